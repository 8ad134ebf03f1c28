"""Makes a case that fails smaller while it fails in the same way, and prints what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tests.random_graphs.case import Case, values_by_node
from tests.random_graphs.program import Program, finished
from tests.random_graphs.run import Problem, problem
from wholestep import partition
from wholestep.graph import meta
from wholestep.graph.graph import Input, Output, Role, TrainGraph
from wholestep.graph.meta import meta_of
from wholestep.graph.nodes import function_of, operands
from wholestep.graph.text import show_call
from wholestep.layout import REPLICATED, Layout
from wholestep.mesh import Mesh
from wholestep.plan.decision import Options
from wholestep.plan.propagation_inputs import moving
from wholestep.plan.strategy import Pins

ROUNDS = 6
Smaller = Callable[[Case], Iterator[Case]]


def shrink(case: Case, found: Problem) -> Case:
    """The smallest case found that fails as this one does."""
    for _ in range(ROUNDS):
        before = case
        for way in WAYS:
            case = _descend(case, found.kind, way)
        if case is before:
            break
    return case


def _descend(case: Case, kind: str, way: Smaller) -> Case:
    """Take the first smaller case that still fails, again and again."""
    while True:
        for candidate in way(case):
            wrong = problem(candidate)
            if wrong is not None and wrong.kind == kind:
                case = candidate
                break
        else:
            return case


# -- plans -----------------------------------------------------------------------------
def _without_strategy(case: Case) -> Iterator[Case]:
    """The same layouts of inputs, without the strategy that chose them."""
    if case.strategy is None:
        return
    with suppress(Exception):
        plan = case.plan()
        states = {i.owner: plan.storage[i.name] for i in case.program.graph.inputs if i.role is Role.STATE}
        grad_targets = {i.name: states.get(i.name, plan.storage[i.name]) for i in case.program.graph.inputs}
        plain = replace(case, strategy=None, rest=plan.storage, grad_targets=grad_targets, options=plan.options)
        yield plain
        yield replace(plain, storage=frozenset(case.mesh.names))


def _plainer(case: Case) -> Iterator[Case]:
    """Fewer choices besides layouts of inputs."""
    for name in ("storage", "scatter", "pins", "written_out", "options"):
        default: Any = {"storage": frozenset(), "pins": Pins(), "options": Options()}.get(name, False)
        if getattr(case, name) != default:
            yield replace(case, **{name: default})
    for kind in ("results", "reads"):
        for key in getattr(case.pins, kind):
            kept = {k: v for k, v in getattr(case.pins, kind).items() if k != key}
            yield replace(case, pins=replace(case.pins, **{kind: kept}))


# -- graphs ----------------------------------------------------------------------------
def _fewer_outputs(case: Case) -> Iterator[Case]:
    """Half of the outputs, or all but one."""
    outputs = case.program.graph.outputs
    half = len(outputs) // 2
    kept = [list(range(half)), list(range(half, len(outputs)))] if half else []
    kept += [[i for i in range(len(outputs)) if i != j] for j in range(len(outputs))] if len(outputs) > 1 else []
    for numbers in kept:
        yield from _rebuilt(case, lambda graph: None, numbers)


def _earlier_output(case: Case) -> Iterator[Case]:
    """Return what the call behind an output reads in place of what it makes."""
    for position, (_, node) in enumerate(case.program.graph.results()):
        for given in dict.fromkeys(operands(node)) if node.op == "call_function" else ():
            if meta.tensor(given) is not None:
                yield from _rebuilt(case, lambda graph, name=given.name: _returning(graph, name), [position])


def _returning(graph: Graph, name: str) -> None:
    nodes = list(graph.nodes)
    nodes[-1].args = ((next(n for n in nodes if n.name == name),),)


def _shorter(case: Case) -> Iterator[Case]:
    """Take a call as an input that rests as the call's result does: late ones first, then early ones."""
    plan = None
    with suppress(Exception):
        plan = case.plan()
    if plan is None or plan.decomposed:
        plan = None
    nodes = [n for n in case.program.graph.graph.nodes if n.op == "call_function" and meta.tensor(n) is not None]
    values = _values(case)
    moves = moving(case.program.graph)
    for node in reversed(nodes):
        layouts = {Layout(((),) * values[node].dim()): None}
        if plan is not None and not plan.decisions[node.name].given[0].varies:
            layouts = {plan.decisions[node.name].given[0]: None} | layouts
        for layout in layouts:
            yield from _as_input(case, node, values[node], layout, Role.BATCH if node in moves else Role.CONST)


