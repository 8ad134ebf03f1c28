"""What `Auto` searches beyond one mesh and one batch: programs on the best of several meshes, sizes of batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from tests.together import OneDevice, compare
from tests.unit.test_auto import PAIRS, graph_of, train
from tests.unit.test_auto_short_steps import FAST, deep
from wholestep.cost.memory import peak_memory
from wholestep.layout import REPLICATED, AxisState
from wholestep.passes.base import run_passes
from wholestep.plan.strategies import compose
from wholestep.plan.tensor_parallel import SolvedLayouts
from wholestep.planner.folded_step import fold_step
from wholestep.planner.ilp_candidates import IlpCandidates, Symmetrizer, best_meshes
from wholestep.planner.search_result import Candidate, Status

NODES = ws.Hardware.preset("dgx-h100")


# -- meshes ----------------------------------------------------------------------------------------------
@pytest.mark.full
def test_programs_are_solved_for_the_meshes_whose_templates_do_best() -> None:
    auto, seen = ws.Auto(hardware=NODES, tensor=PAIRS), list[str]()
    found = auto.search(graph_of("blocks"), "auto=16", watch=seen.append)
    plain = replace(auto, solve=False).search(graph_of("blocks"), "auto=16")
    ranked = list(dict.fromkeys(str(row.mesh) for row in plain.rows if row.status in ("chosen", "slower", "bounded")))
    solved = [name.removeprefix("solve for layouts on ") for name in seen if name.startswith("solve ")]
    assert solved == ranked[:3]
    assert {str(row.mesh) for row in found.rows if row.name.startswith("solved for")} == set(solved)
    assert found.best.batch_s <= plain.best.batch_s
    assert {(row.name, row.mesh) for row in plain.rows} < {(row.name, row.mesh) for row in found.rows}
    assert found.solved is not None
    planned = ws.plan(graph_of("blocks"), "auto=16", auto)
    assert any(note.startswith("solved: ") for note in planned.notes)
    assert planned.objective is not None
    assert 0 < planned.objective.model_bound_s <= planned.objective.model_s


@pytest.mark.full
def test_how_many_meshes_are_solved_for() -> None:
    seen: list[str] = []
    auto = ws.Auto(hardware=NODES, tensor=PAIRS, solved_meshes=0)
    found = auto.search(graph_of("blocks"), "auto=16", watch=seen.append)
    assert not [name for name in seen if name.startswith("solve ")]
    assert found.solved is None
    with pytest.raises(ws.PlanError, match=r"Auto\(solved_meshes=-1\)"):
        ws.Auto(solved_meshes=-1)


class Reader(nn.Module):
    """Attends causally, with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def _reading() -> OneDevice:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Reader(), Reader()).double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    return OneDevice(make, mean_square, [(torch.randn(1, 512, 32).double(),) for _ in range(3)])


def test_ranks_share_sequences_where_a_whole_one_does_not_fit() -> None:
    one, budget = _reading(), 1_400_000
    graph = one.capture.graph
    without = ws.Auto(budget, NODES, recompute=False, solve=False, saves=False)
    with pytest.raises(ws.PlanError, match="no plan fits"):
        without.search(graph, "auto=4")
    search = replace(without, context=ws.ContextParallel()).search(graph, "auto=4")
    assert {str(row.mesh) for row in search.rows} == {"dp=4", "dp=2,cp=2", "cp=4"}
    assert search.best.mesh == ws.Mesh("cp=4")
    comparison = compare(one, "cp=4", search.plan.strategies)
    assert comparison.worst < 1e-10
    assert peak_memory(run_passes(comparison.local, ws.default_passes(NODES))).size_bytes <= budget


def test_all_candidates_share_sequences_on_a_mesh_with_that_axis() -> None:
    auto, mesh = ws.Auto(hardware=NODES, context=ws.ContextParallel()), ws.Mesh("dp=2,cp=2")
    search = auto.search(_reading().capture.graph, mesh)
    assert len(search.rows) > 4
    assert all("context parallel on cp" in row.name and row.batches == 2 for row in search.rows)
    assert len({row.name for row in search.rows}) == len(search.rows)
    assert auto.base(mesh).of(ws.ContextParallel)
    assert auto.base(ws.Mesh("dp=4")).of(ws.ContextParallel) == []


