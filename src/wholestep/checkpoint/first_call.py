"""Restores a step that was not called yet at its first call: only then its model and optimizer are known."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..capture.scheduled_numbers import note_changed
from ..runtime.step import CompiledStep
from . import snapshot

Seen = list[dict[str, tuple[Any, int]]]
"""The options of each parameter group: the object that is there, and a tensor's count of writes."""


@dataclass(frozen=True)
class AtFirstCall:
    """Calls `restore` when the state of a step is placed. Options that were set since the load stay: a script may load,
    set a learning rate and call the step.
    """

    restore: Callable[[CompiledStep], object]
    at_load: Mapping[Optimizer, Seen]

    def __call__(self, step: CompiledStep) -> None:
        """Restore; then set again what was set after the load."""
        assert step.state is not None, "called when the state is placed"
        optimizers = [o for o in step.state.optimizers.values() if o in self.at_load]
        changed = [(optimizer, _set_since(self.at_load[optimizer], optimizer)) for optimizer in optimizers]
        self.restore(step)
        for optimizer, groups in changed:
            for number, options in enumerate(groups):
                group = optimizer.param_groups[number]
                saved = [(optimizer, number, key, group.get(key)) for key in options]
                snapshot.set_options(group, options)
                note_changed(saved)  # as in a run that nothing interrupted


def at_first_call(step: CompiledStep, restore: Callable[[CompiledStep], object]) -> None:
    """Call `restore` at the first call of `step`, in place of what waits for it."""
    at_load = WeakKeyDictionary[Optimizer, Seen]()
    for candidate in gc.get_objects():  # torch keeps no list of optimizers, and the step has not seen its own
        if issubclass(type(candidate), Optimizer):
            at_load[candidate] = [_mark(group) for group in candidate.param_groups]
    waiting = [call for call in step.on_placed if not isinstance(call, AtFirstCall)]
    step.on_placed[:] = [*waiting, AtFirstCall(restore, at_load)]


def _mark(group: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Put an equal object of our own in the place of each number, so that one that is set later is another object."""
    seen: dict[str, tuple[Any, int]] = {}
    for key, value in snapshot.options_of(group).items():
        if type(value) is float:
            group[key] = float.fromhex(value.hex())
        elif type(value) is tuple:
            group[key] = (*cast(tuple[Any, ...], value),)
        seen[key] = group[key], _writes(value)
    return seen


def _set_since(seen: Seen, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each group that were set since they were marked."""
    out: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        marks = seen[number] if number < len(seen) else {}
        now = snapshot.options_of(group)
        was_set = {k: v for k, v in now.items() if k not in marks or v is not marks[k][0] or _writes(v) != marks[k][1]}
        out.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in was_set.items()})
    return out


def _writes(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0
