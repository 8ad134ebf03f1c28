"""Constraints in `Auto`: every plan that is considered keeps them, along every axis; others are refused."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import wholestep as ws
from tests.together import OneDevice, compare
from tests.tp_models import MLP, squares, step_of
from tests.unit.test_auto_short_steps import FAST, LAYERS, PAIRS, WIDTHS, deep
from tests.unit.test_optimal import QUICK_LINK
from tests.unit.test_tensor_parallel import builder, floats
from wholestep.capture import capture_step
from wholestep.plan.data_parallel import REPLICATE, PerParameterStorage
from wholestep.planner import resolve
from wholestep.planner.bounds import costs
from wholestep.planner.constraints import Constraints, constraints_of
from wholestep.planner.ilp.axis_constraints import AxisConstraints
from wholestep.planner.search_result import SearchResult

TOLERANCE = 1e-10


@cache
def mlp() -> ws.TrainGraph:
    model = MLP()
    return capture_step(step_of(squares), (model, torch.optim.AdamW(model.parameters()), *floats(6, 12)[0]), {}).graph


def auto(**options: Any) -> ws.Auto:
    return ws.Auto(hardware=options.pop("hardware", QUICK_LINK), **options)


def shape_on(plan: ws.Plan, name: str) -> str:
    return plan.storage[name].show(next(i.meta.shape for i in plan.inputs if i.name == name))


def planned(found: SearchResult, graph: ws.TrainGraph) -> Iterator[tuple[str, ws.Plan]]:
    """Every candidate that was in the race, planned again on its own."""
    for row in found.rows:
        if row.strategies is not None and row.status != "no plan":
            yield row.name, ws.plan(graph, row.mesh, row.strategies)


# -- over data-parallel axes -----------------------------------------------------------------------
@pytest.mark.parametrize("mesh", ["dp=4", pytest.param("replicate=2,shard=2", marks=pytest.mark.full), "dp=2,tp=2"])
def test_whole_is_whole_in_every_candidate(mesh: str) -> None:
    graph, axes = mlp(), ws.Mesh(mesh).names
    free = auto().search(graph, mesh)
    cut = [name for name, plan in planned(free, graph) if plan.storage["net1.weight"].axes]
    assert cut, "without the wish it is cut by some"
    found = auto(replicated={"net1": axes}).search(graph, mesh)
    assert {row.name for row in found.rows} == {row.name for row in free.rows}
    several = 0
    for name, plan in planned(found, graph):
        held = [n for n in (*plan.storage, *plan.created_storage) if n.startswith("net1.")]
        assert all(not {**plan.storage, **plan.created_storage}[n].axes for n in held), name
        several += bool(plan.storage["net2.weight"].axes)
    assert several, "what is not named is cut as the style says"


def test_pinned_whole_leaves_the_state_to_be_cut() -> None:
    """As ZeRO-1 does: that is the difference between `pinned` and `whole`."""
    graph = mlp()
    pinned = auto(styles=("fully_shard",), pinned={"net1.weight": {"dp": Replicate()}}).search(graph, "dp=4").plan
    whole = auto(styles=("fully_shard",), replicated={"net1.weight": "dp"}).search(graph, "dp=4").plan
    assert shape_on(pinned, "net1.weight") == shape_on(whole, "net1.weight") == "32 12"
    assert shape_on(pinned, "net1.weight/exp_avg") == "32@dp 12"
    assert shape_on(whole, "net1.weight/exp_avg") == "32 12"


def test_pinned_cut_is_cut() -> None:
    graph = mlp()
    found = auto(styles=("replicate", "zero1"), pinned={"net1.weight": {"dp": Shard(-2)}}).search(graph, "dp=4")
    for name, plan in planned(found, graph):
        assert shape_on(plan, "net1.weight") == "32@dp 12", name
        assert plan.storage["net2.weight"].is_replicated, name


def test_groups_keep_one_axis() -> None:
    """Whole over the groups, it may be cut inside them."""
    found = auto(styles=("fully_shard",), replicated={"net1": "replicate"}).search(mlp(), "replicate=2,shard=2")
    assert "hybrid" in found.plan.strategy
    assert shape_on(found.plan, "net1.weight") == "32@shard 12"
    assert shape_on(found.plan, "net2.weight") == "12@shard,replicate 32"


def test_the_solver_stores_as_is_wanted() -> None:
    asked = {"pinned": {"net2.weight": {"dp": Shard(0)}}, "replicated": {"net1": "dp"}}
    found = auto(**asked).search(mlp(), "dp=4")
    made = [
        p
        for row in found.rows
        for p in (row.strategies.parts if row.strategies else ())
        if isinstance(p, PerParameterStorage)
    ]
    solved = next(part for part in made if part.solution)
    assert solved.storage["net1.weight"] == solved.storage["net1.bias"] == REPLICATE
    assert solved.storage["net2.weight"].style == "fully_shard"


# -- over an axis whose ranks compute together -------------------------------------------------------
def test_results_and_parameters_along_tp() -> None:
    graph = mlp()
    found = auto(pinned={"net2": {"tp": Shard(0)}, "net1.weight": {"tp": Shard(1)}}).search(graph, "dp=2,tp=2")
    assert shape_on(found.plan, "net1.weight").endswith("12@tp") or "12@tp" in shape_on(found.plan, "net1.weight")
    made = [d for name, d in found.plan.decisions.items() if name.startswith("addmm_1")][-1]
    assert made.given[0].state("tp").dim == 0
    lost = [row for row in found.rows if row.status == "no plan"]
    assert lost
    assert all("needed: " in row.why for row in lost)


def test_a_module_is_whole_along_tp() -> None:
    graph = mlp()
    assert "32@tp" in shape_on(ws.plan(graph, "tp=2", auto()), "net1.weight")
    plan = ws.plan(graph, "tp=2", auto(replicated={"net1": "tp"}, styles=("replicate",)))
    assert shape_on(plan, "net1.weight") == "32 12"


def test_a_plan_by_module_that_breaks_a_wish_is_none() -> None:
    tensor = ws.TensorParallel({"net1": "colwise", "net2": "rowwise"})
    found = auto(tensor=tensor, replicated={"net1": "tp"}).search(mlp(), "dp=2,tp=2")
    by_hand = [row for row in found.rows if "tensor parallel on tp" in row.name]
    assert by_hand
    assert {row.status for row in by_hand} == {"no plan"}
    assert by_hand[0].why.startswith("'net1' is to be replicated over tp: net1.weight is cut along dim 0; needed: ")
    assert auto(tensor=tensor, replicated={"net1": "dp"}).search(mlp(), "dp=2,tp=2").best.status == "chosen"


def test_tensor_parallel_auto_gets_the_wishes() -> None:
    tensor = ws.TensorParallel("auto", hardware=QUICK_LINK, pinned={"net1.bias": Replicate()})
    options: Any = {"tensor": tensor, "pinned": {"net1.weight": {"tp": Shard(1)}}}
    found = auto(**options).search(mlp(), "tp=2", same_batches=True)
    assert shape_on(found.plan, "net1.weight") == "32 12@tp"
    assert shape_on(found.plan, "net1.bias") == "32"


# -- the finished plan is checked --------------------------------------------------------------------
def test_the_check_finds_what_is_broken() -> None:
    graph = mlp()
    plan = ws.plan(graph, "dp=4", ws.DataParallel("zero1"))
    fine = constraints_of(graph, [plan.mesh], {"net1.weight": {"dp": Replicate()}}, {})
    assert fine is not None
    fine.check(plan, complete=True)
    broken = constraints_of(graph, [plan.mesh], {}, {"net1": "dp"})
    assert broken is not None
    with pytest.raises(
        ws.PlanError, match=r"'net1' is to be replicated over dp: net1\.(weight|bias) is cut along dim 0"
    ):
        broken.check(plan)
    lost = Constraints({"dp": AxisConstraints({"gone": (plan.storage["net1.weight"].state("dp"), "*.gone")})})
    lost.check(plan)
    with pytest.raises(ws.PlanError, match=r"'\*.gone' asks for a layout of gone, which the plan does not have"):
        lost.check(plan, complete=True)


def test_axes_of_one_rank_cut_nothing() -> None:
    found = auto(pinned={"net1.weight": {"dp": Shard(0)}}).search(mlp(), "dp=1")
    assert found.plan.storage["net1.weight"].is_replicated


# -- deep models, searched meshes, files ----------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("layer", "equal"),
    [*(pytest.param(one, LAYERS - 1, marks=pytest.mark.full) for one in (0, LAYERS - 1)), (5, 0)],
)
def test_a_wish_for_one_layer_of_many(layer: int, equal: int) -> None:
    """Its equals are the layers on one side of it, if they are enough; what is said of the winner is of all."""
    graph = deep(256)
    options: dict[str, Any] = {"solve": layer == 0, "styles": None if layer == 0 else ("replicate", "fully_shard")}
    asked = auto(hardware=FAST, tensor=PAIRS, replicated={f"layers.{layer}": ("dp", "tp")}, **options)
    found = asked.search(graph, "dp=4,tp=2")
    assert (found.folded.count if found.folded else 0) == equal
    assert found.best.blocks is None
    assert found.best.costs == costs(ws.partition(graph, found.plan), found.plan, FAST)
    rests = {name: layout for name, layout in found.plan.storage.items() if name.startswith(f"layers.{layer}.")}
    assert rests
    assert not any(layout.axes for layout in rests.values())


@pytest.mark.full
def test_a_wish_for_all_layers_leaves_them_equal() -> None:
    found = auto(hardware=FAST, replicated={"layers.*.norm": "dp"}, solve=False).search(deep(256), "dp=8")
    assert found.folded is not None
    assert found.folded.count == LAYERS
    assert found.plan.storage["layers.7.norm.weight"].is_replicated


def test_what_breaks_a_wish_is_planned_with_few_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = resolve.make_plan
    monkeypatch.setattr(
        resolve, "make_plan", lambda graph, *rest: planned.append(len(graph.graph.nodes)) or plan(graph, *rest)
    )
    graph = deep(WIDTHS["wide"])
    with pytest.raises(ws.PlanError, match=r"'head' is to be cut along dim 0 over dp: \w+ is another value on each"):
        auto(hardware=FAST, pinned={"head": {"dp": Shard(0)}}, solve=False).search(graph, "dp=8")
    assert planned
    assert max(planned) < len(graph.graph.nodes) / 2


def test_on_searched_meshes_axes_that_a_mesh_lacks_are_left_out() -> None:
    tensor, graph = ws.TensorParallel({"net1": "colwise", "net2": "rowwise"}), mlp()
    nodes = ws.Hardware.preset("dgx-h100")
    found = auto(tensor=tensor, replicated={"net1.weight": ("shard", "dp")}, hardware=nodes).search(graph, "auto=16")
    assert {str(row.mesh) for row in found.rows if row.status != "no plan"} >= {"dp=16", "replicate=2,shard=8"}
    assert not {"dp", "shard"} & set(found.plan.storage["net1.weight"].axes)
    with pytest.raises(ws.PlanError, match=r"axis 'sp' of the constraint on 'net1' is on no mesh: the \d+ meshes"):
        auto(tensor=tensor, replicated={"net1": "sp"}).search(graph, "auto=8")
    with pytest.raises(ws.PlanError, match="axis 'tp' of the constraint on 'net1'"):
        auto(replicated={"net1": "tp"}).search(graph, "auto=8")


def test_the_plan_goes_through_a_file() -> None:
    graph = mlp()
    made = ws.plan(graph, "dp=4", auto(styles=("fully_shard",), replicated={"net1": "dp"}, solve=False))
    read = ws.Plan.from_json(made.to_json())
    assert read == made
    assert read.strategies is not None
    again = ws.plan(graph, "dp=4", read.strategies)
    assert again.storage == made.storage
    assert again.created_storage == made.created_storage


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.full), "dp=3", "dp=2,tp=2"])
def test_what_is_wanted_computes_the_same(mesh: str) -> None:
    one = OneDevice(builder(MLP, hidden=32), step_of(squares), floats(6, 12))
    data = ws.DataParallel(semantics="global")
    asked: Any = {"pinned": {"net2.weight": {"dp": Replicate()}}, "replicated": {"net1": "dp"}}
    for style in ("fully_shard", "zero1", "replicate"):
        found = auto(data=data, styles=(style,), solve=False, **asked).search(one.capture.graph, mesh)
        assert found.best.strategies is not None
        assert compare(one, mesh, found.best.strategies).worst < TOLERANCE


# -- refusals --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pinned": {"net3": {"dp": Replicate()}}}, "the pattern 'net3' names no module and no parameter"),
        ({"replicated": {"net3": "dp"}}, "the pattern 'net3' names no module and no parameter"),
        (
            {"replicated": {"net1": "tp"}},
            "axis 'tp' of the constraint on 'net1' is on no mesh: mesh dp=4\n  needed: one of",
        ),
        ({"pinned": {"net1.weight": {"dp": Shard(2)}}}, "'net1.weight' is to be cut along dim 2: %net1.weight has no"),
        ({"pinned": {"net2": {"dp": Shard(-3)}}}, "'net2' is to be cut along dim -3: %addmm_1 has no such layout, it"),
        ({"pinned": {"net1.weight": {"dp": Shard(1)}}}, "net1.weight to be cut along dim 1 over dp: no way to store a"),
        ({"pinned": {"net2": {"dp": Shard(0)}}}, "'net2' is to be cut along dim 0 over dp: addmm_1 is another value"),
        (
            {"pinned": {"net1.weight": {"dp": Shard(0)}}, "replicated": {"net*": "dp"}},
            "'net1.weight' asks for net1.weight to be cut along dim 0 over dp, 'net*' for it to be replicated over dp",
        ),
        (
            {"pinned": {"net1.weight": {"dp": Shard(0)}, "*.weight": {"dp": Replicate()}}},
            "'net1.weight' asks for net1.weight to be cut along dim 0 over dp, '*.weight' for it to be replicated",
        ),
    ],
)
def test_wishes_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ws.PlanError) as refused:
        auto(**options).search(mlp(), "dp=4")
    assert said in str(refused.value)
    assert "next: " in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pinned": {"a": Replicate()}}, "Auto(pinned={'a': Replicate()})"),
        ({"pinned": {"a": {}}}, "pinned={'a': {}}"),
        ({"pinned": {"a": {"tp": 0}}}, "Auto(pinned={'a': {'tp': 0}})"),
        ({"pinned": ["a"]}, "Auto(pinned=['a'])"),
        ({"replicated": "a"}, "Auto(replicated='a')"),
        ({"replicated": {"a": ()}}, "replicated={'a': ()}"),
        ({"replicated": {"a": 3}}, "Auto(replicated={'a': 3})"),
    ],
)
def test_malformed_wishes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ws.PlanError) as refused:
        ws.Auto(**options)
    assert refused.value.found == said


def test_ranks_that_wish_for_other_things_say_so() -> None:
    mesh = ws.Mesh("dp=2")
    said = {a.describe(mesh) for a in (auto(), auto(replicated={"a": "dp"}), auto(pinned={"a": {"dp": Shard(0)}}))}
    assert len(said) == 3
