"""Exchanges of ranks with threads as ranks: what they cost, and whom their errors name."""

import pickle
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

import wholestep as ws
from wholestep.distributed import rendezvous, store_tree
from wholestep.distributed.rendezvous import Calls, Rendezvous
from wholestep.distributed.sections import GRAPH, LAYOUTS, UNKNOWN, Section
from wholestep.distributed.store_tree import ARITY, StoreTree
from wholestep.runtime.consistency import ConsistencyCheck
from wholestep.runtime.progress import Stages


class Counting:
    """A store in memory, as one rank sees it: counts the keys that each request of this rank asks for."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, Counter[str]()
        self.polled = Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            if name == "check":
                self.polled.update(args[0])
            else:
                self.asked[name] += len(args[0]) if args and isinstance(args[0], list) else 1
            return getattr(self.store, name)(*args)

        return ask


def on_ranks(
    act: Callable[[Rendezvous], Any], size: int, store: Any = None, timeout_s: float = 60.0, ranks: Any = None
) -> list[Any]:
    """What `act` returns on each rank, or the first line of its error."""
    shared = store if store is not None else dist.HashStore()
    chosen = list(range(size) if ranks is None else ranks)
    started = threading.Barrier(len(chosen))  # ranks that poll leave no time to start the others

    def rank_main(rank: int) -> Any:
        started.wait()
        seen = shared[rank] if isinstance(shared, list) else shared
        try:
            return act(Rendezvous(seen, rank, size, timeout_s))
        except (ws.RankMismatchError, ws.StoreError) as error:
            return str(error).splitlines()[0]

    with ThreadPoolExecutor(len(chosen)) as threads:
        return list(threads.map(rank_main, chosen))


def equal(
    said: Callable[[int], dict[str, Section]], failure: Callable[[int], str] = lambda _: "",
    call: Callable[[int], str] = lambda _: "",
) -> Callable[[Rendezvous], Calls]:  # fmt: skip
    return lambda ranks: ranks.all_equal("job", said(ranks.rank), failure(ranks.rank), call(ranks.rank))


def lines(*texts: str) -> Section:
    return Section.of(texts)


def counted(size: int) -> list[Counting]:
    shared = dist.HashStore()
    return [Counting(shared) for _ in range(size)]


def levels(size: int) -> int:
    """Levels of groups above the ranks."""
    return 0 if size == 1 else 1 + levels(-(-size // ARITY))


EXCHANGES: dict[str, Callable[[Rendezvous], Any]] = {
    "all_equal": equal(lambda _: {LAYOUTS: lines("a", "b"), GRAPH: lines("c")}),
    "gather": lambda ranks: ranks.gather("job", ranks.rank, "a test", int),
    "broadcast": lambda ranks: ranks.broadcast("job", {"of": ranks.rank}, "a test", Mapping[str, int]),
    "barrier": lambda ranks: ranks.barrier("a test"),
}


@pytest.mark.parametrize("size", [2, 16, 17, 300, pytest.param(1024, marks=pytest.mark.full)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_rank_asks_the_store_for_all_others(exchange: str, size: int) -> None:
    """A rank asks O(arity x log ranks) times, all together O(ranks); each polls one key."""
    seen = counted(size)
    found = on_ranks(EXCHANGES[exchange], size, seen, timeout_s=200.0)
    expected = {"all_equal": Calls(0, True), "gather": list(range(size)), "broadcast": {"of": 0}, "barrier": None}
    assert found == [expected[exchange]] * size
    asked = [sum(one.asked.values()) for one in seen]
    assert max(asked) <= 2 * (ARITY + 3) * levels(size) + 8
    assert sum(asked) <= 10 * size
    assert all(len(one.polled) <= 1 for one in seen)


@pytest.mark.parametrize("size", [300, pytest.param(1024, marks=pytest.mark.full)])
def test_one_rank_of_many_that_differs_is_named_on_all(size: int) -> None:
    seen = counted(size)
    said = equal(lambda rank: {"options": lines("lr: 0.1", f"decay: {0.5 if rank == 277 else 0.1}")})
    found = on_ranks(said, size, seen, timeout_s=200.0)
    text = f"ranks differ in options: decay: 0.5 on rank 277, 0.1 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and {size - 9} more"
    assert found == [text] * size
    assert sum(sum(one.asked.values()) for one in seen) <= 12 * size


def test_missing_ranks_are_found_by_descending_the_tree() -> None:
    """Of 1,024 ranks three are missing: a rank that looks asks for the keys of their groups only."""
    seen, absent = counted(1024), [5, 300, 1023]
    for rank in range(1024):
        if rank not in absent:
            assert StoreTree(seen[rank], "job", rank, 1024, int).contribute(rank, max) == []
    looker = Counting(seen[0].store)
    assert StoreTree(looker, "job", 0, 1024, int).missing() == absent
    assert sum(looker.polled.values()) <= len(absent) * (ARITY + 2) * levels(1024)


def test_ranks_that_wait_look_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank looks for the missing ones in each period, and the others read what it found."""
    monkeypatch.setattr(rendezvous, "_REPORT_S", 0.8)
    size, seen, reported = 64, counted(64), [list[list[int]]() for _ in range(64)]

    def act(ranks: Rendezvous) -> Any:
        waits = Rendezvous(ranks.store, ranks.rank, size, 4.0, reported[ranks.rank].append)
        return waits.all_equal("job", {LAYOUTS: lines("a")})

    found = on_ranks(act, size, seen, ranks=[rank for rank in range(size) if rank != 9])
    assert all(text.startswith("ranks [9] compiled no program while rank") for text in found)
    assert all(one == [9] for told in reported for one in told)
    assert any(reported)
    looked = sum(len(one.polled) > 3 for one in seen)
    assert looked <= 8, "at most one in each of five periods, and one at the end"


