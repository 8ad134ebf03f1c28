"""The parts of a page as data: tables of collectives and ops, verdicts, drawings, and the tree of modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch.fx import Node

from ..cost.simulation import kind_of
from ..cost.timeline import COMPUTE, WAIT, Timeline, phase
from ..graph import meta
from ..graph.graph import Input, LocalGraph, Role
from ..graph.nodes import communicates, is_wait, node_at
from ..graph.text import collective_bytes, human, short_dtype
from ..plan.plan import Plan
from ..planner.search_result import Candidate

_Key = tuple[str, str, str, str]
_CARRIED: _Key = ("from the step before", "", "", "")
_DEPTH = 4
COLUMNS = 720
"""Number of columns of the memory chart; each shows the peak of its part of the step."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class TrafficRow:
    """Collectives of one kind, axis, phase and module path, in which numbers are `*`. `sent_bytes`: that a rank sends.
    `us`: time on the link. `waited_us`: the part for which the rank waits.
    """

    kind: str
    axis: str
    phase: str
    where: str
    count: int = 0
    sent_bytes: int = 0
    us: float = 0.0
    waited_us: float = 0.0


def sent(local: LocalGraph, timeline: Timeline) -> list[TrafficRow]:
    """The collectives of a program, the longest first."""
    rows: dict[_Key, TrafficRow] = {}
    us = {span.name: span.us for span in timeline.spans if span.stream not in (COMPUTE, WAIT)}
    waited = {span.name: span.us for span in timeline.spans if span.stream == WAIT}
    names = {node: placeholder.name for placeholder, node in local.placeholders()}
    keys: dict[Node, _Key] = {}
    for node in local.graph.nodes:
        if communicates(node):
            keys[node] = (kind_of(node), str(node.args[-1]), phase(node), where(node, names))
            row = rows.setdefault(keys[node], TrafficRow(*keys[node]))
            row.count += 1
            row.sent_bytes += collective_bytes(node, local)[1]
            row.us += us.get(node.name, 0.0)
        elif is_wait(node) and node.name in waited:
            key = keys.get(node_at(node, 0), _CARRIED)
            rows.setdefault(key, TrafficRow(*key)).waited_us += waited[node.name]
    return sorted(rows.values(), key=lambda row: (-row.us, -row.waited_us, row.kind, row.axis, row.phase, row.where))


def where(node: Node, names: Mapping[Node, str]) -> str:
    """The module of a collective; of a bucket, the first and the last module. `names`: names of inputs."""
    paths = dict.fromkeys(_NUMBER.sub("*", path) for path in _paths(node, names, _DEPTH) if path)
    if len(paths) < 2:
        return next(iter(paths), "")
    first, *_, last = paths
    return f"{first} \u2026 {last}"


def _paths(node: Node, names: Mapping[Node, str], depth: int) -> Iterator[str]:
    path = meta.module_path(node) or names.get(node, "").rpartition(".")[0]
    if path or not depth:
        yield path
        return
    for source in node.all_input_nodes:
        yield from _paths(source, names, depth - 1)


def by_op(timeline: Timeline) -> list[tuple[str, int, float]]:
    """(op, count, microseconds) of the computing stream, the longest first; of a pipeline, blocks of all stages."""
    totals: dict[str, tuple[int, float]] = {}
    for span in timeline.spans:
        if span.stream == COMPUTE or span.stage is not None:
            count, us = totals.get(span.op, (0, 0.0))
            totals[span.op] = (count + 1, us + span.us)
    return sorted(((op, *rest) for op, rest in totals.items()), key=lambda row: (-row[2], row[0]))


def verdicts(rows: Sequence[Candidate], memory_bytes: int | None = None) -> list[str]:
    """For each row why it won or lost: no plan, does not fit in `memory_bytes`, or slower."""
    fit = [row for row in rows if row.costs and (memory_bytes is None or row.costs.peak_bytes <= memory_bytes)]
    best = min(fit, key=lambda row: row.batch_s, default=None)
    words = "fastest for each batch" + (" that fits" if len(fit) < sum(row.costs is not None for row in rows) else "")
    return [words if row is best else _verdict(row, best, memory_bytes) for row in rows]


