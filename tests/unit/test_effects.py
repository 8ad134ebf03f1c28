"""What Python does around the tensors: every kind is done in each call as eager does it, or refused with the line."""

import dataclasses
import datetime
import functools
import gc
import importlib
import logging
import math
import os
import queue
import random
import re
import secrets
import subprocess
import sys
import threading
import time
import types
import uuid
import warnings
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date as Date
from enum import Enum
from functools import partial
from os import urandom as system_bytes
from pathlib import Path
from time import monotonic as seconds_since_start
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import manual_seed, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import manual_seed_all
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import wholestep as ws

CALLS = 6
SYSTEM = random.SystemRandom()
LOG = logging.getLogger("a step")
CONTEXT: ContextVar[int] = ContextVar("context", default=0)


def halve_gradient(param: torch.Tensor) -> None:
    param.grad.mul_(0.5)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 4, generator=generator) for _ in range(CALLS)]


class World:
    """A trainer with a model, an optimizer, and places for anything else."""

    def __init__(self, optimizer: Callable[..., Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2))
        make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        self.optimizer = make(self.model.parameters())
        self.n = 0
        self.scale = 1.0

    def update(self, x: torch.Tensor, factor: Any = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, x: torch.Tensor) -> Any:
        return self.update(x)


CASES: dict[str, type[World]] = {}
REFUSED: dict[str, tuple[type[World], str]] = {}


def case(cls: type[World]) -> type[World]:
    CASES[cls.__name__] = cls
    return cls


def refused(text: str) -> Callable[[type[World]], type[World]]:
    def note(cls: type[World]) -> type[World]:
        REFUSED[cls.__name__] = cls, text
        return cls

    return note


@case
class NumberOfThread(World):
    def __init__(self):
        super().__init__()
        self.of_thread = threading.local()
        self.of_thread.n = 0

    def step(self, x):
        self.of_thread.n += 1
        self.n = self.of_thread.n
        return self.update(x, 1.0 / self.of_thread.n)


# -- attributes --------------------------------------------------------------------------------------------------------
@case
class Counter(World):
    def step(self, x):
        self.n += 1
        return self.update(x)


@case
class CounterUsed(World):
    def step(self, x):
        self.n += 1
        return self.update(x, 1.0 / self.n)


@case
class CounterWarmup(World):
    def step(self, x):
        self.n += 1
        return self.update(x, min(1.0, self.n / 4))


@case
class CounterBranch(World):
    def step(self, x):
        self.n += 1
        return self.update(x, 0.5 if self.n % 3 == 0 else 1.0)


@case
class MathOnCounter(World):
    def step(self, x):
        self.n += 1
        return self.update(x, 0.5 * (1 + math.cos(math.pi * self.n / 10)))


@case
class NumberReturned(World):
    def step(self, x):
        self.n += 1
        return self.update(x), self.n, {"half": self.n / 2}


@case
class EmaOfLoss(World):
    def step(self, x):
        loss = self.update(x)
        self.scale = 0.9 * self.scale + 0.1 * loss
        return loss


@case
class EmaStartsAsNone(World):
    ema = None

    def step(self, x):
        loss = self.update(x)
        self.ema = loss if self.ema is None else 0.9 * self.ema + 0.1 * loss
        return loss


@case
class LastLossKept(World):
    def step(self, x):
        self.last = self.update(x)
        return self.last * 2


@case
class TensorInPlace(World):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def step(self, x):
        loss = self.update(x)
        self.total += loss
        return loss


@case
class TensorsChangedByParts(World):
    def __init__(self):
        super().__init__()
        self.table, self.sums, self.last = torch.zeros(3, 2), [torch.zeros(2), torch.ones(2)], torch.zeros(2)
        self.halved = torch.ones(2)

    def step(self, x):
        means = self.model(x).detach().mean(0)
        self.table[0] = means
        self.table.view(-1)[2:4].add_(1.0)
        self.table.unbind()[2].sub_(means)
        torch._foreach_mul_(self.sums, 0.5)
        torch.add(means, 1.0, out=self.last)
        self.halved.mul_(0.5)
        return self.update(x)


@case
class TensorReplaced(World):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(2)
        self.kept = []

    def step(self, x):
        self.mean = 0.5 * self.mean + 0.5 * self.model(x).mean(0).detach()
        return self.update(x)


@case
class ModuleCounter(World):
    def __init__(self):
        super().__init__()

        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.calls, self.inner = 0, nn.Linear(4, 4)

            def forward(self, x):
                self.calls += 1
                return self.inner(x) / self.calls

        self.model = nn.Sequential(Counting(), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)


@case
class ModuleCache(World):
    """A table that the module makes at its first use and keeps."""

    def __init__(self):
        super().__init__()

        class Cached(nn.Module):
            table = None

            def forward(self, x):
                if self.table is None:
                    self.table = torch.arange(4.0)
                return x + self.table

        self.model = nn.Sequential(Cached(), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)


@case
class AuxLossList(World):
    def step(self, x):
        self.aux = []
        for _ in range(2):
            self.aux.append(self.model(x).mean().detach())
        return self.update(x)


@case
class DictOfStats(World):
    def __init__(self):
        super().__init__()
        self.stats = {"n": 0, "loss": None}

    def step(self, x):
        self.stats["loss"] = self.update(x)
        self.stats["n"] += x.shape[0]
        return self.stats["loss"]


@case
class DefaultDictCounts(World):
    def __init__(self):
        super().__init__()
        self.counts = defaultdict(int)

    def step(self, x):
        self.counts["seen"] += 1
        return self.update(x)


@case
class ListItem(World):
    def __init__(self):
        super().__init__()
        self.slots = [0.0, 1.0]

    def step(self, x):
        loss = self.update(x, self.slots[1])
        self.slots[1] = self.slots[1] * 0.9
        return loss


@case
class FlagSet(World):
    started = False

    def step(self, x):
        factor = 1.0 if self.started else 0.1
        self.started = True
        return self.update(x, factor)


@case
class PhaseByName(World):
    phase = "warm"

    def step(self, x):
        factor = 0.1 if self.phase == "warm" else 1.0
        self.phase = "main"
        return self.update(x, factor)


@case
class Setattr(World):
    def step(self, x):
        setattr(self, "n", getattr(self, "n") + 2)  # noqa: B009, B010
        return self.update(x, 1 / self.n)


@case
class VarsOfSelf(World):
    def step(self, x):
        vars(self)["n"] += 1
        return self.update(x, 1 / vars(self)["n"])


@case
class PropertyBehind(World):
    @property
    def count(self):
        return self.n

    @count.setter
    def count(self, value):
        self.n = value

    def step(self, x):
        self.count += 1
        return self.update(x, 1 / self.count)


@case
class ClassAttribute(World):
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made = 0

    def step(self, x):
        type(self).made += 1
        return self.update(x, 1 / type(self).made)


@dataclass
class Progress:
    steps: int = 0
    best: float = 10.0
    history: list[float] = field(default_factory=list)


@case
class DataclassField(World):
    def __init__(self):
        super().__init__()
        self.progress = Progress()

    def step(self, x):
        self.progress.steps += 1
        return self.update(x, 1 / self.progress.steps)


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


@case
class SlotOfObject(World):
    def __init__(self):
        super().__init__()
        self.inner = Slotted()

    def step(self, x):
        self.inner.n += 1
        return self.update(x, 1 / self.inner.n)


@case
class Namespace(World):
    def __init__(self):
        super().__init__()
        self.inner = types.SimpleNamespace(deep=types.SimpleNamespace(k=1.0))

    def step(self, x):
        self.inner.deep.k *= 0.5
        return self.update(x, self.inner.deep.k)


@case
class Deleted(World):
    def __init__(self):
        super().__init__()
        self.once = 3.0

    def step(self, x):
        factor = 1.0
        if hasattr(self, "once"):
            factor = self.once
            del self.once
        return self.update(x, factor)


@case
class ChangedFromOutside(World):
    def between(self, call):
        self.scale = 1.0 / (call + 2)

    def step(self, x):
        return self.update(x, self.scale)


@case
class ModuleOptionFromOutside(World):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def between(self, call):
        self.model[1].negative_slope = 0.1 * (call % 3)


@case
class ModuleReplacedFromOutside(World):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def between(self, call):
        if call == 2:
            self.model[1] = nn.ReLU()


@case
class FunctionReplacedFromOutside(World):
    activation = staticmethod(torch.tanh)

    def between(self, call):
        if call == 3:
            self.activation = torch.relu

    def step(self, x):
        return self.update(self.activation(x))


@case
class HookAddedFromOutside(World):
    def between(self, call):
        if call == 2:
            self.model[0].register_forward_hook(lambda module, args, out: out * 0.5)


