"""Turns reshard steps into nodes: padding, the collective, its wait, trimming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import LayoutError
from ..graph import meta
from ..graph.meta import TensorMeta
from ..layout import Layout
from ..mesh import Mesh
from ..reshard import Path, Step
from .pieces import only_first, pad_to, take_chunk, trim_chunk

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
        if step.kind == "vary" or (step.kind == "mask" and step.op == "avg"):
            return at
        if step.kind == "slice":
            return self.call(take_chunk, (at, step.dim, self.mesh.axis_size(step.axis), step.axis), made, at)
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
            return self.call(funcol.all_reduce.default, (at, op, step.axis), here, at)
        long, short = (after, before) if step.kind == "all_gather" else (before, after)
        long_shape = list(self._made(long, whole).shape)
        chunk = -(-long_shape[step.dim] // parts)
        padded = list(self._made(short, whole).shape)
        padded[step.dim] = chunk if step.kind == "all_gather" else chunk * parts
        if long_shape[step.dim] % parts:
            at = self.call(pad_to, (at, step.dim, padded[step.dim]), contiguous(padded, whole), at)
        at = self._first(at, step.dim, padded, whole)
        moved = [padded[step.dim], *padded[: step.dim], *padded[step.dim + 1 :]]
        if step.kind == "all_gather":
            moved[0] = chunk * parts
            return self.call(
                funcol.all_gather_into_tensor.default, (at, parts, step.axis), contiguous(moved, whole), at
            )
        moved[0] = chunk
        return self.call(
            funcol.reduce_scatter_tensor.default, (at, step.op, parts, step.axis), contiguous(moved, whole), at
        )

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
        parts, size = (
            self.mesh.axis_size(step.axis),
            self._made(after if step.kind == "all_gather" else before, whole).shape[step.dim],
        )
        if step.dim:
            back = [*range(1, step.dim + 1), 0, *range(step.dim + 1, len(here.shape))]
            node = self.call(aten.permute.default, (node, back), contiguous([here.shape[d] for d in back], whole), node)
        if size % parts == 0:
            return node
        if step.kind == "all_gather":
            return self.call(aten.slice.Tensor, (node, step.dim, 0, size), self._made(after, whole), node)
        return self.call(trim_chunk, (node, step.dim, size, parts, step.axis), self._made(after, whole), node)


def contiguous(shape: list[int] | tuple[int, ...], like: TensorMeta) -> TensorMeta:
    """A row-major TensorMeta of `shape` with the dtype and device of `like`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return replace(like, shape=tuple(shape), stride=tuple(strides))
