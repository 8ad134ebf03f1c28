"""Which rank failed, as ranks find it out with their heartbeats. Ranks are objects in one process, and stores count."""

import ctypes
import gc
import linecache
import os
import platform
import select
import socket
import struct
import sys
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wholestep as ws
from tests.unit.test_rendezvous import Counting
from wholestep import _torch
from wholestep.distributed.activity import Activity
from wholestep.distributed.heartbeat import Beat, MainThread, waited_for
from wholestep.distributed.peers import Peers
from wholestep.distributed.typed_messages import decode, encode
from wholestep.units import parse_seconds

TIMEOUT_S = 40.0  # a failed rank is found after 30 s, counted in heartbeats of 2 s: nobody waits here


class Step:
    __name__, number, calls = "train_step", 1, 7


class Rank(Peers):
    """A rank without threads, which says what it is told to say."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(store, rank, size, TIMEOUT_S, Activity(Step))
        self._connect()
        self.says: dict[str, Any] = {"waits": True, "still_s": 0.0}

    def round(self, seconds: float = 0.0) -> str:
        """One heartbeat, `seconds` after the last one. Returns the first line of the failure that is known, or ""."""
        said, self._answered_at = self.says, self._answered_at - seconds
        self._main.beat = lambda before, most_s: replace(before, number=before.number + 1, **said)  # type: ignore[method-assign]
        self._exchange()
        return str(self.activity.failure).splitlines()[0] if self.activity.failure else ""


def job(size: int) -> tuple[list[Rank], list[Counting]]:
    shared = dist.HashStore()

    class Cloned(Counting):
        def clone(self) -> "Cloned":
            return self

    stores: list[Counting] = [Cloned(shared) for _ in range(size)]
    ranks = [Rank(stores[rank], rank, size) for rank in range(size)]
    for _ in range(2):
        for rank in ranks:
            assert rank.round() == ""
    return ranks, stores


def who(rank: int) -> str:
    return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"


def test_no_rank_of_1024_reads_more_than_three_records() -> None:
    ranks, stores = job(1024)
    before = [sum(store.asked.values()) + sum(store.polled.values()) for store in stores]
    for rank in ranks:
        rank.round()
    asked = [sum(s.asked.values()) + sum(s.polled.values()) - b for s, b in zip(stores, before, strict=True)]
    assert max(asked) == 1 + 3
    assert max(sum(store.polled.values()) for store in stores) <= 2 * 2  # at the start, until the others are there
    ranks[700].says |= {"waits": False, "still_s": 31.0, "what": "between steps", "where": "data.py:3  next(rows)"}
    ranks[699].says |= {"still_s": 31.0, "what": "in call 8 of train_step, waiting at all_reduce"}
    found = [rank.round() for rank in (ranks[700], ranks[699], *ranks)]
    text = f"{who(700)} does not come: rank 699 has waited for 31 s, in call 8 of train_step, waiting at all_reduce"
    assert found[1:] == [text] * 1025
    assert "last: between steps, for 31 s\n  there: data.py:3  next(rows)" in str(ranks[0].activity.failure)
    assert getattr(ranks[0].activity.failure, "rank", None) == 700


def test_a_silent_rank_is_found_after_the_timeout_and_sooner_where_a_connection_broke() -> None:
    ranks, _ = job(3)
    for _ in range(8):  # 4 s each count, however long this rank was away: it may have been stopped itself
        assert ranks[0].round(1000.0) == ranks[2].round(1000.0) == ""
    assert f"{who(1)} is stopped, or blocked outside of Python, or unreachable: no heartbeat" in ranks[0].round(1000.0)
    assert ranks[2].round() == str(ranks[0].activity.failure).splitlines()[0]

    ranks, _ = job(3)
    ranks[2]._suspects = True
    assert ranks[2].round() == ranks[0].round() == ""
    assert ranks[0].round(4.0) == ""
    assert f"{who(1)} is stopped" in ranks[0].round(4.0)


def test_a_rank_that_compiles_has_its_own_time_and_one_that_waits_is_not_to_blame() -> None:
    ranks, _ = job(2)
    ranks[0].says["still_s"] = 100.0
    ranks[1].says |= {"waits": False, "still_s": 100.0, "allowance_s": 120.0}
    assert [ranks[1].round(), ranks[0].round()] == ["", ""]
    ranks[1].says["waits"] = True
    ranks[1].says["still_s"] = 1000.0
    assert [ranks[1].round(), ranks[0].round()] == ["", ""]
    ranks[1].says |= {"waits": False, "calls": 8, "step": "train_step"}  # past the collective that rank 0 waits at
    ranks[0].says |= {"calls": 7, "step": "train_step"}
    assert [ranks[1].round(), ranks[0].round()] == ["", ""]
    ranks[1].says |= {"calls": 7, "still_s": 121.0}
    assert [ranks[1].round(), ranks[0].round()][1].startswith(f"{who(1)} does not come")


def test_ranks_that_wait_at_different_points_are_named_once_none_works() -> None:
    """The ranks beside each other in the ring that differ are 1 and 2, and 3 and 0."""
    ranks, _ = job(4)
    save = {"still_s": 31.0, "what": "between steps, after call 3 of train_step, waiting at save(a)", "point": "save/1"}
    call = {
        "still_s": 31.0,
        "what": "in call 4 of train_step, waiting at all_reduce",
        "point": "call 4",
        "where": "b:7",
    }
    for rank in (0, 1):
        ranks[rank].says |= {**save, "where": f"a:{rank}  ws.save(a, step)"}
    for rank in (2, 3):
        ranks[rank].says |= {**call, "waits": rank == 2, "still_s": 31.0 if rank == 2 else 1.0}
    assert [rank.round() for rank in ranks] == [""] * 4, "rank 3 works"
    ranks[3].says |= {"waits": True, "still_s": 20.0}
    assert [rank.round() for rank in ranks] == [""] * 4, "it may still come"
    ranks[3].says |= {"still_s": 31.0}
    for rank in [*ranks, *ranks]:
        rank.round()
    assert {str(rank.activity.failure) for rank in ranks} == {
        "ranks wait for each other at different points\n"
        "  ranks 0, 1: between steps, after call 3 of train_step, waiting at save(a), for 31 s\n"
        "  there: a:0  ws.save(a, step)\n"
        "  ranks 2, 3: in call 4 of train_step, waiting at all_reduce, for 31 s\n"
        "  there: b:7\n"
        "  needed: all ranks, until the end of the job\n"
        "  next: make the same calls on every rank, in the same order (no `if rank == 0`)"
    }


def test_a_rank_with_a_new_program_and_one_with_the_known_program_are_told_apart() -> None:
    ranks, _ = job(4)
    new = {"step": "train_step 1", "calls": 3, "news": "x is 2, it was 1\n    rank 2: a:7  b()", "still_s": 5.0}
    runs = {"step": "train_step 1", "calls": 3, "meets": 4, "still_s": 5.0}
    ranks[2].says |= new
    for other in ({"meets": 0}, {"meets": 3}, {"still_s": 3.0}, {"step": "train_step 2"}):
        ranks[1].says |= {**runs, **other}
        assert [rank.round() for rank in ranks] == [""] * 4, "it may still compare its program, or is of another call"
    for ahead in ({}, {"calls": 6, "meets": 6, "waits": False}):  # where a device runs the program
        ranks, _ = job(4)
        ranks[2].says |= new
        ranks[1].says |= {**runs, **ahead}
        for rank in 3 * ranks:
            rank.round()
        assert {f"{type(rank.activity.failure).__name__}: {rank.activity.failure}" for rank in ranks} == {
            "RankMismatchError: rank 2 compiled another program for call 4 of train_step, rank 1 did not: "
            "x is 2, it was 1\n"
            "    rank 2: a:7  b()\n"
            "  needed: the same collectives on every rank, in one order\n"
            "  next: run this part on every rank: on zeros, with torch.where, or times a tensor that is 0 or 1"
        }


def test_ranks_that_wait_at_one_point_wait_on() -> None:
    ranks, _ = job(3)
    for rank in ranks:
        rank.says |= {"still_s": 1000.0, "point": "call 4"}
    assert [rank.round() for rank in [*ranks, *ranks]] == [""] * 6


def test_a_heartbeat_that_no_rank_wrote_ends_the_job() -> None:
    ranks, stores = job(2)
    stores[0].store.set(f"{ranks[0].label}/1", b"{}")
    with pytest.raises(ws.StoreError, match="the store of the job holds under wholestep/alive/1/1: 2 bytes"):
        ranks[0].round()


def test_ranks_may_leave_until_somebody_waits_for_them() -> None:
    ranks, _ = job(4)
    for rank in (1, 2, 3):
        ranks[rank]._over.set()
        assert ranks[rank].round() == ""
    for _ in range(5):
        ranks[0].says |= {"waits": False, "still_s": 1000.0}
        assert ranks[0].round() == ""
    ranks[0].says |= {"waits": True, "still_s": 7.0}
    assert ranks[0].round() == f"{who(1)} ended its program while other ranks go on"


def test_the_first_failure_stays() -> None:
    ranks, _ = job(3)
    ranks[1].says |= {"waits": False, "still_s": 31.0}
    ranks[2].says |= {"waits": False, "still_s": 31.0}
    ranks[0].says["still_s"] = 31.0
    for rank in (1, 2):
        ranks[rank].round()
    first = ranks[0].round()
    assert first.startswith(who(1))
    ranks[1].says |= {"waits": True}
    assert [ranks[1].round(), ranks[2].round()] == [first, first]


def test_a_thread_that_waits_in_a_program_is_seen_to_wait() -> None:
    started, done = threading.Event(), threading.Event()

    def run_program() -> None:
        scope: dict[str, Any] = {"wait": lambda: (started.set(), done.wait()), "wholestep_waits": {2: "all_reduce_3"}}
        exec(compile("def run():\n    wait()\n", "<program>", "exec"), scope)
        scope["run"]()

    thread = threading.Thread(target=run_program)
    thread.start()
    started.wait()
    frame = sys._current_frames()[thread.ident or 0]  # pyright: ignore[reportPrivateUsage]
    while frame is not None and "wholestep_waits" not in frame.f_globals:
        frame = frame.f_back
    assert waited_for(frame) == "all_reduce_3"
    done.set()
    thread.join()


def test_the_main_thread_is_shown_at_the_users_line() -> None:
    ranks, _ = job(2)
    looks = MainThread(Activity(Step))
    first = looks.beat(Beat(ranks[0]._own.who), 2.0)
    second = looks.beat(first, 2.0)
    assert (second.number, second.step, second.calls, second.waits) == (2, "train_step 1", 7, False)
    assert second.what == "between steps, after call 7 of train_step"
    assert "test_peers.py" in second.where
    assert "looks.beat(first, 2.0)" in second.where
    assert decode("key", encode("key", second), Beat) == second


def test_the_main_thread_may_empty_the_table_of_lines_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return True

    looks = MainThread(Activity(Step))
    first = looks.beat(Beat(job(2)[0][0]._own.who), 2.0)
    monkeypatch.setattr(linecache, "cache", Emptied())
    assert "test_peers.py" in looks.beat(first, 2.0).where


def test_a_look_at_the_main_thread_keeps_nothing_alive() -> None:
    """Its frames have the tensors of a step, which have to go when the step lets go of them."""
    looks, ranks = MainThread(Activity(Step)), job(1)[0]

    def step() -> weakref.ref[Any]:
        held = torch.zeros(2)
        thread = threading.Thread(target=looks.beat, args=(Beat(ranks[0]._own.who), 2.0))
        thread.start()
        thread.join()
        return weakref.ref(held)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not os.path.exists("/proc/self/fdinfo"), reason="sockets are found in /proc")
@pytest.mark.parametrize("upper_half", [0, 0x7F21])
def test_connections_of_python_are_not_taken_for_those_of_gloo(upper_half: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, select.epoll() as polled:
        packed = "=IQ" if platform.machine() == "x86_64" else "@IQ"
        event = struct.pack(packed, select.EPOLLIN, upper_half << 32 | ours.fileno())
        assert ctypes.CDLL(None).epoll_ctl(polled.fileno(), 1, ours.fileno(), event) == 0  # 1: EPOLL_CTL_ADD
        _torch.break_gloo_connections()
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not _torch.listens_at(port)
        server.listen()
        assert _torch.listens_at(port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            _torch.break_connections_to(port)
            assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("5min", 300), ("2 h", 7200), ("500ms", 0.5), (90, 90), ("1.5", 1.5)]
)
def test_times(text: float | str, seconds: float) -> None:
    assert parse_seconds(text, "timeout") == seconds


@pytest.mark.parametrize("given", ["", "0", -1, "5 minutes!", "1d", "nan", 1e300])
def test_times_that_are_none(given: Any) -> None:
    with pytest.raises(ws.PlanError) as caught:
        ws.compile(lambda: None, timeout=given)
    needed = 'a positive number of seconds up to 100,000,000, or text like "60s" or "5min"'
    assert str(caught.value) == f"timeout={given!r}\n  needed: {needed}\n  next: correct it"


@pytest.mark.parametrize("given", [True, float("nan"), [5]])
def test_what_is_no_time(given: Any) -> None:
    with pytest.raises(ws.PlanError, match="needed: timeout of type float"):
        ws.compile(lambda: None, timeout=given)
