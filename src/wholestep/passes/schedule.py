"""How collectives are merged and ordered, as one value: which passes do it, and with which sizes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from .base import Pass, run_passes
from .bucket import Bucket
from .bucket_sizes import SizeBuckets
from .cross_step import CrossStep
from .limit_inflight import LimitInflight
from .overlap import Overlap
from .sink_waits import SinkWaits
from .split_optimizer import SplitOptimizer


@dataclass(frozen=True)
class Schedule:
    """Buckets sized by the link, an update and a gather for each, all in the order that a simulation finds best.

    It is a pass itself: called with a LocalGraph it runs its `passes`.

    Args:
        hardware: to schedule for.
        bucket_bytes: what a collective holds at least, where there is enough; by the link if None.
        first_bucket_bytes: the same for the first of each kind, which sets the wire going; at most `bucket_bytes`.
        in_flight_bytes: gathered parameters that may wait for their use, and gradients that may be on their way to be
            scattered; three buckets each if None, and two tensors each however large.
        across_steps: reductions that are in flight when a step ends are waited for in the next call, where what is
            updated with them is read first. Until then, or until `step.flush()`, those parameters are a step behind.

    Example:
        >>> scheduled = ws.run_passes(local, [ws.Schedule(ws.Hardware.preset("dgx-h100"))])
        >>> step = ws.compile(train_step, schedule=ws.Schedule(bucket_bytes=4 << 20))
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = 1 << 20
    in_flight_bytes: int | None = None
    across_steps: bool = False

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same step in another order, with fewer and larger collectives."""
        return run_passes(local, self.passes)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that it stands for."""
        sizes = SizeBuckets(self.hardware, self.bucket_bytes, self.first_bucket_bytes, self.in_flight_bytes)
        sums = Bucket.sized("reduce_scatter"), Bucket.sized("all_reduce")
        merging = (sizes, SinkWaits(), *sums, SplitOptimizer(), SinkWaits(), Bucket.sized("all_gather"))
        across = (CrossStep(),) if self.across_steps else ()
        return (*merging, *across, Overlap(self.hardware, None, None), LimitInflight())