@pytest.mark.parametrize("exchange", ["all_equal", "gather", "broadcast"])
def test_a_file_store_will_do(exchange: str, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), -1)
    found = on_ranks(EXCHANGES[exchange], 8, store)
    assert found[0] == found[7]
    assert not isinstance(found[0], str)


def test_a_gather_leaves_nothing_in_the_store() -> None:
    store = dist.HashStore()
    on_ranks(EXCHANGES["gather"], 40, store)
    assert store.num_keys() == 0


def test_one_rank_that_differs_is_named_on_all() -> None:
    def said(rank: int) -> dict[str, Section]:
        return {"options": lines("lr: 0.1", f"decay: {0.5 if rank == 5 else 0.1}"), GRAPH: lines(f"of {rank}")}

    text = "ranks differ in options: decay: 0.5 on rank 5, 0.1 on ranks 0, 1, 2, 3, 4, 6, 7"
    assert on_ranks(equal(said), 8) == [text] * 8


def test_the_first_difference_of_programs_is_shown_from_each_side() -> None:
    found = on_ranks(equal(lambda rank: {LAYOUTS: lines("a", "b" if rank < 3 else "c", "d")}), 4)
    text = "rank {} and rank {} compiled different programs; the first difference is at line 2 of 3:"
    assert found == [text.format(0, 3), text.format(1, 3), text.format(2, 3), text.format(3, 0)]


def test_a_large_program_is_exchanged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tree, "_PIECE_BYTES", 1000)
    found = on_ranks(equal(lambda rank: {GRAPH: Section.of([f"{i} {rank}" for i in range(10_000)])}), 2)
    assert all("line 1 of 10000" in str(text) for text in found)


def test_graphs_are_compared_among_ranks_of_the_like_call() -> None:
    def said(rank: int) -> dict[str, Section]:
        return {GRAPH: lines(f"graph of call {rank % 2}") if rank != 2 else Section(UNKNOWN)}

    found = on_ranks(equal(said, call=lambda rank: str(rank % 2)), 4)
    assert found == [Calls(1, True), Calls(1, False)] * 2
    text = "rank {} and rank {} compiled different programs; the first difference is at line 1 of 1:"
    found = on_ranks(equal(lambda r: {GRAPH: lines(str(r == 3))}, call=lambda rank: str(rank % 2)), 4)
    assert found == [text.format(1, 3), text.format(1, 3), text.format(1, 3), text.format(3, 1)]


