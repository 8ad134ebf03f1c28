"""The measured timeline of a step, beside the predicted one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..cost.kernel_times import KernelTimes
from ..cost.memory import bytes_held, peak_memory
from ..cost.simulation import SimulationResult, kind_of
from ..cost.timeline import COMPUTE, WAIT, Span, Timeline, op_name, phase
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, node_at
from ..graph.region import region_of

_SHOWN = 12


@dataclass
class SpanClock:
    """Start and end of each call in seconds, by node. On a GPU each call is synchronized: nothing overlaps."""

    on_gpu: bool
    spans: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def timed(self, node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed; that of a piece of a loop for the loop."""
        name = meta.part_of(node) if region_of(node) else node.name

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            out = call(*args, **kwargs)
            if self.on_gpu:
                torch.cuda.synchronize()
            self.spans.append((name, begin, time.perf_counter()))
            return out

        return run

    def clear(self) -> None:
        """Forget all spans."""
        self.spans = []


@dataclass(frozen=True)
class Profile:
    """A step as it was measured, and as the cost model predicts it.
    `kernels` are the measured times of its ops, from which `simulate` and `timeline` (`profile=`) predict other steps.
    """

    measured: Timeline
    predicted: Timeline
    kernels: KernelTimes

    def save(self, path: str) -> None:
        """Write both as one Chrome trace, one above the other."""
        self.predicted.save(path, self.measured)

    def classes(self) -> dict[str, tuple[float, float]]:
        """Microseconds of each class of ops and of waits: predicted, measured; the longest measured first."""
        ours, theirs = _by_class(self.predicted), _by_class(self.measured)
        times = {op: (ours.get(op, 0.0), theirs.get(op, 0.0)) for op in {**theirs, **ours}}
        return dict(sorted(times.items(), key=lambda item: -item[1][1]))

    def __str__(self) -> str:
        pair = self.predicted.simulated.step_us, self.measured.simulated.step_us
        rows = [f"{'':34}{'predicted ms':>14}{'measured ms':>14}{'error':>9}", _row("step", *pair)]
        classes = list(self.classes().items())
        rows += [_row(op, *both) for op, both in classes[:_SHOWN]]
        rest = [both for _, both in classes[_SHOWN:]]
        rows += [_row(f"{len(rest)} more", sum(p for p, _ in rest), sum(m for _, m in rest))] if rest else []
        return "\n".join(rows)


def measured_timeline(
    local: LocalGraph, seen: Sequence[tuple[str, float, float]], begin: float, seconds: float
) -> Timeline:
    """The timeline of one call that began at `begin` and took `seconds`, from the spans of its nodes."""
    nodes: Mapping[str, Node] = {node.name: node for node in local.graph.nodes}
    started: dict[Node, float] = {}
    spans: list[Span] = []
    waited = 0.0
    for name, start, end in seen:
        node, at, us = nodes.get(name), (start - begin) * 1e6, (end - start) * 1e6
        if node is None:  # what a rank adds to the program, as the sum after an exchange
            spans.append(Span(name, name.rstrip("0123456789").rstrip("_"), COMPUTE, at, us))
        elif is_wait(node) and node_at(node, 0) in started:
            sent = node_at(node, 0)
            waited += us
            spans.append(_span(node, kind_of(sent), WAIT, at, us))
            spans.append(_span(sent, kind_of(sent), str(sent.args[-1]), started[sent], at + us - started[sent]))
        elif is_collective(node):
            started[node] = at
            spans.append(_span(node, f"start {kind_of(node)}", COMPUTE, at, us))
        else:
            spans.append(_span(node, op_name(node), COMPUTE, at, us))
    ends = {name: (end - begin) * 1e6 for name, _, end in seen}
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    live_bytes = zip(calls, bytes_held(local), strict=True)
    memory = tuple((ends[node.name], size) for node, size in live_bytes if node.name in ends)
    ordered = tuple(sorted(spans, key=lambda span: span.start_us))
    return Timeline(ordered, SimulationResult(seconds * 1e6, waited), memory, peak_memory(local), "measured")


def measured_kernels(local: LocalGraph, seen: Timeline) -> KernelTimes:
    """The ops of a measured timeline: what computes, without starts of collectives."""
    nodes = {node.name: node for node in local.graph.nodes if not is_collective(node)}
    computed = [span for span in seen.spans if span.stream == COMPUTE and span.name in nodes]
    return KernelTimes.of([(nodes[span.name], span.us) for span in computed])


def _span(node: Node, op: str, stream: str, start_us: float, us: float) -> Span:
    return Span(node.name, op, stream, start_us, us, phase(node), meta.module_path(node), meta.size_bytes(node))


def _by_class(timeline: Timeline) -> dict[str, float]:
    total = dict[str, float]()
    for span in timeline.spans:
        if span.stream in (COMPUTE, WAIT):
            name = f"wait for {span.op}" if span.stream == WAIT else span.op
            total[name] = total.get(name, 0.0) + span.us
    return total


def _row(name: str, predicted: float, measured: float) -> str:
    error = f"{(predicted - measured) / measured:+.0%}" if measured else "-"
    return f"{name:34}{predicted / 1e3:14.2f}{measured / 1e3:14.2f}{error:>9}"
