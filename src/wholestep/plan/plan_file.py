"""Plans as JSON values by the types of their fields, and strategies, so that `compile(parallel=plan)` can apply a file.

A file that named a user's class or function would run code from data when it is read: such strategies are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast

import torch

from ..errors import PlanError, WholestepError
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta
from ..hardware.hardware import Hardware
from ..hardware.hardware_file import from_json, to_json
from ..layout import Layout
from ..mesh import Mesh
from ..typed_json import MalformedError, Readers, as_list, as_object, hints_of, wrong
from ..typed_json import read as typed
from .context_parallel import ContextParallel
from .data_parallel import DataParallel, PerParameterStorage
from .decision import Decision
from .expert_parallel import ExpertParallel
from .micro_batches import MicroBatches
from .pipelines import Pipeline
from .strategies import Strategies
from .strategy import Strategy
from .tensor_parallel import SolvedLayouts, TensorParallel

_STRATEGIES = {
    kind.__name__: kind
    for kind in (
        ContextParallel, DataParallel, ExpertParallel, MicroBatches, PerParameterStorage, Pipeline, TensorParallel,
        SolvedLayouts,
    )
}  # fmt: skip
_AGAIN = "write the plan again"


# -- plans -----------------------------------------------------------------------------------------------
def encode(plan: object) -> dict[str, Any]:
    """A plan as JSON values, with a table of its distinct layouts, which are named by number."""
    table: dict[Layout, int] = {}
    fields = _encoded(vars(plan), table)
    return {**fields, "layouts": [[x.dims, x.partial, x.varies, x.owned, x.blocks] for x in table]}


def _encoded(value: Any, table: dict[Layout, int]) -> Any:
    """Of a mapping whose keys are no texts, a list of pairs."""
    if isinstance(value, Layout):
        return table.setdefault(value, len(table))
    if isinstance(value, Mapping):
        items = [(key, _encoded(entry, table)) for key, entry in cast(Mapping[Any, Any], value).items()]
        return dict(items) if all(isinstance(key, str) for key, _ in items) else items
    if isinstance(value, tuple):
        return [_encoded(entry, table) for entry in cast(tuple[Any, ...], value)]
    if isinstance(value, Decision):
        return [_encoded(entry, table) for entry in vars(value).values()]
    if isinstance(value, Input):
        return _encoded({**{k: v for k, v in vars(value).items() if k != "meta"}, **vars(value.meta)}, table)
    if isinstance(value, (Mesh, torch.dtype)):
        return str(value).removeprefix("torch.")
    if isinstance(value, Role):
        return value.value
    if isinstance(value, Hardware):
        return to_json(value)
    if isinstance(value, Strategies):
        return encode_strategies(value)
    return _encoded(vars(value), table) if is_dataclass(value) else value


def decode(data: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode`: each field as its type in `kinds`. Raises PlanError naming a field that cannot be read."""
    data = dict[str, Any](objective=None, strategies=None, async_axes=[], owners={}) | {**data}
    data, fields = dict[str, Any](owner_axis="", update_owners={}, precision=None, repeated=[]) | data, dict[str, Any]()
    readers = _READERS
    for name, kind in {"layouts": tuple[Layout, ...], **kinds}.items():
        if name not in data:
            raise PlanError(f"field {name!r} is missing", "every field that Plan.to_json writes", _AGAIN)
        try:
            field = typed(kind, data[name], name, readers)
        except MalformedError as error:
            raise PlanError(f"field {name!r} cannot be read: {error.found}", error.needed, _AGAIN) from error
        if name == "layouts":
            readers = {**_READERS, Layout: _numbered(cast(tuple[Layout, ...], field))}
        else:
            fields[name] = field
    return fields


def read(kind: Any, value: Any) -> Any:
    """A JSON value that holds no layouts as the type `kind`. Raises MalformedError."""
    return typed(kind, value, "", _READERS)


def _numbered(table: Sequence[Layout]) -> Any:
    def layout(value: Any, at: str) -> Layout:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(table):
            raise wrong(at, value, f"the number of a layout, from 0 to {len(table) - 1}")
        return table[value]

    return layout


