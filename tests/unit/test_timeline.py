"""A step in time: streams that wait for each other, what shares a link, the trace that Perfetto reads, the profile."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node
from torch.optim import SGD, Adam

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.cost.compute import flops, node_us, work
from wholestep.cost.simulation import Clock, sent_us
from wholestep.graph import meta
from wholestep.graph.nodes import is_collective
from wholestep.passes.write_into_buckets import WriteIntoBuckets

MACHINE = ws.Hardware.measured(
    flops_per_us=1000, memory_bytes_per_us=1000, launch_us=1, link_us=10, link_bytes_per_us=100
)


def program(style: str = "fully_shard", mesh: str = "dp=2", schedule: ws.Schedule | None = None) -> ws.LocalGraph:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        x = torch.empty(64, 256)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    local = ws.partition(graph, ws.plan(graph, mesh, ws.DataParallel(style)))  # type: ignore[arg-type]
    return (schedule or ws.Schedule(MACHINE))(local)


@pytest.mark.smoke
def test_a_timeline_adds_up_to_the_simulation() -> None:
    local = program()
    made, simulated = ws.timeline(local, MACHINE), ws.simulate(local, MACHINE)
    assert made.simulated == simulated
    assert made.streams == ("compute", "wait", "dp")
    assert made.busy_us("wait") == pytest.approx(simulated.exposed_us)
    starts = sum(is_collective(n) for n in local.graph.nodes) * MACHINE.launch_us
    assert made.busy_us("compute") + made.busy_us("wait") + starts == pytest.approx(simulated.step_us)
    for stream in made.streams:
        spans = [span for span in made.spans if span.stream == stream]
        assert all(a.start_us + a.us <= b.start_us + 1e-6 for a, b in pairwise(spans)), stream
    assert made.memory[-1][0] == pytest.approx(simulated.step_us)
    assert max(size for _, size in made.memory) == made.peak.size_bytes == ws.peak_memory(local).size_bytes


def test_waits_are_named_by_what_is_waited_for() -> None:
    waits = [span for span in ws.timeline(program(), MACHINE).spans if span.stream == "wait"]
    assert {span.op for span in waits} <= {"all_gather", "reduce_scatter"}
    assert {span.phase for span in waits} <= {"forward", "backward", "update"}
    assert all(span.size_bytes for span in waits)


def test_model_flops_utilization_counts_what_the_model_needs() -> None:
    """Three products for each layer, but for the first one's input: its gradient is not asked for."""
    local = program()
    counted = (3 * 4 - 1) * 2.0 * 64 * 256 * 256
    assert sum(flops(n) for n in local.graph.nodes if n.op == "call_function") == counted
    made = ws.simulate(local, MACHINE)
    assert made.mfu == pytest.approx(counted / MACHINE.peak_flops_per_us("float32") / made.step_us)


def test_what_is_made_again_is_no_work_of_the_model() -> None:
    """Activations under a budget: products run again, the model's own work stays."""
    with torch.device("meta"):
        model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())])
        x = torch.empty(4096, 64)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    before = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("replicate")))
    after = ws.Recompute(int(0.65 * ws.peak_memory(before).size_bytes), MACHINE)(before)
    executed = [sum(flops(n) for n in one.graph.nodes if n.op == "call_function") for one in (before, after)]
    made = [ws.simulate(one, MACHINE) for one in (before, after)]
    assert executed[1] > executed[0]
    assert [m.mfu * m.step_us for m in made] == pytest.approx([executed[0] / MACHINE.peak_flops_per_us("float32")] * 2)


def collectives(axes: tuple[str, ...]) -> tuple[Graph, list[Node]]:
    """All-reduces of 1000 floats, along each of `axes` in turn."""
    graph = Graph()
    x = graph.placeholder("x")
    reduce = torch.ops._c10d_functional.all_reduce.default
    made = [graph.call_function(reduce, (x, "sum", axis)) for axis in axes]
    shape = meta.TensorMeta((1000,), (1,), torch.float32, "cpu")
    for node in (x, *made):
        meta.set_tensors(node, (shape,))
    return graph, made


