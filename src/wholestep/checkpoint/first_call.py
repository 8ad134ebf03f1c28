"""Restores a step that was not called yet at its first call: only then its model and optimizer are known."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from ..runtime.step import CompiledStep
from . import snapshot

Options = list[dict[str, Any]]
"""Plain options of each parameter group."""


@dataclass(frozen=True)
class AtFirstCall:
    """Calls `restore` when the state of a step is placed. Options that were set since then stay: a script may load, set
    a learning rate and call the step.
    """

    restore: Callable[[CompiledStep], object]
    then: Mapping[Optimizer, Options]

    def __call__(self, step: CompiledStep) -> None:
        """Restore; then set again what was set after the load."""
        assert step.state is not None, "called when the state is placed"
        live = step.state.optimizers.values()
        changed = [(o, _changed(before, _options(o))) for o in live if (before := self.then.get(o)) is not None]
        self.restore(step)
        for optimizer, groups in changed:
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                snapshot.set_options(group, options)


def at_first_call(step: CompiledStep, restore: Callable[[CompiledStep], object]) -> None:
    """Call `restore` at the first call of `step`, in place of what waits for it."""
    then = WeakKeyDictionary[Optimizer, Options]()
    for one in gc.get_objects():  # torch keeps no list of optimizers, and the step has not seen its own
        if issubclass(type(one), Optimizer):
            then[one] = _options(one)
    waiting = [call for call in step.on_placed if not isinstance(call, AtFirstCall)]
    step.on_placed[:] = [*waiting, AtFirstCall(restore, then)]


def _options(optimizer: Optimizer) -> Options:
    found = [snapshot.options_of(group) for group in optimizer.param_groups]
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in found]


def _changed(before: Options, now: Options) -> Options:
    """The options of each group that have another value now."""
    pairs = zip(before, now, strict=False)
    changed = [{k: v for k, v in new.items() if k not in old or not _same(old[k], v)} for old, new in pairs]
    return [*changed, *now[len(before) :]]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)
