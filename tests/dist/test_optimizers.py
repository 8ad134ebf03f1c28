"""Optimizers on two ranks against DDP: state of shapes of its own, and every kind there is."""

import copy
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from tests.dist.compare import difference
from tests.dist.launch import run_ranks
from tests.optimizers import Kind, build, data, of_others, of_torch
from tests.steps import mse as train
from tests.unit.test_optimizer_state import ASKS, with_state

STYLES = ("replicate", "zero1", "zero2", "fully_shard")


def _data(rank: int, call: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank)).double()


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3)).double()


class Preconditioned(Optimizer):
    """Keeps matrices of rows by rows and columns by columns, a vector of rows and a count, as Shampoo does, in a list
    whose items are replaced and in a tuple that is.
    """

    def __init__(self, params: Any, at_once: bool) -> None:
        super().__init__(params, {"lr": 0.005})
        for p in self.param_groups[0]["params"] if at_once else ():
            self._begin(p)

    def _begin(self, p: Tensor) -> None:
        rows, columns = p.shape[0], p[0].numel()
        self.state[p] = {
            "m": torch.zeros_like(p), "LR": [p.new_zeros(rows, rows), p.new_zeros(columns, columns)],
            "rows": p.new_zeros(rows), "first": (torch.zeros_like(p), {"count": p.new_zeros(())}),
        }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self._begin(p)
                state, grad = self.state[p], p.grad.reshape(p.shape[0], -1)
                left, right = (torch.eye(one.shape[0], dtype=p.dtype) for one in state["LR"])
                state["LR"][0] = state["LR"][0] * 0.9 + grad @ grad.T * 0.1
                state["LR"][1].mul_(0.9).add_(grad.T @ grad, alpha=0.1)
                state["rows"].add_(grad.square().sum(1))
                state["first"] = (state["first"][0] * 0.5 + p.grad, {"count": state["first"][1]["count"] + 1})
                state["m"].mul_(0.9).add_(p.grad)
                update = torch.linalg.solve(state["LR"][0] + 0.1 * left, state["m"].reshape(grad.shape))
                update = update @ (state["LR"][1] + right)
                update = update / (state["rows"].sqrt() + state["first"][1]["count"]).unsqueeze(1)
                p.add_(update.reshape(p.shape) + 0.01 * state["first"][0], alpha=-group["lr"])


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a state, by the names of its entries."""
    if isinstance(value, Tensor):
        return [value]
    return (
        [one for _, item in sorted(value.items()) for one in _tensors(item)]
        if isinstance(value, dict)
        else [one for item in value for one in _tensors(item)]
    )


def _own_shapes(rank: int, world: int, style: str, at_once: bool, folder: str) -> dict[str, Any]:
    """Five steps with states read and loaded, and a checkpoint, in between."""
    ours, theirs = _mlp(), _mlp()
    wrapped, losses = Ddp(theirs), 0.0
    optimizers = [Preconditioned(m.parameters(), at_once) for m in (ours, theirs)]
    step = ws.compile(train, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
    for call in range(5):
        if call == 2:
            optimizers[0].load_state_dict(optimizers[0].state_dict())
        if call == 3:
            ws.save(folder, step)
            saved = copy.deepcopy((theirs.state_dict(), optimizers[1].state_dict()))
        if call == 4:
            before = [difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
            assert max(before) < 1e-12
            ws.load(folder, step)
            theirs.load_state_dict(saved[0])
            optimizers[1].load_state_dict(saved[1])
        batch = _data(rank, call, 4 + rank, 6), _data(rank, call + 50, 4 + rank, 3)
        losses = max(losses, difference(step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)))
    worst = losses
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        mine, expected = (o.state[p] for o, p in zip(optimizers, (a, b), strict=True))
        assert list(mine) == list(expected), (list(mine), list(expected))
        pairs = [*zip(_tensors(mine), _tensors(expected), strict=True)]
        assert len(pairs) == 6
        worst = max(worst, difference(a, b), *(difference(x, y) for x, y in pairs))
    held = optimizers[0].state[next(iter(ours.parameters()))]["m"]
    return {"worst": worst, "captures": step.captures, "held": getattr(held, "_local_tensor", held).shape[0]}


@pytest.mark.crossed
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=() if s in ("zero1", "fully_shard") else pytest.mark.full) for s in STYLES]
)
def test_state_of_shapes_of_its_own(style: str, at_once: bool, tmp_path: Any) -> None:
    """What has the parameter's shape rests as the style says, all else whole."""
    for found in run_ranks(_own_shapes, 2, style, at_once, str(tmp_path)):
        assert found["worst"] < 1e-12
        assert found["captures"] == (1 if at_once else 2)
        assert found["held"] == (8 if style == "replicate" else 4)


