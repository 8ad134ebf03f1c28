"""Shards and sums over two axes of links of different speed: the outer axis carries pieces, and costs no more than one
axis.
"""

from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from tests.simulate import Simulation
from tests.steps import clipped, mean_square
from wholestep.capture import Capture, capture_step
from wholestep.cost.simulation import kind_of, whole_bytes
from wholestep.graph.nodes import is_collective

HOPPER = ws.Hardware.preset("dgx-h100")
INSIDE, NODES = 8, 4
WIDTH = 1024
FACTOR = 1.1  # each stage starts a collective of its own; 0.96 to 1.08 were seen
SHARES = ws.Hardware.measured(link_us=1e-6, launch_us=1e-6)  # bytes count alone
STARTS = ws.Hardware.measured(link_us=1e9)  # the number of collectives counts alone


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)])
    return ws.capture(mean_square, model, AdamW(model.parameters()), torch.randn(32, WIDTH))


@pytest.fixture(scope="module")
def bulky() -> ws.TrainGraph:
    """A step in which bytes count, and not how many collectives start."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False) for _ in range(8)])
        return ws.capture(mean_square, model, AdamW(model.parameters()), torch.randn(2048, 4 * WIDTH))


def planned(graph: ws.TrainGraph, mesh: str, data: ws.DataParallel, hardware: ws.Hardware = HOPPER) -> ws.LocalGraph:
    return ws.run_passes(
        ws.partition(graph, ws.plan(graph, mesh, data, hardware=hardware)), ws.default_passes(hardware)
    )


def whole(local: ws.LocalGraph) -> dict[tuple[str, str], int]:
    """Bytes of the buffers of collectives, by kind and axis."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for node in local.graph.nodes:
        if is_collective(node):
            found[kind_of(node), str(node.args[-1])] += whole_bytes(node)
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("axis", [None, ("gpu", "node")])
@pytest.mark.parametrize("style", ["zero1", "zero2", "fully_shard"])
def test_links_between_nodes_carry_pieces(graph: ws.TrainGraph, style: str, axis: tuple[str, ...] | None) -> None:
    local = planned(graph, f"node={NODES},gpu={INSIDE}", ws.DataParallel(style, axis=axis))
    carried = whole(local)
    for kind in ("all_gather", "reduce_scatter"):
        assert carried[kind, "gpu"] >= 8 * WIDTH * WIDTH * 4
        assert carried[kind, "node"] * INSIDE == carried[kind, "gpu"]


@pytest.mark.crossed
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-h100+ethernet-100"])
@pytest.mark.parametrize("style", ["replicate", "zero1", "zero2", "fully_shard"])
def test_two_axes_take_as_long_as_one(bulky: ws.TrainGraph, style: str, name: str) -> None:
    """The ranks and links are the same: how they are named changes little, in either direction."""
    hardware = ws.Hardware.preset(name)

    def step_us(mesh: str) -> float:
        return ws.simulate(planned(bulky, mesh, ws.DataParallel(style), hardware), hardware).step_us

    two, one = step_us(f"node={NODES},gpu={INSIDE}"), step_us(f"dp={NODES * INSIDE}")
    assert two <= FACTOR * one
    assert one <= FACTOR * two


# -- sums ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [f"node={NODES},gpu={INSIDE}", f"rack=2,node={NODES},gpu={INSIDE}"])
def test_sums_between_nodes_carry_pieces(graph: ws.TrainGraph, mesh: str) -> None:
    """Reduce-scattered inside a node, summed between nodes, gathered inside: buckets keep the stages together."""
    local = planned(graph, mesh, ws.DataParallel("replicate"))
    carried, everything = whole(local), 8 * WIDTH * WIDTH * 4
    assert carried["reduce_scatter", "gpu"] == carried["all_gather", "gpu"] == everything
    assert not carried["all_reduce", "gpu"]
    for outer in local.mesh.names[:-1]:
        assert carried["all_reduce", outer] * INSIDE <= everything
    counts = {kind: total.count for kind, total in local.collectives().items()}
    assert counts["all_gather"] == counts["reduce_scatter"]
    assert counts["all_reduce"] < 8


