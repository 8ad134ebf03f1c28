"""What a step reads from anywhere is right in each call, or found by call 8: a trace is repeated and compared."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import fractions
import functools
import gc
import importlib
import itertools
import mmap
import os
import queue
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wholestep as ws

CALLS = 9
USED = ["builtins", "calendar", "decimal", "fractions", "inspect", "linecache", "signal"]  # by the texts below
Kind = tuple[Callable[[], Any], Callable[[float], Any]]
KINDS: dict[str, Callable[[Path], Kind]] = {}


def kind(make: Callable[[Path], Kind]) -> Callable[[Path], Kind]:
    """A place: `make(folder)` returns a function that reads a number from it, and one that puts a number there."""
    KINDS[make.__name__] = make
    return make


def stated(name: str, make: Callable[[], Any], read: str, put: str) -> None:
    """A kind of which `make()` is the object `here`, read by an expression and set by a statement with `value`."""

    def kind(folder: Path) -> Kind:
        here = make()
        modules = {name: importlib.import_module(name) for name in USED}
        scope: dict[str, Any] = {"here": here, **modules, **globals()}
        source = f"def read():\n return {read}\ndef put(value):\n {put}"
        exec(compile(source, __file__, "exec"), scope)
        return scope["read"], scope["put"]

    KINDS[name] = kind


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


CONTEXT = contextvars.ContextVar("context", default=1.0)
LOCAL = threading.local()
OPTIONS = {"value": 1.0}


def function() -> float:
    return 1.0


def with_default(value: float = 1.0) -> float:
    return value


def counted() -> Any:
    return itertools.count(1)


stated("an attribute", Plain, "here.value", "here.value = value")
stated("an attribute of a class", lambda: Plain, "here.value", "here.value = value")
stated("a slot", lambda: setattr(s := Slotted(), "value", 1.0) or s, "here.value", "here.value = value")
stated("a descriptor", WithDescriptor, "here.value", "type(here).__dict__['value'].held['value'] = value")
stated("an attribute of a metaclass", lambda: OfMeta, "here.value", "type(here).value = value")
stated("__getattr__", Computed, "here.anything", "here.held[0] = value")
stated("a UserDict", lambda: Mapping(value=1.0), "here['value']", "here['value'] = value")
stated("a ChainMap", lambda: collections.ChainMap({}, {"value": 1.0}), "here['value']", "here.maps[1]['value'] = value")
stated("an OrderedDict", lambda: collections.OrderedDict(value=1.0), "here['value']", "here['value'] = value")
stated("a Counter", lambda: collections.Counter(a=1), "float(here['a'])", "here['a'] = int(value)")
stated("a deque", lambda: collections.deque([1.0]), "here[0]", "here[0] = value")
stated("a set", lambda: {1.0}, "max(here)", "here.clear(); here.add(value)")
stated("a bytearray", lambda: bytearray(b"\1"), "float(here[0])", "here[0] = int(value)")
stated("a memoryview", lambda: memoryview(bytearray(b"\1")), "float(here[0])", "here[0] = int(value)")
stated("an array", lambda: array.array("d", [1.0]), "here[0]", "here[0] = value")
stated("an array of numpy", lambda: np.ones(2), "float(here[0])", "here[:] = value")
stated("a record of numpy", lambda: np.ones(1, [("a", "f8")]), "float(here['a'][0])", "here['a'] = value")
stated("a structure of ctypes", lambda: ctypes.c_double(1.0), "here.value", "here.value = value")
stated("an mmap", lambda: mmap.mmap(-1, 8), "float(here[0]) + 1", "here[0] = int(value)")
stated("a context variable", lambda: CONTEXT, "here.get()", "here.set(value)")
stated("an attribute of a thread", lambda: setattr(LOCAL, "value", 1.0) or LOCAL, "here.value", "here.value = value")
stated("an event", threading.Event, "2.0 if here.is_set() else 1.0", "here.set() if int(value) % 2 else here.clear()")
stated("a lock", threading.Lock, "2.0 if here.locked() else 1.0", "here.release() if here.locked() else here.acquire()")
stated("a semaphore", lambda: threading.Semaphore(1), "float(here._value)", "here.release()")
stated("a queue", queue.Queue, "here.qsize() + 1.0", "here.put(value)")
stated("a queue's item", lambda: queue.deque([1.0]), "here[-1]", "here.append(value)")
stated(
    "a partial with a dict",
    lambda: functools.partial(dict, value=1.0),
    "here()['value']",
    "here.keywords['value'] = value",
)
stated(
    "an attribute of a function",
    lambda: setattr(function, "value", 1.0) or function,
    "here.value",
    "here.value = value",
)
stated("a default", lambda: with_default, "here()", "here.__defaults__ = (value,)")
stated("a namespace", lambda: types.SimpleNamespace(value=1.0), "here.value", "here.value = value")
stated("a module", lambda: setattr(m := types.ModuleType("m"), "value", 1.0) or m, "here.value", "here.value = value")
stated("a weak reference", lambda: (weakref.ref(p := Plain()), p), "here[0]().value", "here[1].value = value")
stated(
    "a weak dict",
    lambda: (weakref.WeakValueDictionary(a=(p := Plain())), p),
    "here[0]['a'].value",
    "here[1].value = value",
)
stated("a mapping proxy", lambda: (types.MappingProxyType(d := {"v": 1.0}), d), "here[0]['v']", "here[1]['v'] = value")
stated("a global", lambda: None, "OPTIONS['value']", "OPTIONS['value'] = value")
stated("globals()", lambda: None, "globals().get('BY_NAME', 1.0)", "globals()['BY_NAME'] = value")
stated("builtins", lambda: None, "getattr(builtins, 'a_value', 1.0)", "builtins.a_value = value")
stated(
    "sys.argv",
    lambda: None,
    "float(sys.argv[-1]) if sys.argv[-1][:1].isdigit() else 1.0",
    "sys.argv.append(str(value))",
)
stated("an attribute of sys", lambda: None, "getattr(sys, 'a_value', 1.0)", "sys.a_value = value")
stated(
    "the recursion limit", lambda: None, "sys.getrecursionlimit() / 1000", "sys.setrecursionlimit(int(1000 + value))"
)
stated("the environment", lambda: None, "float(os.environ.get('A_VALUE', 1))", "os.environ['A_VALUE'] = str(value)")
stated(
    "the environment by getenv", lambda: None, "float(os.getenv('A_VALUE', 1))", "os.environ['A_VALUE'] = str(value)"
)
stated("the working directory", lambda: None, "float(len(os.getcwd()))", "os.chdir('/' if int(value) % 2 else '/tmp')")
stated(
    "the precision of decimals",
    lambda: None,
    "float(decimal.getcontext().prec)",
    "decimal.getcontext().prec = int(value)",
)
stated("a fraction", lambda: [fractions.Fraction(1)], "float(here[0])", "here[0] = fractions.Fraction(value)")
stated("the first weekday", lambda: None, "calendar.firstweekday() + 1.0", "calendar.setfirstweekday(int(value) % 7)")
stated(
    "the threshold of gc",
    lambda: None,
    "float(gc.get_threshold()[1])",
    "gc.set_threshold(gc.get_threshold()[0], int(10 + value))",
)
stated(
    "filters of warnings", lambda: None, "float(len(warnings.filters))", "warnings.filters.append(warnings.filters[0])"
)
stated(
    "the cache of lines",
    lambda: None,
    "float(len(linecache.cache) + 1)",
    "linecache.cache[str(value)] = (1, None, [], '')",
)
stated(
    "a handler of signals",
    lambda: None,
    "float(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN) + 1",
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
)
stated("torch's threads", lambda: None, "torch.get_num_threads() * 1.0", "torch.set_num_threads(int(value) % 2 + 1)")
stated(
    "a flag of torch",
    lambda: None,
    "float(torch.backends.cudnn.benchmark) + 1",
    "torch.backends.cudnn.benchmark = bool(int(value) % 2)",
)
stated("the default device", lambda: None, "float(len(str(torch.get_default_device())))", "None")
stated(
    "a member of an enum",
    lambda: Level,
    "float(here.LOW.weight) if hasattr(here.LOW, 'weight') else 1.0",
    "here.LOW.weight = value",
)
stated("the length of an object", Sized, "float(len(here))", "here.size = value")
stated(
    "a generator's frame",
    lambda: (g := (i for i in range(99)), next(g)),
    "here[0].gi_frame.f_locals['i'] + 1.0",
    "next(here[0])",
)
stated("a counter of itertools", counted, "float(here.__reduce__()[1][0])", "next(here)")
stated(
    "a signature",
    lambda: with_default,
    "inspect.signature(here).parameters['value'].default",
    "here.__defaults__ = (value,)",
)
stated("attributes of a tensor", lambda: torch.ones(1), "getattr(here, 'weight', 1.0)", "here.weight = value")
stated("a closed-over tensor", lambda: torch.ones(1), "here", "here.fill_(value)")
stated(
    "an attribute of a parameter",
    lambda: nn.Parameter(torch.ones(1)),
    "getattr(here, 'weight', 1.0)",
    "here.weight = value",
)


@kind
def a_file(folder: Path) -> Kind:
    return lambda: 2.0 if (folder / "stop").exists() else 1.0, lambda value: (folder / "stop").touch()


@kind
def a_folder(folder: Path) -> Kind:
    return lambda: 1.0 + os.path.getsize(folder / "a"), lambda value: (folder / "a").write_text("x" * int(value))


@kind
def a_closure_of_a_closure(folder: Path) -> Kind:
    value = 1.0

    def read() -> float:
        return (lambda: (lambda: value)())()

    def put(new: float) -> None:
        nonlocal value
        value = new

    return read, put


@pytest.mark.parametrize("name", KINDS)
def test_no_place_that_a_step_reads_is_silently_stale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x")
    backends = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(backends, "__allow_nonbracketed_mutation_flag", True)  # torch.testing clears it for ever
    before = os.getcwd(), sys.getrecursionlimit(), gc.get_threshold(), [*sys.argv], [*warnings.filters]
    read, put = KINDS[name](tmp_path)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) * read()).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled, x = ws.compile(step, verify=True), torch.ones(2, 2)
    wrong = list[int]()
    try:
        for call in range(CALLS):
            expected = (model(x) * read()).sum().item()
            if compiled(x).item() != pytest.approx(expected, rel=1e-5):
                wrong.append(call)
            put(2.0 + call)
        assert wrong == []
    except ws.WholestepError:
        assert call < 8
    finally:
        os.chdir(before[0])
        sys.setrecursionlimit(before[1])
        gc.set_threshold(*before[2])
        sys.argv[:], warnings.filters[:] = before[3], before[4]
        os.environ.pop("A_VALUE", None)
        torch.set_num_threads(1)
