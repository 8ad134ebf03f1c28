"""Batches of sizes that change, on gloo ranks: one program for all, with the numbers of DDP or of one process."""

import copy
import random
import shutil
from collections.abc import Callable
from typing import Any, Literal, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from examples.demo.model import GPTConfig, build
from tests.dist.launch import run_ranks
from tests.tp_models import LAYERS, SEQUENCE, VOCAB, Llama, next_token, step_of
from tests.unit.test_sizes import train
from tests.unit.test_sizes_compiled import model_of
from wholestep.graph.nodes import communicates

of_tokens = step_of(next_token)
STYLES = ("replicate", "zero1", "zero2", "fully_shard")


def sizes(rank: int, calls: int, semantics: str) -> list[tuple[int, int]]:
    """Rows and length of each call: under global, ranks have the same length."""
    own, shared = random.Random(rank), random.Random(100)
    same = [(shared.randint(2, 9), shared.randint(2, 24)) for _ in range(calls)]
    if semantics == "global":
        return [(own.randint(2, 9), length) for _, length in same]
    return [(own.randint(2, 9), own.randint(2, 24)) for _ in range(calls)]


def bytes_of(rank: int, call: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randint(256, (rows, length), generator=drawn), torch.randint(256, (rows, length), generator=drawn)


def average(model: nn.Module, world: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= world


def _trains(
    rank: int, world: int, style: str, semantics: str, calls: int, backend: str = "eager", schedule: Any = "auto"
) -> tuple[float, int, list[str]]:
    torch.set_default_dtype(torch.float64)
    config = GPTConfig(layers=1, width=16, heads=2, context=24)
    model, other = build(config, 0), build(config, 0)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, other))
    parallel = ws.DataParallel(style, semantics=cast(Literal["per_rank", "global"], semantics))
    mesh = "replicate=2,shard=2" if style == "hybrid" else None
    step = ws.compile(train, parallel=parallel, backend=backend, mesh=mesh, schedule=schedule)
    worst = 0.0
    for call in range(calls):
        given = [sizes(r, calls, semantics)[call] for r in range(world)]
        loss = step(model, optimizer, *bytes_of(rank, call, *given[rank]))
        if semantics == "global":
            parts = [bytes_of(r, call, *given[r]) for r in range(world)]
            expected = train(other, plain, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        else:
            expected = train(other, plain, *bytes_of(rank, call, *given[rank]), between=lambda: average(other, world))
        worst = max(worst, abs(float(loss) - float(expected)))
    assert step.local_graph is not None
    assert schedule == "auto" or step.local_graph.across is not None, "the end of a step is left to the next"
    with ws.whole(model):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst, step.captures, step.misses


def check(style: str, semantics: str, calls: int, backend: str = "eager") -> None:
    for worst, captures, misses in run_ranks(_trains, 2, style, semantics, calls, backend, timeout=500):
        assert worst < 1e-9, misses
        assert captures == 2, misses


@pytest.mark.parametrize(("style", "semantics"), [("fully_shard", "per_rank"), ("zero1", "global")])
def test_ranks_with_other_sizes_share_one_program(style: str, semantics: str) -> None:
    check(style, semantics, 5)


@pytest.mark.full
@pytest.mark.parametrize("semantics", [pytest.param("per_rank", marks=pytest.mark.full), "global"])
def test_a_step_that_ends_in_the_next_one_takes_all_sizes(semantics: str) -> None:
    """Of two sizes in a row, the update of the first completes in the call of the second."""
    schedule = ws.Schedule(bucket_bytes=2000, first_bucket_bytes=300, across_steps=True)
    for worst, captures, misses in run_ranks(_trains, 2, "replicate", semantics, 6, "eager", schedule, timeout=500):
        assert worst < 1e-9, misses
        assert captures == 2, misses


@pytest.mark.full
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("style", STYLES)
def test_fifty_sizes_in_every_style(style: str, semantics: str) -> None:
    check(style, semantics, 50)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
def test_sizes_on_a_mesh_of_two_axes(semantics: str) -> None:
    for worst, captures, misses in run_ranks(_trains, 4, "hybrid", semantics, 12, timeout=590):
        assert worst < 1e-9, misses
        assert captures == 2, misses


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.full
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_regions_that_inductor_compiles_are_those_of_all_sizes(style: str, semantics: str) -> None:
    check(style, semantics, 12, "inductor")


def _ragged(rank: int, world: int) -> list[tuple[int, int]]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = ws.compile(_square, parallel=ws.DataParallel("zero2"), dynamic={"x": (0,)})
    counts: list[tuple[int, int]] = []
    for rows in (8, 8, 3 + rank, 8, 5):
        step(model, optimizer, torch.randn(rows, 6))
        counts.append((step.captures, len(step.programs)))
    return counts


def _square(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, between: Callable[[], None] | None = None
) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    if between is not None:
        between()
    optimizer.step()
    return loss.detach()


def test_a_ragged_last_batch_is_no_capture_and_no_plan() -> None:
    for counts in run_ranks(_ragged, 2):
        assert len(set(counts)) == 1


def _compiled(rank: int, world: int, style: str, semantics: str) -> tuple[float, int, list[str]]:
    """A step that Inductor compiled beside that of one process, or of DDP."""
    model, other = model_of(), model_of()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    parallel = ws.DataParallel(style, semantics=cast(Literal["per_rank", "global"], semantics))
    step = ws.compile(_square, parallel=parallel, backend="inductor", dynamic={"x": (0, 1)})
    worst = 0.0
    for call in range(8):
        given = [sizes(r, 8, semantics)[call] for r in range(world)]
        drawn = torch.Generator().manual_seed(call)
        parts = [torch.randn(*one, 6, generator=drawn, dtype=torch.float64) for one in given]
        loss = step(model, optimizer, parts[rank])
        if semantics == "global":
            expected = _square(other, plain, torch.cat(parts))
        else:
            expected = _square(other, plain, parts[rank], lambda: average(other, world))
        worst = max(worst, abs(float(loss) - float(expected)))
    with ws.whole(model):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst, len(step.programs), step.misses


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
@pytest.mark.parametrize("style", ["replicate", "zero2", "fully_shard"])
def test_what_inductor_compiles_is_for_all_sizes_on_each_rank(style: str, semantics: str) -> None:
    for worst, programs, misses in run_ranks(_compiled, 2, style, semantics, timeout=590):
        assert worst < 1e-9
        assert programs == 1, misses
        regions = [miss for miss in misses if "region" in miss]
        most = 1 if semantics == "global" else 0  # rows that ranks share equally, and others, are two sides of a region
        assert len(regions) <= most, misses
        assert all("is compiled again" in miss for miss in regions), misses


FFN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PADDED: dict[str, tuple[str, Any]] = {
    "per_rank": ("dp=2", ws.DataParallel("fully_shard")),
    "global": ("dp=2", ws.DataParallel("zero1", semantics="global")),
    "tensor parallel": ("tp=2", ws.TensorParallel(FFN)),
    "both": ("dp=2,tp=2", [ws.DataParallel("fully_shard", axis="dp", semantics="global"), ws.TensorParallel(FFN)]),
    "stages": ("pp=2", ws.Pipeline(micro_batches=2, schedule="1f1b")),
    "stages per rank": ("dp=2,pp=2", [ws.DataParallel("zero1", axis="dp"), ws.Pipeline(micro_batches=2)]),
    "stages global": (
        "dp=2,pp=2", [ws.DataParallel("zero1", axis="dp", semantics="global"), ws.Pipeline(micro_batches=2)],
    ),
}  # fmt: skip


def longest(parts: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Batches that one device gets as one: padded to the longest."""
    most = max(x.shape[1] for x, _ in parts)
    return [(F.pad(x, (0, most - x.shape[1])), F.pad(y, (0, most - y.shape[1]), value=-100)) for x, y in parts]


def _pads(rank: int, world: int, kind: str) -> tuple[float, int, list[str]]:
    """Ranks whose batches have other lengths, each padded, beside one process on the batches as they are."""
    torch.set_default_dtype(torch.float64)
    model, other = (build(GPTConfig(layers=1, width=16, heads=2, context=24), 0) for _ in range(2))
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    pad_to = ws.PadTo((8, 16, 24), {"tokens": 1, "targets": 1}, fill={"targets": -100})
    mesh, parallel = PADDED[kind]
    dynamic = {"tokens": (0,), "targets": (0,)}
    step = ws.compile(train, mesh=mesh, parallel=parallel, pad_to=pad_to, dynamic=dynamic)
    worst, parts = 0.0, dict(axis.split("=") for axis in mesh.split(",")).get("dp", 1)
    own, times = rank * int(parts) // world, 4 if "stages" in kind else 1  # pieces are equally large
    for call in range(6):
        given = [(times * rows, length) for rows, length in (sizes(r, 6, "per_rank")[call] for r in range(int(parts)))]
        batches = [bytes_of(r, call, *size) for r, size in enumerate(given)]
        loss = float(step(model, optimizer, *batches[own]))
        together = kind in ("global", "both", "stages global")
        whole = longest(batches) if together else batches
        expected = train_by(whole_loss if together else mean_of, other, plain, whole)
        worst = max(worst, abs(loss - expected)) if "per" not in kind else worst
    with ws.whole(model):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst, len(step.programs), step.misses


@pytest.mark.usual("stages", "global")
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.full) if "," in PADDED[one][0] else one for one in PADDED]
)
def test_ranks_pad_their_batches(kind: str) -> None:
    for worst, programs, misses in run_ranks(_pads, 4 if "," in PADDED[kind][0] else 2, kind, timeout=290):
        assert worst < 1e-12
        assert programs == 1, misses


def _lengths_that_differ(rank: int, world: int) -> str:
    model = nn.Linear(6, 4)
    step: Any = ws.compile(_square, parallel=ws.DataParallel(semantics="global"))
    try:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3 + rank, 6))
    except ws.errors.RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_share_a_batch_have_one_length() -> None:
    for rank, found in enumerate(run_ranks(_lengths_that_differ, 2)):
        shapes = f"with x of {[2, 3 + rank, 6]}"
        assert f"rank {1 - rank} was given a batch of other sizes than rank {rank}, {shapes}" in found
        assert "they differ in the dims that ranks share alone (dim 0 of x)" in found


def whole_loss(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The loss of one batch."""
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def mean_of(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of the losses of several batches, as of ranks under DDP."""
    return torch.stack([whole_loss(model, [part]) for part in parts]).mean()


def train_by(
    loss_of: Callable[[nn.Module, list[tuple[Tensor, Tensor]]], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[tuple[Tensor, Tensor]],
) -> float:
    """One update as `train` makes it."""
    optimizer.zero_grad()
    loss = loss_of(model, parts)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _piped(
    rank: int, world: int, mesh: str, order: str, semantics: str, style: str = "zero1"
) -> tuple[float, int, int, list[str]]:
    """Stages, whose ranks get the same batch of each size, beside one process."""
    torch.set_default_dtype(torch.float64)
    config = GPTConfig(layers=2, width=16, heads=2, context=24)
    model, other = build(config, 0), build(config, 0)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, fused=True) for m in (model, other))
    pipeline = ws.Pipeline(micro_batches=3, schedule=cast(Any, order))
    data = ws.DataParallel(style, axis="dp", semantics=cast(Any, semantics))
    parallel = [data, pipeline] if "dp" in mesh else pipeline
    step: Any = ws.compile(train, parallel=parallel, mesh=mesh)
    worst, copies = 0.0, world // 2
    own, calls = rank // 2, ((6, 8), (9, 5), (15, 9), (12, 24), (6, 8), (18, 17), (12, 2))
    for call, (rows, length) in enumerate(calls):
        apart = semantics == "per_rank"
        given = [(rows + 6 * r, max(2, length - r) if apart else length) for r in range(copies)]
        parts = [bytes_of(r, call, *size) for r, size in enumerate(given)]
        loss = float(step(model, optimizer, *parts[own]))
        losses = mean_of if apart else whole_loss
        expected = train_by(losses, other, plain, parts)
        worst = max(worst, abs(loss - expected)) if not apart else worst
    with ws.whole(model, writeback=False):
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst, step.captures, len(step.programs), step.misses


@pytest.mark.parametrize(
    "order", ["1f1b", *(pytest.param(one, marks=pytest.mark.full) for one in ("gpipe", "zero_bubble", "auto"))]
)
def test_stages_take_all_sizes(order: str) -> None:
    """Seven sizes, in three pieces each."""
    for worst, captures, programs, misses in run_ranks(_piped, 2, "pp=2", order, "global", timeout=290):
        assert worst < 1e-9, misses
        assert captures == 2, misses
        assert programs == 2, misses


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("semantics", ["per_rank", "global"])
def test_stages_and_data_parallel_ranks_take_all_sizes(semantics: str) -> None:
    for worst, captures, programs, misses in run_ranks(_piped, 4, "dp=2,pp=2", "1f1b", semantics, timeout=590):
        assert worst < 1e-9, misses
        assert captures == 2, misses
        assert programs <= 4, misses


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ranks_with_other_sizes_run_blocks_in_one_order() -> None:
    """Ranks of a stage reduce in each block, and each prices blocks for its own batch."""
    for worst, _, _, misses in run_ranks(_piped, 4, "dp=2,pp=2", "auto", "per_rank", "zero2", timeout=590):
        assert worst < 1e-9, misses


def _shares_tokens(rank: int, world: int) -> tuple[float, int]:
    """Rows and tokens of a batch that change; ranks have pieces of all rows, of unequal lengths in one of the calls."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Llama(by_hand=True, kv=4, layers=1)
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, other))
    step = ws.compile(of_tokens, parallel=ws.DataParallel("fully_shard", semantics="global", input_batch_dim=1))
    worst = 0.0
    for call, (rows, length) in enumerate([(4, 20), (4, 12), (4, 13), (2, 20), (4, 16), (2, 14)]):
        drawn = torch.Generator().manual_seed(call)
        ids, targets = torch.randint(VOCAB, (2, rows, length), generator=drawn)
        pieces = [whole.chunk(world, 1)[rank].contiguous() for whole in (ids, targets)]
        loss = step(model, optimizer, *pieces)
        worst = max(worst, abs(loss.item() - of_tokens(other, plain, ids, targets).item()))
    return worst, len(step.programs)


def _rows_of_layers(rank: int, world: int, plan: Any, by_hand: bool) -> tuple[float, list[int]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Llama(by_hand=by_hand, kv=4, layers=1)
    other = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, other))
    step = ws.compile(of_tokens, parallel=ws.TensorParallel(plan), mesh="tp=2")
    worst = 0.0
    for call, (rows, length) in enumerate([(4, 20), (5, 22), (3, 14)]):
        batch = torch.randint(VOCAB, (2, rows, length), generator=torch.Generator().manual_seed(call))
        loss = step(model, optimizer, *batch)
        worst = max(worst, abs(loss.item() - of_tokens(other, plain, *batch).item()))
    return worst, [sum(map(communicates, program.local.graph.nodes)) for program in step.programs]


@pytest.mark.parametrize(("plan", "by_hand"), [(SEQUENCE, False), (LAYERS, True)], ids=["sequence", "by hand"])
def test_tensor_parallel_layers_take_any_number_of_rows(plan: Any, by_hand: bool) -> None:
    """Tokens and heads lie behind rows: one program for all numbers of rows, with as many collectives as for one."""
    for worst, collectives in run_ranks(_rows_of_layers, 2, plan, by_hand):
        assert worst < 1e-10
        assert len(collectives) == 2
        assert collectives[0] == collectives[1]


def test_ranks_share_tokens_at_all_sizes() -> None:
    """Tokens are blocks behind rows: their number is asked of each batch, where sizes are symbols."""
    for worst, programs in run_ranks(_shares_tokens, 2):
        assert worst < 1e-10
        assert programs <= 4  # the first size; with symbols: four rows, four rows unevenly, two rows
