"""One save, once its values are at hand: claim a folder, write this rank's files, publish.

A folder is a checkpoint when it has a manifest, which is written last. Until then nobody reads it.
"""

from __future__ import annotations

import sys
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..capture.scheduled_numbers import to_save
from ..capture.state import StepState
from ..errors import CheckpointError
from ..runtime.failed_call import params_of, refuse_torn
from . import durable, lease, manifest, snapshot, stateful, tensor_files
from .lease import Lease
from .manifest import VALUES, CheckpointTensor, Chunk, Manifest
from .ranks import Ranks
from .stateful import Stateful, to_bytes
from .tensor_files import Piece

CLAIM = "writer.json"
_REPORT_S = 10.0
_ABANDONED_S = 86_400.0  # what an unknown process wrote is removed after a day without a change


@dataclass(frozen=True)
class Part:
    """What a rank wrote: sizes and checksums of its files, the tensors that it alone knows of (all of them on the first
    rank), the chunks of tensors, and the objects whose state differs from the first rank's.
    """

    files: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, CheckpointTensor]
    chunks: Mapping[str, Chunk]
    differing: Sequence[str]


@dataclass(frozen=True)
class Save:
    """What one rank has to write. `contents` are files of plain values by name. `description` lacks what all ranks find
    out together: tensors, files, chunks, time.
    """

    root: Path
    ranks: Ranks
    description: Manifest
    tensors: Mapping[str, CheckpointTensor]
    pieces: Mapping[str, Piece]
    contents: Mapping[str, bytes]
    differing: Sequence[str]
    keep: int

    def run(self) -> Path:
        """Write and publish. Every rank calls it; the folder is named on all. Raises CheckpointError on all."""
        token, name = self.ranks.on_first_rank(self._claim, tuple[str, str])
        folder = manifest.folder_in(self.root, name)
        try:
            parts = self.ranks.gather_on_first(lambda: self._write(folder), Part)
            self.ranks.first_does(lambda: self._publish(token, folder, parts))
            return folder
        except CheckpointError:
            if self.ranks.rank == 0:
                _remove_quietly(folder)
            raise

    def _claim(self) -> tuple[str, str]:
        """The owner, and the name of a new folder that no other process writes to."""
        root = self.root
        with durable.explained(root):
            durable.make_folder(root)
            acquired = lease.acquire(root)
            _remove_unfinished(root, acquired)
            for name in manifest.names_for(self.description.number):
                folder = root / name
                if (folder / manifest.NAME).exists():
                    continue
                try:
                    durable.make_folder(folder)
                    if durable.create(folder / CLAIM, acquired.owner.to_json()):
                        return acquired.owner.token, name
                except OSError:
                    _remove_quietly(folder)
                    raise
        raise AssertionError("names do not end")

    def _write(self, folder: Path) -> Part:
        rank, files = self.ranks.rank, dict[str, tuple[int, int]]()
        total = sum(piece.values.nbytes for piece in self.pieces.values())
        progress = Progress(f"checkpoint {folder.name}: {{}} written by rank 0", total, quiet=rank != 0)
        with durable.explained(folder):
            for name, data in self.contents.items():
                files[name] = durable.write(folder / name, data)
            name = f"__{rank}_0{tensor_files.SUFFIX}"
            written = tensor_files.write(folder / name, self.pieces.items(), progress)
            durable.sync(folder)
        tensors = {n: saved for n, saved in self.tensors.items() if rank == 0 or saved.role == "rank"}
        return Part({**files, name: (written.size, written.crc)}, tensors, written.chunks, self.differing)

    def _publish(self, token: str, folder: Path, parts: list[Part]) -> None:
        acquired = lease.held(self.root, token)
        files = {name: size_crc for part in parts for name, size_crc in part.files.items()}
        tensors = {name: saved for part in parts for name, saved in part.tensors.items()}
        chunks = {name: tuple(part.chunks[name] for part in parts if name in part.chunks) for name in tensors}
        differing = {
            name: tuple(rank for rank, part in enumerate(parts) if name in part.differing)
            for name in self.description.stateful
        }
        older = manifest.checkpoints(self.root)
        last = max((manifest.read(path).saved_at for path in older[:1] if manifest.is_readable(path)), default=0.0)
        now = max(time.time(), last + 1e-3)  # also where this host's clock is behind
        about = replace(self.description, saved_at=now, tensors=tensors, chunks=chunks, stateful=differing)
        with durable.explained(folder):
            index = durable.write(folder / tensor_files.DCP_INDEX, tensor_files.dcp_index(about))
            complete = replace(about, files={**files, tensor_files.DCP_INDEX: index})
            acquired.check()
            durable.replace(folder / manifest.NAME, complete.to_json().encode())
            durable.sync(self.root)
        try:  # it is published
            durable.replace(self.root / manifest.LATEST, f"{folder.name}\n".encode())
            for old in older[self.keep - 1 :]:
                durable.remove(old, manifest.NAME, CLAIM)
        except OSError as error:
            warnings.warn(f"{folder} is saved, but older checkpoints could not be removed: {error}", stacklevel=2)


