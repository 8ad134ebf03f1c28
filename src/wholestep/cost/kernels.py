"""Microseconds of every op of a program: as each op is a kernel, as a compiler fuses them, or as a stack has them."""

from __future__ import annotations

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.loop import loop_of, with_bodies
from ..graph.nodes import is_collective, is_wait, node_at
from ..graph.op_kinds import SUMS_OF_PIECES, arithmetic, is_list_op
from ..hardware.device import Work
from ..hardware.hardware import Hardware
from .compute import node_us, work
from .fusion import LOSS, compiled_us, source_of
from .kernel_times import KernelTimes
from .stack import Accumulates, Stack, attention_us, started


def op_times(
    graph: Graph, hardware: Hardware, compiled: bool, stack: Stack | None = None, profile: KernelTimes | None = None
) -> dict[Node, float] | None:
    """Microseconds of each op; None where each op is a kernel that `node_us` prices. What `profile` has measured counts
    for ops that are kernels of their own, and scales the others.
    """
    if stack is None and profile is None and not compiled:
        return None
    calls = [node for node, _ in with_bodies(graph) if node.op == "call_function" and not loop_of(node)]
    if compiled or (stack is not None and stack.compiled):
        times = compiled_us(graph, hardware, () if stack is None or stack.fused_loss else LOSS)
    else:
        times = dict.fromkeys(calls, 0.0) | alone_us(graph, hardware)
    generation = 2 if stack is None else stack.flash_attention
    for node in calls if generation != 2 else ():
        node_work = work(node)
        if node_work is not None and node_work.attention is not None:
            times[node] = attention_us(node_work, hardware, generation)
    accumulates = "own" if stack is None else stack.accumulates
    for node in calls:
        if node.target in SUMS_OF_PIECES:
            times[node] = _added_us(node, times[node], hardware, accumulates)
    return times if profile is None else profile.applied(times)


def alone_us(graph: Graph, hardware: Hardware) -> dict[Node, float]:
    """Microseconds of each op that computes, as a kernel of its own."""
    calls = (node for node, _ in with_bodies(graph) if node.op == "call_function" and not loop_of(node))
    return {node: node_us(node, hardware) for node in calls if not (is_collective(node) or is_wait(node))}


def _added_us(node: Node, own_us: float, hardware: Hardware, accumulates: Accumulates) -> float:
    """Microseconds of adding a gradient to its sum, which takes the program `own_us`."""
    value = node_at(node, 1)
    if accumulates == "half":
        tensor = meta.one_tensor(value)
        return hardware.work_us(Work(3 * tensor.size_bytes, dtype=str(tensor.dtype).removeprefix("torch.")))
    in_product = accumulates == "product" and arithmetic(source_of(value).target) is not None
    return 0.0 if in_product else own_us  # the product reads and writes the sum while it multiplies


def starts(graph: Graph, times: dict[Node, float], hardware: Hardware, stack: Stack) -> dict[Node, float]:
    """Microseconds of the host for each op that it starts. Ops of an update are parts of lists, which start at once. A
    collective is one call, without a module around it.
    """
    host_us: dict[Node, float] = {}
    for node, _ in with_bodies(graph):
        if node.op != "call_function" or loop_of(node) or is_wait(node):
            continue
        if is_collective(node):
            host_us[node] = stack.call_us(hardware)
        elif times[node] > 0 and (is_list_op(node.target) or not meta.is_batch_invariant(node)):
            several = started(work(node), stack)
            recomputes = bool(meta.module_path(node))  # a module runs again: its Python too
            host_us[node] = several * stack.host_us(hardware, meta.is_backward(node) and not recomputes)
    return host_us
