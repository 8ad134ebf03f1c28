"""Plans that are kept: written, read, compared, and applied to a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.optim import AdamW

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.layout import AxisState
from wholestep.plan.plan_file import decode_parts, decode_strategies, encode_parts, encode_strategies
from wholestep.plan.strategies import Strategies
from wholestep.plan.strategy import Pins
from wholestep.plan.tensor_parallel import SolvedLayouts

MACHINE = ws.Hardware.preset("dgx-h100")
HALF = ws.MixedPrecision(torch.bfloat16, torch.float32)
BY_HAND: dict[str, Any] = {
    "*.0": ColwiseParallel(),
    "*.2": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
}


def model_of(width: int = 8, layers: int = 3) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(layers)]
    made = nn.Sequential(*blocks)
    made.add_module("norm", nn.LayerNorm(width))
    return made


def graph_of(width: int = 8, layers: int = 3) -> ws.TrainGraph:
    model = model_of(width, layers)
    return ws.capture(train, model, AdamW(model.parameters()), torch.randn(4, 6, width))


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    return graph_of()


@pytest.mark.parametrize(
    "strategies",
    [
        [ws.DataParallel("zero1", axis=("dp", "tp"), input_batch_dim={"mask": None, "*": 0})],
        [ws.DataParallel("fully_shard", axis="dp", semantics="global", inputs="global"),
         ws.TensorParallel(BY_HAND, axis="tp")],
        [ws.TensorParallel({"*.0": "colwise", "*.2": "rowwise"}, axis="tp", input_dim={"x": 1})],
    ],
)  # fmt: skip
def test_strategies_come_back(graph: ws.TrainGraph, strategies: list[Any], tmp_path: Path) -> None:
    """What is read plans as what was written does."""
    made = ws.plan(graph, "dp=2,tp=2", strategies)
    made.save(tmp_path / "sub" / "plan.json")
    read = ws.Plan.load(tmp_path / "sub" / "plan.json")
    assert read == made
    assert read.strategies is not None
    assert ws.plan(graph, made.mesh, list(read.strategies.parts)) == made
    plain = [part for part in strategies if isinstance(part, ws.DataParallel)]
    assert [part for part in read.strategies.parts if isinstance(part, ws.DataParallel)] == plain


class Mine(ws.DataParallel):
    """A strategy of the user's."""


def test_a_plan_of_a_foreign_strategy_is_not_applied(graph: ws.TrainGraph) -> None:
    made = ws.plan(graph, "dp=2", Mine("zero1"))
    assert ws.compile(train, parallel=made).options.plan is made
    read = ws.Plan.from_json(made.to_json())
    with pytest.raises(ws.PlanError, match="does not hold what made it"):
        ws.compile(train, parallel=read)


def test_what_an_applied_plan_says_of_a_step(graph: ws.TrainGraph) -> None:
    """Its strategies, mesh and budget are those of the step."""
    made = ws.plan(graph, "dp=4", ws.Auto("1GiB"))
    options = ws.compile(train, parallel=made).options
    assert isinstance(made.strategies, Strategies)
    assert options.mesh == made.mesh
    assert options.memory_bytes == 1 << 30
    assert options.may_regather == (made.strategies.options.reshard_after_forward is False)
    with pytest.raises(ws.MeshError, match="mesh dp=2 with a plan for dp=4"):
        ws.compile(train, parallel=made, mesh="dp=2")


def step_on(width: int, layers: int, plan: ws.Plan) -> Any:
    torch.manual_seed(0)
    model = model_of(width, layers)
    step = ws.compile(train, parallel=plan)
    return step(model, AdamW(model.parameters()), torch.randn(4, 6, width))


