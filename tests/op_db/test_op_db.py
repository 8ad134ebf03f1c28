"""Every op of PyTorch's own database in a training step, by every style and layout, against one device in eager.

Each day takes other ops, chosen by its date; `--all-ops` takes all of them, `-k` some. WHOLESTEP_DAY=2026-01-31 takes
those of another day.
"""

import hashlib
from collections import Counter
from typing import Any

import pytest
from torch.testing._internal.common_methods_invocations import op_db

from tests.conftest import today
from tests.op_db.run import outcomes

DAILY = 20
INFOS = {f"{info.name}{'.' * bool(info.variant_test_name)}{info.variant_test_name}": info for info in op_db}


def of_the_day(names: list[str], day: str, count: int) -> list[str]:
    """`count` names that follow from the day alone, in order."""
    taken = sorted(names, key=lambda name: hashlib.sha256(f"{day} {name}".encode()).digest())[:count]
    return sorted(taken)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All ops, or those of the day."""
    if "op" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-ops")
        metafunc.parametrize("op", list(INFOS) if every else of_the_day(list(INFOS), today(), DAILY))


def test_op(op: str) -> None:
    found = list(outcomes(INFOS[op]))
    wrong = [f"{o.how}: {o.text}" for o in found if o.verdict == "wrong"]
    assert not wrong, f"{op}: " + "\n\n".join(wrong)


def test_the_tier_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import ops

    from wholestep.rules import registry

    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    registry.rule(ops.aten.cumsum.default, "... -> ...")
    try:
        found = Counter(o.verdict for o in outcomes(INFOS["cumsum"]))
        assert found["wrong"] > 0
        assert found["equal"] > 0
    finally:
        monkeypatch.undo()
        registry.bound = {}


def test_days_differ_and_are_the_same_for_all() -> None:
    names: list[Any] = list(INFOS)
    one, other = of_the_day(names, "2026-01-01", DAILY), of_the_day(names, "2026-01-02", DAILY)
    assert one != other
    assert one == of_the_day(names[::-1], "2026-01-01", DAILY)
    covered = {n for day in range(135) for n in of_the_day(names, f"day {day}", DAILY)}
    assert len(covered) > 0.97 * len(names), "the days of a few months see nearly all"
