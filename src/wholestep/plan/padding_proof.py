"""The proof that a batch may be padded: what padding adds reaches no parameter, no state and no result.

A captured step with a symbol for a length is the step of all lengths. It runs on a batch of n places, and on the same
batch padded to N. By induction over its nodes, each value of the padded run holds that of the other run at the first n
places of its padded dims. Of the places beyond, the tails, the proof knows whether they are one constant.

- An op is right at the real places if its sharding rule may cut the padded dim: then it computes each piece by itself.
- A sum over a padded dim is right if the tail adds zero: the op is linear in an operand that is zero there.
- Some ops have a row of their own: softmax, attention, losses that ignore a class, views, slices, masks by position.

Where a softmax reads a tail that is no such constant, as that of a mask by a large number, the program can be given it:
it has the number of real places as an input, and fills the places behind them (`filled_where_padded`). The result is
proved like any other step.

All else is refused, with the user's line. Zero times what padding computes is zero: that is taken to be finite, since
it is computed from the fill as other places are from data. What is known to be no number is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NoReturn, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Input, Role, TrainGraph
from ..graph.sizes_in_graph import sizes_among
from ..rules.call import Call, opened
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from ..rules.rule import Group
from ..sizes import SizeFloat, SizeInt, evaluate
from .padded_values import (
    COMPARISONS,
    EXACT,
    NO_LENGTH,
    ONE_POSITION,
    SAME,
    Made,
    Numbers,
    Places,
    Region,
    Value,
    adds_nothing,
    constant_made,
    filled,
    keeps,
    no_number,
    pointwise,
    put_back,
    short_cut,
    subsets,
)
from .padding_fills import FUSED, LIKE, SIZED, Draw, Fill, with_fills
from .padding_rows import SPECIAL

aten = torch.ops.aten


class PaddingError(PlanError):
    """A batch cannot be padded: what padding adds would reach a result."""


@dataclass(frozen=True)
class PaddedDims:
    """Dims of the batch that are padded together to one of `lengths`: `places`, by name of an input, with the value
    `fill`, and the `symbols` of their sizes. `length` is the input that has their length without padding. `batches` are
    sizes of all symbols that the guards of the capture hold for.
    """

    lengths: Sequence[int]
    places: Mapping[str, int]
    fill: Mapping[str, float]
    symbols: Sequence[str]
    length: str
    batches: Sequence[Mapping[str, int]]


def filled_where_padded(graph: TrainGraph, padded: Sequence[PaddedDims], symbols: _torch.Symbols) -> TrainGraph:
    """A step whose results do not depend on padding: `graph`, or a copy that fills padded positions where softmax reads
    them. Raises PaddingError where that is not enough.
    """
    step = graph
    for dims in padded:
        fills: list[Fill | Draw] = []
        _Proof(step, dims, fills).run()
        step = with_fills(step, fills, dims.length, symbols) if fills else step
    for dims in padded if step is not graph else ():
        _Proof(step, dims, None).run()
    return step


class _Proof:
    """One walk. With `fills`, it takes padded positions for filled that can be, and notes them there."""

    def __init__(self, graph: TrainGraph, padded: PaddedDims, fills: list[Fill | Draw] | None) -> None:
        self.graph, self.padded, self.fills, self.batches = graph, padded, fills, padded.batches
        first, longest = self.batches[0], max(padded.lengths)
        sizes = sorted({*range(2, longest + 1)[:33], *(n - less for n in padded.lengths for less in (0, 1))} - {1})
        self._other_batches = [{**first, **dict.fromkeys(padded.symbols, n)} for n in sizes]
        self._varying: dict[str, bool] = {}
        self.values: dict[Node, Made] = {}
        self.node: Node = next(iter(graph.graph.nodes))

    def run(self) -> None:
        """Go through the graph."""
        inputs = {node: spec for spec, node in self.graph.placeholders()}
        for node in self.graph.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                spec = inputs[node]
                constant = self.graph.constants.get(spec.name)
                is_number = (
                    constant is not None and constant.numel() == 1 and not (constant.is_meta or constant.is_complex())
                )
                self.values[node] = Value(constant=float(constant)) if is_number and constant is not None else SAME
                if spec.role is Role.BATCH:
                    self.values[node] = self._of_batch(spec)
            elif node.op == "call_function":
                self.values[node] = self._made()
            if node.op != "output":
                self._check_dims()
        for output, node in self.graph.results():
            if isinstance(node, Node) and isinstance(value := self.values[node], Value) and value.dims:
                self.node = node
                what = "returns" if output.kind == "result" else f"updates {output.target!r} with"
                self.refuse(f"the step {what} a value of the padded length", "results without that length")

    def _of_batch(self, spec: Input) -> Value:
        if spec.name == self.padded.length:
            return Value(real=True)
        if spec.name not in self.padded.places:
            return SAME
        dim = self.padded.places[spec.name]
        length = self.numbers(spec.meta.shape[dim])
        return filled({dim: Places.alone(length)}, float(self.padded.fill.get(spec.name, 0)))

    def fill(self, operand: int, dim: int, value: float) -> bool:
        """Whether the program can have this constant at the padded places of an operand of the node."""
        if self.fills is not None:
            self.fills.append(Fill(self.node.name, operand, dim, value))
        return self.fills is not None

    # -- sizes ------------------------------------------------------------------------------
    def numbers(self, size: int) -> Numbers:
        """A size in all batches."""
        if not isinstance(size, SizeInt):
            return (int(size),) * len(self.batches)
        return tuple(int(evaluate(size.text, batch)) for batch in self.batches)

    def varies(self, size: object) -> bool:
        """True if a number depends on the padded length."""
        if not isinstance(size, (SizeInt, SizeFloat)):
            return False
        if size.text not in self._varying:
            self._varying[size.text] = len({evaluate(size.text, batch) for batch in self._other_batches}) > 1
        return self._varying[size.text]

    def _check_dims(self) -> None:
        """What depends on the length is known to be padded."""
        for value, tensor in zip(self.flat(self.values[self.node]), meta.tensors(self.node), strict=False):
            if tensor is None:
                continue
            long = {dim for dim, size in enumerate(tensor.shape) if self.varies(size)}
            if long != set(value.dims) and self.node.op == "placeholder":
                self.refuse(f"the step gets {self.node.name!r}, which has that length too", "it among dims of PadTo")
            if long != set(value.dims):
                self.refuse("makes a size of its own of the padded length")

    def flat(self, values: Made) -> list[Value]:
        """Values in the order of the flat outputs of a node."""
        return [values] if isinstance(values, Value) else [value for item in values for value in self.flat(item)]

    def refuse(self, why: str, needed: str = "", text: str = "") -> NoReturn:
        """The step cannot be padded."""
        what = text or f"%{self.node.name} ({self.node.target}) {why}"
        if self.node.op == "output" or why.startswith("the step"):
            what = why
        module = meta.module_path(self.node)
        raise PaddingError(
            f"pad_to: {what}{f', in {module!r}' if module else ''}",
            needed or "an op that keeps padded positions apart, or a mask in front of it",
            "mask it, or leave out pad_to: each size then runs as it is",
            meta.source_line(self.node),
        )

    # -- nodes -----------------------------------------------------------------------------------
    def _made(self) -> Made:
        node = self.node
        if _torch.is_getitem(node.target):
            return cast(Sequence[Made], self.values[cast(Node, node.args[0])])[cast(int, node.args[1])]
        nodes = [n for n in opened([*node.args, *node.kwargs.values()]) if isinstance(n, Node)]
        values = [self.values[n] for n in nodes]
        shapes = [tensor.shape for tensor in meta.tensors(node) if tensor is not None]
        sizes = sizes_among([node.args, node.kwargs, shapes])
        if not any(value.dims for entry in values for value in self.flat(entry)) and not any(map(self.varies, sizes)):
            return self._untouched(shapes)
        if draws(node):
            return self._drawn()
        operands = [value for value in values if isinstance(value, Value)]
        if len(operands) != len(values):
            self.refuse("reads a list of tensors of the padded length")
        special = SPECIAL.get(node.target) or SPECIAL.get(getattr(node.target, "overloadpacket", None))
        if special is not None:
            return special(self, Call.of(node), operands)
        return self.by_rule(Call.of(node), operands)

    def _drawn(self) -> Made:
        """Random numbers that are drawn for the longest length are those of each."""
        node, symbols = self.node, {f"({symbol})" for symbol in self.padded.symbols}
        tensor = meta.tensors(node)[0]
        long = {dim: size for dim, size in enumerate(tensor.shape) if self.varies(size)} if tensor is not None else {}
        are_symbols = all(isinstance(size, SizeInt) and size.text in symbols for size in long.values())
        if node.target not in (*LIKE, *SIZED, FUSED) or not are_symbols or self.fills is None:
            needed = "dropout of positions by F.dropout, and none inside a kernel of attention (dropout_p=0)"
            self.refuse("draws random numbers, other ones for another length", needed)
        self.fills.append(Draw(node.name, tuple(long), max(self.padded.lengths)))
        drawn = filled({dim: Places.alone(self.numbers(size)) for dim, size in long.items()}, None)
        return put_back(meta.value(node), repeat(drawn))

    def _untouched(self, shapes: Sequence[Any]) -> Made:
        """What has nothing to do with the padded length; the constant, if it is one."""
        outputs = meta.value(self.node)
        if not isinstance(outputs, torch.Tensor):
            return put_back(outputs, repeat(SAME))
        constant = constant_made(self.node)
        if constant is None and not self.node.all_input_nodes:
            return SAME
        if constant is None and pointwise(self.node.target):
            values = {n: self.values[n] for n in self.node.all_input_nodes}
            constant = self.folded({n: v.constant if isinstance(v, Value) else None for n, v in values.items()})
        return Value(constant=constant)

    def folded(self, constants: Mapping[Node, float | None]) -> float | None:
        """What a pointwise op makes of constants; None if that depends on operands that are not known."""
        node = self.node
        shortcut = short_cut(node, constants)
        if shortcut is not None or None in constants.values():
            return shortcut
        if sizes_among([node.args, node.kwargs]):  # another constant for another size
            return None
        if keeps(node.target) and node.target is not aten._to_copy.default:
            return next(iter(constants.values()))

        def as_tensor(value: Any) -> Any:
            if isinstance(value, Node):
                tensor = meta.one_tensor(value)
                return torch.tensor(constants[value], dtype=torch.float64).to(tensor.dtype)
            return value

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), as_tensor)  # type: ignore[misc]
        named = {key: value for key, value in cast(dict[str, Any], kwargs).items() if key not in ("device", "layout")}
        try:
            out = cast(Any, node.target)(*cast(Any, args), **named)
        except (RuntimeError, TypeError, NotImplementedError):
            return None  # not known: the proof then refuses what depends on it
        return float(out) if isinstance(out, torch.Tensor) and out.numel() == 1 and not out.is_complex() else None

    def by_rule(self, call: Call, operands: Sequence[Value]) -> Made:
        """An op whose rule may cut the padded dims."""
        rule = find_rule(self.node)
        if rule is None:
            self.refuse("has no sharding rule", "an op of which it is known what it mixes")
        for name, size in self._named_sizes(call):
            if self.varies(size) and name not in rule.sizes:
                self.refuse(f"computes with the padded length ({name})", NO_LENGTH)
        values: dict[int, Value] = {}
        shared = [i for i, v in enumerate(operands) if v.dims and not any(i in g.operands for g in rule.groups)]
        if shared and not set(shared) <= set(rule.by_shape):
            self.refuse("mixes padded positions with others")
        for group in rule.groups:
            if set(group.reduces.values()) - {"sum"} or any(group.operands[i][d] in rule.local for i in group.operands
                                                            for d in operands[i].dims):  # fmt: skip
                self._refuse_reduced(group, operands, rule.local)
            values |= self._group(call, group, operands)
        flat = [values.get(i, SAME) for i in range(len(call.outputs))]
        return put_back(meta.value(self.node), iter(flat))

    def _named_sizes(self, call: Call) -> Iterator[tuple[str, Any]]:
        parameters = [a.name for a in _torch.schema_of(call.target).arguments] if _torch.is_op(call.target) else []
        names = parameters or [f"argument {i}" for i in range(len(call.args))]
        named = [*zip(names, call.args, strict=False), *call.kwargs.items()]
        return ((name, size) for name, value in named for size in sizes_among([value]))

    def _refuse_reduced(self, group: Group, operands: Sequence[Value], local: Mapping[str, Any]) -> None:
        for i, term in group.operands.items():
            for dim in operands[i].dims:
                factor = term[dim]
                if factor is not None and (how := group.reduces.get(factor, "sum")) != "sum":
                    kind = {"avg": "the mean", "max": "the maximum", "min": "the minimum"}.get(how, "a number")
                    self.refuse(f"takes {kind} over padded positions", "a masked sum divided by the count of the mask")
                if factor in local:
                    self.refuse("reads positions of the padded length by number")

    def _group(self, call: Call, group: Group, operands: Sequence[Value]) -> dict[int, Value]:
        factors: dict[str, Places] = {}
        for i, term in group.operands.items():
            for dim, places in operands[i].dims.items():
                factor = term[dim] if dim < len(term) else None
                if factor is None:
                    self.refuse("mixes padded positions with others")
                if factor in group.even:  # the outer one of several that are merged
                    self.refuse("takes padded positions apart")
                if factors.setdefault(factor, places) != places:
                    self.refuse("aligns padded positions with other ones")
        for i, term in group.operands.items():
            for dim, factor in enumerate(term):
                if factor in factors and dim not in operands[i].dims:
                    self.refuse("aligns padded positions with a dim that is not padded")
        nodes = [n for n in opened([*self.node.args, *self.node.kwargs.values()]) if isinstance(n, Node)]
        order = list(factors)
        values: dict[int, Value] = {}

        def region_of(i: int, chosen: frozenset[str]) -> Region:
            return frozenset(d for d, f in enumerate(group.operands[i]) if f in chosen)

        def is_zero(chosen: frozenset[str]) -> bool:
            """True if the op adds nothing where these factors are beyond the real places."""
            linear = [p.operands for p in group.partial if "sum" in p.ops]
            return any(all(operands[i].at(region_of(i, chosen)) == 0 for i in indices) for indices in linear)

        def refuse_no_number(chosen: frozenset[str]) -> None:
            if any(no_number(operands[i].at(region_of(i, chosen))) for i in group.operands):
                self.refuse("sums over padded positions, some of which are no number", ONE_POSITION)

        for output, term in group.outputs.items():
            free = [f for f in order if f in term]
            summed = [f for f in order if f not in term]
            for free_part in (frozenset[str](), *subsets(free)):
                for part in subsets(summed):
                    refuse_no_number(free_part | part)
            if not all(is_zero(part) for part in subsets(summed)):
                self.refuse("sums over padded positions that are not zero", "a mask: zero at padded positions")
            dims = {term.index(f): factors[f] for f in free}
            tails: dict[Region, float | None] = {}
            for chosen in subsets(free):
                where = frozenset(term.index(f) for f in chosen)
                lost_number = any(no_number(operands[i].at(region_of(i, chosen))) for i in group.operands)
                if not lost_number and is_zero(chosen) and all(is_zero(chosen | part) for part in subsets(summed)):
                    tails[where] = 0.0
                elif not summed and pointwise(self.node.target):
                    at = {nodes[i]: operands[i].at(region_of(i, chosen)) for i in group.operands}
                    tails[where] = self.folded(at)
                    if tails[where] is None and self.node.target in COMPARISONS:
                        tails[where] = self._compared(group, operands, chosen)
                else:
                    tails[where] = None
            index = None
            if len(group.operands) == 1 and (keeps(self.node.target) or adds_nothing(self.node)):
                ((only, operand),) = ((i, operands[i]) for i in group.operands)
                exact = meta.one_tensor(self.node).dtype in EXACT
                if exact and operand.index is not None and (factor := group.operands[only][operand.index]) in free:
                    index = term.index(factor)
            values[output] = Value(dims, tails, index=index)
        return values

    def _compared(self, group: Group, operands: Sequence[Value], chosen: frozenset[str]) -> float | None:
        """Two numbers of places: one that is beyond the real places is greater than one that is not, and no less than
        the number of real ones.
        """
        if [operands[i].real for i in sorted(group.operands)] == [False, True] and operands[0].index is not None:
            constants = {aten.ge.Tensor: 1.0, aten.lt.Tensor: 0.0}
            return constants.get(cast(Any, self.node.target)) if chosen else None
        sides: list[bool] = []
        for i in sorted(group.operands):
            index = operands[i].index
            if index is None:
                return None
            sides.append(group.operands[i][index] in chosen)
        if len(sides) != 2 or sides[0] == sides[1]:
            return None
        a, b = (torch.tensor(int(side)) for side in sides)
        return float(cast(Any, self.node.target)(a, b))
