"""Finds every mutable Python value that a step can reach, each with a path.

Roots are the step's function, its arguments, modules and optimizers. From there the search follows closures, globals
that the code names, attributes, containers, hooks, and functions in these. Code of torch, of the standard library and
of proven libraries (`graph/origin.py`) has no globals that a step changes; objects of their classes are searched.
"""

from __future__ import annotations

import builtins
import dis
import functools
import gc
import inspect
import io
import random
import sys
import types
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import _torch
from ..graph.origin import is_own_code, is_own_function, is_own_module
from .call_structure import Structure, codes_in
from .function_caches import CACHE, results_of
from .holdings import VIEWS, dict_of, form_of, is_closed, slots_of
from .locations import (
    MISSING,
    SIMPLE,
    ArgumentItems,
    GroupEntry,
    Location,
    Reads,
    Slots,
    StateEntry,
    TensorAttributes,
    items_of,
    key_text,
    tensors_of,
)
from .optimizer_entries import Entry, Lookup
from .state import StepState, is_users
from .wrappers import attributes_of, unwrapped

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_ASSIGNED = ("STORE_ATTR", "DELETE_ATTR")
_LOOKED_UP = ("state", "param_groups", "defaults", "_opt_called")
Trainable = nn.Module | Optimizer | GradScaler
_LEAVES: tuple[type, ...] = (*SIMPLE, torch.Tensor, torch.layout, torch.memory_format, Enum, range, slice)


@dataclass(eq=False)
class Container:
    """A mutable container and its contents by key: `original` ones, and those `before` the step runs in a trace.

    Only `keys` of `holder` are compared, if given, and never the `excluded` ones. For a container without assignable
    items, such as a generator or a set, the result of `opaque()` is compared. `owner` is the object whose attributes
    these are. Later calls find the container by `lookup`. `refused`: why no change can be repeated, and the cure.
    """

    path: str
    holder: Any
    style: str  # "attribute" | "item" | "variable" | "class" | "modules" | "function" | "tensor" | "fake"
    keys: frozenset[str] | None = None
    excluded: tuple[str, ...] = ()
    opaque: Callable[[], Any] | None = None
    owner: Any = None
    lookup: Lookup | None = None
    refused: tuple[str, str] | None = None
    before: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.original = self.before = self.now()

    def now(self) -> dict[Any, Any]:
        """Return the current contents, by key."""
        if self.opaque is not None:
            return {"": self.opaque()}
        if isinstance(self.holder, Entry):
            return self.holder.now()
        if isinstance(self.holder, (list, tuple)):
            return dict(enumerate(cast(Sequence[Any], self.holder)))
        if self.keys is not None:
            entries = ((key, Location("", self.holder, key).get()) for key in self.keys)
            return {key: value for key, value in entries if value is not MISSING}
        if self.style == "class":
            table = cast(Mapping[str, Any], vars(self.holder.owner))
            return {k: v for k, v in table.items() if not (k[:2] == k[-2:] == "__" or _is_descriptor(v))}
        contents = dict(cast(Mapping[Any, Any], self.holder))
        if self.style in ("tensor", "fake"):
            return {k: v for k, v in contents.items() if is_users(k) and not (self.style == "fake" and k[0] == "_")}
        for key in self.excluded:
            contents.pop(key, None)
        return contents

    def path_of(self, key: Any) -> str:
        """Return the user's expression for an entry."""
        if self.style == "variable" or self.opaque is not None:
            return self.path or str(key)
        if self.style == "item":
            return f"{self.path}[{key_text(key, cast(Mapping[Any, Any], self.holder))}]"
        return f"{self.path}.{key}" if self.path else str(key)

    def place_of(self, key: Any) -> Location:
        """Return the place of an entry."""
        return Location(self.path_of(key), self.assigned, key)

    @property
    def assigned(self) -> Any:
        """Where later calls find and assign the entries."""
        return self.holder if self.lookup is None else self.lookup

    def changes(self) -> list[tuple[Any, Any, Any]]:
        """Return `(key, before, now)` of each entry that is another object now."""
        now = self.now()
        if self.opaque is not None:
            return [("", self.before[""], now[""])] if now != self.before else []
        pairs = zip(now.items(), self.before.items(), strict=False)
        if len(now) == len(self.before) and all(k is had and v is was for (k, v), (had, was) in pairs):
            return []
        now = {
            key: self.before[key] if type(value) is Structure and value == self.before.get(key) else value
            for key, value in now.items()
        }
        both = ((key, self.before.get(key, MISSING), now.get(key, MISSING)) for key in {**self.before, **now})
        return [(key, before, after) for key, before, after in both if before is not after]

    def put(self, key: Any, value: Any) -> None:
        """Set an entry, which then counts as its value before the trace."""
        Location("", self.holder, key).set(value)
        self.before = {**self.before, key: value}

    def keep(self, key: Any, value: Any) -> None:
        """Set an entry for good; of a container without assignable items, all that it holds."""
        if self.opaque is not None:
            self.holder.clear()
            (self.holder.update if isinstance(self.holder, set) else self.holder.extend)(value)
        elif isinstance(self.holder, list) and key == len(cast(list[Any], self.holder)):
            cast(list[Any], self.holder).append(value)
        else:
            Location("", self.holder, key).set(value)

    def restore(self, unchanged: set[Any]) -> None:
        """Restore all entries except `kept`."""
        if self.opaque is not None:
            if isinstance(self.holder, (set, deque)) and self.changes():
                self.keep("", self.before[""])
            return
        if isinstance(self.holder, list):
            items = cast(list[Any], self.holder)
            items[:] = [items[i] if i in unchanged and i < len(items) else v for i, v in self.before.items()]
            return
        for key, _, _ in self.changes():
            if key not in unchanged:
                Location("", self.holder, key).set(self.before.get(key, MISSING))


