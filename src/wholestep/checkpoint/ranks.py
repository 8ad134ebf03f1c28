"""Work that every rank does at the same point: all succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ..distributed.activity import ACTIVITY
from ..distributed.rendezvous import Rendezvous
from ..errors import CheckpointError, RankFailedError

T = TypeVar("T")

_TIMEOUT_S = 1800.0  # of a rank that is alive: it may write for minutes
_WHAT = "saving or loading a checkpoint"


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together. They stay reachable after the process group was destroyed."""

    rendezvous: Rendezvous

    @staticmethod
    def of_job() -> Ranks:
        """Those of torch's default process group."""
        return Ranks(Rendezvous.of_job(_TIMEOUT_S))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.rendezvous.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.rendezvous.size

    def on_every_rank(self, work: Callable[[], T], name_rank: bool = True) -> T:
        """Call `work` on every rank; each gets its own result. Raises CheckpointError: on every rank, the failure of
        the first one that failed; `name_rank=False` is for work that the ranks share, where it does not matter which.
        """
        own, failure, cause = _attempt(work)
        failures = self._gather(failure)
        failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
        if failed:
            rank, (found, *others) = failed[0]
            alone = name_rank and len(failed) < len(failures)
            raise CheckpointError(f"on rank {rank}, {found}" if alone else found, *others) from cause
        return cast(T, own)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """As `on_every_rank`; each rank gets the results of all, in rank order."""
        return self._gather(self.on_every_rank(work))

    def gather_on_first(self, work: Callable[[], T]) -> list[T]:
        """As `gather`, but the first rank alone gets the results, which are many bytes; the others get none."""
        own, ranks = self.on_every_rank(work), self.rendezvous
        return ranks.gather(ranks.next_label("checkpoint"), own, _WHAT, on_first=True)

    def on_first_rank(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank only; every rank gets its result, or the CheckpointError that it ends in."""
        own, failure, cause = _attempt(work) if self.rank == 0 else (None, None, None)
        result, failure = self._gather((own, failure))[0]
        if failure is not None:
            raise CheckpointError(*failure) from cause
        return cast(T, result)

    def _gather(self, value: T) -> list[T]:
        ranks = self.rendezvous
        return ranks.gather(ranks.next_label("checkpoint"), value, _WHAT)


def _attempt(work: Callable[[], Any]) -> tuple[Any, tuple[str, ...] | None, BaseException | None]:
    """The result of some work, its failure, and the cause of that, which stays on the rank that failed."""
    try:
        with ACTIVITY.doing(_WHAT, _TIMEOUT_S):
            return work(), None, None
    except RankFailedError:
        raise
    except CheckpointError as error:
        return None, error.args, error.__cause__
    except Exception as error:
        return None, (f"{type(error).__name__}: {error}",), error
