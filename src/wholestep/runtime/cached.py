"""The compile cache of one step: finds its program in a folder, and keeps there what was compiled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..cache import folder as files
from ..cache.folder import DamagedError, Entry
from ..cache.key import Key, Situation, baked, key_of
from ..cache.program import Compiled, content, read, write
from ..cache.ran import Ran, Witness
from ..cache.values import UnknownValueError, Values
from ..capture.reach import reach
from ..capture.state import Hyper
from ..errors import CacheError
from ..graph.file import StoreError

Say = Callable[[str], None]
NO_KEY = ""


def folder_of(given: str | os.PathLike[str] | None) -> Path | None:
    """The folder that programs are kept in: the option's, or that of WHOLESTEP_CACHE; None for no cache.

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
class Search:
    """What the cache knows about one call: its key, or why it has none; the program, if it was found."""

    now: Situation
    key: Key | None = None
    unknown: str = ""
    found: Compiled | None = None
    file: str = ""
    data: bytes = b""
    ran: Ran | None = None
    witness: Witness | None = None
    baked: str = ""
    reads: str = ""
    damaged: list[Path] = field(default_factory=list[Path])

    @property
    def text(self) -> str:
        """The key as text; empty without one."""
        return self.key.text if self.key else NO_KEY


@dataclass
class Kept:
    """The programs of one step in `folder`. `log` says what happened at each compile, `say` tells it as it happens."""

    folder: Path
    say: Say
    loud: bool = True
    log: list[str] = field(default_factory=list[str])
    _told: set[str] = field(default_factory=set[str])

    def tell(self, text: str) -> None:
        """Note what the cache did."""
        self.log.append(text)
        self.say(text)

    def search(self, now: Situation) -> Search:
        """The key of a call."""
        try:
            return Search(now, key_of(now))
        except UnknownValueError as error:
            search = Search(now, unknown=str(error))
            self.refuse(search.unknown)
            return search

    def find(self, search: Search) -> Compiled | None:
        """The program of a call, read from the folder; says why there is none."""
        if search.key is None:
            return None
        why = ""
        for path in files.files_of(self.folder, search.text):
            try:
                entry = Entry.from_bytes(path.read_bytes())
                other, found = self._open(entry, search)
            except (DamagedError, StoreError) as error:
                warnings.warn(f"compile cache: {path} {error}: it is not used, and written again", stacklevel=2)
                other, found = "the entry cannot be read", None
                search.damaged.append(path)
            except OSError as error:
                other, found = f"the entry cannot be read: {error}", None
            else:
                search.file, search.data, search.found = path.name, entry.program, found
                search.witness, search.baked = entry.witness, entry.baked
            if found is not None:
                self.tell("hit")
                return found
            why = why or other
        if not why:
            nearest = files.nearest(self.folder, search.key.parts)
            why = f"{nearest} is another one" if nearest else "no entry"
        self.tell(f"miss: {why}")
        return None

    def _open(self, entry: Entry, search: Search) -> tuple[str, Compiled | None]:
        """The program, or why it is not that of this call."""
        assert search.key is not None, "an entry is looked up by key"
        changed = entry.witness.changed(search.key.values)
        if changed:
            return changed, None
        made = self.decode(entry.program, search)
        if self.baked(search, made.capture.hypers) != entry.baked:
            return "an option of the optimizer is another one", None
        given = dict(zip(search.now.names, search.now.leaves, strict=True))
        where = made.capture.values.changed(given) if made.capture.values else ""
        return (f"the value that the step reads at {where} is another one", None) if where else ("", made)

    def baked(self, search: Search, live: Sequence[Hyper]) -> str:
        """The fingerprint of the options that a program with these scheduled numbers holds as they are."""
        assert search.key is not None, "asked of calls that have a key"
        return baked(search.now.state, live, search.key.values)

    def decode(self, program: bytes, search: Search) -> Compiled:
        """A program for what the step holds here.

        Raises:
            StoreError: it cannot be read.
        """
        assert search.key is not None, "programs are exchanged by key"
        now = search.now
        found = reach(now.fn, dict(zip(now.names, now.leaves, strict=True)), now.state)
        return read(program, now.device, search.key.values.tensors, now.state, found)

    def compiled(self, search: Search, compile: Callable[[], Compiled]) -> Compiled:
        """The program, compiled now, and watched so that it can be kept."""
        search.found = None
        if search.key is None:
            return compile()
        ran = Ran(search.key.values)
        with ran.watching():
            made = compile()
        try:
            search.witness = ran.witness(search.key.values.codes)
            search.baked = self.baked(search, made.capture.hypers)
            read = made.capture.values.reads if made.capture.values else ()
            search.reads = Values().digest("values read", [r.expected for r in read])
        except UnknownValueError as error:
            self.give_up(search, str(error))
        return made

    def encode(self, search: Search, made: Compiled) -> bytes:
        """The program as bytes; empty if it cannot be kept, which is told."""
        if search.key is None:
            return b""
        try:
            return write(made, search.now.device, search.key.values.tensors)
        except StoreError as error:
            self.give_up(search, str(error))
            return b""

    def keep(self, search: Search, program: bytes) -> None:
        """Write a program that was compiled into the folder; one that cannot be kept is empty."""
        if search.key is None or search.witness is None or not program:
            return
        entry = Entry(search.key.parts, search.witness, search.baked, program)
        try:
            for path in search.damaged:
                path.unlink(missing_ok=True)
            search.file = files.name_of(search.text, entry, search.reads)
            files.write(self.folder, search.text, search.file, entry.to_bytes())
        except OSError as error:
            self._warn(f"the compile cache {self.folder} cannot be written: {error}")

    def give_up(self, search: Search, why: str) -> None:
        """The program of this call is not kept, nor taken from elsewhere."""
        search.key, search.unknown = None, why
        self.refuse(why)

    def refuse(self, why: str) -> None:
        """Say that a program is not kept, and why: once as a warning."""
        self.tell(f"off: {why}")
        self._warn(
            f"this step is not kept in the compile cache: {why}. A program is kept only where all that it may "
            "depend on can be compared with what another process has"
        )

    def _warn(self, text: str) -> None:
        if self.loud and text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=2)

    def compare(self, search: Search, fresh: Compiled, lines: Sequence[str]) -> None:
        """Raise CacheError when the program that was found is not the one that was compiled just now."""
        found, device = search.found, search.now.device
        assert found is not None, "there is something to compare"
        again = self.decode(write(fresh, device, search.key.values.tensors if search.key else {}), search)
        ours, theirs = content(found, device), content(again, device)
        differing = [name for name, text in theirs.items() if ours[name] != text]
        if list(found.lines) != list(lines):
            differing.append("collectives")
        if differing:
            raise CacheError(
                f"the program in {self.folder / search.file} is not what this step compiles to: other {differing[0]}",
                "a step that follows from its code, arguments, modules, optimizers and globals alone",
                "look for what else it reads (an environment variable, a file, the time), and delete the file",
            )


def verifying() -> bool:
    """True when WHOLESTEP_CACHE_VERIFY asks to compile all the same and compare."""
    return os.environ.get("WHOLESTEP_CACHE_VERIFY", "") not in ("", "0")