@case
class DictItemFromOutside(World):
    def __init__(self):
        super().__init__()
        self.config = {"factor": 1.0, "names": ["a"]}

    def between(self, call):
        self.config["factor"] = 1.0 / (1 + call // 3)

    def step(self, x):
        return self.update(x, self.config["factor"])


@case
class ArrayChangedFromOutside(World):
    def __init__(self):
        super().__init__()
        self.factors = np.ones(4)

    def between(self, call):
        self.factors[call % 2] = 0.5

    def step(self, x):
        return self.update(x * torch.tensor(self.factors, dtype=x.dtype))


@case
class VariableOfTheEnvironment(World):
    def __init__(self):
        super().__init__()
        os.environ.pop("WHOLESTEP_TEST_FACTOR", None)

    def between(self, call):
        os.environ["WHOLESTEP_TEST_FACTOR"] = str(1.0 + call // 2)

    def step(self, x):
        doubled = 2.0 if "WHOLESTEP_TEST_FACTOR" in os.environ else 1.0
        return self.update(x, doubled * float(os.getenv("WHOLESTEP_TEST_FACTOR", "0.5")))


@case
class GeneratorWithSeed(World):
    def step(self, x):
        return self.update(x, np.random.default_rng(3).random() + random.Random(3).random())


@case
class TensorReadAsNumber(World):
    def __init__(self):
        super().__init__()
        self.temperature = torch.tensor(1.0)

    def between(self, call):
        self.temperature.fill_(1.0 + call % 2)

    def step(self, x):
        return self.update(x, self.temperature.item())


@case
class MethodReplacedFromOutside(World):
    def __init__(self):
        super().__init__()
        self.__class__ = type("Own", (MethodReplacedFromOutside,), {})

    def activation(self, x):
        return torch.tanh(x)

    def between(self, call):
        if call == 3:
            type(self).activation = lambda self, x: torch.relu(x)

    def step(self, x):
        return self.update(self.activation(x))


@case
class TensorReplacedFromOutside(World):
    def __init__(self):
        super().__init__()
        self.weights = torch.ones(4)

    def between(self, call):
        if call == 2:
            self.weights = torch.full((4,), 0.5)

    def step(self, x):
        return self.update(x * self.weights)


# -- closures, globals, defaults ---------------------------------------------------------------------------------------
@case
class Nonlocal(World):
    def __init__(self):
        super().__init__()
        count = 0

        def step(x):
            nonlocal count
            count += 1
            return self.update(x, 1 / count), count

        self.step = step


STEPS = 0
TOTALS = {"n": 0.0}
HERE = sys.modules[__name__]


@case
class Global(World):
    def __init__(self):
        super().__init__()
        global STEPS
        STEPS = 0

    def step(self, x):
        global STEPS
        STEPS += 1
        return self.update(x, 1 / STEPS)


@case
class NewGlobals(World):
    """Names that the first call makes, of its module and of one that it changes."""

    def __init__(self):
        super().__init__()
        for name in ("LAST", "MADE", "COUNTED"):
            globals().pop(name, None)

    def step(self, x):
        global LAST, COUNTED
        if "LAST" not in globals():
            COUNTED = 0
        loss = self.update(x)
        LAST, COUNTED = loss, COUNTED + 1
        HERE.MADE = loss.detach() * 2
        return loss, COUNTED, LAST + HERE.MADE


@case
class GlobalDict(World):
    def __init__(self):
        super().__init__()
        TOTALS["n"] = 0.0

    def step(self, x):
        loss = self.update(x)
        TOTALS["n"] += 0.5
        return loss, TOTALS["n"]


@case
class FunctionAttribute(World):
    def __init__(self):
        super().__init__()

        def step(x):
            step.calls += 1
            return self.update(x, 1 / step.calls)

        step.calls = 0
        self.step = step


@case
class MutableDefault(World):
    def __init__(self):
        super().__init__()

        def step(x, counts={"n": 0}):  # noqa: B006
            counts["n"] += 1
            return self.update(x, 1 / counts["n"])

        step.__defaults__[0]["n"] = 0
        self.step = step


@case
class HelperWithClosure(World):
    def __init__(self):
        super().__init__()
        seen = {"n": 0}

        def scale():
            seen["n"] += 1
            return 1 / seen["n"]

        self.step = lambda x: self.update(x, scale())


@functools.lru_cache
def mask(size: int) -> torch.Tensor:
    return torch.arange(1.0, size + 1)


@case
class CachedFunction(World):
    """The cache holds a tensor that the step made: it must be a real one, or none."""

    def __init__(self):
        super().__init__()
        mask.cache_clear()

    def step(self, x):
        return self.update(x * mask(4)), mask(4) + 0

    def between(self, call):
        assert not isinstance(mask(4), FakeTensor)


@functools.cache
def settings_of_file():
    print("reads its settings")
    return {"lines": len(Path(__file__).read_text().splitlines())}


@functools.lru_cache
def log_file(name, mode="w"):
    return open(name, mode)  # here


@functools.cache
def progress():
    return Progress()


@case
class CachedFileAndObject(World):
    """What a cached function does happens once, and its object is like others."""

    def __init__(self):
        super().__init__()
        settings_of_file.cache_clear()
        progress().steps = 0

    def step(self, x):
        progress().steps += 1
        self.seen = progress().steps
        return self.update(x, 1000 / settings_of_file()["lines"] / self.seen)


class Tracker:
    made = 0

    def __init__(self, start):
        Tracker.made += 1
        self.n, self.sums = start, []


@functools.cache
def tracker(name, *, start=0):
    return Tracker(start)


@functools.lru_cache(4, typed=True)
def history(model):
    return [0.0]


PROGRESS = functools.cache(Progress)  # a class


@functools.lru_cache(2)
def lazy(name):
    return tracker(name, start=10)


@case
class ObjectsOfColdCaches(World):
    """What the calls change is the object that the cache keeps: made once, as in eager; others are left alone."""

    def __init__(self):
        super().__init__()
        for cached in (tracker, history, lazy, PROGRESS):
            cached.cache_clear()
        Tracker.made = 0
        tracker("before").n, lazy("older").n = 5, 7

    def step(self, x):
        tracker("here", start=2).n += 1
        lazy("inner").n += tracker("here", start=2).n
        history(self.model)[0] += 0.5
        PROGRESS().steps += 1
        return self.update(x, (tracker("before").n + history(self.model)[0]) / lazy("inner").n)

    def between(self, call):
        self.seen = tracker("here", start=2).n, tracker("before").n, history(self.model)[0], lazy("older").n
        self.made, self.steps = Tracker.made, PROGRESS().steps


@functools.cache  # here
def noisy():
    return [torch.rand(4)]


@refused("the cached function noisy draws random numbers for what it keeps")
class CachedDraw(World):
    def step(self, x):
        noisy.cache_clear()
        return self.update(x * noisy()[0])


@functools.cache  # here
def projection(size):
    return torch.randn(size, size) / size, size


@refused("the cached function projection draws random numbers for what it keeps")
class CachedTensorDrawn(World):
    def step(self, x):
        projection.cache_clear()
        return self.update(x @ projection(4)[0])


@functools.lru_cache(1)  # here
def newest(name):
    return [name]


@refused("the cached function newest makes an object again that its cache did not keep")
class CachedAgain(World):
    def step(self, x):
        return self.update(x, 1.0 / len(newest("a") + newest("b") + newest("a")))


@functools.cache  # here
def of_tensor(tensor):
    return [tensor.shape]


@refused("the cached function of_tensor makes an object from a tensor")
class CachedOfTensor(World):
    def step(self, x):
        return self.update(x, 1.0 / of_tensor(x)[0][0])


@refused("the step keeps what a cached function opened or drew")
class CachedHandle(World):
    def step(self, x):
        log_file(os.devnull).write("a step")
        return self.update(x)


@case
class CachedMethods(World):
    """The caches are of the class, and hold tensors that the trace made."""

    @functools.lru_cache  # noqa: B019
    def mask(self, size):
        return torch.ones(size, size).tril()

    @staticmethod
    @functools.cache
    def scales(size):
        return torch.arange(size) + 1.0

    def step(self, x):
        self.n += 1
        return self.update(x @ self.mask(4) / self.scales(4), 1 / self.n)

    def between(self, call):
        self.seen = float(self.mask(4).sum()), float(self.scales(4).sum())


# -- optimizers and groups ---------------------------------------------------------------------------------------------
class GroupCounts(torch.optim.Optimizer):
    """Keeps its step in the group, as many of the ecosystem do."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            correction = 1 - group["beta"] ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(state["mean"], alpha=-group["lr"] / math.sqrt(correction))


class StateCounts(GroupCounts):
    """Keeps its step in the state of each parameter, as a Python number."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                p.add_(state["mean"] / (1 - group["beta"] ** state["step"]), alpha=-group["lr"])


class WeightSum(GroupCounts):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("weight_sum", 0.0)
            group.setdefault("k", 0)
            weight = (group["k"] + 1) ** 0.5 * group["lr"] ** 2
            group["weight_sum"] += weight
            ratio = weight / group["weight_sum"]
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], ratio)
            group["k"] += 1


class AttributeCounts(GroupCounts):
    def __init__(self, params):
        super().__init__(params)
        self.updates = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.updates += 1
        for p in (p for g in self.param_groups for p in g["params"]):
            p.sub_(p.grad, alpha=0.1 / self.updates)


def with_optimizer(name: str, make: Callable[..., Any]) -> None:
    CASES[name] = type(name, (World,), {"__init__": lambda self: World.__init__(self, make)})


for made in (GroupCounts, StateCounts, WeightSum, AttributeCounts):
    with_optimizer(made.__name__, made)


@case
class RateChangedInside(World):
    def step(self, x):
        loss = self.update(x)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        return loss


@case
class DecayChangedInside(World):
    def __init__(self):
        super().__init__(lambda params: torch.optim.AdamW(params, lr=0.05))

    def step(self, x):
        loss = self.update(x)
        self.optimizer.param_groups[0]["weight_decay"] *= 2.0
        return loss


