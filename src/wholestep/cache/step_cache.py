"""The compile cache of one step: the first rank looks up what an earlier start chose, and broadcasts it.

Its folder holds a JSON file for each key, written aside and renamed, with a checksum. Several ranks and jobs may use
one folder at once; it may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ..distributed.rendezvous import Rendezvous
from ..distributed.typed_messages import reading
from ..errors import CacheError, shown
from ..graph.graph import LocalGraph
from ..passes.context import Fitting
from ..tuning import TUNING
from ..typed_json import MalformedError, parse
from .choices import Choices
from .key import Key, UnknownValueError, digest

FORMAT, VERSION = "wholestep.choices", 6
ENDING = ".choices.json"
MOST_FILES = TUNING.cached_files
_HIT = "hit"


class DamagedError(Exception):
    """A file that is no whole entry of this version."""


def path_of(folder: Path, key: Key) -> Path:
    """The file of a key."""
    return folder / f"{key.text}{ENDING}"


def read(folder: Path, key: Key) -> Choices | None:
    """The choices that are kept under a key; None where there is no file. Raises DamagedError, OSError."""
    try:
        data = path_of(folder, key).read_bytes()
    except FileNotFoundError:
        return None
    body = _opened(data)
    if body["key"] != dict(key.parts):
        raise DamagedError("is the entry of another key")
    try:
        return Choices.from_json(body["choices"])
    except MalformedError as error:
        raise DamagedError(f"cannot be read ({error})") from error


def write(folder: Path, key: Key, choices: Choices) -> None:
    """Put an entry into the folder as one act; the oldest go where there are many. Raises OSError."""
    body = {"key": dict(key.parts), "choices": choices.to_json()}
    entry = {"format": FORMAT, "version": VERSION, "sum": sum_of(body), **body}
    folder.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=folder, prefix=f".{key.text[:8]}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=1)
        os.chmod(aside, 0o644)  # it was made for this user alone
        os.replace(aside, path_of(folder, key))
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    for old in _newest(folder)[MOST_FILES:]:
        old.unlink(missing_ok=True)


def nearest(folder: Path, key: Key) -> list[str]:
    """The parts in which the entry differs that differs least, of the newest ones; empty where there is none."""
    best: list[str] = []
    for path in _newest(folder)[: TUNING.compared_files]:
        try:
            differing = key.differing(_opened(path.read_bytes())["key"])
        except (OSError, DamagedError):
            continue
        if differing and (not best or len(differing) < len(best)):
            best = differing
    return best


def _opened(data: bytes) -> Mapping[str, Any]:
    """The content of a file, which is as it was written."""
    try:
        content = parse(data)
    except MalformedError as error:
        raise DamagedError("is no JSON") from error
    entry: dict[str, Any] = cast(dict[str, Any], content) if isinstance(content, dict) else {}
    if entry.get("format") != FORMAT:
        raise DamagedError("is no entry of wholestep's compile cache")
    if entry.get("version") != VERSION:
        raise DamagedError("is of another version")
    body = {"key": entry.get("key"), "choices": entry.get("choices")}
    if entry.get("sum") != sum_of(body):
        raise DamagedError("was changed")
    return body


def sum_of(body: Mapping[str, Any]) -> str:
    """The checksum of an entry: of its key and its choices."""
    return digest([json.dumps(body, sort_keys=True)])


def _newest(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"), key=_age, reverse=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def folder_of(cache: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the cache, from `cache` or WHOLESTEP_CACHE; None for no cache. Raises CacheError: it is a file."""
    named = os.fspath(cache) if cache is not None else os.environ.get("WHOLESTEP_CACHE", "")
    if not named:
        return None
    try:
        folder = Path(named).expanduser().absolute()
        is_file = folder.exists() and not folder.is_dir()
    except (OSError, RuntimeError) as error:
        raise CacheError(f"cache={shown(named)} cannot be read: {error}", "a folder", "name another") from error
    if "\0" in named:
        raise CacheError(f"cache={shown(named)}", "the name of a folder", "name another")
    if is_file:
        raise CacheError(
            f"cache={shown(str(named))} is a file", "a folder, which is made if there is none", "name another"
        )
    return folder


