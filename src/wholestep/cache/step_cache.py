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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from ..distributed.rendezvous import Rendezvous
from ..distributed.typed_messages import of_plain, plain
from ..errors import CacheError, shown
from ..passes.context import Choice
from ..tuning import TUNING
from ..typed_json import MalformedError, parse
from .key import Key, UnknownValueError, digest

T = TypeVar("T")
Entry = tuple[str, Any]
"""A fingerprint of the program that a decision is for, or "", and the decision as JSON values."""
Kept = Mapping[str, Entry]
"""Decisions by the name of their choice. None is a program: each start captures, plans and partitions, so a wrong one
makes a step slow, and not wrong.
"""
_Message = tuple[str, Kept, str]
FORMAT, VERSION = "wholestep.choices", 7
ENDING = ".choices.json"
MOST_FILES = TUNING.cached_files
_HIT, _UNREADABLE = "hit", "miss: the entry cannot be read"


class DamagedError(Exception):
    """A file that is no whole entry of this version."""


def path_of(folder: Path, key: Key) -> Path:
    """The file of a key."""
    return folder / f"{key.text}{ENDING}"


def read(folder: Path, key: Key) -> Kept | None:
    """The decisions under a key, or None: there is no file. Raises DamagedError, OSError."""
    try:
        data = path_of(folder, key).read_bytes()
    except FileNotFoundError:
        return None
    body = _opened(data)
    if body["key"] != dict(key.parts):
        raise DamagedError("is the entry of another key")
    try:
        return of_plain(Kept, body["choices"], "choices")
    except MalformedError as error:
        raise DamagedError(f"cannot be read ({error})") from error


def write(folder: Path, key: Key, choices: Kept) -> None:
    """Put an entry into the folder as one act; the oldest go where there are many. Raises OSError."""
    body = {"key": dict(key.parts), "choices": choices}
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
        problem = f"cache={shown(str(named))} is a file"
        raise CacheError(problem, "a folder, which is made if there is none", "name another")
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

    def find(self, key: Key) -> tuple[str, Kept, str]:
        """The event to log, what an earlier start chose (empty without an entry), and a warning."""
        try:
            choices = read(self.folder, key)
        except DamagedError as error:
            path = path_of(self.folder, key)
            warning = f"compile cache: {path} {error}: it is not used, and written again"
            return _UNREADABLE, {}, warning
        except OSError as error:
            return f"{_UNREADABLE}: {error}", {}, ""
        if choices is not None:
            return _HIT, choices, ""
        *earlier, last = nearest(self.folder, key) or [""]
        names = f"{', '.join(earlier)} and {last}" if earlier else last
        return f"miss: other {names}" if names else "miss: no entry", {}, ""

    def warn(self, text: str) -> None:
        """Once for each text."""
        if text and text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


@dataclass
class KeptChoices:
    """What is decided in one compile, of choices that are `kept`. `earlier`: in an earlier start of the same step.
    Without `cache`, there is none.

    All ranks call `look_up` at the same point, before they measure or search: the first rank reads the entry.
    """

    rendezvous: Rendezvous
    cache: StepCache | None
    values: Callable[[], Mapping[str, object]]
    label: str
    earlier: Kept = field(default_factory=dict[str, Entry])
    now: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _looked: bool = False
    _key: Key | None = None

    def look_up(self) -> None:
        """Know `earlier` from now on. Raises RankMismatchError: the first rank does not say it in time."""
        if self.cache is None or self._looked:
            return
        self._looked = True
        message = self._find(self.cache) if self.rendezvous.rank == 0 else None
        what = "what an earlier start chose (cache=)"
        event, self.earlier, warning = self.rendezvous.broadcast(f"{self.label}/choices", message, what, _Message)
        self.cache.tell("from rank 0" if event == _HIT and self.rendezvous.rank != 0 else event)
        self.cache.warn(warning if self.rendezvous.rank == 0 else "")

    def _find(self, cache: StepCache) -> tuple[str, Kept, str]:
        try:
            self._key = Key.of(self.values())
        except UnknownValueError as error:
            return f"off: {error}", {}, f"nothing of this step is kept in the compile cache: {error}"
        return cache.find(self._key)

    def of(self, choice: Choice[T], about: str = "") -> T | None:
        """What an earlier start decided on a choice for the program `about`, or None. Looks up."""
        self.look_up()
        if self.cache is None or choice.name not in self.earlier:
            return None
        program, value = self.earlier[choice.name]
        if program != about:
            return self.cache.tell(f"miss: {choice.what} was chosen for another program")
        try:
            return of_plain(choice.kind, value, choice.name)
        except MalformedError as error:
            where = path_of(self.cache.folder, self._key) if self._key is not None else "the entry of the first rank"
            self.cache.tell(_UNREADABLE)
            text = f"compile cache: {where} cannot be read ({error})"
            return self.cache.warn(f"{text}: it is not used, and written again")

    def note(self, choice: Choice[T], decision: T, about: str = "") -> None:
        """Remember a decision, for the program `about`, for a later start."""
        if self.cache is not None:
            self.now[choice.name] = about, plain(decision)

    def store(self) -> None:
        """Write what was chosen, where an earlier start chose something else, or there was none."""
        if self.cache is None:
            return
        if not self._looked:
            self.cache.tell("nothing to choose")
        elif self._key is not None and self.now != self.earlier:
            try:
                write(self.cache.folder, self._key, self.now)
            except OSError as error:
                self.cache.warn(f"the compile cache {self.cache.folder} cannot be written: {error}")