@case
class RateBySteps(World):
    def step(self, x):
        self.n += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (self.n // 2)
        return self.update(x), self.optimizer.param_groups[0]["lr"]


# -- schedulers --------------------------------------------------------------------------------------------------------
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: ConstantLR(o, 0.3, 2),
    "LinearLR": lambda o: LinearLR(o, 0.3, 1.0, 4),
    "ExponentialLR": lambda o: ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5),
    "LambdaLR": lambda o: LambdaLR(o, lambda n: 1 / (n + 1)),
    "PolynomialLR": lambda o: PolynomialLR(o, 5),
    "OneCycleLR": lambda o: OneCycleLR(o, 0.3, total_steps=10),
    "CyclicLR": lambda o: CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "WarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 2), ExponentialLR(o, 0.5)], [2]),
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, 0.1, 1.0, 2), ExponentialLR(o, 0.8)]),
}


def with_scheduler(name: str, make: Callable[[Any], Any], first: bool) -> None:
    class Scheduled(World):
        def __init__(self):
            super().__init__()
            self.scheduler = make(self.optimizer)

        def step(self, x):
            if first:
                self.scheduler.step()
                return self.update(x), self.scheduler.get_last_lr()
            before = self.scheduler.get_last_lr()[0]
            loss = self.update(x)
            self.scheduler.step()
            return loss, before, self.optimizer.param_groups[0]["lr"], getattr(self.scheduler, "last_epoch", 0)

    CASES[f"{name}{'First' if first else ''}"] = Scheduled


for key, value in SCHEDULERS.items():
    with_scheduler(key, value, False)
    if key in ("StepLR", "CosineAnnealingLR", "OneCycleLR", "LambdaLR"):
        with_scheduler(key, value, True)


@case
class SchedulerEverySecondStep(World):
    def __init__(self):
        super().__init__()
        self.scheduler = ExponentialLR(self.optimizer, 0.5)

    def step(self, x):
        loss = self.update(x)
        self.n += 1
        if self.n % 2 == 0:
            self.scheduler.step()
        return loss


@case
class SchedulerBetweenTwoUpdates(World):
    def __init__(self):
        super().__init__()
        self.scheduler = ExponentialLR(self.optimizer, 0.5)

    def step(self, x):
        first = self.update(x)
        self.scheduler.step()
        return first, self.update(x)


# -- calls on the host -------------------------------------------------------------------------------------------------
@case
class Callback(World):
    def __init__(self):
        super().__init__()
        self.log = []

    def step(self, x):
        loss = self.update(x)
        self.n += 1
        ws.callback(self.log.append, loss)
        ws.callback(lambda *values, tag: self.log.append((*values, tag)), loss * 2, self.n, "text", tag=self.n / 2)
        return loss


@case
class PrintOfNumbers(World):
    def __init__(self):
        super().__init__()
        self.n, self.sink = 0, Sink([])

    def step(self, x):
        self.n += 1
        print("step", self.n, file=self.sink)
        return self.update(x)


@case
class StepOfProfiler(World):
    def __init__(self):
        super().__init__()
        self.ready = []
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
            on_trace_ready=lambda profiler: self.ready.append(profiler.step_num),
            acc_events=True,
        )
        self.profiler.start()

    def step(self, x):
        loss = self.update(x)
        self.profiler.step()
        return loss

    def between(self, call):
        if call == CALLS - 1:
            self.profiler.stop()


class Sink:
    def __init__(self, lines):
        self.lines = lines

    def write(self, text):
        self.lines.append(text)


# -- modules and parameters --------------------------------------------------------------------------------------------
@case
class ModeChangedInside(World):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x):
        self.model.train()
        loss = self.update(x)
        self.model.eval()
        return loss, self.model(x).detach()


@case
class FrozenInside(World):
    def step(self, x):
        self.model[0].requires_grad_(False)
        return self.update(x)


@case
class FrozenForAWhile(World):
    def step(self, x):
        loss = self.update(x)
        self.model[0].requires_grad_(False)
        self.optimizer.zero_grad()
        self.model(x).mean().backward()
        self.optimizer.step()
        self.model[0].requires_grad_(True)
        return loss


@case
class ParameterHook(World):
    def __init__(self):
        super().__init__()
        for p in self.model.parameters():
            p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.world.n += 1
        return grad / ctx.world.n, None


@case
class NumbersInBackward(World):
    """Hooks and `backward` of the user's count, choose, and read parameters."""

    def __init__(self):
        super().__init__()
        self.of_hook, self.of_module, self.bias = 0, 0, self.model[2].bias
        self.model[2].weight.register_hook(self.hook)
        self.model[1].register_full_backward_hook(self.module_hook)

    def hook(self, grad):
        self.of_hook += 1
        return grad * 0.5 if self.of_hook % 2 else grad + self.bias.detach().sum()

    def module_hook(self, module, grad_input, grad_output):
        self.of_module += 1

    def step(self, x):
        self.optimizer.zero_grad()
        loss = CountsInBackward.apply(self.model(x), self).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@case
