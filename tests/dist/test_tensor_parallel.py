"""Tensor parallel programs on four gloo ranks: against one process, against torch's FSDP2 + TP, and checkpoints."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from tests import tp_models as models
from tests.dist.compare import counts, whole
from tests.dist.launch import run_ranks
from tests.tp_models import MLP, Llama, Normed, SimpleModel, next_token, squares, step_of
from wholestep import DataParallel, TensorParallel
from wholestep.passes.bucket import Bucket

WORLD = 4
MESH = "dp=2,tp=2"
TOLERANCE = 1e-12


def per_rank(axis: str = "dp", **options: Any) -> DataParallel:
    return DataParallel("fully_shard", axis=axis, **options)


def batch_of(part: int, step: int, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """What the ranks at place `part` of dp are given: others get other data."""
    generator = torch.Generator().manual_seed(100 * step + part + 1)
    return tuple(torch.rand(shape, generator=generator) for shape in shapes)


def largest(found: nn.Module, expected: nn.Module, grads: bool = False) -> float:
    worst = 0.0
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        pairs = [(a, b), (a.grad, b.grad)] if grads else [(a, b)]
        for x, y in pairs:
            assert x is not None, name
            assert y is not None, name
            worst = max(worst, (whole(x) - whole(y)).abs().max().item())
    return worst


# -- section C: a model of two axes ---------------------------------------------------------


def _simple(rank: int, world: int, reshard: bool, cut_rows: bool, offload: Any) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    plan = models.SIMPLE_PLAN if cut_rows else models.MLP_PLAN
    torch.manual_seed(rank)  # the first rank's parameters are taken
    model = SimpleModel()
    torch.manual_seed(0)
    twin = SimpleModel()
    optimizer, other = SGD(model.parameters(), lr=3e-5), SGD(twin.parameters(), lr=3e-5)

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.sum().backward()
        optimizer.step()
        return out.detach()

    parallel = [per_rank(reshard_after_forward=reshard), TensorParallel(plan)]
    step = ws.compile(train, parallel=parallel, mesh=MESH, keep_grads=True, offload=offload)
    shape, worst = (4, 3, 5), Counter[str]()
    for number in range(2):
        found = step(model, optimizer, *batch_of(rank // 2, number, shape))
        other.zero_grad()
        outs = [twin(*batch_of(part, number, shape)) for part in range(2)]
        (sum(out.sum() for out in outs) / 2).backward()
        other.step()
        forward = "forward" if number == 0 else "forward after the step"
        worst[forward] = (found - outs[rank // 2]).abs().max().item()
        worst["gradients"] = max(worst["gradients"], largest(model, twin, grads=True) if number == 0 else 0.0)
        assert sum(p.grad.numel() for p in model.parameters() if p.grad is not None) == 144
    worst["parameters"] = largest(model, twin)
    return dict(worst)


@pytest.mark.usual("False-True-cpu")
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("cut_rows", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_simple_model(reshard: bool, cut_rows: bool, offload: str | None) -> None:
    for found in run_ranks(_simple, WORLD, reshard, cut_rows, offload):
        assert set(found) == {"forward", "gradients", "forward after the step", "parameters"}
        assert max(found.values()) < TOLERANCE, found


def _torch_2d(rank: int, world: int, reshard: bool) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    theirs = SimpleModel()
    ours = SimpleModel()
    ours.load_state_dict(theirs.state_dict())
    parallelize_module(theirs, devices["tp"], dict(zip(("net1", "net2"), _classes(), strict=True)))
    for layer in (theirs.net1, theirs.net2, theirs.net3):
        fully_shard(layer, mesh=devices["dp"], reshard_after_forward=reshard)
    fully_shard(theirs, mesh=devices["dp"], reshard_after_forward=reshard)
    other, optimizer = AdamW(theirs.parameters(), lr=0.01), AdamW(ours.parameters(), lr=0.01)
    parallel = [per_rank(reshard_after_forward=reshard), TensorParallel(models.MLP_PLAN)]
    step = ws.compile(step_of(squares, None), parallel=parallel, mesh=MESH, keep_grads=True)
    worst, plain = Counter[str](), step_of(squares, None)
    for number in range(3):
        batch = batch_of(rank // 2, number, (2, 3, 5), (2, 3, 12))
        found, expected = step(ours, optimizer, *batch), plain(theirs, other, *batch)
        worst["loss"] = max(worst["loss"], (found - expected).abs().item())
        worst["gradients"] = max(worst["gradients"], largest(ours, theirs, grads=True))
        worst["parameters"] = max(worst["parameters"], largest(ours, theirs))
    for name, a, b in zip(dict(ours.named_parameters()), ours.parameters(), theirs.parameters(), strict=True):
        assert isinstance(a, DTensor) == isinstance(b, DTensor), name
        same = [p.is_shard() == q.is_shard() for p, q in zip(a.placements[-2:], b.placements[-2:], strict=False)]
        assert all(same) or len(b.placements) == 1, name
        worst["state"] = max(
            worst["state"],
            *(
                (whole(optimizer.state[a][k]) - whole(other.state[b][k])).abs().max().item()
                for k in ("exp_avg", "exp_avg_sq")
            ),
        )
    return dict(worst)


def _classes() -> tuple[Any, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return ColwiseParallel(), RowwiseParallel()


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.full)])
def test_against_fsdp2_and_tp_of_torch(reshard: bool) -> None:
    for found in run_ranks(_torch_2d, WORLD, reshard):
        assert set(found) == {"loss", "gradients", "parameters", "state"}
        assert max(found.values()) < TOLERANCE, found


def _counted(rank: int, world: int, mesh: str, bucket: bool) -> tuple[dict[str, int], dict[str, int], float]:
    """Collectives seen and planned of a sequence-sharded norm and MLP; whether any gradient is not a number."""
    torch.manual_seed(0)
    model = Normed()
    optimizer = SGD(model.parameters(), lr=0.1)
    parallel: Any = TensorParallel(models.NORMED_PLAN)
    parallel = [per_rank(), parallel] if "dp" in mesh else parallel

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        step_of(squares, None)(model, optimizer, x, y)

    transform = Bucket() if bucket else None
    step = ws.compile(
        train,
        parallel=parallel,
        mesh=mesh,
        keep_grads=True,
        passes=transform and (lambda passes: [transform, *passes]),
        schedule=None,
    )
    batch = batch_of(rank // 2 if "dp" in mesh else 0, 0, (4, 8, 10), (4, 8, 10))
    step(model, optimizer, *batch)
    with CommDebugMode() as mode:
        step(model, optimizer, *batch)
    assert step.local_graph is not None
    planned = {kind: total.count for kind, total in step.local_graph.collectives().items()}
    odd = sum(p.grad.isnan().sum().item() for p in model.parameters() if p.grad is not None)
    return counts(mode), planned, odd


@pytest.mark.parametrize(
    ("mesh", "bucket", "count"),
    [
        pytest.param("tp=4", False, 5, marks=pytest.mark.full),
        pytest.param(MESH, False, 11, marks=pytest.mark.full),
        (MESH, True, 7),
    ],
)
def test_collectives_of_a_sequence_sharded_norm(mesh: str, bucket: bool, count: int) -> None:
    """Along tp two gathers, two reduce-scatters and the gradient of the norm; along dp one gather and one
    reduce-scatter for each of three parameters, or for all of them.
    """
    for seen, planned, odd in run_ranks(_counted, WORLD, mesh, bucket):
        assert seen == planned
        assert sum(planned.values()) == count
        assert odd == 0


# -- every rank is given a part of its own, along tp too --------------------------------------


def _own_parts(rank: int, world: int, semantics: Any, dim: int, sizes: tuple[int, ...], reshard: bool) -> float:
    """Each rank is given `sizes[rank]` along `dim`; a tp group computes on all parts of its ranks together."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, twin = SimpleModel(), SimpleModel()
    twin.load_state_dict(model.state_dict())
    optimizer, other = SGD(model.parameters(), lr=0.05), SGD(twin.parameters(), lr=0.05)
    data = DataParallel("fully_shard", axis="dp", semantics=semantics, reshard_after_forward=reshard)
    parallel = [data, TensorParallel(models.SIMPLE_PLAN, input_dim=dim)]

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        return out.detach()

    step, worst = ws.compile(train, parallel=parallel, mesh=MESH), 0.0
    for number in range(3):
        shapes = [(n, 4, 5) if dim == 0 else (4, n, 5) for n in sizes]
        parts = [batch_of(r, number, shape)[0] for r, shape in enumerate(shapes)]
        groups = [torch.cat(parts[g : g + 2], dim) for g in (0, 2)]
        found = step(model, optimizer, parts[rank])
        if semantics == "global":
            own = train(twin, other, torch.cat(groups))
        else:
            other.zero_grad()
            losses = [twin(group) for group in groups]
            torch.stack([out.square().mean() for out in losses]).mean().backward()
            own = losses[rank // 2].detach()
            other.step()
        worst = max(worst, (found - own).abs().max().item())
    return max(worst, largest(model, twin))


@pytest.mark.usual("per_rank-0-sizes1-False", "global-1-sizes5-True")
@pytest.mark.parametrize(
    ("semantics", "dim", "sizes", "reshard"),
    [
        ("per_rank", 0, (2, 2, 2, 2), True),
        ("per_rank", 0, (3, 1, 2, 2), False),
        ("per_rank", 1, (2, 2, 2, 2), True),
        ("global", 0, (2, 2, 2, 2), False),
        ("global", 0, (3, 1, 2, 2), True),
        ("global", 1, (2, 2, 2, 2), True),
    ],
)
def test_parts_of_their_own(semantics: str, dim: int, sizes: tuple[int, ...], reshard: bool) -> None:
    assert max(run_ranks(_own_parts, WORLD, semantics, dim, sizes, reshard)) < TOLERANCE


def _own_parts_of_torch(rank: int, world: int, reshard: bool) -> float:
    """Section C: rand(2, 3, 5) seeded rank + 1; torch's ranks return their part of the result, ours the whole."""
    torch.set_default_dtype(torch.float64)
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    theirs, ours = SimpleModel(), SimpleModel()
    ours.load_state_dict(theirs.state_dict())
    parallelize_module(theirs, devices["tp"], dict(models.SIMPLE_PLAN))
    for layer in (theirs.net1, theirs.net2, theirs.net3):
        fully_shard(layer, mesh=devices["dp"], reshard_after_forward=reshard)
    fully_shard(theirs, mesh=devices["dp"], reshard_after_forward=reshard)
    other, optimizer = SGD(theirs.parameters(), lr=3e-5), SGD(ours.parameters(), lr=3e-5)
    parallel = [per_rank(reshard_after_forward=reshard), TensorParallel(models.SIMPLE_PLAN, input_dim=0)]

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, sums: Any = None) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.sum().backward()
        for param in model.net3.parameters() if sums else ():  # torch leaves what no plan names to its user
            grad: Any = param.grad
            dist.all_reduce(grad.to_local(), group=sums)
        optimizer.step()
        return out.detach()

    step, worst = ws.compile(train, parallel=parallel, mesh=MESH, keep_grads=True), 0.0
    for _ in range(2):
        x = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(rank + 1))
        found, expected = step(ours, optimizer, x), train(theirs, other, x, devices["tp"].get_group())
        start = 2 * (rank % 2)
        worst = max(worst, (found[start : start + 2] - expected).abs().max().item(), largest(ours, theirs, grads=True))
    return worst


