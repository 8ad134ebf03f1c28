"""Checks the table of rules: every op with a rule, on every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ... import _torch
from ...errors import RuleError
from ..registry import RULES
from .check import CheckResult, Failure, Sample, cases_of, check_case


@dataclass(frozen=True)
class Row:
    """One op of the table. `bound`: number of samples to which its rule applies."""

    op: str
    result: CheckResult
    given: int
    bound: int
    runs: bool
    named: bool

    @property
    def verdict(self) -> str:
        """`holds`, `shapes hold` (random values), `wrong`, `no sample`, `not on CPU`, or `says nothing`."""
        if self.result.failures:
            return "wrong"
        if not self.runs:
            return "not on CPU"
        if not self.bound:
            return "says nothing" if self.given or not self.named else "no sample"
        return "shapes hold" if self.result.shapes_only else "holds"

    @property
    def ok(self) -> bool:
        """False if the rule is wrong or was never tried."""
        return self.verdict not in ("wrong", "no sample") and not (self.named and self.verdict == "says nothing")


def check_op(target: Any, samples: Sequence[Sample]) -> Row:
    """Check one op on its samples; a rule that does not fit a sample is a failure too."""
    runs = not _torch.is_op(target) or _torch.runs_on_cpu(target)
    cases = cases_of(target, samples) if runs else []
    result, bound = CheckResult(str(target)), 0
    for case in cases:
        try:
            found = check_case(case)
        except RuleError as error:
            failure = Failure(case.name, "the rule", "bound", "a sample", f"is refused: {error.found}", error.needed)
            found = CheckResult(case.name, 1, failures=(failure,))
        if found is not None:
            result, bound = result + found, bound + 1
    return Row(str(target), result, len(cases), bound, runs, target in RULES)


def check_table(
    targets: Iterable[Any],
    samples: Callable[[Any], Sequence[Sample]],
    progress: Callable[[Any], None] = lambda op: None,
) -> Iterator[Row]:
    """A row for each op."""
    for target in targets:
        progress(target)
        yield check_op(target, samples(target))
