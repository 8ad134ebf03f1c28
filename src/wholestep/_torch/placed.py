"""A tensor of the user's that becomes a DTensor, as the same object.

A DTensor has slots that the object has no memory for, and Python changes the class of an object only to one of the same
layout. So the object gets what torch has of the DTensor, and a class of its own layout that hands ops to a DTensor with
the same local tensor. What only the DTensor's slots hold is beside the attributes of the object.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
from collections import OrderedDict
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..errors import StateError
from .held import move_hooks
from .undo import undo

_CLASS, _DICT = vars(object)["__class__"], vars(Tensor)["__dict__"]
_DATA = cast(Any, Tensor.data)


class Attributes(dict[str, Any]):
    """The `__dict__` of a tensor, with `notes` of wholestep that are no attributes, and the slots of a DTensor."""

    __slots__ = ("_local_tensor", "_spec", "kind", "notes")

    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__(attributes)
        self.notes = dict[str, Any]()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # of a pickled tensor, which any program reads


def notes_of(tensor: Tensor) -> dict[str, Any]:
    """What wholestep has noted of a tensor, to be read and written; no copy of the tensor has it."""
    return _attributes(tensor).notes


def _attributes(tensor: Any) -> Attributes:
    table = _DICT.__get__(tensor)
    if type(table) is not Attributes:
        table = Attributes(table)
        _DICT.__set__(tensor, table)
    return table


def _of_slot(name: str) -> Any:
    def put(tensor: Any, value: Any) -> None:
        setattr(_attributes(tensor), name, value)

    return property(lambda tensor: getattr(_attributes(tensor), name), put)


class Placed:
    """What the class of a tensor that became a DTensor has before the user's own class."""

    __slots__ = ()
    _local_tensor, _spec, _kind = map(_of_slot, ("_local_tensor", "_spec", "kind"))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pairs = dict[int, tuple[DTensor, Any]]()

        def dtensor_of(tensor: Any) -> DTensor:
            if id(tensor) not in pairs:
                pairs[id(tensor)] = tensor._kind(tensor._local_tensor, tensor._spec, requires_grad=False), tensor
            return pairs[id(tensor)][0]

        args, kwargs = tree_map_only(Placed, dtensor_of, (args, kwargs or {}))
        kinds: list[Any] = [type(dtensor) for dtensor, _ in pairs.values() if type(dtensor) is not DTensor]
        dispatch = kinds[0].__torch_dispatch__ if kinds else None
        result = dispatch(func, types, args, kwargs) if dispatch else func(*args, **kwargs)
        back = {id(dtensor): tensor for dtensor, tensor in pairs.values()}
        return tree_map_only(Tensor, lambda tensor: back.get(id(tensor), tensor), result)

    def __getattr__(self, name: str) -> Any:
        return inspect.getattr_static(self._kind, name).__get__(self, self._kind)  # a method or property of DTensor

    def __repr__(self) -> str:
        return self._kind.__repr__(self)

    def __tensor_flatten__(self) -> Any:
        return self._kind.__tensor_flatten__(self)

    __tensor_unflatten__ = staticmethod(cast(Any, DTensor).__tensor_unflatten__)

    def __deepcopy__(self, memo: Any) -> Any:
        tensor = cast(Any, self)
        with torch.inference_mode(False):
            copy = content = nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
            if type(self).__bases__[1] is not nn.Parameter:
                become(copy := like(tensor, torch.empty(0), False), content, "a copy")
        memo[id(self)] = copy
        return copy

    def _set_class(self, kind: Any) -> None:
        if not issubclass(kind, DTensor):  # as `torch.utils.swap_tensors` does with the class of another DTensor
            _CLASS.__set__(self, kind)

    def _set_attributes(self, attributes: dict[str, Any]) -> None:
        if attributes is not (table := _attributes(self)) and attributes.keys() != {"_is_param"}:  # of `swap_tensors`
            table.clear()
            table.update(attributes)

    def _set_data(self, value: Any) -> None:
        if not isinstance(value, DTensor):
            problem = f"`.data` of a parameter that ranks share becomes a {type(value).__name__}"
            raise StateError(problem, "a DTensor", "write a whole tensor inside of `with ws.whole(...)`")
        self._local_tensor, self._spec = value._local_tensor, value._spec
        _DATA.__set__(self, value)

    __class__: Any = property(lambda self: self._kind, _set_class)
    __dict__: Any = property(_attributes, _set_attributes)
    data = property(_DATA.__get__, _set_data)


@cache
def _placed_class(kind: Any, dtensor: Any) -> type:
    """A class of the layout of `kind` for tensors that became a `dtensor`."""
    about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    function = inspect.getattr_static(dtensor, "__torch_function__")
    return type(kind)(kind.__name__, (Placed, kind), {"__slots__": (), "__torch_function__": function, **about})


def like(tensor: Tensor, value: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter with this value, of the class that the user gave `tensor`."""
    kind = cast(Any, type(tensor).__bases__[1] if isinstance(tensor, Placed) else type(tensor))
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter) or type(value) is not Tensor:
        return nn.Parameter(value, requires_grad=requires_grad)
    return Tensor._make_subclass(kind, value, requires_grad)


def become(original: Tensor, content: Tensor, name: str) -> None:
    """Let a tensor have the values, the gradient and the layout of `content`, which nobody uses any more, as the same
    object with the same hooks. A graph that has the values of before cannot run backward.
    """

    def refuse(*_: Any) -> None:
        problem = f"a backward reaches {name!r} as it was before a compiled step placed it"
        raise StateError(problem, "a graph of its values now", "compute the loss again, after the first call")

    move_hooks(original, content)
    if original.requires_grad and original.is_leaf:
        torch.autograd.graph.get_gradient_edge(original).node.register_prehook(refuse)
    torch._C._swap_tensor_impl(original, content)
    if isinstance(content, DTensor):
        table = _attributes(original)
        table._local_tensor, table._spec, table.kind = content._local_tensor, content._spec, type(content)
        _CLASS.__set__(original, _placed_class(type(original), type(content)))


def holder_of_local(tensor: Any) -> Any:
    """Return what has the local tensor of a DTensor as an attribute that is read quickly."""
    return _attributes(tensor) if isinstance(tensor, Placed) else tensor


def as_before(tensor: Tensor) -> None:
    """Give a tensor that became a DTensor the user's class, until the end of the innermost `undone`."""
    if isinstance(tensor, Placed):
        undo(_CLASS.__set__, tensor, kind := cast(Any, type(tensor)))
        _CLASS.__set__(tensor, kind.__bases__[1])
