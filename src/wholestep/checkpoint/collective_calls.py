"""Work that every rank does at the same point: all succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from ..distributed.activity import ACTIVITY
from ..distributed.rendezvous import Rendezvous
from ..errors import CheckpointError, RankFailedError

T = TypeVar("T")

_TIMEOUT_S = 1800.0  # of a rank that is alive: it may write for minutes


def on_every_rank(work: Callable[[], T], name_rank: bool = True) -> T:
    """Call `work` on every rank; each gets its own result. Raises CheckpointError: on every rank, the failure of the
    first one that failed; `name_rank=False` is for work that the ranks share, where it does not matter which.
    """
    own, failure, cause = _attempt(work)
    failures = _gather(failure)
    failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
    if failed:
        rank, (found, *others) = failed[0]
        alone = name_rank and len(failed) < len(failures)
        raise CheckpointError(f"on rank {rank}, {found}" if alone else found, *others) from cause
    return cast(T, own)


def gather_from_ranks(work: Callable[[], T]) -> list[T]:
    """As `on_every_rank`; each rank gets the results of all, in rank order."""
    return _gather(on_every_rank(work))


def on_first_rank(work: Callable[[], T]) -> T:
    """Call `work` on the first rank only; every rank gets its result, or the CheckpointError that it ends in."""
    own, failure, cause = _attempt(work) if rank_and_size()[0] == 0 else (None, None, None)
    result, failure = _gather((own, failure))[0]
    if failure is not None:
        raise CheckpointError(*failure) from cause
    return cast(T, result)


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks."""
    ranks = Rendezvous.of_job(_TIMEOUT_S)
    return ranks.rank, ranks.size


def _gather(value: T) -> list[T]:
    ranks = Rendezvous.of_job(_TIMEOUT_S)
    return ranks.gather(ranks.next_label("checkpoint"), value, "saving or loading a checkpoint")


def _attempt(work: Callable[[], Any]) -> tuple[Any, tuple[str, ...] | None, BaseException | None]:
    """The result of some work, its failure, and the cause of that, which stays on the rank that failed."""
    try:
        with ACTIVITY.doing("saving or loading a checkpoint", _TIMEOUT_S):
            return work(), None, None
    except RankFailedError:
        raise
    except CheckpointError as error:
        return None, error.args, error.__cause__
    except Exception as error:
        return None, (f"{type(error).__name__}: {error}",), error
