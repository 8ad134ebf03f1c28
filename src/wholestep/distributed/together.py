"""Work that every rank does at the same point: all succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ..errors import CheckpointError

T = TypeVar("T")


def connected() -> bool:
    """True when there are other ranks to talk to."""
    return dist.is_initialized() and dist.get_world_size() > 1


def everyone(work: Callable[[], T], name_rank: bool = True) -> list[T]:
    """Call `work` on every rank; each gets all results, in rank order.

    `name_rank=False` is for work that the ranks share out: it does not matter which of them fails.

    Raises:
        CheckpointError: on every rank, when it failed on any; the failure of the first such rank.
    """
    result, failure, cause = _attempt(work)
    said: list[Any] = [(result, failure)]
    if connected():
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, (result, failure))
    failures = [(rank, error) for rank, (_, error) in enumerate(said) if error is not None]
    if failures:
        rank, error = failures[0]
        alone = name_rank and len(failures) < len(said)
        found = f"on rank {rank}, {error.found}" if alone else error.found
        raise CheckpointError(found, *error.args[1:]) from cause
    return [value for value, _ in said]


def first(work: Callable[[], T]) -> T:
    """Call `work` on the first rank only; every rank gets its result.

    Raises:
        CheckpointError: on every rank, when it failed.
    """
    result, failure, cause = _attempt(work) if not connected() or dist.get_rank() == 0 else (None, None, None)
    said: list[Any] = [(result, failure)]
    if connected():
        dist.broadcast_object_list(said, src=0)
    result, failure = said[0]
    if failure is not None:
        raise failure from cause
    return cast(T, result)


def _attempt(work: Callable[[], T]) -> tuple[T | None, CheckpointError | None, BaseException | None]:
    """Result, failure to tell the others, and what it comes from."""
    try:
        return work(), None, None
    except CheckpointError as error:
        return None, error, error.__cause__
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}"), error
