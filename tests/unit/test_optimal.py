"""Layouts solved for: the program against every assignment, its plans against one device and against plans by hand."""

import sys
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import wholestep as ws
from tests import tp_models as models
from tests.together import OneDevice, compare
from tests.tp_models import MLP, Llama, Normed, next_token, squares, step_of
from tests.unit.test_tensor_parallel import builder, dp, floats, tokens
from wholestep import DataParallel, Hardware, TensorParallel
from wholestep.capture import capture_step
from wholestep.cli.hf import ModelSpec, build
from wholestep.graph.graph import TrainGraph
from wholestep.layout import REPLICATED, AxisState
from wholestep.plan.data_parallel import STORAGE_OPTIONS, PerParameterStorage
from wholestep.plan.plan import Plan
from wholestep.planner.bounds import costs
from wholestep.planner.ilp.build_problem import ProblemBuilder, ProblemSpec
from wholestep.planner.ilp.formulation import solve
from wholestep.planner.ilp.prices import Prices
from wholestep.planner.ilp.problem import Need, OneOf, Option, Problem, StepLoad, ValueEdge, evaluate, fits
from wholestep.planner.ilp.solve import decomposable, solve_layouts

TOLERANCE = 1e-10
STATES = (REPLICATED, AxisState("S", 0), AxisState("P", op="sum"))
QUICK_LINK = Hardware.measured(
    flops_per_us=10, memory_bytes_per_us=100, launch_us=0.1, link_us=0.1, link_bytes_per_us=10_000
)
SLOW_MEMORY = Hardware.measured(
    flops_per_us=1e6, memory_bytes_per_us=10, launch_us=0.01, link_us=1, link_bytes_per_us=100
)
MACHINES = {"quick link": QUICK_LINK, "slow memory": SLOW_MEMORY}


# -- the program and every assignment ---------------------------------------------------------


def best_of_all(problem: Problem) -> float | None:
    found = (evaluate(problem, picked) for picked in product(*(range(len(c.options)) for c in problem.choices)))
    return min((load.step_us for load in found if load and fits(problem, load)), default=None)


def random_problem(seed: int) -> Problem:
    r = Random(seed)

    def phases(often: float) -> tuple[float, float, float]:
        a, b, c = (1000 * r.random() if r.random() < often else 0.0 for _ in range(3))
        return a, b, c

    def load() -> StepLoad:
        bytes_ = [1e9 * r.random() for _ in range(3)]
        return StepLoad(phases(0.8), phases(0.3), phases(0.3), phases(0.3), *bytes_)

    size = r.randint(3, 6)
    edges = [(i, j) for i in range(size) for j in range(i + 1, size) if r.random() < 0.5]
    choices: list[OneOf] = []
    for number in range(size):
        takes = [at for at, (_, taker) in enumerate(edges) if taker == number]
        options = [
            Option({0: r.choice(STATES)}, {at: r.choice(STATES[:2]) for at in takes}, load())
            for k in range(r.randint(1, 4))
        ]
        choices.append(OneOf(f"{number}", tuple(options), r.randint(1, 3)))
    values: list[ValueEdge] = []
    for maker in range(size):
        needs = tuple(Need(taker, at, r.random() < 0.4) for at, (m, taker) in enumerate(edges) if m == maker)
        moves = {
            (a, b): load() if a != b else StepLoad() for a in STATES for b in STATES[:2] if a == b or r.random() < 0.9
        }
        kept = {state: 1e9 * r.random() for state in STATES}
        values += [ValueEdge(maker, 0, needs, moves, r.randint(1, 2), kept, r.randint(0, 2))] if needs else []
    return Problem(tuple(choices), tuple(values), r.choice([None, None, 2e10 * r.random()]), load())


def test_the_program_finds_the_best_of_all_assignments() -> None:
    feasible = 0
    for seed in range(100):
        problem = random_problem(seed)
        expected, found = best_of_all(problem), solve(problem, gap=0.0)
        assert (expected is None) == (found is None), seed
        if found is not None:
            feasible += 1
            assert found.step_us == pytest.approx(expected, rel=1e-6), seed
            assert found.bound_us == pytest.approx(expected, rel=1e-5), seed
            assert found.gap < 1e-5
    assert feasible > 50


def product_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def asked(mesh: str, hardware: Any, **options: Any) -> ProblemSpec:
    return ProblemSpec(Prices(hardware, ws.Mesh(mesh), "tp"), **options)


