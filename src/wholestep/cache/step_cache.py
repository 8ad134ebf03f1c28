"""The compile cache of one step: the first rank looks up what an earlier start chose, and broadcasts it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..distributed.rendezvous import Rendezvous
from ..errors import CacheError
from ..graph.graph import LocalGraph
from ..passes.fit_memory import Fitting
from . import folder as files
from .choices import Choices
from .folder import DamagedError
from .key import Key, UnknownValueError, digest


@dataclass(frozen=True)
class _Found:
    """What a look-up logs, and whether there was an entry."""

    text: str
    hit: bool = False


def folder_of(given: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the cache: the option's, or that of WHOLESTEP_CACHE; None for no cache.

    Raises:
        CacheError: there is a file in its place.
    """
    named = os.fspath(given) if given is not None else os.environ.get("WHOLESTEP_CACHE", "")
    if not named:
        return None
    folder = Path(named).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise CacheError(f"cache={str(named)!r} is a file", "a folder, which is made if there is none", "name another")
    return folder


@dataclass
class StepCache:
    """The entries of one step in `folder`. `log` holds an event for each compile; `say` is called with each event."""

    folder: Path
    say: Callable[[str], None]
    log: list[str] = field(default_factory=list[str])
    _warned: set[str] = field(default_factory=set[str])

    def tell(self, text: str) -> None:
        """Note what the cache did."""
        self.log.append(text)
        self.say(text)

    def find(self, key: Key) -> tuple[_Found, Choices, str]:
        """The event to log, the choices of an earlier start (empty without an entry), and a warning."""
        try:
            found = files.read(self.folder, key)
        except DamagedError as error:
            path = files.path_of(self.folder, key)
            warning = f"compile cache: {path} {error}: it is not used, and written again"
            return _Found("miss: the entry cannot be read"), Choices(), warning
        except OSError as error:
            return _Found(f"miss: the entry cannot be read: {error}"), Choices(), ""
        if found is not None:
            return _Found("hit", hit=True), found, ""
        *others, last = files.nearest(self.folder, key) or [""]
        names = f"{', '.join(others)} and {last}" if others else last
        return _Found(f"miss: other {names}" if names else "miss: no entry"), Choices(), ""

    def store(self, key: Key, choices: Choices) -> None:
        """Write an entry."""
        try:
            files.write(self.folder, key, choices)
        except OSError as error:
            self.warn(f"the compile cache {self.folder} cannot be written: {error}")

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
    cache: StepCache | None = None
    values: Callable[[], Mapping[str, object]] = dict[str, object]
    label: str = ""
    earlier: Choices = field(default_factory=Choices)
    now: Choices = field(default_factory=Choices)
    _looked: bool = False
    _key: Key | None = None

    def look_up(self) -> None:
        """Know `earlier` from now on.

        Raises:
            RankMismatchError: the first rank does not broadcast in time what it found.
        """
        if self.cache is None or self._looked:
            return
        self._looked = True
        own, warning = _Found(""), ""
        if self.rendezvous.rank == 0:
            own, self.earlier, warning = self._find(self.cache)
        what = "what an earlier start chose (cache=)"
        found, choices = self.rendezvous.broadcast(f"{self.label}/choices", (own, self.earlier.to_json()), what)
        if self.rendezvous.rank != 0:
            self.earlier = Choices.from_json(choices)
            found = replace(found, text="from rank 0") if found.hit else found
        self.cache.tell(found.text)
        self.cache.warn(warning)

    def _find(self, cache: StepCache) -> tuple[_Found, Choices, str]:
        try:
            self._key = Key.of(self.values())
        except UnknownValueError as error:
            text = f"nothing of this step is kept in the compile cache: {error}"
            return _Found(f"off: {error}"), Choices(), text
        return cache.find(self._key)

    def note(self, **chosen: Any) -> None:
        """Remember fields of `Choices` for a later start."""
        self.now = replace(self.now, **chosen)

    def fitting_for(self, local: LocalGraph) -> Fitting | None:
        """How an earlier start fitted this program into its budget; None where it fitted another one."""
        if self.earlier.fitting is None or self.earlier.fitted == digest([str(local)]):
            return self.earlier.fitting
        if self.cache is not None:
            self.cache.tell("miss: the tensors to rematerialize were chosen for another program")
        return None

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
            self.cache.store(self._key, self.now)
