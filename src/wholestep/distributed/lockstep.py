"""Numbers that the ranks of one node give each other before a call, in memory that they share: some microseconds."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .activity import ACTIVITY
from .heartbeat import CALL
from .rendezvous import Rendezvous

_WORD, _SECRET = 8, 16
_NUMBER_BITS = 20
_SPIN_S, _NAP_S = 1e-3, 1e-4  # a rank that is a little late is waited for without a pause


@dataclass(eq=False)
class Lockstep:
    """This rank's side of the memory: two rows of words, one word a rank. A word has the number of the exchange and
    the number that the rank gave, so both change at once. A rank is at most one exchange ahead: hence two rows.

    Behind them are two tables for up to `width` numbers of each rank, in two words each, which count for themselves.
    """

    words: memoryview[int]
    rank: int
    size: int
    width: int = 0
    exchanges: int = 0
    tables: int = 0

    def extremes(self, number: int) -> tuple[int, int]:
        """The least and the greatest number that the ranks give in this exchange (collective).

        Raises RankFailedError: a rank failed.
        """
        self.give(number)
        return self.taken()

    def give(self, number: int) -> None:
        """Begin an exchange, of which `taken` is the end."""
        self.exchanges += 1
        self.words[self.exchanges % 2 * self.size + self.rank] = self.exchanges << _NUMBER_BITS | number

    def taken(self) -> tuple[int, int]:
        """The extremes of the exchange that has begun. Raises RankFailedError: a rank failed."""
        row = self.exchanges % 2 * self.size
        numbers = [self._read(row + other, self.exchanges) for other in range(self.size)]
        return min(numbers), max(numbers)

    def rows(self, row: Sequence[int]) -> list[list[int]]:
        """The rows of all ranks, of at most `width` numbers, from 0 to 2^40, each (collective).

        Raises RankFailedError: a rank failed.
        """
        assert len(row) <= self.width, "rows have a place"
        self.tables += 1
        place = 2 * (self.width + 1)
        table = 2 * self.size + self.tables % 2 * self.size * place
        start = table + self.rank * place
        for i, number in enumerate((len(row), *row)):
            self.words[start + 2 * i] = self.tables << _NUMBER_BITS | number & (1 << _NUMBER_BITS) - 1
            self.words[start + 2 * i + 1] = self.tables << _NUMBER_BITS | number >> _NUMBER_BITS
        return [self._row(table + other * place) for other in range(self.size)]

    def _row(self, at: int) -> list[int]:
        count = self._number(at)
        return [self._number(at + 2 * i) for i in range(1, count + 1)]

    def _number(self, at: int) -> int:
        return self._read(at, self.tables) | self._read(at + 1, self.tables) << _NUMBER_BITS

    def _read(self, at: int, now: int) -> int:
        words = self.words
        if words[at] >> _NUMBER_BITS != now:
            _wait(lambda: words[at] >> _NUMBER_BITS == now)
        return words[at] & (1 << _NUMBER_BITS) - 1


def _wait(is_there: Callable[[], bool]) -> None:
    begun = time.perf_counter()
    while time.perf_counter() - begun < _SPIN_S:
        if is_there():
            return
    with ACTIVITY.waiting(CALL):
        while not is_there():
            ACTIVITY.raise_failure()
            time.sleep(_NAP_S)


def lockstep(ranks: Rendezvous, label: str, width: int = 0) -> Lockstep | None:
    """Memory that all ranks share, for rows of `width` numbers; None where they are on several nodes (collective)."""
    secret, path = secrets.token_bytes(_SECRET), Path()  # the same file has the same secret
    if ranks.rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="wholestep-", dir=folder)
        path = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(secret + bytes(words_of(ranks.size, width) * _WORD))
    try:
        where, secret = ranks.broadcast(
            f"{label}/memory", (path, secret), "which memory ranks share", tuple[Path, bytes]
        )
        shared = _opened(where, secret)
        everywhere = all(ranks.gather(f"{label}/shared", shared is not None, "whether they share memory", bool))
    finally:
        if ranks.rank == 0:
            path.unlink()
    if shared is None or not everywhere:
        return None
    return Lockstep(memoryview(shared)[_SECRET:].cast("Q"), ranks.rank, ranks.size, width)


def words_of(size: int, width: int) -> int:
    """How many words `size` ranks share."""
    return 2 * size + 2 * size * 2 * (width + 1) * (width > 0)


def _opened(path: Path, secret: bytes) -> mmap.mmap | None:
    """The file as memory; None where there is no such file."""
    try:
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 0)
    except OSError:
        return None
    return shared if shared[:_SECRET] == secret else None
