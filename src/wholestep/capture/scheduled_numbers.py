"""Which options of an optimizer change between calls: a program takes them as inputs and holds the others as they are.

A program that takes a number as an input may round otherwise than one that holds it. So that a run which is resumed
computes the same bits, it has to begin with the set that the run had: what a scheduler will change is known from what
torch's schedulers leave in the groups, and what changed otherwise is kept with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_changed = WeakKeyDictionary[Optimizer, set[str]]()


def scheduled(optimizers: Iterable[Optimizer]) -> set[str]:
    """The options of these that change, as far as is known."""
    found = {"lr"}
    for optimizer in optimizers:
        found |= changed_of(optimizer)
        for group in optimizer.param_groups:
            if "base_momentum" in group and "max_momentum" in group:  # from CyclicLR and OneCycleLR
                found.add("betas" if "betas" in group else "momentum")
    return found


def changed_of(optimizer: Optimizer) -> set[str]:
    """The options of `optimizer` that were seen to change."""
    return _changed.get(optimizer, set())


def note(optimizer: Optimizer, keys: Iterable[str]) -> None:
    """Options of `optimizer` that change."""
    _changed.setdefault(optimizer, set()).update(keys)


def note_changed(held: Sequence[tuple[Optimizer, int, str, Any]]) -> None:
    """Note which of the options that a program holds have another value now, and may be its inputs."""
    for optimizer, number, key, value in held:
        found = optimizer.param_groups[number].get(key)
        parts = cast(tuple[object, ...], found) if isinstance(found, tuple) else (found,)
        if found is not value and found != value and all(isinstance(v, float) for v in parts):
            note(optimizer, [key])


def to_save(optimizers: Mapping[str, Optimizer]) -> dict[str, list[str]]:
    """What a checkpoint keeps, by name of the optimizer."""
    return {name: sorted(changed_of(optimizer)) for name, optimizer in optimizers.items()}
