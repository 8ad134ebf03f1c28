"""Runs the kinds of cases: some of each in `make test`, many in `make test-all`; the same ones each time."""

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from . import doors
from .cases import KINDS, Kind
from .judge import TooSlowError, verdict

PART = 250  # cases of one test, so that each ends within the limit of a test
PARTS = [(name, number) for name, kind in KINDS.items() for number in range(-(-kind.full // PART))]


def test_there_are_enough_cases() -> None:
    assert sum(kind.quick for kind in KINDS.values()) >= 500
    assert sum(kind.full for kind in KINDS.values()) >= 10_000


def test_each_public_method_is_called_on_a_value() -> None:
    assert not [name for name, kind in doors.methods().items() if kind not in doors.right_values()]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.quick])
def test_a_few_of_each_kind(name: str) -> None:
    run(KINDS[name], KINDS[name].quick, 0)


@pytest.mark.full
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_many_of_each_kind(name: str, part: int) -> None:
    run(KINDS[name], min(PART, KINDS[name].full - part * PART), part + 1)


def run(kind: Kind, count: int, number: int) -> None:
    """Judge `count` cases. A case that fails is made smaller, and shown; one that is too slow is shown as it is."""

    @seed(number)
    @settings(
        max_examples=count, deadline=None, database=None, print_blob=False, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def judge(data: st.DataObject) -> None:
        text, call = kind.draw(lambda strategy: data.conjecture_data.draw(strategy))
        note(f"{kind.name}, seed {number}: {text}")
        why = verdict(call)
        if why.startswith("no end"):
            raise TooSlowError(f"{kind.name}, seed {number}: {text}\n{why}")
        assert not why, why

    judge()
