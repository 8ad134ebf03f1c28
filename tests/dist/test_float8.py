"""Float8 layers on gloo ranks against one device: scales are exact maxima, so sums alone may differ in their order."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.float8 import LAYERS, Model, batch, by_hand, train
from wholestep import DataParallel, TensorParallel

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


@pytest.mark.parametrize(
    ("recipe", "style", "mesh", "sequence"),
    [
        ("rowwise", "replicate", "dp=2", False),
        ("tensorwise", "fully_shard", "dp=2", False),
        ("tensorwise", "", "tp=2", True),
        ("rowwise", "", "tp=2", True),
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