def to_write(
    root: Path, state: StepState, described: Manifest, extra: dict[str, Any], objects: Mapping[str, Stateful], keep: int
) -> Save:
    """What this rank writes: its part of the state, which is referred to and not copied (collective)."""
    now, objects = snapshot.take(state), {**objects, **stateful.extra_states(state.modules)}
    ranks = Ranks.of_job("save", root, snapshot.fingerprint(now))
    ranks.on_every_rank(lambda: refuse_torn(params_of(state)))

    def prepare() -> tuple[dict[str, bytes], dict[str, bytes], dict[str, int]]:
        scheduled = to_save(state.optimizers)
        parts = {
            "extra": ("extra", extra), "options": ("a parameter group", now.options),
            "values": ("optimizer state", now.values), "scheduled": ("a schedule", scheduled),
        }  # fmt: skip
        for what, value in parts.values():
            to_bytes(what, value)
        values = to_bytes("the state", {name: value for name, (_, value) in parts.items()}) if ranks.rank == 0 else b""
        return {VALUES: values} if values else {}, stateful.take(objects), snapshot.buffer_sums(now)

    contents, states, buffers = ranks.on_every_rank(prepare)
    sums = {name: zlib.crc32(data) for name, data in states.items()}
    first_buffers, first = ranks.on_first_rank(lambda: (buffers, sums), tuple[Mapping[str, int], Mapping[str, int]])

    def check() -> None:
        if first.keys() != sums.keys():
            problem = f"stateful={{...}} with {sorted(sums)} on rank {ranks.rank}, {sorted(first)} on rank 0"
            raise CheckpointError(problem, "the same names on every rank", "pass the same objects on every rank")

    ranks.on_every_rank(check)
    snapshot.add_own(now, ranks.rank, buffers, first_buffers)
    described = replace(described, world_size=ranks.size, optimizers=now.optimizers, stateful=dict.fromkeys(first, ()))
    differing = [name for name in sums if sums[name] != first[name]]
    for name in sums if ranks.rank == 0 else differing:
        contents[described.file_of(name, ranks.rank)] = states[name]
    pieces = tensor_files.pieces_to_write(now.tensors, now.saved, ranks.rank, ranks.size)
    return Save(root, ranks, described, now.saved, pieces, contents, differing, keep)


def _remove_unfinished(root: Path, acquired: Lease) -> None:
    """Remove folders without a manifest whose process is this one or has ended, or that did not change for a day."""
    for folder in manifest.folders(root):
        if (folder / manifest.NAME).exists():
            continue
        owner = lease.owner_of(folder / CLAIM)
        newest = max((path.stat().st_mtime for path in durable.entries(folder)), default=0.0)
        ours = owner is not None and (owner.token == acquired.owner.token or owner.is_this_process or owner.is_dead)
        if ours or time.time() - newest > _ABANDONED_S:
            durable.remove(folder, manifest.NAME, CLAIM)


def _remove_quietly(folder: Path) -> None:
    try:
        durable.remove(folder, manifest.NAME, CLAIM)
    except OSError as error:
        print(f"{folder} is left unfinished: {error}", file=sys.stderr)


class Progress:
    """Reports long work on standard error: `text` with the bytes so far, every ten seconds."""

    def __init__(self, text: str, total: int, quiet: bool) -> None:
        self._text, self._total, self._quiet = text, total, quiet
        self._done, self._start = 0, time.monotonic()
        self._reported = self._start

    def __call__(self, size: int) -> None:
        """Count `size` bytes as done."""
        self._done += size
        now = time.monotonic()
        if not self._quiet and now - self._reported > _REPORT_S:
            self._reported = now
            so_far = f"{self._done / 2**30:.1f} of {self._total / 2**30:.1f} GiB"
            print(f"{self._text.format(so_far)} ({now - self._start:.0f} s)", file=sys.stderr)
