"""Branches on values of tensors. A trace assumes the truth of each; where it is wrong, the graph changes nothing."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from .. import _torch
from ..errors import CaptureError
from ..graph.graph import BRANCHES, Input, Output, Role, TrainGraph
from ..graph.nodes import cone
from ..graph.ops import OVER_RANKS
from ..sizes import evaluate
from ..tuning import TUNING
from .capture_options import CaptureOptions
from .skip_nonfinite import After, Updates

aten = torch.ops.aten
_OF_OPTIONS = (Role.HYPER, Role.CONST)
MOST = 500  # of one trace: a loop that ends by a value may never end
_USUALLY_TRUE = (aten.all.default, aten.all.dim, aten.mul.Tensor)  # of booleans: as `isfinite` is traced


@dataclass(frozen=True)
class TakenBranch:
    """The truth of a value that a trace assumes, and the line that asks for it. `text`: what is compared of counts.
    `together`: it most often does not depend on those just before it, which are too.
    """

    expected: bool
    where: str
    text: str = ""
    together: bool = False


class OtherBranchError(CaptureError):
    """A call has to take another branch than its program: its first ones are `taken`."""

    def __init__(self, choices: tuple[bool, ...], where: str) -> None:
        super().__init__(f"the branch at {where} is another one", where=where)
        self.taken = choices


def too_many_branches(other: OtherBranchError, tries: int) -> CaptureError:
    """The error of a call that takes another branch than each of the programs that were tried."""
    return CaptureError(
        f"one call takes another branch than each of {tries} programs, as a loop does that ends by a value, or that is "
        "over what values choose",
        "few branches on values in a step: each way through them is a program",
        "let a number of Python end the loop, choose with torch.where, loop over all experts and not the chosen ones "
        '(model.set_experts_implementation("grouped_mm") in transformers), or leave the loop out of the compiled step; '
        "nothing was changed",
        other.where,
    )


def other_branch(branches: Sequence[TakenBranch], number: int, differ: Sequence[float], same: bool) -> CaptureError:
    """The error of a call in which the truth of value `number` is the first that is not as expected; `differ`: on how
    many ranks each is not. `same`: on some ranks it is as expected.
    """
    branch = branches[number]
    if not same:
        end = number + 1
        while branch.together and end < len(branches) and branches[end].together:
            end += 1
        counted = zip(branches[:end], differ, strict=False)
        return OtherBranchError(tuple(b.expected is not bool(count) for b, count in counted), branch.where)
    return CaptureError(
        "ranks, or micro-batches, take different branches",
        "a value that is the same for all of them: they run one program, and share its collectives",
        "choose with torch.where, run the other branch on zeros as well (an empty batch of that kind, all experts and "
        'not the chosen ones), or compile with semantics="global"; nothing was changed',
        branch.where,
    )


def is_behind_branch(error: Exception, branches: Sequence[TakenBranch]) -> bool:
    """Whether a branch on numbers that a call had counted, before it raised, is not as expected."""
    scopes = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    numbers = {name: value for scope in scopes for name, value in scope.items() if re.fullmatch(r"u\d+", name)}
    return any(
        bool(evaluate(branch.text, numbers)) is not branch.expected
        for branch in branches
        if branch.text and {*re.findall(r"u\d+", branch.text)} <= numbers.keys()
    )


@dataclass
class Branches:
    """The branches of one trace, along those of its `options`; `now` returns a value of the batch as it is."""

    inputs: Sequence[Input]
    options: CaptureOptions
    now: Callable[[Node, Any], torch.Tensor | None]
    decided: list[TakenBranch] = field(default_factory=list[TakenBranch])
    values: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    @property
    def expected(self) -> tuple[bool, ...]:
        """What values were taken for so far; nothing of a trace with too many."""
        return tuple(branch.expected for branch in self.decided) if len(self.decided) < MOST else ()

    def take(
        self, value: torch.Tensor, where: str, likely: bool | None = None, text: str = "", together: bool = False
    ) -> bool | None:
        """Return what the truth of a traced value is taken for; None if it cannot be assumed."""
        assumed = self.options.branches
        traced = None if assumed is None or _torch.inside_transform() else _torch.traced_node(value)
        if assumed is None or traced is None or value.numel() != 1 or len(self.decided) == MOST:
            return None
        node, number = traced[0], len(self.decided)
        if not self.depends_on_tensors(node):
            return None
        with _torch.unobserved():
            now = self.now(*traced) if self.options.branches_of_batch and number >= len(assumed) else None
            if likely is None or now is not None:
                likely = bool(now) if now is not None else usual(value)
        expected = assumed[number] if number < len(assumed) else likely
        with torch.no_grad():
            self.values.append((value.detach() != 0).reshape(()))
        self.decided.append(TakenBranch(expected, where, text, together))
        return expected

    def depends_on_tensors(self, node: Node) -> bool:
        """False for what is computed of options of an optimizer alone, which can be constants."""
        inputs = dict(zip(node.graph.find_nodes(op="placeholder"), self.inputs, strict=False))
        return any(n in inputs and inputs[n].role not in _OF_OPTIONS for n in cone(node, ()))


def usual(value: torch.Tensor) -> bool:
    """What the truth of a traced value most often is, by what computed it."""
    traced = _torch.traced_node(value)
    return traced is not None and traced[0].target in _USUALLY_TRUE and value.dtype is torch.bool


def along_branches(assumed: tuple[bool, ...] | None, capture: Callable[[tuple[bool, ...] | None], Any]) -> Any:
    """Capture along the `assumed` branches, and behind them along the first ones on which the step can be traced."""
    first: CaptureError | None = None
    tried, now = set[tuple[bool, ...]](), assumed
    for _ in range(TUNING.most_captures):
        try:
            return capture(now)
        except CaptureError as error:
            first, choices = first or error, error.branches
            now = None
            for i in reversed(range(len(assumed or ()), len(choices))):
                tried.add(choices[: i + 1])
                other = (*choices[:i], not choices[i])
                if other not in tried:
                    now = other
                    break
            if now is None:
                raise first from first.__cause__
    assert first is not None, "a capture returned or raised"
    raise first


def check_branches(graph: TrainGraph, branches: Sequence[TakenBranch], first: int, fused: bool) -> TrainGraph:
    """Return the step with one more result in place of the values of `branches`, which are results from number `first`
    on: how many ranks have each as it is not expected, and as it is. The step changes nothing if one is not.
    """
    pairs = graph.results()
    end = first + len(branches)
    values = [node for _, node in pairs[first:end]]
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    place = After(max(values, key=order.__getitem__))
    pairs = [*pairs[:first], *pairs[end:]]
    differing = [
        place.call(aten.logical_not.default, node) if branch.expected else node
        for node, branch in zip(values, branches, strict=True)
    ]
    sizes = [place.call(aten._to_copy.default, node, dtype=torch.float32) for node in differing]
    differ = place.call(aten.stack.default, [place.call(OVER_RANKS, size) for size in sizes])
    same = [place.call(OVER_RANKS, place.call(aten.rsub.Scalar, size, 1)) for size in sizes]
    counts = place.call(aten.stack.default, [differ, place.call(aten.stack.default, same)])
    stop = place.call(aten.any.default, place.call(aten.gt.Scalar, differ, 0))
    updates = Updates(stop) if fused else None
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    placeholders = {given_input.name: node for given_input, node in graph.placeholders()}
    checked: list[tuple[Output, Node]] = []
    for out, new in pairs:
        old = placeholders.get(out.target) if out.kind == "update" else None
        if old is not None and new is not old:
            after = After(updates.last(new) if updates else max(new, place.node, key=order.__getitem__))
            new = (updates and updates.kept(new, old)) or after.call(aten.where.self, stop, old, new)
        checked.append((out, new))
    results = sum(out.kind == "result" for out, _ in checked)
    checked.insert(results, (Output("result", BRANCHES), counts))
    next(iter(reversed(graph.graph.nodes))).args = (tuple(node for _, node in checked),)
    return replace(graph, outputs=tuple(out for out, _ in checked))
