"""Updates at owners, as plans and programs: who owns what, what is sent, and what is refused."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from tests.steps import clipped, mean_square
from wholestep.graph import meta
from wholestep.graph.graph import Role
from wholestep.graph.owned import check_owners, of_owner
from wholestep.partition.stage_program import stage_program

SIZES = (24, 40, 16, 32, 24, 8)


def model_of(bias: bool = True) -> nn.Module:
    layers = [nn.Linear(a, b, bias=bias) for a, b in pairwise(SIZES)]
    return nn.Sequential(*layers)


def both(model: nn.Module, optimizers: list[Optimizer], x: Tensor) -> Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def muons() -> ws.TrainGraph:
    model = model_of()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(vectors, foreach=True)]
    return ws.capture(both, model, optimizers, torch.randn(4, 24))


def owners(**options: Any) -> ws.DataParallel:
    return ws.DataParallel("zero1", owners=True, **options)


def test_matrices_have_owners_and_vectors_are_sharded() -> None:
    """The longest updates are shared out first. Ranks send no more than where each gathers all matrices in 16 bits."""
    graph = muons()
    plan, gathered = ws.plan(graph, "dp=2", owners()), ws.plan(graph, "dp=2", ws.DataParallel("zero1"))
    assert sorted(plan.update_owners) == [f"{i}.weight" for i in range(5)]
    states = {i.owner: plan.storage[i.name] for i in graph.inputs if i.key == "momentum_buffer"}
    assert {name: layout.owned for name, layout in states.items()} == {
        name: (("dp", at),) for name, at in plan.update_owners.items()
    }
    vectors = [plan.storage[i.name] for i in graph.inputs if i.key == "exp_avg"]
    assert [str(layout) for layout in vectors] == ["_@dp"] * 5
    shapes, work = {i.name: i.meta.shape for i in graph.inputs}, [0, 0]
    for name, at in plan.update_owners.items():
        rows, columns = shapes[name]
        work[at] += rows * columns * min(rows, columns)
    assert max(work) < 0.65 * sum(work)
    programs = [ws.run_passes(ws.partition(graph, p), ws.default_passes()) for p in (plan, gathered)]
    sent, before = (sum(one.bytes for one in p.collectives().values()) for p in programs)
    assert sent <= 1.1 * before
    assert ws.peak_memory(programs[0]).size_bytes < ws.peak_memory(programs[1]).size_bytes
    hardware = ws.Hardware.preset("dgx-h100")
    assert ws.simulate(programs[0], hardware).step_us < ws.simulate(programs[1], hardware).step_us


def test_updates_on_elements_have_no_owners() -> None:
    """Asked for owners, a step that needs none is planned as without."""
    model = model_of()
    graph = ws.capture(clipped, model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, 24))
    plan, plain = ws.plan(graph, "dp=4", owners()), ws.plan(graph, "dp=4", ws.DataParallel("zero1"))
    assert plan.update_owners == {}
    assert plan.storage == plain.storage
    assert str(ws.partition(graph, plan)) == str(ws.partition(graph, plain))


def test_named_owners_and_files() -> None:
    """Owners are chosen by name for any parameter, and a plan in a file keeps them."""
    model = model_of(bias=False)
    graph = ws.capture(mean_square, model, torch.optim.AdamW(model.parameters(), foreach=True), torch.randn(4, 24))
    named = {"0.weight": 3, "2.weight": 0}
    plan = ws.plan(graph, "dp=4", ws.DataParallel("zero1", owners=named))
    assert plan.storage["0.weight/exp_avg"].show((40, 24)) == "40 24 dp:3"
    assert plan.storage["1.weight/exp_avg"].show((16, 40)) == "16@dp 40"
    again = ws.Plan.from_json(plan.to_json())
    assert again.update_owners == named
    assert str(ws.partition(graph, again)) == str(ws.partition(graph, plan))
    automatic = ws.plan(muons(), "dp=2", owners())
    assert ws.Plan.from_json(automatic.to_json()).strategies == automatic.strategies


def test_ranks_run_what_they_own() -> None:
    """Every call runs on one rank or on all; each rank has the collectives of all."""
    graph = muons()
    local = ws.run_passes(ws.partition(graph, ws.plan(graph, "dp=3", owners())), ws.default_passes())
    each = [of_owner(local.graph, at) for at in range(3)]
    calls = [{n.name for n in one.nodes if n.op == "call_function"} for one in each]
    for node in local.graph.nodes:
        if node.op == "call_function":
            at = meta.owner(node)
            assert [node.name in found for found in calls] == [at in (None, rank) for rank in range(3)]
    products = [sum(str(n.target) == "aten.addmm.default" for n in one.nodes) for one in each]
    assert sum(products) - 2 * 5 == sum(str(n.target) == "aten.addmm.default" for n in local.graph.nodes)


def test_what_only_an_owner_has_is_not_read_elsewhere() -> None:
    """A pass that lets all ranks read it, or gives a collective an owner, is found."""
    graph = muons()
    for broken in ("reader", "collective"):
        local = ws.partition(graph, ws.plan(graph, "dp=2", owners()))
        owned = [n for n in local.graph.nodes if meta.owner(n) is not None and n.op == "call_function"]
        sent = [n for n in local.graph.nodes if "all_to_all" in n.name]
        meta.set_owner(owned[-1] if broken == "reader" else sent[0], None if broken == "reader" else 1)
        with pytest.raises(ws.GraphError) as error:
            check_owners(local.graph)
        said = "and reads" if broken == "reader" else "runs on the ranks at 1 alone"
        assert said in str(error.value)


REFUSED = {
    ("dp=2", "fully_shard"): """owners= with style 'fully_shard'
  needed: a style in which ranks share out the state of parameters that rest whole
  next: give "zero1" or "zero2\"""",
    ("dp=2,tp=2", "zero1"): """owners= names '0.weight', which is 40@tp 24
  needed: a parameter that no other axis shards
  next: leave it out""",
    ("a=2,dp=2", "zero1"): """DataParallel(owners=True) over a and dp
  needed: one axis of data parallelism
  next: leave out owners, or give one axis""",
}


