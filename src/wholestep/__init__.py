"""wholestep: write a training step for one device, get the program that every rank of a mesh runs."""

from .capture import MixedPrecision
from .compile import capture, compile
from .errors import (
    BackendError,
    CaptureError,
    CheckpointError,
    GraphError,
    LayoutError,
    MeshError,
    PlanError,
    RankMismatchError,
    StateError,
    WholestepError,
)
from .graph.graph import LocalGraph, TrainGraph
from .layout import Layout
from .mesh import Axis, Mesh
from .partition.lower import partition
from .passes.base import run_passes
from .plan.data_parallel import DataParallel
from .plan.make import plan
from .plan.plan import Plan
from .plan.tensor_parallel import TensorParallel
from .runtime.checkpoint import Checkpoint, load, save
from .runtime.step import CompiledStep

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "BackendError",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "CompiledStep",
    "DataParallel",
    "GraphError",
    "Layout",
    "LayoutError",
    "LocalGraph",
    "Mesh",
    "MeshError",
    "MixedPrecision",
    "Plan",
    "PlanError",
    "RankMismatchError",
    "StateError",
    "TensorParallel",
    "TrainGraph",
    "WholestepError",
    "capture",
    "compile",
    "load",
    "partition",
    "plan",
    "run_passes",
    "save",
]
