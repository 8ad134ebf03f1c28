"""What loops accumulate. The first operand of these functions is None for the first piece."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..graph.op_kinds import FREE, SUMS_OF_PIECES, priced_like
from ..graph.storage import shares


@priced_like(SUMS_OF_PIECES)
@shares("view")
def add_up(total: Tensor | None, value: Tensor, op: str, owned: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Return `total` with `value` added, or the larger (`max`) or smaller (`min`) of both, in the memory of `total`.
    `owned`: nothing else uses the memory of `value`. `dtype` of a total that is wider than `value`.
    """
    if total is None:
        return value.to(dtype) if dtype else value if owned else value.clone()
    if op in ("max", "min"):
        return (torch.maximum if op == "max" else torch.minimum)(total, value, out=total)
    return total.add_(value)


@shares("view")
def put_piece(full: Tensor | None, value: Tensor, pieces: int, piece: int) -> Tensor:
    """Return `full` with `value` as its rows number `piece` of as many."""
    rows = value.shape[0]
    if full is None:
        full = value.new_empty((pieces * rows, *value.shape[1:]))
    full[piece * rows : (piece + 1) * rows] = value
    return full


@shares("all")
def keep_piece(values: list[Tensor] | None, value: Tensor, owned: bool) -> list[Tensor]:
    """Return `values` with `value` of one more piece, for a later loop."""
    return [*(values or ()), value if owned else value.clone()]


ACCUMULATORS = (add_up, put_piece, keep_piece)


@priced_like(FREE)
@shares("view")
def kept_piece(values: list[Tensor], piece: int) -> Tensor:
    """Return the value of one piece that `keep_piece` has kept."""
    return values[piece]


def accumulate_early(graph: Graph, also: Callable[[Node], bool] = lambda _: False) -> None:
    """Let a body accumulate each value as soon as it is there, so that it need not be held until the piece ends; with
    nodes in front of an accumulator that `also` is true of.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}

    def raised(node: Node) -> None:
        for operand in node.all_input_nodes:
            if also(operand):
                raised(operand)
        computed = [operand for operand in node.all_input_nodes if operand.op != "placeholder"]
        if computed:
            last = max(computed, key=place.__getitem__)
            last.append(node)
            place[node] = place[last]

    for node in reversed(list(graph.nodes)):
        if node.target in ACCUMULATORS:
            raised(node)
