"""The inputs of a call, and batches that ranks share: each computes on its part of the batch that one device would get.

At every call ranks gather the sizes of their parts, a few bytes: a rank with fewer samples would otherwise run another
program. Parts that are not sharded as layouts are (as `torch.chunk` does) are gathered and sharded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from ..capture.call_structure import Structure
from ..capture.state import StepState
from ..distributed.launch import World
from ..errors import PlanError, RankMismatchError
from ..layout import Extent
from ..mesh import Axis, Mesh
from ..plan.strategies import Strategies

MOST_TENSORS = 63
BatchSizes = tuple[tuple[int, ...], ...]
"""For each sharded dim, the sizes of its parts in order."""


@dataclass(frozen=True)
class ShardedDim:
    """Dim `dim` of leaf number `leaf` of a call is shared by the ranks of the mesh `parts`: a rank of it has a part."""

    leaf: int
    dim: int
    parts: Mesh


@dataclass(frozen=True)
class BatchSharder:
    """Makes this rank's part of a batch. Ranks at different coordinates along `own` have separate batches. `whole`:
    each rank is given the whole batch. `exchange`: parts may differ in size.
    """

    shared: tuple[ShardedDim, ...]
    names: tuple[str, ...]
    world: World
    own: tuple[str, ...]
    whole: bool
    exchange: bool

    def sizes(self, leaves: Sequence[Any]) -> BatchSizes:
        """Sizes of all parts. Raises RankMismatchError: ranks with the same part were given different sizes."""
        own = [int(leaves[cut.leaf].shape[cut.dim]) for cut in self.shared]
        if self.whole or not self.exchange:
            return tuple((n,) * cut.parts.size for n, cut in zip(own, self.shared, strict=True))
        vector = torch.zeros(MOST_TENSORS + 1, dtype=torch.int64)
        vector[0], vector[1 : len(own) + 1] = len(own), torch.tensor(own, dtype=torch.int64)
        found: list[dict[int, int]] = [{} for _ in self.shared]
        vector = vector.to(self.world.device)
        rows = [torch.empty_like(vector) for _ in range(self.world.mesh.size)]
        dist.all_gather(rows, vector)
        for rank, row in enumerate(rows):
            count, *given = cast(list[int], row.tolist())
            theirs = self.world.mesh.coordinate(rank)
            if all(theirs[axis] == self.world.coordinate[axis] for axis in self.own):  # they share their batch
                parts = [cut.parts.rank(theirs) for cut in self.shared]
                known = [f.setdefault(p, n) for f, p, n in zip(found, parts, given, strict=False)]
                if count != len(own) or known != given[:count]:
                    axes = ", ".join(dict.fromkeys(axis for cut in self.shared for axis in cut.parts.names))
                    text = f"rank {rank} was given a batch of sizes {given[:count]}, another one {known}"
                    needed = f"the same batch on ranks that differ only outside {axes}"
                    raise RankMismatchError(text, needed, f"give ranks the batch of their coordinate on {axes}")
        return tuple(tuple(f[p] for p in range(cut.parts.size)) for f, cut in zip(found, self.shared, strict=True))

    def global_shapes(self, leaves: Sequence[Any], sizes: BatchSizes) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole batch, by name of the leaf."""
        out: dict[str, tuple[int, ...]] = {}
        for cut, lengths in zip(self.shared, sizes, strict=True):
            name = self.names[cut.leaf]
            shape: list[int] = list(out.get(name, tuple(leaves[cut.leaf].shape)))
            shape[cut.dim] = lengths[0] if self.whole else sum(lengths)
            out[name] = tuple(shape)
        return out

    def shard(self, leaves: Sequence[Any], sizes: BatchSizes) -> Sequence[Any]:
        """This rank's part of every cut leaf. Raises RankMismatchError: unequal parts of one cut along two dims."""
        out = list(leaves)
        often = Counter(cut.leaf for cut in self.shared)
        for cut, lengths in zip(self.shared, sizes, strict=True):
            total = lengths[0] if self.whole else sum(lengths)
            start, length = self._piece(total, cut)
            if self.whole:
                out[cut.leaf] = out[cut.leaf].narrow(cut.dim, start, length)
            elif list(lengths) != [self._piece(total, cut, part)[1] for part in range(cut.parts.size)]:
                if often[cut.leaf] > 1:
                    name, axes = self.names[cut.leaf], ", ".join(cut.parts.names)
                    found = f"parts of {name!r} along {axes} have sizes {list(lengths)}"
                    needed = "parts as torch.chunk makes them where a tensor is cut along two dims"
                    raise RankMismatchError(found, needed, "give every rank as much, or cut one dim only")
                out[cut.leaf] = self._gathered(leaves[cut.leaf], cut, lengths).narrow(cut.dim, start, length)
                out[cut.leaf] = out[cut.leaf].contiguous()
        return out

    def _piece(self, total: int, cut: ShardedDim, part: int | None = None) -> tuple[int, int]:
        """Start and length of a part, this rank's by default."""
        axes = tuple((axis.name, axis.size) for axis in cut.parts.axes)
        coordinate = self.world.coordinate if part is None else cut.parts.coordinate(part)
        return Extent(total, axes, start=True).at(coordinate), Extent(total, axes).at(coordinate)

    def _gathered(self, leaf: torch.Tensor, cut: ShardedDim, lengths: Sequence[int]) -> torch.Tensor:
        """The whole batch of one leaf. Ranks apart along other axes may have nothing to gather."""
        rows = leaf.movedim(cut.dim, 0).contiguous()
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        assert self.world.devices is not None, "batches are cut among several ranks"
        for axis in reversed(cut.parts.axes):
            pieces = [torch.empty_like(padded) for _ in range(axis.size)]
            dist.all_gather(pieces, padded, group=self.world.devices.get_group(axis.name))
            padded = torch.cat(pieces)
        parts = torch.split(padded, max(lengths))
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]).movedim(0, cut.dim)


def batch_sharder(
    strategies: Strategies, names: Sequence[str], leaves: Sequence[Any], world: World
) -> BatchSharder | None:
    """How batches of this kind are sharded; None where each rank runs on its own batch."""
    options, mesh = strategies.options, world.mesh
    shared = tuple(
        ShardedDim(i, cut.dim, Mesh(tuple(Axis(axis, mesh.axis_size(axis)) for axis in cut.axes)))
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        for cut in (strategies.batch_cuts(mesh, name, leaf.dim()) if isinstance(leaf, torch.Tensor) else ())
    )
    several = [a for a in options.axes(mesh) if mesh.axis_size(a) > 1]
    if not shared and (options.semantics == "per_rank" or not several):
        return None
    own = options.axes(mesh) if options.semantics == "per_rank" else ()
    whole, exchange = options.inputs == "global", options.inputs == "local" and options.uneven_batches
    if exchange and len(shared) > MOST_TENSORS:
        found = f"the batch has {len(shared)} tensors that are cut"
        needed = f"at most {MOST_TENSORS} with uneven_batches=True"
        raise PlanError(found, needed, "give equal batches and uneven_batches=False, or fewer tensors")
    return BatchSharder(shared, tuple(names), world, own, whole, exchange)


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a call as leaves with names, and the modules and optimizers that the step uses.

    `sharder` makes this rank's part of a batch that ranks share; `sizes` are those of the parts on all ranks, and
    `whole` the shapes of the batch tensors that leaves are parts of, by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    structure: Structure
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    state: StepState
    sharder: BatchSharder | None
    sizes: BatchSizes | None
    whole: Mapping[str, tuple[int, ...]]
