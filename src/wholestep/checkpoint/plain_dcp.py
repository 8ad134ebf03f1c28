"""Files of torch.distributed.checkpoint (DCP) with nothing of wholestep beside them."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError


def write(folder: Path, tensors: Mapping[str, Tensor], files: int = 1, alone: bool = True) -> None:
    """Write tensors into `files` files a rank; `alone`: this process has all of them, and no other rank takes part."""
    with _dcp() as dcp:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder, thread_count=files), no_dist=alone)


def read(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read whole tensors into memory that is there."""
    with _dcp() as dcp:
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@contextmanager
def _dcp() -> Generator[Any]:
    """It is imported where it is used: that takes a tenth of a second. What failed is an exception that `except
    Exception` sees.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield dcp
        except CheckpointException as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error


@contextmanager
def on_disk(
    folder: Path, tensors: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]]
) -> Generator[dict[str, Tensor]]:
    """The values as tensors whose memory is a file in `folder`, so that all of them need not fit into memory at once.
    `tensors` gives their shapes and dtypes.
    """
    with TemporaryDirectory(dir=folder, prefix="values-") as inside:
        made: dict[str, Tensor] = {}
        for number, (name, value) in enumerate(values):
            like = tensors[name]
            if like.nbytes:
                path = str(Path(inside) / str(number))
                flat = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
                made[name] = flat.view(like.shape).copy_(value)
            else:
                made[name] = value.to(like.dtype)
        yield made
