"""Restoring a step from the copies that the nodes of a job hold in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..capture.state import StepState
from ..distributed.launch import World
from ..distributed.typed_messages import decode
from ..runtime import random_state
from ..runtime.step import CompiledStep
from . import snapshot, tensor_files
from .checkpoint import check_fits
from .manifest import Chunk, Manifest
from .ranks import Ranks
from .snapshot import Restore, Snapshot
from .stateful import extra_states, load_stateful, read_plain

PIECES, INDEX, VALUES = "pieces", "index", "values.pt"
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Copy:
    """A whole copy on a node: of shard number `shard` of `shards`, `number` calls after the job's start `start`. Copies
    of one start with equal shard numbers are equal. `size`: of its pieces, in bytes.
    """

    start: int
    number: int
    shard: int
    shards: int
    layouts: str
    size: int
    folder: str


def mapped(path: Path, size: int) -> Tensor:
    """The bytes of a file as a tensor; writing to it writes to the file."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def values_of(memory: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """The part of the mapped bytes that is a chunk, as a tensor."""
    return memory[chunk.start : chunk.start + chunk.length].view(dtype).view(chunk.sizes)


def _index(data: bytes) -> Manifest:
    return cast(Manifest, decode(INDEX, data, Manifest))


def position(now: Snapshot, world: World) -> tuple[int, int, str]:
    """The number of this rank's shard of the state, the number of shards, and how the state is laid out."""
    sharding, lines = set[int](), [str(world.mesh)]
    for name, tensor in now.tensors.items():
        if isinstance(tensor, DTensor):
            sharding |= {dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()}
            lines.append(f"{name}: {tensor.placements}")
    shard, shards = 0, 1
    for dim in sorted(sharding):
        axis = world.mesh.axes[dim]
        shard, shards = shard * axis.size + world.coordinate[axis.name], shards * axis.size
    return shard, shards, "\n".join(lines)


