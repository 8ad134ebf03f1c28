"""Plans as JSON, field by field, with errors that name the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import MeshError, PlanError
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta
from ..hardware.hardware_file import from_json, to_json
from ..layout import Layout
from ..mesh import Mesh
from ..precision import MixedPrecision
from . import strategy_file
from .decision import Decision, Objective, Options

_PLAIN = ("name", "owner", "key", "trainable", "optimizer")  # fields of an Input that are JSON values

if TYPE_CHECKING:
    from .plan import Plan


def encode(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values, with a table of its distinct layouts."""
    table: dict[Layout, int] = {}

    def number(layout: Layout) -> int:
        return table.setdefault(layout, len(table))

    inputs = [_encode_input(i) for i in plan.inputs]
    rest = {name: number(layout) for name, layout in plan.storage.items()}
    created = {name: number(layout) for name, layout in plan.created_storage.items()}
    decisions = {
        name: [
            [number(x) for x in d.operands],
            [number(x) for x in d.outputs],
            d.why,
            None if d.settle is None else number(d.settle),
            list(d.because),
            list(d.reads),
            list(map(list, d.moves)),
            d.gradient_of,
        ]
        for name, d in plan.decisions.items()
    }
    layouts = [[list(map(list, x.dims)), list(map(list, x.partial)), list(x.varies)] for x in table]
    options = {**vars(plan.options), "again": list(plan.options.again)}
    head = {"mesh": str(plan.mesh), "strategy": plan.strategy, "options": options, "notes": list(plan.notes)}
    head |= {"objective": None if plan.objective is None else vars(plan.objective)}
    head |= {"strategies": strategy_file.encode(plan.strategies)}
    head |= {"mixed_precision": _encode_precision(plan.mixed_precision), "offload": plan.offload}
    head |= {"hardware": to_json(plan.hardware)}
    head |= {
        "decomposed": list(plan.decomposed),
        "axis_strategies": dict(plan.axis_strategies),
        "input_nodes": dict(plan.input_nodes),
    }
    return {
        **head,
        "layouts": layouts,
        "inputs": inputs,
        "storage": rest,
        "created_storage": created,
        "decisions": decisions,
    }


def _encode_precision(given: MixedPrecision | None) -> dict[str, str | None] | None:
    return None if given is None else {k: v and str(v).removeprefix("torch.") for k, v in vars(given).items()}


def _decode_precision(value: Mapping[str, str | None] | None) -> MixedPrecision | None:
    return None if value is None else MixedPrecision(**{k: _dtype(v) for k, v in value.items()})


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _encode_input(given: Input) -> dict[str, Any]:
    made, plain = given.meta, {name: getattr(given, name) for name in _PLAIN}
    dtype = str(made.dtype).removeprefix("torch.")
    meta = {"shape": list(made.shape), "stride": list(made.stride), "dtype": dtype, "device": made.device}
    return {**plain, "role": given.role.value, **meta}


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `encode`; PlanError names the field that cannot be read."""
    mesh = _field(data, "mesh", lambda v: Mesh(str(v)))
    layouts = _field(data, "layouts", lambda v: [_layout(x) for x in v])
    return {
        "mesh": mesh,
        "strategy": _field(data, "strategy", str),
        "inputs": _field(data, "inputs", lambda v: tuple(_decode_input(x) for x in v)),
        "storage": _field(data, "storage", lambda v: {str(k): layouts[i] for k, i in v.items()}),
        "created_storage": _field(data, "created_storage", lambda v: {str(k): layouts[i] for k, i in v.items()}),
        "decisions": _field(data, "decisions", lambda v: {str(k): _decision(d, layouts) for k, d in v.items()}),
        "options": _field(data, "options", _options),
        "objective": _field({"objective": None, **data}, "objective", lambda v: None if v is None else Objective.of(v)),
        "notes": _field(data, "notes", lambda v: tuple(map(str, v))),
        "decomposed": _field(data, "decomposed", lambda v: tuple(map(str, v))),
        "axis_strategies": _field(data, "axis_strategies", lambda v: {str(k): str(x) for k, x in v.items()}),
        "input_nodes": _field(data, "input_nodes", lambda v: {str(k): str(x) for k, x in v.items()}),
        "strategies": _field({"strategies": None, **data}, "strategies", strategy_file.decode),
        "mixed_precision": _field(data, "mixed_precision", _decode_precision),
        "offload": _field(data, "offload", bool),
        "hardware": _field(data, "hardware", lambda v: from_json(v, "field 'hardware'")),
    }


def _field(data: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> Any:
    if name not in data:
        raise PlanError(f"field {name!r} is missing", "every field that Plan.to_json writes", "write the plan again")
    try:
        return read(data[name])
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, MeshError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(
            f"field {name!r} cannot be read: {text}", "the form that Plan.to_json writes", "write the plan again"
        ) from error


def _options(value: Mapping[str, Any]) -> Options:
    fields: dict[str, Any] = {**value, "again": tuple(map(str, value.get("again", ())))}
    return Options(**fields)


def _layout(value: Any) -> Layout:
    dims, partial, varies = value
    return Layout(
        tuple(tuple(map(str, axes)) for axes in dims),
        tuple((str(a), str(op)) for a, op in partial),
        tuple(map(str, varies)),
    )


def _decision(
    value: tuple[list[int], list[int], str, int | None, list[str], list[str], list[tuple[str, str]], str],
    layouts: list[Layout],
) -> Decision:
    operands, outputs, why, settle, because, reads, moves, gradient_of = value
    return Decision(
        tuple(layouts[i] for i in operands),
        tuple(layouts[i] for i in outputs),
        str(why),
        None if settle is None else layouts[settle],
        tuple(map(str, because)),
        tuple(map(str, reads)),
        tuple((str(name), str(text)) for name, text in moves),
        str(gradient_of),
    )


def _decode_input(value: Any) -> Input:
    dtype = getattr(torch, value["dtype"])
    meta = TensorMeta(tuple(value["shape"]), tuple(value["stride"]), dtype, value["device"])
    return Input(role=Role(value["role"]), meta=meta, **{name: value[name] for name in _PLAIN})
