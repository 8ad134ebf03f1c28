"""The tables of a report: collectives, time by op, why alternatives lost."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from ..cost.simulation import kind_of
from ..cost.timeline import COMPUTE, WAIT, Timeline, phase
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import is_collective, is_wait, node_at
from ..graph.text import collective_bytes, human
from .compare import PlanRow

_Key = tuple[str, str, str, str]
_CARRIED: _Key = ("from the step before", "", "", "")
_DEPTH = 4
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass
class TrafficRow:
    """Collectives of one kind, axis, phase and module path, in which numbers are `*`.

    `sent_bytes`: that a rank sends. `us`: time on the link. `waited_us`: the part for which the rank waits.
    """

    kind: str
    axis: str
    phase: str
    where: str
    count: int = 0
    sent_bytes: int = 0
    us: float = 0.0
    waited_us: float = 0.0


def sent(local: LocalGraph, made: Timeline) -> list[TrafficRow]:
    """The collectives of a program, the longest first."""
    rows: dict[_Key, TrafficRow] = {}
    us = {span.name: span.us for span in made.spans if span.stream not in (COMPUTE, WAIT)}
    waited = {span.name: span.us for span in made.spans if span.stream == WAIT}
    names = {node: given.name for given, node in local.placeholders()}
    keys: dict[Node, _Key] = {}
    for node in local.graph.nodes:
        if is_collective(node):
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
    found = dict.fromkeys(_NUMBER.sub("*", path) for path in _paths(node, names, _DEPTH) if path)
    if len(found) < 2:
        return next(iter(found), "")
    first, *_, last = found
    return f"{first} \u2026 {last}"


def _paths(node: Node, names: Mapping[Node, str], depth: int) -> Iterator[str]:
    path = meta.module_path(node) or names.get(node, "").rpartition(".")[0]
    if path or not depth:
        yield path
        return
    for given in node.all_input_nodes:
        yield from _paths(given, names, depth - 1)


def by_op(made: Timeline) -> list[tuple[str, int, float]]:
    """(op, count, microseconds) of the computing stream, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for span in made.spans:
        if span.stream == COMPUTE:
            count, us = found.get(span.op, (0, 0.0))
            found[span.op] = (count + 1, us + span.us)
    return sorted(((op, *rest) for op, rest in found.items()), key=lambda row: (-row[2], row[0]))


def verdicts(rows: Sequence[PlanRow], memory_bytes: int | None = None) -> list[str]:
    """For each row why it won or lost: no plan, does not fit in `memory_bytes`, or slower."""
    fit = [row for row in rows if row.costs and (memory_bytes is None or row.costs.peak_bytes <= memory_bytes)]
    best = min(fit, key=lambda row: row.batch_s, default=None)
    words = "fastest for each batch" + (" that fits" if len(fit) < sum(row.costs is not None for row in rows) else "")
    return [words if row is best else _verdict(row, best, memory_bytes) for row in rows]


def _verdict(row: PlanRow, best: PlanRow | None, memory_bytes: int | None) -> str:
    if row.costs is None:
        return f"no plan: {row.error}"
    if memory_bytes is not None and row.costs.peak_bytes > memory_bytes:
        return f"does not fit: {human(row.costs.peak_bytes - memory_bytes)} more than the device has"
    assert best is not None, "this row fits, so some row does"
    assert best.costs is not None, "the best has costs"
    waits = row.costs.exposed_s / row.batches - best.costs.exposed_s / best.batches
    more = row.batch_s - best.batch_s
    slower = f"{row.batch_s / best.batch_s - 1:.1%} slower for each batch"
    if more <= 0:
        return "as fast"
    return f"{slower}: mostly {'waits for collectives' if waits >= more / 2 else 'computes'} longer"