def test_small_sums_are_not_shared() -> None:
    """Three collectives of a few bytes take longer than two."""
    layer = nn.Linear(8, 8)
    graph = ws.capture(mean_square, layer, AdamW(layer.parameters()), torch.randn(4, 8))
    local = ws.partition(graph, ws.plan(graph, "node=4,gpu=8", ws.DataParallel("replicate"), hardware=HOPPER))
    assert set(local.collectives()) == {"all_reduce"}


@pytest.fixture(scope="module")
def odd() -> Capture:
    """Sizes that divide by no axis, by one, and by all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 7, bias=False), nn.Linear(7, 1), nn.Linear(1, 12)).double()
    return capture_step(clipped, (model, AdamW(model.parameters()), torch.randn(4, 12).double()), {})


def updated(capture: Capture, mesh: str, hardware: ws.Hardware, schedule: str) -> tuple[list[Tensor], set[str]]:
    """Parameters after a step on data that differs between ranks, and the kinds of collectives that made them."""
    plan = ws.plan(capture.graph, mesh, ws.DataParallel("replicate"), hardware=hardware)
    local = ws.partition(capture.graph, plan)
    if schedule == "buckets":
        local = ws.Schedule(bucket_bytes=3000, first_bucket_bytes=500)(local)
    elif schedule == "without copies":
        local = ws.run_passes(local, ws.default_passes(HOPPER))
        assert ("shared_sum" in str(local)) == (hardware is SHARES)
    simulation = Simulation(capture, plan, local)
    simulation.start()
    generator = torch.Generator().manual_seed(1)
    name = next(i.name for i in capture.graph.inputs if i.role.name == "BATCH")
    ranks = range(plan.mesh.size)
    simulation.step([{name: torch.randn(4, 12, dtype=torch.float64, generator=generator)} for _ in ranks])
    params = [simulation.whole(i.name) for i in plan.inputs if i.role.name == "PARAM"]
    return params, set(local.collectives())


@pytest.mark.crossed
@pytest.mark.parametrize("schedule", ["none", "buckets", "without copies"])
@pytest.mark.parametrize("mesh", ["node=2,gpu=2", "node=2,gpu=3", "node=3,gpu=4", "rack=2,node=2,gpu=2"])
def test_shared_sums_are_the_same_numbers(odd: Capture, mesh: str, schedule: str) -> None:
    """Up to the order in which ranks are added: inside a node first."""
    shared, kinds = updated(odd, mesh, SHARES, schedule)
    plain, others = updated(odd, mesh, STARTS, schedule)
    assert kinds == {"reduce_scatter", "all_reduce", "all_gather"}
    assert others == {"all_reduce"}
    for one, other in zip(shared, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


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


@pytest.mark.crossed
@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
@pytest.mark.parametrize("mesh", ["dp=8", "dp=64", "dp=512", "node=64,gpu=8"])
def test_no_fixed_size_is_much_faster(large: ws.TrainGraph, mesh: str, style: str) -> None:
    part = ws.partition(large, ws.plan(large, mesh, ws.DataParallel(style)))

    def step_us(size: int | None) -> float:
        passes = ws.default_passes(HOPPER, schedule=ws.Schedule(HOPPER, bucket_bytes=size << 20 if size else None))
        return ws.simulate(ws.run_passes(part, passes), HOPPER).step_us

    assert step_us(None) <= 1.2 * min(step_us(16 << power) for power in range(0, 8, 2))


def test_measured_starts_do_not_depend_on_ranks(large: ws.TrainGraph) -> None:
    cpu = ws.Hardware.default()
    made = [ws.partition(large, ws.plan(large, mesh, ws.DataParallel("zero1"))) for mesh in ("dp=4", "dp=512")]
    sizes = [ws.run_passes(local, ws.default_passes(cpu)).sizes for local in made]
    assert [one.bucket_bytes for one in sizes if one] == [cpu.bucket_bytes] * 2
