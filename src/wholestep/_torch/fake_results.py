"""Results of ops on fake tensors, remembered by op and arguments: `FakeTensorMode` takes most of the time of a capture.

A result is remembered where the schema says how it aliases: fresh, views of the first operand, or an operand itself.
All else is torch's. Symbolic sizes are remembered by their expressions, for one environment of symbols; storages of
such results say nothing.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import extract_val
from torch.utils._python_dispatch import TorchDispatchMode

from .held import storage_key
from .op_schemas import identity, is_op
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
_KNOWN = ("aten", "prims", "wholestep")
_SYMBOLS: set[Any] = {torch.SymInt, torch.SymFloat}
_SIZED_RESULTS = "wholestep_results"  # of symbolic sizes, in their environment
_kind: Callable[[Any], Any] = type
_make_subclass: Callable[..., Any] = cast(Any, torch.Tensor)._make_subclass  # a trace replaces it
_results: dict[Any, Any] = {}
_aliasing: dict[int, tuple[Any, str]] = {}  # by the identity of an op, which is kept: its own hash is one of Python
_attributes: dict[str, None] = {}


_Result = tuple[Any, tuple[Any, ...], str]
"""Results of one call: the class of a sequence of several, None for one; tensors of their sizes and strides with the
device; how they alias."""


class _SizedKey(tuple[Any, ...]):
    """A key with symbolic sizes, which belong to one environment of symbols."""


def _key_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what determines the result of an op, up to storages; None where that is not known."""
    key = identity(op)
    known = _aliasing.get(key)
    if known is None:
        known = _aliasing[key] = op, _aliasing_of(op)
    parts: list[Any] = [key, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    if known[1] and op.namespace == "wholestep":  # texts are names, which results do not depend on
        args = [value for value in args if _kind(value) is not str]
    if not known[1] or not add_kinds(parts, (*args, *chain.from_iterable(kwargs.items()))):
        return None
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:  # of symbolic sizes
        return _SizedKey(map(_hashable, key))
    return key


def _hashable(part: Any) -> Any:
    if _kind(part) in _SYMBOLS:
        return _kind(part), part.node._expr
    return tuple(map(_hashable, cast(Any, part))) if isinstance(part, (tuple, list)) else part


def kind_of(values: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return what determines results of ops on these fake tensors; None where that is not known."""
    parts: list[Any] = []
    with _C.DisableTorchFunction():
        if not all(_kind(value) in FAKE_TYPES for value in values) or not add_kinds(parts, values):
            return None
        parts += (value.requires_grad for value in values)
        return tuple(parts) if all(_kind(size) is int for value in values for size in value.shape) else None


def is_known(op: Any) -> bool:
    """Return whether results of an op are new tensors, or its first operand, which it changes."""
    known = _aliasing.get(identity(op))
    return known is not None and known[1] in (_FRESH, _IN_PLACE)


def changes_first(op: Any) -> bool:
    """Return whether an op changes its first operand in place, and returns it."""
    return _aliasing[identity(op)][1] is _IN_PLACE


def fake_result(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op on fake tensors, outside of modes of torch functions.

    What torch compares of symbolic sizes in a call, it has compared before in the environment of these symbols.
    """
    key = _key_of(op, args, kwargs)
    mode = _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) if key is not None else None
    if key is not None and mode is None and args and _kind(args[0]) in FAKE_TYPES:
        mode = args[0].fake_mode
    if mode is None:
        return op(*args, **kwargs)
    sized, results = _kind(key) is _SizedKey, _results
    if sized:
        results = cast(dict[str, Any], vars(mode.shape_env)).setdefault(_SIZED_RESULTS, dict[Any, Any]())
    result = results.get(key)
    if result is None:
        if key in results:
            return op(*args, **kwargs)
        out = _computed(mode, op, args, kwargs)
        if len(results) >= _MOST_RESULTS:
            results.clear()
        results[key] = _remembered(op, args, out, sized)
        return out
    kind, items, aliasing = result
    if aliasing is _IN_PLACE:
        return args[0] if items else None
    source = args[0].untyped_storage() if aliasing is _VIEW and not sized else None
    with _C._DisableTorchDispatch():
        copies: list[Any] = [
            item and _fake(item[0].data if sized else _of_storage(item[0], source), item[1], mode) for item in items
        ]
    return copies[0] if kind is None else kind(copies)


def _computed(mode: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op whose result is remembered here: torch would remember it, too, and those of the ops that it is of."""
    caches, mode.cache_enabled = mode.cache_enabled, False
    try:
        return op(*args, **kwargs)
    finally:
        mode.cache_enabled = caches


class Remembering(TorchDispatchMode):
    """Takes results on fake tensors from what is remembered."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fake_result(func, args, kwargs or {})


def other_fake(value: Any, alias: Any = None) -> Any:
    """Return a fake tensor like a plain one: of the storage of `alias`, or else of a storage of its own."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        return _fake(
            _of_storage(value, None) if alias is None else alias.data, value.__dict__[_DEVICE], value.fake_mode
        )


def fake_input(original: Callable[..., Any], mode: Any, tensor: Any, *options: Any, **named: Any) -> Any:
    """The fake tensor that a trace makes of a tensor: of a plain fake one that is no view, another like it."""
    plain = _kind(tensor) in FAKE_TYPES and tensor.fake_mode is mode and kind_of((tensor,)) is not None
    if not plain or tensor.constant is not None or not tensor.is_leaf or tensor._is_view() or tensor.storage_offset():
        return original(mode, tensor, *options, **named)
    copied = other_fake(tensor)
    if getattr(tensor, "_is_param", False):
        copied._is_param = True
    return copied.requires_grad_(tensor.requires_grad)


def snapshot(value: Any) -> Any:
    """Return another fake tensor of the same storage, whose sizes later changes in place leave as they are."""
    if not is_plain(value):
        return extract_val(value)
    with _C._DisableTorchDispatch():
        return _fake(value.data, value.__dict__[_DEVICE], value.fake_mode)


def add_kinds(parts: list[Any], values: Sequence[Any]) -> bool:
    """Append what determines the result of an op in its arguments; False where that is not known."""
    for value in values:
        kind = _kind(value)
        if kind in FAKE_TYPES:
            if not is_plain(value):
                if value.constant is None or value.numel() or not _is_dense(value):
                    return False
                parts.append("constant")  # without elements, as the first keys and values of a cache
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.__dict__[_DEVICE])
        elif kind in _NUMBERS:
            parts += (kind, value)
        elif kind in _SYMBOLS:
            parts.append([kind, value.node._expr])  # torch compares a SymFloat to hash it
        elif kind in _SEQUENCES:
            parts += (kind, len(value))
            if not add_kinds(parts, value):
                return False
        elif kind in _CONSTANTS:
            parts.append(value)
        else:
            return False
    return True


def is_plain(value: Any) -> bool:
    """Return whether a fake tensor is no more than its sizes, strides, dtype and device."""
    return value.constant is None and _is_dense(value)


def _is_dense(value: Any) -> bool:
    return _CAN and value.layout is torch.strided and not (value.is_neg() or value.is_conj() or value.is_inference())


def _aliasing_of(op: Any) -> str:
    """Return how results of an op alias its operands; "" where its schema does not say it, or for ops of others."""
    if not _CAN or not is_op(op) or op.namespace not in _KNOWN or torch.Tag.inplace_view in op.tags:
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


def _remembered(op: Any, args: Sequence[Any], out: Any, sized: bool) -> _Result | None:
    """Return what makes the result of a call again; None where only torch can."""
    kind = _kind(out) if _kind(out) in _SEQUENCES else None
    items, aliasing = list(cast(Sequence[Any], out)) if kind else [out], _aliasing[identity(op)][1]
    tensors = [item for item in items if item is not None]
    if not all(_kind(item) in FAKE_TYPES and is_plain(item) for item in tensors):
        return None
    is_operand = [any(item is arg for arg in args) for item in tensors]
    if aliasing is _IN_PLACE:
        return (None, tuple(tensors and ["itself"]), aliasing) if all(is_operand) else None
    storages = {*map(storage_key, tensors)}
    if any(is_operand) or (len(storages) < len(tensors) and aliasing is _FRESH):
        return None
    operands = [storage_key(arg) for arg in args if _kind(arg) in FAKE_TYPES]
    if aliasing is _FRESH and not sized:
        if operands and storages == {operands[0]}:  # `_unsafe_view`, whose schema does not say it
            aliasing = _VIEW
        elif storages & {*operands} or any(item.storage_offset() for item in tensors):
            return None
    with _C._DisableTorchDispatch():
        return kind, tuple(item if item is None else (item.data, item.fake_device) for item in items), aliasing


def _of_storage(value: Any, storage: Any) -> Any:
    """Return a tensor of the sizes and strides of another one, on a storage or on one of its own."""
    if storage is None:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())


def _fake(value: Any, device: torch.device, mode: Any) -> Any:
    """Make a fake tensor of a tensor that nothing else has, with what torch knows of its symbolic sizes."""
    fake: Any = _make_subclass(FakeTensor, value, False, dispatch_device=True, device_for_backend_keys=device)
    if not _attributes:
        usual: Any = FakeTensor(mode, torch.empty(0, device="meta"), device)
        _attributes.update((name, None) for name, attribute in cast(Any, vars(usual)).items() if attribute is None)
    _C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_attributes, fake_mode=mode, **{_DEVICE: device})
    return fake
