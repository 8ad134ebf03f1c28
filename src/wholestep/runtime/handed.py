"""What the first rank compiled, handed to the others through the job's store: its key first, then the program."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import _torch
from ..errors import RankMismatchError

_PIECE_BYTES = 4 << 20  # a store takes values of 8 MiB at most


@dataclass(frozen=True)
class Handed:
    """One exchange. `label` is the same on all ranks; they wait `timeout_s` for each thing that the first one says."""

    label: str
    timeout_s: float

    def say(self, what: str, said: Mapping[str, Any], data: bytes = b"") -> None:
        """Tell the others (the first rank alone)."""
        store = _torch.default_store()
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            store.set(f"{self.label}/{what}/{number}", piece)
        store.set(f"{self.label}/{what}", json.dumps({**said, "pieces": len(pieces)}))

    def hear(self, what: str) -> dict[str, Any]:
        """What the first rank said.

        Raises:
            RankMismatchError: it failed, or said nothing in time.
        """
        store, key = _torch.default_store(), f"{self.label}/{what}"
        end = time.monotonic() + self.timeout_s
        while not store.check([key]):
            if time.monotonic() > end:
                raise RankMismatchError(
                    f"rank 0 gave no program within {self.timeout_s:g} s, which it compiles for all ranks (cache=)",
                    "every rank to call the step, and the first one to capture and plan it in that time",
                    "read rank 0's own error, or give a longer agree_timeout",
                )
            time.sleep(0.01)
        said: dict[str, Any] = json.loads(store.get(key))
        if said.get("failure"):
            raise RankMismatchError(
                f"rank 0 could not compile its step: {said['failure']}",
                "a step that every rank can compile",
                "read rank 0's own error",
            )
        return said

    def data(self, what: str, said: Mapping[str, Any]) -> bytes:
        """The bytes that go with what the first rank said."""
        store = _torch.default_store()
        keys = [f"{self.label}/{what}/{number}" for number in range(said["pieces"])]
        if keys:
            store.wait(keys, timedelta(seconds=self.timeout_s))
        return b"".join(store.get(key) for key in keys)


def is_first() -> bool:
    """True on the rank that compiles for the others."""
    return dist.get_rank() == 0
