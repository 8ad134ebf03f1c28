"""Steps under a budget of memory on two ranks: what is predicted is held, numbers are the same, all refuse alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.live_bytes import peak_of
from tests.steps import sum_from_one as train
from wholestep.capture.call_structure import take_apart
from wholestep.passes.saved_values import SavedValues
from wholestep.runtime.finalize import bound_to_rank
from wholestep.runtime.step import CompiledStep

SCHEDULE = ws.Schedule(ws.Hardware.default())


def make() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 64))
    return model, AdamW(model.parameters(), lr=0.01, fused=True)


def trained(rank: int, rows: int, **options: Any) -> tuple[CompiledStep, nn.Module, Optimizer, list[Tensor], Tensor]:
    """Three steps, on data of this rank's own."""
    model, optimizer = make()
    step = ws.compile(train, **options)
    losses: list[Tensor] = []
    x = torch.empty(0)
    for number in range(3):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(10 * number + rank))
        losses.append(step(model, optimizer, x))
    return step, model, optimizer, [whole(p).clone() for p in model.parameters()] + losses, x


def _fitted(rank: int, world: int, style: str, part: float) -> dict[str, Any]:
    options = {"parallel": ws.DataParallel(style), "schedule": SCHEDULE}  # type: ignore[arg-type]
    rows = 256 - 32 * rank
    plain, *_, expected, _ = trained(rank, rows, **options)
    assert plain.local_graph is not None
    assert plain.world is not None
    before = ws.peak_memory(bound_to_rank(plain.local_graph, plain.world))
    rest = before.rest_bytes if rank == 0 else 0
    budget = int(rest + part * (before.size_bytes - rest)) if rank == 0 else 0
    said: list[Any] = [budget]
    torch.distributed.broadcast_object_list(said)
    step, model, optimizer, found, x = trained(rank, rows, memory_bytes=said[0], **options)
    assert step.local_graph is not None
    assert step.world is not None
    inputs = step.programs[-1].gather_inputs(take_apart(((model, optimizer, x), {})).leaves)
    return {
        "budget": said[0], "before": before.size_bytes,
        "predicted": ws.peak_memory(bound_to_rank(step.local_graph, step.world)).size_bytes,
        # gloo may let go of a tensor late, on a busy machine
        "measured": min(peak_of(step.programs[-1].run, inputs) for _ in range(3)),
        "again": sum("_again" in n.name for n in step.local_graph.graph.nodes),
        "same": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
    }  # fmt: skip


@pytest.mark.parametrize(
    "style", ["fully_shard", *(pytest.param(one, marks=pytest.mark.full) for one in ("replicate", "zero1"))]
)
def test_a_budget_is_kept(style: str) -> None:
    """Counted while the step runs, by the bytes of live tensors: exactly what was predicted. The same bits."""
    for found in run_ranks(_fitted, 2, style, 0.8, timeout=200):
        assert found["same"]
        assert found["predicted"] <= found["budget"] < found["before"]
        assert found["measured"] == pytest.approx(found["predicted"], rel=0.01)
        assert found["again"] > 0


class Layer(nn.Module):
    """What column-parallel and row-parallel layers of a decoder are, with a norm that computes on a shard of tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


WIDTH = 16
SEQUENCE: dict[str, Any] = {
    "*.norm": "sequence", "*.up": "colwise", "*.down": RowwiseParallel(output_layouts=Shard(1)),
}  # fmt: skip


def layers() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(WIDTH) for _ in range(4))).double()
    return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


def tokens_of(part: int, call: int, rows: int) -> Tensor:
    return torch.randn(rows, 32, WIDTH, generator=torch.Generator().manual_seed(10 * call + part), dtype=torch.float64)


def least_bytes_of(x: Tensor, mesh: str, parallel: Any) -> list[int]:
    """What a rank needs at least while it keeps what it has gathered of activations, and if it need not."""
    graph = ws.capture(train, *layers(), x)
    local = ws.partition(graph, ws.plan(graph, mesh, parallel))
    several = (SavedValues(local, gathers=False, activations=again) for again in (False, True))
    return [min(one.peak_bytes for one in saved.path(SCHEDULE.hardware)) for saved in several]


def _regathered(rank: int, world: int, mesh: str, parts: Any, rows: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Steps within a budget that no rank meets while it keeps what it has gathered. `rows`: for each call, those of the
    batch at each place along the axis of data.
    """
    part = rank * len(rows[0]) // world
    kept, least = least_bytes_of(tokens_of(0, 0, rows[0][0]), mesh, parts)
    budget, (model, optimizer) = (kept + least) // 2, layers()
    step = ws.compile(
        train, mesh=mesh, parallel=parts, memory_bytes=budget, schedule=SCHEDULE, dynamic={"x": (0,)}
    )  # fmt: skip
    x, losses = torch.empty(0), list[float]()
    for call, several in enumerate(rows):
        x = tokens_of(part, call, several[part])
        losses.append(step(model, optimizer, x).item())
    state = [whole(p).clone() for p in model.parameters()]
    assert step.local_graph is not None
    assert step.world is not None
    inputs = step.programs[-1].gather_inputs(take_apart(((model, optimizer, x), {})).leaves)
    return {
        "budget": budget, "kept": kept, "losses": losses, "state": state,
        "predicted": ws.peak_memory(bound_to_rank(step.local_graph, step.world)).size_bytes,
        "measured": min(peak_of(step.programs[-1].run, inputs) for _ in range(3)),
        "again": [n.name for n in step.local_graph.graph.nodes if "all_gather" in str(n.target) and "_again" in n.name],
    }  # fmt: skip


