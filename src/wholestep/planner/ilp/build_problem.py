"""Builds the layout problem of a captured step along one axis, and reads layouts from an assignment."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from torch.fx import Node
from torch.fx.node import map_arg

from ... import _torch
from ...cost.compute import flops, node_us
from ...graph import meta
from ...graph.graph import Input, Role, TrainGraph
from ...graph.meta import TensorMeta
from ...graph.nodes import node_at, operands, reached
from ...graph.op_kinds import VIEWS
from ...graph.ops import GRAD_READY
from ...hardware.hardware import Hardware
from ...layout import REPLICATED, AxisState, Layout
from ...mesh import Mesh
from ...plan.data_parallel import REPLICATE, StorageOption, storage_of
from ...plan.op_strategies import OpStrategy, op_strategies
from ...plan.propagation_inputs import moving
from ...plan.strategies import Strategies
from ...plan.strategy import Pins, States
from ...plan.tensor_parallel import TensorParallel
from ...rules.find_rule import find_rule
from ...rules.rule import BoundRule, Group
from ...tuning import TUNING
from .axis_constraints import AxisConstraints, axis_constraints, made_by
from .prices import Move, Prices, storage_load
from .problem import Need, OneOf, Option, Phases, Problem, StepLoad, ValueEdge

_NUMBER = re.compile(r"\d+")
_UNCONSTRAINED = AxisConstraints().mark("")


@dataclass(frozen=True)
class ProblemSpec:
    """What a problem is built for.

    Args:
        prices: the cost model along the solved axis.
        axes: data-parallel axes.
        storages: the storage options of parameters over them.
        rest: states along the solved axis of inputs whose storage layout is given.
        constraints: the user's constraints along the solved axis.
        recomputes: activations may be recomputed: bytes from the forward to the backward are not counted.
    """

    prices: Prices
    axes: tuple[str, ...] = ()
    storages: tuple[StorageOption, ...] = ()
    rest: Mapping[str, AxisState] = field(default_factory=dict[str, AxisState])
    constraints: AxisConstraints = field(default_factory=AxisConstraints)
    recomputes: bool = False


def problem_spec(
    tensor: TensorParallel, beside: Strategies, graph: TrainGraph, mesh: Mesh, placed: Mapping[str, Layout]
) -> ProblemSpec:
    """The problem of the axis of `tensor`; the strategies on other axes are given."""
    data = beside.data
    axes = tuple(a for a in data.axes(mesh) if mesh.axis_size(a) > 1) if data is not None else ()
    shares = data is not None and data.semantics == "global"
    share = 1 / prod(mesh.axis_size(a) for a in axes) if shares else 1.0
    rest: dict[str, AxisState] = {}
    for graph_input in graph.inputs:
        if graph_input.role is Role.PARAM and graph_input.name in placed:
            rest[graph_input.name] = placed[graph_input.name].state(tensor.axis)
        elif graph_input.role is Role.BATCH:
            cut = tensor.batch_cut(mesh, graph_input.name, len(graph_input.meta.shape))
            rest |= {graph_input.name: AxisState("S", cut.dim)} if cut is not None else {}
    storages = (storage_of(data),) if data is not None and axes else ()
    prices = Prices(tensor.hardware or Hardware.default(), mesh, tensor.axis, share)
    return ProblemSpec(prices, axes, storages, rest, axis_constraints(graph, tensor.pinned, tensor.replicated))


@dataclass
class ProblemBuilder:
    """The problem of one graph. `of_class`: choices of each class of nodes, `of_param`: choice of each parameter."""

    graph: TrainGraph
    spec: ProblemSpec
    choices: list[OneOf] = field(default_factory=list[OneOf])
    of_class: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    of_param: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.inputs: dict[Node, Input] = {node: graph_input for graph_input, node in self.graph.placeholders()}
        self.params = {param.name: node for node, param in self.inputs.items() if param.role is Role.PARAM}
        self.moving = moving(self.graph)
        included = self._included()
        self.calls = [n for n in self.graph.graph.nodes if n in included]
        marks: dict[Node, Hashable] = {n: self._mark(name) for name, n in self.params.items()}
        marks |= {n: ("gradient", self._mark(str(n.args[1]))) for n in self.grads}
        fixed = {n: i for n, i in self.inputs.items() if i.role is not Role.PARAM and i.name in self.spec.rest}
        marks |= {n: i.name for n, i in fixed.items()}
        marks |= {n: self.spec.constraints.mark(meta.part_of(n)) for n in self.calls}
        self.number = node_classes([*self.params.values(), *fixed, *self.calls, *self.grads], marks)
        self.members: dict[int, list[Node]] = {}
        for node in [*self.params.values(), *fixed, *self.calls]:
            self.members.setdefault(self.number[node], []).append(node)

    def _included(self) -> set[Node]:
        """Calls between batch and gradients, and calls on parameters alone that these read; none on constants alone."""
        self.grads = [n for n in self.graph.graph.nodes if n.target is GRAD_READY]
        after = dict.fromkeys(self.grads)  # in order: the sum of their times is the same in every run
        for node in self.graph.graph.nodes:
            if any(n in after for n in node.all_input_nodes):
                after[node] = None
        stored_bytes = sum(i.meta.size_bytes for i in self.graph.inputs if i.role in (Role.PARAM, Role.STATE))
        spent = sum(node_us(n, self.spec.prices.hardware) for n in after if n not in self.moving)
        self.update_us = spent / max(stored_bytes, 1)  # for each byte of a parameter and its state
        included = {n for n in self.moving if n.op == "call_function" and n not in after}
        reads = (n for node in included for n in node.all_input_nodes)
        before = reached(reads, where=lambda node: node not in included and node not in after)
        of_params = set(self.params.values())
        for node in self.graph.graph.nodes:
            if node in before and any(n in of_params for n in node.all_input_nodes):
                of_params.add(node)
        return included | (before & of_params)

    def _mark(self, param: str) -> Hashable:
        return without_numbers(param), tuple(map(str, self._states(param))), self.spec.constraints.mark(param)

    def _states(self, param: str) -> list[AxisState]:
        """States along the axis in which a parameter may be stored."""
        tensor = meta.tensor(self.params[param])
        assert tensor is not None, "a parameter is one tensor"
        fixed = self.spec.rest.get(param)
        if fixed is not None:
            return [fixed]
        free = self.spec.constraints.mark(param) == _UNCONSTRAINED
        if len(tensor.shape) == 1 and tensor.size_bytes < TUNING.smallest_sharded_vector_bytes and free:
            return [REPLICATED]
        return states_of(tensor, self.spec.prices.parts)

    # -- choices -------------------------------------------------------------------------
    def problem(self) -> Problem:
        """The problem of the graph."""
        readers = self._readers()
        for node, graph_input in self.inputs.items():
            if graph_input.role is Role.PARAM and self.number[node] not in self.of_class:
                self._param(node, graph_input)
            elif node in self.number and graph_input.role is not Role.PARAM:
                self._add(node, (Option({0: self.spec.rest[graph_input.name]}, {}),))
            if graph_input.role is Role.PARAM:
                self.of_param[graph_input.name] = self.of_class[self.number[node]][0]
        for node in self.calls:
            if self.number[node] not in self.of_class and not _torch.is_getitem(node.target):
                several = len(readers.get((self.number[node], 0), ())) > 1
                for options in op_options(node, self.spec.prices, meta.is_backward(node), several):
                    self._add(node, options)
        values = self._values(readers)
        fixed = sum(i.meta.size_bytes for i in self.graph.inputs if i.role not in (Role.PARAM, Role.STATE, Role.GRAD))
        return Problem(tuple(self.choices), tuple(values), fixed=StepLoad(rest=float(fixed)))

    def _add(self, node: Node, options: Sequence[Option]) -> None:
        name = self.inputs[node].name if node in self.inputs else meta.part_of(node)
        allowed = tuple(o for o in options if self.spec.constraints.allows(node, name, o))
        if not allowed:
            raise self.spec.constraints.infeasible(name)
        self.of_class.setdefault(self.number[node], []).append(len(self.choices))
        self.choices.append(OneOf(node.name, allowed, len(self.members[self.number[node]])))

    def _param(self, node: Node, param: Input) -> None:
        spec, prices = self.spec, self.spec.prices
        owned = [i for i in self.graph.inputs if i.role is Role.STATE and i.owner == param.name]
        grads = [g for g in self.grads if str(g.args[1]) == param.name]
        options: list[Option] = []
        for state in self._states(param.name):
            size = prices.local(param.meta, state).size_bytes
            share = size / max(param.meta.size_bytes, 1)
            state_bytes = sum(i.meta.size_bytes * (share if i.meta.shape == param.meta.shape else 1) for i in owned)
            grad_bytes = size if grads else 0.0
            update_us = self.update_us * (size + state_bytes) if grads else 0.0
            takes = {1 + number: state for number in range(len(grads))}
            for storage in spec.storages or (None,):
                how = storage or REPLICATE
                load = storage_load(how, size, state_bytes, grad_bytes, update_us, prices, spec.axes)
                load = replace(load, saved=0.0) if spec.recomputes else load
                options.append(Option({0: state}, takes, load, storage=storage))
        self._add(node, options)

    # -- values ---------------------------------------------------------------------------
    def _readers(self) -> dict[tuple[int, int], dict[tuple[int, int], bool]]:
        """For each class and output, the classes and operand places that read it: True for reads in the backward."""
        readers: dict[tuple[int, int], dict[tuple[int, int], bool]] = {}

        def note(operand: Node, reader: tuple[int, int], later: bool) -> None:
            source, output = made_by(operand)
            if source in self.number and source.target is not GRAD_READY:
                readers.setdefault((self.number[source], output), {})[reader] = later

        for node in self.calls:
            rule = None if _torch.is_getitem(node.target) else find_rule(node)
            for place, operand in enumerate(operands(node)):
                if not _torch.is_getitem(node.target) and not (rule and place in rule.by_shape):
                    note(operand, (self.number[node], place), meta.is_backward(node))
        seen: dict[str, int] = {}
        for node in self.grads:
            name = str(node.args[1])
            seen[name] = seen.get(name, 0) + 1
            note(node_at(node, 0), (self.number[self.params[name]], seen[name]), True)
        for number, (output, node) in enumerate(self.graph.results()):
            if output.kind == "result" or output.target not in self.params:
                note(node, (-1, number), False)
        return readers

    def _values(self, readers: Mapping[tuple[int, int], dict[tuple[int, int], bool]]) -> list[ValueEdge]:
        out: list[ValueEdge] = []
        results = len(self.choices)
        self.choices.append(OneOf("results", (Option({}, {0: REPLICATED}),)))
        for (number, output), places in readers.items():
            maker = next((c for c in self.of_class.get(number, ()) if output in self.choices[c].options[0].gives), None)
            if maker is None:
                continue
            needs = [Need(results, 0, later) if reader < 0 else self._need(reader, place, later)
                     for (reader, place), later in places.items()]  # fmt: skip
            distinct = [need for need in dict.fromkeys(needs) if need is not None]
            value = self._value(self.members[number][0], maker, output, tuple(distinct))
            if value is not None:
                out.append(value)
        return out

    def _need(self, reader: int, place: int, later: bool) -> Need | None:
        taker = next((c for c in self.of_class.get(reader, ()) if place in self.choices[c].options[0].takes), None)
        return None if taker is None else Need(taker, place, later)

    def _value(self, node: Node, maker: int, output: int, needs: tuple[Need, ...]) -> ValueEdge | None:
        tensor = meta.tensors(node)[output]
        if tensor is None or not needs:
            return None
        prices, moves = self.spec.prices, node in self.moving
        gives = [o.gives[output] for o in self.choices[maker].options]
        takes = [o.takes[need.at] for need in needs for o in self.choices[need.taker].options]
        names = {param.name for param in self.params.values()}
        bulk = not moves or all(self.choices[n.taker].name in names for n in needs)
        later = meta.is_backward(node) or all(need.later for need in needs)
        pairs = product(dict.fromkeys(gives), dict.fromkeys(takes))
        loads = {p: _load(move, later, bulk) for p in pairs if (move := prices.move(tensor, *p, bulk=bulk)) is not None}
        early = moves and not meta.is_backward(node) and not self.spec.recomputes
        saved = {s: prices.local(tensor, s).size_bytes * prices.share for s in dict.fromkeys(takes)} if early else {}
        count, memory = self.choices[maker].count, self.number[_root(node)] if early else -1
        free = all(load.is_nothing for load in loads.values()) and len(loads) == len(set(gives)) * len(set(takes))
        if free and not (saved and any(need.later for need in needs)):
            return None
        return ValueEdge(maker, output, needs, loads, count, saved, memory, tensor.size_bytes)

    # -- layouts ---------------------------------------------------------------------------
    def layouts(self, picked: Sequence[int]) -> tuple[Pins, dict[str, AxisState], dict[str, StorageOption]]:
        """Pins of nodes, and the state and storage option of each parameter, under an assignment."""
        axis = self.spec.prices.axis
        results, ways = dict[str, States](), dict[str, Mapping[str, tuple[str, ...]]]()
        options = [choice.options[i] for choice, i in zip(self.choices, picked, strict=True)]
        for node, chosen in self._picked(options):
            names = [o.strategy for o in chosen]
            if any(names):
                ways[node.name] = {axis: tuple(names)}
            if len(meta.tensors(node)) == 1 and chosen and (chosen[0].gives[0].kind == "P" or chosen[0].reduced):
                results[node.name] = {axis: chosen[0].gives[0]}
        params = {name: options[choice].gives[0] for name, choice in self.of_param.items()}
        stored = ((name, options[choice].storage) for name, choice in self.of_param.items())
        return Pins(results, {}, ways), params, {name: option for name, option in stored if option}

    def partial_parts(self, picked: Sequence[int]) -> set[str]:
        """Decomposed ops of which a part returns partial values, under an assignment."""
        options = [choice.options[i] for choice, i in zip(self.choices, picked, strict=True)]
        sums = [bool(o.reduced) or any(state.kind == "P" for state in o.gives.values()) for o in options]
        summed = (n for n in self.calls if any(sums[c] for c in self.of_class.get(self.number[n], ())))
        return {name for n in summed if (name := meta.part_of(n))}

    def _picked(self, options: Sequence[Option]) -> Iterator[tuple[Node, list[Option]]]:
        """The options of each call, of those of the choices."""
        for node in self.calls:
            yield node, [options[c] for c in self.of_class.get(self.number[node], ())]


def _load(move: Move, later: bool, hidden: bool) -> StepLoad:
    computes, sent = in_phase(move.copied_us, later), in_phase(move.sent_us, later)
    return StepLoad(computes, beside=sent) if hidden else StepLoad(computes, waits=sent)


def _root(node: Node) -> Node:
    """The node that made the memory of a view."""
    while node.op == "call_function" and node.target in VIEWS and node_at(node, 0).op == "call_function":
        node = node_at(node, 0)
    return node


# -- classes of equal nodes ----------------------------------------------------------------------------------
def node_classes(nodes: Sequence[Node], marks: Mapping[Node, Hashable]) -> dict[Node, int]:
    """The class of each node, numbered by first appearance. Nodes with different `marks` are never equal.

    Classes are refined in rounds. The first round compares op, arguments, shapes and module path without numbers; each
    further round also the classes of operands and readers. After a few rounds a class is one place in a layer, and
    layers but the first and the last few share classes. Nodes of one class share a choice: a class that is too coarse
    may cost time, never correctness.
    """
    inside = set(nodes)
    operands_of = {node: [n for n in operands(node) if n in inside] for node in nodes}
    readers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for node in nodes:
        for place, operand in enumerate(operands_of[node]):
            readers[operand].append((node, place))
    class_of = _numbered({node: (_about(node), marks.get(node)) for node in nodes})
    for _ in range(TUNING.class_rounds):
        class_of = _numbered({
            node: (
                class_of[node], tuple(class_of[n] for n in operands_of[node]),
                tuple(sorted((class_of[n], place) for n, place in readers[node])),
            )
            for node in nodes
        })  # fmt: skip
    return class_of


def without_numbers(name: str) -> str:
    """`name` with `*` for each number: the same in every layer."""
    return _NUMBER.sub("*", name)


def _about(node: Node) -> Hashable:
    tensors = tuple(m and (m.shape, m.stride, m.dtype) for m in meta.tensors(node))
    if node.op != "call_function":
        return node.op, tensors
    if node.target is GRAD_READY:  # it names its parameter
        return node.target, tensors
    args = repr(map_arg((node.args, node.kwargs), lambda _: "%"))
    return node.target, args, tensors, meta.is_backward(node), without_numbers(meta.module_path(node))


def _numbered(keys: Mapping[Node, Hashable]) -> dict[Node, int]:
    table: dict[Hashable, int] = {}
    return {node: table.setdefault(key, len(table)) for node, key in keys.items()}


def op_options(node: Node, prices: Prices, later: bool, may_reduce: bool) -> list[tuple[Option, ...]]:
    """The options of each group of a call, all with states of the same operands and outputs; an op without a rule has
    one option, replicated.

    `later`: the call is in the backward. `may_reduce`: a partial result may be reduced at once, as several ops read it.
    """
    rule = find_rule(node) if prices.parts > 1 else None
    count, outputs = len(operands(node)), range(len(meta.tensors(node)))
    if rule is None or not rule.groups:
        gives, takes = dict.fromkeys(outputs, REPLICATED), dict.fromkeys(range(count), REPLICATED)
        load = StepLoad(in_phase(prices.op_us(node, {}, {}), later))
        return [(Option(gives, takes, load),)]
    grouped_operands = {i for group in rule.groups for i in group.operands}
    grouped_outputs = {o for group in rule.groups for o in group.outputs}
    ungrouped = frozenset({*range(count)} - grouped_operands - rule.by_shape), frozenset({*outputs} - grouped_outputs)
    choices: list[tuple[Option, ...]] = []
    for group in rule.groups:
        choices.append(tuple(_options(node, rule, group, prices, later, may_reduce, ungrouped)))
        ungrouped = frozenset[int](), frozenset[int]()  # in the first group only
    return choices


def _options(
    node: Node, rule: BoundRule, group: Group, prices: Prices, later: bool, may_reduce: bool,
    ungrouped: tuple[frozenset[int], frozenset[int]],
) -> Iterator[Option]:  # fmt: skip
    for option in _candidates(node, group, prices):
        takes = {i: s for i, s in option.takes.items() if i not in rule.by_shape}
        takes = dict.fromkeys(ungrouped[0], REPLICATED) | takes
        gives = dict.fromkeys(ungrouped[1], REPLICATED) | {**option.gives}
        us = prices.op_us(node, option.takes, option.gives) * (1 / len(rule.groups))
        yield Option(gives, takes, StepLoad(in_phase(us, later)), option.name)
        tensor = meta.tensor(node)
        if not may_reduce or tensor is None or gives[0].kind != "P":
            continue
        for state in states_of(tensor, prices.parts):
            move = prices.move(tensor, gives[0], state)
            if move is not None:
                load = StepLoad(in_phase(us + move.copied_us, later), in_phase(move.sent_us, later))
                yield Option({0: state}, takes, load, option.name, reduced=True)


def _candidates(node: Node, group: Group, prices: Prices) -> Iterator[OpStrategy]:
    """The op strategies under which every rank has rows, and no product of replicated tensors stays partial."""
    arguments, heavy = operands(node), flops(node) > 0
    for option in op_strategies(group, prices.parts):
        if option.factor and any(
            s.kind == "S" and tensor.shape[s.dim] < prices.parts
            for i, s in option.takes.items() if (tensor := meta.tensor(arguments[i])) is not None
        ):  # fmt: skip
            continue
        if heavy and any(s.kind == "P" for s in option.takes.values()):
            continue
        yield option


def states_of(tensor: TensorMeta, parts: int) -> list[AxisState]:
    """Replicated, and sharded on each dim that has a row for every rank."""
    return [REPLICATED, *(AxisState("S", d) for d, size in enumerate(tensor.shape) if size >= parts > 1)]


def in_phase(us: float, later: bool) -> Phases:
    """Microseconds in the backward, or else in the forward."""
    return (0.0, us, 0.0) if later else (us, 0.0, 0.0)
