"""Products next to collectives along an axis of tensor parallelism that one op can compute, and that op.

One op can do an all-gather and the products that read its rows, or one product and the reduce-scatter of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor
from ..graph.nodes import add_call, is_wait, node_at
from ..partition import rank_ops
from .fused_products import multiply_gathered, multiply_gathered_scaled, scatter_product, scatter_scaled_product

aten, funcol = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = funcol.all_gather_into_tensor.default, funcol.reduce_scatter_tensor.default
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_COPIES = (aten.clone.default, rank_ops.contiguous)
_PRODUCTS = (aten.mm.default, aten._scaled_mm.default)
_TURNED = [1, 0, 2]
_LEFT_SCALE, _RIGHT_SCALE = 2, 3
"""The positions of scales among the arguments of a product in float8."""


@dataclass
class Writer:
    """Appends calls to a graph, which read `at` of a node; `appended` are those calls."""

    graph: Graph
    at: Callable[[Node], Node] = lambda node: node
    appended: list[Node] = field(default_factory=list[Node])

    def call(self, target: Any, args: tuple[Any, ...], result: TensorMeta, origin: Node) -> Node:
        """Append a call with one tensor output and the origin of `origin`."""
        name = str(getattr(target, "__name__", target)).split(".")[0]
        node = add_call(self.graph, target, args, result, origin, name)
        meta.set_strided(node, False)
        self.appended.append(node)
        return node

    def view(self, node: Node, shape: Sequence[Any], origin: Node) -> Node:
        """Append a view of `node`. A size that differs between ranks is given as -1."""
        viewed = one_tensor(node)
        sizes = [viewed.numel // -prod(shape) if n == -1 else n for n in shape]
        return self.call(aten.view.default, (node, list(shape)), contiguous(sizes, viewed), origin)


def _is_fusible(node: Node) -> bool:
    """True for a product of two matrices that torch can fuse: in float8, with one scale for all of a factor."""
    scales = [node_at(node, i) for i in (_LEFT_SCALE, _RIGHT_SCALE)] if node.target is _PRODUCTS[1] else []
    return node.target in _PRODUCTS and not node.kwargs and all(one_tensor(scale).numel == 1 for scale in scales)


@dataclass(frozen=True)
class GatheredRows:
    """An all-gather, and products that read its rows.

    Args:
        collective, wait: of the gather.
        products: in the order of the program.
        dtype: of the rows that they read: 8 bits are sent as bytes.
        is_read: something else reads what is gathered.
    """

    collective: Node
    wait: Node
    products: tuple[Node, ...]
    dtype: torch.dtype
    is_read: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is replaced, in an order in which it can run."""
        return (self.collective, self.wait, *self.products)

    def fused(self, writer: Writer) -> dict[Node, Node]:
        """Append one op; return what replaces the products, and what is gathered if it is read."""
        ranks, axis = self.collective.args[1:]
        source, full = writer.at(node_at(self.collective, 0)), one_tensor(self.collective)
        first, rows = self.products[0], one_tensor(node_at(self.collective, 0)).shape[0]
        factors = [writer.at(node_at(product, 1)) for product in self.products]
        shapes = [(*full.shape[:-1], one_tensor(factor).shape[1]) for factor in factors]
        results = [contiguous(shape, one_tensor(product)) for shape, product in zip(shapes, self.products, strict=True)]
        target, args = multiply_gathered, (source, factors)
        if first.target is aten._scaled_mm.default:
            source = writer.call(
                aten.view.dtype, (source, self.dtype), replace(one_tensor(source), dtype=self.dtype), self.collective
            )
            scales = [writer.at(node_at(product, _RIGHT_SCALE)) for product in self.products]
            target = multiply_gathered_scaled
            args = (source, factors, writer.at(node_at(first, _LEFT_SCALE)), scales, *_options(first))
        sent = replace(full, dtype=self.dtype)
        op = writer.call(target, (*args, ranks, axis), sent, self.collective)
        meta.set_tensors(op, [sent, *results])
        parts = [writer.call(_torch.GETITEM, (op, i), part, op) for i, part in enumerate([sent, *results])]
        replaced = dict[Node, Node]()
        if self.is_read:
            replaced[self.wait] = parts[0]
            if sent.dtype != full.dtype:
                replaced[self.wait] = writer.call(aten.view.dtype, (parts[0], full.dtype), full, self.collective)
        for product, part in zip(self.products, parts[1:], strict=True):
            shaped = writer.view(part, (ranks, rows, prod(full.shape[1:-1]), -1), product)
            replaced[product] = self._in_order(writer, product, shaped)
        return replaced

    def _in_order(self, writer: Writer, product: Node, shaped: Node) -> Node:
        """Rows in the order of the product: first by the inner dims of what is gathered, then by rank."""
        computed, order = one_tensor(shaped), (2, 0, 1, 3)
        if computed.shape[2] > 1:
            shape, stride = (tuple(sizes[i] for i in order) for sizes in (computed.shape, computed.stride))
            turned = replace(computed, shape=shape, stride=stride)
            shaped = writer.call(aten.permute.default, (shaped, list(order)), turned, product)
            shaped = writer.call(aten.cat.default, ([shaped], 2), contiguous(shape, computed), product)
        return writer.view(shaped, (one_tensor(product).shape[0], -1), product)


