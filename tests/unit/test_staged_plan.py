"""Pipelines planned from few layers: against the same step with all of its layers and stages, planned as a whole."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import wholestep as ws
from tests.clock_stages import Stages
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.staged import StagedStep
from wholestep.graph.loop import loop_of
from wholestep.graph.stage_part import StageBlock
from wholestep.plan.strategies import compose
from wholestep.planner.staged_plan import ShortPipelines, ShortStages, StagedSetup, stage_passes, staged

HARDWARE = ws.Hardware.preset("dgx-a100")
WIDTH, VOCABULARY, LENGTH = 64, 96, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(VOCABULARY, WIDTH), again
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.head(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def captured(batch: int, layers: int, **options: Any) -> ws.TrainGraph:
    with torch.device("meta"):
        model = Model(layers, **options)
        tokens = torch.empty(batch, LENGTH, dtype=torch.int64)
    return ws.capture(train_step, model, torch.optim.AdamW(model.parameters(), fused=True), tokens)


def both(
    mesh: str, layers: tuple[int, ...], pieces: int, order: Any = "1f1b", chunks: int | None = None, **options: Any
) -> tuple[StagedStep, StagedStep]:
    """From short steps, and planned as a whole with the same layers in each stage."""
    sizes, on = iter(range(sum(layers))), ws.Mesh(mesh)
    named = [[f"layers.{next(sizes)}" for _ in range(count)] for count in layers]
    beside = [ws.DataParallel("zero1", axis="dp")] if "dp" in on.names else []
    short = ShortPipelines(lambda batch, count: captured(batch, count, **options), sum(layers), HARDWARE)
    pipe = ws.Pipeline(micro_batches=pieces, schedule=order, chunks=chunks)
    few = short.step(StagedSetup(on, compose([*beside, pipe]), layers), 2)
    pipe = ws.Pipeline(stages=named, micro_batches=pieces, schedule=order, chunks=chunks)
    per_step = pieces * 2
    graph = captured(per_step, sum(layers), **options)
    plan = ws.plan(graph, on, [*beside, pipe], hardware=HARDWARE)
    return few, staged(ws.partition(graph, plan), BlockPrices(HARDWARE, on), order)


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "layers", "pieces", "order", "chunks", "options"), [
    ("dp=2,pp=4", (1, 3, 2, 2), 8, "1f1b", None, {"tied": True}),
    pytest.param("pp=2", (4, 4), 4, "1f1b", None, {}, marks=pytest.mark.full),
    pytest.param("pp=4", (2, 2, 2, 2), 8, "zero_bubble", None, {}, marks=pytest.mark.full),
    pytest.param("pp=2", (2, 2, 2, 2), 4, "interleaved", 2, {}, marks=pytest.mark.full),
    pytest.param("pp=4", (2, 2, 2, 2), 8, "gpipe", None, {"again": True}, marks=pytest.mark.full),
])  # fmt: skip
def test_short_stages_stand_for_any_number(
    mesh: str, layers: tuple[int, ...], pieces: int, order: str, chunks: int | None, options: dict[str, Any]
) -> None:
    few, whole = both(mesh, layers, pieces, order, chunks, **options)
    assert few.order == whole.order
    # buckets of the whole, in stages with other numbers of layers; the update of two chunks is one kernel
    close = 0.005 if chunks else 1e-3 if "dp" in mesh else 1e-6
    assert few.step_us == pytest.approx(whole.step_us, rel=close)
    counts_us = 9.0 * (pieces - 2)  # a loop beside the stages, which counts tokens: a short step has it for two pieces
    assert few.bubble == pytest.approx(whole.bubble, rel=close, abs=1.01 * counts_us / whole.step_us / len(few.stages))
    assert few.model_us == pytest.approx(whole.model_us)
    assert few.sent_bytes == pytest.approx(whole.sent_bytes)
    assert few.collectives == whole.collectives
    for one, other in zip(few.stages, whole.stages, strict=True):
        assert one.busy_us == pytest.approx(other.busy_us, rel=2 * close, abs=1.01 * counts_us)
        assert one.in_flight == other.in_flight
        batch = 2 * pieces * LENGTH * 8  # of which a short step has two pieces
        assert one.rest_bytes == pytest.approx(other.rest_bytes, abs=batch + 128)
        message = 2 * LENGTH * WIDTH * 4  # of two pieces one more is under way when the last one ends than of many
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01, abs=message)


@pytest.mark.full
def test_all_layers_of_a_v_are_captured() -> None:
    """Its stages that share a rank are one block, which three short stages do not show."""
    asked = list[int]()
    short = ShortPipelines(lambda batch, count: (asked.append(count), captured(batch, count))[1], 8, HARDWARE)
    pipe, on = ws.Pipeline(micro_batches=4, placement="v"), ws.Mesh("pp=2")
    found = short.step(StagedSetup(on, compose([pipe])), 2)
    plan = ws.plan(captured(8, 8), on, pipe, hardware=HARDWARE)
    assert found == staged(ws.partition(captured(8, 8), plan), BlockPrices(HARDWARE, on), "auto")
    assert asked == [8]


def first_blocks(again: bool) -> tuple[tuple[StageBlock, ...], int]:
    """The blocks of the first of two stages, of which each has two layers; and bytes that the forward leaves."""
    graph = captured(8, 4, again=again)
    local = ws.partition(graph, ws.plan(graph, "pp=2", [ws.Pipeline(micro_batches=4, schedule="1f1b")]))
    loops = [loop for node in local.graph.nodes if (loop := loop_of(node)) is not None and loop.stages is not None]
    assert len(loops) == 1
    assert loops[0].stages is not None
    blocks = loops[0].stages.parts[0].blocks
    costs = ShortStages(local).costs(BlockPrices(HARDWARE, local.mesh), False, ())
    return blocks, next(cost.holds_bytes for cost in costs.values() if cost.stage == 0 and not cost.is_backward)


@pytest.mark.full
def test_what_a_layer_computes_again_waits_for_the_backward() -> None:
    """Also behind an op of several results, as a norm is: the forward of a stage calls what it calls without
    checkpoints, and leaves less than a third to the backward.
    """
    (kept, kept_bytes), (again, again_bytes) = (first_blocks(checkpointed) for checkpointed in (False, True))
    assert [block.is_backward for block in again] == [block.is_backward for block in kept] == [False, True]
    calls = [
        [Counter(name for n in block.body.nodes if (name := str(n.target)).startswith("aten")) for block in blocks]
        for blocks in (kept, again)
    ]
    assert calls[0][0] == calls[1][0]
    norm = "aten.native_layer_norm.default"
    assert calls[0][0][norm] == calls[1][1][norm] == 2
    assert 0 < again_bytes < kept_bytes / 3


def planned(mesh: str, style: Any, order: Any, pieces: int, chunks: int | None = None) -> ws.LocalGraph:
    several: list[Any] = [ws.Pipeline(micro_batches=pieces, schedule=order, chunks=chunks)]
    several += [ws.DataParallel(style, axis="dp")] if style else []
    graph = captured(2 * pieces, 4)
    return ws.partition(graph, ws.plan(graph, mesh, several, hardware=HARDWARE))


@pytest.mark.parametrize(("style", "order", "chunks"), [
    ("zero1", "1f1b", None),
    pytest.param("zero1", "zero_bubble", None, marks=pytest.mark.full),
    pytest.param("zero2", "1f1b", None, marks=pytest.mark.full),
    pytest.param("replicate", "interleaved", 2, marks=pytest.mark.full),
    pytest.param("fully_shard", "1f1b", None, marks=pytest.mark.full),
    pytest.param("zero1", "gpipe", None, marks=pytest.mark.full),
])  # fmt: skip
def test_a_step_takes_what_the_programs_of_its_stages_take(style: str, order: str, chunks: int | None) -> None:
    """Beside an independent clock that runs the programs that ranks run, node by node, all stages together."""
    local = planned("dp=4,pp=2", style, order, 4, chunks)
    prices = BlockPrices(HARDWARE, local.mesh)
    passes = stage_passes(local.mesh, local.stage_axis, prices)
    stages = Stages(local, HARDWARE, passes)
    made = staged(local, prices, order)
    # the last micro-batch runs apart: its reductions go on beside what follows, which no block shows
    assert made.step_us == pytest.approx(stages.step_us(), rel={"zero2": 0.05, "replicate": 0.005}.get(style, 0.001))
    sent = [sum(one.count for one in program.collectives().values()) for program in stages.programs]
    unscheduled = staged(local, prices, order, ws.default_passes(schedule=None))
    assert made.collectives < unscheduled.collectives
    assert made.waited_us < unscheduled.waited_us
    assert made.collectives <= max(sent)
    assert ws.simulate(local, HARDWARE) == ws.timeline(local, HARDWARE).simulated == made.timeline.simulated
    assert ws.simulate(local, HARDWARE).step_us < 0.99 * unscheduled.step_us or "dp" not in str(local.mesh)


@pytest.mark.parametrize("style", ["zero1", pytest.param("", marks=pytest.mark.full)])
def test_a_pipeline_of_one_micro_batch_takes_what_its_stages_take(style: str) -> None:
    """There is no loop: stages run the whole batch one after the other."""
    local = planned("dp=4,pp=2" if style else "pp=2", style, "1f1b", 1)
    passes = stage_passes(local.mesh, local.stage_axis, BlockPrices(HARDWARE, local.mesh))
    stages, made = Stages(local, HARDWARE, passes), ws.timeline(local, HARDWARE)
    assert made.simulated.step_us == pytest.approx(stages.step_us(), rel=0.02)
    assert made.peak.size_bytes == max(ws.peak_memory(one).size_bytes for one in stages.programs)
    names = [[span.op for span in made.spans if span.stream == f"stage {stage}"] for stage in (0, 1)]
    assert names[0][:2] == ["forward", "backward"]
    assert names[1][0] == "forward and backward"


def test_a_program_of_all_stages_is_simulated_in_its_own_order() -> None:
    """Orders that ranks run were chosen when the program was made, also for other hardware than that."""
    local = planned("dp=4,pp=2", "zero1", "gpipe", 4)
    prices = BlockPrices(HARDWARE, local.mesh)
    assert staged(local, prices).order == "gpipe"
    assert ws.simulate(local, HARDWARE).step_us == staged(local, prices, "gpipe").step_us
    assert staged(local, prices).fullest.in_flight > staged(local, prices, "1f1b").fullest.in_flight
