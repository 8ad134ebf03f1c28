"""Ops that a trace has recorded, recorded again for other tensors without the Python that called them."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .dispatch import TAPE, TapedOp, add_twin, same_notes, track
from .fake_results import changes_first, is_known
from .held import storage_key
from .types_shown import FAKE_TYPES


@dataclass
class Tape:
    """The ops that a trace records, None for what cannot be recorded again, and the nodes of `fakes` around them."""

    fakes: Sequence[Any]
    ops: list[TapedOp | None] = field(default_factory=list[TapedOp | None])
    before: list[Any] = field(default_factory=list[Any])
    after: list[Any] = field(default_factory=list[Any])


def can_tape() -> bool:
    """Return whether ops can be listed: by the fast path, where no mode but those of the trace sees them."""
    mode: Any = get_proxy_mode()
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return TAPE in vars(mode) and torch._C._len_torch_function_stack() == 1 and len(modes) == 2


@contextmanager
def ops_taped(fakes: Sequence[Any]) -> Generator[Tape]:
    """List the ops that are recorded inside this context."""
    mode: Any = get_proxy_mode()
    tape = Tape(fakes, before=_nodes_of(fakes))
    setattr(mode, TAPE, tape.ops)
    try:
        yield tape
    finally:
        setattr(mode, TAPE, None)
        tape.after = _nodes_of(fakes)


def same_ops(tape: Tape, other: Tape) -> bool:
    """Return whether two tapes have the same ops on their `fakes`, and each can be repeated: it computes a new tensor,
    or changes one of these, or of `fakes`, as its first operand.
    """
    twins: dict[Any, Any] = dict(zip(tape.before, other.before, strict=True))
    own = {*map(id, tape.fakes)}
    if None in twins or len(twins) < len(tape.fakes) or len(tape.ops) != len(other.ops):
        return False
    for taped, taped_for_other in zip(tape.ops, other.ops, strict=True):
        if taped is None or taped_for_other is None or not _is_repeatable(taped, own):
            return False
        (op, args, out, node), (other_op, other_args, other_out, other_node) = taped, taped_for_other
        operands = map_arg((node.args, node.kwargs), lambda operand: twins.get(operand, operand))
        same = op is other_op and same_notes(node, other_node)
        if (
            not same
            or (out is args[0]) != (other_out is other_args[0])
            or operands != (other_node.args, other_node.kwargs)
        ):
            return False
        own.add(id(out))
        twins[node] = other_node
    return True


def repeat_ops(tape: Tape, fakes: Sequence[Any]) -> None:
    """Record the ops of a tape on other tensors than its `fakes`."""
    mode: Any = get_proxy_mode()
    tracer, twins = mode.tracer, dict(zip(tape.before, _nodes_of(fakes), strict=True))
    for taped in tape.ops:
        assert taped is not None, "same_ops holds for the tape"
        op, _, _, node = taped
        operands: Any = map_arg((node.args, node.kwargs), lambda operand: twins.get(operand, operand))
        twins[node] = add_twin(node, operands, operands[0][0] if changes_first(op) else None)
    for fake, before, after in zip(fakes, tape.before, tape.after, strict=True):
        if after is not before:
            track(tracer, twins[after], fake)
            torch.autograd.graph.increment_version(fake)


def _is_repeatable(taped: TapedOp, own: set[int]) -> bool:
    op, args, out, _ = taped
    if not args or type(out) not in FAKE_TYPES or not is_known(op):
        return False
    if changes_first(op):
        return out is args[0] and id(out) in own
    with torch._C.DisableTorchFunction():
        return all(storage_key(out) != storage_key(value) for value in args if type(value) in FAKE_TYPES)


def _nodes_of(fakes: Sequence[Any]) -> list[Any]:
    mode: Any = get_proxy_mode()
    slots: list[Any] = [mode.tracer.tensor_tracker.get(fake) for fake in fakes]
    return [None if slot is None or slot.constant is not None else slot.proxy.node for slot in slots]
