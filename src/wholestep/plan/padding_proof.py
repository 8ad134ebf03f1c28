"""The proof that a batch may be padded: what padding adds reaches no parameter, no state and no result.

A captured step with a symbol for a length is the step of all lengths. It runs on a batch of n places, and on the same
batch padded to N. By induction over its nodes, each value of the padded run holds that of the other run at the first n
places of its padded dims. Of the places beyond, the tails, the proof knows whether they are one constant.

- An op is right at the real places if its sharding rule may cut the padded dim: then it computes each piece by itself.
- A sum over a padded dim is right if the tail adds zero: the op is linear in an operand that is zero there.
- Some ops have a row of their own: softmax, attention, losses that ignore a class, views, slices, masks by position.

All else is refused, with the user's line. Zero times what padding computes is zero: that is taken to be finite, since
it is computed from the fill as other places are from data. What is known to be no number is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any, NoReturn, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.sizes_in_graph import sizes_among
from ..rules.call import Call, opened
from ..rules.find_rule import find_rule
from ..rules.registry import draws
from ..rules.rule import Group
from ..sizes import SizeFloat, SizeInt, evaluate

aten = torch.ops.aten
Region = frozenset[int]
"""Padded dims, by number, whose places are beyond the real ones; in all other padded dims the places are real."""
Numbers = tuple[int, ...]
"""A size in several batches: the proof compares sizes there."""
_END = sys.maxsize


class PaddingError(PlanError):
    """A batch cannot be padded: what padding adds would reach a result."""


@dataclass(frozen=True)
class Places:
    """The places of a padded dim: `outer` rows of `length` places of `inner` elements, in the order of memory."""

    outer: Numbers
    length: Numbers
    inner: Numbers

    @property
    def first(self) -> bool:
        """True if the real places are the first ones of the dim."""
        return max(self.outer) == max(self.inner) == 1


@dataclass(frozen=True)
class Value:
    """What is known of a tensor of the padded run. `tails` has the constant in each region, or None. `constant` is that
    of a tensor without padded dims. With `index`, each element is its place along the padded dim of that number.
    """

    dims: Mapping[int, Places] = field(default_factory=dict[int, Places])
    tails: Mapping[Region, float | None] = field(default_factory=dict[Region, Any])
    constant: float | None = None
    index: int | None = None

    def at(self, region: Region) -> float | None:
        """The constant in a region; in none, that of the whole tensor."""
        return self.tails[region] if region else self.constant


_ONE_POSITION = "a mask that leaves each row one position: mask keys alone, and not rows of queries"
_NO_LENGTH = "a number that does not depend on it"
SAME = Value()
Made = Value | Sequence[Any]


def regions(dims: Sequence[int] | Mapping[int, Any]) -> Iterator[Region]:
    """Every set of padded dims but the empty one."""
    return map(frozenset, chain.from_iterable(combinations(dims, n) for n in range(1, len(dims) + 1)))


def _filled(dims: Mapping[int, Places], constant: float | None) -> Value:
    return Value(dims, dict.fromkeys(regions(dims), constant))


def prove_padding(
    graph: TrainGraph,
    places: Mapping[str, int],
    fill: Mapping[str, float],
    symbols: Sequence[str],
    batches: Sequence[Mapping[str, int]],
) -> None:
    """Raise PaddingError unless results of a step do not depend on padding: of the dims `places`, by name of an input,
    with the value `fill`. `symbols` are the sizes of these dims, and `batches` sizes of all symbols that the guards of
    the capture hold for.
    """
    _Proof(graph, places, fill, symbols, batches).run()


class _Proof:
    def __init__(
        self, graph: TrainGraph, places: Mapping[str, int], fill: Mapping[str, float], symbols: Sequence[str],
        batches: Sequence[Mapping[str, int]],
    ) -> None:  # fmt: skip
        self.graph, self.places, self.fill, self.batches = graph, places, fill, batches
        first = batches[0]
        self._longer = [{**first, **{one: first[one] + more for one in symbols}} for more in (1, 1009)]
        self.values: dict[Node, Made] = {}
        self.node: Node = next(iter(graph.graph.nodes))

    def run(self) -> None:
        """Go through the graph."""
        inputs = {node: given for given, node in self.graph.placeholders()}
        for node in self.graph.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                given = inputs[node]
                constant = self.graph.constants.get(given.name)
                known = (
                    constant is not None and constant.numel() == 1 and not (constant.is_meta or constant.is_complex())
                )
                self.values[node] = Value(constant=float(constant)) if known and constant is not None else SAME
                if given.role is Role.BATCH and given.name in self.places:
                    dim = self.places[given.name]
                    length = self.numbers(given.meta.shape[dim])
                    one = (1,) * len(length)
                    self.values[node] = _filled({dim: Places(one, length, one)}, float(self.fill.get(given.name, 0)))
            elif node.op == "call_function":
                self.values[node] = self._made()
            if node.op != "output":
                self._check_dims()
        for output, node in self.graph.results():
            if isinstance(node, Node) and isinstance(made := self.values[node], Value) and made.dims:
                self.node = node
                what = "returns" if output.kind == "result" else f"updates {output.target!r} with"
                self.refuse(f"the step {what} a value of the padded length", "results without that length")

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
        return any(evaluate(size.text, one) != evaluate(size.text, self.batches[0]) for one in self._longer)

    def _check_dims(self) -> None:
        """What depends on the length is known to be padded."""
        for made, found in zip(self.flat(self.values[self.node]), meta.tensors(self.node), strict=False):
            if found is None:
                continue
            long = {dim for dim, size in enumerate(found.shape) if self.varies(size)}
            if long != set(made.dims) and self.node.op == "placeholder":
                self.refuse(f"the step gets {self.node.name!r}, which has that length too", "it among dims of PadTo")
            if long != set(made.dims):
                self.refuse("makes a size of its own of the padded length")

    def flat(self, made: Made) -> list[Value]:
        """Values in the order of the flat outputs of a node."""
        return [made] if isinstance(made, Value) else [one for item in made for one in self.flat(item)]

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
        given = [self.values[n] for n in nodes]
        shapes = [made.shape for made in meta.tensors(node) if made is not None]
        touched = any(one.dims for made in given for one in self.flat(made)) or any(
            self.varies(size) for size in sizes_among([node.args, node.kwargs, shapes])
        )
        if not touched:
            return self._untouched(shapes)
        if draws(node):
            self.refuse("draws random numbers, other ones for another length", "a step without dropout in padded parts")
        operands = [made for made in given if isinstance(made, Value)]
        if len(operands) != len(given):
            self.refuse("reads a list of tensors of the padded length")
        special = _SPECIAL.get(node.target) or _SPECIAL.get(getattr(node.target, "overloadpacket", None))
        if special is not None:
            return special(self, Call.of(node), operands)
        return self._by_rule(Call.of(node), operands)

    def _untouched(self, shapes: Sequence[Any]) -> Made:
        """What has nothing to do with the padded length; the constant, if it is one."""
        made = meta.value(self.node)
        if not isinstance(made, torch.Tensor):
            return _like(made, SAME)
        constant = _constant_made(self.node)
        if constant is None and not self.node.all_input_nodes:
            return SAME
        if constant is None and _pointwise(self.node.target):
            given = {n: self.values[n] for n in self.node.all_input_nodes}
            constant = self.folded({n: one.constant if isinstance(one, Value) else None for n, one in given.items()})
        return Value(constant=constant)

    def folded(self, constants: Mapping[Node, float | None]) -> float | None:
        """What a pointwise op makes of constants; None if that depends on operands that are not known."""
        node = self.node
        known = _short_cut(node, constants)
        if known is not None or None in constants.values():
            return known
        if sizes_among([node.args, node.kwargs]):  # another constant for another size
            return None
        if _keeps(node.target) and node.target is not aten._to_copy.default:
            return next(iter(constants.values()))

        def one(value: Any) -> Any:
            if isinstance(value, Node):
                made = meta.one_tensor(value)
                return torch.tensor(constants[value], dtype=torch.float64).to(made.dtype)
            return value

        args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), one)  # type: ignore[misc]
        named = {key: value for key, value in cast(dict[str, Any], kwargs).items() if key not in ("device", "layout")}
        try:
            made = cast(Any, node.target)(*cast(Any, args), **named)
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        return float(made) if isinstance(made, torch.Tensor) and made.numel() == 1 and not made.is_complex() else None

    def _by_rule(self, call: Call, operands: Sequence[Value]) -> Made:
        """An op whose rule may cut the padded dims."""
        rule = find_rule(self.node)
        if rule is None:
            self.refuse("has no sharding rule", "an op of which it is known what it mixes")
        for name, size in self._named_sizes(call):
            if self.varies(size) and name not in rule.sizes:
                self.refuse(f"computes with the padded length ({name})", _NO_LENGTH)
        found: dict[int, Value] = {}
        shared = [i for i, one in enumerate(operands) if one.dims and not any(i in g.operands for g in rule.groups)]
        if shared and not set(shared) <= set(rule.by_shape):
            self.refuse("mixes padded positions with others")
        for group in rule.groups:
            if set(group.reduces.values()) - {"sum"} or any(group.factors_at(i, d) in rule.local for i in group.operands
                                                            for d in operands[i].dims):  # fmt: skip
                self._refuse_reduced(group, operands, rule.local)
            found |= self._group(call, group, operands)
        flat = [found.get(i, SAME) for i in range(len(call.outputs))]
        return _put_back(meta.value(self.node), iter(flat))

    def _named_sizes(self, call: Call) -> Iterator[tuple[str, Any]]:
        known = [a.name for a in _torch.schema_of(call.target).arguments] if _torch.is_op(call.target) else []
        names = known or [f"argument {i}" for i in range(len(call.args))]
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
        made: dict[int, Value] = {}

        def region_of(i: int, chosen: frozenset[str]) -> Region:
            return frozenset(d for d, f in enumerate(group.operands[i]) if f in chosen)

        def is_zero(chosen: frozenset[str]) -> bool:
            """True if the op adds nothing where these factors are beyond the real places."""
            linear = [p.operands for p in group.partial if "sum" in p.ops]
            return any(all(operands[i].at(region_of(i, chosen)) == 0 for i in one) for one in linear)

        def refuse_no_number(chosen: frozenset[str]) -> None:
            if any(_no_number(operands[i].at(region_of(i, chosen))) for i in group.operands):
                self.refuse("sums over padded positions, some of which are no number", _ONE_POSITION)

        for output, term in group.outputs.items():
            kept = [f for f in order if f in term]
            lost = [f for f in order if f not in term]
            for more in (frozenset[str](), *_sets(kept)):
                for less in _sets(lost):
                    refuse_no_number(more | less)
            if not all(is_zero(less) for less in _sets(lost)):
                self.refuse("sums over padded positions that are not zero", "a mask: zero at padded positions")
            dims = {term.index(f): factors[f] for f in kept}
            tails: dict[Region, float | None] = {}
            for chosen in _sets(kept):
                where = frozenset(term.index(f) for f in chosen)
                no_number = any(_no_number(operands[i].at(region_of(i, chosen))) for i in group.operands)
                if not no_number and is_zero(chosen) and all(is_zero(chosen | less) for less in _sets(lost)):
                    tails[where] = 0.0
                elif not lost and _pointwise(self.node.target):
                    at = {nodes[i]: operands[i].at(region_of(i, chosen)) for i in group.operands}
                    tails[where] = self.folded(at)
                    if tails[where] is None and self.node.target in _COMPARISONS:
                        tails[where] = self._compared(group, operands, chosen)
                else:
                    tails[where] = None
            index = None
            if len(group.operands) == 1 and _keeps(self.node.target):
                ((only, operand),) = ((i, operands[i]) for i in group.operands)
                exact = meta.one_tensor(self.node).dtype in _EXACT
                if exact and operand.index is not None and (factor := group.operands[only][operand.index]) in kept:
                    index = term.index(factor)
            made[output] = Value(dims, tails, index=index)
        return made

    def _compared(self, group: Group, operands: Sequence[Value], chosen: frozenset[str]) -> float | None:
        """Two numbers of places: one that is beyond the real places is greater than one that is not."""
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


def _sets(factors: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(factors, n) for n in range(1, len(factors) + 1)))


def _no_number(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


def _like(made: Any, value: Value) -> Made:
    return [_like(one, value) for one in cast(Sequence[Any], made)] if isinstance(made, (list, tuple)) else value


def _put_back(made: Any, flat: Iterator[Value]) -> Made:
    if isinstance(made, (list, tuple)):
        return [_put_back(one, flat) for one in cast(Sequence[Any], made)]
    return next(flat)


_KEEPING = (
    aten.clone, aten._to_copy, aten.alias, aten.detach, aten.unsqueeze, aten.squeeze, aten.permute, aten.transpose,
    aten.t, aten.contiguous,
)  # fmt: skip
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # these hold the number of each place
_COMPARISONS = (aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor, aten.ne.Tensor)


def _keeps(target: Any) -> bool:
    """True for an op whose result has the elements of its operand."""
    return getattr(target, "overloadpacket", None) in _KEEPING


def _pointwise(target: Any) -> bool:
    return _torch.is_op(target) and (torch.Tag.pointwise in target.tags or _keeps(target))


def _constant_made(node: Node) -> float | None:
    """The constant that a factory fills its result with."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return 0.0
    if packet in (aten.ones, aten.ones_like, aten.new_ones):
        return 1.0
    value = Call.of(node).argument("fill_value") if packet in (aten.full, aten.full_like, aten.new_full) else None
    value = Call.of(node).argument("s") if packet is aten.scalar_tensor else value
    return float(value) if isinstance(value, (bool, int, float)) and not sizes_among([value]) else None


