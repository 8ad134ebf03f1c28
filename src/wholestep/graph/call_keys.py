"""Keys of calls: what results for an op with its arguments and outputs are kept under."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from ..sizes import SizeFloat, SizeGuards, SizeInt, UnitInt, text_of, unit_of
from . import meta
from .meta import TensorMeta

_INT = {int}


def place_in(cache: dict[Any, Any], call: Any) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    """Where the result for a call, or for a node, is kept: a cache, and a key that distinguishes numbers of different
    types (dim 1 and True); hashable if all arguments are. Calls with symbolic sizes have a cache of their own
    (`SizeGuards.own`), and keys in which expressions stand for them, so that numbers which are equal in one batch alone
    are told apart.
    """
    records: list[SizeGuards] = []
    outputs = meta.tensors(call) if isinstance(call, Node) else call.outputs
    parts = call.args, tuple(call.kwargs.items()), outputs
    key = call.target, *[_frozen(part, records) for part in parts]
    return records[0].own(cache) if records else cache, key


def _frozen(value: Any, records: list[SizeGuards]) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(v, records) for v in cast(Sequence[Any], value)])
    if isinstance(value, Node):
        value = meta.tensor(value) or Node
    if isinstance(value, TensorMeta):
        if _INT.issuperset(map(type, value.shape)) and _INT.issuperset(map(type, value.stride)):
            return value
        return _frozen(value.shape, records), _frozen(value.stride, records), value.dtype, value.device
    if isinstance(value, (SizeInt, SizeFloat)):
        records.append(value.guards)
        unit = unit_of(cast(int, value))
        return type(value), value.text, unit if unit is None else text_of(unit)
    if isinstance(value, UnitInt):
        return UnitInt, int(value), value.unit
    return type(value), value
