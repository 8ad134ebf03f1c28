"""How far from a query the keys are that a mask of attention lets through, proved by what computes the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.nodes import operands
from ..graph.op_kinds import arithmetic, packet_name
from ..rules.call import Call
from ..sizes import text_of
from .padded_values import constant_made

_Range = tuple[float, float]
_ALL, _NONE = (-inf, inf), (inf, -inf)
_COMPARED = {"gt": (1, inf), "ge": (0, inf), "lt": (-inf, -1), "le": (-inf, 0), "eq": (0, 0)}


@dataclass(frozen=True)
class _Places:
    """Whole numbers that count places: what one place adds, by dim (-1 is the last), and the number at the first."""

    steps: Mapping[int, int]
    first: int


@dataclass(frozen=True)
class _Seen:
    """Ranges of key - query, places along the last two dims. Outside of `yes` nothing is true, nor above -inf; outside
    of `no` nothing is false, nor -inf.
    """

    yes: _Range = _ALL
    no: _Range = _ALL


_TRUE, _FALSE = _Seen(_ALL, _NONE), _Seen(_NONE, _ALL)


def near_tokens(node: Node, parts: int) -> int | None:
    """How many tokens of others a rank needs for a call of attention, where it needs few; None where it needs most."""
    reach, query = reach_of(node), meta.one_tensor(operands(node)[0]).shape
    if reach is None or len(query) != 4:
        return None
    others = int(query[2]) * (parts - 1) // parts
    return sum(reach) if sum(reach) < others else None


def mask_of(node: Node) -> int | None:
    """The place of the mask among the operands of a call of attention."""
    masks = (slot.positions for slot in Call.of(node).slots if slot.name in ("attn_mask", "attn_bias"))
    return next((places[0] for places in masks if places), None)


def reach_of(node: Node) -> tuple[int, int] | None:
    """How far in front of a query of an attention call, and behind it, the keys are that its mask lets through; None
    where that is not proved, and where the gradient of the mask is read.
    """
    operation, place = arithmetic(node.target), mask_of(node)
    if operation is None or place is None:
        return None
    query, call = int(operation.backward), Call.of(node)
    learns = operation.backward and any(meta.picked(u).stop > 3 for u in node.users if _torch.is_getitem(u.target))
    mask = _value(operands(node)[place])
    shapes = call.shape(query), call.shape(query + 1)
    alike = len(shapes[0]) == 4 and text_of(shapes[0][2]) == text_of(shapes[1][2])
    if learns or not isinstance(mask, _Seen) or not alike:
        return None
    first, last = mask.yes
    return (max(0, -int(first)), max(0, int(last))) if -inf < first <= last < inf else None


# -- what computes a mask ----------------------------------------------------------------------------------
def _value(value: Any) -> _Places | _Seen | None:
    """What is proved of an argument; None of one that is no mask, and counts no places."""
    if not isinstance(value, Node):
        return _Places({}, value) if type(value) is int else None
    tensor, name = meta.tensor(value), packet_name(value.target)
    if tensor is None or value.op != "call_function":
        return _Seen()
    if (number := constant_made(value)) is not None:
        return _constant(number, tensor.dtype)
    proved = _of_call(value, name, tensor.dtype) or _Seen()
    return _where_repeated(proved, {-place for place, size in enumerate(reversed(tensor.shape), 1) if size == 1})


def _where_repeated(proved: _Places | _Seen, dims: set[int]) -> _Places | _Seen:
    """What is proved wherever the single places along `dims` are repeated."""
    if isinstance(proved, _Places):
        return _Places({dim: step for dim, step in proved.steps.items() if dim not in dims}, proved.first)
    return _Seen() if dims & {-1, -2} and proved not in (_TRUE, _FALSE) else proved


def _constant(number: float, dtype: torch.dtype) -> _Seen:
    if dtype is torch.bool or dtype.is_floating_point:
        return _TRUE if (bool(number) if dtype is torch.bool else number != -inf) else _FALSE
    return _Seen()


def _of_call(node: Node, name: str, dtype: torch.dtype) -> _Places | _Seen | None:
    """What is proved of the result of a call."""
    args = cast("list[Any]", list(node.args))
    if name == "arange":
        numbers = [0, *args] if len(args) == 1 else args
        counts = len(numbers) == 2 and type(numbers[0]) is int and dtype in _WHOLE
        return _Places({-1: 1}, numbers[0]) if counts else None
    if name in ("where", "masked_fill"):
        condition, yes, no = args if name == "where" else (args[1], args[2], args[0])
        return _chosen(_seen(condition), _seen(yes, dtype), _seen(no, dtype))
    if name in ("tril", "triu"):
        at = args[1] if len(args) > 1 else 0
        if type(at) is not int:  # of a size
            return None
        sides = ((-inf, at), (at + 1, inf)) if name == "tril" else ((at, inf), (-inf, at - 1))
        return _chosen(_Seen(*sides), _seen(args[0]), _constant(0, dtype))
    if name in ("bitwise_and", "logical_and", "bitwise_or", "logical_or") and _of_booleans(args):
        first, second = map(_seen, args)
        return _chosen(first, second, _FALSE) if name.endswith("and") else _chosen(first, _TRUE, second)
    if name in ("bitwise_not", "logical_not") and _of_booleans(args):
        return _Seen((seen := _seen(args[0])).no, seen.yes)
    if name in ("le", "lt") and isinstance(args[0], Node) and packet_name(args[0].target) == "abs":
        inner, most_apart = _value(args[0].args[0]), args[1]
        if isinstance(inner, _Places) and type(most_apart) is int:
            return _compared((-most_apart + (name == "lt"), most_apart - (name == "lt")), inner)
    first = _value(args[0]) if args else None
    flips = (
        name in ("t", "transpose", "permute")
        and args[1:] in ([], [0, 1], [[1, 0]])
        and len(meta.one_tensor(node).shape) == 2
    )
    if flips and isinstance(first, _Seen):
        return _Seen(*((-last, -start) for start, last in (first.yes, first.no)))
    if name in ("expand", "clone", "alias", "detach") or (name == "_to_copy" and _keeps(args[0], dtype)):
        return first
    if name == "slice" and not any(args[2:3]) and len(args) < 5:
        return first
    if isinstance(first, _Places):
        return _of_places(name, first, args, node)
    return first if name == "unsqueeze" and 0 <= args[1] < len(meta.one_tensor(node).shape) - 2 else None


def _of_places(name: str, first: _Places, args: list[Any], node: Node) -> _Places | _Seen | None:
    """What is proved of a call on numbers that count places."""
    ndim, second = len(meta.one_tensor(node).shape), _value(args[1]) if len(args) > 1 else None
    if name == "unsqueeze":
        new = args[1] - ndim if args[1] >= 0 else args[1]
        return _Places({dim - (dim <= new): step for dim, step in first.steps.items()}, first.first)
    if name in ("add", "sub", *_COMPARED) and isinstance(second, _Places) and not node.kwargs:
        sign = 1 if name == "add" else -1
        dims = {*first.steps, *second.steps}
        steps = {dim: first.steps.get(dim, 0) + sign * second.steps.get(dim, 0) for dim in dims}
        both = _Places({dim: step for dim, step in steps.items() if step}, first.first + sign * second.first)
        return _compared(_COMPARED[name], both) if name in _COMPARED else both
    return None


def _compared(wanted: _Range, both: _Places) -> _Seen | None:
    """Where numbers that count keys less queries, or the reverse, are in a range."""
    if (step := both.steps.get(-1)) not in (1, -1) or both.steps != {-1: step, -2: -step}:
        return None
    low, high = (end - both.first for end in wanted)
    low, high = (low, high) if step == 1 else (-high, -low)
    others = (-inf, low - 1) if high == inf else (high + 1, inf) if low == -inf else _ALL
    return _Seen((low, high), others)


def _seen(value: Any, dtype: torch.dtype | None = None) -> _Seen:
    if dtype is not None and isinstance(value, (bool, int, float)):
        return _constant(value, dtype)
    seen = _value(value)
    return seen if isinstance(seen, _Seen) else _Seen()


def _chosen(condition: _Seen, yes: _Seen, no: _Seen) -> _Seen:
    """What is proved of `where(condition, yes, no)`."""
    return _Seen(
        _either(_both(condition.yes, yes.yes), _both(condition.no, no.yes)),
        _either(_both(condition.yes, yes.no), _both(condition.no, no.no)),
    )


def _both(a: _Range, b: _Range) -> _Range:
    both = max(a[0], b[0]), min(a[1], b[1])
    return both if both[0] <= both[1] else _NONE


def _either(a: _Range, b: _Range) -> _Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _of_booleans(values: list[Any]) -> bool:
    """Whether all are booleans: of numbers, what is seen is whether they are above -inf."""
    return all(isinstance(value, Node) and meta.one_tensor(value).dtype is torch.bool for value in values)


def _keeps(value: Any, dtype: torch.dtype) -> bool:
    """Whether a cast keeps what is said of a value."""
    before = meta.one_tensor(value).dtype
    return before == dtype or (before.is_floating_point and dtype.is_floating_point) or {before, dtype} <= _WHOLE


_WHOLE = {torch.int32, torch.int64}
