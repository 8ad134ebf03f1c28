"""What Python does around the tensors of a trace: numbers that become inputs, and functions that are watched."""

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
_own: Any = proxy_tensor


def new_input(
    mode: Any, dtype: torch.dtype, position: int, last: torch.fx.Node | None
) -> tuple[torch.Tensor, torch.fx.Node]:
    """A 0-dim fake tensor of the trace under way that is one more input of its graph, and the input's node.

    It is input number `position`; the node `last` is the one before, where that is known. make_fx makes its inputs
    known by `track_tensor_tree` (2.11 to 2.15); a graph in the making takes further placeholders.
    """
    proxies = _own.get_proxy_mode()
    assert proxies is not None, "asked while a step is traced"
    with _own.disable_proxy_modes_tracing(), mode:
        fake = torch.empty((), dtype=dtype)
    graph = proxies.tracer.graph
    if last is None and position:
        last = [node for node in graph.nodes if node.op == "placeholder"][position - 1]
    with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(f"number_{len(graph.nodes)}")
    _own.track_tensor_tree(fake, torch.fx.Proxy(node, proxies.tracer), constant=None, tracer=proxies.tracer)
    return fake, node


@contextlib.contextmanager
def patched_host(
    on_math: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
    on_scheduler: Callable[[LRScheduler, tuple[Any, ...], dict[str, Any]], bool],
    on_print: Callable[..., Any],
    on_clock: Callable[[str], None],
) -> Generator[None]:
    """Inside, functions of `math`, steps of schedulers, `print` and reads of the clock go through what is given.

    `on_math` returns NotImplemented for numbers that are plain, `on_scheduler` false for a step that is to be made.
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
    """Inside, `read` and `written` are told of attributes of objects of these classes: the object, the name.

    Gives the classes that cannot be watched.
    """
    patched: list[tuple[type, str, Any]] = []
    blind = set[type]()

    def watch(kind: type, method: str, tell: Callable[[Any, str], None]) -> None:
        original, inherited = vars(kind).get(method), getattr(kind, method)

        def watching(self: Any, name: str, *value: Any) -> Any:
            tell(self, name)
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
                blind.add(kind)
        yield blind
    finally:
        for kind, method, original in reversed(patched):
            if original is None:
                delattr(kind, method)
            else:
                setattr(kind, method, original)


def behind(value: Any) -> Any:
    """The function that `patched_host` has another one stand in for; any other value as it is."""
    return vars(value).get("stands_in_for", value) if isinstance(value, FunctionType) else value


def tensor_hooks(param: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks that the user put on a parameter's gradient.

    `_backward_hooks` (2.11 to 2.15): there is no public way to ask for them.
    """
    hooks: dict[int, Callable[..., Any]] = param._backward_hooks or {}
    return list(hooks.values())


def accumulation_hooks(param: torch.Tensor) -> list[Callable[..., Any]]:
    """Hooks that the user put on a parameter, to be called when its gradient is accumulated (2.11 to 2.15)."""
    hooks: dict[int, Callable[..., Any]] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return list(hooks.values())


def hook_count() -> int:
    """Grows with each hook that anybody registers anywhere."""
    return torch.utils.hooks.RemovableHandle.next_id


def schedulers_of(scheduler: LRScheduler) -> list[LRScheduler]:
    """A scheduler, followed by the schedulers that it drives (SequentialLR, ChainedScheduler)."""
    inner = cast(list[LRScheduler], getattr(scheduler, "_schedulers", []))
    return [scheduler, *(s for one in inner for s in schedulers_of(one))]
