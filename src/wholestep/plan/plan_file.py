"""Plans as JSON values by the types of their fields, and strategies, so that `compile(parallel=plan)` can apply a file.

A file that named a user's class or function would run code from data when it is read: such strategies are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import torch

from ..errors import MeshError, PlanError, first_line
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta
from ..hardware.hardware import Hardware
from ..hardware.hardware_file import from_json, to_json
from ..layout import AxisState, Layout
from ..mesh import Mesh
from .data_parallel import DataParallel, PerParameterStorage, StorageOption
from .decision import Decision
from .module_styles import ModuleStyle
from .strategies import Strategies
from .strategy import Pins, Strategy
from .tensor_parallel import SolvedLayouts, TensorParallel

_STRATEGIES = (DataParallel, PerParameterStorage, TensorParallel, SolvedLayouts)
_PLAIN = (str, int, float, bool, Role, Mesh)
_KINDS = {kind.__name__: kind for kind in (*_STRATEGIES, ModuleStyle, AxisState, StorageOption, Pins)}


# -- plans -----------------------------------------------------------------------------------------------
def encode(plan: object) -> dict[str, Any]:
    """A plan as JSON values, with a table of its distinct layouts, which are named by number."""
    table: dict[Layout, int] = {}

    def value_of(given: Any) -> Any:
        if isinstance(given, Layout):
            return table.setdefault(given, len(table))
        if isinstance(given, Mapping):
            return {name: value_of(one) for name, one in cast(Mapping[str, Any], given).items()}
        if isinstance(given, tuple):
            return [value_of(one) for one in cast(tuple[Any, ...], given)]
        if isinstance(given, Decision):
            return [value_of(one) for one in vars(given).values()]
        if isinstance(given, Input):
            return value_of({**{k: v for k, v in vars(given).items() if k != "meta"}, **vars(given.meta)})
        if isinstance(given, (Mesh, torch.dtype)):
            return str(given).removeprefix("torch.")
        if isinstance(given, Role):
            return given.value
        if isinstance(given, Hardware):
            return to_json(given)
        if isinstance(given, Strategies):
            return encode_strategies(given)
        return value_of(vars(given)) if is_dataclass(given) else given

    made = value_of(vars(plan))
    return {**made, "layouts": [[x.dims, x.partial, x.varies] for x in table]}


def decode(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode`: each field as its type in `kinds`. Raises PlanError naming a field that cannot be read."""
    data, made = dict[str, Any](objective=None, strategies=None) | {**data}, dict[str, Any]()
    for name, kind in {"layouts": None, **kinds}.items():
        if name not in data:
            raise PlanError(
                f"field {name!r} is missing", "every field that Plan.to_json writes", "write the plan again"
            )
        try:
            if name == "layouts":
                made[name] = [_dataclass(Layout, given, ()) for given in data[name]]
            else:
                made[name] = read(kind, data[name], made["layouts"])
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, MeshError) as error:
            found = f"field {name!r} cannot be read: {first_line(error)}"
            raise PlanError(found, "the form that Plan.to_json writes", "write the plan again") from error
    del made["layouts"]
    return made


def read(kind: Any, value: Any, layouts: Sequence[Layout] = ()) -> Any:
    """A JSON value as the type `kind`; a value that is none raises one of the errors that `decode` catches."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):  # X | None
        return None if value is None else read(args[0], value, layouts)
    if origin is tuple:
        several: Sequence[Any] = [args[0]] * len(value) if args[-1] is ... else args
        return tuple(read(one, given, layouts) for one, given in zip(several, value, strict=True))
    if origin is Mapping:
        return {str(name): read(args[1], given, layouts) for name, given in dict[str, Any](value).items()}
    if kind is Layout:
        return cast(Layout, layouts[value])
    if kind is torch.dtype:
        return _dtype(value)
    if kind is Input:
        made = {name: value[name] for name in _hints(TensorMeta)}
        return _dataclass(Input, {"meta": made} | {k: v for k, v in value.items() if k not in made}, layouts)
    if kind is Hardware:
        return from_json(value, "field 'hardware'")
    if kind is Strategies:
        return decode_strategies(value)
    return kind(value) if kind in _PLAIN else _dataclass(kind, value, layouts)


def _dataclass(kind: Any, value: Any, layouts: Sequence[Layout]) -> Any:
    hints = _hints(kind)
    given = cast(dict[str, Any], value if isinstance(value, dict) else dict(zip(hints, value, strict=True)))
    return kind(**{name: read(hints[name], one, layouts) for name, one in given.items()})


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


# -- strategies --------------------------------------------------------------------------------------------
def encode_strategies(strategies: Strategies | None) -> list[Any] | None:
    """One value for each strategy; None if one of them is user-defined, or has a function as its style."""
    parts = strategies.parts if strategies else ()
    own = all(type(part) in _STRATEGIES and isinstance(getattr(part, "style", ""), str) for part in parts)
    return [_encoded(_with_styles(part)) for part in parts] if strategies and own else None


def decode_strategies(values: Sequence[Any] | None) -> Strategies | None:
    """Inverse of `encode_strategies`, except that torch's tensor-parallel styles come back as a `ModuleStyle`. Raises
    TypeError, KeyError or ValueError for other values.
    """
    return None if values is None else Strategies(tuple(cast(Strategy, _decoded(value)) for value in values))


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
        return _dtype(given["dtype"])
    if "map" in given:
        return {_decoded(k): _decoded(v) for k, v in given["map"]}
    return _KINDS[given["is"]](**{k: _decoded(v) for k, v in given.items() if k != "is"})
