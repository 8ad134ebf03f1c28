"""The first rank looks up what an earlier start chose, for all: bitwise the same programs; no rank waits for ever."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.dist.test_errors import attempt, train_step
from wholestep.passes import fit_memory
from wholestep.planner import resolve
from wholestep.runtime import choose_strategy, finalize

LINK = ws.Hardware.measured(link_us=1.0, link_bytes_per_us=1e6)


def options_of(kind: str) -> dict[str, Any]:
    return {
        "fully_shard": {"parallel": ws.DataParallel("fully_shard")},
        "across steps": {"parallel": ws.DataParallel("zero1"), "schedule": "across_steps"},
        "Auto": {"parallel": ws.Auto()},
        "budget": {"parallel": ws.DataParallel("fully_shard"), "memory_bytes": 10_500},
        "solved": {"parallel": ws.TensorParallel("auto"), "mesh": "tp=2"},
        "solved for a machine": {"parallel": ws.TensorParallel("auto", hardware=LINK), "mesh": "tp=2"},
        "solved and sharded": {
            "parallel": [ws.DataParallel("zero1", axis="dp"), ws.TensorParallel("auto")],
            "mesh": "dp=1,tp=2",
        },
    }[kind]


USUAL = ("solved and sharded",)  # of Auto: test_a_damaged_entry_is_written_again
KINDS = ("fully_shard", "across steps", "Auto", "budget", "solved", "solved for a machine", "solved and sharded")


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured or searched")


def train(rank: int, world: int, folders: list[str], kind: str, rows: tuple[int, int], warm: bool) -> dict[str, Any]:
    """Three steps: what the cache did, the parameters after them, the program. A warm start searches nothing."""
    if warm:
        finalize.measure_hardware = choose_strategy._chosen = fit_memory.choices = resolve.solve_layouts = refuse
    case = CASES["tokens"]
    model = case.build(torch.float32)
    optimizer = OPTIMIZERS["AdamW-fused"].make(model.parameters())
    step = ws.compile(case.step, cache=folders[rank], **options_of(kind))
    for i in range(3):
        own = 0 if kind.startswith("solved") else rank  # ranks of a tensor-parallel axis are given one batch
        batch = {k: v[: rows[own]] for k, v in case.batches(10 * i + own, torch.float32).items()}
        loss = step(model, optimizer, batch)
    step.flush()
    texts = str(step.local_graph), str(step.train_graph), str(step.plan)
    return {
        "log": step.cache_log,
        "numbers": [loss.item(), *(whole(p).tolist() for p in model.parameters())],
        "texts": texts,
    }


def logs(found: list[dict[str, Any]]) -> list[str]:
    return [one["log"][0] for one in found]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in USUAL else pytest.mark.full) for kind in KINDS]
)
def test_a_second_start_measures_and_searches_nothing(kind: str, tmp_path: Path) -> None:
    """Only the first rank's folder is read and written; its figures are those that the job measured."""
    folders = [str(tmp_path / name) for name in ("first", "second")]
    cold = run_ranks(train, 2, folders, kind, (3, 3), False, measures=True)
    warm = run_ranks(train, 2, folders, kind, (3, 3), True, measures=True)
    assert logs(cold) == ["miss: no entry"] * 2
    assert logs(warm) == ["hit", "from rank 0"]
    for before, after in zip(cold, warm, strict=True):
        assert before["texts"] == after["texts"]
        assert before["numbers"] == after["numbers"]
    assert len(list(Path(folders[0]).iterdir())) == 1
    assert not Path(folders[1]).exists()


@pytest.mark.parametrize(
    "kind", ["budget", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("fully_shard", "Auto"))]
)
def test_the_cache_changes_no_numbers(kind: str, tmp_path: Path) -> None:
    """Ranks are given batches of other sizes; the first one's choices hold for both."""
    folders = [str(tmp_path)] * 2
    without, cold = (run_ranks(train, 2, here, kind, (3, 2), False) for here in (["", ""], folders))
    warm = run_ranks(train, 2, folders, kind, (3, 2), True)
    assert [one["log"] for one in without] == [[], []]
    assert (logs(cold), logs(warm)) == (["miss: no entry"] * 2, ["hit", "from rank 0"])
    for one, two, three in zip(without, cold, warm, strict=True):
        assert one["numbers"] == two["numbers"] == three["numbers"]
        assert two["texts"] == three["texts"]


def test_a_damaged_entry_is_written_again(tmp_path: Path) -> None:
    folders = [str(tmp_path)] * 2
    cold = run_ranks(train, 2, folders, "Auto", (3, 3), False)
    (file,) = tmp_path.iterdir()
    whole_text = file.read_text()
    file.write_text(whole_text[:-20])
    again = run_ranks(train, 2, folders, "Auto", (3, 3), False)
    assert logs(again) == ["miss: the entry cannot be read"] * 2
    assert [one["numbers"] for one in again] == [one["numbers"] for one in cold]
    assert json.loads(file.read_text())["key"] == json.loads(whole_text)["key"]
    assert logs(run_ranks(train, 2, folders, "Auto", (3, 3), True)) == ["hit", "from rank 0"]


@pytest.mark.full  # on one device: tests/unit/test_cache.py
def test_another_mesh_has_another_entry(tmp_path: Path) -> None:
    run_ranks(train, 2, [str(tmp_path)] * 2, "solved", (3, 3), False)
    other = run_ranks(train, 2, [str(tmp_path)] * 2, "solved and sharded", (3, 3), False)
    assert logs(other) == ["miss: other mesh and option parallel"] * 2


