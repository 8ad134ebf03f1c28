"""Random step graphs on random meshes: all ranks of the partitioned program compute what one device computes.

Each day takes other seeds. `WHOLESTEP_SEEDS=5000:6000` chooses from others. A seed that fails is made smaller
and printed, and again by `python -m tests.random_graphs --seed N`.
"""

import datetime
import os
import warnings

import pytest

from tests.conftest import today
from tests.random_graphs.case import case
from tests.random_graphs.run import problem
from tests.random_graphs.shrink import show, shrink

BLOCK = 25
FIRST, LAST = map(int, os.environ.get("WHOLESTEP_SEEDS", "0:2000").split(":"))
BLOCKS = range(FIRST, LAST, BLOCK)
OF_THE_DAY = BLOCKS[datetime.date.fromisoformat(today()).toordinal() % len(BLOCKS)]
MORE = range(LAST, LAST + 4000, BLOCK)


def check(first: int, last: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, last):
            made = case(seed)
            found = problem(made)
            if found is not None:
                small = shrink(made, found)
                text = show(small, problem(small) or found)
                pytest.fail(f"seed {seed}: {found.kind}\npython -m tests.random_graphs --seed {seed}\n\n{text}", False)


@pytest.mark.parametrize("first", [pytest.param(n, marks=() if n == OF_THE_DAY else pytest.mark.full) for n in BLOCKS])
def test_all_ranks_compute_what_one_device_does(first: int) -> None:
    check(first, min(first + BLOCK, LAST))


@pytest.mark.full
@pytest.mark.parametrize("first", MORE)
def test_more_of_them(first: int) -> None:
    check(first, first + BLOCK)