def _as_input(case: Case, node: Node, value: Tensor, layout: Layout, role: Role) -> Iterator[Case]:
    name = f"{node.name}_"
    for edited in _rebuilt(case, lambda graph: _replaced(graph, node.name, name), None, {name: (value, role)}):
        if name in edited.program.values:
            yield replace(edited, rest={**edited.rest, name: layout})


def _replaced(graph: Graph, old: str, new: str) -> None:
    node = next(n for n in graph.nodes if n.name == old)
    last = [n for n in graph.nodes if n.op == "placeholder"]
    place = graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes)))
    with place:
        given = graph.placeholder(new)
    meta.copy(node, given)
    node.replace_all_uses_with(given)


def _values(case: Case) -> dict[Node, Any]:
    env: dict[Node, Any] = dict(values_by_node(case.program))
    for node in case.program.graph.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = function_of(node)(*args, **kwargs)
    return env


def _rebuilt(
    case: Case,
    edit: Callable[[Graph], None],
    outputs: Sequence[int] | None = None,
    more: dict[str, tuple[Tensor, Role]] | None = None,
) -> Iterator[Case]:
    """The case with its graph changed and some outputs kept; nothing where that makes no graph."""
    old, graph = case.program.graph, Graph()
    copies: dict[Node, Node] = {}
    results = graph.graph_copy(old.graph, copies)
    kept = range(len(old.outputs)) if outputs is None else outputs
    graph.output(tuple(results[i] for i in kept))
    edit(graph)
    given = [*old.inputs]
    values = dict(case.program.values)
    for name, (value, role) in (more or {}).items():
        given.append(Input(name, role, meta_of(value)))
        values[name] = value
    with suppress(Exception):
        chosen = [old.outputs[i] for i in kept]
        made = [n.name for n in graph.find_nodes(op="output")[0].args[0]]
        kept_names = [old.results()[i][1].name for i in kept]
        same = made == kept_names
        renamed = [o if o.kind == "update" and same else Output("result", f"result{n}") for n, o in enumerate(chosen)]
        train = finished(graph, given, renamed)
        known = {i.name for i in train.inputs}
        grad_targets = dict(case.grad_targets)
        program = Program(train, {i.name: values[i.name] for i in train.inputs}, case.program.coarse)
        yield replace(
            case, program=program, rest={n: v for n, v in case.rest.items() if n in known}, grad_targets=grad_targets
        )


# -- layouts and meshes ------------------------------------------------------------------
def _smaller_layouts(case: Case) -> Iterator[Case]:
    """An axis less in the layout of an input."""
    if case.strategy is not None:
        return
    for name, layout in case.rest.items():
        for axis in sorted(layout.axes):
            yield replace(case, rest={**case.rest, name: layout.put(axis, REPLICATED)})


def _smaller_mesh(case: Case) -> Iterator[Case]:
    """An axis less, or smaller, or all of one name less in layouts."""
    for axis in case.mesh.axes:
        others = tuple(a for a in case.mesh.axes if a is not axis)
        if others and case.strategy is None:
            rest, grad_targets = (
                {n: v.put(axis.name, REPLICATED) for n, v in part.items()} for part in (case.rest, case.grad_targets)
            )
            pins = Pins(
                {k: {a: s for a, s in v.items() if a != axis.name} for k, v in case.pins.results.items()},
                {k: {a: s for a, s in v.items() if a != axis.name} for k, v in case.pins.reads.items()},
            )
            yield replace(
                case,
                mesh=Mesh(others),
                rest=rest,
                grad_targets=grad_targets,
                pins=pins,
                storage=case.storage - {axis.name},
            )
        if axis.size > 2:
            yield replace(
                case, mesh=Mesh(tuple(replace(a, size=a.size - 1) if a is axis else a for a in case.mesh.axes))
            )