@dataclass(frozen=True)
class Restoring:
    """A state of which the nodes hold all shards. `copies` are those of it on the node of each rank."""

    ranks: Ranks
    copies: Sequence[Sequence[Copy]]
    index: Manifest
    values: Mapping[str, Any]

    @staticmethod
    def of(folder: Path, ranks: Ranks) -> Restoring | None:
        """The newest such state, of the latest start that has one; None on every rank where there is none."""
        every = ranks.gather(lambda: copies_in(folder), tuple[Copy, ...])
        present: dict[tuple[int, int], set[int]] = {}
        shards: dict[tuple[int, int], int] = {}
        for copy in (copy for of_rank in every for copy in of_rank):
            present.setdefault((copy.start, copy.number), set()).add(copy.shard)
            shards[copy.start, copy.number] = copy.shards
        complete = [key for key, numbers in present.items() if len(numbers) == shards[key]]
        if not complete:
            return None
        copies = [[copy for copy in of_rank if (copy.start, copy.number) == max(complete)] for of_rank in every]
        source = next(rank for rank, of_rank in enumerate(copies) if of_rank)
        here = copies[ranks.rank]

        def read() -> list[bytes]:
            return [(Path(here[0].folder) / n).read_bytes() for n in (INDEX, VALUES)] if ranks.rank == source else []

        index, values = ranks.gather(read, tuple[bytes, ...])[source]
        return Restoring(ranks, copies, _index(index), read_plain(values))

    def put_random(self) -> None:
        """Set the random generators of this rank, in a job of as many ranks."""
        if self._same_size:
            random_state.put(self._alone()["random"])

    def _alone(self) -> dict[str, Any]:
        """What this rank alone had, or the first one in a job of another size."""
        per_rank, rank = self.values["own"], self.ranks.rank if self._same_size else 0
        return read_plain(per_rank["rows"][rank][: per_rank["alone"][rank]].numpy().tobytes())

    def restore_placed(self, step: CompiledStep) -> None:
        """Restore a step once its state is where it rests."""
        assert step.state is not None, "called when the state is placed"
        self.restore(step.state, step.world, keep_primed=True)

    def restore(self, state: StepState, world: World | None, keep_primed: bool) -> None:
        """Restore a state. What this rank lacks, another one sends (collective)."""
        assert world is not None, "a step with a state has joined"
        manifest = self._manifest()
        self.ranks.on_every_rank(lambda: check_fits(manifest, state, "what the nodes hold in memory"))
        restore = Restore(manifest, state)
        self._restore_buffers(restore)
        pieces = {n: tensor_files.own_piece(t) for n, t in restore.staged.items() if n in self.index.chunks}
        shard, _, layouts = position(snapshot.take(state), world)
        here = {copy.shard: copy for copy in reversed(self.copies[self.ranks.rank])}
        any_copy = next(copy for of_rank in self.copies for copy in of_rank)
        shards = [shard] if layouts == any_copy.layouts else list(range(any_copy.shards))
        lacking = self.ranks.gather(lambda: [number for number in shards if number not in here], tuple[int, ...])
        for number in shards:
            if number in here:
                folder = Path(here[number].folder)
                index = _index((folder / INDEX).read_bytes())
                _fill(pieces, index, mapped(folder / PIECES, here[number].size))
        for number in range(any_copy.shards):
            to = [rank for rank, numbers in enumerate(lacking) if number in numbers]
            if to:
                self._pass_on(number, to, pieces, world)
        module_states = {name: read_plain(data) for name, data in self._alone()["modules"].items()}
        self.ranks.on_every_rank(lambda: load_stateful(extra_states(state.modules), module_states))
        restore.commit(self.values["content"], keep_primed)

    def _pass_on(self, number: int, to: Sequence[int], pieces: Mapping[str, tensor_files.Piece], world: World) -> None:
        """One rank that has a shard sends it to ranks that lack it."""
        holding = {rank: c for rank, of_rank in enumerate(self.copies) for c in of_rank if c.shard == number}
        source = min(holding)
        if self.ranks.rank == source:
            folder = Path(holding[source].folder)
            index = torch.frombuffer(bytearray((folder / INDEX).read_bytes()), dtype=torch.uint8)
            length = torch.tensor([len(index)]).view(torch.uint8)
            for part in (length, index, mapped(folder / PIECES, holding[source].size)):
                _send(part, to, world)
        elif self.ranks.rank in to:
            length = int(_received(8, source, world).view(torch.int64))
            index = _index(_received(length, source, world).numpy().tobytes())
            _fill(pieces, index, _received(holding[source].size, source, world))

    def _manifest(self) -> Manifest:
        """What the copies hold, as this rank sees it."""
        tensors = dict(self.index.tensors)
        if self._same_size:
            tensors |= {self._name(name): replace(tensors[name], role="rank") for name in self.values["own"]["buffers"]}
        modules, size = dict.fromkeys(self._alone()["modules"], ()), self.values["size"]
        return replace(self.index, world_size=size, tensors=tensors, stateful=modules)

    @property
    def _same_size(self) -> bool:
        return self.values["size"] == self.ranks.size

    def _restore_buffers(self, restore: Restore) -> None:
        """Buffers that differed between ranks; in a job of another size, the first rank's."""
        per_rank = self.values["own"]
        row: Tensor = per_rank["rows"][self.ranks.rank if self._same_size else 0]
        start = max(per_rank["alone"])
        for name in per_rank["buffers"]:
            staged = restore.staged[self._name(name)]
            staged.copy_(row[start : start + staged.nbytes].clone().view(staged.dtype).view(staged.shape))
            start += staged.nbytes

    def _name(self, buffer: str) -> str:
        return f"rank{self.ranks.rank}/{buffer}" if self._same_size else buffer


def copies_in(folder: Path) -> list[Copy]:
    """The whole copies that a node holds."""
    copies: list[Copy] = []
    for slot in folder.iterdir():
        if (slot / VALUES).exists():
            values = read_plain((slot / VALUES).read_bytes())
            size = (slot / PIECES).stat().st_size
            copies.append(Copy(**values["copy"], size=size, folder=str(slot)))
    return copies


def _send(data: Tensor, to: Sequence[int], world: World) -> None:
    for block in cast(list[Tensor], data.split(_BLOCK_BYTES)):
        there = block.to(world.device)
        for rank in to:
            dist.send(there, rank)


def _received(count: int, source: int, world: World) -> Tensor:
    out = torch.empty(count, dtype=torch.uint8)
    for block in cast(list[Tensor], out.split(_BLOCK_BYTES)):
        there = block.to(world.device)
        dist.recv(there, source)
        block.copy_(there)
    return out


@torch.no_grad()
def _fill(pieces: Mapping[str, tensor_files.Piece], index: Manifest, memory: Tensor) -> None:
    """Copy into `pieces` what they share with the chunks that are in `memory`."""
    for name, piece in pieces.items():
        (chunk,) = index.chunks[name]
        shared = tensor_files.overlap(chunk, piece)
        if shared is not None:
            piece.values[shared[1]].copy_(values_of(memory, chunk, piece.values.dtype)[shared[0]])
