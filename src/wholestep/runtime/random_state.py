"""The state of every random generator that a training loop draws from, as plain tensors, and back.

A step whose ranks compute on one batch together has a generator of its own, with the same state on all ranks. Random
values of replicated tensors are equal on all ranks; shards of a tensor are drawn from generators derived from it, one
for each shard (`partition.rank_ops.drawn`). Generators of user code are unchanged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from ..distributed.launch import World
from ..errors import first_line
from ..graph.graph import LocalGraph
from ..mesh import Mesh
from ..partition.rank_ops import drawn
from ..rules.registry import is_random

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
    for name, by_kind in of_steps.items():
        states |= {f"{_STEP}{name}-{kind}": state for kind, state in by_kind.items()}
    return states


def check(states: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `put` can set every state."""
    try:
        for name, state in states.items():
            if name == "python":
                version, words, gauss = cast(tuple[int, list[int], float | None], _from_tensor(state))
                random.Random().setstate((version, tuple(words), gauss))
            elif name == "numpy":
                np.random.RandomState().set_state(tuple(_from_tensor(state)))
            elif name == "torch" or name.endswith("-cpu"):
                torch.Generator().set_state(state)
        if states and not states.keys() >= {"torch", "python", "numpy"}:
            raise ValueError(f"states of {', '.join(states)} alone")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # RecursionError is a RuntimeError
        raise ValueError(f"no state of a random generator: {first_line(error)}") from error


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


@dataclass
class SharedRng:
    """States of torch's generators that only compiled steps advance, saved with checkpoints."""

    states: dict[str, torch.Tensor]

    @staticmethod
    def of(world: World, per_rank: frozenset[str]) -> SharedRng:
        """The generators of this process for steps that compute together except along `per_rank` axes (collective)."""
        name = "+".join(sorted(per_rank)) or "all"
        restored = name in of_steps
        states = of_steps.setdefault(name, {})
        flag = torch.tensor([restored and "cpu" in states], dtype=torch.int32, device=world.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        if not flag.item():  # a rank that the checkpoint does not know starts all of them anew
            states |= SharedRng._start(world, per_rank)
        return SharedRng(states)

    @staticmethod
    def _start(world: World, per_rank: frozenset[str]) -> dict[str, torch.Tensor]:
        """States seeded by the first rank's generator; they differ between ranks along `per_rank` axes."""
        with torch.random.fork_rng(devices=[]):
            seed = torch.randint(0, 2**62, (1,)).to(world.device)
        dist.broadcast(seed, 0)
        number = Mesh(tuple(axis for axis in world.mesh.axes if axis.name in per_rank)).rank(world.coordinate)
        value = (int(seed) + 0x9E3779B97F4A7C15 * number) % 2**63
        states = {"cpu": torch.Generator().manual_seed(value).get_state()}
        if world.device.startswith("cuda"):
            states["cuda"] = torch.Generator(world.device).manual_seed(value).get_state()
        return states

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Random numbers inside come from these generators, which do not advance if it raises."""
        devices = [torch.cuda.current_device()] if "cuda" in self.states else []
        with torch.random.fork_rng(devices):
            torch.set_rng_state(self.states["cpu"])
            if devices:
                torch.cuda.set_rng_state(self.states["cuda"])
            yield  # ranks may raise at different points: then the states stay
            self.states["cpu"] = torch.get_rng_state()
            if devices:
                self.states["cuda"] = torch.cuda.get_rng_state()


@contextmanager
def kept_if_it_raises() -> Generator[None]:
    """Torch's generators are afterwards as before, if what is inside raises."""
    before, on_gpu = torch.get_rng_state(), torch.cuda.is_available() and torch.cuda.is_initialized()
    gpu = torch.cuda.get_rng_state() if on_gpu else None
    try:
        yield
    except BaseException:
        torch.set_rng_state(before)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        raise


def draws_random(local: LocalGraph) -> bool:
    """True when a program draws random numbers."""
    return any(n.op == "call_function" and (n.target is drawn or is_random(n)) for n in local.graph.nodes)
