"""Inputs: documents and texts that are right but for a few changes, and values of types that do not belong."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import wholestep as ws

Draw = Callable[[st.SearchStrategy[Any]], Any]

DIGITS = "9" * 5000
RAW = (DIGITS, "-" + DIGITS, "1e999", "-1e999", "NaN", "Infinity", "[" * 100_000, '{"a":' * 5000, '"\\ud800"', "1.5e3")
"""Texts that no JSON value of Python is written as; `_MARK` and a number stand for them until then."""
_MARK = "raw text number "
ODD_JSON: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, 10**30, 0.0, -1.5, 1e-300, 1e308, "", "x", "dp", "0", "-1",
    "é", "\0", "a" * 3000, "../../up", "os.system", "__class__", [], {}, [[]], [[[[[]]]]], [None], [0], ["dp"],
    [["dp"]], {"is": "os.system"}, {"map": []}, {"dtype": "float32"}, {"": 0}, "sum", "S", "float32", "hub", "param",
    "dp=2", "dp=0", "mesh", *(f"{_MARK}{i}" for i in range(len(RAW))),
)  # fmt: skip


def mutated_json(draw: Draw, document: Any, most: int = 3) -> str:
    """`document` as JSON, after one to `most` changes of its values, and sometimes one of its text."""
    changed = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        changed = _changed(draw, changed)
    text = json.dumps(changed)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"{_MARK}{number}"', raw)
    return mutated_text(draw, text, ()) if draw(st.integers(0, 9)) == 9 else text


def _changed(draw: Draw, document: Any) -> Any:
    """`document` with one change, in place but for a change of all of it."""
    holder, key, value = None, None, document
    while isinstance(value, (dict, list)) and value and (holder is None or draw(st.integers(0, 4))):
        holder = value
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[draw(st.integers(0, len(keys) - 1))]
        value = value[key]
    if holder is None or draw(st.integers(0, 60)) == 60:
        return _odd_json(draw)
    how = draw(st.sampled_from(("odd", "odd", "odd", "near", "near", "drop", "twice", "rename", "sibling")))
    if how == "odd":
        holder[key] = _odd_json(draw)
    elif how == "near":
        holder[key] = _near(draw, value)
    elif how == "drop":
        del holder[key]
    elif how == "sibling":
        others = list(holder.values()) if isinstance(holder, dict) else holder
        holder[key] = copy.deepcopy(others[draw(st.integers(0, len(others) - 1))])
    elif isinstance(holder, dict):
        holder["other" if how == "twice" else "x" + str(key)] = holder[key] if how == "twice" else holder.pop(key)
    else:
        holder.insert(key, copy.deepcopy(value))
    return document


def _odd_json(draw: Draw) -> Any:
    return copy.deepcopy(draw(st.sampled_from(ODD_JSON)))


def _near(draw: Draw, value: Any) -> Any:
    """A value of the same type, close by."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw(st.sampled_from((-1, 1, -2 * value, 10**9)))
    if isinstance(value, float):
        return draw(st.sampled_from((-value, 0.0, value * 1e300, value / 1e300)))
    if isinstance(value, str):
        return mutated_text(draw, value, ("dp", "=", ",", "S", "sum"))
    return [value] if isinstance(value, list) else {"x": value}


def mutated_text(draw: Draw, text: str, tokens: Sequence[str], most: int = 4) -> str:
    """`text` after one to `most` edits; `tokens` are inserted too."""
    pool = (
        *tokens,
        "",
        " ",
        "\n",
        "\0",
        "é",
        "\ud800",
        "0",
        "-1",
        DIGITS,
        "(",
        "[",
        "(" * 100_000,
        "[" * 2000,
        "%s",
        "\\",
    )
    for _ in range(draw(st.integers(1, most))):
        first, last = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        how = draw(st.sampled_from(("cut", "insert", "insert", "replace", "repeat")))
        if how == "cut":
            text = text[:first] + text[last:]
        elif how == "repeat":
            text = text[:last] + text[first:last] * draw(st.sampled_from((1, 3, 1000))) + text[last:]
        else:
            token = draw(st.sampled_from(pool))
            text = text[:first] + token + text[first if how == "insert" else last :]
        text = text[:300_000]
    return text


class Unprintable:
    """No text, no equality, no truth."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def _cyclic() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


class Text(str):
    """A text of a class of its own."""


CALLED = {"fn", "passes", "progress", "style"}
ODD_OBJECTS: tuple[Callable[[], Any], ...] = (
    *(lambda v=v: copy.copy(v) for v in ODD_JSON[:-len(RAW)]),
    lambda: 10**5000, lambda: -(10**5000), lambda: math.nan, lambda: math.inf, lambda: -math.inf, lambda: 1j,
    lambda: b"dp=2", lambda: (), lambda: (1, 2), lambda: ("dp",), lambda: {"dp"}, lambda: frozenset({"dp"}), object,
    lambda: (lambda *args: None), lambda: (lambda: 1 / 0), lambda: int, lambda: ws.Mesh, lambda: ...,
    Unprintable, _cyclic,
    lambda: torch.zeros(2), lambda: torch.tensor(1), lambda: nn.Linear(2, 2), lambda: torch.float16, lambda: torch.int8,
    lambda: torch.device("meta"), lambda: np.int64(3), lambda: np.zeros(2), lambda: Path("x"), lambda: iter([1]),
    lambda: ws.Mesh("dp=2"), lambda: ws.Axis("dp", 2), lambda: ws.Layout(((),)), lambda: ws.Layout((("dp",), ())),
    lambda: ws.DataParallel("zero1"), lambda: [ws.DataParallel()], lambda: ws.Hardware.preset("dgx-h100"),
    lambda: ws.Auto(), lambda: ws.TensorParallel("auto"), lambda: ws.Schedule(), lambda: ws.MixedPrecision(),
    lambda: ws.DataParallel, lambda: {"x": 0}, lambda: {0: "x"}, lambda: {"x": ws.Layout(())}, lambda: [[["x"]]],
    lambda: Text("dp=2"), lambda: range(3), lambda: "dp=2,tp=2", lambda: "1GiB", lambda: "auto", lambda: "eager",
)  # fmt: skip


def odd_object(draw: Draw) -> Any:
    """A value that belongs in few places."""
    return ODD_OBJECTS[draw(st.integers(0, len(ODD_OBJECTS) - 1))]()


def with_odd(draw: Draw, right: Mapping[str, Any], names: Sequence[str] = (), most: int = 2) -> dict[str, Any]:
    """`right` with one to `most` of its values, or of `names`, replaced by odd ones."""
    found, known = dict(right), [*dict.fromkeys((*right, *names))]
    for _ in range(draw(st.integers(1, most))):
        name, value = known[draw(st.integers(0, len(known) - 1))], odd_object(draw)
        found[name] = nothing if name in CALLED and callable(value) else value
    return found


def nothing(*args: Any) -> None:
    """A function for an option that takes one: what a user's function raises is the user's."""
