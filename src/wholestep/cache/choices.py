"""The measurements and choices of a first call, as a JSON value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..hardware.hardware import Hardware
from ..hardware.hardware_file import from_json, to_json
from ..passes.fit_memory import Fitting
from ..plan.decision import Objective
from ..plan.plan_file import decode_strategies, encode_strategies, read
from ..plan.strategies import Strategies


@dataclass(frozen=True)
class AutoChoice:
    """What `Auto` chose on the first rank: a template by its number among the candidates, or strategies that were
    solved for; what it was chosen for, and why.
    """

    objective: Objective
    template: int | None = None
    solved: Strategies | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "objective": asdict(self.objective),
            "template": self.template,
            "solved": encode_strategies(self.solved),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> AutoChoice:
        """Inverse of `to_json`. Raises TypeError, KeyError, ValueError: not what `to_json` writes."""
        template, solved = data["template"], decode_strategies(data["solved"])
        if (template is None) is (solved is None):
            raise ValueError("neither a template nor strategies, or both")
        number = None if template is None else int(template)
        return AutoChoice(read(Objective, data["objective"]), number, solved, tuple(map(str, data["notes"])))


@dataclass(frozen=True)
class Choices:
    """Choices among programs that compute the same. None of them is a program: each start captures, plans and
    partitions, so an entry that is wrong makes a step slow, and not wrong.

    Args:
        hardware: how fast the job computes and communicates, as it was measured.
        auto: what `Auto` chose.
        solved: the strategies with the layouts that were solved for in place of `TensorParallel("auto")`.
        fitting: how the step was fitted into its budget.
        fitted: a fingerprint of the program that `fitting` is for; names of its nodes mean nothing in another one.
    """

    hardware: Hardware | None = None
    auto: AutoChoice | None = None
    solved: Strategies | None = None
    fitting: Fitting | None = None
    fitted: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values. Strategies that are not wholestep's own are left out."""
        return {
            "hardware": None if self.hardware is None else to_json(self.hardware),
            "auto": None if self.auto is None else self.auto.to_json(),
            "solved": encode_strategies(self.solved),
            "fitting": None if self.fitting is None else asdict(self.fitting),
            "fitted": self.fitted,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choices:
        """Inverse of `to_json`. Raises TypeError, KeyError, ValueError: not what `to_json` writes."""
        measured, fitting = data["hardware"], data["fitting"]
        return Choices(
            None if measured is None else from_json(measured),
            None if data["auto"] is None else AutoChoice.from_json(data["auto"]),
            decode_strategies(data["solved"]),
            None if fitting is None else Fitting(int(fitting["way"]), tuple(map(str, fitting["names"]))),
            str(data["fitted"]),
        )
