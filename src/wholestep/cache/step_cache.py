"""The compile cache of one step: the first rank looks up what an earlier start chose, and tells the others."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cache import folder as files
from ..cache.choices import Choices
from ..cache.folder import DamagedError
from ..cache.key import Key, UnknownValueError, digest
from ..distributed.agree import from_first_rank
from ..errors import CacheError
from ..graph.graph import LocalGraph

HIT = "hit"


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
    """The entries of one step in `folder`. `log` says what happened at each compile, `say` tells it as it happens."""

    folder: Path
    say: Callable[[str], None]
    log: list[str] = field(default_factory=list[str])
    _warned: set[str] = field(default_factory=set[str])

    def tell(self, text: str) -> None:
        """Note what the cache did."""
        self.log.append(text)
        self.say(text)

    def find(self, key: Key) -> tuple[str, Choices, str]:
        """What to log, the choices of an earlier start (empty without an entry), and what to warn of."""
        try:
            found = files.read(self.folder, key)
        except DamagedError as error:
            path = files.path_of(self.folder, key)
            warning = f"compile cache: {path} {error}: it is not used, and written again"
            return "miss: the entry cannot be read", Choices(), warning
        except OSError as error:
            return f"miss: the entry cannot be read: {error}", Choices(), ""
        if found is not None:
            return HIT, found, ""
        *others, last = files.nearest(self.folder, key) or [""]
        names = f"{', '.join(others)} and {last}" if others else last
        return f"miss: other {names}" if names else "miss: no entry", Choices(), ""

    def keep(self, key: Key, choices: Choices) -> None:
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
    """What is chosen during one compile. `earlier` is what an earlier start of the same step chose, `now` what this one
    did. Without `kept`, nothing is looked up.

    All ranks call `look_up` at the same point, before they measure or search: the first one reads the entry.
    """

    kept: StepCache | None = None
    values: Callable[[], Mapping[str, object]] = dict[str, object]
    label: str = ""
    rank: int = 0
    timeout_s: float = 0.0
    earlier: Choices = field(default_factory=Choices)
    now: Choices = field(default_factory=Choices)
    _looked: bool = False
    _key: Key | None = None

    def look_up(self) -> None:
        """Know `earlier` from now on.

        Raises:
            RankMismatchError: the first rank does not say in time what it found.
        """
        if self.kept is None or self._looked:
            return
        self._looked = True
        log, warning, own = "", "", list[str]()
        if self.rank == 0:
            log, self.earlier, warning = self._found(self.kept)
            own = [log, json.dumps(self.earlier.to_json())]
        said = from_first_rank(f"{self.label}/choices", own, self.timeout_s, "what an earlier start chose (cache=)")
        if self.rank != 0:
            log = "from rank 0" if said[0] == HIT else said[0]
            self.earlier = Choices.from_json(json.loads(said[1]))
        self.kept.tell(log)
        self.kept.warn(warning)

    def _found(self, kept: StepCache) -> tuple[str, Choices, str]:
        try:
            self._key = Key.of(self.values())
        except UnknownValueError as error:
            return f"off: {error}", Choices(), f"nothing of this step is kept in the compile cache: {error}"
        return kept.find(self._key)

    def note(self, **chosen: Any) -> None:
        """Remember fields of `Choices` for a later start."""
        self.now = replace(self.now, **chosen)

    def again_for(self, local: LocalGraph) -> list[str]:
        """How an earlier start fitted this program into its budget; empty where it fitted another one."""
        if not self.earlier.again or self.earlier.fitted == digest([str(local)]):
            return list(self.earlier.again)
        if self.kept is not None:
            self.kept.tell("miss: what is made again was chosen for another program")
        return []

    def note_again(self, local: LocalGraph, said: list[str]) -> None:
        """Remember how `local` is fitted into its budget."""
        if self.kept is not None:
            self.note(again=tuple(said), fitted=digest([str(local)]))

    def keep(self) -> None:
        """Write what was chosen, where an earlier start chose something else, or there was none."""
        if self.kept is None:
            return
        if not self._looked:
            self.kept.tell("nothing to choose")
        elif self._key is not None and self.now.to_json() != self.earlier.to_json():
            self.kept.keep(self._key, self.now)
