"""Functionalizes a traced graph: replaces each in-place op by its functional form.

Tensors that share memory form a family: a base and its views. A write gives the base a new value (the inverse of each
view applied to the written tensor) and increments the version of the family; a view that is read later is recomputed
from the base. The graph is rewritten in one walk, without a second trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.counted_rows import counts_rows
from ..graph.nodes import add_node, arguments_of, copy_graph, is_mutating, node_at, written
from ..graph.sizes_in_graph import without_size_nodes
from .strides import count_from_tensors, insert_call, is_view

aten = torch.ops.aten

Put = Callable[[Callable[..., Node], Node, Node, Node], Node]
"""(call, view, source, new) -> `source` with the elements of `view` replaced by `new`; `call` inserts a node."""


def _unchanged(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    return new


def _reshaped(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    shape = list(meta.value(source).shape)
    try:
        return call(aten.view.default, new, shape)
    except RuntimeError:  # the strides of `new` do not allow a view
        return call(aten.view.default, call(aten.clone.default, new, memory_format=torch.contiguous_format), shape)


def _permuted_back(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    dims: Any = view.args[1]
    order = [dim % len(dims) for dim in dims]
    return call(aten.permute.default, new, [order.index(dim) for dim in range(len(order))])


def _undone_by(target: Any) -> Put:
    return lambda call, view, source, new: call(target, new, *view.args[1:])


def _scattered(target: Any) -> Put:
    return lambda call, view, source, new: call(target, source, new, *view.args[1:], **view.kwargs)


def _section(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    split, index = cast(tuple[Node, int], view.args)
    dim = int(cast(Any, split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)))
    lengths = [part.shape[dim] for part in meta.value(split)]
    start = sum(lengths[:index])
    return call(aten.slice_scatter.default, source, new, dim, start, start + lengths[index])


def _row(call: Callable[..., Node], view: Node, source: Node, new: Node) -> Node:
    unbind = cast(Node, view.args[0])
    dim = unbind.kwargs.get("dim", unbind.args[1] if len(unbind.args) > 1 else 0)
    return call(aten.select_scatter.default, source, new, dim, view.args[1])


VIEWS: dict[Any, Put] = {
    aten.detach.default: _unchanged,
    aten.alias.default: _unchanged,
    aten.lift_fresh.default: _unchanged,
    aten.view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.unsqueeze.default: _undone_by(aten.squeeze.dim),
    aten.t.default: _undone_by(aten.t.default),
    aten.transpose.int: _undone_by(aten.transpose.int),
    aten.permute.default: _permuted_back,
    aten.select.int: _scattered(aten.select_scatter.default),
    aten.slice.Tensor: _scattered(aten.slice_scatter.default),
    aten.diagonal.default: _scattered(aten.diagonal_scatter.default),
    aten.as_strided.default: _scattered(aten.as_strided_scatter.default),
}
"""Inverses of ops that return one view."""

PIECES: dict[Any, Put] = {aten.split.Tensor: _section, aten.split_with_sizes.default: _section, aten.unbind.int: _row}
"""Inverses of ops that return several views; `view` is the getitem node."""


class _UnsupportedError(Exception):
    """A write that this module does not support."""


def functionalize(
    module: GraphModule, fakes: Sequence[torch.Tensor], symbols: _torch.Symbols | None = None
) -> GraphModule:
    """Return the graph without mutation; torch's functionalization (a second trace) handles unsupported writes."""
    _fill_in_memory_order(module.graph)
    rewritten = _torch.graph_module(module, copy_graph(module.graph))
    count_from_tensors(rewritten.graph)  # a new value may have another memory layout
    try:
        _Walk(rewritten).run()
    except _UnsupportedError as error:
        if (first := counts_rows(rewritten.graph)) is not None:
            problem = f"the step counts rows while it runs, and writes in place: {error}"
            raise CaptureError(problem, "other writes", "compute a new tensor", meta.source_line(first)) from None
        rewritten = _torch.functionalize(module, [fake.detach() for fake in fakes])
        if symbols is not None:
            without_size_nodes(rewritten.graph, symbols)
    return rewritten


