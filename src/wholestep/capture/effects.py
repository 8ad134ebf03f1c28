"""What a step does besides computing tensors: what has changed when a trace ends, and how each call does it again.

All that the step can reach is compared before and after. A number becomes part of the host's program, a tensor an
input and an output of the graph, a plain value is assigned anew; anything else is refused. Afterwards everything is as
it was: no fake tensor stays in an object of the user's.
"""

from __future__ import annotations

import builtins
import inspect
import io
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .. import _torch
from ..errors import CaptureError
from ..graph.graph import Input
from ..graph.meta import is_users, meta_of, show_line
from .callback import recorded
from .expect import Expected, contents, expect, given_away
from .find import Structure, put_together, take_apart
from .numbers import At, HostProgram, Numbers, Preserved
from .places import MISSING, SIMPLE, FloatPlace, GroupPlace, PartPlace, Place, StatePlace, Words, is_number, shown
from .reach import Container, Reach, is_of_python, is_own_code
from .state import StepState

CALLBACK = "`wholestep.callback(fn, *values)`, which calls fn with the values of each step"
_SCHEDULED = ("lr", "momentum", "betas")


@dataclass(frozen=True)
class Promoted:
    """Paths of places whose value is carried from call to call: `numbers` on the host, `tensors` in the graph."""

    numbers: frozenset[str] = frozenset()
    tensors: frozenset[str] = frozenset()

    def __or__(self, other: Promoted) -> Promoted:
        return Promoted(self.numbers | other.numbers, self.tensors | other.tensors)

    def __le__(self, other: Promoted) -> bool:
        return self.numbers <= other.numbers and self.tensors <= other.tensors

    def __bool__(self) -> bool:
        return bool(self.numbers or self.tensors)


@dataclass(frozen=True)
class Extra:
    """A leaf that is result number `index` of those that the step makes beside what it returns."""

    index: int


@dataclass(frozen=True)
class Made:
    """A value that each call makes: structure and leaves, which are plain, of the host's program, or `Extra`."""

    structure: Structure
    leaves: tuple[Any, ...]

    def value(self, numbers: Sequence[Any], extra: Sequence[Any]) -> Any:
        """The value of one call."""
        found = [numbers[v.index] if type(v) is At else extra[v.index] if type(v) is Extra else v for v in self.leaves]
        return put_together(self.structure, found)


@dataclass(frozen=True)
class Write:
    """An assignment at the end of a call; without `made`, the place is emptied."""

    place: Place
    made: Made | None


@dataclass(frozen=True)
class Called:
    """A callback at the end of a call: `fn(*args, **kwargs)` of `made`."""

    fn: Callable[..., object]
    made: Made


@dataclass(frozen=True)
class Effects:
    """What each call does on the host, and what it takes for granted there.

    `extra` counts the results that the graph makes for it; `rebound` names the tensors that a call replaces in place of
    changing them; `flags` are parameters whose `requires_grad` is set at the end.
    """

    program: HostProgram = HostProgram()
    writes: tuple[Write, ...] = ()
    calls: tuple[Called, ...] = ()
    expected: tuple[Expected, ...] = ()
    extra: int = 0
    rebound: tuple[str, ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    carried: Promoted = Promoted()

    def group_options(self) -> set[tuple[int, int, Any]]:
        """Options of parameter groups that are carried or assigned: optimizer, number of the group, key."""
        places = [*(w.place for w in self.writes), *(e.place for e in self.expected if e.kind == "type")]
        return {(id(p.optimizer), p.group, p.key) for p in places if isinstance(p, GroupPlace)}

    @property
    def works(self) -> bool:
        """True where a call does anything on the host."""
        return bool(self.acts)

    @property
    def acts(self) -> str:
        """What a call does beyond computing tensors, for a message; empty where it does nothing."""
        first = next(iter(self.writes), None)
        if first is not None:
            return f"the step changes {first.place.path}"
        if self.calls:
            return "the step makes calls on the host"
        if self.rebound or self.flags:
            return f"the step changes {(*self.rebound, *(name for name, _ in self.flags))[0]}"
        return "the step does work on the host" if self.program.needed or self.program.decisions else ""


class RefusedError(CaptureError):
    """A change that no call could make again; `path` says of what."""

    def __init__(self, path: str, before: object, after: object, why: str, way_out: str) -> None:
        self.path = path
        super().__init__(f"the step changes {path}: {shown(before)} -> {shown(after)}; {why}", NEEDED, way_out)


_PRINT = builtins.print
_OWN_BUSINESS = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused",
    "_zero_grad_profile_name", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_flat_weights", "_flat_weight_refs",
}  # what torch keeps for itself in modules and optimizers; hooks are compared apart  # fmt: skip
_OF_MODULES = frozenset(dir(torch.nn.Module)) - {"forward"}
_ALWAYS_READ = ("variable", "class", "modules")
NEEDED = "numbers, tensors and plain values that are assigned, which each call then assigns anew"
WAYS_OUT = f"return it from the step, or use {CALLBACK}"


