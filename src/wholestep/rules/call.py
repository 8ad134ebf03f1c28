"""One call of an op as rules see it: arguments and outputs, with metadata in place of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .. import _torch
from ..graph import meta
from ..graph.meta import TensorMeta

_UNKNOWN = TensorMeta((), (), torch.float32, "cpu")


@dataclass(frozen=True)
class Slot:
    """A tensor argument of the schema, with the positions of its tensors among the operands; none for None."""

    name: str
    positions: tuple[int, ...]
    is_list: bool


@dataclass(frozen=True)
class Call:
    """An op with global shapes. `operands` are its tensors in argument order, lists flattened."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorMeta | None, ...]

    @staticmethod
    def of(node: Node) -> Call:
        """The call of `node`."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: cast(Any, meta.tensor(n) or _UNKNOWN))
        return Call(node.target, args, kwargs, meta.tensors(node))

    @staticmethod
    def on(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], returned: Any) -> Call:
        """The call `target(*args, **kwargs)` on real or fake tensors, which gave `returned`."""
        inputs, named, outs = _torch.tree_map_only(torch.Tensor, meta.meta_of, (tuple(args), dict(kwargs), returned))
        return Call(target, inputs, named, tuple(m if isinstance(m, TensorMeta) else None for m in opened([outs])))

    @cached_property
    def operands(self) -> tuple[TensorMeta, ...]:
        """Tensors among the arguments, in order."""
        return tuple(v for v in opened([*self.args, *self.kwargs.values()]) if isinstance(v, TensorMeta))

    def shape(self, operand: int) -> tuple[int, ...]:
        """Shape of the tensor at a position among `operands`."""
        return self.operands[operand].shape

    def made(self, output: int = 0) -> tuple[int, ...]:
        """Shape of an output; () if it is no tensor."""
        tensor = self.outputs[output] if output < len(self.outputs) else None
        return tensor.shape if tensor else ()

    def sizes(self, terms: Mapping[int, Sequence[str | None]]) -> dict[str, int]:
        """Size of each factor in the terms of operands."""
        return {f: n for i, term in terms.items() for f, n in zip(term, self.shape(i), strict=True) if f}

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Tensor arguments in the order of the schema; all tensors of a plain function."""
        at, slots = 0, dict[str, Slot]()
        for name, value in (*zip(self._names(len(self.args)), self.args, strict=False), *self.kwargs.items()):
            count = sum(isinstance(v, TensorMeta) for v in opened([value]))
            slots[name] = Slot(name, tuple(range(at, at + count)), isinstance(value, (list, tuple)))
            at += count
        arguments = _arguments(self.target)
        if not arguments:
            return tuple(slot for slot in slots.values() if slot.positions)
        return tuple(slots.get(a.name, Slot(a.name, (), False)) for a in arguments if "Tensor" in str(a.type))

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of a schema argument, or its default."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = self._names(len(self.args))
        if name in names:
            return self.args[names.index(name)]
        for parameter in _arguments(self.target):
            if parameter.name == name and parameter.has_default_value():
                return parameter.default_value
        return default

    def replace(self, values: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        """`args` and `kwargs` with the schema arguments in `values` replaced."""
        out, keyed = list(args), dict(kwargs)
        names = self._names(len(args))
        for name, value in values.items():
            if name in names and name not in keyed:
                out[names.index(name)] = value
            else:
                keyed[name] = value
        return tuple(out), keyed

    def _names(self, count: int) -> list[str]:
        names = [a.name for a in _arguments(self.target)]
        return names[:count] if names else [f"arg{i}" for i in range(count)]


def _arguments(target: Any) -> Sequence[Any]:
    return _torch.schema_of(target).arguments if _torch.is_op(target) else ()


def opened(values: Iterable[Any]) -> Iterator[Any]:
    """Values, lists flattened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from opened(cast(Sequence[Any], value))
        else:
            yield value
