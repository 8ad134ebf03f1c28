"""How ranks compare what they say, with threads as ranks: what it costs, and who is named."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import wholestep as ws
from wholestep.distributed.agree import GRAPH, LAYOUTS, UNKNOWN, Meeting, Others, Section


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked, self.lock = store, Counter[str](), threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            with self.lock:
                self.asked[name] += 1
            return getattr(self.store, name)(*args)

        return ask


def hold(
    store: Any, size: int, said: Callable[[int], dict[str, Section]], failure: Callable[[int], str] = lambda _: "",
    call: Callable[[int], str] = lambda _: "", timeout_s: float = 60.0, ranks: list[int] | None = None,
) -> list[Others | str]:  # fmt: skip
    """What each rank gets: its verdict, or the text of its error."""

    def rank_main(rank: int) -> Others | str:
        meeting = Meeting(store, "job", rank, size, timeout_s)
        try:
            return meeting.hold(said(rank), failure(rank), None, call(rank))
        except ws.RankMismatchError as error:
            return str(error).splitlines()[0]

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_main, ranks if ranks is not None else range(size)))


def lines(*texts: str) -> Section:
    return Section.of(texts)


def stores(tmp_path: Path) -> dict[str, Any]:
    return {"hash": dist.HashStore(), "file": dist.FileStore(str(tmp_path / "store"), -1)}


@pytest.mark.parametrize(("kind", "size"), [("hash", 2), ("hash", 64), ("hash", 256), ("file", 8)])
def test_ranks_that_agree_ask_the_store_a_few_times_each(kind: str, size: int, tmp_path: Path) -> None:
    store = Counting(stores(tmp_path)[kind])
    found = hold(store, size, lambda _: {LAYOUTS: lines("a", "b"), GRAPH: lines("c")})
    assert found == [Others(0, True)] * size
    store.asked.pop("check")  # of one key, until the last rank has come
    assert store.asked == {"set": size + 1, "add": size + 1, "multi_get": 1, "get": size}


@pytest.mark.parametrize(("kind", "size"), [("hash", 256), ("file", 8)])
def test_one_rank_that_differs_is_named_on_all(kind: str, size: int, tmp_path: Path) -> None:
    store = Counting(stores(tmp_path)[kind])

    def said(rank: int) -> dict[str, Section]:
        return {"options": lines("lr: 0.1", f"decay: {0.5 if rank == 5 else 0.1}"), GRAPH: lines(f"of {rank}")}

    others = "ranks 0, 1, 2, 3, 4, 6, 7" if size == 8 else "ranks 0, 1, 2, 3, 4, 6, 7, 8 and 247 more"
    assert hold(store, size, said) == [f"ranks differ in options: decay: 0.5 on rank 5, 0.1 on {others}"] * size
    store.asked.pop("check")
    assert sum(store.asked.values()) < 10 * size


def test_the_first_difference_of_programs_is_shown_from_each_side() -> None:
    found = hold(dist.HashStore(), 4, lambda rank: {LAYOUTS: lines("a", "b" if rank < 3 else "c", "d")})
    text = "rank {} and rank {} compiled different programs; the first difference is at line 2 of 3:"
    assert found == [text.format(0, 3), text.format(1, 3), text.format(2, 3), text.format(3, 0)]


def test_a_large_program_is_exchanged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.distributed.agree._PIECE_BYTES", 1000)
    found = hold(dist.HashStore(), 2, lambda rank: {GRAPH: Section.of([f"{i} {rank}" for i in range(10_000)])})
    assert all("line 1 of 10000" in str(text) for text in found)


def test_graphs_are_compared_among_ranks_of_the_like_call() -> None:
    def said(rank: int) -> dict[str, Section]:
        return {GRAPH: lines(f"graph of call {rank % 2}") if rank != 2 else Section(UNKNOWN)}

    found = hold(dist.HashStore(), 4, said, call=lambda rank: str(rank % 2))
    assert found == [Others(1, True), Others(1, False)] * 2
    text = "rank {} and rank {} compiled different programs; the first difference is at line 1 of 1:"
    found = hold(dist.HashStore(), 4, lambda r: {GRAPH: lines(str(r == 3))}, call=lambda rank: str(rank % 2))
    assert found == [text.format(1, 3), text.format(1, 3), text.format(1, 3), text.format(3, 1)]


def test_a_rank_that_failed_is_named_though_others_are_not_there_yet() -> None:
    found = hold(
        dist.HashStore(), 16, lambda _: {LAYOUTS: lines("a")}, lambda rank: "no" if rank == 7 else "",
        ranks=[0, 1, 7, 12],
    )  # fmt: skip
    text = "rank 7 could not compile its step: no"
    assert found == [text, text, Others(0, True), text]


def test_ranks_that_do_not_come_are_named_and_told_when_they_do() -> None:
    store = dist.HashStore()
    found = hold(store, 8, lambda _: {LAYOUTS: lines("a")}, timeout_s=0.5, ranks=[0, 1, 2, 4, 5, 6])
    assert found == [f"ranks [3, 7] compiled no program while rank {r} did, within 0 s" for r in (0, 1, 2, 4, 5, 6)]
    found = hold(store, 8, lambda _: {LAYOUTS: lines("a")}, ranks=[3])
    assert found == ["rank 3 compiled its program when others no longer waited for it (60 s)"]


def test_a_wait_tells_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.distributed.agree._TELL_S", 0.1)
    told: list[list[int]] = []
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    meeting = Meeting(store, "job", 1, 3, 0.5)
    with pytest.raises(ws.RankMismatchError, match=r"ranks \[0, 2\] compiled no program while rank 1 did"):
        meeting.hold({LAYOUTS: lines("a")}, "", told.append, "")
    assert told
    assert told[0] == [0, 2]
