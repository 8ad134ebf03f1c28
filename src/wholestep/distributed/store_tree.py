"""A combining tree over the job's key-value store: no rank reads the values of all others."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import shown
from .activity import ACTIVITY
from .typed_messages import MOST_BYTES, decode, encode, malformed

ARITY = 16
"""Ranks in a group. A group's last rank reads `ARITY` values; 1,024 ranks have three levels of groups."""

_PIECE_BYTES = 4 << 20  # a TCPStore takes values of 8 MiB at most
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.1
_INLINE, _PIECES = b"=", b"#"
_DIGITS = 10  # of a number of pieces


def put(store: Any, key: str, value: object) -> None:
    """Write a value as a message, in pieces where it is large. Raises PlanError: it has no form as text."""
    data = encode(key, value)
    if len(data) < _PIECE_BYTES:
        store.set(key, _INLINE + data)
        return
    pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, _PIECES + str(len(pieces)).encode())


def get(store: Any, key: str, kind: Any) -> Any:
    """The value that `put` wrote, as the type `kind`. Raises StoreError: it is none that a rank wrote."""
    return _decoded(store, key, store.get(key), kind)


def _decoded(store: Any, key: str, head: bytes, kind: Any) -> Any:
    data = head[1:]
    if head[:1] == _PIECES:
        count = int(data) if data.isdigit() and len(data) < _DIGITS else 0
        keys = [f"{key}/{number}" for number in range(min(count, MOST_BYTES // _PIECE_BYTES + 1))]
        if not keys or not store.check(keys):
            raise malformed(key, "pieces that are not there")
        data = b"".join(map(store.get, keys))
    return decode(key, data, kind)


def add(store: Any, key: str, amount: int) -> int:
    """Count in the store. Raises StoreError: what is there is no number."""
    try:
        return store.add(key, amount)
    except (RuntimeError, ValueError, IndexError):
        with contextlib.suppress(RuntimeError):  # the connection that asked is closed then
            if not re.fullmatch(rb"-?\d{1,18}", text := store.clone().get(key)):
                raise malformed(key, f"{shown(text)}, which is no number") from None
        raise


def appears(store: Any, key: str, timeout_s: float) -> bool:
    """Poll until `key` is set; False after `timeout_s`. `store.wait` would log each timeout. Raises RankFailedError."""
    start = time.monotonic()
    while not store.check([key]):
        ACTIVITY.raise_failure()
        waited = time.monotonic() - start
        if waited > timeout_s:
            return False
        time.sleep(pause_s(waited))
    return True


def pause_s(waited_s: float) -> float:
    """The pause before the next poll: a tenth of the time waited so far, within bounds."""
    return min(_FIRST_PAUSE_S + waited_s / 10, _LONGEST_PAUSE_S)


@dataclass(frozen=True)
class StoreTree:
    """One contribution of each rank under `label`, merged in groups of `ARITY` ranks, level by level; all of a `kind`.

    The rank that completes a group merges its values and contributes the result to the next level, so nobody waits
    until the last rank has come. A rank sends 2 requests; one that completes a group 2 for the next level, one to
    read `ARITY` values and `ARITY + 1` to delete them: O(log size) a rank, O(size) in all.
    """

    store: Any
    label: str
    rank: int
    size: int
    kind: Any

    def contribute(self, value: Any, merge: Callable[[list[Any]], Any]) -> list[Any]:
        """Add this rank's value. Returns `[merged value of all ranks]` on the rank that comes last, `[]` on others."""
        index, width, level, stale = self.rank, self.size, 0, list[str]()
        while width > 1:
            put(self.store, self._key(level, index), value)
            self._delete(stale)
            group = index // ARITY
            keys = [self._key(level, member) for member in _members(group, width)]
            count = f"{self.label}/{level}/count/{group}"
            if (came := add(self.store, count, 1)) < len(keys):
                return []
            if came > len(keys):
                raise malformed(count, f"{came}, where {len(keys)} ranks count")
            heads = zip(keys, self.store.multi_get(keys), strict=True)  # in one request where values are small
            value = merge([_decoded(self.store, key, head, self.kind) for key, head in heads])
            index, width, level, stale = group, -(-width // ARITY), level + 1, [*keys, count]
        self._delete(stale)
        return [value]

    def missing(self) -> list[int]:
        """Ranks that have contributed nothing. Asks for `ARITY` keys a level and missing rank, not for all ranks."""
        widths = [self.size]
        while widths[-1] > ARITY:
            widths.append(-(-widths[-1] // ARITY))
        return [rank for index in range(widths[-1]) for rank in self._absent(widths, len(widths) - 1, index)]

    def _absent(self, widths: Sequence[int], level: int, index: int) -> list[int]:
        key = self._key(level, index)
        if self.store.check([key]):
            return []
        if level == 0:
            return [index]
        members = _members(index, widths[level - 1])
        absent = [rank for member in members for rank in self._absent(widths, level - 1, member)]
        return [] if self.store.check([key]) else absent  # merged, and its members deleted, meanwhile

    def _key(self, level: int, index: int) -> str:
        return f"{self.label}/{level}/{index}"

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.delete_key(key)


def _members(group: int, width: int) -> range:
    return range(group * ARITY, min((group + 1) * ARITY, width))
