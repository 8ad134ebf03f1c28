"""Reads the reducer's settings from a DDP module, and finds its parameters in a dynamo graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from .. import _torch
from .buckets import Param, Reducer

Reduced = dict[nn.Parameter, Param]


def reduced_by(ddp: DistributedDataParallel) -> Reduced:
    """Return the parameters whose gradients `ddp` reduces, in order of registration."""
    known: Any = ddp
    ignored: set[str] = known.parameters_to_ignore
    modules: Iterable[tuple[str, nn.Module]] = known.module.named_modules()
    found: Reduced = {}
    for path, module in modules:
        sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        for name, param in module.named_parameters(recurse=False):
            if param.requires_grad and f"{path}.{name}" not in ignored and param not in found:
                found[param] = describe(param, f"{path}.{name}".lstrip("."), len(found), sparse)
    return found


def describe(param: nn.Parameter, name: str, number: int, sparse: bool = False) -> Param:
    """Return the reducer's view of `param`."""
    size_bytes = param.numel() * param.element_size()
    return Param(name, number, size_bytes, (str(param.dtype), str(param.device)), sparse)


def reducer_of(ddp: DistributedDataParallel, params: Iterable[Param]) -> Reducer:
    """Return the reducer of `ddp` with its bucket limits."""
    known: Any = ddp
    limits: list[int] = list(known.bucket_bytes_cap_list)
    if not limits:
        cap = int(known.bucket_bytes_cap)
        limits = [_torch.first_bucket_bytes() if known.bucket_bytes_cap_default else cap, cap]
    by_arrival = bool(ddp.static_graph) or not ddp.find_unused_parameters
    return Reducer(tuple(params), tuple(limits), by_arrival)


def params_of_nodes(whole: GraphModule, inputs: Sequence[Any]) -> dict[Node, list[nn.Parameter]]:
    """Return the parameters of the inputs, attributes and module calls in dynamo's graph."""
    places = whole.graph.find_nodes(op="placeholder")
    found = {n: [value] for n, value in zip(places, inputs, strict=True) if isinstance(value, nn.Parameter)}
    for node in whole.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value: Any = whole
            for name in str(node.target).split("."):
                value = getattr(value, name)
            params = list(value.parameters()) if isinstance(value, nn.Module) else [value]
            found[node] = [p for p in params if isinstance(p, nn.Parameter)]
    return found


def reduced_in(whole: GraphModule, params: dict[Node, list[nn.Parameter]]) -> Reduced:
    """Return the parameters of a graph without a DDP module that need a gradient and that DDP does not ignore."""
    found: Reduced = {}
    for node in whole.graph.nodes:
        for param in params.get(node, ()):
            if param.requires_grad and not getattr(param, "_ddp_ignored", False) and param not in found:
                found[param] = describe(param, node.name, len(found))
    return found
