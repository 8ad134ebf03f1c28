"""What a trace has recorded, before it is normalized: traces that recorded the same become the same graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import TrainGraph
from .trace import Traced


@dataclass(frozen=True)
class RawTrace:
    """`normalize` makes equal graphs of traces with equal digests. `tensors`: the constants of the trace."""

    digest: bytes
    tensors: tuple[torch.Tensor, ...]

    def graph_like(self, other: RawTrace, graph: TrainGraph) -> TrainGraph | None:
        """Return `graph`, which is that of `other`, with what this trace reads; None if this one may have another."""
        pairs = {id(before): now for before, now in zip(other.tensors, self.tensors, strict=False)}
        constants = {name: pairs.get(id(tensor)) for name, tensor in graph.constants.items()}
        if self.digest != other.digest or None in constants.values():
            return None
        return replace(graph, constants=constants)


def raw_trace(traced: Traced) -> RawTrace | None:
    """None where a digest would not say all: sizes are symbols, branches are assumed, arguments are no plain values."""
    if traced.stand_ins.symbols is not None or traced.branches.decided:
        return None
    lists = traced.stand_ins.inputs, traced.created, traced.draws.repeats
    parts: list[Any] = [torch.get_default_dtype(), traced.fresh_grads, len(traced.result_leaves), *lists]
    places, tensors, notes = dict[Any, int](), dict[int, torch.Tensor](), dict[int, tuple[int, str]]()
    for node in traced.module.graph.nodes:
        places[node] = len(places)
        origin = meta.origin(node)
        if (key := _torch.identity(origin)) not in notes:
            notes[key] = len(notes), repr(origin)
        target = node.target if isinstance(node.target, str) else _torch.identity(node.target)
        parts += (target, notes[key][0], len(node.args), tuple(node.kwargs))
        result = meta.value(node)
        values: list[Any] = [*node.args, *node.kwargs.values()]
        values += [] if isinstance(result, torch.ScriptObject) else [result]  # of a mark for a profiler
        if node.op == "get_attr":
            tensor: Any = getattr(traced.module, node.target)
            if not isinstance(tensor, torch.Tensor):
                return None
            tensors.setdefault(id(tensor), tensor)
            parts += ([*tensors].index(id(tensor)), meta.meta_of(tensor), tensor.requires_grad, tensor.is_conj())
            parts += (tensor.storage_offset(), tensor.untyped_storage().resizable(), tensor.is_neg())
            values.clear()
        if not _add(parts, values, places):
            return None
    parts += (*notes.values(), *places)
    return RawTrace(hashlib.blake2b(repr(parts).encode()).digest(), tuple(tensors.values()))


def _add(parts: list[Any], values: Sequence[Any], places: dict[Any, int]) -> bool:
    """Append what the operands and the result of a node are; False where that is not known. Kinds have `places` too."""
    for value in values:
        if type(value) is Node:
            parts += (Node, places[value])
        elif isinstance(value, (tuple, list)):
            parts += (list, len(cast(Sequence[Any], value)))
            if not _add(parts, cast(Sequence[Any], value), places):
                return False
        elif _torch.is_fake(value):
            if not _torch.add_kinds(kind := list[Any](), (value,)):
                return False
            parts.append(places.setdefault(tuple(kind), len(places)))
        elif not _torch.add_kinds(parts, (value,)):
            return False
    return True
