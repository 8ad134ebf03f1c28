"""How far a generated function had come when it raised: whether it had changed an input, and what it had exchanged.

The line of its first change and those of its collectives are found when it raises: a call that succeeds notes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import NoneType
from typing import Any

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.messages import complete, start_receive, start_send
from ..graph.nodes import communicates, is_mutating, operands, written
from ..graph.region import Region, inputs_of, region_of
from ..passes.reinplace import aliased
from ..rules.registry import is_random

LANDMARKS = "wholestep_landmarks"  # a global of a generated function, which finds them
GO_TO = "wholestep_go_to"  # another one: a function that says which line is next, where lines are left out
_NEVER = 1 << 60


@dataclass(frozen=True)
class Landmarks:
    """Lines of a function: the first one that may change an input; the first and last ones of what it exchanges; the
    text of those that complete the last call, apart from all else, and the first change of these.
    """

    change: int
    exchanges: tuple[tuple[int, int], ...]
    late: Mapping[int, str]
    late_change: int

    @staticmethod
    def of(lines: Sequence[tuple[int, Node]], graph: Graph, source: str) -> Landmarks:
        """Those of the calls of a graph, which are in these lines of its source."""
        writers, text = _writers(graph), source.splitlines()
        late = {line: f"{GO_TO}({line}); {text[line - 1].strip()}" for line, node in lines if meta.is_late(node)}
        mixed = any(meta.is_late(target) != meta.is_late(node) for node, inputs in writers.items() for target in inputs)
        if mixed or any(is_random(node) for line, node in lines if line in late):
            late = {}  # they cannot be told apart, or draw random numbers, which a call that raises puts back
        change, late_change = (
            min((line for line, node in lines if node in writers and (line in late) == ends), default=_NEVER)
            for ends in (False, True)
        )
        return Landmarks(change, tuple(_exchanges(lines).values()), late, late_change)


@dataclass(frozen=True)
class Reached:
    """How far a call had come: state may have `changed`, collectives were `begun` (None: one was at work)."""

    changed: bool = False
    begun: int | None = 0


def reached(error: BaseException) -> Reached:
    """How far the outermost generated function had come that `error` left. Without one, all may have been done."""
    for frame, line in walk_tb(error.__traceback__):
        landmarks: Landmarks | None = frame.f_globals.get(LANDMARKS, NoneType)()
        if landmarks is not None:
            before = sum(end < line for _, end in landmarks.exchanges)
            torn = line >= landmarks.change or (line in landmarks.late and line >= landmarks.late_change)
            return Reached(torn, None if any(begin <= line <= end for begin, end in landmarks.exchanges) else before)
    return Reached(True, None)


def rest_of(error: BaseException) -> Callable[[], None] | None:
    """What completes the last call where `error` has left a function that had begun to; None if it had not."""
    for frame, line in walk_tb(error.__traceback__):
        landmarks: Landmarks | None = frame.f_globals.get(LANDMARKS, NoneType)()
        if landmarks is not None and line > landmarks.late_change:
            text = "\n".join(late for number, late in landmarks.late.items() if number > line)
            scope = {**frame.f_globals, **frame.f_locals, LANDMARKS: NoneType}  # what raises there leaves it torn
            return torch.no_grad()(partial(exec, text, scope))
    return None


def _exchanges(lines: Sequence[tuple[int, Node]]) -> dict[str, tuple[int, int]]:
    """The first and the last line of each exchange: of a collective, and of all that stands for a loop or a stage."""
    exchanges: dict[str, tuple[int, int]] = {}
    regions = {region for _, node in lines if (region := region_of(node))}
    regions = {region for region in regions if any(map(communicates, region.body.nodes))}
    for line, node in lines:
        in_pieces = node.target in regions or node.target in (start_send, start_receive, complete)
        if in_pieces or communicates(node):
            name = meta.part_of(node) if in_pieces else node.name
            exchanges[name] = exchanges.get(name, (line, line))[0], line
    return exchanges


def _writers(graph: Graph) -> dict[Node, list[Node]]:
    """The calls that may write into inputs of a graph, and these inputs."""
    writers: dict[Node, list[Node]] = {}
    changed_by: dict[Region, set[int]] = {}
    for node in graph.nodes:
        for changed in map(_root_of, _written(node, changed_by)):
            if changed.op == "placeholder" or (meta.is_late(changed) and not meta.is_late(node)):
                writers.setdefault(node, []).append(changed)
    return writers


def _written(node: Node, changed_by: dict[Region, set[int]]) -> Sequence[Node]:
    """The operands that a call may write into; `changed_by`: of regions, the numbers of inputs."""
    if is_mutating(node):
        return written(node)
    if node.op == "call_function" and not _is_known(node.target):
        return operands(node)
    if region := region_of(node):
        if region not in changed_by:
            at = {placeholder: i for i, placeholder in enumerate(region.body.find_nodes(op="placeholder"))}
            changed_by[region] = {at[changed] for inputs in _writers(region.body).values() for changed in inputs}
        return [value for i, value in enumerate(inputs_of(node)) if i in changed_by[region] and value is not None]
    return ()


def _root_of(node: Node) -> Node:
    """The node whose storage `node` may share."""
    while (source := aliased(node)) is not None:
        node = source
    return node


def _is_known(target: Any) -> bool:
    """Whether a function is an op, or one of wholestep; not so what another compiler has made."""
    named = getattr(target, "__module__", type(target).__module__)
    return _torch.is_op(target) or _torch.is_getitem(target) or str(named).startswith("wholestep")
