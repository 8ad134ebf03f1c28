"""Microseconds of kernels that other software has, and of its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch.fx import Graph, Node

from wholestep.cost.compute import alone_us, work
from wholestep.cost.fusion import LOSS, compiled_us, source_of
from wholestep.graph import meta
from wholestep.graph.loop import loop_of, with_bodies
from wholestep.graph.nodes import is_collective, is_wait, node_at
from wholestep.graph.op_kinds import SUMS_OF_PIECES, arithmetic, is_list_op
from wholestep.hardware.device import Work, item_bytes
from wholestep.hardware.hardware import Hardware

Accumulates = Literal["own", "half", "product"]
FLASH = {1: 0.55, 2: 1.0, 3: 1.6}
"""Rates of attention by generation, as shares of the second's. The first reaches 25 to 40 % of an A100's peak, the
second 50 to 73 % (arXiv 2307.08691); the third, and cuDNN's, is 1.5 to 2 times as fast on Hopper (arXiv 2407.08608)."""
_FORWARD_PASSES, _BACKWARD_PASSES = (4.5, 12.0), 6.0
"""Accesses of each score: a fused kernel scales, masks and normalizes (2), dropout reads, writes and keeps a mask of
half the bytes (2.5); else there are a cast, scaling, a mask, softmax and a cast. The backward reads gradients, scores
and mask, and writes gradients, twice."""
_STARTED = 10, 17
"""Ops of such an attention, views and copies included, with that kernel and without."""


def op_times(
    graph: Graph, hardware: Hardware, compiled: bool, fused_loss: bool, flash_attention: int, accumulates: Accumulates
) -> dict[Node, float]:
    """Microseconds of each op, by the fields of a `Stack`."""
    calls = [node for node, _ in with_bodies(graph) if node.op == "call_function" and not loop_of(node)]
    apart = () if fused_loss else LOSS
    times = compiled_us(graph, hardware, apart) if compiled else alone_us(graph, hardware)
    for node in calls if flash_attention != 2 else ():
        node_work = work(node)
        if node_work is not None and node_work.attention is not None:
            times[node] = attention_us(node_work, hardware, flash_attention)
    for node in calls:
        if node.target in SUMS_OF_PIECES:
            times[node] = _added_us(node, times[node], hardware, accumulates)
    return times


def _added_us(node: Node, own_us: float, hardware: Hardware, accumulates: Accumulates) -> float:
    """Microseconds of adding a gradient to its sum, which takes the program `own_us`."""
    value = node_at(node, 1)
    if accumulates == "half":
        tensor = meta.one_tensor(value)
        return hardware.work_us(Work(3 * tensor.size_bytes, dtype=str(tensor.dtype).removeprefix("torch.")))
    in_product = accumulates == "product" and arithmetic(source_of(value).target) is not None
    return 0.0 if in_product else own_us  # the product reads and writes the sum while it multiplies


def starts(
    graph: Graph, times: Mapping[Node, float], flash_attention: int, call_us: float, kernel_us: tuple[float, float]
) -> dict[Node, float]:
    """Microseconds of the host for each op that it starts: `call_us` for a collective, which is one call without a
    module around it, `kernel_us` for a kernel of the forward and of the backward. Ops of an update are parts of lists,
    which start at once.
    """
    host_us: dict[Node, float] = {}
    for node, _ in with_bodies(graph):
        if node.op != "call_function" or loop_of(node) or is_wait(node):
            continue
        if is_collective(node):
            host_us[node] = call_us
        elif times[node] > 0 and (is_list_op(node.target) or not meta.is_batch_invariant(node)):
            recomputes = bool(meta.module_path(node))  # a module runs again: its Python too
            us = kernel_us[meta.is_backward(node) and not recomputes]
            host_us[node] = _started(work(node), flash_attention) * us
    return host_us


def is_softmax_fused(op_work: Work) -> bool:
    """Megatron's kernel takes four heads of a batch at a time (its `FusedScaleMaskSoftmax.is_kernel_available`)."""
    assert op_work.attention is not None, "it is attention"
    return op_work.attention[0] * op_work.attention[1] % 4 == 0


def _started(op_work: Work | None, generation: int) -> int:
    """How many kernels the host starts for an op."""
    if generation or op_work is None or op_work.attention is None:
        return 1
    return _STARTED[not is_softmax_fused(op_work)]


def attention_us(op_work: Work, hardware: Hardware, generation: int) -> float:
    """Attention of a generation; the third needs Hopper, which multiplies in float8. Of 0, scores are written: two
    products and a fused softmax, twice as many products in the backward.
    """
    assert op_work.attention is not None, "it is attention"
    if generation:
        moved = hardware.launch_us + hardware.bytes_us(op_work.moved_bytes)
        newest = 3 if hardware.peak_flops_per_us("float8") > hardware.peak_flops_per_us("bfloat16") else 2
        return max(hardware.work_us(replace(op_work, speed=FLASH[min(generation, newest)])), moved)
    batch, heads, queries, keys, width = op_work.attention
    several = batch * heads
    scores = several * queries * keys * item_bytes(op_work.dtype)
    products = hardware.matmul_us(several, queries, keys, width, op_work.dtype) + hardware.matmul_us(
        several, queries, width, keys, op_work.dtype
    )
    passes = _BACKWARD_PASSES if op_work.backward else _FORWARD_PASSES[not is_softmax_fused(op_work)]
    return products * (2 if op_work.backward else 1) + hardware.bytes_us(passes * scores)
