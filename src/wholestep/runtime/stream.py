"""Random numbers of a step whose ranks compute one thing together: a stream of its own, the same on all ranks.

Random values of whole tensors are then alike everywhere; pieces of a cut tensor are drawn from streams derived from it,
one for each piece (`partition.pieces.drawn`). The generators that the user's code draws from are left as they are.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..graph.graph import LocalGraph
from ..partition.pieces import drawn
from ..rules.registry import is_random
from .launch import World


@dataclass
class Stream:
    """States of torch's generators that the step alone advances."""

    states: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @staticmethod
    def start(world: World, per_rank: frozenset[str]) -> Stream:
        """A stream from the first rank's generator; ranks that differ along `per_rank` axes have different ones."""
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
        return Stream(states)

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


def draws(local: LocalGraph) -> bool:
    """True when a program draws random numbers."""
    return any(n.op == "call_function" and (n.target is drawn or is_random(n)) for n in local.graph.nodes)
