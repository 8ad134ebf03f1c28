"""Numbers that ranks give each other before a call, by way of their hosts: no rank waits for its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from .lockstep import Lockstep, lockstep
from .rendezvous import Rendezvous


@dataclass(frozen=True)
class HostExchange:
    """One rank's side. `memory` is what the ranks of one node share; `group` connects hosts, None for the default. Rows
    have at most `width` numbers.
    """

    size: int
    memory: Lockstep | None
    group: Any
    width: int

    @staticmethod
    def of(ranks: Rendezvous, kind: str, width: int) -> HostExchange:
        """For ranks whose devices are of `kind` (collective)."""
        memory = lockstep(ranks, ranks.next_label("host exchange"), width)
        config = [pair.partition(":")[0] for pair in str(dist.get_backend_config()).split(",")]
        group = None if kind == "cpu" or "cpu" in config else dist.new_group(backend="gloo")
        return HostExchange(ranks.size, memory, group, width)

    def extremes(self, number: int) -> tuple[int, int]:
        """The least and the greatest number, from 0 to 2^20, that ranks give (collective)."""
        if self.memory is not None:
            return self.memory.extremes(number)
        both = torch.tensor([-number, number])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        least, greatest = cast("list[int]", both.tolist())
        return -least, greatest

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, each of its own length (collective)."""
        if self.memory is not None:
            return self.memory.rows(row)
        own = torch.tensor([len(row), *row, *[0] * (self.width - len(row))], dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own, group=self.group)
        found = cast("list[list[int]]", torch.stack(rows).tolist())
        return [numbers[1 : 1 + numbers[0]] for numbers in found]
