"""Finds out which rank of the job failed first, and ends the waiting of this one.

Each rank tells the store every few seconds what it does, and reads what the next rank does: a ring in which a rank that
waits stands, somewhere, before one that nobody waits for any more. Who finds a failure writes it where all ranks read.
All of this is done by two threads: one talks to the store, one ends what the main thread waits for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from .. import _torch
from ..errors import RankFailedError, RankMismatchError, StoreError, WholestepError, first_line
from .activity import ACTIVITY, Activity, is_broken_connection
from .heartbeat import Beat, Identity, MainThread, end_process
from .sections import cure, show_ranks
from .typed_messages import decode, encode

_BEATS = 20  # in the time after which a rank has failed
_LONGEST_INTERVAL_S = 2.0
_PATIENCE = 0.75  # of that time: the rest is for the news, and to end
_SHORTEST_GAP_S = 2.0
_LAST_WORDS_S = 5.0  # at most, for what is said when a process ends: it takes one request
_MISSED = 3  # beats that a rank misses before it is suspected of having broken a connection
_SUSPECTED = b"suspected"  # some rank's connection broke, and nobody knows yet who is gone
_NOBODY = (b"-", _SUSPECTED)  # has failed, as far as is known


@dataclass(frozen=True)
class RankFailure:
    """What a rank that failed, or `differs` from others, is, what is wrong with it, what it did last, what to do."""

    who: Identity | None
    what: str
    last: str
    next_step: str
    differs: bool = False

    def error(self) -> WholestepError:
        """The same on all ranks."""
        if self.differs:
            return RankMismatchError(self.what, "the same collectives on every rank, in one order", self.next_step)
        last = f"\n  last: {self.last}" if self.last else ""
        error = RankFailedError(f"{self.what}{last}", "all ranks, until the end of the job", self.next_step)
        if self.who is not None:
            error.rank, error.host, error.pid = self.who.rank, self.who.host, self.who.pid
        return error


class Listener(Protocol):
    """Another thing that ranks tell each other with their heartbeats."""

    @property
    def urgent(self) -> bool:
        """Whether ranks are to talk more often now."""
        ...

    def exchange(self, store: Any) -> None:
        """Ask the store, in the thread that talks to it."""
        ...


class Peers:
    """The other ranks of the job. A rank that is needed has failed after `timeout_s`. A beat asks the `listeners`."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, activity: Activity) -> None:
        self.rank, self.size, self.timeout_s, self.activity = rank, size, timeout_s, activity
        self.host: str = getattr(_innermost(store), "host", "unknown")
        self.port: int | None = getattr(_innermost(store), "port", None)
        self.listeners: list[Listener] = []
        self._kept = store  # on the rank that hosts it, the store lives as long as this
        self._store: Any = None
        self.label = ""
        who = Identity.own(rank, self.port is not None and _torch.listens_at(self.port))
        self._own, self._main, self._pid = Beat(who), MainThread(activity), os.getpid()
        self._watched, self._silent_s = (rank + 1) % size, 0.0
        self._seen: dict[int, Beat] = {}
        self._answered_at = time.monotonic()
        self._left: Beat | None = None
        self._said: RankFailure | None = None
        self._suspects = self._store_is_lost = False
        self._wake, self._known, self._told, self._over = (threading.Event() for _ in range(4))
        self._talker = threading.Thread(target=self._talk, name="wholestep heartbeats", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="wholestep watch", daemon=True)
        activity.explain, activity.acknowledge = self._explain, self._tell
        activity.failure, activity.error = None, ""

    def start(self) -> None:
        """Tell the others of this rank from now on. Raises RankFailedError: whoever hosts the store does not answer."""
        self._answered_at = time.monotonic()
        self._watcher.start()
        with self.activity.waiting("the store of the job"):
            try:
                self._connect()
            except RuntimeError:
                self._store_is_lost = True
                raise
        self._talker.start()

    def _connect(self) -> None:
        """The first requests, over a connection of its own: a request of the main thread may block."""
        with _shorter_timeout(self._kept, _PATIENCE * self.timeout_s):
            self._store = self._kept.clone()
        self.label = f"wholestep/alive/{self._store.add(f'wholestep/lives/{self.rank}', 1)}"
        self._store.compare_set(self._key("failed"), "", "-")

    @property
    def interval_s(self) -> float:
        """Between two heartbeats."""
        return min(self.timeout_s / _BEATS, _LONGEST_INTERVAL_S)

    @property
    def _gap_s(self) -> float:
        """Of silence, after which a rank may be the one that broke a connection."""
        return max(_MISSED * self.interval_s, _SHORTEST_GAP_S)

    def wake(self) -> None:
        """Do not wait for the next heartbeat. Signal handlers may call it."""
        self._wake.set()

    def leave(self) -> None:
        """This process ends: say so, and why, and let the threads end. Also after an error that nobody caught."""
        if os.getpid() != self._pid or self._over.is_set():
            return
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is not None and is_broken_connection(error):
            self._explain(error)
            if self.activity.failure is not None:
                os.write(2, f"{type(self.activity.failure).__name__}: {self.activity.failure}\n".encode())
        elif error is not None and self.activity.failure is None:
            what = f"{self._own.who} raised {type(error).__name__}: {first_line(error)}"
            self._said = RankFailure(self._own.who, what, self._own.last(), f"read rank {self.rank}'s own error")
        self._told.set()
        self._over.set()
        self._wake.set()
        _join(self._talker)
        if self._talker.is_alive() and self.port is not None:  # or it would wake up in a dead interpreter
            _torch.break_connections_to(self.port)
        _join(self._talker)
        _join(self._watcher)

    # -- the thread that talks to the store
    def _talk(self) -> None:
        try:
            while not self._known.is_set():
                over = self._over.is_set()
                self._exchange()
                self._answered_at = time.monotonic()
                if over:
                    break
                unseen = self.rank != 0 and 0 not in self._seen  # the host of the store, perhaps
                urgent = self._suspects or unseen or any(listener.urgent for listener in self.listeners)
                self._wake.wait(self.interval_s / 4 if urgent else self.interval_s)
                self._wake.clear()
            self._linger("seen" if self._known.is_set() else "left")
        except RuntimeError:  # of the store
            self._store_is_lost = True
        except StoreError as error:
            self._know(RankFailure(None, error.found, "", error.next_step))

    def _exchange(self) -> None:
        """Tell the others of this rank, hear what the next one does, and whether anyone has failed."""
        most_s = 2 * self.interval_s  # of the time that has passed: this process may have been stopped
        self._own = replace(self._main.beat(self._own, most_s), has_left=self._over.is_set())
        self._store.set(self._key(self.rank), encode(self._key(self.rank), self._own))
        listened_s = min(time.monotonic() - self._answered_at, most_s)
        others = [rank for rank in (self._watched, 0) if rank != self.rank]  # who may not have made their first call
        keys = {self._key(r): r for r in others if r in self._seen or self._store.check([self._key(r)])}
        failed = self._key("failed")
        *texts, failure = self._store.multi_get([*keys, failed])
        for (key, rank), text in zip(keys.items(), texts, strict=True):
            beat: Beat = decode(key, text, Beat)
            if rank == self._watched:
                earlier = self._seen.get(rank)
                self._silent_s = self._silent_s + listened_s if earlier and earlier.number == beat.number else 0.0
            self._seen[rank] = beat
        for listener in self.listeners:
            listener.exchange(self._store)
        if failure in _NOBODY:
            verdict = self._said or self._verdict(failure == _SUSPECTED)
            if verdict is not None or (self._suspects and failure != _SUSPECTED):
                failure = self._publish(failed, failure, verdict)
        if failure not in _NOBODY:
            self._know(decode(failed, failure, RankFailure))

    def _publish(self, key: str, before: bytes, verdict: RankFailure | None) -> bytes:
        """The first failure that any rank has found stays."""
        while True:
            message = encode(key, verdict) if verdict is not None else _SUSPECTED
            now = self._store.compare_set(key, before, message)
            if now == message or now not in _NOBODY:
                return now
            before = now

    def _verdict(self, suspected: bool) -> RankFailure | None:
        """What is wrong with the rank that this one watches, if anything is."""
        beat, ours = self._seen.get(self._watched), self._own
        if beat is not None and beat.has_left:
            self._left, beat = self._left or beat, None
            self._watched, self._silent_s = (self._watched + 1) % self.size, 0.0
        if self._left and (suspected or (ours.waits and ours.still_s > _MISSED * self.interval_s)):
            return _ended(self._left)
        if beat is None:
            return None
        who, silent_s, patience_s = beat.who, self._silent_s, _PATIENCE * self.timeout_s
        if who.is_gone(ours.who):
            next_step = f"{_READ} {who.rank}, and the system's log: a process that needs too much memory is killed"
            return RankFailure(who, f"{who} is gone: its process was killed, or ended", beat.last(silent_s), next_step)
        if silent_s > (self._gap_s if suspected else patience_s):
            causes = "" if who.is_stopped(ours.who) else ", or blocked outside of Python, or unreachable"
            what = f"{who} is stopped{causes}: no heartbeat for {silent_s:.0f} s"
            return RankFailure(who, what, beat.last(silent_s), f"{_LOOK}, or raise timeout=")
        same = beat.step == ours.step
        if beat.news and same and ours.meets > beat.calls and min(ours.still_s, beat.still_s) > 2 * self.interval_s:
            call = f"call {beat.calls + 1} of {ours.step.rpartition(' ')[0]}"
            problem = f"rank {who.rank} compiled another program for {call}, rank {self.rank} did not: {beat.news}"
            return RankFailure(None, problem, "", cure(beat.news.partition("\n")[2]), differs=True)
        if parted := self._parted(ours, beat):
            return parted
        behind = same and beat.calls < ours.calls
        # Where a device runs the program, the main thread may wait for a collective at any line.
        waits = (ours.waits and not (same and beat.calls > ours.calls)) or (behind and torch.cuda.is_initialized())
        late = not beat.waits and beat.still_s > max(patience_s, beat.allowance_s, 0 if beat.step else ours.allowance_s)
        if waits and late and ours.still_s > patience_s:
            what = f"{who} does not come: rank {self.rank} has waited for {ours.still_s:.0f} s, {ours.what}"
            return RankFailure(who, what, beat.last(), f"{_LOOK}, or raise timeout= if it needs longer")
        apart = ours.waits and beat.waits and beat.point != ours.point
        if apart and min(ours.still_s, beat.still_s) > patience_s:
            return self._deadlock(patience_s)
        return None

    def _parted(self, ours: Beat, beat: Beat) -> RankFailure | None:
        """The ranks have run different programs, each of which all know: both had the collectives, so nobody waits."""
        theirs = dict(beat.trail)
        alike = sorted((call, chain == theirs[call]) for call, chain in ours.trail if call in theirs)
        first = next((call for call, same in alike if not same), None)
        if first is None:
            return None
        before = max((call for call, same in alike if same and call < first), default=0)
        calls = f"call {first}" if first == before + 1 else f"one of calls {before + 1} to {first}"
        problem = f"ranks {self.rank} and {beat.who.rank} ran different programs in {calls}, counted over all steps"
        return RankFailure(None, problem, "", f"{cure('')}, and go on from a checkpoint before that", differs=True)

    def _deadlock(self, patience_s: float) -> RankFailure | None:
        """Two ranks wait at different points. If all do, at one or another, nobody will ever come."""
        keys = [self._key(rank) for rank in range(self.size)]
        if not self._store.check(keys):
            return None  # one has not called the step yet
        groups: dict[str, list[Beat]] = {}
        for key, text in zip(keys, self._store.multi_get(keys), strict=True):
            beat: Beat = decode(key, text, Beat)
            if beat.has_left or not beat.waits or beat.still_s <= patience_s:
                return None
            groups.setdefault(beat.point, []).append(beat)
        if len(groups) < 2:
            return None
        lines = [f"\n  {show_ranks([beat.who.rank for beat in beats])}: {beats[0].last()}" for beats in groups.values()]
        what = f"ranks wait for each other at different points{''.join(lines)}"
        return RankFailure(None, what, "", "make the same calls on every rank, in the same order (no `if rank == 0`)")

    def _linger(self, counted: str) -> None:
        """Count this rank; whoever hosts the store waits, for a moment, until the others have read what they need."""
        key = self._key(counted)
        self._store.add(key, 1)
        end = time.monotonic() + (_LAST_WORDS_S if counted == "seen" else 2 * self.interval_s)
        awaited = self.size - (counted == "seen")
        while self._own.who.hosts_store and self._store.add(key, 0) < awaited and time.monotonic() < end:
            time.sleep(self.interval_s / _BEATS)

    # -- the thread that ends what the main thread waits for
    def _watch(self) -> None:
        patience_s = _PATIENCE * self.timeout_s
        while not self._known.wait(self.interval_s / 2):
            if self._over.is_set():
                return
            lost = self._store_is_lost or time.monotonic() - self._answered_at > patience_s
            if lost and (self._suspects or self._main.beat(self._own, self.timeout_s).waits):
                self._store_is_lost = True
                self._know(self._lost_store())
        _torch.break_gloo_connections()
        if self._store_is_lost and self.port is not None:
            _torch.break_connections_to(self.port)
        if torch.cuda.is_initialized():
            threading.Thread(target=_torch.abort_groups, daemon=True).start()  # may block
        if not self._told.wait((1 - _PATIENCE) * self.timeout_s / 2) and not self._over.is_set():
            error = self.activity.failure  # the main thread hangs, or does something else for longer than it may
            end_process(f"{type(error).__name__}: {error}")

    def _lost_store(self) -> RankFailure:
        """The store does not answer: the rank that hosts it is gone, or its launcher."""
        host, silent_s = self._seen.get(0), time.monotonic() - self._answered_at
        if host is None and not _torch.launcher_hosts_store():
            who = f"rank 0 (host {self.host}), or the launcher that hosts the store of the job,"
            what = f"{who} does not answer: no answer for {silent_s:.0f} s"
            return RankFailure(None, what, "unknown, as no heartbeat of it had come", f"{_READ} 0")
        if host is None or not host.who.hosts_store:
            what = f"the store of the job, on {self.host}, does not answer rank {self.rank} for {silent_s:.0f} s"
            return RankFailure(None, what, "", "read the output of what hosts it: the launcher of the first host")
        if host.has_left:
            return _ended(host)
        stopped = host.who.is_stopped(self._own.who)
        how = "is gone" if host.who.is_gone(self._own.who) else "is stopped" if stopped else "does not answer"
        what = f"{host.who}, which hosts the store of the job, {how}: no answer for {silent_s:.0f} s"
        return RankFailure(host.who, what, host.last(silent_s), f"{_READ} 0")

    def _know(self, failure: RankFailure) -> None:
        self.activity.failure = failure.error()
        self._known.set()

    # -- called by the main thread
    def _explain(self, error: BaseException) -> None:
        """A connection broke: wait until it is known which rank failed, and keep torch's own text in a later line."""
        self._suspects = True
        self._wake.set()
        self._known.wait(self.timeout_s)
        failure = self.activity.failure
        if failure is not None:
            failure.add_note(f"  torch: {first_line(error)}")

    def _tell(self) -> None:
        """The main thread has the error."""
        if not self._told.is_set():
            self._told.set()
            _join(self._talker)  # until the others can do without a store that ends here

    def _key(self, name: object) -> str:
        return f"{self.label}/{name}"


