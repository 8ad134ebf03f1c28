"""What a message between two stages costs: on its way, and of the cores at both ends, which compute meanwhile."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from .. import _torch
from ..hardware.curves import CollectiveCost
from ..tuning import TUNING


class Products:
    """Computes for so many seconds. Of the last call: products, microseconds of the clock and of this thread."""

    count: int
    us: float
    own_us: float

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.one, self.other = torch.full((128, 384), 0.5), torch.full((384, 768), 0.5)
        self.made = torch.empty(128, 768)

    def __call__(self) -> None:
        """Compute."""
        self.count, start, thread = 0, time.perf_counter(), time.thread_time()
        while self.count == 0 or time.perf_counter() < start + self.seconds:
            torch.mm(self.one, self.other, out=self.made)
            self.count += 1
        self.us, self.own_us = (time.perf_counter() - start) * 1e6, (time.thread_time() - thread) * 1e6


@dataclass(frozen=True)
class _Message:
    """Microseconds of one message: from the call that sends it until the other end has it, and of the computing thread
    and of its core at each end.
    """

    way_us: float
    own_us: float
    core_us: float

    @property
    def link_us(self) -> float:
        """The rest of its way, between the two ends."""
        return max(self.way_us - 2 * (self.own_us + self.core_us), 0.0)


def measure_messages(group: str, ranks: int, coordinate: int, share: float) -> CollectiveCost:
    """The cost of messages along an axis, on which this rank has a coordinate. Ranks exchange them in pairs, all pairs
    at once. `share`: of the CPU time of other threads that computing lacks.

    A message goes its way as in a step: who sends computes on, who receives waits for it, and some milliseconds of
    computing lie between two messages. So it meets a link that has rested and threads that share their core.
    """
    sizes = TUNING.message_bytes
    other = coordinate ^ 1
    if other >= ranks:  # an odd number of ranks: the last one measures nothing, and what another measured counts
        return CollectiveCost("send", 0.0, 0.0)
    short, middle, long = (_exchanged(size, group, other, coordinate < other, share) for size in sizes)
    added = sizes[1] - sizes[0]
    byte_us = max(middle.link_us - short.link_us, 0.0) / added
    own_byte_us, core_byte_us = (
        max(much - little, 0.0) / added
        for little, much in ((short.own_us, middle.own_us), (short.core_us, middle.core_us))
    )
    return CollectiveCost(
        "send", max(short.link_us - byte_us * sizes[0], 0.0), byte_us,
        max(short.core_us - core_byte_us * sizes[0], 0.0), core_byte_us,
        max(short.own_us - own_byte_us * sizes[0], 0.0), own_byte_us,
        burst_bytes=float(sizes[1]), over_byte_us=max(long.link_us - middle.link_us, 0.0) / (sizes[2] - sizes[1]),
    )  # fmt: skip


def _exchanged(size: int, group: str, other: int, is_first: bool, share: float) -> _Message:
    """The usual message of `size` bytes to the rank `other` of the group, and back. Each says how long its sender has
    computed since it had the one before, by its own clock: clocks of two machines need not agree.
    """
    rounds, products = TUNING.message_rounds, Products(TUNING.message_gap_s)
    out, came, ways = torch.zeros(size // 4), torch.zeros(size // 4), list[float]()
    process, started = time.process_time(), time.thread_time()
    baseline = started
    coming, going = _torch.start_receive(came, other, 0, group), None
    arrived, sent = time.perf_counter(), 0.0
    for number in range(2 * rounds):
        if (number % 2 == 0) == is_first:
            products()
            baseline += products.own_us / 1e6
            if going is not None:
                going.wait()
            sent = time.perf_counter()
            out[0] = (sent - arrived) * 1e6
            going = _torch.start_send(out, other, 0, group)
            products()
            baseline += products.own_us / 1e6
        else:
            coming.wait()
            arrived = time.perf_counter()
            if sent:
                ways.append(((arrived - sent) * 1e6 - float(came[0])) / 2)
            if number < 2 * rounds - 2 + is_first:
                coming = _torch.start_receive(came, other, 0, group)
    assert going is not None, "each rank sends"
    going.wait()
    own_s = time.thread_time() - baseline
    others_s = time.process_time() - process - (time.thread_time() - started)
    ends = 2 * rounds
    return _Message(statistics.median(ways[1:]), own_s * 1e6 / ends, share * others_s * 1e6 / ends)
