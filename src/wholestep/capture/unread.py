"""What stands, while a step is traced, for an argument whose values differ between calls and that is no number.

A trace in which nobody asks it for anything proves that the step does not read the argument: its value is not compared
from then on. Who asks is refused, and the step is captured for the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .. import _torch
from .locations import Location

_TOLD: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: tuple(t.shape), "ndim": Tensor.dim, "size": Tensor.numel,
    "dtype": lambda t: np.dtype(str(t.dtype).removeprefix("torch.")),
}  # of an array  # fmt: skip


class Unread(_torch.StandIn):
    """In place of the value of the class `kind` at a `place` of the arguments, for an object of which it passes. `fake`
    has the contents of an array.
    """

    __slots__ = ("_fake", "_kind", "_place", "_refuse")

    def __init__(self, kind: type, place: Location, refuse: Callable[[str], NoReturn], fake: Tensor | None) -> None:
        for name, value in (("_kind", kind), ("_place", place), ("_refuse", refuse), ("_fake", fake)):
            object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        kind: type = object.__getattribute__(self, "_kind")
        if name == "__class__":
            return kind
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


def _of_array(original: Callable[..., Tensor], data: Any, *rest: Any, **named: Any) -> Tensor:
    """In place of a function that makes a tensor: of an array, a traced one."""
    fake: Tensor | None = object.__getattribute__(data, "_fake") if type(data) is Unread else None
    if fake is None or rest or named.keys() - {"dtype", "device"}:
        return original(data, *rest, **named)
    device = named.get("device") or ("cpu" if original.__name__ == "from_numpy" else torch.get_default_device())
    made = fake.detach().to(device, named.get("dtype") or fake.dtype)
    return made.clone() if original.__name__ == "tensor" else made


OF_ARRAYS = [(torch, name, _of_array) for name in ("from_numpy", "as_tensor", "tensor")]


def _refused(unread: Unread, *_: Any, **__: Any) -> Any:
    place: Location = object.__getattribute__(unread, "_place")
    refuse: Callable[[str], NoReturn] = object.__getattribute__(unread, "_refuse")
    return refuse(place.path)


def place_of(value: object) -> Location | None:
    """Return the place for whose value this stands; None for any other value."""
    return object.__getattribute__(value, "_place") if type(value) is Unread else None


_OWN = {"__init__", "__new__", "__class__", "__getattribute__", "__len__", "__init_subclass__", "__subclasshook__"}
_ASKED = {name for kind in (str, bytes, int, float, dict, set, np.ndarray) for name in dir(kind) if name[:2] == "__"}
for _name in (_ASKED | {"__call__", "__fspath__", "__buffer__", "__length_hint__"}) - _OWN:
    setattr(Unread, _name, _refused)