@pytest.mark.full  # test_parts_of_their_own compares with one device
@pytest.mark.parametrize("reshard", [True, False])
def test_parts_of_their_own_against_torch(reshard: bool) -> None:
    assert max(run_ranks(_own_parts_of_torch, WORLD, reshard)) < TOLERANCE


# -- global semantics, and a whole model ----------------------------------------------------


def _llama(rank: int, world: int, mesh: str, name: str) -> float:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)
    model = Llama()
    torch.manual_seed(0)
    twin = Llama()
    optimizer, other = (
        AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True),
        AdamW(twin.parameters(), lr=0.01, eps=1e-4, fused=True),
    )
    parallel: list[Any] = [TensorParallel(getattr(models, name))]
    if "dp" in mesh:
        axes = ("rep", "dp") if "rep" in mesh else "dp"
        style = "hybrid" if "rep" in mesh else "fully_shard"
        parallel.insert(0, DataParallel(style, axis=axes, semantics="global"))
    step, plain = ws.compile(step_of(next_token), parallel=parallel, mesh=mesh), step_of(next_token)
    shards = world // 2 if "dp" in mesh else 1
    worst = 0.0
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        tokens, labels = (torch.randint(0, models.VOCAB, (4, 6), generator=generator) for _ in range(2))
        coordinate = ws.Mesh(mesh).coordinate(rank)
        part = coordinate.get("rep", 0) * 2 + coordinate.get("dp", 0) if shards > 1 else 0
        mine = [t.chunk(shards)[part] for t in (tokens, labels)]
        found, expected = step(model, optimizer, *mine), plain(twin, other, tokens, labels)
        worst = max(worst, (found - expected).abs().item())
    return max(worst, largest(model, twin))


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("tp=2", "SEQUENCE"),
        pytest.param(MESH, "SEQUENCE", marks=pytest.mark.full),
        pytest.param("tp=2,dp=2", "WHOLE_VOCABULARY", marks=pytest.mark.full),
        pytest.param("rep=2,tp=2,dp=2", "SEQUENCE", marks=pytest.mark.full),
    ],
)
def test_llama(mesh: str, name: str) -> None:
    for worst in run_ranks(_llama, ws.Mesh(mesh).size, mesh, name):
        assert worst < TOLERANCE


