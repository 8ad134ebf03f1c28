"""What a compile leaves in memory, and when the garbage collector runs."""

import gc
import linecache
import weakref
from collections import Counter
from collections.abc import Generator

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.distributed.activity import ACTIVITY
from wholestep.graph.gc_control import FROZEN, collected_after, existing_objects_frozen


class Cycle:
    """Garbage that nothing but the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector() -> Generator[None]:
    gc.collect()
    gc.enable()
    FROZEN.clear()
    yield
    gc.enable()


def test_a_large_compile_ends_with_a_collection() -> None:
    """So that none of its objects is left for one in a later call."""
    with collected_after():
        held = [[i] for i in range(120 * gc.get_threshold()[0])]
        collections = gc.get_stats()[2]["collections"]
        lost = weakref.ref(Cycle())
    assert gc.get_stats()[2]["collections"] > collections
    assert lost() is None
    assert gc.get_count()[0] < len(held)


@pytest.mark.parametrize("new_only", [True, False])
def test_objects_from_before_are_left_alone_where_none_can_be_garbage_of_a_compile(new_only: bool) -> None:
    gc.unfreeze()
    held_so_far = Cycle()
    gc.collect()
    old, young = weakref.ref(held_so_far), weakref.ref(Cycle())
    del held_so_far
    with collected_after(lambda: new_only):
        held = [[i] for i in range(120 * gc.get_threshold()[0])]
        lost = weakref.ref(Cycle())
    assert held
    assert lost() is None
    assert young() is None
    assert (old() is not None) == new_only
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None
    gc.freeze()  # as all tests find it


def test_a_process_that_freezes_objects_keeps_them_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[None] = []
    assert gc.get_freeze_count()
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: (counted.append(None), count())[1])
    for _ in range(3):
        with collected_after(lambda: True), existing_objects_frozen():
            pass
    assert len(counted) == 1, "each count is a walk over all objects"
    assert count()


def test_a_compile_goes_through_old_objects_where_programs_were_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another step, or of this one: nothing else would free them."""
    model, batch = nn.Linear(2, 2), torch.ones(1, 2)

    def train_step(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        model.zero_grad()
        model(x if y is None else y).sum().backward()

    def compiled() -> ws.CompiledStep:
        return ws.compile(train_step, mesh="dp=1", keep_grads=True, max_programs=1)

    monkeypatch.setattr(ACTIVITY, "compiled", Counter())
    step = compiled()
    step(batch)
    assert step._holds_all()
    other = compiled()
    other(batch)
    assert not step._holds_all()
    assert not other._holds_all()
    ACTIVITY.compiled.subtract({"train_step": 1})
    assert step._holds_all()
    with pytest.warns(UserWarning, match="max_programs=1"):
        step(torch.ones(1, 2), torch.ones(1, 2))
    assert not step._holds_all()


def test_a_small_compile_does_not() -> None:
    collections = gc.get_stats()[2]["collections"]
    with collected_after():
        held = [[i] for i in range(gc.get_threshold()[0] // 2)]
    assert held
    assert gc.get_stats()[2]["collections"] == collections


def test_a_collector_that_the_user_has_turned_off_stays_off() -> None:
    gc.disable()
    collections = gc.get_stats()[2]["collections"]
    with collected_after(), existing_objects_frozen():
        held = [[i] for i in range(120 * gc.get_threshold()[0])]
    assert held
    assert not gc.isenabled()
    assert gc.get_stats()[2]["collections"] == collections


def test_no_collection_runs_in_a_compile_but_at_its_end() -> None:
    with collected_after():
        collections = [stats["collections"] for stats in gc.get_stats()]
        held = [[i] for i in range(120 * gc.get_threshold()[0])]
        assert [stats["collections"] for stats in gc.get_stats()] == collections
    assert held
    assert gc.isenabled()


def test_a_search_inside_a_pause_frees_its_garbage() -> None:
    with collected_after():
        with existing_objects_frozen():
            lost = weakref.ref(Cycle())
            held = [[i] for i in range(120 * gc.get_threshold()[0])]
            assert lost() is None
        assert not gc.isenabled()
    assert held
    assert gc.isenabled()


def test_a_capture_forgets_the_source_files_that_it_read() -> None:
    """Lines that are of no file stay: nothing can read them again."""
    linecache.clearcache()
    linecache.cache["<typed in>"] = 5, None, ["line\n"], "<typed in>"
    model = nn.Linear(2, 2)

    def train_step(x: torch.Tensor) -> None:
        model(x).sum().backward()

    ws.capture(train_step, torch.ones(1, 2), options=ws.CaptureOptions(keep_grads=True))
    assert list(linecache.cache) == ["<typed in>"]
