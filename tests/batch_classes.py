"""Classes whose objects people give to a step as a batch: each holds `x` and `y`, a number `k` and a `name`."""

import abc
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Plain:
    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self.x, self.y, self.k, self.name = x, y, k, name

    def to(self, device: str) -> "Plain":
        return Plain(self.x.to(device), self.y.to(device), self.k, self.name)


class Slotted:
    __slots__ = ("__hidden", "k", "name", "x")

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self.x, self.k, self.name, self.__hidden = x, k, name, y

    @property
    def y(self) -> Tensor:
        return self.__hidden


class SlottedBelow(Slotted):
    """Has slots and a `__dict__`."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        super().__init__(x, y, k, name)
        self.seen = [x]


class Hidden:
    """Properties over private fields; it answers no other name."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self._fields = {"x": x, "y": y, "k": k, "name": name}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_fields"][name]


class Raising(Plain):
    """Raises where someone asks whether it has an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"nobody may ask for {name}")


class EasyDict(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # pyright: ignore[reportAssignmentType]


class EasyDictOfAttributes(dict[str, Any]):
    """Each item is an attribute too, as in `ModelOutput`."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


class Rows(list[Any]):
    x = property(lambda self: self[0])
    y = property(lambda self: self[1][0])
    k = property(lambda self: self[2])


class Encoding(collections.UserDict[str, Any]):
    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])
    k = property(lambda self: self["k"])


class Listed(collections.UserList[Any]):
    x, y, k = (property(lambda self, i=i: self[i]) for i in range(3))


class Store(dict[str, Any]):
    pass


class Graph:
    """As torch_geometric has it: `__getattr__` reads a store, which knows its parent."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self.__dict__["_store"] = Store(x=x, y=y, k=k, name=name)
        self.__dict__["_store"].__dict__["parent"] = self

    def __getattr__(self, name: str) -> Any:
        if "_store" not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__["_store"][name]


class Boxes:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Instances:
    """As detectron2 has it: fields of classes of their own, an image size."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self._image_size, self._fields = (4, 3), collections.OrderedDict(boxes=Boxes(x), classes=[{"y": Boxes(y)}])
        self.k, self.file_name = k, name

    x = property(lambda self: self._fields["boxes"].tensor)
    y = property(lambda self: self._fields["classes"][0]["y"].tensor)


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    k: float
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor
    k: float
    name: str


class Named(NamedTuple):
    x: Tensor
    y: Tensor
    k: float
    name: str


class NamedBelow(Named):
    def scaled(self) -> Tensor:
        return self.x * self.k


class Queue(collections.deque[Any]):
    x, y, k = (property(lambda self, i=i: self[i]) for i in range(3))


class Chain(collections.ChainMap[str, Any]):
    x = property(lambda self: self["x"])
    y = property(lambda self: self["y"])
    k = property(lambda self: self["k"])


class Shown(Plain):
    """Shows what dicts have, in a proxy and views."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self.proxy = types.MappingProxyType({"x": x, "name": name})
        self.values, self.items, self.keys = {"y": y}.values(), {"k": k}.items(), {y: name}.keys()

    x = property(lambda self: self.proxy["x"])
    y = property(lambda self: next(iter(self.values if next(iter(self.keys)) is not None else ())))
    k = property(lambda self: dict(self.items)["k"])


class Pinned(Plain):
    """Copies are made by its own code, which counts."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        super().__init__(x, y, k, name)
        self.parts, self.this = (x, (y,), {"k": k}), self


class Arrays(Plain):
    """Its tensors are arrays of numpy."""

    def __init__(self, x: Tensor, y: Tensor, k: float, name: str) -> None:
        self.arrays, self.k, self.name = {"x": x.numpy(), "y": y.numpy()}, k, name

    x = property(lambda self: torch.from_numpy(self.arrays["x"]))
    y = property(lambda self: torch.as_tensor(self.arrays["y"]))


def _of_items(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, k, name: kind(x=x, y=y, k=k, name=name)


CLASSES: dict[str, Callable[[Tensor, Tensor, float, str], Any]] = {
    "plain": Plain,
    "made by code of Python": abc.ABCMeta("Made", (Plain,), {}),
    "slots": Slotted,
    "slots and a dict": SlottedBelow,
    "answers names": Hidden,
    "raises": Raising,
    "EasyDict": _of_items(EasyDict),
    "items and attributes": _of_items(EasyDictOfAttributes),
    "list": lambda x, y, k, name: Rows([x, (y,), k, name]),
    "UserDict": lambda x, y, k, name: Encoding({"x": x, "y": y, "k": k, "name": name}),
    "UserList": lambda x, y, k, name: Listed([x, y, k, name]),
    "graph": Graph,
    "instances": Instances,
    "dataclass": Record,
    "frozen": Frozen,
    "namedtuple": Named,
    "below a namedtuple": NamedBelow,
    "deque": lambda x, y, k, name: Queue([x, y, k, name]),
    "ChainMap": lambda x, y, k, name: Chain({"x": x}, {"y": y, "k": k, "name": name}),
    "proxy and views": Shown,
    "namespace": _of_items(types.SimpleNamespace),
    "refers to itself": Pinned,
    "arrays": Arrays,
}