@dataclass
class Watch:
    """What one trace sees of the host. `promoted` places are carried; `find` is a path whose change is to be located.

    `add_input` takes each further input of the graph with its position, from `first_number` on; `line` is the user's.
    """

    state: StepState
    reach: Reach
    promoted: Promoted
    mode: Any
    first_number: int
    add_input: Callable[[int, Input, torch.Tensor], None]
    line: Callable[[], str]
    find: str = ""
    options: Sequence[tuple[torch.Tensor, Place, float]] = ()
    found_at: str = ""
    extra: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    needed: Promoted = field(default_factory=Promoted)

    def __post_init__(self) -> None:
        self.numbers = Numbers(self.mode, self.first_number, self.add_input)
        self._called: list[Called] = []
        self._reads, self._assigned = set[tuple[int, str]](), set[tuple[int, str]]()
        self._blind, self._running = set[type](), False
        self._writes: list[Write] = []
        self._returned = set[int]()
        self._expected: list[Expected] = []
        self._rebound: list[str] = []
        self._originals: list[dict[Any, Any]] = []
        self._flags: list[tuple[str, bool]] = []
        self._schedulers: list[tuple[LRScheduler, dict[str, Any]]] = []
        self._held = {(id(container), key) for h in self._carriers() for container, key in h.places}
        self._thread = threading.get_ident()

    def _carriers(self) -> list[Any]:
        return [*self.state.params.values(), *self.state.buffers.values()]

    # -- while it runs ------------------------------------------------------------------
    @contextmanager
    def watching(self, given: Mapping[str, torch.Tensor]) -> Generator[None]:
        """Around the call of the step's function; `given` are its stand-ins by name."""
        containers = self._begin()
        trainable = {name: given[name].requires_grad for name in self.state.params}
        patched = _torch.patched_host(self._math, self._scheduled, self._printed, self._clock)
        reads = _torch.watched_attributes([torch.nn.Module, *self.reach.kinds], self._read, self._written)
        before = sys.gettrace()
        try:
            with recorded(self.call), patched, reads as self._blind:
                if self.find:
                    sys.settrace(self._tracer(containers))
                yield
                sys.settrace(before)
            self._flags = [(n, given[n].requires_grad) for n, was in trainable.items() if given[n].requires_grad != was]
            self._compare(containers)
        finally:
            sys.settrace(before)
            self._end(containers)

    def _begin(self) -> list[Container]:
        containers = [*self.reach.containers, *self._state_entries()]
        self._originals = [c.before for c in containers]
        for container in containers:
            container.before = container.now()
            if container.opaque is None:
                for key, value in container.before.items():
                    if is_number(value) and container.path_of(key) in self.promoted.numbers:
                        self._replace(container, key, self.numbers.read(container.place_of(key), value))
                    elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                        self._replace(container, key, _Untouched(container.path_of(key), value, self.line))
        for option in self.options:
            self.numbers.option(*option)
        for scheduler in self.reach.schedulers:
            self._show_numbers(scheduler, vars(scheduler), late=False)
        return containers

    def _replace(self, container: Container, key: Any, value: Any) -> None:
        Place("", container.holder, key).set(value)
        container.before = {**container.before, key: value}

    def _end(self, containers: Sequence[Container]) -> None:
        for container, original in zip(self.reach.containers, self._originals, strict=False):
            kept = {key for key in container.now() if (id(container.holder), key) in self._held}
            container.before = original
            container.restore(kept)
        for scheduler, attributes in reversed(self._schedulers):
            vars(scheduler).clear()
            vars(scheduler).update(attributes)

    def _state_entries(self) -> list[Container]:
        """Options that the optimizers keep for each parameter, by its stand-in."""
        out: list[Container] = []
        for number, (label, optimizer) in enumerate(self.state.optimizers.items()):
            for name, held in self.state.params.items():
                entry = optimizer.state[held.tensor] if held.tensor in optimizer.state else None
                if entry is not None:
                    out.append(self._entry(number, label, name, entry, dict(entry)))
        return out

    def _entry(self, number: int, label: str, owner: str, entry: Any, before: dict[Any, Any]) -> Container:
        def place(key: Any) -> Place:
            path = f"{label}.state[{owner!r}][{key!r}]"
            return StatePlace(path, None, key, state=self.state, optimizer=number, owner=owner)

        return Container(f"{label}.state[{owner!r}]", entry, before, "item", place=place)

    # -- what it sees -------------------------------------------------------------------
    def call(self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write down a callback."""
        self._called.append(Called(fn, self._made((args, kwargs), "")))

    def _read(self, owner: Any, name: str) -> None:
        if name != "__dict__" or is_users(sys._getframe(2).f_code.co_filename):  # pyright: ignore[reportPrivateUsage]
            if (id(owner), name) not in self._assigned:
                self._reads.add((id(owner), name))

    def _written(self, owner: Any, name: str) -> None:
        self._assigned.add((id(owner), name))

    def _math(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self.numbers.call(function, args) if self.numbers else NotImplemented

    def _users(self) -> bool:
        """True when the user's own code made the call that is being looked at."""
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # of the patched function's caller
        while frame is not None and "wholestep/_torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        return self._thread == threading.get_ident() and frame is not None and is_own_code(frame.f_code.co_filename)

    def _printed(self, *args: Any, **kwargs: Any) -> None:
        if not self._users():
            _PRINT(*args, **kwargs)
            return
        tensors = [v for v in take_apart((args, kwargs)).leaves if isinstance(v, torch.Tensor)]
        if any(self.numbers.index_of(v) is None for v in tensors):
            raise CaptureError(
                "the step prints a tensor, which has no value while the step is captured",
                "a call that is made in each step, with the values of that step",
                "write wholestep.callback(print, ...) with the same arguments",
                self.line(),
            )
        self.call(_PRINT, args, kwargs)

    def _clock(self, name: str) -> None:
        if self._users():
            raise CaptureError(
                f"the step reads the clock with time.{name}(): all later steps would use the same time",
                "a step whose work does not depend on the time",
                "read the clock outside the step, or in a function given to wholestep.callback; "
                "step.profile() times a step",
                self.line(),
            )

    def _scheduled(self, scheduler: LRScheduler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A scheduler's step runs for real in each call; what it sets are new numbers from there on."""
        if self._running:
            return False
        every = _torch.schedulers_of(scheduler)
        self._refuse_metrics(scheduler, every, [*args, *kwargs.values()])
        optimizers = {id(s.optimizer): s.optimizer for s in every if getattr(s, "optimizer", None) is not None}
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        for optimizer in optimizers.values():
            self._flush_groups(optimizer)
        self.numbers.effect(
            [*groups, *(vars(s) for s in every)],
            _run_scheduler, scheduler, tuple(optimizers.values()), tuple(kwargs), *args, *kwargs.values(),
        )  # fmt: skip
        after = self._tried(scheduler, every, groups, args, kwargs)
        for optimizer in optimizers.values():
            self._renew_groups(optimizer, after)
        for one in every:
            self._show_numbers(one, after[id(vars(one))], late=True)
        return True

    def _refuse_metrics(self, scheduler: LRScheduler, every: Sequence[LRScheduler], given: Sequence[Any]) -> None:
        if any(isinstance(s, ReduceLROnPlateau) for s in every):
            raise CaptureError(
                "the step calls ReduceLROnPlateau.step, which reads a metric on the host",
                "schedulers that follow from the number of steps",
                "return the metric and call scheduler.step(metric) after the compiled step",
                self.line(),
            )
        if any(isinstance(v, torch.Tensor) and v not in self.numbers for v in given):
            raise CaptureError(
                f"the step gives {type(scheduler).__name__}.step a tensor",
                "a scheduler's step without arguments, or with numbers",
                "call it after the compiled step",
                self.line(),
            )

    def _tried(
        self, scheduler: LRScheduler, every: Sequence[LRScheduler], groups: Sequence[dict[str, Any]],
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> dict[int, dict[str, Any]]:  # fmt: skip
        """What a scheduler and the groups hold after its step, by the identity of each: it is made and undone."""
        held = [*groups, *(vars(s) for s in every)]
        plain = self.numbers.plain
        with Preserved(held), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in held:
                for key, value in list(one.items()):
                    one[key] = type(value)(map(plain, value)) if type(value) in (list, tuple) else plain(value)
            self._running = True
            try:
                scheduler.step(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
            finally:
                self._running = False
            return {id(one): dict(one) for one in held}

    def _group_containers(self, optimizer: Any) -> list[Container]:
        groups = {id(group) for group in optimizer.param_groups}
        return [c for c in self.reach.containers if id(c.holder) in groups]

    def _flush_groups(self, optimizer: Any) -> None:
        """Numbers that the step has set until here are where the scheduler looks for them."""
        for container in self._group_containers(optimizer):
            for key, _, after in container.changes():
                index, before = self.numbers.index_of(after), self._original(container, key)
                path = container.path_of(key)
                if is_number(before) and path not in self.promoted.numbers:
                    self.needed |= Promoted(frozenset([path]))
                elif index is None and isinstance(after, torch.Tensor):
                    why = "a scheduler steps after that, and works with numbers"
                    raise RefusedError(path, before, after, why, "call the scheduler after the step")
                self.numbers.effect([container.holder], container.place_of(key).set, after)
                container.before = {**container.before, key: after}

    def _renew_groups(self, optimizer: Any, found: Mapping[int, dict[str, Any]]) -> None:
        """The options that a scheduler's step changes are other numbers from here on."""
        for container in self._group_containers(optimizer):
            after = found[id(container.holder)]
            for key, value in after.items():
                before = self.numbers.plain(container.holder.get(key))
                if key != "lr" and (key not in _SCHEDULED or _same(before, value)):
                    continue
                place = container.place_of(key)
                if isinstance(value, tuple):
                    parts = enumerate(cast(tuple[Any, ...], value))
                    new: Any = tuple(
                        self.numbers.read(PartPlace(f"{place.path}[{i}]", place, i), v, True) for i, v in parts
                    )
                else:
                    new = self.numbers.read(FloatPlace(place.path, place, key), float(value), late=True)
                container.holder[key] = new
                container.before = {**container.before, key: new}

    def _show_numbers(self, scheduler: LRScheduler, values: Mapping[str, Any], late: bool) -> None:
        """What a scheduler tells of itself, as numbers of this place in the step."""
        held, name = vars(scheduler), type(scheduler).__name__
        if all(other is not scheduler for other, _ in self._schedulers):
            self._schedulers.append((scheduler, dict(held)))
        for key, value in list(values.items()):
            place = Place(f"{name}.{key}", held, key)
            if is_number(value):
                held[key] = self.numbers.read(place, value, late)
            elif key == "_last_lr" and isinstance(value, list):
                held[key] = [
                    self.numbers.read(PartPlace(f"{name}.get_last_lr()[{i}]", place, i), float(v), late)
                    for i, v in enumerate(cast(list[Any], value))
                ]

    # -- after it -----------------------------------------------------------------------
    def _original(self, container: Container, key: Any) -> Any:
        for other, original in zip(self.reach.containers, self._originals, strict=False):
            if other is container:
                return original.get(key, MISSING)
        return container.before.get(key, MISSING)

    def _compare(self, containers: Sequence[Container]) -> None:
        known = {id(c.holder) for c in containers}
        for container, original in zip(containers, self._originals, strict=True):
            for key, _, after in container.changes():
                if (id(container.holder), key) in self._held:
                    self._rebind(container.path_of(key), after)
                elif not self._is_state(container, after):
                    self._settle(container, key, original.get(key, MISSING), after)
        self._compare_new_entries(known)

    def _compare_new_entries(self, known: set[int]) -> None:
        """Numbers and plain values in state that the optimizers created."""
        for number, (label, optimizer) in enumerate(self.state.optimizers.items()):
            for name, held in self.state.params.items():
                entry = optimizer.state[held.tensor] if held.tensor in optimizer.state else {}
                if id(entry) not in known:
                    container = self._entry(number, label, name, entry, {})
                    for key, value in entry.items():
                        if not self._is_state(container, value):
                            self._settle(container, key, MISSING, value)

    def _is_state(self, container: Container, after: Any) -> bool:
        """True for a tensor of optimizer state, which is part of the graph anyway."""
        ours = container.place is not None and isinstance(container.place(""), StatePlace)
        return ours and isinstance(after, torch.Tensor) and after not in self.numbers

    def _rebind(self, path: str, after: Any) -> None:
        """A tensor that is held; one that the step replaces is replaced by each call."""
        if path in self.promoted.tensors and isinstance(after, torch.Tensor):
            self._rebound.append(path)

    def _settle(self, container: Container, key: Any, before: Any, after: Any) -> None:
        """How each call makes one change again, or why it cannot."""
        path, place = container.path_of(key), container.place_of(key)
        if container.owner is not None and key in _OWN_BUSINESS:
            return
        self._refuse_unrepeatable(container, key, before, after)
        if self._was_read(container, key):
            self._keep_in_mind(place, before, after)
        self._writes.append(Write(place, None if after is MISSING else self._made(after, path)))

    def _was_read(self, container: Container, key: Any) -> bool:
        """False only for attributes, of which each read is seen."""
        if container.owner is None or container.kind in self._blind:
            return True
        return bool({(container.owner, key), (container.owner, "__dict__")} & self._reads)

    def _keep_in_mind(self, place: Place, before: Any, after: Any) -> None:
        """What follows from the value that a changed place had: it is carried, or it has to be there again."""
        if is_number(before):
            if place.path not in self.promoted.numbers:
                self.needed |= Promoted(frozenset([place.path]))
        elif isinstance(before, torch.Tensor):
            self.needed |= Promoted(frozenset(), frozenset([place.path]))
        elif isinstance(before, (list, dict, tuple, set)) and before and before is not after:
            raise RefusedError(
                place.path, before, after, "the old container may have been read, and each call brings another one",
                f"assign to its items, which are carried, or {WAYS_OUT}",
            )  # fmt: skip
        else:
            self._expected.append(expect(place, before))

    def _refuse_unrepeatable(self, container: Container, key: Any, before: Any, after: Any) -> None:
        path = container.path_of(key)
        kind = type(container.holder).__name__
        if container.opaque is not None:
            raise RefusedError(
                path, Words(f"a {kind}"), Words("changed"), "it has no items that each call could assign", WAYS_OUT
            )
        if isinstance(container.holder, list) and (before is MISSING or after is MISSING):
            counts = len(container.before), len(cast(list[Any], container.holder))
            raise RefusedError(
                container.path,
                Words(f"{counts[0]} items"),
                Words(f"{counts[1]} items"),
                "lists keep their length",
                WAYS_OUT,
            )
        if isinstance(key, torch.Tensor):
            raise RefusedError(path, before, after, "a key that is a number of the step or a tensor", WAYS_OUT)
        if isinstance(before, torch.nn.Module) or isinstance(after, (torch.nn.Module, torch.nn.Parameter)):
            raise RefusedError(
                path, before, after, "a step keeps its modules and parameters", "change it between calls"
            )

    def _made(self, value: Any, path: str) -> Made:
        call = take_apart(value)
        return Made(call.structure, tuple(self._leaf(v, path) for v in call.leaves))

    def leaf(self, value: Any) -> Any:
        """A leaf of what the step returns: a number by its line, anything else as it is."""
        index = self.numbers.index_of(value)
        if index is None:
            return value
        self._returned.add(index)
        return At(index)

    def _leaf(self, value: Any, path: str) -> Any:
        index = self.numbers.index_of(value)
        if index is not None:
            return At(index)
        if _torch.is_fake(value):
            self.extra.append(value)
            return Extra(len(self.extra) - 1)
        if not isinstance(value, (*SIMPLE, torch.Tensor, type)) and id(value) not in self.reach.seen:
            held = list(vars(value).values()) if hasattr(value, "__dict__") else []
            if path or any(_torch.is_fake(v) for v in held):
                raise RefusedError(
                    path or "an argument of wholestep.callback", None, value,
                    "an object that the step makes, which later calls would share", WAYS_OUT,
                )  # fmt: skip
        return value

    def _tracer(self, containers: Sequence[Container]) -> Callable[..., Any]:
        """Finds the line after which the entry `find` is another one."""
        wanted = [c for c in containers if c.path == self.find or any(c.path_of(k) == self.find for k in c.now())]
        wanted += [c for c in containers if c.style != "variable" and self.find.startswith(c.path) and c not in wanted]
        last: dict[FrameType, int] = {}

        def changed() -> bool:
            return any(self.find in (c.path, c.path_of(key)) for c in wanted for key, _, _ in c.changes())

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            if not self.found_at and frame in last and changed():
                self.found_at = show_line(frame.f_code.co_filename, last[frame])
            last[frame] = frame.f_lineno
            return None if self.found_at else local

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            if not self.found_at and frame.f_back in last and changed():
                self.found_at = show_line(frame.f_back.f_code.co_filename, last[frame.f_back])
            code = frame.f_code
            traced = is_users(code.co_filename) and not is_of_python(code.co_filename)
            return local if traced and not self.found_at and not code.co_flags & inspect.CO_GENERATOR else None

        return enter

    # -- what came of it ---------------------------------------------------------------
    def effects(self, used: set[str]) -> Effects:
        """What each call has to do; `used` names the inputs of the graph."""
        leaves = [v for w in self._writes if w.made for v in w.made.leaves]
        leaves += [v for c in self._called for v in c.made.leaves]
        program = self.numbers.program(used, self._returned | {v.index for v in leaves if isinstance(v, At)})
        expected = [*self._expected, *self._carried_numbers(), *self._read_places()]
        return Effects(
            program, tuple(self._writes), tuple(self._called), tuple(expected), len(self.extra), tuple(self._rebound),
            tuple(self._flags), self.promoted,
        )  # fmt: skip

    def _absent(self, container: Container, names: set[str], changed: set[str]) -> list[Expected]:
        """Attributes that the class gave because the object had none of its own."""
        kind = container.kind
        return [
            Expected(container.place_of(n), "is", MISSING)
            for n in names
            if kind is not None and hasattr(kind, n) and n not in _OF_MODULES and container.path_of(n) not in changed
        ]

    def _carried_numbers(self) -> list[Expected]:
        """Numbers that are carried stay of one type, which arithmetic depends on; tensors of one shape."""
        held = {id(tensor): place for tensor, place in self.reach.tensors.values()}
        carried = [held[id(h.tensor)] for name, h in self.state.buffers.items() if name in self.promoted.tensors]
        return [Expected(p, "tensor", meta_of(cast(torch.Tensor, p.get()))) for p in carried] + [
            Expected(container.place_of(key), "type", type(value))
            for container in self.reach.containers
            for key, value in container.before.items()
            if is_number(value) and container.path_of(key) in self.promoted.numbers
        ]

    def _read_places(self) -> list[Expected]:
        """Everything that the trace read on the host and that may be another one in a later call."""
        changed = {w.place.path for w in self._writes} | self.promoted.numbers | self.promoted.tensors
        carried: dict[int, set[Any]] = {}
        for container in self.reach.containers:
            keys = [*container.before, *(w.place.key for w in self._writes if w.place.container is container.holder)]
            carried[id(container.holder)] = {key for key in keys if container.path_of(key) in changed}
        reads = dict[int | None, set[str]]()
        for owner, name in self._reads:
            reads.setdefault(owner, set()).add(name)
        theirs, out = given_away([c.fn for c in self._called]), list[Expected]()
        for container in self.reach.containers:
            if container.style == "modules" and container.before:
                out.append(Expected(Place(container.path, container.holder, None), "size", len(container.before)))
            if container.opaque is not None or not (container.owner or container.style in _ALWAYS_READ):
                continue
            out += self._absent(container, reads.get(container.owner, set()) - container.before.keys(), changed)
            for key, value in container.before.items():
                path = container.path_of(key)
                if not self._was_read(container, key) or path in changed or key in _OWN_BUSINESS or key == "training":
                    continue
                out.append(expect(container.place_of(key), value))
                out += [e for e in contents(value, path, carried) if id(e.place.holder) not in theirs]
        return out


class _Untouched:
    """Stands for an iterator: whatever it would give next, later calls would not get another one."""

    def __init__(self, path: str, original: Any, line: Callable[[], str]) -> None:
        self._path, self._original, self._line = path, original, line

    def __iter__(self) -> _Untouched:
        return self

    def __next__(self) -> Any:
        error = RefusedError(
            self._path, Words(f"a {type(self._original).__name__}"), Words("the same, one item further"),
            "all later calls would be given this very item", "take the item before the step, and pass it in",
        )  # fmt: skip
        error.where = self._line()
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _run_scheduler(scheduler: LRScheduler, optimizers: Sequence[Any], names: Sequence[str], *values: Any) -> None:
    """One step of a scheduler; it finds that its optimizers ran, as they do in the program of the call."""
    for optimizer in optimizers:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            optimizer._opt_called = True
    count = len(values) - len(names)
    scheduler.step(*values[:count], **dict(zip(names, values[count:], strict=True)))
