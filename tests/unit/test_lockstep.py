"""Ranks of one node give each other numbers in shared memory."""

import random
import threading
import time

import pytest

from wholestep.distributed.activity import ACTIVITY
from wholestep.distributed.lockstep import Lockstep
from wholestep.errors import RankFailedError


def test_ranks_hear_each_others_numbers_in_every_exchange() -> None:
    """Some ranks are late, so that others wait for them."""
    size, exchanges = 3, 200
    words = memoryview(bytearray(2 * size * 8)).cast("Q")
    given = [[random.Random(rank).randrange(1000) for _ in range(exchanges)] for rank in range(size)]
    found: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        own = Lockstep(words, rank, size)
        for i, number in enumerate(given[rank]):
            if i % 67 == rank:
                time.sleep(0.005)
            found[rank].append(own.extremes(number))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[(min(numbers), max(numbers)) for numbers in zip(*given, strict=True)]] * size


def test_a_failure_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACTIVITY, "failure", RankFailedError("rank 1 died"))
    with pytest.raises(RankFailedError, match="rank 1 died"):
        Lockstep(memoryview(bytearray(32)).cast("Q"), 0, 2).extremes(3)
