"""What functions under `functools.cache` and `functools.lru_cache` have kept.

An object that a cached function makes during a trace would be another one in the calls: it is made outside of the
trace, and the step is traced again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import numpy as np
import torch
from torch.fx import Node

from .. import _torch
from ..errors import CaptureError
from ..graph.meta import show_line
from ..rules.registry import draws
from .call_structure import take_apart
from .locations import SIMPLE

CACHE = type(functools.cache(int))
"""The type of functions under `functools.cache` and `functools.lru_cache`."""


@dataclass(frozen=True)
class CachedCall:
    """A call whose result a cache has kept, by the `key` of that cache."""

    cache: Any
    key: Any
    result: Any

    def repeat(self, repeated: Collection[CachedCall]) -> None:
        """Make the call, so that the cache keeps what it returns outside of a trace; it is none of those `repeated`."""
        if any(self.cache is one.cache and self.key == one.key for one in repeated):
            raise self._error("makes an object again that its cache did not keep")
        args, kwargs = _arguments(self.key, self.cache.cache_parameters()["typed"])
        if _has_tensor((args, *kwargs.values())):
            raise self._error("makes an object from a tensor")
        before = torch.get_rng_state()
        self.cache(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            _remove(self.cache, [self.key])
            raise self._error("draws random numbers for what it keeps")

    def _error(self, what: str) -> CaptureError:
        function = self.cache.__wrapped__
        name, code = getattr(function, "__qualname__", str(function)), getattr(function, "__code__", None)
        return CaptureError(
            f"the cached function {name} {what} while the step is captured",
            "a result that is there before the step runs, which each call then uses",
            f"call {name} once before the first step",
            show_line(code.co_filename, code.co_firstlineno) if code is not None else "",  # none of a class
        )


class KeptResults:
    """The results in `caches`, to be compared with what they are after a trace."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self._before = [(cache, results_of(cache)) for cache in caches]

    def new(self) -> list[CachedCall]:
        """Return the calls whose results the caches did not have."""
        return [
            CachedCall(cache, key, result)
            for cache, before in self._before
            for key, result in results_of(cache).items()
            if before.get(key, self) is not result
        ]

    def forget(self, calls: Sequence[CachedCall], can_change: Callable[[Any], bool]) -> None:
        """Remove the results of `calls`. What `can_change` of the others stays: the step may have changed it before."""
        for cache, before in self._before:
            keys = [call.key for call in calls if call.cache is cache]
            if keys and any(map(can_change, before.values())):
                _remove(cache, keys)
            elif keys:
                cache.cache_clear()


def results_of(cache: Any) -> dict[Any, Any]:
    """Return the results in a cache by key. One with a size limit refers to key, result and type of link for each."""
    parts: list[Any] = [part for part in gc.get_referents(cache) if part is not type(cache)]
    triples = zip(parts[::3], parts[1::3], parts[2::3], strict=False)
    table, linked = _table(cache), takewhile(lambda one: _is_link(one[2]), triples)
    found = {key: result for key, result, _ in linked if key in table}  # the last of a key: `_remove` leaves links
    return found or {**table}


def _table(cache: Any) -> dict[Any, Any]:
    own = cast(object, vars(cache))
    tables: list[dict[Any, Any]] = [part for part in gc.get_referents(cache) if type(part) is dict and part is not own]
    return tables[-1]  # results may be dicts, and stand before it


def _remove(cache: Any, keys: Sequence[Any]) -> None:
    for key in keys:
        del _table(cache)[key]


def _arguments(key: Any, typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call from its key: these, a mark before each name and value, the types of all."""
    if not isinstance(key, tuple):
        return (key,), {}
    whole = cast(tuple[Any, ...], key)
    mark = next((i for i, part in enumerate(whole) if type(part) is object), None)
    if mark is None:
        return whole[: len(whole) // 2] if typed else whole, {}
    named = whole[mark + 1 :]
    if typed:
        named = named[: (len(named) - mark) // 3 * 2]
    return whole[:mark], dict(zip(named[::2], named[1::2], strict=True))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_has_tensor, cast(tuple[Any, ...], value)))
    return isinstance(value, torch.Tensor)


def _is_link(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == "functools" and kind.__name__ == "_lru_list_elem"


def is_drawn(value: Any) -> bool:
    """Return whether tensors of the active trace in `value` depend on random numbers."""
    made = [_torch.traced_node(v) for v in take_apart(value, objects=False).leaves if _torch.is_fake(v)]
    waiting, seen = [one[0] for one in made if one is not None], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if draws(node):
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False


def is_data(value: Any) -> bool:
    """Return whether a value consists of plain values, tensors and arrays, in containers."""
    if isinstance(value, Mapping):
        return all(map(is_data, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_data, cast("list[Any]", value)))
    return isinstance(value, (*SIMPLE, torch.Tensor, np.ndarray, np.generic))
