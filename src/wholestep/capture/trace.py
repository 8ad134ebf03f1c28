"""Traces a step once, with fake tensors for its state and batch, into a raw ATen graph."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import _torch
from ..errors import CaptureError, WholestepError, first_line
from ..graph.graph import Input, Role
from ..graph.meta import meta_of, show_line, source_line, user_frame_of
from ..graph.op_kinds import PACKED_CURE
from ..graph.ops import GRAD_READY, LOSS
from ..graph.origin import is_installed, is_own_code, is_user_file
from ..graph.sizes_in_graph import without_size_nodes
from . import cuda_attention
from . import state as held_state
from .batch_reads import READS, Reader, ReadValues, read_refused, value_read
from .branches import Branches
from .call_structure import LENGTHS, Structure, in_place, leaf_names, take_apart
from .counted_places import CountedPlaces, asked_number
from .effects import RefusedError, SizesFixedError
from .fake_inputs import FakeInputs, Request, stand_ins
from .float8 import Float8Linears
from .host_numbers import AS_TENSOR, Numbers
from .locations import MISSING, GroupEntry, Location, NumberLocation, places_of, same_kind
from .methods import methods, refuse_anomaly_mode, refuse_open_scalers
from .optimizer_entries import Entry, Items
from .optimizer_loops import optimizer_loops
from .optimizer_scalars import INSTEAD, Counts
from .own_tensors import OwnTensors
from .random_numbers import RngReplay, refuse_generators
from .replacements import fixed_sizes, form_of
from .rounded_updates import RoundedUpdates
from .sized_forms import SIZED_OPS, sized_forms
from .stand_ins import error_of_text, text_of_tensor
from .state import Hyper, StepState
from .traced_modules import modules_seen
from .watch import Watch

_IN_PLACE: dict[Any, Any] = {
    getattr(torch.Tensor, f"{name}_"): getattr(torch.Tensor, name)
    for name in ("add", "sub", "mul", "div", "floor_divide", "remainder")
}
_ASK_TRUTH = "__bool__", "is_nonzero", "_assert"
_OF_BOOL = *_ASK_TRUTH, "item", "tolist", "__int__", "__float__"
_SET_DATA = cast(Any, torch.Tensor.data).__set__
_INTERNAL = ("capture/trace.py", "torch/_tensor.py", "torch/overrides.py", "torch/_subclasses/fake_tensor.py")
_TEXT = tuple(getattr(torch.Tensor, name) for name in ("__format__", "__repr__"))
_SET_GRAD, _GET_GRAD = cast(Any, torch.Tensor.grad).__set__, cast(Any, torch.Tensor.grad).__get__
_FACTS = _torch.METADATA - {_GET_GRAD}


class TensorLeaf:
    """Placeholder for a tensor in the result structure of a step."""


def trace_step(request: Request) -> Traced:
    """Trace the step with its current state; a CaptureError has the user's source line."""
    run = Traced(request, stand_ins(request, _asking_text))
    try:
        run.trace()
    except WholestepError as error:
        if isinstance(error, CaptureError):
            error.branches = error.branches or run.branches.expected
        returned = isinstance(error, RefusedError)  # raised after the step's return: its traceback has no user line
        error.where = error.where or run.watch.found_at or ("" if returned else user_frame_of(error))
        raise
    except Exception as error:
        explained = _explain(error)
        explained.branches = run.branches.expected
        raise explained from error
    return run


