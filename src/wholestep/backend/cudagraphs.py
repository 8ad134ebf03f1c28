"""Replays a whole step as one CUDA graph: one launch in place of thousands, and no time lost between kernels.

The first calls run as under `eager`: they are steps of the training like any other, and leave every library set up. The
next one is recorded and replayed, and so is each after it. A graph reads and writes at fixed addresses. Parameters,
buffers and state are updated where they are; when one has moved, the step is recorded again. What a call brings, the
batch and scheduled numbers, is copied into buffers, and what it returns is copied out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from ..errors import first_line
from ..graph import meta
from ..graph.graph import Input, Role
from ..graph.nodes import is_collective, operands
from ..partition.rank_ops import drawn, to_device, to_host
from ..rules.registry import is_random
from ..tuning import TUNING
from .eager import eager
from .gloo.exchange import gather, swap
from .protocol import NodeClock, Run
from .tensorize_numbers import as_tensors, following, in_single_precision

WARM_CALLS, MOST_RECORDINGS = TUNING.warm_calls, TUNING.most_recordings
_BROUGHT = (Role.BATCH, Role.HYPER)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
Replay = Callable[[], None]
Record = Callable[[Callable[[], list[Tensor]]], tuple[list[Tensor], Replay]]


def record_on_cuda(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Replay]:
    """Record what `run` launches, without running it: tensors that hold its results after a replay, and that.

    Each graph has a memory pool of its own. Other threads may use CUDA meanwhile (data loaders that pin memory, NCCL's
    watchdog). Draws of the device's default generator follow that generator's state at each replay, and advance it.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = run()
    return made, graph.replay


@dataclass
class CudaGraphs:
    """The backend `cudagraphs`: records a step on a GPU and replays it. It warns once of each obstacle.

    `record` is the function that records, on devices of type `kind`.
    """

    name = "cudagraphs"
    fused_optimizers = True
    in_place_buffers = True
    splits_steps = False
    times_nodes = True
    kind: str = "cuda"
    record: Record = record_on_cuda
    warned: set[str] = field(default_factory=set[str])

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """`graph` as a function that replays it; as `eager` makes it where that cannot be, with a warning of why."""
        if why := obstacle(graph, inputs, example_inputs, self.kind, _transport(self.kind)):
            self._warn(f"backend='cudagraphs' runs this step as 'eager' does: {why}")
            return eager(graph, clock)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        in_single_precision(graph, {n for n, i in zip(placeholders, inputs, strict=True) if i.role is Role.HYPER})
        return _Replayed(eager(graph, clock), [i.role for i in inputs], self.kind, self.record, self._warn)

    def _warn(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, stacklevel=2)


