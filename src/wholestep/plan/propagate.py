"""Propagates storage layouts through a step, node by node, to a layout of every value.

Axes are treated one by one. An operand that varies between ranks makes the result vary, and all other operands whole.
Otherwise the op's rule offers its factors, and the cheapest resharding of the operands wins. A partial value stays
partial through linear ops, and is reduced to the storage layout of its parameter's optimizer state.

Activations, losses and incomplete gradients depend on the batch; parameters, their state and complete gradients do not.
An op that reads both is sharded as its batch-dependent operands are; parameters sharded in storage only are gathered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.decompose import can_expand
from ..graph.graph import Role
from ..graph.meta import TensorMeta
from ..graph.nodes import node_at, operands
from ..graph.op_kinds import PRODUCTS, VIEWS
from ..graph.ops import GRAD_READY, OVER_RANKS
from ..layout import REPLICATED, VARIES, AxisState, Layout, replicated
from ..mesh import TIME
from ..reshard import reshard
from ..rules.find_rule import call_kind, find_rule
from ..rules.registry import draws, is_random
from ..rules.rule import BoundRule, Group, PassThrough
from ..tuning import TUNING
from .decision import Decision
from .explain import moves, reason, settled, with_names
from .for_pieces import is_drawn_into
from .op_strategies import NEAR, PART, OpStrategy, named, part_of, through, whole
from .op_strategies import cut as cut_by
from .propagation_inputs import (
    PropagationInputs,
    gradient_homes,
    moving,
    reads,
    refuse_varying_updates,
    rounding,
    shrinks,
)
from .rows_in_any_order import states_along

_PRODUCER = "producer"
_Decided = tuple[tuple[Layout, ...], tuple[Layout, ...], str, list[str], list[tuple[str, str]]]


def propagate(situation: PropagationInputs, scout: bool = False) -> dict[str, Decision]:
    """A decision for every call of the graph.

    With `scout`, readers of an op that can be decomposed see the layout that it would have if it were sharded. Raises
    PlanError if a parameter or its state would be updated with values that differ between ranks.
    """
    run = _Propagation(situation, scout)
    for node in situation.graph.graph.nodes:
        if node.op == "call_function":
            run.decide(node)
    refuse_varying_updates(situation.graph, run.layouts)
    return run.decisions


@dataclass
class _Propagation:
    situation: PropagationInputs
    scout: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict[str, Decision])
    layouts: dict[Node, tuple[Layout, ...]] = field(default_factory=dict[Node, tuple[Layout, ...]])
    targets: dict[Node, tuple[Layout | None, ...]] = field(default_factory=dict[Node, tuple[Layout | None, ...]])
    decided: dict[tuple[Hashable, ...], _Decided] = field(default_factory=dict[tuple[Hashable, ...], _Decided])

    def __post_init__(self) -> None:
        self.batch_dependent: frozenset[Node] = moving(self.situation.graph)
        self.rounding: frozenset[Node] = rounding(self.situation.graph, self.batch_dependent)
        self.homes: dict[Node, Layout] = gradient_homes(self.situation.graph, self.situation.grad_targets)
        self.active = [axis for axis in self.situation.axes if self.situation.mesh.axis_size(axis) > 1]
        self.batch_axes = set[str]()
        for spec, node in self.situation.graph.placeholders():
            self.layouts[node] = (self.situation.rest[spec.name],)
            self.batch_axes |= self.situation.rest[spec.name].axes if spec.role is Role.BATCH else set()

    def decide(self, node: Node) -> None:
        if _torch.is_getitem(node.target):
            decision = self._pick(node)
        elif node.target is GRAD_READY:
            decision = self._gradient(node)
        elif node.target is OVER_RANKS:
            decision = self._over_ranks(node)
        else:
            decision = self._call(node)
        if node.name in self.situation.pins.results:
            decision = self._pinned(node, decision)
        elif any(layout.partial for layout in decision.outputs):
            decision = self._reduced(node, decision)
        self.decisions[node.name] = decision
        self.layouts[node] = decision.given

    def _pick(self, node: Node) -> Decision:
        source, picked = node_at(node, 0), meta.picked(node)
        if source in self.targets:
            self.targets[node] = self.targets[source][picked]
        return Decision((), self.layouts[source][picked], _PRODUCER, reads=(source.name,))

    def _gradient(self, node: Node) -> Decision:
        """Turn a gradient that varies between ranks into a partial value, to be averaged or summed."""
        param = str(node.args[1])
        self.targets[node] = (self.situation.grad_targets[param],)
        have = layout = self.layouts[node_at(node, 0)][0]
        for axis, at in self.situation.pins.owners.get(node.name, {}).items():
            layout = layout.put(axis, at)
        if layout != have and layout.state(TIME).kind == "P":
            layout = layout.put(TIME, REPLICATED)
        partial = layout
        for axis in self.active:
            if layout.state(axis) == VARIES:  # along per-rank axes
                partial = partial.put(axis, AxisState("P", op=self.situation.reduce_op))
        reads = (node_at(node, 0).name,)
        return Decision((layout,), (partial,), "gradient", reads=reads, gradient_of=param)

    def _over_ranks(self, node: Node) -> Decision:
        """Turn a norm into a partial 1-norm along every axis: also ranks that should hold the same are heard. Of
        stages, the one that has it is.
        """
        layout = partial = self.layouts[node_at(node, 0)][0]
        for axis in self.active:
            state = layout.state(axis)
            if state.kind != "O" and (axis != TIME or state != REPLICATED):  # not once for each piece
                partial = partial.put(axis, AxisState("P", op="norm1"))
        return Decision((layout,), (partial,), "over ranks", reads=(node_at(node, 0).name,))

    def _call(self, node: Node) -> Decision:
        inputs = operands(node)
        have = [self._seen(node, n) for n in inputs]
        self._inherit_targets(node, inputs)
        key = self._alike(node, inputs, have)
        if key not in self.decided:
            self.decided[key] = self._decision(node, inputs, have)
        takes, gives, why, because, moved = self.decided[key]
        names = tuple([n.name for n in inputs])
        moved = tuple([(with_names(name, names), text) for name, text in moved])
        return Decision(takes, gives, why, None, tuple([with_names(t, names) for t in because]), names, moved)

    def _alike(self, node: Node, inputs: Sequence[Node], have: Sequence[Layout]) -> tuple[Hashable, ...]:
        """Equal for calls that get the same decision, but for the names of their operands: equal layers have many."""
        depends, pins, home = self.batch_dependent, self.situation.pins, self.homes.get(node)
        pinned, owners = pins.op_strategies.get(node.name, {}), pins.owners.get(node.name, {})
        placed = pinned or owners or home or meta.along(node)
        if not (placed or any(layout.partial or any(layout.dims) for layout in have)):
            return (node,)  # to decide takes no longer
        return (
            call_kind(node), tuple(have), home, tuple(pinned.items()), tuple(owners.items()), node in depends,
            tuple([n in depends for n in inputs]), any(user in depends for user in node.users),
            tuple([self.target(n) for n in inputs]), node in self.rounding, is_drawn_into(node),
            tuple(map(inputs.index, inputs)) if len({*inputs}) < len(inputs) else (), meta.along(node),
        )  # fmt: skip

    def _decision(self, node: Node, inputs: Sequence[Node], have: Sequence[Layout]) -> _Decided:
        """The decision about a call, with places of operands for their names (`explain.with_names`)."""
        tensors = meta.tensors(node)
        want = [replicated(len(layout.dims)) for layout in have]
        outputs: list[Layout] = [replicated(len(m.shape)) if m else Layout(()) for m in tensors]
        rule: BoundRule | None = None
        cut: dict[tuple[int, str], tuple[int, ...]] = {}
        why, random, because = "no operand is cut", is_random(node), list[str]()
        pinned = self.situation.pins.op_strategies.get(node.name, {})
        apart, made = meta.along(node), [i for i, tensor in enumerate(tensors) if tensor]
        for axis in in_order(self.active, have, [n in self.batch_dependent for n in inputs]):
            states, owner = [layout.state(axis) for layout in have], self._owner(node, axis)
            varies = VARIES in states or (random and axis in self.situation.per_rank)
            all_whole = states.count(REPLICATED) == len(states)
            stored = axis in self.situation.storage and node not in self.batch_dependent
            takes, gives = [REPLICATED] * len(inputs), dict[int, AxisState]()
            if apart and apart[0] == axis:
                why, text = "experts", "rows of the experts that a rank has"
                takes, results = states_along(apart, states)
                gives = {i: results[i] for i in made}
            elif owner is not None or any(state.kind == "O" for state in states):
                takes, result, text = self._at_owner(node, states, owner)
                why, gives = "stage", dict.fromkeys(made, result)
            elif all_whole and not (varies or axis in pinned or self.at_home(node, axis, all_whole)):
                continue
            elif varies:
                why, text = "varies", "each rank has its own value"
                takes, gives = [s if s == VARIES else REPLICATED for s in states], dict.fromkeys(made, VARIES)
            elif stored and node.target in VIEWS and axis not in pinned:  # gathered as stored: rows first
                why, text = "a view of the whole", "a view of the whole parameter, gathered as it is stored"
            elif axis == TIME and (draws(node) or is_drawn_into(node)):
                why, text = "drawn at once", "random numbers of all pieces, as on one device"
                takes = takes if random else states
            elif axis == TIME and self._moves_a_sum(node, have):
                why, text = "sent once", "what another stage sums over pieces is sent when it is complete"
            elif node in self.rounding:
                why, text = "rounds coarsely", "whole operands, so that sums in this dtype round as on one device"
            elif (rule := rule or find_rule(node)) is None:
                why, text = "no rule", "whole: the op has no rule"
            else:
                why = "rule" if rule.origin == "built in" else rule.origin
                takes, gives, text = _CallOnAxis(self, node, axis, inputs, states, rule, cut).chosen()
            because.append(f"{axis}: {text}")
            want = [w.put(axis, s) for w, s in zip(want, takes, strict=True)]
            outputs = [o.put(axis, gives[i]) if i in gives else o for i, o in enumerate(outputs)]
        if rule is not None and len(rule.groups) > 1:
            _order_by_group(rule.groups, have, want, outputs)
        if self.scout and node in self.batch_dependent and not pinned:
            outputs = self._if_decomposed(node, inputs, have, want, outputs)
        moved = moves(inputs, have, want, self.situation.mesh, self.situation.hardware) if have != want else ()
        return tuple(want), tuple(outputs), why, because, list(moved)

    def _owner(self, node: Node, axis: str) -> AxisState | None:
        return self.situation.pins.owners.get(node.name, {}).get(axis)

    def at_home(self, node: Node, axis: str, whole: bool) -> str:
        """The factor of a gradient along which its parameter is sharded, if operands lack it or are `whole`, or ""."""
        home = self.homes.get(node)
        state = REPLICATED if home is None or (axis in self.situation.storage and not whole) else home.state(axis)
        rule = find_rule(node) if state.kind == "S" else None
        if rule is None:
            return ""
        groups = [g for g in rule.groups if 0 in g.outputs]
        terms = [(g.outputs[0], (*rule.made_factors(g), *(g.factors if whole else ()))) for g in groups]
        return next((f for term, factors in terms if (f := term[state.dim]) in factors), None) or ""

    def _at_owner(
        self, node: Node, states: Sequence[AxisState], owner: AxisState | None
    ) -> tuple[list[AxisState], AxisState, str]:
        """States along an axis of owners: an owner sends for what others own. Numbers of several owners meet on all
        ranks as a sum to which each rank adds its own.
        """
        rule = find_rule(node)
        by_shape = rule.by_shape if rule else frozenset[int]()
        if owner is not None:
            takes = [s if i in by_shape or s == REPLICATED else owner for i, s in enumerate(states)]
            return takes, owner, f"runs at {owner.at}, with what it reads"
        owned = [meta.one_tensor(n) for n, s in zip(operands(node), states, strict=True) if s.kind == "O"]
        numbers = all(tensor.numel == 1 for tensor in owned)
        for group in rule.groups if rule and numbers else ():
            for number, passing in enumerate(group.partial):
                if passing.operands >= {i for i, s in enumerate(states) if s.kind == "O"} and "sum" in passing.ops:
                    strategy = through(group, number, "sum")
                    takes = [strategy.takes.get(i, REPLICATED) for i in range(len(states))]
                    return takes, next(iter(strategy.gives.values())), "a sum of what each stage has"
        takes = [s if i in by_shape else REPLICATED for i, s in enumerate(states)]
        return takes, REPLICATED, "runs everywhere"

    def _moves_a_sum(self, node: Node, have: Sequence[Layout]) -> bool:
        """True if an operand is a sum over pieces that another stage has."""
        return any(
            layout.state(TIME).kind == "P" and any((at := self._owner(node, a)) and at.at != o for a, o in layout.owned)
            for layout in have
        )

    def _if_decomposed(
        self, node: Node, inputs: Sequence[Node], have: Sequence[Layout], want: Sequence[Layout], gives: list[Layout]
    ) -> list[Layout]:
        """Layouts of the results if `node` stayed sharded as its operands are."""
        pairs = zip(inputs, have, want, strict=True)
        lost = [(n, h) for n, h, w in pairs if n in self.batch_dependent and set(h.shard_axes()) - set(w.shard_axes())]
        if not lost or not can_expand(node):
            return gives
        shapes = {tensor.shape: layout.without_partial() for n, layout in lost if (tensor := meta.tensor(n))}
        tensors = meta.tensors(node)
        return [shapes.get(m.shape, layout) if m else layout for m, layout in zip(tensors, gives, strict=True)]

    def _seen(self, node: Node, operand: Node) -> Layout:
        """The layout in which `node` reads an operand: its own, or pinned for this reader."""
        layout = self.layouts[operand][0]
        for axis, state in self.situation.pins.reads.get((node.name, operand.name), {}).items():
            layout = layout.put(axis, state)
        return layout

    def _inherit_targets(self, node: Node, inputs: Sequence[Node]) -> None:
        """Give outputs with the shape of a gradient its target layout; for list ops, that of the same list entry."""
        if self.targets.keys().isdisjoint(inputs):
            return
        tensors = meta.tensors(node)
        first = node.args[0] if node.args else None
        count = len(first) if isinstance(first, (list, tuple)) and first else 1
        operand_targets: dict[int, list[tuple[TensorMeta | None, Layout]]] = {}
        for j, n in enumerate(inputs):
            home = self.targets.get(n, (None,))[0]
            if home is not None:
                operand_targets.setdefault(j % count, []).append((meta.tensor(n), home))

        def target(i: int, tensor: TensorMeta | None) -> Layout | None:
            entries = operand_targets.get(i % count, ())
            return next((layout for m, layout in entries if m and tensor and m.shape == tensor.shape), None)

        targets = tuple(target(i, m) for i, m in enumerate(tensors))
        if any(layout is not None for layout in targets):
            self.targets[node] = targets

    def target(self, node: Node) -> Layout | None:
        return self.targets.get(node, (None,))[0]

    def _reduced(self, node: Node, decision: Decision) -> Decision:
        """Reduce a partial value with several readers once, at `node`, unless the readers shrink it."""
        readers = (u for u in node.users if not _torch.is_getitem(u.target) and reads(u, node))
        users = [u for u in readers if u.target is not OVER_RANKS]  # which takes partial norms as they are
        at_once = self.situation.scatter and node.target is GRAD_READY
        layout = decision.outputs[0]
        if len(decision.outputs) > 1 or (not at_once and (len(users) < 2 or shrinks(node))):
            return decision
        target = reduced(layout, self.target(node) or self._like_siblings(node, layout))
        text = settled(meta.tensors(node)[0], layout, target, self.situation.mesh, self.situation.hardware)
        return replace(decision, reshards_to=target, because=(*decision.because, text))

    def _like_siblings(self, node: Node, partial: Layout) -> Layout:
        """The layout a partial value is reduced to: sharded as the other operands of its readers are, else whole."""
        out = partial.without_partial()
        for axis, _ in partial.partial:
            out = out.put(axis, self._as_read(node, axis, set[Node]()) or REPLICATED)
        return out

    def _as_read(self, node: Node, axis: str, seen: set[Node]) -> AxisState | None:
        """The state along an axis that rules of its readers give a value, for another operand that they read or for
        what reads their results, up to the next products.
        """
        for user in [u for u in node.users if u not in seen]:
            seen.add(user)
            rule, inputs = find_rule(user) if user.op == "call_function" else None, operands(user)
            stored = axis in self.situation.storage and user in self.batch_dependent
            there = [n in self.layouts and not (stored and n not in self.batch_dependent) for n in inputs]
            states = [self.layouts[n][0].state(axis) if t else REPLICATED for n, t in zip(inputs, there, strict=True)]
            for group in rule.groups if rule and node in inputs else ():
                if (at := inputs.index(node)) not in group.operands:
                    continue
                sharded = [(0, i, state) for i, state in enumerate(states) if i in group.operands]
                if user.target not in PRODUCTS and 0 in group.outputs and (after := self._as_read(user, axis, seen)):
                    sharded.append((1, 0, after))
                factors = filter(None, (group.factor_at(*place) for place in sharded))
                if wanted := next(filter(None, (group.state_by(factor, 0, at) for factor in factors)), None):
                    return wanted
        return None

    def _pinned(self, node: Node, decision: Decision) -> Decision:
        """Reshard the result to the layout that the strategy pins."""
        layout = before = decision.outputs[0]
        for axis, state in self.situation.pins.results[node.name].items():
            layout = layout.put(axis, state)
        if layout == before:
            return decision
        text = settled(meta.tensors(node)[0], before, layout, self.situation.mesh, self.situation.hardware)
        return replace(decision, reshards_to=layout, because=(*decision.because, f"pinned: {text}"))


# -- choosing along one axis ---------------------------------------------------------------------------
@dataclass
class _CallOnAxis:
    """Chooses an op strategy for each group of a call's rule along one axis; `cut`: parts of each factor so far."""

    run: _Propagation
    node: Node
    axis: str
    inputs: Sequence[Node]
    states: Sequence[AxisState]
    rule: BoundRule
    cut: dict[tuple[int, str], tuple[int, ...]]

    def __post_init__(self) -> None:
        self.batch_dependent, self.parts = self.run.batch_dependent, self.run.situation.mesh.axis_size(self.axis)
        self.moves = self.node in self.batch_dependent
        self.only_stores = self.axis in self.run.situation.storage
        self.extended = self.rule.extends and not draws(self.node)

    def chosen(self) -> tuple[list[AxisState], dict[int, AxisState], str]:
        """States of operands and outputs, and the reason."""
        takes = [s if i in self.rule.by_shape else REPLICATED for i, s in enumerate(self.states)]
        gives, why = dict[int, AxisState](), ""
        for number, group in enumerate(self.rule.groups):
            best = self._pinned(number, group) or self._cheapest(number, group)
            if best.factor:
                self.cut[number, best.factor] = (*self.cut.get((number, best.factor), ()), self.parts)
            for i, state in best.takes.items():
                stays = i in self.rule.by_shape and state.kind != "S" and self.states[i].kind == "P"
                takes[i] = self.states[i] if stays else state
            gives |= best.gives
            why = why or reason(best, group, self.inputs, self.states)
        return takes, gives, why

    def _splits(self, number: int, group: Group, factor: str) -> bool:
        cuts = {of: parts for (at, of), parts in self.cut.items() if at == number}
        cuts[factor] = (*cuts.get(factor, ()), self.parts)
        return not factor or (
            group.splits(factor, cuts[factor], self.axis == TIME, self.extended)
            and group.nests(cuts)
            and not (group.is_inner(factor) and draws(self.node))
        )

    def _pinned(self, number: int, group: Group) -> OpStrategy | None:
        """The op strategy that is pinned; None if none is, or if it is not possible."""
        pins = self.run.situation.pins.op_strategies.get(self.node.name, {})
        name = next(iter(pins.get(self.axis, ())[number:]), "")
        strategy = (part_of(self.node) or (None,))[0] if name == PART else named(self.rule, group, name)
        if strategy is None or any(_lost(self.states[i], s) for i, s in strategy.takes.items()):
            return None
        if name == PART and self.states[0].kind == "S" and self.states[0] != strategy.takes[0]:
            return None  # a dim as long as the sequence
        if name == PART and self.axis != next(axis for axis, names in pins.items() if PART in names):
            return None  # ranks of one axis send each other what is in other pieces
        if name == NEAR:
            cuts = (self.run.layouts[n][0].dims[strategy.takes[i].dim] for i, n in enumerate(self.inputs[:3]))
            others = {axis for cut in cuts for axis in cut} - {self.axis}
            if any(not pins.get(axis, ("",))[0].startswith("cut ") for axis in others):
                return None  # they share these tokens too
        return strategy if self._splits(number, group, strategy.factor) else None

    def _cheapest(self, number: int, group: Group) -> OpStrategy:
        """The op strategy with the cheapest resharding of operands."""
        possible = [
            o
            for o in self._options(group)
            if all(self._allowed(i, s) for i, s in o.takes.items() if i not in self.rule.by_shape)
            and self._splits(number, group, o.factor)
        ]
        return min(possible, key=lambda o: (self.moves and o.whole, self._price(o)))

    def _price(self, option: OpStrategy) -> float:
        """Microseconds to reshard the operands, and to reduce results that the forward and backward read later."""
        total = 0.0
        for i, want in option.takes.items():
            stored = self.moves and self.inputs[i] not in self.batch_dependent
            if i in self.rule.by_shape or self.states[i] == want or (stored and self.only_stores):
                continue  # sharded in storage only: gathered in any case
            tensor = meta.tensor(self.inputs[i]) or TensorMeta((), (), torch.float32, "cpu")
            total += self._cost(tensor, self.states[i], want) * (TUNING.keep_sharded_factor if stored else 1.0)
        stored = self.only_stores and not self.moves
        if option.factor and (not stored or any(user in self.batch_dependent for user in self.node.users)):
            tensors, end = meta.tensors(self.node), REPLICATED if stored else AxisState("S", 0)
            for o, state in option.gives.items():
                tensor = tensors[o]
                if state.kind == "P" and tensor is not None and tensor.shape:
                    total += self._cost(tensor, state, end)
        return total

    def _cost(self, tensor: TensorMeta, have: AxisState, want: AxisState) -> float:
        plain, situation = replicated(len(tensor.shape)), self.run.situation
        before, after = plain.put(self.axis, have), plain.put(self.axis, want)
        return reshard(before, after, tensor.shape, tensor.dtype.itemsize, situation.mesh, situation.hardware).cost_us

    def _options(self, group: Group) -> Iterator[OpStrategy]:
        """Op strategies of a group along one axis, least communication first: partial, sharded by a factor, whole."""
        for number, passing in enumerate(group.partial):
            ops = {self.states[i].op for i in passing.operands if self.states[i].kind == "P"}
            stored = frozenset(i for i in group.operands if self.moves and self.inputs[i] not in self.batch_dependent)
            free = all(_is_free(self.states[i], i, passing, stored) for i in group.operands)
            if len(ops) == 1 and ops <= passing.ops and free and not self._waits(group):
                yield through(group, number, ops.pop())
        for factor in self._factors(group):
            yield cut_by(group, factor)
        yield whole(group)

    def _waits(self, group: Group) -> bool:
        """True if an operand is complete after all pieces: what is summed over them does not wait for it."""
        indices = (i for i in group.operands if i not in self.rule.by_shape and self.inputs[i] in self.batch_dependent)
        return self.axis == TIME and any(self.states[i] == REPLICATED for i in indices)

    def _factors(self, group: Group) -> list[str]:
        """Factors along which an operand is sharded, or its reduced gradient will be; and those of a gradient alone, as
        the rows of an embedding, where its parameter is sharded along them.
        """
        factors: dict[str, None] = {}
        for i in group.operands:
            if self.moves and self.only_stores and self.inputs[i] not in self.batch_dependent:
                continue
            target = self.run.target(self.inputs[i])
            state = target.state(self.axis) if self.states[i].kind == "P" and target else self.states[i]
            factor = group.factor_at(0, i, state)
            # such a program is for one number of blocks: for that only samples and tokens are shared
            if factor and (self.axis in self.run.batch_axes or not group.is_counted_by_symbols(factor)):
                factors[factor] = None
        home = self.run.at_home(self.node, self.axis, self.states.count(REPLICATED) == len(self.states))
        return [*factors, home] if home in self.rule.made_factors(group) or home in group.factors else list(factors)

    def _allowed(self, operand: int, want: AxisState) -> bool:
        """True if a partial value may be reduced to `want`: to its target layout or to a replicated one."""
        if self.states[operand].kind != "P" or want.kind == "P":
            return True
        target = self.run.target(self.inputs[operand])
        return target is None or want in (target.state(self.axis), REPLICATED)


