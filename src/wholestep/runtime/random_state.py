"""Takes and puts back the state of every random generator that a training loop draws from, as plain tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch


def take() -> dict[str, torch.Tensor]:
    """State of torch's generators (CPU and this rank's GPU), of Python's and of numpy's, by name."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states = {
        "torch": torch.get_rng_state(),
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, keys.tolist(), *rest]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put(states: Mapping[str, torch.Tensor]) -> None:
    """Set every generator that `states` holds; the others stay."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = cast(tuple[int, list[int], float | None], _from_tensor(states["python"]))
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(_from_tensor(states["numpy"])))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(value: torch.Tensor) -> Any:
    return json.loads(bytes(cast(list[int], value.tolist())))
