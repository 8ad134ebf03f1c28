"""Tensors in files: each rank writes the pieces that are its own, any rank reads the parts that it needs.

A file is a row of `torch.save` archives, as torch.distributed.checkpoint (DCP) writes them. Which rank writes a piece
follows from layouts, so ranks exchange nothing before they write.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch, dtensor
from ..collectives.mesh_position import MeshPosition, place
from ..errors import CheckpointError
from ..layout import Layout, chunk_range
from .durable import ChecksummedFile
from .manifest import CheckpointTensor, Chunk, Manifest

SUFFIX, DCP_INDEX = ".distcp", ".metadata"


@dataclass(frozen=True)
class Piece:
    """Part of a tensor: where it starts in each dim, and its values."""

    offsets: tuple[int, ...]
    values: Tensor

    @staticmethod
    def full(tensor: Tensor) -> Piece:
        """All of a tensor."""
        return Piece((0,) * tensor.dim(), tensor)


@dataclass(frozen=True)
class Written:
    """A file that was written: its size in bytes, its CRC-32, and the chunks in it by tensor."""

    size: int
    crc: int
    chunks: Mapping[str, Chunk]


def pieces_to_write(
    tensors: Mapping[str, Tensor], saved: Mapping[str, CheckpointTensor], rank: int, size: int
) -> dict[str, Piece]:
    """What this rank writes, so that all ranks write each element once. Equal pieces are shared out by bytes.

    A plain tensor that trains is the same on all ranks. The first rank writes the buffers.
    """
    places: dict[object, MeshPosition] = {}
    bytes_by_copy = defaultdict[object, list[int]](list)
    out: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh not in places:
                places[tensor.device_mesh] = place(tensor.device_mesh)
            here = places[tensor.device_mesh]
            layout = dtensor.layout_from(tensor.placements, tensor.dim(), here.mesh)
            axes = tuple(axis for axis in here.mesh.axes if axis.name not in layout.axes)
            key, copies, copy_number = (tensor.device_mesh, axes), prod(axis.size for axis in axes), 0
            for axis in axes:
                copy_number = copy_number * axis.size + here.coordinate[axis.name]
            piece = Piece(_offsets(layout, tuple(tensor.shape), here), _torch.local_tensor(tensor))
        else:
            piece = Piece.full(tensor)
            role = saved[name].role
            if role == "rank" or (role == "buffer" and rank == 0):
                out[name] = piece
            if role in ("rank", "buffer"):
                continue
            key, copies, copy_number = None, size, rank
        loads = bytes_by_copy[key]
        loads.extend([0] * (copies - len(loads)))
        least = loads.index(min(loads))
        loads[least] += tensor.nbytes
        if copy_number == least and (piece.values.numel() or not tensor.numel()):
            out[name] = piece
    return out


def own_piece(tensor: Tensor) -> Piece:
    """What this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return Piece.full(tensor)
    here = place(tensor.device_mesh)
    layout = dtensor.layout_from(tensor.placements, tensor.dim(), here.mesh)
    return Piece(_offsets(layout, tuple(tensor.shape), here), _torch.local_tensor(tensor))


def _offsets(layout: Layout, shape: tuple[int, ...], here: MeshPosition) -> tuple[int, ...]:
    """Where this rank's piece starts in each dim."""
    out: list[int] = []
    for length, axes in zip(shape, layout.dims, strict=True):
        begin = 0
        for axis in axes:
            start, length = chunk_range(length, here.mesh.axis_size(axis), here.coordinate[axis])
            begin += start
        out.append(begin)
    return tuple(out)


def write(path: Path, pieces: Iterable[tuple[str, Piece]], progress: Callable[[int], None]) -> Written:
    """Write pieces, by name, to a new file, one after the other: those that are made meanwhile are not in memory
    together. `progress` is called with the bytes of each. Raises OSError.
    """
    file, chunks = ChecksummedFile(path), dict[str, Chunk]()
    with file:
        for name, piece in pieces:
            values = piece.values.detach().cpu().contiguous()
            if values.untyped_storage().nbytes() != values.nbytes:  # torch.save would write all of the storage
                values = values.clone()
            start = file.size
            try:
                torch.save(values, cast(IO[bytes], file))
            except Exception as error:
                raise file.failure or error from error
            chunks[name] = Chunk(piece.offsets, tuple(values.shape), path.name, start, file.size - start)
            progress(values.nbytes)
    return Written(file.size, file.crc, chunks)


def read(
    folder: Path, chunks: Mapping[str, Iterable[Chunk]], into: Mapping[str, Tensor], progress: Callable[[int], None]
) -> None:
    """Read into tensors of any layout what this rank holds of them. `progress` is called with the bytes of each chunk.

    Nothing in the files is run: archives are read with `weights_only`. Raises CheckpointError: one holds another value.
    """
    parts_by_file = defaultdict[str, list[tuple[Chunk, str, Piece]]](list)
    for name, tensor in into.items():
        piece = own_piece(tensor)
        for chunk in chunks[name]:
            if overlap(chunk, piece) is not None:
                parts_by_file[chunk.file].append((chunk, name, piece))
    for name, parts in sorted(parts_by_file.items()):
        with (folder / name).open("rb") as file:
            for chunk, of, piece in sorted(parts, key=lambda part: part[0].start):
                file.seek(chunk.start)
                _copy(chunk, _loaded(folder / name, of, chunk, file.read(chunk.length), piece.values.dtype), piece)
                progress(piece.values.element_size() * prod(chunk.sizes))


def read_full(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor. Raises CheckpointError: its file holds something else."""
    tensor = manifest.tensors[name].empty("cpu")
    read(folder, manifest.chunks, {name: tensor}, lambda _: None)
    return tensor


def dcp_index(manifest: Manifest) -> bytes:
    """The content of `.metadata`, by which torch alone reads the folder: it pickles what wholestep never reads."""
    chunks = {name: [tuple(vars(chunk).values()) for chunk in several] for name, several in manifest.chunks.items()}
    saved = manifest.tensors.items()
    return pickle.dumps(_torch.dcp_metadata([(n, getattr(torch, s.dtype), s.shape, chunks[n]) for n, s in saved]))


def overlap(chunk: Chunk, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The part that a chunk and a piece share, as indices of the chunk and of the piece; None where there is none."""
    theirs, ours = list[slice](), list[slice]()
    for start, length, begin, size in zip(chunk.offsets, chunk.sizes, piece.offsets, piece.values.shape, strict=True):
        low, high = max(start, begin), min(start + length, begin + size)
        if low >= high:
            return None
        theirs.append(slice(low - start, high - start))
        ours.append(slice(low - begin, high - begin))
    return tuple(theirs), tuple(ours)


def _loaded(path: Path, name: str, chunk: Chunk, data: bytes, dtype: torch.dtype) -> Tensor:
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} holds no tensor for {name!r}: {what}", "the file as it was saved") from error
    fits = isinstance(tensor, Tensor) and tuple(tensor.shape) == chunk.sizes and tensor.dtype == dtype
    if not fits or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{path} holds another value for {name!r}", f"{dtype}{list(chunk.sizes)}")
    return cast(Tensor, tensor)


@torch.no_grad()
def _copy(chunk: Chunk, values: Tensor, piece: Piece) -> None:
    shared = overlap(chunk, piece)
    assert shared is not None, "chosen because they overlap"
    piece.values[shared[1]].copy_(values[shared[0]])
