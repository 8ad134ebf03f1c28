"""Rows that a step counts while it runs (`ROWS_OF`), whose number is a symbol: what has to hold of graphs with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..errors import CaptureError, PlanError
from ..layout import Layout
from ..sizes import SizeGuards, counted_in
from . import meta
from .nodes import add_node, is_collective, operands
from .op_kinds import COUNTS_ROWS
from .ops import BEHIND

aten = torch.ops.aten
_NEW: dict[Any, Any] = {
    aten.zeros.default: aten.new_zeros.default, aten.ones.default: aten.new_ones.default,
    aten.full.default: aten.new_full.default, aten.empty.memory_format: aten.new_empty.default,
}  # fmt: skip
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def counts_rows(graph: Graph) -> Node | None:
    """Return the first node that counts rows, if there is one."""
    return next((n for op in COUNTS_ROWS for n in graph.find_nodes(op="call_function", target=op)), None)


def tie_numbers(graph: Graph) -> None:
    """Make each call that takes a number of counted rows an operation on what follows from these rows: a pass may put
    other calls before the count.
    """
    if counts_rows(graph) is None:
        return
    rows: dict[str, Node] = {}
    counted: dict[Node, set[str]] = {}
    for node in list(graph.nodes):
        counted[node] = {symbol for operand in node.all_input_nodes for symbol in counted[operand]}
        read = [*dict.fromkeys(counted_in((node.args, [*node.kwargs.values()])))]
        if node.target in _SQUEEZES:
            _refuse_squeezed(node)
        if node.target in COUNTS_ROWS:
            for symbol in read:
                rows[symbol] = node
            counted[node] |= {*read}
        for symbol in (symbol for symbol in read if symbol not in counted[node]):
            if symbol not in rows or not _tied(node, rows[symbol]):
                raise CaptureError(
                    f"{node.target} takes the number of rows that the step counts, and not the rows",
                    "numbers of rows in operations on what was picked by them",
                    "count with `mask.sum()`, or make the tensor of the picked rows, as `rows.new_zeros(...)`",
                    meta.source_line(node),
                )
            counted[node.prev] = counted[node] = counted[node] | {symbol}


def _refuse_squeezed(node: Node) -> None:
    """Raise CaptureError where one row would lose its dim."""
    shape, dims = meta.one_tensor(operands(node)[0]).shape, node.args[1] if len(node.args) > 1 else range(-99, 99)
    dims = {dims} if isinstance(dims, int) else {*cast(Sequence[int], dims)}
    if any(counted_in(size) and {dim, dim - len(shape)} & dims for dim, size in enumerate(shape)):
        raise CaptureError(
            "squeeze() of rows that the step counts while it runs: a single row would lose its dim",
            "squeeze(dim) of other dims",
            "name the dims of size 1, as `mask.nonzero().squeeze(1)`",
            meta.source_line(node),
        )


def _tied(node: Node, rows: Node) -> bool:
    """Whether `node` is an operation on `rows`, too, from now on."""
    if form := _NEW.get(node.target):
        meta_of = meta.one_tensor(node)
        node.target, node.args = form, (rows, *node.args)
        node.kwargs = {"dtype": meta_of.dtype, "device": torch.device(meta_of.device)}
        return True
    if not isinstance(node.args[0], Node):
        return False
    with node.graph.inserting_before(node):
        later = add_node(node.graph, "call_function", BEHIND, (node.args[0], rows), {}, None)
    meta.copy_origin(node, later)
    meta.recompute_value(later)
    node.args = (later, *node.args[1:])
    return True


def refuse_assumptions(assumed: Sequence[str], graph: Graph) -> None:
    """Raise CaptureError for what torch `assumed` of numbers of rows that a step counts."""
    if assumed:
        raise CaptureError(
            f"the step combines rows that it counts while it runs as if {assumed[0]}",
            "rows that were picked by one mask, or with other shapes that do not depend on their number",
            "compute the mask once, and pick all of them by it; or choose with `torch.where`",
            meta.source_line(cast(Node, counts_rows(graph))),
        )


def refuse_cut(graph: Graph, layouts: Mapping[str, Sequence[Layout]], is_in_blocks: bool) -> None:
    """Raise PlanError where rows that a step counts are cut among ranks, or counted in micro-batches or stages."""
    if (first := counts_rows(graph)) is None:
        return
    if is_in_blocks:
        raise _refused("in micro-batches or stages", first)
    for node in graph.nodes:
        for tensor, layout in zip(meta.tensors(node), layouts.get(node.name, ()), strict=False):
            if tensor is not None and any(counted_in(n) for n, by in zip(tensor.shape, layout.dims, strict=True) if by):
                raise _refused("and ranks share them out", node)


def refuse_sent(graph: Graph) -> None:
    """Raise PlanError where rows that a step counts are sent to other ranks."""
    for node in filter(is_collective, graph.nodes if counts_rows(graph) is not None else ()):
        tensors = [tensor.shape for n in (node, *operands(node)) for tensor in meta.tensors(n) if tensor is not None]
        if counted_in((tensors, node.args)):
            raise _refused("and ranks exchange them", node)


def refuse_assumed(guards: SizeGuards, graph: Graph) -> None:
    """Raise PlanError if what was compared of numbers of rows ends otherwise for some of them."""
    text = guards.not_for_all()
    first = counts_rows(graph)
    if text and first is not None:
        raise _refused(f"and the program needs {text} of their number", first)


def _refused(which: str, node: Node) -> PlanError:
    return PlanError(
        f"the step counts rows while it runs {which}",
        'rows that each rank picks of its own batch: semantics="per_rank" without micro-batches, stages and '
        "parallelism of tensors",
        "use one of these, or a static form: `torch.where(mask, value, 0)` instead of `value[mask]`",
        meta.source_line(node),
    )
