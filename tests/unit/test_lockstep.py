"""Ranks of one node give each other numbers in shared memory."""

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from wholestep.distributed.activity import ACTIVITY
from wholestep.distributed.lockstep import Lockstep, lockstep, words_of
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


def test_ranks_hear_each_others_rows() -> None:
    """Between other exchanges; rows have lengths of their own, and large numbers."""
    size, exchanges, width = 3, 200, 5
    words = memoryview(bytearray(8 * words_of(size, width))).cast("Q")
    drawn = random.Random(0)
    given = [
        [
            [drawn.choice([0, 7, 1 << 20, (1 << 40) - 1]) for _ in range(drawn.randint(0, width))]
            for _ in range(exchanges)
        ]
        for _ in range(size)
    ]
    found: list[list[list[list[int]]]] = [[] for _ in range(size)]

    def run(rank: int) -> None:
        own = Lockstep(words, rank, size, width)
        for i, row in enumerate(given[rank]):
            if i % 67 == rank:
                time.sleep(0.005)
            if i % 3 == 0:
                assert own.extremes(i) == (i, i)
            found[rank].append(own.rows(row))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[list(rows) for rows in zip(*given, strict=True)]] * size


def test_a_failure_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACTIVITY, "failure", RankFailedError("rank 1 died"))
    with pytest.raises(RankFailedError, match="rank 1 died"):
        Lockstep(memoryview(bytearray(32)).cast("Q"), 0, 2).extremes(3)


@dataclass
class SecondRank:
    """A rendezvous of two ranks, seen by the second one: the first says where its memory is, and has it."""

    memory: tuple[Path, bytes]
    rank: int = 1
    size: int = 2

    def broadcast(self, label: str, value: Any, what: str, kind: Any) -> Any:
        return self.memory

    def gather(self, label: str, value: Any, what: str, kind: Any) -> list[Any]:
        return [True, value]


def test_ranks_on_another_node_do_not_share_memory(tmp_path: Path) -> None:
    """No file of that name, or another file."""
    secret, file = b"s" * 16, tmp_path / "memory"
    file.write_bytes(secret + bytes(32))
    assert lockstep(cast(Any, SecondRank((file, secret))), "label") is not None
    assert lockstep(cast(Any, SecondRank((file, b"t" * 16))), "label") is None
    assert lockstep(cast(Any, SecondRank((tmp_path / "other", secret))), "label") is None
