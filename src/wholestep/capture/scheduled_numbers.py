"""Tracks the optimizer options that change between calls: these are inputs of the program, the others constants.

An input may round differently from a constant. For bitwise equal results a resumed run must start with the same set
of inputs: keys of groups tell the options of torch's schedulers, and other changed ones are saved in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_changed = WeakKeyDictionary[Optimizer, set[str]]()


def scheduled(optimizers: Iterable[Optimizer]) -> set[str]:
    """Return the options of the optimizers that are known to change."""
    options = {"lr"}
    for optimizer in optimizers:
        options |= changed_of(optimizer)
        for group in optimizer.param_groups:
            if "base_momentum" in group and "max_momentum" in group:  # from CyclicLR and OneCycleLR
                options.add("betas" if "betas" in group else "momentum")
    return options


def changed_of(optimizer: Optimizer) -> set[str]:
    """Return the options of `optimizer` that changed so far."""
    return _changed.get(optimizer, set())


def note(optimizer: Optimizer, keys: Iterable[str]) -> None:
    """Record changing options of `optimizer`."""
    _changed.setdefault(optimizer, set()).update(keys)


def note_changed(constants: Sequence[tuple[Optimizer, int, str, Any]]) -> None:
    """Record the constant options of a program that changed to another float: they may become inputs."""
    for optimizer, number, key, value in constants:
        current = optimizer.param_groups[number].get(key) if number < len(optimizer.param_groups) else value
        parts = cast(tuple[object, ...], current) if isinstance(current, tuple) else (current,)
        if current is not value and current != value and all(isinstance(v, float) for v in parts):
            note(optimizer, [key])


def to_save(optimizers: Mapping[str, Optimizer]) -> dict[str, list[str]]:
    """Return the changing options to save in a checkpoint, by optimizer name."""
    return {name: sorted(changed_of(optimizer)) for name, optimizer in optimizers.items()}