def _short_cut(node: Node, constants: Mapping[Node, float | None]) -> float | None:
    """What a pointwise op makes whatever the operands that are not known are."""
    packet, args = getattr(node.target, "overloadpacket", None), node.args

    def known(position: int) -> float | None:
        given = args[position] if position < len(args) else None
        if isinstance(given, Node):
            return constants.get(given)
        return float(given) if isinstance(given, (bool, int, float)) and not sizes_among([given]) else None

    if packet in (aten.where, aten.masked_fill):
        condition, yes, no = (known(i) for i in ((0, 1, 2) if packet is aten.where else (1, 2, 0)))
        if condition is None:
            return yes if yes == no else None
        return yes if condition else no
    if packet in (aten.mul, aten.logical_and, aten.bitwise_and) and 0 in (known(0), known(1)):
        return None if any(_no_number(known(i)) for i in (0, 1)) else 0.0
    if packet is aten.div and known(0) == 0 and known(1) is None:
        return 0.0
    if packet in (aten.logical_or, aten.bitwise_or) and meta.one_tensor(node).dtype is torch.bool:
        return 1.0 if 1 in (known(0), known(1)) else None
    if packet is aten.add and not node.kwargs:
        return next((v for v in (known(0), known(1)) if v is not None and math.isinf(v)), None)
    return None


