"""Functions under `functools.cache` and `functools.lru_cache` that a step calls.

Uncompiled, such a function runs once. So it runs outside of the trace, as if it had been called before the step.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from types import FunctionType
from typing import Any, cast

import numpy as np
import torch

from .. import _torch
from ..errors import CaptureError
from ..graph.meta import show_line
from .call_structure import take_apart
from .locations import SIMPLE

CACHE = type(functools.cache(int))
"""The type of functions under `functools.cache` and `functools.lru_cache`."""


@dataclass(frozen=True)
class CachedCall:
    """A call that its cache could not answer, of code at `line`; `changes`: the step may change what it has made."""

    cache: Any
    arguments: tuple[Any, ...]
    line: str
    changes: bool = False

    def error(self, what: str) -> CaptureError:
        """The error for a call that `what` makes impossible to make before the step."""
        name = self.cache.__wrapped__.__qualname__
        problem = f"the cached function {name} {what} while the step is captured"
        needed = "a result that is there before the step runs, which each call then uses"
        return CaptureError(problem, needed, f"call {name} once before the first step", self.line)


class CachedCalls:
    """The calls of one trace that `caches` could not answer: `new` are those with more than a plain value as a result.

    Changes of Python's objects in the context `staying` are no effects of the step. `is_running`: such a call runs now;
    `reached` are the lines of it that do something outside of Python's objects.
    """

    def __init__(
        self, caches: Sequence[Any], changeable: Callable[[Any], list[Any]], holds_fake: Callable[[Any], bool],
        staying: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        self._changeable, self._holds_fake, self._staying = changeable, holds_fake, staying
        self._caches, self._misses = caches, [cache.cache_info().misses for cache in caches]
        self._of_trace, self._made = list[Any](), list[Any]()
        self.new, self.reached = list[CachedCall](), list[str]()
        self.is_running = False

    def forms(self) -> list[tuple[Any, str, Any]]:
        """Attributes to set while the step is traced."""
        functions = dict.fromkeys(_function_of(cache.__wrapped__) for cache in self._caches)
        return [_torch.code_form(code, partial(self._on_call, code)) for code in functions if code is not None]

    def end(self) -> None:
        """Restore what calls have made, as it was then, and forget results that are of the trace."""
        for container in self._made:
            container.restore(set())
        for cache in self._of_trace:
            cache.cache_clear()

    def _on_call(self, function: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        cache = self._missed(function)
        if cache is None or self.is_running:
            return original(*args, **kwargs)
        created = args[:1] if isinstance(cache.__wrapped__, type) else ()  # the new object, of a class
        code = cast(Any, original).__code__
        arguments = *args[len(created) :], *kwargs.items()
        call = CachedCall(cache, arguments, show_line(code.co_filename, code.co_firstlineno))
        if any(isinstance(leaf, torch.Tensor) for leaf in take_apart((args, kwargs), objects=False).leaves):
            returned = original(*args, **kwargs)
            if any(map(self._changeable, (*created, returned, *results_of(cache).values()))):
                raise call.error("makes an object from a tensor")
            self._of_trace.append(cache)
            return returned
        self.is_running = True
        try:
            with self._staying(), _torch.unobserved():
                before = torch.default_generator.get_state()
                returned = original(*args, **kwargs)
                drawn = not torch.equal(before, torch.default_generator.get_state())
                torch.default_generator.set_state(before)
        finally:
            self.is_running = False
        result = created[0] if created else returned
        if drawn:
            raise call.error("draws random numbers for what it keeps")
        if self.reached and not is_data(result):
            raise done_once("keeps what a cached function opened or drew", self.reached[0])
        self.reached.clear()
        if self._holds_fake(result):
            raise call.error("keeps a value of the trace")
        if not isinstance(result, SIMPLE):
            containers = self._changeable(result)
            self._made += containers
            self.new.append(replace(call, changes=bool(containers)))
        return returned

    def _missed(self, function: Any) -> Any:
        """The cache that calls a function of its own; None where the step calls it."""
        for number, cache in enumerate(self._caches):
            now = cache.cache_info()
            cleared = now.misses and not now.currsize
            if (now.misses != self._misses[number] or cleared) and _function_of(cache.__wrapped__) is function:
                self._misses[number] = now.misses
                return cache
        return None


def done_once(what: str, line: str) -> CaptureError:
    """Return the error for what would happen in the trace alone."""
    return CaptureError(
        f"the step {what}: that would happen once, while the step is captured, and in no later step",
        "a step that reads and changes tensors and objects of Python alone",
        "do it outside of the step, or write wholestep.callback(fn, ...), which calls fn in each step",
        line,
    )


def _function_of(wrapped: Any) -> FunctionType | None:
    """The function of Python that runs for what a cache does not have; of a class, its `__init__`."""
    function = wrapped.__init__ if isinstance(wrapped, type) else wrapped
    return function if isinstance(function, FunctionType) else None


def results_of(cache: Any) -> dict[Any, Any]:
    """Return the results in a cache by key. One with a size limit refers to key, result and type of link for each."""
    attributes = cast(object, vars(cache))
    parts: list[Any] = [part for part in gc.get_referents(cache) if part is not type(cache)]
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    links = takewhile(lambda triple: getattr(triple[2], "__name__", "") == "_lru_list_elem", triples)
    results = {key: result for key, result, _ in links}
    return results or {**[part for part in parts if type(part) is dict and part is not attributes][-1]}


def is_data(value: Any) -> bool:
    """Return whether a value consists of plain values, tensors and arrays, in containers."""
    if isinstance(value, Mapping):
        return all(map(is_data, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_data, cast("list[Any]", value)))
    return isinstance(value, (*SIMPLE, torch.Tensor, np.ndarray, np.generic))