@pytest.mark.parametrize("name", MACHINES)
def test_of_a_layer_every_assignment_is_tried(name: str) -> None:
    model = nn.Linear(8, 12, bias=False)
    graph = capture_step(
        product_step, (model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 8)), {}
    ).graph
    problem = ProblemBuilder(graph, asked("tp=2", MACHINES[name])).problem()
    size = prod(len(choice.options) for choice in problem.choices)
    assert 100 < size < 200_000, "small enough to try, large enough to mean something"
    best, found = best_of_all(problem), solve(problem, gap=0.0)
    assert found is not None
    assert found.step_us == pytest.approx(best, rel=1e-6)
    again = evaluate(problem, found.picked)
    assert again is not None
    assert again.step_us == pytest.approx(best, rel=1e-6)


# -- layers that repeat -----------------------------------------------------------------------------


@cache
def llama(layers: int) -> tuple[TrainGraph, nn.Module]:
    target = build(ModelSpec("llama-3-8b", layers=layers))
    return capture_step(target.step, target.args, target.kwargs).graph, target.models()[0]


@pytest.mark.full
def test_layers_that_repeat_are_solved_once() -> None:
    few, many = (
        len(ProblemBuilder(llama(layers)[0], asked("tp=8", Hardware.preset("dgx-h100"))).problem().choices)
        for layers in (8, 9)
    )
    assert few == many


@pytest.mark.full
def test_the_optimum_of_many_layers() -> None:
    hardware = Hardware.preset("dgx-h100")
    found = solve_layouts(llama(9)[0], replace(asked("dp=32,tp=8", hardware), axes=("dp",), storages=STORAGE_OPTIONS))[
        0
    ]
    assert found.solution.gap < 0.01
    assert found.solution.variables < 8000


@pytest.mark.full
def test_a_solution_is_that_of_smaller_budgets_that_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[float | None] = []

    def counted(problem: Problem, *args: Any) -> Any:
        solved.append(problem.budget_bytes)
        return solve(problem, *args)

    monkeypatch.setattr(sys.modules[solve_layouts.__module__], "solve", counted)
    wanted = replace(asked("dp=32,tp=8", Hardware.preset("dgx-h100")), axes=("dp",), storages=STORAGE_OPTIONS)
    graph = llama(2)[0]
    wide, same = solve_layouts(graph, wanted, (1e15, 1e14))
    assert same is wide
    held = wide.solution.load.peak_bytes
    assert 1e14 not in solved
    first, tight = solve_layouts(graph, wanted, (1e15, 0.9 * held))
    assert 0.9 * held in solved
    assert tight.solution.load.peak_bytes <= 0.9 * held < first.solution.load.peak_bytes


# -- beside plans by hand -------------------------------------------------------------------------


def step_s(graph: TrainGraph, planned: Plan, hardware: Hardware) -> float:
    return costs(ws.partition(graph, planned), planned, hardware).step_s


