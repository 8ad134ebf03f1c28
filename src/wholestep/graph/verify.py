"""Checks of the invariants of TrainGraph and LocalGraph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch.fx import Graph, Node

from ..errors import GraphError
from . import meta
from .graph import Input, LocalGraph, Output, Role, TrainGraph
from .loop import bodies_of
from .nodes import is_collective, is_mutating, is_wait, operands

_BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def check_train_graph(train: TrainGraph) -> None:
    """Raise GraphError, which names the node, if `train` violates an invariant of TrainGraph."""
    _check_ends(train.graph, train.inputs, train.outputs)
    _check_order(train.graph)
    lasting = {i.name: i.meta for i in train.inputs if i.role is not Role.BATCH}
    for out, node in train.results():
        new, old = meta.one_tensor(node), lasting.get(out.target) if out.kind == "update" else None
        if old is not None and (new.shape, new.dtype) != (old.shape, old.dtype):
            problem = f"the output for {out.target!r} is {list(new.shape)} {new.dtype}"
            raise GraphError(problem, f"what its input is: {list(old.shape)} {old.dtype}", where=meta.source_line(node))
    for node in train.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise GraphError(f"%{node.name} is a {node.op} node", "placeholders, calls and one output")
        if node.op == "call_function" and is_mutating(node):
            problem = f"%{node.name} ({node.target}) changes its inputs"
            raise GraphError(problem, "functional operations only", where=meta.source_line(node))
        if node.op == "placeholder" and meta.tensor(node) is None:
            raise GraphError(f"%{node.name} has no recorded shape", "a recorded value on every input")
        if node.target in _BY_STRIDES and isinstance(node.kwargs.get("storage_offset", node.args[-1]), int):
            problem = f"%{node.name} has an offset into the storage"
            raise GraphError(problem, "as_strided with an offset into its operand")


def check_local_graph(local: LocalGraph) -> None:
    """Raise GraphError, which names the node, if `local` violates an invariant of LocalGraph."""
    _check_ends(local.graph, local.inputs, local.outputs)
    _check_order(local.graph)
    for program_input, layout in zip(local.inputs, local.layouts, strict=True):
        layout.check(program_input.meta.shape, local.mesh, program_input.name)
    _check_calls(local.graph, {node for out, node in local.results() if out.kind == "carry"})
    for body in {body: None for node in local.graph.nodes for body in bodies_of(node)[1]}:
        _check_order(body)
        _check_calls(body, set())


def _check_calls(graph: Graph, carried: Collection[Node]) -> None:
    """Check that every node is used, and that what a collective returns is waited for before it is read."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if not node.users and not meta.is_kept(node) and not is_mutating(operands(node)[0] if is_wait(node) else node):
            problem = f"%{node.name} ({node.target}) is dead"
            raise GraphError(problem, "no node without a user", "remove it in the pass that left it")
        for user in node.users if is_collective(node) else ():
            if not is_wait(user) and (user.op != "output" or node not in carried):
                problem = f"%{user.name} reads %{node.name} before its wait"
                raise GraphError(problem, "a wait between a collective and its users")


def _check_order(graph: Graph) -> None:
    """Check operands and names as `Graph.lint` does, in a fraction of the time."""
    seen, names = set[Node](), set[str]()
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                raise GraphError(f"%{node.name} reads %{source.name}, which comes later", "operands before their users")
        if node.name in names:
            raise GraphError(f"two nodes are called %{node.name}", "distinct names")
        seen.add(node)
        names.add(node.name)


def _check_ends(graph: Graph, inputs: tuple[Input, ...], outputs: tuple[Output, ...]) -> None:
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise GraphError(f"the graph has {len(placeholders)} placeholders for {len(inputs)} inputs", "one for each")
    if not nodes or nodes[-1].op != "output" or len(cast(Sequence[object], nodes[-1].args[0])) != len(outputs):
        needed = f"{len(outputs)} values: {[o.target for o in outputs]}"
        raise GraphError("the graph does not end in one output for each named output", needed)
    names = Counter(i.name for i in inputs)
    if len(names) < len(inputs):
        raise GraphError(f"two inputs are called {min(n for n in names if names[n] > 1)!r}", "distinct names")
    stray = sorted(o.target for o in outputs if o.kind == "update" and not o.owner and o.target not in names)
    if stray:
        raise GraphError(f"an output updates {stray[0]!r}, which is no input", "inputs, or state that the step creates")
