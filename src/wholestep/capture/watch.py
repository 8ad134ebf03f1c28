"""Records the Python side effects of a step during a trace, so that each call can repeat them.

All reachable containers are compared before and after the trace. A changed number becomes part of the host program, a
changed tensor becomes an input and an output of the graph, a plain value is assigned in each call, and any other change
is refused. Then all containers are restored: no fake tensor remains in the user's objects.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType, FunctionType, ModuleType
from typing import Any, NoReturn, cast

import numpy as np
import torch

from .. import _torch
from ..errors import CaptureError
from ..graph.gc_control import is_enabled
from ..graph.meta import show_line
from ..graph.origin import is_of_python, is_own_code, is_user_file, own_modules
from .assumptions import Assumption, about, contents, expect, owned_by_callbacks, shared
from .call_structure import Structure, equal_objects, take_apart
from .effects import REFUSED, WAYS_OUT, Called, Change, Effects, Extra, Promoted, Recipe, RefusedError, Write, recorded
from .function_caches import CachedCalls
from .host_numbers import At, Numbers
from .locations import (
    MISSING,
    SIMPLE,
    ArgumentItems,
    GroupEntry,
    Location,
    Reads,
    StateEntry,
    Words,
    alike,
    holds_items,
    is_number,
    items_of,
    same_kind,
    tensors_of,
)
from .lr_schedulers import Schedulers
from .optimizer_entries import Entry, Items
from .outside import Outside
from .own_tensors import OwnTensors
from .reachable import Container, Reach, argument_containers, changeable, state_containers
from .stand_ins import (
    RefusedIterator,
    Unread,
    array_functions,
    as_given,
    is_foreign_iterator,
    is_of_trace,
    place_of,
    refuse_tensor_text,
)
from .state import StepState, state_name
from .wrappers import attributes_of

_TORCH_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused",
    "_zero_grad_profile_name", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_flat_weights", "_flat_weight_refs",
}  # attributes of modules and optimizers that torch manages  # fmt: skip
_HOOKS = ("._forward_hooks", "._forward_pre_hooks")
_SET_UP = ("_output_capturing_hooks_installed",)  # transformers: set when the first forward installs recording hooks
_MODULE_ATTRIBUTES = frozenset(dir(torch.nn.Module)) - {"forward"}
_ALWAYS_READ = ("variable", "class", "modules", "function", "tensor")


@dataclass
class Watch:
    """Recorder of the host effects of one trace.

    `promoted` places are state of the step. `find` is a path whose change is to be located. `line` returns the user's
    current line. `set_up` collects entries that a library adds to modules at their first call and that must stay.
    `of_torch` are the functions that are replaced while it traces, which the user's modules may have too.
    """

    state: StepState
    reach: Reach
    promoted: Promoted
    numbers: Numbers
    own_tensors: OwnTensors
    line: Callable[[], str]
    find: str = ""
    options: Sequence[tuple[torch.Tensor, Location, Any, float]] = ()
    found_at: str = ""
    extra: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    needed: Promoted = field(default_factory=Promoted)
    set_up: list[tuple[Container, Any, Any]] = field(default_factory=list[tuple[Container, Any, Any]])
    open_arguments: dict[int, Any] = field(default_factory=dict[int, Any])
    of_torch: Sequence[tuple[Any, str, Any]] = ()

    def __post_init__(self) -> None:
        self._called: list[Called] = []
        self._reads, self._assigned = set[tuple[int, str]](), set[tuple[int, str]]()
        self._unobserved, self._arguments = set[type](), dict[int, Any]()
        self._numbers_of_objects, self._unread = dict[int, int](), list[str]()
        self._writes: list[Write] = []
        self._expected: list[Assumption] = []
        self._equal: list[tuple[Container, Any, Any]] = []
        self.kept: list[tuple[Container, Any, Any, RefusedError]] = []
        self._rebound: list[str] = []
        self._watched: list[Container] = []
        self._flags: list[tuple[str, bool]] = []
        tensors = [*self.state.params.values(), *self.state.buffers.values()]
        self._held = {(_torch.identity(container), key) for entry in tensors for container, key in entry.places}
        self._replaced = self._paths_of_replaced()
        self._schedulers = Schedulers(self.numbers, self.reach, self.promoted.numbers, self.line)
        self._refused: CaptureError | None = None
        below = functools.partial(changeable, state=self.state)
        self.cached = CachedCalls(self.reach.caches, below, self._holds_fake, self._staying)
        self._outside = Outside(
            self.call, self._refuse, lambda tensor: self.numbers.index_of(tensor) is not None, self.cached
        )

    def _paths_of_replaced(self) -> set[str]:
        """Return the paths of tuples, lists and dicts that are replaced, whose tensors are carried."""
        return {
            container.path_of(key)
            for container in (self.reach.containers if self.promoted.tensors else ())
            for key, value in container.before.items()
            if items_of(value) and alike(value, value)
            if container.path_of(key) in self.promoted.tensors
            or (isinstance(value, tuple) and tensors_of(value, container.place_of(key)).keys() <= self.promoted.tensors)
        }

    @functools.cached_property
    def _changes(self) -> list[tuple[Any, str, Any]]:
        """Attributes to set: what runs in place of functions."""
        of_host = _torch.host_forms(self.numbers.of_math, self.numbers.as_float, self._schedulers.step, self._outside)
        forms = [(gc, "isenabled", is_enabled), *array_functions(self.computed_array)]
        return [*of_host, *self.cached.forms(), *_torch.forms_of(forms)]

    @functools.cached_property
    def shown(self) -> Callable[[Any], Any]:
        """What the step sees of a value that may be one of these functions. It is asked for before they are set."""
        return functools.partial(_torch.with_replaced, _torch.replaced_by(self._changes))

    @contextmanager
    def watching(
        self, fakes: Mapping[str, torch.Tensor], objects: Sequence[Any], paths: Sequence[str]
    ) -> Generator[None]:
        """Record the call of the step's function; `fakes` are by input name, `objects` those among the arguments."""
        self._inputs = {*fakes}
        of_call = argument_containers(objects, paths, self._arguments)
        self._numbers_of_objects = {id(value): number for number, value in enumerate(objects)}
        self._restored = [*self.own_tensors.attributes(), *self._settings(), *self.reach.containers]
        self._watched = containers = [*self._restored, *self._state_entries(), *of_call]
        trainable = {name: fakes[name].requires_grad for name in self.state.params}
        aliases = _torch.aliases([*self.of_torch, *self._changes], own_modules())
        patched = _torch.attributes_set([*self._changes, *aliases])
        types = _torch.types_shown(own_modules(), self.numbers.plain)
        reads = _torch.watched_attributes([torch.nn.Module, *self.reach.kinds], self._on_read, self._on_write)
        before = sys.gettrace()
        with _torch.undone():
            _torch.undo(self._end)
            self._begin(containers)
            _torch.undo(sys.settrace, before)
            _torch.undo(torch.set_grad_enabled, torch.is_grad_enabled())
            _torch.undo(torch.set_default_dtype, torch.get_default_dtype())
            with recorded(self.call), patched, types, reads as self._unobserved, self._outside.heard():
                if self.find:
                    sys.settrace(self._tracer(containers))
                yield
                sys.settrace(before)
            if self._refused is not None:
                raise self._refused  # the step caught it
            self._flags = [(n, fakes[n].requires_grad) for n, was in trainable.items() if fakes[n].requires_grad != was]
            self._compare(containers)
            objects = [c for c in of_call if c.owner is not None]
            self._unread = [c.path_of(key) for c in objects for key in c.before if not self._was_read(c, key)]

    def _begin(self, containers: Sequence[Container]) -> None:
        """Put numbers, and what runs in place of functions, into the places that the step can reach."""
        numbers, shown = self.promoted.numbers, self.shown
        for container in containers:
            container.before = container.now()
            if container.opaque is None:
                for key, value in container.before.items():
                    if numbers and is_number(value) and container.path_of(key) in numbers:
                        container.put(key, self.numbers.read(container.place_of(key), value))
                    elif (new := shown(value)) is not value and container.style != "class":
                        container.put(key, new)
                    elif is_foreign_iterator(value):
                        container.put(key, RefusedIterator(container.path_of(key), value, self.line, self._refuse))
        for option in self.options:
            self.numbers.option(*option)
        for scheduler in self.reach.schedulers:
            self._schedulers.show(scheduler, vars(scheduler), late=False)

    def _end(self) -> None:
        self.cached.end()
        for container in self._restored:
            before, container.before = container.before, container.original
            container.restore({key for key in before if self._is_carried(container, key, before[key])})

    def _is_carried(self, container: Container, key: Any, before: Any) -> bool:
        """Return whether an entry is a tensor of the state, or a container of such that the step may replace."""
        is_held = not self._held.isdisjoint((_torch.identity(at), key) for at in (container.holder, container.assigned))
        if is_held or not self._replaced:
            return is_held
        return container.path_of(key) in self._replaced and alike(before, container.now().get(key))

    @contextmanager
    def _staying(self) -> Generator[None]:
        """Changes inside this context stay: they are no effect of the step."""
        before = [container.now() for container in self._watched]
        yield
        for container, had in zip(self._watched, before, strict=True):
            now = container.now()
            for key in {**had, **now}:
                value = now.get(key, MISSING)
                for table in (container.before, container.original) if had.get(key, MISSING) is not value else ():
                    table.pop(key, None)
                    table.update({} if value is MISSING else {key: value})

    def _state_entries(self) -> list[Container]:
        optimizers = enumerate(self.state.optimizers)
        return [container for number, label in optimizers for container in state_containers(self.state, number, label)]

    def call(self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a callback."""
        self._called.append(Called(fn, self._recipe((args, kwargs), "")))

    def assign(self, place: Location, value: Any) -> None:
        """Record an assignment at the end of a call; MISSING deletes the entry."""
        self._writes.append(Write(place, None if value is MISSING else self._recipe(value, place.path)))

    def assign_to_batch(self, batch: Mapping[str, tuple[int, torch.Tensor, bool]]) -> None:
        """Record the gradients that the step leaves at tensors of the batch, and that these require one.

        `batch` has the number of each leaf, its fake, and whether the step resets its gradient before it computes one.
        """
        for name, (index, tensor, reset) in batch.items():
            if tensor.grad is not None:
                self.open_arguments[index], holder = None, ArgumentItems(self.open_arguments, index, attributes=True)
                self.assign(Location(f"{name}.requires_grad", holder, "requires_grad"), True)
                place = Location(f"{name}.grad", holder, "grad")
                self._writes.append(Write(place, self._recipe(tensor.grad, place.path), adds=not reset))

    def _refuse(self, error: CaptureError) -> NoReturn:
        self._refused = self._refused or error
        raise error

    def _on_read(self, original: Callable[..., Any], owner: Any, name: str) -> Any:
        seen = name != "__dict__" or is_user_file(sys._getframe(2).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]
        if seen and (_torch.identity(owner), name) not in self._assigned:
            self._reads.add((_torch.identity(owner), name))
        return original(owner, name)

    def _on_write(self, original: Callable[..., Any], owner: Any, name: str, value: Any) -> None:
        self._assigned.add((_torch.identity(owner), name))
        original(owner, name, value)

    def _settings(self) -> list[Container]:
        """Settings of torch and of optimizers that no call changes."""
        once = "later calls would not change it", "set it in a `with` block of the step"
        regrouped = "groups may change between calls alone", "call add_param_group() outside the step"
        rows: list[tuple[str, Callable[[], Any], tuple[str, str]]] = [
            ("torch's grad mode", torch.is_grad_enabled, once),
            ("torch's default dtype", torch.get_default_dtype, once),
            ("torch's autocast", functools.partial(torch.is_autocast_enabled, "cpu"), once),
        ]
        for optimizer in self.state.optimizers.values():
            path = f"the parameter groups of {type(optimizer).__name__}"
            rows.append((path, lambda o=optimizer: [len(group["params"]) for group in o.param_groups], regrouped))
        return [Container(path, None, "item", opaque=getter, refused=refused) for path, getter, refused in rows]

    def _compare(self, containers: Sequence[Container]) -> None:
        watched = {id(c.holder.table) for c in containers if isinstance(c.holder, Entry)}
        created = [c for c in self._state_entries() if id(c.holder.table) not in watched]
        for container in created:
            container.original = container.before = {}
        for container in [*containers, *created]:
            changes = container.changes()
            rebuilt = {key for key, before, after in changes if Structure in (type(before), type(after))}
            for key, before, after in changes:
                if self._is_carried(container, key, before):
                    self._note_rebound(before, after, container.place_of(key))
                elif key in rebuilt:
                    self._rebuild(container, key, container.original.get(key, MISSING))
                elif rebuilt and str(key).partition(".")[0] in rebuilt:
                    continue
                elif not self._is_state(container, after):
                    self._keep_or_record(container, key, container.original.get(key, MISSING), after)
        self.needed |= Promoted(frozenset(self._schedulers.needed))

    def _rebuild(self, container: Container, key: Any, before: Any) -> None:
        """Record that a step makes a container in the state of its optimizer, or another one in place of one."""
        entry, place = cast(Entry, container.holder), container.place_of(key)
        if before is not MISSING:
            self._expected.append(Assumption(place, "equal", before))
        if key not in entry.table:
            return self.assign(place, MISSING)
        of = cast(StateEntry, container.lookup)
        label = list(self.state.optimizers)[of.optimizer]
        new = {id(v): state_name(of.owner, n, of.optimizer, label) for n, v in entry.leaves().items()}
        new = {at: name for at, name in new.items() if name not in self._inputs}
        call = take_apart(entry.table[key], objects=False)
        leaves = tuple(
            Extra(new[id(v)])
            if id(v) in new and _torch.is_fake(v) and v not in self.numbers
            else self._leaf(v, place.path)
            for v in call.leaves
        )
        self._writes.append(Write(place, Recipe(call.structure, leaves)))
        return None

    def _note_rebound(self, before: Any, after: Any, place: Location) -> None:
        """Note the carried tensors, of a place or of a tuple there, that the step replaces by others of their kind."""
        now = tensors_of(after, place)
        for path, (tensor, _) in tensors_of(before, place).items():
            is_carried = path in now and not {path, place.path}.isdisjoint(self.promoted.tensors)
            new = now[path][0] if is_carried else tensor
            if new is not tensor and same_kind(tensor, new):
                self._rebound.append(path)

    def _is_state(self, container: Container, after: Any) -> bool:
        """Return whether a value is a tensor of optimizer state, which the graph updates."""
        is_state = isinstance(container.lookup, StateEntry) and isinstance(after, torch.Tensor)
        return is_state and after not in self.numbers

    def _keep_or_record(self, container: Container, key: Any, before: Any, after: Any) -> None:
        """Record a change. An object in place of an equal one is none; what no call can repeat may be set up once."""
        needed, expected, extra = self.needed, len(self._expected), len(self.extra)
        try:
            self._record_change(container, key, before, after)
        except RefusedError as error:
            change = Change(container, key, before, after)
            if self.find or not change.can_stay or self._holds_fake((key, after)):
                raise
            self.needed, self._expected[expected:], self.extra[extra:] = needed, [], []
            if container.opaque is None and equal_objects(before, after):
                self._equal.append((container, key, before))
            else:
                self.kept.append((container, key, after, error))

    def _record_change(self, container: Container, key: Any, before: Any, after: Any) -> None:
        place = container.place_of(key)
        path = container.path if container.path.endswith(_HOOKS) else place.path  # a hook has a new key in each trace
        of_library = isinstance(after, FunctionType) and not is_own_code(after.__code__.co_filename)
        if before is MISSING and (of_library if container.path.endswith(_HOOKS) else key in _SET_UP):
            self.set_up.append((container, key, after))
            return
        if (container.owner is not None and key in _TORCH_INTERNAL) or _torch.only_looks(after):
            return
        self._refuse_unrepeatable(container, key, before, after)
        is_argument = isinstance(container.lookup, ArgumentItems)  # other guards compare it
        if self._was_read(container, key) and not is_argument:
            self._guard_old_value(place, before, after)
        self.assign(dataclasses.replace(place, path=path), after)

    def _was_read(self, container: Container, key: Any) -> bool:
        """Return whether the step may have read an entry; only attribute reads are observed."""
        owner = container.owner
        if owner is None or type(owner) in self._unobserved:
            return True
        return not self._reads.isdisjoint([(_torch.identity(owner), key), (_torch.identity(owner), "__dict__")])

    def _guard_old_value(self, place: Location, before: Any, after: Any) -> None:
        """Handle the value that a changed place had: make it state of the step, or guard it."""
        if is_number(before):
            if place.path not in self.promoted.numbers:
                self.needed |= Promoted(frozenset([place.path]))
        elif isinstance(before, torch.Tensor) or (before and alike(before, after) and self._may_replace(before, after)):
            self.needed |= Promoted(frozenset(), frozenset([place.path]))
        elif place.path in self._replaced:
            return
        elif holds_items(before) and before is not after:
            raise RefusedError(
                place.path, before, after, "the step may have read the old container, which each call replaces",
                f"assign to its items, which are carried, or {WAYS_OUT}",
            )  # fmt: skip
        else:
            self._expected.append(expect(place, before))

    def _may_replace(self, before: Any, after: Any) -> bool:
        """Return whether a container can be made anew in each call: the old one stays, the new one is in one place."""
        changed = any(c.holder is before and c.changes() for c in self._watched)
        places = sum(value is after for c in self._watched for value in c.now().values())
        return isinstance(before, tuple) or not (changed or places > 1)

    def _refuse_unrepeatable(self, container: Container, key: Any, before: Any, after: Any) -> None:
        change, path = Change(container, key, before, after), container.path_of(key)
        refused = container.refused or next((row[1:] for row in REFUSED if row[0](change)), None)
        if change.resizes_list:
            path, before, after = (
                container.path,
                *(Words(f"{len(v)} items") for v in (container.before, container.holder)),
            )
        elif container.opaque is not None and not container.refused:
            before, after = Words(f"a {type(container.holder).__name__}"), Words("changed")
        if refused:
            raise RefusedError(path, before, after, *refused)

    def _recipe(self, value: Any, path: str) -> Recipe:
        call = take_apart(value, objects=False)
        return Recipe(call.structure, tuple(self._leaf(v, path) for v in call.leaves))

    def stand_in(self, index: int, name: str, value: Any, fake: torch.Tensor | None) -> Any:
        """What the step gets for leaf `index`, whose value may be any: a number is an input, an array holds `fake`."""
        self.open_arguments[index] = value
        place = Location(name, Reads(lambda i: as_given(self.open_arguments[i])), index)
        kind = np.ndarray if fake is not None else cast(type[Any], type(value))
        return self.numbers.read(place, value) if is_number(value) else Unread(kind, place, self._refuse_use, fake)

    def _refuse_use(self, name: str) -> NoReturn:
        error = CaptureError(
            f"the step reads the argument {name}", "an argument that it does not read", "", self.line()
        )
        error.place = name
        self._refuse(error)

    def computed_array(self, contents: torch.Tensor, refusal: CaptureError) -> Unread:
        """What stands for an array that the step computes: the `refusal` is raised where values of it are asked for."""
        refusal.where = self.line()
        return Unread(np.ndarray, None, lambda _: self._refuse(refusal), contents)

    def argument(self, value: Any) -> Any:
        """A number, or an object that the call is given, as what each call takes in its place; else the value."""
        if (place := place_of(value)) is not None:
            return self.numbers.taken(place.get)
        number = self._numbers_of_objects.get(id(value))
        if number is None:
            return self.numbers.argument(value)
        return self.numbers.taken(functools.partial(self._arguments.__getitem__, number))

    def _leaf(self, value: Any, path: str) -> Any:
        argument = self.argument(value)
        if argument is not value:
            return argument
        refuse_tensor_text(value)
        value = self.own_tensors.fake_of(value) if isinstance(value, torch.Tensor) else value
        if _torch.is_fake(value):
            self.extra.append(value)
            return Extra(len(self.extra) - 1)
        if not isinstance(value, (*SIMPLE, torch.Tensor, type, Enum)) and _torch.identity(value) not in self.reach.seen:
            attributes = attributes_of(value) or {}
            if path or any(self._is_traced(v) for v in attributes.values()):
                raise RefusedError(
                    path or "an argument of wholestep.callback", None, value,
                    "the step creates an object that all later calls would share", WAYS_OUT,
                )  # fmt: skip
        return value

    def refuse_made(self, results: Sequence[Any]) -> None:
        """Raise CaptureError if a result is an object that the step made and that holds a tensor of the trace."""
        for value in results:
            refuse_tensor_text(value)
            if not isinstance(value, (*SIMPLE, torch.Tensor, type)) and self._holds_fake(value):
                raise CaptureError(
                    f"the step returns a {type(value).__name__} that holds tensors: later calls would return it again",
                    "tensors and plain values, in tuples, lists, dicts, mappings and dataclasses",
                    "return its parts, and make the object after the call; or make its class a dataclass",
                )

    def _is_traced(self, value: object) -> bool:
        return _torch.is_fake(value) or self.own_tensors.name_of(value) is not None

    def _holds_fake(self, value: Any) -> bool:
        seen, waiting = set(self.reach.seen), list[Any]([value])
        while waiting:
            reached: Any = waiting.pop()
            if self._is_traced(reached) or is_of_trace(reached) or isinstance(reached, _torch.SYMBOLIC):
                return True
            if _torch.identity(reached) not in seen and not isinstance(reached, (type, ModuleType)):
                is_function = isinstance(reached, FunctionType)  # whose globals lead anywhere
                waiting += (reached.__closure__ or ()) if is_function else gc.get_referents(reached)
            seen.add(_torch.identity(reached))
        return False

    def _tracer(self, containers: Sequence[Container]) -> Callable[..., Any]:
        """Return a trace function that locates the line that changes the entry `find`."""
        places = [c for c in containers if c.path == self.find or any(c.path_of(k) == self.find for k in c.now())]
        places += [c for c in containers if c.style != "variable" and self.find.startswith(c.path) and c not in places]
        last: dict[FrameType, int] = {}

        def look(frame: FrameType | None) -> None:
            if frame is not None and frame in last:
                changed = any(self.find in (c.path, c.path_of(key)) for c in places for key, _, _ in c.changes())
                self.found_at = (self.found_at or show_line(frame.f_code.co_filename, last[frame])) if changed else ""

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            look(frame)
            last[frame] = frame.f_lineno
            return local

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            look(frame.f_back)
            code = frame.f_code
            traced = is_user_file(code.co_filename) and not is_of_python(code.co_filename)
            return local if traced and not code.co_flags & inspect.CO_GENERATOR else None

        return enter

    def effects(self, used: set[str], returned: Sequence[Any]) -> Effects:
        """Return the host effects of each call; `used` are the names of the graph's inputs, `returned` the results."""
        leaves = [*returned, *(v for w in self._writes if w.recipe for v in w.recipe.leaves)]
        leaves += [v for c in self._called for v in c.recipe.leaves]
        program = self.numbers.program(used, {v.index for v in leaves if isinstance(v, At)})
        expected = [*self._expected, *self._outside.read.values(), *self._carried_numbers(), *self._read_places()]
        return Effects(
            program, tuple(self._writes), tuple(self._called), tuple(expected), len(self.extra), tuple(self._rebound),
            tuple(self._flags), self.promoted, self._arguments, tuple(self._unread), self.open_arguments,
        )  # fmt: skip

    def _read_while_absent(self, container: Container, names: set[str], changed: set[str]) -> list[Assumption]:
        """Guard attributes that the object did not have: the class has them, or the step asked whether they exist."""
        owner, keys = container.owner, container.keys
        if owner is None:
            return []
        absent = (names if keys is None else names & keys) - {*container.before, *container.excluded}
        if isinstance(owner, torch.optim.Optimizer) and id(owner) in self.reach.of_state:
            absent = {name for name in absent if not name.startswith("_") and not hasattr(type(owner), name)}
        if isinstance(owner, torch.nn.Module):
            in_tables = (vars(owner)[table] for table in container.excluded)
            absent -= _MODULE_ATTRIBUTES.union(*in_tables)
        return [expect(container.place_of(n), MISSING) for n in absent if container.path_of(n) not in changed]

    def _is_sized(self, container: Container) -> bool:
        """Return whether the number of entries is guarded: the step may have asked whether another one is there."""
        owner, contents = container.owner, container.before
        if container.style in ("modules", "function"):
            return bool(contents) or container.style == "function"
        if not isinstance(container.holder, dict) or owner is None or id(owner) in self.reach.of_state:
            return False
        return type(owner) in self._unobserved or (_torch.identity(owner), "__dict__") in self._reads

    def _carried_numbers(self) -> list[Assumption]:
        """Guard the type of carried numbers, the shape and dtype of carried tensors, and which places share these."""
        carried = [place for _, place in self.reach.carried(self.promoted.tensors).values()]
        sharing = self.reach.holding({id(place.get()) for place in carried})
        in_tuples = {id(place.holder): place for place in carried if isinstance(place.holder, Items)}.values()
        tuples = [Location(place.path.rpartition("[")[0], place.holder, None) for place in in_tuples]
        return [
            *(Assumption(p, "tensor", about(cast(torch.Tensor, p.get()))) for p in carried),
            *(Assumption(place, "size", len(place.holder)) for place in tuples),
            *([shared(sharing)] if len(sharing) > 1 else []),
            *(
                Assumption(container.place_of(key), "type", type(value))
                for container in (self.reach.containers if self.promoted.numbers else ())
                for key, value in container.before.items()
                if is_number(value) and container.path_of(key) in self.promoted.numbers
            ),
        ]

    def _read_places(self) -> list[Assumption]:
        """Guard every value that the trace read on the host and that may change between calls."""
        changed = {w.place.path for w in self._writes} | self.promoted.numbers | self.promoted.tensors
        changed |= {*self._replaced}
        carried: dict[int, set[Any]] = {}
        changed |= {container.path_of(key) for container, key, _ in self._equal}
        for container in self.reach.containers:
            keys = [*container.before, *(w.place.key for w in self._writes if w.place.holder is container.assigned)]
            carried[id(container.holder)] = {key for key in keys if changed and container.path_of(key) in changed}
        reads = dict[int, set[str]]()
        for owner, name in self._reads:
            reads.setdefault(owner, set()).add(name)
        of_callbacks = owned_by_callbacks([c.fn for c in self._called])
        out = [expect(place, place.get()) for place in self.reach.methods]
        out += [e for value, path in self.reach.bound for e in contents(value, path, carried)]
        for container, key, value in self._equal:
            place = container.place_of(key)
            out += [Assumption(place, "built", value), *contents(value, place.path, carried)]
        for container in self.reach.containers:
            is_group = isinstance(container.lookup, GroupEntry) and not carried[id(container.holder)]
            if is_group or self._is_sized(container):
                out.append(
                    Assumption(Location(container.path, container.assigned, None), "size", len(container.holder))
                )
            elif container.style == "tensor":
                names = frozenset(cast(dict[str, Any], container.before))
                out.append(Assumption(Location(container.path, container.lookup, None), "attributes", names))
            if container.opaque is not None or (container.owner is None and container.style not in _ALWAYS_READ):
                continue
            out += self._read_while_absent(container, reads.get(_torch.identity(container.owner), set()), changed)
            for key, value in container.before.items():
                path = container.path_of(key)
                guarded = key == "training" and id(container.owner) in self.reach.of_state
                if not self._was_read(container, key) or path in changed or key in _TORCH_INTERNAL or guarded:
                    continue
                out.append(expect(container.place_of(key), value))
                if isinstance(value, torch.Tensor) and id(value) not in self.reach.of_state:
                    out.append(Assumption(container.place_of(key), "tensor", about(value)))
                out += [e for e in contents(value, path, carried) if id(e.place.holder) not in of_callbacks]
        return out
