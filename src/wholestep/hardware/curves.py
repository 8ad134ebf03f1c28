"""The time of a collective by its algorithm: the bytes on each level of links, and the hops there.

A group is described by its units: `units[0]` is its number of ranks, `units[i]` the number of units of level i-1 over
which they are spread; the last is 1. 16 ranks on two nodes of 8 are `(16, 2, 1)`, on 16 nodes `(16, 16, 1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Regime:
    """One protocol of an algorithm, for instance with low latency or with high bandwidth: the time until the first byte
    moves, the latency of a hop as a multiple of the link's, the rate as a share of the link's.
    """

    base_us: float
    latency: float = 1.0
    rate: float = 1.0


@dataclass(frozen=True)
class Curve:
    """The time of one kind of collective by one algorithm: that of its fastest regime, as a library chooses protocols.

    Args:
        kind: one of `KINDS`.
        algorithm: one of `ALGORITHMS`.
        regimes: at least one.
        own_bytes_per_us: rate at which a rank copies or reduces the piece that it keeps; 0 if that costs nothing.
        least_ranks: of a group that can use the algorithm.
    """

    kind: str
    algorithm: str
    regimes: tuple[Regime, ...]
    own_bytes_per_us: float = 0.0
    least_ranks: int = 2


@dataclass(frozen=True)
class CollectiveCost:
    """The measured cost of one kind of collective. Each figure has a part per collective (`_us`) and a part per byte
    that a rank sends (`_byte_us`), in microseconds.

    Args:
        kind: one of `KINDS`.
        start_us, byte_us: time on the link.
        cpu_us, cpu_byte_us: compute time that the rank loses to the collective while the two overlap.
        host_us, host_byte_us: time that the computing thread itself spends to start it; at least a launch.
        reduce_byte_us: time that the computing thread spends to sum received data.
        overlap_slowdown: how many times longer the collective takes while the rank computes.
        burst_bytes, over_byte_us: a link may let a burst through before it keeps to its rate: each byte beyond
            `burst_bytes` takes `over_byte_us` on it instead; 0 for a link without one.

    Of `send`, `host_us` and `cpu_us` are what a message takes of the computing thread and of its core at each end, and
    the rest of its way between the two is the time on the link.
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
    burst_bytes: float = 0.0
    over_byte_us: float = 0.0

    def us(self, sent: float) -> float:
        """Time on the link of a collective in which a rank sends `sent` bytes."""
        over = max(sent - self.burst_bytes, 0.0) if self.burst_bytes else 0.0
        return self.start_us + self.byte_us * (sent - over) + self.over_byte_us * over

    def end_us(self, sent: float) -> float:
        """Time that the computing thread loses to a message at each of its ends."""
        return self.host_us + self.cpu_us + (self.host_byte_us + self.cpu_byte_us) * sent


def sent_bytes(kind: str, whole_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends: a message to one other is sent whole; in a ring 2(W-1)/W of the whole buffer for an
    all-reduce, else (W-1)/W.
    """
    if kind == "send":
        return whole_bytes
    return (2 if kind == "all_reduce" else 1) * whole_bytes * (ranks - 1) / ranks


@dataclass(frozen=True)
class LinkLoad:
    """The load of a collective on one level: the share of the buffer that a link carries, and the hops in sequence."""

    share: float
    hops: float


Units = Sequence[int]


def curve_us(
    curve: Curve, size_bytes: float, units: Units, rates: Sequence[float], latencies: Sequence[float]
) -> float:
    """Microseconds of a collective: `size_bytes` of the largest buffer of a rank, `rates` in bytes per microsecond.
    Levels carry data at the same time, so the slowest one counts; the latencies of hops add up.
    """
    loads = ALGORITHMS[curve.algorithm](curve.kind, units)
    hops = sum(load.hops * latency for load, latency in zip(loads, latencies, strict=False))
    carried = max(size_bytes * load.share / rate for load, rate in zip(loads, rates, strict=False))
    own_us = size_bytes / units[0] / curve.own_bytes_per_us if curve.own_bytes_per_us else 0.0
    return own_us + min(r.base_us + r.latency * hops + carried / r.rate for r in curve.regimes)


def _ring(kind: str, units: Units) -> list[LinkLoad]:
    """Each link of the ring carries (n-1)/n of the buffer, twice for an all-reduce. As many rings as a node has ranks
    share the traffic between nodes, each over the link of one rank.
    """
    ranks = units[0]
    rounds = 2 if kind == "all_reduce" else 1
    share = 1.0 if kind in ("broadcast", "send") else rounds * (ranks - 1) / ranks
    return [LinkLoad(share * under / ranks, rounds * (under - over)) for under, over in pairwise(units)]


def _flat(kind: str, units: Units) -> list[LinkLoad]:
    """A ring over links of the outermost level that it crosses."""
    ranks = units[0]
    rounds = 2 if kind == "all_reduce" else 1
    inner = [LinkLoad(0.0, 0) for _ in units[2:]]
    return [*inner, LinkLoad(rounds * (ranks - 1) / ranks, rounds * (ranks - 1))]


def _tree(kind: str, units: Units) -> list[LinkLoad]:
    """Chains inside a unit; between units two binary trees, each for half of the buffer."""
    loads: list[LinkLoad] = []
    for level, (under, over) in enumerate(pairwise(units)):
        joined = under / over
        hops = joined - 1 if level == 0 else ceil(log2(joined)) if joined > 1 else 0
        loads.append(LinkLoad(2 * (joined - 1) / joined * under / units[0], 2 * hops))
    return loads


def _nvls(kind: str, units: Units) -> list[LinkLoad]:
    """The switch adds and multicasts: a rank sends its buffer and its own reduced piece once. A tree between units."""
    inside = units[0] / units[1]
    return [LinkLoad((inside + 1) / inside, 2), *_tree(kind, units)[1:]]


def _pairwise(kind: str, units: Units) -> list[LinkLoad]:
    """A rank sends one piece directly to each other rank. What leaves a node crosses its links however far it goes."""
    hops = [units[0] / over - units[0] / under for under, over in pairwise(units)]
    sent = [hops[0], *(units[0] - units[0] / under for under in units[1:-1])]
    return [LinkLoad(pieces / units[0], hop) for pieces, hop in zip(sent, hops, strict=True)]


ALGORITHMS: dict[str, Callable[[str, Units], list[LinkLoad]]] = {
    "ring": _ring,
    "flat": _flat,
    "tree": _tree,
    "nvls": _nvls,
    "nvls_tree": _nvls,
    "pairwise": _pairwise,
    "copy_engine": _pairwise,
    # a step replaces a reduce-scatter of gloo by an all-to-all and a local sum (`backend/gloo`)
    "gloo": lambda kind, units: (_pairwise if kind == "reduce_scatter" else _ring)(kind, units),
}
