"""Copies of a step's state in the memory of its nodes. They outlive processes; a node's loss is made good by a replica.

In a folder of node-local memory each rank has two slots, written in turns: `pieces` (raw bytes), `index` (which
tensors, and where), `values.pt` (number, plain values, what each rank alone holds). A slot without `values.pt` is being
written. Before a rank overwrites the older slot, all ranks have completed the newer one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..capture.scheduled_numbers import to_save
from ..distributed.launch import World, ensure_group
from ..distributed.typed_messages import encode
from ..errors import CheckpointError, shown
from ..runtime import random_state
from ..runtime.between_steps import flush_pending
from ..runtime.failed_call import params_of, refuse_torn
from ..runtime.step import CompiledStep
from . import snapshot, stateful, tensor_files
from .checkpoint import Checkpoint
from .first_call import at_first_call
from .manifest import Chunk, Manifest
from .memory_restore import INDEX, PIECES, VALUES, Restoring, mapped, position, values_of
from .ranks import Ranks
from .snapshot import Snapshot
from .stateful import to_bytes
from .tensor_files import Piece

_ALIGNED = 64


class MemoryCopies:
    """Copies of a step's state in the memory of each node, from which a restart needs no disk.

    Each rank keeps a copy of what it holds, also of a sharded state. A process that ends leaves its copy to the process
    that follows it. What a lost node held is sent by a replica, where the state is replicated along an axis of the mesh
    (`replicate`, `hybrid`). A copy takes as long as copying the bytes, and a node holds two.

    Args:
        folder: of memory that outlives processes and belongs to the node, such as `/dev/shm/my-job`; another one for
            each job.
        every: number of calls of the step from one copy to the next.

    Example:
        >>> copies = ws.MemoryCopies("/dev/shm/my-job", every=5)
        >>> checkpoint = copies.load(step) or ws.load("checkpoints", step)
        >>> for number in range(checkpoint.number, 10):
        ...     loss = step(model, optimizer, batch)
        ...     copies.save(step)
        >>> copies.remove()

    Raises:
        CheckpointError: `every` is no number from 1, or the folder belongs to another user.
    """

    def __init__(self, folder: str | Path, *, every: int = 1) -> None:
        if every < 1:
            raise CheckpointError(f"MemoryCopies(every={every})", "a number from 1", "correct it")
        self.folder, self.every = Path(folder), every
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.folder.stat().st_uid
        except (OSError, ValueError) as error:  # also a null in the name
            raise CheckpointError(f"{shown(str(folder))} cannot be made: {error}", "a folder", "correct it") from error
        if owner != os.getuid():
            raise CheckpointError(f"{folder} belongs to another user", "a folder of your own", "choose another name")
        self._start, self._count = 0, 0
        self._slots: list[_Slot] = []
        self._failure: Exception | None = None
        self._ranks: Ranks | None = None

    def save(self, step: CompiledStep, *, extra: Mapping[str, Any] | None = None) -> None:
        """Copy the state, if the step's calls are a multiple of `every`. Called on every rank after each call.

        `extra`: tensors and plain values to keep as well (the first rank's), as a scheduler's `state_dict()`.

        Raises:
            CheckpointError: on every rank: the step was not called, or the last copy of a rank failed, for want of
                memory, say.
        """
        if step.state is None or step.world is None:
            raise CheckpointError("a copy of a step that was not called", "a step with a state", "call it first")
        if step.calls % self.every:
            return
        flush_pending()
        refuse_torn(params_of(step.state))
        now, ranks, world = snapshot.take(step.state), self._ranks or Ranks.of_job("MemoryCopies.save"), step.world
        self._ranks = ranks
        if not self._start:
            self._start = ranks.on_first_rank(self._new_start, int)
            names = [f"{self._start}-{ranks.rank}-{slot}" for slot in range(2)]
            self._slots = [_Slot(self.folder / name) for name in names]
        exchanged = _exchange(now, world, self._alone(step))  # all ranks have completed their last copy
        if exchanged is None:
            ranks.on_every_rank(self._raise_failure)
        assert exchanged is not None, "a failure was raised"
        per_rank, differing = exchanged
        if self._count == 1:
            self._remove_others()
        content = {
            "extra": dict(extra or {}), "options": now.options, "values": now.values,
            "scheduled": to_save(step.state.optimizers),
        }  # fmt: skip
        shard, shards, layouts = position(now, world)
        values = {
            "copy": {"start": self._start, "number": step.calls, "shard": shard, "shards": shards, "layouts": layouts},
            "content": content, "own": per_rank, "size": ranks.size,
        }  # fmt: skip
        pieces = {name: tensor_files.own_piece(t) for name, t in now.tensors.items() if name not in differing}
        slot = self._slots[self._count % 2]
        if self._count < 2:  # memory is taken here
            ranks.on_every_rank(lambda: slot.write(now, pieces, values))
        else:
            try:
                slot.write(now, pieces, values)
            except (OSError, CheckpointError) as error:
                self._failure = error
        self._count += 1

    def load(self, step: CompiledStep) -> Checkpoint | None:
        """Restore the newest state of which the nodes hold all shards; None, on every rank, where there is none.

        A step that was not called yet is restored at its first call. Random state, and buffers that differ between
        ranks, come back on the same number of ranks.

        Raises:
            CheckpointError: on every rank: the copies are of another model or optimizer.
        """
        flush_pending()
        ensure_group(step.options.user.device)
        restoring = Restoring.of(self.folder, Ranks.of_job("MemoryCopies.load"))
        if restoring is None:
            return None
        if step.state is not None:
            restoring.restore(step.state, step.world, keep_primed=False)
        else:
            at_first_call(step, restoring.restore_placed)
        restoring.put_random()
        step.calls = restoring.values["copy"]["number"]
        return Checkpoint(step.calls, restoring.values["content"]["extra"], self.folder)

    def _alone(self, step: CompiledStep) -> bytes | None:
        """What this rank alone has: random state, and what modules keep. None where its last copy, or this, failed."""
        assert step.state is not None
        modules: dict[str, bytes] = {}
        try:
            modules = stateful.take(stateful.extra_states(step.state.modules))
        except CheckpointError as error:
            self._failure = self._failure or error
        if self._failure is not None:
            return None
        return to_bytes("what a rank has", {"random": random_state.take(), "modules": modules})

    def _new_start(self) -> int:
        """A number for this start of the job, above those of earlier ones, also where the clock was set back."""
        return max([time.time_ns(), *(1 + int(folder.name.partition("-")[0]) for folder in self.folder.iterdir())])

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def remove(self) -> None:
        """Free the memory of this node, at the end of the job."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove_others(self) -> None:
        """Free what earlier starts of the job have left: this start has a copy on all ranks."""
        for folder in self.folder.iterdir():
            if not folder.name.startswith(f"{self._start}-"):
                shutil.rmtree(folder, ignore_errors=True)  # other ranks of the node remove it too


@dataclass
class _Slot:
    """One of a rank's two copies."""

    folder: Path
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    index: Manifest | None = None

    def write(self, now: Snapshot, pieces: Mapping[str, Piece], values: dict[str, Any]) -> None:
        """Invalidate the slot, copy, and make it valid."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / VALUES).unlink(missing_ok=True)
        index, size = _index(now, pieces)
        if size != len(self.memory):
            _take_memory(self.folder / PIECES, size)
            self.memory = mapped(self.folder / PIECES, size)
        for name, piece in pieces.items():
            (chunk,) = index.chunks[name]
            values_of(self.memory, chunk, piece.values.dtype).copy_(piece.values.detach())
        if index != self.index:
            (self.folder / INDEX).write_bytes(encode(INDEX, index))
            self.index = index
        aside = self.folder / f"{VALUES}.new"
        aside.write_bytes(to_bytes("the state", values))
        os.replace(aside, self.folder / VALUES)


def _take_memory(path: Path, size: int) -> None:
    """A file that has its memory already: writing to a map for which none is left would end the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def _index(now: Snapshot, pieces: Mapping[str, Piece]) -> tuple[Manifest, int]:
    """What a slot holds and where each piece is, and the length of all."""
    chunks, end = dict[str, tuple[Chunk, ...]](), 0
    for name, piece in pieces.items():
        chunks[name] = (Chunk(piece.offsets, tuple(piece.values.shape), "", end, piece.values.nbytes),)
        end += -(-piece.values.nbytes // _ALIGNED) * _ALIGNED
    return Manifest(0, 0, 1, "", 0.0, now.saved, now.optimizers, {}, chunks, {}), end or _ALIGNED


def _exchange(now: Snapshot, world: World, alone: bytes | None) -> tuple[dict[str, Any], list[str]] | None:
    """What each rank has `alone`, in a row of bytes for each, and the buffers that differ between ranks, which are
    named. None on every rank where one has failed.
    """
    sums = snapshot.buffer_sums(now)
    heads = _gathered(torch.tensor([-1 if alone is None else len(alone), *sums.values()]), world)
    rows: list[list[int]] = [head.tolist() for head in heads]
    lengths = [row[0] for row in rows]
    if alone is None or min(lengths) < 0:
        return None
    differing = [name for n, name in enumerate(sums, 1) if len({row[n] for row in rows}) > 1]
    padded = alone.ljust(max(lengths), b"\0")
    tensors = (now.tensors[name].detach().cpu().contiguous().reshape(-1) for name in differing)
    parts = [torch.frombuffer(bytearray(padded), dtype=torch.uint8), *(tensor.view(torch.uint8) for tensor in tensors)]
    stacked = torch.stack([row.cpu() for row in _gathered(torch.cat(parts), world)])
    return {"rows": stacked, "alone": lengths, "buffers": differing}, differing


def _gathered(tensor: Tensor, world: World) -> list[Tensor]:
    if world.devices is None:
        return [tensor]
    tensor = tensor.to(world.device)
    out = [torch.empty_like(tensor) for _ in range(world.mesh.size)]
    dist.all_gather(out, tensor)
    return out
