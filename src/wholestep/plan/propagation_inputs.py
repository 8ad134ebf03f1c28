"""The inputs of propagation, the nodes of a step that depend on the batch, and the readers of a partial value."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Input, Role, TrainGraph
from ..graph.nodes import node_at, operands, reached
from ..graph.op_kinds import CHEAP, PRODUCTS, VIEWS, is_pointwise
from ..graph.ops import COMPLETE, GRAD_READY
from ..hardware.hardware import Hardware
from ..hardware.presets import one_host
from ..layout import Layout
from ..mesh import Mesh
from ..rules.find_rule import find_rule
from ..rules.registry import is_random
from .strategy import Pins


@dataclass(frozen=True)
class PropagationInputs:
    """The inputs of propagation.

    `rest`: storage layouts. `grad_targets`: the layout to which each parameter's gradient is reduced; with `scatter`
    as soon as it is complete. Along `per_rank` axes each rank runs the step on its own batch; along `storage` axes
    parameters are sharded in storage only. `pins` fixes layouts along some axes. `hardware` prices resharding.
    """

    graph: TrainGraph
    mesh: Mesh
    axes: tuple[str, ...]
    rest: Mapping[str, Layout]
    grad_targets: Mapping[str, Layout]
    reduce_op: str
    scatter: bool = False
    per_rank: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    pins: Pins = field(default_factory=Pins)
    hardware: Hardware = field(default_factory=one_host)


def moving(graph: TrainGraph, besides: Container[str] = ()) -> frozenset[Node]:
    """Nodes that depend on the batch, on the inputs `besides`, or on random numbers; not on complete gradients."""
    dependent = {node for spec, node in graph.placeholders() if spec.role is Role.BATCH or spec.name in besides}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in COMPLETE:
            continue
        if not dependent.isdisjoint(node.all_input_nodes) or is_random(node):
            dependent.add(node)
    return frozenset(dependent)


def gradient_homes(graph: TrainGraph, targets: Mapping[str, Layout]) -> dict[Node, Layout]:
    """By term of a parameter's gradient, of the same shape: the layout to which the gradient is reduced."""
    homes = dict[Node, Layout]()
    for node in reversed(graph.graph.nodes):
        if node.target is GRAD_READY:
            homes[node_at(node, 0)] = targets[str(node.args[1])]
        elif node in homes and node.target in (torch.ops.aten._to_copy.default, torch.ops.aten.add.Tensor):
            shape = meta.one_tensor(node).shape
            for operand in node.all_input_nodes:
                if (tensor := meta.tensor(operand)) is not None and tensor.shape == shape:
                    homes[operand] = homes[node]
    return homes


def incomplete_gradients(graph: TrainGraph) -> frozenset[Node]:
    """Terms of a parameter's gradient before it is complete for one backward: nothing else is computed of them."""
    terms, passing = set[Node](), {*CHEAP, torch.ops.aten.add.Tensor}
    for node in reversed(graph.graph.nodes):
        ends = [u.target is GRAD_READY or (u in terms and u.target in passing) for u in node.users]
        if node.op == "call_function" and ends and all(ends):
            terms.add(node)
    return frozenset(terms)


def rounding(graph: TrainGraph, moves: Container[Node]) -> frozenset[Node]:
    """Matrix products in 16 bits in an update, and the 16-bit sums that they depend on.

    The order of such a sum changes its result, and iterations (Newton-Schulz in Muon) do not contract the error: on
    sharded operands the update would differ from that of one device by far more than the gradients do.
    """
    tensors = {node: meta.tensors(node) for node in graph.graph.nodes if node not in moves}
    in_16_bits = {n for n, of in tensors.items() if any(m and m.dtype in (torch.bfloat16, torch.float16) for m in of)}
    products = (n for n in graph.graph.nodes if n.target in PRODUCTS)
    seen = reached(products, where=lambda node: node in in_16_bits and node.target not in COMPLETE)
    coarse = {n for n in seen if not (_torch.is_getitem(n.target) or n.target in CHEAP or is_pointwise(n.target))}
    siblings = [n for n in seen - coarse if any(u in coarse for operand in n.all_input_nodes for u in operand.users)]
    return frozenset(coarse.union(siblings))  # they read the same operand, which is gathered once


def per_rank_buffers(graph: TrainGraph) -> frozenset[str]:
    """Buffers that differ between ranks with different batches: their updates depend on the batch.

    A step counter, the scale of a GradScaler and an average of parameters stay the same on all ranks.
    """
    buffers = {i.name for i in graph.inputs if i.role is Role.BUFFER}
    changed = [(o.target, node) for o, node in graph.results() if o.kind == "update" and o.target in buffers]
    differing = frozenset[str]()
    while changed:
        batch_dependent = moving(graph, differing)
        updated = frozenset(name for name, node in changed if node in batch_dependent)
        if updated == differing:
            break
        differing = updated
    return differing


def refuse_varying_updates(graph: TrainGraph, layouts: Mapping[Node, Sequence[Layout]]) -> None:
    """Raise PlanError if a parameter, its state or gradient is updated with a value that differs between ranks."""
    roles = {spec.name: spec.role for spec in graph.inputs}
    for output, node in graph.results():
        is_shared = roles.get(output.target, Role.STATE) in (Role.PARAM, Role.STATE, Role.GRAD)
        if output.kind == "update" and is_shared and layouts[node][0].varies:
            raise PlanError(
                f"{output.target!r} would be updated with a value that differs between ranks",
                "updates that depend only on gradients of autograd, parameters, their state and numbers",
                "average the value over ranks, or let autograd compute the gradient (loss.backward())",
                meta.source_line(node),
            )


def varying(spec: Input, axes: Sequence[str], mesh: Mesh) -> Layout:
    """The layout of a value that differs between ranks along `axes`."""
    return Layout(((),) * len(spec.meta.shape), varies=tuple(sorted(a for a in axes if mesh.axis_size(a) > 1)))


def reads(user: Node, node: Node) -> bool:
    """True if `user` reads values of `node`, not only its shape."""
    rule = find_rule(user) if user.op == "call_function" else None
    return rule is None or any(n is node and i not in rule.by_shape for i, n in enumerate(operands(user)))


def shrinks(node: Node) -> bool:
    """True if all readers of `node` are linear in it, and their results together are smaller than `node`.

    Example: the expert weights chosen for tokens are far larger than their products with the tokens.
    """
    tensor, total = meta.tensor(node), 0
    for user, view in _readers(node):
        if not _passes(user, view):
            return False
        total += sum(output.numel for output in meta.tensors(user) if output)
    return tensor is not None and 0 < total < tensor.numel


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """The nodes that read the values of `node`, each with the view that it reads."""
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS:
            yield from _readers(user)
        else:
            yield user, node


def _passes(user: Node, view: Node) -> bool:
    """True if `user` passes partial values of `view` alone through."""
    rule = find_rule(user) if user.op == "call_function" else None
    if rule is None:
        return False
    places = frozenset(i for i, n in enumerate(operands(user)) if n is view)
    return any(through.operands == places for group in rule.groups for through in group.partial)
