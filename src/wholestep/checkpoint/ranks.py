"""Work that every rank does at the same point: all succeed, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast

from ..distributed.activity import ACTIVITY
from ..distributed.rendezvous import Rendezvous
from ..distributed.sections import show_ranks
from ..errors import CheckpointError, RankFailedError, StoreError

T = TypeVar("T")

_TIMEOUT_S = 1800.0  # of a rank that is alive: it may write for minutes
_Failure = tuple[str, ...] | None


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together, in one call of a public function: `what` says which, and on which things.
    They stay reachable after the process group was destroyed.

    Their exchanges have labels of their own: those of another call, which another thread makes at the same time, can
    have any order on each rank.
    """

    rendezvous: Rendezvous
    what: str
    label: str
    _numbers: Iterator[int] = field(default_factory=count)

    @staticmethod
    def of_job(call: str, *things: object) -> Ranks:
        """Those of torch's default process group, in this call of the public function `call`, which is to have the same
        `things` on all ranks.
        """
        rendezvous = Rendezvous.of_job(_TIMEOUT_S)
        return Ranks(rendezvous, f"{call}({', '.join(map(str, things))})", rendezvous.next_label(call))

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
        returned, failure, cause = self._attempt(work)
        failures = self._gather(failure, _Failure)
        failed = [(rank, error) for rank, error in enumerate(failures) if error is not None]
        if failed:
            rank, (problem, *advice) = failed[0]
            alone = name_rank and len(failed) < len(failures)
            raise CheckpointError(f"on rank {rank}, {problem}" if alone else problem, *advice) from cause
        return cast(T, returned)

    def gather(self, work: Callable[[], T], kind: Any) -> list[T]:
        """As `on_every_rank`; each rank gets the results of all, of the type `kind`, in rank order."""
        return self._gather(self.on_every_rank(work), kind)

    def gather_on_first(self, work: Callable[[], T], kind: Any) -> list[T]:
        """As `gather`, but the first rank alone gets the results, which are many bytes; the others get none."""
        return self._gather(self.on_every_rank(work), kind, on_first=True)

    def on_first_rank(self, work: Callable[[], T], kind: Any) -> T:
        """Call `work` on the first rank only; all ranks get its result, of the type `kind`, or its CheckpointError."""
        returned, failure, cause = self._attempt(work) if self.rank == 0 else (None, None, None)
        result, failure = self._gather((returned, failure), tuple[kind | None, _Failure])[0]
        if failure is not None:
            raise CheckpointError(*failure) from cause
        return cast(T, result)

    def first_does(self, work: Callable[[], object]) -> None:
        """Call `work` on the first rank only. Raises the CheckpointError that it ends in, on every rank."""

        def done() -> bool:
            work()
            return True

        self.on_first_rank(done, bool)

    def _gather(self, value: Any, kind: Any, on_first: bool = False) -> list[Any]:
        """What each rank says. In their first exchange, ranks also say which call they are in."""
        number = next(self._numbers)
        label, what = f"{self.label}/{number}", self.what
        if number:
            return self.rendezvous.gather(label, value, what, kind, on_first)
        pairs = self.rendezvous.gather(label, (self.what, value), what, tuple[str, kind])
        ranks_of = {call: [rank for rank, (other, _) in enumerate(pairs) if other == call] for call, _ in pairs}
        if len(ranks_of) > 1:
            where = "; ".join(f"{show_ranks(ranks)} at {call}" for call, ranks in ranks_of.items())
            raise CheckpointError(
                f"ranks are at different calls: {where}", "the same call on every rank",
                "make the same calls on all ranks in the same order, with the same folder and the same things to save",
            )  # fmt: skip
        return [value for _, value in pairs]

    def _attempt(self, work: Callable[[], Any]) -> tuple[Any, _Failure, BaseException | None]:
        """The result of some work, its failure, and the cause of that, which stays on the rank that failed."""
        try:
            with ACTIVITY.doing(self.what, _TIMEOUT_S):
                return work(), None, None
        except (RankFailedError, StoreError):
            raise
        except CheckpointError as error:
            return None, error.args, error.__cause__
        except Exception as error:
            return None, (f"{type(error).__name__}: {error}",), error