def argument_containers(objects: Sequence[Any], paths: Sequence[str], arguments: dict[int, Any]) -> list[Container]:
    """The containers among the `objects` of a call, and their attributes, which a step may change for its caller.
    `arguments` will have those of the current call, by number.
    """
    containers: list[Container] = []
    for number, (value, path) in enumerate(zip(objects, paths, strict=True)):
        form, lookup = form_of(cast("type[Any]", type(value))), ArgumentItems(arguments, number)
        if form is None or not path:
            continue
        if form.items is not None:
            copied = value.copy if form.items is deque else None
            containers.append(Container(path, value, "item", lookup=lookup, opaque=copied))
        lookup = replace(lookup, attributes=True)
        if form.has_dict:
            containers.append(Container(path, dict_of(value), "attribute", owner=value, lookup=lookup))
        if form.slots:
            slots = frozenset(form.slots)
            containers.append(Container(path, Slots(value), "attribute", slots, owner=value, lookup=lookup))
    return containers


@dataclass
class Reach:
    """Result of a search: `containers`, real `tensors` with their places, by path, and objects `seen`, by identity.

    `bound` is what the function is given in each call.
    `of_state` are the identities of modules, optimizers and tensors of the state.
    `kinds` are the classes of objects, `methods` the places of those that code names, `caches` those of `functools`.
    """

    containers: list[Container] = field(default_factory=list[Container])
    tensors: dict[str, tuple[torch.Tensor, Location]] = field(default_factory=dict[str, tuple[torch.Tensor, Location]])
    seen: dict[int, Any] = field(default_factory=dict[int, Any])
    bound: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    schedulers: list[LRScheduler] = field(default_factory=list[LRScheduler])
    kinds: dict[type, None] = field(default_factory=dict[type, None])
    methods: list[Location] = field(default_factory=list[Location])
    caches: list[Any] = field(default_factory=list[Any])
    of_state: set[int] = field(default_factory=set[int])

    @property
    def paths(self) -> set[str]:
        """The paths of all entries."""
        return {container.path_of(key) for container in self.containers for key in container.before}

    def carried(self, paths: Set[str]) -> dict[str, tuple[torch.Tensor, Location]]:
        """The tensors at some paths, and those of containers there, which a step replaces, by path."""
        tensors = {path: entry for path, entry in self.tensors.items() if path in paths}
        for container in self.containers if paths - tensors.keys() else ():
            for key, value in container.before.items():
                if items_of(value) and container.path_of(key) in paths:
                    tensors |= tensors_of(value, container.place_of(key))
        return tensors

    def holding(self, tensors: Set[int]) -> list[Location]:
        """The places of some tensors, by identity."""
        return [place for tensor, place in self.tensors.values() if id(tensor) in tensors]

    def groups_of(self, optimizer: Optimizer) -> list[Container]:
        """Return the containers of an optimizer's parameter groups, in order."""
        groups = {id(group) for group in optimizer.param_groups}
        return [c for c in self.containers if isinstance(c.lookup, GroupEntry) and id(c.holder) in groups]


