"""How ranks compare, broadcast and gather small values and wait for each other, through the job's store.

Each exchange has a timeout, and its error names the ranks. Values merge in a tree (`StoreTree`): a rank sends
O(log ranks) requests, and polls one key.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .. import _torch
from ..errors import PlanError, RankMismatchError
from ..graph.meta import last_user_frame
from .activity import ACTIVITY
from .sections import (
    GRAPH,
    LAYOUTS,
    Section,
    SectionDifference,
    difference,
    first_other_call,
    merged,
    other_program,
    other_value,
)
from .store_tree import StoreTree, appears, get, pause_s, put

_PUBLISHED_S = 10.0  # at least, for what another rank is about to publish
_REPORT_S = 5.0  # between two reports of missing ranks
_PATIENCE_S = 5.0  # then a rank at a barrier warns, and publishes where it waits
UNDER = ("call", "choices", "plan", "order", "memory", "memory/fits/outcome", "memory/fits/outcomes")
_STORE = "the store of the job"  # which does not answer where its host is lost
_LOOK_S = 0.5  # between two looks at where the other ranks wait


@dataclass(frozen=True)
class Calls:
    """The lowest rank with another call than rank 0, or 0; `same` is true on ranks with rank 0's call."""

    first_other: int
    same: bool


@dataclass(frozen=True)
class _Outcome:
    """What ends an exchange on every rank: its value, or what went wrong."""

    value: Any = None
    failed: tuple[int, str] | None = None
    late: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Exchanges among all ranks of a job through its key-value store. Every rank makes the same ones; a label is used
    once. With one rank, nothing is sent. `on_wait` is called with the missing ranks every few seconds of waiting.
    """

    store: Any
    rank: int
    size: int
    timeout_s: float
    on_wait: Callable[[list[int]], None] | None = None

    @staticmethod
    def of_job(timeout_s: float, on_wait: Callable[[list[int]], None] | None = None) -> Rendezvous:
        """The ranks of torch's default process group; one rank where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Rendezvous(None, 0, 1, timeout_s, on_wait)
        return Rendezvous(_torch.default_store(), dist.get_rank(), dist.get_world_size(), timeout_s, on_wait)

    def next_label(self, kind: str) -> str:
        """A new label, the same on all ranks that ask equally often; counted in the store."""
        if self.store is None:
            return f"wholestep/{kind}/0"
        with ACTIVITY.waiting(_STORE):
            return f"wholestep/{kind}/{self.store.add(f'wholestep/counts/{kind}/{self.rank}', 1)}"

    def all_equal(self, label: str, sections: Mapping[str, Section], failure: str = "", call: str = "") -> Calls:
        """Compare sections of a program with those of all ranks by fingerprint; lines are sent where they differ.

        Sections of `PER_CALL` are compared among ranks with the same `call`. A rank with a `failure` has no program: it
        stops all others, and returns at once. Raises RankMismatchError: on every rank, with the ranks and the first
        difference, or the failed or missing rank.
        """
        if self.size == 1:
            return Calls(0, True)
        with ACTIVITY.waiting("the comparison of programs"):
            return self._all_equal(label, sections, failure, call)

    def _all_equal(self, label: str, sections: Mapping[str, Section], failure: str, call: str) -> Calls:
        if failure:
            self._publish(label, lambda: _Outcome(failed=(self.rank, failure)))
            return Calls(0, True)
        prints = tuple((name, section.fingerprint) for name, section in sections.items())
        own = {(call, prints): [(self.rank, self.rank)]}
        found = self._combine(label, own, merged, lambda tally: _Outcome(difference(tally) or first_other_call(tally)))
        if found.failed is not None:
            other, text = found.failed
            what = f"rank {other} could not compile its step: {text}"
            raise RankMismatchError(what, "a step that every rank can compile", f"read rank {other}'s own error")
        if found.late is not None:
            raise self._late_program(found.late)
        result: SectionDifference | tuple[str, int] = found.value
        if isinstance(result, SectionDifference):
            raise self._difference(label, result, sections)
        first_call, first_other = result
        return Calls(first_other, call == first_call)

    def forget(self, label: str) -> None:
        """Remove what ranks exchanged under a label, and under the names `UNDER` it, once all ranks have read it."""
        if self.size > 1 and self.rank == 0:
            with ACTIVITY.waiting(_STORE):
                for key in ("outcome", "outcomes", "missing", *UNDER):
                    self.store.delete_key(f"{label}/{key}")

    def broadcast(self, label: str, value: Any, what: str) -> Any:
        """Rank 0's `value`, on every rank. Raises RankMismatchError, which calls it `what`: rank 0 is not in time."""
        if self.size == 1:
            return value
        if self.rank == 0:
            with ACTIVITY.waiting(_STORE):
                put(self.store, label, value)
            return value
        with ACTIVITY.waiting(f"rank 0, which says {what}"):
            said = appears(self.store, label, self.timeout_s)
        if not said:
            found = f"rank 0 did not say within {self.timeout_s:,.9g} s {what}"
            needed = "every rank to compile its step"
            raise RankMismatchError(found, needed, "read rank 0's own error, or give a longer agree_timeout")
        return get(self.store, label)

    def choose(self, label: str, choose: Callable[[], Any], what: str) -> Any:
        """What `choose()` returns on rank 0, on every rank. Its PlanError is raised on every rank. After another error,
        the other ranks get a PlanError.
        """
        if self.rank == 0:
            try:
                return self.broadcast(label, choose(), what)
            except PlanError as error:
                self.broadcast(label, error, what)
                raise
            except Exception as error:  # also of pickling what was chosen
                self.broadcast(label, PlanError(f"rank 0 could not choose: {error}"), what)
                raise
        made = self.broadcast(label, None, what)
        if isinstance(made, PlanError):
            raise made
        return made

    def gather(self, label: str, value: Any, what: str, on_first: bool = False) -> list[Any]:
        """Every rank's `value`, in rank order; with `on_first`, on rank 0 only, and none elsewhere. Raises
        RankMismatchError, which calls this `what`: ranks are missing.
        """
        if self.size == 1:
            return [value]
        with ACTIVITY.waiting(what):
            return self._gather(label, value, what, on_first)

    def _gather(self, label: str, value: Any, what: str, on_first: bool) -> list[Any]:
        def conclude(values: list[Any]) -> _Outcome:
            if on_first:
                put(self.store, f"{label}/all", values)
            return _Outcome(None if on_first else values)

        found = self._combine(label, [value], lambda lists: [one for part in lists for one in part], conclude)
        if found.late is not None:
            text = f"{what}: ranks {list(found.late)} did not come within {self.timeout_s:,.9g} s"
            needed = "all ranks at the same call"
            raise RankMismatchError(text, needed, "call it on every rank, equally often and in the same order")
        values: list[Any] = found.value or []
        if on_first and self.rank == 0:
            values = get(self.store, f"{label}/all")
            self.store.delete_key(f"{label}/all")
        if self.store.add(f"{label}/read", 1) == self.size:  # nobody reads it any more
            for key in ("read", "outcome", "outcomes"):
                self.store.delete_key(f"{label}/{key}")
        return values

    def barrier(self, what: str) -> None:
        """Wait until every rank is at the barrier `what`. Two or three requests a rank, and nothing stays in the store.
        Raises RankMismatchError: some do not come in time, or wait at another barrier. After it a rank may come again.
        """
        if self.size == 1:
            return
        with ACTIVITY.waiting(what):
            self._barrier(what)

    def _barrier(self, what: str) -> None:
        key = f"wholestep/barrier/{what}"
        came = self.store.add(key, 1)
        number = (came - 1) // self.size
        full = (number + 1) * self.size
        if came == full:
            self.store.set(f"{key}/{number}", b"")
            if number:
                self.store.delete_key(f"{key}/{number - 1}")  # all ranks have seen it
            return
        if appears(self.store, f"{key}/{number}", min(_PATIENCE_S, self.timeout_s / 2)):
            return
        missing = self._wait_at_barrier(what, f"{key}/{number}")
        if missing and self.store.add(key, -1) + 1 == full:
            self.store.add(key, 1)  # the last rank came at this moment
        elif missing:
            needed = "all ranks, as this gathers what each of them holds a part of"
            next_step = "call it on every rank (not under `if rank == 0`), equally often and in the same order"
            raise RankMismatchError(f"{what}: rank {self.rank} is there, {missing}", needed, next_step, _user_line())

    def _combine(
        self, label: str, value: Any, merge: Callable[[list[Any]], Any], conclude: Callable[[Any], _Outcome]
    ) -> _Outcome:
        """Merge the values of all ranks; the rank that comes last concludes for all."""
        tree = StoreTree(self.store, label, self.rank, self.size)
        for whole in tree.contribute(value, merge):
            self._publish(label, lambda whole=whole: conclude(whole))
        key, start = f"{label}/outcome", time.monotonic()
        reported = start
        while not self.store.check([key]):
            ACTIVITY.raise_failure()
            now = time.monotonic()
            if now - start > self.timeout_s:
                self._publish(label, lambda: _Outcome(late=tuple(tree.missing())))
                break
            if self.on_wait and now - reported > _REPORT_S:
                reported = now
                missing = self._shared_look(f"{label}/missing", _REPORT_S, tree.missing)
                if missing:
                    self.on_wait(missing)
            time.sleep(pause_s(now - start))
        return self._await(key)

    def _publish(self, label: str, outcome: Callable[[], _Outcome]) -> None:
        """Publish the outcome, unless there is one."""
        if self.store.add(f"{label}/outcomes", 1) == 1:
            put(self.store, f"{label}/outcome", outcome())

    def _shared_look(self, key: str, period_s: float, look: Callable[[], Any]) -> Any:
        """What `look` returned on one of the ranks that wait: one looks in each period, for all. None before that."""
        if self.store.add(f"{key}/{int(time.time() / period_s)}", 1) == 1:
            found = look()
            put(self.store, key, found)
            return found
        return get(self.store, key) if self.store.check([key]) else None

    def _await(self, key: str) -> Any:
        timeout_s = max(_PUBLISHED_S, self.timeout_s)
        if not appears(self.store, key, timeout_s):
            found = f"a rank did not publish within {timeout_s:,.9g} s what the others compare with"
            needed = "ranks that live until all have compared their programs"
            raise RankMismatchError(found, needed, "read the errors of the other ranks")
        return get(self.store, key)

    def _late_program(self, ranks: tuple[int, ...]) -> RankMismatchError:
        if self.rank in ranks or not ranks:
            found = f"rank {self.rank} compiled its program when others no longer waited"
            needed = "all ranks to call the step at about the same time"
            next_step = "find out why this rank is slow, or raise agree_timeout"
            return RankMismatchError(f"{found} for it ({self.timeout_s:.0f} s)", needed, next_step)
        found = f"ranks {list(ranks)} compiled no program while rank {self.rank} did, within {self.timeout_s:.0f} s"
        needed = "every rank to call the step with the same kind of arguments (structure, training mode, requires_grad)"
        next_step = "look for a call that only some ranks make, or raise agree_timeout if those ranks are slow"
        return RankMismatchError(found, needed, next_step)

    def _difference(self, label: str, found: SectionDifference, sections: Mapping[str, Section]) -> RankMismatchError:
        """Exchange the lines of the section that differs: the lowest rank of each group publishes the group's."""
        section, first = found.section, found.groups[0]
        own = next((group for group in found.groups if self.rank in group[1]), first)
        theirs = found.groups[1] if own is first else first
        held = sections.get(section, Section(""))
        if own[1][0] == self.rank:
            put(self.store, f"{label}/lines/{own[0]}", list(held.lines))
        lines, others = (self._await(f"{label}/lines/{fingerprint}") for fingerprint, _ in (own, theirs))
        if section in (LAYOUTS, GRAPH):
            inside = self.rank in own[1]
            rank, where = (self.rank, held.where) if inside else (own[1][0], None)
            return other_program(rank, lines, theirs[1][0], others, section, where)
        if own is first:
            return other_value(section, own[1], lines, theirs[1], others)
        return other_value(section, theirs[1], others, own[1], lines)

    def _wait_at_barrier(self, what: str, key: str) -> str:
        """Publish where this rank waits, and wait on. Returns why the others do not come; "" once they have come."""
        self.store.set(_at(self.rank), what)
        warnings.warn(f"rank {self.rank} waits for other ranks at {what}\n  at: {_user_line()}", stacklevel=4)
        end = time.monotonic() + self.timeout_s
        try:
            while not appears(self.store, key, min(_LOOK_S, self.timeout_s / 2)):
                at: dict[int, str] | None = self._shared_look(f"{key}/at", _LOOK_S, self._waiting_ranks)
                elsewhere = [
                    rank for rank, there in (at or {}).items() if there != what and self._waits_at(rank) == there
                ]
                if at is not None and elsewhere:
                    time.sleep(2 * _LOOK_S)  # the others look as well
                    return "; ".join(f"rank {rank} is at {at[rank]}" for rank in elsewhere)
                if time.monotonic() > end:
                    at = self._waiting_ranks() if at is None else at
                    absent = [rank for rank in range(self.size) if rank not in at and rank != self.rank]
                    return f"ranks {absent} did not come within {self.timeout_s:,.9g} s"
            return ""
        finally:
            self.store.set(_at(self.rank), "")

    def _waiting_ranks(self) -> dict[int, str]:
        return {rank: what for rank in range(self.size) if (what := self._waits_at(rank))}

    def _waits_at(self, rank: int) -> str:
        return self.store.get(_at(rank)).decode() if self.store.check([_at(rank)]) else ""


def _at(rank: int) -> str:
    return f"wholestep/waits/{rank}"


def _user_line() -> str:
    return last_user_frame("".join(traceback.format_stack()))
