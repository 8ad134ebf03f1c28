"""Completes a plan: from layouts at rest, node by node, to the layout of every value.

Per axis, a value that varies makes the result vary and asks for whole operands; otherwise the op's rule offers its
factors, and the cheapest way to bring the operands together wins. A partial value stays partial through linear ops and
is reduced, where it must be, to the layout its parameter's optimizer state rests in.

What depends on the batch moves (activations, losses, gradients until they are complete); parameters, their state and
complete gradients rest. Where the two meet, the work stays divided as the moving values are: on axes that only store
parameters, those come whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.decompose import can_expand
from ..graph.graph import Role, node_at, operands
from ..graph.meta import TensorMeta
from ..graph.ops import GRAD_READY, VIEWS
from ..layout import REPLICATED, VARIES, AxisState, Layout, replicated
from ..reshard import reshard
from ..rules.find_rule import find_rule
from ..rules.registry import is_random
from ..rules.rule import BoundRule, Group, PassThrough
from .axis_order import in_order, reduced
from .explain import cut_reason, moves, partial_reason, settled, whole_reason
from .op_strategies import OpStrategy, named, through, whole
from .op_strategies import cut as cut_by
from .partial_readers import reads, shrinks
from .plan import Decision
from .propagation_inputs import PropagationInputs, moving, rounding

_PRODUCER = "producer"
_KEEP_CUT = 8.0  # work stays where parameters are cut, unless moving the activations costs so many times more


def propagate(situation: PropagationInputs, scout: bool = False) -> dict[str, Decision]:
    """A decision for every call of the graph.

    A `scout` looks past ops that can be written out: what they would give when cut is what the ops behind them see.

    Raises:
        PlanError: a parameter or its state would be given values that differ between ranks.
    """
    run = _Propagation(situation, scout)
    for node in situation.graph.graph.nodes:
        if node.op == "call_function":
            run.decide(node)
    run.check_updates()
    return run.decisions


@dataclass
class _Propagation:
    situation: PropagationInputs
    scout: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict[str, Decision])
    layouts: dict[Node, tuple[Layout, ...]] = field(default_factory=dict[Node, tuple[Layout, ...]])
    homes: dict[Node, tuple[Layout | None, ...]] = field(default_factory=dict[Node, tuple[Layout | None, ...]])

    def __post_init__(self) -> None:
        self.moving = moving(self.situation.graph)
        self.rounding = rounding(self.situation.graph, self.moving)
        for given, node in self.situation.graph.placeholders():
            self.layouts[node] = (self.situation.rest[given.name],)

    def decide(self, node: Node) -> None:
        if _torch.is_getitem(node.target):
            decision = self._pick(node)
        elif node.target is GRAD_READY:
            decision = self._gradient(node)
        else:
            decision = self._call(node)
        if node.name in self.situation.pins.results:
            decision = self._pinned(node, decision)
        elif any(layout.partial for layout in decision.outputs):
            decision = self._settled(node, decision)
        self.decisions[node.name] = decision
        self.layouts[node] = decision.given

    # -- the three kinds of node ----------------------------------------------------
    def _pick(self, node: Node) -> Decision:
        source, picked = node_at(node, 0), meta.picked(node)
        if source in self.homes:
            self.homes[node] = self.homes[source][picked]
        return Decision((), self.layouts[source][picked], _PRODUCER, reads=(source.name,))

    def _gradient(self, node: Node) -> Decision:
        """The mark on a gradient: what varied becomes a partial value with a meaning, the mean or sum over ranks."""
        param = node.args[1]
        layout = self.layouts[node_at(node, 0)][0]
        partial = layout
        for axis in self._active():
            if layout.state(axis) == VARIES:  # along per-rank axes
                partial = partial.put(axis, AxisState("P", op=self.situation.reduce_op))
        self.homes[node] = (self.situation.homes[str(param)],)
        reads = (node_at(node, 0).name,)
        return Decision((layout,), (partial,), f"gradient of {param}", reads=reads)

    def _call(self, node: Node) -> Decision:
        given = operands(node)
        have = [self._seen(node, n) for n in given]
        made = meta.tensors(node)
        wanted = [replicated(len(layout.dims)) for layout in have]
        outputs: list[Layout] = [replicated(len(m.shape)) if m else Layout(()) for m in made]
        rule: BoundRule | None = None
        cut: dict[tuple[int, str], int] = {}
        why, random, because = "no operand is cut", is_random(node), list[str]()
        asked = self.situation.pins.ways.get(node.name, {})
        for axis in in_order(list(self._active()), have, [n in self.moving for n in given]):
            states = [layout.state(axis) for layout in have]
            varies = VARIES in states or (random and axis in self.situation.per_rank)
            if all(s == REPLICATED for s in states) and not varies and axis not in asked:
                continue
            if varies:
                why = "varies"
                because.append(f"{axis}: each rank has its own value")
                wanted = [w.put(axis, s if s == VARIES else REPLICATED) for w, s in zip(wanted, states, strict=True)]
                outputs = [o.put(axis, VARIES) if m else o for o, m in zip(outputs, made, strict=True)]
                continue
            if axis in self.situation.storage and node.target in VIEWS and node not in self.moving:
                why = "a view of the whole"  # gathered as stored: rows first
                because.append(f"{axis}: a view of the whole parameter, gathered as it is stored")
                continue
            if node in self.rounding:
                why = "rounds coarsely"
                because.append(f"{axis}: on whole operands, as one device adds them up: sums of this dtype are coarse")
                continue
            rule = rule or find_rule(node)
            why = ("rule" if rule.origin == "built in" else rule.origin) if rule else "no rule"
            takes, gives, reason = self._choose(node, axis, given, states, rule, cut)
            because.append(f"{axis}: {reason}")
            wanted = [w.put(axis, s) for w, s in zip(wanted, takes, strict=True)]
            outputs = [o.put(axis, gives[i]) if i in gives else o for i, o in enumerate(outputs)]
        self._inherit_homes(node, given)
        if self.scout and node in self.moving and not asked:
            outputs = self._written_out(node, given, have, wanted, outputs)
        because += moves(given, have, wanted, self.situation.mesh, self.situation.hardware) if have != wanted else ()
        reads = tuple(n.name for n in given)
        return Decision(tuple(wanted), tuple(outputs), why, because=tuple(because), reads=reads)

    def _written_out(
        self, node: Node, given: Sequence[Node], have: Sequence[Layout], wanted: Sequence[Layout], gives: list[Layout]
    ) -> list[Layout]:
        """Layouts of the results, could `node` stay cut as its operands are."""
        pairs = zip(given, have, wanted, strict=True)
        lost = [(n, h) for n, h, w in pairs if n in self.moving and set(h.shard_axes()) - set(w.shard_axes())]
        if not lost or not can_expand(node):
            return gives
        shapes = {found.shape: layout.without_partial() for n, layout in lost if (found := meta.tensor(n))}
        made = meta.tensors(node)
        return [shapes.get(m.shape, layout) if m else layout for m, layout in zip(made, gives, strict=True)]

    def _seen(self, node: Node, given: Node) -> Layout:
        """The layout in which `node` finds an operand: as made, or as it is pinned for this reader."""
        layout = self.layouts[given][0]
        for axis, state in self.situation.pins.reads.get((node.name, given.name), {}).items():
            layout = layout.put(axis, state)
        return layout

    def _inherit_homes(self, node: Node, given: Sequence[Node]) -> None:
        """Outputs shaped like a gradient belong where it does; list ops take the home of the entry at their place."""
        made = meta.tensors(node)
        first = node.args[0] if node.args else None
        count = len(first) if isinstance(first, (list, tuple)) and first else 1
        near: dict[int, list[tuple[TensorMeta | None, Layout]]] = {}
        for j, n in enumerate(given):
            known = self._home(n)
            if known is not None:
                near.setdefault(j % count, []).append((meta.tensor(n), known))

        def home(i: int, like: TensorMeta | None) -> Layout | None:
            return next((h for m, h in near.get(i % count, ()) if m and like and m.shape == like.shape), None)

        found = tuple(home(i, m) for i, m in enumerate(made))
        if any(h is not None for h in found):
            self.homes[node] = found

    def _home(self, node: Node) -> Layout | None:
        return self.homes.get(node, (None,))[0]

    def _settled(self, node: Node, decision: Decision) -> Decision:
        """A partial value that several places read is reduced once, where it is made, unless they make less of it."""
        users = [u for u in node.users if not _torch.is_getitem(u.target) and reads(u, node)]
        at_once = self.situation.scatter and node.target is GRAD_READY
        made = decision.outputs[0]
        if len(decision.outputs) > 1 or (not at_once and (len(users) < 2 or shrinks(node))):
            return decision
        home = reduced(made, self._home(node) or self._beside(node, made))
        said = settled(meta.tensors(node)[0], made, home, self.situation.mesh, self.situation.hardware)
        return replace(decision, settle=home, because=(*decision.because, said))

    def _beside(self, node: Node, made: Layout) -> Layout:
        """Where a partial value is reduced to: cut as what it will meet is, else whole."""
        shape, out = meta.tensors(node)[0], made.without_partial()
        met = [n for user in node.users for n in user.all_input_nodes if n is not node and n in self.layouts]
        alike = [self.layouts[n][0] for n in met if (found := meta.tensor(n)) and shape and found.shape == shape.shape]
        for axis, _ in made.partial:
            cuts = [layout.state(axis) for layout in alike if layout.state(axis).kind == "S"]
            out = out.put(axis, cuts[0]) if cuts and shape and shape.shape else out
        return out

    def _pinned(self, node: Node, decision: Decision) -> Decision:
        """The result is laid out as the strategy says along the axes it names."""
        layout = decision.outputs[0]
        for axis, state in self.situation.pins.results[node.name].items():
            layout = layout.put(axis, state)
        if layout == decision.outputs[0]:
            return decision
        said = settled(meta.tensors(node)[0], decision.outputs[0], layout, self.situation.mesh, self.situation.hardware)
        return replace(decision, settle=layout, because=(*decision.because, f"pinned: {said}"))

    # -- choosing one axis ---------------------------------------------------------------
    def _active(self) -> Iterator[str]:
        return (axis for axis in self.situation.axes if self.situation.mesh.axis_size(axis) > 1)

    def _choose(
        self,
        node: Node,
        axis: str,
        given: Sequence[Node],
        states: Sequence[AxisState],
        rule: BoundRule | None,
        cut: dict[tuple[int, str], int],
    ) -> tuple[list[AxisState], dict[int, AxisState], str]:
        """What the op takes and gives along one axis, and why; `cut` counts the parts each factor is in already."""
        takes, gives, why = [REPLICATED] * len(given), dict[int, AxisState](), ""
        if rule is None:
            return takes, gives, "whole: the op has no rule"
        for i in rule.by_shape:
            takes[i] = states[i]
        parts = self.situation.mesh.axis_size(axis)
        for number, group in enumerate(rule.groups):
            best = self._asked(node, axis, number, group, states, cut)
            best = best or self._cheapest(node, axis, given, states, rule, number, cut)
            if best.factor:
                cut[number, best.factor] = parts * cut.get((number, best.factor), 1)
            for i, state in best.takes.items():
                takes[i] = states[i] if i in rule.by_shape and state.kind != "S" and states[i].kind == "P" else state
            gives |= best.gives
            why = why or _reason(best, group, given, states)
        return takes, gives, why

    def _asked(
        self, node: Node, axis: str, number: int, group: Group, states: Sequence[AxisState],
        cut: Mapping[tuple[int, str], int],
    ) -> OpStrategy | None:  # fmt: skip
        """The way that the strategy asks for; None where it asks for none, or for one that there is not."""
        names = self.situation.pins.ways.get(node.name, {}).get(axis, ())
        way = named(group, names[number]) if number < len(names) else None
        if way is None or any(_lost(states[i], s) for i, s in way.takes.items()):
            return None
        parts = self.situation.mesh.axis_size(axis) * cut.get((number, way.factor), 1)
        return way if not way.factor or group.splits(way.factor, parts) else None

    def _cheapest(
        self, node: Node, axis: str, given: Sequence[Node], states: Sequence[AxisState], rule: BoundRule, number: int,
        cut: Mapping[tuple[int, str], int],
    ) -> OpStrategy:  # fmt: skip
        """The way that takes least to bring the operands together."""
        group, moves, parts = rule.groups[number], node in self.moving, self.situation.mesh.axis_size(axis)
        free = [
            o
            for o in self._options(group, given, states, axis, moves)
            if all(self._allowed(given[i], states[i], s, axis) for i, s in o.takes.items() if i not in rule.by_shape)
            and (not o.factor or group.splits(o.factor, parts * cut.get((number, o.factor), 1)))
        ]
        return min(free, key=lambda o: (moves and o.whole, self._price(o, given, states, axis, rule, node)))

    def _price(
        self,
        option: OpStrategy,
        given: Sequence[Node],
        states: Sequence[AxisState],
        axis: str,
        rule: BoundRule,
        node: Node,
    ) -> float:
        """Microseconds to bring the operands together, and to reduce results later that forward and backward read."""
        total = 0.0
        for i, want in option.takes.items():
            if i not in rule.by_shape:
                rests = node in self.moving and given[i] not in self.moving
                if rests and axis in self.situation.storage:
                    continue  # what is only stored in parts comes whole in any case
                total += self._cost(given[i], states[i], want, axis) * (_KEEP_CUT if rests else 1.0)
        stored = node not in self.moving and axis in self.situation.storage
        if option.factor and (not stored or any(user in self.moving for user in node.users)):
            made, end = meta.tensors(node), REPLICATED if stored else AxisState("S", 0)
            for o, state in option.gives.items():
                found = made[o]
                if state.kind == "P" and found is not None and found.shape:
                    total += self._cost_of(found, state, end, axis)
        return total

    def _options(
        self, group: Group, given: Sequence[Node], states: Sequence[AxisState], axis: str, moves: bool
    ) -> Iterator[OpStrategy]:
        """Ways to run a group along one axis, least communication first: partial through, cut by a factor, whole."""
        for number, passing in enumerate(group.partial):
            ops = {states[i].op for i in passing.operands if states[i].kind == "P"}
            rests = frozenset(i for i in group.operands if moves and given[i] not in self.moving)
            if (
                len(ops) == 1
                and ops <= passing.ops
                and all(_is_free(states[i], i, passing, rests) for i in group.operands)
            ):
                yield through(group, number, ops.pop())
        for factor in self._factors(group, given, states, axis, moves):
            yield cut_by(group, factor)
        yield whole(group)

    def _factors(
        self, group: Group, given: Sequence[Node], states: Sequence[AxisState], axis: str, moves: bool
    ) -> list[str]:
        """Factors along which some operand is cut, or its reduced gradient will be."""
        found: dict[str, None] = {}
        for i in group.operands:
            if moves and given[i] not in self.moving and axis in self.situation.storage:
                continue
            home = self._home(given[i])
            state = home.state(axis) if states[i].kind == "P" and home else states[i]
            factor = group.factors_at(i, state.dim) if state.kind == "S" else None
            if factor:
                found[factor] = None
        return list(found)

    def _allowed(self, node: Node, have: AxisState, want: AxisState, axis: str) -> bool:
        """A partial value is reduced to its home and nowhere else."""
        if have.kind != "P" or want.kind == "P":
            return True
        home = self._home(node)
        return True if home is None else want in (home.state(axis), REPLICATED)

    def _cost(self, node: Node, have: AxisState, want: AxisState, axis: str) -> float:
        if have == want:
            return 0.0
        return self._cost_of(meta.tensor(node) or TensorMeta((), (), torch.float32, "cpu"), have, want, axis)

    def _cost_of(self, made: TensorMeta, have: AxisState, want: AxisState, axis: str) -> float:
        plain = replicated(len(made.shape))
        return reshard(
            plain.put(axis, have),
            plain.put(axis, want),
            made.shape,
            made.dtype.itemsize,
            self.situation.mesh,
            self.situation.hardware,
        ).cost_us

    # -- the end -----------------------------------------------------------------------------
    def check_updates(self) -> None:
        """Parameters, their state and gradients must not be given values that vary between ranks."""
        inputs = {i.name: i for i in self.situation.graph.inputs}
        for output, node in self.situation.graph.results():
            given = inputs.get(output.target)
            role = given.role if given else Role.STATE
            if output.kind != "update" or role not in (Role.PARAM, Role.STATE, Role.GRAD):
                continue
            layout = self.layouts[node][0]
            if layout.varies:
                raise PlanError(
                    f"{output.target!r} would be given a value that differs between ranks",
                    "parameters and their state to follow from gradients that autograd reduced, from each other, "
                    "and from numbers",
                    "average what it depends on over ranks, or let autograd make the gradient (loss.backward())",
                    meta.source_line(node),
                )


def _reason(option: OpStrategy, group: Group, given: Sequence[Node], states: Sequence[AxisState]) -> str:
    if option.factor:
        return cut_reason(group, option.factor, given, states)
    return whole_reason(group) if option.whole else partial_reason(given, option.takes)


def would_gather(situation: PropagationInputs, decisions: Mapping[str, Decision]) -> list[Node]:
    """Calls on the batch's path that take an operand whole, or cut otherwise, which is made cut."""
    by_node: dict[Node, Layout] = {n: situation.rest[i.name] for i, n in situation.graph.placeholders()}
    moves, found = moving(situation.graph), list[Node]()
    for node in situation.graph.graph.nodes:
        if node.op != "call_function":
            continue
        decision = decisions[node.name]
        if decision.given:
            by_node[node] = decision.given[0]
        if node in moves and not _torch.is_getitem(node.target):
            pairs = zip(operands(node), decision.operands, strict=False)
            if any(n in moves and set(by_node[n].shard_axes()) - set(want.shard_axes()) for n, want in pairs):
                found.append(node)
    return found


def _is_free(state: AxisState, operand: int, through: PassThrough, rests: frozenset[int]) -> bool:
    """True when an operand needs no communication for partial values to pass; a parameter is added by one rank."""
    if state.kind == "P":
        return operand in through.operands
    return state == REPLICATED and (through.mixed or operand not in through.operands or operand in rests)


def _lost(have: AxisState, want: AxisState) -> bool:
    """True where a value cannot become partial: it is cut, or partial otherwise."""
    return want.kind == "P" and have.kind != "R" and have != want
