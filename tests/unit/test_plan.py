"""Plans: JSON, checks, where things rest; layouts, meshes and the cheapest way between layouts."""

import dataclasses
import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import clipped as train_step
from wholestep.graph.nodes import copy_graph
from wholestep.graph.verify import check_local_graph, check_train_graph
from wholestep.hardware.presets import one_host
from wholestep.layout import REPLICATED, AxisState, Layout, chunk_range, replicated, sharded
from wholestep.mesh import Mesh, mesh_of_torch
from wholestep.reshard import reshard


def capture(rows: int = 33, **options) -> ws.TrainGraph:
    model = nn.Sequential(nn.Linear(12, rows), nn.ReLU(), nn.Linear(rows, 7))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return ws.capture(train_step, model, optimizer, torch.randn(4, 12))


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    return capture(fused=True)


STYLES = ["replicate", "zero1", "zero2", "fully_shard"]


@pytest.mark.parametrize("style", STYLES)
def test_json_round_trip(graph, style):
    plan = ws.plan(graph, "dp=4", ws.DataParallel(style))
    again = ws.Plan.from_json(plan.to_json())
    assert again == plan
    assert str(ws.partition(graph, again)) == str(ws.partition(graph, plan))


def test_nothing_keeps_a_graph_that_was_planned():
    graph = capture()
    ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
    held = weakref.ref(graph.graph)
    del graph
    gc.collect()
    assert held() is None


def broken(plan: ws.Plan, **fields: object) -> str:
    data = json.loads(plan.to_json()) | fields
    return json.dumps({k: v for k, v in data.items() if v is not None})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "field 'format': this JSON is not a wholestep plan"),
        ({"version": 99}, "field 'version': found 99"),
        ({"mesh": "dp"}, "field 'mesh' cannot be read: mesh 'dp': cannot parse 'dp'"),
        ({"mesh": None}, "field 'mesh' is missing"),
        ({"layouts": [[1]]}, "field 'layouts' cannot be read"),
        ({"storage": {"0.weight": 10_000}}, "field 'storage' cannot be read"),
        ({"inputs": [{"name": "x"}]}, "field 'inputs' cannot be read"),
        ({"options": {"speed": 11}}, "field 'options' cannot be read"),
    ],
)
def test_a_bad_file_names_the_field(graph, fields, message):
    plan = ws.plan(graph, "dp=2")
    with pytest.raises(ws.PlanError) as caught:
        ws.Plan.from_json(broken(plan, **fields))
    assert str(caught.value).startswith(message)


def test_what_is_no_json_is_refused():
    with pytest.raises(ws.PlanError, match="the plan: the text is not JSON"):
        ws.Plan.from_json("{")


def test_a_plan_for_another_model_names_what_differs(graph):
    plan = ws.plan(graph, "dp=2")
    with pytest.raises(ws.PlanError) as caught:
        ws.partition(capture(rows=32, fused=True), plan)
    assert str(caught.value).splitlines()[0] == (
        "the plan has '0.weight' as float32[33, 12], the graph as float32[32, 12] (and 8 more)"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_at_rest_are_a_rank_share_plus_padding(graph, ranks):
    plan = ws.plan(graph, f"dp={ranks}", ws.DataParallel("fully_shard"))
    whole = sum(i.meta.size_bytes for i in graph.inputs if i.role.value in ("param", "state") and i.meta.shape)
    padding = sum(
        (-i.meta.shape[0] % ranks) * (i.meta.size_bytes // i.meta.shape[0])
        for i in graph.inputs
        if i.role.value in ("param", "state") and i.meta.shape
    )
    counts = sum(i.meta.size_bytes for i in graph.inputs if i.role.value == "state" and not i.meta.shape)
    rest = plan.stored_bytes("param") + plan.stored_bytes("state") - counts
    assert whole / ranks <= rest <= (whole + padding) / ranks * 1.01


# -- layouts and meshes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "parts", "lengths"),
    [
        (11, 8, [2, 2, 2, 2, 2, 1, 0, 0]),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0]),
        (10, 4, [3, 3, 3, 1]),
        (5, 4, [2, 2, 1, 0]),
        (1, 4, [1, 0, 0, 0]),
    ],
)
def test_uneven_pieces_follow_torch_chunk(size, parts, lengths):
    assert [chunk_range(size, parts, i)[1] for i in range(parts)] == lengths
    pieces = [torch.arange(size).narrow(0, *chunk_range(size, parts, i)) for i in range(parts)]
    assert torch.cat(pieces).tolist() == list(range(size))


def test_mesh_numbers_ranks_row_major():
    mesh = Mesh("dp=4,tp=2")
    assert mesh.coordinate(5) == {"dp": 2, "tp": 1}
    assert [mesh.rank(mesh.coordinate(r)) for r in range(8)] == list(range(8))
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dp", "mesh 'dp': cannot parse 'dp'"),
        ("dp=2,dp=2", "mesh 'dp=2,dp=2' names axis 'dp' twice"),
        ("dp=0", "axis 'dp' has size 0"),
        ((ws.Axis("ep", 2),), "mesh (Axis(name='ep', size=2),) has an axis 'ep': experts have no axis of their own"),
        ("dp=2,ep=4", "mesh 'dp=2,ep=4' has an axis 'ep': experts have no axis of their own"),
    ],
)
def test_a_malformed_mesh_is_refused(spec, message):
    with pytest.raises(ws.MeshError) as caught:
        Mesh(spec)
    assert str(caught.value).splitlines()[0] == message


