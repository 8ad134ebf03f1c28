"""Takes the mutation out of a traced graph: each in-place op becomes the functional op that makes the new value.

Tensors that share memory form a family: a base and the views of it. A write gives the base a new value (the written
view put back into it, view by view) and the family a new version; a member that is read later is made again from the
base. The trace is rewritten in one walk, without running it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import copy_graph, node_at
from .strides import count_from_tensors
from .view_inverses import PIECES, VIEWS, Put

aten = torch.ops.aten


class _UnknownError(Exception):
    """A write that the walk cannot express."""


def functionalize(module: GraphModule, fakes: Sequence[torch.Tensor]) -> GraphModule:
    """The same step without mutation; it is traced again where it writes in a way this module does not know."""
    _fill_in_memory_order(module.graph)
    rewritten = _torch.graph_module(module, copy_graph(module.graph))
    count_from_tensors(rewritten.graph)  # a new value of a tensor may lie elsewhere in memory
    try:
        _Walk(rewritten).run()
    except _UnknownError:
        return _torch.functionalize(module, fakes)
    return rewritten


def _fill_in_memory_order(graph: Graph) -> None:
    """Random numbers land where eager puts them: bernoulli_ fills memory in order, its functional form row by row."""
    for node in [n for n in graph.nodes if n.target is aten.bernoulli_.float]:
        given = node_at(node, 0)
        found = meta.tensor(given)
        if found is not None and not found.is_contiguous:
            stride = found.stride
            order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
            with graph.inserting_before(node):
                permuted = graph.call_function(aten.permute.default, (given, order))
            meta.copy_origin(node, permuted)
            meta.set_value(permuted, meta.value(given).permute(order))
            node.replace_all_uses_with(given)
            node.args = (permuted, *node.args[1:])
            meta.set_value(node, meta.value(permuted))


def _missing(node: Node, form: Any) -> tuple[Any, ...]:
    """Defaults of the in-place op that its functional form lacks."""
    own, others = _torch.schema_of(node.target).arguments, {a.name: a for a in _torch.schema_of(form).arguments}
    return tuple(
        a.default_value
        for a in own[len(node.args) :]
        if not a.kwarg_only and a.name not in node.kwargs and not others[a.name].has_default_value()
    )


@dataclass
class _Walk:
    """The families of a graph as they stand at the node being visited."""

    module: GraphModule
    source: dict[Node, Node] = field(default_factory=dict[Node, Node])  # what a view is a view of
    same: dict[Node, Node] = field(default_factory=dict[Node, Node])  # an older node of the very same tensor
    returned: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])  # tensors that an op hands on
    version: dict[Node, int] = field(default_factory=dict[Node, int])  # writes to the family of a base
    value: dict[Node, tuple[int, Node]] = field(default_factory=dict[Node, tuple[int, Node]])

    def run(self) -> None:
        for node in list(self.module.graph.nodes):
            self.before = self.origin = node
            if self.version:
                node.args = torch.fx.map_arg(node.args, self.current)
                node.kwargs = torch.fx.map_arg(node.kwargs, self.current)
            if _torch.is_getitem(node.target):
                self._visit_item(node)
            elif _torch.is_op(node.target):
                self._visit(node)

    def _visit(self, node: Node) -> None:
        schema = _torch.schema_of(node.target)
        if schema.is_mutable:
            self._visit_write(node)
        elif any(r.alias_info is not None for r in schema.returns):
            self._view(node, node.all_input_nodes[0])

    def _visit_item(self, node: Node) -> None:
        whole, index = cast(tuple[Node, int], node.args)
        if whole in self.returned:
            self.same[node] = self.returned[whole][index]
        elif whole in self.source:
            self._view(node, whole)

    def _visit_write(self, node: Node) -> None:
        """Give the op its functional form, and what it wrote new values."""
        op = cast(_torch.OpOverload[..., Any], node.target)
        form = _torch.functional_form(op)
        schema = _torch.schema_of(op)
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        given: dict[str, Any] = {
            **dict(zip((a.name for a in schema.arguments), node.args, strict=False)),
            **node.kwargs,
        }
        fresh = sum(r.alias_info is None for r in schema.returns)
        outputs = fresh + len(writes)
        if form is None or len(_torch.schema_of(form).returns) != outputs or _torch.changes_shape(op):
            raise _UnknownError(str(op))
        node.args += _missing(node, form)
        node.kwargs = {k: v for k, v in node.kwargs.items() if not any(a.is_out and a.name == k for a in writes)}
        node.target = form
        meta.set_value(node, self._result(node))
        self.before = node.next
        if fresh == 1 and outputs > 1:  # it made one tensor, and now several
            first = self._item(node, 0)
            node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
        if fresh == 0:
            self._hand_on(node, [given[a.name] for a in writes])
        for position, argument in enumerate(writes, start=fresh):
            tensors = given.get(argument.name)
            read_only = _torch.is_fused_optimizer(form) and argument.name == "grads" and not given.get("grad_scale")
            if tensors is not None and not read_only:
                self._write_all(tensors, self._item(node, position) if outputs > 1 else node)

    def _hand_on(self, node: Node, written: list[Any]) -> None:
        """What an op returns is what it wrote, at whatever time that is read."""
        if len(written) > 1:
            self.returned[node] = written
        elif isinstance(written[0], Node):
            self.same[node] = self._eldest(written[0])

    def _write_all(self, tensors: Node | Sequence[Node], new: Node) -> None:
        if isinstance(tensors, Node):
            return self._write(tensors, new)
        for index, tensor in enumerate(tensors):
            self._write(tensor, self._item(new, index))
        return None

    # -- families -------------------------------------------------------------------
    def current(self, node: Node) -> Node:
        """What `node` holds now."""
        seen, made = self.value.get(node, (0, node))
        version = self.version.get(self._base(node), 0)
        if seen == version:
            return made
        if node in self.same:
            return self.current(self.same[node])
        made = self.call(node.target, self.current(self.source[node]), *node.args[1:], **node.kwargs)
        self._keep(node, made, version)
        return made

    def _base(self, node: Node) -> Node:
        while (older := self.same.get(node) or self.source.get(node)) is not None:
            node = older
        return node

    def _view(self, node: Node, source: Node) -> None:
        self.source[node] = source
        self.value[node] = self.version.get(self._base(node), 0), node

    def _keep(self, node: Node, made: Node, version: int) -> bool:
        """Let `made` be `node` in this version, unless it lies in memory in another way."""
        if made is not node and meta.tensor(node) == meta.tensor(made):
            self.value[node], self.same[made] = (version, made), node
        return self.value.get(node, (0, node))[0] == version

    def _write(self, node: Node, new: Node) -> None:
        """`node` becomes `new`, and so do the tensors that it is a view of, each where it shows through."""
        node = self._eldest(node)
        dtype = meta.value(node).dtype
        if meta.value(new).dtype != dtype:
            new = self.call(aten._to_copy.default, new, dtype=dtype)
        changed = [(node, new)]
        while node in self.source:
            source = self._eldest(self.source[node])
            view, pieces = (source, PIECES) if _torch.is_getitem(node.target) else (node, VIEWS)
            put: Put | None = pieces.get(view.target)
            if put is None:
                raise _UnknownError(str(view.target))
            source = self._eldest(self.source[view])
            new = put(self.call, node, self.current(source), new)
            node = source
            changed.append((node, new))
        self.version[node] = self.version.get(node, 0) + 1
        kept = [self._keep(member, made, self.version[node]) for member, made in changed]
        if not kept[-1]:
            raise _UnknownError(f"{node} with other strides")

    def _eldest(self, node: Node) -> Node:
        while node in self.same:
            node = self.same[node]
        return node

    # -- nodes ----------------------------------------------------------------------
    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node beside the one being visited."""
        with self.module.graph.inserting_before(self.before):
            made = self.module.graph.call_function(target, args, kwargs)
        meta.copy_origin(self.origin, made)
        meta.set_value(made, self._result(made))
        return made

    def _item(self, node: Node, index: int) -> Node:
        return self.call(_torch.GETITEM, node, index)

    def _result(self, node: Node) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._value)
        return cast(Any, node.target)(*args, **kwargs)

    def _value(self, node: Node) -> Any:
        return getattr(self.module, str(node.target)) if node.op == "get_attr" else meta.value(node)
