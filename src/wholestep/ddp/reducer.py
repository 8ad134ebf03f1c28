"""DDP's reducer: which gradients it puts into one bucket, read from a DDP module or from a dynamo graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from .. import _torch


@dataclass(frozen=True)
class Param:
    """A parameter whose gradient is reduced.

    `number` is its position in order of registration, `size_bytes` the size of its gradient. Only gradients of the same
    `kind` (dtype and device) share a bucket; a sparse gradient has its own bucket.
    """

    name: str
    number: int
    size_bytes: int
    kind: tuple[str, str]
    sparse: bool = False


def assign(params: Sequence[Param], limits: Sequence[int]) -> tuple[tuple[Param, ...], ...]:
    """Return the reducer's buckets, filled in the order of `params`; buckets that do not reach their limit are last.

    A bucket closes when its bytes reach the limit, so it may be larger. The n-th bucket of a kind has the n-th of
    `limits` (bytes), later ones the last.
    """
    closed: list[tuple[Param, ...]] = []
    filling: dict[tuple[str, str], list[Param]] = {}
    count: dict[tuple[str, str], int] = {}
    for param in params:
        if param.sparse:
            closed.append((param,))
            continue
        bucket = filling.setdefault(param.kind, [])
        bucket.append(param)
        limit = limits[min(count.get(param.kind, 0), len(limits) - 1)]
        if sum(p.size_bytes for p in bucket) >= limit:
            closed.append(tuple(filling.pop(param.kind)))
            count[param.kind] = count.get(param.kind, 0) + 1
    return (*closed, *(tuple(bucket) for bucket in filling.values()))


@dataclass(frozen=True)
class Reducer:
    """The reducer of one DDP module: its parameters in order of registration, and its limits in bytes.

    `by_arrival`: the reducer rebuilds its buckets after the first backward, in the order of arrival of the gradients;
    else (DDP's `find_unused_parameters` without `static_graph`) buckets keep the order of registration.
    """

    params: tuple[Param, ...]
    limits: tuple[int, ...]
    by_arrival: bool = True

    def buckets(self, arrivals: Sequence[Param]) -> tuple[tuple[Param, ...], ...]:
        """Return the buckets in the order of reduction, if the gradients of one graph arrive in this order.

        Parameters registered after all of these are assumed to arrive before them, from later graphs.
        """
        if not self.by_arrival:
            buckets = assign(self.params, self.limits)
            return tuple(sorted(buckets, key=lambda bucket: min(p.number for p in bucket), reverse=True))
        last = max((p.number for p in arrivals), default=-1)
        before = (p for p in reversed(self.params) if p.number > last)
        return assign((*before, *arrivals), self.limits)


def reduced_by(ddp: DistributedDataParallel) -> dict[nn.Parameter, Param]:
    """Return the parameters whose gradients `ddp` reduces, in order of registration."""
    untyped: Any = ddp
    reduced: dict[nn.Parameter, Param] = {}
    modules: Iterable[tuple[str, nn.Module]] = untyped.module.named_modules()
    for path, module in modules:
        sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and f"{path}.{name}" not in untyped.parameters_to_ignore and param not in reduced:
                reduced[param] = _describe(param, f"{path}.{name}".lstrip("."), len(reduced), sparse)
    return reduced


def _describe(param: nn.Parameter, name: str, number: int, sparse: bool = False) -> Param:
    kind = str(param.dtype), str(param.device)
    return Param(name, number, param.numel() * param.element_size(), kind, sparse)


def reducer_of(ddp: DistributedDataParallel, params: Iterable[Param]) -> Reducer:
    """Return the reducer of `ddp` with its bucket limits."""
    untyped: Any = ddp
    limits: list[int] = list(untyped.bucket_bytes_cap_list)
    if not limits:
        cap = int(untyped.bucket_bytes_cap)
        limits = [_torch.first_bucket_bytes() if untyped.bucket_bytes_cap_default else cap, cap]
    by_arrival = bool(ddp.static_graph) or not ddp.find_unused_parameters
    return Reducer(tuple(params), tuple(limits), by_arrival)


def params_of_nodes(graph_module: GraphModule, inputs: Sequence[Any]) -> dict[Node, list[nn.Parameter]]:
    """Return the parameters of the inputs, attributes and module calls in dynamo's graph."""
    places = graph_module.graph.find_nodes(op="placeholder")
    by_node = {n: [value] for n, value in zip(places, inputs, strict=True) if isinstance(value, nn.Parameter)}
    for node in graph_module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value = attrgetter(str(node.target))(graph_module)
            params = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            by_node[node] = [p for p in params if isinstance(p, nn.Parameter)]
    return by_node


def reduced_in(graph_module: GraphModule, params: dict[Node, list[nn.Parameter]]) -> dict[nn.Parameter, Param]:
    """Return the parameters of a graph without a DDP module that need a gradient and that DDP does not ignore."""
    reduced: dict[nn.Parameter, Param] = {}
    for node in graph_module.graph.nodes:
        for param in params.get(node, ()):
            if param.requires_grad and not getattr(param, "_ddp_ignored", False) and param not in reduced:
                reduced[param] = _describe(param, node.name, len(reduced))
    return reduced
