"""Guards: the conditions of a captured program, checked at each call. After a miss, the step is captured again."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from .. import _torch
from ..capture.assumptions import Assumption
from ..capture.call_structure import Structure, opener
from ..capture.capture import Capture, shared_memory, with_arrays, written_leaves
from ..capture.locations import MISSING, PLAIN, Slots, TensorAttributes, shown
from ..capture.reachable import opaque
from ..capture.stand_ins import as_given
from ..capture.state import baked_numbers, option_of, tensor_attributes
from ..capture.wrappers import switches
from .size_check import SizeCheck
from .step_inputs import BatchSizes, StepInputs, batch_shapes


@dataclass(frozen=True)
class Miss:
    """Why a program does not fit a call, as text for a log.

    Where a value differs that would cost captures without end, `use` is what the step does with it, and `where` its
    source line or path. `number`: later programs can carry the value. `replaced`: there is another object in its place.
    `arguments`: those that have another value, which later programs leave open if they can. `counts`: it is a number of
    rows, which later programs count.
    """

    text: str
    use: str = ""
    where: str = ""
    number: bool = False
    replaced: bool = False
    arguments: tuple[str, ...] = ()
    counts: bool = False


@dataclass(frozen=True)
class TensorGuard:
    """Shape, stride, dtype, device, requires_grad and attributes of a tensor argument. `dims` may have other
    sizes, in any strides: `SizeCheck` compares shapes.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    dims: tuple[int, ...]
    attributes: dict[str, Any]

    @staticmethod
    def of(tensor: torch.Tensor, dims: tuple[int, ...] = ()) -> TensorGuard:
        """The guard of a tensor as it is."""
        about = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
        return TensorGuard(*about, dims, tensor_attributes(tensor))

    def fits(self, value: Any) -> bool:
        """True when `value` is such a tensor."""
        if not isinstance(value, torch.Tensor) or value.dim() != len(self.shape):
            return False
        return (
            (bool(self.dims) or (value.shape == self.shape and value.stride() == self.stride))
            and value.dtype is self.dtype
            and value.device == self.device
            and value.requires_grad == self.requires_grad
            and (self._is_tagged_alike(value) if vars(value) or self.attributes else True)
        )

    def _is_tagged_alike(self, value: torch.Tensor) -> bool:
        now = tensor_attributes(value)
        return now.keys() == self.attributes.keys() and all(_same_value(now[k], v) for k, v in self.attributes.items())


@dataclass(frozen=True)
class LeafGuard:
    """An argument that is no tensor: of the class `kind`, and with the contents `value` if it has `contents` that can
    change. One without a class is not read: it is anything but a tensor, of which ranks may have parts.
    """

    kind: type | None
    contents: bool = False
    value: Any = None

    def fits(self, value: Any) -> bool:
        """True when `value` is such an argument."""
        if self.kind is None:
            return not isinstance(value, torch.Tensor)
        value = as_given(value) if self.kind is np.ndarray else value
        if type(value) is not self.kind or not self.contents:
            return type(value) is self.kind
        return (reader := opaque(value)) is not None and bool(reader() == self.value)


