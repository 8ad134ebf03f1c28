"""Micro-batches: an axis `time` that ranks do not share, but go through piece after piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import PlanError
from ..mesh import TIME, Mesh
from .data_parallel import BatchDim, batch_dim
from .strategy import BatchCut, Strategy


@dataclass(frozen=True)
class MicroBatches(Strategy):
    """Each rank goes through its batch in `pieces` micro-batches, and computes what it would on all of it at once.

    What depends on samples (activations) exists for one micro-batch at a time, what is summed over samples (gradients,
    losses, counts) accumulates, and all else is computed once. Random numbers are drawn for the whole batch, so that
    micro-batches do not change them. Their sizes are those of `torch.chunk`, and may differ.

    Args:
        pieces: their number. `"auto"`: as many as make the step fit into a budget of memory, where that is faster than
            recomputing activations; the budget is `compile(memory_bytes=...)`, or that of `Auto(micro_batches=...)`.
        input_batch_dim: the dim of batch tensors that counts samples, as in `DataParallel`.

    Example:
        >>> plan = ws.plan(graph, "dp=8", [ws.DataParallel("zero1"), ws.MicroBatches(4)])
        >>> step = ws.compile(train_step, parallel=[ws.DataParallel("fully_shard"), ws.MicroBatches(4)])
        >>> step = ws.compile(train_step, parallel=ws.MicroBatches("auto"), memory_bytes="3GiB")

    Raises:
        PlanError: `pieces` is not positive.
    """

    pieces: int | Literal["auto"]
    input_batch_dim: BatchDim = 0

    def __post_init__(self) -> None:
        if self.pieces != "auto" and self.pieces < 1:
            raise PlanError(f"MicroBatches({self.pieces})", "at least one piece", "correct the number")

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axis `time`, in the mesh of a plan."""
        return (TIME,) if TIME in mesh.names else ()

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """The dim that counts samples."""
        dim = batch_dim(self.input_batch_dim, name, ndim) if TIME in mesh.names else None
        return None if dim is None else BatchCut(dim, (TIME,))

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"{'some' if self.pieces == 'auto' else self.pieces} micro-batches"