def _two_steps(rank: int, world: int) -> tuple[str, str]:
    """A second step finds parameters where the first put them: its layouts are read from DTensors."""
    torch.manual_seed(0)
    model = MLP(12, 33)
    optimizer = AdamW(model.parameters(), lr=0.02, fused=True)
    batch = batch_of(rank // 2, 0, (6, 12), (6, 12))
    first = ws.compile(step_of(squares), parallel=[per_rank(), TensorParallel(models.MLP_PLAN)], mesh=MESH)
    first(model, optimizer, *batch)
    second = ws.compile(step_of(squares, None), parallel=[per_rank(), TensorParallel(models.MLP_PLAN)], mesh=MESH)
    second(model, optimizer, *batch)
    assert second.plan is not None
    weight = model.net1.weight
    return second.plan.storage["net1.weight"].show((33, 12)), str(list(weight.placements))


def test_a_second_step_reads_strided_shards() -> None:
    for layout, placements in run_ranks(_two_steps, WORLD):
        assert layout == "33@tp,dp 12"
        assert placements == "[_StridedShard(dim=0, sf=2), Shard(dim=0)]"


# -- checkpoints ---------------------------------------------------------------------------


LAYOUTS: dict[str, tuple[str, Any]] = {
    "2-D": (MESH, lambda: [per_rank(), TensorParallel(models.MLP_PLAN)]),
    "other way round": ("tp=2,dp=2", lambda: [per_rank(), TensorParallel(models.MLP_PLAN)]),
    "1-D": ("dp=4", lambda: per_rank()),
    "columns": ("tp=4", lambda: TensorParallel(models.MLP_PLAN)),
    "replicated": ("dp=4", lambda: DataParallel("replicate")),
}


class Training:
    """Adam on an MLP whose sizes divide by nothing, the same batch for all ranks."""

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = MLP(12, 33)
        self.optimizer = AdamW(self.model.parameters(), lr=0.02, fused=True)
        mesh, parallel = LAYOUTS[layout]
        self.step = ws.compile(step_of(squares), parallel=parallel(), mesh=mesh)

    def run(self, *numbers: int) -> list[float]:
        return [float(self.step(self.model, self.optimizer, *batch_of(0, n, (6, 12), (6, 12)))) for n in numbers]

    def values(self) -> dict[str, Tensor]:
        out = {n: whole(p).detach().clone() for n, p in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            out |= {f"{name}/{k}": whole(v).clone() for k, v in self.optimizer.state[param].items()}
        return out


def _resharded(rank: int, world: int, folder: str, first: str, second: str) -> tuple[float, float]:
    torch.set_default_dtype(torch.float64)
    path, back = Path(folder) / "a", Path(folder) / "b"
    one = Training(first, 0)
    one.run(0, 1)
    ws.save(path, one.step)
    kept, losses = one.values(), one.run(2, 3)
    two = Training(second, 5)
    two.run(7)
    ws.load(path, two.step)
    worst = max((a - kept[n]).abs().max().item() for n, a in two.values().items())
    ws.save(back, two.step)
    again = Training(first, 9)
    again.run(8)
    ws.load(back, again.step)
    worst = max(worst, *((a - kept[n]).abs().max().item() for n, a in again.values().items()))
    found = [two.run(2, 3), again.run(2, 3)]
    dist.barrier()
    return worst, max(abs(a - b) for values in found for a, b in zip(values, losses, strict=True))


PAIRS = [("2-D", "1-D"), ("1-D", "2-D"), ("2-D", "other way round"), ("columns", "2-D"), ("2-D", "replicated")]


@pytest.mark.parametrize(
    ("first", "second"), [PAIRS[0], *(pytest.param(*pair, marks=pytest.mark.full) for pair in PAIRS[1:])]
)
def test_checkpoints_between_meshes(first: str, second: str, tmp_path: Path) -> None:
    for exact, after in run_ranks(_resharded, WORLD, str(tmp_path), first, second):
        assert exact == 0.0
        assert after < 1e-9
