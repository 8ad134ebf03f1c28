"""Float8 layers on gloo ranks against one device: scales are exact maxima, so sums alone may differ in their order."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.float8 import LAYERS, Model, batch, by_hand, train
from wholestep import DataParallel, TensorParallel, _torch
from wholestep.passes import async_tensor_parallel
from wholestep.passes.fused_products import FUSED, multiply_gathered_scaled, scatter_scaled_product
from wholestep.passes.fusible_products import sites

TOLERANCE = 1e-4  # a sum in another order can move a number to the next one of float8
STEPS = 4
COLUMNS = {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
SEQUENCE = {"layers.*.norm": "sequence", **COLUMNS, "layers.*.down": RowwiseParallel(output_layouts=Shard(1))}


def _trains(rank: int, world: int, recipe: str, style: str, mesh: str, sequence: bool) -> float:
    torch.manual_seed(rank)  # the first rank's parameters are taken
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(0)
    twin = by_hand(Model(), recipe == "rowwise")
    other = torch.optim.SGD(twin.parameters(), lr=0.5)
    parts: list[DataParallel | TensorParallel] = []
    if "dp" in mesh:
        parts.append(DataParallel(style, axis="dp", semantics="global"))
    if "tp" in mesh:
        parts.append(TensorParallel(SEQUENCE if sequence else COLUMNS, axis="tp"))
    step = ws.compile(train, parallel=parts, mesh=mesh, float8=ws.Float8(recipe, LAYERS))
    ranks_of_dp = ws.Mesh(mesh).axis_size("dp") if "dp" in mesh else 1
    place = rank * ranks_of_dp // world
    worst = 0.0
    for number in range(STEPS):
        pieces = [batch(number, part) for part in range(ranks_of_dp)]
        found = step(model, optimizer, pieces[place])
        expected = train(twin, other, torch.cat(pieces))
        worst = max(worst, (whole(found) - expected).abs().item())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        worst = max(worst, (whole(a) - b).abs().max().item())
    return worst


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


FULL = pytest.mark.full
H100 = ws.Hardware.preset("dgx-h100")


@pytest.mark.parametrize(
    ("recipe", "style", "mesh", "sequence"),
    [
        ("rowwise", "replicate", "dp=2", False),
        ("tensorwise", "fully_shard", "dp=2", False),
        ("tensorwise", "", "tp=2", True),
        pytest.param("rowwise", "", "tp=2", True, marks=FULL),
        pytest.param("tensorwise", "replicate", "dp=2", False, marks=FULL),
        pytest.param("rowwise", "fully_shard", "dp=2", False, marks=FULL),
        *(
            pytest.param(recipe, *more, marks=FULL)
            for recipe in ("tensorwise", "rowwise")
            for more in (
                ("", "tp=2", False),
                ("", "tp=4", False),
                ("", "tp=4", True),
                ("fully_shard", "dp=2,tp=2", False),
                ("fully_shard", "dp=2,tp=2", True),
                ("fully_shard", "dp=4", False),
            )
        ),
    ],
)
def test_ranks_compute_what_one_device_does(recipe: str, style: str, mesh: str, sequence: bool) -> None:
    for worst in run_ranks(_trains, ws.Mesh(mesh).size, recipe, style, mesh, sequence):
        assert worst < TOLERANCE


def _trained(rank: int, recipe: Any, mesh: str, async_tp: bool) -> tuple[list[Tensor], ws.LocalGraph]:
    """Losses and parameters of two steps, and the program. A bias would stand between a product and its sum."""
    torch.manual_seed(0)
    model = Model()
    for block in model.layers:
        block.down = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parts: list[DataParallel | TensorParallel] = [TensorParallel(SEQUENCE, async_tp=async_tp)]
    if "dp" in mesh:
        parts.insert(0, DataParallel("fully_shard", axis="dp"))
    option = ws.Float8(recipe, LAYERS)
    step = ws.compile(train, parallel=parts, mesh=mesh, float8=option, schedule=ws.Schedule(H100))
    found = [step(model, optimizer, batch(number, rank // 2 if "dp" in mesh else 0)) for number in range(2)]
    assert step.local_graph is not None
    return [*found, *map(whole, model.parameters())], step.local_graph


def _fused(rank: int, world: int) -> tuple[float, set[str]]:
    plain, _ = _trained(rank, "tensorwise", "tp=2", False)
    async_tensor_parallel.faster_sites = lambda local, axes, _: sites(local.graph, axes)
    found, program = _trained(rank, "tensorwise", "tp=2", True)
    worst = max((one - other).abs().max().item() for one, other in zip(plain, found, strict=True))
    return worst, {node.target.__name__ for node in program.graph.nodes if node.target in FUSED}


def test_fused_products_without_symmetric_memory() -> None:
    """They are what GPUs run; here the collective and the product run one after the other."""
    for worst, fused in run_ranks(_fused, 2):
        assert worst < 1e-6
        assert fused == {multiply_gathered_scaled.__name__, scatter_scaled_product.__name__}


def _shapes(rank: int, world: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    group = torch.distributed.group.WORLD.group_name  # pyright: ignore[reportOptionalMemberAccess]
    with torch.device("meta"):
        shard, left = (torch.empty(16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
        factors = [torch.empty(columns, 64).to(torch.float8_e4m3fn).t() for columns in (32, 48)]
        one = torch.empty(())
    whole, products = _torch.gather_and_multiply_scaled(shard, factors, one, [one, one], torch.bfloat16, True, group)
    left = left.view(2, 16, 64)
    piece = _torch.multiply_and_scatter_scaled(left, factors[0], one, one, torch.bfloat16, False, 1, group)
    return [(tuple(made.shape), made.dtype) for made in (whole, *products, piece)]


def test_the_ops_of_symmetric_memory_take_float8() -> None:
    """Torch's own definition of them, without data: arguments and shapes."""
    for shapes in run_ranks(_shapes, 2):
        half = torch.bfloat16
        assert shapes[0] == ((32, 2, 64), torch.float8_e4m3fn)
        assert shapes[1:] == [((32, 2, 32), half), ((32, 2, 48), half), ((2, 8, 32), half)]
