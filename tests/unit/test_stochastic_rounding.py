"""Updates of bfloat16 parameters in float32, rounded at random: unbiased, reproducible, however tensors are sharded."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.simulate import Simulation
from tests.steps import clipped, mean_square
from wholestep.capture import Capture, CaptureOptions, capture_step
from wholestep.graph.meta import one_tensor
from wholestep.graph.nodes import is_collective
from wholestep.graph.ops import ROUND_AT_RANDOM
from wholestep.mesh import Mesh
from wholestep.passes.bucket import GATHER

ROUNDED = ws.MixedPrecision(stochastic_rounding=True)
STEPS = 512
UNIT = 2.0**-7  # between neighbours in bfloat16, of numbers from 1 to 2


def rounded(value: Tensor, step: float = 1.0, salt: int = 5) -> Tensor:
    return ROUND_AT_RANDOM(value, torch.tensor(step), [0] * value.dim(), list(value.shape), salt)


# -- the numbers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "sign"), [(0.0, 1.0), (0.003, -1.0), (0.25, 1.0), (0.5, -1.0), (0.9, 1.0)])
def test_the_expectation_is_the_value(share: float, sign: float) -> None:
    """Over elements at one step, and over steps at one element; the sums are within four standard deviations."""
    value = sign * (1 + share * UNIT)
    over_elements = rounded(torch.full((256, 256), value)).double()
    over_steps = torch.stack([rounded(torch.full((16,), value), step).double() for step in range(STEPS)])
    for found in (over_elements.flatten(), over_steps.flatten()):
        up = ((found.abs() - 1) / UNIT).round()
        assert set(up.tolist()) <= {0.0, 1.0}, "one of both neighbours"
        exact = round(share * UNIT * 2**23) / 2**16  # of the 16 bits that are cut off, in float32
        allowed = 4 * (exact * (1 - exact) / found.numel()) ** 0.5
        assert abs(float(up.mean()) - exact) <= allowed
    each = ((over_steps.abs() - 1) / UNIT).mean(0)
    assert (each - share).abs().max() <= 5 * (0.25 / STEPS) ** 0.5, "of each element by itself"


def test_bits_of_neighbours_steps_and_parameters_differ() -> None:
    value = torch.full((64, 64), 1 + UNIT / 2)
    base = rounded(value) > 1
    for other in (rounded(value, step=2.0), rounded(value, salt=6)):
        assert abs(float(((other > 1) == base).double().mean()) - 0.5) < 0.05
    for shifted in (base.roll(1, 0), base.roll(1, 1)):
        assert abs(float((shifted == base).double().mean()) - 0.5) < 0.05
    assert torch.equal(rounded(value) > 1, base), "the same again"


def test_what_bfloat16_has_stays() -> None:
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(rounded(exact.float()), exact)
    special = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, float("nan")])
    odd = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)  # other bits of NaN
    assert rounded(torch.cat([special, odd])).isnan().tolist() == [False] * 4 + [True] * 3
    assert rounded(special[:4]).tolist() == special[:4].tolist()


# -- steps -----------------------------------------------------------------------------------------------------
def captured(optimizer: Any = torch.optim.AdamW, step: Any = clipped, **options: Any) -> Capture:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 7)).bfloat16()
    made = optimizer(model.parameters(), lr=1e-3, **options)
    x = torch.randn(4, 12).bfloat16()
    return capture_step(step, (model, made, x), {}, CaptureOptions(mixed_precision=ROUNDED))


def trained(capture: Capture, mesh: str, data: Any, steps: int = 2) -> dict[str, Tensor]:
    """Parameters and state after steps in which each data-parallel rank has data of its own."""
    plan = ws.plan(capture.graph, mesh, data)
    local = ws.run_passes(ws.partition(capture.graph, plan), ws.default_passes(ws.Hardware.default()))
    simulation = Simulation(capture, plan, local)
    simulation.start()
    name = next(i.name for i in capture.graph.inputs if i.role.name == "BATCH")
    for step in range(steps):
        groups = [
            sum(at for axis, at in Mesh(mesh).coordinate(r).items() if axis != "tp") for r in range(Mesh(mesh).size)
        ]
        seeds = [torch.Generator().manual_seed(10 * step + group) for group in groups]
        simulation.step([{name: torch.randn(4, 12, generator=seed).bfloat16()} for seed in seeds])
    return {i.name: simulation.whole(i.name) for i in plan.inputs if i.role.name in ("PARAM", "STATE")}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_a_step_is_one_in_float32_that_is_rounded(options: dict[str, Any]) -> None:
    capture = captured(step=mean_square, **options)
    found = trained(capture, "dp=1", ws.DataParallel("replicate"), steps=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 7)).bfloat16()
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    model(x).square().mean().backward()
    wide = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        wide[name].grad = param.grad.float()  # type: ignore[union-attr]
    torch.optim.AdamW(wide.values(), lr=1e-3).step()
    changed = 0
    for name, param in wide.items():
        exact, got = param.detach(), found[name].float()
        assert ((got - exact).abs() <= exact.abs() * 2.0**-7 + 1e-30).all(), "a neighbour of the float32 value"
        changed += int((got != exact.bfloat16().float()).sum())
    assert changed > 20, "and not always the nearest"


@pytest.mark.crossed
@pytest.mark.parametrize("style", ["zero1", "fully_shard"])
@pytest.mark.parametrize("mesh", ["dp=2", "node=2,gpu=1"])
def test_shards_are_rounded_as_the_whole(style: str, mesh: str) -> None:
    """Two ranks, whose sums have one order: the same bits where the state is sharded, unevenly too."""
    capture = captured(step=mean_square)
    whole, cut = (trained(capture, mesh, ws.DataParallel(kind)) for kind in ("replicate", style))  # type: ignore[arg-type]
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert torch.equal(value, cut[name]), name


def test_a_piece_has_the_bits_of_its_place() -> None:
    value, step = 1 + torch.rand(6, 5, 4), torch.tensor(3.0)
    whole = ROUND_AT_RANDOM(value, step, [0, 0, 0], [6, 5, 4], 5)
    for a, b, c in ((0, 0, 0), (2, 0, 1), (5, 4, 3), (3, 2, 0)):
        piece = ROUND_AT_RANDOM(value[a:, b:, c:], step, [a, b, c], [6, 5, 4], 5)
        assert torch.equal(piece, whole[a:, b:, c:])


def test_dims_cut_by_different_axes() -> None:
    """Each rank is told where its piece begins along both dims; what is not cut begins at 0."""
    parallel = [ws.DataParallel("fully_shard", axis="dp"), ws.TensorParallel({"2": "rowwise"}, axis="tp")]
    graph = captured().graph
    local = ws.partition(graph, ws.plan(graph, "dp=3,tp=2", parallel))
    starts = {str(n.args[2]) for n in local.graph.nodes if n.target is ROUND_AT_RANDOM}
    assert starts == {
        "[start(24@tp,dp), 0]", "[start(24@tp,dp)]", "[start(7@dp), start(24@tp)]", "[start(7@dp)]",
    }  # fmt: skip
    assert all(value.isfinite().all() for value in trained(captured(), "dp=3,tp=2", parallel, steps=1).values())


def test_small_updates_are_not_lost() -> None:
    """A thousandth of the distance between neighbours, a thousand times: lost by rounding to the nearest."""
    param = torch.ones(512, dtype=torch.bfloat16)
    nearest = param.clone()
    for step in range(1000):
        param = rounded(param.float() + UNIT / 1000, float(step))
        nearest = (nearest.float() + UNIT / 1000).bfloat16()
    assert (nearest == 1).all()
    assert float(param.double().mean()) == pytest.approx(1 + UNIT, abs=4 * UNIT / 512**0.5)


# -- what is refused -------------------------------------------------------------------------------------------
def test_an_optimizer_without_a_count() -> None:
    with pytest.raises(ws.CaptureError) as error:
        captured(torch.optim.SGD)
    assert "SGD keeps no count of the updates of '0.weight'" in str(error.value)
    assert "an optimizer whose state has a tensor 'step'" in str(error.value)


def test_a_model_without_bfloat16() -> None:
    model = nn.Linear(4, 4)
    options = CaptureOptions(mixed_precision=ROUNDED)
    with pytest.raises(ws.CaptureError, match="the step updates no parameter in bfloat16"):
        capture_step(mean_square, (model, torch.optim.AdamW(model.parameters()), torch.randn(2, 4)), {}, options)


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    params = list(model.parameters())

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("inside the update")

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", fails)
    with pytest.raises(ws.CaptureError, match="inside the update"):
        capture_step(mean_square, (model, optimizer, torch.randn(2, 4).bfloat16()), {},
                     CaptureOptions(mixed_precision=ROUNDED))  # fmt: skip
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == [id(param) for param in params]
    assert set(optimizer.state) <= set(params)


# -- collectives -----------------------------------------------------------------------------------------------
HALF, FULL = "bfloat16", "float32"


@pytest.mark.crossed
@pytest.mark.parametrize(("param", "reduce"), [(HALF, FULL), (HALF, HALF), (FULL, HALF)])
@pytest.mark.parametrize(
    ("mesh", "style"),
    [
        ("dp=4", "fully_shard"), ("dp=4", "replicate"), ("node=4,gpu=8", "replicate"), ("dp=4", "zero1"),
        ("node=2,gpu=2", "hybrid"),
    ],
)  # fmt: skip
def test_collectives_carry_the_dtypes_that_are_asked_for(param: str, reduce: str, mesh: str, style: Any) -> None:
    """Gathers for computing that of `param`, sums that of `reduce`; new parameters of zero1 that of storage."""
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 2048, bias=False))
    precision = ws.MixedPrecision(getattr(torch, param), getattr(torch, reduce))
    options = ws.CaptureOptions(mixed_precision=precision)
    graph = ws.capture(
        mean_square, model, torch.optim.AdamW(model.parameters()), torch.randn(64, 2048), options=options
    )
    local = ws.partition(graph, ws.plan(graph, mesh, ws.DataParallel(style), hardware=ws.Hardware.preset("dgx-h100")))
    found: dict[str, set[str]] = {"gather": set(), "sum": set()}
    for node in local.graph.nodes:
        if is_collective(node) and one_tensor(node).shape:
            kind = "gather" if node.target is GATHER else "sum"
            found[kind].add(str(one_tensor(node).dtype).removeprefix("torch."))
    assert found["sum"] == {reduce}
    gathers = {"replicate": {reduce} if "node" in mesh else set(), "zero1": {"float32"}}
    assert found["gather"] == gathers.get(style, {param})
