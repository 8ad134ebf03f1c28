"""The user's own tensors while a step is traced: Python sees them, and torch computes with fake tensors in their place.

Modules, optimizers and arguments keep the tensors that the user made, so that identity, type, attributes and whatever
else Python asks of them are what they are in an uncompiled step, and other threads meet no fake tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, cast

import torch

from .. import _torch
from ..errors import CaptureError
from .host_numbers import parts_of
from .reachable import Container
from .state import tensor_attributes


class OwnTensors:
    """The tensors of one trace by identity, each with the fake tensor that torch gets in its place.

    A real tensor is never computed with: what reaches torch past its function modes is exchanged where it enters
    (`entrances`), or at the latest where an op is recorded (`at_op`).
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line  # of the user's, that runs
        self._fakes: dict[int, torch.Tensor] = {}
        self._own: dict[int, torch.Tensor] = {}  # by the identity of the fake
        self._names: dict[int, str] = {}
        self._batch: list[torch.Tensor] = []

    def put(self, name: str, original: torch.Tensor, fake: torch.Tensor, of_batch: bool = False) -> None:
        """Let `fake` stand for the tensor `own`, which has the input `name`."""
        _torch.shown_to_user(fake)
        _torch.without_address(fake)
        self._batch += [original] * of_batch
        self._fakes[_torch.identity(original)], self._own[_torch.identity(fake)] = fake, original
        vars(fake).update({key: v for key, v in tensor_attributes(original).items() if not hasattr(fake, key)})
        self._names[_torch.identity(original)] = self._names[_torch.identity(fake)] = name

    def name_of(self, tensor: object) -> str | None:
        """Return the input that a tensor of the user's, or its fake, is; None for any other value."""
        return self._names.get(_torch.identity(tensor))

    def of(self, tensor: Any) -> Any:
        """Return the user's tensor where `made` is its fake; any other value unchanged."""
        return self._own.get(_torch.identity(tensor), tensor)

    def fake_of(self, value: Any) -> Any:
        """Exchange the user's tensors in a value, and inside lists, tuples, dicts and slices, for their fakes."""
        kind = _kind(value)
        if kind in _NEVER:
            return value
        fake = self._fakes.get(_torch.identity(value))
        if fake is not None:
            return fake
        if issubclass(kind, (tuple, list)):
            items: list[Any] = [self.fake_of(item) for item in value]
            if all(map(is_, items, value)):
                return value
            make: Any = cast(Any, kind)
            return make(*items) if hasattr(make, "_fields") else make(items)
        if kind is dict:
            fakes = self.named(value)
            return value if all(map(is_, fakes.values(), value.values())) else fakes  # what is called may write to it
        if kind is slice:
            return slice(*(self.fake_of(part) for part in (value.start, value.stop, value.step)))
        return value

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Exchange the user's tensors in a dict for their fakes."""
        return {key: self.fake_of(value) for key, value in values.items()}

    def attributes(self) -> list[Container]:
        """The attributes that no call repeats: those of batch tensors, and those of the fakes that a Function has."""
        tensors = [("tensor", tensor) for tensor in self._batch] + [("fake", fake) for fake in self._fakes.values()]
        return [
            Container(self._names[_torch.identity(t)], vars(t), style, refused=_NOT_CARRIED) for style, t in tensors
        ]

    def entrances(self) -> AbstractContextManager[None]:
        """Exchange tensors inside this context where torch takes them without asking its function modes."""

        def enter(original: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*_torch.shown_to_user(self.fake_of(args)), **self.named(kwargs))

        return _torch.entrances_replaced(enter)

    def at_op(self, op: object, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Exchange tensors in the arguments of an op that is recorded; CaptureError if a gradient would be lost."""
        if torch.is_grad_enabled():
            for value in parts_of((args, *kwargs.values())):
                if _torch.identity(value) in self._fakes and value.requires_grad:
                    raise CaptureError(
                        f"{op} takes {self.name_of(value)!r} past torch's Python functions, so that its gradient "
                        "would be lost",
                        "operations that torch's function modes see (torch.*, tensors' methods, torch.ops)",
                        "register the operation with torch.library.custom_op, or call it outside the step",
                        self._line(),
                    )
        return self.fake_of(args), self.named(kwargs)


_NOT_CARRIED = (
    "attributes of this tensor are not carried from call to call",
    "store it in optimizer.state, in a module or as an attribute of a parameter",
)
_NEVER = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, *_torch.FAKE_TYPES})
_kind: Callable[[Any], Any] = type
