"""Turns a raw trace into a TrainGraph: functional, without redundant nodes, with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.counted_rows import tie_numbers
from ..graph.graph import Input, Output, Role, TrainGraph
from ..graph.nodes import drop_dead, is_mutating, name_in_order, node_at, redirect, written
from ..graph.op_kinds import CHEAP, COUNTS_ROWS
from ..graph.ops import GRAD_READY, LOSS
from ..graph.sizes_in_graph import with_plain_sizes
from ..graph.verify import check_train_graph
from .functional import functionalize
from .methods import refuse_collectives
from .strides import count_from_tensors, is_view
from .trace import Traced

aten = torch.ops.aten
_SAME = {op.default for op in (aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy, aten.detach_)}
_WHOLE_VIEWS = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default,
})  # fmt: skip


def normalize(traced: Traced, keep_grads: bool) -> TrainGraph:
    """Return the functional graph of a trace; refuse changes of tensors that are neither state nor argument."""
    _refuse_mutated_constants(traced.module)
    refuse_collectives(traced.module)
    _check_matrices(traced.module.graph)
    module = functionalize(traced.module, traced.stand_ins.fakes, traced.stand_ins.symbols)
    graph = module.graph
    count_from_tensors(graph)
    _drop_input_copies(graph)
    losses = _take_losses(graph)
    _drop_no_ops(graph)
    traced.draws.share(graph)
    _fuse_alpha(graph, traced.stand_ins.inputs)
    _share_views(graph, traced.stand_ins.inputs)
    _cast_gradients_early(graph)
    inputs, constants = _constants_to_inputs(module, traced.stand_ins.inputs)
    outputs = _name_outputs(graph, traced, keep_grads)
    drop_dead(graph, lambda node: node.target in COUNTS_ROWS)  # whose number may be read, if not the rows
    inputs = _drop_unused(graph, inputs, outputs)
    if traced.stand_ins.symbols is not None:
        with_plain_sizes(graph, traced.stand_ins.symbols)
        tie_numbers(graph)
        drop_dead(graph, lambda node: False)
    name_in_order(graph, [source.name for source in inputs])
    names = tuple(node.name for node in losses if node in set(graph.nodes))
    result = TrainGraph(graph, tuple(inputs), tuple(outputs), constants, names)
    check_train_graph(result)
    return result


def _check_matrices(graph: Graph) -> None:
    """Let a decomposition itself raise where torch does after it: for a matrix that is singular, or not positive."""
    for check in graph.find_nodes(op="call_function", target=aten._linalg_check_errors.default):
        decomposed = node_at(node_at(check, 0), 0)
        decomposed.kwargs = {**decomposed.kwargs, "check_errors": True}
        graph.erase_node(check)


def changed_tensors(module: GraphModule, inputs: Sequence[Input]) -> tuple[set[str], list[torch.Tensor]]:
    """Return the names of the inputs, and the constants (tensors that are none), that a trace changes in place."""
    names = dict(zip(module.graph.find_nodes(op="placeholder"), (i.name for i in inputs), strict=True))
    written = [*_written(module)]
    constants = [getattr(module, str(constant.target)) for _, constant in _changed(module, written)]
    return {names[source] for _, source in written if source in names}, constants


def _written(module: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield each node that changes a tensor in place, and the node of that tensor, or of what it is a view of."""
    return ((node, _viewed(at)) for node in filter(is_mutating, module.graph.nodes) for at in written(node))


def _changed(module: GraphModule, written: Iterable[tuple[Node, Node]]) -> Iterator[tuple[Node, Node]]:
    """Yield each node that changes a constant in place, and the constant, also an array's (`from_numpy`)."""
    for node, viewed in written:
        source = node_at(viewed, 0) if viewed.target is aten.lift_fresh_copy.default else viewed
        if source.op == "get_attr" and (
            source is viewed or not getattr(module, str(source.target)).untyped_storage().resizable()
        ):
            yield node, source


def _viewed(node: Node) -> Node:
    """Return the tensor that a node is a view of; itself if of none."""
    while is_view(node) or _torch.is_getitem(node.target):
        node = node.all_input_nodes[0]
    return node


def _refuse_mutated_constants(module: GraphModule) -> None:
    for node, constant in _changed(module, _written(module)):
        raise CaptureError(
            f"the step changes in place a tensor of shape {tuple(getattr(module, str(constant.target)).shape)} "
            "that it closes over",
            "every changed tensor as part of the model or the optimizer, or as an argument",
            "register it as a buffer of the model or pass it to the step",
            meta.source_line(node),
        )