def test_a_rank_that_failed_is_named_though_others_are_not_there_yet() -> None:
    act = equal(lambda _: {LAYOUTS: lines("a")}, lambda rank: "no" if rank == 7 else "")
    text = "rank 7 could not compile its step: no"
    assert on_ranks(act, 16, ranks=[0, 1, 7, 12]) == [text, text, Calls(0, True), text]


def test_ranks_that_do_not_come_are_named_and_told_when_they_do() -> None:
    store, act = dist.HashStore(), equal(lambda _: {LAYOUTS: lines("a")})
    found = on_ranks(act, 8, store, timeout_s=3.0, ranks=[0, 1, 2, 4, 5, 6])
    assert found == [f"ranks [3, 7] compiled no program while rank {r} did, within 3 s" for r in (0, 1, 2, 4, 5, 6)]
    found = on_ranks(act, 8, store, ranks=[3])
    assert found == ["rank 3 compiled its program when others no longer waited for it (60 s)"]


def test_a_rank_that_waits_hears_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_S", 0.1)
    reports: list[list[int]] = []
    waiting = Rendezvous(dist.HashStore(), 1, 3, 0.5, reports.append)
    with pytest.raises(ws.RankMismatchError, match=r"ranks \[0, 2\] compiled no program while rank 1 did"):
        waiting.all_equal("job", {LAYOUTS: lines("a")})
    assert reports
    assert all(missing == [0, 2] for missing in reports)


def test_a_gather_names_the_ranks_that_do_not_come() -> None:
    found = on_ranks(EXCHANGES["gather"], 20, timeout_s=3.0, ranks=range(1, 19))
    assert found == ["a test: ranks [0, 19] did not come within 3 s"] * 18


def test_a_broadcast_names_what_the_first_rank_owes() -> None:
    found = on_ranks(EXCHANGES["broadcast"], 3, timeout_s=0.3, ranks=[1, 2])
    assert found == ["rank 0 did not say within 0.3 s a test"] * 2


def test_a_barrier_names_ranks_that_do_not_come_and_lets_all_come_again() -> None:
    store = dist.HashStore()
    with pytest.warns(UserWarning, match="waits for other ranks at a test"):
        found = on_ranks(EXCHANGES["barrier"], 3, store, timeout_s=4.0, ranks=[0, 2])
    assert found == [f"a test: rank {r} is there, ranks [1] did not come within 4 s" for r in (0, 2)]
    assert on_ranks(EXCHANGES["barrier"], 3, store) == [None] * 3


def test_a_rank_that_gives_up_first_at_a_barrier_did_come() -> None:
    store = dist.HashStore()

    def barrier(ranks: Rendezvous) -> None:
        replace(ranks, timeout_s=2.0 - ranks.rank / 2).barrier("a test")

    with pytest.warns(UserWarning, match="waits for other ranks at a test"):
        said = on_ranks(barrier, 3, store, ranks=[0, 2])
    assert said == [f"a test: rank {r} is there, ranks [1] did not come within {2 - r // 2} s" for r in (0, 2)]
    assert not store.check(["wholestep/barrier@ThreadPoolExecutor-_/a test/0/late"])


def test_a_barrier_names_ranks_at_another_one() -> None:
    with pytest.warns(UserWarning, match="waits for other ranks"):
        found = on_ranks(lambda ranks: ranks.barrier(f"door {ranks.rank % 2}"), 4, timeout_s=4.0)
    there = ["rank 1 is at door 1; rank 3 is at door 1", "rank 0 is at door 0; rank 2 is at door 0"] * 2
    assert found == [f"door {r % 2}: rank {r} is there, {there[r]}" for r in range(4)]


# -- what another process writes into the store ---------------------------------------------------------------------