@pytest.mark.parametrize(("mesh", "style"), list(REFUSED))
def test_refusals(mesh: str, style: Any) -> None:
    """What owners do not go with is said before anything runs."""
    model = model_of(bias=False)
    graph = ws.capture(mean_square, model, torch.optim.AdamW(model.parameters()), torch.randn(4, 24))
    others = [ws.TensorParallel({"0": "colwise"}, axis="tp")] if "tp" in mesh else []
    axis, named = ("a", "dp") if "a=2" in mesh else "dp", {"0.weight": 0} if others else True
    with pytest.raises(ws.PlanError) as error:
        ws.plan(graph, mesh, [ws.DataParallel(style, axis=axis, owners=named), *others])
    assert str(error.value) == REFUSED[mesh, style]


def test_matrices_that_another_axis_shards_have_no_owner() -> None:
    """Beside tensor parallelism, the others have; beside stages, each stage shares out its own."""
    beside = [owners(axis="dp"), ws.TensorParallel({"0": "colwise", "1": "rowwise"}, axis="tp")]
    plan = ws.plan(muons(), "dp=2,tp=2", beside)
    assert sorted(plan.update_owners) == [f"{i}.weight" for i in (2, 3, 4)]
    stages = ws.Pipeline(stages=[["0", "1"], ["2", "3", "4"]])
    plan = ws.plan(muons(), "dp=2,pp=2", [owners(axis="dp"), stages])
    assert {plan.update_owners["0.weight"], plan.update_owners["1.weight"]} == {0, 1}
    assert {plan.update_owners[f"{i}.weight"] for i in (2, 3, 4)} == {0, 1}
    params, local = {i.name for i in plan.inputs if i.role is Role.PARAM}, ws.partition(muons(), plan)
    for stage in range(2):
        updated = {out.target for out in stage_program(local, stage).outputs if out.target in params}
        assert updated == {name for name, at in plan.owners.items() if at == stage}


def test_owners_of_unknown_parameters() -> None:
    """A wrong name, and a wrong coordinate."""
    model = model_of(bias=False)
    graph = ws.capture(mean_square, model, torch.optim.AdamW(model.parameters()), torch.randn(4, 24))
    with pytest.raises(ws.PlanError, match="owners= names"):
        ws.plan(graph, "dp=2", ws.DataParallel("zero1", owners={"9.weight": 0}))
    with pytest.raises(ws.WholestepError, match="coordinate 5 of axis 'dp'"):
        ws.plan(graph, "dp=2", ws.DataParallel("zero1", owners={"0.weight": 5}))


def test_a_plan_whose_owners_were_changed() -> None:
    """What a file could say, and no plan does."""
    graph = muons()
    plan = ws.plan(graph, "dp=2", owners())
    for changed in ({"owner_axis": ""}, {"owner_axis": "tp"}, {"update_owners": {}}, {"update_owners": {"x": 0}}):
        with pytest.raises(ws.WholestepError):
            ws.partition(graph, replace(plan, **changed))  # type: ignore[arg-type]
    without = replace(plan, owner_axis="", update_owners={})
    with pytest.raises(ws.WholestepError):
        ws.partition(graph, without)