def reach(fn: Callable[..., Any], arguments: Mapping[str, Any], state: StepState, opened: Sequence[Any] = ()) -> Reach:
    """Search from `fn`, its arguments `given`, and its state. `opened` are objects whose contents are arguments."""
    search = _Search(Reach(), state)
    search.skip(opened)
    for value, path in bound_to(fn):
        search.visit(value, path)
        search.found.bound.append((value, path))
    search.visit(fn, fn.__name__ if isinstance(fn, types.FunctionType) else "")
    wrappers = ((type(wrapper).__name__, wrapper) for wrapper in state.wrappers)
    for name, value in (*arguments.items(), *wrappers, *state.modules.items(), *state.optimizers.items()):
        search.visit(value, name or "model")
    tensors = [entry.tensor for entry in (*state.params.values(), *state.buffers.values())]
    for holder in (*tensors, *(v for v in arguments.values() if isinstance(v, torch.Tensor)), *_torch.FOR_ALL):
        for hook in (hook for table in _torch.hook_tables(holder) for hook in table.values()):
            search.visit(hook, getattr(hook, "__name__", "a hook"))
    for name in (*state.params, *state.buffers):
        search.attributes(name, lambda name=name: (state.params.get(name) or state.buffers[name]).tensor)
    search.finish()
    return search.found


def trainables(fn: Callable[..., Any], arguments: Mapping[str, Any], opened: Sequence[Any]) -> dict[str, Trainable]:
    """Return the modules, optimizers and gradient scalers to which a step leads, by path and in its order.

    What an object holds counts where code that the step leads to names the attribute; an optimizer's, whatever code.
    """
    search = _Search(Reach(), StepState({}, {}), by_path := dict[str, Trainable](), inspect.unwrap(fn))
    search.skip(opened)
    bound = [("" if path == "self" else path, value) for value, path in bound_to(fn)]
    for path, value in (*arguments.items(), *bound, ("", fn)):
        search.visit(value, path)
    search.finish()
    return dict(sorted(by_path.items()))


def bound_to(fn: Any) -> list[tuple[Any, str]]:
    """Return what a partial function or a bound method is given in each call, with a path."""
    if isinstance(fn, functools.partial):
        return [(fn.args, "partial.args"), (fn.keywords, "partial.keywords"), *bound_to(fn.func)]
    return [(fn.__self__, "self"), *bound_to(fn.__func__)] if isinstance(fn, types.MethodType) else []


def changeable(value: Any, state: StepState) -> list[Container]:
    """Return what a step may change of a value."""
    search = _Search(Reach(), state)
    search.visit(value, "")
    return search.found.containers


