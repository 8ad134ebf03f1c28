"""Emits the nodes of reshard steps: padding, the collective, its wait, trimming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import LayoutError
from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor
from ..graph.nodes import add_call, node_at
from ..graph.op_kinds import FLOAT8
from ..graph.stage_part import transfer
from ..layout import NORMS, Extent, Layout, extent, has_extent, split_at_blocks
from ..mesh import Mesh
from ..reshard import Path, Step
from ..sizes import SizeInt, unit_of
from . import rank_ops
from .owned_rows import add_sums, part_of_row, start_spread, start_sums
from .rank_ops import cut_to, only_first, pad_to, share, take_chunk, take_units

funcol = torch.ops._c10d_functional
aten = torch.ops.aten
_Move = tuple[Step, Layout, Layout]


@dataclass
class Emitter:
    """Appends nodes of reshard steps to a graph, with the shapes of the first rank. Along `stage_axis` owners send one
    value at a time, along `owner_axis` rows of several. `sent`: what left its owner, by the node and where it went:
    readers that want it in several layouts make these of one message.
    """

    graph: Graph
    mesh: Mesh
    stage_axis: str = ""
    owner_axis: str = ""
    sent: dict[object, Node] = field(default_factory=dict[object, Node])

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], tensor: TensorMeta, template: Node) -> Node:
        """Append a call node with one tensor output and the source line of `like`."""
        name = str(getattr(target, "__name__", target)).split(".")[0].removesuffix("_tensor").removesuffix("_into")
        return add_call(self.graph, target, args, tensor, template, name)

    def start(self, path: Path, source: Node, full: TensorMeta) -> tuple[Node, Callable[[], Node]]:
        """Emit the nodes up to the first collective; return its node, and a function that emits the rest.

        Float8 travels as bytes, which every backend of torch.distributed can send.
        """
        if full.dtype not in FLOAT8 or not any(step.communicates for step in path.steps):
            return self._start(path, source, full)
        sent = replace(full, dtype=torch.uint8)
        begun, finish = self._start(path, self._as(source, torch.uint8), sent)
        return begun, lambda: self._as(finish(), full.dtype)

    def _as(self, node: Node, dtype: torch.dtype) -> Node:
        new = self.call(aten.view.dtype, (node, dtype), replace(one_tensor(node), dtype=dtype), node)
        meta.set_strided(new, meta.is_strided(node))
        return new

    def _start(self, path: Path, source: Node, full: TensorMeta) -> tuple[Node, Callable[[], Node]]:
        node = source
        todo = [(step, before, after) for step, (before, after) in zip(path.steps, pairwise(path.layouts), strict=True)]
        if any(layout.blocks for layout in path.layouts):
            return self._start_split(todo, source, full)
        while todo and not todo[0][0].communicates:
            node = self._local(todo.pop(0), node, full)
        if not todo:
            return node, lambda: node
        begun = self._begin(todo[0], node, full)

        def finish() -> Node:
            last = self._end(todo[0], begun, full)
            for move in todo[1:]:
                if move[0].communicates:
                    last = self._end(move, self._begin(move, last, full), full)
                else:
                    last = self._local(move, last, full)
            return last

        return begun, finish

    def _start_split(self, todo: Sequence[_Move], node: Node, full: TensorMeta) -> tuple[Node, Callable[[], Node]]:
        """`_start` for layouts that shard blocks of a dim: each step over the dims that are whole blocks."""
        (step, before, after), *rest = todo
        (before, after), shape = split_at_blocks((before, after), full.shape, self.mesh)
        states = before.state(step.axis), after.state(step.axis)
        shards = [state.dim for state in states if state.kind == "S"]
        step = replace(step, dim=shards[0], to=shards[-1] if step.to >= 0 else -1) if shards else step
        split = replace(full, shape=shape)
        reshaped = self._reshaped(node, before, split)
        begun, finish = self._start(Path((step,), (before, after), 0.0), reshaped, split)

        def finish_all() -> Node:
            last = self._reshaped(finish(), todo[0][2], full)
            return self._start_split(rest, last, full)[1]() if rest else last

        return begun, finish_all

    def _reshaped(self, node: Node, layout: Layout, full: TensorMeta) -> Node:
        tensor, shape = self._made(layout, full), layout.extents(full.shape, self.mesh)
        if one_tensor(node).shape == tensor.shape:
            return node
        if node.target is aten.reshape.default and one_tensor(node_at(node, 0)).shape == tensor.shape:
            return node_at(node, 0)
        new = self.call(aten.reshape.default, (node, shape), tensor, node)
        meta.set_strided(new, meta.is_strided(node))
        return new

    def _made(self, layout: Layout, full: TensorMeta) -> TensorMeta:
        shape = layout.local_shape(full.shape, self.mesh, self.mesh.coordinate(0))
        return contiguous(shape, full)

    def _local(self, move: _Move, node: Node, full: TensorMeta) -> Node:
        step, _, after = move
        local = self._made(after, full)
        if step.kind in ("vary", "own") or (step.kind == "mask" and step.op in ("avg", "max", "min")):
            return node
        if step.kind == "slice":
            local = replace(local, stride=one_tensor(node).stride)
            parts, unit = self.mesh.axis_size(step.axis), unit_of(full.shape[step.dim])
            if unit is None:
                new = self.call(take_chunk, (node, step.dim, parts, step.axis), local, node)
            else:
                new = self.call(take_units, (node, step.dim, unit, parts, step.axis), local, node)
            meta.set_strided(new, meta.is_strided(node) or step.dim > 0)
            return new
        if step.kind == "share":
            new = self.call(share, (node, step.dim, step.axis), local, node)
            meta.set_stage(new, None)
            meta.set_owner(new, None)
            return new
        if step.kind == "mask" and step.op in ("sum", *NORMS):
            return self.call(only_first, (node, step.axis), local, node)
        raise LayoutError(f"%{node.name} cannot become {after}", "a partial op with a neutral element")

    def _begin(self, move: _Move, node: Node, full: TensorMeta) -> Node:
        step, before, after = move
        parts = self.mesh.axis_size(step.axis)
        if step.kind == "all_reduce":
            local = one_tensor(node)
            if order := NORMS.get(step.op):
                node = self.call(aten.pow.Tensor_Scalar, (node, order), local, node)
            node, op = self._contiguous(node), "sum" if order else step.op
            return self.call(funcol.all_reduce.default, (node, op, step.axis), contiguous(local.shape, local), node)
        if step.kind in ("send", "broadcast"):
            key = node, step, full.dtype
            if key not in self.sent:
                self.sent[key] = self._from_owner(move, self._contiguous(node), full)
            return self.sent[key]
        if step.kind == "reduce":
            return start_sums(self.call, [self._contiguous(node)], [step.dim], parts, step.axis)
        if step.kind == "all_to_all":
            return self._exchange(move, node, full)
        long, short = (after, before) if step.kind == "all_gather" else (before, after)
        size = full.shape[step.dim]
        outer = tuple(a for a in long.dims[step.dim] if a != step.axis)
        chunk = extent(size, outer, self.mesh, parts)
        padded = list(self._made(short, full).shape)
        times = 1 if step.kind == "all_gather" else parts
        padded[step.dim] = length = self._on_first_rank(chunk) * times
        if not self._even(size, outer, parts):
            node = self.call(pad_to, (node, step.dim, chunk, times), contiguous(padded, full), node)
        node = self._dim_first(node, step.dim, padded, full)
        moved = [padded[step.dim], *padded[: step.dim], *padded[step.dim + 1 :]]
        if step.kind == "all_gather":
            moved[0] = length * parts
            args: tuple[Any, ...] = (node, parts, step.axis)
            return self.call(funcol.all_gather_into_tensor.default, args, contiguous(moved, full), node)
        moved[0] = length // parts
        args = (node, step.op, parts, step.axis)
        return self.call(funcol.reduce_scatter_tensor.default, args, contiguous(moved, full), node)

    def _from_owner(self, move: _Move, node: Node, full: TensorMeta) -> Node:
        step, before, _ = move
        local, sends = one_tensor(node), step.kind == "send"
        if step.axis == self.owner_axis:
            return start_spread(self.call, [node], [step.dim], self.mesh.axis_size(step.axis), step.axis)
        if sends:
            shape = [extent(n, axes, self.mesh) for n, axes in zip(full.shape, before.dims, strict=True)]
            new = self.call(transfer, (node, step.dim, step.to, shape, step.axis), contiguous(local.shape, local), node)
        else:
            args = (node, step.dim, step.axis)
            new = self.call(funcol.broadcast.default, args, contiguous(local.shape, local), node)
        meta.set_stage(new, step.to if sends else None)
        meta.set_strided(new, False)
        return new

    def _from_row(self, move: _Move, received: Node, full: TensorMeta) -> Node:
        """Emit what follows an exchange with an owner: the sum, and the tensor in it."""
        step, _, after = move
        local = self._made(after, full)
        if step.kind == "broadcast":
            return self.call(part_of_row, (received, 0, list(local.shape)), local, received)
        row = add_sums(self.call, received, self.mesh.axis_size(step.axis), step.op)
        new = self.call(part_of_row, (row, 0, list(local.shape)), local, row)
        note_owner(new, after, self.stage_axis, self.owner_axis)
        return new

    def _on_first_rank(self, length: int | Extent) -> int:
        return length.at(self.mesh.coordinate(0)) if isinstance(length, Extent) else length

    def _even(self, size: int, outer: tuple[str, ...], parts: int) -> bool:
        """Return whether each rank's piece of a dim, sharded over `outer`, divides into `parts`; false for a size that
        is another one in other batches.
        """
        pieces = prod(self.mesh.axis_size(a) for a in outer) * parts
        return not isinstance(size, SizeInt) and size // (unit_of(size) or 1) % pieces == 0

    def _dim_first(self, node: Node, dim: int, shape: list[int], full: TensorMeta) -> Node:
        """Permute `dim` to the front and make the tensor contiguous: collectives gather and scatter dim 0. Behind dims
        of size 1 it lies in front already.
        """
        behind = _moves(shape, dim)
        if dim:
            order = [dim, *(d for d in range(len(shape)) if d != dim)]
            turned = self.call(aten.permute.default, (node, order), contiguous([shape[d] for d in order], full), node)
            meta.set_strided(turned, meta.is_strided(node) or not one_tensor(node).is_contiguous)
            node = turned
        local = one_tensor(node)
        if behind or not local.is_contiguous:
            node = self.call(aten.clone.default, (node,), contiguous(local.shape, full), node)
            node.kwargs = {"memory_format": torch.contiguous_format}
            return node
        return self._contiguous(node)

    def _contiguous(self, node: Node) -> Node:
        local = one_tensor(node)
        if not meta.is_strided(node) and local.is_contiguous:
            return node
        new = self.call(rank_ops.contiguous, (node,), contiguous(local.shape, local), node)
        meta.set_strided(new, False)
        return new

    def _exchange(self, move: _Move, node: Node, full: TensorMeta) -> Node:
        """Emit an all-to-all from shards of one dim to shards of another, padded to equal parts."""
        step, before, after = move
        parts, into = self.mesh.axis_size(step.axis), step.to
        outer_from = tuple(a for a in before.dims[step.dim] if a != step.axis)
        outer_into = tuple(a for a in after.dims[into] if a != step.axis)
        shape = list(self._made(before, full).shape)
        chunk_from = extent(full.shape[step.dim], outer_from, self.mesh, parts)
        chunk_into = extent(full.shape[into], outer_into, self.mesh, parts)
        shape[step.dim] = self._on_first_rank(chunk_from)
        if not self._even(full.shape[step.dim], outer_from, parts):
            node = self.call(pad_to, (node, step.dim, chunk_from, 1), contiguous(shape, full), node)
        shape[into] = self._on_first_rank(chunk_into) * parts
        if not self._even(full.shape[into], outer_into, parts):
            node = self.call(pad_to, (node, into, chunk_into, parts), contiguous(shape, full), node)
        node = self._dim_first(node, into, shape, full)
        local = one_tensor(node)
        rows = [chunk_into if has_extent(chunk_into) else local.shape[0] // parts] * parts
        return self.call(funcol.all_to_all_single.default, (node, rows, rows, step.axis), local, node)

    def _exchanged(self, move: _Move, node: Node, full: TensorMeta) -> Node:
        """Emit the reordering after an all-to-all: its result has the pieces of the gathered dim in dim 0."""
        step, before, after = move
        parts, into = self.mesh.axis_size(step.axis), step.to
        outer_from = tuple(a for a in before.dims[step.dim] if a != step.axis)
        shape = list(self._made(after, full).shape)
        length = extent(full.shape[step.dim], outer_from, self.mesh)
        size = extent(full.shape[into], after.dims[into], self.mesh)
        args = (node, parts, step.dim, into, length, size)
        new = self.call(rank_ops.join_exchanged, args, contiguous(shape, full), node)
        meta.set_strided(new, True)
        return new

    def _end(self, move: _Move, begun: Node, full: TensorMeta) -> Node:
        step, before, after = move
        local = one_tensor(begun)
        if step.kind == "send":
            return begun
        node = self.call(funcol.wait_tensor.default, (begun,), local, begun)
        if step.kind == "all_reduce" and step.op in NORMS:
            return self.call(aten.pow.Tensor_Scalar, (node, 1.0 / NORMS[step.op]), local, node)
        parts = self.mesh.axis_size(step.axis)
        if step.kind == "reduce" or (step.kind == "broadcast" and step.axis == self.owner_axis):
            return self._from_row(move, node, full)
        if step.kind in ("all_reduce", "broadcast"):
            return node
        if step.kind == "all_to_all":
            return self._exchanged(move, node, full)
        if step.dim:
            back = [*range(1, step.dim + 1), 0, *range(step.dim + 1, len(local.shape))]
            permuted = contiguous([local.shape[d] for d in back], full)
            node = self.call(aten.permute.default, (node, back), permuted, node)
            meta.set_strided(node, _moves(permuted.shape, step.dim))
        gathers = step.kind == "all_gather"
        outer = tuple(a for a in (before if gathers else after).dims[step.dim] if a != step.axis)
        if self._even(full.shape[step.dim], outer, parts):
            return node
        length = extent(full.shape[step.dim], after.dims[step.dim], self.mesh)
        trimmed = self._made(after, full)
        if gathers and isinstance(length, int):
            new = self.call(aten.slice.Tensor, (node, step.dim, 0, length), trimmed, node)
        else:
            new = self.call(cut_to, (node, step.dim, length), trimmed, node)
        meta.set_strided(new, bool(step.dim))
        return new


def note_owner(node: Node, layout: Layout | None, stage_axis: str, owner_axis: str) -> None:
    """Record which stage, and which owner along another axis, has what a node makes. Raises LayoutError: it is owned
    along a third one.
    """
    owned = dict(layout.owned) if layout is not None else {}
    meta.set_stage(node, owned.pop(stage_axis, None))
    meta.set_owner(node, owned.pop(owner_axis, None))
    if owned:
        problem = f"%{node.name} is owned along {next(iter(owned))!r}"
        needed = f"the axis of stages or of owners, {stage_axis or owner_axis or 'and the plan has none'}"
        raise LayoutError(problem, needed)


def _moves(shape: Sequence[int], dim: int) -> bool:
    """True where elements move if `dim` becomes the first one, or returns from there."""
    return prod(shape[:dim]) != 1