class Condition:
    """Small comparisons that all have to hold at every call, as one generated function. A comparison costs 20 ns there;
    in a loop, 50 to 120. Example: `add("{}[{}] is {}", container, "lr", value)`. `says`: what is said where it fails.
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._terms: list[tuple[str, Callable[[], str]]] = []

    def add(self, term: str, *values: Any, says: Callable[[], str] = str) -> None:
        """An expression of Python, where each `{}` stands for one of `values`."""
        names = [f"v{len(self._names) + i}" for i in range(len(values))]
        self._names.update(zip(names, values, strict=True))
        self._terms.append((term.format(*names), says))

    def compiled(self) -> Callable[[], bool]:
        """True when all terms hold; false also where something that a term looks up is gone."""
        return self._function(" and ".join(term for term, _ in self._terms) or "True")

    def failed(self) -> str:
        """What the first term that does not hold says. A term may be false where nothing changed, and then says ""."""
        return next((text for term, says in self._terms if not self._function(term)() and (text := says())), "")

    def _function(self, body: str) -> Callable[[], bool]:
        absent = "LookupError, AttributeError, ValueError"
        exec(f"def holds():\n try:\n  return {body}\n except ({absent}):\n  return False", self._names)
        return self._names["holds"]


def _compiled(expected: Sequence[Assumption]) -> Callable[[], bool]:
    """One function that is true when all expected objects are in place; where it is false, each is looked at."""
    condition, empty = Condition(), list[object]()
    for assumption in expected:
        holder, key, value = assumption.place.holder, assumption.place.key, assumption.value
        holder = holder.now() if isinstance(holder, TensorAttributes) else holder
        if (
            assumption.kind in ("content", "tensor", "shared") or holder is os.environ
        ):  # a variable is a new string in each read
            condition.add("{}.holds", assumption)
        elif assumption.kind == "attributes" and not holder:
            empty.append(holder)  # as most parameters have none: 5 ns each
        elif assumption.kind in ("attributes", "size"):
            condition.add("len({}) == {}", holder, len(holder) if assumption.kind == "attributes" else value)
        elif assumption.kind == "type":
            condition.add("type({}[{}]) is {}", holder, key, value)
        elif value is MISSING and isinstance(holder, dict):
            condition.add("{} not in {}", key, holder)
        elif value is MISSING:
            condition.add("{}.holds", assumption)
        elif isinstance(holder, Slots) and key == "cell_contents":  # a closure variable
            condition.add("{}.cell_contents is {}", holder.owner, value)
        elif assumption.kind == "built":
            condition.add("({}[{}] is {} or {}.holds)", holder, key, value, assumption)
        else:
            condition.add("{}[{}] is {}", holder, key, value)
    condition.add("not any({})", empty)
    return condition.compiled()


class HookGuard:
    """Compares the hooks of `holders` with those at its creation. Hooks that only observe do not count."""

    def __init__(self, holders: Iterable[object]) -> None:
        self._holders = [*holders, *_torch.FOR_ALL]
        self._expected = self._now()
        self._registered = RemovableHandle.next_id
        tables = [table for holder in self._holders for table in _torch.hook_tables(holder)]
        self._sizes = [(table, len(table)) for table in tables if table]

    def changed(self) -> bool:
        """True if hooks were added or removed. Compares them only if a hook was registered since, or is gone."""
        if RemovableHandle.next_id == self._registered and all(len(table) == size for table, size in self._sizes):
            return False
        if same := self._now() == self._expected:
            self._registered = RemovableHandle.next_id
        return not same

    def _now(self) -> list[tuple[int, Any]]:
        entries = [item for holder in self._holders for table in _torch.hook_tables(holder) for item in table.items()]
        return [(key, hook) for key, hook in entries if not _torch.only_looks(hook)]


def ambient(device: str) -> tuple[Any, ...]:
    """Settings of torch that a trace depends on."""
    kind = device.partition(":")[0]
    autocast = torch.is_autocast_enabled(kind)
    precision = autocast, torch.get_autocast_dtype(kind) if autocast else None, torch.get_default_dtype()
    return (*precision, torch.is_grad_enabled(), torch.is_anomaly_enabled())


class Guards:
    """Everything a program was captured under. `check` finds the first difference."""

    def __init__(self, capture: Capture, inputs: StepInputs, device: str) -> None:
        state, self._effects, self._values = capture.state, capture.effects, capture.values
        self._structure, self._names, self._ambient = inputs.structure, inputs.names, ambient(device)
        self.opened = opener(inputs.structure, inputs.leaves)
        self._batch_sizes, self._written = inputs.sizes, written_leaves(capture.graph)
        symbols = capture.symbols
        self.sizes = None if symbols is None else SizeCheck(symbols, inputs)
        dims = self.sizes.dims if self.sizes is not None else {}
        unread = self._effects.is_unread
        leaves = with_arrays(self._effects.carried.arrays, inputs.names, inputs.leaves)
        self._leaves = [
            TensorGuard.of(leaf, dims.get(i, ()))
            if isinstance(leaf, torch.Tensor)
            else _guard_of(leaf, unread(name), i in self._effects.open_arguments)
            for i, (leaf, name) in enumerate(zip(leaves, inputs.names, strict=True))
        ]
        self.shapes = batch_shapes(inputs)
        carried = self._effects.group_options()
        baked = baked_numbers(state, capture.hypers)
        self.numbers = [number for number in baked if (id(number[0]), *number[1:3]) not in carried]
        self._held = Condition()
        self._hold_state(capture)
        self._held_holds = self._held.compiled()
        self._assumptions_hold = _compiled(self._effects.expected)

    def _hold_state(self, capture: Capture) -> None:
        """Compare what modules, parameters and optimizers are set to."""
        state, add = capture.state, self._held.add
        params = {name: param.tensor for name, param in state.params.items()}
        add("{}()", _torch.flags_check([*params.values()]), says=partial(_other_flag, _flags(params), params))
        for optimizer in state.optimizers.values():
            members = [list(group["params"]) for group in optimizer.param_groups]
            term = "{}([group['params'] for group in {}.param_groups], {})"
            add(term, _torch.same_tensors, optimizer, members, says=partial(_other_members, optimizer, members))
        modules = [module for root in state.modules.values() for module in root.modules()]
        for module in modules:
            now = partial("a {} is in {} mode".format, type(module).__name__, "eval" if module.training else "training")
            add("{}.training is {}", module, module.training, says=now)
        for option in self.numbers:
            same = "==" if isinstance(option[3], (*PLAIN, tuple)) else "is"
            term = f"{{}}.param_groups[{{}}][{{}}] {same} {{}}"
            if isinstance(option[3], tuple):  # loading a state dict may turn it into a list
                term = "tuple({}.param_groups[{}][{}]) == {}"
            add(term, *option, says=partial(_other_option, *option))
        for holder, key in switches(state.wrappers):
            text = f"{key} of {type(holder).__name__} is {not getattr(holder, key)}"
            add("getattr({}, {}) == {}", holder, key, getattr(holder, key), says=text.__str__)
        for hyper in (hyper for hyper in capture.hypers if hyper.key != "lr"):
            zero = not option_of(state, hyper)
            text = f"option {hyper.key!r} of a parameter group is {'no longer zero' if zero else 'zero'}"
            add("bool({}({}, {})) is not {}", option_of, state, hyper, zero, says=text.__str__)
        hooks = HookGuard([*modules, *params.values(), *state.optimizers.values()])
        add("not {}()", hooks.changed, says="hooks were registered or removed".__str__)
        for scaler in state.scalers.values():
            options = _torch.scaler_options(scaler)
            add("{}({}) == {}", _torch.scaler_options, scaler, options, says="options of a GradScaler changed".__str__)
        for name, param in params.items() if not capture.fresh_grads else ():
            text = f"the gradient of {name} is {'set' if param.grad is None else 'None'}"
            add("({}.grad is None) is {}", param, param.grad is None, says=text.__str__)

    def check(self, structure: Structure, leaves: Sequence[Any], now: tuple[Any, ...]) -> Miss | None:
        """The first difference, but in sizes that a program may have other ones of; None without one."""
        if structure is not self._structure and structure != self._structure:
            return Miss("the arguments have another structure")
        for leaf, guard, name in zip(leaves, self._leaves, self._names, strict=True):
            if isinstance(guard, TensorGuard):
                if not guard.fits(leaf):
                    actual, was = shown(leaf), f"{tuple(guard.shape)} {guard.dtype}"
                    detail = " in other strides, on another device, with another requires_grad or other attributes"
                    return Miss(f"argument {name} is {actual}, it was {was}{detail * actual.endswith(was)}")
            elif leaf is not guard and not _same_value(leaf, guard):
                return self._miss_of(name, leaf, guard, leaves)
        for i in self._effects.open_arguments:
            self._effects.open_arguments[i] = leaves[i]
        if shared := self._shared(leaves):
            return Miss(shared)
        if now != self._ambient:
            return Miss("autocast, grad mode, anomaly mode or default dtype changed")
        why = self._check_held()
        return Miss(why) if why else self._check_host() or self._check_read(leaves)

    def check_sizes(self, leaves: Sequence[Any], sizes: BatchSizes | None) -> Miss | None:
        """The first difference in sizes, of a call without another one; `sizes` are those on all ranks."""
        if self.sizes is None:
            return None if sizes == self._batch_sizes else Miss("the size of the whole batch changed")
        why = self.sizes.check(leaves, sizes)
        return Miss(why) if why else None

    def _miss_of(self, name: str, leaf: Any, guard: Any, leaves: Sequence[Any]) -> Miss:
        rows = zip(self._names, leaves, self._leaves, strict=True)
        changed = tuple(n for n, v, g in rows if not isinstance(g, TensorGuard) and not _same_value(v, g))
        kind = guard.kind if isinstance(guard, LeafGuard) else None
        text = f"is {shown(leaf)}, it was {kind.__name__ if kind is not None else shown(guard)}"
        text = "has other contents" if kind is not None and guard.contents else text
        return Miss(f"argument {name} {text}", where=name, arguments=changed)

    def differ_in_sizes(self, structure: Structure, leaves: Sequence[Any], now: tuple[Any, ...]) -> bool:
        """True if a call, that missed, differs in nothing but sizes of the batch."""
        if structure != self._structure or now != self._ambient:
            return False
        pairs = zip(leaves, self._leaves, strict=True)
        pairs = ((v, replace(g, dims=(0,)) if isinstance(g, TensorGuard) else g) for v, g in pairs)  # of any sizes
        if not all(g.fits(v) if isinstance(g, TensorGuard) else _same_value(v, g) for v, g in pairs):
            return False
        return not self._check_held() and self._check_host() is None and not self._shared(leaves)

    def _shared(self, leaves: Sequence[Any]) -> str:
        """Which tensor that the step changes in place shares memory with another one; "" if none does."""
        return shared_memory(dict(zip(self._names, leaves, strict=True)), self._written) if self._written else ""

    def _check_host(self) -> Miss | None:
        """The first value of Python, or choice of the host's program, that is another one."""
        effects = self._effects
        assumption = None if self._assumptions_hold() else next((e for e in effects.expected if not e.holds), None)
        if assumption is not None:
            number, use = assumption.number, "depends on a value of Python"
            replaced = assumption.kind != "equal" and not number
            return Miss(assumption.difference, use, number or assumption.place.path, bool(number), replaced)
        where = effects.program.decided_otherwise() if effects.program.decisions else ""
        if not where:
            return None
        why = f"the choice made at {where} is another one"
        return Miss(why, "makes a choice", why)

    def _check_read(self, leaves: Sequence[Any]) -> Miss | None:
        read = self._values.changed(dict(zip(self._names, leaves, strict=True))) if self._values else None
        if read is None:
            return None
        why = f"the value that the step reads at {read.where} is another one"
        return Miss(why, "reads a value of the batch", read.where, counts=read.counts)

    def _check_held(self) -> str:
        return "" if self._held_holds() else self._held.failed()


