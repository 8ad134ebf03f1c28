"""Ranks meet before something that needs all of them and that the user calls: a rank alone is an error, not a hang."""

from __future__ import annotations

import time
import traceback
import warnings
from typing import Any

import torch.distributed as dist

from .. import _torch
from ..errors import RankMismatchError
from ..graph.meta import last_user_frame

_PATIENCE_S = 5.0  # then a rank that waits says so to the others
_LOOK_S = 0.5  # and looks where they are as often


def meet(what: str, timeout_s: float) -> None:
    """Wait until every rank is about to do the same thing that needs all of them; `what` it is comes in the error.

    Two or three messages to the store; nothing is left in it.

    Raises:
        RankMismatchError: some ranks do not come in time, or do something else that needs all ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    size, store, key = dist.get_world_size(), _torch.default_store(), f"wholestep/meet/{what}"
    came = store.add(key, 1)
    number = (came - 1) // size
    if came == (number + 1) * size:
        store.set(f"{key}/{number}", b"")
        if number:
            store.delete_key(f"{key}/{number - 1}")  # all have seen it
        return
    patience = min(_PATIENCE_S, timeout_s / 2)
    if _is_set(store, f"{key}/{number}", patience):
        return
    missing = _wait_for_others(store, what, f"{key}/{number}", timeout_s)
    if missing and store.add(key, -1) + 1 == (number + 1) * size:
        store.add(key, 1)  # the last one came at this moment
    elif missing:
        raise RankMismatchError(
            f"{what}: rank {dist.get_rank()} is there, {missing}",
            "all ranks, as this gathers what each of them holds a part of",
            "call it on every rank (not under `if rank == 0`), equally often and in the same order",
            _here(),
        )


def _wait_for_others(store: Any, what: str, key: str, timeout_s: float) -> str:
    """Say where this rank is, and wait on; what keeps the others, or nothing once they have come."""
    rank, size, prefix = dist.get_rank(), dist.get_world_size(), "wholestep/meet-at"
    store.set(f"{prefix}/{rank}", what)
    warnings.warn(f"rank {rank} waits for other ranks at {what}\n  at: {_here()}", stacklevel=3)
    end = time.monotonic() + timeout_s
    try:
        while not _is_set(store, key, min(_LOOK_S, timeout_s / 2)):
            others = {r: f"{prefix}/{r}" for r in range(size) if r != rank}
            at = {r: store.get(k).decode() if store.check([k]) else "" for r, k in others.items()}
            elsewhere = [f"rank {r} is at {there}" for r, there in at.items() if there not in ("", what)]
            if elsewhere:
                time.sleep(2 * _LOOK_S)  # they look as well
                return "; ".join(elsewhere)
            if time.monotonic() > end:
                return f"ranks {[r for r, there in at.items() if not there]} did not come within {timeout_s:g} s"
        return ""
    finally:
        store.set(f"{prefix}/{rank}", "")


def _here() -> str:
    """The user's line that runs."""
    return last_user_frame("".join(traceback.format_stack()))


def _is_set(store: Any, key: str, timeout_s: float) -> bool:
    """Look again and again: `store.wait` writes lines to the log when it is in vain."""
    end, pause = time.monotonic() + timeout_s, 1e-4
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True
