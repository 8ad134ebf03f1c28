"""Ways to reach in: another forward for a submodule, a transformation of the program, every stage's text in files."""

import dataclasses

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.backend.default_passes import edited
from wholestep.graph.nodes import copy_graph
from wholestep.passes.order_collectives import SameOrder
from wholestep.passes.sink_waits import SinkWaits


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Halved(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 0.5 * self.inner(x)


def test_a_submodule_is_replaced_for_the_trace_only():
    (model, optimizer), (other, another) = make(), make()
    inner = other[2]
    step, x = ws.compile(mean_square, module_overrides={"2": Halved(model[2])}), torch.randn(6, 4)
    losses = [step(model, optimizer, x) for _ in range(3)]
    other[2] = Halved(inner)
    assert losses == [mean_square(other, another, x) for _ in range(3)]
    assert step.captures == 1
    assert torch.equal(model[2].weight, inner.weight)
    assert isinstance(model[2], nn.Linear)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing": nn.ReLU()}, "module override 'nothing' matches no submodule"),
        ({"2": nn.Linear(5, 3)}, "module override '2' has a parameter of its own, 'weight'"),
    ],
)
def test_a_wrong_override_is_refused(overrides, message):
    model, optimizer = make()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(mean_square, module_overrides=overrides)(model, optimizer, torch.randn(6, 4))
    assert str(caught.value).splitlines()[0] == message


def to_gelu(local: ws.LocalGraph) -> ws.LocalGraph:
    graph = copy_graph(local.graph)
    for node in graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.tanh.default
    return dataclasses.replace(local, graph=graph)


def test_the_program_is_transformed_once():
    seen = []

    def count(local: ws.LocalGraph) -> ws.LocalGraph:
        seen.append(1)
        return to_gelu(local)

    model, optimizer = make()
    weights = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(6, 4)
    step = ws.compile(mean_square, passes=lambda passes: [count, *passes])
    loss = step(model, optimizer, x)
    step(model, optimizer, x)
    first = torch.tanh(x @ weights[0].T + weights[1])
    torch.testing.assert_close(loss, (first @ weights[2].T + weights[3]).square().mean())
    assert len(seen) == 1


def test_a_transformation_that_breaks_the_graph_is_named():
    def drop_output(local: ws.LocalGraph) -> ws.LocalGraph:
        return dataclasses.replace(local, outputs=local.outputs[1:])

    def forget(local: ws.LocalGraph) -> None:
        return None

    model, optimizer = make()
    for broken, message in (
        (drop_output, "pass drop_output left a malformed graph"),
        (forget, "pass forget returned NoneType"),
    ):
        with pytest.raises(ws.GraphError, match=message):
            ws.compile(mean_square, passes=lambda passes, broken=broken: [broken, *passes])(
                model, optimizer, torch.randn(6, 4)
            )


def test_passes_of_wholestep_are_checked_together(monkeypatch):
    """At the end, and before a pass of the user's, which is not blamed for what they did."""

    def stray(self: SinkWaits, local: ws.LocalGraph) -> ws.LocalGraph:
        with local.graph.inserting_after(next(iter(local.graph.nodes))):
            local.graph.call_function(torch.ops.aten.zeros.default, ([2],))
        return local

    monkeypatch.setattr(SinkWaits, "change", stray)
    model, optimizer = make()
    graph = ws.capture(mean_square, model, optimizer, torch.randn(6, 4))
    local, schedule = ws.partition(graph, ws.plan(graph, "dp=2")), ws.Schedule(ws.Hardware.default()).passes
    for passes, names in (
        (schedule, "passes InBodies, PeelPieces, SinkWaits, Bucket, .* left a malformed graph: .* is dead"),
        ((SinkWaits(), to_gelu), "pass SinkWaits left"),
    ):
        with pytest.raises(ws.GraphError, match=names):
            ws.run_passes(local, passes)


def test_a_graph_that_a_pass_of_the_user_keeps_is_not_edited():
    kept = list[tuple[ws.LocalGraph, str]]()

    def look(local: ws.LocalGraph) -> ws.LocalGraph:
        kept.append((local, str(local)))
        return local

    model, optimizer = make()
    graph = ws.capture(mean_square, model, optimizer, torch.randn(6, 4))
    local, passes = ws.partition(graph, ws.plan(graph, "dp=2")), ws.Schedule(ws.Hardware.default()).passes
    before = str(local)
    made = ws.run_passes(local, [each for one in passes for each in (one, look)])
    assert str(local) == before
    assert len({text for _, text in kept}) > 2, "passes change the graph"
    assert all(str(one) == text for one, text in kept)
    assert str(made.graph) == str(ws.run_passes(local, passes).graph) == str(kept[-1][0].graph)


def test_lists_of_passes_that_cannot_run_are_refused():
    given = ws.default_passes(ws.Hardware.default())
    assert edited(given, None) == given
    for edit, message in (
        (lambda passes: None, r"passes= gives None\n  needed: a list of passes"),
        (lambda passes: [*passes, "Bucket"], "passes= gives 'Bucket'"),
        (lambda passes: [one for one in passes if not isinstance(one, SameOrder)], "passes= leaves out SameOrder"),
    ):
        with pytest.raises(ws.PlanError, match=message):
            edited(given, edit)
    model, optimizer = make()
    with pytest.raises(ws.PlanError, match="passes= gives None"):
        ws.compile(mean_square, passes=lambda passes: None)(model, optimizer, torch.randn(6, 4))


def test_every_stage_is_dumped(tmp_path, monkeypatch):
    monkeypatch.setenv("WHOLESTEP_DUMP", str(tmp_path))
    model, optimizer = make()
    step = ws.compile(mean_square)
    step(model, optimizer, torch.randn(6, 4))
    step(model, optimizer, torch.randn(7, 4))
    passes = [f"3-pass-0{n}-{name}" for n, name in enumerate(("Offload", "WriteIntoBuckets", "Reinplace"), 1)]
    stages = ["1-train-graph", "2-plan", "3-local-graph", *passes, "4-final-graph"]
    names = sorted(p.name for p in (tmp_path / "rank0").iterdir())
    assert names == [f"mean_square-{capture}-{stage}.txt" for capture in (1, 2) for stage in stages]
    assert "addmm" in (tmp_path / "rank0" / "mean_square-1-1-train-graph.txt").read_text()
    final = (tmp_path / "rank0" / "mean_square-2-4-final-graph.txt").read_text()
    assert final == f"{step.local_graph}\n"
