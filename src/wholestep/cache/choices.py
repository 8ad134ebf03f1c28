"""The measurements and choices of a first call, as a JSON value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..hardware.hardware import Hardware
from ..passes.fit_memory import Fitting
from ..plan.decision import Objective
from ..plan.plan_file import encode, read
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

    def __post_init__(self) -> None:
        if (self.template is None) is (self.solved is None):
            raise ValueError("neither a template nor strategies, or both")


@dataclass(frozen=True)
class Choices:
    """Choices among programs that compute the same. None of them is a program: each start captures, plans and
    partitions, so an entry that is wrong makes a step slow, and not wrong.

    `solved` has the layouts that were solved for in place of `TensorParallel("auto")`. `fitting` fits the step into its
    budget; `fitted` is a fingerprint of the program that it is for.
    """

    hardware: Hardware | None = None
    auto: AutoChoice | None = None
    solved: Strategies | None = None
    fitting: Fitting | None = None
    fitted: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON values. Strategies that are not wholestep's own are left out."""
        return {name: one for name, one in encode(self).items() if name != "layouts"}  # there are none but a plan's

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Choices:
        """Inverse of `to_json`. Raises TypeError, KeyError, ValueError: not what `to_json` writes."""
        return read(Choices, {one.name: data[one.name] for one in fields(Choices)})
