"""Tells what the program of a call found not to be finite, a call later, so that no call waits for its own result."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast
from weakref import WeakSet

import torch

from ..errors import NonFiniteError, not_finite

OnNonfinite = Literal["skip", "raise"] | Callable[[int, tuple[str, ...]], object]
"""What `compile` does about a step that was skipped; a function gets the number of the call and names."""


@dataclass(frozen=True)
class _Found:
    """What one call found: whether it was skipped, and which of `names` were not finite; on the host after `ready`."""

    number: int
    names: tuple[str, ...]
    skipped: torch.Tensor
    flags: torch.Tensor
    ready: torch.cuda.Event | None


@dataclass(eq=False)
class NonfiniteWatch:
    """The results of the last calls of one step that nobody has read yet.

    Results are equal on all ranks, and every rank reads the result of a call at the same point: before the next call
    where the program runs on a CPU, before the one after that on a GPU, which works while the host prepares a call.
    """

    name: str
    action: OnNonfinite
    skipped: int = 0
    _unread: deque[_Found] = field(default_factory=deque[_Found])

    def __post_init__(self) -> None:
        _watches.add(self)

    def note(self, number: int, names: tuple[str, ...], skipped: torch.Tensor, flags: torch.Tensor) -> None:
        """Keep the result of a call, which the device may still compute."""
        ready = None
        if skipped.is_cuda:
            skipped, flags = _to_host(skipped), _to_host(flags)
            ready = torch.cuda.Event()
            ready.record()
        self._unread.append(_Found(number, names, skipped, flags, ready))

    def before_call(self) -> None:
        """Read what was due. Raises NonFiniteError."""
        while self._unread and (len(self._unread) > 1 or self._unread[0].ready is None):
            self._read(self._unread.popleft())

    def read_all(self) -> None:
        """Wait for the last call, and read its result too. Raises NonFiniteError."""
        while self._unread:
            self._read(self._unread.popleft())

    def _read(self, outcome: _Found) -> None:
        if outcome.ready is not None:
            outcome.ready.synchronize()
        if not outcome.skipped:
            return
        self.skipped += 1
        flags = cast("list[bool]", outcome.flags.tolist())
        names = tuple(dict.fromkeys(name for name, flag in zip(outcome.names, flags, strict=True) if flag))
        if callable(self.action):
            self.action(outcome.number, names)
        elif self.action == "raise":
            raise NonFiniteError(outcome.number, names)
        elif self.skipped == 1:
            text = f"{self.name} skips call {outcome.number}: {not_finite(names)}; step.skipped counts such calls"
            warnings.warn(text, stacklevel=4)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


_watches = WeakSet[NonfiniteWatch]()


def read_all_nonfinite() -> None:
    """Read what every step of this process found, before its state is kept. Raises NonFiniteError."""
    for watch in list(_watches):
        watch.read_all()
