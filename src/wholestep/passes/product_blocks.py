"""Products next to collectives along an axis of tensor parallelism, and how they are written in blocks.

A gather whose rows a product reads is cut into blocks of each rank's rows: the product of a block needs that block
alone. A reduce-scatter of a product is cut into blocks of columns, which need columns of the weight alone: nothing is
copied to cut them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
_FACTORS: dict[object, tuple[int, int]] = {
    aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten._scaled_mm.default: (0, 1),
}  # fmt: skip
"""The positions of both factors among the arguments of a product of two matrices."""
FUSED_PARTS = 0
"""In place of a number of blocks: product and collective become one op."""
_ALIGNED = 16
"""Elements: blocks are cut at multiples of it where there are as many. Kernels of 8 bits ask for 16 columns."""


def blocks(size: int, parts: int) -> list[tuple[int, int]]:
    """Begin and end of at most `parts` blocks of `size` elements."""
    step = -(-size // parts)
    if size >= parts * _ALIGNED:
        step = -(-step // _ALIGNED) * _ALIGNED
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]


@dataclass
class Writer:
    """Appends calls to a graph, which read `at` of each node that is given. `started` is the number of them after which
    all collectives have started that need nothing that the others wait for.
    """

    graph: Graph
    at: Callable[[Node], Node] = lambda node: node
    made: list[Node] = field(default_factory=list[Node])
    started: int = 0

    def call(self, target: Any, args: tuple[Any, ...], made: TensorMeta, like: Node, **kwargs: Any) -> Node:
        """Append a call with one tensor output and the origin of `like`."""
        name = str(getattr(target, "__name__", target)).split(".")[0].removesuffix("_tensor").removesuffix("_into")
        node = add_call(self.graph, target, args, made, like, name)
        node.kwargs = kwargs
        meta.set_strided(node, False)
        self.made.append(node)
        return node

    def wait(self, sent: Node) -> Node:
        """Append the wait for a collective."""
        return self.call(funcol.wait_tensor.default, (sent,), one_tensor(sent), sent)

    def multiply(self, product: Node, rows: int, columns: int, given: Mapping[int, Node]) -> Node:
        """Append `product` with other arguments, by position."""
        own = enumerate(product.args)
        args = [given[i] if i in given else self.at(a) if isinstance(a, Node) else a for i, a in own]
        made = contiguous((rows, columns), one_tensor(product))
        return self.call(product.target, tuple(args), made, product, **product.kwargs)


def factor(product: Node, place: int) -> Node:
    """The left (0) or right (1) factor of a product."""
    return node_at(product, _FACTORS[product.target][place])


def is_product(node: Node) -> bool:
    """True for a product of two matrices that can be cut into blocks."""
    return node.target in _FACTORS


_LEFT_SCALE, _RIGHT_SCALE = 2, 3
"""The positions of scales among the arguments of a product in float8."""


def scale(product: Node, place: int) -> Node | None:
    """The scales of rows or columns of a product in float8; None if one number is for all, or for other dtypes."""
    given = node_at(product, place) if product.target is aten._scaled_mm.default else None
    return given if given is not None and one_tensor(given).numel > 1 else None


def _fuses(product: Node) -> bool:
    """True if products of its kind can be fused with a collective."""
    has_scales = scale(product, _LEFT_SCALE) or scale(product, _RIGHT_SCALE)
    return product.target is aten.mm.default or (product.target is aten._scaled_mm.default and not has_scales)


@dataclass(frozen=True)
class GatheredRows:
    """An all-gather, and products that read its rows.

    Args:
        gather, wait: of the gather.
        products: in the order of the program.
        dtype: of the rows that they read: 8 bits are sent as bytes.
        is_read: something else reads what is gathered.
    """

    gather: Node
    wait: Node
    products: tuple[Node, ...]
    dtype: torch.dtype
    is_read: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is replaced, in an order in which it can run."""
        return (self.gather, self.wait, *self.products)

    @property
    def collective(self) -> Node:
        """The gather."""
        return self.gather

    @property
    def rows(self) -> int:
        """Of one rank."""
        return one_tensor(node_at(self.gather, 0)).shape[0]

    def write(self, parts: int, writer: Writer) -> dict[Node, Node]:
        """Append the blocks; return what replaces the products, and what is gathered if it is read."""
        if parts == FUSED_PARTS:
            return self._fused(writer)
        ranks, axis = self.gather.args[1:]
        shard = one_tensor(node_at(self.gather, 0))
        inner, width = prod(shard.shape[1:-1]), shard.shape[-1]
        sent, cuts = list[Node](), blocks(self.rows, parts)
        for begin, end in cuts:
            cut = replace(shard, shape=(end - begin, *shard.shape[1:]))
            source = writer.at(node_at(self.gather, 0))
            piece = writer.call(aten.slice.Tensor, (source, 0, begin, end), cut, self.gather)
            whole = contiguous((cast(int, ranks) * (end - begin), *shard.shape[1:]), shard)
            sent.append(writer.call(GATHER, (piece, ranks, axis), whole, self.gather))
        writer.started = len(writer.made)
        arrived: list[Node] = []
        pieces: dict[Node, list[Node]] = {product: [] for product in self.products}
        for one, (begin, end) in zip(sent, cuts, strict=True):
            arrived.append(writer.wait(one))
            count = one_tensor(one).shape[0] * inner
            rows = view(writer, arrived[-1], (count, width), self.gather)
            if self.dtype != shard.dtype:
                made = replace(one_tensor(rows), dtype=self.dtype)
                rows = writer.call(aten.view.dtype, (rows, self.dtype), made, self.gather)
            for product, computed in pieces.items():
                columns, given = one_tensor(product).shape[1], {_FACTORS[product.target][0]: rows}
                if scales := scale(product, _LEFT_SCALE):
                    given[_LEFT_SCALE] = self._scales(writer, scales, begin, end)
                made = writer.multiply(product, count, columns, given)
                computed.append(view(writer, made, (ranks, end - begin, inner, -1), product))
        out = {product: self._joined(writer, product, computed) for product, computed in pieces.items()}
        if self.is_read:
            shaped = [view(writer, one, (ranks, -1, *shard.shape[1:]), one) for one in arrived]
            whole = cat(writer, shaped, 1, self.wait)
            out[self.wait] = view(writer, whole, one_tensor(self.wait).shape, self.wait)
        return out

    def _scales(self, writer: Writer, scales: Node, begin: int, end: int) -> Node:
        """The scales of a block's rows, which are first by rank; those of the product are first by the inner dims."""
        ranks, made = cast(int, self.gather.args[1]), one_tensor(scales)
        inner, step = made.numel // (ranks * self.rows), end - begin
        if (begin, end) == (0, self.rows) and inner == 1:
            return writer.at(scales)
        shaped = view(writer, writer.at(scales), (inner, ranks, self.rows), scales)
        whole = one_tensor(shaped)
        cut = replace(whole, shape=(inner, ranks, step))
        piece = writer.call(aten.slice.Tensor, (shaped, 2, begin, end), cut, scales)
        order = [1, 2, 0]
        turned = replace(cut, shape=(ranks, step, inner), stride=_picked(cut.stride, order))
        piece = writer.call(aten.permute.default, (piece, order), turned, scales)
        rows = (ranks * step * inner, 1)
        return writer.call(aten.reshape.default, (piece, list(rows)), contiguous(rows, made), scales)

    @property
    def can_fuse(self) -> bool:
        """True where one op can do all of it."""
        first, *others = self.products
        alike = all((one.target, one.args[4:], one.kwargs) == (first.target, first.args[4:], {}) for one in others)
        scaled = first.target is aten._scaled_mm.default
        one_scale = not scaled or len({node_at(product, _LEFT_SCALE) for product in self.products}) == 1
        return alike and one_scale and all(map(_fuses, self.products))

    def _fused(self, writer: Writer) -> dict[Node, Node]:
        ranks, axis = self.gather.args[1:]
        source, whole = writer.at(node_at(self.gather, 0)), one_tensor(self.gather)
        right = [writer.at(factor(product, 1)) for product in self.products]
        shapes = [(*whole.shape[:-1], one_tensor(r).shape[1]) for r in right]
        results = [contiguous(shape, one_tensor(product)) for shape, product in zip(shapes, self.products, strict=True)]
        first = self.products[0]
        target, args = multiply_gathered, (source, right)
        if first.target is aten._scaled_mm.default:
            piece = replace(one_tensor(source), dtype=self.dtype)
            source = writer.call(aten.view.dtype, (source, self.dtype), piece, self.gather)
            scales = [writer.at(node_at(product, _RIGHT_SCALE)) for product in self.products]
            target = multiply_gathered_scaled
            args = (source, right, writer.at(node_at(first, _LEFT_SCALE)), scales, *_options(first))
        sent = replace(whole, dtype=self.dtype)
        fused = writer.call(target, (*args, ranks, axis), sent, self.gather)
        meta.set_tensors(fused, [sent, *results])
        gathered, *made = (writer.call(_torch.GETITEM, (fused, i), m, fused) for i, m in enumerate([sent, *results]))
        if self.is_read and sent.dtype != whole.dtype:
            gathered = writer.call(aten.view.dtype, (gathered, whole.dtype), whole, self.gather)
        out = {self.wait: gathered} if self.is_read else {}
        for product, piece in zip(self.products, made, strict=True):
            shaped = view(writer, piece, (ranks, self.rows, prod(whole.shape[1:-1]), -1), product)
            out[product] = self._joined(writer, product, [shaped])
        return out

    def _joined(self, writer: Writer, product: Node, pieces: Sequence[Node]) -> Node:
        """Rows in the order of the product: first by the inner dims of what is gathered, then by rank."""
        if len(pieces) == 1 and one_tensor(pieces[0]).shape[2] == 1:
            return view(writer, pieces[0], (one_tensor(product).shape[0], -1), product)
        turned: list[Node] = []
        for piece in pieces:
            made = one_tensor(piece)
            order = [2, 0, 1, 3]
            moved = replace(made, shape=_picked(made.shape, order), stride=_picked(made.stride, order))
            turned.append(writer.call(aten.permute.default, (piece, order), moved, product))
        return view(writer, cat(writer, turned, 2, product), (one_tensor(product).shape[0], -1), product)


