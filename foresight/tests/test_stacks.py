"""Stacks: which kernels other software has, what its host takes to start them, and what it overlaps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import wholestep as ws
from tests.unit.test_fusion import program
from tests.unit.test_prices import H100, PRESETS, check_peaks, local, train_step
from tests.unit.test_staged_plan import HARDWARE, captured, planned
from wholestep.cost.fusion import LOSS, compiled_us
from wholestep.cost.stage_costs import BlockPrices
from wholestep.graph import meta
from wholestep.graph.loop import loop_of
from wholestep.hardware.device import Work
from wholestep.partition.accumulators import add_up
from wholestep.passes.bucket import Bucket
from wholestep.passes.overlap import Overlap
from wholestep.passes.peel_pieces import PeelPieces
from wholestep.passes.split_optimizer import SplitOptimizer
from wholestep.planner.staged_plan import ShortPipelines, StagedSetup, stage_passes, staged
from wholestep_foresight import Stack
from wholestep_foresight.stack import STACKS
from wholestep_foresight.staged_search import StagedSearch

__all__ = ["local"]


@pytest.mark.parametrize("name", PRESETS)
def test_no_op_is_faster_than_the_peak(local: ws.LocalGraph, name: str) -> None:
    """On every stack."""
    hardware = ws.Hardware.preset(name)
    for stack in STACKS:
        check_peaks(local, hardware, stack.op_times(local.graph, hardware))


def test_a_stack_is_found_by_its_name() -> None:
    assert Stack.named("torchtitan-compile").compiled
    with pytest.raises(ws.PlanError) as error:
        Stack.named("pytorch")
    said = "there is no stack 'pytorch'\n  needed: one of wholestep, wholestep-compile, fsdp"
    assert str(error.value).startswith(said)


def us(local: ws.LocalGraph, **changed: Any) -> float:
    return ws.simulate(local, H100, software=replace(Stack("x", recorded=True), **changed)).step_us


def test_each_kernel_that_a_stack_lacks_costs_time(local: ws.LocalGraph) -> None:
    base = us(local)
    assert base == ws.simulate(local, H100).step_us
    assert us(local, compiled=True) == pytest.approx(ws.simulate(local, H100, compiled=True).step_us)
    assert us(local, compiled=True) < base < us(local, flash_attention=1) < us(local, flash_attention=0)
    assert us(local, flash_attention=3) < base


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["half", "float32"])
def test_sums_of_micro_batches_move_what_a_stack_says(dtype: torch.dtype | None) -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False), torch.empty(512, 4096)
    options = ws.CaptureOptions(mixed_precision=ws.MixedPrecision(dtype))
    graph = ws.capture(train_step, model, AdamW(model.parameters(), fused=True), x, options=options)
    local = ws.partition(graph, ws.plan(graph, "dp=1", ws.MicroBatches(4)))
    body = next(loop.body for node in local.graph.nodes if (loop := loop_of(node)))
    added = next(n for n in body.nodes if n.target is add_up and meta.one_tensor(n).shape == (4096, 4096))
    size = 4 if dtype is None else 2
    per_byte = H100.work_us(Work(1 << 30)) / (1 << 30)
    for name, moved in (("own", 4 + 4 + size), ("half", 3 * size), ("product", 0)):
        times = Stack("x", accumulates=name).op_times(body, H100)
        assert times is not None
        assert times[added] == pytest.approx(moved * 4096 * 4096 * per_byte, abs=6.0), name


def test_the_third_attention_needs_hopper(local: ws.LocalGraph) -> None:
    a100 = ws.Hardware.preset("dgx-a100")
    two, three = (
        ws.simulate(local, a100, software=Stack("x", recorded=True, flash_attention=n)).step_us for n in (2, 3)
    )
    assert two == three


def test_the_host_is_hidden_until_it_is_slower_than_the_device(local: ws.LocalGraph) -> None:
    base, hidden = us(local), us(local, recorded=False, start_us=0.01)
    assert hidden == pytest.approx(base, rel=0.01)
    slow = ws.simulate(local, H100, software=Stack("x", start_us=1000.0))
    assert slow.step_us >= slow.host_us > base
    assert ws.simulate(local, H100, software=Stack("x", recorded=True, start_us=1000.0)).step_us == base
    forward = ws.simulate(local, H100, software=Stack("x", start_us=1000.0, backward_start_us=1.0))
    assert base < forward.step_us < slow.step_us


def test_a_measured_host_counts(local: ws.LocalGraph) -> None:
    slow, twice = Stack("x", start_us=1000.0), ws.KernelTimes((), device=1.0, host=2.0)
    assert ws.simulate(local, H100, software=slow, profile=twice).host_us == pytest.approx(
        2 * ws.simulate(local, H100, software=slow).host_us
    )


def test_a_loss_that_is_not_compiled_passes_over_the_logits_op_by_op() -> None:
    """As Megatron's of 2022. Nothing else changes."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 512, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), x.sum(-1).long())

    graph, old = program(Scores, (256, 64)).graph, Stack.named("megatron-2022")
    fused = replace(old, fused_loss=True).op_times(graph, H100)
    assert old.op_times(graph, H100) == fused | compiled_us(graph, H100, LOSS)


def test_stages_are_simulated_with_other_software() -> None:
    local, stack = planned("dp=4,pp=2", "zero1", "1f1b", 4), Stack.named("megatron-deepspeed-2022")
    priced = staged(local, BlockPrices(HARDWARE, local.mesh, stack))
    assert ws.simulate(local, HARDWARE, software=stack).step_us == priced.step_us
    assert ws.simulate(local, HARDWARE, software=stack).step_us > ws.simulate(local, HARDWARE).step_us


def test_a_stack_without_overlap_gets_passes_without_it() -> None:
    local = planned("dp=4,pp=2", "replicate", "1f1b", 4)
    stack = Stack.named("megatron-deepspeed-2022")
    prices = BlockPrices(HARDWARE, local.mesh, stack)
    passes = {type(one) for one in stage_passes(local.mesh, local.stage_axis, prices)}
    assert passes.isdisjoint({Overlap, PeelPieces, SplitOptimizer})
    assert Bucket in passes


@pytest.mark.full
def test_the_search_of_pipelines_simulates_what_is_fast() -> None:
    def capture(batch: int, layers: int) -> ws.TrainGraph:
        return captured(batch, layers)

    short = ShortPipelines(capture, 8, HARDWARE)
    search = StagedSearch(lambda kind: short, 8, HARDWARE, 1 << 30, None, 1 << 20, ("none",))
    best, lost = search.run(4, 32)
    listed = [*best, *lost]
    assert {str(one.mesh) for one in listed} == {"dp=2,pp=2", "pp=4"}
    assert {(one.order, one.chunks) for one in listed} >= {("1f1b", 1), ("interleaved", 2)}
    assert all(one.why for one in lost)
    again = [short.step(StagedSetup(one.mesh, one.strategies), one.batch).step_us / 1e6 for one in listed]
    found = [one.costs.step_s for one in best if one.costs]
    assert found == pytest.approx(again[: len(best)])
    assert min(found) <= 1.05 * min(again)
    none, lost = StagedSearch(lambda kind: short, 8, HARDWARE, 1 << 18, None, 1 << 20, ("none",)).run(4, 32)
    assert not none
    assert all("too much" in one.why for one in lost)