def _matrices() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((16, 24), (24, 33), (33, 8))]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def _muon(rank: int, world: int, style: str, nesterov: bool) -> dict[str, float]:
    ours, theirs = _matrices(), _matrices()
    wrapped, losses = Ddp(theirs), 0.0
    optimizers = [torch.optim.Muon(m.parameters(), 0.02, nesterov=nesterov) for m in (ours, theirs)]
    step = ws.compile(train, parallel=ws.DataParallel(style))  # type: ignore[arg-type]
    for call in range(5):
        batch = _data(rank, call, 4, 16).float(), _data(rank, call + 50, 4, 8).float()
        losses = max(losses, difference(step(ours, optimizers[0], *batch), train(wrapped, optimizers[1], *batch)))
    params = max(difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    return {"losses": losses, "params": params}


def _muons(rank: int, world: int, first: bool) -> dict[str, dict[str, float]]:
    return {style: _muon(rank, world, style, number % 2 == first) for number, style in enumerate(STYLES)}


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.full)])
def test_orthogonalized_updates_are_computed_on_whole_matrices(first: bool) -> None:
    """Newton-Schulz in bfloat16 on pieces differs by 2e-3 after five steps, on whole matrices not at all. Every other
    style has Nesterov's momentum.
    """
    for found in run_ranks(_muons, 2, first):
        assert {key: one for key, one in found.items() if max(one.values()) > 1e-6} == {}


SAMPLE = [
    "SGD(momentum=0.9,dampening=0.3,foreach=True)", "AdamW(fused=True)", "NAdam(foreach=True)", "RAdam(foreach=False)",
    "ASGD(t0=3,foreach=True)", "Rprop(foreach=False)", "RMSprop(centered=True,foreach=True)",
    "lion_pytorch.Lion", "SM3", "CAME", "LARS", "Shampoo", "AdamWScheduleFree", "SGDScheduleFree",
]  # fmt: skip
USUAL = SAMPLE[::2]


def _kinds(names: list[str]) -> list[Kind]:
    """Those that are installed."""
    found = [k for k in (*of_torch(), *of_others()) if k.name in names]
    assert len(found) == len(names)
    return [k for k in found if importlib.util.find_spec(k.library)]


def _sampled(rank: int, world: int, style: Any, names: list[str]) -> dict[str, float]:
    """Differences to DDP after six calls, relative to the largest parameter."""
    found: dict[str, float] = {}
    for kind in _kinds(names):
        (ours, mine), (theirs, expected) = build(kind, torch.float64), build(kind, torch.float64)
        wrapped, worst = Ddp(theirs), 0.0
        step = ws.compile(train, parallel=ws.DataParallel(style))
        for call in range(6):
            batch = data(2 * call + rank, torch.float64)
            worst = max(worst, difference(step(ours, mine, *batch), train(wrapped, expected, *batch)))
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            worst = max(worst, difference(a, b) / b.abs().max().item())
        found[kind.name] = worst
    return found


@pytest.mark.parametrize(
    ("style", "names"),
    [("fully_shard", USUAL), *(pytest.param(s, SAMPLE, marks=pytest.mark.full) for s in ("replicate", "fully_shard"))],
)
def test_a_sample_of_all_optimizers(style: str, names: list[str]) -> None:
    """The sums of gradients over ranks round otherwise than DDP's, by 1e-16."""
    for found in run_ranks(_sampled, 2, style, names, timeout=300):
        assert len(found) >= len(names) // 2
        assert {key: worst for key, worst in found.items() if not worst < 1e-10} == {}


def _asked(rank: int, world: int) -> None:
    """The batches of both ranks, in one, are the oracle's."""
    for name, asks in itertools.product(("adamw", "momentum"), ("in", "sam")):
        (ours, mine), (theirs, expected) = with_state(name), with_state(name)
        step = ws.compile(ASKS[asks], parallel=ws.DataParallel("fully_shard", semantics="global"))
        for call in range(3):
            parts = [_data(number, call, 4, 3) for number in range(world)]
            loss = ASKS[asks](theirs, expected, torch.cat(parts))
            torch.testing.assert_close(step(ours, mine, parts[rank]), loss, rtol=1e-12, atol=1e-12)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor().detach(), b.detach(), rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]


def test_a_step_asks_for_state_before_there_is_some() -> None:
    run_ranks(_asked, 2)
