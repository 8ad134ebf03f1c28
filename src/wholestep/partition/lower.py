"""The partition stage: rewrites the graph of one device into the program of one rank, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise, starmap
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.counted_rows import refuse_cut, refuse_sent
from ..graph.gc_control import collector_paused
from ..graph.graph import Input, LocalGraph, Role, TrainGraph
from ..graph.meta import TensorMeta, contiguous, row_major
from ..graph.nodes import add_node, drop_dead, node_at, operands
from ..graph.op_kinds import VIEWS, depends_on_strides, is_pointwise, packet_name
from ..graph.ops import COMPLETE, GRAD_READY
from ..graph.owned import check_owners
from ..graph.verify import check_local_graph
from ..layout import REPLICATED, Extent, Layout, extent
from ..mesh import TIME
from ..plan.decision import Decision
from ..plan.for_pieces import DRAWN_INTO, is_drawn_into
from ..plan.plan import Plan
from ..plan.propagation_inputs import incomplete_gradients, moving
from ..reshard import reshard
from ..rules.call import Call
from ..rules.find_rule import find_rule
from ..rules.localize import VIEWS_OF_PIECES, localize
from ..rules.registry import draws
from . import rank_ops
from .balanced_calls import BalancedCalls
from .collectives import Emitter, note_owner
from .cut_early import masks_in_rows, slice_early
from .extended_calls import ExtendedCalls
from .fold_pieces import fold_pieces
from .gather_lifetimes import Regions, find_regions, gathers
from .rank_ops import drawn
from .ring_calls import RingCalls
from .rows_by_rank import with_rows_sent

aten = torch.ops.aten
funcol = torch.ops._c10d_functional
_ANY_STRIDES = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "sum", "mean", "amax", "amin", "linalg_vector_norm", "clone", "cat", "stack",
    "_to_copy",
})  # fmt: skip
_WRITE_ROWS = frozenset({
    "mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "native_layer_norm", "native_layer_norm_backward", "embedding",
    "embedding_dense_backward",
})  # fmt: skip
_KEEP_ROWS = frozenset({
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "view_as_complex", "view_as_real", "_to_copy", "clone",
    "sum", "mean", "amax", "amin", "nll_loss_forward", "nll_loss_backward",
})  # fmt: skip
_TURNS: frozenset[Any] = frozenset({aten.t.default, aten.transpose.int, aten.permute.default})
_Key = tuple[Node, Layout, int]
_Finish = Callable[[], Node]


@collector_paused()
def written(graph: TrainGraph, plan: Plan) -> LocalGraph:
    """The program of a rank by a plan; of a pipeline that of all stages, which have no blocks yet. `graph`: as the
    decisions are about it (`Plan.decompose`), with the marks that planning left (`plan.whole_units`): planning the same
    graph again replaces them.
    """
    _refuse_cut_arguments(graph, plan)
    layouts = {name: decision.outputs for name, decision in plan.decisions.items()}
    refuse_cut(graph.graph, layouts, is_in_blocks=plan.mesh.pieces > 1 or bool(plan.stage_axis))
    lowering = _Lowering(graph, plan, find_regions(graph, plan))
    local = lowering.run()
    with_rows_sent(local.graph, plan.mesh)
    masks_in_rows(local, lowering.once)
    if plan.mesh.pieces > 1:
        slice_early(local)
        local = fold_pieces(local, lowering.once, lowering.regathered)
    check_local_graph(local)
    refuse_sent(local.graph)
    if plan.owner_axis:
        check_owners(local.graph)
    return local


def _refuse_cut_arguments(graph: TrainGraph, plan: Plan) -> None:
    """Raise PlanError for an argument that the step changes in place, and of which ranks or micro-batches have parts:
    it may be no batch, and its rows none of these.
    """
    batch = {i.name for i in plan.inputs if i.role is Role.BATCH}
    for out, node in graph.results():
        if out.kind == "update" and out.target in batch and plan.storage[out.target].is_sharded:
            in_time = TIME in plan.storage[out.target].shard_axes()
            of, kind = ("each micro-batch", "MicroBatches") if in_time else ("each rank", "DataParallel")
            raise PlanError(
                f"the step changes {out.target}, of which {of} has a piece",
                "changes of state, or of arguments that are there as a whole",
                "make a new tensor, as `x = x * 2`, instead; what lasts (an average, samples of earlier calls) is a "
                "buffer of the model, or held by an object that the step closes over; if the argument has no samples, "
                f"name it: {kind}(..., input_batch_dim={{{out.target!r}: None, '*': 0}})",
                meta.source_line(node),
            )


@dataclass
class _Lowering:
    """`once`: calls whose results are the same for every piece, with the operands of which they read only the shape.
    `regathered`: nodes that gather a parameter or activation for one segment of the step, with its views and casts.
    """

    train: TrainGraph
    plan: Plan
    regions: Regions
    graph: Graph = field(default_factory=Graph)
    at: dict[tuple[Node, int], Node] = field(default_factory=dict[tuple[Node, int], Node])
    layouts: dict[Node, tuple[Layout, ...]] = field(default_factory=dict[Node, tuple[Layout, ...]])
    started: dict[tuple[Node, int], _Finish] = field(default_factory=dict[tuple[Node, int], _Finish])
    moved: dict[_Key, _Finish] = field(default_factory=dict[_Key, _Finish])
    ordered: dict[tuple[Node, bool], Node] = field(default_factory=dict[tuple[Node, bool], Node])
    once: dict[Node, tuple[Node, ...]] = field(default_factory=dict[Node, "tuple[Node, ...]"])
    regathered: set[Node] = field(default_factory=set[Node])

    def __post_init__(self) -> None:
        self.emit = Emitter(self.graph, self.plan.mesh, self.plan.stage_axis, self.plan.owner_axis)
        self.extended, self.first = ExtendedCalls(self.emit), self.plan.mesh.coordinate(0)
        self.balanced, self.rings = BalancedCalls(self.emit, self.plan), RingCalls(self.emit, self.plan)
        self.moving, self.incomplete = moving(self.train), incomplete_gradients(self.train)

    def run(self) -> LocalGraph:
        for spec, node in self.train.placeholders():
            self._placeholder(spec, node, self.plan.storage[spec.name])
        for node in self.train.graph.nodes:
            if node.op == "call_function" and node not in self.regions.on_demand:
                self._emit(node, 0)
        self.graph.output(tuple(self._result(out.kind, out.target, node) for out, node in self.train.results()))
        drop_dead(self.graph)
        rest = tuple(self.plan.storage[i.name] for i in self.train.inputs)
        return LocalGraph(
            self.graph, self.plan.mesh, self.train.inputs, self.train.outputs, rest, self.train.constants,
            offload=self.train.offload, async_axes=self.plan.async_axes, stage_axis=self.plan.stage_axis,
            owner_axis=self.plan.owner_axis,
        )  # fmt: skip

    def _placeholder(self, spec: Input, node: Node, layout: Layout) -> None:
        new = self.graph.placeholder(node.name)
        meta.copy(node, new)
        meta.set_tensors(new, (self._local_meta(meta.tensor(node), layout),))
        note_owner(new, layout, self.plan.stage_axis, self.plan.owner_axis)
        self.at[node, 0], self.layouts[node] = new, (layout,)
        full = meta.tensor(node)
        if spec.role is Role.BATCH and layout.is_sharded and full is not None:
            meta.set_strided(new, any(layout.dims[1:]) or not full.is_contiguous)  # a part of the user's tensor
        if self.plan.options.broadcast_buffers and spec.role is Role.BUFFER:
            self._broadcast(node, new)

    def _broadcast(self, node: Node, new: Node) -> None:
        tensor = meta.one_tensor(new)
        for axis in self.plan.mesh.axes:
            if axis.size > 1 and axis.name != TIME:
                begun = self.emit.call(funcol.broadcast.default, (new, 0, axis.name), tensor, new)
                new = self.emit.call(funcol.wait_tensor.default, (begun,), tensor, new)
        self.at[node, 0] = new

    def _local_node(self, node: Node, region: int) -> Node:
        """Return the local node of `node` for a segment; waits for a started reduction."""
        if node in self.regions.on_demand:
            self._emit(node, region)
        key = (node, self.regions.of(node, region) if node in self.regions.on_demand else 0)
        if key in self.started:
            self.at[key] = self.started.pop(key)()
        return self.at[key]

    def _emit(self, node: Node, region: int) -> None:
        """Emit `node` for a segment of the step, once."""
        key = (node, self.regions.of(node, region))
        if key in self.at:
            return
        decision = self.plan.decisions[node.name]
        if _torch.is_getitem(node.target):
            new = self._getitem(node, region)
        elif node.target in COMPLETE:
            new = self._resharded(node_at(node, 0), decision.operands[0], region)
        else:
            new = self._call(node, decision, region)
        meta.set_computes(new, self._computed(node, len(decision.outputs)))
        self.at[key], self.layouts[node] = new, decision.outputs
        if node in self.regions.on_demand:
            self._note_regathered(new, node, region)
        if decision.reshards_to is not None:
            self.started[key] = self._begin(node, new, decision.outputs[0], decision.reshards_to)
            self.layouts[node] = (decision.reshards_to,)
        else:
            self._start_reductions(node)

    def _computed(self, node: Node, outputs: int) -> meta.Outputs | None:
        """Which outputs of the plan the local node of `node` has; those of queries in another order come with items."""
        if self.balanced.queries(node) or self.rings.ring(node) is not None:
            return None
        is_item = _torch.is_getitem(node.target)
        source, first = (node_at(node, 0), meta.picked(node).start) if is_item else (node, 0)
        return tuple((source.name, index) for index in range(first, first + outputs))

    def _call(self, node: Node, decision: Decision, region: int) -> Node:
        segment = region if node in self.regions.on_demand else self.regions.segment.get(node, 0)
        sources = operands(node)
        inputs = [self._resharded(n, want, segment) for n, want in zip(sources, decision.operands, strict=True)]
        inputs = self.balanced.operands(node, inputs)
        if not _takes_any_strides(node.target):
            shards = zip(sources, inputs, decision.operands, strict=True)
            inputs = [self._in_dim_order(node.target, n, at, layout) for n, at, layout in shards]
        if (ring := self.rings.ring(node)) is not None:
            return self.rings.call(node, ring, inputs, self._local_outputs(node))
        if inputs and (part := self.rings.part(node, inputs[0])) is not None:
            return part
        added = {} if self.balanced.queries(node) else self.extended.operands(node, decision, inputs)
        ready = iter(inputs)
        args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(ready))
        new = self._localized(node, decision, args, kwargs)
        meta.set_batch_invariant(new, node not in self.moving)
        if self.plan.mesh.pieces > 1 and all(layout.state(TIME) == REPLICATED for layout in decision.outputs):
            rule = find_rule(node)
            has_sizes = rule is not None and bool(rule.sizes)  # an argument says the shape, as in `new_zeros`
            cut = [layout.state(TIME).kind == "S" and not has_sizes for layout in decision.operands]
            self.once[new] = tuple(n for i, n in enumerate(inputs) if rule and i in rule.by_shape and not cut[i])
        return self.balanced.result(self.extended.result(self._with_outputs(new, node), node, added), node)

    def _localized(self, node: Node, decision: Decision, args: Any, kwargs: Any) -> Node:
        layouts = (*decision.operands, *decision.outputs)
        cut = any(layout.is_sharded for layout in layouts)
        rule = find_rule(node) if cut else None
        target = node.target
        if rule is not None:
            takes, gives, mesh = decision.operands, decision.outputs, self.plan.mesh
            target, args, kwargs = localize(rule, Call.of(node), takes, gives, mesh, args, kwargs)
            args = (*queries.ranges, *args[2:]) if (queries := self.balanced.queries(node)) else args
        if self.plan.mesh.pieces > 1 and is_drawn_into(node):
            tensor, axes = meta.one_tensor(node), decision.outputs[0].dims
            sizes = [extent(n, by, self.plan.mesh) for n, by in zip(tensor.shape, axes, strict=True)]
            target, args = DRAWN_INTO[cast(Any, node.target)], (sizes,)
            kwargs = {"dtype": tensor.dtype, "device": torch.device(tensor.device)}
        cut_by = decision.outputs[0].shard_axes() if cut and decision.outputs else ()
        if cut_by and draws(node):
            parts = tuple((axis, self.plan.mesh.axis_size(axis)) for axis in cut_by)
            target, args = drawn, (Extent(prod(n for _, n in parts), parts, start=True), target, *args)
        inputs = _nodes(args, kwargs)
        strided = any(map(meta.is_strided, inputs)) or any(any(layout.dims[1:]) for layout in layouts)
        strided = strided and not _is_row_major(node, inputs)
        if strided or target is aten.view_as_complex.default:  # it also refuses odd offsets into a bucket
            target = VIEWS_OF_PIECES.get(target, target)
        new = add_node(self.graph, "call_function", target, args, kwargs, node.name)
        meta.copy(node, new)
        meta.set_strided(new, strided)
        return new

    def _getitem(self, node: Node, region: int) -> Node:
        source = node_at(node, 0)
        if (ready := self.rings.results.get((source, meta.picked(node).start))) is not None:
            return self.balanced.result(ready, node)
        local = self._local_node(source, region)
        new = add_node(self.graph, "call_function", node.target, (local, node.args[1]), {}, node.name)
        meta.copy(node, new)
        meta.set_strided(new, meta.is_strided(local))
        return self.balanced.result(self.extended.item(self._with_outputs(new, node), node, source), node)

    def _with_outputs(self, new: Node, node: Node) -> Node:
        """Record the local outputs of `node` on `new`."""
        layouts = self.plan.decisions[node.name].outputs
        note_owner(new, layouts[0] if layouts else None, self.plan.stage_axis, self.plan.owner_axis)
        meta.set_tensors(new, self._local_outputs(node))
        return new

    def _local_outputs(self, node: Node) -> list[TensorMeta | None]:
        layouts = self.plan.decisions[node.name].outputs
        return list(starmap(self._local_output, zip(meta.tensors(node), layouts, strict=True)))

    def _result(self, kind: str, target: str, node: Node) -> Node:
        """Reshard an output: updates to their storage layout; results to replicated or varying."""
        have = self._layout(node)
        if kind == "update" and target in self.plan.storage:
            want = self.plan.storage[target]
            want = replace(want, varies=have.varies) if have.varies else want
        elif kind == "update":
            want = self.plan.created_storage[target]
        else:
            want = Layout(((),) * len(have.dims), (), have.varies)
        return self._resharded(node, want, self.regions.last)

    def _in_dim_order(self, op: Any, node: Node, at: Node, layout: Layout) -> Node:
        """Return `at`, the shard of `node`, with the dim order of the unsharded tensor, which kernels may assume."""
        full, local = meta.tensor(node), meta.tensor(at)
        if full is None or local is None:
            return at
        # shards of parameters and optimizer state are stored contiguously: gradients must match
        rows = full.is_contiguous or (layout.is_sharded and _torch.is_fused_optimizer(op))
        expanded = () if rows else _expanded(full, local)
        once = tuple(1 if d in expanded else size for d, size in enumerate(local.shape))
        ordered = contiguous(local.shape, local) if rows else meta.with_shape(full, once)
        if expanded:
            steps = tuple(0 if d in expanded else step for d, step in enumerate(ordered.stride))
            ordered = replace(ordered, shape=local.shape, stride=steps)
        actual = _turned(at) if meta.is_strided(at) else local
        if actual is not None and (not depends_on_strides(op) or meta.same_strides(actual, ordered)):
            return at
        if (at, rows) not in self.ordered:
            target, args = rank_ops.contiguous, (at,)
            if not rows and full.shape == local.shape:
                target, args = meta.with_stride, (at, full.stride)
            elif not rows:
                # an expanded dim (stride 0) goes first: kernels assume a dense last dim
                dims = sorted(range(len(full.shape)), key=lambda d: (full.stride[d] != 0, -full.stride[d], d))
                target, args = rank_ops.in_order, (at, dims, expanded) if expanded else (at, dims)
            self.ordered[at, rows] = self.emit.call(target, args, ordered, at)
            meta.set_strided(self.ordered[at, rows], False)
        return self.ordered[at, rows]

    def _layout(self, node: Node) -> Layout:
        if node in self.layouts:
            return self.layouts[node][0]
        return self.plan.decisions[node.name].given[0]

    def _resharded(self, node: Node, want: Layout, region: int) -> Node:
        """Return `node` resharded to `want`, once per segment."""
        at = self._local_node(node, region)
        have = self._layout(node)
        if have is want or have == want:
            return at
        if gathers(have, want) and _is_transposed(node) and node not in self.regions.on_demand:
            turns = node.target is aten.t.default
            if self._layout(node_at(node, 0)) == (have.transposed if turns else have):
                return self._transposed(node, want.transposed if turns else want, want, region)
        key = (node, want, self.regions.of(node, region, gathers=gathers(have, want)))
        last = next(iter(reversed(self.graph.nodes)))
        if key not in self.moved:
            self.moved[key] = self._begin(node, at, have, want)
        moved = self.moved[key]()
        self.moved[key] = lambda: moved
        if self.regions.source.get(node) in self.regions.regathered and gathers(have, want):
            while (last := cast(Node, last.next)).op != "root":
                self._note_regathered(last, node, region)
        return moved

    def _note_regathered(self, new: Node, node: Node, region: int) -> None:
        self.regathered.add(new)
        if self.regions.source[node].op == "call_function" and self.regions.is_backward(region):
            meta.set_backward(new)  # a stage computes it with the first that reads it

    def _transposed(self, node: Node, source: Layout, want: Layout, region: int) -> Node:
        """Return the transpose `node`, or its copy, of its operand gathered to `source`: what else reads that needs no
        gather of its own.
        """
        gathered = self._resharded(node_at(node, 0), source, region)
        key = (node, want, self.regions.of(node, region, gathers=True))
        if key not in self.moved:
            tensor = meta.one_tensor(gathered)
            turned = replace(tensor, shape=tensor.shape[::-1], stride=tensor.stride[::-1])
            turned = turned if node.target is aten.t.default else contiguous(tensor.shape, tensor)
            new = self.emit.call(cast(Any, node.target), (gathered,), turned, node)
            new.kwargs = node.kwargs
            meta.set_strided(new, node.target is aten.t.default and meta.is_strided(gathered))
            self.moved[key] = lambda: new
        return self.moved[key]()

    def _start_reductions(self, node: Node) -> None:
        have = self.layouts[node][0] if self.layouts[node] else None
        if have is None or not have.partial or len(self.layouts[node]) > 1:
            return
        for want in dict.fromkeys(self._wanted(node)):
            if want != have and not (want.partial and set(want.partial) <= set(have.partial)):
                self.moved[node, want, 0] = self._begin(node, self.at[node, 0], have, want)

    def _wanted(self, node: Node) -> list[Layout]:
        layouts: list[Layout] = []
        for user in node.users:
            if user.op == "call_function" and not _torch.is_getitem(user.target):
                wants = self.plan.decisions[user.name].operands
                layouts += [want for n, want in zip(operands(user), wants, strict=True) if n is node]
        return layouts

    def _begin(self, node: Node, at: Node, have: Layout, want: Layout) -> _Finish:
        first, *later = pairwise(self._legs(node, have, want))
        finish = self._leg(node, at, *first)
        for before, after in later:
            finish = partial(self._then, node, finish, before, after)
        return finish

    def _legs(self, node: Node, have: Layout, want: Layout) -> list[Layout]:
        """Layouts on the way: sums over pieces come before sums over ranks, or after them for each piece."""
        pieces = have.state(TIME)
        if pieces.kind != "P" or pieces == want.state(TIME):
            return [have, want]
        each = self.plan.options.reduces_each_piece and node.target is GRAD_READY
        between = want.put(TIME, pieces) if each else have.put(TIME, REPLICATED)
        return [have, want] if between in (have, want) else [have, between, want]

    def _then(self, node: Node, finish: _Finish, have: Layout, want: Layout) -> Node:
        return self._leg(node, finish(), have, want)()

    def _leg(self, node: Node, at: Node, have: Layout, want: Layout) -> _Finish:
        full = meta.one_tensor(node)
        path = reshard(have, want, full.shape, full.dtype.itemsize, self.plan.mesh, self.plan.hardware)
        sums = [s for s in path.steps if s.kind in ("all_reduce", "reduce_scatter") and s.op in ("sum", "avg")]
        is_gradient = node not in self.moving or node in self.incomplete  # sums of activations keep their dtype
        other = self._reduce_dtype(full) if sums and full.shape and is_gradient else None
        if sums and all(step.axis == TIME for step in sums):  # in 16 bits, each piece would round the sum again
            other = torch.float32 if full.dtype in (torch.bfloat16, torch.float16) else None
        if other is None:
            return self.emit.start(path, at, full)[1]
        cast = self._cast(at, other)
        finish = self.emit.start(path, cast, replace(full, dtype=other))[1]
        return lambda: self._cast(finish(), full.dtype)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        if _widens(node, dtype):
            return node_at(node, 0)
        new = self.emit.call(aten._to_copy.default, (node,), replace(meta.one_tensor(node), dtype=dtype), node)
        new.kwargs = {"dtype": dtype}
        return new

    def _reduce_dtype(self, full: TensorMeta) -> torch.dtype | None:
        name = self.plan.options.reduce_dtype
        dtype = getattr(torch, name) if name and full.dtype.is_floating_point else None
        return None if dtype == full.dtype else dtype

    def _local_output(self, full: TensorMeta | None, layout: Layout) -> TensorMeta | None:
        """Return the local output of an op; a shard of separate rows has the strides of the unsharded tensor."""
        local = self._local_meta(full, layout)
        if local is full or local is None or full is None or any(layout.dims[1:]) or not meta.rows_are_separate(full):
            return local
        return TensorMeta(local.shape, full.stride, local.dtype, local.device)

    def _local_meta(self, full: TensorMeta | None, layout: Layout) -> TensorMeta | None:
        if full is None or not layout.is_sharded:
            return full
        shape = layout.local_shape(full.shape, self.plan.mesh, self.first)
        pairs = zip(full.stride, row_major(shape), strict=True)
        stride = tuple(0 if full_step == 0 else step for full_step, step in pairs)  # expanded dims stay expanded
        return TensorMeta(shape, stride, full.dtype, full.device)


def _widens(node: Node, dtype: torch.dtype) -> bool:
    """Return whether a node casts a value of `dtype` to one with more bits, and does nothing else: cast back, it is the
    same.
    """
    if node.target is not aten._to_copy.default:
        return False
    before, after = meta.tensor(node_at(node, 0)), meta.one_tensor(node)
    return (
        before is not None
        and before == replace(after, dtype=dtype)
        and torch.promote_types(dtype, after.dtype) == after.dtype
    )


def _is_transposed(node: Node) -> bool:
    """Return whether a node is a transpose, or a copy of one row by row."""
    if node.target is aten.clone.default and meta.one_tensor(node).is_contiguous:
        return _is_transposed(node_at(node, 0))
    return node.target is aten.t.default


@cache
def _takes_any_strides(target: Any) -> bool:
    """Return whether an op is a view, or its kernels support operands of any strides."""
    if target in VIEWS or not _torch.is_op(target):
        return True
    if depends_on_strides(target):
        return False
    return is_pointwise(target) or packet_name(target) in _ANY_STRIDES


def _is_row_major(node: Node, inputs: Sequence[Node]) -> bool:
    """Return whether a shard of the result of `node` is row-major in memory: kernels that write rows make it so; views
    and elementwise ops do if all of their `inputs` are.
    """
    form, name = node.kwargs.get("memory_format"), packet_name(node.target)
    if name in _WRITE_ROWS or form is torch.contiguous_format:
        return True
    if not (is_pointwise(node.target) or name in _KEEP_ROWS) or form not in (None, torch.preserve_format):
        return False
    tensors = [meta.tensor(n) for n in (node, *operands(node))]
    return not any(map(meta.is_strided, inputs)) and all(m is not None and m.is_contiguous for m in tensors)


def _turned(node: Node) -> TensorMeta | None:
    """Return how a view with permuted dims lies in memory, if what it is a view of is known; else None."""
    source = next(iter(operands(node)), None)
    tensor = meta.tensor(source) if source is not None and not meta.is_strided(source) else None
    if tensor is None or node.target not in _TURNS:
        return None
    order = list(range(len(tensor.shape)))
    if node.target is aten.permute.default:
        order = [cast(int, d) % len(order) for d in cast(Sequence[Any], node.args[1])]
    elif node.target is aten.transpose.int:
        first, second = (cast(int, d) % len(order) for d in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    else:
        order.reverse()
    return replace(tensor, shape=tuple(tensor.shape[d] for d in order), stride=tuple(tensor.stride[d] for d in order))


def _nodes(args: Any, kwargs: Any) -> list[Node]:
    nodes: list[Node] = []
    map_arg((args, kwargs), nodes.append)
    return nodes


def _expanded(full: TensorMeta, local: TensorMeta) -> tuple[int, ...]:
    """Dims in which a tensor and its shard repeat one entry, as a mask does for each head. None if the last one does:
    kernels assume that it is dense.
    """
    pairs = zip(full.stride, local.stride, local.shape, strict=True)
    dims = tuple(d for d, (step, local_step, size) in enumerate(pairs) if step == local_step == 0 and size > 1)
    return () if len(full.shape) - 1 in dims else dims