@pytest.mark.full
def test_no_slower_than_the_plans_that_llama_carries() -> None:
    hardware, (graph, model) = Hardware.preset("dgx-h100"), llama(2)
    found = ws.plan(graph, "tp=8", TensorParallel("auto", hardware=hardware))
    for by_hand in (TensorParallel.of(model), TensorParallel.of(model, loss_parallel=True)):
        assert step_s(graph, found, hardware) <= step_s(graph, ws.plan(graph, "tp=8", by_hand), hardware)
    assert found.storage["model.layers.0.mlp.gate_proj.weight"].show((14336, 4096)) == "14336@tp 4096"
    assert found.storage["model.layers.1.mlp.down_proj.weight"].show((4096, 14336)) == "4096 14336@tp"
    assert "layouts solved for" in found.strategy
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.full
def test_no_slower_than_a_plan_for_gpt() -> None:
    target = build(ModelSpec("gpt2", layers=2, batch=4))
    graph, hardware = capture_step(target.step, target.args, target.kwargs).graph, Hardware.preset("dgx-h100")
    styles = {"attn.c_attn": "colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
    by_hand = TensorParallel({"transformer.wte": "rowwise"} | {f"transformer.h.*.{n}": s for n, s in styles.items()})
    found = ws.plan(graph, "tp=4", TensorParallel("auto", hardware=hardware))
    assert step_s(graph, found, hardware) <= step_s(graph, ws.plan(graph, "tp=4", by_hand), hardware)


# -- the numbers --------------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("kind", ["mlp", "normed", "llama", "by hand"])
def test_what_is_found_computes_the_same(kind: str, mesh: str, name: str) -> None:
    one = {
        "mlp": lambda: OneDevice(builder(MLP, hidden=32), step_of(squares), floats(6, 12)),
        "normed": lambda: OneDevice(builder(Normed, bias=True), step_of(squares), floats(4, 6, 10)),
        "llama": lambda: OneDevice(builder(Llama, layers=1), step_of(next_token), tokens()),
        "by hand": lambda: OneDevice(builder(Llama, layers=1, by_hand=True, tied=True), step_of(next_token), tokens()),
    }[kind]()
    tensor = TensorParallel("auto", hardware=MACHINES[name])
    found = compare(one, mesh, [dp("fully_shard"), tensor] if "dp" in mesh else tensor)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.usefixtures("double")
def test_ranks_may_be_given_parts_of_a_sequence() -> None:
    one = OneDevice(builder(Normed), step_of(squares), floats(4, 6, 10))
    found = compare(one, "tp=2", TensorParallel("auto", input_dim=1, hardware=QUICK_LINK))
    assert found.worst < TOLERANCE
    assert any("6@tp" in layout.show((4, 6, 10)) for layout in found.plan.storage.values() if len(layout.dims) == 3)


def test_what_is_placed_stays() -> None:
    model = MLP()
    graph = capture_step(step_of(squares), (model, torch.optim.SGD(model.parameters()), *floats(6, 12)[0]), {}).graph
    tensor, strange = TensorParallel("auto", hardware=QUICK_LINK), {"net1.weight": ws.Layout(((), ("tp",)))}
    assert ws.plan(graph, "tp=2", tensor).storage["net1.weight"] != strange["net1.weight"]
    assert ws.plan(graph, "tp=2", tensor, placed=strange).storage["net1.weight"] == strange["net1.weight"]


def test_one_rank_solves_nothing() -> None:
    graph = llama(1)[0]
    assert decomposable(graph)
    planned = ws.plan(graph, "dp=2,tp=1", [DataParallel("zero1", axis="dp"), TensorParallel("auto")])
    assert planned.decomposed == ()


def test_options_that_say_nothing_are_refused() -> None:
    with pytest.raises(ws.PlanError, match=r'loss_parallel with TensorParallel\("auto"\)'):
        TensorParallel("auto", loss_parallel=True)
    with pytest.raises(ws.PlanError, match="hardware with a plan by module"):
        TensorParallel(models.MLP_PLAN, hardware=Hardware.default())


# -- what a user asks for ----------------------------------------------------------------------------


@cache
def small() -> TrainGraph:
    model = MLP()
    return capture_step(step_of(squares), (model, torch.optim.SGD(model.parameters()), *floats(6, 12)[0]), {}).graph


def test_pins_are_kept() -> None:
    free = ws.plan(small(), "tp=2", TensorParallel("auto", hardware=QUICK_LINK)).storage["net1.weight"]
    assert free.show((32, 12)) == "32@tp 12"
    for placement, shown in ((Shard(1), "32 12@tp"), (Replicate(), "32 12")):
        tensor = TensorParallel("auto", hardware=QUICK_LINK, pinned={"net1.weight": placement})
        assert ws.plan(small(), "tp=2", tensor).storage["net1.weight"].show((32, 12)) == shown


def test_results_of_modules_can_be_pinned() -> None:
    for placement, shown in ((Shard(0), "6@tp 12"), (Shard(-1), "6 12@tp"), (Replicate(), "6 12")):
        tensor = TensorParallel("auto", hardware=QUICK_LINK, pinned={"net2": placement})
        planned = ws.plan(small(), "tp=2", tensor)
        made = [d for name, d in planned.decisions.items() if name.startswith("addmm_1")][-1]
        assert made.given[0].show((6, 12)) == shown


def test_modules_can_be_left_whole() -> None:
    tensor = TensorParallel("auto", hardware=QUICK_LINK, replicated=("net1",))
    planned = ws.plan(small(), "tp=2", tensor)
    assert not planned.storage["net1.weight"].axes
    assert not planned.storage["net1.bias"].axes
    assert not any(x.is_sharded for x in planned.decisions["addmm"].operands)


@pytest.mark.usefixtures("double")
def test_what_is_asked_for_computes_the_same() -> None:
    one = OneDevice(builder(MLP, hidden=32), step_of(squares), floats(6, 12))
    for options in ({"pinned": {"net1.weight": Shard(1), "net2": Shard(0)}}, {"replicated": ("net2",)}):
        assert compare(one, "tp=2", TensorParallel("auto", hardware=QUICK_LINK, **options)).worst < TOLERANCE


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


@pytest.mark.usefixtures("double")
def test_an_op_that_is_left_whole_behind_one_that_is_cut() -> None:
    """It could be written out to stay cut, which is not what was asked for: it takes its operand whole."""
    one = OneDevice(builder(Three), step_of(squares), floats(6, 12))
    tensor = TensorParallel("auto", hardware=Hardware.preset("dgx-h100"), pinned={"b": Shard(1)}, replicated=("c",))
    found = compare(one, "tp=2", tensor)
    assert found.worst < TOLERANCE
    assert not any(
        x.is_sharded for x in (*found.plan.decisions["addmm_2"].operands, *found.plan.decisions["addmm_2"].given)
    )


@pytest.mark.usefixtures("double")
def test_an_empty_softmax_is_not_decomposed() -> None:
    """A softmax of no elements has no largest element."""

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.none = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(4, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            none = self.none.softmax(1).sum() + self.none.log_softmax(1).sum() + (x @ self.w)[:, :0].softmax(1).sum()
            return (x @ self.w).softmax(1).square().sum() + none

    one = OneDevice(builder(Empty), product_step, [(x,) for x, _ in floats(4, 6)])
    found = compare(one, "tp=2", TensorParallel("auto", hardware=QUICK_LINK))
    assert found.worst < TOLERANCE, found.where


def test_patterns_that_name_nothing() -> None:
    for options in ({"pinned": {"net.weight": Shard(0)}}, {"replicated": ("net3",)}):
        with pytest.raises(
            ws.PlanError, match=r"names no module and no parameter\n  needed: those of the step, as '.*net"
        ):
            ws.plan(small(), "tp=2", TensorParallel("auto", **options))


def test_a_pin_that_cannot_be() -> None:
    with pytest.raises(ws.PlanError, match=r"'net1.weight' is to be cut along dim 2: %net1.weight has no such layout"):
        ws.plan(small(), "tp=2", TensorParallel("auto", pinned={"net1.weight": Shard(2)}))


# -- in Auto ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_budget_that_only_a_mixed_plan_meets() -> None:
    """Neither any template nor anything that recomputes: some parameters in parts, others not, fit and are faster."""
    hardware, (graph, model), mesh = Hardware.preset("dgx-h100"), llama(2), "dp=32,tp=8"
    auto = ws.Auto("2GB", hardware, tensor=TensorParallel.of(model), recompute=False)
    with pytest.raises(ws.PlanError, match="no plan fits"):
        replace(auto, solve=False).search(graph, mesh)
    found, slack = auto.search(graph, mesh), replace(auto, memory_bytes="4.4GB")
    assert "each parameter by itself" in found.plan.strategy
    assert found.best.needs_bytes <= 2_000_000_000
    templates = replace(slack, solve=False, styles=("replicate", "zero1", "zero2", "fully_shard")).search(graph, mesh)
    assert found.best.batch_s < templates.best.batch_s
    assert found.best.strategies is not None
    stored = [part.storage for part in found.best.strategies.parts if isinstance(part, PerParameterStorage)]
    assert len(set(stored[0].values())) > 1


def test_the_objective_tells_the_program_s_bound() -> None:
    planned = ws.plan(small(), "dp=4", ws.Auto(hardware=QUICK_LINK))
    made = planned.objective
    assert made is not None
    assert 0 < made.model_bound_s <= made.model_s
    assert made.model_bound_s >= 0.99 * made.model_s > 0
    assert any(note.startswith("solved: ") for note in planned.notes)
    assert Plan.from_json(planned.to_json()) == planned


def test_a_plan_that_was_solved_for_can_be_applied() -> None:
    planned = ws.plan(small(), "tp=2", TensorParallel("auto", hardware=QUICK_LINK))
    read = Plan.from_json(planned.to_json())
    assert read.strategies is not None
    assert ws.plan(small(), "tp=2", read.strategies).decisions == planned.decisions
