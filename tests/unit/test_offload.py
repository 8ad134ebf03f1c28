"""`offload="cpu"`: shards go to the device to be gathered, reduced gradients to the host, where updates run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.catalogue import SimpleMlp
from tests.simulate import Simulation, cut
from tests.together import OneDevice, compare
from wholestep import _torch
from wholestep.backend.rank_binding import bind
from wholestep.capture import capture_step
from wholestep.graph import meta
from wholestep.graph.graph import Role
from wholestep.graph.messages import POINT_TO_POINT, complete
from wholestep.graph.nodes import is_collective
from wholestep.graph.region import Region
from wholestep.partition.host_copies import to_device, to_host
from wholestep.partition.rank_ops import contiguous
from wholestep.partition.stage_program import stage_program
from wholestep.passes.base import run_passes
from wholestep.passes.offload import Offload
from wholestep.passes.reinplace import Reinplace

pytestmark = pytest.mark.usefixtures("double")


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
    graph = replace(one.capture.graph, offload="cpu")
    plan = ws.plan(graph, "dp=2", ws.DataParallel(style, semantics="global"))
    local = run_passes(ws.partition(graph, plan), [Offload()])
    targets = [n.target for n in local.graph.nodes]
    assert targets.count(to_host) >= 4, "a gradient of each parameter"
    assert targets.count(to_device) >= 4, "each parameter"
    for node in local.graph.nodes:
        if is_collective(node):
            assert node.all_input_nodes[0].target is not to_host, "collectives run on the device"
    simulation = Simulation(one.capture, plan, run_passes(local, [Reinplace()]))
    simulation.start()
    for number, batch in enumerate(one.batches):
        pieces = {n: cut(v, plan.storage[n], plan.mesh) for n, v in zip(("x", "y"), batch, strict=True)}
        for (loss,) in simulation.step([{n: p[r] for n, p in pieces.items()} for r in range(2)]):
            torch.testing.assert_close(loss, one.losses[number][0], rtol=1e-12, atol=0)
    for name, expected in one.state.items():
        torch.testing.assert_close(simulation.whole(name), expected, rtol=1e-11, atol=1e-14)


def test_same_numbers_through_host_memory_in_stages() -> None:
    one = OneDevice(make, train, [(torch.randn(8, 50), torch.randn(8, 8)) for _ in range(3)])
    one.capture = replace(one.capture, graph=replace(one.capture.graph, offload="cpu"))
    data = ws.DataParallel("zero1", axis="dp", semantics="global")
    found = compare(one, "dp=2,pp=2", [data, ws.Pipeline(micro_batches=2)], passes=ws.default_passes())
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"
    for stage in range(2):
        made = run_passes(stage_program(found.local, stage), ws.default_passes())
        assert {to_host, to_device} <= {node.target for node in made.graph.nodes}


@pytest.mark.smoke
def test_compiled() -> None:
    model, optimizer = make()
    step = ws.compile(train, parallel=ws.DataParallel("fully_shard"), offload="cpu")
    step(model, optimizer, torch.randn(7, 50), torch.randn(7, 8))
    assert "to_host" in str(step.local_graph)
    with pytest.raises(ws.PlanError, match="offload='disk'"):
        ws.CaptureOptions(offload="disk")  # type: ignore[arg-type]


class Tied(nn.Linear):
    """A layer whose weight, of the shape of another one's, may be that one's."""

    def __init__(self) -> None:
        super().__init__(6, 32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.weight)


class OnTwoDevices(torch.fx.Interpreter):
    """Runs one rank's program on fake tensors, which refuse to be mixed across devices; notes where collectives and
    stages ran.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.collectives: set[str] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        self.running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        if isinstance(target, Region) or target in (*POINT_TO_POINT, complete):
            self.collectives |= {str(one.device) for one in args if isinstance(one, Tensor)}
            made = [m and torch.empty(m.shape, dtype=m.dtype, device="cuda:0") for m in meta.tensors(self.running)]
            return made if isinstance(target, Region) else made[0] if made else None
        if target is contiguous:  # the method needs the device
            return torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        if "_c10d_functional" not in name:
            return super().call_function(target, args, kwargs)
        self.collectives |= set() if "wait" in name else {str(args[0].device)}
        if "all_gather" in name:
            return torch.cat([args[0]] * 2)
        return args[0].narrow(0, 0, args[0].shape[0] // 2).clone() if "reduce_scatter" in name else args[0].clone()


@pytest.mark.crossed
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("style", ["replicate", "fully_shard", "stages", "stages and shards"])
def test_host_and_device_meet_only_where_tensors_are_moved(style: str, fused: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), Tied(), nn.ReLU(), nn.Linear(32, 8))
    model[2].weight = model[0].weight if "stages" in style else model[2].weight
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)

    def decay(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(torch.ones(param.shape, device=param.device), alpha=1e-3)
        return loss

    options = ws.CaptureOptions(fused=fused, offload="cpu")
    captured = capture_step(decay, (model, optimizer, torch.randn(8, 6), torch.randn(8, 8)), {}, options)
    numbers = {node for given, node in captured.graph.placeholders() if given.role is Role.HYPER}
    for node in captured.graph.graph.nodes:  # as if it had been captured on a GPU
        if node not in numbers:
            meta.set_tensors(node, [m and replace(m, device="cuda:0") for m in meta.tensors(node)])
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    graph = replace(captured.graph, offload="cuda:0")
    if "stages" in style:
        shards = [ws.DataParallel("fully_shard", axis="dp", semantics="global")] if "shards" in style else []
        pipeline = ws.Pipeline(stages=[["0"], ["2", "4"]], micro_batches=2)
        plan = ws.plan(graph, "dp=2,pp=2" if shards else "pp=2", [*shards, pipeline])
        whole = ws.partition(graph, plan)
        found = [run_passes(stage_program(whole, stage), [Offload()]) for stage in range(2)]
    else:
        plan = ws.plan(graph, "dp=2", ws.DataParallel(style, semantics="global"))
        found = [run_passes(ws.partition(graph, plan), [Offload()])]
    for local in found:
        _runs_apart(local, plan)


def _runs_apart(local: ws.LocalGraph, plan: ws.Plan) -> None:
    """Updates run on the host, and collectives and stages on the device."""
    here = {axis: local.stage or 0 if axis == "pp" else 0 for axis in plan.mesh.names}
    on_host = (Role.PARAM, Role.STATE, Role.GRAD)
    program = OnTwoDevices(torch.fx.GraphModule({}, bind(local, here, {"dp": "0", "pp": "0"}, runs=False)))
    with _torch.fake_mode():
        given: list[Tensor] = []
        for i in local.inputs:
            rests = plan.storage[i.name]
            shape = rests.local_shape(i.meta.shape, plan.mesh, here) if rests.is_held_at(here) else (0,)
            device = "cpu" if i.role in (*on_host, Role.HYPER) else "cuda:0"
            given.append(torch.empty(shape, dtype=i.meta.dtype, device=device))
        made = program.run(*given)
    assert program.collectives == {"cuda:0"}
    ends = {o.target: str(v.device) for o, v in zip(local.outputs, made, strict=True) if o.kind == "update"}
    assert set(ends.values()) == {"cpu"}, ends
    assert len(ends) >= 3 * 4 or local.stage is not None


class TwoLoops(nn.Module):
    """Some of its backward is a loop of its own: it reads what the first loop has kept of each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.attention = (
            nn.Linear(5, 12),
            nn.LayerNorm(12),
            nn.MultiheadAttention(12, 2, batch_first=True),
        )
        self.inner, self.up, self.down, self.last = (
            nn.LayerNorm(12),
            nn.Linear(12, 24),
            nn.Linear(24, 12),
            nn.Linear(12, 19),
        )

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.inner(x))))

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, 5) -> (b, 19)."""
        h = self.first(x)
        h = checkpoint(self.block, h, use_reentrant=False)
        n = self.norm(h)
        return self.last((h + self.attention(n, n, n, need_weights=False)[0]).mean(1))


@pytest.mark.full
def test_loops_over_pieces_run_on_the_device() -> None:
    found: list[list[Tensor]] = []
    for options in ({}, {"parallel": ws.MicroBatches(3)}, {"parallel": ws.MicroBatches(3), "offload": "cpu"}):
        torch.manual_seed(0)
        model = TwoLoops()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.3)
        step = ws.compile(train, **options)
        for call in range(3):
            drawn = torch.Generator().manual_seed(call)
            step(model, optimizer, torch.randn(9, 7, 5, generator=drawn), torch.randn(9, 19, generator=drawn))
        found.append([p.detach() for p in model.parameters()])
    for one in found[1:]:
        for a, b in zip(found[0], one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
