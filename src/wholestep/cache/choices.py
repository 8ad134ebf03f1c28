"""What a first call finds out by measuring and searching, as a value that JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..hardware.hardware import Hardware
from ..hardware.hardware_file import from_json, to_json
from ..plan import strategy_file
from ..plan.strategy import Strategies


@dataclass(frozen=True)
class Choices:
    """Choices among programs that compute the same. None of them is a program: each start captures, plans and
    partitions, so an entry that is wrong makes a step slow, and not wrong.

    Args:
        hardware: how fast the job computes and communicates, as it was measured.
        auto: what `Auto` chose, as the first rank says it (`runtime.choose_strategy`).
        solved: the strategies with the layouts that were solved for in place of `TensorParallel("auto")`.
        again: how the step was fitted into its budget, as the first rank says it (`runtime.memory_budget`).
        fitted: a fingerprint of the program that `again` is for; names of its nodes mean nothing in another one.

    Example:
        >>> Choices.from_json(Choices(auto=("0", "{}")).to_json()).auto
        ('0', '{}')
    """

    hardware: Hardware | None = None
    auto: tuple[str, ...] = ()
    solved: Strategies | None = None
    again: tuple[str, ...] = ()
    fitted: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values. Strategies that are not wholestep's own are left out."""
        return {
            "hardware": None if self.hardware is None else to_json(self.hardware),
            "auto": list(self.auto),
            "solved": strategy_file.encode(self.solved),
            "again": list(self.again),
            "fitted": self.fitted,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choices:
        """Inverse of `to_json`.

        Raises:
            TypeError, KeyError, ValueError: not what `to_json` writes.
        """
        return Choices(
            None if data["hardware"] is None else from_json(data["hardware"]),
            tuple(map(str, data["auto"])),
            strategy_file.decode(data["solved"]),
            tuple(map(str, data["again"])),
            str(data["fitted"]),
        )
