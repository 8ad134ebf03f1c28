"""From a captured step to the problem of its layouts along one axis, and from its solution back to nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node

from ... import _torch
from ...cost.compute import node_us
from ...graph import meta
from ...graph.graph import Input, Role, TrainGraph, node_at, operands
from ...graph.meta import TensorMeta
from ...graph.op_kinds import VIEWS
from ...graph.ops import GRAD_READY
from ...layout import REPLICATED, AxisState
from ...rules.find_rule import find_rule
from ...tuning import TUNING
from ..propagation_inputs import moving
from ..storage_styles import STYLES
from ..strategy import Pins, States
from .alike import classes, starred
from .prices import Move, Prices
from .problem import Choice, Load, Need, Option, Phases, Problem, Value
from .storage import Sizes, Storage, share_of
from .units import Unit, settled, states_of, units
from .wishes import Wishes

_SMALL = TUNING.smallest_sharded_vector_bytes
_FREE = Wishes().of("")


@dataclass(frozen=True)
class Asked:
    """What a problem is made for: prices along the axis that is solved for, data-parallel `axes` with the ways to store
    parameters over them, and the `only` ones for some, states in which inputs `rest` that are not free, what the user
    `wishes` along the axis. With `again`, bytes from the forward to the backward are not counted.
    """

    prices: Prices
    axes: tuple[str, ...] = ()
    storages: tuple[Storage, ...] = ()
    rest: Mapping[str, AxisState] = field(default_factory=dict[str, AxisState])
    wishes: Wishes = field(default_factory=Wishes)
    only: Mapping[str, tuple[Storage, ...]] = field(default_factory=dict[str, tuple[Storage, ...]])
    again: bool = False

    def ways(self, param: str) -> tuple[Storage, ...]:
        """The ways in which one parameter may be stored."""
        return self.only.get(param, self.storages)


@dataclass(frozen=True)
class Found:
    """What a solution says of a graph along the axis: pins of nodes, and the state and storage of each parameter."""

    pins: Pins
    params: Mapping[str, AxisState]
    storage: Mapping[str, Storage]


@dataclass
class Build:
    """The problem of one graph, and which choice stands for which node and parameter."""

    graph: TrainGraph
    asked: Asked
    choices: list[Choice] = field(default_factory=list[Choice])
    of_class: dict[int, list[tuple[int, Unit]]] = field(default_factory=dict[int, list[tuple[int, Unit]]])
    of_param: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.inputs: dict[Node, Input] = {node: given for given, node in self.graph.placeholders()}
        self.params = {given.name: node for node, given in self.inputs.items() if given.role is Role.PARAM}
        self.moving = moving(self.graph)
        included = self._included()
        self.calls = [n for n in self.graph.graph.nodes if n in included]
        marks: dict[Node, Hashable] = {n: self._mark(name) for name, n in self.params.items()}
        marks |= {n: ("gradient", self._mark(str(n.args[1]))) for n in self.grads}
        cut = {n: i for n, i in self.inputs.items() if i.role is not Role.PARAM and i.name in self.asked.rest}
        marks |= {n: i.name for n, i in cut.items()} | {n: self.asked.wishes.of(n.name) for n in self.calls}
        self.number = classes([*self.params.values(), *cut, *self.calls, *self.grads], marks)
        self.members: dict[int, list[Node]] = {}
        for node in [*self.params.values(), *cut, *self.calls]:
            self.members.setdefault(self.number[node], []).append(node)

    def _included(self) -> set[Node]:
        """Calls on the way from the batch to gradients, and those of parameters that these read. What follows from
        constants alone is whole.
        """
        self.grads = [n for n in self.graph.graph.nodes if n.target is GRAD_READY]
        after = set(self.grads)
        for node in self.graph.graph.nodes:
            if any(n in after for n in node.all_input_nodes):
                after.add(node)
        held = sum(i.meta.size_bytes for i in self.graph.inputs if i.role in (Role.PARAM, Role.STATE))
        spent = sum(node_us(n, self.asked.prices.hardware) for n in after if n not in self.moving)
        self.update_us = spent / max(held, 1)  # for each byte of a parameter and its state
        found = {n for n in self.moving if n.op == "call_function" and n not in after}
        todo, before = [n for node in found for n in node.all_input_nodes], set[Node]()
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in found and node not in after and node not in before:
                before.add(node)
                todo += node.all_input_nodes
        of_params = set(self.params.values())
        for node in self.graph.graph.nodes:
            if node in before and any(n in of_params for n in node.all_input_nodes):
                of_params.add(node)
        return found | (before & of_params)

    def _mark(self, param: str) -> Hashable:
        return (
            starred(param),
            tuple(map(str, self._states(param))),
            self.asked.wishes.of(param),
            self.asked.only.get(param),
        )

    def _states(self, param: str) -> list[AxisState]:
        """States along the axis that a parameter may rest in."""
        made = meta.tensor(self.params[param])
        assert made is not None, "a parameter is one tensor"
        fixed = self.asked.rest.get(param)
        if fixed is None and len(made.shape) == 1 and made.size_bytes < _SMALL and self.asked.wishes.of(param) == _FREE:
            return [REPLICATED]
        return [fixed] if fixed is not None else states_of(made, self.asked.prices.parts)

    # -- choices -------------------------------------------------------------------------
    def problem(self) -> Problem:
        """The whole of it."""
        readers = self._readers()
        for node, given in self.inputs.items():
            if given.role is Role.PARAM and self.number[node] not in self.of_class:
                self._param(node, given)
            elif node in self.number and given.role is not Role.PARAM:
                gives = Option("", {0: self.asked.rest[given.name]}, {})
                self._add(node, Unit((gives,), frozenset(), frozenset({0})))
            if given.role is Role.PARAM:
                self.of_param[given.name] = self.of_class[self.number[node]][0][0]
        for node in self.calls:
            if self.number[node] not in self.of_class and not _torch.is_getitem(node.target):
                self._call(node, readers)
        values = self._values(readers)
        fixed = sum(i.meta.size_bytes for i in self.graph.inputs if i.role not in (Role.PARAM, Role.STATE, Role.GRAD))
        return Problem(tuple(self.choices), tuple(values), fixed=Load(rest=float(fixed)))

    def _add(self, node: Node, unit: Unit) -> None:
        name = self.inputs[node].name if node in self.inputs else node.name
        allowed = tuple(o for o in unit.options if self.asked.wishes.allows(node, name, o))
        if not allowed:
            raise self.asked.wishes.refused(name)
        self.choices.append(Choice(node.name, allowed, len(self.members[self.number[node]])))
        self.of_class.setdefault(self.number[node], []).append((len(self.choices) - 1, unit))

    def _call(self, node: Node, readers: Mapping[tuple[int, int], dict[tuple[int, int], bool]]) -> None:
        several = len(readers.get((self.number[node], 0), ())) > 1
        for unit in units(node, self.asked.prices, meta.is_backward(node), several):
            self._add(node, unit)

    def _param(self, node: Node, given: Input) -> None:
        asked, prices = self.asked, self.asked.prices
        owned = [i for i in self.graph.inputs if i.role is Role.STATE and i.owner == given.name]
        grads = [g for g in self.grads if str(g.args[1]) == given.name]
        options: list[Option] = []
        for state in self._states(given.name):
            size = prices.local(given.meta, state).size_bytes
            share = size / max(given.meta.size_bytes, 1)
            state_bytes = sum(i.meta.size_bytes * (share if i.meta.shape == given.meta.shape else 1) for i in owned)
            sizes = Sizes(size, state_bytes, size if grads else 0.0)
            takes = {1 + number: state for number in range(len(grads))}
            for storage in asked.ways(given.name) or (Storage("", STYLES["replicate"]),):
                load = storage.load(sizes, prices.hardware, prices.mesh, asked.axes)
                load = replace(load, kept=0.0) if asked.again else load
                parts = share_of(storage, prices.mesh, asked.axes)
                us = self.update_us * (size + state_bytes) / parts if grads else 0.0
                name = f"{state} {storage.name}".strip()
                options.append(Option(name, {0: state}, takes, load + Load((0.0, 0.0, us))))
        self._add(node, Unit(tuple(options), frozenset(options[0].takes), frozenset({0})))

    # -- values ---------------------------------------------------------------------------
    def _source(self, node: Node) -> tuple[Node, int]:
        """The call that makes a value, and which of its outputs it is."""
        start = 0
        while _torch.is_getitem(node.target):
            start += meta.picked(node).start
            node = node_at(node, 0)
        return node, start

    def _readers(self) -> dict[tuple[int, int], dict[tuple[int, int], bool]]:
        """For each class and output, the classes and places that read it: True where that is in the backward."""
        found: dict[tuple[int, int], dict[tuple[int, int], bool]] = {}

        def note(given: Node, reader: tuple[int, int], later: bool) -> None:
            source, output = self._source(given)
            if source in self.number and source.target is not GRAD_READY:
                found.setdefault((self.number[source], output), {})[reader] = later

        for node in self.calls:
            rule = None if _torch.is_getitem(node.target) else find_rule(node)
            for place, given in enumerate(operands(node)):
                if not _torch.is_getitem(node.target) and not (rule and place in rule.by_shape):
                    note(given, (self.number[node], place), meta.is_backward(node))
        seen: dict[str, int] = {}
        for node in self.grads:
            name = str(node.args[1])
            seen[name] = seen.get(name, 0) + 1
            note(node_at(node, 0), (self.number[self.params[name]], seen[name]), True)
        for number, (output, node) in enumerate(self.graph.results()):
            if output.kind == "result" or output.target not in self.params:
                note(node, (-1, number), False)
        return found

    def _values(self, readers: Mapping[tuple[int, int], dict[tuple[int, int], bool]]) -> list[Value]:
        out: list[Value] = []
        whole = len(self.choices)
        self.choices.append(Choice("results", (Option("", {}, {0: REPLICATED}),)))
        for (number, output), places in readers.items():
            maker = next((c for c, unit in self.of_class.get(number, ()) if output in unit.given), None)
            if maker is None:
                continue
            needs = [Need(whole, 0, later) if reader < 0 else self._need(reader, place, later)
                     for (reader, place), later in places.items()]  # fmt: skip
            kept = [need for need in dict.fromkeys(needs) if need is not None]
            value = self._value(self.members[number][0], maker, output, tuple(kept))
            if value is not None:
                out.append(value)
        return out

    def _need(self, reader: int, place: int, later: bool) -> Need | None:
        taker = next((c for c, unit in self.of_class.get(reader, ()) if place in unit.taken), None)
        return None if taker is None else Need(taker, place, later)

    def _value(self, node: Node, maker: int, output: int, needs: tuple[Need, ...]) -> Value | None:
        made = meta.tensors(node)[output]
        if made is None or not needs:
            return None
        prices, moves = self.asked.prices, node in self.moving
        given = [o.gives[output] for o in self.choices[maker].options]
        wanted = [o.takes[need.at] for need in needs for o in self.choices[need.taker].options]
        at_rest = not moves or all(self.choices[n.taker].name in self._param_names for n in needs)
        later = meta.is_backward(node) or all(need.later for need in needs)
        loads = {pair: _load(move, later, at_rest)
                 for pair, move in prices.moves(made, given, wanted, bulk=at_rest)}  # fmt: skip
        early = moves and not meta.is_backward(node) and not self.asked.again
        kept = {s: self._bytes(made, s) for s in dict.fromkeys(wanted)} if early else {}
        count, memory = self.choices[maker].count, self.number[_root(node)] if early else -1
        free = all(load.is_nothing for load in loads.values()) and len(loads) == len(set(given)) * len(set(wanted))
        if free and not (kept and any(need.later for need in needs)):
            return None
        return Value(maker, output, needs, loads, count, kept, memory, made.size_bytes)

    @property
    def _param_names(self) -> frozenset[str]:
        return frozenset(node.name for node in self.params.values())

    def _bytes(self, made: TensorMeta, state: AxisState) -> float:
        return self.asked.prices.local(made, state).size_bytes * self.asked.prices.share

    # -- and back --------------------------------------------------------------------------
    def found(self, picked: Sequence[int]) -> Found:
        """What an option for each choice says of nodes and parameters."""
        axis = self.asked.prices.axis
        results, ways = dict[str, States](), dict[str, Mapping[str, tuple[str, ...]]]()
        options = [choice.options[i] for choice, i in zip(self.choices, picked, strict=True)]
        for node in self.calls:
            chosen = [options[c] for c, _ in self.of_class.get(self.number[node], ())]
            names = [settled(o.name)[0] for o in chosen]
            if any(names):
                ways[node.name] = {axis: tuple(names)}
            if len(meta.tensors(node)) == 1 and chosen and (chosen[0].gives[0].kind == "P" or "->" in chosen[0].name):
                results[node.name] = {axis: chosen[0].gives[0]}
        rests, storage = dict[str, AxisState](), dict[str, Storage]()
        for name, choice in self.of_param.items():
            rests[name] = options[choice].gives[0]
            stored = [s for s in self.asked.ways(name) if options[choice].name == f"{rests[name]} {s.name}"]
            if stored:
                storage[name] = stored[0]
        return Found(Pins(results, {}, ways), rests, storage)


def _load(move: Move, later: bool, hidden: bool) -> Load:
    computes, sent = _phase(move.copied_us, later), _phase(move.sent_us, later)
    return Load(computes, beside=sent) if hidden else Load(computes, waits=sent)


def _phase(us: float, later: bool) -> Phases:
    return (0.0, us, 0.0) if later else (us, 0.0, 0.0)


def _root(node: Node) -> Node:
    """What made the memory that a view looks at."""
    while node.op == "call_function" and node.target in VIEWS and node_at(node, 0).op == "call_function":
        node = node_at(node, 0)
    return node
