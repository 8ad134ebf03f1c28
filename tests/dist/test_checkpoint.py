"""ws.save and ws.load on several ranks: exact on the same ranks, resharded to any others, refused by all or by none."""

import copy
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import RankError, run_ranks
from tests.dist.scripts import start
from wholestep.checkpoint import durable

ROWS = 12
KILLED = r"exit code -9|Connection|closed"  # the rank itself, or what its peer saw of it
STYLES = ("replicate", "zero1", "zero2", "fully_shard")
MESHES = {"hybrid": {2: "r=1,s=2", 4: "r=2,s=2"}}


def make(optimizer: str, noisy: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sizes that divide by nothing, fewer rows than ranks, tied weights; `noisy` adds per-rank buffers and dropout."""
    between: list[nn.Module] = [nn.BatchNorm1d(11), nn.Dropout(0.4)] if noisy else [nn.LayerNorm(11)]
    model = nn.Sequential(nn.Linear(5, 11), *between, nn.Linear(11, 11), nn.Linear(11, 11), nn.Linear(11, 3))
    model[-2].weight = model[-3].weight
    groups = [
        {"params": model[0].parameters()},
        {"params": [p for m in model[1:-1] for p in m.parameters()], "lr": 0.03},
    ]
    groups.append({"params": model[-1].parameters(), "weight_decay": 0.1})
    groups[1]["params"] = list(dict.fromkeys(groups[1]["params"]))
    if optimizer == "adamw":
        return model, torch.optim.AdamW(groups, lr=0.02)
    return model, torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


class Training:
    """One model trained under a style; batches are this rank's rows of one batch for all."""

    def __init__(self, style: Any, optimizer: str, noisy: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model, self.optimizer = make(optimizer, noisy)
        mesh = MESHES.get(style, {}).get(dist.get_world_size())
        self.step = ws.compile(train_step, parallel=ws.DataParallel(style), mesh=mesh)
        torch.manual_seed(seed + 1 + dist.get_rank())

    def train(self, numbers: Iterator[int] | range) -> list[float]:
        return [self.step(self.model, self.optimizer, *batch(i)).item() for i in numbers]

    def state(self) -> dict[str, Any]:
        """Everything, whole."""
        names = {param: name for name, param in self.model.named_parameters()}
        found = dict(self.model.state_dict())
        for param, entry in self.optimizer.state.items():
            found |= {f"{names[param]}/{key}": value for key, value in entry.items()}
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
        return {k: v.detach().clone() for k, v in whole.items()}


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    x, y = torch.randn(ROWS, 5, generator=draw), torch.randn(ROWS, 3, generator=draw)
    rank, world = dist.get_rank(), dist.get_world_size()
    return x.chunk(world)[rank], y.chunk(world)[rank]


def equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    wrong = {n: (one[n], other[n]) for n in one if not torch.equal(one[n], other[n])}
    assert not wrong, wrong


# -- the same ranks --------------------------------------------------------------------------


def _continue(rank: int, world: int, style: str, optimizer: str, root: str) -> None:
    first = Training(style, optimizer, noisy=True)
    first.train(range(3))
    ws.save(root, first.step)
    expected, state = first.train(range(3, 6)), first.state()

    fresh = Training(style, optimizer, noisy=True, seed=5)
    assert ws.load(root, fresh.step).number == 3
    assert fresh.train(range(3, 6)) == expected
    equal(fresh.state(), state)
    assert fresh.step.calls == 6
    ws.load(root, fresh.step)  # now it was called
    assert fresh.train(range(3, 6)) == expected
    equal(fresh.state(), state)
    assert len(set(everywhere(expected[0]))) == world, "ranks have different data"
    assert world == 1 or not torch.equal(*everywhere(fresh.state()["1.running_mean"])[:2]), "and buffers"


def everywhere(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s == "fully_shard" else pytest.mark.full) for s in STYLES]
)
def test_continues_exactly_on_two(style: str, tmp_path: Path) -> None:
    run_ranks(_continue, 2, style, "sgd" if style in ("zero1", "fully_shard") else "adamw", str(tmp_path))


