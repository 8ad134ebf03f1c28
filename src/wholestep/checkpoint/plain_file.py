"""Reads a file of torch.save that anybody may have written: runs no code, takes no more memory than the file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError


def load(path: Path) -> Any:
    """Tensors and plain values. Raises CheckpointError: the file holds something else, or it is packed."""
    needed = "tensors and plain values, as wholestep.save writes them"
    if not path.is_file():
        raise CheckpointError(f"{path} is no plain file", needed)
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        unpacked = sum(part.file_size for part in parts)
        if unpacked > path.stat().st_size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise CheckpointError(f"{path} is packed: it would be {unpacked} bytes", needed)
        return torch.load(path, weights_only=True, map_location="cpu")
    except CheckpointError:
        raise
    except Exception as error:  # of zipfile, pickle and torch; any that what is in the file leads to
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}", needed) from error
