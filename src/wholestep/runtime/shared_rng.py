"""The random generator of a step whose ranks compute on one batch together: the same state on all ranks.

Random values of replicated tensors are equal on all ranks; shards of a tensor are drawn from generators derived from
it, one for each shard (`partition.rank_ops.drawn`). Generators of user code are unchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..distributed.launch import World
from ..graph.graph import LocalGraph
from ..partition.rank_ops import drawn
from ..rules.registry import is_random
from . import random_state


@dataclass
class SharedRng:
    """States of torch's generators that only compiled steps advance, saved with checkpoints (`random_state`)."""

    states: dict[str, torch.Tensor]

    @staticmethod
    def of(world: World, per_rank: frozenset[str]) -> SharedRng:
        """The generators of this process for steps that compute together except along `per_rank` axes (collective)."""
        name = "+".join(sorted(per_rank)) or "all"
        restored = name in random_state.of_steps
        states = random_state.of_steps.setdefault(name, {})
        known = torch.tensor([restored and "cpu" in states], dtype=torch.int32, device=world.device)
        dist.all_reduce(known, dist.ReduceOp.MIN)
        if not known.item():  # a rank that the checkpoint does not know starts all of them anew
            states |= SharedRng._start(world, per_rank)
        return SharedRng(states)

    @staticmethod
    def _start(world: World, per_rank: frozenset[str]) -> dict[str, torch.Tensor]:
        """States seeded by the first rank's generator; they differ between ranks along `per_rank` axes."""
        with torch.random.fork_rng(devices=[]):
            seed = torch.randint(0, 2**62, (1,)).to(world.device)
        dist.broadcast(seed, 0)
        number = 0
        for axis in world.mesh.axes:
            if axis.name in per_rank:
                number = number * axis.size + world.coordinate[axis.name]
        value = (int(seed) + 0x9E3779B97F4A7C15 * number) % 2**63
        states = {"cpu": torch.Generator().manual_seed(value).get_state()}
        if world.device.startswith("cuda"):
            states["cuda"] = torch.Generator(world.device).manual_seed(value).get_state()
        return states

    @contextmanager
    def drawing(self) -> Generator[None]:
        """Random numbers inside come from these generators."""
        outside, outside_cuda = torch.get_rng_state(), None
        if "cuda" in self.states:
            outside_cuda = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(self.states["cuda"])
        torch.set_rng_state(self.states["cpu"])
        try:
            yield
        finally:
            self.states["cpu"] = torch.get_rng_state()
            torch.set_rng_state(outside)
            if outside_cuda is not None:
                self.states["cuda"] = torch.cuda.get_rng_state()
                torch.cuda.set_rng_state(outside_cuda)


def draws_random(local: LocalGraph) -> bool:
    """True when a program draws random numbers."""
    return any(n.op == "call_function" and (n.target is drawn or is_random(n)) for n in local.graph.nodes)
