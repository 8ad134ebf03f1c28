"""Fits the stages of a pipeline into a budget of memory: each rematerializes what it has to."""

from __future__ import annotations

from dataclasses import dataclass

from ..cost.memory import peak_memory
from ..cost.stage_costs import BlockPrices
from ..cost.staged import StagedStep
from ..graph.graph import LocalGraph
from ..partition.stage_program import stage_program
from ..passes.base import Pass, run_passes
from ..passes.bucket_sizes import smaller_buckets
from ..passes.fit_memory import FitMemory
from ..passes.saved_values import SavedValues
from .staged_plan import stage_passes, staged


@dataclass(frozen=True)
class FittedStages:
    """The program of all stages within a budget, and the passes that follow. `rematerialized`: by name, of all stages;
    `peak_bytes`: of the fullest.
    """

    local: LocalGraph
    passes: tuple[Pass, ...]
    rematerialized: tuple[str, ...]
    peak_bytes: int

    def step(self, prices: BlockPrices) -> StagedStep:
        """The step, in the order of blocks that the program had before."""
        return staged(self.local, prices, None, self.passes)


def fit_stages(local: LocalGraph, budget_bytes: int, prices: BlockPrices) -> FittedStages:
    """Fit each stage of `local`, the program of all, as `compile` does. Buckets are those of the stage that needs the
    smallest; the order of blocks stays.

    Raises:
        PlanError: a stage does not fit; names it, with the bytes that it needs at least.
    """
    stages = range(local.mesh.axis_size(local.stage_axis))
    passes, hardware = stage_passes(local.mesh, local.stage_axis, prices), prices.hardware
    fittings = [FitMemory(budget_bytes, hardware, False, passes, stage=stage).choose(local) for stage in stages]
    names = tuple(name for fitting in fittings for name in fitting.names)
    fitted = SavedValues(local, gathers=False, activations=True).applied(names, hardware)
    passes = smaller_buckets(passes)[max(fitting.way for fitting in fittings)]
    peaks = [peak_memory(run_passes(stage_program(fitted, stage), passes)).size_bytes for stage in stages]
    return FittedStages(fitted, passes, names, max(peaks))


def least_bytes(local: LocalGraph, prices: BlockPrices) -> int:
    """What the fullest stage holds at least."""
    passes, hardware = stage_passes(local.mesh, local.stage_axis, prices), prices.hardware
    stages = range(local.mesh.axis_size(local.stage_axis))
    return max(FitMemory(0, hardware, False, passes, stage=stage).least(local)[1] for stage in stages)
