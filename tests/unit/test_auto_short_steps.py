"""A deep step is searched on short ones: the same winner as with all layers, and what it costs within a few percent."""

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.cost.extrapolate import extrapolated
from wholestep.cost.memory import peak_memory
from wholestep.passes.fit_memory import FitMemory
from wholestep.plan.strategies import compose
from wholestep.planner.bounds import Costs, costs, lower_bound
from wholestep.planner.candidates import Template, templates
from wholestep.planner.evaluate import Evaluator
from wholestep.planner.folded_memory import FoldedFit
from wholestep.planner.folded_step import FEWEST, FoldedStep, fold_step
from wholestep.planner.search import SURE, Search
from wholestep.planner.search_result import SearchResult, explained
from wholestep.units import parse_bytes

LAYERS = 12
FAST = ws.Hardware.measured(link_bytes_per_us=100_000.0, link_us=5.0)
MACHINES = {
    "slow": ws.Hardware.measured(link_bytes_per_us=12.0),
    "dgx-h100": ws.Hardware.preset("dgx-h100"),
    "two levels": ws.Hardware.preset("dgx-h100+ethernet-100"),
}
PAIRS = ws.TensorParallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
MESH = ws.Mesh("dp=4,tp=2")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, width: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@lru_cache
def deep(width: int, layers: int = LAYERS) -> ws.TrainGraph:
    with torch.device("meta"):
        model, words = Deep(width, layers), torch.empty(8, 64, dtype=torch.int64)
    return ws.capture(train, model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), words)


WIDTHS = {"wide": 2048, "narrow": 256}


def search(graph: ws.TrainGraph, hardware: Any, short: FoldedStep | None, memory: int | None = None) -> SearchResult:
    """By the same code with and without short steps."""
    auto = ws.Auto(memory, hardware, PAIRS)
    run = Search(Evaluator(graph, hardware, memory, ws.default_passes(hardware), folded=short))
    return run.run(auto.candidates(MESH))


def short_of(graph: ws.TrainGraph, hardware: Any) -> FoldedStep:
    short = fold_step(graph, hardware)
    assert short is not None
    return short


@pytest.mark.full
@pytest.mark.parametrize(("kind", "hardware"), [("wide", "slow"), ("wide", "dgx-h100"), ("narrow", "dgx-h100")])
def test_the_winner_is_that_of_all_layers(kind: str, hardware: str) -> None:
    """And its figures are those of the whole step, to the last bit."""
    graph, hardware = deep(WIDTHS[kind]), MACHINES[hardware]
    long, short = search(graph, hardware, None), search(graph, hardware, short_of(graph, hardware))
    assert short.best.batch_s == long.best.batch_s
    assert short.best.costs == long.best.costs
    assert short.best.blocks is None
    assert short.plan.to_json() == long.plan.to_json()


@pytest.mark.full
@pytest.mark.parametrize(
    ("hardware", "mesh", "tensor", "each", "least"),
    [
        pytest.param("slow", "dp=4,tp=2", PAIRS, 1, 12, marks=pytest.mark.full),
        pytest.param("dgx-h100", "dp=4,tp=2", PAIRS, 1, 7, marks=pytest.mark.full),
        pytest.param("two levels", "node=4,rank=8", None, 1, 7, marks=pytest.mark.full),
        ("two levels", "node=4,rank=8", None, 2, 4),
    ],
)
def test_extrapolated_costs_are_near(hardware: str, mesh: str, tensor: Any, each: int, least: int) -> None:
    """Of every template, or every other one. Of what is re-gathered, one bucket more or less in flight counts thirteen
    times in a peak.
    """
    graph, hardware, on = deep(2048, 16), MACHINES[hardware], ws.Mesh(mesh)
    short, seen = short_of(graph, hardware), 0
    for template in list(templates(on, tensor))[::each]:
        assert not isinstance(template.strategies, ws.WholestepError)
        strategies = compose(template.strategies)
        pair = short.blocks(on, strategies)
        if pair is None:
            continue
        plans = [(ws.plan(g, on, strategies), g) for g in map(short.with_blocks, pair)]
        programs = [(planned, ws.partition(g, planned)) for planned, g in plans]
        made, real = short.priced(pair, programs, ws.default_passes(hardware)), priced(graph, template, hardware, on)
        assert made.step_s == pytest.approx(real.step_s, rel=SURE), template.name
        close = 0.5 if "re-gathered" in template.name else 0.03
        assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=close), template.name
        assert made.rest_bytes == real.rest_bytes
        assert made.sent_bytes == real.sent_bytes
        seen += 1
    assert seen >= least


