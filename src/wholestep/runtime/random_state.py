"""The state of every random generator that a training loop draws from, as plain tensors, and back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

of_steps: dict[str, dict[str, torch.Tensor]] = {}
"""States of `SharedRng`, by its name and the kind of device."""
_STEP = "step-"


def take() -> dict[str, torch.Tensor]:
    """State of torch's generators (CPU and this rank's GPU), of Python's, of numpy's and of steps' own, by name."""
    kind, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states = {
        "torch": torch.get_rng_state(),
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, keys.tolist(), *rest]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, found in of_steps.items():
        states |= {f"{_STEP}{name}-{kind}": state for kind, state in found.items()}
    return states


def put(states: Mapping[str, torch.Tensor]) -> None:
    """Set every generator that `states` holds; the others stay."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = cast(tuple[int, list[int], float | None], _from_tensor(states["python"]))
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(_from_tensor(states["numpy"])))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    for full, state in states.items():
        if full.startswith(_STEP):
            name, _, kind = full.removeprefix(_STEP).rpartition("-")
            of_steps.setdefault(name, {})[kind] = state.clone()


def _as_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(value: torch.Tensor) -> Any:
    return json.loads(bytes(cast(list[int], value.tolist())))