def test_collectives_of_axes_that_share_a_link_get_half_of_it_each() -> None:
    mesh, hardware = ws.Mesh("a=2,b=2"), replace(MACHINE, device=replace(MACHINE.device, launch_us=0.0))
    _, (one, other) = collectives(("a", "b"))
    alone = sent_us(one, hardware, mesh)
    clock = Clock(hardware, mesh)
    clock.run(one)
    clock.run(other)
    assert (clock.ends[one], clock.ends[other]) == (pytest.approx(2 * alone), pytest.approx(2 * alone))

    _, (one, other) = collectives(("a", "a"))
    clock = Clock(hardware, mesh)
    clock.run(one)
    clock.run(other)
    assert (clock.ends[one], clock.ends[other]) == (pytest.approx(alone), pytest.approx(2 * alone))


def test_axes_on_links_of_their_own_do_not_slow_each_other() -> None:
    """Tensor parallel within nodes of eight, data parallel between them."""
    hardware = ws.Hardware.preset("dgx-h100")
    inside, across = ws.Mesh("dp=4,tp=8"), ws.Mesh("dp=4,tp=2")
    assert not hardware.shares_links(inside, "dp", "tp")
    assert hardware.shares_links(across, "dp", "tp")
    for mesh, factor in ((inside, 1.0), (across, 2.0)):
        _, (one, other) = collectives(("dp", "tp"))
        clock = Clock(replace(hardware, device=replace(hardware.device, launch_us=0.0)), mesh)
        clock.run(one)
        clock.run(other)
        short = min(sent_us(one, clock.hardware, mesh), sent_us(other, clock.hardware, mesh))
        assert min(clock.ends.values()) == pytest.approx(factor * short)


def test_a_trace_that_perfetto_opens(tmp_path: Path) -> None:
    made = ws.timeline(program(), MACHINE)
    made.save(tmp_path / "step.json", replace(made, title="measured"))
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"predicted", "measured"}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert len(spans) == len(made.spans)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    assert sorted(threads.values()) == ["axis dp", "compute", "wait"]
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") == made.peak.size_bytes


def test_views_are_free_and_parts_are_priced_by_what_is_read() -> None:
    nodes = {n.name: n for n in program().graph.nodes if n.op == "call_function"}
    assert all(work(n) is None for name, n in nodes.items() if name.startswith(("part_of_scatter", "view", "t_")))
    parts = [n for name, n in nodes.items() if name.startswith("part_of_gather")]
    assert parts
    for node in parts:
        found = work(node)
        assert found is not None
        assert found.moved_bytes == 2 * meta.tensor(node).size_bytes


def test_a_product_made_in_its_bucket_costs_what_a_product_does() -> None:
    before = program("replicate")
    after = ws.run_passes(before, [WriteIntoBuckets()])
    total = [sum(flops(n) for n in one.graph.nodes if n.op == "call_function") for one in (before, after)]
    assert total[0] == total[1] > 0
    assert all(node_us(n, MACHINE) > 1 for n in after.graph.nodes if n.name.startswith("multiply_into"))


def test_a_profile_beside_its_prediction(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(32, 32), nn.Linear(32, 32)
    twin.load_state_dict(model.state_dict())
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(twin.parameters(), lr=0.1)
    step, x = ws.compile(train), torch.randn(8, 32)
    found = step.profile(model, optimizer, x, hardware=MACHINE, repeat=3)
    for _ in range(5):  # one to compile, one that checks, three that count
        train(twin, other, x)
    assert torch.equal(model.weight, twin.weight)
    assert step(model, optimizer, x).shape == ()
    predicted, measured = found.classes()["addmm"]
    assert predicted > 0
    assert measured > 0
    assert "addmm" in str(found)
    assert found.measured.simulated.step_us >= found.measured.busy_us("compute")
    found.save(tmp_path / "step.json")
    assert "measured" in (tmp_path / "step.json").read_text()
    found.kernels.save(tmp_path / "kernels.json")
    learned = ws.simulate(step.local_graph, MACHINE, profile=ws.KernelTimes.load(tmp_path / "kernels.json"))
    slower = ws.KernelTimes(tuple(replace(kernel, us=2 * kernel.us) for kernel in found.kernels.kernels))
    twice = ws.simulate(step.local_graph, MACHINE, profile=slower)
    assert twice.step_us == pytest.approx(2 * learned.step_us), "what was measured alone says how long it takes"


def test_a_profile_needs_a_machine() -> None:
    model = nn.Linear(4, 4)
    step = ws.compile(train)
    with pytest.raises(ws.PlanError, match="give hardware="):
        step.profile(model, SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
