"""What a DDP module says about its reducer, and which inputs of a dynamo graph are its parameters."""

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
    """The parameters whose gradients `ddp` reduces, in the order in which it registered them."""
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
    """`param` as the reducer sees it."""
    size_bytes = param.numel() * param.element_size()
    return Param(name, number, size_bytes, (str(param.dtype), str(param.device)), sparse)


def reducer_of(ddp: DistributedDataParallel, params: Iterable[Param]) -> Reducer:
    """The rules by which `ddp` makes its buckets."""
    known: Any = ddp
    limits: list[int] = list(known.bucket_bytes_cap_list)
    if not limits:
        cap = int(known.bucket_bytes_cap)
        limits = [_torch.first_bucket_bytes() if known.bucket_bytes_cap_default else cap, cap]
    by_arrival = bool(ddp.static_graph) or not ddp.find_unused_parameters
    return Reducer(tuple(params), tuple(limits), by_arrival)


def held(whole: GraphModule, inputs: Sequence[Any]) -> dict[Node, list[nn.Parameter]]:
    """The parameters that nodes of dynamo's graph stand for: inputs, attributes, and modules that are called."""
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
    """Without a DDP module: every parameter of the graph that needs a gradient and is not marked to be ignored."""
    found: Reduced = {}
    for node in whole.graph.nodes:
        for param in params.get(node, ()):
            if param.requires_grad and not getattr(param, "_ddp_ignored", False) and param not in found:
                found[param] = describe(param, node.name, len(found))
    return found
