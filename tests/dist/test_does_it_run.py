"""Rows of docs/does-my-script-run.md on two ranks: each rank its own batches, gradients averaged, as with DDP."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import wholestep as ws
from tests.dist.launch import RankError, run_ranks
from tests.oracle import clone, relative, twin
from tests.scripts import ROWS
from tests.scripts.models import sync
from tests.scripts.python import gathered, reduced
from tests.scripts.row import STYLES, Row, Script, floats, pair, steps, train, update

SHARED = [row for row in ROWS if row.ranks]


def modules_of(made: Any) -> list[nn.Module]:
    """The models among what a script makes, wherever they are nested."""
    if isinstance(made, nn.Module):
        return [made]
    return [m for item in made for m in modules_of(item)] if isinstance(made, (list, tuple)) else []


def averaged(made: Any, world: int) -> None:
    """Gradients become the average over ranks as they are accumulated: what DDP computes."""

    def average(param: Tensor) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= world

    for param in {p for m in modules_of(made) for p in m.parameters() if p.requires_grad}:
        param.register_post_accumulate_grad_hook(average)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def differences(script: Script, style: str, rank: int, world: int) -> float:
    """The largest relative difference of results and parameters from the averaged eager run."""
    eager, ours = twin(script.make)
    averaged(eager, world)
    step, worst = ws.compile(script.step, parallel=ws.DataParallel(style), **script.options), 0.0
    for i, call in enumerate(script.calls(rank)):
        if script.between is not None:
            script.between(i, *eager)
            script.between(i, *ours)
        torch.manual_seed(100 * rank + i)
        expected = script.step(*eager, *clone(call))
        torch.manual_seed(100 * rank + i)
        found = step(*ours, *clone(call))
        for a, b in zip(tensors(found), tensors(expected), strict=True):
            worst = max(worst, relative(whole(a), b))
    for a, b in zip(modules_of(ours), modules_of(eager), strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            worst = max(worst, relative(whole(p), q.detach()))
    return worst


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return tensors(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return [value.detach()] if isinstance(value, Tensor) else []


def run_rows(rank: int, world: int, names: list[str], style: str) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in (row for row in SHARED if row.what in names):
            try:
                found[row.what] = differences(row.script(), style, rank, world)
            except Exception as error:
                raise AssertionError(f"{row.what} under {style}") from error
    return found


@pytest.mark.full
@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("part", range(3))
def test_rows_on_two_ranks(part: int, style: str) -> None:
    rows: list[Row] = SHARED[part::3]
    tolerances = {row.what: max(row.script().tolerance, 1e-10) for row in rows}
    for found in run_ranks(run_rows, 2, [row.what for row in rows], style):
        assert {name: d for name, d in found.items() if not d <= tolerances[name]} == {}
        assert len(found) == len(rows)


def refused(rank: int, world: int) -> list[str]:
    torch.set_default_dtype(torch.float64)
    scripts = [
        steps(reduced),
        steps(lambda m, o, x: update(o, gathered(m, x))),
        steps(functional),
        train(model=sync),
    ]
    said: list[str] = []
    for make in scripts:
        script = make()
        with pytest.raises(ws.CaptureError) as caught:
            ws.compile(script.step)(*script.make(), *script.calls(rank)[0])
        said.append(caught.value.found)
        assert "tests" in caught.value.where
    return said


def functional(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(update(optimizer, model(x).square().mean()), "sum", dist.group.WORLD)


def test_what_speaks_to_other_ranks_is_refused() -> None:
    expected = [
        "the step calls torch.distributed.all_reduce() itself",
        "the step calls torch.distributed.all_gather() itself",
        "the step calls _c10d_functional.all_reduce.default itself",
        "SyncBatchNorm averages over ranks itself",
    ]
    assert run_ranks(refused, 2) == [expected, expected]


def skipped(rank: int, world: int) -> float:
    """One rank alone has a gradient that is not finite: all skip."""
    from tests.scripts.training import scaled, with_scaler

    def calls(rank: int) -> list[tuple[Any, ...]]:
        made = floats((5, 4))(rank)
        if rank == 1:
            made[1][0][0] = torch.inf
        return made

    torch.set_default_dtype(torch.float64)
    return max(differences(Script(scaled, with_scaler, calls), style, rank, world) for style in STYLES)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    assert max(run_ranks(skipped, 2)) <= 1e-12


def test_the_comparison_can_fail() -> None:
    with pytest.raises(RankError, match="rank 0 differs"):
        run_ranks(not_averaged, 2)


def not_averaged(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    (model, optimizer), (x,) = pair()(), floats((5, 4))(rank)[0]
    other, other_optimizer = pair()()
    other.load_state_dict(model.state_dict())
    step = ws.compile(lambda m, o, x: update(o, m(x).square().mean()))
    step(model, optimizer, x)
    update(other_optimizer, other(x).square().mean())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(relative(whole(a), b.detach()) <= 1e-10 for a, b in pairs), "rank 0 differs"
