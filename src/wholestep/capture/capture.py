"""The capture stage: traces a function and its arguments into one functional graph."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import _torch
from ..errors import CaptureError
from ..graph.counted_rows import refuse_assumptions
from ..graph.gc_control import collector_paused, source_lines_dropped
from ..graph.graph import Role, TrainGraph
from ..graph.ops import GRAD_READY
from ..graph.sizes_in_graph import planned_at
from ..sizes import SizeGuards
from .batch_reads import ReadValues
from .branches import TakenBranch, along_branches, check_branches
from .call_structure import StepCall, Structure, equal_objects, leaf_names, take_apart
from .capture_options import CaptureOptions
from .effects import BATCH_COUNTS, CALLBACK, CountsRowsError, Effects, Extra, Promoted, RefusedError
from .fake_inputs import Request
from .function_caches import CachedCall
from .host_numbers import At
from .locations import is_number, same_kind
from .normalize import changed_tensors, normalize
from .raw_trace import RawTrace, raw_trace
from .reachable import Reach, Trainable, reach, trainables
from .scheduled_numbers import scheduled
from .skip_nonfinite import refuse_unskippable, skip_nonfinite
from .stand_ins import as_given
from .state import Hyper, StepState, carry, collect, find_hypers, option_of, refuse_objects
from .trace import Traced, trace_step
from .traced_modules import overridden
from .wrappers import effects_refused, unwrapped


@dataclass(frozen=True)
class Capture:
    """A captured step: its graph, its state, its host effects, and the structure of its results.

    `checked` names the values for which the graph says whether they are finite (`skip_nonfinite`). `symbols` are the
    sizes of the batch that the graph has as symbols. `unfilled` is the graph of the trace, where that of the step fills
    padded positions of the batch. The graph assumes `branches`, and checks them (`check_branches`). `counts`
    are the numbers of rows that the step counts while it runs. The step asks for optimizer state before it has made it:
    once these parameters have some (`unmade`), it is another step.
    """

    graph: TrainGraph
    state: StepState
    hypers: tuple[Hyper, ...]
    results: Structure
    result_leaves: tuple[Any, ...]
    fresh_grads: bool
    cleared_grads: tuple[str, ...] = ()
    values: ReadValues | None = None
    effects: Effects = field(default_factory=Effects)
    checked: tuple[str, ...] = ()
    symbols: _torch.Symbols | None = None
    unfilled: TrainGraph | None = None
    branches: tuple[TakenBranch, ...] = ()
    raw: RawTrace | None = None
    counts: SizeGuards | None = None
    unmade: tuple[tuple[Optimizer, torch.Tensor], ...] = ()

    @property
    def traced(self) -> TrainGraph:
        """The graph of the trace."""
        return self.unfilled or self.graph

    @property
    def sized(self) -> _torch.Symbols:
        """The symbols of a capture that has some."""
        assert self.symbols is not None, "captured with symbols"
        return self.symbols


def find_state(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[StepState, StepCall, list[str]]:
    """Return the state of a step, its arguments taken apart, and the names of their leaves.

    Modules and optimizers are found among the arguments, in `extra`, and where these and `fn` lead (`trainables`).
    """
    call = take_apart((args, dict(kwargs)))
    names = leaf_names(fn, call.structure)
    roots = [*zip(names, call.leaves, strict=True), *extra.items()]
    holders: dict[int, tuple[str, Trainable]] = {}
    for name, leaf in [*roots, *trainables(fn, dict(roots), call.objects).items()]:
        inner = unwrapped(leaf)
        if isinstance(inner, (nn.Module, Optimizer, GradScaler)):
            holders.setdefault(id(inner), (name, leaf))
    modules = {n: m for n, m in holders.values() if isinstance(m, nn.Module) and any(True for _ in m.parameters())}
    optimizers = {n: o for n, o in holders.values() if not isinstance(o, (nn.Module, GradScaler))}
    scalers = {n: s for n, s in holders.values() if isinstance(s, GradScaler) and s.is_enabled()}
    if not modules and not optimizers:
        raise CaptureError(
            f"{getattr(fn, '__name__', fn)!r} was given no model and no optimizer, and closes over none",
            "the modules and optimizers that the step uses",
            "pass them as arguments, or give model= and optimizer= to wholestep.compile",
        )
    state = collect(modules, optimizers, scalers)
    _check_arguments(state, names, call.leaves)
    refuse_objects(state.optimizers.values())
    return state, call, names


def with_arrays(array_names: Set[str], names: Sequence[str], leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves of a call, with the arrays that are `read`, by name, in place of their tensors."""
    return tuple(as_given(leaf) if name in array_names else leaf for name, leaf in zip(names, leaves, strict=True))


