"""Which dims of a batch are padded, to which lengths and with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PlanError, shown


@dataclass(frozen=True)
class PadTo:
    """Dims of the batch that have one length, padded to the next of a few: `compile(pad_to=...)`.

    A step that is padded computes what it computes unpadded: that is proved from its graph, or the step is refused with
    the line that mixes padded positions into others.

    Args:
        lengths: to pad to, as `(256, 512, 1024)`; a longer batch is not padded.
        dims: the dim of each tensor of the batch that has the length, by name of the argument, as
            `{"tokens": 1, "targets": 1}`.
        fill: the value of padded positions, by name; 0 (False in a mask) for others. Targets get the class that the
            loss ignores.

    Example:
        >>> pad_to = ws.PadTo((256, 512, 1024), {"tokens": 1, "targets": 1}, fill={"targets": -100})
        >>> step = ws.compile(train_step, pad_to=pad_to)

    Raises:
        PlanError: a field is malformed, or `fill` names what `dims` does not.
    """

    lengths: Sequence[int]
    dims: Mapping[str, int]
    fill: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2:
            raise PlanError(f"PadTo(lengths={shown(self.lengths)})", "lengths of 2 or more", "correct it")
        if not self.dims or min(self.dims.values()) < 0:
            raise PlanError(f"PadTo(dims={shown(self.dims)})", "a dim of 0 or more of each tensor", "correct it")
        if unknown := sorted(set(self.fill) - set(self.dims)):
            raise PlanError(f"PadTo(fill=...) names {unknown[0]!r}", f"one of {', '.join(self.dims)}", "correct it")

    def length(self, size: int) -> int:
        """The length that a batch gets: the next one, or its own if it is longer than all.

        Example:
            >>> assert ws.PadTo((256, 512), {"tokens": 1}).length(300) == 512
        """
        return min((length for length in self.lengths if length >= size), default=size)
