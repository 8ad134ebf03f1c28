"""The table of docs/does-my-script-run.md is what its scripts do: equal to eager, or refused with that error."""

from itertools import groupby
from pathlib import Path

import pytest

from tests.scripts import ROWS
from tests.scripts.row import STYLES, Row, cell

pytestmark = pytest.mark.usefixtures("double")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "does-my-script-run.md"
HEAD = """# Does my script run?

A test runs every row and writes this page (`tests/scripts`, `tests/unit/test_does_it_run.py`). "yes" means that the
numbers of several calls are those of eager torch: results, parameters, buffers and optimizer state, under `replicate`
and `fully_shard`. "no" shows the first line of the error, which comes at the first call and names the line of the
script. There is no third outcome: a script that trains on other numbers without a word is a defect.
"""


def usual(number: int) -> str:
    """The style in which `make test` runs a row."""
    return STYLES[number % len(STYLES)]


@pytest.mark.parametrize(
    ("row", "style"),
    [
        pytest.param(row, style, id=f"{row.what}-{style}", marks=() if style == usual(number) else pytest.mark.full)
        for number, row in enumerate(ROWS)
        for style in STYLES
    ],
)
def test_row(row: Row, style: str) -> None:
    assert cell(row, style).startswith("yes") == row.runs, cell(row, style)


def test_the_page_says_so(request: pytest.FixtureRequest) -> None:
    parts = [HEAD]
    for group, rows in groupby(enumerate(ROWS), lambda one: one[1].group):
        parts.append(f"\n## {group}\n\n| a script that uses | runs |\n|---|---|\n")
        parts += [f"| {row.what} | {cell(row, usual(number))} |\n" for number, row in rows]
    text = "".join(parts)
    if request.config.getoption("--accept"):
        PAGE.write_text(text)
    assert text == PAGE.read_text(), "docs/does-my-script-run.md differs: if right, run pytest --accept"


def test_there_are_many_rows() -> None:
    assert len({row.what for row in ROWS}) == len(ROWS) >= 100
