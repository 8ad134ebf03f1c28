"""Strategies that were solved for as text: what one rank found, for the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...layout import AxisState
from ..data_parallel import DataParallel
from ..strategy import Pins, Strategies, Strategy
from .cuts import Cuts
from .mixed import Mixed


def encode(strategies: Strategies) -> str:
    """Of a `Mixed`, a plain `DataParallel` and `Cuts`, what is not an option of the user's; other parts are left out."""
    return json.dumps([one for part in strategies.parts if (one := _encoded(part)) is not None])


def decode(text: str, data: DataParallel) -> Strategies:
    """Inverse of `encode`; options of data parallelism are those of `data`."""
    return Strategies(tuple(_decoded(one, data) for one in json.loads(text)))


def is_solved(strategies: Strategies) -> bool:
    """True where something in it was solved for."""
    return any(isinstance(part, (Cuts, Mixed)) for part in strategies.parts)


def _encoded(part: Strategy) -> dict[str, Any] | None:
    if isinstance(part, Cuts):
        pins = part.found
        return {
            "kind": "cuts", "axis": part.axis, "params": {name: str(s) for name, s in part.params.items()},
            "results": {n: {a: str(s) for a, s in states.items()} for n, states in pins.results.items()},
            "ways": {n: dict(ways) for n, ways in pins.ways.items()}, "expanded": list(pins.expanded),
            "said": part.said, "input_dim": part.input_dim if part.input_dim is None or isinstance(part.input_dim, int)
            else dict(part.input_dim),
        }  # fmt: skip
    if isinstance(part, DataParallel):
        axis = list(part.axis) if isinstance(part.axis, tuple) else part.axis
        found = {"kind": "data", "style": part.style, "axis": axis, "again": part.reshard_after_forward}
        return found | ({"storage": dict(part.storage), "said": part.said} if isinstance(part, Mixed) else {})
    return None


def _decoded(given: Mapping[str, Any], data: DataParallel) -> Strategy:
    if given["kind"] == "cuts":
        results = {n: {a: _state(s) for a, s in states.items()} for n, states in given["results"].items()}
        ways = {n: {a: tuple(names) for a, names in found.items()} for n, found in given["ways"].items()}
        pins = Pins(results, {}, ways, tuple(given["expanded"]))
        params = {name: _state(s) for name, s in given["params"].items()}
        return Cuts(given["axis"], params, pins, given["said"], given["input_dim"])
    fields: dict[str, Any] = {name: getattr(data, name) for name in DataParallel.__dataclass_fields__}
    axis = given["axis"]
    fields |= {"style": given["style"], "axis": tuple(axis) if isinstance(axis, list) else axis}
    fields["reshard_after_forward"] = given["again"]
    if "storage" in given:
        return Mixed(**fields, storage=given["storage"], said=given["said"])
    return DataParallel(**fields)



def _state(text: str) -> AxisState:
    kind, _, rest = text.partition("(")
    inside = rest.rstrip(")")
    return AxisState("S", int(inside)) if kind == "S" else AxisState("P", op=inside) if kind == "P" else AxisState("R")
