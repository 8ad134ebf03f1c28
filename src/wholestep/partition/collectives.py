"""Turns reshard steps into nodes: padding, the collective, its wait, trimming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import LayoutError
from ..graph import meta
from ..graph.meta import TensorMeta
from ..layout import Extent, Layout, extent, has_extent
from ..mesh import Mesh
from ..reshard import Path, Step
from . import rank_ops
from .rank_ops import cut_to, only_first, pad_to, take_chunk

funcol = torch.ops._c10d_functional
aten = torch.ops.aten


@dataclass
class Emitter:
    """Appends nodes for reshard steps to a graph. Shapes recorded are those of the first rank."""

    graph: Graph
    mesh: Mesh

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], made: TensorMeta, like: Node) -> Node:
        """One call node that makes one tensor, at the place in the user's code of `like`."""
        name = str(getattr(target, "__name__", target)).split(".")[0].removesuffix("_tensor").removesuffix("_into")
        node = self.graph.create_node("call_function", target, args, name=name)
        meta.copy(like, node)
        meta.set_value(node, None)
        meta.set_tensors(node, (made,))
        return node

    def start(self, path: Path, source: Node, whole: TensorMeta) -> tuple[Node, Callable[[], Node]]:
        """Nodes up to and with the first collective, now; the rest when the returned function is called."""
        at = source
        todo = [(step, before, after) for step, (before, after) in zip(path.steps, pairwise(path.layouts), strict=True)]
        while todo and not todo[0][0].communicates:
            at = self._local(todo.pop(0), at, whole)
        if not todo:
            return at, lambda: at
        begun = self._begin(todo[0], at, whole)

        def finish() -> Node:
            node = self._end(todo[0], begun, whole)
            for move in todo[1:]:
                node = (
                    self._end(move, self._begin(move, node, whole), whole)
                    if move[0].communicates
                    else self._local(move, node, whole)
                )
            return node

        return begun, finish

    def _made(self, layout: Layout, whole: TensorMeta) -> TensorMeta:
        shape = layout.local_shape(whole.shape, self.mesh, self.mesh.coordinate(0))
        return contiguous(shape, whole)

    def _local(self, move: tuple[Step, Layout, Layout], at: Node, whole: TensorMeta) -> Node:
        step, _, after = move
        made = self._made(after, whole)
        if step.kind == "vary" or (step.kind == "mask" and step.op in ("avg", "max", "min")):
            return at
        if step.kind == "slice":
            here = meta.tensor(at)
            made = replace(made, stride=here.stride) if here is not None else made
            node = self.call(take_chunk, (at, step.dim, self.mesh.axis_size(step.axis), step.axis), made, at)
            meta.set_loose(node, meta.is_loose(at) or step.dim > 0)
            return node
        if step.kind == "mask" and step.op in ("sum", "norm1", "norm2"):
            return self.call(only_first, (at, step.axis), made, at)
        raise LayoutError(f"%{at.name} cannot become {after}", "a partial op with a neutral element")

    def _begin(self, move: tuple[Step, Layout, Layout], at: Node, whole: TensorMeta) -> Node:
        step, before, after = move
        parts = self.mesh.axis_size(step.axis)
        here = meta.tensor(at)
        assert here is not None, "a reshard has one tensor"
        if step.kind == "all_reduce":
            if step.op.startswith("norm"):
                at = self.call(aten.pow.Tensor_Scalar, (at, int(step.op[4:])), here, at)
            op = "sum" if step.op.startswith("norm") else step.op
            at = self._settled(at)
            return self.call(funcol.all_reduce.default, (at, op, step.axis), contiguous(here.shape, here), at)
        if step.kind == "all_to_all":
            return self._exchange(move, at, whole)
        long, short = (after, before) if step.kind == "all_gather" else (before, after)
        size = whole.shape[step.dim]
        outer = tuple(a for a in long.dims[step.dim] if a != step.axis)
        chunk = extent(size, outer, self.mesh, parts)
        padded = list(self._made(short, whole).shape)
        length = self._here(chunk) * (1 if step.kind == "all_gather" else parts)
        padded[step.dim] = length
        if not self._even(size, outer, parts):
            times = 1 if step.kind == "all_gather" else parts
            at = self._ranked(pad_to, (at, step.dim, chunk, times), contiguous(padded, whole), at)
        at = self._first(at, step.dim, padded, whole)
        moved = [padded[step.dim], *padded[: step.dim], *padded[step.dim + 1 :]]
        if step.kind == "all_gather":
            moved[0] = length * parts
            return self.call(
                funcol.all_gather_into_tensor.default, (at, parts, step.axis), contiguous(moved, whole), at
            )
        moved[0] = length // parts
        return self.call(
            funcol.reduce_scatter_tensor.default, (at, step.op, parts, step.axis), contiguous(moved, whole), at
        )

    def _here(self, length: int | Extent) -> int:
        return length.at(self.mesh.coordinate(0)) if isinstance(length, Extent) else length

    def _even(self, size: int, outer: tuple[str, ...], parts: int) -> bool:
        """True when every rank's piece of the dim has `parts` equal parts."""
        cut = prod(self.mesh.axis_size(a) for a in outer) * parts
        return size % cut == 0

    def _ranked(self, target: Callable[..., Any], args: tuple[Any, ...], made: TensorMeta, like: Node) -> Node:
        """A call whose arguments may differ between ranks."""
        node = self.call(target, args, made, like)
        if has_extent(args):
            meta.set_ranked(node)
        return node

    def _first(self, at: Node, dim: int, shape: list[int], whole: TensorMeta) -> Node:
        """Collectives join and cut dim 0 of contiguous tensors: bring `dim` there."""
        if dim:
            order = [dim, *(d for d in range(len(shape)) if d != dim)]
            at = self.call(aten.permute.default, (at, order), contiguous([shape[d] for d in order], whole), at)
        here = meta.tensor(at)
        if dim or here is None or not here.is_contiguous:
            made = contiguous(here.shape if here else shape, whole)
            at = self.call(aten.clone.default, (at,), made, at)
            at.kwargs = {"memory_format": torch.contiguous_format}
            return at
        return self._settled(at)

    def _settled(self, at: Node) -> Node:
        """`at`, row by row in memory."""
        here = meta.tensor(at)
        assert here is not None, "a reshard has one tensor"
        if not meta.is_loose(at) and here.is_contiguous:
            return at
        node = self.call(rank_ops.contiguous, (at,), contiguous(here.shape, here), at)
        meta.set_loose(node, False)
        return node

    def _exchange(self, move: tuple[Step, Layout, Layout], at: Node, whole: TensorMeta) -> Node:
        """All-to-all from shards of one dim to shards of another: equal parts, padded where they are not."""
        step, before, after = move
        parts, into = self.mesh.axis_size(step.axis), step.to
        outer_from = tuple(a for a in before.dims[step.dim] if a != step.axis)
        outer_into = tuple(a for a in after.dims[into] if a != step.axis)
        shape = list(self._made(before, whole).shape)
        chunk_from = extent(whole.shape[step.dim], outer_from, self.mesh, parts)
        chunk_into = extent(whole.shape[into], outer_into, self.mesh, parts)
        shape[step.dim] = self._here(chunk_from)
        if not self._even(whole.shape[step.dim], outer_from, parts):
            at = self._ranked(pad_to, (at, step.dim, chunk_from, 1), contiguous(shape, whole), at)
        shape[into] = self._here(chunk_into) * parts
        if not self._even(whole.shape[into], outer_into, parts):
            at = self._ranked(pad_to, (at, into, chunk_into, parts), contiguous(shape, whole), at)
        at = self._first(at, into, shape, whole)
        here = meta.tensor(at)
        assert here is not None, "a reshard has one tensor"
        rows = [here.shape[0] // parts] * parts
        if has_extent(chunk_into):
            rows = [chunk_into] * parts
        return self._ranked(funcol.all_to_all_single.default, (at, rows, rows, step.axis), here, at)

    def _exchanged(self, move: tuple[Step, Layout, Layout], node: Node, whole: TensorMeta) -> Node:
        """What an all-to-all brought, put right: pieces of the joined dim stand one after the other in the cut one."""
        step, before, after = move
        parts, into = self.mesh.axis_size(step.axis), step.to
        outer_from = tuple(a for a in before.dims[step.dim] if a != step.axis)
        made = list(self._made(after, whole).shape)
        length = extent(whole.shape[step.dim], outer_from, self.mesh)
        size = extent(whole.shape[into], after.dims[into], self.mesh)
        args = (node, parts, step.dim, into, length, size)
        new = self._ranked(rank_ops.join_exchanged, args, contiguous(made, whole), node)
        meta.set_loose(new, True)
        return new

    def _end(self, move: tuple[Step, Layout, Layout], begun: Node, whole: TensorMeta) -> Node:
        step, before, after = move
        here = meta.tensor(begun)
        assert here is not None, "a collective makes one tensor"
        node = self.call(funcol.wait_tensor.default, (begun,), here, begun)
        if step.kind == "all_reduce":
            return (
                self.call(aten.pow.Tensor_Scalar, (node, 1.0 / int(step.op[4:])), here, node)
                if step.op.startswith("norm")
                else node
            )
        if step.kind == "all_to_all":
            return self._exchanged(move, node, whole)
        parts = self.mesh.axis_size(step.axis)
        if step.dim:
            back = [*range(1, step.dim + 1), 0, *range(step.dim + 1, len(here.shape))]
            node = self.call(aten.permute.default, (node, back), contiguous([here.shape[d] for d in back], whole), node)
            meta.set_loose(node, True)
        gathers = step.kind == "all_gather"
        outer = tuple(a for a in (before if gathers else after).dims[step.dim] if a != step.axis)
        if self._even(whole.shape[step.dim], outer, parts):
            return node
        length = extent(whole.shape[step.dim], after.dims[step.dim], self.mesh)
        made = self._made(after, whole)
        if gathers and isinstance(length, int):
            new = self.call(aten.slice.Tensor, (node, step.dim, 0, length), made, node)
        else:
            new = self._ranked(cut_to, (node, step.dim, length), made, node)
        meta.set_loose(new, bool(step.dim))
        return new


def contiguous(shape: list[int] | tuple[int, ...], like: TensorMeta) -> TensorMeta:
    """A row-major TensorMeta of `shape` with the dtype and device of `like`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return replace(like, shape=tuple(shape), stride=tuple(strides))
