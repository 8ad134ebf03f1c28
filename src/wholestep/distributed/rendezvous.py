"""How ranks compare, broadcast and gather small values and wait for each other, through the job's store.

Each exchange has a timeout, and its error names the ranks. Values merge in a tree (`StoreTree`): a rank sends
O(log ranks) requests, and polls one key.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from .. import _torch
from ..errors import BudgetError, PlanError, RankMismatchError, StoreError
from ..graph.meta import last_user_frame
from .activity import ACTIVITY
from .peers import doing
from .sections import (
    GRAPH,
    LAYOUTS,
    USER_LINES,
    Pair,
    Section,
    SectionDifference,
    Tally,
    difference,
    first_other_call,
    merged,
    other_program,
    other_value,
)
from .store_tree import StoreTree, add, appears, get, pause_s, put

_PUBLISHED_S = 10.0  # at least, for what another rank is about to publish
_REPORT_S = 5.0  # between two reports of missing ranks
_PATIENCE_S = 5.0  # then a rank at a barrier warns, and publishes where it waits
UNDER = ("call", "choices", "auto", "plan", "blocks", "order", "memory", "memory/fits/outcome", "memory/fits/outcomes")
_STORE = "the store of the job"  # which does not answer where its host is lost
_AT = Mapping[int, str]
_LOOK_S = 0.5  # between two looks at where the other ranks wait


@dataclass(frozen=True)
class Calls:
    """The lowest rank with another call than rank 0, or 0; `same` is true on ranks with rank 0's call."""

    first_other: int
    same: bool


class _Outcome(NamedTuple):
    """What ends an exchange on every rank: its value, or what went wrong."""

    value: Any = None
    failed: tuple[int, str] | None = None
    late: tuple[int, ...] | None = None
    spoiled: tuple[str, str, str] | None = None

    @staticmethod
    def get(store: Any, key: str, kind: Any) -> _Outcome:
        """One whose value is of a type. Raises StoreError: a rank found what no rank wrote."""
        parts = kind | None, tuple[int, str] | None, tuple[int, ...] | None, tuple[str, str, str] | None
        outcome = _Outcome(*get(store, key, tuple[parts]))
        if outcome.spoiled is not None:
            raise StoreError(*outcome.spoiled)
        return outcome


