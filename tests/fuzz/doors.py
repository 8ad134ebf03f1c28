"""Every public function, constructor and method, with arguments by their annotations and with odd ones among them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
from hypothesis import strategies as st
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.cost.software import OWN
from wholestep.errors import shown
from wholestep.hardware.curves import CollectiveCost
from wholestep.hardware.device import Device, MeasuredDevice, Work

from .inputs import CALLED, Draw, nothing, odd_object

TEXTS = ["dp", "tp", "x", "0.weight", "relu", "all_gather", "bfloat16", "dp=2", "eager", "dgx-h100", "f.json", "param"]
NUMBERS = 0, 1, 2, 3, 8, -1, 1 << 12, (1 << 62), -(1 << 62)
OF_OTHERS = {"rule": "cases of its own", "callback": "runs what it is given", "CompiledStep.profile": "runs the step"}
"""Calls that are not made here, and why."""


@cache
def calls() -> dict[str, Callable[..., Any]]:
    """By name; methods of a value that is right."""
    found: dict[str, Callable[..., Any]] = {}
    for name in ws.__all__:
        given: Any = getattr(ws, name)
        if inspect.ismodule(given):
            found |= {f"{name}.{inner}": getattr(given, inner) for inner in cast(Any, given).__all__}
        elif not inspect.isclass(given):
            found[name] = given
        elif not issubclass(given, BaseException) and not getattr(given, "_is_protocol", False):
            found[name] = given
            for method, function in inspect.getmembers(given):
                if not method.startswith("_") and callable(function) and not inspect.isclass(function):
                    found[f"{name}.{method}"] = function if _is_static(given, method) else _method(given, method)
    return {name: call for name, call in found.items() if name not in OF_OTHERS and _parameters(call)}


def methods() -> dict[str, type]:
    """The class on a value of which a method is called, by the name of the call."""
    classes = {name: name.rpartition(".")[0] for name in calls() if inspect.isclass(getattr(ws, name.split(".")[0]))}
    return {
        name: getattr(ws, kind)
        for name, kind in classes.items()
        if kind and not _is_static(getattr(ws, kind), name.rpartition(".")[2])
    }


def _is_static(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod))


def _method(kind: type, name: str) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        return getattr(right_values()[kind][0], name)(*args, **named)

    function = getattr(kind, name)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    made: Any = call
    made.__signature__ = inspect.signature(function).replace(parameters=parameters)
    made.__annotations__ = get_type_hints(function)
    return made


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


@cache
def right_values() -> dict[Any, tuple[Any, ...]]:
    """By type."""
    from .cases import graph, local, plans

    model, optimizer = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    hardware = ws.Hardware.preset("dgx-h100")
    took, peak = ws.timeline(local(), hardware), ws.peak_memory(local())
    comparison = ws.compare(mean_square, (model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(4, 2)))
    node = next(node for node in graph().graph.nodes if node.op == "call_function")
    values = (
        graph(), local(), plans()[0], plans()[1], ws.Mesh("dp=2"), ws.Mesh("dp=2,tp=2"), ws.Axis("dp", 2), hardware,
        ws.Hardware.default(), ws.DataParallel(), ws.TensorParallel({"0": "colwise"}), ws.Pipeline(micro_batches=2),
        ws.MicroBatches(2), ws.Auto("1GiB"), ws.ContextParallel(), ws.ExpertParallel(), ws.TileRows(2),
        ws.OffloadSaved(), ws.Layout((("dp",), ())),
        ws.MixedPrecision(), ws.Float8(),
        ws.Schedule(), ws.Recompute(1 << 20), ws.CaptureOptions(), ws.PadTo([2, 4], {"x": 0}),
        ws.KernelTimes(()), ws.Inductor(), took, took.spans[0], took.simulated, peak, peak.live[0],
        ws.Checkpoint(1, {}, Path("x")), ws.CheckResult("x"), ws.compile(mean_square), comparison, model, optimizer,
        node, graph().graph, torch.ones(2, 3), torch.bfloat16,
        CollectiveCost("all_reduce", 1.0, 1.0), plans()[0].inputs[0],
        Work(10, 10.0, "float32"), True, False, None, Path("f.json"), "", *TEXTS, *NUMBERS, 1.0, 0.5, -1.0, 1e300,
    )  # fmt: skip
    found: dict[Any, tuple[Any, ...]] = {Device: (hardware.device,), MeasuredDevice: (ws.Hardware.default().device,)}
    for value in values:
        for kind in type(value).__mro__[:-1]:
            found[kind] = (*found.get(kind, ()), value)
    found[ws.MemoryCopies], found[ws.Software] = (_Copies(),), (OWN,)
    return found


class _Copies:
    """Copies in the folder that a case has, made where they are used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ws.MemoryCopies("copies"), name)


def by_annotation(draw: Draw, kind: Any) -> Any:
    """A value of a type, small and ordinary; an odd one where nothing is known of it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return by_annotation(draw, draw(st.sampled_from(args)))
    if origin is Literal:
        return draw(st.sampled_from(args))
    if origin in (Sequence, Collection, Iterable, tuple, list):
        inner = args[0] if args else Any
        several = [by_annotation(draw, inner) for _ in range(draw(st.integers(0, 3)))]
        return tuple(several) if origin is tuple else several
    if origin in (Mapping, dict):
        return {
            _key(by_annotation(draw, args[0])): by_annotation(draw, args[1]) for _ in range(draw(st.integers(0, 2)))
        }
    if kind is NoneType or kind is None:
        return None
    if Callable in (origin, kind):
        return nothing
    if values := right_values().get(origin or kind):
        return draw(st.sampled_from(values))
    return odd_object(draw)


def _key(value: Any) -> Any:
    try:
        hash(value)
    except Exception:
        return "x"
    return value


NESTED = (
    lambda value: [value], lambda value: (value,), lambda value: {"x": value}, lambda value: [[[value]]],
    lambda value: (), lambda value: {}, lambda value: [], lambda value: math.nan,
)  # fmt: skip


def drawn(draw: Draw, name: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for the call of this name."""
    call = calls()[name]
    hints = {**getattr(call, "__annotations__", {})} if name.count(".") and not name.startswith("coll") else {}
    hints = hints if hints and not any(isinstance(one, str) for one in hints.values()) else get_type_hints(_typed(call))
    args: list[Any] = []
    named: dict[str, Any] = {}
    takes_any = any(one.kind is one.VAR_POSITIONAL for one in _parameters(call))
    for one in _parameters(call):
        left_out = draw(st.integers(0, 29 if one.default is one.empty else 2)) == 0
        if one.kind is one.VAR_KEYWORD or left_out:
            continue
        how, kind = draw(st.integers(0, 9)), hints.get(one.name, Any)
        value = by_annotation(draw, kind) if how < 6 else odd_object(draw)
        if how in (8, 9):
            value = draw(st.sampled_from(NESTED))(by_annotation(draw, kind))
        if one.name in CALLED and callable(value):
            value = nothing
        if one.name == "cores":  # as many processes are started
            value = 1
        if one.kind is one.VAR_POSITIONAL or (takes_any and one.kind is one.POSITIONAL_OR_KEYWORD):
            args.append(value)
        else:
            named[one.name] = value
    if draw(st.integers(0, 29)) == 0:
        named["of_another_name"] = 1
    return args, named


def _typed(call: Callable[..., Any]) -> Any:
    return cast(Any, call).__init__ if inspect.isclass(call) else call


def text_of(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> str:
    """The call as it would be written."""
    return f"{name}({', '.join([*map(shown, args), *(f'{k}={shown(v)}' for k, v in named.items())])})"
