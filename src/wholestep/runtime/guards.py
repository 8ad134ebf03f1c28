"""Guards: the conditions of a captured program, checked at each call. After a miss, the step is captured again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch import scaler_options
from ..capture.batch_reads import ReadValues
from ..capture.call_structure import StepCall, Structure
from ..capture.capture import Capture
from ..capture.locations import is_number
from ..capture.state import Hyper, StepState, baked_numbers, is_zero
from ..capture.wrappers import switches
from .condition import Condition
from .hook_guard import HookGuard
from .host_work import HostWork


@dataclass(frozen=True)
class Change:
    """A value that differs from call to call, and would cost captures without end.

    `where` is a source line or a path. `number`: the value is a number that later programs can carry. `replaced`: there
    is another object in its place.
    """

    what: str
    where: str
    number: bool = False
    replaced: bool = False


@dataclass(frozen=True)
class Miss:
    """Why a program does not fit a call, as text for a log; `change` where a value that it depends on changed."""

    text: str
    change: Change | None = None


@dataclass(frozen=True)
class TensorGuard:
    """Shape, stride, dtype, device and requires_grad of a tensor argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def fits(self, value: Any) -> bool:
        """True when `value` is such a tensor."""
        return (
            isinstance(value, torch.Tensor)
            and value.shape == self.shape
            and value.dtype is self.dtype
            and value.stride() == self.stride
            and value.device == self.device
            and value.requires_grad == self.requires_grad
        )


