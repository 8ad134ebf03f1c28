"""The predicted timeline of a step: a value, a table, and a Chrome trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, node_at
from ..graph.op_kinds import ARRIVALS, HOST_COPIES
from ..graph.text import human, seconds
from ..hardware.hardware import Hardware
from ..typed_json import write_text
from .memory import PeakMemory, bytes_held, peak_memory
from .simulation import SimulationResult, kind_of, priced, result_of, steady_start, whole_bytes
from .software import OWN, Software

COMPUTE, WAIT, STAGE, COPIES = "compute", "wait", "stage ", ("to host", "to device")
_SHOWN = 8


@dataclass(frozen=True)
class Span:
    """One interval of one stream: an op on `compute`, a `wait` for a collective or a copy, a collective on its axis, or
    a copy between host and device on `to host` or `to device`.

    Args:
        name: of the node.
        op: name of the called op, or kind of the collective.
        stream: `compute`, `wait`, the name of an axis, `to host` or `to device`.
        start_us: since the start of the step.
        us: duration.
        phase: forward, backward or update.
        module: path of the module whose forward it belongs to.
        size_bytes: of the largest buffer of a collective; of the result of an op.
        stage: of a pipeline, whose stream it is.

    Example:
        >>> longest = max(ws.timeline(local, ws.Hardware.preset("dgx-h100")).spans, key=lambda span: span.us)
    """

    name: str
    op: str
    stream: str
    start_us: float
    us: float
    phase: str = ""
    module: str = ""
    size_bytes: int = 0
    stage: int | None = None


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step: spans in the order of their starts, and live bytes as (microsecond, bytes).

    Example:
        >>> timeline = ws.timeline(local, ws.Hardware.preset("dgx-h100"))
        >>> print(timeline)
        >>> timeline.save("step.json")  # for Perfetto
    """

    spans: tuple[Span, ...]
    simulated: SimulationResult
    memory: tuple[tuple[float, int], ...]
    peak: PeakMemory
    title: str = "predicted"

    def busy_us(self, stream: str) -> float:
        """Microseconds in which `stream` is not idle."""
        return sum(span.us for span in self.spans if span.stream == stream)

    @property
    def streams(self) -> tuple[str, ...]:
        """`compute`, `wait`, the axes with collectives, and directions of copies; of a pipeline its stages."""
        stages = {span.stage for span in self.spans if span.stage is not None}
        copies = [stream for stream in COPIES if any(span.stream == stream for span in self.spans)]
        return tuple(f"{STAGE}{stage}" for stage in sorted(stages)) or (COMPUTE, WAIT, *self.axes, *copies)

    @property
    def axes(self) -> list[str]:
        """The axes with collectives."""
        others = COMPUTE, WAIT, *COPIES
        return [*dict.fromkeys(s.stream for s in self.spans if s.stage is None and s.stream not in others)]

    @property
    def waits_for(self) -> str:
        """What a rank may wait for."""
        return "collectives and copies" if {*COPIES} & {*self.streams} else "collectives"

    def shown(self, stream: str) -> str:
        """A stream for people."""
        return f"axis {stream}" if stream in self.axes else stream

    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write a Chrome trace, for Perfetto and chrome://tracing, with the timelines `others` below this one. Missing
        folders are created.
        """
        events = [event for number, trace in enumerate((self, *others)) for event in _events(trace, number)]
        write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        step = self.simulated.step_us
        if COMPUTE not in self.streams:
            busy = ((stream, self.busy_us(stream)) for stream in self.streams)
            rows = [f"{stream}: busy {seconds(us / 1e6)} ({us / step:.0%})" for stream, us in busy]
            idle = f"a stage does nothing for {self.simulated.exposed_us / step:.0%} of it"
            return "\n".join([f"step {seconds(step / 1e6)}: {idle}", *rows, str(self.peak)])
        rows = [
            f"step {seconds(step / 1e6)}: compute {seconds(self.busy_us(COMPUTE) / 1e6)}, waiting for {self.waits_for} "
            f"{seconds(self.simulated.exposed_us / 1e6)} ({self.simulated.exposed_us / max(step, 1e-9):.0%}), "
            f"model FLOPs utilization {self.simulated.mfu:.1%}"
        ]
        for axis in self.axes:
            sent = [span for span in self.spans if span.stream == axis]
            kinds = dict.fromkeys(span.op for span in sent)
            parts = ", ".join(f"{sum(s.op == kind for s in sent)} {kind}" for kind in kinds)
            rows.append(f"axis {axis}: busy {seconds(self.busy_us(axis) / 1e6)} with {parts}")
        rows += [f"copies {way}: busy {seconds(self.busy_us(way) / 1e6)}" for way in COPIES if way in self.streams]
        waits = sorted((s for s in self.spans if s.stream == WAIT), key=lambda span: -span.us)[:_SHOWN]
        rows += ["longest waits:"] if waits else []
        rows += [
            f"  {seconds(w.us / 1e6):>10}  {w.op} of {human(w.size_bytes)}, {w.phase}  %{w.name}  {w.module}"
            for w in waits
        ]
        return "\n".join([*rows, str(self.peak)])


def timeline(local: LocalGraph, hardware: Hardware, software: Software = OWN) -> Timeline:
    """The timeline of a step of one rank (`planner.prediction.timeline`)."""
    clock = steady_start(local, priced(local, hardware, software))
    spans: list[Span] = []
    ends: list[float] = []
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    for node in calls:
        before = clock.now
        clock.run(node)
        ends.append(clock.now)
        if clock.now > before and not is_collective(node):
            waits = is_wait(node) or node.target in ARRIVALS
            spans.append(_span(node, WAIT if waits else COMPUTE, before, clock.now))
    copies = [n for n in calls if n.target in HOST_COPIES and n in clock.begun]
    spans += [_span(n, f"to {HOST_COPIES[n.target]}", clock.begun[n], clock.ends[n]) for n in copies]
    spans += [_span(n, str(n.args[-1]), clock.begun[n], clock.ends[n]) for n in calls if is_collective(n)]
    memory = tuple(zip(ends, bytes_held(local), strict=True))
    ordered = tuple(sorted(spans, key=lambda span: span.start_us))
    return Timeline(ordered, result_of(local, clock), memory, peak_memory(local))


def _span(node: Node, stream: str, start_us: float, end_us: float) -> Span:
    """The span of an op, of a collective, or of a wait, which is shown as the collective it waits for."""
    shown = node_at(node, 0) if is_wait(node) and is_collective(node_at(node, 0)) else node
    collective = is_collective(shown)
    op, size = (kind_of(shown), whole_bytes(shown)) if collective else (op_name(node), meta.size_bytes(shown))
    return Span(node.name, op, stream, start_us, end_us - start_us, phase(node), meta.module_path(node), size)


def op_name(node: Node) -> str:
    """The name of the called op without namespace and overload."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.split("::")[-1].removeprefix("aten.").split(".")[0]


def phase(node: Node) -> str:
    """forward, backward, or update: nodes that depend on complete gradients."""
    return "update" if meta.is_batch_invariant(node) else "backward" if meta.is_backward(node) else "forward"


def _events(step_timeline: Timeline, process: int) -> Iterable[dict[str, Any]]:
    """https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: times in microseconds."""
    yield _named("process_name", process, 0, step_timeline.title)
    threads = {stream: number for number, stream in enumerate(step_timeline.streams)}
    for stream, number in threads.items():
        yield _named("thread_name", process, number, step_timeline.shown(stream))
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}
    for span in step_timeline.spans:
        details = {"node": span.name, "phase": span.phase, "module": span.module, "bytes": span.size_bytes}
        yield {
            "ph": "X", "name": span.op, "cat": span.phase or "step", "pid": process, "tid": threads[span.stream],
            "ts": span.start_us, "dur": span.us, "args": {key: value for key, value in details.items() if value},
        }  # fmt: skip
    for size, equal in groupby(step_timeline.memory, key=itemgetter(1)):
        yield {"ph": "C", "name": "live bytes", "pid": process, "ts": next(equal)[0], "args": {"bytes": size}}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
