"""Values of options of `wholestep plan`: `--pin`, `--replicated` and `--cp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .target import refuse

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

REPLICATE = "replicate"


def constraints(pin: Sequence[str], replicated: Sequence[str], cp: bool) -> dict[str, Any]:
    """The fields of `Auto` for `--pin pattern=axis:dim`, `--replicated pattern=axis,axis` and `--cp`."""
    from wholestep import ContextParallel

    fields = {"pinned": _pinned(pin), "replicated": _replicated(replicated), "context": ContextParallel() if cp else ()}
    return {name: value for name, value in fields.items() if value}


def _pinned(texts: Sequence[str]) -> dict[str, dict[str, Shard | Replicate]]:
    from torch.distributed.tensor import Replicate, Shard

    pinned: dict[str, dict[str, Shard | Replicate]] = {}
    for entry in texts:
        pattern, _, layout = entry.rpartition("=")
        axis, _, dim = layout.partition(":")
        if not (pattern and axis and (dim == REPLICATE or dim.removeprefix("-").isdecimal())):
            refuse(f"--pin {entry}: needed pattern=axis:replicate, or pattern=axis:dim, as lm_head=tp:2")
        placement = Replicate() if dim == REPLICATE else Shard(int(dim))
        if pinned.setdefault(pattern, {}).setdefault(axis, placement) != placement:
            refuse(f"--pin {entry}: {pattern} is pinned on {axis} already, to {pinned[pattern][axis]}")
    return pinned


def _replicated(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    replicated: dict[str, tuple[str, ...]] = {}
    for entry in texts:
        pattern, _, axes = entry.rpartition("=")
        names = tuple(name.strip() for name in axes.split(","))
        if not pattern or not all(names):
            refuse(f"--replicated {entry}: needed pattern=axis or pattern=axis,axis, as norm=dp,tp")
        replicated[pattern] = tuple(dict.fromkeys((*replicated.get(pattern, ()), *names)))
    return replicated
