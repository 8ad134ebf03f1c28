"""`offload="cpu"`: shards go to the device to be gathered, reduced gradients to the host, where updates run."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.catalogue import SimpleMlp
from tests.simulate import Simulation, cut
from tests.together import OneDevice
from wholestep.graph.verify import is_collective
from wholestep.partition.pieces import to_device, to_host
from wholestep.passes.base import run_passes
from wholestep.passes.offload import Offload
from wholestep.passes.reinplace import Reinplace


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def make() -> tuple[nn.Module, Optimizer]:
    model = SimpleMlp(33, 8)
    return model, AdamW(model.parameters(), lr=0.01, fused=True)


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_same_numbers_through_host_memory(style: str) -> None:
    one = OneDevice(make, train, [(torch.randn(7, 50), torch.randn(7, 8)) for _ in range(3)])
    parallel = ws.DataParallel(style, semantics="global", offload="cpu")
    plan = ws.plan(one.capture.graph, "dp=2", parallel)
    local = run_passes(ws.partition(one.capture.graph, plan), [Offload("cpu")])
    targets = [n.target for n in local.graph.nodes]
    assert targets.count(to_host) >= 4, "a gradient of each parameter"
    assert targets.count(to_device) >= 4, "each parameter"
    for node in local.graph.nodes:
        if is_collective(node):
            assert node.all_input_nodes[0].target is not to_host, "collectives run on the device"
    simulation = Simulation(one.capture, plan, run_passes(local, [Reinplace()]))
    simulation.start()
    for number, batch in enumerate(one.batches):
        pieces = {n: cut(v, plan.rest[n], plan.mesh) for n, v in zip(("x", "y"), batch, strict=True)}
        for (loss,) in simulation.step([{n: p[r] for n, p in pieces.items()} for r in range(2)]):
            torch.testing.assert_close(loss, one.losses[number][0], rtol=1e-12, atol=0)
    for name, expected in one.state.items():
        torch.testing.assert_close(simulation.whole(name), expected, rtol=1e-11, atol=1e-14)


def test_compiled() -> None:
    model, optimizer = make()
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard", offload="cpu"))
    step(model, optimizer, torch.randn(7, 50), torch.randn(7, 8))
    assert "to_host" in str(step.local_graph)
    with pytest.raises(ws.PlanError, match="offload one of None, 'cpu'"):
        ws.DataParallel(offload="disk")
