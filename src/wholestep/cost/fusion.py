"""Kernels that a compiler makes of a program: neighbouring ops on elements become one, which moves its ends alone.

What fuses follows Inductor's scheduler. Ops on elements, copies, and reductions of rows join the kernel of what they
read, unless a product, an attention or another op with a kernel of its own lies between: the *stage* of an op counts
those on its longest path. A sum of columns, or of all elements, has to be complete before its readers start, and shares
no kernel with a sum of rows. Kernels end at collectives and waits, as the regions of `backend="inductor"` do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.loop import bodies_of
from ..graph.nodes import is_collective, is_mutating, is_wait, operands
from ..graph.op_kinds import READS_A_PART, arithmetic, is_list_op, is_pointwise, packet_name, streams
from ..graph.storage import shared_operand
from ..hardware.device import Work
from ..hardware.hardware import Hardware
from .compute import is_free, work

_ROWS = frozenset({
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm",
    "native_group_norm_backward", "nll_loss_forward", "nll_loss_backward", "mse_loss", "mse_loss_backward",
    "cross_entropy_loss", "argmax", "argmin", "gelu_backward",
})  # fmt: skip
LOSS = frozenset({"_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"})
"""Of the mean cross entropy of rows of logits, and of its backward."""
_BOTH = frozenset({"native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"})
"""Their gradients of weights are sums of columns, for which another kernel reads the first two operands."""
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "var_mean", "logsumexp", "linalg_vector_norm", "prod"})
_COPIES = frozenset({
    "_to_copy", "clone", "copy_", "cat", "stack", "constant_pad_nd", "embedding", "index_select", "gather", "index",
    "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "scalar_tensor", "arange", "tril", "triu",
    "slice_backward", "select_backward",
})  # fmt: skip


@dataclass(eq=False)
class Kernel:
    """Ops that run as one, in the order of the program."""

    stage: int
    region: int
    nodes: list[Node] = field(default_factory=list[Node])
    reduces: str = ""


def kernels(graph: Graph, alone: Collection[str] = ()) -> list[Kernel]:
    """The kernels of a program once it is compiled, in the order in which they end; collectives are none. Ops with a
    name in `alone` have kernels of their own.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(_Fusion(alone).kernels(graph), key=lambda kernel: place[kernel.nodes[-1]])


def compiled_us(graph: Graph, hardware: Hardware, alone: Collection[str] = ()) -> dict[Node, float]:
    """Microseconds of each op of a compiled program. A kernel of several ops counts where its last op stands."""
    times: dict[Node, float] = dict.fromkeys(graph.nodes, 0.0)
    for kernel in kernels(graph, alone):
        times[kernel.nodes[-1]] = hardware.work_us(kernel_work(kernel))
    for body in {body: None for node in graph.nodes for body in bodies_of(node)[1]}:
        times |= compiled_us(body, hardware, alone)
    return times


def kernel_work(kernel: Kernel) -> Work:
    """What a kernel moves: what it reads of others and what others read of it. One op has its own work."""
    nodes = kernel.nodes
    if len(nodes) == 1:
        op_work = work(nodes[0])
        assert op_work is not None, f"%{nodes[0].name} has a kernel"
        return op_work
    inside, read_bytes = set(nodes), dict[Node, int]()
    moved = sum(meta.size_bytes(node) for node in nodes if is_mutating(node) or _is_read_elsewhere(node, inside))
    for node in nodes:
        for i, operand in enumerate(operands(node)):
            source = source_of(operand)
            if source not in inside:
                size = min(meta.size_bytes(operand), meta.size_bytes(source))
                part = min(size, meta.size_bytes(node)) if i == 0 and node.target in READS_A_PART else size
                read_bytes[source] = max(read_bytes.get(source, 0), part)
        if packet_name(node.target) in _BOTH:
            moved += sum(map(meta.size_bytes, operands(node)[:2]))
    tensor = next((m for m in meta.tensors(nodes[-1]) if m is not None), None)
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor else "float32"
    return Work(sum(read_bytes.values()) + moved, dtype=dtype, streams=all(streams(node.target) for node in nodes))


class _Fusion:
    def __init__(self, alone: Collection[str]) -> None:
        self.alone = alone
        self.stages: dict[Node, int] = {}
        self.of: dict[Node, Kernel] = {}

    def kernels(self, graph: Graph) -> list[Kernel]:
        region = 0
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if is_collective(node) or is_wait(node):
                region += 1
                self.stages[node] = self._stage(node) + 1
            elif work(node) is not None:
                self._join(node, region)
        return list(dict.fromkeys(self.of.values()))

    def _stage(self, node: Node) -> int:
        return max((self.stages.get(source_of(operand), 0) for operand in operands(node)), default=0)

    def _join(self, node: Node, region: int) -> None:
        stage, joins = self._stage(node), self._fuses(node)
        kernel = Kernel(stage, region)
        if joins:
            sources = {source_of(operand) for operand in operands(node)}
            near = [self.of[s] for s in sources if s in self.of and self._fuses(s)]
            kernel.reduces = _reduces(node)
            for other in dict.fromkeys(near):
                alike = not other.reduces or not kernel.reduces or other.reduces == kernel.reduces
                if alike and (other.stage, other.region) == (stage, region):
                    kernel.nodes += other.nodes
                    kernel.reduces = kernel.reduces or other.reduces
        kernel.nodes.append(node)
        self.of |= dict.fromkeys(kernel.nodes, kernel)
        self.stages[node] = stage + (not joins or _reduces(node) == "columns")

    def _fuses(self, node: Node) -> bool:
        return packet_name(node.target) not in self.alone and _fuses(node)


def _fuses(node: Node) -> bool:
    """True for an op that is compiled together with others. Random ones draw what eager mode draws, apart."""
    target = node.target
    if not _torch.is_op(target) or is_list_op(target) or arithmetic(target) is not None:
        return False
    name = packet_name(target)
    fusible = is_pointwise(target) or name in _ROWS | _REDUCTIONS | _COPIES
    return fusible and torch.Tag.nondeterministic_seeded not in target.tags


def _reduces(node: Node) -> str:
    """What a reduction adds up: "rows", over the last dims, or "columns", also of all elements; else nothing."""
    name = packet_name(node.target)
    if name in _ROWS:
        return "rows"
    tensor = meta.tensor(operands(node)[0]) if name in _REDUCTIONS else None
    if tensor is None:
        return ""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not tensor.shape or not isinstance(dims, (list, tuple, int)):
        return "columns"
    rank = len(tensor.shape)
    reduced = {int(str(d)) % rank for d in ([dims] if isinstance(dims, int) else dims)}
    return "rows" if rank - 1 in reduced and len(reduced) < rank else "columns"


def _is_read_elsewhere(node: Node, inside: set[Node]) -> bool:
    """True where something outside of a kernel reads what it makes, also as a view."""
    for user in node.users:
        if user.op == "output" or user not in inside:
            if user.op == "output" or not (_torch.is_getitem(user.target) or is_free(user)):
                return True
            if _is_read_elsewhere(user, inside):
                return True
    return False


def source_of(node: Node) -> Node:
    """What a view, or one of several results, is a part of."""
    while node.op == "call_function":
        picks = _torch.is_getitem(node.target)
        source = node.all_input_nodes[0] if picks else shared_operand(node) if is_free(node) else None
        if source is None:
            return node
        node = source
    return node