# -- dims -----------------------------------------------------------------------------------
def _smaller_dims(case: Case) -> Iterator[Case]:
    """Every dim and number of one size made smaller, where the calls still fit."""
    sizes = sorted({n for v in case.program.values.values() for n in v.shape if n > 1}, reverse=True)
    for size in sizes:
        for new in dict.fromkeys((1, 2, 3, size - 1)):
            if new < size:
                yield from _resized(case, size, new)


def _resized(case: Case, size: int, new: int) -> Iterator[Case]:
    def number(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(number(v) for v in value)
        return new if type(value) is int and value == size else value

    def edit(graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                node.args = tuple(number(a) if isinstance(a, (list, tuple)) else a for a in node.args)
                node.kwargs = {k: number(v) if isinstance(v, (list, tuple)) else v for k, v in node.kwargs.items()}
        _remeasure(graph, values)

    values = {n: _resize(v, size, new) for n, v in case.program.values.items()}
    with suppress(Exception):
        for edited in _rebuilt(case, edit):
            inputs = tuple(replace(i, meta=meta_of(values[i.name])) for i in edited.program.graph.inputs)
            train = replace(edited.program.graph, inputs=inputs)
            yield replace(edited, program=replace(edited.program, graph=train, values=values))


def _resize(value: Tensor, size: int, new: int) -> Tensor:
    for dim, n in enumerate(value.shape):
        value = value.narrow(dim, 0, new) if n == size else value
    whole = not value.is_floating_point() and value.dtype != torch.bool and value.numel() and int(value.max()) >= new
    return value.remainder(new).clone() if whole else value.clone()


def _remeasure(graph: Graph, values: dict[str, Tensor]) -> None:
    """Record anew what every node makes."""
    env: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = values[node.name]
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = function_of(node)(*args, **kwargs)
        if node.op != "output":
            node.meta.pop("wholestep_tensors", None)
            meta.set_value(node, env[node])


WAYS: tuple[Smaller, ...] = (
    _without_strategy, _fewer_outputs, _earlier_output, _shorter, _plainer, _smaller_layouts, _smaller_mesh,
    _smaller_dims,
)  # fmt: skip


# -- printing ------------------------------------------------------------------------------
def show(case: Case, found: Problem) -> str:
    """A case as text: inputs with their layouts, calls with what they take and give, what each rank runs."""
    lines = [found.text.rstrip(), "", f"mesh {case.mesh}" + (f"; {case.strategy}" if case.strategy else "")]
    lines += [f"{name} = {getattr(case, name)}" for name in ("storage", "scatter", "pins") if getattr(case, name)]
    plan = None
    with suppress(Exception):
        plan = case.plan()
    train: TrainGraph = case.program.graph if plan is None else plan.decompose(case.program.graph)
    rest = case.rest if plan is None else plan.storage
    for given in train.inputs:
        home = (
            f"  home {case.grad_targets[given.name].show(given.meta.shape)}" if given.name in case.grad_targets else ""
        )
        lines.append(f"  {given.name}: {rest[given.name].show(given.meta.shape)}  {given.role.value}{home}")
    for node in train.graph.nodes:
        if node.op == "call_function":
            lines.append(f"  %{node.name} = {show_call(node)}")
            if plan is not None:
                lines.append(f"      {_decided(node, plan)}")
    lines += [f"  {o.kind} {o.target} = %{n.name}" for o, n in train.results()]
    if plan is not None:
        with suppress(Exception):
            lines += ["", str(partition(case.program.graph, plan))]
    return "\n".join(lines)


def _decided(node: Node, plan: Any) -> str:
    decision = plan.decisions[node.name]
    takes = [w.show(_shape(meta.tensor(n))) for n, w in zip(operands(node), decision.operands, strict=False)]
    gives = [o.show(_shape(m)) for o, m in zip(decision.outputs, meta.tensors(node), strict=True) if m]
    settle = f"; settled to {decision.reshards_to}" if decision.reshards_to else ""
    return f"{', '.join(takes)} -> {', '.join(gives)}  ({decision.why}{settle})"


def _shape(found: Any) -> Sequence[int]:
    return found.shape if found else ()