def would_gather(situation: PropagationInputs, decisions: Mapping[str, Decision]) -> list[Node]:
    """Batch-dependent calls that would gather or redistribute a sharded operand."""
    by_node: dict[Node, Layout] = {n: situation.rest[i.name] for i, n in situation.graph.placeholders()}
    moves, calls = moving(situation.graph), list[Node]()
    for node in situation.graph.graph.nodes:
        if node.op != "call_function":
            continue
        decision = decisions[node.name]
        if decision.given:
            by_node[node] = decision.given[0]
        if node in moves and not _torch.is_getitem(node.target):
            pairs = zip(operands(node), decision.operands, strict=False)
            if any(n in moves and set(by_node[n].shard_axes()) - set(want.shard_axes()) for n, want in pairs):
                calls.append(node)
    return calls


def _is_free(state: AxisState, operand: int, through: PassThrough, stored: frozenset[int]) -> bool:
    """True if an operand needs no communication for partial values to pass; one rank alone adds a parameter."""
    if state.kind == "P":
        return operand in through.operands
    return state == REPLICATED and (through.mixed or operand not in through.operands or operand in stored)


def _lost(have: AxisState, want: AxisState) -> bool:
    """True if `want` is partial and `have` cannot become that: it is sharded, or partial by another op."""
    return want.kind == "P" and have.kind != "R" and have != want


