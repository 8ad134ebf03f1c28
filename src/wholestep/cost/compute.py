"""The work of one node of a local graph: arithmetic of products, convolutions and attention; bytes of other ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta, op_kinds
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.loop import loop_of, with_bodies
from ..graph.messages import STARTED
from ..graph.nodes import is_collective, is_mutating, is_wait, operands
from ..graph.op_kinds import BUCKET_COPIES, FREE, PRODUCTS, READS_A_PART, WRITES_A_PART, arithmetic, streams
from ..graph.region import region_of
from ..graph.storage import copies_at_need, shared_operand
from ..hardware.device import Work
from ..hardware.hardware import Hardware
from ..layout import Extent, OfOwner, resolve
from ..precision import StepPrecision
from .fused import fused_flops, is_fused

aten = torch.ops.aten


def node_us(node: Node, hardware: Hardware) -> float:
    """Microseconds of one call node on one rank: at least a launch, or a view. `getitem` is free. Of a loop: without
    collectives.
    """
    if loop := loop_of(node):
        inner = (call for call in loop.body.nodes if not is_collective(call) and not is_wait(call))
        return loop.pieces * sum(node_us(call, hardware) for call in inner)
    if region := region_of(node):
        return region.us
    node_work = work(node)
    if node_work is not None:
        return hardware.work_us(node_work)
    return hardware.view_us if node.op == "call_function" and not _torch.is_getitem(node.target) else 0.0


def alone_us(graph: Graph, hardware: Hardware) -> dict[Node, float]:
    """Microseconds of each op of a program as a kernel of its own; 0 for collectives and waits."""
    calls = (node for node, _ in with_bodies(graph) if node.op == "call_function" and not loop_of(node))
    return {node: 0.0 if is_collective(node) or is_wait(node) else node_us(node, hardware) for node in calls}


def work(node: Node) -> Work | None:
    """The work of one call node; None for a node that computes nothing and moves nothing."""
    if node.op != "call_function" or is_free(node):
        return None
    tensor = next((m for m in meta.tensors(node) if m is not None), None)
    dtype = _name(tensor.dtype) if tensor else "float32"
    product, operation = _matmul(node), arithmetic(node.target)
    if product is not None and tensor is not None:
        b, m, n, k = product
        factor_dtype = _multiplied(node)
        each = b * ((m * k + k * n) * factor_dtype.itemsize + m * n * tensor.dtype.itemsize)
        moved = _moved(node) if _is_grouped(node) else each
        return Work(moved, flops(node), _name(factor_dtype), product)
    attends, backward = (operation.kind == "attention", operation.backward) if operation else (False, False)
    causal, dtype = attends and _is_causal(node), _name(_multiplied(node)) if attends else dtype
    call = Work(
        _moved(node), flops(node), dtype, None, _attention(node, backward) if attends else None, causal, backward,
        streams(node.target), node.target in BUCKET_COPIES,
    )  # fmt: skip
    if call.attention is not None and not causal and isinstance(keys := node.args[0], OfOwner):  # by rank
        *sizes, count, width = call.attention
        largest = max(map(int, keys.numbers))
        return replace(call, flops=call.flops * largest / max(count, 1), attention=(*sizes, largest, width))
    if not causal or node.target not in op_kinds.IN_PLACE_OF:
        return call
    starts, lengths = (number if isinstance(number, (list, tuple)) else [number] for number in node.args[:2])
    return most_of_ranks(call, cast(Any, starts), cast(Any, lengths), cast(Any, node.kwargs.get("keys")))


def _moved(node: Node) -> int:
    """Bytes read plus written."""
    arguments = operands(node)
    if node.target in WRITES_A_PART:
        return 2 * sum(map(meta.size_bytes, {*arguments[1:]}))
    if node.target in READS_A_PART:
        return sum(map(meta.size_bytes, {*arguments[1:]})) + 2 * meta.size_bytes(node)
    return sum(map(meta.size_bytes, {*arguments})) + meta.size_bytes(node)


def is_free(node: Node) -> bool:
    """True for a node that computes and moves nothing: an item of a list, a view by the schema of its op, or a copy at
    need of what lies in memory as it should already, as `cost.memory` has it.
    """
    if _torch.is_getitem(node.target) or node.target in STARTED:
        return True
    shares = (_torch.is_op(node.target) or copies_at_need(node.target)) and not is_mutating(node)
    return node.target in FREE or (shares and shared_operand(node) is not None)


def flops(node: Node) -> float:
    """Multiplications and additions of a product, a convolution or attention, whose masked ones count; 0 for other ops.
    Of causal attention of a piece of the queries: the mean of the ranks.
    """
    if is_fused(node):
        return fused_flops(node)
    operation = arithmetic(node.target)
    if operation is None:
        return 0.0
    if operation.kind == "product":
        product = _matmul(node)
        return 0.0 if not product else _grouped(node)[1] if _is_grouped(node) else 2.0 * prod(product)
    outputs, shapes, backward = meta.tensors(node), _shapes(node), operation.backward
    if operation.kind == "attention" and len(shapes) >= 3:
        batch, length, width = prod(shapes[0][:-2]), shapes[0][-2], shapes[0][-1]
        keys = shapes[1 + backward][-2]  # the first operand of a backward is the gradient of the output
        return 4.0 * batch * length * keys * width * (2.5 if backward else 1.0)
    if operation.kind == "convolution" and len(shapes) >= 2:
        data, weight = (shapes[0], shapes[2]) if backward else (outputs[0].shape if outputs[0] else (), shapes[1])
        return 2.0 * prod(data[:1] + data[2:]) * prod(weight) * (2 if backward else 1)
    return 0.0


def peak_us(
    graph: Graph, hardware: Hardware, besides: Callable[[Node], object] = lambda _: None
) -> tuple[float, float]:
    """Microseconds of a graph's arithmetic at the peak rate of the hardware: without recomputed nodes, and of them.
    `besides`: nodes whose bodies do not count.
    """
    once = again = 0.0
    for node, times in with_bodies(graph, besides):
        count = times * flops(node) if node.op == "call_function" and meta.runs_on_first(node) else 0.0
        if not count or not node.all_input_nodes:
            continue
        us = count / hardware.peak_flops_per_us(_name(_multiplied(node)))
        runs_again = meta.is_recomputed(node) or (meta.is_backward(node) and bool(meta.module_path(node)))
        once, again = (once, again + us) if runs_again else (once + us, again)
    return once, again


def precision_of(step: TrainGraph | LocalGraph) -> StepPrecision:
    """The dtypes of weights, of what products multiply, and of optimizer state; those of a hundredth are left out."""
    stored = {role: Counter[str]() for role in (Role.PARAM, Role.STATE)}
    count = size = 0
    for graph_input in step.inputs:
        if graph_input.role in stored:
            stored[graph_input.role][_name(graph_input.meta.dtype)] += graph_input.meta.size_bytes
            size += (1 + graph_input.trainable) * graph_input.meta.size_bytes
            count += prod(graph_input.meta.shape) if graph_input.role is Role.PARAM else 0
    weights, state = map(_mostly, stored.values())
    products = (node for node, _ in with_bodies(step.graph) if node.all_input_nodes and arithmetic(node.target))
    compute = Counter(_name(_multiplied(node)) for node in products)
    return StepPrecision(weights, _mostly(compute) or weights, state, size / max(count, 1))


def _mostly(counted: Counter[str]) -> str:
    least = sum(counted.values()) / 100
    return ", ".join(name for name, count in counted.most_common() if count > least)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _multiplied(node: Node) -> torch.dtype:
    """The dtype of the numbers that a product multiplies, or a convolution, or attention."""
    return next(s.dtype for n in operands(node) if (s := meta.tensor(n)) is not None)


def _matmul(node: Node) -> tuple[int, int, int, int] | None:
    if node.target not in PRODUCTS:
        return None
    outputs, shapes = meta.tensors(node), _shapes(node)
    if outputs[0] is None or len(shapes) < 2:
        return None
    if node.target is aten.linear.default:
        return 1, prod(outputs[0].shape[:-1]), outputs[0].shape[-1], shapes[0][-1]
    if _is_grouped(node):
        return _grouped(node)[0]
    first, second = shapes[:2] if node.target is aten._scaled_mm.default else shapes[-2:]
    return prod(first[:-2]), first[-2], second[-1], first[-1]


def _is_grouped(node: Node) -> bool:
    return op_kinds.IN_PLACE_OF.get(node.target, node.target) is aten._grouped_mm.default


_CUT = {(2, 3): 0, (3, 2): 1, (2, 2): 2}  # by the dims of both operands: which of (m, n, k) the offsets cut


def _grouped(node: Node) -> tuple[tuple[int, int, int, int], float]:
    """(groups, m, n, k) of one product for each group, and the operations of all. Where groups end is not known before
    a step runs: they are priced as if of one size, rounded up to whole rows. Operations are exact for any sizes.
    """
    (first, second), product = _shapes(node)[:2], meta.one_tensor(node).shape
    groups = next((shape[0] for shape in (first, second, product) if len(shape) == 3), 1)
    sizes, cut = [first[-2], second[-1], first[-1]], _CUT.get((len(first), len(second)))
    if cut is not None:
        sizes[cut] = -(-sizes[cut] // op_kinds.SHARES_OF_ROWS.get(node.target, 1))
    count = 2.0 * prod(sizes) * (groups if cut is None else 1)
    if cut is not None:
        groups = max(min(groups, sizes[cut]), 1)
        sizes[cut] = -(-sizes[cut] // groups)
    m, n, k = sizes
    return (groups, m, n, k), count


def _attention(node: Node, backward: bool) -> tuple[int, int, int, int, int] | None:
    """(batch, heads, queries, keys, width). The first operand of a backward is the gradient of the output."""
    shapes, first = _shapes(node), int(backward)
    if len(shapes) < first + 3 or len(shapes[first]) != 4:
        return None
    (batch, heads, queries, width), keys = shapes[first], shapes[first + 1][-2]
    return batch, heads, queries, keys, width


def _is_causal(node: Node) -> bool:
    op = op_kinds.IN_PLACE_OF.get(node.target, node.target)
    names = ["start", "length"] * (op is not node.target) + [a.name for a in _torch.schema_of(op).arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return arguments.get("is_causal") is True


_RankNumber = int | Extent | OfOwner


def most_of_ranks(
    call: Work, starts: Sequence[_RankNumber], lengths: Sequence[_RankNumber], seen: _RankNumber | None = None
) -> Work:
    """Causal attention `call` on ranges of the queries, as the rank has it that does most: others wait for it. What is
    masked counts as computed, as in a call on all queries. `seen`: to how many keys at most.
    """
    assert call.attention is not None, "pieces of the queries have four dims"
    batch, heads, _, keys, width = call.attention
    ranges = (tuple(map(_of_hint, numbers)) for numbers in (starts, lengths))
    queries, before, after = _most_attended(*ranges, _of_hint(keys if seen is None else seen))
    count = 4.0 * batch * heads * queries * (2 * before + after) * width * (2.5 if call.backward else 1.0)
    sizes = batch, heads, queries, round(before + after), width
    return replace(call, flops=count, attention=sizes, keys_before=before)


def _of_hint(number: _RankNumber) -> _RankNumber:
    """A number of a rank for the sizes of the capture: prices compare no symbols."""
    if isinstance(number, OfOwner):
        return OfOwner(number.axis, tuple(map(int, number.numbers)))
    return replace(number, size=int(number.size)) if isinstance(number, Extent) else int(number)


@lru_cache(maxsize=1 << 12)
def _most_attended(
    starts: tuple[_RankNumber, ...], lengths: tuple[_RankNumber, ...], seen: _RankNumber
) -> tuple[int, float, float]:
    """The queries of the rank that attends to most keys; how many keys are before the range of one, and in it, on
    average.
    """
    numbers = (*starts, *lengths)
    axes = {axis: parts for number in numbers if isinstance(number, Extent) for axis, parts in number.axes}
    axes |= {number.axis: len(number.numbers) for number in numbers if isinstance(number, OfOwner)}
    most = (0.0, 0, 0.0, 0.0)
    for places in product(*map(range, axes.values())):
        coordinate = dict(zip(axes, places, strict=True))
        ranges = list(zip(resolve(starts, coordinate), resolve(lengths, coordinate), strict=True))
        queries, keys = sum(length for _, length in ranges), resolve(seen, coordinate)
        before = sum(length * min(start, keys) for start, length in ranges)
        after = sum(length * max(min(length, keys - start), 0) for start, length in ranges)
        if queries:
            most = max(most, (2.0 * before + after, queries, before / queries, after / queries))
    return most[1:]


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [s.shape for n in operands(node) if (s := meta.tensor(n)) is not None]
