"""The measurements and choices of a first call, as a JSON value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import PlanError
from ..hardware.hardware import Hardware
from ..passes.context import Fitting
from ..plan.decision import Objective
from ..plan.plan_file import encode, read
from ..plan.strategies import Strategies
from ..typed_json import MalformedError, as_object


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
            raise PlanError("what Auto chose is neither a template nor strategies, or both", "one of them")


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
        return {name: entry for name, entry in encode(self).items() if name != "layouts"}  # there are none but a plan's

    @staticmethod
    def from_json(data: Any) -> Choices:
        """Inverse of `to_json`. Raises MalformedError: not what `to_json` writes."""
        missing = [field.name for field in fields(Choices) if field.name not in as_object(data, "")]
        if missing:
            raise MalformedError(f"field {missing[0]} is missing", "every field that to_json writes")
        return read(Choices, data)
