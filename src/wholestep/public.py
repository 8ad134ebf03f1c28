"""All public names. The package loads them where the first one is asked for."""

from .graph.gc_control import collector_paused

with collector_paused():  # modules are no garbage, and torch has many
    from . import collectives
    from .backend.default_passes import default_passes
    from .backend.inductor.inductor_backend import Inductor
    from .backend.protocol import Backend
    from .capture import CaptureOptions
    from .capture.effects import callback
    from .checkpoint.checkpoint import Checkpoint, load, save
    from .checkpoint.export import export
    from .checkpoint.memory_copies import MemoryCopies
    from .compile import capture, compile
    from .cost.kernel_times import KernelTimes
    from .cost.memory import LiveTensor, PeakMemory
    from .cost.simulation import SimulationResult
    from .cost.software import Software
    from .cost.stage_orders import stage_order
    from .cost.timeline import Span, Timeline
    from .ddp.backend import ddp_backend
    from .errors import (
        BackendError,
        BudgetError,
        CacheError,
        CaptureError,
        CheckpointError,
        GraphError,
        LayoutError,
        MeshError,
        NonFiniteError,
        PlanError,
        RankFailedError,
        RankMismatchError,
        RuleError,
        StateError,
        StoreError,
        WholestepError,
    )
    from .graph.graph import LocalGraph, TrainGraph
    from .hardware.hardware import Hardware
    from .layout import AxisState, Layout
    from .mesh import Axis, Mesh
    from .partition.stage_program import stage_program
    from .passes.base import run_passes
    from .passes.offload_saved import OffloadSaved
    from .passes.order_stages import partition
    from .passes.recompute import Recompute
    from .passes.schedule import Schedule
    from .passes.tile_rows import TileRows
    from .plan.context_parallel import ContextParallel
    from .plan.data_parallel import DataParallel
    from .plan.expert_parallel import ExpertParallel
    from .plan.micro_batches import MicroBatches
    from .plan.pad_to import PadTo
    from .plan.pipelines import Pipeline
    from .plan.plan import Plan
    from .plan.strategy import BatchCut, Pins, Stored, Strategy
    from .plan.tensor_parallel import TensorParallel
    from .planner.auto import Auto
    from .planner.prediction import peak_memory, simulate, timeline
    from .planner.resolve import plan
    from .precision import Float8, MixedPrecision
    from .proof.compare_values import Comparison, Parted, compare
    from .report.page import report
    from .rules.registry import rule
    from .rules.testing.check import CheckResult, check_rule
    from .runtime.step import CompiledStep
    from .runtime.whole_tensors import whole
    from .typed_values import check_arguments_of

__all__ = [
    "Auto", "Axis", "AxisState", "Backend", "BackendError", "BatchCut", "BudgetError", "CacheError", "CaptureError",
    "CaptureOptions", "CheckResult", "Checkpoint", "CheckpointError", "Comparison", "CompiledStep", "ContextParallel",
    "DataParallel", "ExpertParallel", "Float8", "GraphError", "Hardware", "Inductor", "KernelTimes", "Layout",
    "LayoutError", "LiveTensor", "LocalGraph", "MemoryCopies", "Mesh", "MeshError", "MicroBatches", "MixedPrecision",
    "NonFiniteError", "OffloadSaved", "PadTo", "Parted", "PeakMemory", "Pins", "Pipeline", "Plan", "PlanError",
    "RankFailedError", "RankMismatchError", "Recompute", "RuleError", "Schedule", "SimulationResult", "Software",
    "Span", "StateError", "StoreError", "Stored", "Strategy", "TensorParallel", "TileRows", "Timeline", "TrainGraph",
    "WholestepError", "callback", "capture", "check_rule", "collectives", "compare", "compile", "ddp_backend",
    "default_passes", "export", "load", "partition", "peak_memory", "plan", "report", "rule", "run_passes", "save",
    "simulate", "stage_order", "stage_program", "timeline", "whole",
]  # fmt: skip

check_arguments_of(globals(), __all__)
