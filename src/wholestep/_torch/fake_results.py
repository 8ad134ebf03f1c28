"""Results of ops on fake tensors, remembered by op and arguments: `FakeTensorMode` takes most of the time of a capture.

A result is remembered where the schema says how it aliases: fresh, views of the first operand, or an operand itself.
All else, and sizes that are symbols, are torch's.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .op_schemas import is_op
from .types_shown import FAKE_TYPES

_C: Any = torch._C
_NEEDED = ("_DisableTorchDispatch", "_set_throw_on_mutable_data_ptr", "_get_dispatch_mode", "_TorchDispatchModeKey")
_CAN = all(hasattr(_C, name) for name in _NEEDED)
_DEVICE = "_fake_device" if hasattr(FakeTensor, "fake_device") else "fake_device"  # as older versions call it
_MOST_RESULTS = 1 << 13
_NUMBERS = {int, float, bool}
_SEQUENCES: set[Any] = {tuple, list}
_CONSTANTS = {str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_FRESH, _VIEW, _IN_PLACE = "fresh", "view", "in place"
_kind: Callable[[Any], Any] = type
_results: dict[Any, _Result | None] = {}
_aliasing: dict[Any, str] = {}
_attributes: dict[str, None] = {}


_Like = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, offset, dtype and device of a fake tensor."""


@dataclass(frozen=True)
class _Result:
    """Results of one call, and how they alias. `kind` is the class of a sequence of several; None for one."""

    kind: Any
    items: tuple[_Like | None, ...]
    aliasing: str


def key_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what determines the result of an op, up to storages; None where that is not known."""
    aliasing = _aliasing.get(op)
    if aliasing is None:
        aliasing = _aliasing[op] = _aliasing_of(op)
    parts: list[Any] = [op, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if not aliasing or not _note(parts, args) or not _note(parts, [part for pair in kwargs.items() for part in pair]):
        return None
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:  # a symbolic size
        return None
    return key


def compute(key: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op on fake tensors; `key` is that of the call. Modes of torch functions must be off."""
    result = _results.get(key) if key is not None else None
    mode = _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) if result else None
    if result and mode is None and _kind(args[0]) in FAKE_TYPES:
        mode = args[0].fake_mode
    if result is None or mode is None:
        out = op(*args, **kwargs)
        if key is not None and key not in _results:
            if len(_results) >= _MOST_RESULTS:
                _results.clear()
            _results[key] = _remembered(op, args, out)
        return out
    if result.aliasing is _IN_PLACE:
        return args[0] if result.items[0] else None
    source = args[0].untyped_storage() if result.aliasing is _VIEW else None
    with _C._DisableTorchDispatch():
        results = [None if spec is None else _make_fake(spec, mode, source) for spec in result.items]
    return results[0] if result.kind is None else result.kind(results)


def fake_result(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op on fake tensors."""
    return compute(key_of(op, args, kwargs), op, args, kwargs)


def snapshot(value: Any) -> Any:
    """Return another fake tensor of the same storage, whose sizes later changes in place leave as they are."""
    with _C._DisableTorchDispatch():
        return _make_fake(_like(value), value.fake_mode, value.untyped_storage())


def _note(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append what determines the result of an op in its arguments; False where that is not known."""
    for value in values:
        kind = _kind(value)
        if kind in FAKE_TYPES:
            if not is_plain(value):
                return False
            parts += _like(value)
        elif kind in _NUMBERS:
            parts += (kind, value)
        elif kind in _SEQUENCES:
            parts += (kind, len(value))
            if not _note(parts, value):
                return False
        elif kind in _CONSTANTS:
            parts.append(value)
        else:
            return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether a fake tensor is no more than its sizes, strides, dtype and device."""
    return (
        _CAN
        and value.layout is torch.strided
        and value.constant is None
        and not (value.is_neg() or value.is_conj() or value.is_inference())
    )


def _aliasing_of(op: Any) -> str:
    """Return how results of an op alias its operands; "" where its schema does not say it, or for ops of others."""
    if not _CAN or not is_op(op) or op.namespace not in ("aten", "prims") or torch.Tag.inplace_view in op.tags:
        return ""
    schema: Any = op._schema
    first = schema.arguments[0] if schema.arguments else None
    notes = [argument.alias_info for argument in schema.arguments]
    if not any(notes) and not any(returned.alias_info for returned in schema.returns):
        return _FRESH
    if first is None or first.alias_info is None or any(notes[1:]) or str(first.type) not in ("Tensor", "List[Tensor]"):
        return ""
    if first.alias_info.is_write:
        written = first.alias_info.before_set
        same = [r.alias_info is not None and r.alias_info.before_set == written for r in schema.returns]
        return _IN_PLACE if len(same) <= 1 and all(same) else ""
    return _VIEW if schema.returns and all(r.alias_info is not None for r in schema.returns) else ""


def _remembered(op: Any, args: Sequence[Any], out: Any) -> _Result | None:
    """Return what makes the result of a call again; None where only torch can."""
    kind = _kind(out) if _kind(out) in _SEQUENCES else None
    items, aliasing = list(cast(Sequence[Any], out)) if kind else [out], _aliasing[op]
    if aliasing is _IN_PLACE and not (out is None or out is args[0]):
        return None
    if not all(item is None or (_kind(item) in FAKE_TYPES and is_plain(item)) for item in items):
        return None
    if aliasing is _FRESH:
        tensors = [item for item in items if item is not None]
        storages = {*map(_storage, tensors)}
        operands = [_storage(arg) for arg in args if _kind(arg) in FAKE_TYPES]
        if operands and storages == {operands[0]}:  # `_unsafe_view`, whose schema does not say it
            aliasing = _VIEW
        elif storages & {*operands} or len(storages) < len(tensors) or any(item.storage_offset() for item in tensors):
            return None
    return _Result(kind, tuple(None if item is None else _like(item) for item in items), aliasing)


def _storage(value: Any) -> int:
    return value.untyped_storage()._cdata


def _like(value: Any) -> _Like:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device


def _make_fake(spec: _Like, mode: Any, storage: Any) -> Any:
    """Make a fake tensor, on a storage or on one of its own."""
    shape, stride, offset, dtype, device = spec
    if storage is None:
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    else:
        empty = torch.empty(0, dtype=dtype, device="meta")
        empty.set_(storage, offset, shape, stride)
    if not _attributes:
        usual: Any = FakeTensor(mode, empty, device)
        _attributes.update((name, None) for name, value in cast(Any, vars(usual)).items() if value is None)
    fake: Any = cast(Any, torch.Tensor)._make_subclass(
        FakeTensor, empty, False, dispatch_device=True, device_for_backend_keys=device
    )
    _C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_attributes, fake_mode=mode, **{_DEVICE: device})
    return fake
