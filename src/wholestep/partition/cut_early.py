"""Makes pieces of values from pieces of their operands, rather than cut from the whole of them.

A mask of attention of S x S elements is made of few numbers: the places of all tokens, the documents that these are in.
Where a rank takes a piece of one, it takes pieces of these numbers instead. Values that parameters make are left alone.
The gradient of a mean is one number expanded to the batch, a mask of dropout a scaled draw: of these, a loop over
micro-batches needs a piece at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import add_call, copy_node, drop_dead, operands, reached
from ..graph.op_kinds import is_pointwise, packet_name
from ..layout import Extent, OfOwner, chunk_range, extent, has_extent
from ..mesh import TIME, Mesh
from ..rules.registry import draws
from .rank_ops import take_chunk

_ALIKE = frozenset({"_to_copy", "clone", "alias", "detach", "full_like", "ones_like", "zeros_like", "expand"})
_SIZES = {"full": 0, "ones": 0, "zeros": 0, "new_full": 1, "new_ones": 1, "new_zeros": 1, "expand": 1}
"""Where the arguments have the sizes of the result."""
aten = torch.ops.aten
_TRIANGLES = ("tril", "triu")
_OF_NO_PARAMETER = (Role.BATCH, Role.CONST, Role.BUFFER)


def masks_in_rows(local: LocalGraph, once: dict[Node, tuple[Node, ...]]) -> None:
    """Replace pieces of masks by masks of pieces, in place. `once`: as `fold_pieces` has it; new calls join it."""
    learned = (node for spec, node in local.placeholders() if spec.role not in _OF_NO_PARAMETER)
    behind = reached((user for node in learned for user in node.users), lambda node: node.users)
    pieces = _Pieces(local.graph, local.mesh, once)
    for cut in [node for node in local.graph.nodes if node.target is take_chunk and node.args[-1] != TIME]:
        value, dim, parts, axis = cast("tuple[Node, int, int, str]", cut.args)
        if value not in behind and all(user.target is take_chunk for user in value.users) and _is_of_less(value, dim):
            with local.graph.inserting_before(cut):
                new = pieces.of(value, dim, parts, axis, meta.one_tensor(cut).shape[dim])
            cut.replace_all_uses_with(new)
    drop_dead(local.graph)


def slice_early(local: LocalGraph) -> None:
    """Move the slices along `time` in front of ops on elements, and of what is one number, where no other result is
    read and no operand is larger, so that no piece waits for the whole.
    """
    moved = True
    while moved:
        moved, pieces = False, _Pieces(local.graph, local.mesh, goes_on=False)
        slices = {_first(node) for node in local.graph.nodes if node.target is take_chunk and node.args[-1] == TIME}
        for cut in [node for node in local.graph.nodes if node in slices]:
            value, dim, parts, axis = cast("tuple[Node, int, int, str]", cut.args)
            operand_dims = _cut_operands(value, dim)
            if operand_dims is not None and _is_early(cut, value, operand_dims):
                with local.graph.inserting_before(cut):
                    new = pieces.new(value, dim, parts, axis, meta.one_tensor(cut).shape[dim], operand_dims)
                cut.replace_all_uses_with(new)
                moved = True
        drop_dead(local.graph)


def _first(cut: Node) -> Node:
    """The slice that comes first, of `cut` and the slices along other axes that it is cut from."""
    value = cast(Node, cut.args[0])
    return _first(value) if value.target is take_chunk and value.args[-1] != TIME else cut


def _is_early(cut: Node, value: Node, cut_operands: dict[Node, int]) -> bool:
    """Whether a slice along `time` is moved in front of `value`."""
    if packet_name(value.target) in _SIZES:
        return not cut_operands
    same = all(user.target is take_chunk and user.args[1:] == cut.args[1:] for user in value.users)
    shrinks = any(meta.size_bytes(operand) > meta.size_bytes(value) for operand in operands(value))
    return same and not shrinks and (is_pointwise(value.target) or packet_name(value.target) in _ALIKE)


def _is_of_less(value: Node, dim: int) -> bool:
    """Whether all that has to be cut for a piece of `value` has fewer elements."""
    whole, todo = meta.one_tensor(value), list((_cut_operands(value, dim) or {}).items())
    if 0 in map(int, whole.shape) or int(whole.shape[dim]) == 1 or _cut_operands(value, dim) is None:
        return False
    for node, at in todo:
        further = _cut_operands(node, at)
        if further is None and int(meta.one_tensor(node).numel) >= int(whole.numel):
            return False
        todo += (pair for pair in (further or {}).items() if pair not in todo)
    return True


def _cut_operands(node: Node, dim: int) -> dict[Node, int] | None:
    """Of which operands pieces make the piece of `node` along `dim`, and their dims; None where none do."""
    tensor, name = meta.tensor(node), packet_name(node.target)
    if node.op != "call_function" or tensor is None or draws(node):
        return None
    ndim, args = len(tensor.shape), cast("list[Any]", list(node.args))
    size = args[_SIZES[name]][dim] if name in _SIZES else 0
    if has_extent(size) and not (isinstance(size, Extent) and size.times == 1):
        return None
    if is_pointwise(node.target) or name in _ALIKE:
        tensors = {operand: meta.tensor(operand) for operand in operands(node)}
        places = {n: (dim - ndim + len(t.shape), t.shape) for n, t in tensors.items() if t is not None}
        return {n: at for n, (at, shape) in places.items() if at >= 0 and int(shape[at]) != 1}
    if name in _SIZES:
        return {}
    if node.target is take_chunk or name in _TRIANGLES:
        ranked = args[1] == dim if node.target is take_chunk else dim >= ndim - 2 and has_extent(args)
        return None if ranked else {args[0]: dim}
    if name == "unsqueeze" and args[1] % ndim != dim:
        return {args[0]: dim - (args[1] % ndim < dim)}
    if name in ("t", "transpose", "permute"):
        order = list(range(ndim))
        first, second = args[1:] if name == "transpose" else (0, ndim - 1)
        order[first], order[second] = order[second], order[first]
        return {args[0]: (args[1][dim] if name == "permute" else order[dim]) % ndim}
    return None


@dataclass
class _Pieces:
    """Pieces of values that were made, by dim, number and axis. `goes_on`: operands too are made from pieces of their
    operands, where they can be.
    """

    graph: Graph
    mesh: Mesh
    once: dict[Node, tuple[Node, ...]] = field(default_factory=dict[Node, "tuple[Node, ...]"])
    goes_on: bool = True
    made: dict[tuple[Node, int, int, str], Node] = field(default_factory=dict[tuple[Node, int, int, str], Node])

    def of(self, node: Node, dim: int, parts: int, axis: str, length: int) -> Node:
        """The piece of `node` along `dim`, and what makes it; on the first rank it has this length."""
        key = node, dim, parts, axis
        if key not in self.made:
            cut_operands = _cut_operands(node, dim) if self.goes_on else None
            self.made[key] = self.new(node, dim, parts, axis, length, cut_operands)
        return self.made[key]

    def new(
        self, node: Node, dim: int, parts: int, axis: str, length: int, cut_operands: dict[Node, int] | None
    ) -> Node:
        """The same from pieces of `cut_operands`; None: cut from the value."""
        tensor = meta.one_tensor(node)
        shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
        piece = replace(tensor, shape=shape) if node.target is aten.expand.default else meta.with_shape(tensor, shape)
        if cut_operands is None:
            new = add_call(self.graph, take_chunk, (node, dim, parts, axis), piece, node, f"{node.name}_piece")
        else:
            pieces = {operand: self.of(operand, at, parts, axis, length) for operand, at in cut_operands.items()}
            new = copy_node(node, self.graph, lambda operand: pieces.get(operand, operand))
            new.args = self._args(new, tensor.shape, dim, axis, bool(cut_operands))
            if node in self.once:
                self.once[new] = tuple(pieces.get(operand, operand) for operand in self.once[node])
        meta.set_tensors(new, (piece,))
        meta.set_strided(new, True)
        return new

    def _args(self, node: Node, shape: Sequence[int], dim: int, axis: str, is_cut: bool) -> Any:
        """The arguments of `node` for a piece: its size, or the diagonal of a piece of a triangle."""
        args, name = cast("list[Any]", list(node.args)), packet_name(node.target)
        if name in _SIZES:
            sizes = list(args[_SIZES[name]])
            sizes[dim] = -1 if is_cut else self._piece_of(sizes[dim], axis)
            args[_SIZES[name]] = sizes
        if name in _TRIANGLES and dim >= len(shape) - 2:
            first, sign = args[1] if len(args) > 1 else 0, 1 if dim == len(shape) - 2 else -1
            parts = range(self.mesh.axis_size(axis))
            starts = (chunk_range(shape[dim], len(parts), piece)[0] for piece in parts)
            args[1:] = [OfOwner(axis, tuple(first + sign * start for start in starts), start=True)]
        return tuple(args)

    def _piece_of(self, size: int | Extent, axis: str) -> int | Extent:
        parts = self.mesh.axis_size(axis)
        if isinstance(size, Extent):
            return replace(size, axes=(*size.axes, (axis, parts)))
        return size // parts if axis == TIME and size % parts == 0 else extent(size, (axis,), self.mesh)