def _check_arguments(state: StepState, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise CaptureError if an argument is no dense tensor, or a parameter or a buffer, which are state."""
    names_by_id = {id(entry.tensor): name for name, entry in {**state.params, **state.buffers}.items()}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and (other := _torch.other_kind(leaf)):
            raise CaptureError(
                f"the argument {name} is a {other}",
                "dense tensors, whole or this rank's part",
                "pass its parts (indices and values, offsets, a mask) and make it in the step; or make it dense",
            )
        if isinstance(leaf, torch.Tensor) and id(leaf) in names_by_id:
            raise CaptureError(
                f"the argument {name} is {names_by_id[id(leaf)]!r} of the model or the optimizer",
                "parameters and buffers that the step reads from the model, the optimizer or a variable",
                "leave the argument out: `model.parameters()`, or a list that the function closes over, is the same",
            )


@collector_paused()
@source_lines_dropped()
@_torch.one_thread()
def capture_step(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CaptureOptions | None = None, *,
    shapes: Mapping[str, tuple[int, ...]] | None = None, carried: Promoted | None = None,
    changing: Promoted | None = None, dynamic: Mapping[str, tuple[int, ...]] | None = None, repeats: bool = False,
) -> Capture:  # fmt: skip
    """Capture `fn(*args, **kwargs)`: forward, backward and optimizer in one graph. No real tensor is read or changed.

    Optimizer options that change between calls become inputs of the graph where the step computes with them as
    tensors; other options are constants. The capture with the most inputs is tried first. `shapes` gives the global
    shapes, by name, of batch tensors that `args` contain only a part of; the graph has these shapes. `carried` are
    Python values that are state of the step; the trace adds more that it finds. `changing` are numbers that changed
    between calls; they become state if the step can be captured that way. `dynamic` are dims of batch tensors, by name,
    whose sizes are symbols. `repeats`: what `capture_again` makes will be compared with it.
    """
    options, shapes, dynamic, carried = options or CaptureOptions(), shapes or {}, dynamic or {}, carried or Promoted()
    again = partial(capture_step, fn, args, kwargs, options, shapes=shapes, dynamic=dynamic, repeats=repeats)
    state, call, names = find_state(fn, args, kwargs, options.extra)
    arrays = {names[i] for i in call.arrays} - carried.arrays
    if torch.device(options.device or device_of(state)).type != "cpu":  # a GPU computes on its own memory
        carried |= Promoted(arrays=frozenset(arrays))
    arguments = (carried | (changing or Promoted())).numbers & {*names}
    live = find_hypers(state, sorted(scheduled(state.optimizers.values())))
    tries = [(live, carried | changing)] if changing else []
    tries += [(numbers, carried) for numbers in (live, find_hypers(state, ["lr"]), [])]
    first: CaptureError | None = None
    for attempt, (numbers, promoted) in enumerate(tries):
        if first is not None and attempt == 1 and changing == BATCH_COUNTS and not first.counts:
            continue  # the same as the first
        try:
            with overridden(state, options.module_overrides):
                captured = along_branches(
                    options.branches,
                    lambda branches, inputs=(numbers, shapes, promoted, dynamic): _captured(
                        fn, args, kwargs, replace(options, branches=branches), *inputs, repeats=repeats
                    ),
                )
        except CaptureError as failed:
            first = first or failed
            if failed.place in arrays | arguments:
                first, arrays, arguments = failed, arrays & {failed.place}, arguments & {failed.place}
                break
            other_next = changing and attempt == 0 and (failed.counts or changing != BATCH_COUNTS)
            if not other_next and not failed.reads_value and not _in_optimizer(failed):
                break
            continue
        if first is None or captured.effects.carried <= promoted:
            replaced = {*map(id, options.module_overrides.values())}  # for the trace, whatever is in their places
            expected = tuple(e for e in captured.effects.expected if id(e.value) not in replaced)
            return replace(captured, effects=replace(captured.effects, expected=expected))
        carried |= captured.effects.carried  # with these from the start, a try that failed may hold
        return again(carried=carried, changing=changing)
    assert first is not None, "a capture returned or raised"
    if arrays and (first.place in arrays or not dynamic):  # the step reads their contents
        return again(carried=carried | Promoted(arrays=frozenset(arrays)), changing=changing)
    if arguments:  # the step reads their values
        less = changing and changing - arguments
        return again(carried=carried - arguments, changing=less)
    raise first


@collector_paused()
@source_lines_dropped()
@_torch.one_thread()
def capture_again(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CaptureOptions, earlier: Capture,
    shapes: Mapping[str, tuple[int, ...]],
) -> Capture:  # fmt: skip
    """Capture a call that an earlier capture is for, with the inputs and symbols of that one."""
    dims = {} if earlier.symbols is None else earlier.symbols.record.by_name()
    options = replace(options, branches=tuple(branch.expected for branch in earlier.branches))
    overrides = options.module_overrides
    with overridden(find_state(fn, args, kwargs, options.extra)[0], overrides) if overrides else nullcontext():
        inputs = earlier.hypers, shapes, earlier.effects.carried, dims
        return _captured(fn, args, kwargs, options, *inputs, earlier=earlier)


def _captured(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: CaptureOptions,
    numbers: Sequence[Hyper], shapes: Mapping[str, tuple[int, ...]], promoted: Promoted,
    dynamic: Mapping[str, tuple[int, ...]], repeated: tuple[CachedCall, ...] = (), earlier: Capture | None = None,
    repeats: bool = True, first: Traced | None = None,
) -> Capture:  # fmt: skip
    """`repeated`: cached calls of earlier traces; `earlier`: one of the same inputs; `first`: its changes are there."""
    state, call, names = find_state(fn, args, kwargs, options.extra)
    call = replace(call, leaves=with_arrays(promoted.arrays, names, call.leaves))
    device = options.device or device_of(state)
    _check_devices(state, names, call.leaves, device, options.offload is not None)
    reachable = reach(fn, dict(zip(names, call.leaves, strict=True)), state, call.objects)
    if first is not None:  # numbers of what it made were none of its inputs
        promoted -= reachable.paths - first.request.reach.paths
    fused = options.fused and all(hyper.key == "lr" for hyper in numbers)
    arguments = (args, dict(kwargs)), call, names
    request = fn, *arguments, state, tuple(numbers), device, options, fused, shapes, reachable, promoted
    with _torch.without_onednn(), _torch.without_logs(), effects_refused(state.wrappers):
        try:
            traced = _trace_until_carried(Request(*request, dynamic=dynamic))
        except CountsRowsError as found:
            traced = _traced_with_counts(Request(*request, counts=True), found.__cause__)
    if new := [call for call in traced.watch.cached.new if call not in repeated]:
        calls = *repeated, *new
        return _captured(fn, args, kwargs, options, numbers, shapes, promoted, dynamic, calls, earlier, repeats, first)
    if first is None and earlier is None and traced.watch.kept:
        inputs = options, numbers, shapes, promoted, dynamic, repeated, None, repeats, traced
        return _with_kept(traced, lambda: _captured(fn, args, kwargs, *inputs))
    if traced.watch.kept or (first is not None and not _is_same_call(first, traced)):
        raise (first or traced).watch.kept[0][-1]
    if again := [call for call in traced.watch.cached.new if call.changes]:
        raise again[0].error("makes an object again that its cache did not keep")
    _check_update(traced, state, options.keep_grads)
    offload = device if options.offload is not None else ""
    raw = raw_trace(traced) if repeats else None
    same = raw.graph_like(earlier.raw, earlier.traced) if raw and earlier and earlier.raw else None
    graph = same or normalize(traced, options.keep_grads)
    graph = replace(graph, mixed_precision=options.mixed_precision, offload=offload)
    _refuse_shared_memory(graph, dict(zip(names, call.leaves, strict=True)))
    effects = traced.watch.effects({i.name for i in graph.inputs}, traced.result_leaves)
    if traced.stand_ins.symbols is not None:
        effects.refuse_symbolic(traced.result_leaves, counts=not dynamic)
    checked = earlier.checked if earlier and same else ()
    if branches := traced.branches.decided:
        before = sum(out.kind == "result" for out in graph.outputs) - len(branches)
        graph = check_branches(graph, branches, before, fused and not options.skip_nonfinite)
        effects = replace(effects, extra=effects.extra - len(branches))
    if options.skip_nonfinite:
        refuse_unskippable(state, effects)
        if same is None:
            graph, checked = skip_nonfinite(graph, traced.fresh_grads, fused)
    symbols, counts = traced.stand_ins.symbols, None
    if symbols is not None and not dynamic:
        refuse_assumptions(traced.places.unchecked(), graph.graph)
        symbols, counts = None, symbols.record
    if symbols is not None:
        symbols.end_of_trace()
    return Capture(
        graph, state, tuple(traced.request.hypers), traced.results, tuple(traced.result_leaves), traced.fresh_grads,
        tuple(traced.cleared), traced.values, effects, checked, symbols, branches=tuple(branches),
        raw=raw, counts=counts, unmade=traced.unmade,
    )  # fmt: skip


def _with_kept(first: Traced, again: Callable[[], Capture]) -> Capture:
    """Return what `again` does where the changes of a `first` trace stay; take them back if it raises."""
    refusal = first.watch.kept[0][-1]
    try:
        for container, key, value, _ in first.watch.kept:
            container.keep(key, value)
        return again()
    except BaseException as error:
        for container, *_ in first.watch.kept:
            container.restore(set())
        if error is refusal:
            trace_step(replace(first.request, find=refusal.path))  # raises it with the user's line
        raise


def _is_same_call(*traces: Traced) -> bool:
    """Return whether calls as two traces have found them compute the same, return the same, and do the same."""
    nodes = [(traced.module, traced.module.graph.find_nodes(op="get_attr")) for traced in traces]
    first, second = [{str(n.target): getattr(module, str(n.target)) for n in reads} for module, reads in nodes]
    both = [(value, second.get(name)) for name, value in first.items()]
    tensors = [(a, b) for a, b in both if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
    same = len(tensors) == len(both) == len(second) and all(same_kind(a, b) for a, b in tensors)
    return (
        same
        and all(a is b or a.is_meta or torch.equal(a, b) for a, b in tensors)
        and equal_objects(*map(_all_done, traces))
    )


def _all_done(traced: Traced) -> list[Any]:
    """All that a call does, as values that can be compared."""
    effects = traced.watch.effects({source.name for source in traced.stand_ins.inputs}, traced.result_leaves)

    def leaves(values: Sequence[Any]) -> list[Any]:
        return [(type(value), value.index) if isinstance(value, (At, Extra)) else value for value in values]

    recipes = [*(write.recipe for write in effects.writes), *(call.recipe for call in effects.calls)]
    lines = effects.program.instructions
    return [
        str(traced.module.graph), traced.results.outline, leaves(traced.result_leaves), traced.cleared,
        effects.rebound, effects.flags, [call.fn for call in effects.calls],
        [(write.place.path, write.adds) for write in effects.writes],
        [recipe and (recipe.structure.outline, leaves(recipe.leaves)) for recipe in recipes],
        [(getattr(getattr(line.func, "__self__", line.func), "path", line.func), leaves(line.args)) for line in lines],
        [(choice.expected, choice.where) for choice in effects.program.decisions],
    ]  # fmt: skip


def written_leaves(graph: TrainGraph) -> list[str]:
    """Return the names of the batch tensors that a step changes in place."""
    batch = {i.name for i in graph.inputs if i.role is Role.BATCH}
    return [out.target for out in graph.outputs if out.kind == "update" and out.target in batch]


def shared_memory(batch: Mapping[str, Any], written: Sequence[str]) -> str:
    """Say which tensor of a batch shares memory with one of those `written`; "" if none does."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    pairs = ((name, other) for name in written for other in tensors if other != name)
    texts = (f"{a} shares memory with {b}" for a, b in pairs if _torch.memory_overlaps(tensors[a], tensors[b]))
    return next(texts, "")


def _refuse_shared_memory(graph: TrainGraph, batch: Mapping[str, Any]) -> None:
    text = shared_memory(batch, written_leaves(graph))
    if text:
        name = text.partition(" ")[0]
        raise CaptureError(
            f"the step changes {name} in place, and {text}",
            "changes in place of tensors that share memory with no other argument",
            f"pass `{name}.clone()`, or leave the tensor as it is: `x = x * 2` instead of `x *= 2`",
        )


def at_other_sizes(captured: Capture, sizes: dict[str, int]) -> Capture | None:
    """Return a capture with symbols, to be planned for other sizes; None if it does not apply to them."""
    symbols = captured.sized.at(sizes)
    if symbols is None:
        return None
    graph, *unfilled = (
        planned_at(graph, sizes, symbols.record) for graph in (captured.graph, captured.unfilled) if graph is not None
    )
    return replace(captured, graph=graph, unfilled=unfilled[0] if unfilled else None, symbols=symbols)


def device_of(state: StepState) -> str:
    """Return the device of the first parameter; cpu for a model on `meta`."""
    kinds = [h.tensor.device for h in state.params.values() if not h.tensor.is_meta]
    return str(kinds[0]) if kinds else "cpu"


def _in_optimizer(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))
        if any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames):
            return True
        cause = cause.__cause__
    return False


