"""Places that a step can read: rows of `places.txt`, and what their expressions name.

A row is `outcome | name | make | read | put | undo`: the object `here`, an expression that reads a number from it, and
a statement that puts `value` there. Outcomes: `right` at once, `refused` at capture, `found` by a later trace.
"""

from __future__ import annotations

import collections
import configparser
import contextlib
import contextvars
import dataclasses
import enum
import functools
import importlib
import itertools
import sqlite3
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

OF_TEXTS = """
    abc argparse array asyncio builtins calendar concurrent.futures copy ctypes datetime decimal faulthandler fractions
    gc hashlib inspect io json linecache logging math mmap multiprocessing operator os pickle queue random re resource
    signal tempfile time tracemalloc uuid warnings weakref zlib xml.etree.ElementTree
"""


class Place(NamedTuple):
    """A row: the outcome, a name, and texts of Python."""

    outcome: str
    name: str
    make: str
    read: str
    put: str
    undo: str = "None"

    def functions(self, folder: Path) -> tuple[Callable[[], Any], Callable[[float], Any], Callable[[], Any]]:
        """Functions of this module that read the number, put another one there, and clean up."""
        here = sys.modules[__name__]
        for name in OF_TEXTS.split():
            vars(here)[name.partition(".")[0]] = importlib.import_module(name.partition(".")[0])
            importlib.import_module(name)
        scope = vars(here)
        scope.update(FOLDER=folder, np=importlib.import_module("numpy"))
        source = f"def make():\n return {self.make}\ndef steps(here):\n def read():\n  return {self.read}\n"
        source += f" def put(value):\n  {self.put}\n def undo():\n  {self.undo}\n return read, put, undo"
        exec(compile(source, __file__, "exec"), scope)
        return scope["steps"](scope["make"]())


def _rows() -> dict[str, Place]:
    lines = Path(__file__).with_suffix(".txt").read_text().splitlines()
    return {place.name: place for place in (Place(*line.split(" | ")) for line in lines)}


class Plain:
    value = 1.0


class Slotted:
    __slots__ = ("value",)


class Descriptor:
    def __init__(self) -> None:
        self.held = {"value": 1.0}

    def __get__(self, owner: Any, kind: Any) -> float:
        return self.held["value"]


class WithDescriptor:
    value = Descriptor()


class WithMeta(type):
    value = 1.0


class OfMeta(metaclass=WithMeta):
    pass


class Computed:
    def __init__(self) -> None:
        self.__dict__["held"] = [1.0]

    def __getattr__(self, name: str) -> Any:
        return self.held[0]


class Mapping(collections.UserDict):  # type: ignore[type-arg]
    pass


class Sized:
    def __init__(self) -> None:
        self.size = 1

    def __len__(self) -> int:
        return int(self.size)


class Level(enum.Enum):
    LOW = 1


class Everywhere:
    def __getattribute__(self, name: str) -> Any:
        return HELD["value"]


class Absent(dict[str, float]):
    value = 1.0

    def __missing__(self, key: str) -> float:
        return self.value


class OfValue:
    shared = 1.0

    def __init__(self, value: float) -> None:
        self.value = value

    def get(self) -> float:
        return self.value

    @property
    def half(self) -> float:
        return self.value / 2

    @functools.cached_property
    def kept(self) -> float:
        return 1.0

    @staticmethod
    def fixed() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return cls.shared

    def by(self, times: float) -> float:
        return self.value * times

    scaled = functools.partialmethod(by, 2.0)

    def __call__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return self.value == 1.0

    def __contains__(self, item: float) -> bool:
        return item == self.value

    def __float__(self) -> float:
        return float(self.value)

    def __iter__(self) -> Any:
        return iter([self.value])

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __hash__(self) -> int:
        return int(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __enter__(self) -> float:
        return self.value


class Point(NamedTuple):
    x: float
    y: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Changing:
    value: Any


@dataclasses.dataclass(slots=True)
class Thin:
    value: Any


CONTEXT = contextvars.ContextVar("context", default=1.0)
LOCAL = threading.local()
OPTIONS = {"value": 1.0}
HELD = {"value": 1.0}
KEPT: list[Any] = []


def function() -> float:
    return 1.0


def with_default(value: float = 1.0) -> float:
    return value


def with_keyword(*, value: float = 1.0) -> float:
    return value


def HELPER() -> float:
    return 1.0


def counted() -> Any:
    return itertools.count(1)


def of_own(kind: type) -> Any:
    return type("Own", (kind,), {})


def of_code() -> Any:
    return lambda: 1.0


def nested() -> tuple[Callable[[], float], Callable[[float], None]]:
    value = 1.0

    def put(new: float) -> None:
        nonlocal value
        value = new

    return lambda: (lambda: (lambda: value)())(), put


@contextlib.contextmanager
def manager() -> Any:
    yield HELD["value"]


def entered(manage: Any) -> float:
    with manage() as value:
        return value


def parser() -> configparser.ConfigParser:
    made = configparser.ConfigParser()
    made.read_dict({"a": {"b": "1.0"}})
    return made


def database() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    made.executescript("create table t (v real); insert into t values (1.0)")
    return made


def a_module(get: Any = None) -> types.ModuleType:
    made = sys.modules["a_module"] = types.ModuleType("a_module")
    vars(made).update({"__getattr__": get} if get else {"value": 1.0})
    return made


def imported() -> float:
    import a_module

    return a_module.value


def holding(tensor: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.register_buffer("held", tensor)
    return made


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)


def pair() -> Any:
    ctypes = importlib.import_module("ctypes")
    return type("Pair", (ctypes.Structure,), {"_fields_": [("value", ctypes.c_double)]})(1.0)


PLACES = _rows()
