"""Host side of a trace: numbers that become inputs, patched functions, and observed attributes."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import logging
import math
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch.fx.experimental import proxy_tensor
from torch.optim.lr_scheduler import LRScheduler

from .attributes import Form, forms_of, forms_set, here_only

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
GENERATORS: dict[str, Any] = {m.__name__: m.random.__self__ for m in (random, np.random)}
_STATES = ("getstate", "get_state")
_proxies: Any = proxy_tensor


def new_input(
    mode: Any, dtype: torch.dtype, position: int, last: torch.fx.Node | None
) -> tuple[torch.Tensor, torch.fx.Node]:
    """Add a 0-dim input to the graph being traced; return its fake tensor and its node.

    `position` is its number among the inputs, `last` the node before it, if known. Uses `track_tensor_tree`, as make_fx
    does for its inputs (2.11 to 2.15).
    """
    proxies = _proxies.get_proxy_mode()
    assert proxies is not None, "no trace is active"
    with _proxies.disable_proxy_modes_tracing(), mode:
        fake = torch.empty((), dtype=dtype)
    graph = proxies.tracer.graph
    if last is None and position:
        last = [node for node in graph.nodes if node.op == "placeholder"][position - 1]
    with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(f"number_{len(graph.nodes)}")
    _proxies.track_tensor_tree(fake, torch.fx.Proxy(node, proxies.tracer), constant=None, tracer=proxies.tracer)
    return fake, node


def host_forms(
    on_math: Form, on_float: Callable[[Any], Any], on_scheduler: Form, outward: Any
) -> list[tuple[Any, str, Any]]:
    """Attributes to set, so that functions of `math`, steps of schedulers, and what reads or changes something outside
    of Python's objects run the given forms, and `float()` of torch's clipping `on_float`. The latter are methods
    `on_print`, `on_log`, `on_level` (of a logger), `on_profiler`, `on_text` (of a stream), `on_act` (with a text),
    `on_clock`, `on_entropy`, `on_draw` (of a module's generator) and `on_variable` (of the system) of
    `outward`.

    numpy takes all seeds that a user did not give from `randbits` of `numpy.random.bit_generator` (1.17 to 2.4).
    """
    functions = [name for name, function in vars(math).items() if callable(function) and not name.startswith("_")]
    clocks = [name + suffix for name in CLOCKS for suffix in ("", "_ns")]
    schedulers = [kind for kind in _with_subclasses(LRScheduler) if "step" in vars(kind)]
    changes = forms_of(
        [
            *((math, name, on_math) for name in functions),
            *((time, name, outward.on_clock) for name in clocks),
            *((kind, "step", on_scheduler) for kind in schedulers),
            (builtins, "print", outward.on_print),
            (np.random.bit_generator, "randbits", outward.on_entropy),
            (random.Random, "__init__", outward.on_entropy),
            (random, "_urandom", outward.on_entropy),
            (os, "urandom", outward.on_entropy),
            (uuid, "_generate_time_safe", outward.on_clock),
            (type(os.environ), "__getitem__", outward.on_variable),
            (logging.Logger, "handle", outward.on_log),
            (logging.Logger, "isEnabledFor", outward.on_level),
            (torch.profiler.profile, "step", outward.on_profiler),
            (threading.Thread, "start", functools.partial(outward.on_act, "starts the thread {1.name!r}")),
            *((torch, name, functools.partial(outward.on_act, "calls torch.{0}(...)")) for name in ("save", "load")),
            *((module, name, functools.partial(outward.on_draw, module.__name__)) for module, name in _draws()),
        ]
    )
    streams = [(getattr(sys, name), "write", functools.partial(outward.on_text, name)) for name in ("stdout", "stderr")]
    changes += forms_of([form for form in streams if hasattr(form[0], "__dict__")])
    dates: list[type] = [datetime.datetime, datetime.date]
    changes += [(datetime, kind.__name__, _with_clock(kind, outward.on_clock)) for kind in dates]
    return [*changes, (torch.nn.utils.clip_grad, "float", on_float)]  # `float(max_norm)` (2.5 to 2.13)


def _draws() -> list[tuple[ModuleType, str]]:
    """The functions of `random` and `numpy.random` that move their global generators."""
    places = ((module, name, function) for module in (random, np.random) for name, function in vars(module).items())
    return [
        (module, name)
        for module, name, function in places
        if getattr(function, "__self__", None) is GENERATORS[module.__name__] and name not in _STATES
    ]


def _with_clock(kind: type, on_clock: Form) -> type:
    """Return a class that makes objects of `kind`, and calls `on_clock` where `kind` reads the clock."""

    class Dates(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, kind)

    def reads(name: str) -> staticmethod[..., Any]:
        original: Callable[..., Any] = getattr(kind, name)
        return staticmethod(here_only(on_clock, original))

    return Dates(kind.__name__, (kind,), {n: reads(n) for n in ("now", "utcnow", "today") if hasattr(kind, n)})


def _with_subclasses(kind: type) -> list[type]:
    kinds = [kind]
    for sub in kind.__subclasses__():
        kinds += [s for s in _with_subclasses(sub) if s not in kinds]
    return kinds


@contextlib.contextmanager
def watched_attributes(kinds: Iterable[type], on_read: Form, on_write: Form) -> Generator[set[type]]:
    """Run `on_read`, `on_write` in place of `__getattribute__`, `__setattr__`; yields classes that cannot have it."""
    watched, unobserved = set[type](), set[type]()
    with contextlib.ExitStack() as stack:
        for kind in (k for k in kinds if not watched.intersection(k.__mro__)):
            try:
                stack.enter_context(forms_set([(kind, "__getattribute__", on_read), (kind, "__setattr__", on_write)]))
                watched.add(kind)
            except TypeError:
                unobserved.add(kind)
        yield unobserved


def copy_hooks(real: torch.Tensor, fake: torch.Tensor) -> None:
    """Register the hooks on a parameter's gradient on its fake, too."""
    of_tensor: dict[int, Callable[..., Any]] = real._backward_hooks or {}
    of_sum: dict[int, Callable[..., Any]] = getattr(real, "_post_accumulate_grad_hooks", None) or {}

    def with_real(hook: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
        return lambda _: hook(real)

    for hook in of_tensor.values():
        fake.register_hook(hook)
    for hook in of_sum.values():
        fake.register_post_accumulate_grad_hook(with_real(hook))


def schedulers_of(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return a scheduler, followed by the schedulers inside it (SequentialLR, ChainedScheduler)."""
    inner = cast(list[LRScheduler], getattr(scheduler, "_schedulers", []))
    return [scheduler, *(s for nested in inner for s in schedulers_of(nested))]