def priced(graph: ws.TrainGraph, template: Template, hardware: Any, mesh: ws.Mesh = MESH) -> Any:
    planned = ws.plan(graph, mesh, template.strategies)  # pyright: ignore[reportArgumentType]
    return costs(ws.partition(graph, planned), planned, hardware)


@pytest.mark.full
@pytest.mark.parametrize(
    ("hardware", "each"), [("slow", 2), *(pytest.param(name, 1, marks=pytest.mark.full) for name in MACHINES)]
)
def test_bounds_are_those_of_all_layers(hardware: str, each: int) -> None:
    graph, hardware = deep(WIDTHS["wide"]), MACHINES[hardware]
    short = short_of(graph, hardware)
    for template in list(templates(MESH, PAIRS))[::each]:
        assert not isinstance(template.strategies, ws.WholestepError)

        def of(graph: ws.TrainGraph, template: Template = template) -> Any:
            return lower_bound(ws.partition(graph, ws.plan(graph, MESH, compose(template.strategies))), hardware)

        made, real = short.whole(FEWEST, tuple(of(short.with_blocks(n)) for n in FEWEST)), of(graph)
        assert made.sent == real.sent
        assert made.computed_us == pytest.approx(real.computed_us, rel=1e-3)


@pytest.mark.full
def test_budgets_as_with_all_layers() -> None:
    """One that only some candidates keep to, and one under all their peaks: what the whole step then holds is within
    the budget, in about the time of a search with all layers.
    """
    graph, short = deep(WIDTHS["wide"]), short_of(deep(WIDTHS["wide"]), FAST)
    least = min(row.costs.peak_bytes for row in search(graph, FAST, None).rows if row.costs is not None)
    for budget in (least + 1000, least - least // 40):
        long, found = search(graph, FAST, None, budget), search(graph, FAST, short, budget)
        assert found.best.blocks is None  # it may fit another one: values made again are chosen from fewer
        assert max(found.best.needs_bytes, long.best.needs_bytes) <= budget
        assert found.best.batch_s <= long.best.batch_s * (1 + SURE)
        assert found.rows[0] is found.best


def test_values_are_made_again_alike_in_equal_layers() -> None:
    graph = deep(WIDTHS["wide"])
    short, strategies = short_of(graph, FAST), compose(ws.DataParallel("fully_shard", reshard_after_forward=True))
    few, more, whole = (ws.partition(g, ws.plan(g, MESH, strategies)) for g in (*map(short.with_blocks, FEWEST), graph))
    memory = FitMemory(0, FAST, gathers=False, after=ws.default_passes(FAST))
    fitting = FoldedFit(short, FEWEST, (few, more), memory)
    least = fitting.least()
    made = fitting.unfolded(whole, least)
    assert least.classes
    assert made is not None
    assert len(made.names) % LAYERS <= 3  # as many of each class as there are layers, and a few outside
    assert len(made.names) >= LAYERS
    assert peak_memory(memory.run(whole, made)).size_bytes == pytest.approx(least.peak_bytes, rel=0.35)


@pytest.mark.full
def test_a_refusal_tells_the_truth() -> None:
    graph = deep(WIDTHS["wide"])
    with pytest.raises(ws.PlanError) as refused:
        search(graph, FAST, short_of(graph, FAST), 1_000_000)
    said = re.search(r"memory_bytes='([^']+)' or more", str(refused.value))
    assert said is not None
    assert search(graph, FAST, short_of(graph, FAST), parse_bytes(said[1])).best.needs_bytes <= parse_bytes(said[1])


def test_shallow_steps_are_left_whole() -> None:
    assert fold_step(deep(64, 6), FAST) is None


def test_buckets_that_hold_many_layers_need_more_of_them() -> None:
    graph = deep(WIDTHS["narrow"])
    one, both = (compose(ws.DataParallel("zero1", axis=axis)) for axis in ("dp", None))
    wide, narrow = short_of(deep(WIDTHS["wide"]), FAST), short_of(graph, FAST)
    assert wide.blocks(MESH, one) == FEWEST
    assert narrow.blocks(MESH, one) is None
    assert wide.blocks(MESH, both) is None, "twice as many for a second hop"
    assert short_of(deep(2048, 16), FAST).blocks(MESH, both) == (3, 5)


def test_layers_that_a_strategy_tells_apart_are_not_equal() -> None:
    """One of them is cut by tensor parallelism, the others are not."""
    graph = deep(WIDTHS["wide"])
    short = short_of(graph, FAST)
    odd = ws.TensorParallel({"layers.3.up": "colwise", "layers.3.down": "rowwise"})
    run = Search(Evaluator(graph, FAST, None, ws.default_passes(FAST), folded=short))
    found = run.run([(MESH, Template("odd", (ws.DataParallel("replicate", axis="dp"), odd)))])
    assert found.rows[0].blocks is None
    assert found.best.costs == priced(graph, Template("odd", (ws.DataParallel("replicate", axis="dp"), odd)), FAST)


@pytest.mark.full
def test_what_is_nearly_alike_is_looked_at_with_few_layers() -> None:
    """By what is alike in all of them; figures of the best are of what it does itself, in all layers."""
    graph, data = deep(WIDTHS["wide"]), ws.DataParallel("replicate", axis="dp")
    odd = ws.TensorParallel({"layers.3.up": "colwise", "layers.3.down": "rowwise"})
    template = Template("odd", (data, odd), symmetric=(data, PAIRS))
    said: list[str] = []
    run = Search(Evaluator(graph, FAST, None, ws.default_passes(FAST), watch=said.append, folded=short_of(graph, FAST)))
    found = run.run([(MESH, template)])
    assert said == ["odd", "all layers: odd"]
    assert found.best.costs == priced(graph, template, FAST)
    slower = Search(Evaluator(graph, FAST, None, ws.default_passes(FAST), folded=short_of(graph, FAST)))
    both = slower.run([(MESH, template), (MESH, Template("even", (data, PAIRS)))])
    assert both.best.name == "even"


def test_a_pattern_for_each_layer() -> None:
    """Patterns that name layers name none in a short step: all layers are planned."""
    graph = deep(WIDTHS["wide"])
    styles = {f"layers.{i}.{one}": how for i in range(LAYERS) for one, how in (("up", "colwise"), ("down", "rowwise"))}
    row = Template("each", (ws.DataParallel("replicate", axis="dp"), ws.TensorParallel(styles)))
    run = Search(Evaluator(graph, FAST, None, ws.default_passes(FAST), folded=short_of(graph, FAST)))
    found = run.run([(MESH, row)])
    assert found.best.costs == priced(graph, row, FAST)


@pytest.mark.full
def test_auto_says_what_is_extrapolated() -> None:
    graph = deep(WIDTHS["wide"])
    found = ws.Auto(hardware=FAST, tensor=PAIRS, solve=False).search(graph, MESH)
    assert found.folded is not None
    assert any(row.blocks is not None and row.costs is not None for row in found.rows)
    plan = explained(found)
    assert plan.objective is not None
    assert plan.objective.batch_s == found.best.batch_s


def test_what_is_extrapolated() -> None:
    """From one and two layers to eleven: whole numbers stay whole, a missing kind is 0, nothing is below 0."""
    one = Costs(10, 101, 4, 2, 1.0, 0.2, by_kind={"activation": 5, "batch": 3, "late": 1})
    two = Costs(12, 102, 4, 3, 1.5, 0.1, by_kind={"activation": 7, "batch": 3, "new": 2})
    many = Costs(30, 111, 4, 12, 6.0, 0.0, by_kind={"activation": 25, "batch": 3, "new": 20})
    assert extrapolated(one, two, 10) == many
    assert extrapolated(3, 4, 2.6) == 6
    assert extrapolated((3.0, (None, "x")), (4.0, (None, "x")), 0.5) == (3.5, (None, "x"))
