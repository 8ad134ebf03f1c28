"""Replays the compiled function of a step as one CUDA graph: one launch in place of thousands.

The first calls of a program run it, the last of them in the memory of the recordings, and leave every library set up.
The next one is recorded and replayed, and so is each after it. A graph reads and writes at fixed addresses. Parameters,
buffers and state are updated where they are; when one has moved, the program is recorded again. What a call brings is
copied into buffers, and what it returns is copied out.

Ranks that communicate do all of this together: NCCL wants each collective to be replayed by all ranks from the same
recording, or by none. Before each call they agree on what they do, as one of them may have a batch of another size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from .. import _torch
from ..errors import first_line
from ..graph.graph import Input, Role
from ..graph.nodes import communicates, copy_graph, is_mutating, node_at
from ..graph.sizes_in_graph import record_of
from ..graph.text import human
from ..sizes import SizeGuards
from ..tuning import TUNING
from .cuda_recorder import Recorder, Recording
from .protocol import Run
from .recordable import is_brought, obstacle, transport
from .tensorize_numbers import in_single_precision

WARM_CALLS, MOST_RECORDINGS = TUNING.warm_calls, TUNING.most_recordings
_MOST_COUNTED = 4096  # sizes whose calls are counted; the count of the oldest is forgotten
_RUN, _RECORD = 0, 1
"""What a rank would do in a call; greater numbers are those of recordings that it would replay."""

Agree = Callable[[int], tuple[int, int]]
"""The least and the greatest of the numbers that the ranks of a job give at the same point."""
CompileFor = Callable[[Graph, Sequence[Any]], Run]
"""Compiles a graph for inputs like these."""
log = logging.getLogger("wholestep")


def alone(number: int) -> tuple[int, int]:
    """The ranks of a job of one."""
    return number, number


@dataclass(eq=False)
class Recordings:
    """The recordings of one step, on this rank, `most` at a time. `warns`: warn of what cannot be recorded."""

    recorder: Recorder
    warns: bool
    most: int = MOST_RECORDINGS
    agree: Agree = alone
    count: int = 0
    run_bytes: int = 0
    obstacles: list[str] = field(default_factory=list[str])
    replayed: WeakSet[Replayed] = field(default_factory=lambda: WeakSet[Replayed]())

    def compiled(self, graph: Graph, inputs: Sequence[Input], examples: Sequence[Any], compile: CompileFor) -> Run:
        """What `compile` makes of a bound graph, replayed where it can be recorded. The graph may be edited."""
        kind, fit = torch.device(self.recorder.device).type, copy_graph(graph)
        agree = self.agree if any(map(communicates, graph.nodes)) else alone
        if why := obstacle(fit, inputs, examples, kind, transport(kind)):
            self.say(why)
            return _agreeing(compile(graph, examples), agree)
        placeholders = [n for n in fit.nodes if n.op == "placeholder"]
        in_single_precision(fit, {n for n, i in zip(placeholders, inputs, strict=True) if i.role is Role.HYPER})
        brought = [is_brought(spec, example, kind) for spec, example in zip(inputs, examples, strict=True)]
        written = [any(is_mutating(user) and node_at(user, 0) is node for user in node.users) for node in placeholders]
        record = record_of(fit)
        replayed = Replayed(self, agree, brought, written)
        replayed.run = compile(fit, replayed.on_device(examples))
        return replayed if record is None else ReplayedBySize(replayed, record)

    def say(self, why: str) -> None:
        """A program is not recorded."""
        if why not in self.obstacles:
            self.obstacles.append(why)
            text = f"this step is not recorded as a CUDA graph: {why}"
            if self.warns:
                warnings.warn(text, stacklevel=2)
            else:
                log.info(text)

    @property
    def recorded(self) -> int:
        """How many programs are recorded now."""
        return sum(replayed.recording is not None for replayed in self.replayed)

    def __str__(self) -> str:
        parts = [f"not recorded: {why}" for why in self.obstacles]
        if self.recorded:
            pool, before = human(self.recorder.reserved_bytes), human(self.run_bytes)
            number = "recorded" if self.recorded == 1 else f"{self.recorded} programs recorded"
            at = sorted(replayed.at for replayed in self.replayed if replayed.recording is not None and replayed.at)
            where = f" at {' and at '.join(at)}" if at else ""
            parts.insert(0, f"{number}{where}, {pool} of memory ({before} before)")
        elif any(not replayed.gave_up for replayed in self.replayed):
            parts.insert(0, f"recorded from call {WARM_CALLS + 1} on")
        return "; ".join(parts)


@dataclass(eq=False)
class Replayed:
    """A run function that turns itself into a recording. `brought` says of each input whether a call brings it,
    `written` whether the program changes it; `at` is the size of the batch, where others have recordings of their own.
    """

    owner: Recordings
    agree: Agree
    brought: Sequence[bool]
    written: Sequence[bool]
    at: str = ""
    run: Run = field(init=False)
    calls: int = 0
    attempts: int = 0
    replays: int = 0
    gave_up: bool = False
    number: int = _RECORD
    places: list[int] = field(default_factory=list[int])
    recording: Recording | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    numbers: dict[int, Any] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        self._bring = [i for i, brought in enumerate(self.brought) if brought]
        self._return = [i for i in self._bring if self.written[i]]
        self._stay = [i for i, brought in enumerate(self.brought) if not brought]
        self.owner.replayed.add(self)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run, record or replay."""
        placed = self.on_device(inputs)
        places = [placed[i].data_ptr() for i in self._stay]
        self.calls += 1
        least, most = self.agree(self._wish(places))
        if least == _RECORD:
            least = most = self._record(placed, places)
        if least == most > _RECORD:
            assert self.recording is not None, "all ranks have the recording of this number"
            self.replays += 1
            returned = self.owner.recorder.replay(self.recording)
        else:
            returned = self._run(placed)
        for i in self._return:
            cast(Tensor, inputs[i]).copy_(placed[i])
            self.numbers.pop(i, None)
        return list(returned)

    def on_device(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with buffers that hold what this call brings."""
        placed = list(inputs)
        for i in self._bring:
            new = cast(Tensor, placed[i])
            buffer = self.buffers.get(i)
            if buffer is None:
                device = self.owner.recorder.device
                buffer = torch.empty_strided(new.shape, new.stride(), dtype=new.dtype, device=device)
                self.buffers[i] = buffer
            if new.dim() or new.device.type != "cpu":
                buffer.copy_(new, non_blocking=new.device == buffer.device)
            elif (value := new.item()) != self.numbers.get(i):
                self.numbers[i] = value
                buffer.fill_(value)
            placed[i] = buffer
        return placed

    def run_once(self, inputs: Sequence[Any]) -> list[Any]:
        """Run what is not recorded, and needs no memory from call to call."""
        device, placed = self.owner.recorder.device, list(inputs)
        for i in self._bring:
            placed[i] = cast(Tensor, placed[i]).to(device, non_blocking=True)
        self.agree(_RUN)
        returned = list(self.run(placed))
        for i in self._return:
            if placed[i] is not inputs[i]:
                cast(Tensor, inputs[i]).copy_(placed[i])
        return returned

    def for_other_sizes(self, at: str) -> Replayed:
        """The same function for a batch of other sizes, in buffers of its own, which was called often enough."""
        other = Replayed(self.owner, self.agree, self.brought, self.written, at)
        other.run, other.calls = self.run, WARM_CALLS - 1
        return other

    def drop(self) -> None:
        """Let go of the recording, if there is one."""
        if self.recording is not None:
            self.recording.release()
            self.recording, self.number = None, _RECORD

    def _wish(self, places: list[int]) -> int:
        """What this rank would do."""
        if self.calls <= WARM_CALLS or self.gave_up:
            return _RUN
        if self.recording is not None and self.places == places:
            return self.number
        if self.attempts == MOST_RECORDINGS:
            often = f"other addresses again and again ({MOST_RECORDINGS} recordings so far)"
            return self._give_up(f"parameters, state or gradients have {often}: change them in place")
        if self.recording is None and self.owner.recorded >= self.owner.most:
            return self._give_up(f"{self.owner.most} kinds of call are recorded, and this is another one")
        return _RECORD

    def _record(self, placed: list[Any], places: list[int]) -> int:
        """Record; returns the number of the recording, or _RUN where a rank could not."""
        self.drop()  # its memory is there for the new one
        owner, why = self.owner, ""
        owner.count += 1
        self.attempts = 1 if self.replays > MOST_RECORDINGS else self.attempts + 1  # it was worth its time
        self.replays = 0
        owner.run_bytes = max(owner.run_bytes, owner.recorder.reserved_bytes)
        if dist.is_initialized():
            _torch.before_groups_end(release_recordings)
        try:
            self.recording = owner.recorder.record(lambda: self.run(placed))
        except Exception as error:  # whatever a library says when it cannot be recorded
            why = f"it cannot be recorded: {first_line(error)}"
            release_recordings()
        if not self.agree(int(not why))[0]:
            self.drop()
            return self._give_up(why or "another rank cannot record it")
        self.places, self.number = places, _RECORD + owner.count
        _replayed.add(self)
        log.info("a step is %s", owner)
        return self.number

    def _run(self, placed: list[Any]) -> Sequence[Any]:
        """Run it; what is or will be recorded, in the memory of the recordings from the last call before that on."""
        if self.gave_up or self.calls < WARM_CALLS:
            return self.run(placed)
        return self.owner.recorder.run(lambda: self.run(placed), make_room=self.calls == WARM_CALLS)

    def _give_up(self, why: str) -> int:
        self.gave_up = True
        self.owner.say(why)
        return _RUN


class ReplayedBySize:
    """A run function for batches of all sizes, with a recording for each size that is called again, up to the most of
    its owner. Calls of other sizes run it.
    """

    def __init__(self, first: Replayed, record: SizeGuards) -> None:
        self._first, self._record = first, record
        self._held: dict[tuple[int, ...], Replayed] = {}
        self._calls: dict[tuple[int, ...], int] = {}

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run, record or replay what is for the sizes of this call."""
        now = self._record.now
        replayed = self._held.get(now) or self._called(now)
        return self._first.run_once(inputs) if replayed is None else replayed(inputs)

    def _called(self, now: tuple[int, ...]) -> Replayed | None:
        """Count a call; what is recorded in the next ones, once there were as many as libraries need."""
        calls, first = self._calls.pop(now, 0) + 1, self._first
        first.gave_up = first.gave_up or any(replayed.gave_up for replayed in self._held.values())  # for all sizes
        if calls >= WARM_CALLS and not first.gave_up:
            if len(self._held) < first.owner.most:
                self._held[now] = replayed = first.for_other_sizes(self._record.shown_now())
                return replayed
            first.owner.say(f"max_recordings={first.owner.most} sizes of the batch are recorded; others run op by op")
        self._calls[now] = calls
        if len(self._calls) > _MOST_COUNTED:
            del self._calls[next(iter(self._calls))]
        return None


def _agreeing(run: Run, agree: Agree) -> Run:
    """`run`, which is not recorded, on a rank of a job whose others may want to record."""
    if agree is alone:
        return run

    def agreed(inputs: Sequence[Any]) -> list[Any]:
        agree(_RUN)
        return run(inputs)

    return agreed


def release_recordings() -> None:
    """Let go of every recording of this process; a step that is called again records anew."""
    for replayed in list(_replayed):
        replayed.drop()


_replayed = WeakSet[Replayed]()
