"""Checks that blocks of a captured step are equal: nodes, operands, lists, and the nodes outside that read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import _torch
from ...tuning import TUNING
from .. import meta
from ..graph import Input, Output, Role, TrainGraph
from ..nodes import node_at, operands
from ..op_kinds import is_list_op
from ..ops import GRAD_READY

LEAST = TUNING.fewest_layers
Names = Callable[[str], str]
Place = tuple[int, int]


class ListCalls:
    """The calls of a graph that compute lists entry by entry from lists of the same length.

    `call_of` maps each such call, and each getitem of one of several result lists, to the call. `items` maps each
    getitem of an entry to the call and the place of the entry.
    """

    def __init__(self, graph: Graph) -> None:
        self.call_of: dict[Node, Node] = {}
        self.items: dict[Node, tuple[Node, int]] = {}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if _makes_lists(node):
                self.call_of[node] = node
            elif _torch.is_getitem(node.target) and node_at(node, 0) in self.call_of:
                call = self.call_of[node_at(node, 0)]
                if isinstance(meta.value(node), (list, tuple)):
                    self.call_of[node] = call
                else:
                    self.items[node] = call, cast(int, node.args[1])

    def source(self, node: Node) -> Node | None:
        """The entry of the first operand list that `node`, an entry of a result, follows from; None for other nodes."""
        if node not in self.items:
            return None
        call, index = self.items[node]
        entry = first_list(call)[index]
        return entry if isinstance(entry, Node) else None


def first_list(call: Node) -> Sequence[Any]:
    """The first operand that is a list."""
    return next(cast(Sequence[Any], a) for a in call.args if isinstance(a, (list, tuple)))


def _makes_lists(node: Node) -> bool:
    return (
        is_list_op(node.target)
        and any(isinstance(a, (list, tuple)) and a for a in node.args)
        and bool(meta.tensors(node))
    )


class NoRepeatsError(Exception):
    """Blocks differ; `block` is the number of the one that does, where it is known."""

    def __init__(self, why: str, block: int = -1) -> None:
        super().__init__(why)
        self.block = block


def shape_of(node: Node, program_input: Input | None, names: Names, lists: ListCalls) -> tuple[object, ...]:
    """The op of a node, its arguments except operands, and the metadata of its results: the same for equal nodes.
    `names` removes the number of the layer from a name.
    """
    if program_input is not None:
        name = "" if program_input.role is Role.CONST else names(program_input.name)
        return replace(program_input, name=name, owner=names(program_input.owner)), ()
    if node in lists.items:
        return "item", lists.items[node][0].name, meta.tensors(node)
    args: object = node.args
    args = names(str(node.args[1])) if node.target is GRAD_READY else _plain((args, node.kwargs))
    return node.target, args, meta.tensors(node), names(meta.module_path(node)), meta.is_backward(node)


def _plain(arguments: Any) -> object:
    """Arguments with a placeholder for each node, to compare."""
    return repr(map_arg(arguments, lambda _: None))


def check_blocks(
    graph: TrainGraph, blocks: Sequence[Sequence[Node]], lists: ListCalls, names: Names
) -> dict[Node, Place]:
    """Block and slot of every node of `blocks`. Raises NoRepeatsError: they are not equal, or something reads of them
    what blocks that are left out would not have.
    """
    places = {node: (b, s) for b, block in enumerate(blocks) for s, node in enumerate(block)}
    if len(places) != sum(map(len, blocks)):
        raise NoRepeatsError("a node is in two layers")
    inputs = {node: program_input for program_input, node in graph.placeholders()}
    middle = blocks[1]
    shapes = [shape_of(n, inputs.get(n), names, lists) for n in middle]
    reads = [_reads(n, places, lists) for n in middle]
    for number in (0, len(blocks) - 1, *range(2, len(blocks) - 1)):
        block = blocks[number]
        if len(block) != len(middle):
            raise NoRepeatsError(f"{len(block)} nodes in one layer, {len(middle)} in another", number)
        for node, shape, expected in zip(block, shapes, reads, strict=True):
            if shape_of(node, inputs.get(node), names, lists) != shape:
                raise NoRepeatsError(f"%{node.name} differs from its equals", number)
            if not _same_reads(_reads(node, places, lists), expected, number, len(blocks) - 1):
                raise NoRepeatsError(f"%{node.name} reads something else than its equals", number)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node not in places:
            _check_reader(node, places, len(blocks), lists)
    _check_outputs(graph, places, len(blocks), names)
    return places


def _reads(node: Node, places: dict[Node, Place], lists: ListCalls) -> list[object]:
    """Each operand as (0, slot) in its own block, (-1 or 1, slot) in the one before or behind; any other as itself."""
    own_block = places[node][0]
    reads: list[object] = []
    source = lists.source(node)
    for operand in [*operands(node), *([source] if source is not None else [])]:
        block, slot = places.get(operand, (None, 0))
        reads.append(operand if block is None else (block - own_block, slot))
    return reads


def _same_reads(ours: Sequence[object], theirs: Sequence[object], block: int, last: int) -> bool:
    """Equal reads; the first and the last block read outside where others read a neighbour."""
    if len(ours) != len(theirs):
        return False
    for our, their in zip(ours, theirs, strict=True):
        step = cast(Place, their)[0] if isinstance(their, tuple) else 0
        at_end = (block == 0 and step == -1) or (block == last and step == 1)
        if abs(step) > 1 or (our != their and not (at_end and isinstance(our, Node))):
            return False
    return True


def _check_reader(node: Node, places: dict[Node, Place], count: int, lists: ListCalls) -> None:
    """A node outside reads the first block or the last, or one slot of all blocks in a list."""
    for argument in (*node.args, *node.kwargs.values()):
        entries = cast(Sequence[Any], argument) if isinstance(argument, (list, tuple)) else ()
        if entries:
            _check_list(node, entries, places, count)
        elif isinstance(argument, Node) and places.get(argument, (0, 0))[0] not in (0, count - 1):
            raise NoRepeatsError(f"%{node.name} reads a layer in the middle")
    if lists.call_of.get(node) is node:
        _check_columns(node, places)


def _check_list(node: Node, entries: Sequence[Any], places: dict[Node, Place], count: int) -> None:
    seen: dict[int, list[int]] = {}
    for entry in entries:
        if isinstance(entry, Node) and entry in places:
            block, slot = places[entry]
            seen.setdefault(slot, []).append(block)
    for blocks in seen.values():
        if sorted(blocks) != list(range(count)) and not set(blocks) <= {0, count - 1}:
            raise NoRepeatsError(f"%{node.name} reads a list of some layers only")


def _check_columns(call: Node, places: dict[Node, Place]) -> None:
    """Entries at one place of several lists are in one block, or in none."""
    rows = [places.get(entry, (None, 0))[0] for entry in first_list(call) if isinstance(entry, Node)]
    for argument in (*call.args, *call.kwargs.values()):
        if isinstance(argument, (list, tuple)) and len(cast(Sequence[Any], argument)) == len(rows):
            for entry, block in zip(cast(Sequence[Any], argument), rows, strict=True):
                if isinstance(entry, Node) and places.get(entry, (block, 0))[0] != block:
                    raise NoRepeatsError(f"%{call.name} has lists of different orders")


def _check_outputs(graph: TrainGraph, places: dict[Node, Place], count: int, names: Names) -> None:
    """Equal nodes update equal inputs; results of the step are in the first block or the last."""
    updates: dict[str, dict[int, object]] = {}
    owners = {i.name: places[n][0] for i, n in graph.placeholders() if n in places}
    for output, node in graph.results():
        block = owner_block(output, owners) if output.kind == "update" else None
        where = places.get(node) if isinstance(node, Node) else None
        if block is None:
            if where is not None and where[0] not in (0, count - 1):
                raise NoRepeatsError(f"%{node.name} of a layer in the middle is a result of the step")
            continue
        update = (where[0] - block, where[1]) if where is not None else node
        updates.setdefault(names(output.target), {})[block] = update
    for target, by_block in updates.items():
        if len(by_block) != count or len(set(by_block.values())) > 1:
            raise NoRepeatsError(f"{target} is not updated alike in all layers ({len(graph.inputs)} inputs)")


def owner_block(output: Output, owners: dict[str, int]) -> int | None:
    """The block of an input that is updated, or of the parameter whose state or gradient the step creates."""
    return owners.get(output.target, owners.get(output.owner))
