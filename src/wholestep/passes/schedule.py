"""The passes that bucket and order collectives, with their sizes, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..cost.software import OWN, Software
from ..graph.graph import LocalGraph
from ..hardware.hardware import Hardware
from ..tuning import TUNING
from .async_tensor_parallel import AsyncTensorParallel
from .base import Pass, run_passes
from .bucket import Bucket
from .bucket_owned import BucketOwned
from .bucket_sizes import SizeBuckets
from .cross_step import CrossStep
from .in_bodies import InBodies
from .limit_inflight import LimitInflight
from .overlap import Overlap
from .peel_pieces import PeelPieces
from .sink_waits import SinkWaits
from .split_optimizer import SplitOptimizer


@dataclass(frozen=True)
class Schedule:
    """Buckets collectives by the speed of the link, splits the optimizer by bucket, and orders all by simulation.

    It is a pass itself: called with a LocalGraph it runs its `passes`.

    Args:
        hardware: to schedule for.
        bucket_bytes: size at which a bucket closes; chosen for the link if None.
        first_bucket_bytes: the same for the first bucket of each kind, so that the link starts early; at most
            `bucket_bytes`.
        in_flight_bytes: bound on gathered parameters that wait for their use, and on gradients that are being
            scattered; three buckets each if None. Two tensors each may always be in flight.
        across_steps: the next call waits for the reductions that are in flight when a step ends, just before it reads
            the parameters that they update. Until then, or until `step.flush()`, these parameters are a step behind.

    Example:
        >>> scheduled = ws.run_passes(local, [ws.Schedule(ws.Hardware.preset("dgx-h100"))])
        >>> step = ws.compile(train_step, schedule=ws.Schedule(bucket_bytes=4 << 20))
    """

    hardware: Hardware = field(default_factory=Hardware.default)
    bucket_bytes: int | None = None
    first_bucket_bytes: int = TUNING.first_bucket_bytes
    in_flight_bytes: int | None = None
    across_steps: bool = False

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The same step with fewer, larger and reordered collectives."""
        return run_passes(local, self.passes)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes that it stands for."""
        return self.passes_of(OWN, True)

    def passes_of(self, software: Software, may_coalesce: bool) -> tuple[Pass, ...]:
        """The passes of this schedule on `software`: one that does not overlap reduces all after the backward."""
        hardware, fills, overlaps = self.hardware, software.fills, software.overlaps
        sizes = SizeBuckets(
            hardware, self.bucket_bytes, self.first_bucket_bytes, self.in_flight_bytes,
            may_coalesce=may_coalesce and not software.copies,
        )  # fmt: skip
        waits = (SinkWaits(),) if overlaps else ()
        reductions = Bucket.sized("reduce_scatter"), Bucket.sized("all_reduce"), BucketOwned("sums")
        gathers = Bucket.sized("all_gather"), BucketOwned("spread")
        split = (SplitOptimizer(),) if overlaps and software.splits_update else ()
        merging = (*waits, *reductions, *split, *waits, *gathers, AsyncTensorParallel(hardware))
        bodies = (InBodies(hardware, fills), PeelPieces()) if overlaps else ()
        across = (CrossStep(),) if self.across_steps else ()
        overlap = (Overlap(hardware, fills),) if overlaps else ()
        return (sizes, *bodies, *merging, *across, *overlap, LimitInflight())