def guard_of(leaf: Any) -> Any:
    """The guard of a leaf: a later one must be such a tensor, an equal value, or the same object."""
    if isinstance(leaf, torch.Tensor):
        return TensorGuard(leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf


def ambient(device: str, sizes: object = None) -> tuple[Any, ...]:
    """Settings of torch that a trace depends on, and the sizes of the batch on all ranks."""
    kind = torch.device(device).type
    autocast = torch.is_autocast_enabled(kind)
    return (
        torch.is_grad_enabled(),
        autocast,
        torch.get_autocast_dtype(kind) if autocast else None,
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        sizes,
    )


@dataclass
class Guards:
    """Everything a program was captured under. `check` finds the first difference."""

    structure: Structure
    leaves: Sequence[Any]
    names: Sequence[str]
    modes: Sequence[tuple[nn.Module, bool]]
    trainable: Sequence[tuple[torch.Tensor, bool, str]]
    numbers: Sequence[tuple[Optimizer, int, str, Any]]
    groups: Sequence[tuple[Optimizer, list[int]]]
    grads: Sequence[bool] | None
    ambient: tuple[Any, ...]
    values: ReadValues | None = None
    zeros: Sequence[tuple[StepState, Hyper, bool]] = ()
    switches: Sequence[tuple[Any, str, Any]] = ()
    scalers: Sequence[tuple[torch.amp.GradScaler, tuple[object, ...]]] = ()
    hooks: HookGuard | None = None
    host: HostWork = field(kw_only=True)

    def __post_init__(self) -> None:
        self._params = [param for param, _, _ in self.trainable]
        self._flags = [flag for _, flag, _ in self.trainable]
        condition = Condition()
        for module, training in self.modes:
            condition.add("{}.training is {}", module, training)
        for optimizer, number, key, value in self.numbers:
            same = "==" if isinstance(value, (*_PLAIN, tuple)) else "is"
            condition.add(f"{{}}.param_groups[{{}}][{{}}] {same} {{}}", optimizer, number, key, value)
        for holder, key, value in self.switches:
            condition.add("getattr({}, {}) == {}", holder, key, value)
        self._settings_hold = condition.compiled()

    def check(self, structure: Structure, leaves: Sequence[Any], now: tuple[Any, ...]) -> Miss | None:
        """The first difference; None when the program may run."""
        if structure != self.structure:
            return Miss("the arguments have another structure")
        for leaf, guard, name in zip(leaves, self.leaves, self.names, strict=True):
            if isinstance(guard, TensorGuard):
                if not guard.fits(leaf):
                    return Miss(f"argument {name} is {_about(leaf)}, it was {tuple(guard.shape)} {guard.dtype}")
            elif leaf is not guard and not (type(leaf) is type(guard) and isinstance(leaf, _PLAIN) and leaf == guard):
                return Miss(f"argument {name} is {_about(leaf)}, it was {_about(guard)}")
        if now != self.ambient:
            return Miss("autocast, grad mode, anomaly mode, default dtype or the size of the whole batch changed")
        why = self._check_held()
        return Miss(why) if why else self._check_host() or self._check_read(leaves)

    def _check_host(self) -> Miss | None:
        why, one = self.host.difference(), self.host.missed
        if not why:
            return None
        if one is None:
            return Miss(why, Change("makes a choice", why))
        number = one.kind == "equal" and is_number(one.value) and is_number(one.place.get())
        return Miss(why, Change("depends on a value of Python", one.place.path, number, one.kind != "equal"))

    def _check_read(self, leaves: Sequence[Any]) -> Miss | None:
        where = self.values.changed(dict(zip(self.names, leaves, strict=True))) if self.values else ""
        if not where:
            return None
        text = f"the value that the step reads at {where} is another one"
        return Miss(text, Change("reads a value of the batch", where))

    def _check_held(self) -> str:
        if [param.requires_grad for param in self._params] != self._flags:
            name, flag = next((n, p.requires_grad) for p, was, n in self.trainable if p.requires_grad is not was)
            return f"requires_grad of {name} is {flag}"
        for optimizer, counts in self.groups:
            now = [len(group["params"]) for group in optimizer.param_groups]
            if now != counts:
                return f"the parameter groups have {now} parameters, they had {counts}"
        if not self._settings_hold():
            why = self._other_setting()
            if why:
                return why
        for state, hyper, zero in self.zeros:
            if is_zero(state, hyper) is not zero:
                return f"option {hyper.key!r} of a parameter group is {'zero' if not zero else 'no longer zero'}"
        if self.hooks is not None and self.hooks.changed():
            return "hooks were registered or removed"
        for scaler, options in self.scalers:
            if scaler_options(scaler) != options:
                return "options of a GradScaler changed"
        if self.grads is not None:
            for (param, _, name), had in zip(self.trainable, self.grads, strict=True):
                if (param.grad is not None) is not had:
                    return f"the gradient of {name} is {'set' if param.grad is not None else 'None'}"
        return ""

    def _other_setting(self) -> str:
        """The first training flag, option of a parameter group or switch of a wrapper that is another one."""
        for module, training in self.modes:
            if module.training is not training:
                return f"a {type(module).__name__} is in {'training' if module.training else 'eval'} mode"
        for optimizer, number, key, value in self.numbers:
            found = optimizer.param_groups[number].get(key)
            if found is not value and found != value and not _same_list(found, value):
                return f"option {key!r} of a parameter group is {found!r}, it was {value!r}"
        for holder, key, value in self.switches:
            if getattr(holder, key) != value:
                return f"{key} of {type(holder).__name__} is {getattr(holder, key)}"
        return ""


def _same_list(found: object, value: object) -> bool:
    """Loading a state dict may turn a tuple into a list."""
    return isinstance(found, list) and tuple(cast(list[Any], found)) == value


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _about(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    return repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def all_modes(state: StepState) -> list[tuple[nn.Module, bool]]:
    """Training flags of every module."""
    return [(m, m.training) for root in state.modules.values() for m in root.modules()]


def guards_of(capture: Capture, call: StepCall, names: Sequence[str], now: tuple[Any, ...]) -> Guards:
    """The guards of the program of `call`; `names` are those of its leaves, `now` is `ambient`."""
    state = capture.state
    params = [(h.tensor, h.tensor.requires_grad, n) for n, h in state.params.items()]
    groups = [(o, [len(g["params"]) for g in o.param_groups]) for o in state.optimizers.values()]
    grads = None if capture.fresh_grads else [p.grad is not None for p, _, _ in params]
    carried = capture.effects.group_options()
    numbers = [n for n in baked_numbers(state, capture.hypers) if (id(n[0]), n[1], n[2]) not in carried]
    return Guards(
        call.structure, [guard_of(leaf) for leaf in call.leaves], names, all_modes(state), params,
        numbers, groups, grads, now, capture.values,
        [(state, h, is_zero(state, h)) for h in capture.hypers if h.key != "lr"],
        [(holder, key, getattr(holder, key)) for holder, key in switches(state.wrappers)],
        [(s, scaler_options(s)) for s in state.scalers.values()],
        HookGuard([*(m for m, _ in all_modes(state)), *(p for p, _, _ in params), *state.optimizers.values()]),
        host=HostWork(capture.effects, state),
    )  # fmt: skip
