"""What an allocator reserves while a rank repeats its program: the tensors of `cost.memory` in blocks and segments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, Role
from ..graph.loop import loop_of
from ..graph.nodes import is_wait, operands
from ..graph.op_kinds import collective_kind
from ..graph.stage_part import StagePart, part_of
from ..graph.storage import PIECES, Storage, storages
from ..hardware.hardware import Hardware
from .allocator import Allocator, Block
from .memory import storages_here
from .stack import Stack

_STEPS = 3
"""Optimizer state takes what the first step freed, so that the second cannot be packed alike; then nothing changes."""
_BESIDE = "gather"
_Value = tuple[str, int]  # a value and its piece


@dataclass(frozen=True)
class Reserved:
    """Bytes of a rank at their peak: `reserved_bytes` of segments, as `torch.cuda.max_memory_reserved` has them, and
    `allocated_bytes` of tensors among them.

    Example:
        >>> found = reserved(local, ws.Stack.named("torchtitan"))
        >>> print(found.reserved_bytes, found.allocated_bytes)
    """

    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class _Life:
    """Bytes from call `first` to call `last`, inclusive; -1 and None: for good."""

    size_bytes: int
    first: int
    last: int | None
    stream: str = ""


@dataclass
class _Kept:
    """A value of a piece from call `first` on, which so many `names` keep."""

    size_bytes: int
    first: int
    names: int


@dataclass(frozen=True)
class _Allocations:
    """Those of so many `calls`. `inside`: of the pieces of a loop, by the call that runs them, and how often to repeat
    them: each further piece takes what the second has freed.
    """

    calls: int
    lives: Sequence[_Life]
    inside: Mapping[int, tuple[int, _Allocations]]


def reserved(
    local: LocalGraph, stack: Stack, *, until: Mapping[Node, Node] | None = None, added: Sequence[int] = (),
    summed: Collection[tuple[Node, int]] = (),
) -> Reserved:  # fmt: skip
    """Repeat the allocations of a step until they are steady. `until`: results that a stack holds until another node
    has run. `added`: sizes of tensors that are there for good besides, as gradients that stay from one micro-batch to
    the next; results that are `summed`, by node and number of the output, are added to these by the call that follows.
    Buffers of gathers belong to another stream where the stack copies out of them, so that no other tensor takes their
    blocks.

    Example:
        >>> print(reserved(local, ws.Stack.named("torchtitan")).reserved_bytes)
    """
    held = storages_here(local, storages(local.graph))
    made, place = _allocations(local.graph, held, stack, until or {}, summed)
    roles = {node: given.role for given, node in local.placeholders()}
    states = [one for one in held if roles.get(one.node) is Role.STATE]
    rest = [one.size_bytes for one in held if one.first < 0 and roles.get(one.node) is not Role.STATE]
    updated = min((place[user] for one in states for user in one.node.users if user in place), default=0)
    run = _Replay(Allocator(stack.expandable_segments))
    for size_bytes in (*rest, *added):
        run.take(_Life(size_bytes, -1, None))
    for number in range(_STEPS):
        run.step(made, (states if number == 0 else [], updated))
    return Reserved(run.allocator.reserved_bytes, run.peak_bytes)


def reserved_bytes(
    local: LocalGraph, hardware: Hardware, stack: Stack | None = None, added: Sequence[int] = (),
    summed: Collection[tuple[Node, int]] = (),
) -> int | None:  # fmt: skip
    """What torch reserves on a GPU of `hardware` while `local` runs, with the allocator of `stack`, torch's default if
    None; None for what is no GPU, and for the program of all stages of a pipeline, which none of them runs.
    """
    if not hardware.has_gpus or (local.stage_axis and local.stage is None):
        return None
    return reserved(local, stack or Stack.named("wholestep"), added=added, summed=summed).reserved_bytes


def _allocations(
    graph: Graph,
    held: Sequence[Storage],
    stack: Stack,
    until: Mapping[Node, Node],
    summed: Collection[tuple[Node, int]] = (),
) -> tuple[_Allocations, dict[Node, int]]:
    """The allocations of a program for the storages that it holds, and the places of its calls."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    place, inside = {node: i for i, node in enumerate(calls)}, dict[int, tuple[int, _Allocations]]()
    for i, node in enumerate(calls):
        if loop := loop_of(node):
            inside[i] = min(loop.pieces, 2), _of_piece(loop.body, stack)[0]
        elif (part := part_of(node)) and part.begins and part.ends:
            inside[i] = 1, _of_part(part, stack)
    own = [one for one in held if one.node.graph is graph]  # else of one moment of a piece
    own = [one for one in own if one.index != PIECES or place[one.node] not in inside]
    own = [
        replace(one, last=min(one.first + 1, len(calls) - 1)) if (one.node, one.index) in summed else one for one in own
    ]
    return _Allocations(len(calls), [life for one in own for life in _lives(one, place, stack, until)], inside), place


