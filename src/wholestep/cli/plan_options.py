"""Values of options of `wholestep plan`: `--pin`, `--replicated`, `--cp` and `--what-if`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .target import check_mesh, hardware_of, refuse

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard

REPLICATE = "replicate"
WHAT_IF_FORMS = "mesh=AXES, hardware=NAME, or with --hf batch=N or seq=N"


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


def check_what_if(cases: Sequence[str], hf: bool) -> None:
    """Refuse malformed cases before the long work."""
    for text in cases:
        kind, equals, value = text.partition("=")
        if not equals or kind not in ("mesh", "hardware", "batch", "seq"):
            refuse(f"--what-if {text}: needed {WHAT_IF_FORMS}")
        if kind in ("batch", "seq"):
            if not hf:
                refuse(f"--what-if {text} without --hf: the function that returns the step decides that")
            if not value.isdigit() or int(value) < 1:
                refuse(f"--what-if {text}: needed a number of at least 1")
        elif kind == "mesh":
            check_mesh(value)
        else:
            hardware_of(value)