def test_meshes_where_something_fits_come_first() -> None:
    def row(mesh: str, status: str, batch_s: float = float("inf"), bound_s: float = 0.0) -> Candidate:
        return Candidate("", ws.Mesh(mesh), None, status=Status(status), batch_s=batch_s, bound_s=bound_s)

    rows = [
        row("a=4", "peak", 1.0), row("b=4", "slower", 3.0), row("c=4", "bounded", bound_s=2.5), row("d=4", "rest"),
        row("e=4", "no plan"), row("a=4", "slower", 4.0), row("b=4", "peak", 0.5),
    ]  # fmt: skip
    assert [str(mesh) for mesh in best_meshes(rows, 9)] == ["c=4", "b=4", "a=4"]
    assert [str(mesh) for mesh in best_meshes(rows, 1)] == ["c=4"]


def test_equal_layers_get_what_the_one_in_the_middle_has() -> None:
    """Solutions that differ at the ends are made even: few layers then say what all cost."""
    graph, mesh = deep(256), ws.Mesh("dp=2,tp=4")
    short = fold_step(graph, FAST)
    assert short is not None
    tensor = ws.TensorParallel("auto", hardware=FAST)
    made = next(t.solved for t in IlpCandidates(graph, mesh, FAST, ws.DataParallel(), tensor).templates() if t.solved)
    first = f"{short.repeats.prefix}.0.up.weight"
    odd = AxisState("S", 1) if made.params[first] != AxisState("S", 1) else REPLICATED
    uneven = replace(made, params={**made.params, first: odd})
    even = Symmetrizer(graph, short.repeats)(uneven)
    assert even.params[first] == made.params["layers.6.up.weight"] != odd
    names = [node.name for node, (_, slot) in short.repeats.places.items() if node.op == "call_function"]
    by_slot: dict[object, set[str]] = {}
    slots = {node.name: slot for node, (_, slot) in short.repeats.places.items()}
    for name, ways in even.pins.op_strategies.items():
        base, _, part = name.partition("__")
        if base in slots:
            by_slot.setdefault((slots[base], part), set()).add(str(ways))
    assert names
    assert by_slot
    assert all(len(ways) == 1 for ways in by_slot.values())
    assert set(even.params) == set(made.params)
    outside = {n: w for n, w in made.pins.op_strategies.items() if n.partition("__")[0] not in slots}
    assert {n: even.pins.op_strategies[n] for n in outside} == outside
    strategies = compose([SolvedLayouts("tp", even.params, even.pins), ws.DataParallel("zero1", axis="dp")])
    ws.partition(graph, ws.plan(graph, mesh, strategies))


def test_what_may_be_made_again_is_not_counted() -> None:
    """A budget that activations alone are over has a solution only where they are not counted."""
    graph, mesh, tensor = wide(512), ws.Mesh("tp=2"), ws.TensorParallel("auto")
    programs = IlpCandidates(graph, mesh, ws.Hardware.default(), ws.DataParallel(), tensor, budget_bytes=80_000_000)
    peaks = [
        [t.solved.solution.load.peak_bytes for t in one.templates() if t.solved]
        for one in (programs, replace(programs, recomputes=True))
    ]
    assert not peaks[0] or min(peaks[0]) > 80_000_000
    assert peaks[1]
    assert max(peaks[1]) <= 80_000_000


def test_a_faster_plan_is_made_to_fit_though_a_slower_one_does() -> None:
    graph, hardware = wide(64), ws.Hardware.measured(link_us=5_000.0, link_bytes_per_us=1e6)
    free = ws.Auto(hardware=hardware).search(graph, "dp=4")
    budget = free.best.needs_bytes - 1
    plain = ws.Auto(budget, hardware, recompute=False, saves=False).search(graph, "dp=4")
    made = ws.Auto(budget, hardware, saves=False).search(graph, "dp=4")
    assert made.best.needs_bytes <= budget
    assert made.best.rematerialized
    assert made.best.batch_s < plain.best.batch_s


def wide(rows: int) -> ws.TrainGraph:
    with torch.device("meta"):
        layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
        model, x = nn.Sequential(*layers), torch.empty(64 * rows, 256)
    return ws.capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1), x)
