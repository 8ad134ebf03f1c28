"""The tensors of a checkpoint folder, whole and one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..tuning import TUNING
from . import plain_dcp
from .manifest import CheckpointTensor, Manifest


def described(saved: Mapping[str, CheckpointTensor]) -> dict[str, Tensor]:
    """Tensors on `meta` with shapes and dtypes of a manifest. Raises CheckpointError: no tensor has them."""
    out: dict[str, Tensor] = {}
    for name, one in saved.items():
        dtype = getattr(torch, one.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name} has dtype {one.dtype!r}", "a dtype of torch", "")
        try:
            out[name] = torch.empty(one.shape, dtype=dtype, device="meta")
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{name} has shape {list(one.shape)}", "the sizes of a tensor", "") from error
    return out


def read(folder: Path, found: Manifest, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors with their names, a few at a time in memory. Raises CheckpointError: they are not there."""
    wanted = described({name: found.tensors[name] for name in names})
    there, needed = sum(size for size, _ in found.files.values()), sum(one.nbytes for one in wanted.values())
    if needed > there:
        text = f"checkpoint {folder} names tensors of {needed} bytes, and its files have {there}"
        raise CheckpointError(text, "a folder written by wholestep.save", "")
    few: dict[str, Tensor] = {}
    for name, one in wanted.items():
        few[name] = one
        if sum(given.nbytes for given in few.values()) >= TUNING.gathered_piece_bytes:
            yield from _read(folder, few).items()
            few = {}
    yield from _read(folder, few).items()


def _read(folder: Path, few: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {name: torch.empty_like(one, device="cpu") for name, one in few.items()}
    if made:
        plain_dcp.read(folder, made)
    return made
