"""Values made again in blocks of stages and in loops over micro-batches: numbers, peaks, times, what is refused."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import wholestep as ws
from tests.alone import fake_group, predicted_and_measured
from tests.clock_stages import Stages
from tests.stage_models import SEQUENCE, batches, maker, train
from tests.steps import mean_square
from tests.together import Double, OneDevice, compare, joined, without_chance
from wholestep.backend.rank_binding import bind
from wholestep.capture import Capture, capture_step
from wholestep.cost.stage_costs import BlockPrices, resize_regions
from wholestep.errors import PlanError
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.loop import with_bodies
from wholestep.graph.sizes_in_graph import at_sizes
from wholestep.partition.stage_program import stage_program
from wholestep.passes.fit_memory import FitMemory
from wholestep.passes.recompute_layers import RecomputeLayers
from wholestep.passes.reinplace import Reinplace
from wholestep.passes.saved_values import SavedValues
from wholestep.planner.fit_stages import fit_stages, least_bytes
from wholestep.planner.search_result import Status, explained
from wholestep.planner.staged_plan import costs_of_staged, staged
from wholestep.runtime.compile_options import CompileOptions, StepOptions

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
MACHINE = ws.Hardware.default()
TENSOR_PARALLEL = ws.TensorParallel({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, axis="tp")
GLOBAL = ws.DataParallel("zero1", axis="dp", semantics="global")


def stages_of(local: LocalGraph) -> list[int | None]:
    return list(range(local.mesh.axis_size(local.stage_axis))) if local.stage_axis else [None]


def again(local: LocalGraph) -> int:
    """Calls that compute a value once more."""
    return sum(meta.is_recomputed(node) for node, _ in with_bodies(local.graph))


def all_again(local: LocalGraph) -> LocalGraph:
    """`local` with all that is worth it rematerialized, in every stage."""
    names = [
        name
        for stage in stages_of(local)
        for name in SavedValues(local, gathers=False, stage=stage, activations=True).path(MACHINE)[-1].names
    ]
    made = SavedValues(local, gathers=False, activations=True).applied(names, MACHINE)
    assert again(made) > 10
    return made


def gathered_again(local: LocalGraph) -> int:
    """Gathers that run once more."""
    return sum(meta.is_recomputed(node) for node, _ in with_bodies(local.graph) if "all_gather" in str(node.target))


# -- numbers ----------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=4)
def one_device(layers: int, tied: bool, drop: float) -> OneDevice:
    return OneDevice(maker(layers, tied, drop), train, batches(8, 2))


@pytest.mark.full
@pytest.mark.crossed
@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "zero_bubble", "auto"])
@pytest.mark.parametrize("pieces", [1, 4, 8])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["", "dropout"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_stages_compute_what_one_device_does(tied: bool, drop: float, stages: int, pieces: int, order: str) -> None:
    """Two steps of AdamW with clipping: losses on every rank, and all parameters."""
    parallel = ws.Pipeline(micro_batches=pieces, schedule=order)
    found = compare(one_device(stages + 1, tied, drop), f"pp={stages}", parallel, edit=all_again)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.full
@pytest.mark.parametrize("parallel", [
    ("dp=2,pp=2", GLOBAL),
    pytest.param(("pp=2,tp=2", TENSOR_PARALLEL), marks=pytest.mark.full),
    pytest.param(("pp=2,tp=2", ws.TensorParallel(SEQUENCE)), marks=pytest.mark.full),
    pytest.param(("dp=2,pp=2", ws.DataParallel("zero2", axis="dp", semantics="global")), marks=pytest.mark.full),
    pytest.param(("dp=2,pp=2", ws.DataParallel("fully_shard", axis="dp", semantics="global")), marks=pytest.mark.full),
], ids=["zero1", "tp", "sequence", "zero2", "fully_shard"])  # fmt: skip
@pytest.mark.parametrize("order", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.full)])
def test_stages_beside_other_axes(parallel: tuple[str, Any], order: str) -> None:
    """After all passes that run by default: runs of blocks are written out, collectives merged."""
    mesh, beside = parallel
    passes = ws.default_passes(schedule=ws.Schedule(bucket_bytes=1 << 10, first_bucket_bytes=1 << 10))
    strategies = [beside, ws.Pipeline(micro_batches=4, schedule=order)]
    found = compare(one_device(4, True, 0.0), mesh, strategies, passes=passes, edit=all_again)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert (gathered_again(found.local) > 0) == (beside == ws.TensorParallel(SEQUENCE))


@pytest.mark.parametrize("pieces", [1, 4])
def test_loops_gather_activations_again(pieces: int) -> None:
    parallel = [ws.TensorParallel(SEQUENCE), ws.MicroBatches(pieces)]
    found = compare(one_device(3, False, 0.0), "tp=2", parallel, edit=all_again)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert gathered_again(found.local) > 0


@pytest.mark.crossed
@pytest.mark.parametrize("pieces", [1, 4, 8])
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2"])
def test_loops_compute_what_one_device_does(mesh: str, pieces: int) -> None:
    if pieces == 8 and mesh == "dp=2":
        pieces = 3  # uneven
    one = one_device(3, False, 0.2 if mesh == "dp=1" else 0.0)
    found = compare(one, mesh, [GLOBAL, ws.MicroBatches(pieces)], in_place=True, edit=all_again)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.full), "selective"])
def test_layers_are_computed_again_by_a_rule_in_a_loop(kind: Any) -> None:
    found = compare(one_device(3, False, 0.2), "dp=1", ws.MicroBatches(4), edit=RecomputeLayers(kind))
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"
    assert again(found.local) > 10
    staged_local = ws.partition(wide(), ws.plan(wide(), "pp=2", ws.Pipeline(micro_batches=4)))
    with pytest.raises(PlanError, match=f"recompute {kind}: the program of a stage"):
        RecomputeLayers(kind)(stage_program(staged_local, 0))


@pytest.mark.full
@pytest.mark.parametrize("order", ["1f1b", pytest.param("interleaved", marks=pytest.mark.full)])
def test_llama(order: str) -> None:
    pytest.importorskip("transformers")
    from tests.hf_models import entries, loss_of

    (entry,) = entries(["llama"])
    generator = torch.Generator().manual_seed(0)

    def make() -> tuple[nn.Module, Optimizer]:
        model = without_chance(entry.build().double())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with Double():
        given = [(joined([entry.batch(generator) for _ in range(4)]),) for _ in range(2)]
        parallel = ws.Pipeline(micro_batches=2, schedule=order)
        found = compare(OneDevice(make, step, given), "pp=2", parallel, edit=all_again)
    assert found.worst < TOLERANCE, f"{found.where} differs by {found.worst:.1e}"


# -- peaks ------------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def wide() -> ws.TrainGraph:
    """Of which activations take most of the memory."""
    model, optimizer = maker(3, False, 0.1)()
    return ws.capture(train, model, optimizer, *batches(256, 1)[0])


@lru_cache(maxsize=2)
def planned(stages: int, order: Any, pieces: int) -> LocalGraph:
    parallel = ws.Pipeline(micro_batches=pieces, schedule=order)
    return ws.partition(wide(), ws.plan(wide(), f"pp={stages}", parallel))


@lru_cache(maxsize=1)
def least_of_two() -> int:
    """What stages need at least."""
    return least_bytes(planned(2, "1f1b", 8), BlockPrices(MACHINE, ws.Mesh("pp=2")))


@pytest.mark.parametrize("order", [
    "1f1b", *(pytest.param(one, marks=pytest.mark.full) for one in ("interleaved", "gpipe", "zero_bubble")),
])  # fmt: skip
@pytest.mark.full
def test_peaks_of_stages_are_as_predicted(order: str) -> None:
    """Bytes of tensors while the program of a stage runs, with what it sends and receives."""
    local = planned(2, order, 8)
    with fake_group(2) as group:
        for stage in range(2):
            for made in (local, all_again(local)):
                own = ws.run_passes(stage_program(made, stage), [Reinplace()])
                predicted, measured = predicted_and_measured(own, group, exchange=False)
                assert measured <= predicted.size_bytes
                rel = 0.05 if order == "gpipe" else 0.01 if made is local else 0.02  # attention that runs again
                assert predicted.size_bytes == pytest.approx(measured, rel=rel)


@pytest.mark.parametrize(
    "order", ["1f1b", *(pytest.param(one, marks=pytest.mark.full) for one in ("gpipe", "interleaved"))]
)
def test_a_budget_is_met_in_each_stage(order: str) -> None:
    local, prices = planned(2, order, 8), BlockPrices(MACHINE, ws.Mesh("pp=2"))
    before = max(ws.peak_memory(stage_program(local, stage)).size_bytes for stage in range(2))
    budget = (before + (least_of_two() if order == "1f1b" else least_bytes(local, prices))) // 2
    assert budget < 0.9 * before
    fit = fit_stages(local, budget, prices)
    assert again(fit.local) > 0
    assert fit.peak_bytes <= budget
    with fake_group(2) as group:
        for stage in range(2):
            own = ws.run_passes(stage_program(fit.local, stage), fit.passes)
            assert predicted_and_measured(own, group, exchange=False)[1] <= budget


def test_a_program_with_symbols_holds_what_that_of_the_size_does() -> None:
    """What `memory_bytes` is compared with at each size of a batch."""
    model = nn.Sequential(*(module for _ in range(4) for module in (nn.Linear(32, 32), nn.GELU())))

    def captured(rows: int, **options: Any) -> Capture:
        given = model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(rows, 32)
        return capture_step(mean_square, given, {}, **options)

    def bound(made: Capture, stage: int) -> LocalGraph:
        local = ws.partition(made.graph, ws.plan(made.graph, "pp=2", ws.Pipeline(micro_batches=4)))
        own = ws.run_passes(stage_program(local, stage), [Reinplace()])
        return replace(own, graph=bind(own, {"pp": stage}, {"pp": "pp"}))

    made, fixed = captured(16, dynamic={"x": (0,)}), captured(64)
    assert made.symbols is not None
    for stage in range(2):
        sized = bound(made, stage)
        at_sizes(sized.graph, dict.fromkeys(made.symbols.record.dims, 64))
        resize_regions(sized.graph)
        assert ws.peak_memory(sized).size_bytes == ws.peak_memory(bound(fixed, stage)).size_bytes


@pytest.mark.full
def test_a_stage_with_more_pieces_in_flight_recomputes_more() -> None:
    """Stage `s` of `p` holds p - s pieces, so that it has to do more for the same budget; the last one has but one."""
    local, prices = planned(3, "1f1b", 8), BlockPrices(MACHINE, ws.Mesh("pp=3"))
    peaks = [ws.peak_memory(stage_program(local, stage)).size_bytes for stage in range(3)]
    assert peaks[0] > peaks[1] > peaks[2]
    budget = max(peaks[2], int(0.6 * peaks[0]))
    fit = fit_stages(local, budget, prices)
    counts = [again(stage_program(fit.local, stage)) for stage in range(3)]
    assert counts[0] > counts[1] >= counts[2] == 0


@pytest.mark.full
@pytest.mark.parametrize("part", [*(pytest.param(part, marks=pytest.mark.full) for part in (0.8, 0.4)), 0.1])
def test_a_budget_is_met_in_a_loop(part: float) -> None:
    parallel = ws.MicroBatches(4)
    local = ws.partition(wide(), ws.plan(wide(), "dp=1", parallel))
    after = (Reinplace(),)
    before = ws.peak_memory(ws.run_passes(local, after)).size_bytes
    least = FitMemory(0, after=after).least(local)[1]
    assert least < 0.7 * before
    budget = int(least + part * (before - least))
    made = ws.run_passes(FitMemory(budget, after=after)(local), after)
    assert again(made) > 0
    with fake_group(1) as group:
        predicted, measured = predicted_and_measured(made, group, exchange=False)
    assert measured <= predicted.size_bytes * 1.001 <= budget * 1.001


def test_a_budget_that_no_stage_can_meet_is_refused() -> None:
    local, prices = planned(2, "1f1b", 8), BlockPrices(MACHINE, ws.Mesh("pp=2"))
    least = least_of_two()
    assert fit_stages(local, least, prices).peak_bytes == least
    with pytest.raises(PlanError, match=r"stage \d needs at least .* on a rank") as caught:
        fit_stages(local, least - 1, prices)
    assert 'more stages, or more micro-batches with schedule="1f1b"' in str(caught.value)


# -- times ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["1f1b", pytest.param("zero_bubble", marks=pytest.mark.full)])
def test_a_step_takes_what_its_stages_compute_again(order: str) -> None:
    """Beside an independent clock that runs the programs of all stages; more than without."""
    hardware = ws.Hardware.preset("dgx-a100")
    local, prices = planned(2, order, 8), BlockPrices(hardware, ws.Mesh("pp=2"))
    budget = (max(one.peak_bytes for one in staged(local, prices).stages) + least_bytes(local, prices)) // 2
    fit = fit_stages(local, budget, prices)
    step, before = fit.step(prices), staged(local, prices)
    assert step.again_us > before.again_us == 0
    assert step.model_us == pytest.approx(before.model_us)
    assert before.step_us < step.step_us == pytest.approx(Stages(fit.local, hardware, fit.passes).step_us(), rel=0.01)
    assert ws.simulate(fit.local, hardware).step_us == pytest.approx(step.step_us)
    peaks = [ws.peak_memory(stage_program(fit.local, stage)).size_bytes for stage in range(2)]
    assert [one.peak_bytes for one in step.stages] == pytest.approx(peaks, rel=0.01)


# -- the search -------------------------------------------------------------------------------------------------------
def test_auto_fits_stages_by_recomputation() -> None:
    asked, local = ws.Pipeline(micro_batches=8, schedule="1f1b"), planned(2, "1f1b", 8)
    prices = BlockPrices(MACHINE, local.mesh)
    free, least = costs_of_staged(staged(local, prices)), least_of_two()
    budget = (free.peak_bytes + least) // 2
    found = ws.Auto(budget, MACHINE, pipeline=asked).search(wide(), "pp=2")
    assert found.best.status is Status.CHOSEN
    assert least <= found.best.needs_bytes <= budget < free.peak_bytes
    assert found.best.rematerialized
    assert found.best.batch_s > free.step_s
    assert found.best.costs is not None
    assert found.best.costs.again_s > free.again_s == 0
    assert StepOptions.of(CompileOptions(parallel=explained(found))).memory_bytes == budget
    with pytest.raises(ws.PlanError, match="no plan fits"):
        ws.Auto(budget, MACHINE, pipeline=asked, recompute=False).search(wide(), "pp=2")