@dataclass
class StepCache:
    """The entries of one step in `folder`. `log` holds an event for each compile; `report` is told of each."""

    folder: Path
    report: Callable[[str, str], None]
    log: list[str] = field(default_factory=list[str])
    _warned: set[str] = field(default_factory=set[str])

    def tell(self, text: str) -> None:
        """Note what the cache did."""
        self.log.append(text)
        del self.log[: -TUNING.kept_log]
        self.report(f"cache: {text}", "done")

    def find(self, key: Key) -> tuple[str, Choices, str]:
        """The event to log, the choices of an earlier start (empty without an entry), and a warning."""
        try:
            choices = read(self.folder, key)
        except DamagedError as error:
            path = path_of(self.folder, key)
            warning = f"compile cache: {path} {error}: it is not used, and written again"
            return "miss: the entry cannot be read", Choices(), warning
        except OSError as error:
            return f"miss: the entry cannot be read: {error}", Choices(), ""
        if choices is not None:
            return _HIT, choices, ""
        *earlier, last = nearest(self.folder, key) or [""]
        names = f"{', '.join(earlier)} and {last}" if earlier else last
        return f"miss: other {names}" if names else "miss: no entry", Choices(), ""

    def warn(self, text: str) -> None:
        """Once for each text."""
        if text and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


@dataclass
class CachedChoices:
    """The choices of one compile. `earlier` are those of an earlier start of the same step, `now` those of this one.
    Without `cache`, nothing is looked up.

    All ranks call `look_up` at the same point, before they measure or search: the first rank reads the entry.
    """

    rendezvous: Rendezvous
    cache: StepCache | None
    values: Callable[[], Mapping[str, object]]
    label: str
    earlier: Choices = field(default_factory=Choices)
    now: Choices = field(default_factory=Choices)
    _looked: bool = False
    _key: Key | None = None

    def look_up(self) -> None:
        """Know `earlier` from now on. Raises RankMismatchError: the first rank does not say it in time."""
        if self.cache is None or self._looked:
            return
        self._looked = True
        event = warning = ""
        if self.rendezvous.rank == 0:
            event, self.earlier, warning = self._find(self.cache)
        label, what = f"{self.label}/choices", "what an earlier start chose (cache=)"
        message = event, json.dumps(self.earlier.to_json())
        event, text = self.rendezvous.broadcast(label, message, what, tuple[str, str])
        with reading(label):
            self.earlier = Choices.from_json(parse(text))
        self.cache.tell("from rank 0" if event == _HIT and self.rendezvous.rank != 0 else event)
        self.cache.warn(warning)

    def _find(self, cache: StepCache) -> tuple[str, Choices, str]:
        try:
            self._key = Key.of(self.values())
        except UnknownValueError as error:
            return f"off: {error}", Choices(), f"nothing of this step is kept in the compile cache: {error}"
        return cache.find(self._key)

    def note(self, **chosen: Any) -> None:
        """Remember fields of `Choices` for a later start."""
        self.now = replace(self.now, **chosen)

    def fitting_for(self, local: LocalGraph, choose: Callable[[], Fitting]) -> Callable[[], Fitting]:
        """`choose`, or what says how an earlier start fitted this program into its budget. Looks up."""
        self.look_up()
        earlier = self.earlier.fitting
        if earlier is not None and self.earlier.fitted == digest([str(local)]):
            return lambda: earlier
        if earlier is not None and self.cache is not None:
            self.cache.tell("miss: the tensors to rematerialize were chosen for another program")
        return choose

    def note_fitting(self, local: LocalGraph, fitting: Fitting) -> None:
        """Remember how `local` is fitted into its budget."""
        if self.cache is not None:
            self.note(fitting=fitting, fitted=digest([str(local)]))

    def store(self) -> None:
        """Write what was chosen, where an earlier start chose something else, or there was none."""
        if self.cache is None:
            return
        if not self._looked:
            self.cache.tell("nothing to choose")
        elif self._key is not None and self.now.to_json() != self.earlier.to_json():
            try:
                write(self.cache.folder, self._key, self.now)
            except OSError as error:
                self.cache.warn(f"the compile cache {self.cache.folder} cannot be written: {error}")