@pytest.mark.full
def test_continues_exactly_on_four(tmp_path: Path) -> None:
    run_ranks(_continue, 4, "hybrid", "adamw", str(tmp_path))


# -- other ranks, other styles -----------------------------------------------------------------


def _save(rank: int, world: int, style: str, optimizer: str, root: str) -> tuple[list[float], dict[str, Any]]:
    training = Training(style, optimizer)
    training.train(range(3))
    ws.save(root, training.step, extra={"epoch": 3})
    return training.state(), everywhere(training.train(range(3, 6)))


def _load(rank: int, world: int, style: str, optimizer: str, root: str, into: str, saved: Any, losses: Any) -> None:
    training = Training(style, optimizer, seed=5)
    if into == "called step":
        training.train(range(1))
    given = {"model": training.model, "optimizer": training.optimizer} if into == "model" else {"step": training.step}
    found = ws.load(root, **given)
    assert (found.number, found.extra) == (3, {"epoch": 3})
    if into == "step":
        # the first call restores and then trains: look in between
        states: list[Any] = []
        training.step.on_placed.append(lambda step: states.append(training.state()))
        mine = training.train(range(3, 4))
        equal(states[0], saved)
    else:
        equal(training.state(), saved)
        mine = training.train(range(3, 4))
    mine += training.train(range(4, 6))
    # the mean over all rows is the same on any number of ranks
    ours = torch.tensor(everywhere(mine)).mean(0)
    torch.testing.assert_close(ours, torch.tensor(losses).mean(0), rtol=1e-4, atol=1e-6)


TARGETS = [
    (3, "replicate", "step"), (1, "fully_shard", "called step"), (4, "hybrid", "step"), (2, "zero1", "called step"),
    (3, "zero2", "model"), (2, "zero1", "step"), (4, "fully_shard", "called step"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "style", "optimizer", "targets"),
    [
        (2, "fully_shard", "adamw", [target for target in TARGETS if target[0] <= 2]),
        pytest.param(
            2, "fully_shard", "adamw", [target for target in TARGETS if target[0] > 2], marks=pytest.mark.full
        ),
        pytest.param(4, "hybrid", "sgd", TARGETS[3:5], marks=pytest.mark.full),
        pytest.param(3, "zero1", "adamw", TARGETS[1:3], marks=pytest.mark.full),
    ],
)
def test_loads_on_any_ranks_in_any_style(world: int, style: str, optimizer: str, targets: Any, tmp_path: Path) -> None:
    root = str(tmp_path)
    saved, losses = run_ranks(_save, world, style, optimizer, root)[0]
    for ranks, other, into in targets:
        run_ranks(_load, ranks, other, optimizer, root, into, saved, losses)


# -- meshes with tensor parallelism ------------------------------------------------------------

CUT = {"0": "colwise", "2": "rowwise"}


def _outer_first(given: Any, have: ws.Layout, mesh: ws.Mesh, axes: tuple[str, ...]) -> tuple[ws.Layout, ws.Layout]:
    """`fully_shard` with the axes in the order in which checkpoints were written once."""
    layout = ws.Layout((axes, *have.dims[1:])) if have.dims else have
    return layout, layout


JOBS: dict[str, tuple[int, str, Any]] = {
    "tp": (2, "tp=2", ws.TensorParallel(CUT, axis="tp")),
    "2-D": (4, "dp=2,tp=2", [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel(CUT, axis="tp")]),
    "2-D zero1": (4, "tp=2,dp=2", [ws.DataParallel("zero1", axis="dp"), ws.TensorParallel(CUT, axis="tp")]),
    "hybrid": (4, "r=2,s=2", ws.DataParallel("hybrid")),
    "fully_shard": (3, "dp=3", ws.DataParallel("fully_shard")),
    "two axes": (4, "node=2,gpu=2", ws.DataParallel("fully_shard")),  # a part of it has no rows
    "outer first": (4, "node=2,gpu=2", ws.DataParallel(_outer_first)),
    "two axes zero1": (4, "node=2,gpu=2", ws.DataParallel("zero1")),
}