# -- layouts that several axes share -----------------------------------------------------------------
def in_order(axes: Sequence[str], have: Sequence[Layout], moves: Sequence[bool]) -> list[str]:
    """`axes` in an order that agrees with layouts that shard one dim over several, outermost first.

    `moves`: which of `have` depend on the batch; these decide where layouts disagree.
    """
    if not any(len(dim) > 1 for layout in have for dim in layout.dims):
        return list(axes)
    pairs: dict[tuple[str, str], None] = {}
    for depends in (True, False):
        for layout in (h for h, m in zip(have, moves, strict=True) if m == depends):
            for outer, inner in (p for dim in layout.dims for p in combinations(dim, 2)):
                if (inner, outer) not in pairs:
                    pairs[outer, inner] = None
    remaining, out = list(axes), list[str]()
    while remaining:
        outermost = [a for a in remaining if not any((b, a) in pairs for b in remaining)]
        out.append((outermost or remaining)[0])
        remaining.remove(out[-1])
    return out


def _order_by_group(groups: Sequence[Group], have: Sequence[Layout], want: list[Layout], gives: list[Layout]) -> None:
    """Nest axes that shard one dim as the first operand of a group has them: `in_order` is one for all groups."""
    for group in groups:
        first = {frozenset(axes): axes for i in sorted(group.operands, reverse=True) for axes in have[i].dims}
        for layouts, places in ((want, group.operands), (gives, group.outputs)):
            for i in places if not group.merged else ():
                dims = tuple(first.get(frozenset(axes), axes) for axes in layouts[i].dims)
                layouts[i] = layouts[i] if layouts[i].blocks else replace(layouts[i], dims=dims)


def reduced(partial: Layout, home: Layout) -> Layout:
    """`partial` with its partial axes, and axes that shard a dim outside of these, in the state that `home` has."""
    out, partial_axes = partial, [a for a, _ in partial.partial]
    for axes in home.dims:
        inner = max((i for i, a in enumerate(axes) if a in partial_axes), default=-1)
        for axis in axes[: inner + 1]:
            if partial.state(axis).kind in ("P", "R"):
                out = out.put(axis, home.state(axis))
    for axis in partial_axes:
        state = home.state(axis)
        if state.kind != "S":
            out = out.put(axis, state if state.kind == "O" else REPLICATED)
    return out
