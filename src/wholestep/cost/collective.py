"""Seconds a collective takes. The formula is DTensor's: 6.6 us + hops * latency + bytes * (n-1)/n / bandwidth."""

from __future__ import annotations

BASE_US = 6.6
LATENCY_US = 0.6
BANDWIDTH_BYTES_PER_US = 87.7 * 2**30 / 1e6


def collective_us(kind: str, whole_bytes: int, ranks: int) -> float:
    """Microseconds of one collective over `ranks` ranks of one host; `whole_bytes` is the size of the whole tensor.

    An all-reduce takes 2(n-1) hops of a ring, the others n-1. Local cuts and masks are free.
    """
    if ranks == 1 or kind in ("slice", "mask", "vary"):
        return 0.0
    hops = 2 * (ranks - 1) if kind == "all_reduce" else ranks - 1
    return BASE_US + hops * LATENCY_US + whole_bytes * hops / ranks / BANDWIDTH_BYTES_PER_US
