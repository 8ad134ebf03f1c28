"""What a program saves for its backward: by itself, or in the bodies that it runs for pieces of the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..cost.memory import curve
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import Loop, loop_of
from ..graph.nodes import is_collective
from ..graph.stage_part import StagePart
from ..hardware.hardware import Hardware
from ..partition.batch_dependent import batch_dependent
from ..partition.stage_blocks import levels_of, recut
from .in_bodies import of_piece
from .remat_frontier import Array, RematChoice, choices, held_by
from .rematerialize import rematerialized
from .saved_tensors import SavedTensors


@dataclass
class SavedValues:
    """The values of a program that can be rematerialized: its own, or, where it has loops, those of each body.

    Names of values of a body begin with that of its loop. `gathers`, `activations`: as in `SavedTensors`;
    parameters that are gathered in a body stay. `stage`: of the program of all stages, the one whose values are asked
    for.
    """

    local: LocalGraph
    gathers: bool = True
    stage: int | None = None
    activations: bool = False

    @cached_property
    def loops(self) -> dict[str, Loop]:
        """The loops of the program, by name."""
        return {node.name: loop for node in self.local.graph.nodes if (loop := loop_of(node))}

    @cached_property
    def places(self) -> dict[str, SavedTensors]:
        """What is saved, by the name of the loop; "" for the program itself."""
        if not self.loops:
            return {"": SavedTensors(self.local, self.gathers, self.activations)}
        varying, again = batch_dependent(self.local), self.activations
        return {
            node.name: SavedTensors(of_piece(self.local, node, varying, loop.body), False, again)
            for node in self.local.graph.nodes if (loop := self.loops.get(node.name))
        }  # fmt: skip

    @property
    def has_gathers(self) -> bool:
        """True if a gather may be repeated."""
        return any(is_collective(n) for saved in self.places.values() for n in filter(saved.repeatable, saved.position))

    def path(self, hardware: Hardware, wire_price: float = 1.0) -> list[RematChoice]:
        """The frontier, cheapest choice first. Gathers cost `wire_price` of their time on the link."""
        return _merged([self._path(name, hardware, wire_price) for name in self.places])

    def applied(self, names: Sequence[str], hardware: Hardware) -> LocalGraph:
        """A copy of the program that rematerializes the values `names`. What stages exchange stays, and its order;
        `hardware` prices their blocks anew.
        """
        if not names:
            return self.local
        if not self.loops:
            return rematerialized(self.places[""], names)
        program = self.local.copy()
        for node in program.graph.nodes:
            inner = [name.removeprefix(f"{node.name}/") for name in names if name.startswith(f"{node.name}/")]
            if inner and (loop := self.loops.get(node.name)):
                loop = loop.with_body(rematerialized(self.places[node.name], inner).graph)
                node.target = recut(loop, self.local.mesh, self.local.stage_axis, hardware, self.stage)
        return program

    def full_name(self, place: str, value: str) -> str:
        """The name of a value in one of the `places`."""
        return f"{place}/{value}" if place else value

    def _path(self, name: str, hardware: Hardware, wire_price: float) -> list[RematChoice]:
        saved, loop = self.places[name], self.loops.get(name)
        if loop is None and self.stage is None:
            return choices(saved, held_by(saved.local), hardware, wire_price)
        storages = [s for s in saved.storages if s.first < 0 or meta.stage(s.node) in (None, self.stage)]
        among = [value for value in saved.candidates if meta.stage(value.storage.node) == self.stage]
        load = None
        if loop is not None and loop.stages is not None and self.stage is not None:
            load = OtherPieces.of(saved, loop.stages.parts[self.stage])
        path = choices(saved, curve(storages, len(saved.position)), hardware, wire_price, among=among, load=load)
        return [replace(choice, names=tuple(self.full_name(name, value) for value in choice.names)) for choice in path]


def _merged(paths: Sequence[Sequence[RematChoice]]) -> list[RematChoice]:
    """One path for values of several bodies: each goes as far down its own as the largest of their peaks."""
    if len(paths) == 1:
        return list(paths[0])
    merged: list[RematChoice] = []
    for target in sorted({choice.peak_bytes for path in paths for choice in path}, reverse=True):
        picked = [next((choice for choice in path if choice.peak_bytes <= target), path[-1]) for path in paths]
        names = tuple(name for choice in picked for name in choice.names)
        merged.append(RematChoice(names, max(choice.peak_bytes for choice in picked)))
    return merged


@dataclass(frozen=True)
class OtherPieces:
    """What a stage holds at each call of the body of its loop, from what one piece holds there: others are in flight.

    Blocks of one level run in one go, but for gradients of weights. `begins`: the first call of each level. `waits`:
    the call at which a piece that has run a level holds what it does while it waits. `counts`: for each level, how many
    other pieces wait behind each while it runs; a row for each case.
    """

    begins: tuple[int, ...]
    waits: tuple[int, ...]
    counts: tuple[Array, ...]
    rest_bytes: int

    @staticmethod
    def of(saved: SavedTensors, part: StagePart) -> OtherPieces:
        """Those of a stage by the order of its actions."""
        levels, level_of = sorted({block.level for block in part.blocks}), levels_of(saved.local.graph)
        own_nodes = [node for node in saved.position if meta.stage(node) == part.stage]
        begins = [
            min((saved.position[node] for node in own_nodes if level_of[node] == level), default=len(saved.position))
            for level in levels
        ]  # fmt: skip
        turn = min((saved.position[node] for node in own_nodes if meta.is_backward(node)), default=0)
        last = begins[-1] if len(levels) > 1 else turn
        waits = [max(at - 1, 0) for at in (*begins[1:], last)]
        counts = [np.array(sorted(rows), dtype=np.int64) for rows in _waiting_counts(part, levels)]
        rest = sum(storage.size_bytes for storage in saved.storages if storage.first < 0)
        return OtherPieces(tuple(begins), tuple(waits), tuple(counts), rest)

    def __call__(self, piece_bytes: Array) -> Array:
        """Add the activations of the other micro-batches in flight to the memory curve of one, `piece_bytes`."""
        stage_bytes, waiting = piece_bytes.copy(), piece_bytes[list(self.waits)] - self.rest_bytes
        for begin, end, rows in zip(self.begins, (*self.begins[1:], len(piece_bytes)), self.counts, strict=True):
            stage_bytes[begin:end] += int((rows @ waiting).max())
        return stage_bytes


def _waiting_counts(part: StagePart, levels: Sequence[int]) -> list[set[tuple[int, ...]]]:
    """For each level of the blocks of a stage, how many other pieces wait behind each level while it runs."""
    at = {block.name: levels.index(block.level) for block in part.blocks}
    runs = [(action.name, action.piece) for action in part.actions if action.kind == "run"]
    runs_left, last_level = Counter(piece for _, piece in runs), dict[int, int]()
    counts: list[set[Any]] = [set() for _ in levels]
    for name, piece in runs:
        waiting = [last for other, last in last_level.items() if other != piece and runs_left[other]]
        counts[at[name]].add(tuple(map(waiting.count, range(len(levels)))))
        last_level[piece] = max(last_level.get(piece, 0), at[name])
        runs_left[piece] -= 1
    return counts