def test_a_plan_is_applied_to_the_step_it_fits_alone() -> None:
    made = ws.plan(graph_of(), "dp=1", ws.DataParallel("zero1"))
    assert step_on(8, 3, made).isfinite()
    with pytest.raises(ws.PlanError) as caught:
        step_on(12, 3, made)
    assert "0.0.weight: f32[16 8] in the plan, f32[24 12] here" in str(caught.value)
    assert "(and 10 more)" in str(caught.value)
    with pytest.raises(ws.PlanError, match=r"3\.0\.weight: absent in the plan, f32\[16 8\] here"):
        step_on(8, 4, made)


def test_a_file_that_is_no_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(ws.PlanError, match=r"nowhere\.json cannot be read"):
        ws.Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(ws.PlanError, match=r"no\.json: field 'format'"):
        ws.Plan.load(tmp_path / "no.json")


def test_a_name_that_is_no_dtype_is_refused(graph: ws.TrainGraph) -> None:
    """Not another attribute of torch: a file gives values alone."""
    data = ws.plan(graph, "dp=2").to_json()
    assert '"float32"' in data
    with pytest.raises(ws.PlanError, match=r"inputs\[0\]\.dtype is 'hub'\n  needed: a dtype of torch"):
        ws.Plan.from_json(data.replace('"float32"', '"hub"'))


def test_pins_by_pairs_of_names_come_back() -> None:
    """What a node reads of another is pinned by both names."""
    pins = Pins(
        reads={("relu", "addmm"): {"tp": AxisState("S", 1)}},
        op_strategies={"mm": {"tp": ("n", "")}},
        decomposed=("mean",),
    )
    cuts = Strategies((SolvedLayouts("tp", {"0.weight": AxisState("S", 0)}, pins, "solved"),))
    assert decode_strategies(json.loads(json.dumps(encode_strategies(cuts)))) == cuts


@pytest.mark.parametrize("options", [{}, {"hardware": MACHINE}, {"pinned": {"0": Shard(1)}}, {"replicated": ("0",)}])
def test_what_is_solved_for_on_this_rank_stays_this_ranks(options: dict[str, Any]) -> None:
    """A strategy that solves for layouts has no text, whatever its options: its rank's own is taken, by its number."""
    local = Strategies((ws.DataParallel("zero1"), ws.TensorParallel("auto", **options)))
    values = encode_parts(local, local)
    assert [isinstance(value, int) for value in values] == [False, True]
    assert decode_parts(json.loads(json.dumps(values)), local) == local
    assert encode_strategies(local) is None


def test_precision_is_kept_with_a_plan_and_asked_for_again(tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    given = model, AdamW(model.parameters()), torch.randn(4, 6, 6)
    graph = ws.capture(train, *given, options=ws.CaptureOptions(mixed_precision=HALF))
    made = ws.plan(graph, "dp=1")
    made.save(tmp_path / "plan.json")
    read = ws.Plan.load(tmp_path / "plan.json")
    assert (read, read.mixed_precision) == (made, HALF)
    ws.compile(train, parallel=read, mixed_precision=HALF)(*given)
    with pytest.raises(ws.PlanError, match=r"the plan was made with MixedPrecision\(param=torch.bfloat16"):
        ws.compile(train, parallel=read)(*given)


def test_hardware_prices_what_is_explained_and_is_kept(graph: ws.TrainGraph, tmp_path: Path) -> None:
    slow = ws.Hardware.preset("dgx-a100+ethernet-10")
    made = [ws.plan(graph, "node=4,rank=8", hardware=given) for given in (None, slow)]
    times = [float(one.explain("0.0.weight").split(" us)")[0].rpartition("(")[2]) for one in made]
    assert times[1] > 5 * times[0], "gathered over a slow link between nodes"
    made[1].save(tmp_path / "plan.json")
    assert ws.Plan.load(tmp_path / "plan.json").hardware == slow
    hardware = ws.Hardware.measured(link_us=3.0)
    measured = ws.plan(graph, "dp=2", hardware=hardware)
    assert ws.Plan.from_json(measured.to_json()).hardware == hardware