def _traced_with_counts(request: Request, refusal: BaseException | None) -> Traced:
    """`refusal`: what is said of a step that reads numbers, if it cannot be traced with counts."""
    try:
        return _trace_until_carried(request)
    except CaptureError as error:
        if isinstance(refusal, CaptureError):
            refusal.branches, refusal.where = error.branches, refusal.where or error.where
            raise refusal from None
        error.counts = True
        raise


def _trace_until_carried(request: Request) -> Traced:
    """Trace the step; retrace it while the trace changes numbers or tensors that are not state of the step yet.

    The change of any other Python value is an error, whose line a second trace locates.
    """
    while True:
        request = _with_carried(request)
        try:
            traced = trace_step(request)
        except RefusedError as error:
            if not error.where and not request.find:
                trace_step(replace(request, find=error.path))
            raise
        for container, key, value in traced.watch.set_up:
            container.holder[key] = container.before[key] = value
        if traced.watch.cached.new:
            return traced
        needed = traced.watch.needed | _changed_in_place(traced, request.reach)
        if traced.watch.set_up and needed <= request.promoted:
            continue
        if not needed:
            return traced
        if needed <= request.promoted:
            path = sorted(needed.numbers | needed.tensors)[0]
            problem = f"the step changes {path} in a way that cannot be carried from call to call"
            needed = "a number or a tensor that one place holds"
            raise CaptureError(problem, needed, f"return the new value from the step, or use {CALLBACK}")
        request = replace(request, promoted=request.promoted | needed)


