"""Runs a bound graph as plain Python: one line for each node, every temporary freed after its last use.

Numbers that follow from sizes of the batch are computed at the head of the function, from the sizes of the call; those
that follow from rows that the step counts (`ROWS_OF`), where they are read.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .. import _torch
from ..errors import BackendError
from ..graph import meta
from ..graph.graph import Input
from ..graph.nodes import communicates, function_of, is_mutating, is_wait, node_at, operands
from ..graph.ops import NUMBERS_OF, ROWS_OF
from ..graph.region import ByPiece, inputs_of, region_of
from ..sizes import SizeFloat, SizeGuards, SizeInt, counted_in, evaluate, evaluator, quotient, text_of
from .gloo.buffers import Buffers, with_buffers
from .protocol import NodeClock, Run, RunBody
from .reached import GO_TO, LANDMARKS, Landmarks

_PIECE, _INPUTS = "wholestep_piece", "wholestep_inputs"
WAITS = "wholestep_waits"  # a global of a generated function: by line, the collective that it waits for
Layout = tuple[str, tuple[int, ...] | None, "list[tuple[Any, Layout]]"]
"""Of a node: its name, the strides of its result in the trace, and the layouts of items that nodes select from it."""
_Function = Callable[[Sequence[Any], int], list[Any]]
_MOST_SIZES = 4096  # of which it is known that they were checked; more are checked again


class WaitClock:
    """Adds up how long a call was blocked in waits: the host, or the stream of the GPU that computes."""

    def __init__(self) -> None:
        self._on_host = 0.0
        self._on_stream: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._gpu = False

    def reset(self, device: str) -> None:
        """A call begins on `device`."""
        self._on_host, self._on_stream, self._gpu = 0.0, [], torch.device(device).type == "cuda"

    @property
    def seconds(self) -> float:
        """Of the last call. On a GPU, waits until it has run."""
        for _, end in self._on_stream[-1:]:
            end.synchronize()
        return self._on_host + sum(begin.elapsed_time(end) for begin, end in self._on_stream) / 1e3

    def timed(self, node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
        """Waits, on the clock."""
        if not is_wait(node):
            return call

        def run(value: Any) -> Any:
            if self._gpu:  # the host goes on: its stream is told to wait
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                out = call(value)
                end.record()
                self._on_stream.append((begin, end))
                return out
            start = time.perf_counter()
            out = call(value)
            self._on_host += time.perf_counter() - start
            return out

        return run


@dataclass
class Eager:
    """The backend `eager`: one call after the other. Collectives of its programs share one pool of buffers."""

    name = "eager"
    fused_optimizers = True
    in_place_buffers = True
    splits_steps = True
    times_nodes = True
    recordable = True
    buffers: Buffers = field(default_factory=Buffers)

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """See `Backend`."""
        return eager(with_buffers(graph, self.buffers), clock)


def eager(graph: Graph, clock: NodeClock | None = None, body: Callable[[Graph], RunBody] | None = None) -> Run:
    """Compile `graph` to a Python function from the list of inputs to the list of outputs; `body` compiles the regions
    that it calls, by default op by op as well.
    """
    return _Eager(graph, clock, body=body)


def op_by_op(body: Graph) -> RunBody:
    """The body of a region as a function that frees each input with its last reader."""
    return _Eager(body, None, is_body=True)


def _refuse_places(read: Sequence[Node], zeroed: Set[Node], scope: Mapping[str, Any]) -> None:
    """Raise IndexError if an op looks up places that are now zeros in what is empty: kernels of pools look anywhere."""
    values = {n: value for n in read if isinstance(value := scope.get(n.name), torch.Tensor)}
    places = any(n in zeroed and not value.is_floating_point() for n, value in values.items())
    if places and not all(value.numel() for value in values.values()):
        raise IndexError("there are no places")


def finished(error: Exception) -> list[Any]:
    """Run on the function that `error` has left: an op that raises is zeros, so that no other rank waits for this."""
    function: Any = None
    for frame, line in walk_tb(error.__traceback__):
        if LANDMARKS in frame.f_globals and type(function) is _Eager:
            return function.finish(frame, line)
        function = frame.f_locals.get("self", function)
    raise error


class _Eager:
    """A bound graph as a function; `source` is its text.

    The body of a region is a function of its own, which takes the number of the piece too. It empties the list of
    inputs that it is given, and frees each with its last reader: what a piece has kept goes while its backward runs.

    Later nodes count on the strides that the trace recorded, and a few kernels of torch disagree with their own shape
    functions about them. The first call with certain sizes finds those nodes: each function that it calls is in one
    that checks and mends its results. From then on results of those nodes are copied into shape.
    """

    def __init__(
        self, graph: Graph, clock: NodeClock | None, is_body: bool = False,
        body: Callable[[Graph], RunBody] | None = None,
    ) -> None:  # fmt: skip
        self._graph, self._clock, self._is_body, self._compile_body = graph, clock, is_body, body or op_by_op
        self._blocks: dict[Graph, RunBody] = {}
        distinct: dict[Hashable, tuple[int, ...]] = {}
        traced = ((node, meta.traced_stride(node)) for node in graph.nodes)
        self._strides = {n: None if s is None else distinct.setdefault(tuple(map(text_of, s)), s) for n, s in traced}
        self._distinct = list(map(id, distinct.values()))
        self._sizes, self._texts = _sizes_in(self._strides)
        symbols = list(self._sizes.dims) if self._sizes is not None else []
        texts = ["" if counted_in(stride) else _texts(stride) for stride in distinct.values()]
        self._strides_at = evaluator([f"({text})" for text in texts], symbols)
        counted = (node for node in graph.nodes if self._sizes is not None and _is_of_counted_rows(node))
        self._counted = {node.name: stride for node in counted if (stride := self._strides[node]) is not None}
        self._wrong = dict(self._counted)  # each call has another number of rows
        self._compile()
        self._checked = set[tuple[int, ...]]()

    def __call__(self, inputs: Sequence[Any], piece: int = 0) -> list[Any]:
        now = () if self._sizes is None else self._sizes.now
        if now in self._checked:
            return self._run(inputs, piece)
        wrong_before = len(self._wrong)
        self._strides_now = dict(zip(self._distinct, self._strides_at(*now), strict=True))
        self._go_to(0)
        out = self._check_run(inputs, piece)
        if len(self._wrong) > wrong_before:
            self._compile()
        if self._sizes is None:
            self._check_run = self._run
            self._graph, self._blocks, self._strides, self._layouts = Graph(), {}, {}, {}
        if len(self._checked) >= _MOST_SIZES:
            self._checked.clear()
        self._checked.add(now)
        return out

    @torch.no_grad()
    def finish(self, frame: FrameType, line: int) -> list[Any]:
        """The rest of a call, from a line on (`finished`)."""
        scope, nodes, zeroed = {**frame.f_globals, **frame.f_locals}, dict(self._numbered), set[Node]()
        *lines, result = (text.strip() for text in self.source.splitlines()[line - 1 :])
        for number, text in enumerate(lines, line):
            frame.f_globals[GO_TO](number)
            read = operands(nodes[number]) if zeroed and number in nodes else []
            try:
                _refuse_places(read, zeroed, scope)
                exec(text, scope)
                zeroed |= {nodes[number] for n in read if n in zeroed}
            except Exception:
                region, zeroed = region_of(node := nodes[number]), {*zeroed, node}
                if is_wait(node) or any(map(communicates, region.body.nodes if region else [node])):
                    raise
                shapes = [m and evaluate(self._value(m.shape), scope) for m in meta.tensors(node)]
                zeros = [  # a size of another branch may be below none
                    m and torch.zeros([max(0, n) for n in shape or ()], dtype=m.dtype, device=m.device)
                    for m, shape in zip(meta.tensors(node), shapes, strict=True)
                ]
                scope[node.name] = zeros if isinstance(meta.value(node), (list, tuple)) else zeros[0]
        return evaluate(result.removeprefix("return "), scope)

    def _compile(self) -> None:
        self._constants: dict[str, Any] = {}
        self._names: dict[tuple[str, int], str] = {}
        self._waits: dict[int, str] = {}
        self._numbered: list[tuple[int, Node]] = []
        self.source = self._write()
        scope: dict[str, Any] = {**self._constants, WAITS: self._waits, GO_TO: int, "math": math, "quotient": quotient}
        if not self._is_body:
            scope[LANDMARKS] = cache(partial(Landmarks.of, self._numbered, self._graph, self.source))
        first = {name: partial(self._fit, value) for name, value in scope.items() if name.startswith("_f")}
        code = compile(self.source, "<wholestep eager>", "exec")
        self._run: _Function = _defined(code, scope)
        self._check_run: _Function = _defined(code, {**scope, **first, GO_TO: self._go_to})
        self._layouts = {line: self._layout(n) for line, n in self._numbered if not _torch.is_getitem(n.target)}

    def _layout(self, node: Node) -> Layout | None:
        items = [(n.args[1], layout) for n in node.users if _torch.is_getitem(n.target) and (layout := self._layout(n))]
        as_it_is = is_mutating(node) or is_wait(node) or not node.users or node.name in self._counted
        stride = None if as_it_is else self._strides[node]
        return (node.name, stride, items) if items or stride is not None else None

    def _go_to(self, line: int) -> None:
        """The next function to be called is that of this line, or of the first one after it that calls one."""
        self._expected = (layout for number, layout in self._layouts.items() if number >= line)

    def _fit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout = next(self._expected)  # before the call, which may raise
        out = call(*args, **kwargs)
        return out if layout is None else self._mended(out, layout)

    def _mended(self, value: Any, layout: Layout) -> Any:
        """A result in the strides that the trace recorded."""
        name, stride, selected = layout
        if isinstance(value, torch.Tensor) and stride is not None:
            mended = meta.with_stride(value, self._strides_now[id(stride)])
            if mended is not value:
                self._wrong[name] = stride
            return mended
        if not isinstance(value, (list, tuple)):  # None: a gradient that was not asked for
            return value
        items = list(were := cast(Sequence[Any], value))
        for index, item in selected:
            items[index] = self._mended(were[index], item)
        return items if any(map(operator.is_not, items, were)) else were

    def _write(self) -> str:
        nodes, self._counted_here = list(self._graph.nodes), set[str]()
        last = {operand: node for node in nodes for operand in operands(node)}
        dying: dict[Node, list[str]] = {}
        for operand, node in last.items():
            if (self._is_body or operand.op != "placeholder") and node.op != "output":
                dying.setdefault(node, []).append(operand.name)
        inputs = [n.name for n in nodes if n.op == "placeholder"]
        lines = [f"def run(inputs, {_PIECE}):"]
        lines += [f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = inputs"] if inputs else []
        lines += ["    inputs.clear()"] if self._is_body else []
        if self._sizes is not None:
            symbols = "".join(f"{symbol}, " for symbol in self._sizes.dims)
            lines += [f"    ({symbols}) = {self._constant(self._sizes, 'c')}.now"]
            lines += [f"    {name} = {text}" for text, name in self._texts.items()]
        for node in nodes:
            freed = [f"del {', '.join(sorted(set(dying[node])))}"] if node in dying else []
            if node.op == "call_function":
                if is_wait(node):
                    self._waits[len(lines) + 1] = node_at(node, 0).name
                self._numbered.append((len(lines) + 1, node))
                line = self._line(node)
                if region_of(node):  # which frees what nothing else reads
                    line, freed = "; ".join([f"{_INPUTS} = {self._value(inputs_of(node))}", *freed, line]), []
                lines.append(f"    {line}")
            elif node.op == "output":
                lines.append(f"    return {self._value(list(cast(Sequence[Any], node.args[0])))}")
            if node.target in (ROWS_OF, NUMBERS_OF):
                numbers = counted_in(node.args[1])
                values = f"{node.name}.tolist()" if node.target is NUMBERS_OF else f"{node.name}.shape[:1]"
                lines.append(f"    {', '.join(numbers)}, = {values}")
                self._counted_here |= {*numbers}
            lines += [f"    {line}" for line in freed]
        return "\n".join(lines) + "\n"

    def _line(self, node: Node) -> str:
        if _torch.is_getitem(node.target):
            call = f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        else:
            region = region_of(node)
            target = self._block(region.body) if region else _torch.directly(function_of(node))
            target = self._clock.timed(node, target) if self._clock else target
            positional: Sequence[Any] = node.args
            if node.target in (ROWS_OF, NUMBERS_OF):
                positional = node.args[0], 0 if node.target is ROWS_OF else []
            args = [self._value(a) for a in positional] + [f"{k}={self._value(v)}" for k, v in node.kwargs.items()]
            args = [_INPUTS, *args[1:]] if region else args
            call = f"{self._constant(target, 'f')}({', '.join(args)})"
        if node.name in self._wrong:
            call = f"{self._constant(meta.with_stride, 'c')}({call}, {self._value(self._wrong[node.name])})"
        return f"{node.name} = {call}" if node.users or node.target in (ROWS_OF, NUMBERS_OF) else call

    def _block(self, body: Graph) -> RunBody:
        """The body of a region, compiled once."""
        if body not in self._blocks:
            self._blocks[body] = self._compile_body(body)
        return self._blocks[body]

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (SizeInt, SizeFloat)):
            if unknown := {*counted_in(value)} - self._counted_here:
                problem = f"a call takes {min(unknown)}, a number of rows that is counted elsewhere"
                raise BackendError(problem, "the count before it, in one function", "leave out passes= and TileRows")
            return self._texts.get(value.text, value.text)
        if isinstance(value, (list, tuple)):
            items = cast(Sequence[Any], value)
            inner = ", ".join(self._value(v) for v in items)
            return f"[{inner}]" if isinstance(items, list) else f"({inner}{',' if len(items) == 1 else ''})"
        if isinstance(value, ByPiece):
            return f"({', '.join(map(self._value, value.values))})[{_PIECE}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value, "c")

    def _constant(self, value: Any, prefix: str) -> str:
        key = prefix, id(value)
        if key not in self._names:
            self._names[key] = f"_{prefix}{len(self._constants)}"
            self._constants[self._names[key]] = value
        return self._names[key]


def _defined(code: CodeType, scope: dict[str, Any]) -> _Function:
    exec(code, scope)
    return torch.no_grad()(scope["run"])


def _texts(shape: Sequence[int]) -> str:
    return "".join(f"{size.text if isinstance(size, SizeInt) else int(size)}, " for size in shape)


def _is_of_counted_rows(node: Node) -> bool:
    traced = meta.tensor(node) if node.op == "call_function" and not is_mutating(node) and not is_wait(node) else None
    return traced is not None and bool(counted_in((traced.shape, traced.stride)))


def _sizes_in(strides: Mapping[Node, tuple[int, ...] | None]) -> tuple[SizeGuards | None, dict[str, str]]:
    """The sizes that arguments and strides of the nodes follow from, and a name for each expression of the batch's."""
    guards, texts = list[SizeGuards](), dict[str, str]()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, ByPiece):
            map_aggregate(leaf.values, note)
        if isinstance(leaf, (SizeInt, SizeFloat)):
            guards.append(leaf.guards)
            if not counted_in(leaf):
                texts.setdefault(leaf.text, f"_n{len(texts)}")
        return leaf

    for node, stride in strides.items():
        leaves = [v for v in (*node.args, *node.kwargs.values(), *(stride or ())) if type(v) not in (Node, int)]
        map_aggregate(cast(Any, leaves), note)
    return guards[0] if guards else None, texts