_Refusal = tuple[str, tuple[str, str, str, str]]  # a PlanError: the name of its class, and its texts
_REFUSALS = {kind.__name__: kind for kind in (PlanError, BudgetError)}


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
        """A new label, the same on all ranks whose threads of this name ask equally often for this kind; counted in the
        store. Threads ask in any order, so that each has labels of its own.
        """
        if self.store is None:
            return f"wholestep/{kind}/0"
        kind += _thread()
        with ACTIVITY.waiting(_STORE):
            return f"wholestep/{kind}/{add(self.store, f'wholestep/counts/{kind}/{self.rank}', 1)}"

    def all_equal(
        self, label: str, sections: Mapping[str, Section], failure: str = "", call: str = "", news: str = ""
    ) -> Calls:
        """Compare sections of a program with those of all ranks by fingerprint; lines are sent where they differ.

        Sections of `PER_CALL` are compared among ranks with the same `call`. A rank with a `failure` has no program: it
        stops all others, and returns at once. Raises RankMismatchError: on every rank, with the ranks and the first
        difference, or the failed or missing rank. It has the `news`, what is new here, if a rank goes on without.
        """
        if self.size == 1:
            return Calls(0, True)
        with ACTIVITY.waiting("the comparison of programs", label, news):
            if failure:
                self._publish(label, lambda: _Outcome(failed=(self.rank, failure)))
                return Calls(0, True)
            prints = tuple((name, section.fingerprint) for name, section in sections.items())
            entry = {(call, prints): [(self.rank, self.rank)]}
            kinds = Tally, SectionDifference | tuple[str, int]
            outcome = self._combine(
                label, entry, merged, lambda tally: _Outcome(difference(tally) or first_other_call(tally)), kinds
            )
            if outcome.failed is not None:
                other, text = outcome.failed
                what = f"rank {other} could not compile its step: {text}"
                raise RankMismatchError(what, "a step that every rank can compile", f"read rank {other}'s own error")
            if outcome.late is not None:
                raise self._late_program(outcome.late, news)
            result: SectionDifference | tuple[str, int] = outcome.value
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

    def broadcast(self, label: str, value: Any, what: str, kind: Any) -> Any:
        """Rank 0's `value`, of the type `kind`, on every rank. Raises RankMismatchError: `what` is not in time."""
        if self.size == 1:
            return value
        if self.rank == 0:
            with ACTIVITY.waiting(_STORE):
                put(self.store, label, value)
            return value
        with ACTIVITY.waiting(f"rank 0, which says {what}", label):
            arrived = appears(self.store, label, self.timeout_s)
        if not arrived:
            problem = f"rank 0 did not say within {self.timeout_s:,.9g} s {what}"
            needed = "every rank to compile its step"
            raise RankMismatchError(problem, needed, "read rank 0's own error, or give a longer agree_timeout")
        return get(self.store, label, kind)

    def choose(self, label: str, choose: Callable[[], Any], what: str, kind: Any) -> Any:
        """What `choose()` returns on rank 0, of the type `kind`, on every rank. Its PlanError is raised on every rank.
        After another error, the other ranks get a PlanError.
        """
        both = tuple[kind | None, _Refusal | None]
        if self.rank == 0:
            try:
                chosen = choose()
                self.broadcast(label, (chosen, None), what, both)
            except Exception as error:  # also of sending what was chosen
                refused = error if isinstance(error, PlanError) else PlanError(f"rank 0 could not choose: {error}")
                self.broadcast(label, (None, (type(refused).__name__, refused.args)), what, both)
                raise
            return chosen
        chosen, refusal = self.broadcast(label, None, what, both)
        if refusal is not None:
            kind, texts = refusal
            raise _REFUSALS.get(kind, PlanError)(*texts)
        return chosen

    def gather(self, label: str, value: Any, what: str, kind: Any, on_first: bool = False) -> list[Any]:
        """Every rank's `value`, of the type `kind`, in rank order; with `on_first`, on rank 0 only, and none elsewhere.
        Raises RankMismatchError, which calls this `what`: ranks are missing.
        """
        if self.size == 1:
            return [value]
        with ACTIVITY.waiting(what, label):

            def conclude(values: tuple[Any, ...]) -> _Outcome:
                if on_first:
                    put(self.store, f"{label}/all", values)
                return _Outcome(None if on_first else values)

            joined, kinds = partial(sum, start=()), tuple[kind, ...]
            outcome = self._combine(label, (value,), joined, conclude, (kinds, kinds))
            if (late := outcome.late) is not None:
                text = f"{list(late)} did not come within {self.timeout_s:,.9g} s{doing(self.store, late)}"
                next_step = "call it on every rank, equally often and in the same order"
                raise RankMismatchError(f"{what}: ranks {text}", "all ranks at the same call", next_step)
            values: tuple[Any, ...] = outcome.value or ()
            if on_first and self.rank == 0:
                values = get(self.store, f"{label}/all", kinds)
                self.store.delete_key(f"{label}/all")
            if add(self.store, f"{label}/read", 1) == self.size:  # nobody reads it any more
                for key in ("read", "outcome", "outcomes"):
                    self.store.delete_key(f"{label}/{key}")
            return list(values)

    def barrier(self, what: str) -> None:
        """Wait until every rank is at the barrier `what`. Two or three requests a rank, and nothing stays in the store.
        Raises RankMismatchError: some do not come in time, or wait at another barrier. After it a rank may come again.
        """
        if self.size == 1:
            return
        with ACTIVITY.waiting(what):
            key = f"wholestep/barrier{_thread()}/{what}"
            came = add(self.store, key, 1)
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
            waiting = add(self.store, key, -1) if missing else full
            if waiting + 1 == full:
                add(self.store, key, 1)  # the last rank came at this moment
            elif missing:
                if waiting == number * self.size:  # nobody waits here any more
                    self.store.delete_key(f"{key}/{number}/late")
                needed = "all ranks, as this gathers what each of them holds a part of"
                next_step = "call it on every rank (not under `if rank == 0`), equally often and in the same order"
                problem = f"{what}: rank {self.rank} is there, {missing}"
                raise RankMismatchError(problem, needed, next_step, _user_line())

    def _combine(
        self, label: str, value: Any, merge: Callable[[list[Any]], Any], conclude: Callable[[Any], _Outcome],
        kinds: tuple[Any, Any],
    ) -> _Outcome:  # fmt: skip
        """Merge the values of all ranks; the last one concludes for all. `kinds`: contributed, and concluded."""
        tree = StoreTree(self.store, label, self.rank, self.size, kinds[0])
        try:
            for combined in tree.contribute(value, merge):
                self._publish(label, lambda combined=combined: conclude(combined))
        except StoreError as error:
            spoiled = error.found, error.needed, error.next_step
            reconnected = replace(self, store=self.store.clone())  # the server has closed the connection that asked
            reconnected._publish(label, lambda: _Outcome(spoiled=spoiled))
            raise
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
                missing = self._shared_look(f"{label}/missing", _REPORT_S, tree.missing, tuple[int, ...])
                if missing:
                    self.on_wait(list(missing))
            time.sleep(pause_s(now - start))
        self._expect(key)
        return _Outcome.get(self.store, key, kinds[1])

    def _publish(self, label: str, outcome: Callable[[], _Outcome]) -> None:
        """Publish the outcome, unless there is one."""
        if add(self.store, f"{label}/outcomes", 1) == 1:
            put(self.store, f"{label}/outcome", outcome())

    def _shared_look(self, key: str, period_s: float, look: Callable[[], Any], kind: Any) -> Any:
        """What `look` returned on one of the ranks that wait: one looks in each period, for all. None before that."""
        if add(self.store, f"{key}/{int(time.time() / period_s)}", 1) == 1:
            seen = look()
            put(self.store, key, seen)
            return seen
        return get(self.store, key, kind) if self.store.check([key]) else None

    def _expect(self, key: str) -> None:
        timeout_s = max(_PUBLISHED_S, self.timeout_s)
        if not appears(self.store, key, timeout_s):
            problem = f"a rank did not publish within {timeout_s:,.9g} s what the others compare with"
            needed = "ranks that live until all have compared their programs"
            raise RankMismatchError(problem, needed, "read the errors of the other ranks")

    def _late_program(self, ranks: tuple[int, ...], news: str) -> RankMismatchError:
        if self.rank in ranks or not ranks:
            problem = f"rank {self.rank} compiled its program when others no longer waited"
            needed = "all ranks to call the step at about the same time"
            next_step = "find out why this rank is slow, or raise agree_timeout"
            return RankMismatchError(f"{problem} for it ({self.timeout_s:.0f} s)", needed, next_step)
        problem = f"ranks {list(ranks)} compiled no program while rank {self.rank} did, within {self.timeout_s:.0f} s"
        problem += (news and f"\n  new on rank {self.rank}: {news}") + doing(self.store, ranks)
        needed = "every rank to call the step with the same kind of arguments (structure, training mode, requires_grad)"
        next_step = "look for a call that only some ranks make, or raise agree_timeout if those ranks are slow"
        return RankMismatchError(problem, needed, next_step)

    def _difference(self, label: str, differs: SectionDifference, sections: Mapping[str, Section]) -> RankMismatchError:
        """Exchange the lines of the section that differs: the lowest rank of each group publishes the group's."""
        section, first = differs.section, differs.groups[0]
        our_group = next((group for group in differs.groups if self.rank in group[1]), first)
        their_group = differs.groups[1] if our_group is first else first
        here = sections.get(section, Section(""))
        if our_group[1][0] == self.rank:
            put(self.store, f"{label}/lines/{our_group[0]}", (here.lines, sections.get(USER_LINES, here).lines))
        ours, theirs = (self._lines(f"{label}/lines/{fingerprint}") for fingerprint, _ in (our_group, their_group))
        if section.startswith((LAYOUTS, GRAPH)):
            inside = self.rank in our_group[1]
            rank, where = (self.rank, here.where) if inside else (our_group[1][0], None)
            return other_program(rank, ours, their_group[1][0], theirs, section, where)
        if our_group is first:
            return other_value(section, our_group[1], ours[0], their_group[1], theirs[0])
        return other_value(section, their_group[1], theirs[0], our_group[1], ours[0])

    def _lines(self, key: str) -> Pair:
        self._expect(key)
        return get(self.store, key, tuple[tuple[str, ...], tuple[str, ...]])

    def _wait_at_barrier(self, what: str, key: str) -> str:
        """Publish where this rank waits, and wait on. Returns why the others do not come; "" once they have come."""
        put(self.store, f"wholestep/waits/{self.rank}", what)
        warnings.warn(f"rank {self.rank} waits for other ranks at {what}\n  at: {_user_line()}", stacklevel=3)
        end = time.monotonic() + self.timeout_s
        try:
            while not appears(self.store, key, min(_LOOK_S, self.timeout_s / 2)):
                at = cast(dict[int, str] | None, self._shared_look(f"{key}/at", _LOOK_S, self._waiting_ranks, _AT))
                elsewhere = [
                    rank for rank, there in (at or {}).items() if there != what and self._waits_at(rank) == there
                ]
                if at is not None and elsewhere:
                    time.sleep(2 * _LOOK_S)  # the others look as well
                    return "; ".join(f"rank {rank} is at {at[rank]}" for rank in elsewhere)
                if time.monotonic() > end:  # the first that gives up says for all who was there
                    if not self.store.check([f"{key}/late"]):
                        at = self._waiting_ranks() if at is None else at
                        late = [rank for rank in range(self.size) if rank not in at and rank != self.rank]
                        put(self.store, f"{key}/late", tuple(late))
                    late = list(get(self.store, f"{key}/late", tuple[int, ...]))
                    return f"ranks {late} did not come within {self.timeout_s:,.9g} s"
            return ""
        finally:
            put(self.store, f"wholestep/waits/{self.rank}", "")

    def _waiting_ranks(self) -> dict[int, str]:
        return {rank: what for rank in range(self.size) if (what := self._waits_at(rank))}

    def _waits_at(self, rank: int) -> str:
        key = f"wholestep/waits/{rank}"
        return get(self.store, key, str) if self.store.check([key]) else ""


def _thread() -> str:
    """What names this thread on all ranks; "" for the main thread. Python's numbers of threads differ among ranks."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else "@" + re.sub(r"\d+", "", thread.name)


def _user_line() -> str:
    return last_user_frame("".join(traceback.format_stack()))
