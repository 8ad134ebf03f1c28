"""`Auto`: never worse than a template by its own simulator, bounds that are bounds, refusals that tell the truth."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.steps import mean_from_one as train
from wholestep.graph.text import human
from wholestep.plan.data_parallel import PerParameterStorage
from wholestep.planner.bounds import costs, lower_bound
from wholestep.planner.candidates import TemplateKey, meshes
from wholestep.planner.evaluate import Evaluator
from wholestep.planner.search import Search
from wholestep.planner.search_result import SearchResult, explained
from wholestep.report.compare import compare, templates
from wholestep.units import parse_bytes

SLOW, FAST = (
    ws.Hardware.measured(link_bytes_per_us=12.0),
    ws.Hardware.measured(link_bytes_per_us=100_000.0, link_us=5.0),
)
MACHINES = {"slow": SLOW, "plain": ws.Hardware.default(), "fast": FAST, "dgx-h100": ws.Hardware.preset("dgx-h100")}
PAIRS = ws.TensorParallel({"0.up": "colwise", "0.down": "rowwise", "1.up": "colwise", "1.down": "rowwise"})


MESH = ws.Mesh("dp=8")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x).relu()).relu().mean((2, 3)))


@lru_cache
def graph_of(kind: str, rows: int = 32) -> ws.TrainGraph:
    with torch.device("meta"):
        if kind == "blocks":
            model: nn.Module = nn.Sequential(Block(128), Block(128))
            x = torch.empty(rows, 128)
        elif kind == "wide":
            model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
            x = torch.empty(rows, 1024)
        else:
            model, x = Convolutions(), torch.empty(rows, 3, 32, 32)
    kind_of: Any = torch.optim.SGD if kind == "convolutions" else torch.optim.AdamW
    return ws.capture(train, model, kind_of(model.parameters(), lr=0.1), x)


GRAPHS = ("blocks", pytest.param("wide", marks=pytest.mark.full), "convolutions")
EXTREMES = [pytest.param(name, marks=() if name == "dgx-h100" else pytest.mark.full) for name in MACHINES]


# -- never worse -----------------------------------------------------------------------------
@pytest.mark.crossed
@pytest.mark.parametrize("hardware", EXTREMES)
@pytest.mark.parametrize("kind", GRAPHS)
def test_never_worse_than_any_template(kind: str, hardware: str) -> None:
    """By the same simulator, each template planned and simulated on its own."""
    mesh, tensor = ws.Mesh("dp=4,tp=2"), PAIRS if kind == "blocks" else None
    found = ws.Auto(hardware=MACHINES[hardware], tensor=tensor, solve=False).search(graph_of(kind), mesh)
    rows = compare(graph_of(kind), mesh, templates(mesh, tensor), MACHINES[hardware])
    assert found.best.batch_s == pytest.approx(rows[0].batch_s, rel=1e-12)
    assert len(found.rows) == len(rows)
    solved = ws.Auto(hardware=MACHINES[hardware], tensor=tensor).search(graph_of(kind), mesh)
    assert solved.best.batch_s <= rows[0].batch_s * (1 + 1e-12)
    assert {row.name for row in found.rows} < {row.name for row in solved.rows}


@pytest.mark.full
@pytest.mark.crossed
@pytest.mark.parametrize("hardware", EXTREMES)
@pytest.mark.parametrize("kind", GRAPHS)
def test_bounds_are_bounds(kind: str, hardware: str) -> None:
    mesh, hardware = ws.Mesh("dp=4,tp=2"), MACHINES[hardware]
    tensor, bounds = PAIRS if kind == "blocks" else None, dict[TemplateKey, float]()
    for template in templates(mesh, tensor):
        assert isinstance(template.strategies, tuple)
        planned = ws.plan(graph_of(kind), mesh, template.strategies)
        local = ws.partition(graph_of(kind), planned)
        least, step = lower_bound(local, hardware).us(hardware, mesh), costs(local, planned, hardware).step_s * 1e6
        assert 0 < least <= step * (1 + 1e-12), template.name
        assert template.key is not None
        bounds[template.key] = least
    for key, least in bounds.items():
        assert bounds[key.sending_less] <= least * (1 + 1e-12), key


# -- what it chooses ---------------------------------------------------------------------------
def test_a_slow_link_gets_the_fewest_bytes() -> None:
    best = ws.Auto(hardware=SLOW, solve=False).search(graph_of("wide"), "dp=8").best
    rows = compare(graph_of("wide"), ws.Mesh("dp=8"), templates(ws.Mesh("dp=8")), SLOW)
    sent = {row.name: row.costs.sent_bytes for row in rows if row.costs is not None}
    assert sent[best.name] == min(sent.values())
    assert len(set(sent.values())) > 1


def test_tight_memory_shards_everything() -> None:
    far = ws.Hardware.measured(
        link_us=5_000.0, link_bytes_per_us=1e6, memory_bytes_per_us=1e6
    )  # what counts is how often
    whole = ws.Auto(hardware=far).search(graph_of("wide"), "dp=8")
    assert whole.best.name.startswith("replicate")
    peaks = [row.costs.peak_bytes for row in compare(graph_of("wide"), MESH, templates(MESH), far) if row.costs]
    least = min(peaks)
    found = ws.Auto(least, far).search(graph_of("wide"), "dp=8")
    assert found.best.name.startswith("fully_shard")
    assert found.best.needs_bytes <= least
    assert {row.status for row in found.rows} >= {"chosen", "rest"}


def deep(rows: int) -> ws.TrainGraph:
    with torch.device("meta"):
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
        model, x = nn.Sequential(*layers), torch.empty(rows, 64)
    return ws.capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), x)


def test_recomputes_where_nothing_fits() -> None:
    graph = deep(4096)
    free = ws.Auto().search(graph, "dp=4")
    least = min(row.costs.peak_bytes for row in free.rows if row.costs)
    found = ws.Auto(int(least * 0.7)).search(graph, "dp=4")
    assert found.best.rematerialized
    assert found.best.needs_bytes <= int(least * 0.7)
    assert found.best.batch_s > free.best.batch_s
    assert "tensors are rematerialized" in str(explained(found))
    with pytest.raises(ws.PlanError, match="no plan fits"):
        ws.Auto(int(least * 0.7), recompute=False).search(graph, "dp=4")


@pytest.mark.usual("0.01-True")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("part", [0.2, 0.01])
def test_a_refusal_tells_the_truth(recompute: bool, part: float) -> None:
    """What it says is missing is what is missing: that much is enough, and less than what is rounded to it is not."""
    graph = deep(1024)
    least = min(row.costs.peak_bytes for row in ws.Auto().search(graph, "dp=4").rows if row.costs)
    budget = int(least * part)

    def refused(budget: int) -> ws.PlanError:
        with pytest.raises(ws.PlanError, match="no plan fits: the nearest, ") as caught:
            ws.plan(graph, "dp=4", ws.Auto(budget, recompute=recompute))
        return caught.value

    error = refused(budget)
    needed = parse_bytes(error.next_step.split("'")[1])  # rounded up, so that it suffices
    assert f"at most {human(budget)}" in error.needed
    assert "more than there are" in error.found
    made = ws.plan(graph, "dp=4", ws.Auto(needed, recompute=recompute))
    assert made.objective is not None
    assert made.objective.peak_bytes <= needed
    assert made.strategy.split(" ")[0].rstrip(",") in error.found
    assert error.next_step.split("'")[1].endswith(" MB")  # with one digit
    refused(needed - 100_001)


# -- what it says --------------------------------------------------------------------------------
def statuses(found: SearchResult) -> dict[str, str]:
    return {row.name: row.status for row in found.rows}


def test_counts_add_up_and_pruning_happens() -> None:
    seen: list[str] = []
    found = ws.Auto(hardware=SLOW, tensor=PAIRS).search(graph_of("blocks"), "dp=4,tp=2", watch=seen.append)
    assert seen[0] == "solve for layouts"
    assert len(found.rows) == 14  # twelve templates, two that are solved for
    simulated = sum(row.costs is not None for row in found.rows)
    assert f"of 14 candidates ({simulated} simulated, {14 - simulated} left out by a bound)" in str(explained(found))
    assert "bounded" in statuses(found).values()
    assert len(seen[1:]) == 14
    bounded = [row for row in found.rows if row.status == "bounded"]
    assert all(row.costs is None and row.bound_s >= found.best.batch_s for row in bounded)


def test_what_sends_more_than_a_loser_is_not_planned() -> None:
    """Where gathering once is known to lose, gathering twice is not looked at."""
    seen: list[str] = []
    search = Search(Evaluator(graph_of("wide"), SLOW, None, ws.default_passes(SLOW), watch=seen.append))
    search.bounds[MESH, TemplateKey("fully_shard", False, ("dp",))] = 1e9
    chosen = [template for template in templates(MESH) if "kept" not in template.name]
    found = search.run([(MESH, template) for template in chosen])
    assert statuses(found)["fully_shard, re-gathered on dp"] == "bounded"
    assert seen == [template.name for template in chosen if "re-gathered" not in template.name]


def test_zero2_without_micro_batches_is_zero1() -> None:
    assert statuses(ws.Auto().search(graph_of("wide"), "dp=8"))["zero2 on dp"] == "same"


def test_what_rests_is_too_much_before_anything_is_planned() -> None:
    seen: list[str] = []
    weights = 2 * (1024 * 1024 + 1024) * 4
    found = ws.Auto(int(2.6 * weights)).search(graph_of("wide"), "dp=8", watch=seen.append)
    assert statuses(found)["replicate on dp"] == "rest"
    assert "replicate on dp" not in seen


def test_the_plan_says_why() -> None:
    plan = ws.plan(graph_of("wide"), "dp=8", ws.Auto(hardware=SLOW, solve=False))
    text = str(plan)
    assert "  chosen by Auto: " in text
    assert "  note: Auto chose " in text
    assert "of 5 candidates" in text
    for name in ("zero1 on dp", "fully_shard, re-gathered on dp", "zero2 on dp: the same program as"):
        assert name in text
    assert "  chosen by Auto: " in plan.explain("0.weight")
    again = ws.Plan.from_json(plan.to_json())
    assert again == plan
    assert plan.objective is not None
    assert 0 <= plan.objective.gap < 1
    assert plan.objective.bound_s <= plan.objective.batch_s


def test_the_plan_is_that_of_the_template() -> None:
    found = ws.Auto(hardware=SLOW).search(graph_of("wide"), "dp=8")
    assert found.best.strategies is not None
    assert found.plan == ws.plan(graph_of("wide"), "dp=8", found.best.strategies, hardware=SLOW)


def test_styles_limit_the_choice() -> None:
    found = ws.Auto(styles=("zero1", "hybrid")).search(graph_of("wide"), "a=2,b=2")
    names = {row.name.split(",")[0].split(" ")[0] for row in found.rows}
    assert names == {"zero1", "hybrid", "solved"}
    stored = {
        str(option)
        for row in found.rows
        for part in (row.strategies.parts if row.strategies else ())
        if isinstance(part, PerParameterStorage)
        for option in part.storage.values()
    }
    assert stored <= {"zero1", "hybrid kept", "hybrid re-gathered"}


def test_options_that_are_not_searched_are_kept() -> None:
    found = ws.Auto(data=ws.DataParallel(semantics="global")).search(graph_of("wide"), "dp=4")
    assert "global" in found.plan.strategy
    assert {row.batches for row in found.rows} == {1}


def test_compile_keeps_what_ranks_are_given() -> None:
    """Whether two ranks share a batch is not for compile to choose."""
    auto = ws.Auto(tensor=PAIRS)
    everything = [t.name for _, t in auto.candidates(ws.Mesh("dp=4,tp=2"))]
    same = [t.name for _, t in auto.candidates(ws.Mesh("dp=4,tp=2"), same_batches=True)]
    assert len(everything) == 12
    assert same == [name for name in everything if "tensor parallel" in name]
    assert [t.name for _, t in auto.candidates(ws.Mesh("tp=2"), same_batches=True)] == ["tensor parallel on tp"]


def test_a_schedule_of_ones_own() -> None:
    plain = ws.Auto(hardware=SLOW, styles=("replicate",)).search(graph_of("blocks"), "dp=4")
    none = ws.Auto(hardware=SLOW, styles=("replicate",)).search(
        graph_of("blocks"), "dp=4", passes=ws.default_passes(schedule=None)
    )
    assert plain.best.batch_s < none.best.batch_s


# -- meshes ----------------------------------------------------------------------------------------
def test_meshes_keep_to_nodes() -> None:
    found = [str(mesh) for mesh in meshes(16, MACHINES["dgx-h100"], "tp")]
    assert found == [
        "dp=16", "replicate=2,shard=8", "dp=8,tp=2", "replicate=2,shard=4,tp=2", "dp=4,tp=4",
        "replicate=2,shard=2,tp=4", "dp=2,tp=8",
    ]  # fmt: skip
    assert [str(mesh) for mesh in meshes(6, ws.Hardware.default(), "tp")] == ["dp=6", "dp=3,tp=2", "dp=2,tp=3", "tp=6"]
    assert [str(mesh) for mesh in meshes(1, ws.Hardware.default())] == ["dp=1"]
    assert all(mesh.size == 16384 for mesh in meshes(16384, MACHINES["dgx-h100"], "tp"))


@pytest.mark.full
def test_the_mesh_is_searched() -> None:
    auto = ws.Auto(hardware=MACHINES["dgx-h100"], tensor=PAIRS)
    found = auto.search(graph_of("blocks"), "auto=16")
    assert {row.mesh for row in found.rows} == set(auto.meshes(16))
    assert found.plan.mesh == found.best.mesh
    for mesh in auto.meshes(16):
        fixed = ws.Auto(hardware=MACHINES["dgx-h100"], tensor=PAIRS if "tp" in mesh.names else None)
        assert found.best.batch_s <= fixed.search(graph_of("blocks"), mesh).best.batch_s * (1 + 1e-12)
    assert ws.plan(graph_of("blocks"), "auto=16", auto).mesh == found.plan.mesh


# -- refusals ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_bytes": "much"}, "memory_bytes='much'"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"styles": ("zero3",)}, "styles="),
        ({"styles": ()}, "styles="),
        ({"styles": "zero1"}, "styles="),
    ],
)
def test_malformed_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ws.PlanError, match=said):
        ws.Auto(**options)


def test_one_budget() -> None:
    with pytest.raises(ws.PlanError, match="memory_bytes with parallel=Auto"):
        ws.compile(train, parallel=ws.Auto("1GiB"), memory_bytes="2GiB")


def test_compile_needs_axes() -> None:
    with pytest.raises(ws.MeshError, match="mesh auto=4 in compile"):
        ws.compile(train, parallel=ws.Auto(), mesh="auto=4")
    with pytest.raises(ws.MeshError, match="without a mesh"):
        ws.compile(train, parallel=ws.Auto(tensor=PAIRS))
    with pytest.raises(ws.MeshError, match="no axis 'tp'"):
        ws.compile(train, parallel=ws.Auto(tensor=PAIRS), mesh="dp=4")


def test_no_template_at_all() -> None:
    wrong = ws.TensorParallel({"no.such": "colwise"})
    with pytest.raises(ws.PlanError, match="no template can be planned: tensor parallel on tp"):
        ws.Auto(tensor=wrong).search(graph_of("wide"), "tp=2", same_batches=True)
    found = ws.Auto(tensor=wrong).search(graph_of("wide"), "dp=2,tp=2")
    assert {row.status for row in found.rows if "tensor" in row.name} == {"no plan"}


def test_one_rank_compiles_with_auto() -> None:
    model = nn.Linear(4, 4)
    step = ws.compile(train, parallel=ws.Auto())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4))
    assert step.plan is not None
    assert step.plan.objective is not None