def _fill_in_memory_order(graph: Graph) -> None:
    """Permute operands of `bernoulli_`: eager fills memory in order, the functional form fills row by row."""
    for node in [n for n in graph.nodes if n.target is aten.bernoulli_.float]:
        filled = node_at(node, 0)
        layout = meta.tensor(filled)
        if layout is not None and not layout.is_contiguous:
            stride = layout.stride
            order = sorted(range(len(stride)), key=lambda dim: -stride[dim])
            permuted = insert_call(node, aten.permute.default, filled, order)
            node.replace_all_uses_with(filled)
            node.args = (permuted, *node.args[1:])
            meta.set_value(node, meta.value(permuted))


def _required_defaults(node: Node, form: Any) -> tuple[Any, ...]:
    """Return default arguments of the in-place op that are required by its functional form."""
    functional = {a.name: a for a in _torch.schema_of(form).arguments}
    return tuple(
        a.default_value
        for a in _torch.schema_of(node.target).arguments[len(node.args) :]
        if not a.kwarg_only and a.name not in node.kwargs and not functional[a.name].has_default_value()
    )


def _is_dense(layout: meta.TensorMeta) -> bool:
    """True if a tensor is row-major with its dims in some order."""
    rows = sorted(zip(layout.stride, layout.shape, strict=True), reverse=True)
    return all(stride == row for (stride, _), row in zip(rows, meta.row_major([size for _, size in rows]), strict=True))


