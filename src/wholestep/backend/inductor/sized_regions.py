"""Regions whose shapes follow from sizes of the batch: compiled with symbols, once for all sizes.

What the compiler asked of sizes (`s0 * s1 <= 4096`, where it takes another loop) is a condition of what it made. Sizes
that break it get another function for their side, a few at most; further ones run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Proxy
from torch.fx.node import map_aggregate
from torch.fx.proxy import GraphAppendingTracer

from ... import _torch
from ...errors import first_line
from ...graph.meta import TensorMeta
from ...sizes import SizeGuards, SizeInt, evaluate, evaluator, text_of
from ...tuning import TUNING

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def symbolic_fake(tensor_meta: TensorMeta, symbols: _torch.Symbols) -> torch.Tensor:
    """A fake tensor with the symbols of an environment in its shape."""
    shape, stride = symbols.symbolic(tensor_meta.shape), symbols.symbolic(tensor_meta.stride)
    with symbols.mode:
        return torch.empty_strided(shape, stride, dtype=tensor_meta.dtype, device=tensor_meta.device)


def with_symbols(module: GraphModule, record: SizeGuards) -> GraphModule:
    """`module` with the sizes of symbols as further inputs, from which it computes what it needs."""
    graph, nodes = module.graph, dict[str, Any]()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        symbols = {symbol: Proxy(graph.placeholder(symbol), GraphAppendingTracer(graph)) for symbol in record.dims}

        def computed(leaf: Any) -> Any:
            if not isinstance(leaf, SizeInt):
                return leaf
            if leaf.text not in nodes:
                nodes[leaf.text] = evaluate(leaf.text, {**symbols, **_torch.SYMBOLIC_FUNCTIONS}).node
            return nodes[leaf.text]

        for node in list(graph.nodes):
            args, kwargs = map_aggregate((node.args, node.kwargs), computed)  # pyright: ignore[reportGeneralTypeIssues]  # of fx, untyped
            _torch.set_operands(node, args, kwargs)
    return GraphModule({}, graph)


@dataclass(eq=False)
class SizedRegion:
    """A region as a function of its tensors and of the sizes of all symbols. `metas` describe the tensors.

    `variants` are the compiled functions, each with what its sizes have to fulfil; `compiles` counts tries.
    """

    module: GraphModule
    metas: Sequence[TensorMeta]
    record: SizeGuards
    compile: Compile
    name: str
    variants: list[tuple[Callable[..., Sequence[bool]], Callable[..., Any]]] = field(default_factory=list[Any])
    compiles: int = 0
    by_sizes: dict[tuple[int, ...], Callable[..., Any]] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        self._tensors, self._symbols = len(self.metas), list(self.record.dims)
        texts = [str(text_of(n)) for tensor in self.metas for n in (*tensor.shape, *tensor.stride)]
        self._described = evaluator(texts, self._symbols)
        self.compile_at(self.record.now)

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        run = self.by_sizes.get(inputs[self._tensors :])
        if run is None:
            run = self._find(inputs[: self._tensors], inputs[self._tensors :])
        return run(*inputs)

    def _find(self, tensors: Sequence[torch.Tensor], now: tuple[int, ...]) -> Callable[..., Any]:
        """The function for sizes that are new."""
        run = self._fits(tensors, now)
        if len(self.by_sizes) >= TUNING.kept_log:
            self.by_sizes.clear()
        self.by_sizes[now] = run
        return run

    def _fits(self, tensors: Sequence[torch.Tensor], now: tuple[int, ...]) -> Callable[..., Any]:
        actual = tuple(n for tensor in tensors for n in (*tensor.shape, *tensor.stride()))
        sizes = self.record.shown_now()
        if actual != self._described(*now):
            self.record.say(f"a region runs op by op at {sizes}: its inputs have other strides")
            return self.module
        for holds, run in self.variants:
            if all(holds(*now)):
                return run
        if self.compiles >= TUNING.most_region_programs:
            self.record.say(f"a region runs op by op at {sizes}: it was compiled {self.compiles} times")
            return self.module
        self.record.say(f"a region is compiled again at {sizes}: Inductor compares sizes in %{self.name}")
        with self.record.busy():
            return self.compile_at(now) or self.module

    def compile_at(self, now: tuple[int, ...]) -> Callable[..., Any] | None:
        """Compile it with symbols that have these sizes now; None where that fails, which is said."""
        self.compiles += 1
        symbols = self.record.symbols.apart(dict(zip(self._symbols, now, strict=True)))
        try:
            examples = [symbolic_fake(tensor, symbols) for tensor in self.metas]
            run = self.compile(self.module, [*examples, *symbols.ints()])
        except Exception as error:  # whatever the compiler does not do with symbols
            self.record.say(f"a region runs op by op, as Inductor cannot compile it with symbols: {first_line(error)}")
            self.compiles = TUNING.most_region_programs
            return None
        guards = [guard.text for guard in symbols.guards()]
        self.variants.append((evaluator([f"({text})" for text in guards], self._symbols), run))
        return run