def _dtype(value: Any, at: str) -> torch.dtype:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise wrong(at, value, "a dtype of torch")
    return dtype


def _mesh(value: Any, at: str) -> Mesh:
    try:
        return Mesh(typed(str, value, at))
    except WholestepError as error:
        raise MalformedError(error.found, error.needed) from error


def _hardware(value: Any, at: str) -> Hardware:
    try:
        return from_json(value, at)
    except WholestepError as error:
        raise MalformedError(error.found, error.needed) from error


def _input(value: Any, at: str) -> Input:
    """An input and what it says of its tensor, in one object."""
    entries, about = as_object(value, at), hints_of(TensorMeta)
    meta = cast(TensorMeta, typed(TensorMeta, {k: v for k, v in entries.items() if k in about}, at, _READERS))
    if len(meta.shape) != len(meta.stride) or min((*meta.shape, *meta.stride), default=0) < 0:
        raise wrong(f"{at}.stride", meta.stride, f"a stride from 0 for each size from 0 of {meta.shape}")
    fields = {name: kind for name, kind in hints_of(Input).items() if name != "meta"}
    unknown = next((name for name in entries if name not in about and name not in fields), None)
    if unknown is not None:
        raise MalformedError(f"unknown field {at}.{unknown}", f"one of {', '.join((*fields, *about))}")
    decoded = {k: typed(kind, entries[k], f"{at}.{k}", _READERS) for k, kind in fields.items() if k in entries}
    if not {"name", "role"} <= decoded.keys():
        raise wrong(at, value, "an object with name and role")
    return Input(meta=meta, **decoded)


# -- strategies --------------------------------------------------------------------------------------------
def encode_strategies(strategies: Strategies | None) -> list[Any] | None:
    """One value for each strategy; None if one is a user's, has a function as its style, or is solved for in a plan."""
    parts = encode_parts(strategies, Strategies(())) if strategies else []
    return None if not parts or None in parts else parts


def encode_parts(strategies: Strategies, base: Strategies) -> list[dict[str, Any] | int | None]:
    """Each strategy as a JSON value. What has no form as text (`encode_strategies`) is the number of the part of `base`
    that it is, or None.
    """
    styled = strategies.changed(TensorParallel, lambda p: p if p.is_open else replace(p, plan=dict(p.styles())))
    unnamed = [part for part in strategies.parts if not isinstance(getattr(part, "style", ""), str)]
    return [
        (base.parts.index(part) if part in base.parts else None)
        if type(part) not in _STRATEGIES.values() or part in unnamed or part in strategies.open_parts
        else {"is": type(part).__name__, **_encoded(vars(text), {})}
        for part, text in zip(strategies.parts, styled.parts, strict=True)
    ]  # fmt: skip


def decode_parts(values: Any, base: Strategies) -> Strategies:
    """Inverse of `encode_parts`; what is the same as in `base` is of it. Raises MalformedError."""
    forms = [(number, part) for number, part in enumerate(base.parts)]
    forms += [(text, part) for text, part in zip(encode_parts(base, base), base.parts, strict=True)]
    return Strategies(
        tuple(
            next((part for form, part in forms if form == value), None) or _strategy(value, f"strategies[{i}]")
            for i, value in enumerate(as_list(values, "strategies"))
        )
    )


def decode_strategies(values: Any, at: str = "strategies") -> Strategies:
    """Inverse of `encode_strategies`, except that torch's tensor-parallel styles come back as a `ModuleStyle`. Raises
    MalformedError for other values.
    """
    return Strategies(tuple(_strategy(value, f"{at}[{i}]") for i, value in enumerate(as_list(values, at))))


def _strategy(value: Any, at: str) -> Strategy:
    fields = dict(as_object(value, at))
    kind = fields.pop("is", None)
    if not isinstance(kind, str) or kind not in _STRATEGIES:
        raise wrong(f"{at}.is", kind, f"one of {', '.join(_STRATEGIES)}")
    return cast(Strategy, typed(_STRATEGIES[kind], fields, at, _READERS))


_READERS: Readers = {
    torch.dtype: _dtype, Mesh: _mesh, Hardware: _hardware, Input: _input, Strategies: decode_strategies,
}  # fmt: skip