class _Search:
    """One search. One that has `new` puts there, by path, what no state has yet, and follows attributes once a name in
    code leads to it: in that of `root`, whoever wrote it, and in what is visited.
    """

    def __init__(
        self, reachable: Reach, state: StepState, new: dict[str, Trainable] | None = None, root: Any = None
    ) -> None:
        self.found, self.state, self._new = reachable, state, new
        self._unnamed: list[tuple[Any, Any, str]] = []
        self._globals_seen = set[tuple[int, str]]()
        self._assigned = set[str]()
        self._names: set[str] = {"forward", "__call__", "step"}
        self._names |= _names_of(root.__code__) if isinstance(root, types.FunctionType) else set()
        self._methods: list[tuple[str, types.FunctionType]] = []
        self._classes: list[type] = []
        self._waiting: list[tuple[Any, str]] = []
        self._modules: dict[str, types.ModuleType] = {}
        reachable.of_state |= {id(module) for root in state.modules.values() for module in root.modules()}
        reachable.of_state |= {id(optimizer) for optimizer in state.optimizers.values()}
        reachable.of_state |= {id(entry.tensor) for entry in (*state.params.values(), *state.buffers.values())}

    def skip(self, opened: Sequence[Any]) -> None:
        """Search the classes of objects, and not the objects."""
        for value in opened:
            self.found.seen[_torch.identity(value)] = value
            kind = cast(type[Any], type(value))
            if form_of(kind) is not None and not is_closed(kind):
                self._note_class(kind)

    def visit(self, value: Any, path: str) -> None:
        """Search a value and everything below it."""
        self._waiting.append((value, path))
        while self._waiting:
            self._open(*self._waiting.pop())

    def attributes(self, path: str, tensor: Callable[[], torch.Tensor]) -> None:
        """Search the attributes of a tensor."""
        self._note(Container(path, vars(tensor()), "tensor", lookup=TensorAttributes(tensor)))

    def finish(self) -> None:
        """Search the methods and modules that visited code names, until no new one is found."""
        while self._search_modules() or any(name in self._names for name, *_ in (*self._methods, *self._unnamed)):
            named = [(function, function.__qualname__) for name, function in self._methods if name in self._names]
            named += [(value, path) for key, value, path in self._unnamed if key in self._names]
            self._methods = [(name, function) for name, function in self._methods if name not in self._names]
            self._unnamed = [row for row in self._unnamed if row[0] not in self._names]
            for value, path in named:
                self.visit(value, path)
        named = {kind: self._names & {*type.__dir__(kind), *type.__dir__(type(kind))} for kind in self._classes}
        places = [Location(f"{k.__name__}.{name}", Slots(k), name) for k in named for name in sorted(named[k])]
        self.found.methods += [place for place in places if is_own_function(place.get())]
        static = [Location(p.path, Reads(functools.partial(_defined, p.holder.owner)), p.key) for p in places]
        self.found.methods += [place for place in static if isinstance(place.get(), (property, classmethod))]

    def _search_modules(self) -> bool:
        """Search the modules that code names as text or imports; whether there is something new in them."""
        self._modules |= {name: sys.modules[name] for name in self._names & sys.modules.keys()}
        before = len(self._globals_seen)
        for name, module in self._modules.items():
            if is_own_module(module):
                names = (self._names | {"__getattr__"}) & vars(module).keys()
                self._globals(vars(module), names | self._assigned, f"{name}.")
        while self._waiting:
            self._open(*self._waiting.pop())
        return len(self._globals_seen) > before

    def _open(self, value: Any, path: str) -> None:
        if isinstance(value, _LEAVES) or (key := _torch.identity(value)) in self.found.seen:
            return
        self.found.seen[key] = value
        if self._new is not None and isinstance(unwrapped(value), (nn.Module, Optimizer, GradScaler)):
            self._new[path if path not in self._new else f"{path}~{len(self._new)}"] = value
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._waiting += [(value.__self__, path.rpartition(".")[0] or "self"), (value.__func__, path)]
        elif (led := leads_to(value)) is not None:
            self._waiting += [(item, path) for item in led]
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += [(item, f"{path}[{i}]") for i, item in enumerate(cast(tuple[Any, ...], value))]
        elif isinstance(value, (dict, list)):
            self._note(Container(path, value, "item"))
            if attributes_of(cast(object, value)) is not None:  # of a class of the user's
                self._object(value, path)
        elif type(value) is CACHE:
            self.found.caches.append(value)
            self._waiting += [(v, path) for v in (value.__wrapped__, *results_of(value).values())]
        elif isinstance(value, LRScheduler):
            self.found.schedulers.append(value)
        elif isinstance(value, Optimizer):
            self._optimizer(value, path)
        elif isinstance(value, (type, types.ModuleType)):
            self._class(value, path)
        else:
            self._object(value, path)

    def _note(self, container: Container) -> None:
        waits = self._new is not None and container.style in ("attribute", "class")
        waits = waits and not isinstance(container.owner, Optimizer)
        self.found.containers.append(container)
        for key, value in container.before.items():
            if waits and key not in self._names:
                self._unnamed.append((key, value, container.path_of(key)))
                continue
            if isinstance(value, (torch.Tensor, tuple)):
                self.found.tensors |= tensors_of(value, container.place_of(key))
            if isinstance(value, torch.Tensor) and id(value) not in self.found.of_state:
                self._note_tensor(value, container.path_of(key))
            if not isinstance(value, _LEAVES):
                self._waiting.append((cast(Any, value), container.path_of(key)))

    def _note_tensor(self, tensor: torch.Tensor, path: str) -> None:
        if (key := _torch.identity(tensor)) not in self.found.seen:
            self.found.seen[key] = tensor
            self.attributes(path, lambda: tensor)

    def _function(self, function: types.FunctionType) -> None:
        if function.__module__ and function.__module__.startswith("wholestep"):
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._note(Container(name, Slots(cell), "variable", frozenset(["cell_contents"])))
        if function.__defaults__ or function.__kwdefaults__:
            defaults = frozenset(["__defaults__", "__kwdefaults__"])
            self._note(Container(f"{function.__name__}'s defaults", Slots(function), "variable", defaults))
        is_users_code = is_own_code(code.co_filename)
        if function.__dict__ or is_users_code:
            self._note(Container(function.__name__, function.__dict__, "function" if is_users_code else "attribute"))
        if not is_users_code:
            return
        names, assigned = _names_of(code), _globals_of(code, _ASSIGNED)
        self._names |= names
        self._assigned |= assigned
        self._globals(function.__globals__, _globals_of(code) - vars(builtins).keys())
        for name in _globals_of(code) & function.__globals__.keys():
            module: Any = function.__globals__[name]
            if is_own_module(module):
                self._globals(module.__dict__, (names & module.__dict__.keys()) | assigned, f"{name}.")

    def _globals(self, table: dict[str, Any], names: Set[str], prefix: str = "") -> None:
        new = {(id(table), name) for name in names} - self._globals_seen
        self._globals_seen |= new
        for _, name in sorted(new):
            if not isinstance(table.get(name), types.ModuleType):
                self._note(Container(f"{prefix}{name}", table, "variable", frozenset([name])))

    def _object(self, value: Any, path: str) -> None:
        kind = cast(type[Any], type(value))
        contents = opaque(value)
        if contents is not None:
            self.found.containers.append(Container(path, value, "item", opaque=contents))
            return
        if is_closed(kind) or isinstance(value, GradScaler):  # a scaler is state of the step
            return
        self._note_class(kind)
        if (attributes := attributes_of(value)) is not None:
            split = _MODULE_DICTS if isinstance(value, nn.Module) else ()
            self._note(Container(path, attributes, "attribute", excluded=split, owner=value))
            for name in split:
                style, is_of_state = "modules" if name == "_modules" else "attribute", id(value) in self.found.of_state
                owner = None if is_of_state or name == "_modules" else value
                self._note(Container(path, attributes[name], style, owner=owner))
        slots = frozenset(slots_of(kind))
        if slots:
            self._note(Container(path, Slots(value), "attribute", slots, owner=value))

    def _optimizer(self, optimizer: Optimizer, path: str) -> None:
        positions = [number for number, other in enumerate(self.state.optimizers.values()) if other is optimizer]
        if not positions and self._new is None:
            return self._object(optimizer, path)
        self._note_class(type(optimizer))
        self._note(Container(path, vars(optimizer), "attribute", excluded=_LOOKED_UP, owner=optimizer))
        for g, group in enumerate(optimizer.param_groups if positions else ()):
            options = GroupEntry(optimizer, g)
            if self.state.has_first(positions[0], group):
                self._note(Container(f"{path}.param_groups[{g}]", group, "item", excluded=("params",), lookup=options))
        for container in state_containers(self.state, positions[0], path) if positions else ():
            self._note(container)
        return None

    def _note_class(self, kind: type[Any]) -> None:
        self.found.kinds.setdefault(kind)
        for base in (*kind.__mro__, type(kind)):
            self._open(base, base.__name__)

    def _class(self, kind: Any, path: str) -> None:
        if isinstance(kind, types.ModuleType):
            self._modules.setdefault(path, kind)
        if isinstance(kind, types.ModuleType) or not is_own_code(_file_of(kind)):
            return
        if type(kind) is not type:
            self._open(type(kind), type(kind).__name__)
        self._classes.append(kind)
        table: dict[str, Any] = {**vars(kind)}
        for name, value in table.items():
            function = cast(Any, value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
            function = function.fget if isinstance(function, property) else function
            if isinstance(function, types.FunctionType):
                self._methods.append((name, function))
            elif type(function) is CACHE:
                self._waiting.append((function, f"{path}.{name}"))
        self._waiting += [(v, f"{path}.{k}") for k, v in table.items() if is_own_code(_file_of(type(cast(object, v))))]
        self._note(Container(path, Slots(kind), "class"))


def state_containers(state: StepState, number: int, path: str) -> list[Container]:
    """Return the containers of the state that optimizer `number`, at `path`, has for each parameter."""
    states = cast(Mapping[Any, dict[Any, Any]], list(state.optimizers.values())[number].state)
    entries = [(owner, states[param.tensor]) for owner, param in state.params.items() if param.tensor in states]
    return [
        Container(f"{path}.state[{owner!r}]", Entry(entry), "item", lookup=StateEntry(state, number, owner))
        for owner, entry in entries
    ]


@functools.cache
def _globals_of(code: types.CodeType, ops: tuple[str, ...] = _GLOBAL) -> frozenset[str]:
    instructions = (i for inner in codes_in(code) for i in dis.get_instructions(inner))
    return frozenset(str(i.argval) for i in instructions if i.opname in ops)


def _names_of(code: types.CodeType) -> set[str]:
    """Return names in code and its nested functions, and string constants that may be attribute names."""
    texts = {v for inner in codes_in(code) for v in inner.co_consts if isinstance(v, str) and v.isidentifier()}
    return texts.union(*(inner.co_names for inner in codes_in(code)))


def _defined(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name, MISSING)


def _file_of(kind: type) -> str:
    module = sys.modules.get(kind.__module__)
    file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    return file or ("__main__" if kind.__module__ == "__main__" else "")


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, type) or any("__get__" in vars(base) for base in type(cast(object, value)).__mro__)


