"""The tensors of a checkpoint folder, whole and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import tensor_files
from .manifest import CheckpointTensor, Manifest
from .tensor_files import Piece


def described(saved: CheckpointTensor) -> Tensor:
    """A tensor on `meta` with its shape and dtype."""
    return torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device="meta")


def read(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """A whole tensor. Raises CheckpointError: its file holds something else."""
    tensor: Tensor = torch.empty_like(described(manifest.tensors[name]), device="cpu")
    tensor_files.read(folder, manifest.chunks, {name: tensor}, lambda _: None)
    return tensor


@dataclass(frozen=True)
class PiecesRead(Mapping[str, Piece]):
    """Whole tensors as pieces to write. Each is read when it is written, so that one is in memory at a time."""

    names: Sequence[str]
    value: Callable[[str], Tensor]

    def __getitem__(self, name: str) -> Piece:
        value = self.value(name)
        return Piece((0,) * value.dim(), value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
