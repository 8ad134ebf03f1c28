"""Random numbers of a step whose ranks compute one thing together: a stream of its own, the same on all ranks.

Random values of whole tensors are then alike everywhere; pieces of a cut tensor are drawn from streams derived from it,
one for each piece (`partition.rank_ops.drawn`). The generators that the user's code draws from are left as they are.
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
    """States of torch's generators that steps alone advance, kept with checkpoints (`random_state`)."""

    states: dict[str, torch.Tensor]

    @staticmethod
    def of(world: World, per_rank: frozenset[str]) -> SharedRng:
        """The stream of this process for steps that compute together but along `per_rank` axes (collective)."""
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
        """States from the first rank's generator; ranks that differ along `per_rank` axes have different ones."""
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
        """Draws inside come from this stream."""
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