@dataclass
class _Walk:
    """The rewrite of one graph; the fields describe the families at the node being visited."""

    module: GraphModule
    source: dict[Node, Node] = field(default_factory=dict[Node, Node])  # view -> the tensor it views
    same: dict[Node, Node] = field(default_factory=dict[Node, Node])  # node -> an earlier node of the same tensor
    returned: dict[Node, list[Node]] = field(default_factory=dict[Node, list[Node]])  # op -> its operands it returns
    version: dict[Node, int] = field(default_factory=dict[Node, int])  # base -> writes to its family
    value: dict[Node, tuple[int, Node]] = field(default_factory=dict[Node, tuple[int, Node]])  # (version, new node)

    def run(self) -> None:
        for node in list(self.module.graph.nodes):
            self.before = self.origin = node
            if self.version and any(self.current(operand) is not operand for operand in node.all_input_nodes):
                _torch.set_operands(node, *torch.fx.map_arg((node.args, node.kwargs), self.current))
            if _torch.is_getitem(node.target):
                listed, index = cast(tuple[Node, int], node.args)
                if listed in self.returned:
                    self.same[node] = self.returned[listed][index]
                elif listed in self.source:
                    self._view(node, listed)
            elif is_mutating(node):
                self._visit_write(node)
            elif is_view(node) and node.all_input_nodes:  # of a number, as the conjugate of 1j, it is no view
                self._view(node, node.all_input_nodes[0])

    def _visit_write(self, node: Node) -> None:
        """Replace the op by its functional form, and record new values of the written tensors."""
        op = cast(_torch.OpOverload[..., Any], node.target)
        form = _torch.functional_form(op)
        if _torch.is_library_op(op):
            bases = list[Node]()
            torch.fx.map_arg((node.args, node.kwargs), lambda leaf: bases.append(self._base(leaf)))
            if form is None or any(bases.count(self._base(target)) > 1 for target in written(node)):
                problem = (
                    f"the step calls {op}, which writes into a list, an optional tensor or memory that arguments share"
                )
                needed = "writes into tensors apart from other arguments, and returns of all of these or of none"
                raise CaptureError(problem, needed, "register one that returns new tensors", meta.source_line(node))
        schema = _torch.schema_of(op)
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        operands = arguments_of(node)
        fresh = sum(r.alias_info is None for r in schema.returns)
        outputs = fresh + len(writes)
        if form is None or len(_torch.schema_of(form).returns) != outputs or _torch.changes_shape(op):
            raise _UnsupportedError(str(op))
        node.args += _required_defaults(node, form)
        node.kwargs = {k: v for k, v in node.kwargs.items() if not any(a.is_out and a.name == k for a in writes)}
        node.target = form
        meta.set_value(node, self._result(node))
        self.before = node.next
        if fresh == 1 and outputs > 1:  # the in-place op returns one tensor, the functional form several
            first = self._item(node, 0)
            node.replace_all_uses_with(first, delete_user_cb=lambda user: user is not first)
        written_now = [operands[a.name] for a in writes] if fresh == 0 else []  # is returned: later reads see these
        if len(written_now) > 1:
            self.returned[node] = written_now
        elif written_now and isinstance(written_now[0], Node):
            self.same[node] = self._eldest(written_now[0])
        for position, argument in enumerate(writes, start=fresh):
            tensors = operands.get(argument.name)
            read_only = _torch.is_fused_optimizer(form) and argument.name == "grads" and not operands.get("grad_scale")
            if tensors is not None and not read_only:
                self._write_all(tensors, self._item(node, position) if outputs > 1 else node)

    def _write_all(self, tensors: Node | Sequence[Node], new: Node) -> None:
        if isinstance(tensors, Node):
            return self._write(tensors, new)
        if len({self._eldest(tensor) for tensor in tensors}) < len(tensors):
            problem, needed = f"the step calls {new.target} with one tensor twice in a list", "each tensor once"
            raise CaptureError(problem, needed, "change it once, or in a loop", meta.source_line(new))
        for index, tensor in enumerate(tensors):
            self._write(tensor, self._item(new, index))
        return None

    def current(self, node: Node) -> Node:
        seen, newest = self.value.get(node, (0, node))
        version = self.version.get(self._base(node), 0)
        if seen == version:
            return newest
        if node in self.same:
            return self.current(self.same[node])
        newest = self.call(node.target, self.current(self.source[node]), *node.args[1:], **node.kwargs)
        self._keep(node, newest, version)
        return newest

    def _base(self, node: Node) -> Node:
        while (older := self.same.get(node) or self.source.get(node)) is not None:
            node = older
        return node

    def _view(self, node: Node, source: Node) -> None:
        self.source[node] = source
        self.value[node] = self.version.get(self._base(node), 0), node

    def _keep(self, node: Node, new: Node, version: int) -> bool:
        """Use `made` as the value of `node` in this version, if its memory layout is the same."""
        if new is not node and meta.tensor(node) == meta.tensor(new):
            self.value[node], self.same[new] = (version, new), node
        return self.value.get(node, (0, node))[0] == version

    def _write(self, node: Node, new: Node) -> None:
        """Set `node` to `new`, and update the tensors that it is a view of."""
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
                raise _UnsupportedError(str(view.target))
            source = self._eldest(self.source[view])
            new = put(self.call, node, self.current(source), new)
            node = source
            changed.append((node, new))
        changed[-1] = node, self._as_written(node, changed[-1][1])
        self.version[node] = self.version.get(node, 0) + 1
        is_kept = [self._keep(member, value, self.version[node]) for member, value in changed]
        if not is_kept[-1]:
            raise _UnsupportedError(f"{node} with other strides")

    def _as_written(self, node: Node, new: Node) -> Node:
        """`new` in the layout of the tensor that is written: kernels need it, and some functional forms return rows."""
        layout, new_layout = meta.tensor(node), meta.tensor(new)
        if layout is None or new_layout is None or layout == new_layout or not _is_dense(layout):
            return new
        order = sorted(range(len(layout.shape)), key=lambda dim: (-layout.stride[dim], dim))
        rows = self.call(aten.permute.default, new, order)
        rows = self.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, rows, [order.index(dim) for dim in range(len(order))])

    def _eldest(self, node: Node) -> Node:
        while node in self.same:
            node = self.same[node]
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.module.graph.inserting_before(self.before):
            node = add_node(self.module.graph, "call_function", target, args, kwargs, None)
        meta.copy_origin(self.origin, node)
        meta.set_value(node, self._result(node))
        return node

    def _item(self, node: Node, index: int) -> Node:
        return self.call(_torch.GETITEM, node, index)

    def _result(self, node: Node) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._value)
        return _torch.fake_result(node.target, args, kwargs)

    def _value(self, node: Node) -> Any:
        return getattr(self.module, str(node.target)) if node.op == "get_attr" else meta.value(node)
