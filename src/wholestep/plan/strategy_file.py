"""Strategies as JSON values, so that `compile(parallel=plan)` can apply a plan from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from ..layout import AxisState
from .data_parallel import DataParallel
from .module_styles import ModuleStyle
from .per_parameter_storage import PerParameterStorage, StorageOption
from .solved_layouts import SolvedLayouts
from .strategies import Strategies
from .strategy import Pins, Strategy
from .tensor_parallel import TensorParallel

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        DataParallel,
        TensorParallel,
        ModuleStyle,
        AxisState,
        PerParameterStorage,
        StorageOption,
        SolvedLayouts,
        Pins,
    )
}


def encode(strategies: Strategies | None) -> list[Any] | None:
    """One value for each strategy; None if one of them is user-defined, or has a function as its style.

    A file that named the class or function would run code from data when it is read.
    """
    parts = [_with_styles(part) for part in strategies.parts] if strategies else []
    known = strategies is not None and all(type(part) in _KINDS.values() and not _has_function(part) for part in parts)
    return [_encoded(part) for part in parts] if known else None


def decode(values: Sequence[Any] | None) -> Strategies | None:
    """Inverse of `encode`, except that torch's tensor-parallel styles come back as a `ModuleStyle`.

    Raises:
        TypeError, KeyError, ValueError: not what `encode` writes.
    """
    return None if values is None else Strategies(tuple(cast(Strategy, _decoded(value)) for value in values))


def _has_function(part: Strategy) -> bool:
    return isinstance(part, DataParallel) and not isinstance(part.style, str)


def _with_styles(part: Strategy) -> Strategy:
    if not isinstance(part, TensorParallel) or part.is_open:
        return part
    return replace(part, plan=dict(part.styles()))


def _encoded(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"is": type(value).__name__, **{f.name: _encoded(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, Mapping):
        return {"map": [[_encoded(k), _encoded(v)] for k, v in cast(Mapping[Any, Any], value).items()]}
    if isinstance(value, (tuple, list)):
        return [_encoded(v) for v in cast(Sequence[Any], value)]
    return {"dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(v) for v in cast(list[Any], value))
    if not isinstance(value, dict):
        return value
    given = cast(dict[str, Any], value)
    if "dtype" in given:
        return getattr(torch, given["dtype"])
    if "map" in given:
        return {_decoded(k): _decoded(v) for k, v in given["map"]}
    return _KINDS[given["is"]](**{k: _decoded(v) for k, v in given.items() if k != "is"})