# -- ops with a row of their own -----------------------------------------------------------------
Special = Callable[[_Proof, Call, Sequence[Value]], Made]


def _regroup(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A view by other sizes: the elements are the same, in the same order."""
    given = operands[0]
    pieces: list[tuple[Numbers, int | None]] = []  # sizes of the operand, from the left, and the padded dim they are
    for dim, size in enumerate(call.shape(0)):
        places = given.dims.get(dim)
        if places is None:
            pieces.append((proof.numbers(size), None))
        else:
            pieces += [(places.outer, None), (places.length, dim), (places.inner, None)]
    one = (1,) * len(proof.batches)
    pieces = [piece for piece in pieces if piece[0] != one]
    dims: dict[int, Places] = {}
    names: dict[int, int] = {}
    for dim, size in enumerate(call.made()):
        wanted, taken = proof.numbers(size), list[tuple[Numbers, int | None]]()
        while wanted != one:
            if not pieces:
                proof.refuse("takes padded positions apart")
            piece, padded = pieces.pop(0)
            if _divides(piece, wanted):
                taken.append((piece, padded))
                wanted = _quotient(wanted, piece)
            elif padded is None and _divides(wanted, piece):
                taken.append((wanted, None))
                pieces.insert(0, (_quotient(piece, wanted), None))
                wanted = one
            else:
                proof.refuse("takes padded positions apart")
        long = [i for i, (_, padded) in enumerate(taken) if padded is not None]
        if len(long) > 1:
            proof.refuse("merges two padded dims")
        for i in long:
            before, after = (_product(one, taken[:i]), _product(one, taken[i + 1 :]))
            dims[dim] = Places(before, taken[i][0], after)
            names[cast(int, taken[i][1])] = dim
    return _renamed(given, dims, names)


def _divides(a: Numbers, b: Numbers) -> bool:
    return all(y % x == 0 for x, y in zip(a, b, strict=True))


def _quotient(a: Numbers, b: Numbers) -> Numbers:
    return tuple(x // y for x, y in zip(a, b, strict=True))


def _product(one: Numbers, pieces: Sequence[tuple[Numbers, int | None]]) -> Numbers:
    for piece, _ in pieces:
        one = tuple(x * y for x, y in zip(one, piece, strict=True))
    return one


def _renamed(given: Value, dims: Mapping[int, Places], names: Mapping[int, int]) -> Value:
    """`given` with padded dims at other numbers."""
    tails = {frozenset(names[d] for d in region): tail for region, tail in given.tails.items()}
    return Value(dims, tails, given.constant, None if given.index is None else names[given.index])


def _expanded(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    given, shape, made = operands[0], call.shape(0), call.made()
    lead = len(made) - len(shape)
    dims = {dim + lead: places for dim, places in given.dims.items()}
    one = (1,) * len(proof.batches)
    for dim, size in enumerate(made):
        if dim not in dims and proof.varies(size):
            dims[dim] = Places(one, proof.numbers(size), one)
    old = {dim + lead for dim in given.dims}
    tails = {r: given.at(frozenset(d - lead for d in r & old)) for r in regions(dims)}
    return Value(dims, tails, index=None if given.index is None else given.index + lead)


def _factory(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A tensor that is filled with one constant, or not at all."""
    if proof.varies(call.argument("fill_value")):
        proof.refuse("computes with the padded length (fill_value)", _NO_LENGTH)
    one = (1,) * len(proof.batches)
    dims = {d: Places(one, proof.numbers(n), one) for d, n in enumerate(call.made()) if proof.varies(n)}
    if operands and operands[0].dims and call.made() == call.shape(0):
        dims = dict(operands[0].dims)
    constant = _constant_made(proof.node)
    return replace(_filled(dims, constant), constant=constant)


def _counted(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    if proof.varies(call.argument("start", 0)) or proof.varies(call.argument("step", 1)):
        proof.refuse("counts from the padded length on")
    one = (1,) * len(proof.batches)
    plain = call.argument("start", 0) == 0 and call.argument("step", 1) == 1
    return Value(
        {0: Places(one, proof.numbers(call.made()[0]), one)}, {frozenset({0}): None}, index=0 if plain else None
    )


def _sliced(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    given = operands[0]
    dim: int = call.argument("dim", 0) % len(call.shape(0))
    start, end, step = call.argument("start") or 0, call.argument("end"), call.argument("step", 1)
    size: int = call.made()[dim]
    if dim not in given.dims and not proof.varies(size):
        return given
    if proof.varies(start) or start < 0 or step != 1:
        proof.refuse("reads positions counted from the end of the padded length", "positions counted from the start")
    if dim in given.dims and not given.dims[dim].first:
        proof.refuse("takes padded positions apart")
    kept = {d: places for d, places in given.dims.items() if d != dim}
    if not proof.varies(size):  # the first ones, which are real where the guards of the capture hold
        if end is not None and (proof.varies(end) or end < 0):
            proof.refuse("reads positions counted from the end of the padded length")
        return Value(kept, {r: tail for r, tail in given.tails.items() if dim not in r})
    one = (1,) * len(proof.batches)
    dims = {**kept, dim: Places(one, proof.numbers(size), one)}
    whole = end is None or end == _END or (dim in given.dims and proof.numbers(end) == given.dims[dim].length)
    tails = {r: given.at(r) if dim in given.dims and (whole or dim not in r) else None for r in regions(dims)}
    if dim not in given.dims:
        tails |= {r: given.at(r) for r in regions(kept)}
    return Value(dims, tails, index=given.index if start == 0 else None)


def _unsliced(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    """A slice in the middle of zeros."""
    given, made = operands[0], call.made()
    dim: int = call.argument("dim") % len(made)
    start, end, step = call.argument("start"), call.argument("end"), call.argument("step")
    if dim not in given.dims and not proof.varies(made[dim]):
        return given
    if proof.varies(start) or start < 0 or step != 1 or (dim in given.dims and not given.dims[dim].first):
        proof.refuse("reads positions counted from the end of the padded length")
    one = (1,) * len(proof.batches)
    if dim not in given.dims:  # a few of the first places, all of which are real
        dims = {**given.dims, dim: Places(one, proof.numbers(made[dim]), one)}
        return Value(dims, {r: 0.0 if dim in r else given.at(r) for r in regions(dims)})
    if end != _END and any(given.tails[r] != 0 for r in regions(given.dims) if dim in r):
        proof.refuse("puts padded positions, which are not zero, beside others")
    kept = {d: places for d, places in given.dims.items() if d != dim}
    if not proof.varies(made[dim]):
        return Value(kept, {r: tail for r, tail in given.tails.items() if dim not in r})
    dims = {**kept, dim: Places(one, proof.numbers(made[dim]), one)}
    return Value(dims, dict(given.tails))


def _selected(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    given = operands[0]
    dim, index = call.argument("dim") % len(call.shape(0)), call.argument("index")
    if dim in given.dims and (proof.varies(index) or index < 0 or not given.dims[dim].first):
        proof.refuse("reads the last of the padded positions", "a position counted from the start")
    names = {d: d - (d > dim) for d in given.dims if d != dim}
    kept = Value(given.dims, {r: t for r, t in given.tails.items() if dim not in r}, given.constant)
    return _renamed(kept, {names[d]: p for d, p in given.dims.items() if d != dim}, names)


def _triangle(proof: _Proof, call: Call, operands: Sequence[Value]) -> Value:
    """Zeros on one side of a diagonal of the last two dims."""
    given, rank = operands[0], len(call.shape(0))
    row, column, diagonal = rank - 2, rank - 1, call.argument("diagonal", 0)
    dims = given.dims
    if set(dims) - {row, column} or not all(places.first for places in dims.values()) or len(dims) != 2:
        proof.refuse("counts positions of the padded length")
    if dims[row] != dims[column] or proof.varies(diagonal):
        proof.refuse("counts positions of the padded length")
    lower = call.target is aten.tril.default
    right = (
        0.0 if lower and diagonal <= 0 else given.tails[frozenset({column})] if not lower and diagonal <= 1 else None
    )
    below = 0.0 if not lower and diagonal >= 0 else given.tails[frozenset({row})] if lower and diagonal >= -1 else None
    both = 0.0 if given.tails[frozenset({row, column})] == 0 else None
    tails = {frozenset({column}): right, frozenset({row}): below, frozenset({row, column}): both}
    return Value(dims, tails)


def _softmax(proof: _Proof, call: Call, operands: Sequence[Value]) -> Made:
    given = operands[0]
    dim = call.argument("dim") % len(call.shape(0))
    if dim not in given.dims:
        return proof._by_rule(call, operands)  # pyright: ignore[reportPrivateUsage]
    if given.tails[frozenset({dim})] != -math.inf:
        proof.refuse("is a softmax over padded positions", "-inf at padded positions: a mask with masked_fill(-inf)")
    tails: dict[Region, float | None] = {}
    for region in regions(given.dims):
        row = region - {dim}
        nothing = given.tails[row | {dim}] == -math.inf and bool(row) and given.tails[row] == -math.inf
        empty = 0.0 if call.target is aten._safe_softmax.default else math.nan
        masked = given.tails[region] == -math.inf and dim in region
        tails[region] = empty if nothing else 0.0 if masked else None
    return Value(given.dims, tails)


def _softmax_backward(proof: _Proof, call: Call, operands: Sequence[Value]) -> Made:
    grad, made = operands
    dim = call.argument("dim") % len(call.shape(0))
    if dim not in made.dims:
        return proof._by_rule(call, operands)  # pyright: ignore[reportPrivateUsage]
    if grad.dims != made.dims or made.tails[frozenset({dim})] != 0:
        proof.refuse("is a softmax over padded positions", "-inf at padded positions: a mask with masked_fill(-inf)")
    tails: dict[Region, float | None] = {}
    for region in regions(made.dims):
        if any(_no_number(one.tails[region]) for one in operands):
            proof.refuse("has rows of padded positions that are no number", _ONE_POSITION)
        row = region - {dim}
        no_grad = bool(row) and grad.tails[row] == 0 and grad.tails[row | {dim}] == 0
        tails[region] = 0.0 if no_grad or (made.tails[region] == 0 and dim in region) else None
    return Value(made.dims, tails)


def _attention(proof: _Proof, call: Call, operands: Sequence[Value]) -> Made:
    """Attention, forward and backward, by the names of its arguments."""
    given = _by_name(call, operands)
    query, key, value = given["query"], given["key"], given["value"]
    places = call.shape(0)
    at = len(places) - 2
    one, other = query.dims, key.dims
    if set(one) - {at} or set(other) - {at} or other != value.dims:
        proof.refuse("mixes padded positions with others")
    if proof.varies(call.argument("scale")):
        proof.refuse("computes with the padded length (scale)", _NO_LENGTH)
    if call.argument("dropout_p", 0.0) != 0:
        proof.refuse("draws random numbers, other ones for another length", "attention without dropout")
    if other:
        mask = given.get("attn_mask", given.get("attn_bias"))
        causal = bool(call.argument("is_causal", False)) and one == other and other[at].first
        last = len(_shape_by_name(call, "attn_mask", "attn_bias")) - 1
        masked = False
        if mask is not None and last in mask.dims:
            masked = mask.tails[frozenset({last})] == -math.inf and mask.dims[last] == other[at]
        if not causal and not masked:
            proof.refuse(
                "attends to padded positions",
                "is_causal=True, or a mask that is False (or -inf) at padded keys: attn_mask=mask[:, None, None, :]",
            )
        rows = frozenset(mask.dims) - {last} if mask is not None else frozenset[int]()
        if mask is not None and rows and mask.tails[rows] == mask.tails.get(rows | {last}) == -math.inf:
            proof.refuse("has rows of padded positions that are no number", _ONE_POSITION)
    grad = given.get("grad_out", given.get("grad_out_"))
    if grad is None:
        flat = [Value()] * len(call.outputs)
        flat[0] = _filled(one, None)
        for i, found in enumerate(call.outputs[1:], 1):
            if found is not None and one and any(proof.varies(n) for n in found.shape):
                flat[i] = _filled({len(found.shape) - 1: one[at]}, None)
        return _put_back(meta.value(proof.node), iter(flat))
    if one and (grad.dims != one or grad.tails[frozenset({at})] != 0):
        proof.refuse("has gradients at padded positions that are not zero", "a loss that leaves padded positions out")
    zeros = [_filled(dims, 0.0) for dims in (one, other, other)]
    return _put_back(meta.value(proof.node), iter([*zeros, *[SAME] * (len(call.outputs) - 3)]))


def _by_name(call: Call, operands: Sequence[Value]) -> dict[str, Value]:
    return {slot.name: operands[slot.positions[0]] for slot in call.slots if slot.positions}


def _shape_by_name(call: Call, *names: str) -> tuple[int, ...]:
    return next((call.shape(slot.positions[0]) for slot in call.slots if slot.name in names and slot.positions), ())


def _loss(proof: _Proof, call: Call, operands: Sequence[Value]) -> Made:
    """The loss of classes: padded positions are left out if their target is the class that it ignores."""
    given = _by_name(call, operands)
    scores, target = given["self"], given["target"]
    ignored = call.argument("ignore_index", -100)
    rows = {dim - (dim > 1): places for dim, places in scores.dims.items()}  # dim 1 are the classes
    if rows != target.dims or 1 in scores.dims:
        proof.refuse("mixes padded positions with others")
    if any(tail != ignored for tail in target.tails.values()):
        proof.refuse(
            "is a loss with padded positions", f"fill={{...: {ignored}}} for its targets: the loss ignores that class"
        )
    if "grad_output" in given:
        return _filled(scores.dims, 0.0)
    each = _filled(target.dims, 0.0) if call.argument("reduction", 1) == 0 else SAME
    return [each, SAME]


_SPECIAL: dict[Any, Special] = {
    **dict.fromkeys((aten.view, aten._unsafe_view, aten.reshape), _regroup),
    aten.expand: _expanded,
    **dict.fromkeys(
        (aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros,
         aten.new_ones, aten.new_full, aten.empty, aten.empty_like, aten.new_empty), _factory,
    ),
    aten.arange: _counted,
    aten.slice.Tensor: _sliced,
    aten.slice_backward: _unsliced,
    aten.select.int: _selected,
    **dict.fromkeys((aten.tril, aten.triu), _triangle),
    **dict.fromkeys((aten._softmax, aten._safe_softmax), _softmax),
    aten._softmax_backward_data: _softmax_backward,
    **dict.fromkeys(
        (aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward), _loss
    ),
    **dict.fromkeys(
        (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward,
         aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward,
         aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
        _attention,
    ),
}  # fmt: skip
