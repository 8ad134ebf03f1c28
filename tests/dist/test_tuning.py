"""Schedules that take turns (`tune="auto"`): the same bits, the same schedule on all ranks, and what becomes of it."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.dist.scripts import start
from tests.stage_models import LENGTH, maker
from tests.stage_models import batches as batches_of_gpt
from tests.stage_models import train as train_gpt
from tests.steps import clipped, mean_square
from wholestep.graph.stage_part import part_of
from wholestep.passes.order_collectives import collectives_of
from wholestep.runtime import tuner
from wholestep.runtime.step import CompiledStep
from wholestep.runtime.trial import Round
from wholestep.tuning import TUNING

LINK = ws.Hardware.measured(link_us=100.0, link_bytes_per_us=500)  # hides much: several small buckets
WIDTH, CALLS = 128, TUNING.trial_calls + 2
STYLES = ("replicate", "zero1", "zero2", "fully_shard", "default")
FULL = pytest.mark.full


class Stopped(Exception):
    """Raised by a callback of one rank."""


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(16)])


def compiled(train_step: Any, style: str, tune: Any, **options: Any) -> CompiledStep:
    return ws.compile(train_step, parallel=ws.DataParallel(style), tune=tune, hardware=LINK, **options)


def batches(rank: int, rows: tuple[int, ...]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for call in range(CALLS):
        yield torch.randn(rows[call % len(rows)], WIDTH, generator=generator)


def second_is_fastest(turns: Any, rows: Any) -> Round:
    """In place of what was measured."""
    return {number: (1.0, 1.1) if number == 1 else (2.0, 2.1) for number in turns}


def ran(step: CompiledStep) -> tuple[str, ...]:
    assert step.local_graph is not None
    return tuple(collectives_of(step.local_graph))


def train(rank: int, world: int, style: str, rows: tuple[tuple[int, ...], ...], tune: str, forced: bool = True) -> Any:
    """The losses, the parameters after them, the collectives of each call, and what tuning says. `rows`: of the batches
    of each rank, in turn. `forced`: the second schedule is told to be the fastest.
    """
    if forced:
        tuner.merged = second_is_fastest
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mesh = "replicate=2,shard=2" if style == "hybrid" else None
    train_step = clipped if style == "zero2" else mean_square
    step = compiled(train_step, style, tune, mesh=mesh)
    losses, orders = list[float](), list[tuple[str, ...]]()
    for x in batches(rank, rows[rank]):
        losses.append(step(model, optimizer, x).item())
        orders.append(ran(step))
    params = [whole(p).tolist() for p in model.parameters()]
    taker = any(isinstance(program.run, tuner.TurnTaker) for program in step.programs[-1:])
    return losses, params, orders, step.tuning, taker


@pytest.mark.parametrize(
    ("style", "world"),
    [
        pytest.param(style, world, marks=() if (style, world) == ("zero1", 2) else FULL)
        for world in (2, 4)
        for style in (*STYLES, *(("hybrid",) if world == 4 else ()))
    ],
)
def test_numbers_are_the_same_bits_and_all_ranks_run_the_same(style: str, world: int) -> None:
    rows = ((8,),) * world
    plain, tuned = (run_ranks(train, world, style, rows, tune) for tune in ("off", "auto"))
    for (losses, params, *_), (same, also, *_) in zip(plain, tuned, strict=True):
        assert losses == same
        assert params == also
    losses_of_ranks = {tuple(one[0]) for one in tuned}
    assert len(losses_of_ranks) == world  # each has its own data
    (_, _, orders, first, taker), *others = tuned
    assert all(other[2] == orders for other in others)
    assert not taker  # a call costs what it cost before
    if not first.tried:  # sums over four ranks stay as they are
        assert (style, world) in {("replicate", 4)}
        assert str(first) == "not tuned: no other buckets give the same bits in as much memory"
        return
    assert first.chosen == 1
    ends = TUNING.calls_before_trial + 2 * TUNING.turn_calls * len(first.tried)
    assert len(set(orders[:ends])) == len(first.tried)
    assert set(orders[ends:]) == {first.tried[1].order}
    assert f"tuned, {ends} calls" in str(first)
    assert "schedule 1, stays" in str(first)


@pytest.mark.full
def test_ranks_whose_batches_differ_run_the_same_schedule_in_each_call() -> None:
    """Rank 1 gets batches of other sizes, and compiles a program for each while the schedules take turns, alone."""
    rows = ((8,), (8, 8, 8, 8, 5, 8, 6))
    plain, tuned = (run_ranks(train, 2, "fully_shard", rows, tune) for tune in ("off", "auto"))
    assert [one[:2] for one in plain] == [one[:2] for one in tuned]
    assert tuned[0][2] == tuned[1][2]
    assert tuned[0][3].chosen == tuned[1][3].chosen == 1
    assert not tuned[0][4]
    assert not tuned[1][4]


def train_on_lengths(rank: int, world: int, style: str, tune: str) -> Any:
    """Batches of another size in each call, and on each rank."""
    tuner.merged = second_is_fastest
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = compiled(mean_square, style, tune, dynamic={"x": (0, 1)})
    drawn, sizes = torch.Generator().manual_seed(100 + rank), Random(rank)
    losses, orders = list[float](), list[tuple[str, ...]]()
    for _ in range(CALLS):
        x = torch.randn(sizes.randint(2, 9), sizes.randint(2, 9), WIDTH, generator=drawn)
        losses.append(step(model, optimizer, x).item())
        orders.append(ran(step))
    params = [whole(p).tolist() for p in model.parameters()]
    return losses, params, orders, step.tuning, step.captures, step.misses


@pytest.mark.parametrize("style", ["fully_shard", pytest.param("zero1", marks=FULL)])
def test_calls_of_all_sizes_take_turns(style: str) -> None:
    plain, tuned = (run_ranks(train_on_lengths, 2, style, tune) for tune in ("off", "auto"))
    assert [one[:2] for one in plain] == [one[:2] for one in tuned]
    assert tuned[0][2] == tuned[1][2]
    for _, _, orders, tuning, captures, misses in tuned:
        assert captures == 2, misses
        assert tuning.chosen == 1, str(tuning)
        assert len(set(orders)) == len(tuning.tried) > 1
        assert orders[-1] == tuning.tried[1].order


def forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum().detach()


def train_with_interruptions(rank: int, world: int, folder: str, tune: str) -> Any:
    """A callback raises on one rank, an evaluation and a load come in between: losses and orders."""
    tuner.merged = second_is_fastest
    calls = 0

    def notice(loss: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 6 and rank == 1:
            raise Stopped

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = mean_square(model, optimizer, x)
        ws.callback(notice, loss)
        return loss

    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = compiled(train_step, "fully_shard", tune, on_nonfinite="skip")
    teacher, evaluate = layers(), compiled(forward, "replicate", "auto")
    losses, orders = list[float](), list[tuple[str, ...]]()
    for number, x in enumerate(batches(rank, (8,))):
        if number == 9:
            ws.save(folder, step)
        if number == 13:
            ws.load(folder, step)
        if number == 17:
            with torch.no_grad():
                losses.append(model(x).sum().item())
        for _ in range(1 + 4 * rank if number else 0):  # without collectives: one rank calls it more often
            losses.append(evaluate(teacher, x).item())
        try:
            losses.append(step(model, optimizer, x).item())
        except Stopped:
            losses.append(-1.0)
        orders.append(ran(step))
    return losses, orders, str(step.tuning)


@pytest.mark.full
def test_errors_evaluations_and_loads_between_turns_change_nothing(tmp_path: Path) -> None:
    plain, tuned = (run_ranks(train_with_interruptions, 2, str(tmp_path / tune), tune) for tune in ("off", "auto"))
    assert [one[0] for one in plain] == [one[0] for one in tuned]
    assert tuned[0][1] == tuned[1][1]
    assert len(set(tuned[0][1])) > 1
    assert "schedule 1, stays" in tuned[0][2]
    assert -1.0 in tuned[1][0]
    assert -1.0 not in tuned[0][0]


def train_with_cache(rank: int, world: int, folders: list[str]) -> Any:
    """Two starts of one step: what the second one runs, and says."""
    tuner.merged = second_is_fastest
    found: list[Any] = []
    for _ in range(2):
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = compiled(mean_square, "zero1", "auto", cache=folders[rank])
        xs = batches(rank, (8,))
        step(model, optimizer, next(xs))
        while not step.tuning.why_not and step.tuning.chosen is None:
            step(model, optimizer, next(xs))
        found.append((step.cache_log, str(step.tuning).splitlines()[0], ran(step)))
    return found


def test_a_later_start_runs_what_was_found(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for rank, (cold, warm) in enumerate(run_ranks(train_with_cache, 2, folders)):
        assert cold[0] == ["miss: no entry"]
        assert warm[0] == [["hit"], ["from rank 0"]][rank]
        assert cold[1].startswith("tuned, ")
        assert warm[1] == "not tuned: an earlier start did (cache=)"
        assert warm[2] == cold[2]


def train_stages(rank: int, world: int, mesh: str, tune: str, folder: str, starts: tuple[int, ...]) -> Any:
    """Of starts with a pipeline, each of so many calls: losses, parameters, the actions of the stage in each call, what
    tuning says, and the number of captures.
    """
    tuner.merged = second_is_fastest
    data = ws.DataParallel("zero1", axis="dp", semantics="global", inputs="global")
    pipeline = ws.Pipeline(micro_batches=4)
    found: list[Any] = []
    for calls in starts:
        torch.manual_seed(0)
        model, optimizer = maker(3, True, 0.0)()
        parallel = [data, pipeline] if "dp" in mesh else pipeline
        step = ws.compile(
            train_gpt, parallel=parallel, mesh=mesh, tune=tune, cache=folder, hardware=ws.Hardware.measured(),
            dynamic={"batch": (0, 1)},
        )  # fmt: skip
        losses, actions = list[float](), list[str]()
        for number, (batch,) in enumerate(batches_of_gpt(16, calls)):
            rows, length = 16 - 8 * (number % 2), LENGTH - (number % 3 == 0)
            losses.append(step(model, optimizer, {key: x[:rows, :length] for key, x in batch.items()}).item())
            assert step.local_graph is not None
            parts = [part for node in step.local_graph.graph.nodes if (part := part_of(node))]
            actions.append(" ".join(str(action) for part in parts for action in part.actions))
        with ws.whole(model, writeback=False):
            params = [p.tolist() for p in model.parameters()]
        found.append((losses, params, actions, step.tuning, step.captures))
    return found


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=2"])
def test_orders_of_blocks_take_turns(mesh: str, tmp_path: Path) -> None:
    """Batches of several sizes: all stages run one order in each call, with the bits of every other, and keep one."""
    world, calls = 4 if "dp" in mesh else 2, TUNING.calls_before_trial + 6 * TUNING.turn_calls + 3
    plain = run_ranks(train_stages, world, mesh, "off", str(tmp_path / "off"), (calls,), timeout=290)
    tuned = run_ranks(train_stages, world, mesh, "auto", str(tmp_path / "auto"), (calls, 3), timeout=290)
    for (first,), (cold, warm) in zip(plain, tuned, strict=True):
        assert cold[:2] == first[:2]
        assert warm[0] == first[0][:3]
        assert cold[4] == first[4] == 2
        assert cold[3].chosen == 1, str(cold[3])
        assert f"{cold[3].tried[1].blocks}, stays" in str(cold[3])
        assert [one.blocks for one in cold[3].tried] == [one.blocks for one in tuned[0][0][3].tried]
        assert str(warm[3]) == "not tuned: an earlier start did (cache=)"
        assert warm[2][-1] == cold[2][-1]
    assert any(cold[2][-1] != first[2][-1] for (first,), (cold, _) in zip(plain, tuned, strict=True))


def picky(local: ws.LocalGraph) -> ws.LocalGraph:
    """A pass of a user's that wants to come before sizes are decided."""
    if local.sizes is not None:
        raise ValueError("sizes are decided")
    return local


