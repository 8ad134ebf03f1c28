"""Calls of attention in a ring: a rank attends to its own keys and values, and then to those that arrive from the rank
before it, which it passes on while it computes. Gradients of keys and values go to the rank that has them. By a mask
that is a window, ranks send each other what is within reach, before a call, and its gradients after it. So they do for
a part of the tokens, as without the last ones.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..graph import meta
from ..graph.meta import TensorMeta, contiguous, one_tensor, with_shape
from ..graph.nodes import add_node, operands
from ..layout import OfOwner, chunk_range
from ..plan.op_strategies import part_of
from ..plan.plan import Plan
from ..plan.ring_attention import END, FIRST, LAST, START, Ring, ring_of, shared
from ..rules.aten.query_pieces import key_piece
from ..sizes import least, most, text_of
from . import rank_ops
from .collectives import Emitter, note_owner

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
_Span = tuple[int, int]
_IN_ROWS = rank_ops.tokens_first, rank_ops.after, funcol.all_to_all_single.default, funcol.wait_tensor.default


@dataclass
class RingCalls:
    """Writes such calls. `results`: what they return, by the call of the step and the place. `near`: what ranks have of
    keys and values, in windows.
    """

    emit: Emitter
    plan: Plan
    results: dict[tuple[Node, int], Node] = field(default_factory=dict[tuple[Node, int], Node])
    near: dict[Hashable, list[Node]] = field(default_factory=dict[Hashable, "list[Node]"])

    def ring(self, node: Node) -> Ring | None:
        """The ring of a call of the step."""
        ring = ring_of(node, self.plan.decisions[node.name], self.plan.mesh)
        return replace(ring, balanced=node.name in self.plan.options.balanced) if ring else None

    def call(self, node: Node, ring: Ring, arguments: Sequence[Node], tensors: Sequence[TensorMeta | None]) -> Node:
        """Write a call, with its operands and results on a rank. Returns what has the results that are not `results`:
        what a kernel notes for its backward.
        """
        keys, first, arguments = arguments[ring.key : ring.key + 2], None, list(arguments)
        outputs = cast("list[TensorMeta]", tensors[: 3 if ring.backward else 2])
        if ring.balanced:
            rows = ring.arrived(0)[0]
            outputs = [with_shape(t, (*t.shape[:2], rows, *t.shape[3:])) for t in outputs]
        accumulated = [_wide(tensor) for tensor in outputs[: 1 if ring.backward else 2]]
        if ring.reach:
            pieces = self._near(node, ring, keys)
            message = pieces[0]
        else:
            message, pieces = self._joined(node, keys), list(keys)
        merged, total, coming = list[Node](), list[Node](), list[Node]()
        steps, mask = 1 if ring.reach else ring.parts, arguments[ring.mask] if ring.mask else None
        options = {} if mask is None or ring.reach else {"most": self._most(node, mask)}
        for step in range(steps):
            ahead = self._sent(node, ring, message, step, 1) if step + 1 < steps else None
            arguments[ring.key : ring.key + 2] = pieces
            if mask is not None:
                arguments[ring.mask] = self._columns(node, ring, step, mask)
            of_keys = list(map(one_tensor, pieces)) if ring.backward else list(tensors[2:] if step == 0 else ())
            options = {**options, **({"merged": [*merged]} if merged else {}), **ring.seen(step)}
            new = self._step(node, (*ring.attended(step),), arguments, options, [*accumulated, *of_keys])
            first = first or new
            merged = [self._call(node, operator.getitem, (new, i), tensor) for i, tensor in enumerate(accumulated)]
            if ring.backward:
                items = [self._call(node, operator.getitem, (new, i), one_tensor(pieces[i - 1])) for i in (1, 2)]
                gradients = self._joined(node, items)
                sent = [self._sent(node, ring, gradients, step, -step)] if step else []
                total = self._added(node, total or [self._cast(node, gradients, _wide(one_tensor(gradients)))], coming)
                coming = sent
            if ahead is not None:  # on its way during this step, and no further one
                args = self._waited(node, ahead), (total or merged)[0]
                message = self._call(node, rank_ops.after, args, one_tensor(ahead))
                pieces = self._parted(node, message, keys)
        total = [self._returned(node, ring, whole) for whole in total] if ring.reach else total
        merged += [part for whole in self._added(node, total, coming) for part in self._parted(node, whole, keys)]
        for place, (value, tensor) in enumerate(zip(merged, outputs, strict=True)):
            self.results[node, place] = self._cast(node, value, tensor)
        return cast(Node, first)

    def part(self, node: Node, x: Node) -> Node | None:
        """Write a call that takes a part of a dim of which ranks have pieces, or puts one among zeros: they send each
        other what is in pieces of others in its operand and in its result. None: of other calls.
        """
        decision, place = self.plan.decisions[node.name], part_of(node)
        if place is None or not (axes := decision.operands[0].dims[place[1]]):
            return None
        (_, dim, first), mesh, shapes = place, self.plan.mesh, [one_tensor(n).shape for n in (operands(node)[0], node)]
        parts, size = mesh.axis_size(axes[0]), shapes[0][dim]
        own, wanted = ([chunk_range(shape[dim], parts, i) for i in range(parts)] for shape in shapes)
        spans = [(start, start + length) for start, length in own]
        asked = [(start + first, start + first + length) for start, length in wanted]
        inside = [(least(most(0, since), size), least(most(0, until), size)) for since, until in asked]
        front = [least(most(0, -since), until - since) for since, until in asked]
        back = [most(0, until - most(since, size)) for since, until in asked]
        order = [dim, *(d for d in range(len(shapes[0])) if d != dim)]
        turned = contiguous([one_tensor(x).shape[d] for d in order], one_tensor(x))
        rows = self._call(node, aten.permute.default, (x, order), turned)
        args = x, dim, *self._wanted(node, rows, axes[0], spans, inside), [_numbers(axes[0], n) for n in (front, back)]
        shape = decision.outputs[0].local_shape(shapes[1], mesh, mesh.coordinate(0))
        return self._call(node, rank_ops.range_with_rows, args, contiguous(shape, one_tensor(x)))

    def _wanted(self, node: Node, rows: Node, axis: str, own: Sequence[_Span], wanted: Sequence[_Span]) -> list[Any]:
        """Arguments of `range_with_rows`: which wanted places a rank has (start, number), the rows that it receives for
        the others, and how many of these are in front.
        """
        starts, there, here, kept = shared(axis, own, wanted)
        rows = self._rows(node, rows, starts, there)
        if any(text_of(n) != 0 for sender in here for n in sender.numbers):
            rows = self._exchanged(node, rows, there, here)
        before = [sum(sender.numbers[i] for sender in here[:i]) for i in range(len(own))]
        return [_numbers(axis, [n.numbers[i] for i, n in enumerate(starts)]), kept, rows, _numbers(axis, before)]

    def _near(self, node: Node, ring: Ring, keys: Sequence[Node]) -> list[Node]:
        """Keys and values within reach of the queries of a rank, once for forward and backward."""
        at = slice(ring.key, ring.key + 2)
        key = tuple(operands(node)[at]), self.plan.decisions[node.name].operands[at], ring.reach
        if key not in self.near:
            message, count = self._joined(node, keys), ring.keys_between(FIRST, LAST).numbers[0]
            args = message, 0, *self._wanted(node, message, ring.axis, *ring.own_and_near)
            whole = self._call(node, rank_ops.range_with_rows, args, _with_rows(message, count))
            self.near[key] = self._parted(node, whole, keys)
        return self.near[key]

    def _returned(self, node: Node, ring: Ring, total: Node) -> Node:
        """The sum of the gradients of a rank's own keys and values: `total` has those of all within reach."""
        starts, there, here, _ = shared(ring.axis, *ring.own_and_near)
        sides = ring.keys_between(FIRST, START), ring.keys_between(END, LAST)
        firsts, size = (0, ring.keys_between(FIRST, END, start=True)), ring.keys_between(START, END)
        back = self._exchanged(node, self._rows(node, total, firsts, sides), here, there)
        args = total, replace(sides[0], start=True), size, back, starts, there
        return self._call(node, rank_ops.plus_rows, args, _with_rows(total, size.numbers[0]))

    def _rows(self, node: Node, rows: Node, starts: Sequence[Any], lengths: Sequence[OfOwner]) -> Node:
        shape = _with_rows(rows, sum(part.numbers[0] for part in lengths))
        return self._call(node, rank_ops.rows_at, (rows, [*starts], [*lengths]), shape)

    def _exchanged(self, node: Node, rows: Node, there: list[OfOwner], here: list[OfOwner]) -> Node:
        shape = _with_rows(rows, sum(part.numbers[0] for part in here))
        args = rows, here, there, there[0].axis
        return self._waited(node, self._call(node, funcol.all_to_all_single.default, args, shape))

    def _columns(self, node: Node, ring: Ring, step: int, mask: Node) -> Node:
        """What a mask says of the keys of a step."""
        first, count = ring.columns(step)
        shape = contiguous((*one_tensor(mask).shape[:-1], count.numbers[0]), one_tensor(mask))
        return self._call(node, rank_ops.columns, (mask, first, count), shape)

    def _most(self, node: Node, mask: Node) -> Node:
        """The largest number of each row of a mask."""
        shape = contiguous((*one_tensor(mask).shape[:-1], 1), one_tensor(mask))
        return self._call(node, aten.amax.default, (mask, [-1], True), shape)

    def _step(
        self, node: Node, places: Sequence[OfOwner], reads: Sequence[Node], options: Mapping[str, Any],
        tensors: Sequence[TensorMeta | None],
    ) -> Node:  # fmt: skip
        """Attention to one piece of the keys."""
        ready = iter(reads)
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(ready))
        name, target = node.name, key_piece(node.target)
        new = add_node(self.emit.graph, "call_function", target, (*places, *args), {**kwargs, **options}, name)
        meta.copy(node, new)
        meta.set_tensors(new, tensors)
        return self._noted(new, node)

    def _sent(self, node: Node, ring: Ring, message: Node, step: int, to: int) -> Node:
        """Send what belongs to the keys of a step to the rank that is so far behind this one."""
        rows, ranks, tensor = ring.arrived(step), range(ring.parts), one_tensor(message)
        there = [[rows[rank] if (rank + to) % ring.parts == peer else 0 for rank in ranks] for peer in ranks]
        here = [[rows[peer] if (peer + to) % ring.parts == rank else 0 for rank in ranks] for peer in ranks]
        splits = ([OfOwner(ring.axis, tuple(numbers)) for numbers in side] for side in (here, there))
        shape = (sum(numbers[0] for numbers in here), *tensor.shape[1:])
        args = (message, *splits, ring.axis)
        return self._call(node, funcol.all_to_all_single.default, args, contiguous(shape, tensor))

    def _joined(self, node: Node, keys: Sequence[Node]) -> Node:
        """Keys and values as one message, tokens first."""
        key, value = map(one_tensor, keys)
        shape = (key.shape[2], *key.shape[:2], key.shape[3] + value.shape[3])
        return self._call(node, rank_ops.tokens_first, tuple(keys), contiguous(shape, key))

    def _parted(self, node: Node, message: Node, keys: Sequence[Node]) -> list[Node]:
        """Views of a message: the keys, and the values."""
        tensor, width = one_tensor(message), one_tensor(keys[0]).shape[3]
        shape = (*tensor.shape[1:3], tensor.shape[0])
        turned = contiguous((*shape, tensor.shape[3]), tensor)
        both = self._call(node, aten.permute.default, (message, [1, 2, 0, 3]), turned)
        ends = (0, width), (width, tensor.shape[3])
        tensors = (contiguous((*shape, end - start), tensor) for start, end in ends)
        return [
            self._call(node, aten.slice.Tensor, (both, 3, *at), part) for at, part in zip(ends, tensors, strict=True)
        ]

    def _added(self, node: Node, total: list[Node], coming: list[Node]) -> list[Node]:
        """A sum, if there is one, with gradients that are on their way."""
        for sent in coming:
            total = [self._call(node, aten.add.Tensor, (total[0], self._waited(node, sent)), one_tensor(total[0]))]
        return total

    def _waited(self, node: Node, sent: Node) -> Node:
        return self._call(node, funcol.wait_tensor.default, (sent,), one_tensor(sent))

    def _cast(self, node: Node, value: Node, tensor: TensorMeta) -> Node:
        if one_tensor(value).dtype == tensor.dtype:
            return value
        new = self._call(node, aten._to_copy.default, (value,), replace(one_tensor(value), dtype=tensor.dtype))
        new.kwargs = {"dtype": tensor.dtype}
        return new

    def _call(self, node: Node, target: Any, args: tuple[Any, ...], tensor: TensorMeta) -> Node:
        return self._noted(self.emit.call(target, args, tensor, node), node)

    def _noted(self, new: Node, node: Node) -> Node:
        """`new`, of the stage that calls `node`, with what is not known of its strides."""
        layout = self.plan.decisions[node.name].outputs[0]
        note_owner(new, layout, self.plan.stage_axis, self.plan.owner_axis)
        meta.set_strided(new, new.target not in _IN_ROWS)
        return new


def _numbers(axis: str, numbers: Sequence[int]) -> OfOwner:
    return OfOwner(axis, tuple(numbers), start=True)


def _wide(tensor: TensorMeta) -> TensorMeta:
    """Of numbers in single precision at least."""
    return replace(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _with_rows(node: Node, rows: int) -> TensorMeta:
    """As what a node gives, with this size of the first dim."""
    return contiguous((rows, *one_tensor(node).shape[1:]), one_tensor(node))