@dataclass
class Traced:
    """A raw capture. `module` returns the result tensors, then the new value of each input, then `created` state.

    `reset`: parameters whose gradient is set to None before the step computes it. `read_grads`: those whose gradient of
    the last call the step reads. `cleared`: those whose gradient is None at the end. `updates`: an optimizer steps.
    `values`: reads of the batch. `unmade`: the parameters that have no state in an optimizer where the step asks.
    """

    request: Request
    stand_ins: FakeInputs
    contributed: set[str] = field(default_factory=set[str])
    reset: set[str] = field(default_factory=set[str])
    read_grads: set[str] = field(default_factory=set[str])
    updates: bool = False
    cleared: list[str] = field(default_factory=list[str])
    created: list[Input] = field(default_factory=list[Input])
    result_leaves: list[Any] = field(default_factory=list[Any])
    results: Structure = field(init=False)
    module: torch.fx.GraphModule = field(init=False)
    values: ReadValues | None = field(init=False)
    unmade: tuple[tuple[torch.optim.Optimizer, torch.Tensor], ...] = ()
    tables: list[held_state.SeenState] = field(init=False)
    draws: RngReplay = field(default_factory=RngReplay)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        request, fakes, state = self.request, self.stand_ins, self.request.state
        pairs = zip(request.names, request.call.leaves, strict=True)
        full_shapes = request.full_shapes  # the values of a part do not determine a read of the whole
        batch = {n: leaf for n, leaf in pairs if n not in full_shapes or tuple(leaf.shape) == full_shapes[n]}
        self.reader = Reader(fakes.inputs, batch)
        if request.options.branches and request.options.branches_of_batch:  # what an error may show
            held = *state.params.values(), *state.buffers.values(), *held_state.optimizer_state(state)
            batch = batch | {entry.input.name: entry.tensor for entry in held}
            batch |= {h.name: torch.asarray(_option_place(state, h).get(), dtype=torch.float64) for h in request.hypers}
        self.values_now = Reader(fakes.inputs, batch)
        self.numbers = Numbers(fakes.mode, sum(i.role is not Role.BATCH for i in fakes.inputs), self._add_number)
        self.branches = Branches(fakes.inputs, request.options, self.reader.now)
        self.places = CountedPlaces(request, fakes.symbols, self.branches, self.known, _calling_text)
        self.own = OwnTensors(_calling_text)
        self.watch = Watch(state, request.reach, request.promoted, self.numbers, self.own, _calling_text, request.find)
        self.given = dict[str, torch.Tensor]()
        self.rounded = RoundedUpdates({})

    @property
    def kernels(self) -> str | None:
        """The device whose attention kernels are recorded in place of this one's."""
        return cuda_attention.recorded_kernels(self.request.options.kernels, self.request.device)

    @property
    def fresh_grads(self) -> bool:
        """True if the step resets every gradient before accumulating, reads none before that, and updates by them."""
        waits = bool(self.request.state.optimizers) and not self.updates
        return self.contributed <= self.reset - self.read_grads and not waits

    def trace(self) -> None:
        """Trace the step."""
        hooks = [register_optimizer_step_pre_hook(_torch.here_only(self._saw_optimizer))]
        precision = self.request.options.mixed_precision
        if precision and precision.stochastic_rounding:
            hooks.append(register_optimizer_step_pre_hook(_torch.here_only(self.rounded.before)))
            hooks.append(register_optimizer_step_post_hook(_torch.here_only(self.rounded.after)))
        try:
            if torch.is_anomaly_enabled():
                refuse_anomaly_mode()
            zero_grads = [(owner, "zero_grad", self._zero_grad) for owner in (torch.optim.Optimizer, torch.nn.Module)]
            rng = [(torch, "get_rng_state", self.draws.saved), (torch, "set_rng_state", self.draws.restored)]
            chosen = self.request.options.float8
            linears = chosen and Float8Linears(chosen, self.request.state.modules, self.request.device)
            float8 = [(torch.nn.functional, "linear", linears.linear)] if linears else []
            sized = sized_forms(self.stand_ins.symbols is not None) + self.places.forms()
            loops = optimizer_loops(self.own.fake_of, self._kind_of, self.numbers.count)
            forms = [*methods(), *sized, *zero_grads, *rng, *float8, *cuda_attention.replaced(self.kernels), *loops]
            with (
                self.places.asked(),
                _torch.numbers_in_arguments(self.stand_ins.symbols),
                _torch.tensor_only_optimizers(),
                _torch.patched_for_tracing(self._in_backward, self.numbers.stands_for_one, *self.request.traced_for),
                _torch.replaced(forms) as self.watch.of_torch,
                self.own.entrances(),
            ):
                ops = {**fixed_sizes(self.known, self.places.of, self.places.truth), **SIZED_OPS, **self.places.ops()}
                self.module = _torch.trace(self._run, self.stand_ins.fakes, ops, self.own.at_op)
            if self.stand_ins.symbols is not None:
                without_size_nodes(self.module.graph, self.stand_ins.symbols)
            if linears:
                linears.check_used()
            if len(hooks) > 1:
                self.rounded.check_used()
        finally:
            for hook in hooks:
                hook.remove()
        self.values = self.reader.values()
        placeholders = zip(self.stand_ins.inputs, self.module.graph.find_nodes(op="placeholder"), strict=True)
        used = (i for i, node in placeholders if any(user.op != "output" for user in node.users))
        self.read_grads |= {i.owner for i in used if i.role is Role.GRAD}

    def _kind_of(self, fakes: list[torch.Tensor]) -> object:
        """What determines how an optimizer updates these tensors of one parameter; None where that is not known."""
        kind = None if self.numbers.among(fakes) else _torch.kind_of(fakes)
        return kind and (kind, *(id(fake) in self.counts.scalars for fake in fakes))

    def _add_number(self, position: int, source: Input, fake: torch.Tensor) -> None:
        self.stand_ins.put(source, fake, position)
        self.given[source.name] = fake

    def _run(self, *flat: torch.Tensor) -> list[torch.Tensor]:
        request, state = self.request, self.request.state
        fakes = self.given = {i.name: t for i, t in zip(self.stand_ins.inputs, flat, strict=True)}
        plain, free = _plain_state(state), request.promoted.numbers
        self._put_own(fakes)
        with ExitStack() as inside:
            inside.enter_context(held_state.restored(state))
            self._put_own(fakes)
            self.rounded.names = {id(param.tensor): name for name, param in state.params.items()}
            leaves = [
                self.watch.stand_in(i, n, v, fakes.get(n))
                if n in free or (i in request.call.arrays and n in fakes)
                else self._argument(n, v)
                for i, (n, v) in enumerate(zip(request.names, request.call.leaves, strict=True))
            ]
            args, kwargs = inside.enter_context(in_place(request.arguments, request.call.structure, leaves))
            places = [(fakes[h.name], _option_place(state, h)) for h in request.hypers]
            with _torch.outside_of_trace():  # where a tensor is read
                self.watch.options = [(fake, at, value, float(value)) for fake, at in places for value in [at.get()]]
            zeros = {id(fake): not now for fake, place, _, now in self.watch.options if place.key != "lr"}
            held_state.set_options(state, request.hypers, fakes, request.device, request.fused)
            self._fill_state(fakes, plain)
            self._mark_gradients(fakes)
            kwargs.pop(LENGTHS, None)
            paths = leaf_names(request.fn, request.call.structure, objects=True)
            modules = modules_seen(state.modules, request.options.mixed_precision)
            calls = self.calls = _TorchCalls(self, zeros)
            with modules, self.watch.watching(fakes, request.call.objects, paths), calls, self.rounded:
                call = take_apart(self.watch.shown(request.fn)(*args, **kwargs), objects=False)
                if calls.refused is not None:
                    raise calls.refused  # the step caught it
            held_state.refuse_objects(state.optimizers.values(), self.numbers)
            refuse_open_scalers(state.scalers.values())
            leaves = [self.own.fake_of(self.watch.argument(v)) for v in call.leaves]
            self.watch.refuse_made(leaves)
            batch = [(i, n) for i, n in enumerate(request.names) if isinstance(request.call.leaves[i], torch.Tensor)]
            self.watch.assign_to_batch({n: (i, fakes[n], n in self.reset) for i, n in batch})
            self.places.unchecked()
            self.watch.extra += self.branches.values
            tables = zip(state.optimizers.values(), self.tables, strict=True)
            self.unmade = tuple((optimizer, param) for optimizer, table in tables for param in table.asked)
            self.counts.end(entry for optimizer in state.optimizers.values() for entry in optimizer.state.values())
            finals = self._new_values(fakes)
            self.results = call.structure
            self.result_leaves = [TensorLeaf if isinstance(v, torch.Tensor) else v for v in leaves]
            return [
                *(v.detach() for v in leaves if isinstance(v, torch.Tensor)),
                *(v.detach() for v in self.watch.extra),
                *finals,
                *self._new_state(fakes),
            ]

    def _put_own(self, fakes: dict[str, torch.Tensor]) -> None:
        for name, entry in (*self.request.state.params.items(), *self.request.state.buffers.items()):
            self.own.put(name, entry.tensor, fakes[name])

    def _argument(self, name: str, tensor: Any) -> Any:
        """What the step sees of an argument: itself, or a fake where it is passed twice: another call may pass two."""
        if not isinstance(tensor, torch.Tensor):
            return self.watch.shown(tensor)
        if self.own.name_of(tensor) is not None:
            return self.given[name]
        self.own.put(name, tensor, self.given[name], of_batch=True)
        return tensor

    def known(self, tensor: torch.Tensor, counts: bool = False) -> torch.Tensor | None:
        """Return the real value of a traced tensor that depends on integers of the batch only, else None."""
        value = self.reader.known(tensor, _calling_text(), counts)
        if value is not None and self.request.dynamic:
            raise SizesFixedError("the step reads a value of the batch", _calling_text())
        return value

    def _fill_state(self, fakes: dict[str, torch.Tensor], plain: list[tuple[Any, Any, Any]]) -> None:
        optimizers, params = list(self.request.state.optimizers.values()), self.request.state.params
        for optimizer, owner, entry in plain:
            optimizer.state[params[owner].tensor if isinstance(owner, str) else owner].update(entry)
        self.tables = [cast(held_state.SeenState, optimizer.state) for optimizer in optimizers]
        for i in self.stand_ins.inputs:
            if i.role is Role.STATE:
                optimizer, param = optimizers[i.optimizer], params[i.owner].tensor
                entries = self.tables[i.optimizer]
                table = entries.later if i.name in self.stand_ins.primed else entries
                self.counts.put(optimizer, table.setdefault(param, {}), i, param, fakes[i.name])

    def _mark_gradients(self, fakes: dict[str, torch.Tensor]) -> None:
        for name in self.request.state.params:
            param = fakes[name]
            param.grad = fakes.get(f"{name}/grad")
            if param.requires_grad:
                _torch.copy_hooks(self.request.state.params[name].tensor, param)

                def ready(grad: torch.Tensor | None, name: str = name) -> torch.Tensor | None:
                    if grad is None:  # returned by a user's backward: the parameter gets no gradient
                        return None
                    self.contributed.add(name)
                    return GRAD_READY(grad, name)

                param.register_hook(ready)

    @contextmanager
    def _in_backward(self, outputs: Sequence[Any]) -> Generator[None]:
        """Note the losses; intercept the calls of hooks and of `Function.backward`, for torch has left the mode."""
        for tensor in outputs if not _torch.inside_transform() else ():
            if isinstance(tensor, torch.Tensor):
                LOSS(tensor.detach())
        with self.calls:
            yield

    def _zero_grad(self, original: Callable[..., None], owner: Any, set_to_none: bool = True) -> None:
        """Replace `zero_grad` of modules and optimizers."""
        if set_to_none:
            groups = [{"params": owner.parameters()}] if isinstance(owner, torch.nn.Module) else owner.param_groups
            self.saw_zero_grad([param for group in groups for param in group["params"]])
        original(owner, set_to_none)

    def saw_zero_grad(self, params: Sequence[Any]) -> None:
        """Record that gradients are set to None."""
        names = {name for name in map(self.own.name_of, params) if name is not None}
        self.reset |= names - self.contributed

    def saw_no_grad(self, param: Any) -> None:
        """Record that the step reads a gradient that is not there yet; one that is there has users in the graph."""
        name = self.own.name_of(param)
        if name in self.request.state.params.keys() - self.reset - self.contributed:
            self.read_grads.add(name)

    def _saw_optimizer(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        state = self.request.state
        if all(optimizer is not found_before for found_before in (*state.optimizers.values(), *state.wrappers)):
            raise CaptureError(
                f"the step runs an optimizer ({type(optimizer).__name__}) that wholestep did not find",
                "every optimizer of the step as an argument of it, as optimizer=, "
                "or as a variable the function closes over",
                "pass it to the step, or to wholestep.compile as optimizer=",
            )
        self.updates = True
        self.counts.begin(optimizer)

    def _new_values(self, fakes: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the value of each input after the step, which stays where each call assigns one of another kind."""
        state, finals = self.request.state, list[torch.Tensor]()
        for i in self.stand_ins.inputs:
            was = now = fakes[i.name]
            if i.role is Role.PARAM and self.own.fake_of(state.params[i.name].tensor) is not was:
                raise CaptureError(
                    f"the step replaces the parameter {i.name!r}",
                    "parameters that stay the same objects: the optimizer would keep the old one",
                    "change it in place (`with torch.no_grad(): p.copy_(...)`), or replace it between steps",
                )
            if i.role is Role.GRAD:
                grad = fakes[i.owner].grad
                if grad is None:
                    self.cleared.append(i.owner)
                now = was if grad is None else grad.detach().to(i.meta.dtype)
            elif i.role in (Role.BUFFER, Role.STATE):
                now = self._kept_value(i, was)
            finals.append(now if now is was else now.detach())
        return finals

    def _kept_value(self, source: Input, was: torch.Tensor) -> torch.Tensor:
        """Return what the graph leaves in a buffer, or in optimizer state."""
        places = places_of(self.request.state, source)
        values = [self.own.fake_of(place.get()) for place in places]
        now = values[0]
        later = self.tables[source.optimizer].later if source.name in self.stand_ins.primed else None
        if now is MISSING and later is not None and self.request.state.params[source.owner].tensor not in later:
            problem, needed = f"the step deletes {source.name!r}, which its update has made", "state that lasts"
            raise CaptureError(problem, needed, "delete it between steps, or before the update of the next one")
        if now is was or (now is MISSING and source.role is Role.STATE):  # others look at what the step deletes
            return was
        if isinstance(places[0].holder, Items) and not _torch.is_fake(now):  # the step replaces all of the tuple
            return was
        if any(value is not now for value in values):
            raise CaptureError(
                f"the step replaces {source.name!r} at one of the {len(places)} places that share it",
                "places that share a tensor before and after each step",
                f"change it in place (`{places[0].path}.copy_(...)`), or let one module have it",
                next((_made_at(value) for value in values if value is not was), ""),
            )
        if isinstance(now, torch.Tensor):
            if any(isinstance(size, torch.SymInt) for size in now.shape):
                raise SizesFixedError(f"the step keeps a size of the batch in {source.name!r}", _made_at(now))
            if same_kind(now, was):
                return now
        for place in places:
            self.watch.assign(place, now)
        return was

    def _new_state(self, fakes: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        state = self.request.state
        tensors = [(h.input, h.tensor) for h in held_state.optimizer_state(state) if h.tensor not in self.numbers]
        grads = [(name, fakes[name].grad) for name in state.params]
        tensors += [(Input(f"{n}/grad", Role.GRAD, meta_of(g), n), g) for n, g in grads if g is not None]
        new = [(source, tensor) for source, tensor in tensors if source.name not in fakes]
        self.created += [source for source, _ in new]
        return [tensor.detach() for _, tensor in new]


_ASKS_FOR_ZERO = ("eq", "ne", "bool")


class _TorchCalls(_torch.FunctionMode):
    """Intercepts the torch calls of the step: answers or refuses reads, computes with fakes of the user's tensors.

    `zeros` maps hypers to whether they are zero, which optimizers test; guards check it in each call.
    """

    def __init__(self, run: Traced, zeros: dict[int, bool]) -> None:
        self._step, self._zeros, self._own = run, zeros, run.own
        self._numbers, self._known = run.numbers, run.known
        self.refused: Exception | None = None
        self._plain: dict[Any, bool] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS and not kwargs:
            tensor = self._own.fake_of(args[0])
            if _torch.is_fake(tensor) and not self._numbers.among((tensor,)):
                return func(tensor, *args[1:])
        if func is torch.Tensor.data_ptr and _torch.is_fake(tensor := self._own.fake_of(args[0])):
            return _torch.address_of(tensor)
        if func is torch.Tensor.is_set_to and all(map(_torch.is_fake, pair := self._own.fake_of(args))):
            places = [(_torch.address_of(tensor), tensor.shape, tensor.stride()) for tensor in pair]
            return places[0] == places[1]
        try:
            returned = self._run(func, self._own.fake_of(args), self._own.named(kwargs) if kwargs else {})
            return _torch.shown_to_user(self._own.of(returned))
        except (WholestepError, *_torch.DATA_DEPENDENT) as error:
            self.refused = self.refused or error
            raise

    def _is_plain(self, func: Any) -> bool:
        """Return whether a function without numbers among its arguments is only called, whatever these are."""
        plain = self._plain.get(func)
        if plain is None:
            name: str = getattr(func, "__name__", "")
            forms = form_of(func), _torch.of_tensors(func), READS.get(func)
            named = name in INSTEAD or name.strip("_") in (*_ASKS_FOR_ZERO, "get", "set")
            asked = func in (*_TEXT, *AS_TENSOR, *_torch.SUBTRACTIONS, cuda_attention.SDPA, torch.Tensor.__getitem__)
            plain = self._plain[func] = not (named or asked or any(forms))
        return plain

    def _run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        if func not in _torch.METADATA:
            _torch.note_line(_calling_line())
        if self._is_plain(func) and not self._numbers.among(args):
            refuse_generators(named)
            return func(*args, **named)
        reading = READS.get(func)
        name = getattr(func, "__name__", "").strip("_")
        asks_for_zero = name in _ASKS_FOR_ZERO and id(args[0]) in self._zeros
        if asks_for_zero and not any(isinstance(a, torch.Tensor) or a for a in args[1:]):
            return self._zeros[id(args[0])] is (name == "eq")
        if (returned := self._numbers.stacked(func, args, named)) is not NotImplemented:
            return returned
        if self._numbers.among(args):
            returned = self._numbers.operation(func, args, named, _calling_text(), not _is_called_by_user())
            if returned is not NotImplemented:
                return returned
            if reading:
                self._numbers.refuse_read(args[0], reading, _calling_text())
            if args[0] in self._numbers:  # `n += tensor` makes a new object: a number is none to change in place
                func = _IN_PLACE.get(func, func)
            args = self._numbers.operands(func, args)
        if reading and not _torch.known_constant(args[0]):
            refusal, value = read_refused(func, args[0]), cast(Any, self._known(args[0]))
            if value is None and func.__name__ in (_OF_BOOL if args[0].dtype is torch.bool else _ASK_TRUTH):
                value = self._step.branches.take(args[0], _calling_text())
            if value is None and func is torch.Tensor.numpy and args[0].is_floating_point() and args[0].dim():
                return self._step.watch.computed_array(args[0].detach(), refusal)
            try:
                if value is None:
                    return self._step.places.read(func, args[0], refusal)
            except CaptureError as error:
                if (value := self._in_error(args[0], error)) is None:
                    raise
            with _torch.outside_of_trace():
                return func(value if torch.is_tensor(value) else torch.full(args[0].shape, value), *args[1:], **named)
        if func in _TEXT and _torch.known_constant(args[0]):
            return func(self._known(args[0]), *args[1:])
        if func in _TEXT and _torch.is_fake(args[0]) and _is_called_by_user():
            self._numbers.refuse_read(args[0], "text", _calling_text())
            refusal = error_of_text(f"a tensor of shape {tuple(args[0].shape)}")
            if (value := self._in_error(args[0], refusal)) is not None:
                return func(value, *args[1:])
            file = (_calling_line() or ("",))[0]
            if func is torch.Tensor.__format__ and (is_installed(file) or not is_own_code(file)):
                return text_of_tensor(_calling_text())  # mostly of an error that is not raised
            raise refusal
        if func is torch.Tensor.__getitem__ and (out := self._step.places.picked(*args)) is not NotImplemented:
            return out
        refuse_generators(named)
        if func is cuda_attention.SDPA and self._step.kernels:  # a name that the step imported
            return cuda_attention.attention(func, *args, **named)
        if (form := form_of(func)) is not None:
            return form(func, self._known, *args, **named)
        if getattr(func, "__name__", "") == "__set__" and func == _SET_DATA and _torch.is_fake(args[0]):
            return _set_data(args[0], args[1])
        if getattr(func, "__name__", "") == "__set__" and func == _SET_GRAD and args[1] is None:
            self._step.saw_zero_grad(args[:1])
        if isinstance(named.get("alpha"), torch.Tensor) and func in _torch.SUBTRACTIONS:
            func, named = _torch.SUBTRACTIONS[func], {**named, "alpha": -named["alpha"]}
        if not named and (returned := self._step.counts.instead(func, args)) is not NotImplemented:
            return returned
        returned = self._called(func, args, named)
        if returned is None and getattr(func, "__name__", "") == "__get__" and func == _GET_GRAD:
            self._step.saw_no_grad(args[0])
        return returned

    def _in_error(self, tensor: torch.Tensor, refusal: CaptureError) -> torch.Tensor | None:
        """What a tensor is in this call, behind branches that no program took: for an error, or the step is refused."""
        assumed, taken, traced = self._step.request.options.branches, self._step.branches, _torch.traced_node(tensor)
        if not assumed or len(taken.decided) < len(assumed) or traced is None or _torch.inside_transform():
            return None
        value = self._step.values_now.now(*traced)
        if value is not None and self.refused is None:
            refusal.where, refusal.branches, self.refused = _calling_text(), taken.expected, refusal
        return value

    def _called(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        form = _torch.of_tensors(func) if self._numbers.among([*args, *named.values()]) else None
        if form is None:
            return func(*args, **named)
        with self, _torch.forms_set(_torch.CHECKS_OF_NUMBERS):
            return form(*args, **{k: v for k, v in named.items() if v is not None})


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise CaptureError(
            f"the step assigns a tensor {list(value.shape)} {value.dtype} to `.data` of a tensor "
            f"{list(tensor.shape)} {tensor.dtype}",
            "tensors that keep shape, dtype and device from step to step",
            "change the tensor before the step, which is then captured again",
        )
    _torch.set_data(tensor, value)


def _plain_state(state: StepState) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Return copies of what optimizers have, as (optimizer, name of the parameter, entries): without tensors, but in
    their lists, tuples and dicts. Nothing of a tensor that the step does not know, in place of a name.
    """
    names = {id(entry_of.tensor): name for name, entry_of in state.params.items()}
    return [
        (optimizer, names.get(id(p), p), Entry({k: v for k, v in items if not isinstance(v, torch.Tensor)}).copy())
        for optimizer in state.optimizers.values()
        for p, entry in optimizer.state.items()
        for items in [entry.items() if id(p) in names else ()]
    ]


def _calling_line() -> tuple[str, int] | None:
    frame = inspect.currentframe()
    while frame is not None and not (  # Python tells audit hooks of each look at a frame's code
        is_user_file(str(frame.f_globals.get("__file__", ""))) and is_user_file(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def _option_place(state: StepState, hyper: Hyper) -> Location:
    place = Location(hyper.name, GroupEntry([*state.optimizers.values()][hyper.optimizer], hyper.group), hyper.key)
    return place if hyper.index is None else NumberLocation(hyper.name, place, hyper.index)


def _calling_text() -> str:
    return show_line(*line) if (line := _calling_line()) else ""


def _asking_text() -> str:
    """Return the user's line that runs, or that made what a backward computes with."""
    line: tuple[str, int] | None = _calling_line() or _torch.noted("line")
    return show_line(*line) if line else ""


def _made_at(value: Any) -> str:
    """Return the user's line that made a tensor; "" for what no operation made."""
    traced = _torch.traced_node(value) if _torch.is_fake(value) else None
    return "" if traced is None else source_line(traced[0])


def _is_called_by_user() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.endswith(_INTERNAL):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def _explain(error: Exception) -> CaptureError:
    """Return a CaptureError for an error of torch's tracer or of the user's code."""
    where = user_frame_of(error)
    if asked := asked_number(error, where):
        return asked
    if isinstance(error, _torch.DATA_DEPENDENT):
        return value_read(
            f"the step has an operation whose result depends on values: {first_line(error)}",
            "use an operation with fixed sizes (torch.where, masks, padding) or keep it outside the step",
            where,
        )
    next_step = "run it uncompiled once; if that works, this operation cannot be traced: keep it outside the step"
    return CaptureError(
        f"the step failed while it was being captured: {type(error).__name__}: {error}",
        "a step that runs uncompiled on one device",
        f"use {PACKED_CURE}" if re.search(r"flex_attention\(|nested_tensor", where) else next_step,
        where,
    )
