"""Tensors in files of torch.distributed.checkpoint. Imported when there is something to save or to load: it takes a
tenth of a second and 10 MB.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ..errors import CheckpointError


def write(folder: Path, tensors: dict[str, torch.Tensor], alone: bool) -> None:
    """Every rank writes what it holds; `alone`: there are no others.

    Raises:
        CheckpointError: some rank failed.
    """
    with _quiet():
        state_dict_saver.save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=alone)


def read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Every rank reads what it holds into `tensors`; no communication.

    Raises:
        CheckpointError: what is there cannot be read.
    """
    with _quiet():
        state_dict_loader.load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=True)


@contextmanager
def _quiet() -> Generator[None]:
    """Without the warning that there are no other ranks; what failed is an exception that `except Exception` sees."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error