def _with_carried(request: Request) -> Request:
    """Return the request with carried tensors as buffers, and without hypers that are carried numbers."""
    promoted = request.promoted | _mixed_options(request)
    carry(request.state, carried := request.reach.carried(promoted.tensors))
    tables = [request.reach.groups_of(optimizer) for optimizer in request.state.optimizers.values()]
    hypers = [h for h in request.hypers if tables[h.optimizer][h.group].path_of(h.key) not in promoted.numbers]
    tensors = {id(tensor) for tensor, _ in carried.values()}
    hypers = [h for h in hypers if id(option_of(request.state, h)) not in tensors]
    return replace(request, promoted=promoted, hypers=hypers)


def _mixed_options(request: Request) -> Promoted:
    """Return the hypers of optimizers that also have carried numbers: these hypers are then Python numbers too."""
    numbers, options = request.promoted.numbers, set[str]()
    for label, optimizer in request.state.optimizers.items():
        tables = request.reach.groups_of(optimizer)
        paths = [c.path for c in tables] + [f"{label}.state["]
        if any(number.startswith(path) for number in numbers for path in paths):
            options |= {c.path_of(h.key) for c in tables for h in request.hypers if is_number(c.before.get(h.key))}
    return Promoted(frozenset(options))


def _changed_in_place(traced: Traced, reachable: Reach) -> Promoted:
    """Return the reachable tensors that the trace changes in place, also those that are options of an optimizer."""
    names, tensors = changed_tensors(traced.module, traced.stand_ins.inputs)
    tensors += [option_of(traced.request.state, h) for h in traced.request.hypers if h.name in names]
    changed = {id(tensor) for tensor in tensors}
    first = {id(tensor): path for path, (tensor, _) in reversed(reachable.tensors.items())}
    return Promoted(frozenset(), frozenset(first[key] for key in changed if key in first))