def train_with_a_picky_pass(rank: int, world: int) -> str:
    model = layers()
    step = compiled(mean_square, "zero1", "auto", passes=lambda passes: [picky, *passes])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _, x in zip(range(4), batches(rank, (8,)), strict=False):
        step(model, optimizer, x)
    return str(step.tuning)


def test_a_schedule_that_cannot_be_made_is_not_tried() -> None:
    why = "not tuned: another schedule cannot be made: sizes are decided"
    assert run_ranks(train_with_a_picky_pass, 2) == [why] * 2


SCRIPT = """
import os, signal
import torch
import wholestep as ws
from tests.dist.test_tuning import LINK, batches, layers, mean_square

model, rank = layers(), int(os.environ["RANK"])
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = ws.compile(mean_square, parallel=ws.DataParallel("zero1"), tune="auto", timeout="8s", hardware=LINK)
for number, x in enumerate(batches(rank, (8,))):
    if rank == 1 and number == 7:
        print("fails now", step.tuning, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    step(model, optimizer, x)
"""


def test_a_rank_that_dies_between_turns_is_named(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with start(script, [], 2, tmp_path) as ranks:
        assert ranks.wait([0], 60.0) == {0: 1}, ranks.output(0)
        assert "takes turns, 7 calls" in ranks.output(1)
        assert re.search(r"RankFailedError: rank 1 .*is gone: its process was killed", ranks.output(0))
