"""The time of products that are fused with a collective: blocks are copied between GPUs while others are multiplied."""

from __future__ import annotations

from typing import cast

from torch.fx import Node

from .._torch import is_op
from ..graph.meta import one_tensor
from ..graph.nodes import node_at
from ..graph.op_kinds import GATHER_AND_MULTIPLY, MULTIPLY_AND_SCATTER
from ..hardware.hardware import Hardware


def is_fused(node: Node) -> bool:
    """True for a product that is fused with a collective."""
    return not is_op(node.target) and (node.target in GATHER_AND_MULTIPLY or node.target in MULTIPLY_AND_SCATTER)


def fused_flops(node: Node) -> float:
    """Multiplications and additions of its products."""
    parts = cast(int, node.args[-2])
    return sum(2.0 * parts * rows * inner * columns for rows, inner, columns in _blocks(node))


def fused_us(node: Node, hardware: Hardware) -> float:
    """Microseconds of the algorithm in torch's `_symmetric_memory`: a block for each rank, on two streams.

    A rank copies a block over the innermost links while it multiplies another, so that each step takes the longer of
    both; first and last nothing hides. A block is as large as what one rank holds, and multiplies as fast as a product
    of that shape alone. Copies go by the copy engines, and slow no product. A barrier is a kernel and a hop.
    """
    parts, blocks, operand = cast(int, node.args[-2]), _blocks(node), one_tensor(node_at(node, 0))
    name = str(operand.dtype).removeprefix("torch.")
    multiply = sum(hardware.matmul_us(1, rows, columns, inner, name) for rows, inner, columns in blocks)
    links, gathers = hardware.levels[0], node.target in GATHER_AND_MULTIPLY
    sent = operand.size_bytes if gathers else one_tensor(node).size_bytes
    barrier = hardware.launch_us + links.latency_us
    send = hardware.launch_us + sent / links.bytes_per_us
    if gathers:  # into shared memory, and out of it for what is gathered
        around = 3 * barrier + 2 * hardware.bytes_us(2 * sent)
    else:  # each block has its barriers; what all ranks sent is added up
        send += 2 * barrier
        around = 2 * barrier + hardware.bytes_us((parts + 1) * sent)
    return around + (parts - 1) * max(multiply, send) + multiply


def _blocks(node: Node) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of the products of one block."""
    operand = one_tensor(node_at(node, 0))
    if node.target in GATHER_AND_MULTIPLY:
        factors = [_shape(weight) for weight in cast(list[Node], node.args[1])]
        return [(operand.numel // operand.shape[-1], *factor) for factor in factors]
    return [(operand.shape[0] // cast(int, node.args[-2]), *_shape(node_at(node, 1)))]


def _shape(node: Node) -> tuple[int, int]:
    return cast("tuple[int, int]", one_tensor(node).shape)
