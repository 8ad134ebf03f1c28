"""The index of a checkpoint in the form of torch.distributed.checkpoint, so that torch alone reads the folder.

torch pickles it. wholestep writes it and never reads it: all that a load needs is in the manifest.
"""

from __future__ import annotations

import pickle

import torch

from .. import _torch
from .manifest import Manifest

NAME = ".metadata"


def to_bytes(manifest: Manifest) -> bytes:
    """The content of `.metadata`."""
    tensors: list[_torch.StoredTensor] = [
        (
            name,
            getattr(torch, saved.dtype),
            saved.shape,
            [tuple(vars(chunk).values()) for chunk in manifest.chunks[name]],
        )
        for name, saved in manifest.tensors.items()
    ]
    return pickle.dumps(_torch.dcp_metadata(tensors))
