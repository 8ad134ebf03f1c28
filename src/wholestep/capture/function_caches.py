"""What functions under `functools.cache` and `functools.lru_cache` have kept."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch

from .locations import SIMPLE


def entries_of(cache: Any) -> list[Any]:
    """Return the results in a cache. One with a size limit refers to key, result and type of link for each."""
    parts: list[Any] = [part for part in gc.get_referents(cache) if part is not vars(cache)]
    linked = [value for value, kind in pairwise(parts) if _is_link(kind) and type(value) is not object]
    tables: list[dict[Any, Any]] = [part for part in parts if type(part) is dict]
    return linked + [value for table in tables for value in table.values() if not _is_link(type(value))]


def _is_link(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__ == "functools" and kind.__name__ == "_lru_list_elem"


def is_data(value: Any) -> bool:
    """Return whether a value consists of plain values, tensors and arrays, in containers."""
    if isinstance(value, Mapping):
        return all(map(is_data, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_data, cast("list[Any]", value)))
    return isinstance(value, (*SIMPLE, torch.Tensor, np.ndarray, np.generic))