def _check_update(traced: Traced, state: StepState, keep_grads: bool) -> None:
    """Raise CaptureError if the step computes gradients that nothing reads: it lacks its optimizer."""
    marked = any(node.target is GRAD_READY for node in traced.module.graph.nodes)
    if marked and traced.fresh_grads and not state.optimizers and not keep_grads:
        raise CaptureError(
            "the step computes gradients and has no optimizer that uses them",
            "the optimizer of the step as an argument of it, as optimizer=, or as a variable the function closes over",
            "pass it, or give keep_grads=True to get the gradients in param.grad",
        )


def _check_devices(
    state: StepState, names: Sequence[str], leaves: Sequence[Any], device: str, host_state: bool
) -> None:
    kind = torch.device(device).type
    entries = {**state.params, **state.buffers}
    tensors = {n: h.tensor for n, h in entries.items() if not (host_state and h.tensor.device.type == "cpu")}
    tensors |= {n: v for n, v in zip(names, leaves, strict=True) if isinstance(v, torch.Tensor) and v.dim() > 0}
    wrong = [(n, t.device) for n, t in tensors.items() if t.device.type not in (kind, "meta")]
    if wrong:
        name, device_text = wrong[0]
        others_text = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        if name not in entries and entries and all(h.tensor.is_meta for h in state.params.values()):
            text = f"{name!r} is on device {device_text}{others_text}, the model is on 'meta'"
            needed = f"the device to make the model on; without one, the step runs on {kind!r}"
            raise CaptureError(text, needed, f"give device={device_text.type!r}")
        problem = f"{name!r} is on device {device_text}{others_text}"
        raise CaptureError(problem, f"everything on {kind!r}, where this step runs", f"move it: .to({kind!r})")
    if kind == "cuda" and not torch.backends.cuda.is_built():  # autograd would end the process
        text = f"device={device!r}, with torch {torch.__version__}, which was built without CUDA"
        raise CaptureError(text, "a build of torch with CUDA; a GPU is not needed", "install it, or leave device= out")
