"""Updates that need whole matrices, each by one rank: the bits of the whole update, what is sent, who has the state."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as Ddp
from torch.optim import Optimizer

import wholestep as ws
from tests.dist.compare import difference, whole
from tests.dist.launch import run_ranks
from tests.dist.test_optimizers import Preconditioned
from wholestep._torch import OwnedRows

SHAPES = [(12, 16), (16, 16), (24, 16), (8, 16), (16, 16)]


class Apart(nn.Module):
    """Matrices whose gradients follow from the batch alone, in whole numbers: their sums have no rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(shape) for shape in SHAPES])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        terms = [(x @ w.T * y[:, : w.shape[0]]).sum() for w in self.weights]
        return torch.stack(terms).sum()


class ByHand(Optimizer):
    """Muon as scripts have it: Newton-Schulz in the dtype of the parameters, with a momentum."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if "m" not in self.state[p]:
                self.state[p]["m"] = torch.zeros_like(p)
            m = self.state[p]["m"].mul_(0.9).add_(p.grad)
            x = m / (m.norm() + 1e-7)
            for _ in range(3):
                x = 1.5 * x - 0.5 * x @ x.T @ x
            p.mul_(1 - 0.1 * self.param_groups[0]["lr"]).add_(x, alpha=-self.param_groups[0]["lr"])


def apart(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def numbers(rank: int, call: int, *shape: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * call + rank)
    return torch.randint(-4, 5, shape, generator=seed).float()


OPTIMIZERS: dict[str, Any] = {
    "Muon": lambda params: torch.optim.Muon(params, 0.02),
    "ByHand": ByHand,
    "Preconditioned": lambda params: Preconditioned(params, at_once=False),
}


def _bits(rank: int, world: int, name: str) -> dict[str, Any]:
    """Five steps of whole updates on each rank, of updates at owners, and of one device on the batches of all ranks."""
    models = [Apart() for _ in range(3)]
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in models]
    styles = ws.DataParallel("replicate"), ws.DataParallel("zero1", owners=True)
    steps = [ws.compile(apart, parallel=style) for style in styles]
    for call in range(5):
        batches = [(numbers(r, call, 4, 16), numbers(r, call + 50, 4, 24)) for r in range(world)]
        for step, model, optimizer in zip(steps, models[:2], optimizers[:2], strict=True):
            step(model, optimizer, *batches[rank])
        optimizers[2].zero_grad()
        for x, y in batches:
            (models[2](x, y) / world).backward()
        optimizers[2].step()
    everywhere, owned, alone = (list(m.parameters()) for m in models)
    plan, program = steps[1].plan, steps[1].local_graph
    assert plan is not None
    assert program is not None
    state = [v for p in owned for v in optimizers[1].state[p].values() if isinstance(v, Tensor) and v.dim()]
    return {
        "as everywhere": [torch.equal(whole(a), whole(b)) for a, b in zip(owned, everywhere, strict=True)],
        "as one device": [difference(a, b) for a, b in zip(owned, alone, strict=True)],
        "owners": dict(plan.update_owners),
        "kinds": program.collectives(),
        "held": sum(v.to_local().numel() for v in state),  # type: ignore[attr-defined]
        "state": sum(v.numel() for v in state),
        "placed": all(any(isinstance(one, OwnedRows) for one in v.placements) for v in state),  # type: ignore[attr-defined]
    }


def _all_bits(rank: int, world: int) -> dict[str, Any]:
    return {name: _bits(rank, world, name) for name in OPTIMIZERS}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_an_update_at_its_owner_has_the_bits_of_the_whole_update(world: int) -> None:
    """Each matrix is updated by one rank, which alone has its state; parameters arrive everywhere."""
    ranks = run_ranks(_all_bits, world)
    for name in OPTIMIZERS:
        for found in (rank[name] for rank in ranks):
            assert all(found["as everywhere"])
            assert max(found["as one device"]) < 1e-6
            assert sorted(found["owners"]) == [f"weights.{i}" for i in range(len(SHAPES))]
            assert set(found["owners"].values()) == set(range(world))
            assert set(found["kinds"]) == {"all_to_all"}
            assert found["placed"]
            assert found["held"] < found["state"]
        assert sum(rank[name]["held"] for rank in ranks) == ranks[0][name]["state"]


class Two(nn.Module):
    """Matrices and vectors: the matrices are updated whole, the vectors element by element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4)
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def both(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two micro-batches, clipped by the norm of all gradients, updated by two optimizers."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    total = x.new_zeros(())
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.mse_loss(model(part), target) / 2
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
    return total


def pair(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [ByHand(matrices), torch.optim.AdamW(vectors, lr=1e-2, foreach=True)]


def batch(rank: int, call: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(rows, 12, generator=seed).double(), torch.randn(rows, 4, generator=seed).double()


def _beside_ddp(rank: int, world: int, style: str, folder: str) -> dict[str, Any]:
    """Eight steps beside DDP, with a checkpoint, states read and loaded, and an eager update in between."""
    ours, theirs = Two(), Two()
    mine, expected = pair(ours), pair(theirs)
    wrapped, worst = Ddp(theirs), 0.0
    step = ws.compile(both, parallel=ws.DataParallel(style, owners=True))  # type: ignore[arg-type]
    saved: Any = None
    for call in range(8):
        if call == 2:
            ws.save(folder, step)
            saved = copy.deepcopy((theirs.state_dict(), [o.state_dict() for o in expected]))
        if call == 4:
            ws.load(folder, step)
            theirs.load_state_dict(saved[0])
            for optimizer, kept in zip(expected, saved[1], strict=True):
                optimizer.load_state_dict(kept)
        if call == 5:
            mine[0].load_state_dict(mine[0].state_dict())
        if call == 6:
            for model, optimizers in ((ours, mine), (theirs, expected)):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 0.01)
                for optimizer in optimizers:
                    optimizer.step()
        loss = step(ours, mine, *batch(rank, call))
        worst = max(worst, difference(loss, both(wrapped, expected, *batch(rank, call))))
    apart = [difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    assert step.plan is not None
    return {"worst": max(worst, *apart), "owners": dict(step.plan.update_owners), "plan": str(step.plan)}


@pytest.mark.parametrize("style", ["zero1", pytest.param("zero2", marks=pytest.mark.full)])
def test_matrices_at_owners_beside_shards(style: str, tmp_path: Any) -> None:
    """What ops on elements update is sharded as before. Checkpoints, states and eager updates are as in any style."""
    for found in run_ranks(_beside_ddp, 2, style, str(tmp_path)):
        assert found["worst"] < 1e-12
        assert sorted(found["owners"]) == [f"layers.{i}.weight" for i in (0, 2, 4, 6)]


def at_once(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def _on_the_whole_batch(rank: int, world: int) -> float:
    """Micro-batches of one global batch, against one device."""
    ours, theirs = Two(), Two()
    mine, expected, worst = pair(ours), pair(theirs), 0.0
    style = ws.DataParallel("zero1", semantics="global", inputs="global", owners=True)
    step = ws.compile(at_once, parallel=[style, ws.MicroBatches(2)])
    for call in range(4):
        whole_batch = batch(0, call, 12)
        worst = max(worst, difference(step(ours, mine, *whole_batch), at_once(theirs, expected, *whole_batch)))
    apart = [difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    assert step.plan is not None
    assert len(step.plan.update_owners) == 4
    return max(worst, *apart)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_owners_with_micro_batches_of_a_global_batch(world: int) -> None:
    """The sum over pieces is complete before it goes to the owner."""
    assert max(run_ranks(_on_the_whole_batch, world)) < 1e-12


def _moved(rank: int, world: int, folder: str) -> list[float]:
    """How far losses are from those of the saved run: on shards, at the same owners again, and at others."""

    def trainer(style: ws.DataParallel) -> Any:
        model = Two()
        optimizers, step = pair(model), ws.compile(both, parallel=style)
        return step, lambda data: step(model, optimizers, *data)

    saved, run = trainer(ws.DataParallel("zero1", owners=True))
    for call in range(3):
        run(batch(rank, call))
    ws.save(f"{folder}/0", saved)
    expected = [run(batch(rank, call)) for call in (3, 4)]
    others = ws.DataParallel("zero1", owners={"layers.0.weight": 1, "layers.2.weight": 0})
    found: list[float] = []
    for number, style in enumerate((ws.DataParallel("fully_shard"), ws.DataParallel("zero2", owners=True), others)):
        step, run = trainer(style)
        ws.load(f"{folder}/{number}", step)
        run(batch(rank, 0))  # what was loaded before the first call is put into place by it
        ws.load(f"{folder}/{number}", step)
        ws.save(f"{folder}/{number + 1}", step)
        found.append(max(difference(run(batch(rank, c)), e) for c, e in zip((3, 4), expected, strict=True)))
    return found


@pytest.mark.full
def test_checkpoints_move_between_owners_and_shards(tmp_path: Any) -> None:
    for found in run_ranks(_moved, 2, str(tmp_path)):
        assert max(found) < 1e-12


def clipped(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


BESIDE: dict[str, tuple[str, Any]] = {
    "stages": ("dp=2,pp=2", ws.Pipeline(micro_batches=2, schedule="1f1b")),
    "tensor parallelism": (
        "dp=2,tp=2", ws.TensorParallel({"layers.0": "colwise", "layers.2": "rowwise"}, axis="tp")
    ),
}  # fmt: skip


def _beside(rank: int, world: int, kind: str, folder: str) -> tuple[float, list[str], bool]:
    """Five steps beside one device on the batch of all ranks, with a checkpoint in between."""
    mesh, other = BESIDE[kind]
    ours, theirs = Two(), Two()
    mine, expected = pair(ours), pair(theirs)
    data = ws.DataParallel("zero1", axis="dp", owners=True, semantics="global", inputs="global")
    step, worst = ws.compile(clipped, parallel=[data, other], mesh=mesh), 0.0
    for call in range(5):
        if call == 2:
            ws.save(folder, step)
            ws.load(folder, step)
        worst = max(
            worst, difference(step(ours, mine, *batch(0, call, 8)), clipped(theirs, expected, *batch(0, call, 8)))
        )
    with ws.whole(ours, writeback=False):
        worst = max(worst, *(difference(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)))
    assert step.plan is not None
    state = [v for p in ours.parameters() for v in mine[0].state.get(p, {}).values() if isinstance(v, Tensor)]
    held = sum(v.to_local().numel() for v in state)  # type: ignore[attr-defined]
    return worst, sorted(step.plan.update_owners), held < sum(v.numel() for v in state)


@pytest.mark.full
@pytest.mark.parametrize("kind", list(BESIDE))
def test_matrices_at_owners_beside_another_axis(kind: str, tmp_path: Any) -> None:
    """Each stage shares out its matrices; those that tensor parallelism shards are gathered as without owners."""
    for worst, owners, is_apart in run_ranks(_beside, 4, kind, str(tmp_path)):
        assert worst < 1e-12
        assert owners == [f"layers.{i}.weight" for i in ((0, 2, 4, 6) if kind == "stages" else (4, 6))]
        assert is_apart
