"""Finds the equal layers of a captured step: forward, backward and update of each, node by node.

`find_repeats(graph)` returns `Repeats`: n equal blocks, and the block and slot of each of their nodes. Nodes of one
slot are equal: the same operation on the same shapes, with equal operands. What holds for one block holds for all.

Candidates are found by the names of parameters (`prefix.0.`, `prefix.1.`, ...) and of modules. Nodes of the backward
and of the optimizer are assigned to layers by their operands and by the order of the trace. Names alone decide
nothing: every operation, shape, argument and operand is compared (`blocks.check_blocks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch.fx import Node

from ...tuning import TUNING
from .. import meta
from ..graph import Input, Role, TrainGraph
from ..nodes import operands
from ..ops import GRAD_READY
from .blocks import LEAST, ListCalls, NoRepeatsError, check_blocks, shape_of

_LONGEST = TUNING.longest_period
_SHRINKS = TUNING.dropped_layers


@dataclass(frozen=True)
class Repeats:
    """`count` equal blocks of a step: layers `prefix.first` and on, `period` of them each. `places` gives the block and
    the slot of every node in a block, inputs included, both from 0.
    """

    prefix: str
    first: int
    period: int
    count: int
    places: dict[Node, tuple[int, int]] = field(repr=False)
    blocks: tuple[tuple[Node, ...], ...] = field(repr=False)

    @property
    def layers(self) -> int:
        """How many layers are in blocks."""
        return self.count * self.period

    def block(self, node: Node) -> int | None:
        """The number of the block that `node` is in; None outside."""
        return self.places[node][0] if node in self.places else None

    def __str__(self) -> str:
        last = self.first + self.layers - 1
        by = f" by {self.period}" if self.period > 1 else ""
        return f"{self.prefix}.{self.first} to {last}{by}: {self.count} blocks of {len(self.blocks[0])} nodes"


def find_repeats(graph: TrainGraph) -> Repeats | None:
    """The equal layers with the most nodes; None where a step has none."""
    candidates = [repeats for repeats, _ in all_repeats(graph) if repeats is not None]
    return max(candidates, key=lambda repeats: len(repeats.places), default=None)


def why_not(graph: TrainGraph) -> str:
    """The reason why `find_repeats` returns None, for each list of layers; empty where it finds equal layers."""
    candidates = all_repeats(graph)
    if any(repeats for repeats, _ in candidates):
        return ""
    return "; ".join(why for _, why in candidates) or f"no list of {LEAST} layers or more with parameters"


def all_repeats(graph: TrainGraph) -> list[tuple[Repeats | None, str]]:
    """For each list of layers: the blocks, or the reason why there are none."""
    return [_of_prefix(graph, prefix) for prefix in _prefixes(graph)]


def _prefixes(graph: TrainGraph) -> list[str]:
    """Names of the lists of layers with parameters; lists inside layers are left out."""
    by_prefix: dict[str, set[str]] = {}
    for program_input in graph.inputs:
        parts = program_input.name.split(".") if program_input.role is Role.PARAM else []
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            by_prefix.setdefault(".".join(parts[:place]), set()).add(parts[place])
    return [prefix for prefix, numbers in by_prefix.items() if len(numbers) >= LEAST]


def _of_prefix(graph: TrainGraph, prefix: str) -> tuple[Repeats | None, str]:
    layers = _Layers(graph, prefix)
    try:
        ranges = _ranges(layers.kinds())
    except NoRepeatsError as error:
        return None, f"{prefix}: {error}"
    whys: list[str] = []
    for first, period, count in ranges:
        repeats = _within(layers, first, period, count)
        if isinstance(repeats, Repeats):
            return repeats, ""
        whys.append(f"{prefix}: {repeats}")
    return None, whys[0] if whys else f"{prefix}: no {LEAST} layers in a row are equal"


def _within(layers: _Layers, first: int, period: int, count: int) -> Repeats | NoRepeatsError:
    """Blocks of `period` layers, without blocks at the ends that differ."""
    last = NoRepeatsError("")
    for _ in range(_SHRINKS):
        try:
            blocks = _Cut(layers, first, period, count).blocks()
            places = check_blocks(layers.graph, blocks, layers.lists, layers.names)
            return Repeats(layers.prefix, first, period, count, places, tuple(map(tuple, blocks)))
        except NoRepeatsError as error:
            last = error
            if error.block not in (0, count - 1) or count <= LEAST:
                break
            first, count = first + (period if error.block == 0 else 0), count - 1
    return last


def _ranges(kinds: Sequence[object]) -> list[tuple[int, int, int]]:
    """Runs of blocks that may be equal, the longest first: first layer, layers in a block, number of blocks."""
    ranges: list[tuple[int, int, int]] = []
    for period in range(1, min(_LONGEST, len(kinds) // LEAST) + 1):
        start, best = 0, (0, period, 0)
        for i in range(len(kinds)):
            if i + period >= len(kinds) or kinds[i] != kinds[i + period]:
                best = max(best, (start, period, (i - start) // period + 1), key=lambda run: run[2])
                start = i + 1
        if best[2] >= LEAST:
            ranges.append(best)
    return sorted(ranges, key=lambda run: -run[1] * run[2])


class _Layers:
    """The layer of each node, as far as names and operands determine it."""

    def __init__(self, graph: TrainGraph, prefix: str) -> None:
        self.graph, self.prefix = graph, prefix
        self.nodes = list(graph.graph.nodes)
        self.pattern = re.compile(re.escape(prefix) + r"\.(\d+)(?=[./]|$)")
        self.inputs: dict[Node, Input] = {node: program_input for program_input, node in graph.placeholders()}
        self.layer: dict[Node, int] = {}
        for node, program_input in self.inputs.items():
            self._say(node, self.number(program_input.owner or program_input.name))
        self._forward()
        self.lists = ListCalls(graph.graph)
        self._behind()

    def names(self, name: str) -> str:
        """A name without the number of the layer."""
        return self.pattern.sub(f"{self.prefix}.*", name)

    def number(self, name: str) -> int | None:
        """The number of the layer in a name."""
        match = self.pattern.match(name)
        return int(match[1]) if match else None

    def _say(self, node: Node, layer: int | None) -> None:
        if layer is not None:
            self.layer[node] = layer

    def _forward(self) -> None:
        for node in self.nodes:
            if node.op == "call_function":
                self._say(node, self.number(meta.module_path(node)))
        for node, program_input in self.inputs.items():
            readers = {self.layer.get(user) for user in node.users}
            if program_input.role is Role.CONST and len(readers) == 1:
                self._say(node, readers.pop())

    def _behind(self) -> None:
        """Assigns backward, clipping and optimizer by the parameters, gradients and activations that a node reads."""
        inner = {n: i for n, i in self.layer.items() if n in self.inputs or self._stays(n, i)}
        settled: dict[Node, int] = {}
        for node in self.nodes:
            has_layer = node in self.layer and node.target is not GRAD_READY
            if node.op != "call_function" or has_layer or node in self.lists.call_of:
                continue
            reads, source = operands(node), self.lists.source(node)
            inside = {inner[n] for n in reads if n in inner}
            behind = {settled[n] for n in reads if n in settled}
            if node.target is GRAD_READY:
                seen = {self.number(str(node.args[1]))}
            elif source is not None:
                seen = {self.layer.get(source)}
            else:
                seen = inside or behind
            if len(seen) == 1:
                self._say(node, next(iter(seen)))
            if node not in self.layer:
                continue
            after = not meta.is_backward(node) and (inside or all(n in settled for n in reads))
            if node.target is GRAD_READY or source is not None or after:
                settled[node] = self.layer[node]

    def _stays(self, node: Node, layer: int) -> bool:
        """True where only the own layer reads a value in the forward."""
        forward = [u for u in node.users if u.op == "call_function" and not meta.is_backward(u)]
        return bool(forward) and all(self.layer.get(u) == layer for u in forward)

    def kinds(self) -> list[object]:
        """A hash of each layer, in order: equal for layers that may be equal."""
        shapes: dict[int, list[object]] = {}
        for node in self.nodes:
            if node in self.layer:
                shapes.setdefault(self.layer[node], []).append(self.shape(node))
        numbers = sorted(shapes)
        if numbers != list(range(len(numbers))):
            raise NoRepeatsError("layers are missing")
        return [hash(tuple(shapes[i])) for i in numbers]

    def shape(self, node: Node) -> tuple[object, ...]:
        """A key that equal nodes share."""
        return shape_of(node, self.inputs.get(node), self.names, self.lists)


class _Cut:
    """Assigns all nodes to blocks. The nodes of a block are contiguous in each sweep over the layers: the forward, the
    backward, each loop of an optimizer. Nodes between nodes of known blocks are divided in the same way everywhere.
    """

    def __init__(self, layers: _Layers, first: int, period: int, count: int) -> None:
        self.layers, self.count = layers, count
        numbers = {node: (i - first) // period for node, i in layers.layer.items()}
        self.block_of = {node: b for node, b in numbers.items() if 0 <= b < count}
        self.members: list[list[Node]] = [[] for _ in range(count)]

    def blocks(self) -> list[list[Node]]:
        """The nodes of each block in the order of the graph."""
        for node in self.layers.inputs:
            if node in self.block_of:
                self.members[self.block_of[node]].append(node)
        calls = [node for node in self.layers.nodes if node.op == "call_function"]
        begin = 0
        sweeps = [*self._sweeps(calls), None]
        for sweep, after in pairwise(sweeps):
            assert sweep is not None, "the last is the end"
            end = after[0][1] if after else len(calls)
            begin = self._sweep(calls, sweep, begin, end)
        return self.members

    def _sweeps(self, calls: Sequence[Node]) -> Iterator[list[tuple[int, int, int]]]:
        """Each sweep as its (block, start, end), in the order of the graph."""
        groups: list[tuple[int, int, int]] = []
        before: bool | None = None
        for i, node in enumerate(calls):
            block, phase = self.block_of.get(node), meta.is_backward(node)
            if block is not None:
                if groups and groups[-1][0] == block and phase == before:
                    groups[-1] = (block, groups[-1][1], i + 1)
                else:
                    groups.append((block, i, i + 1))
                before = phase
        for start in range(0, len(groups), self.count):
            sweep = groups[start : start + self.count]
            seen = [block for block, _, _ in sweep]
            if seen not in (list(range(self.count)), list(reversed(range(self.count)))):
                raise NoRepeatsError(f"%{calls[sweep[0][1]].name} and on: layers are not run one after the other")
            yield sweep

    def _sweep(self, calls: Sequence[Node], sweep: list[tuple[int, int, int]], begin: int, end: int) -> int:
        """Divides the nodes between the groups of a sweep; returns the end of its last block."""
        shape = self.layers.shape
        gaps = [[*map(shape, calls[a[2] : b[1]])] for a, b in pairwise(sweep)]
        gap = gaps[0]
        for number, other in enumerate(gaps):
            if other != gap:
                raise NoRepeatsError(f"%{calls[sweep[number][2]].name}: it stands between two layers, and not alike",
                                     sweep[number + 1][0])  # fmt: skip
        after = [*map(shape, calls[sweep[-1][2] : min(end, sweep[-1][2] + len(gap))])]
        before = [*map(shape, calls[max(begin, sweep[0][1] - len(gap)) : sweep[0][1]])]
        for tail in range(len(gap), -1, -1):
            head = len(gap) - tail
            if after[:tail] == gap[:tail] and (not head or before[-head:] == gap[tail:]):
                break
        else:
            tails = [n for n in range(1, len(gap) + 1) if after[:n] == gap[:n]]
            raise NoRepeatsError(f"%{calls[sweep[0][1]].name}: what stands between layers is not at their ends",
                                 sweep[0][0] if tails else sweep[-1][0])  # fmt: skip
        for block, first, last in sweep:
            self.members[block] += calls[first - head : last + tail]
        return sweep[-1][2] + tail