def _flags(params: Mapping[str, torch.Tensor]) -> dict[str, tuple[bool, torch.dtype]]:
    return {name: (param.requires_grad, param.dtype) for name, param in params.items()}


def _other_flag(had: Mapping[str, tuple[bool, torch.dtype]], params: Mapping[str, torch.Tensor]) -> str:
    """Which parameter has another flag; "" where none has: `_torch.flags_check` is false under a dispatch mode."""
    for name, (needed, dtype) in _flags(params).items():
        if needed is not had[name][0]:
            return f"requires_grad of {name} is {needed}"
        if dtype is not had[name][1]:
            return f"{name} is of {dtype}, it was of {had[name][1]}"
    return ""


def _other_members(optimizer: torch.optim.Optimizer, had: list[list[torch.Tensor]]) -> str:
    were, are = [*map(len, had)], [len(group["params"]) for group in optimizer.param_groups]
    if were != are:
        return f"the parameter groups have {are} parameters, they had {were}"
    return "the parameter groups have other parameters"


def _other_option(optimizer: torch.optim.Optimizer, number: int, key: str, value: object) -> str:
    current = optimizer.param_groups[number].get(key)
    return f"option {key!r} of a parameter group is {current!r}, it was {value!r}"


def _guard_of(leaf: Any, unread: bool, free: bool) -> Any:
    """What is compared with an argument that is no tensor: itself, or its contents. `free`: its value may be any."""
    kind = cast(type[Any], type(leaf))
    if free or unread:
        return LeafGuard(kind if free or kind is np.ndarray else None)
    contents = opaque(leaf) if isinstance(leaf, _CHANGING) else None
    return cast(Any, leaf) if contents is None else LeafGuard(kind, True, contents())


def _same_value(leaf: Any, guard: Any) -> bool:
    if isinstance(guard, LeafGuard):
        return guard.fits(leaf)
    return leaf is guard or (type(leaf) is type(guard) and isinstance(leaf, PLAIN) and leaf == guard)


_CHANGING = (
    set, bytearray, array, memoryview, np.ndarray, random.Random, np.random.Generator, np.random.RandomState,
    torch.Generator,
)  # fmt: skip
