"""The table of thresholds: each has a reason and is read, and no module has a copy."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from wholestep.tuning import TUNING

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for path in (ROOT / "src" / "wholestep").rglob("*.py") if path.name != "tuning.py"]
READ = {name for path in SOURCES for name in re.findall(r"\bTUNING\.(\w+)", path.read_text())}


@pytest.mark.parametrize("threshold", fields(TUNING), ids=lambda one: one.name)
def test_a_threshold_has_a_reason_and_is_read(threshold) -> None:
    assert threshold.metadata["unit"]
    assert len(threshold.metadata["reason"].split()) > 2
    decision = threshold.metadata["decision"]
    assert decision is None or len(list((ROOT / "docs" / "decisions").glob(f"{decision:04}-*.md"))) == 1
    assert threshold.name in READ, f"no module reads {threshold.name}"