def leads_to(value: Any) -> list[Any] | None:
    """Return the objects to which a value of a type in C refers, for its user to change; None for other types."""
    if isinstance(value, weakref.ProxyTypes):
        return [value.__repr__.__self__]
    if isinstance(value, weakref.ref):
        return [cast(Any, value)()]
    if isinstance(value, (*VIEWS,)):
        return gc.get_referents(value)
    if isinstance(value, types.BuiltinMethodType):  # such as `items.append`
        return [value.__self__]
    return [value.func, value.args, value.keywords] if isinstance(value, functools.partial) else None


def opaque(value: Any) -> Callable[[], Any] | None:
    """Return a function whose result changes with an object that has no assignable items; None for other objects."""
    kind = cast(type[Any], type(value))
    reader = next((reader for kinds, reader in _OPAQUE if issubclass(kind, kinds)), None)
    if issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools"):
        reader = reader or _iterator_position
    return None if reader is None else functools.partial(reader, value)


def _checksum(array: np.ndarray[Any, Any]) -> int:
    """Return a checksum of an array's contents, without a copy if it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return zlib.crc32(flat.tobytes() if array.dtype.hasobject else flat.view(np.uint8).data)


def _generator_state(generator: torch.Generator) -> int:
    """Return a hash of a generator's state, read outside of the trace, in which it would be a fake tensor."""
    with _torch.unobserved():
        return hash(generator.get_state().numpy().tobytes())