class Evil:
    """Creates a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


def junk(draw: random.Random, canary: Path) -> bytes:
    """What no rank writes: random bytes, a pickle, JSON, a message for another key, one that is cut off or altered."""
    message = store_tree.encode("job/other", [draw.random()])
    altered = bytearray(store_tree.encode("job", [draw.random()]))
    altered[draw.randrange(len(altered))] ^= draw.randrange(1, 256)
    text = draw.choice(
        [pickle.dumps(Evil(canary)), draw.randbytes(draw.randrange(60)), b"[1]", message, bytes(altered)]
    )
    return draw.choice([b"", b"=", b"#", b"="]) + draw.choice([text, zlib.compress(text), text[: len(text) // 2]])


def test_what_no_rank_wrote_is_neither_run_nor_taken(tmp_path: Path) -> None:
    store, draw, canary = dist.HashStore(), random.Random(1), tmp_path / "canary"
    for _ in range(1000):
        store.set("job", junk(draw, canary))
        with pytest.raises(ws.StoreError, match="the store of the job holds under job: "):
            store_tree.get(store, "job", draw.choice([tuple[float, ...], int, str, tuple[str, tuple[int, ...] | None]]))
    assert not canary.exists()


@pytest.mark.parametrize("exchange", ["all_equal", "gather", "broadcast"])
def test_ranks_end_with_an_error_where_another_process_writes(exchange: str, tmp_path: Path) -> None:
    """It writes over one of the values of an exchange, another one each time."""
    draw, canary, spoiled = random.Random(exchange), tmp_path / "canary", 0

    @dataclass
    class Spoiled(Counting):
        store: Any
        number: int

        def __post_init__(self) -> None:
            super().__init__(self.store)

        def set(self, key: str, value: bytes) -> None:
            self.asked["set"] += 1
            self.store.set(key, junk(draw, canary) if self.asked["set"] == self.number else value)

    for number in [1, 2, 3, 4] * 10:
        shared = dist.HashStore()
        good = Counting(shared) if exchange != "broadcast" else Spoiled(shared, number)
        found = on_ranks(EXCHANGES[exchange], 2, [good, Spoiled(shared, number)], timeout_s=3.0)
        texts = [text for text in found if isinstance(text, str)]
        spoiled += bool(texts)
        right = {"all_equal": Calls(0, True), "gather": [0, 1], "broadcast": {"of": 0}}[exchange]
        assert all(text.startswith("the store of the job holds under job") for text in texts), texts
        assert [one for one in found if not isinstance(one, str)] == [right] * (2 - len(texts))
    assert spoiled >= 10
    assert not canary.exists()


def test_a_count_that_is_no_number_is_named() -> None:
    store = dist.HashStore()
    store.set("job/0/count/0", "abc")
    found = on_ranks(EXCHANGES["gather"], 2, store, timeout_s=3.0)
    assert found == ["the store of the job holds under job/0/count/0: b'abc', which is no number"] * 2


def test_labels_are_counted_rank_by_rank() -> None:
    found = on_ranks(lambda ranks: [ranks.next_label("x"), ranks.next_label("x")], 3)
    thread = "@ThreadPoolExecutor-_"  # its number is another one on each rank
    assert found == [[f"wholestep/x{thread}/1", f"wholestep/x{thread}/2"]] * 3


def test_a_choice_that_cannot_be_sent_ends_all_ranks_at_once() -> None:
    """Rank 0 raises the error, as any other error of its choice, and the others do not wait for the timeout."""

    def act(ranks: Rendezvous) -> str:
        with pytest.raises(ws.PlanError) as caught:
            ranks.choose("job", lambda: print, "a test", str)
        return caught.value.found

    text = "ranks cannot tell each other <built-in function print>"
    assert on_ranks(act, 2, timeout_s=1e6) == [text, text]


def test_a_rank_that_fails_leaves_the_comparison_before_to_slower_ranks() -> None:
    """Rank 1 looks for the outcome of the first comparison only after rank 0 has failed; it must still find it."""
    shared, failed = dist.HashStore(), threading.Event()

    class Slow(Counting):
        def check(self, keys: list[str]) -> bool:
            failed.wait(5.0)
            return self.store.check(keys)

    def act(ranks: Rendezvous) -> bool:
        check = ConsistencyCheck(cast("Any", None), cast("Any", None), ranks, Stages(None, "step"), "step", "")
        check._compare({LAYOUTS: lines("a")})  # pyright: ignore[reportPrivateUsage]
        if ranks.rank == 0:
            check.fail("no")
            failed.set()
            return True
        with pytest.raises(ws.RankMismatchError, match="rank 0 could not compile its step: no"):
            check._compare({LAYOUTS: lines("b")})  # pyright: ignore[reportPrivateUsage]
        return True

    assert on_ranks(act, 2, [shared, Slow(shared)], timeout_s=2.0) == [True, True]
