"""What an allocator reserves while a rank repeats its program: the tensors of `cost.memory` in blocks and segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from ..graph.graph import LocalGraph, Role
from ..graph.loop import loop_of
from ..graph.nodes import is_wait
from ..graph.op_kinds import collective_kind
from ..graph.storage import Storage, storages
from ..hardware.hardware import Hardware
from .allocator import Allocator, Block
from .stack import Stack

_STEPS = 3
"""Optimizer state takes what the first step freed, so that the second cannot be packed alike; then nothing changes."""
_BESIDE = "gather"


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


def reserved(
    local: LocalGraph, stack: Stack, *, until: Mapping[Node, Node] | None = None, accumulates: bool = False
) -> Reserved:
    """Repeat the allocations of a step until they are steady. `until`: results that a stack holds until another node
    has run. `accumulates`: gradients stay from one micro-batch to the next. Buffers of gathers belong to another stream
    where the stack copies out of them, so that no other tensor takes their blocks.

    Example:
        >>> print(reserved(local, ws.Stack.named("torchtitan")).reserved_bytes)
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    roles = {node: given.role for given, node in local.placeholders()}
    held = storages(local.graph)
    lives = [life for one in held for life in _lives(one, place, stack, until or {})]
    states = [one for one in held if roles.get(one.node) is Role.STATE]
    rest = [one for one in held if one.first < 0 and roles.get(one.node) is not Role.STATE]
    updated = min((place[user] for one in states for user in one.node.users if user in place), default=0)
    run = _Replay(Allocator(stack.expandable_segments))
    for one in rest:
        for _ in range(1 + (accumulates and roles.get(one.node) is Role.PARAM)):
            run.take(_Life(one.size_bytes, -1, None))
    for number in range(_STEPS):
        run.step(lives, len(calls), (states if number == 0 else [], updated))
    return Reserved(run.allocator.reserved_bytes, run.peak_bytes)


def reserved_bytes(local: LocalGraph, hardware: Hardware, stack: Stack | None = None) -> int | None:
    """What torch reserves on a GPU of `hardware` while `local` runs, with the allocator of `stack`, torch's default if
    None; None for what is no GPU, for the program of all stages of a pipeline, which none of them runs, and for loops,
    of whose values storages are known for one moment alone.
    """
    stages = local.stage_axis and local.stage is None
    if not hardware.has_gpus or stages or any(map(loop_of, local.graph.nodes)):
        return None
    return reserved(local, stack or Stack.named("wholestep")).reserved_bytes


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

    def step(self, lives: list[_Life], calls: int, created: tuple[list[Storage], int]) -> None:
        """One step. `created`: states that the call of this number makes."""
        begins: list[list[_Life]] = [[] for _ in range(calls)]
        ends: list[list[tuple[Block, int]]] = [[] for _ in range(calls + 1)]
        for life in lives:
            begins[life.first].append(life)
        for number in range(calls):
            if number == created[1]:
                for one in created[0]:
                    self.take(_Life(one.size_bytes, -1, None))
            for life in begins[number]:
                ends[calls if life.last is None else life.last].append(self.take(life))
            for block, size in ends[number]:
                self.give(block, size)
        for block, size in ends[calls]:
            self.give(block, size)
