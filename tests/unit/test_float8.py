"""Linear layers in float8 on one device, against the same written by hand; what is chosen, what is refused."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.float8 import LAYERS, Linear, Model, batch, by_hand, train
from wholestep.cost.compute import work
from wholestep.graph.meta import module_path, one_tensor, tensors
from wholestep.graph.op_kinds import collective_kind
from wholestep.partition.rank_ops import contiguous
from wholestep.plan.op_strategies import cut
from wholestep.rules.call import Call
from wholestep.rules.registry import bind_rule

RECIPES = ["tensorwise", "rowwise"]
Recipe = Any


def pair(recipe: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, by_hand(copy.deepcopy(model), recipe == "rowwise")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def largest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


def captured(model: nn.Module, float8: ws.Float8, tokens: Tensor | None = None) -> ws.TrainGraph:
    given = batch(0) if tokens is None else tokens
    return ws.capture(train, model, sgd(model), given, options=ws.CaptureOptions(float8=float8))


def products(graph: ws.TrainGraph) -> list[str]:
    found = [n for n in graph.graph.nodes if n.target is torch.ops.aten._scaled_mm.default]
    return [n.meta["custom"].get("module", "") for n in found]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_that_by_hand(recipe: Recipe, dtype: torch.dtype) -> None:
    model, twin = pair(recipe, dtype)
    plain = copy.deepcopy(model)
    step, optimizers = ws.compile(train, float8=ws.Float8(recipe, LAYERS)), [sgd(m) for m in (model, twin, plain)]
    for number in range(4):
        found = step(model, optimizers[0], batch(number))
        expected, without = train(twin, optimizers[1], batch(number)), train(plain, optimizers[2], batch(number))
        assert (found - expected).abs() < (1e-5 if dtype is torch.float32 else 4e-3)
        assert (found - without).abs() < 0.05
    if dtype is torch.float32:
        assert largest(model, twin) < 1e-5 < 5e-4 < largest(twin, plain)
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.usual("rowwise")
@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_and_mixed_precision_give_the_layer_bfloat16(recipe: Recipe) -> None:
    def autocast(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return train(model, optimizer, tokens)

    half = ws.MixedPrecision(torch.bfloat16)
    float8 = ws.Float8(recipe, LAYERS)
    for fn, options in ((autocast, {}), (train, {"mixed_precision": half})):
        model, twin = pair(recipe)
        graph = ws.capture(fn, model, sgd(model), batch(0), options=ws.CaptureOptions(float8=float8, **options))
        outs = {tensors(n)[0].dtype for n in graph.graph.nodes if n.target is torch.ops.aten._scaled_mm.default}  # type: ignore[union-attr]
        assert outs == {torch.bfloat16}
        step, other = ws.compile(fn, float8=float8, **options), sgd(twin)
        optimizer = sgd(model)
        for number in range(3):
            assert (step(model, optimizer, batch(number)) - train(twin, other, batch(number))).abs() < 0.03


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_layers_are_in_float8_again(recipe: Recipe) -> None:
    class Checkpointed(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    torch.manual_seed(0)
    model = Checkpointed()
    twin = by_hand(copy.deepcopy(model), recipe == "rowwise")
    step, optimizer, other = ws.compile(train, float8=ws.Float8(recipe, LAYERS)), sgd(model), sgd(twin)
    for number in range(3):
        step(model, optimizer, batch(number))
        train(twin, other, batch(number))
    assert largest(model, twin) < 1e-4


def test_layers_that_share_their_input_share_its_float8_form() -> None:
    graph = captured(Model(blocks=1), ws.Float8(modules=LAYERS))
    casts = [n for n in graph.graph.nodes if tensors(n)[0] and tensors(n)[0].dtype == torch.float8_e4m3fn]  # type: ignore[union-attr]
    made = [n for n in casts if n.target is torch.ops.aten._to_copy.default]
    assert len(made) == 2 + 3  # the input of gate and up, that of down, and three weights


def test_an_input_that_is_changed_in_place_is_scaled_again() -> None:
    def doubled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + 1
            first = model(x)
            return first + model(x.mul_(2))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64))
    twin = nn.Sequential(Linear(copy.deepcopy(model[0]), rowwise=False))  # type: ignore[arg-type]
    x = torch.randn(16, 32)
    found = ws.compile(doubled, float8=ws.Float8(modules=["0"]))(model, sgd(model), x)
    assert (found - doubled(twin, sgd(twin), x)).abs().max() < 1e-5


def test_auto_takes_large_layers_and_leaves_the_vocabulary() -> None:
    with torch.device("meta"):
        large = Model(blocks=1, width=2048, hidden=4352, vocab=8192)
        small = Model(blocks=1, width=512, hidden=1024, vocab=2048)
    for recipe in RECIPES:
        found = products(captured(large, ws.Float8(recipe)))  # type: ignore[arg-type]
        forward = [path for path in found if path]
        taken = ["layers.0.gate", "layers.0.up"] + ["layers.0.down"] * (recipe == "tensorwise")
        assert forward == taken
        assert len(found) == 3 * len(taken)
        with pytest.raises(ws.CaptureError, match="'auto' finds no linear that gains"):
            captured(small, ws.Float8(recipe))  # type: ignore[arg-type]


def test_products_are_priced_at_the_rate_of_float8() -> None:
    graph = captured(Model(blocks=1), ws.Float8(modules=LAYERS))
    node = next(n for n in graph.graph.nodes if n.target is torch.ops.aten._scaled_mm.default)
    found = work(node)
    assert found is not None
    assert (found.dtype, found.matmul, found.flops) == ("float8_e4m3fn", (1, 64, 64, 32), 2 * 64 * 64 * 32)
    assert found.moved_bytes == 64 * 32 + 32 * 64 + 4 * 64 * 64


@pytest.mark.parametrize("recipe", RECIPES)
def test_parameters_are_gathered_in_float8(recipe: Recipe) -> None:
    def gathered(**options: Any) -> int:
        model = Model()
        graph = ws.capture(train, model, sgd(model), batch(0), options=ws.CaptureOptions(**options))
        local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
        return local.collectives()["all_gather"].bytes

    whole, eight = gathered(), gathered(float8=ws.Float8(recipe, LAYERS))
    sent = 2 * 3 * 32 * 64 // 2  # numbers that a rank sends
    if recipe == "rowwise":  # once scaled by rows, once by columns, and the scales of rows
        assert eight == whole - 2 * sent + 4 * 2 * (64 + 64 + 32) // 2
    else:
        assert eight == whole - 3 * sent


def on_ranks(recipe: Recipe, factor: str, ranks: int) -> Tensor:
    """A float8 product, of which `ranks` ranks compute a part each, by the rule of the op, put together again."""
    left, right, scales = operands(recipe)
    arguments = (left, right, *scales, None, None, torch.float32)
    scaled_mm = torch.ops.aten._scaled_mm.default
    rule = bind_rule(Call.on(scaled_mm, arguments, {}, scaled_mm(*arguments)))
    assert rule is not None
    way, pieces = cut(rule.groups[0], factor), list[Tensor]()
    for rank in range(ranks):
        given = [
            tensor if way.takes[i].kind == "R" else tensor.chunk(ranks, way.takes[i].dim)[rank]
            for i, tensor in enumerate((left, right, *scales))
        ]
        by_columns = given[1].t().contiguous().t()
        pieces.append(scaled_mm(given[0].contiguous(), by_columns, *given[2:], None, None, torch.float32))
    made = way.gives[0]
    return torch.stack(pieces).sum(0) if made.kind == "P" else torch.cat(pieces, made.dim)


def operands(recipe: Recipe) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Factors in float8, and the inverses of their scales."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(16, 64, generator=generator), torch.randn(32, 64, generator=generator)
    pairs: list[tuple[Tensor, Tensor]] = []
    for one in given:
        amax = one.abs().amax(1, keepdim=True) if recipe == "rowwise" else one.abs().max()
        pairs.append(((one * 448 / amax).to(torch.float8_e4m3fn), amax / 448))
    (left, one), (right, other) = pairs
    return left, right.t(), (one, other.t() if other.dim() else other)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("factor", ["m", "n", "k"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_of_a_product_are_those_of_float64(recipe: Recipe, factor: str, ranks: int) -> None:
    """Rows, columns, and the contracted dim, whose parts are added up: each with the scales of the whole."""
    left, right, (one, other) = operands(recipe)
    expected = (left.double() @ right.double()) * one.double() * other.double()
    torch.testing.assert_close(on_ranks(recipe, factor, ranks).double(), expected, rtol=1e-5, atol=1e-5)


COLUMNS = {"layers.*.gate": "colwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_are_cut_where_they_are_cut_in_float32(recipe: Recipe) -> None:
    model = Model()
    plain = ws.capture(train, model, sgd(model), batch(0))
    tensor = ws.TensorParallel(COLUMNS)
    plans = [ws.plan(graph, "tp=2", tensor) for graph in (plain, captured(model, ws.Float8(recipe, LAYERS)))]
    assert plans[0].storage == plans[1].storage


SEQUENCE = {"layers.*.norm": "sequence", **COLUMNS, "layers.*.down": RowwiseParallel(output_layouts=Shard(1))}


def along_sequence(recipe: Recipe, modules: list[str]) -> ws.LocalGraph:
    """The program of one layer in bfloat16 whose activations are sharded along the sequence."""
    model, half = Model(blocks=1), ws.MixedPrecision(torch.bfloat16, torch.float32)
    options = ws.CaptureOptions(mixed_precision=half, float8=ws.Float8(recipe, modules))
    graph = ws.capture(train, model, sgd(model), batch(0), options=options)
    return ws.partition(graph, ws.plan(graph, "tp=2", ws.TensorParallel(SEQUENCE)))


def gathered_input(local: ws.LocalGraph) -> list[torch.dtype]:
    """The dtypes of gathers of the input of gate and up."""
    near = [f"layers.0.{name}" for name in ("norm", "gate", "up")]
    found = [n for n in local.graph.nodes if collective_kind(n.target) == "all_gather" and module_path(n) in near]
    return [one_tensor(n).dtype for n in found]


@pytest.mark.parametrize(
    ("recipe", "modules", "found"),
    [
        ("tensorwise", LAYERS, torch.uint8),
        ("tensorwise", ["layers.*.gate", "layers.*.down"], torch.bfloat16),  # up reads bfloat16: that is sent
        ("rowwise", LAYERS, torch.bfloat16),  # the backward casts by columns, from what was sent
    ],
)
def test_an_input_is_sent_once_in_the_dtype_that_all_readers_can_use(
    recipe: Recipe, modules: list[str], found: torch.dtype
) -> None:
    assert gathered_input(along_sequence(recipe, modules)) == [found]


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_copied_between_a_scale_and_a_cast(recipe: Recipe) -> None:
    local = along_sequence(recipe, LAYERS)
    copies = [one_tensor(n) for n in local.graph.nodes if n.target is contiguous]
    assert not [one for one in copies if one.dtype == torch.float32 and one.numel > 64 * 2]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ws.Float8("blockwise"), "recipe='blockwise'"),  # type: ignore[arg-type]
        (lambda: ws.Float8(modules=[]), r"modules=\[\]"),
        (lambda: ws.Float8(modules="layers.*"), "modules of type 'auto'"),  # type: ignore[arg-type]
    ],
)
def test_options_that_say_nothing_are_refused(make: Any, error: str) -> None:
    with pytest.raises(ws.PlanError, match=error):
        make()


def test_what_float8_cannot_do_is_refused() -> None:
    with pytest.raises(ws.CaptureError, match=re.escape("'layer.*.up' matches no linear")):
        captured(Model(), ws.Float8(modules=["layers.*.gate", "layer.*.up"]))
    with pytest.raises(ws.CaptureError, match=r"'layers.0.gate' has 64 rows, 32 inputs and 40 outputs"):
        captured(Model(hidden=40), ws.Float8(modules=["layers.*.gate"]))
    with pytest.raises(ws.CaptureError, match="'head' has 60 rows"):
        captured(Model(), ws.Float8(modules=["head"]), batch(0, length=15))
    with pytest.raises(ws.CaptureError, match=r"'layers.0.up' has torch.float64"):
        captured(Model().double(), ws.Float8(modules=["layers.*.up"]))