def _iterator_position(iterator: Any) -> Any:
    """Return the position of a built-in iterator, without the items that it yields."""
    try:
        parts: tuple[Any, ...] = iterator.__reduce__()
    except TypeError:
        return 0
    arguments = tuple(parts[1]) if len(parts) > 1 else ()
    inner = [_iterator_position(p) for p in arguments if isinstance(p, Iterator) and p is not iterator]
    rest = [p for p in (*parts[1:], *arguments) if isinstance(p, (int, float))]
    return rest, inner, getattr(iterator, "__length_hint__", int)()


_OPAQUE: tuple[tuple[tuple[type, ...], Callable[[Any], Any] | None], ...] = (
    ((set, deque, bytearray), lambda holder: holder.copy()),
    ((array,), lambda array: array.tobytes()),
    ((memoryview,), lambda view: zlib.crc32(view.tobytes())),
    ((np.ndarray,), lambda array: _checksum(array) if array.flags.writeable else 0),
    ((types.GeneratorType,), lambda generator: generator.gi_frame.f_lasti if generator.gi_frame else -1),
    ((random.SystemRandom,), None),
    ((random.Random,), lambda generator: hash(generator.getstate())),
    ((np.random.Generator,), lambda generator: repr(generator.bit_generator.state)),
    ((np.random.RandomState,), lambda generator: repr(generator.get_state())),
    ((torch.Generator,), _generator_state),
    ((SimpleQueue,), lambda queue: queue.qsize()),
    ((ContextVar,), lambda variable: (id(now := variable.get(None)), now)),  # it stays: no other gets its identity
    ((io.StringIO, io.BytesIO), lambda stream: -1 if stream.closed else (stream.tell(), stream.getvalue())),
    ((io.IOBase,), lambda stream: stream.tell() if not stream.closed and stream.seekable() else -1),
)
"""What is compared of objects without assignable items: the first row of whose classes one is."""
