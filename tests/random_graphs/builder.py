"""Random programs: calls chosen one by one on real values, so that shapes fit and numbers stay finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from wholestep.graph.graph import Role

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8)
LARGEST = 600  # elements of a tensor
HUGE = 1e4  # values beyond it lose too many digits to compare


@dataclass
class Given:
    """An input of a program, and its number among the values."""

    name: str
    role: Role
    value: Tensor
    owner: str = ""
    number: int = 0


@dataclass(frozen=True)
class Step:
    """A call on earlier values, by number."""

    fn: Callable[..., Any]
    args: tuple[int, ...]


class Unfit(Exception):
    """A choice that does not fit the values there are: another is made."""


def is_real(value: Tensor) -> bool:
    """True for a tensor that gradients flow through."""
    return value.is_floating_point()


@dataclass
class Builder:
    """Values so far, real ones, and how each came about: `items` holds an input or a call for each, in order."""

    rng: Random
    source: torch.Generator
    items: list[Given | Step] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    givens: list[Given] = field(default_factory=list)

    # -- inputs -----------------------------------------------------------------------
    def give(self, value: Tensor, role: Role | None = None, owner: str = "") -> int:
        """A new input with this value; returns its number."""
        if role is None:
            floats = (Role.PARAM, Role.BATCH, Role.BATCH, Role.CONST)
            role = self.rng.choice(floats if is_real(value) else (Role.BATCH, Role.CONST))
        name = f"x{len(self.givens)}"
        self.givens.append(Given(name, role, value.detach().clone(), owner, len(self.values)))
        self.items.append(self.givens[-1])
        self.values.append(self.givens[-1].value)
        return len(self.values) - 1

    def new(self, *shape: int, role: Role | None = None) -> int:
        """A new input of random numbers."""
        return self.give(torch.randn(shape, generator=self.source, dtype=torch.float64), role)

    def ints(self, high: int, *shape: int) -> int:
        """A new input of whole numbers below `high`."""
        return self.give(torch.randint(high, shape, generator=self.source))

    def shape(self, low: int = 1, high: int = 3) -> tuple[int, ...]:
        """A random shape of few elements."""
        shape = [self.rng.choice(SIZES) for _ in range(self.rng.randint(low, high))]
        while torch.Size(shape).numel() > LARGEST // 2:
            shape[self.rng.randrange(len(shape))] = 1
        return tuple(shape)

    # -- choices ------------------------------------------------------------------------
    def pick(self, fits: Callable[[Tensor], bool] = is_real, low: int = 0, high: int = 9) -> int:
        """A value that fits, the later the likelier; a new input where there is none, or now and then."""

        def suits(value: Tensor) -> bool:
            return low <= value.dim() <= high and value.numel() <= LARGEST and fits(value)

        found = [i for i, v in enumerate(self.values) if suits(v)]
        if found and self.rng.random() < 0.9:
            return found[max(self.rng.randrange(len(found)) for _ in range(2))]
        made = self.new(*self.shape(low, min(high, max(low, 3))))
        if not suits(self.values[made]):
            raise Unfit
        return made

    def of(self, number: int) -> Tensor:
        """The value with this number."""
        return self.values[number]

    def dim(self, number: int) -> int:
        """A dim of a value."""
        if not self.of(number).dim():
            raise Unfit
        return self.rng.randrange(self.of(number).dim())

    def like(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> int:
        """A value of this shape: one there is, or a new input."""
        found = [i for i, v in enumerate(self.values) if tuple(v.shape) == tuple(shape) and v.dtype == dtype]
        if found and self.rng.random() < 0.6:
            return self.rng.choice(found)
        return self.new(*shape)

    def broadcasting(self, number: int) -> int:
        """A value that broadcasts with another: one there is, or a new input with dims dropped or of size 1."""
        shape = list(self.of(number).shape)

        def fits(value: Tensor) -> bool:
            pairs = zip(reversed(value.shape), reversed(shape), strict=False)
            return all(a == b or 1 in (a, b) for a, b in pairs)

        found = [i for i, v in enumerate(self.values) if is_real(v) and fits(v)]
        if found and self.rng.random() < 0.5:
            return self.rng.choice(found)
        shape = [1 if self.rng.random() < 0.25 else n for n in shape]
        return self.new(*shape[self.rng.choice((0, 0, 0, 1, 2)) :])

    # -- calls --------------------------------------------------------------------------
    def call(self, fn: Callable[..., Any], *args: int) -> None:
        """Add a call and every tensor that it makes."""
        made = list(tensors_of(fn(*(self.values[a] for a in args))))
        if not made or not all(map(fits, made)):
            raise Unfit
        self.items.append(Step(fn, args))
        self.values.extend(made)

    def attempt(self, choice: Callable[[Builder], None]) -> bool:
        """Make a choice; what it did is undone where it does not fit."""
        counts = len(self.items), len(self.values), len(self.givens)
        try:
            choice(self)
        except (Unfit, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
            del self.items[counts[0] :], self.values[counts[1] :], self.givens[counts[2] :]
            return False
        return True


def fits(value: Tensor) -> bool:
    """Finite, of moderate size, of a type that is compared."""
    if value.is_complex() or value.numel() > 2 * LARGEST or value.layout != torch.strided:
        return False
    return not value.numel() or bool((value.double().abs() < HUGE).all())


def tensors_of(made: Any) -> Iterator[Tensor]:
    """Tensors in what a call returned, in order, lists opened."""
    for value in made if isinstance(made, (list, tuple)) else [made]:
        if isinstance(value, (list, tuple)):
            yield from tensors_of(value)
        elif isinstance(value, Tensor):
            yield value
