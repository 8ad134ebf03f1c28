"""What stands, while a step is traced, for what it may not use: arguments whose values differ between calls and that
are no numbers, iterators, and the text of tensors.

A trace in which nobody asks an argument for anything proves that the step does not read it: its value is not compared
from then on. Who asks is refused, and the step is captured for the value. Most text of tensors is for an error that is
not raised: it is refused where a call would write, return or keep it.
"""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from .. import _torch
from ..errors import CaptureError
from ..graph.ops import ASSIGNMENT
from ..graph.origin import is_own_function
from .effects import RefusedError
from .locations import Location, Words
from .reachable import leads_to

_MARK = "\ufdd0"  # in no text: Unicode keeps this character for use inside of a program
_AsArray = Callable[[Tensor, CaptureError], Any]
_TOLD: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: tuple(t.shape), "ndim": Tensor.dim, "size": Tensor.numel,
    "dtype": lambda t: np.dtype(str(t.dtype).removeprefix("torch.")),
}  # of an array  # fmt: skip


class Unread(_torch.StandIn):
    """Stands for a value of class `kind` at a `place` of arguments. An array has a `fake`; a computed one no place."""

    __slots__ = ("_fake", "_kind", "_place", "_refuse")

    def __init__(
        self, kind: type, place: Location | None, refuse: Callable[[str], NoReturn], fake: Tensor | None
    ) -> None:
        for name, value in (("_kind", kind), ("_place", place), ("_refuse", refuse), ("_fake", fake)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        kind: type = object.__getattribute__(self, "_kind")
        if name == "__class__":
            return kind
        if name == "__torch_function__":  # torch asks, and calls it
            return partial(_refused, self)
        if name in _TOLD and (fake := object.__getattribute__(self, "_fake")) is not None:
            return _TOLD[name](fake)
        if kind in (str, bytes, bool, int, float, type(None), np.ndarray) and not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return _refused(self)

    def __len__(self) -> int:
        fake: Tensor | None = object.__getattribute__(self, "_fake")
        return _refused(self) if fake is None else len(fake)


def as_given(value: Any) -> Any:
    """An argument that is no tensor, as the call has it: for a tensor, the array whose memory that has."""
    return value.numpy() if isinstance(value, Tensor) else value


def contents_of(value: object) -> Tensor | None:
    """Return the traced contents of what stands for an array; None for any other value."""
    return object.__getattribute__(value, "_fake") if type(value) is Unread else None


def _of_array(original: Callable[..., Tensor], data: Any, *rest: Any, **named: Any) -> Tensor:
    """In place of a function that makes a tensor: of an array, a traced one."""
    fake = contents_of(data)
    if fake is None or rest or named.keys() - {"dtype", "device"}:
        return original(data, *rest, **named)
    device = named.get("device") or ("cpu" if original.__name__ == "from_numpy" else torch.get_default_device())
    copy = fake.detach().to(device, named.get("dtype") or fake.dtype)
    return copy.clone() if original.__name__ == "tensor" else copy


def _assignment(as_array: _AsArray, original: Any, cost_matrix: Any, maximize: Any = False) -> Any:
    """`scipy.optimize.linear_sum_assignment`: as many pairs as the matrix has rows, or columns if these are fewer."""
    cost = cost_matrix if isinstance(cost_matrix, Tensor) else contents_of(cost_matrix)
    if cost is None or cost.dim() != 2:
        return original(cost_matrix, maximize)
    refusal = CaptureError(
        "the step reads values of an array that linear_sum_assignment returns while it is being captured",
        "arrays of which it makes tensors: torch.as_tensor, torch.from_numpy",
        "make a tensor of it, and compute with that",
    )
    return tuple(as_array(places, refusal) for places in ASSIGNMENT(cost.detach(), bool(maximize)).unbind())


_ON_HOST: list[tuple[str, str, Callable[..., Any]]] = [("scipy.optimize", "linear_sum_assignment", _assignment)]
"""Functions of arrays, by module and name, with results whose sizes follow from sizes, and the ops in their place."""


def array_functions(as_array: _AsArray) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Functions of arrays, by owner and name, and what runs in their place, in each module that has them by their name.
    `as_array(contents, refusal)` stands for an array that the step computes.
    """
    forms: list[tuple[Any, str, Any]] = [(torch, name, _of_array) for name in ("from_numpy", "as_tensor", "tensor")]
    for owner, name, form in _ON_HOST:
        if (original := getattr(sys.modules.get(owner), name, None)) is not None:
            loaded = [module for module in list[Any](sys.modules.values()) if isinstance(module, ModuleType)]
            forms += [(m, name, partial(form, as_array)) for m in loaded if vars(m).get(name) is original]
    return forms


def _refused(unread: Unread, *_: Any, **__: Any) -> Any:
    place: Location | None = object.__getattribute__(unread, "_place")
    refuse: Callable[[str], NoReturn] = object.__getattribute__(unread, "_refuse")
    return refuse(place.path if place else "")


def place_of(value: object) -> Location | None:
    """Return the place for whose value this stands, else None; an array that the step computes is refused."""
    return (object.__getattribute__(value, "_place") or _refused(value)) if type(value) is Unread else None


_OWN = {"__init__", "__new__", "__class__", "__getattribute__", "__len__", "__init_subclass__", "__subclasshook__"}
_ASKED = {name for kind in (str, bytes, int, float, dict, set, np.ndarray) for name in dir(kind) if name[:2] == "__"}
for _name in (_ASKED | {"__call__", "__fspath__", "__buffer__", "__length_hint__"}) - _OWN:
    setattr(Unread, _name, _refused)


def is_foreign_iterator(value: object) -> bool:
    """Return whether `next` of a value runs code that is not the user's, whose effects a trace does not see.

    An iterator of a user's class is an object like others. A weak proxy of any object has `__next__` too.
    """
    kind: Any = type(value)
    if not issubclass(kind, Iterator) or issubclass(kind, io.IOBase) or leads_to(value) is not None:
        return False
    return not is_own_function(cast(Any, kind).__next__)


class RefusedIterator:
    """Replaces an iterator during a trace and refuses `next`. Attributes are those of the iterator."""

    def __init__(
        self, path: str, original: Any, line: Callable[[], str], refuse: Callable[[CaptureError], NoReturn]
    ) -> None:
        vars(self).update(_path=path, _original=original, _line=line, _refuse=refuse)

    def __iter__(self) -> RefusedIterator:
        return self

    def __next__(self) -> Any:
        error = RefusedError(
            self._path, Words(f"a {type(self._original).__name__}"), Words("the same, one item further"),
            "all later calls would reuse this item", "take the item before the step, and pass it in",
        )  # fmt: skip
        error.where = self._line()
        self._refuse(error)

    def __length_hint__(self) -> int:
        return operator.length_hint(self._original)

    def send(self, value: object) -> Any:
        """Refuse `send` of a generator likewise."""
        return self.__next__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)


def text_of_tensor(line: str) -> str:
    """Return what stands for the value of a tensor in the text that a `line` makes."""
    return f"{_MARK}{line}{_MARK}"


def refuse_tensor_text(value: object) -> None:
    """Raise CaptureError if `value` is text with a `text_of_tensor`."""
    if isinstance(value, str) and _MARK in value:
        raise error_of_text("a tensor", value.split(_MARK)[1])


def is_of_trace(value: object) -> bool:
    """Return whether a value is text of a tensor, or stands for an argument or an iterator."""
    return type(value) in (Unread, RefusedIterator) or (isinstance(value, str) and _MARK in value)


def error_of_text(what: str, line: str = "") -> CaptureError:
    """Return the error for a step that formats `what` in `line`."""
    return CaptureError(
        f"the step formats {what} as text while it is being captured",
        "text of values that are known before the step runs",
        "return the tensor, or format it in a function passed to wholestep.callback",
        line,
    )
