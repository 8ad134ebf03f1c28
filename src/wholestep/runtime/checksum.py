"""Checksums of tensors, computed where they are: the same for the same bits, another one for any one bit changed."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 tensor on the device of `tensor`: the sum of its bits as integers, modulo 2**64."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    if flat.dtype is torch.bool or flat.dtype.itemsize not in _INTEGERS:
        flat = flat.to(torch.uint8)
    return flat.view(_INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64)
