"""`ws.ddp_backend`: splits what dynamo captured of a DDP model on DDP's bucket boundaries and compiles the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from .. import _torch
from ..errors import BackendError
from . import bucket_table
from .buckets import Param, Reducer
from .compile_parts import compile_parts
from .gradient_order import call_whole, detach_idle, until_settled, with_order
from .model import held, reduced_by, reduced_in, reducer_of
from .split import DdpBucket, Split, cut, plan_split

NAME = "wholestep.ddp"
MIB = 2**20
log = logging.getLogger(NAME)


class DdpBackend:
    """A backend for `torch.compile`, made by `ws.ddp_backend`; prints as the table of the buckets it cut last."""

    def __init__(self, inner: str | Callable[..., Any], cap_bytes: int | None, first_bytes: int | None) -> None:
        self.__name__ = NAME  # what dynamo calls it
        self.name = inner if isinstance(inner, str) else ""
        self.inner = _torch.dynamo_backend(inner) if isinstance(inner, str) else inner
        self.cap_bytes, self.first_bytes = cap_bytes, first_bytes
        self.splits: list[Split] = []

    @property
    def buckets(self) -> tuple[DdpBucket, ...]:
        """The buckets of the graph compiled last, the one nearest the input first; empty before."""
        return self.splits[-1].buckets if self.splits else ()

    def __str__(self) -> str:
        if not self.splits:
            return f"{NAME}: no graph with parameters of a DDP model was compiled yet"
        return f"{NAME}: {bucket_table.headline(self.splits[-1])}\n{bucket_table.table(self.splits[-1])}"

    def __call__(self, whole: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one dynamo graph.

        Raises:
            BackendError: torch's own splitter has cut the graph already.
        """
        if _torch.split_by_torch():
            raise BackendError(
                f"torch's own splitter for DDP models cut this graph before {NAME!r} got it",
                "one of the two alone",
                "leave torch._dynamo.config.optimize_ddp as it is after ws.ddp_backend(), which sets it to False",
            )

        passed = _torch.inductor_settings(**options) if self.name == "inductor" else options

        def compiler(part: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
            return self.inner(part, list(fakes), **passed)

        params = held(whole, example_inputs)
        ddp = _torch.ddp_in_use()
        known = reduced_by(ddp) if ddp is not None else reduced_in(whole, params)
        uses = {node: [known[p] for p in found if p in known] for node, found in params.items()}
        reducer = self._reducer(ddp, list(known.values()))
        if reducer is None or not any(uses.values()) or not _torch.in_dynamo():
            log.debug("%s: no parameter of a DDP model in this graph, compiled whole", NAME)
            return compiler(whole, example_inputs)
        split = plan_split(whole.graph, uses, reducer)
        self._keep(split)
        return _compile(whole, example_inputs, split, uses, compiler, ddp is not None and reducer.by_arrival)

    def _reducer(self, ddp: Any, params: Sequence[Param]) -> Reducer | None:
        """The rules to split by: those of the DDP module in use, unless the user gave others."""
        given = self.cap_bytes is not None or self.first_bytes is not None
        if ddp is not None:
            own = reducer_of(ddp, params)
            if not given:
                return own
            limits = self._limits(own.limits[-1])
            if limits != own.limits:
                log.warning(
                    "%s: asked to split at %s bytes, but this DDP model fills its buckets to %s: they will not agree",
                    NAME,
                    limits,
                    own.limits,
                )
            return Reducer(tuple(params), limits)
        return Reducer(tuple(params), self._limits(25 * MIB)) if given else None

    def _limits(self, cap_bytes: int) -> tuple[int, int]:
        cap = cap_bytes if self.cap_bytes is None else self.cap_bytes
        first = min(_torch.first_bucket_bytes(), cap) if self.first_bytes is None else self.first_bytes
        return check_limits(cap, first)

    def _keep(self, split: Split) -> None:
        self.splits.append(split)
        log.info("%s: %s (DEBUG shows which)", NAME, bucket_table.headline(split))
        log.debug("%s: buckets, from the input to the output\n%s", NAME, bucket_table.table(split))
        if split.extended:
            log.warning("%s: %s", NAME, bucket_table.extension(split))


def _compile(
    whole: GraphModule,
    inputs: Sequence[Any],
    split: Split,
    uses: dict[Node, list[Param]],
    compiler: Callable[..., Any],
    ordered: bool,
) -> Callable[..., Any]:
    """The callable for dynamo: the parts, compiled; with `ordered`, gradients first arrive as the split says."""
    places = whole.graph.find_nodes(op="placeholder")
    number = {param: i for i, node in enumerate(places) for param in uses.get(node, ())}
    arrivals = [[number[param] for param in bucket.params if param in number] for bucket in split.buckets]
    if len(split.buckets) == 1:
        plain = compiler(whole, inputs)
        outer = call_whole(whole.graph, plain)
    else:
        plain = outer = cut(whole, split)
        detach_idle(outer, arrivals)
        compile_parts(whole, outer, compiler)
    return until_settled(plain, with_order(outer, arrivals)) if ordered else plain


def check_limits(cap_bytes: int, first_bytes: int) -> tuple[int, int]:
    """The two limits, first bucket's first.

    Raises:
        BackendError: one is not positive, or the first is larger than the others'.
    """
    if cap_bytes <= 0 or first_bytes <= 0:
        raise BackendError(f"bucket caps of {first_bytes:,} and {cap_bytes:,} bytes", "positive sizes")
    if first_bytes > cap_bytes:
        raise BackendError(
            f"first_bucket_cap is {first_bytes:,} bytes, more than the {cap_bytes:,} bytes of the other buckets",
            "a first bucket no larger than the others: it is there to be sent early",
            f"pass first_bucket_cap={cap_bytes} or less, or a larger bucket_cap_mb",
        )
    return first_bytes, cap_bytes


def ddp_backend(
    inner: str | Callable[..., Any] = "inductor",
    *,
    bucket_cap_mb: float | None = None,
    first_bucket_cap: int | None = None,
) -> DdpBackend:
    """A `torch.compile` backend for models in DistributedDataParallel, which splits on DDP's bucket boundaries.

    Each bucket of gradients is complete when the backward of one part has run, so DDP sends it while the next part
    computes. Where the boundaries lie follows from the DDP module in use. torch's own splitter is switched off for the
    process (`torch._dynamo.config.optimize_ddp`). In dynamo's registry `ddp_backend()` has the name "wholestep.ddp".

    Args:
        inner: the backend that compiles the parts, by name or as a callable `(graph_module, example_inputs)`.
        bucket_cap_mb: split at other sizes than DDP does, in MiB; the parts then are not DDP's buckets. Needed to
            split a model that no DDP module holds.
        first_bucket_cap: bytes of the bucket nearest the output, which is sent first: 1,048,576 if not given, or
            `bucket_cap_mb` where that is smaller.

    Raises:
        BackendError: `inner` is not known, or a size is out of range.

    Example:
        >>> model = torch.compile(DistributedDataParallel(net), backend=ws.ddp_backend(inner="aot_eager"))
    """
    cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
    if cap_bytes is not None:
        first = min(_torch.first_bucket_bytes(), cap_bytes) if first_bucket_cap is None else first_bucket_cap
        check_limits(cap_bytes, first)
    if inner == NAME:
        raise BackendError(f"inner={NAME!r} is this backend itself", "a backend that compiles", 'inner="inductor"')
    made = DdpBackend(inner, cap_bytes, first_bucket_cap)
    if _torch.disable_torch_splitter():
        log.info("%s: set torch._dynamo.config.optimize_ddp to False: torch's own splitter stays out of the way", NAME)
    return made


def __getattr__(name: str) -> DdpBackend:
    """`registered` is what dynamo's registry loads when the name "wholestep.ddp" is used for the first time."""
    if name == "registered":
        return ddp_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
