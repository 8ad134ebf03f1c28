"""Finds the equal layers of a captured step: forward, backward and update of each, node by node.

`find_repeats(graph)` gives `Repeats`: n equal blocks, and for every node of one its block and its slot. Nodes of one
slot are equals: the same operation on the same shapes, whose operands are equals too. So what is decided of one block
holds for its equals, `multiplicity` times:

    repeats = find_repeats(graph)
    for node in graph.graph.nodes:
        same = repeats.representative(node)   # itself outside the blocks, else its equal in the block in the middle
        times = repeats.multiplicity(node)    # 1 outside, else how many blocks there are

Layers are looked for by the names of parameters (`prefix.0.`, `prefix.1.`, ...) and of the modules that ran; which
nodes of the backward and of the optimizer belong to one follows from what they read, and from the order of the trace.
Names decide nothing alone: every operation, shape, argument and operand is compared (`blocks.check_blocks`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch.fx import Node

from ..tuning import TUNING
from . import meta
from .blocks import LEAST, NoRepeatsError, check_blocks, shape_of
from .graph import Input, Role, TrainGraph, operands
from .lists import ListCalls
from .ops import GRAD_READY

_LONGEST = TUNING.longest_period
_SHRINKS = TUNING.dropped_layers


@dataclass(frozen=True)
class Repeats:
    """`count` equal blocks of a step: layers `prefix.first` and on, `period` of them each.

    `places` gives the block and the slot of every node in one, inputs too, both from 0. Nodes of one slot are equals.
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

    def representative(self, node: Node) -> Node:
        """The equal of `node` in the block in the middle, whose neighbours are blocks; itself outside of blocks."""
        return self.blocks[self.count // 2][self.places[node][1]] if node in self.places else node

    def multiplicity(self, node: Node) -> int:
        """How many equals `node` has, itself included."""
        return self.count if node in self.places else 1

    def block(self, node: Node) -> int | None:
        """The number of the block that `node` is in; None outside."""
        return self.places[node][0] if node in self.places else None

    def __str__(self) -> str:
        last = self.first + self.layers - 1
        by = f" by {self.period}" if self.period > 1 else ""
        return f"{self.prefix}.{self.first} to {last}{by}: {self.count} blocks of {len(self.blocks[0])} nodes"


def find_repeats(graph: TrainGraph, marks: Mapping[Node, Hashable] | None = None) -> Repeats | None:
    """The repeated layers with the most nodes in all; None where a step has none that are equal. Nodes of layers with
    different `marks` are no equals.
    """
    found = [one for one, _ in all_repeats(graph, marks) if one is not None]
    return max(found, key=lambda one: len(one.places), default=None)


def why_not(graph: TrainGraph) -> str:
    """Why `find_repeats` gives None, for each list of layers; empty where it does not."""
    found = all_repeats(graph)
    if any(one for one, _ in found):
        return ""
    return "; ".join(why for _, why in found) or f"no list of {LEAST} layers or more with parameters"


def all_repeats(graph: TrainGraph, marks: Mapping[Node, Hashable] | None = None) -> list[tuple[Repeats | None, str]]:
    """For every list of layers by name: the blocks, or why there are none."""
    return [_of_prefix(graph, prefix, marks or {}) for prefix in _prefixes(graph)]


def _prefixes(graph: TrainGraph) -> list[str]:
    """Names of lists of layers that have parameters; not those of lists inside layers."""
    found: dict[str, set[str]] = {}
    for given in graph.inputs:
        parts = given.name.split(".") if given.role is Role.PARAM else []
        place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if place is not None:
            found.setdefault(".".join(parts[:place]), set()).add(parts[place])
    return [prefix for prefix, numbers in found.items() if len(numbers) >= LEAST]


def _of_prefix(graph: TrainGraph, prefix: str, marks: Mapping[Node, Hashable]) -> tuple[Repeats | None, str]:
    layers = _Layers(graph, prefix, marks)
    try:
        ranges = _ranges(layers.kinds())
    except NoRepeatsError as error:
        return None, f"{prefix}: {error}"
    whys: list[str] = []
    for first, period, count in ranges:
        found = _within(layers, first, period, count)
        if isinstance(found, Repeats):
            return found, ""
        whys.append(f"{prefix}: {found}")
    return None, whys[0] if whys else f"{prefix}: no {LEAST} layers in a row are equal"


def _within(layers: _Layers, first: int, period: int, count: int) -> Repeats | NoRepeatsError:
    """Blocks of so many layers; without those at the ends that differ."""
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
    """First layer, layers in a block and number of blocks of runs of blocks that may be equal, the longest first."""
    found: list[tuple[int, int, int]] = []
    for period in range(1, min(_LONGEST, len(kinds) // LEAST) + 1):
        start, best = 0, (0, period, 0)
        for i in range(len(kinds)):
            if i + period >= len(kinds) or kinds[i] != kinds[i + period]:
                best = max(best, (start, period, (i - start) // period + 1), key=lambda one: one[2])
                start = i + 1
        if best[2] >= LEAST:
            found.append(best)
    return sorted(found, key=lambda one: -one[1] * one[2])


class _Layers:
    """What is known of each node before blocks are cut: the layer that it belongs to, where something says so."""

    def __init__(self, graph: TrainGraph, prefix: str, marks: Mapping[Node, Hashable]) -> None:
        self.graph, self.prefix, self.marks = graph, prefix, marks
        self.nodes = list(graph.graph.nodes)
        self.pattern = re.compile(re.escape(prefix) + r"\.(\d+)(?=[./]|$)")
        self.inputs: dict[Node, Input] = {node: given for given, node in graph.placeholders()}
        self.layer: dict[Node, int] = {}
        for node, given in self.inputs.items():
            self._say(node, self.number(given.owner or given.name))
        self._forward()
        self.lists = ListCalls(graph.graph)
        self._behind()

    def names(self, name: str) -> str:
        """A name without the number of its layer."""
        return self.pattern.sub(f"{self.prefix}.*", name)

    def number(self, name: str) -> int | None:
        """The layer that a name is of."""
        found = self.pattern.match(name)
        return int(found[1]) if found else None

    def _say(self, node: Node, layer: int | None) -> None:
        if layer is not None:
            self.layer[node] = layer

    def _forward(self) -> None:
        for node in self.nodes:
            if node.op == "call_function":
                self._say(node, self.number(meta.module_path(node)))
        for node, given in self.inputs.items():
            readers = {self.layer.get(user) for user in node.users}
            if given.role is Role.CONST and len(readers) == 1:
                self._say(node, readers.pop())

    def _behind(self) -> None:
        """Backward, clipping and optimizer: by the parameters, the gradients and the inner values that a node reads."""
        inner = {n: i for n, i in self.layer.items() if n in self.inputs or self._stays(n, i)}
        settled: dict[Node, int] = {}
        for node in self.nodes:
            known = node in self.layer and node.target is not GRAD_READY
            if node.op != "call_function" or known or node in self.lists.made:
                continue
            given, source = operands(node), self.lists.source(node)
            read = {inner[n] for n in given if n in inner}
            behind = {settled[n] for n in given if n in settled}
            if node.target is GRAD_READY:
                seen = {self.number(str(node.args[1]))}
            elif source is not None:
                seen = {self.layer.get(source)}
            else:
                seen = read or behind
            if len(seen) == 1:
                self._say(node, next(iter(seen)))
            if node not in self.layer:
                continue
            after = not meta.is_backward(node) and (read or all(n in settled for n in given))
            if node.target is GRAD_READY or source is not None or after:
                settled[node] = self.layer[node]

    def _stays(self, node: Node, layer: int) -> bool:
        """True where the forward reads a value in its own layer alone: what leaves it says nothing of its readers."""
        forward = [u for u in node.users if u.op == "call_function" and not meta.is_backward(u)]
        return bool(forward) and all(self.layer.get(u) == layer for u in forward)

    def kinds(self) -> list[object]:
        """Of each layer, in order: what can be equal to another's."""
        found: dict[int, list[object]] = {}
        for node in self.nodes:
            if node in self.layer:
                found.setdefault(self.layer[node], []).append(self.shape(node))
        numbers = sorted(found)
        if numbers != list(range(len(numbers))):
            raise NoRepeatsError("layers are missing")
        return [hash(tuple(found[i])) for i in numbers]

    def shape(self, node: Node) -> tuple[object, ...]:
        """What a node has in common with its equals."""
        return *shape_of(node, self.inputs.get(node), self.names, self.lists), self.marks.get(node)


class _Cut:
    """Assigns all nodes to blocks. Nodes of one block follow each other in each sweep over the layers: the forward, the
    backward, the loops of an optimizer. What stands between those of which the block is known is divided alike.
    """

    def __init__(self, layers: _Layers, first: int, period: int, count: int) -> None:
        self.layers, self.count = layers, count
        numbers = {node: (i - first) // period for node, i in layers.layer.items()}
        self.known = {node: b for node, b in numbers.items() if 0 <= b < count}
        self.found: list[list[Node]] = [[] for _ in range(count)]

    def blocks(self) -> list[list[Node]]:
        """The nodes of each block in the order of the graph."""
        for node in self.layers.inputs:
            if node in self.known:
                self.found[self.known[node]].append(node)
        calls = [node for node in self.layers.nodes if node.op == "call_function"]
        done = 0
        sweeps = [*self._sweeps(calls), None]
        for sweep, after in pairwise(sweeps):
            assert sweep is not None, "the last is the end"
            end = after[0][1] if after else len(calls)
            done = self._sweep(calls, sweep, done, end)
        return self.found

    def _sweeps(self, calls: Sequence[Node]) -> Iterator[list[tuple[int, int, int]]]:
        """Each sweep as its (block, start, end), in the order of the graph."""
        groups: list[tuple[int, int, int]] = []
        before: bool | None = None
        for i, node in enumerate(calls):
            block, phase = self.known.get(node), meta.is_backward(node)
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
        """Divides what is between the groups of a sweep; gives where its last block ends."""
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
            self.found[block] += calls[first - head : last + tail]
        return sweep[-1][2] + tail
