"""`ws.ddp_backend`: splits dynamo's graph of a DDP model at DDP's bucket boundaries and compiles the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from torch.fx import GraphModule, Node

from .. import _torch
from ..errors import BackendError
from .reducer import Param, Reducer, params_of_nodes, reduced_by, reduced_in, reducer_of
from .split import DdpBucket, Split, call_whole, compile_parts, cut, detach_idle, plan_split, until_rebuilt, with_order

NAME = "wholestep.ddp"
MIB = 2**20
log = logging.getLogger(NAME)


class DdpBackend:
    """A backend for `torch.compile`, created by `ws.ddp_backend`; prints as a table of the last graph's buckets."""

    def __init__(self, inner: str | Callable[..., Any], cap_bytes: int | None, first_bytes: int | None) -> None:
        self.__name__ = NAME  # dynamo reads it
        self.name = inner if isinstance(inner, str) else ""
        self.inner = _torch.dynamo_backend(inner) if isinstance(inner, str) else inner
        self.cap_bytes, self.first_bytes = cap_bytes, first_bytes
        self.splits: list[Split] = []

    @property
    def buckets(self) -> tuple[DdpBucket, ...]:
        """The buckets of the last compiled graph, from the input to the output; empty before."""
        return self.splits[-1].buckets if self.splits else ()

    def __str__(self) -> str:
        if not self.splits:
            return f"{NAME}: no graph with parameters of a DDP model compiled yet"
        return f"{NAME}: {self.splits[-1].headline}\n{self.splits[-1]}"

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one dynamo graph, which torch's splitter for DDP models must not have split."""
        if _torch.split_by_torch():
            raise BackendError(
                f"torch's own splitter for DDP models split this graph before {NAME!r}",
                "only one of the two splitters",
                "do not change torch._dynamo.config.optimize_ddp after ws.ddp_backend(), which sets it to False",
            )

        passed = _torch.inductor_settings(**options) if self.name == "inductor" else options

        def compiler(part: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            return self.inner(part, list(fakes), **passed)

        params = params_of_nodes(graph_module, example_inputs)
        ddp = _torch.ddp_in_use()
        reduced = reduced_by(ddp) if ddp is not None else reduced_in(graph_module, params)
        uses = {node: [reduced[p] for p in parameters if p in reduced] for node, parameters in params.items()}
        reducer = self._reducer(ddp, list(reduced.values()))
        if reducer is None or not any(uses.values()) or not _torch.in_dynamo():
            log.debug("%s: no parameter of a DDP model in this graph, not split", NAME)
            return compiler(graph_module, example_inputs)
        split = plan_split(graph_module.graph, uses, reducer)
        self.splits.append(split)
        log.info("%s: %s (level DEBUG lists them)", NAME, split.headline)
        log.debug("%s: buckets, from the input to the output\n%s", NAME, split)
        if split.extension:
            log.warning("%s: %s", NAME, split.extension)
        return _compile(graph_module, example_inputs, split, uses, compiler, ddp is not None and reducer.by_arrival)

    def _reducer(self, ddp: Any, params: Sequence[Param]) -> Reducer | None:
        """Return the reducer to split by: the running DDP module's, with the user's bucket caps if given."""
        has_caps = self.cap_bytes is not None or self.first_bytes is not None
        if ddp is not None:
            reducer = reducer_of(ddp, params)
            if not has_caps:
                return reducer
            limits = self.limits(reducer.limits[-1])
            if limits != reducer.limits:
                problem = f"bucket caps of {limits} bytes differ from the caps {reducer.limits} of this DDP model"
                log.warning("%s: %s: parts are not its buckets", NAME, problem)
            return Reducer(tuple(params), limits)
        return Reducer(tuple(params), self.limits(25 * MIB)) if has_caps else None

    def limits(self, cap_bytes: int) -> tuple[int, int]:
        """Return `(first_bytes, cap_bytes)`, checked: the user's values; torch's first and `cap_bytes` by default."""
        cap = cap_bytes if self.cap_bytes is None else self.cap_bytes
        first = min(_torch.first_bucket_bytes(), cap) if self.first_bytes is None else self.first_bytes
        if cap <= 0 or first <= 0:
            raise BackendError(f"bucket caps of {first:,} and {cap:,} bytes", "positive sizes")
        if first > cap:
            problem = f"first_bucket_cap is {first:,} bytes, more than the {cap:,} bytes of the other buckets"
            needed = "a first bucket no larger than the others, so that it is sent early"
            raise BackendError(problem, needed, f"pass first_bucket_cap={cap} or less, or a larger bucket_cap_mb")
        return first, cap


def _compile(
    graph_module: GraphModule, inputs: Sequence[Any], split: Split, uses: dict[Node, list[Param]],
    compiler: Callable[..., Any], ordered: bool,
) -> Callable[..., Any]:  # fmt: skip
    """Compile the parts; with `ordered`, gradients arrive in the order of the split until DDP rebuilds its buckets."""
    places = graph_module.graph.find_nodes(op="placeholder")
    number = {param: i for i, node in enumerate(places) for param in uses.get(node, ())}
    arrivals = [[number[param] for param in bucket.params if param in number] for bucket in split.buckets]
    if len(split.buckets) == 1:
        plain = compiler(graph_module, inputs)
        outer = call_whole(graph_module.graph, plain)
    else:
        plain = outer = cut(graph_module, split)
        detach_idle(outer, arrivals)
        compile_parts(graph_module, outer, compiler)
    return until_rebuilt(plain, with_order(outer, arrivals)) if ordered else plain


def ddp_backend(
    inner: str | Callable[..., Any] = "inductor",
    *,
    bucket_cap_mb: float | None = None,
    first_bucket_cap: int | None = None,
) -> DdpBackend:
    """Return a `torch.compile` backend that splits models in DistributedDataParallel at DDP's bucket boundaries.

    The backward of one part completes one bucket of gradients, so DDP reduces it while the next part computes. The
    boundaries depend on the running DDP module. Disables torch's own splitter in this process
    (`torch._dynamo.config.optimize_ddp`). `ddp_backend()` is registered with dynamo as "wholestep.ddp".

    Args:
        inner: the backend that compiles the parts, by name or as a callable `(graph_module, example_inputs)`.
        bucket_cap_mb: bucket size in MiB, if other than DDP's; the parts are then not DDP's buckets. Required to split
            a model without a DDP module.
        first_bucket_cap: bytes of the bucket nearest the output, which is sent first; by default 1,048,576, or
            `bucket_cap_mb` if smaller.

    Raises:
        BackendError: `inner` is unknown, or a size is out of range.

    Example:
        >>> model = torch.compile(DistributedDataParallel(net), backend=ws.ddp_backend(inner="aot_eager"))
    """
    if bucket_cap_mb == inf:
        raise BackendError("bucket_cap_mb=inf", "a finite number", "leave it out: DDP's size is taken")
    if inner == NAME:
        raise BackendError(f"inner={NAME!r} is this backend itself", "a backend that compiles", 'inner="inductor"')
    backend = DdpBackend(inner, None if bucket_cap_mb is None else int(bucket_cap_mb * MIB), first_bucket_cap)
    if backend.cap_bytes is not None:
        backend.limits(backend.cap_bytes)
    if _torch.disable_torch_splitter():
        log.info("%s: set torch._dynamo.config.optimize_ddp to False, which disables torch's own splitter", NAME)
    return backend


def __getattr__(name: str) -> DdpBackend:
    """Create `registered` lazily: dynamo's registry loads it at the first use of the name "wholestep.ddp"."""
    if name == "registered":
        return ddp_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