TARGETS = {"2-D": ["tp"], "outer first": ["two axes"]}


def _job(name: str, seed: int) -> tuple[Any, nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    """A step that was called twice, with its arguments. Ranks along tp have the same data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    _, mesh, parallel = JOBS[name]
    step = ws.compile(train_step, parallel=parallel, mesh=mesh)
    at = ws.Mesh(mesh).coordinate(dist.get_rank())
    torch.manual_seed(sum((i + 1) * at[axis] for i, axis in enumerate(sorted(at)) if axis != "tp"))
    args = model, optimizer, torch.randn(4, 5), torch.randn(4, 3)
    step(*args)
    step(*args)
    return step, *args


def _full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, param in model.named_parameters():
        states = optimizer.state[param].items()
        found |= {f"{name}/{key}": value for key, value in states}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def _save_job(rank: int, world: int, name: str, root: str) -> Any:
    step, model, optimizer, x, y = _job(name, 0)
    ws.save(root, step)
    state = _full(model, optimizer)
    losses = [step(model, optimizer, x, y).item() for _ in range(2)]
    again, *others = _job(name, 1)
    ws.load(root, again)
    equal(_full(*others[:2]), state)
    assert [again(*others).item() for _ in range(2)] == losses
    return state


def _load_job(rank: int, world: int, name: str, root: str, state: Any) -> None:
    step, model, optimizer, *_ = _job(name, 1)
    ws.load(root, step)
    equal(_full(model, optimizer), state)


@pytest.mark.parametrize("source", [pytest.param(n, marks=() if n in TARGETS else pytest.mark.full) for n in JOBS])
def test_any_mesh_loads_what_another_saved(source: str, tmp_path: Path) -> None:
    state = run_ranks(_save_job, JOBS[source][0], source, str(tmp_path))[0]
    for target in TARGETS.get(source, JOBS):
        run_ranks(_load_job, JOBS[target][0], target, str(tmp_path), state)


# -- objects beside the step -------------------------------------------------------------------


class Place:
    """Stands somewhere in its own data, as a data loader does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _save_places(rank: int, world: int, root: str) -> list[int]:
    model = nn.Linear(3, 3)
    torch.manual_seed(0)
    ws.save(root, model=model, number=1, stateful={"loader": Place(10 + rank), "epoch": Place(7)})
    loader, epoch = Place(0), Place(0)
    ws.load(root, model=model, stateful={"loader": loader, "epoch": epoch})
    return [loader.at, epoch.at]


def _load_places(rank: int, world: int, root: str) -> tuple[int, str]:
    epoch = Place(0)
    ws.load(root, stateful={"epoch": epoch})
    return epoch.at, refusal(lambda: ws.load(root, stateful={"loader": Place(0)}))


def test_each_rank_gets_its_own_state_and_no_other_does(tmp_path: Path) -> None:
    assert run_ranks(_save_places, 3, str(tmp_path)) == [[10, 7], [11, 7], [12, 7]]
    assert (
        run_ranks(_load_places, 2, str(tmp_path))
        == [
            (
                7,
                "'loader' has a state of its own on ranks [1, 2] of 3\n"
                "  needed: 3 ranks: a rank of 2 has no part in another job's rank\n"
                "  next: leave out 'loader' and place it anew",
            )
        ]
        * 2
    )


RESUMED = """
import os, sys
import torch
import wholestep as ws
from tests.dist.test_checkpoint import Place
from tests.steps import mean_square

folder, rank = sys.argv[1], int(os.environ["RANK"])
model = torch.nn.Linear(3, 3)
step = ws.compile(mean_square, parallel=ws.DataParallel("replicate"))
place = Place(10 + rank)
if not os.path.exists(folder):
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.full((2, 3), 1.0 + rank))
    ws.save(folder, step, stateful={"loader": place})
else:
    place.at = 0
    ws.load(folder, step, stateful={"loader": place})
    print("stands at", place.at)
"""


def test_a_load_before_anything_else_joins_the_job(tmp_path: Path) -> None:
    """Ranks that have no process group yet are those of the launcher all the same."""
    script = tmp_path / "script.py"
    script.write_text(RESUMED)
    for run in ("first", "again"):
        (tmp_path / run).mkdir()
        with start(script, [str(tmp_path / "saved")], 2, tmp_path / run) as ranks:
            assert ranks.wait([0, 1], 60.0) == {0: 0, 1: 0}, [ranks.output(rank) for rank in (0, 1)]
            said = [re.findall(r"stands at (\d+)", ranks.output(rank)) for rank in (0, 1)]
    assert said == [["10"], ["11"]]


# -- two jobs in one folder --------------------------------------------------------------------


def _compete(rank: int, world: int, root: str, seconds: float) -> dict[str, int]:
    """Save and load as fast as possible; counts what happened. No load may meet damage."""
    torch.manual_seed(0)
    model, found = nn.Linear(8, 8), {"saved": 0, "refused": 0, "loaded": 0}
    end = time.monotonic() + seconds
    while everywhere(time.monotonic() < end)[0]:
        try:
            ws.save(root, model=model, number=found["saved"])
            found["saved"] += 1
        except ws.CheckpointError as error:
            if not error.found.startswith(f"another job saves to {root}: process "):
                raise
            found["refused"] += 1
        if everywhere((Path(root) / "latest").exists())[0]:
            ws.load(root, model=model, strict=True)
            found["loaded"] += 1
    return found


def test_two_jobs_in_one_folder(tmp_path: Path) -> None:
    jobs: list[Any] = [None, None]

    def start(number: int) -> None:
        jobs[number] = run_ranks(_compete, 2, str(tmp_path), 4.0)[0]

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loser, winner = sorted(jobs, key=lambda found: found["saved"])  # the loser may save once the winner has ended
    assert min(loser["refused"], loser["loaded"], winner["saved"], winner["loaded"]) > 0
    assert all(ws.load(folder).number >= 0 for folder in tmp_path.glob("step-*"))


# -- all or none -------------------------------------------------------------------------------


def refusal(work: Any) -> str:
    with pytest.raises(ws.CheckpointError) as error:
        work()
    return str(error.value)


def _refuse(rank: int, world: int, root: str) -> list[str]:
    training = Training("fully_shard", "adamw")
    training.train(range(2))
    folder = ws.save(root, training.step)
    training.train(range(2, 3))
    newer = ws.save(root, training.step)
    state = training.state()
    texts: list[str] = []
    for name in ("__0_0.distcp", f"__{world - 1}_0.distcp", "values.pt", "manifest.json"):
        dist.barrier()
        good = (newer / name).read_bytes()
        dist.barrier()
        if rank == 0:
            os.truncate(newer / name, 20)
        dist.barrier()
        texts.append(refusal(lambda: ws.load(root, training.step, strict=True)))
        equal(training.state(), state)
        dist.barrier()
        if rank == 0:
            (newer / name).write_bytes(good)
    dist.barrier()
    # a model that is another one on one rank only
    other = Training("fully_shard", "adamw")
    if rank == 1:
        other.model.add_module("more", nn.Linear(2, 2))
    before = copy.deepcopy(other.model.state_dict())
    texts.append(refusal(lambda: ws.load(root, model=other.model)))
    equal(before, other.model.state_dict())
    texts.append(refusal(lambda: ws.load(f"{root}/none", training.step)))
    # a rank whose disk is full
    write = durable.ChecksummedFile.write
    if rank == 1:
        durable.ChecksummedFile.write = full
    texts.append(refusal(lambda: ws.save(root, training.step, number=9)))
    durable.ChecksummedFile.write = write
    dist.barrier()  # the first rank removes what was written
    assert sorted(path.name for path in Path(root).glob("step*")) == ["step-00000002", "step-00000003"]
    assert ws.load(root, training.step).number == 3
    assert ws.load(folder, training.step).number == 2
    return texts


def full(file: durable.ChecksummedFile, data: Any) -> int:
    file.failure = OSError(28, "No space left on device")
    raise file.failure


def test_all_ranks_refuse_alike(tmp_path: Path) -> None:
    answers = run_ranks(_refuse, 3, str(tmp_path))
    assert answers[0] == answers[1] == answers[2]
    first, last, values, manifest, model, none, full = (text.replace(str(tmp_path), "ROOT") for text in answers[0])
    found = "checkpoint ROOT/step-00000003 is damaged: __0_0.distcp has 20 bytes, it had "
    assert first.startswith(found)
    for text in (first, last, values, manifest):
        assert "checkpoint ROOT/step-00000003 is damaged: " in text
        assert text.endswith("\n  next: load 'ROOT/step-00000002', which is intact")
    assert model.startswith(
        "on rank 1, checkpoint ROOT/step-00000003 does not fit:\n    more.weight: float32[2, 2] here"
    )
    assert none.startswith("ROOT/none does not exist\n")
    assert re.match(
        r"on rank 1, checkpoint ROOT/step-00000009 could not be written: the disk is full \(\d+ MiB free", full
    )


# -- killed --------------------------------------------------------------------------------------


def _save_and_die(rank: int, world: int, root: str, operation: str, count: int) -> None:
    training = Training("fully_shard", "adamw")
    training.train(range(1))
    ws.save(root, training.step)
    training.train(range(1, 2))
    real, left = getattr(os, operation), [count]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, operation, deadly)
    ws.save(root, training.step)