def _drop_input_copies(graph: Graph) -> None:
    """Drop the final copies into mutated inputs that functionalization appends: the outputs are the new values."""
    for node in reversed(list(graph.nodes)):
        if node.target is aten.copy_.default and isinstance(node.args[0], Node) and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _take_losses(graph: Graph) -> list[Node]:
    losses: list[Node] = []
    for node in list(graph.nodes):
        if node.target is LOSS:
            source = node.args[0]
            while source.target in _SAME:
                source = source.args[0]
            losses.append(source)
            graph.erase_node(node)
    return losses


def _drop_no_ops(graph: Graph) -> None:
    """Drop profiler marks, detaches, and operations without an effect."""
    for node in reversed(list(graph.nodes)):
        if _torch.is_op(node.target) and node.target.namespace == "profiler" and not node.users:
            graph.erase_node(node)
    aliases = {node: node_at(node, 0) for node in graph.nodes if node.target in _SAME}
    redirect(aliases)
    for node in reversed(aliases):
        graph.erase_node(node)
    for node in list(graph.nodes):
        if (same := _same_as(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _share_views(graph: Graph, inputs: list[Input]) -> None:
    """Merge equal views and casts of a parameter, views of a result (resharded once), and arithmetic of hypers."""
    first: dict[tuple[object, ...], Node] = {}
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    roles = {n: i.role for n, i in placeholders if i.role in (Role.PARAM, Role.HYPER)}
    for node in list(graph.nodes):
        operand_roles = {roles.get(n) for n in node.all_input_nodes}
        views = operand_roles == {Role.PARAM} and node.target in CHEAP and len(node.all_input_nodes) == 1
        role = Role.PARAM if views else Role.HYPER if operand_roles == {Role.HYPER} else None
        if node.op == "call_function" and (role or node.target in _WHOLE_VIEWS):
            key = (node.target, repr(node.args), repr(node.kwargs), role or _moment(node))
            if key in first:
                node.replace_all_uses_with(first[key])
                graph.erase_node(node)
            else:
                first[key] = node
                if role:
                    roles[node] = role


def _moment(node: Node) -> tuple[object, ...]:
    """When, and in which of a list of equal modules, a view is read: what all of them read stays one for each."""
    parts = meta.module_path(node).split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return meta.is_backward(node), meta.is_recomputed(node), *parts[: last + 1]


def _cast_gradients_early(graph: Graph) -> None:
    """Move casts of gradients to where these are made. Autograd goes backwards: casts of all parameters that stand
    before a forward (`MixedPrecision`) would have their backward, and so every reduction, behind the whole backward.
    """
    for ready in graph.find_nodes(op="call_function", target=GRAD_READY):
        chain: list[Node] = [ready]
        while node_at(chain[-1], 0).target is aten._to_copy.default:
            chain.append(node_at(chain[-1], 0))
        if len(chain) > 1:
            behind = node_at(chain[-1], 0)
            for node in reversed(chain):
                behind.append(node)
                behind = node


def _same_as(node: Node) -> Node | None:
    """Return the earlier node with the same value and memory layout as `node`, if there is one."""
    target = node.target
    if target is aten.t.default and isinstance(node.args[0], Node) and node.args[0].target is aten.t.default:
        return node_at(node.args[0], 0)
    if target is aten.copy.default:
        into, source = meta.tensor(node_at(node, 0)), meta.tensor(node_at(node, 1))
        return node_at(node, 1) if into == source else None
    if target is aten._to_copy.default and node_at(node, 0).target is aten._to_copy.default:
        source, wide, cast_to = node_at(node_at(node, 0), 0), meta.tensor(node_at(node, 0)), meta.tensor(node)
        exact = cast_to and cast_to.dtype.is_floating_point and wide and wide.dtype is torch.float64
        return source if exact and meta.tensor(source) == cast_to else None
    if target in (aten.view.default, aten.expand.default, aten._to_copy.default):
        return node_at(node, 0) if meta.tensor(node_at(node, 0)) == meta.tensor(node) else None
    if _torch.is_getitem(target) and node_at(node, 0).target is aten._native_batch_norm_legit_functional.default:
        norm, place = node_at(node, 0), cast(int, node.args[1])
        return node_at(norm, place) if place >= 3 and not norm.args[5] else None  # statistics that a test leaves
    return None


def _fuse_alpha(graph: Graph, inputs: list[Input]) -> None:
    """Restore `add(..., alpha=-lr)` of foreach SGD: its capturable form multiplies first and rounds twice."""
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    numbers = {node for node, i in placeholders if i.role is Role.HYPER}
    for node in list(graph.nodes):
        scaled = _scaled_list(node, numbers)
        if scaled is not None:
            with graph.inserting_before(node):
                alpha = graph.call_function(aten._local_scalar_dense.default, (node_at(scaled, 1),))
            meta.copy(node, alpha)
            meta.set_value(alpha, None)
            meta.set_tensors(alpha, (None,))
            node.args, node.kwargs = (node.args[0], scaled.args[0]), {"alpha": alpha}


def _scaled_list(node: Node, numbers: set[Node]) -> Node | None:
    """Return the product of a list and a negated hyper, if `node` adds all of it, in order, to another list."""
    if node.target is not aten._foreach_add.List or node.kwargs:
        return None
    added = cast(list[Node], node.args[1])
    scaled = node_at(added[0], 0) if _torch.is_getitem(added[0].target) else None
    if scaled is None or scaled.target is not aten._foreach_mul.Tensor:
        return None
    factor, items = node_at(scaled, 1), [(n.target, n.args) for n in added]
    by_number = factor.target is aten.neg.default and node_at(factor, 0) in numbers
    in_order = items == [(added[0].target, (scaled, i)) for i in range(len(cast(list[Node], scaled.args[0])))]
    return scaled if by_number and in_order else None


def _constants_to_inputs(module: GraphModule, inputs: list[Input]) -> tuple[list[Input], dict[str, torch.Tensor]]:
    """Turn tensors that the step closes over into inputs that are bound once, by reference."""
    graph, constants = module.graph, dict[str, torch.Tensor]()
    by_id: dict[int, Node] = {}
    inputs = list(inputs)
    last = graph.find_nodes(op="placeholder")[-1:]
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = getattr(module, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad:
            raise CaptureError(
                f"the step uses a trainable tensor of shape {tuple(tensor.shape)} "
                "that belongs to none of its modules and optimizers",
                "every module of the step as an argument of it, as model=, or as a variable the function closes over",
                "pass its module to the step, or to wholestep.compile as model=",
                next((line for line in (meta.source_line(n) for n in (node, *node.users)) if line), ""),
            )
        if id(tensor) not in by_id:
            name = f"const.{len(constants)}"
            with graph.inserting_after(last[0]) if last else graph.inserting_before(None):
                placeholder = graph.placeholder(name.replace(".", "_"))
            meta.set_value(placeholder, meta.value(node) if meta.value(node) is not None else tensor)
            by_id[id(tensor)], last = placeholder, [placeholder]
            constants[name] = tensor
            inputs.append(Input(name, Role.CONST, meta.meta_of(tensor)))
        node.replace_all_uses_with(by_id[id(tensor)])
        graph.erase_node(node)
    return inputs, constants


def _name_outputs(graph: Graph, traced: Traced, keep_grads: bool) -> list[Output]:
    """Name the outputs; drop unchanged values, and gradients that neither the step nor the user needs."""
    node = next(iter(reversed(graph.nodes)))
    values: list[Any] = list(node.args[0])
    updated = [*traced.stand_ins.inputs, *traced.created]
    count = len(values) - len(updated)
    placeholders = dict(zip((i.name for i in updated), graph.find_nodes(op="placeholder"), strict=False))
    drop_grads = traced.fresh_grads and not keep_grads
    outputs = [(Output("result", str(i)), value) for i, value in enumerate(values[:count])]
    for i, value in zip(updated, values[count:], strict=True):
        if value is not placeholders.get(i.name) and not (drop_grads and i.role is Role.GRAD):
            number = i.optimizer if i.role is Role.STATE else None
            outputs.append((Output("update", i.name, i.owner, i.key, number), value))
    node.args = (tuple(value for _, value in outputs),)
    return [output for output, _ in outputs]


def _drop_unused(graph: Graph, inputs: list[Input], outputs: list[Output]) -> list[Input]:
    """Drop unused inputs: gradients (also those only overwritten), numbers, constants, and state without an update."""
    updated = {o.target for o in outputs}
    used: list[Input] = []
    for source, node in zip(inputs, graph.find_nodes(op="placeholder"), strict=True):
        overwritten = source.role is Role.GRAD or source.name not in updated
        if source.role in (Role.GRAD, Role.HYPER, Role.STATE, Role.CONST) and not node.users and overwritten:
            graph.erase_node(node)
        else:
            used.append(source)
    return used
