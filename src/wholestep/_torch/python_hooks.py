"""Host side of a trace: numbers that become inputs, patched functions, and observed attributes."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import builtins
import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable
from types import FunctionType
from typing import Any, cast

import torch
from torch.fx.experimental import proxy_tensor
from torch.optim.lr_scheduler import LRScheduler

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
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


@contextlib.contextmanager
def patched_host(
    on_math: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
    on_scheduler: Callable[[LRScheduler, tuple[Any, ...], dict[str, Any]], bool],
    on_print: Callable[..., Any],
    on_clock: Callable[[str], None],
) -> Generator[None]:
    """Redirect functions of `math`, scheduler steps, `print` and clock reads to the given functions.

    `on_math` returns NotImplemented, and `on_scheduler` False, to run the original.
    """
    undo: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        undo.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, new)

    def stand_in(new: Any, original: Any) -> Any:
        new.stands_in_for = original
        return new

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = on_math(function, args) if not kwargs else NotImplemented
            return function(*args, **kwargs) if made is NotImplemented else made

        return stand_in(call, function)

    def clock(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def read() -> Any:
            on_clock(name)
            return function()

        return stand_in(read, function)

    def stepping(original: Callable[..., None]) -> Callable[..., None]:
        def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
            if not on_scheduler(self, args, kwargs):
                original(self, *args, **kwargs)

        return step

    for name, function in list(vars(math).items()):
        if callable(function) and not name.startswith("_"):
            replace(math, name, watched(function))
    for name in (n + suffix for n in CLOCKS for suffix in ("", "_ns")):
        replace(time, name, clock(name, getattr(time, name)))
    for kind in _with_subclasses(LRScheduler):
        if "step" in vars(kind):
            replace(kind, "step", stepping(vars(kind)["step"]))
    replace(builtins, "print", on_print)
    try:
        yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for sub in kind.__subclasses__():
        found += [s for s in _with_subclasses(sub) if s not in found]
    return found


@contextlib.contextmanager
def watched_attributes(
    kinds: Iterable[type], read: Callable[[Any, str], None], written: Callable[[Any, str], None]
) -> Generator[set[type]]:
    """Call `read(object, name)` and `written(object, name)` for attribute accesses on objects of these classes.

    Yields the classes that cannot be observed.
    """
    patched: list[tuple[type, str, Any]] = []
    unobserved = set[type]()

    def watch(kind: type, method: str, notify: Callable[[Any, str], None]) -> None:
        original, inherited = vars(kind).get(method), getattr(kind, method)

        def watching(self: Any, name: str, *value: Any) -> Any:
            notify(self, name)
            return inherited(self, name, *value)

        setattr(kind, method, watching)
        patched.append((kind, method, original))

    try:
        known = {kind for kind, _, _ in patched}
        for kind in kinds:
            if known.intersection(kind.__mro__):
                continue
            try:
                watch(kind, "__getattribute__", read)
                watch(kind, "__setattr__", written)
                known.add(kind)
            except TypeError:
                unobserved.add(kind)
        yield unobserved
    finally:
        for kind, method, original in reversed(patched):
            if original is None:
                delattr(kind, method)
            else:
                setattr(kind, method, original)


def behind(value: Any) -> Any:
    """Return the original of a function that `patched_host` replaced; any other value unchanged."""
    return vars(value).get("stands_in_for", value) if isinstance(value, FunctionType) else value


def tensor_hooks(param: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the hooks on a parameter's gradient (`_backward_hooks`, 2.11 to 2.15)."""
    hooks: dict[int, Callable[..., Any]] = param._backward_hooks or {}
    return list(hooks.values())


def accumulation_hooks(param: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the post-accumulate-grad hooks of a parameter (2.11 to 2.15)."""
    hooks: dict[int, Callable[..., Any]] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return list(hooks.values())


def hook_count() -> int:
    """Return the number of hooks registered so far in this process."""
    return torch.utils.hooks.RemovableHandle.next_id


def schedulers_of(scheduler: LRScheduler) -> list[LRScheduler]:
    """Return a scheduler, followed by the schedulers inside it (SequentialLR, ChainedScheduler)."""
    inner = cast(list[LRScheduler], getattr(scheduler, "_schedulers", []))
    return [scheduler, *(s for one in inner for s in schedulers_of(one))]
