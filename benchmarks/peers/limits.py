"""The physical limit of a step: it cannot be faster than its arithmetic, nor than the link carries its bytes."""

import re
from dataclasses import dataclass

from .spec import Spec

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448  # tbf counts ethernet frames; TCP with timestamps puts so much into each
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def link_bytes_per_second(rate: str) -> float | None:
    """What TCP can carry each way over a link shaped to `rate` ("250mbit"); None for "none", which is not shaped.

    Raises:
        ValueError: not a rate.
    """
    if rate == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if not found:
        raise ValueError(f"rate {rate!r} is not a rate: give none, or as 1gbit, 250mbit")
    return float(found[1]) * UNITS[found[2]] / 8 * PAYLOAD_BYTES / FRAME_BYTES


def sweeps(spec: Spec) -> int:
    """How often all parameters, less a rank's own part, leave a rank at the least.

    Gradients are reduced to where the update runs (one sweep) and what was updated is sent to all (another): that is a
    ring all-reduce, and ZeRO, and fully sharded parameters that are kept from forward to backward. Those that are
    gathered again for the backward take a third. Stages exchange no parameters.
    """
    if not spec.exchanges or spec.is_pipe or spec.shares_tokens:
        return 0
    again = spec.style == "fully_shard" and (spec.has("reshard") or (spec.base == "fsdp2" and not spec.has("keep")))
    return 3 if again else 2


def least_bytes(spec: Spec, world: int, parameter_bytes: int) -> float:
    """Bytes that a rank has to send in a step: sweeps x (W - 1) / W x the bytes of parameters."""
    return sweeps(spec) * (world - 1) / world * parameter_bytes


@dataclass(frozen=True)
class Limit:
    """The two bounds of a step in milliseconds."""

    compute_ms: float
    link_ms: float

    @property
    def ms(self) -> float:
        """No step is faster: at best all communication runs beside the arithmetic."""
        return max(self.compute_ms, self.link_ms)


def limit(
    spec: Spec, world: int, parameter_bytes: int, bytes_per_second: float | None, floor_ms: float, update_ms: float
) -> Limit:
    """The limit of one peer, from the floor's step and the part of it that the optimizer takes.

    Where optimizer state is sharded a rank updates only its part, so the floor's update counts 1 / W.
    """
    sharded = spec.style in ("zero1", "zero2", "fully_shard")
    compute = floor_ms - (update_ms * (world - 1) / world if sharded else 0.0)
    link = 1e3 * least_bytes(spec, world, parameter_bytes) / bytes_per_second if bytes_per_second else 0.0
    return Limit(compute, link)