_READ = "read the output of rank"
_LOOK = "look at what this rank does there"


def _ended(beat: Beat) -> RankFailure:
    what = f"{beat.who} ended its program while other ranks go on"
    return RankFailure(beat.who, what, beat.last(), f"make the same calls on every rank: {_READ} {beat.who.rank}")


def _innermost(store: Any) -> Any:
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


@contextmanager
def _shorter_timeout(store: Any, timeout_s: float) -> Generator[None]:
    """Connect for so long at most: a TCPStore whose connection is broken tries again, up to its timeout."""
    store = _innermost(store)
    if getattr(store, "port", None) is None:
        yield
        return
    before: timedelta = store.timeout  # torch's stub lacks it
    store.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        store.set_timeout(before)


def _join(thread: threading.Thread) -> None:
    if thread.ident is not None:  # else it was never started
        thread.join(_LAST_WORDS_S)


_current: list[Peers] = []  # of this process, which is one rank of one job


def watch_peers(timeout_s: float | None) -> Peers | None:
    """Watch the ranks of torch's default process group from now on. A longer timeout than before replaces it. None:
    there is one rank, or nobody has to be watched.
    """
    if timeout_s is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = _torch.default_store()
    if _current and _current[0]._kept is not store:  # pyright: ignore[reportPrivateUsage]
        leave_peers()
    if not _current:
        _current.append(Peers(store, dist.get_rank(), dist.get_world_size(), timeout_s, ACTIVITY))
        _current[0].start()
    _current[0].timeout_s = max(_current[0].timeout_s, timeout_s)
    return _current[0]


def current_peers() -> Peers | None:
    """The ranks that are watched; None where there is one rank, or where nobody watches."""
    return _current[0] if _current else None


def doing(store: Any, ranks: Iterable[int]) -> str:
    """What ranks did at their last heartbeats, in lines; nothing of a rank that sends none."""
    keys = {peers._key(rank): rank for peers in _current for rank in ranks}  # pyright: ignore[reportPrivateUsage]
    last = ((rank, cast(Beat, decode(key, store.get(key), Beat))) for key, rank in keys.items() if store.check([key]))
    return "".join(f"\n  rank {rank}: {beat.last()}" for rank, beat in last)


def leave_peers() -> None:
    """This process leaves the job."""
    while _current:
        _current.pop().leave()
