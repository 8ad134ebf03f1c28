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
