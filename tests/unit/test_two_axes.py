"""Shards over two axes of links of different speed: the outer axis carries pieces, and costs no more than one axis."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import wholestep as ws
from tests.steps import mean_square
from wholestep.cost.simulation import kind_of, whole_bytes
from wholestep.graph.nodes import is_collective

HOPPER = ws.Hardware.preset("dgx-h100")
INSIDE, NODES = 8, 4
WIDTH = 1024


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)])
    return ws.capture(mean_square, model, AdamW(model.parameters()), torch.randn(32, WIDTH))


def planned(graph: ws.TrainGraph, mesh: str, data: ws.DataParallel) -> ws.LocalGraph:
    return ws.run_passes(ws.partition(graph, ws.plan(graph, mesh, data)), ws.pipeline(HOPPER))


def whole(local: ws.LocalGraph) -> dict[tuple[str, str], int]:
    """Bytes of the buffers of collectives, by kind and axis."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for node in local.graph.nodes:
        if is_collective(node):
            found[kind_of(node), str(node.args[-1])] += whole_bytes(node)
    return found


@pytest.mark.parametrize("axis", [None, ("gpu", "node")])
@pytest.mark.parametrize("style", ["zero1", "zero2", "fully_shard", "default"])
def test_links_between_nodes_carry_pieces(graph: ws.TrainGraph, style: str, axis: tuple[str, ...] | None) -> None:
    local = planned(graph, f"node={NODES},gpu={INSIDE}", ws.DataParallel(style, axis=axis))
    carried = whole(local)
    for kind in ("all_gather", "reduce_scatter"):
        assert carried[kind, "gpu"] >= 8 * WIDTH * WIDTH * 4
        assert carried[kind, "node"] * INSIDE == carried[kind, "gpu"]


@pytest.mark.parametrize("style", ["zero1", "zero2", "fully_shard"])
def test_two_axes_take_no_longer_than_one(graph: ws.TrainGraph, style: str) -> None:
    def step_us(mesh: str) -> float:
        return ws.simulate(planned(graph, mesh, ws.DataParallel(style)), HOPPER).step_us

    # each stage starts a collective of its own, which small steps feel
    assert step_us(f"node={NODES},gpu={INSIDE}") <= 1.2 * step_us(f"dp={NODES * INSIDE}")


def test_tensor_parallel_shards_stay_outermost(graph: ws.TrainGraph) -> None:
    strategies = [ws.DataParallel("fully_shard", axis=("node", "gpu")), ws.TensorParallel({"0": "colwise"}, axis="tp")]
    plan = ws.plan(graph, "node=2,gpu=2,tp=2", strategies)
    assert plan.storage["0.weight"].dims[0] == ("tp", "gpu", "node")


# -- sizes of buckets ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def large() -> ws.TrainGraph:
    """Parameters of 1.6 GB in twelve equal layers."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 4096, bias=False) if i % 2 else nn.Linear(4096, 8192, bias=False)
                                for i in range(12)])  # fmt: skip
        return ws.capture(mean_square, model, AdamW(model.parameters()), torch.randn(1024, 4096))


def sized(graph: ws.TrainGraph, mesh: str, style: str) -> ws.LocalGraph:
    return planned(graph, mesh, ws.DataParallel(style))


@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
def test_buckets_grow_with_the_group(large: ws.TrainGraph, style: str) -> None:
    made = [sized(large, f"dp={ranks}", style) for ranks in (8, 64, 512, 4096)]
    sizes = [local.sizes.bucket_bytes for local in made if local.sizes]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 2 * sizes[0]
    assert sizes[-1] * 3 <= HOPPER.spare_bytes


@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=64", "dp=512", "node=64,gpu=8"])
def test_no_fixed_size_is_much_faster(large: ws.TrainGraph, mesh: str, style: str) -> None:
    part = ws.partition(large, ws.plan(large, mesh, ws.DataParallel(style)))

    def step_us(size: int | None) -> float:
        passes = ws.pipeline(HOPPER, schedule=ws.Schedule(HOPPER, bucket_bytes=size << 20 if size else None))
        return ws.simulate(ws.run_passes(part, passes), HOPPER).step_us

    assert step_us(None) <= 1.2 * min(step_us(16 << power) for power in range(0, 8, 2))


def test_measured_starts_do_not_depend_on_ranks(large: ws.TrainGraph) -> None:
    cpu = ws.Hardware.default()
    made = [ws.partition(large, ws.plan(large, mesh, ws.DataParallel("zero1"))) for mesh in ("dp=4", "dp=512")]
    sizes = [ws.run_passes(local, ws.pipeline(cpu)).sizes for local in made]
    assert [one.bucket_bytes for one in sizes if one] == [cpu.bucket_bytes] * 2