def one_device(rows: tuple[tuple[int, ...], ...]) -> tuple[list[list[float]], list[Tensor]]:
    """The losses of each place along the axis of data, and the parameters after steps that average their gradients."""
    (model, optimizer), losses = layers(), [list[float]() for _ in rows[0]]
    for call, sizes in enumerate(rows):
        optimizer.zero_grad()
        several = [(model(tokens_of(part, call, n)) - 1.0).square().sum() for part, n in enumerate(sizes)]
        torch.stack(several).mean().backward()
        optimizer.step()
        for own, loss in zip(losses, several, strict=True):
            own.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


DATA = ws.DataParallel("zero1", axis="dp")


@pytest.mark.parametrize(("mesh", "rows", "beside"), [
    ("tp=2", ((6,), (6,)), []),
    pytest.param("dp=2,tp=2", ((6, 6), (6, 5), (6, 6)), [DATA], marks=pytest.mark.full),
])  # fmt: skip
def test_activations_are_gathered_again_by_all_ranks(mesh: str, rows: Any, beside: Any) -> None:
    """Ranks gather the same, in one order, also for batches of other sizes than those that the choice was made for."""
    found = run_ranks(_regathered, 2 * len(rows[0]), mesh, [*beside, ws.TensorParallel(SEQUENCE)], rows, timeout=200)
    losses, state = one_device(rows)
    for rank, one in enumerate(found):
        assert one["again"] == found[0]["again"] != []
        assert one["losses"] == pytest.approx(losses[rank // 2], rel=1e-10)
        torch.testing.assert_close(one["state"], state, rtol=1e-10, atol=1e-12)
        assert one["predicted"] <= one["budget"] < one["kept"]
        assert one["measured"] == pytest.approx(one["predicted"], rel=0.01)


def _refused(rank: int, world: int, rows: tuple[int, ...], budget: int) -> str:
    try:
        trained(rank, rows[rank], memory_bytes=budget, schedule=SCHEDULE)
    except ws.WholestepError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_too_small_a_budget_is_refused_by_all() -> None:
    first, second = run_ranks(_refused, 2, (64, 64), 100_000)
    assert first == second
    assert first.startswith("PlanError: the step needs ")
    assert "needed: at most 100.0 kB" in first


def test_one_rank_that_does_not_fit_stops_all() -> None:
    """The second rank's batch is far larger than the first's, which chooses."""
    first, second = run_ranks(_refused, 2, (16, 4096), 2_000_000)
    assert first.startswith("RankMismatchError: rank 1 could not compile its step: the step needs ")
    assert second.startswith("PlanError: the step needs ")


def _kept(rank: int, world: int, style: str) -> list[set[int]]:
    """Where the memory of collectives lies after each of several steps, on rows of this rank's own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    step = ws.compile(train, parallel=ws.DataParallel(style), schedule=SCHEDULE)  # type: ignore[arg-type]
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    found: list[set[int]] = []
    for number in range(5):
        step(model, optimizer, torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * number + rank)))
        found.append({one.memory.data_ptr() for one in step.options.backend.buffers.buffers})
    return found


@pytest.mark.parametrize("style", ["replicate", pytest.param("zero1", marks=pytest.mark.full), "fully_shard"])
def test_memory_of_collectives_stays(style: str) -> None:
    """Later steps use it again; a collective that lets go of its tensors late may take some more."""
    for found in run_ranks(_kept, 2, style):
        assert found[1] & found[-1]
        assert len(found[-1]) <= 2 * len(found[1])
