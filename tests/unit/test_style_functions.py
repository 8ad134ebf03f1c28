"""Data-parallel styles: functions from outside the package, and the table of named ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.cli.target import Style
from wholestep.plan.data_parallel import STORAGE_OPTIONS, storage_of
from wholestep.plan.storage_styles import STYLES
from wholestep.planner.candidates import templates


def shard_weights(parameter, layout, mesh, axes):
    if len(layout.dims) < 2:
        return layout, layout
    sharded = ws.Layout(((*layout.dims[0], *axes), *layout.dims[1:]))
    return sharded, sharded


def zero1_by_hand(parameter, layout, mesh, axes):
    return layout, ws.Layout(((*layout.dims[0], *axes), *layout.dims[1:]))


NAME = f"{__name__}:shard_weights"


def arguments() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters()), torch.randn(4, 8)


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    return ws.capture(train, *arguments())


def test_a_function_decides_where_parameters_are_stored(graph: ws.TrainGraph) -> None:
    plan = ws.plan(graph, "dp=4", ws.DataParallel(shard_weights))
    assert plan.storage["0.weight"].dims == (("dp",), ())
    assert plan.storage["0.bias"].dims == ((),)
    assert plan.strategy == f"{NAME} on dp, mean over ranks"
    assert NAME in plan.explain("0.weight")
    assert "all_gather" in str(ws.partition(graph, plan))


def test_a_function_makes_the_program_of_the_name_that_stores_alike(graph: ws.TrainGraph) -> None:
    made = [ws.partition(graph, ws.plan(graph, "dp=4", ws.DataParallel(one))) for one in (zero1_by_hand, "zero1")]
    assert str(made[0]) == str(made[1])


def test_a_function_beside_tensor_parallelism(graph: ws.TrainGraph) -> None:
    for tensor in (ws.TensorParallel({"0": "colwise", "1": "rowwise"}), ws.TensorParallel("auto")):
        plan = ws.plan(graph, "dp=2,tp=2", [ws.DataParallel(shard_weights, axis="dp"), tensor])
        assert "dp" in str(plan.storage["0.weight"].dims)


def nested_otherwise(parameter, layout, mesh, axes):
    dims = (axes if parameter.meta.shape[0] == 4 else axes[::-1], *layout.dims[1:])
    return ws.Layout(dims), ws.Layout(dims)


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_of_all_parameters_leaves_each_with_its_own_nesting_of_axes(fused: bool) -> None:
    model, _, x = arguments()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    data = ws.DataParallel(nested_otherwise, axis=("a", "b"), semantics="global")
    graph = ws.capture(train, model, optimizer, x)
    plan = ws.plan(graph, "a=2,b=2", data)
    assert [plan.storage[f"{n}.weight"].dims[0] for n in (0, 1)] == [("b", "a"), ("a", "b")]
    gathers = str(ws.partition(graph, plan)).count("all_gather_into_tensor")
    assert gathers == 2 * len(optimizer.param_groups[0]["params"]), "parameters along both axes, and no state"
    assert (comparison := ws.compare(train, (model, optimizer, x), "a=2,b=2", data)).equal, comparison


def test_compile_runs_it() -> None:
    losses: list[list[float]] = []
    for style in (shard_weights, "fully_shard"):
        model, optimizer, x = arguments()
        step = ws.compile(train, parallel=ws.DataParallel(style))
        assert "shard" in repr(step)
        losses.append([step(model, optimizer, x).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_plan_file_does_not_hold_the_function(graph: ws.TrainGraph, tmp_path: Path) -> None:
    plan = ws.plan(graph, "dp=1", ws.DataParallel(shard_weights))
    plan.save(tmp_path / "plan.json")
    read = ws.Plan.load(tmp_path / "plan.json")
    assert read.storage == plan.storage
    assert read.strategies is None
    with pytest.raises(ws.PlanError) as error:
        ws.compile(train, parallel=read)
    assert str(error.value).startswith(f"the plan does not hold what made it ({NAME} on dp, mean over ranks)")
    assert "next: give the strategy as parallel=" in str(error.value)
    model, optimizer, x = arguments()
    ws.compile(train, parallel=plan)(model, optimizer, x)


def test_the_compile_cache_is_off_for_a_function(tmp_path: Path) -> None:
    step = ws.compile(train, parallel=ws.DataParallel(shard_weights), memory_bytes="1GiB", cache=tmp_path)
    step(*arguments())
    assert [line.partition(":")[0] for line in step.cache_log] == ["off"]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda layout, axes: None, "no pair of layouts"),
        (lambda layout, axes: (layout, "dp"), "no pair of layouts"),
        (lambda layout, axes: (ws.Layout(((axes[0],),)), ws.Layout(((axes[0],),))), "the parameter has 1 dims"),
        (lambda layout, axes: (layout, ws.Layout((("pp",), ()))), "the layout of the state adds pp"),
        (lambda layout, axes: (layout, ws.Layout((axes, axes))), "the layout of the state adds dp, dp"),
        (lambda layout, axes: (ws.Layout((axes, ())), layout), "an axis that does not shard its state"),
    ],
)
def test_layouts_that_cannot_be_are_refused(graph: ws.TrainGraph, make: Any, found: str) -> None:
    def odd(parameter, layout, mesh, axes):
        return make(layout, axes) if parameter.name == "0.weight" else (layout, layout)

    with pytest.raises(ws.PlanError) as error:
        ws.plan(graph, "dp=2", ws.DataParallel(odd))
    assert ":test_layouts_that_cannot_be_are_refused.<locals>.odd' gives " in str(error.value)
    assert "for '0.weight' of shape [16, 8]" in str(error.value)
    assert found in str(error.value)


def test_auto_takes_no_function() -> None:
    with pytest.raises(ws.PlanError) as error:
        ws.Auto(data=ws.DataParallel(shard_weights))
    assert f"Auto(data=DataParallel(style={NAME}))" in str(error.value)
    with pytest.raises(ws.PlanError, match="needed: styles of type Sequence"):
        ws.Auto(styles=[shard_weights])  # type: ignore[list-item]


# -- the table ---------------------------------------------------------------------------------------------------------
def test_templates_storages_and_the_command_read_the_table() -> None:
    named = {t.name.partition(" on ")[0].partition(",")[0] for t in templates(ws.Mesh("a=2,b=2"))}
    assert named == {*STYLES}
    assert {option.style for option in STORAGE_OPTIONS} == {s.name for s in STYLES.values() if not s.shards_gradients}
    assert [style.value for style in Style] == list(STYLES)
    for style in STYLES.values():
        data = ws.DataParallel(style.name, reshard_after_forward=True)
        assert storage_of(data).regathers == style.gathers_parameters


@pytest.mark.parametrize("style", STYLES.values(), ids=list(STYLES))
def test_properties_of_a_style_are_those_of_its_layouts(style: Any, graph: ws.TrainGraph) -> None:
    mesh = ws.Mesh("node=2,rank=2")
    weight = next(given for given in graph.inputs if given.name == "0.weight")
    param, state = style.store(weight, ws.Layout(((), ())), mesh, mesh.names)
    assert bool(param.dims[0]) == style.gathers_parameters
    assert bool(state.dims[0]) == style.shards_state
    assert ("node" not in state.dims[0] and "rank" in state.dims[0]) == style.grouped