@dataclass
class _Replayed:
    """A run function that turns itself into a recording.

    `recording` has the addresses that it reads and writes beside the buffers, tensors of its results, and the replay.
    """

    run: Run
    roles: Sequence[Role]
    kind: str
    record: Record
    warn: Callable[[str], None]
    calls: int = 0
    recordings: int = 0
    gave_up: bool = False
    recording: tuple[list[int], list[Tensor], Replay] | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    numbers: dict[int, float] = field(default_factory=dict[int, float])

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        given = self._brought(inputs)
        self.calls += 1
        if self.calls <= WARM_CALLS or self.gave_up:
            return self.run(given)
        places = [cast(Tensor, t).data_ptr() for t, role in zip(given, self.roles, strict=True) if role not in _BROUGHT]
        if self.recording is None or self.recording[0] != places:
            self.recording = None  # frees its memory
            self.recording = self._record(given, places)
        if self.recording is None:
            return self.run(given)
        _, made, replay = self.recording
        replay()
        return [tensor.clone() for tensor in made]

    def _brought(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs, with buffers that hold what this call brings."""
        given = list(inputs)
        for i, role in enumerate(self.roles):
            if role not in _BROUGHT:
                continue
            if i not in self.buffers:
                made = cast(Tensor, given[i])
                self.buffers[i] = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=self.kind)
            if role is Role.BATCH:
                self.buffers[i].copy_(given[i], non_blocking=True)
            elif (value := float(given[i])) != self.numbers.get(i):
                self.numbers[i] = value
                self.buffers[i].fill_(value)
            given[i] = self.buffers[i]
        return given

    def _record(self, given: list[Any], places: list[int]) -> tuple[list[int], list[Tensor], Replay] | None:
        self.recordings += 1
        if self.recordings > MOST_RECORDINGS:
            often = f"other addresses again and again ({MOST_RECORDINGS} recordings so far)"
            self._give_up(f"parameters, state or gradients have {often}: change them in place")
            return None
        try:
            return (places, *self.record(lambda: self.run(given)))
        except Exception as error:  # whatever a library says when it cannot be recorded
            self._give_up(f"it cannot be recorded: {first_line(error)}")
            return None

    def _give_up(self, why: str) -> None:
        self.gave_up = True
        self.warn(f"backend='cudagraphs' runs this step as 'eager' does from here on: {why}")


def obstacle(graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], kind: str, transport: str) -> str:
    """Why `graph` cannot be recorded on devices of `kind`, or ''. Numbers that it reads into Python become tensors.

    `transport` is the library that communicates between such devices, '' for none.
    """
    for given, example in zip(inputs, example_inputs, strict=True):
        if why := _unfit(given, example, kind):
            return why
    if readers := as_tensors(graph):
        return f"{readers[0]} takes a scheduled number as a Python number"
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    brought = {n for n, i in zip(placeholders, inputs, strict=True) if i.role in _BROUGHT and _is_number(n)}
    made_here = {n for n in graph.nodes if n.op == "call_function" and not operands(n) and not is_random(n)}
    constants = following(graph, {n for n in made_here if _elsewhere(n, kind)})
    numbers = following(graph, brought | constants) - constants
    for node in graph.nodes:
        if node.op == "call_function" and (why := _unfit_call(node, kind, transport, constants, numbers)):
            return f"%{node.name} {why}"
    return ""


def _is_number(node: Node) -> bool:
    """True for a single number, which is brought to the device wherever it is."""
    made = meta.tensor(node)
    return made is not None and not made.shape


def _elsewhere(node: Node, kind: str) -> str:
    """The type of another device on which `node` makes a tensor, or ''."""
    found = {made.device.partition(":")[0] for made in meta.tensors(node) if made is not None}
    return min(found - {kind, "meta"}, default="")


def _unfit(given: Input, example: Any, kind: str) -> str:
    if not isinstance(example, Tensor):
        return f"{given.name!r} is no tensor"
    if given.role in _BROUGHT and not example.dim():
        return ""
    if example.device.type != kind:
        return f"{given.name!r} is on {example.device}, and a graph is recorded on {kind}"
    if given.role is Role.BATCH and any(n > 1 and s == 0 for n, s in zip(example.shape, example.stride(), strict=True)):
        return f"{given.name!r} is expanded: several of its elements are one in memory"
    return ""


def _unfit_call(node: Node, kind: str, transport: str, constants: set[Node], numbers: set[Node]) -> str:
    """Constants of no dim that are elsewhere are part of what is launched; numbers are computed where they came to."""
    if node.target in (to_host, to_device):
        return "moves between host and device"
    if node.target is drawn:
        return "draws a piece of a random tensor, from a generator that is set in Python"
    if (is_collective(node) or node.target in (gather, swap)) and transport != "nccl":
        return f"communicates over {transport or 'no library'}, which a graph cannot hold"
    other = _elsewhere(node, kind)
    if is_random(node) and other:
        return f"draws on {other}"
    if node in numbers:
        asked = node.kwargs.get("device")
        return f"copies to {asked}" if asked is not None and torch.device(str(asked)).type != kind else ""
    if node in constants:
        return "" if _is_number(node) else f"computes on {other or kind}"
    if node.target in _COPIES and any(n in constants for n in operands(node)):
        return "copies from the host"
    return f"computes on {other}" if other else ""


def _transport(kind: str) -> str:
    if not dist.is_initialized():
        return ""
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config()).split(",")]
    return next((library for device, _, library in pairs if device == kind), "")
