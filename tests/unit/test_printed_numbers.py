"""Numbers that people read: no exponents, and bytes with a unit or with separators."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import wholestep as ws
from wholestep.graph.text import human, human_at_least, seconds
from wholestep.hardware.hardware import Level
from wholestep.planner.bounds import Costs
from wholestep.report.figures import Figures, count

SOURCES = Path(ws.__file__).parent
PRINTS_EXPONENTS = {  # differences of values, for which an exponent says most, and what is cut to three digits before
    "checkpoint/contents.py", "rules/testing/harness.py", "graph/text.py", "proof/compare_values.py",
}  # fmt: skip
PRINTS_BYTES = {"planner/search_result.py"}  # `memory_bytes=` of a call, to be copied
POWERS = [power / 4 for power in range(72)]
NUMBER = r"(\d{1,3}(?:,\d{3})*)(\.\d+)?"


@pytest.mark.parametrize(
    ("written", "units", "low", "error"),
    [
        (human, {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}, 0, 0.3),
        (human_at_least, {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}, 0, 0.3),
        (seconds, {"us": 1e-6, "ms": 1e-3, "s": 1}, -9, 0.01),
    ],
)
def test_times_and_bytes_of_all_sizes_are_plain_numbers_with_a_unit(written, units, low, error) -> None:
    """They say what was given within rounding, from a nanosecond to years, and from a byte to a million terabytes."""
    for power in POWERS:
        value = 10 ** (power + low)
        found = re.fullmatch(rf"{NUMBER} (\w+)", written(value))
        assert found, written(value)
        said = float(f"{found[1].replace(',', '')}{found[2] or ''}") * units[found[3]]
        assert said == pytest.approx(value, rel=error), written(value)


def test_counts_and_rates_have_no_exponents() -> None:
    assert [count(number) for number in (1, 999, 4e3, 2.5e6, 3e11, 1e12, 1e18)] == [
        "1", "999", "4k", "2.5M", "300B", "1T", "1,000,000T",
    ]  # fmt: skip
    hardware = ws.Hardware.preset("dgx-h100")
    fast = replace(hardware, levels=(Level("light", 0, bytes_per_us=1.8e6, latency_us=1),))
    assert str(fast).endswith("light xany 1,800 GB/s")
    for step_s, tokens in ((1e-7, 1e3), (1e-3, 1e9), (1e4, 1e18)):
        costs = Costs(10**9, 3 * 10**13, 10**12, 7, step_s, step_s / 3, host_s=step_s / 2)
        text = str(Figures(costs, hardware, 100_000, 1e6, memory_bytes=10**12, run_tokens=tokens, gpu_hour=1e6))
        assert not re.search(r"\de[+-]\d", text), text


def test_no_message_formats_bytes_raw_or_times_with_an_exponent() -> None:
    """By the names of what is formatted in the sources: bytes go through `human`, or have separators."""
    faults: list[str] = []
    for path in sorted(SOURCES.rglob("*.py")):
        where = path.relative_to(SOURCES).as_posix()
        faults += [f"{where}:{fault}" for fault in _faults(path.read_text(), where)]
    assert not faults, "\n".join(faults)


def test_the_search_finds_what_it_is_for() -> None:
    source = 'raise PlanError(f"{need_bytes} of {self.budget_bytes:,} and {wait_us:.3g} or {wait_s:,.9g}")'
    assert _faults(source, "made.py") == ["1: {need_bytes} has no unit", "1: {wait_us:.3g} may print an exponent"]


def _faults(source: str, where: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FormattedValue):
            continue
        spec = "".join(one.value for one in node.format_spec.values if isinstance(one, ast.Constant)) if isinstance(
            node.format_spec, ast.JoinedStr
        ) else ""  # fmt: skip
        name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
        shown = f"{{{ast.unparse(node.value)}{spec and ':'}{spec}}}"
        if name.endswith("bytes") and "," not in spec and where not in PRINTS_BYTES | {"graph/text.py"}:
            found.append(f"{node.lineno}: {shown} has no unit")
        digits = re.fullmatch(r".*?(\d*)[ge]", spec)
        if digits and not (digits[1] and int(digits[1]) >= 9) and where not in PRINTS_EXPONENTS:
            found.append(f"{node.lineno}: {shown} may print an exponent")
    return found