def later(rank: int, world: int, folder: str) -> list[str]:
    """Programs of one step, for batches of two sizes: collectives of other sizes are chosen for anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 16))
    styles = {"0": "colwise", "2": "rowwise"}
    step = ws.compile(
        train_step, parallel=ws.TensorParallel(styles), mesh="tp=2", memory_bytes=60_000, cache=folder
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in (64, 48, 64):
        step(model, optimizer, torch.ones(rows, 16))
    return step.cache_log


def test_each_program_of_a_step_has_an_entry(tmp_path: Path) -> None:
    cold, warm = (run_ranks(later, 2, str(tmp_path)) for _ in range(2))
    other = "measured machine, layouts of what is placed and captured graph"
    assert cold == [["miss: no entry", f"miss: other {other}"]] * 2
    assert warm == [["hit", "hit"], ["from rank 0", "from rank 0"]]


class Counter:
    """What a step changes in Python, and calls."""

    def __init__(self) -> None:
        self.steps, self.log = 0, list[Any]()


def effects(rank: int, world: int, folder: str) -> tuple[list[str], list[Any], int, int]:
    torch.manual_seed(0)
    model, counter = nn.Linear(4, 4), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = train_step(model, optimizer, x)
        counter.steps += 1
        ws.callback(lambda n, found: counter.log.append((n, float(found))), counter.steps, loss)
        return loss

    compiled = ws.compile(step, cache=folder)
    for number in range(4):
        compiled(torch.full((3, 4), 1.0 + rank + number))
    return compiled.cache_log, counter.log, counter.steps, compiled.captures


def test_effects_are_done_after_a_hit(tmp_path: Path) -> None:
    cold, warm = (run_ranks(effects, 2, str(tmp_path)) for _ in range(2))
    assert [one[0][0] for one in (*cold, *warm)] == ["miss: no entry", "miss: no entry", "hit", "from rank 0"]
    for before, after in zip(cold, warm, strict=True):
        assert before[1:] == after[1:]
        assert [n for n, _ in after[1]] == [1, 2, 3, 4]
    assert cold[0][1] != cold[1][1], "each rank has its own batch"


# -- ranks that fail, are late or differ -------------------------------------------------------------------------------
def fails(rank: int, world: int, folder: str, failing: int, auto: bool) -> tuple[str, str]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        if rank == failing:
            print(loss.tolist())
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(3, 3)
    options: dict[str, Any] = {"parallel": ws.Auto()} if auto else {}
    compiled = ws.compile(step, cache=folder, agree_timeout=30, **options)
    return attempt(compiled, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


@pytest.mark.crossed
@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_compile_is_an_error_on_all(failing: int, auto: bool, tmp_path: Path) -> None:
    found = run_ranks(fails, 2, str(tmp_path), failing, auto, timeout=25)
    (kind, text), (other_kind, other_text) = found[failing], found[1 - failing]
    assert (kind, other_kind) == ("CaptureError", "RankMismatchError")
    assert other_text.splitlines()[0] == f"rank {failing} could not compile its step: {text.splitlines()[0]}"
    assert not list(tmp_path.iterdir())


def first_is_absent(rank: int, world: int, folder: str) -> tuple[str, str]:
    if rank == 0:
        return "", ""
    model = nn.Linear(3, 3)
    step = ws.compile(train_step, cache=folder, agree_timeout=2)
    return attempt(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


def test_a_first_rank_that_never_comes_is_an_error(tmp_path: Path) -> None:
    _, (kind, text) = run_ranks(first_is_absent, 2, str(tmp_path), timeout=60)
    assert kind == "RankMismatchError"
    assert text.splitlines()[0] == "the first call of a step: ranks [0] did not come within 2 s"


def first_dies_later(rank: int, world: int, folder: str) -> tuple[str, str]:
    """The first rank stops between comparing programs and reading its folder."""
    if rank == 0:
        finalize.Finalizer.finish = refuse  # type: ignore[method-assign]
    model = nn.Linear(3, 3)
    step = ws.compile(train_step, cache=folder, agree_timeout=2)
    args = (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))
    try:
        return attempt(step, *args)
    except AssertionError as error:
        return type(error).__name__, str(error)


def test_a_first_rank_that_stops_before_it_looks_is_an_error(tmp_path: Path) -> None:
    (first, _), (kind, text) = run_ranks(first_dies_later, 2, str(tmp_path), timeout=60)
    assert (first, kind) == ("AssertionError", "RankMismatchError")
    assert text.splitlines()[0] == "rank 0 did not say within 2 s what an earlier start chose (cache=)"


def mixed(rank: int, world: int, folder: str, auto: bool) -> tuple[str, str]:
    """The cache is on for the first rank only; the measurement, which all take part in, is not reached."""
    model = nn.Linear(3, 3)
    options: dict[str, Any] = {"parallel": ws.Auto()} if auto else {}
    step = ws.compile(train_step, cache=folder if rank == 0 else "", agree_timeout=5, **options)
    return attempt(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3))


@pytest.mark.parametrize("auto", [False, True])
def test_ranks_of_which_one_has_a_cache(auto: bool, tmp_path: Path) -> None:
    found = run_ranks(mixed, 2, str(tmp_path), auto, timeout=60)
    assert [kind for kind, _ in found] == ["RankMismatchError"] * 2
    assert all("compile cache on" in text for _, text in found)
    assert not list(tmp_path.iterdir())
