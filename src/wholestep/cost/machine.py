"""What a machine can do, as far as scheduling needs to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Speeds of one rank: arithmetic, memory, and the link to its neighbours. Times are in microseconds.

    Args:
        flops_per_us: of a large matrix product in float32.
        memory_bytes_per_us: read plus written by ops on elements.
        launch_us: of one op, however small.
        link_us: of one collective of a few bytes.
        link_bytes_per_us: that a rank sends.
    """

    flops_per_us: float = 50_000.0
    memory_bytes_per_us: float = 8_000.0
    launch_us: float = 4.0
    link_us: float = 250.0
    link_bytes_per_us: float = 1_000.0

    @property
    def bucket_bytes(self) -> int:
        """What a rank should send at once: starting a collective then costs a twentieth of sending it.

        A power of two from 256 KiB to 64 MiB, so that measurements that differ a little agree.
        """
        wanted, size = 20 * self.link_us * self.link_bytes_per_us, 256 << 10
        while size < min(wanted, 64 << 20):
            size *= 2
        return size
