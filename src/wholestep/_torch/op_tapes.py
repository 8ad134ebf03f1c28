"""Ops that a trace has recorded, recorded again for other tensors without the Python that called them."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .dispatch import TAPE, TapedOp, nodes_of, record
from .fake_results import changes_first, is_known
from .types_shown import FAKE_TYPES

Tape = list[TapedOp | None]
_kind: Callable[[Any], Any] = type


def can_tape() -> bool:
    """Return whether ops can be listed: by the fast path, where no mode but those of the trace sees them."""
    mode: Any = get_proxy_mode()
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return TAPE in vars(mode) and torch._C._len_torch_function_stack() == 1 and len(modes) == 2


@contextmanager
def ops_taped() -> Generator[Tape]:
    """List the ops that are recorded inside this context; None for what cannot be recorded again."""
    proxies: Any = get_proxy_mode()
    mode, tape = cast(dict[str, Any], vars(proxies)), Tape()
    mode[TAPE] = tape
    try:
        yield tape
    finally:
        mode[TAPE] = None


def same_ops(tape: Tape, other: Tape, twins: Mapping[int, Any]) -> bool:
    """Return whether two tapes have the same ops on tensors and their `twins` (by the identity of the first one), and
    nothing that `repeat_ops` does not repeat: of ops that neither compute new tensors nor change their first operand.
    """
    twins = dict(twins)
    if len(tape) != len(other):
        return False
    for taped, taped_for_other in zip(tape, other, strict=True):
        if taped is None or taped_for_other is None or not is_known(taped[0]):
            return False
        op, args, named, out, notes = taped
        other_op, other_args, other_named, other_out, other_notes = taped_for_other
        if op is not other_op or notes != other_notes or not _same((args, named), (other_args, other_named), twins):
            return False
        if changes_first(op):
            if out is not args[0] or other_out is not other_args[0]:
                return False
        elif _kind(out) not in FAKE_TYPES or _kind(other_out) not in FAKE_TYPES:
            return False
        twins[id(out)] = other_out
    return True


def repeat_ops(tape: Tape, twins: Mapping[int, Any]) -> None:
    """Record the ops of a tape on the `twins` of its tensors; tensors without one stay."""
    mode, twins = get_proxy_mode(), dict(twins)
    with disable_proxy_modes_tracing():
        for taped in tape:
            assert taped is not None, "same_ops holds for the tape"
            op, args, named, out, notes = taped
            called = _with_twins(args, twins), {key: _with_twins(value, twins) for key, value in named.items()}
            nodes = nodes_of(mode, called[0]), {key: nodes_of(mode, value) for key, value in called[1].items()}
            fx_traceback.current_meta["custom"] = notes
            twins[id(out)] = record(mode, op, called, nodes)
            if changes_first(op):
                torch.autograd.graph.increment_version(called[0][0])


def _with_twins(value: Any, twins: Mapping[int, Any]) -> Any:
    if _kind(value) in FAKE_TYPES:
        return twins.get(id(value), value)
    return _kind(value)(_with_twins(v, twins) for v in value) if _kind(value) in (tuple, list) else value


def _same(value: Any, other: Any, twins: Mapping[int, Any]) -> bool:
    kind = _kind(value)
    if kind in FAKE_TYPES:
        return other is twins.get(id(value), value)
    if kind is not _kind(other):
        return False
    if kind is dict:
        return list(value) == list(other) and _same([*value.values()], [*other.values()], twins)
    if kind in (tuple, list):
        return len(value) == len(other) and all(_same(a, b, twins) for a, b in zip(value, other, strict=True))
    return bool(value == other)