def test_a_reserved_name_is_refused_with_what_there_is():
    with pytest.raises(ws.MeshError) as caught:
        Mesh("dp=2,ep=4")
    assert str(caught.value).splitlines()[1:] == [
        "  needed: axes of batches (dp, or any other name), of layers (tp), of tokens (cp) and of stages (pp)",
        '  next: give ExpertParallel(axis="dp"), or split them along tp',
    ]


def test_axes_of_a_mesh_of_torch_have_any_names():
    mesh = mesh_of_torch(("pp", "dp"), (2, 4))
    assert (str(mesh), mesh.coordinate(5)) == ("pp=2,dp=4", {"pp": 1, "dp": 1})


def test_a_number_of_ranks_alone_is_told_how_to_be_a_mesh():
    with pytest.raises(ws.MeshError, match='write "dp=16", or "auto=16" to have axes chosen'):
        Mesh("16")


def test_layouts_print_their_axes_and_partial_sums():
    layout = sharded(2, 0, "tp", "dp").put("pp", AxisState("P", op="sum"))
    assert layout.show((8, 3)) == "8@tp,dp 3 +pp(sum)"
    assert layout.put("pp", REPLICATED) == sharded(2, 0, "tp", "dp")
    assert sharded(1, 0, "dp").local_shape((11,), Mesh("dp=8"), {"dp": 5}) == (1,)


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        (sharded(2, 0, "a"), replicated(2), ["all_gather"]),
        (replicated(2), sharded(2, 0, "a"), ["slice"]),
        (replicated(2).put("a", AxisState("P", op="avg")), replicated(2), ["all_reduce"]),
        (replicated(2).put("a", AxisState("P", op="avg")), sharded(2, 0, "a"), ["reduce_scatter"]),
        (replicated(2), replicated(2), []),
        (
            replicated(2).put("a", AxisState("P", op="avg")).put("b", AxisState("P", op="avg")),
            sharded(2, 0, "b"),
            ["reduce_scatter", "all_reduce"],
        ),
    ],
)
def test_reshard_takes_the_cheapest_path(source, target, steps):
    path = reshard(source, target, (64, 8), 4, Mesh("a=2,b=2"), one_host())
    assert [s.kind for s in path.steps] == steps


def test_a_shard_cannot_become_partial_and_a_varying_value_cannot_be_whole():
    mesh, partial = Mesh("a=2"), replicated(1).put("a", AxisState("P", op="sum"))
    varying = Layout(((),), varies=("a",))
    for source, target in ((varying, replicated(1)), (varying, partial)):
        with pytest.raises(ws.LayoutError, match="cannot become"):
            reshard(source, target, (8,), 4, mesh, one_host())


# -- checkers ------------------------------------------------------------------------------


def test_the_train_graph_checker_sees_a_mutation_and_a_missing_output(graph):
    changed = copy_graph(graph.graph)
    node = next(n for n in changed.nodes if n.target is torch.ops.aten.relu.default)
    node.target = torch.ops.aten.relu_.default
    with pytest.raises(ws.GraphError, match=r"%relu \(aten.relu_.default\) changes its inputs"):
        check_train_graph(dataclasses.replace(graph, graph=changed))
    with pytest.raises(ws.GraphError, match="does not end in one output for each named output"):
        check_train_graph(dataclasses.replace(graph, outputs=graph.outputs[1:]))
    with pytest.raises(ws.GraphError, match="placeholders for"):
        check_train_graph(dataclasses.replace(graph, inputs=graph.inputs[1:]))


def test_the_local_graph_checker_sees_dead_nodes_and_missing_waits(graph):
    local = ws.partition(graph, ws.plan(graph, "dp=2"))
    dead = copy_graph(local.graph)
    first = next(n for n in dead.nodes if n.op == "call_function")
    with dead.inserting_before(first):
        dead.call_function(torch.ops.aten.neg.default, (next(iter(dead.nodes)),))
    with pytest.raises(ws.GraphError, match="is dead"):
        check_local_graph(dataclasses.replace(local, graph=dead))
    hasty = copy_graph(local.graph)
    wait = next(n for n in hasty.nodes if "wait_tensor" in str(n.target))
    wait.replace_all_uses_with(wait.args[0])
    hasty.erase_node(wait)
    with pytest.raises(ws.GraphError, match="before its wait"):
        check_local_graph(dataclasses.replace(local, graph=hasty))


def test_learned_positions_are_gathered():
    """A lookup that no batch takes part in is no optimizer's arithmetic: by parts it would cost an all-reduce."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(16, 8), nn.Embedding(10, 8)

        def forward(self, x):
            return self.words(x) + self.places(torch.arange(x.shape[1]))

    model = Positions()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    graph = ws.capture(train_step, model, optimizer, torch.zeros(4, 10, dtype=torch.int64))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
    counts = {kind: total.count for kind, total in local.collectives().items()}
    assert counts == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}, "the norm of the gradients alone"


def test_buffers_that_follow_from_no_batch_are_the_same_on_all_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = torch.optim.swa_utils.AveragedModel(
        model, use_buffers=True, avg_fn=torch.optim.swa_utils.get_ema_avg_fn()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, average: Any, x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    planned = ws.plan(ws.capture(step, model, optimizer, average, torch.ones(3, 4)), "dp=2")
    own = {name for name, layout in planned.storage.items() if layout.varies}
    statistics = {f"1.{name}" for name in ("running_mean", "running_var")}
    assert own == {f"model.{n}" for n in statistics} | {f"average.module.{n}" for n in statistics} | {"x"}