class BufferRegisteredAsNone(World):
    def __init__(self):
        super().__init__()

        class Tracks(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", None)

            def forward(self, x):
                self.mean = x.mean(0).detach()
                return x - self.mean

        self.model = nn.Sequential(Tracks(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


# -- refused -----------------------------------------------------------------------------------------------------------
@refused("self.log: 0 items -> 1 items")
class ListGrows(World):
    def __init__(self):
        super().__init__()
        self.log = []

    def step(self, x):
        loss = self.update(x)
        self.log.append(loss)  # here
        return loss


@refused("self.seen")
class SetGrows(World):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def step(self, x):
        self.seen.add(len(self.seen))  # here
        return self.update(x)


@refused("self.recent")
class DequeGrows(World):
    def __init__(self):
        super().__init__()
        self.recent = deque(maxlen=3)

    def step(self, x):
        loss = self.update(x)
        self.recent.append(loss)  # here
        return loss


@refused("self.data")
class IteratorAdvances(World):
    def __init__(self):
        super().__init__()
        self.data = iter(batches())

    def step(self, x):
        return self.update(next(self.data))  # here


@refused("self.data")
class GeneratorAdvances(World):
    def __init__(self):
        super().__init__()
        self.data = (b for b in batches())

    def step(self, x):
        return self.update(next(self.data))  # here


@refused("self.data")
class IteratorAdvancesCaught(World):
    def __init__(self):
        super().__init__()
        self.data = iter(batches())

    def step(self, x):
        try:
            return self.update(next(self.data))  # here
        except Exception:
            return self.update(x)


@refused("calls open('settings.json', 'r')")
class ReadsFileIfItExists(World):
    def step(self, x):
        try:
            return self.update(x, float(open("settings.json").read()))  # here
        except Exception:
            return self.update(x)


@refused("self.draws")
class RandomStateAdvances(World):
    def __init__(self):
        super().__init__()
        self.draws = np.random.RandomState(0)

    def step(self, x):
        return self.update(x, self.draws.beta(1.0, 1.0))  # here


_ENTROPY = "the step makes a random generator without a seed, or reads random bits of the system"


@refused(_ENTROPY)
class GeneratorOfNumpyWithoutSeed(World):
    def step(self, x):
        return self.update(x, np.random.default_rng().random())  # here


@refused(_ENTROPY)
class RandomWithoutSeed(World):
    def step(self, x):
        return self.update(x, random.Random().random())  # here


@refused(_ENTROPY)
class BytesOfTheSystem(World):
    def step(self, x):
        return self.update(x, os.urandom(1)[0] / 256)  # here


@refused(_ENTROPY)
class Secrets(World):
    def step(self, x):
        return self.update(x, secrets.randbelow(9))  # here


@refused(_ENTROPY)
class RandomOfTheSystem(World):
    def step(self, x):
        return self.update(x, SYSTEM.random())  # here


@refused(_ENTROPY)
class Identifier(World):
    def step(self, x):
        return self.update(x, uuid.uuid4().int % 9)  # here


@refused(_ENTROPY)
class BytesOfTheSystemByAnotherName(World):
    def step(self, x):
        return self.update(x, system_bytes(1)[0] / 256)  # here


@refused("reads self.n, a number that changes between calls, with use as an index")
class CounterAsIndex(World):
    def step(self, x):
        self.n += 1
        return self.update(x[: self.n % 2 + 1], [1.0, 0.5][self.n % 2])  # here


@refused("reads self.n, a number that changes between calls")
class CounterInText(World):
    def step(self, x):
        self.n += 1
        self.label = f"step {self.n}"  # here
        return self.update(x)


@refused("the step prints a tensor")
class PrintsTensor(World):
    def step(self, x):
        loss = self.update(x)
        print("loss", loss)  # here
        return loss


@refused("the step logs a tensor")
class LogsTensor(World):
    def step(self, x):
        loss = self.update(x)
        LOG.warning("loss %s", loss)  # here
        return loss


@refused("the step calls open(")
class AppendsToFile(World):
    def step(self, x):
        with open(os.devnull, "a") as file:  # here
            file.write("a step")
        return self.update(x)


@refused("the step calls open(")
class ReadsFile(World):
    def step(self, x):
        return self.update(x, len(Path(os.devnull).read_text()) + 1.0)  # here


@refused("the step calls torch.save(")
class SavesTensor(World):
    def step(self, x):
        torch.save({"n": 1}, os.devnull)  # here
        return self.update(x)


@refused("the step calls os.mkdir('a directory')")
class MakesDirectory(World):
    def step(self, x):
        os.makedirs("a directory", exist_ok=True)  # here
        return self.update(x)


@refused("the step calls subprocess.Popen('true')")
class StartsProcess(World):
    def step(self, x):
        subprocess.run(["true"], check=True)  # here
        return self.update(x)


@refused("the step calls os.putenv(")
class SetsVariable(World):
    def step(self, x):
        os.environ["OF_A_STEP"] = "1"  # here
        return self.update(x)


@refused("the step starts the thread")
class StartsThread(World):
    def step(self, x):
        threading.Thread(target=print).start()  # here
        return self.update(x)


@refused("the step changes CONTEXT")
class ContextVariable(World):
    def step(self, x):
        CONTEXT.set(CONTEXT.get() + 1)  # here
        return self.update(x)


@refused("the step changes self.queue")
class QueueOfThreads(World):
    def __init__(self):
        super().__init__()
        self.queue = queue.SimpleQueue()

    def step(self, x):
        self.queue.put(1)  # here
        return self.update(x)


@refused("the step changes self.counts: a ndarray")
class ItemOfArray(World):
    def __init__(self):
        super().__init__()
        self.counts = np.zeros(4)

    def step(self, x):
        self.counts[0] = self.counts[0] + 1  # here
        return self.update(x)


@refused("the step reads the clock with time.monotonic()")
class ReadsClockByAnotherName(World):
    def step(self, x):
        return self.update(x, seconds_since_start() % 1)  # here


@refused("the step reads the clock with datetime.now()")
class ReadsTimeOfDay(World):
    def step(self, x):
        return self.update(x, datetime.datetime.now(datetime.UTC).microsecond / 1e6)  # here


@refused("the step reads the clock with date.today()")
class ReadsDate(World):
    def step(self, x):
        return self.update(x, Date.today().day)  # here


@refused("the step reads the clock with time.perf_counter()")
class ReadsClock(World):
    def step(self, x):
        import time

        began = time.perf_counter()  # here
        loss = self.update(x)
        self.seconds = time.perf_counter() - began
        return loss


@refused("the step calls ReduceLROnPlateau.step")
class Plateau(World):
    def __init__(self):
        super().__init__()
        self.scheduler = ReduceLROnPlateau(self.optimizer)

    def step(self, x):
        loss = self.update(x)
        self.scheduler.step(loss)  # here
        return loss


@refused("the step creates an object")
class ObjectMade(World):
    def step(self, x):
        loss = self.update(x)
        self.inner = Slotted()  # here
        self.inner.n = loss
        return loss


class _SetUp(World):
    """What the first call sets up, and later ones leave alone or replace by an equal object."""

    def __init__(self):
        super().__init__()
        self.inner, self.memo, self.shapes, self.names, self.alive = None, {}, set(), [], weakref.WeakSet()

    def factor(self, name):
        if name not in self.memo:
            self.memo[name] = types.SimpleNamespace(scale=len(name) / 4, also=[name])
        return self.memo[name].scale


@case
class SetUpInTheFirstCall(_SetUp):
    def step(self, x):
        self.inner = self.inner or Slotted()
        self.shapes.add(x.shape)
        self.alive.add(HELD)
        if not self.names:
            self.names.append("a name")
        return self.update(x, self.factor("a") * self.factor("bcd") + len(self.names) + self.inner.n)

    def between(self, call):
        self.seen = type(self.inner).__name__, sorted(self.memo), len(self.shapes), len(self.alive), [*self.names]
        self.scales = [self.memo[name].scale for name in sorted(self.memo)]
        if call == 1:
            self.memo["bcd"].scale = 5.0
        if call == 2:
            self.memo.clear()
            self.inner = None
        if call == 3:
            self.inner.n = 2
            self.names.clear()


class Registry:
    """Immutable in its user's eyes: a look-up replaces all that it holds, as in einx."""

    def __init__(self, names=(), found=()):
        self.names, self.found, self.counts = list(names), dict(found), {"lookups": 1}

    def looked_up(self, name):
        new = Registry(self.names, self.found)
        if name not in new.found:
            new.found[name] = Slotted()
            new.found[name].n = 1 + len(new.names)
        return new, new.found[name].n


@case
class ReplacedByEqualObjects(World):
    def __init__(self):
        super().__init__()
        self.registry, self.table = Registry(["a"]), {"all": Registry()}

    def look_up(self, name):
        self.registry, first = self.registry.looked_up(name)
        self.table["all"], second = self.table["all"].looked_up(name)
        return first / second

    def step(self, x):
        return self.update(x, self.look_up("a name"))

    def between(self, call):
        self.seen = [*self.registry.names], [v.n for v in self.registry.found.values()], sorted(self.table["all"].found)
        if call == 1:
            self.look_up("another")
        if call == 2:
            self.table["all"].found["a name"].n = 7
        if call == 3:
            self.registry.found.clear()
            self.registry.names.append("b")
        if call == 4:
            self.look_up("a name")


@refused("the step creates an object")
class FirstCallComputesAnother(_SetUp):
    def step(self, x):
        factor = 1.0
        if self.inner is None:
            self.inner, factor = Slotted(), 2.0  # here
        return self.update(x, factor)


@functools.cache
def met_later():
    return Progress()


@refused("the step creates an object")
class SecondCallMeetsAColdCache(_SetUp):
    def __init__(self):
        super().__init__()
        met_later.cache_clear()

    def step(self, x):
        if self.inner is None:
            self.inner = Slotted()  # here
            return self.update(x, 2.0)
        return self.update(x, 3.0 + met_later().steps)


@refused("the step creates an object")
class FirstCallHasAnotherConstant(_SetUp):
    def step(self, x):
        factor = torch.tensor([1.0, 2.0])
        if self.inner is None:
            self.inner, factor = Slotted(), torch.tensor([1.0, 3.0])  # here
        return self.update(x, factor.sum())


@refused("the step creates an object")
class FirstCallReturnsAnother(_SetUp):
    def step(self, x):
        is_first = self.inner is None
        self.inner = self.inner or Slotted()  # here
        return self.update(x), is_first


@refused("the step creates an object")
class FirstCallAssigns(_SetUp):
    def step(self, x):
        if self.inner is None:
            self.inner = Slotted()  # here
            self.unread = 5
        return self.update(x)


@refused("the step creates an object")
class FirstCallPrints(_SetUp):
    def step(self, x):
        if self.inner is None:
            self.inner = Slotted()  # here
            print("sets up")
        return self.update(x)


@refused("the step creates an object")
class FirstCallCounts(_SetUp):
    def step(self, x):
        self.inner = self.inner or Slotted()  # here
        self.inner.n += 1
        return self.update(x, self.inner.n)


@refused("the step creates an object")
class SetUpAndTakenBack(_SetUp):
    def step(self, x):
        self.inner = Slotted() if self.inner is None else None  # here
        return self.update(x)


@refused("the step creates an object")
class SetUpInTwoCalls(_SetUp):
    def step(self, x):
        if self.inner is None:
            self.inner = Slotted()  # here
        elif self.seen is None:
            self.seen = Slotted()
        return self.update(x)

    seen = None


@refused("the step creates an object")
class ReplacedByAnother(_SetUp):
    def step(self, x):
        self.inner = types.SimpleNamespace(n=1 + getattr(self.inner, "n", 0))  # here
        return self.update(x)


@refused("self.model")
class ModuleSwapped(World):
    def step(self, x):
        loss = self.update(x)
        self.model[1] = nn.ReLU()  # here
        return loss


@refused("the step may have read the old container")
class ListRebuilt(World):
    def __init__(self):
        super().__init__()
        self.recent = [1.0, 1.0]

    def step(self, x):
        self.recent = [*self.recent[1:], self.recent[0] * 0.5]  # here
        return self.update(x, self.recent[0])


@refused("the step may have read the old container")
class ListChangedAndRebuilt(World):
    """What holds the old list sees the change."""

    def __init__(self):
        super().__init__()
        self.recent = [torch.ones(()), torch.ones(())]
        self.first = self.recent

    def step(self, x):
        self.recent[0] = 0.5 * self.recent[0]
        factor = self.first[0]
        self.recent = [self.recent[1], factor]  # here
        return self.update(x, factor)


@refused("the step may have read the old container")
class ListOfTwoPlaces(World):
    """A change of it between calls would be seen at both."""

    def __init__(self):
        super().__init__()
        self.recent, self.other = [torch.ones(())], [torch.ones(())]

    def step(self, x):
        loss = self.update(x, self.recent[0] + self.other[0])
        self.recent = self.other = [0.5 * self.recent[0]]  # here
        return loss


@case
class AccumulateHook(World):
    def __init__(self):
        super().__init__()
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(halve_gradient)


@refused("self.progress")
class RecordRebuilt(World):
    def __init__(self):
        super().__init__()
        self.progress = Progress()

    def step(self, x):
        loss = self.update(x)
        self.progress = dataclasses.replace(self.progress, steps=self.progress.steps + 1)  # here
        return loss


@case
class NumberOfNumpy(World):
    def __init__(self):
        super().__init__()
        self.n = np.float64(1.0)

    def step(self, x):
        self.n = self.n * 0.5
        assert type(self.n) is np.float64
        return self.update(x, 1.0 - self.n), self.n


@refused("a graph has no inputs of numpy's number types")
class SingleNumberOfNumpy(World):
    def __init__(self):
        super().__init__()
        self.n = np.float32(1.0)

    def step(self, x):
        self.n = self.n * np.float32(0.5)  # here
        return self.update(x, float(self.n))


@case
class AttributeOfParameter(World):
    def step(self, x):
        loss = self.update(x)
        self.model[0].weight.count = 1
        return loss


@refused("torch's default dtype")
class SettingOfTorch(World):
    def step(self, x):
        loss = self.update(x)
        torch.set_default_dtype(torch.float64)  # here
        return loss


@refused("torch's grad mode")
class SettingOfTorchBehindABlock(World):
    def step(self, x):
        with torch.no_grad():
            x = x * 2
        loss = self.update(x)
        torch.set_grad_enabled(False)  # here
        return loss


@refused("the parameter groups of SGD")
class GroupAddedInTheStep(World):
    def step(self, x):
        loss = self.update(x)
        self.optimizer.add_param_group({"params": [torch.nn.Parameter(x.new_ones(()))]})  # here
        return loss


# -- objects of classes that people write for a loop -----------------------------------------------------------------
class Meter:
    """An average that starts as an int and becomes a tensor, as in the examples of torch."""

    def __init__(self):
        self.sum = self.avg = self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


@case
class AverageMeter(World):
    def __init__(self):
        super().__init__()
        self.meter = Meter()
        self.total = 0.0

    def step(self, x):
        loss = self.update(x)
        self.meter.update(loss, x.shape[0])
        self.total += loss
        return self.meter.avg, self.meter.count, self.total


@case
class SumOfDoubles(World):
    def __init__(self):
        super().__init__()
        self.model.double()
        self.total = 0.0

    def step(self, x):
        loss = self.update(x.double())
        self.total += loss
        return self.total


class Phase(Enum):
    WARM_UP = 1
    MAIN = 2


@case
class MemberOfEnum(World):
    def __init__(self):
        super().__init__()
        self.kind = Phase.WARM_UP

    def step(self, x):
        self.n += 1
        if self.n > 2:
            self.kind = Phase.MAIN
        return self.update(x, 2.0 if self.kind is Phase.MAIN else 1.0)


@case
class AttributeThatAppears(World):
    def step(self, x):
        factor = getattr(self, "factor", 1.0)
        return self.update(x, factor * (2.0 if hasattr(self.model, "ready") else 1.0))

    def between(self, call):
        if call == 1:
            self.factor = 3.0
        if call == 3:
            self.model.ready = True


class Counting:
    made = 0


class CountingBelow(Counting):
    pass


@case
class ClassAttributeMade(World):
    def __init__(self):
        super().__init__()
        if "made" in vars(CountingBelow):
            del CountingBelow.made

    def step(self, x):
        CountingBelow.made += 1
        return self.update(x, 1.0 / CountingBelow.made)


class Stored:
    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind=None):
        return self.values[id(owner)]  # a KeyError for the class

    def __set__(self, owner, value):
        self.values[id(owner)] = value


class WithStored:
    count = Stored()


@case
class DescriptorWithValues(World):
    def __init__(self):
        super().__init__()
        self.described = WithStored()
        self.described.count = 0

    def step(self, x):
        self.described.count += 1
        self.n = self.described.count
        return self.update(x, 1.0 / self.described.count)


class Settings(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Items(list):
    reads = 0

    def first(self):
        self.reads += 1
        return self[0]


@case
class SubclassesOfContainers(World):
    def __init__(self):
        super().__init__()
        self.settings, self.items = Settings(factor=1.0), Items([1.0])

    def step(self, x):
        self.settings.factor *= 0.5
        factor = self.items.first()
        self.n = self.items.reads
        return self.update(x, factor * self.settings.factor)


def scaled(world, x, factor=1.0, *, power=1.0):
    return world.update(x, factor * power)


@case
class DefaultsFromOutside(World):
    def __init__(self):
        super().__init__()
        scaled.__defaults__ = (1.0,)
        scaled.__kwdefaults__["power"] = 1.0

    def step(self, x):
        return scaled(self, x)

    def between(self, call):
        if call == 1:
            scaled.__defaults__ = (2.0,)
        if call == 3:
            scaled.__kwdefaults__["power"] = 3.0


HIDDEN = {"a": 1.0, "b": 1.0}
HELD = Meter()


@case
class ValuesBehindObjectsInC(World):
    def __init__(self):
        super().__init__()
        HIDDEN.update(a=1.0, b=1.0)
        HELD.count = 0
        self.get, self.view, self.ref = HIDDEN.get, types.MappingProxyType(HIDDEN), weakref.ref(HELD)

    def step(self, x):
        self.ref().count += 1
        self.n = self.ref().count
        return self.update(x, self.get("a") * self.view["b"])

    def between(self, call):
        if call == 1:
            HIDDEN["a"] = 2.0
        if call == 3:
            HIDDEN["b"] = 3.0


class Loader:
    """An iterator of a user's class."""

    def __init__(self):
        self.epoch, self.taken = 0, 0

    def __iter__(self):
        return self

    def __len__(self):
        return 4

    def __next__(self):
        self.taken += 1
        return 1.0 / self.taken


@case
class IteratorOfOwnClass(World):
    def __init__(self):
        super().__init__()
        self.loader, self.proxied = Loader(), Loader()
        self.proxy, self.of_library = weakref.proxy(self.proxied), iter(DataLoader(range(4)))
        self.of_library.epoch = 0

    def step(self, x):
        self.loader.epoch += 1
        self.proxy.epoch += 2
        self.of_library.epoch += 3
        self.seen = self.loader.epoch, self.proxy.epoch, self.of_library.epoch, next(self.loader), next(self.proxy)
        return self.update(x, sum(self.seen) / len(self.loader))


@case
class WeakKeys(World):
    def __init__(self):
        super().__init__()
        self.seen = weakref.WeakKeyDictionary({HELD: 0})

    def step(self, x):
        self.seen[HELD] += 1
        self.n = self.seen[HELD]
        return self.update(x)


def received(world):
    count = 0
    while True:
        x = yield
        count += 1
        world.update(x, 1.0 / count)


@refused("self.data")
class GeneratorReceives(World):
    def __init__(self):
        super().__init__()
        self.data = received(self)
        next(self.data)

    def step(self, x):
        self.data.send(x)  # here
        return self.update(x)


class Checkpointed(World):
    """What is recomputed runs twice in each call, up to the last value that the backward needs."""

    def __init__(self):
        super().__init__()
        self.model.register_buffer("seen", torch.zeros(()))

    def update(self, x, factor=1.0):
        self.optimizer.zero_grad()
        loss = checkpoint(self.inside, x, use_reentrant=False).square().mean() * factor
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def inside(self, x):
        raise NotImplementedError


@case
class CheckpointCountsBefore(Checkpointed):
    def inside(self, x):
        self.n += 1
        return self.model(x) / self.n


@case
class CheckpointCountsAfter(Checkpointed):
    def inside(self, x):
        y = self.model(x)
        self.n += 1
        self.model.seen += 1
        return y


@case
class CheckpointUsesACount(Checkpointed):
    def inside(self, x):
        self.n += 1
        y = (self.model(x) * self.n).sin()
        self.scale *= 1.05
        return torch.where(y > 0, y, self.scale) ** self.scale


@case
class SavedTensorsPacked(Checkpointed):
    def update(self, x, factor=1.0):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t * 2.0):
            return World.update(self, x, 1.0 / self.count())

    def count(self):
        self.n += 1
        return self.n


@refused("self.model.0._forward_hooks")
class HookStays(World):
    def step(self, x):
        self.model[0].register_forward_hook(lambda module, given, made: made * 0.9)  # here
        return self.update(x)


class Kept(World):
    """A step that assigns a tensor of another shape or dtype to a buffer, an attribute or optimizer state."""

    def __init__(self, start=None):
        super().__init__()
        self.model.register_buffer("kept", start)

    def step(self, x):
        before = self.model.kept
        loss = self.update(x, 1.0 if before is None else 1.0 + before.sum().square())
        with torch.no_grad():
            self.model.kept = self.new(self.model(x))
        return loss


@case
class BufferBecomesAScalar(Kept):
    def __init__(self):
        super().__init__(torch.ones(4))

    def new(self, h):
        return h.mean()


@case
class BufferOfOneRow(Kept):
    def __init__(self):
        super().__init__(torch.ones(3, 2))

    def new(self, h):
        return h.mean(0, keepdim=True)


@case
class BufferGrows(Kept):
    def __init__(self):
        super().__init__(torch.ones(0, 2))

    def new(self, h):
        return h if self.model.kept.shape[0] < 6 and self.n == 0 else torch.cat([h, h])


@case
class BufferOfAnotherDtype(Kept):
    def __init__(self):
        super().__init__(torch.ones(2))

    def new(self, h):
        return (10 * h).round().long().sum(0)


@case
class CountsBecomeAnAverage(Kept):
    def __init__(self):
        super().__init__(torch.zeros(2, dtype=torch.long))

    def new(self, h):
        return 0.9 * self.model.kept + 0.1 * nn.functional.one_hot(h.argmax(1), 2).sum(0)


@case
class BufferComesAndGoes(Kept):
    def new(self, h):
        return h.mean(0) if self.model.kept is None else None


@case
class BufferIsDeleted(World):
    def __init__(self):
        super().__init__()
        self.model.register_buffer("first", torch.ones(2))

    def step(self, x):
        factor = 1.0
        if hasattr(self.model, "first"):
            factor = self.model.first.sum()
            del self.model.first
        return self.update(x, factor)


@case
class AttributeOfAnotherShape(World):
    def __init__(self):
        super().__init__()
        self.mean, self.count = torch.zeros(()), torch.zeros(2, dtype=torch.long)

    def step(self, x):
        loss = self.update(x, 1.0 + self.mean.sum().square() + self.count.sum())
        with torch.no_grad():
            h = self.model(x)
            self.mean = 0.5 * self.mean + h.mean(0)
            self.count = 0.9 * self.count + (h > 0).sum(0)
        return loss


class TableOfPositions(nn.Module):
    """Rotary embeddings, say: the table grows when a longer sequence comes."""

    def __init__(self):
        super().__init__()
        self.length = 2
        self.register_buffer("table", torch.arange(2.0)[:, None].cos())

    def forward(self, x):
        if x.shape[0] > self.length:
            self.length = x.shape[0]
            self.register_buffer("table", torch.arange(float(self.length), device=x.device)[:, None].cos())
        return x * self.table[: x.shape[0]]


@case
class TableGrows(World):
    def __init__(self):
        super().__init__()
        self.model.insert(0, TableOfPositions())

    def step(self, x):
        return self.update(x)


@case
class StateOfAnotherDtype(World):
    def __init__(self):
        class Averaging(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 0.1})

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        state = self.state[p]
                        if not state:
                            state["mean"] = torch.zeros(p.shape, dtype=torch.bfloat16)
                            state["size"] = torch.zeros(3)
                        state["mean"] = 0.9 * state["mean"].float() + 0.1 * p.grad
                        state["size"] = 0.5 * state["size"].sum() + p.grad.abs().sum()
                        p.sub_(state["mean"] / (1 + state["size"]), alpha=group["lr"])

        super().__init__(Averaging)

    def step(self, x):
        return self.update(x)


@refused("at one of the 2 places that share it")
class SharedBufferReplaced(World):
    def __init__(self):
        super().__init__()
        self.model[0].register_buffer("shared", torch.ones(()))
        self.model[2].register_buffer("shared", self.model[0].shared)

    def step(self, x):
        self.model[0].shared = self.model[0].shared * 2  # here
        return self.update(x, self.model[2].shared)


class Hooked(World):
    """A step with a hook, whose factor changes between calls, and that counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.handle = self.register()

    def scaled(self, grad):
        self.calls += 1
        return grad * self.scale / self.calls

    def step(self, x):
        return self.update(x)

    def between(self, call):
        self.scale = 1.0 + call
        if call == 4 and self.handle is not None:
            self.handle.remove()


@case
class HookOfAGradient(Hooked):
    def register(self):
        return self.model[0].weight.register_hook(self.scaled)


@case
class HookOfASum(Hooked):
    def register(self):
        def change(param):
            param.grad.copy_(self.scaled(param.grad))

        return self.model[2].bias.register_post_accumulate_grad_hook(change)


@case
class HookOfAGradientThatIsAnObject(Hooked):
    def register(self):
        return self.model[2].weight.register_hook(functools.partial(Hooked.scaled, self))


@case
class HookOfAModulesBackward(Hooked):
    def register(self):
        return self.model[1].register_full_backward_hook(lambda module, given, made: (self.scaled(given[0]),))


@case
class HookBeforeAModulesBackward(Hooked):
    def register(self):
        return self.model[1].register_full_backward_pre_hook(lambda module, made: (self.scaled(made[0]),))


@case
class HookOfAnActivation(Hooked):
    def register(self):
        return self.model[0].register_forward_hook(lambda module, given, made: made.register_hook(self.scaled) and None)


class HookOfOptimizers(Hooked):
    def change(self, optimizer, args, kwargs):
        for p in self.model.parameters():
            p.grad.copy_(self.scaled(p.grad))


@case
class HookBeforeAnOptimizer(HookOfOptimizers):
    def register(self):
        return self.optimizer.register_step_pre_hook(self.change)


@case
class HookAfterAnOptimizer(HookOfOptimizers):
    def register(self):
        return self.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.counted())

    def counted(self):
        self.calls += 1
        self.model[2].bias.data.mul_(self.scale / self.calls)


@case
class HookOfAllOptimizers(HookOfOptimizers):
    def register(self):
        return register_optimizer_step_pre_hook(self.change)


@case
class HookOfAllModules(Hooked):
    def register(self):
        return nn.modules.module.register_module_forward_hook(self.change)

    def change(self, module, given, made):
        return self.scaled(made) if module is self.model[0] else made


class ByAnotherName(World):
    """A function or a method that a trace replaces, taken before: `self.taken`, also in containers."""

    def __init__(self, optimizer=None):
        super().__init__(optimizer)
        self.taken = self.take()
        self.callbacks = {"last": [self.taken], "partial": functools.partial(self.taken)}


@case
class SchedulerByItsMethod(ByAnotherName):
    def take(self):
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        return self.scheduler.step

    def step(self, x):
        loss = self.update(x)
        self.taken()
        self.callbacks["partial"]()
        for f in self.callbacks["last"]:
            f()
        return loss


@case
class SchedulerByItsClass(ByAnotherName):
    def take(self):
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        return ExponentialLR.step

    def step(self, x):
        loss = self.update(x)
        self.taken(self.scheduler)
        return loss


@case
class ResetByItsMethod(ByAnotherName):
    def take(self):
        return self.optimizer.zero_grad

    def step(self, x):
        self.taken()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@case
class AverageByItsMethod(ByAnotherName):
    def take(self):
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        return self.average.update_parameters

    def step(self, x):
        loss = self.update(x)
        self.taken(self.model)
        return loss, self.average(x).detach()


@case
class RootByAnotherName(ByAnotherName):
    def take(self):
        return math.sqrt

    def step(self, x, roots=(math.sqrt,)):
        self.n += 1
        return self.update(x, self.taken(self.n) + self.callbacks["last"][0](2.0 * self.n) + roots[0](self.n))


@refused("the step reads the clock with time.perf_counter()")
class ClockByAnotherName(ByAnotherName):
    def take(self):
        return time.perf_counter

    def step(self, x):
        return self.update(x, self.callbacks["partial"]())  # here


@refused("the step reads the clock")
class DateByAnotherName(ByAnotherName):
    def take(self):
        return datetime.datetime

    def step(self, x):
        return self.update(x, self.taken.now().second)  # here


GIVEN: dict[str, Callable[[Callable[..., Any]], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "as an argument": lambda step: (step, {"clock": time.perf_counter}),
    "in an argument": lambda step: (lambda x, by: step(x, by["clock"][0]), {"by": {"clock": [time.perf_counter]}}),
    "by a partial": lambda step: (partial(step, clock=time.perf_counter), {}),
    "by a partial in one": lambda step: (lambda x, by: by(x), {"by": partial(step, clock=time.perf_counter)}),
}


@pytest.mark.parametrize("way", GIVEN)
def test_a_function_in_c_that_a_step_is_given_is_replaced(way: str) -> None:
    world = World()
    step, given = GIVEN[way](lambda x, clock: world.update(x, clock()))
    with pytest.raises(ws.CaptureError, match=r"the step reads the clock with time\.perf_counter\(\)"):
        ws.compile(step)(batches()[0], **given)


@refused("the step seeds torch's random numbers")
class SeedByName(World):
    def step(self, x):
        manual_seed(5)  # here
        return self.update(x)


@refused("the step seeds torch's random numbers")
class SeedOfEveryDevice(World):
    def step(self, x):
        manual_seed_all(5)  # here
        return self.update(x)


@refused("torch.save")
class SavedByName(ByAnotherName):
    def take(self):
        return torch.save

    def step(self, x):
        self.taken(self.n, "a file")  # here
        return self.update(x)


@case
class HiddenStateOfAnLSTM(World):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.optimizer.add_param_group({"params": [*self.lstm.parameters()]})
        self.model.add_module("lstm", self.lstm)
        self.hidden = None

    def step(self, x):
        self.optimizer.zero_grad()
        made, (h, c) = self.lstm(x, self.hidden)
        self.n += 1
        self.hidden = (h.detach(), c.detach()) if self.n != 4 else None
        loss = self.model[2](self.model[1](self.model[0](made))).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


Averages = namedtuple("Averages", "mean square")


@case
class TuplesInTuples(World):
    def __init__(self):
        super().__init__()
        self.kept = Averages(torch.zeros(2), torch.ones(2)), (torch.zeros(()),)

    def step(self, x):
        kept, (total,) = self.kept
        loss = self.update(x, 1.0 + kept.mean.square().sum() + kept.square.sum() + total)
        h = self.model(x).detach()
        self.kept = Averages(0.9 * kept.mean + h.mean(0), kept.square * h.square().mean(0)), (total + loss,)
        self.n = int(type(self.kept[0]) is Averages)
        return loss


@case
class ContainersAreReplaced(World):
    """Lists and dicts of tensors that a step reads, and puts others in place of; who holds the old ones keeps them."""

    def __init__(self):
        super().__init__()
        self.hidden, self.kept = [torch.zeros(2), torch.ones(2)], {"mean": torch.ones(2), "deep": [(torch.ones(()),)]}
        self.first = self.hidden
        self.seen = []

    def step(self, x):
        h, c = self.hidden
        [(total,)] = self.kept["deep"]
        loss = self.update(x, 1.0 + h.square().sum() + c.mean() + self.kept["mean"].sum() + total)
        out = self.model(x).detach()
        self.hidden = [0.5 * h + out.mean(0), c * 0.75]
        self.kept = {"mean": 0.5 * self.kept["mean"] + out.mean(0), "deep": [(0.5 * total + loss,)]}
        return loss

    def between(self, n):
        self.seen.append(self.hidden)
        if n == 3:
            self.hidden[1] = torch.full((2,), 0.25)


@torch.library.custom_op("wholestep_tests::scale_", mutates_args={"x"})
def scale_in_place(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("wholestep_tests::exchanged", mutates_args={"x", "y"})
def exchanged(x: torch.Tensor, y: torch.Tensor, times: int = 2) -> torch.Tensor:
    before = x.clone()
    x.copy_(y * times)
    y.copy_(before)
    return before.sum()


@exchanged.register_fake
def _(x: torch.Tensor, y: torch.Tensor, times: int = 2) -> torch.Tensor:
    return x.new_empty(())


OPS_OF_TESTS = torch.library.Library("wholestep_tests", "FRAGMENT")
OPS_OF_TESTS.define("add_(Tensor(a!) x, Tensor y, *, float alpha=1.0) -> Tensor(a!)")
OPS_OF_TESTS.impl("add_", lambda x, y, alpha=1.0: x.add_(y, alpha=alpha), "CompositeExplicitAutograd")


@case
class OwnOpsInPlace(World):
    """On a gradient, on views of a parameter and of an activation, and with a result that is what was written."""

    def step(self, x):
        loss = self.update(x)
        weight, h = self.model[0].weight.detach(), x.detach().clone()
        scale_in_place(weight[1:], 0.5)
        total = exchanged(weight[0, :2], h[0, :2], 3)
        return loss + total + torch.ops.wholestep_tests.add_(h, x, alpha=0.25).sum() + h.square().sum()


@torch.library.custom_op("wholestep_tests::scale_all_", mutates_args={"values"})
def scale_all(values: list[torch.Tensor], factor: float) -> None:
    for value in values:
        value.mul_(factor)


@refused("the step calls wholestep_tests.scale_all_.default, which writes into a list, an optional tensor or")
class OwnOpOnAList(World):
    def step(self, x):
        loss = self.update(x)
        scale_all([self.model[2].bias.detach()], 0.5)  # here
        return loss


@refused("the step calls wholestep_tests.exchanged.default, which writes into a list, an optional tensor or")
class OwnOpOnSharedMemory(World):
    def step(self, x):
        loss = self.update(x)
        h = x.detach().clone()
        return loss + exchanged(h[0, :2], h[0, 1:3])  # here


LABELS = torch.tensor([3, 1, 3])


@case
class UniqueOfAConstant(World):
    def step(self, x):
        values, inverse, counts = torch.unique(LABELS, return_inverse=True, return_counts=True)
        factor = sum(x[label == LABELS].mean() for label in values.tolist())
        sizes = torch.tensor([[8, 8], [4, 8]])  # of crops, by which DINO groups them
        runs = torch.unique_consecutive(sizes, return_inverse=True, return_counts=True)
        loss = self.update(x, factor + (inverse * counts[inverse]).sum() + runs[2].tolist()[0])
        return loss, values, counts, *runs, torch.unique_consecutive(LABELS, dim=0)


LIBRARY: dict[str, Any] = {"torch": torch}
CHECKS = """
def check(condition, text):
    torch._assert_async(condition)

def checked(x):
    check((x.square() >= 0).all(), f"found {x.sum():.3f}")
    return x

def described(x):
    return f"found {x.sum():.3f}"
"""
exec(compile(CHECKS, "lib/site-packages/a_library.py", "exec"), LIBRARY)


@case
class TextOfALibrary(World):
    """Of an error that is not raised."""

    def step(self, x):
        return self.update(LIBRARY["checked"](x))


@pytest.mark.parametrize("where", ["returned", "kept", "printed"])
def test_text_of_a_library_is_refused_where_it_would_be_seen(where: str) -> None:
    world = World()
    world.said = ""

    def step(x):
        text = LIBRARY["described"](x)
        if where == "kept":
            world.said = text
        if where == "printed":
            print(text)
        return world.update(x), [text] if where == "returned" else None

    with pytest.raises(ws.CaptureError, match="formats a tensor as text") as error:
        ws.compile(step, model=world.model, optimizer=world.optimizer)(batches()[0])
    assert error.value.where.startswith("lib/site-packages/a_library.py:10")
    assert world.said == ""


def observed(world: World) -> Any:
    """Everything that can be seen from outside, tensors copied."""
    found: dict[str, Any] = {}
    for name, p in [*world.model.named_parameters(), *world.model.named_buffers()]:
        found[name] = p.detach().clone(), p.requires_grad
    for key, value in vars(world).items():
        if key not in ("model", "optimizer", "scheduler", "step", "data"):
            found[key] = copied(value)
    for i, module in enumerate(world.model.modules()):
        found[f"module {i}"] = {k: copied(v) for k, v in vars(module).items() if not k.startswith("_") and k != "inner"}
    for group in world.optimizer.param_groups:
        found["group"] = {k: copied(v) for k, v in group.items() if k not in ("params", "capturable")}
    found["state"] = [
        {k: copied(v) for k, v in entry.items()}
        for p in (p for g in world.optimizer.param_groups for p in g["params"])
        if (entry := world.optimizer.state.get(p))
    ]
    found["class"] = getattr(type(world), "made", None), STEPS, dict(TOTALS)
    return found


# -- the tests ---------------------------------------------------------------------------------------------------------
def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, deque)):
        return [copied(v) for v in value]
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (types.SimpleNamespace, Progress)):
        return {k: copied(v) for k, v in vars(value).items()}
    if isinstance(value, Slotted):
        return value.n
    if isinstance(value, Sink):
        return copied(value.lines)
    return value if isinstance(value, (int, float, str, bool, type(None), set)) else type(value).__name__


def compare(ours: Any, theirs: Any, path: str) -> None:
    assert type(ours) is type(theirs), f"{path}: {ours!r} in place of {theirs!r}"
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            compare(ours[key], theirs[key], f"{path}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compare(a, b, f"{path}[{i}]")
    elif isinstance(ours, torch.Tensor):
        close = {"rtol": 1e-12, "atol": 1e-13} if ours.dtype == torch.float64 else {"rtol": 2e-5, "atol": 1e-6}
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text: f"{path}: {text}")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-12), path
    else:
        assert ours == theirs, path


def fakes_in(*roots: Any) -> list[str]:
    """Fake tensors that objects of the user's lead to, by a walk of its own."""
    seen, found, waiting = set[int](), list[str](), list(roots)
    while waiting:
        value = waiting.pop()
        module = type(value).__module__
        skip = isinstance(value, (type, types.ModuleType, types.CodeType, types.FrameType)) or module.startswith(
            "wholestep"
        )
        if id(value) in seen or skip or (isinstance(value, dict) and "__builtins__" in value):  # globals of a module
            continue
        seen.add(id(value))
        if isinstance(value, FakeTensor):
            found.append(repr(value))
        waiting += gc.get_referents(value)
    return found


def train(world: World, step: Callable[[torch.Tensor], Any]) -> list[Any]:
    out: list[Any] = []
    for call, x in enumerate(batches()):
        out.append((copied(step(x)), observed(world)))
        getattr(world, "between", lambda call: None)(call)
    return out


@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.crossed
@pytest.mark.parametrize("verify", [True, False], ids=["verified", ""])
@pytest.mark.parametrize("name", CASES)
def test_is_done_in_each_call_as_eager_does_it(name: str, verify: bool) -> None:
    """Also where the step is traced again: that does nothing of it once more."""
    eager = CASES[name]()
    expected = train(eager, eager.step)
    world = CASES[name]()
    step = ws.compile(world.step, model=world.model, optimizer=world.optimizer, verify=verify)
    found = train(world, step)
    assert not fakes_in(world)
    for call, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        compare(ours, theirs, f"call {call}")
    assert step.captures <= 4, step.misses


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_the_line(name: str) -> None:
    kind, text = REFUSED[name]
    world = kind()
    before = observed(world)
    with pytest.raises(ws.CaptureError) as error:
        ws.compile(world.step)(batches()[0])
    assert text in str(error.value)
    assert __file__ in error.value.where, error.value
    assert error.value.where.endswith("# here"), error.value
    assert not fakes_in(world)
    compare(observed(world), before, "after the refusal")


def test_an_equal_object_in_place_of_another_one_is_no_new_capture() -> None:
    world = ReplacedByEqualObjects()
    step = ws.compile(world.step, model=world.model, optimizer=world.optimizer)
    for x in batches():
        step(x)
        world.look_up("a name")
    assert step.captures == 1, step.misses


def test_what_a_failed_capture_set_up_is_taken_back() -> None:
    world = SetUpInTheFirstCall()

    def step(x):
        if world.inner is not None:
            raise ValueError("in the second trace")
        return world.step(x)

    before = observed(world)
    with pytest.raises(ws.CaptureError, match="in the second trace"):
        ws.compile(step, model=world.model, optimizer=world.optimizer)(batches()[0])
    compare(observed(world), before, "after the refusal")
    assert not world.shapes
    assert not world.names


def test_functions_in_arguments_are_compared() -> None:
    losses: list[list[float]] = []
    for compiled in (False, True):
        world = World()
        plain = lambda x, factor, world=world: world.update(x, factor(0.5))  # noqa: E731
        step = ws.compile(plain, model=world.model, optimizer=world.optimizer) if compiled else plain
        losses.append([float(step(x, partial(max, call / 3))) for call, x in enumerate(batches())])
    torch.testing.assert_close(*losses)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        where = record.pathname, record.lineno, record.funcName
        self.found.append((record.levelname, record.getMessage(), *where, vars(record).get("phase")))


class _Logs(World):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        LOG.warning("step %d of %s", self.n, "many", extra={"phase": "fit"})
        LOG.info("its details")
        sys.stdout.write("a step\n")
        return self.update(x)


def test_log_records_and_text_of_a_stream_are_written_in_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[list[tuple[Any, ...]]] = []
    for compiled in (False, True):
        world, records = _Logs(), _Records()
        LOG.addHandler(records)
        step = ws.compile(world.step, model=world.model, optimizer=world.optimizer) if compiled else world.step
        for call, x in enumerate(batches()):
            LOG.setLevel(logging.INFO if call in (1, 2, 5) else logging.WARNING)
            step(x)
        LOG.removeHandler(records)
        assert capsys.readouterr().out == "a step\n" * CALLS
        found.append(records.found)
    assert found[0] == found[1]
    assert [record[1] for record in found[0][:3]] == ["step 1 of many", "step 2 of many", "its details"]


@pytest.mark.parametrize("file", ["<stdin>", "<ipython-input-1-0a1b2c>", "<python-input-0>"])
def test_effects_of_code_that_was_typed_are_seen(file: str) -> None:
    source = "def step(x):\n    global COUNT\n    COUNT += 1\n    SEEN.append(COUNT)\n    return world.update(x, COUNT)"
    for line in (4, 0):
        world, lines = World(), source.splitlines()
        scope: dict[str, Any] = {"world": world, "COUNT": 0, "SEEN": [], "__name__": "__main__"}
        exec(compile("\n".join(lines[: line - 1] + lines[line:] if line else lines), file, "exec"), scope)
        step = ws.compile(scope["step"], model=world.model, optimizer=world.optimizer)
        if line:
            for x in batches():
                step(x)
            assert scope["COUNT"] == CALLS
        else:
            with pytest.raises(ws.CaptureError, match=re.escape(f"{file}:4")):
                step(batches()[0])


INSTALLED = """
import random, time
STATE = {"n": 0}
SCALE = 1.0
class Config:
    scale = 1.0
config = Config()
def counts(update, x):
    STATE["n"] += 1
    return update(x, 1.0 / STATE["n"])
def scales(update, x):
    return update(x, SCALE * config.scale)
def prints(update, x):
    print("a step")
    return update(x)
def draws(update, x):
    return update(x, random.choice([1.0, 2.0]))
def reads_the_clock(update, x):
    return update(x, time.perf_counter())
"""


@pytest.mark.crossed
@pytest.mark.parametrize("folder", ["src", "venv/lib/python3/site-packages"])
@pytest.mark.parametrize("name", ["counts", "scales", "prints", "draws", "reads_the_clock"])
def test_installed_code_is_code(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "training_code.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.delitem(sys.modules, "training_code", raising=False)
    found: list[list[Any]] = []
    for compiled in (False, True):
        code = importlib.reload(importlib.import_module("training_code"))
        world, results = World(), list[Any]()
        step = partial(getattr(code, name), world.update)
        if compiled:
            step = ws.compile(step, model=world.model, optimizer=world.optimizer)
        if compiled and name in ("draws", "reads_the_clock"):
            with pytest.raises(ws.CaptureError, match="all later steps would reuse"):
                step(batches()[0])
            return
        for call, x in enumerate(batches()):
            code.SCALE, code.config.scale = 1.0 + call // 2, 2.0 - call // 3
            results.append(copied(step(x)))
        assert capsys.readouterr().out == ("a step\n" * CALLS if name == "prints" else "")
        found.append(results)
    compare(found[1], found[0], name)


class _AnswersNone:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __getattr__(self, name: str) -> Any:
        return None


class _AnswersFunctions:
    scale = 1.0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _Raises:
    scale = 1.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"unknown setting {name}")

    @property
    def optimizer(self) -> Any:
        raise RuntimeError("not attached yet")

    param_groups = state = cache_clear = gradient_state = optimizer


class _ClassWithoutUpdate(type):
    def __getattr__(cls, name: str) -> Any:
        if name == "update":  # code of the step names it, of another object
            pytest.fail("asked for what the class does not define")
        raise AttributeError(name)


class _WithoutUpdate(metaclass=_ClassWithoutUpdate):
    scale = 1.0


STRANGERS: list[Any] = [_AnswersNone(scale=1.0), _AnswersFunctions(), _Raises(), _WithoutUpdate()]
STRANGERS += [mock.Mock(scale=1.0), mock.MagicMock(scale=1.0)]


@pytest.mark.crossed
@pytest.mark.parametrize("place", ["closure", "argument", "attribute", "class"])
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda one: type(one).__name__)
def test_objects_that_answer_every_name_or_raise_are_not_asked(stranger: Any, place: str) -> None:
    world, eager = World(), World()

    class Holder:
        held = stranger if place == "class" else None

    holder = Holder()
    if place == "attribute":
        holder.held = stranger
    step = ws.compile(
        lambda x, given: world.update(x, (given or holder.held or stranger).scale),
        model=world.model,
        optimizer=world.optimizer,
    )
    for x in batches()[:2]:
        compare(step(x, stranger if place == "argument" else None), eager.update(x), place)


