"""Checks a plan before it becomes a program: a file or a user's code may have made it.

By the layouts of a plan that passes, ranks compute what the rules of the ops say.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from .. import _torch
from ..errors import PlanError
from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.meta import TensorMeta
from ..graph.nodes import node_at, operands
from ..graph.ops import GRAD_READY, OVER_RANKS
from ..graph.text import short_dtype
from ..layout import REPLICATED, VARIES, AxisState, Layout
from ..mesh import TIME, Mesh
from ..rules.find_rule import call_kind, find_rule
from ..rules.registry import draws, is_random
from ..rules.rule import BoundRule, Group
from ..typed_values import check_fields
from .decision import Decision
from .op_strategies import cut, part_of, ring, through, whole
from .plan import Plan
from .plan_form import check_form
from .propagation_inputs import refuse_varying_updates
from .rows_in_any_order import check_rows, states_along

_UPDATED = (Role.PARAM, Role.STATE)
_REDUCTIONS = ("sum", "avg")
_AGAIN = "plan this graph again"


def check_plan(plan: Plan, graph: TrainGraph) -> TrainGraph:
    """The graph that the decisions are about. Raises PlanError if `plan` is not one for `graph`, or the LayoutError of
    a layout that does not fit its tensor.
    """
    check_form(plan)
    decomposed = plan.decomposed_graph(graph)
    _Check(plan, plan.mesh).run(decomposed)
    return decomposed


def refuse_other_parameters(plan: Plan, step_plan: Plan) -> None:
    """Raise PlanError naming the parameters that differ between `plan` and `step_plan`, the plan of this step."""
    if (plan.mixed_precision, plan.offload) != (step_plan.mixed_precision, step_plan.offload):
        raise PlanError(
            f"the plan was made with {plan.mixed_precision}, offload {plan.offload}; this step has "
            f"{step_plan.mixed_precision}, offload {step_plan.offload}",
            "the same mixed_precision= and offload= in compile as in the capture that was planned",
            "pass compile the options of the plan, or plan this step again",
        )
    expected, present = _params(plan), _params(step_plan)
    differing = [name for name in {**expected, **present} if expected.get(name) != present.get(name)]
    if differing:
        both = [(n, expected.get(n, "absent"), present.get(n, "absent")) for n in differing[:4]]
        layouts = "; ".join(f"{name}: {planned} in the plan, {actual} here" for name, planned, actual in both)
        tail = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
        problem = f"the plan does not fit this step: {layouts}{tail}"
        raise PlanError(problem, "the parameters of the plan, in its layouts", "plan this step again")


def _params(plan: Plan) -> Mapping[str, str]:
    params = (spec for spec in plan.inputs if spec.role is Role.PARAM)
    return {i.name: f"{short_dtype(i.meta.dtype)}[{plan.storage[i.name].show(i.meta.shape)}]" for i in params}


@dataclass
class _Check:
    plan: Plan
    mesh: Mesh
    layouts: dict[Node, tuple[Layout, ...]] = field(default_factory=dict[Node, tuple[Layout, ...]])
    fits: set[tuple[Layout, int]] = field(default_factory=set[tuple[Layout, int]])
    right: set[tuple[Hashable, ...]] = field(default_factory=set[tuple[Hashable, ...]])

    def run(self, graph: TrainGraph) -> None:
        for spec, node in graph.placeholders():
            stored = self.plan.storage[spec.name]
            if spec.role in _UPDATED and (stored.partial or stored.varies):
                raise PlanError(f"the plan stores {spec.name!r} as {stored}", "replicated or sharded", _AGAIN)
            self.layouts[node] = (stored,)
        self.axes = [axis.name for axis in self.mesh.axes if axis.size > 1]
        reductions: set[str] = set()
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            decision = self.plan.decisions[node.name]
            check_fields(decision)
            self._check_fits(node, decision)
            if _torch.is_getitem(node.target):
                self._check_item(node, decision)
            elif node.target is GRAD_READY:
                reductions |= self._check_gradient(node, decision)
            elif node.target is OVER_RANKS:
                self._check_over_ranks(node, decision)
            else:
                self._check_call(node, decision)
            self.layouts[node] = decision.given
        check_rows(graph, self.plan.decisions)
        if len(reductions) > 1:
            raise PlanError("the plan sums some gradients and averages others", "one of them for all", _AGAIN)
        self._check_results(graph)
        refuse_varying_updates(graph, self.layouts)

    def _check_fits(self, node: Node, decision: Decision) -> None:
        """One layout for each tensor that the node reads and makes, each fitting it."""
        inputs = [] if _torch.is_getitem(node.target) else operands(node)
        if node.target is GRAD_READY:
            inputs = inputs[:1]
        tensors = [*(meta.tensor(n) for n in inputs), *meta.tensors(node)]
        layouts = (*decision.operands, *decision.outputs)
        if len(decision.operands) != len(inputs) or len(layouts) != len(tensors):
            problem = f"the plan has {len(decision.operands)} and {len(decision.outputs)} layouts for %{node.name}"
            needed = f"{len(inputs)} of operands and {len(tensors) - len(inputs)} of results"
            raise PlanError(problem, needed, _AGAIN, meta.source_line(node))
        for tensor, layout in zip(tensors, layouts, strict=True):
            self._check_layout(node, tensor, layout)
        if decision.reshards_to is not None:
            if len(decision.outputs) != 1:
                raise self._refused(node, "is resharded at once and has several results", "one result")
            self._check_layout(node, tensors[-1], decision.reshards_to)

    def _check_layout(self, node: Node, tensor: TensorMeta | None, layout: Layout) -> None:
        ndim = len(tensor.shape) if tensor else 0
        try:
            fits = (layout, ndim) in self.fits
        except TypeError:  # with a list in it, which cannot be hashed
            fits = False
        if not fits:
            layout.check(tensor.shape if tensor else (), self.mesh, f"%{node.name}")
            self.fits.add((layout, ndim))

    def _check_item(self, node: Node, decision: Decision) -> None:
        have = self.layouts[node_at(node, 0)][meta.picked(node)]
        if decision.outputs != have:
            raise self._refused(node, "has another layout than the list that it is taken from", _several(have))

    def _check_gradient(self, node: Node, decision: Decision) -> set[str]:
        """How the gradient is reduced."""
        (operand,), (output,) = decision.operands, decision.outputs
        ops = set[str]()
        for axis in self.axes:
            before, after = operand.state(axis), output.state(axis)
            if before == VARIES and after.kind == "P" and after.op in _REDUCTIONS:
                ops.add(after.op)
            elif before != after or before == VARIES:
                needed = "a gradient that varies to be summed or averaged, and no other change"
                raise self._refused(node, f"turns {before} into {after} along {axis}", needed)
        if operand.dims != output.dims:
            raise self._refused(node, f"turns {operand} into {output}", "the same dims")
        return ops

    def _check_over_ranks(self, node: Node, decision: Decision) -> None:
        """Every rank that has a value is heard."""
        (operand,), (output,) = decision.operands, decision.outputs
        part, other = AxisState("P", op="norm1"), AxisState("P", op="norm2")
        takes = (REPLICATED, VARIES, part, other)
        alike = TIME if operand.state(TIME) == output.state(TIME) == REPLICATED else ""
        states = [(operand.state(axis), output.state(axis)) for axis in self.axes if axis != alike]
        heard = all((new == part and old in takes) or (new == old and old.kind == "O") for old, new in states)
        if not heard or operand.dims != output.dims:
            raise self._refused(node, f"turns {operand} into {output}", "a 1-norm of all ranks, from whole values")

    def _check_call(self, node: Node, decision: Decision) -> None:
        layouts = (*decision.operands, *decision.outputs)
        has_parts = any(layout.partial or any(layout.dims) for layout in layouts)
        alike = (call_kind(node), decision.operands, decision.outputs, meta.along(node)) if has_parts else None
        if alike in self.right or not (meta.along(node) or any(layout.axes for layout in layouts)):
            return
        positions = [i for i, tensor in enumerate(meta.tensors(node)) if tensor is not None]
        cuts, apart = False, meta.along(node)
        for axis in self.axes:
            takes = [layout.state(axis) for layout in decision.operands]
            gives = {i: decision.outputs[i].state(axis) for i in positions}
            if any(state.kind == "O" for state in (*takes, *gives.values())):
                self._check_owner(node, axis, takes, set(gives.values()))
                continue
            if apart and apart[0] == axis:
                expected = states_along(apart, takes)
                good = takes == expected[0] and all(expected[1][i] == state for i, state in gives.items())
            elif all(state == REPLICATED for state in (*takes, *gives.values())):
                continue
            elif VARIES in takes or VARIES in gives.values():
                good = _varies(node, takes, list(gives.values()))
            else:
                rule = find_rule(node)
                part = part_of(node)
                is_part = part is not None and (part[0].takes, part[0].gives) == (dict(enumerate(takes)), gives)
                good = rule is not None and (is_part or _follows(rule, takes, gives))
                cuts = True
            if not good:
                problem = f"({node.target}) cannot compute {_states(takes, gives)} along {axis}"
                raise self._refused(node, problem, "layouts that the rule of the op allows")
        rule = find_rule(node) if cuts else None
        if rule is not None:
            for group in rule.groups:
                self._check_cuts(node, group, rule, decision)
        self.right.update([alike] if alike else [])

    def _check_owner(self, node: Node, axis: str, takes: Sequence[AxisState], gives: set[AxisState]) -> None:
        """One owner of all that a node reads, which has the results; but for operands of which it reads the shape."""
        rule = find_rule(node)
        by_shape = rule.by_shape if rule else frozenset[int]()
        states = {state for i, state in enumerate(takes) if i not in by_shape} - {REPLICATED}
        if not (states <= gives and len(gives) == 1) and not (not states and gives <= {REPLICATED}):
            needed = "operands and results of one owner"
            raise self._refused(node, f"has {_several(takes)} -> {_several(tuple(gives))} along {axis}", needed)

    def _check_cuts(self, node: Node, group: Group, rule: BoundRule, decision: Decision) -> None:
        """Each factor is cut by the same axes in the same order wherever it stands, into parts that it allows."""
        placed = [(0, i, decision.operands[i]) for i in group.operands if i not in rule.by_shape]
        placed += [(1, o, decision.outputs[o]) for o in group.outputs if o not in group.opaque]
        cuts: list[dict[str | None, tuple[str, ...]]] = []
        for side, at, layout in placed:
            cuts.append({})
            for axis in (axis for axes in layout.dims for axis in axes if axis in self.axes):
                factor = group.factor_at(side, at, layout.state(axis))
                cuts[-1][factor] = (*cuts[-1].get(factor, ()), axis)
        split = {f: axes for by in cuts for f, axes in by.items() if f}
        for (side, at, _), by in zip(placed, cuts, strict=True):
            for factor, axes in split.items():
                if by.get(factor, ()) != axes and group.state_by(factor, side, at) is not None:
                    problem = f"cuts one factor by {axes} and by {by.get(factor, ())}"
                    raise self._refused(node, problem, "one order of axes")
        parts = {factor: [self.mesh.axis_size(axis) for axis in axes] for factor, axes in split.items()}
        for factor, axes in split.items():
            if not group.splits(factor, parts[factor], TIME in axes, rule.extends and not draws(node)):
                raise self._refused(node, f"cannot be cut by {', '.join(axes)}", "equal parts, or none that is empty")
        if not group.nests(parts):
            raise self._refused(node, f"cannot be cut by {', '.join(map(str, split))} at once", "whole blocks")

    def _check_results(self, graph: TrainGraph) -> None:
        """What the step updates has a place."""
        for output, node in graph.results():
            if output.kind != "update" or not isinstance(node, Node):
                continue
            stored = self.plan.storage.get(output.target) or self.plan.created_storage.get(output.target)
            if stored is None:
                raise PlanError(f"the plan has no layout for {output.target!r}", "one for all state", _AGAIN)
            self._check_layout(node, meta.tensor(node), stored)

    def _refused(self, node: Node, what: str, needed: str) -> PlanError:
        return PlanError(f"the plan's layouts are wrong: %{node.name} {what}", needed, _AGAIN, meta.source_line(node))


def _varies(node: Node, takes: Sequence[AxisState], gives: Sequence[AxisState]) -> bool:
    """True where each rank has its own values, of all results, made from its own or from random numbers."""
    varies = VARIES in takes or is_random(node)
    return varies and all(state == VARIES for state in gives) and all(s in (REPLICATED, VARIES) for s in takes)


def _follows(rule: BoundRule, takes: Sequence[AxisState], gives: Mapping[int, AxisState]) -> bool:
    """True if these are states along one axis of op strategies of the rule, one for each of its groups."""
    states = {i: state for i, state in enumerate(takes) if i not in rule.by_shape}
    grouped = {i for group in rule.groups for i in group.operands}, {o for group in rule.groups for o in group.outputs}
    if any(state != REPLICATED for i, state in states.items() if i not in grouped[0]):
        return False
    if any(state != REPLICATED for o, state in gives.items() if o not in grouped[1]):
        return False
    return all(any(_matches(option, states, gives) for option in _options(rule, group, takes)) for group in rule.groups)


def _options(
    rule: BoundRule, group: Group, takes: Sequence[AxisState]
) -> Iterator[tuple[Mapping[int, AxisState], ...]]:
    inner = [group.factor_at(0, i, takes[i]) for i in group.operands]
    factors = dict.fromkeys(f for f in (*group.factors, *rule.made_factors(group), *inner) if f)
    for strategy in (whole(group), *(cut(group, factor) for factor in factors), ring(rule, group)):
        if strategy is not None:
            yield strategy.takes, strategy.gives
    for number, passing in enumerate(group.partial):
        for op in {state.op for state in takes if state.kind == "P"} & passing.ops:
            strategy = through(group, number, op)
            yield strategy.takes, strategy.gives


def _matches(
    option: tuple[Mapping[int, AxisState], ...], states: Mapping[int, AxisState], gives: Mapping[int, AxisState]
) -> bool:
    pairs = zip(option, (states, gives), strict=True)
    return all(have[place] == state for of, have in pairs for place, state in of.items() if place in have)


def _states(takes: Sequence[AxisState], gives: Mapping[int, AxisState]) -> str:
    return f"{_several(takes)} -> {_several(tuple(gives.values()))}"


def _several(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "nothing"