@dataclass(frozen=True)
class ScatteredProduct:
    """A reduce-scatter of one product.

    Args:
        collective, wait: of the reduce-scatter.
        chain: the product, and views and copies of it that keep the last dim, up to the operand of the reduce-scatter.
    """

    collective: Node
    wait: Node
    chain: tuple[Node, ...]
    is_read = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is replaced, in an order in which it can run."""
        return (*self.chain, self.collective, self.wait)

    def fused(self, writer: Writer) -> dict[Node, Node]:
        """Append one op; return what replaces the wait."""
        result, product = one_tensor(self.collective), self.chain[0]
        turns = any(node.target is aten.permute.default for node in self.chain)
        inner = prod(result.shape[1:-1]) if turns else 1
        factors = [writer.at(node_at(product, place)) for place in (0, 1)]
        target, args = scatter_product, (*factors, inner)
        if product.target is aten._scaled_mm.default:
            scales = [writer.at(node_at(product, place)) for place in (_LEFT_SCALE, _RIGHT_SCALE)]
            target, args = scatter_scaled_product, (*factors, *scales, *_options(product), inner)
        shape = result.numel // (inner * result.shape[-1]), inner, result.shape[-1]
        piece = writer.call(target, (*args, *self.collective.args[2:]), contiguous(shape, result), self.collective)
        return {self.wait: writer.view(piece, result.shape, self.wait)}


Site = GatheredRows | ScatteredProduct


def _options(product: Node) -> tuple[torch.dtype, bool]:
    """The dtype of a product in float8, and whether it adds up in fewer bits."""
    return one_tensor(product).dtype, len(product.args) > 7 and bool(product.args[7])


def sites(graph: Graph, axes: Sequence[str]) -> Iterator[Site]:
    """The places along `axes` that one op can compute, in the order of the program."""
    for node in graph.nodes:
        if is_wait(node) and node_at(node, 0).op == "call_function" and node_at(node, 0).args[-1] in axes:
            site = _gathered_rows(node) or _scattered_product(node)
            if site is not None:
                yield site


def _gathered_rows(wait: Node) -> GatheredRows | None:
    gather = node_at(wait, 0)
    if gather.target is not GATHER or len(gather.users) > 1 or len(one_tensor(wait).shape) not in (2, 3):
        return None
    dtypes, other_readers = dict[Node, torch.dtype](), list[Node]()
    _find_products(wait, False, dtypes, other_readers)
    if not dtypes or len(set(dtypes.values())) > 1:
        return None
    order = {node: i for i, node in enumerate(wait.graph.nodes)} if len(dtypes) > 1 else {}
    first, *later = products = tuple(sorted(dtypes, key=lambda node: order.get(node, 0)))
    alike = all((product.target, product.args[4:]) == (first.target, first.args[4:]) for product in later)
    scales = {node_at(product, _LEFT_SCALE) for product in products if product.target is aten._scaled_mm.default}
    if not alike or len(scales) > 1 or not all(map(_is_fusible, products)):
        return None
    return GatheredRows(gather, wait, products, dtypes[first], bool(other_readers))


def _find_products(node: Node, moved: bool, dtypes: dict[Node, torch.dtype], other_readers: list[Node]) -> None:
    """Find what reads `node`: products of all its rows, through views, and others. `moved`: the gathered dim is the
    second.
    """
    have = one_tensor(node)
    flat = len(have.shape) == 2
    for user in node.users:
        result = meta.tensor(user) if user.op == "call_function" and not rank_ops.is_ranked(user) else None
        if result is not None and flat and user.target in _PRODUCTS and user.args[0] is node is not user.args[1]:
            dtypes[user] = have.dtype
        elif result is None:
            other_readers.append(user)
        elif user.target is aten.view.dtype and result.dtype.itemsize == have.dtype.itemsize:
            _find_products(user, moved, dtypes, other_readers)
        elif user.target is aten.permute.default and not (moved or flat) and user.args[1] == _TURNED:
            _find_products(user, True, dtypes, other_readers)
        elif (
            user.target in _VIEWS and moved and not flat and result.shape == (prod(have.shape[:-1]), have.shape[-1])
        ) or (user.target is rank_ops.contiguous and (flat or moved)):
            _find_products(user, moved, dtypes, other_readers)
        else:
            other_readers.append(user)


def _scattered_product(wait: Node) -> ScatteredProduct | None:
    scatter = node_at(wait, 0)
    if scatter.target is not SCATTER or len(scatter.users) > 1 or scatter.args[1] != "sum":
        return None
    node, chain = node_at(scatter, 0), list[Node]()
    while node.op == "call_function" and len(node.users) == 1 and not rank_ops.is_ranked(node):
        chain.insert(0, node)
        if node.target in _PRODUCTS:
            turns = [cast("list[int]", n.args[1]) for n in chain if n.target is aten.permute.default]
            return (
                ScatteredProduct(scatter, wait, tuple(chain))
                if _is_fusible(node) and turns in ([], [_TURNED])
                else None
            )
        operand, result = node.args[0] if node.args else None, meta.tensor(node)
        if node.target not in (*_VIEWS, *_COPIES, aten.permute.default) or result is None:
            return None
        if not isinstance(operand, Node) or one_tensor(operand).shape[-1:] != result.shape[-1:]:
            return None
        node = operand
    return None
