"""Numbers that ranks give each other for a call, by way of their hosts: no rank waits for its device.

A rank gives its own when the call begins, goes on, and takes those of the others where it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from .activity import ACTIVITY
from .heartbeat import CALL
from .lockstep import Lockstep, lockstep
from .rendezvous import Rendezvous


@dataclass(eq=False)
class HostExchange:
    """One rank's side. `memory` is what the ranks of one node share. Without it, `group` connects hosts, which send
    what is `outgoing` (their number, the length of their row, and the row) and get those of all.
    """

    memory: Lockstep | None
    group: Any
    outgoing: torch.Tensor
    all: torch.Tensor
    _row: Sequence[int] = ()
    _open: bool = False
    _sent: Any = None

    @staticmethod
    def of(ranks: Rendezvous, width: int) -> HostExchange:
        """Of rows of at most `width` numbers; none has begun yet (collective)."""
        memory = lockstep(ranks, ranks.next_label("host exchange"), width)
        group = None if memory is not None else dist.new_group(backend="gloo")
        sent = torch.zeros(ranks.size + 1, width + 2, dtype=torch.int64, device="cpu")
        return HostExchange(memory, group, sent[0], sent[1:])

    def give(self, number: int, row: Sequence[int] = ()) -> None:
        """Begin an exchange: give a number, from 0 to 2^20, and a row of numbers, from 0 to 2^40 (collective)."""
        if self._open:
            self.extremes()  # of a call that failed before it took them
        self._row, self._open = row, True
        if self.memory is not None:
            self.memory.give(number)
            return
        self.outgoing[: len(row) + 2] = torch.tensor([number, len(row), *row], device="cpu")
        self._sent = dist.all_gather(list(self.all), self.outgoing, group=self.group, async_op=True)

    def extremes(self) -> tuple[int, int]:
        """The least and the greatest number that ranks have given. Waits for ranks that have not."""
        self._open = False
        if self.memory is not None:
            return self.memory.taken()
        with ACTIVITY.waiting(CALL):
            self._sent.wait()
        numbers = cast("list[int]", self.all[:, 0].tolist())
        return min(numbers), max(numbers)

    def rows(self) -> list[list[int]]:
        """The rows that ranks have given, each of its own length, once `extremes` are known (collective)."""
        if self.memory is not None:
            return self.memory.rows(self._row)
        table = cast("list[list[int]]", self.all.tolist())
        return [numbers[2 : 2 + numbers[1]] for numbers in table]