def _loads(rank: int, world: int, root: str) -> int:
    training = Training("replicate", "adamw")
    found = ws.load(root, training.step)
    training.train(range(1))
    ws.save(root, training.step)
    return found.number


@pytest.mark.parametrize(
    ("operation", "count", "number"),
    [
        ("fsync", 4, 1),
        ("replace", 2, 2),
        pytest.param("fsync", 1, 1, marks=pytest.mark.full),
        pytest.param("replace", 1, 1, marks=pytest.mark.full),
    ],
)
def test_killed_while_saving(operation: str, count: int, number: int, tmp_path: Path) -> None:
    """Both ranks are killed in the middle of the second save; the first one, or the whole second, is there."""
    with pytest.raises(RankError, match=KILLED):
        run_ranks(_save_and_die, 2, str(tmp_path), operation, count)
    assert run_ranks(_loads, 1, str(tmp_path)) == [number]
    assert not list(tmp_path.glob("*.tmp"))


def _save_until_killed(rank: int, world: int, root: str, seconds: float) -> None:
    training = Training("fully_shard", "adamw")
    training.train(range(1))
    ws.save(root, training.step)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        training.train(range(1))
        ws.save(root, training.step)


@pytest.mark.parametrize("seconds", [0.2, *(pytest.param(s, marks=pytest.mark.full) for s in (0.05, 0.35))])
def test_killed_at_some_moment(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=KILLED):
        run_ranks(_save_until_killed, 2, str(tmp_path), seconds)
    assert run_ranks(_loads, 1, str(tmp_path))[0] >= 1


class Counted(nn.Module):
    """Keeps a number that differs between ranks."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.w, self.kept = nn.Parameter(torch.ones(3)), kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def _keeps(rank: int, world: int, root: str, kept: int) -> int:
    model = Counted(kept + rank)
    if kept:
        ws.save(root, model=model, number=1)
    else:
        ws.load(root, model=model)
    return model.kept


def test_what_modules_keep_is_each_ranks_own(tmp_path: Path) -> None:
    """In a job of another size it is the first rank's, as buffers are."""
    run_ranks(_keeps, 3, str(tmp_path), 10)
    assert run_ranks(_keeps, 3, str(tmp_path), 0) == [10, 11, 12]
    assert run_ranks(_keeps, 2, str(tmp_path), 0) == [10, 10]
