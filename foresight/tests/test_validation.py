"""Error bars from cases: percentiles by device, and none for few runs."""

from foresight.accuracy.read import Case
from foresight.accuracy.validation import validations


def case(hardware: str, measured: float, source: str = "a") -> Case:
    return Case(source, hardware, "", "", measured, 1.0)


def test_percentiles_by_device() -> None:
    cases = [case("A100 80GB", 1 + i / 10, "ab"[i % 2]) for i in range(11)]
    few = [case("H100", 1.0)] * 4
    (row,) = validations([*cases, *few, case("Unknown 1", 1.0)])
    assert (row.device, row.runs, row.sources) == ("A100 SXM 80 GB", 11, ("a", "b"))
    assert (row.low, row.middle, row.high) == (1.1, 1.5, 1.9)
    assert 0.3 < row.mean_error < 0.4