def _of_piece(body: Graph, stack: Stack) -> tuple[_Allocations, list[Storage]]:
    """The allocations of a piece, which end with it, and the storages that it leaves."""
    held = storages(body)
    made, _ = _allocations(body, [one for one in held if one.last is not None], stack, {})
    return made, [one for one in held if one.last is None and one.first >= 0]


def _of_part(part: StagePart, stack: Stack) -> _Allocations:
    """The allocations of the blocks that a stage runs, in the order of its actions. A value of a piece is there until
    the last block has read it and its messages have left; one of another stage from when its message is expected.
    """
    lives, calls, readers = list[_Life](), 0, part.readers
    left, held_by = dict[_Value, int](), dict[_Value, _Kept]()
    blocks, totals = {block.name: block for block in part.blocks}, {after for _, after in part.totals}
    bodies = {name: _of_piece(block.body, stack) for name, block in blocks.items()}

    def read(value: _Value) -> None:
        left[value] = left.get(value, readers.get(value[0], 0)) - 1
        kept = held_by.pop(value, None) if left[value] <= 0 else None
        if kept is not None:
            kept.names -= 1
            if not kept.names:
                lives.append(_Life(kept.size_bytes, kept.first, calls - 1))

    for action in part.actions:
        if action.kind == "post":
            held_by[action.name, action.piece] = _Kept(part.messages[action.name].size_bytes, calls, 1)
            calls += 1
        elif action.kind == "sent":
            read((part.messages[action.name].value, action.piece))
        elif action.kind == "run":
            block, (made, left_behind) = blocks[action.name], bodies[action.name]
            given = dict(zip(operands(next(iter(reversed(block.body.nodes)))), block.gives, strict=False))
            for one in left_behind:
                names = {given[node] for node in one.members if node in given}
                if names & totals:
                    continue  # it is accumulated: the step holds it
                kept = _Kept(one.size_bytes, calls + one.first, sum(map(bool, map(readers.get, names))))
                held_by |= {(name, action.piece): kept for name in names if readers.get(name)}
                if not kept.names:
                    lives.append(_Life(kept.size_bytes, kept.first, calls + made.calls - 1))
            lives += [replace(one, first=calls + one.first, last=calls + (one.last or 0)) for one in made.lives]
            calls += made.calls
            for name in block.takes:
                read((name, action.piece))
    for kept in {id(kept): kept for kept in held_by.values()}.values():
        lives.append(_Life(kept.size_bytes, kept.first, calls - 1))
    return _Allocations(calls, lives, {})


def _lives(one: Storage, place: Mapping[Node, int], stack: Stack, until: Mapping[Node, Node]) -> list[_Life]:
    if one.first < 0:
        return []
    last = one.last
    if last is not None and one.node in until:
        last = max(last, place[until[one.node]])
    waits = [place[user] for user in one.node.users if is_wait(user)]
    if not (stack.copies and waits and collective_kind(one.node.target) == "all_gather"):
        return [_Life(one.size_bytes, one.first, last)]
    copied = min(waits)
    return [_Life(one.size_bytes, one.first, copied, _BESIDE), _Life(one.size_bytes, copied, last)]


@dataclass
class _Replay:
    allocator: Allocator
    bytes_now: int = 0
    peak_bytes: int = 0

    def take(self, life: _Life) -> tuple[Block, int]:
        self.bytes_now += life.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        return self.allocator.take(life.size_bytes, life.stream), life.size_bytes

    def give(self, block: Block, size_bytes: int) -> None:
        self.bytes_now -= size_bytes
        self.allocator.give(block)

    def step(self, made: _Allocations, created: tuple[list[Storage], int]) -> None:
        """One step, or one piece. `created`: states that the call of this number makes."""
        begins: list[list[_Life]] = [[] for _ in range(made.calls)]
        ends: list[list[tuple[Block, int]]] = [[] for _ in range(made.calls + 1)]
        for life in made.lives:
            begins[life.first].append(life)
        for number in range(made.calls):
            if number == created[1]:
                for one in created[0]:
                    self.take(_Life(one.size_bytes, -1, None))
            for life in begins[number]:
                ends[made.calls if life.last is None else life.last].append(self.take(life))
            times, piece = made.inside.get(number, (0, made))
            for _ in range(times):
                self.step(piece, ([], 0))
            for block, size in ends[number]:
                self.give(block, size)
        for block, size in ends[made.calls]:
            self.give(block, size)
