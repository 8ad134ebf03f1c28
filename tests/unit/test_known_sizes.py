"""Ranks that agree on a number have the sizes of all ranks, whatever was given before and is forgotten."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.runtime import step_inputs
from wholestep.runtime.step_inputs import KnownSizes

RANKS = 3


@dataclass
class Ranks:
    """Takes the place of `HostExchange`: each rank gives its number before one asks for those of all."""

    numbers: list[int] = field(default_factory=list[int])

    def give(self, number: int, row: Sequence[int]) -> None:
        self.numbers.append(number)

    def extremes(self) -> tuple[int, int]:
        return min(self.numbers), max(self.numbers)


@given(
    calls=st.lists(st.lists(st.integers(1, 3), min_size=RANKS, max_size=RANKS), max_size=40),
    kept=st.integers(1, 4),
    apart=st.booleans(),
)
def test_numbers_stand_for_the_sizes_of_all_ranks(calls: list[list[int]], kept: int, apart: bool) -> None:
    """`apart`: the last rank has a batch of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_inputs, "_MOST_KNOWN", kept)
        patch.setattr(step_inputs, "_MOST_EXCHANGES", kept + 3)
        exchange = Ranks()
        ranks = [KnownSizes(cast(Any, exchange)) for _ in range(RANKS)]
        last: list[int] = []
        for sizes in calls:
            groups = [sizes[:2], sizes[2:]] if apart else [sizes]
            expected = [(tuple(group),) for group in groups for _ in group]
            exchange.numbers.clear()
            for known, own in zip(ranks, sizes, strict=True):
                known.give(own, ())
            found = [known.agreed() for known in ranks]
            if None in found:
                assert found == [None] * RANKS  # all ranks exchange
                assert sizes != last
                for known, own, whole in zip(ranks, sizes, expected, strict=True):
                    known.note(known.next_number(), own, whole)
            else:
                assert found == expected
            last = sizes
        assert all(len(known.sizes) <= kept and len(known.newest) <= kept for known in ranks)