def _verdict(row: Candidate, best: Candidate | None, memory_bytes: int | None) -> str:
    if row.costs is None:
        return f"no plan: {row.why}"
    if memory_bytes is not None and row.costs.peak_bytes > memory_bytes:
        return f"does not fit: {human(row.costs.peak_bytes - memory_bytes)} more than the device has"
    assert best is not None, "this row fits, so some row does"
    assert best.costs is not None, "the best has costs"
    waits = row.costs.exposed_s / row.batches - best.costs.exposed_s / best.batches
    longer_s = row.batch_s - best.batch_s
    slower = f"{row.batch_s / best.batch_s - 1:.1%} slower for each batch"
    if longer_s <= 0:
        return "as fast"
    return f"{slower}: mostly {'waits for collectives' if waits >= longer_s / 2 else 'computes'} longer"


def columns(memory: Sequence[tuple[float, int]], step_us: float, count: int = COLUMNS) -> list[int]:
    """The peak bytes in each of `count` equal parts of the step. `memory`: (end of a node, live bytes during it)."""
    most = [0] * count
    last = 0
    for end, size in memory:
        first, last = last, min(int(end / step_us * count), count - 1) if step_us else 0
        for column in range(first, last + 1):
            most[column] = max(most[column], size)
    return most


def peak_at(timeline: Timeline) -> float:
    """Time of the peak in microseconds: the middle of the first node that reaches it."""
    before = 0.0
    for end, size in timeline.memory:
        if size == timeline.peak.size_bytes:
            return (before + end) / 2
        before = end
    return 0.0


def outline(most: Sequence[int], top: int) -> str:
    """An SVG path of the area under columns of bytes, 0 to len(most) wide and 100 high for `top` bytes."""
    parts = ["M0 100"]
    parts += [f"V{100 - 100 * size / max(top, 1):.2f}H{column + 1}" for column, size in enumerate(most)]
    return "".join([*parts, "V100Z"])


def lanes(predicted: Timeline) -> dict[str, Any]:
    """Spans for the page's script, in microseconds; strings are numbers into the list `words`."""
    words: dict[str, int] = {}

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    rows = [
        {
            "title": predicted.shown(stream),
            "kind": "axis" if stream in predicted.axes else WAIT if stream == WAIT else COMPUTE,
            "start": [round(s.start_us, 3) for s in spans],
            "us": [round(s.us, 3) for s in spans],
            "node": [s.name for s in spans],
            "op": [number(s.op) for s in spans],
            "phase": [number(s.phase) for s in spans],
            "module": [number(s.module) for s in spans],
            "bytes": [s.size_bytes for s in spans],
        }
        for stream in predicted.streams for spans in [[s for s in predicted.spans if s.stream == stream]]
    ]  # fmt: skip
    return {"step": round(predicted.simulated.step_us, 3), "lanes": rows, "words": list(words)}


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer. `layout`: global shape with its axes; `local` and bytes are those of the first rank."""

    name: str
    kind: str
    dtype: str
    layout: str
    local: str
    size_bytes: int
    state_bytes: int
    why: str


@dataclass
class Branch:
    """A module; sums over all of its parameters and buffers, with bytes of the first rank."""

    name: str
    elements: int = 0
    size_bytes: int = 0
    state_bytes: int = 0
    branches: dict[str, Branch] = field(default_factory=lambda: dict[str, Branch]())
    leaves: list[Leaf] = field(default_factory=list[Leaf])


def tree(plan: Plan) -> Branch:
    """Modules in the order of their first parameter; names are split at dots."""
    root, state = Branch(""), Counter[str]()
    for source in plan.inputs:
        if source.role is Role.STATE:
            state[source.owner] += plan.input_bytes(source)
    for source in plan.inputs:
        if source.role in (Role.PARAM, Role.BUFFER):
            path, leaf = source.name.split(".")[:-1], _leaf(plan, source, state[source.name])
            above = list(accumulate(path, lambda at, part: at.branches.setdefault(part, Branch(part)), initial=root))
            for branch in above:
                branch.elements += source.meta.numel
                branch.size_bytes += leaf.size_bytes
                branch.state_bytes += leaf.state_bytes
            above[-1].leaves.append(leaf)
    return root


def _leaf(plan: Plan, source: Input, state_bytes: int) -> Leaf:
    layout = plan.storage[source.name]
    local = layout.local_shape(source.meta.shape, plan.mesh, plan.mesh.coordinate(0))
    axes = [*layout.shard_axes(), *layout.varies]
    why = "; ".join(f"{axis}: {plan.axis_strategies.get(axis, plan.strategy)}" for axis in axes)
    return Leaf(
        source.name.split(".")[-1],
        "parameter" if source.role is Role.PARAM else "buffer",
        short_dtype(source.meta.dtype),
        layout.show(source.meta.shape),
        " ".join(map(str, local)) or "()",
        plan.input_bytes(source),
        state_bytes,
        why or "whole on every rank",
    )
