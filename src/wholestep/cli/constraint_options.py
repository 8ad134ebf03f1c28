"""Constraints on the command line: `--pin pattern=axis:dim` and `--whole pattern=axis,axis`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .target import refuse

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

REPLICATE = "replicate"


def wishes(pin: Sequence[str], whole: Sequence[str]) -> dict[str, Any]:
    """The fields of `Auto` for these options."""
    found = {"pinned": _pinned(pin), "whole": _whole(whole)}
    return {name: value for name, value in found.items() if value}


def _pinned(given: Sequence[str]) -> dict[str, dict[str, Shard | Replicate]]:
    from torch.distributed.tensor import Replicate, Shard

    found: dict[str, dict[str, Shard | Replicate]] = {}
    for entry in given:
        pattern, _, layout = entry.rpartition("=")
        axis, _, dim = layout.partition(":")
        if not (pattern and axis and (dim == REPLICATE or dim.removeprefix("-").isdecimal())):
            refuse(f"--pin {entry}: needed pattern=axis:replicate, or pattern=axis:dim, as lm_head=tp:2")
        placement = Replicate() if dim == REPLICATE else Shard(int(dim))
        if found.setdefault(pattern, {}).setdefault(axis, placement) != placement:
            refuse(f"--pin {entry}: {pattern} is pinned on {axis} already, to {found[pattern][axis]}")
    return found


def _whole(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for entry in given:
        pattern, _, axes = entry.rpartition("=")
        names = tuple(name.strip() for name in axes.split(","))
        if not pattern or not all(names):
            refuse(f"--whole {entry}: needed pattern=axis or pattern=axis,axis, as norm=dp,tp")
        found[pattern] = tuple(dict.fromkeys((*found.get(pattern, ()), *names)))
    return found
