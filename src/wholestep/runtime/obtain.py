"""Where a step's program comes from: compiled here, found in the compile cache, or compiled by the first rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ..cache.key import Situation
from ..cache.program import Compiled
from ..cache.ran import Witness
from ..capture.capture import Capture
from ..capture.state import Hyper, StepState
from ..cost.machine import Machine
from ..errors import RankMismatchError, WholestepError
from ..graph.file import StoreError
from .agree import program_lines
from .alike import Given, Told, told_of
from .cached import Kept, Search, verifying
from .handed import Handed, is_first


@dataclass
class Offer:
    """A program on its way. `made` is None until the first rank's has come; `lines` is what ranks compare.

    `machine` is known where the first rank found its program in the cache: nobody measures then. `told` and `hypers`
    are what the first rank said of its program.
    """

    compile: Callable[[], Compiled]
    made: Compiled | None
    lines: list[str]
    kept: Kept | None = None
    search: Search | None = None
    handed: Handed | None = None
    machine: Machine | None = None
    told: Told | None = None
    hypers: tuple[Hyper, ...] = ()

    @property
    def capture(self) -> Capture:
        """The capture of a program that has come."""
        assert self.made is not None, "what the first rank told is taken before its program comes"
        return self.made.capture

    @property
    def state(self) -> StepState:
        """What the step holds."""
        if self.made is not None:
            return self.made.capture.state
        assert self.search is not None, "programs that come later were looked for"
        return self.search.now.state

    @property
    def live(self) -> tuple[Hyper, ...]:
        """The numbers that the program takes as inputs."""
        return self.made.capture.hypers if self.made is not None else self.hypers

    @property
    def is_final(self) -> bool:
        """True for a program that was scheduled where it was compiled."""
        return self.made is None or (self.search is not None and self.search.found is not None)

    def receive(self) -> Compiled:
        """The first rank's program.

        Raises:
            RankMismatchError: it failed, it is late, or what it gave cannot be read here.
        """
        assert self.handed is not None, "programs come from the first rank"
        assert self.kept is not None, "they are exchanged where there is a cache"
        assert self.search is not None, "and looked for first"
        said = self.handed.hear("program")
        try:
            return self.kept.decode(self.handed.data("program", said), self.search)
        except StoreError as error:
            raise RankMismatchError(
                f"the program that rank 0 compiled cannot be used here: {error}",
                "the same installation on every rank",
                "compare versions and imported modules, or leave out cache=",
            ) from error

    def anew(self) -> Compiled:
        """The program compiled here in place of one that was found."""
        assert self.kept is not None, "found in a cache"
        assert self.search is not None, "and looked for"
        self.made = self.kept.compiled(self.search, self.compile)
        return self.made

    def settle(self, made: Compiled, compiled: bool) -> None:
        """Keep a finished program, where it was compiled here, and hand it to the others."""
        if self.kept is None or self.search is None:
            return
        program = self.kept.encode(self.search, made) if compiled else self.search.data
        if compiled:
            self.kept.keep(self.search, program)
        if self.handed is not None and is_first():
            failure = "" if program or self.search.key is None else "its program cannot be written"
            self.handed.say("program", {"failure": failure}, program)

    def fail(self, error: BaseException) -> None:
        """Tell the others that no program will come."""
        if self.handed is not None and is_first():
            self.handed.say("program", {"failure": first_line(error)})


def first_line(error: BaseException) -> str:
    """What to tell other ranks about an error."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, WholestepError) else f"{type(error).__name__}: {text}"


def obtain(
    kept: Kept | None, now: Callable[[], Situation], compile: Callable[[], Compiled], handed: Handed | None
) -> Offer:
    """The program of a call, or word of it. With `handed`, the first rank's is for all whose key is the same.

    Raises:
        CaptureError, PlanError, ...: the step cannot be compiled.
        RankMismatchError: the first rank could not compile it.
    """
    if kept is None:
        made = compile()
        return Offer(compile, made, program_lines(made.local, made.plan))
    search = kept.search(now())
    if handed is None:
        return _own(kept, search, compile)
    if is_first():
        return _first(kept, search, compile, handed)
    said = handed.hear("key")
    machine = Machine.of(said["machine"]) if said["machine"] else None
    if _is_ours(kept, search, said):
        kept.tell("from rank 0")
        assert search.key is not None, "its key is the first rank's"
        told = Told.of_json(said["told"], search.key.values.tensors)
        hypers = tuple(Hyper(**h) for h in said["hypers"])
        return Offer(compile, None, list(said["lines"]), kept, search, handed, machine, told, hypers)
    offer = _own(kept, search, compile)
    offer.machine = machine
    return offer


def _own(kept: Kept, search: Search, compile: Callable[[], Compiled]) -> Offer:
    """The program of this rank's own call."""
    made = kept.find(search)
    if made is None:
        made = kept.compiled(search, compile)
        return Offer(compile, made, program_lines(made.local, made.plan), kept, search)
    if verifying():
        fresh = compile()
        kept.compare(search, fresh, program_lines(fresh.local, fresh.plan))
    return Offer(compile, made, list(made.lines), kept, search, machine=made.machine)


def _first(kept: Kept, search: Search, compile: Callable[[], Compiled], handed: Handed) -> Offer:
    """The first rank's program, of which it tells the others."""
    try:
        offer = _own(kept, search, compile)
        made = offer.made
        assert made is not None, "the first rank has its own"
        if not offer.is_final:
            kept.encode(search, made)  # others count on it from now on
    except Exception as error:
        handed.say("key", {"failure": first_line(error)})
        raise
    reads = bool(made.capture.values and made.capture.values.reads)
    now, live = search.now, search.key.values.tensors if search.key else {}
    given = Given(now.structure, tuple(now.names), tuple(now.leaves), now.whole or {}, 0, now.device)
    offer.told = told_of(made.capture, given, live)
    said: dict[str, Any] = {
        "key": search.text,
        "witness": search.witness.to_json() if search.witness else None,
        "baked": search.baked,
        "hypers": [asdict(h) for h in made.capture.hypers],
        "lines": offer.lines,
        "machine": asdict(offer.machine) if offer.machine else None,
        "reads": reads,
        "told": offer.told.to_json(),
    }
    handed.say("key", said)
    offer.handed = handed
    return offer


def _is_ours(kept: Kept, search: Search, said: dict[str, Any]) -> bool:
    """True when the first rank's program is that of this rank's call too: same key, and all else as it is there."""
    if search.key is None or said["key"] != search.text or said["reads"] or said["witness"] is None:
        return False
    live = [Hyper(**h) for h in said["hypers"]]
    changed = Witness.from_json(said["witness"]).changed(search.key.values)
    return not changed and kept.baked(search, live) == said["baked"]