@pytest.mark.full
def test_another_object_in_each_call_is_captured_again_and_said_once() -> None:
    world, eager = World(), World()
    step = ws.compile(lambda x: world.update(x * world.table["scale"]), model=world.model, optimizer=world.optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(20):
            world.table = {"scale": 1.0 + call}
            compare(copied(step(batches()[0])), copied(eager.update(batches()[0] * (1.0 + call))), f"call {call}")
    texts = [str(one.message) for one in said if "was captured 16 times" in str(one.message)]
    assert len(texts) == 1
    assert "because world.table is another object" in texts[0]
    assert len(step.programs) < 20


def test_a_refused_step_leaves_no_names_that_it_made() -> None:
    globals().pop("LAST", None)

    def step(x: torch.Tensor) -> float:
        global LAST
        LAST = HERE.LATEST = world.update(x)
        return float(LAST.tolist()[0])

    world = World()
    with pytest.raises(ws.CaptureError):
        ws.compile(step)(batches()[0])
    assert not {"LAST", "LATEST"} & globals().keys()


def test_a_value_that_keeps_changing_ends_in_an_error() -> None:
    world = World()

    def train_step(x: torch.Tensor) -> torch.Tensor:
        return world.update(x, 2.0 if world.phase == "0" else 1.0)

    step = ws.compile(train_step, model=world.model, optimizer=world.optimizer)

    def train(calls: int) -> None:
        for call in range(calls):
            world.phase = str(call)
            step(batches()[0])

    with pytest.raises(ws.CaptureError, match=r"depends on a value of Python that keeps changing: 16 captures so far"):
        train(20)


def test_a_call_that_fails_leaves_what_it_would_replace() -> None:
    world = CASES["EmaOfLoss"]()
    step = ws.compile(world.step, model=world.model, optimizer=world.optimizer)
    for x in batches()[:2]:
        step(x)
    program, before = step.programs[-1], copied(world.scale)
    run = program.run

    def failing(inputs: Any) -> Any:
        run(inputs)
        raise RuntimeError("after it has run")

    program.run = failing
    with pytest.raises(RuntimeError, match="after it has run"):
        step(batches()[2])
    program.run = run
    assert torch.equal(world.scale, before)
    with pytest.raises(ws.StateError, match="after it had begun to change parameters"):
        step(batches()[3])


@dataclass
class Pair:
    x: torch.Tensor


@pytest.mark.parametrize("kind", ["required before", "required in the step", "reset in the step", "in a dataclass"])
def test_gradients_of_the_batch_are_left_at_its_tensors(kind: str) -> None:
    inside, found = kind == "in a dataclass", list[Any]()
    for compiled in (False, True):
        world = World()

        def train_step(batch: Any, *, w: torch.Tensor) -> Any:
            x = batch.x if inside else batch
            if kind == "required in the step":
                x.requires_grad_()
            if kind == "reset in the step":
                x.grad = None
            loss = world.model(x).square().mean() * w  # noqa: B023
            loss.backward()
            moved = x + 0.1 * x.grad.sign()
            return world.update(moved.detach())  # noqa: B023

        step = ws.compile(train_step, model=world.model, optimizer=world.optimizer) if compiled else train_step
        left: list[Any] = []
        same = batches()[0].requires_grad_()
        for x in batches()[:3]:
            x = same if kind == "reset in the step" else x.requires_grad_(kind != "required in the step")
            left.append((step(Pair(x) if inside else x, w=torch.ones(())), x.requires_grad, x.grad.clone()))
        found.append(left)
    compare(found[1], found[0], kind)


def test_a_gradient_of_the_batch_that_is_there_already_is_refused() -> None:
    world, x = World(), batches()[0].requires_grad_()

    def train_step(x: torch.Tensor) -> torch.Tensor:
        world.model(x).sum().backward()
        return world.update(x)

    step = ws.compile(train_step, model=world.model, optimizer=world.optimizer)
    step(x)
    with pytest.raises(ws.StateError, match=r"x\.grad is set before a step that adds to it"):
        step(x)
    x.grad = None
    step(x)
