"""Hardware as a job measures it: the rates of one rank, and linear costs of collectives."""

from __future__ import annotations

from dataclasses import dataclass

from .work import Work


@dataclass(frozen=True)
class CollectiveCost:
    """The measured cost of one kind of collective. Each figure has a part per collective (`_us`) and a part per byte
    that a rank sends (`_byte_us`), in microseconds.

    Args:
        kind: one of `curves.KINDS`.
        start_us, byte_us: time on the link.
        cpu_us, cpu_byte_us: compute time that the rank loses to the collective while the two overlap.
        host_us, host_byte_us: time that the computing thread itself spends to start it; at least a launch.
        reduce_byte_us: time that the computing thread spends to sum received data.
        overlap_slowdown: how many times longer the collective takes while the rank computes.
    """

    kind: str
    start_us: float
    byte_us: float
    cpu_us: float = 0.0
    cpu_byte_us: float = 0.0
    host_us: float = 0.0
    host_byte_us: float = 0.0
    reduce_byte_us: float = 0.0
    overlap_slowdown: float = 1.0

    def us(self, sent: float) -> float:
        """Time on the link of a collective in which a rank sends `sent` bytes."""
        return self.start_us + self.byte_us * sent


def sent_bytes(kind: str, whole_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends in a ring: 2(W-1)/W of the whole buffer for an all-reduce, else (W-1)/W."""
    return (2 if kind == "all_reduce" else 1) * whole_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class MeasuredDevice:
    """The measured rates of one rank. Times in microseconds, rates in bytes or operations per microsecond.

    Args:
        flops_per_us: of a large matrix product in float32.
        memory_bytes_per_us: read plus written by elementwise ops.
        launch_us: of one op, however small.
        math_bytes_per_us: read plus written by ops that compute more than a sum per element (exp, norms, reductions);
            0 for `memory_bytes_per_us`.
        attention_flops_per_us: of fused attention, masked elements counted as computed; 0 for `flops_per_us`.
        view_us: of a view. Views cost time only where the host that calls ops also computes them.
        bucket_copy_bytes_per_us: read plus written by copies into and out of buckets, which are in no cache; 0 for
            `memory_bytes_per_us`.
    """

    name: str
    flops_per_us: float
    memory_bytes_per_us: float
    launch_us: float
    math_bytes_per_us: float = 0.0
    attention_flops_per_us: float = 0.0
    view_us: float = 0.0
    bucket_copy_bytes_per_us: float = 0.0

    def peak_flops_per_us(self, dtype: str) -> float:
        """The rate of a large product. Only float32 is measured."""
        return self.flops_per_us

    def work_us(self, work: Work) -> float:
        """One op: its launch, and the longer of its arithmetic and its memory traffic."""
        flops_per_us = self.attention_flops_per_us if work.attention else 0.0
        bytes_per_us = (
            self.bucket_copy_bytes_per_us if work.bucketed else 0.0 if work.streams else self.math_bytes_per_us
        )
        computing = work.flops / (flops_per_us or self.flops_per_us)
        return self.launch_us + max(computing, work.moved_bytes / (bytes_per_us or self.memory_bytes_per_us))