@dataclass(frozen=True)
class ScatteredProducts:
    """A reduce-scatter of one product, or of a sum of products.

    Args:
        scatter, wait: of the reduce-scatter.
        tree: the products, and what is computed of them alone up to the operand of the reduce-scatter, in an order in
            which it can run: sums, views and copies that keep the last dim.
    """

    scatter: Node
    wait: Node
    tree: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What is replaced, in an order in which it can run."""
        return (*self.tree, self.scatter, self.wait)

    @property
    def products(self) -> tuple[Node, ...]:
        """The products."""
        return tuple(node for node in self.tree if node.target in _FACTORS)

    @property
    def collective(self) -> Node:
        """The reduce-scatter."""
        return self.scatter

    def write(self, parts: int, writer: Writer) -> dict[Node, Node]:
        """Append the blocks; return what replaces the wait."""
        made = one_tensor(self.scatter)
        if parts == FUSED_PARTS:
            left, right = (writer.at(factor(self.products[0], place)) for place in (0, 1))
            inner = prod(made.shape[1:-1]) if self._turns else 1
            shape = made.numel // (inner * made.shape[-1]), inner, made.shape[-1]
            product, target, args = self.products[0], scatter_product, (left, right)
            if product.target is aten._scaled_mm.default:
                scales = (writer.at(node_at(product, place)) for place in (_LEFT_SCALE, _RIGHT_SCALE))
                target, args = scatter_scaled_product, (left, right, *scales, *_options(product))
            args = (*args, inner, *self.scatter.args[2:])
            piece = writer.call(target, args, contiguous(shape, made), self.scatter)
            return {self.wait: view(writer, piece, made.shape, self.wait)}
        sent: list[Node] = []
        for begin, end in blocks(made.shape[-1], parts):
            at = dict[Node, Node]()
            for node in self.tree:
                at[node] = self._cut(writer, node, at, begin, end)
            args = (at[self.tree[-1]], *self.scatter.args[1:])
            piece = contiguous((*made.shape[:-1], end - begin), made)
            sent.append(writer.call(SCATTER, args, piece, self.scatter))
        writer.started = len(writer.made)
        arrived = [writer.wait(one) for one in sent]
        return {self.wait: cat(writer, arrived, len(made.shape) - 1, self.wait)}

    @property
    def _turns(self) -> bool:
        """True where the rows of the product are first by the inner dims of what is scattered."""
        return any(node.target is aten.permute.default for node in self.tree)

    @property
    def can_fuse(self) -> bool:
        """True where one op can do all of it."""
        turns = [cast("list[int]", node.args[1]) for node in self.tree if node.target is aten.permute.default]
        sums = any(node.target is aten.add.Tensor for node in self.tree)
        return not sums and _fuses(self.products[0]) and turns in ([], [[1, 0, 2]])

    def _cut(self, writer: Writer, node: Node, at: dict[Node, Node], begin: int, end: int) -> Node:
        """`node` for the columns from `begin` to `end`."""
        whole, width = one_tensor(node), end - begin
        if node.target in _FACTORS:
            parts = {_FACTORS[node.target][1]: factor(node, 1)}
            if scales := scale(node, _RIGHT_SCALE):
                parts[_RIGHT_SCALE] = scales
            for place, right in parts.items():
                columns = replace(one_tensor(right), shape=(one_tensor(right).shape[0], width))
                parts[place] = writer.call(aten.slice.Tensor, (writer.at(right), 1, begin, end), columns, right)
            return writer.multiply(node, whole.shape[0], width, parts)
        shape = (*whole.shape[:-1], width)
        args = tuple(at[a] if isinstance(a, Node) else a for a in node.args)
        made = contiguous(shape, whole)
        if node.target in _VIEWS:
            return writer.call(aten.reshape.default, (args[0], list(shape)), made, node)
        if node.target is aten.permute.default:
            given, order = one_tensor(cast(Node, args[0])), cast("list[int]", node.args[1])
            made = replace(made, stride=_picked(given.stride, order))
        return writer.call(node.target, args, made, node, **node.kwargs)


Site = GatheredRows | ScatteredProducts


def _options(product: Node) -> tuple[torch.dtype, bool]:
    """The dtype of a product in float8, and whether it adds up in fewer bits."""
    return one_tensor(product).dtype, len(product.args) > 7 and bool(product.args[7])


def cat(writer: Writer, pieces: list[Node], dim: int, like: Node) -> Node:
    """Append the concatenation of `pieces` along `dim`."""
    first, length = one_tensor(pieces[0]), sum(one_tensor(piece).shape[dim] for piece in pieces)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return writer.call(aten.cat.default, (pieces, dim), contiguous(shape, first), like)


def view(writer: Writer, node: Node, shape: Sequence[Any], like: Node) -> Node:
    """Append a view of `node`. A size that differs between ranks is given as -1."""
    made = one_tensor(node)
    known = [made.numel // -prod(shape) if n == -1 else n for n in shape]
    return writer.call(aten.view.default, (node, list(shape)), contiguous(known, made), like)


def sites(graph: Graph, axes: Sequence[str]) -> Iterator[Site]:
    """The places along `axes` where a product can be cut into blocks, in the order of the program."""
    for node in graph.nodes:
        if not is_wait(node) or node_at(node, 0).op != "call_function" or node_at(node, 0).args[-1] not in axes:
            continue
        found = gathered_rows(node) or scattered_products(node)
        if found is not None:
            yield found


def gathered_rows(wait: Node) -> GatheredRows | None:
    """The products that read rows of what `wait` waits for, if it is gathered."""
    gather = node_at(wait, 0)
    if gather.target is not GATHER or len(gather.users) > 1 or len(one_tensor(wait).shape) not in (2, 3):
        return None
    products, others = dict[Node, torch.dtype](), list[Node]()
    _find_products(wait, False, products, others)
    dtypes = set(products.values())
    if not products or len(dtypes) > 1 or one_tensor(node_at(gather, 0)).shape[0] < 2:
        return None
    order = {node: i for i, node in enumerate(wait.graph.nodes)} if len(products) > 1 else {}
    return GatheredRows(
        gather, wait, tuple(sorted(products, key=lambda n: order.get(n, 0))), dtypes.pop(), bool(others)
    )


def _find_products(node: Node, moved: bool, products: dict[Node, torch.dtype], others: list[Node]) -> None:
    """Find what reads `node`: products of all its rows, through views, and others. `moved`: the gathered dim is the
    second.
    """
    have = one_tensor(node)
    flat = len(have.shape) == 2
    for user in node.users:
        made = meta.tensor(user) if user.op == "call_function" and not meta.is_ranked(user) else None
        if made is not None and flat and is_product(user) and factor(user, 0) is node and factor(user, 1) is not node:
            products[user] = have.dtype
        elif made is None:
            others.append(user)
        elif user.target is aten.view.dtype and made.dtype.itemsize == have.dtype.itemsize:
            _find_products(user, moved, products, others)
        elif user.target is aten.permute.default and not (moved or flat) and user.args[1] == [1, 0, 2]:
            _find_products(user, True, products, others)
        elif (
            user.target in _VIEWS and moved and not flat and made.shape == (prod(have.shape[:-1]), have.shape[-1])
        ) or (user.target is rank_ops.contiguous and (flat or moved)):
            _find_products(user, moved, products, others)
        else:
            others.append(user)


def scattered_products(wait: Node) -> ScatteredProducts | None:
    """The products that are added up over ranks by what `wait` waits for, if nothing else reads them."""
    scatter = node_at(wait, 0)
    if scatter.target is not SCATTER or len(scatter.users) > 1 or scatter.args[1] != "sum":
        return None
    tree: list[Node] = []
    if not _is_tree(node_at(scatter, 0), tree) or one_tensor(scatter).shape[-1] < 2:
        return None
    return ScatteredProducts(scatter, wait, tuple(tree))


def _is_tree(node: Node, tree: list[Node]) -> bool:
    """True if `node` is computed column by column of products that nothing else reads; adds it and them to `tree`."""
    made = meta.tensor(node) if node.op == "call_function" and len(node.users) == 1 else None
    if made is None or not made.shape or meta.is_ranked(node):
        return False
    given = [n for n in node.args if isinstance(n, Node)]
    if node.target in _FACTORS:
        found = node.target is not aten.addmm.default and is_product(node)
    elif node.target is aten.add.Tensor:
        same = len(given) == 2 and given[0] is not given[1] and not node.kwargs and len(node.args) == 2
        found = same and all(one_tensor(g).shape == made.shape and _is_tree(g, tree) for g in given)
    elif node.target is aten.permute.default:
        last = len(made.shape) - 1
        found = cast("list[int]", node.args[1])[-1] in (last, -1) and _is_tree(given[0], tree)
    else:
        keeps = node.target in (*_VIEWS, *_COPIES) and one_tensor(given[0]).shape[-1:] == made.shape[-1:]
        found = keeps and _is_tree(given[0], tree)
    tree.append(node)
    return found


def _picked(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[i] for i in order)
