"""What one stage of a pipeline runs of a loop: blocks of the body, for each piece of the batch, in an order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph

OfPiece = tuple[str, int]
"""A value by name, and its piece."""
_TAGS = 1 << 16  # of messages for pieces; sends outside of loops have smaller ones


@dataclass(frozen=True)
class Message:
    """A value that stage `source` sends to `target` for each piece. `value`: its name at the source; `shape` may have a
    number for each piece (`layout.Extent`).
    """

    name: str
    value: str
    source: int
    target: int
    shape: tuple[Any, ...]
    dtype: torch.dtype
    size_bytes: int = 0


@dataclass(frozen=True, eq=False)
class StageBlock:
    """A part of the body of a loop that runs without waiting for other stages.

    Placeholders of `body` are the values `takes`, its outputs are the values `gives`. `level` counts the sends on the
    longest way to it. `is_backward`: most of its nodes are of the backward. `is_filler`: no other stage waits for it.
    `receives`, `sends`: the messages that it reads, and of what it gives. `us`: microseconds that it takes.
    `work_bytes`: the most that it adds to what is there when it begins. `scheduled`: what passes make of
    its body, and for what, where that is known before it runs.
    """

    name: str
    body: Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    level: int
    is_backward: bool
    is_filler: bool = False
    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    us: float = 0.0
    work_bytes: int = 0
    scheduled: tuple[object, Graph] | None = None

    @property
    def label(self) -> str:
        """What it is in its stage."""
        return f"{'backward' if self.is_backward else 'forward'} {self.level}{', weights' * self.is_filler}"

    @property
    def as_run(self) -> StageBlock:
        """This block with the body that runs, as far as that is known."""
        return self if self.scheduled is None else replace(self, body=self.scheduled[1], scheduled=None)


@dataclass(frozen=True)
class Action:
    """One action of a stage for a piece: `run` a block; start to `send` a message, or to receive one (`post`); `wait`
    until it is there. `sent` waits until a message has left, and its value need not be kept.
    """

    kind: Literal["run", "send", "post", "wait", "sent"]
    name: str
    piece: int = 0

    @property
    def key(self) -> OfPiece:
        """The block or message, and the piece."""
        return self.name, self.piece

    def __str__(self) -> str:
        return f"{self.kind} {self.name}[{self.piece}]"


@dataclass(frozen=True, eq=False)
class StagePart:
    """What a stage runs of a loop: `actions`, which read the values `operands` of the loop.

    `totals`: the name of each accumulator before a piece (None for the first) and after it. `device` of received
    values.
    """

    axis: str
    stage: int
    pieces: int
    blocks: tuple[StageBlock, ...]
    messages: Mapping[str, Message]
    actions: tuple[Action, ...]
    operands: tuple[str, ...]
    totals: tuple[tuple[str, str], ...]
    device: str

    def tag(self, message: str, piece: int) -> int:
        """The tag of a message for a piece."""
        return _TAGS + list(self.messages).index(message) * self.pieces + piece


@dataclass(frozen=True, eq=False)
class StageParts:
    """How stages share the body of a loop: the part of each, and the microseconds by simulation of each order."""

    parts: tuple[StagePart, ...]
    order: str
    simulated_us: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def tasks(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """What each stage runs, in order: blocks by name, and pieces."""
        return tuple(tuple((a.name, a.piece) for a in part.actions if a.kind == "run") for part in self.parts)

    @property
    def has_fillers(self) -> bool:
        """True if gradients of weights are blocks of their own."""
        return any(block.is_filler for part in self.parts for block in part.blocks)


def transfer(x: Tensor, source: int, target: int, shape: list[int], axis: str) -> Tensor:
    """Send `x`, of this local shape, from coordinate `source` of an axis of stages to `target`. In the program of a
    rank this is a send, a receive, or nothing (`stage_program`).
    """
    raise AssertionError("the program of all stages does not run")
