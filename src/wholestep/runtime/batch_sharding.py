"""Batches that ranks share: each rank computes on its part of the batch that one device would be given.

At every call ranks gather the sizes of their parts, a few bytes: a rank with fewer samples would otherwise run another
program. Parts that are not sharded as layouts are (as `torch.chunk` does) are gathered and sharded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist

from ..distributed.launch import World
from ..errors import PlanError, RankMismatchError
from ..layout import Extent
from ..plan.strategies import Strategies

MOST_TENSORS = 63
BatchSizes = tuple[tuple[int, ...], ...]
"""For each sharded dim, the sizes of its parts in order."""


@dataclass(frozen=True)
class ShardedDim:
    """Dim `dim` of leaf number `leaf` of a call is shared by the ranks along `axes`."""

    leaf: int
    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class BatchSharder:
    """Makes this rank's part of a batch. Ranks at different coordinates along `own` have separate batches.

    `whole`: each rank is given the whole batch. `exchange`: parts may differ in size.
    """

    shared: tuple[ShardedDim, ...]
    names: tuple[str, ...]
    world: World
    own: tuple[str, ...]
    whole: bool
    exchange: bool

    def parts(self, cut: ShardedDim) -> int:
        """Number of parts."""
        return prod(self.world.mesh.axis_size(a) for a in cut.axes)

    def part_of(self, rank: int, cut: ShardedDim) -> int:
        """The number of the part that `rank` holds; ranks along other axes hold the same part."""
        coordinate = self.world.mesh.coordinate(rank)
        number = 0
        for axis in cut.axes:
            number = number * self.world.mesh.axis_size(axis) + coordinate[axis]
        return number

    def sizes(self, leaves: Sequence[Any]) -> BatchSizes:
        """Sizes of all parts.

        Raises:
            RankMismatchError: ranks that hold the same part were given different sizes, or another number of tensors.
        """
        own = [int(leaves[cut.leaf].shape[cut.dim]) for cut in self.shared]
        if self.whole or not self.exchange:
            return tuple((n,) * self.parts(cut) for n, cut in zip(own, self.shared, strict=True))
        vector = torch.zeros(MOST_TENSORS + 1, dtype=torch.int64)
        vector[0], vector[1 : len(own) + 1] = len(own), torch.tensor(own, dtype=torch.int64)
        found: list[dict[int, int]] = [{} for _ in self.shared]
        for rank, row in enumerate(self._from_all(vector.to(self.world.device))):
            count, *given = cast(list[int], row.tolist())
            if self._together(rank):
                parts = [self.part_of(rank, cut) for cut in self.shared]
                known = [f.setdefault(p, n) for f, p, n in zip(found, parts, given, strict=False)]
                if count != len(own) or known != given[:count]:
                    raise self._differs(rank, given[:count], known)
        return tuple(tuple(f[p] for p in range(self.parts(cut))) for f, cut in zip(found, self.shared, strict=True))

    def _differs(self, rank: int, given: list[int], known: list[int]) -> RankMismatchError:
        axes = ", ".join(dict.fromkeys(a for cut in self.shared for a in cut.axes))
        return RankMismatchError(
            f"rank {rank} was given a batch of sizes {given}, another one {known}",
            f"the same batch on ranks that differ only outside {axes}",
            f"give ranks the batch of their coordinate on {axes}",
        )

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
        """This rank's part of every cut leaf.

        Raises:
            RankMismatchError: a tensor that is cut along two dims has parts of unequal size.
        """
        out = list(leaves)
        often = Counter(cut.leaf for cut in self.shared)
        for cut, lengths in zip(self.shared, sizes, strict=True):
            total = lengths[0] if self.whole else sum(lengths)
            start, length = self._piece(total, cut)
            if self.whole:
                out[cut.leaf] = out[cut.leaf].narrow(cut.dim, start, length)
            elif list(lengths) != [self._piece(total, cut, part)[1] for part in range(self.parts(cut))]:
                if often[cut.leaf] > 1:
                    raise self._uneven(cut, lengths)
                out[cut.leaf] = self._gathered(leaves[cut.leaf], cut, lengths).narrow(cut.dim, start, length)
                out[cut.leaf] = out[cut.leaf].contiguous()
        return out

    def _uneven(self, cut: ShardedDim, lengths: Sequence[int]) -> RankMismatchError:
        return RankMismatchError(
            f"parts of {self.names[cut.leaf]!r} along {', '.join(cut.axes)} have sizes {list(lengths)}",
            "parts as torch.chunk makes them where a tensor is cut along two dims",
            "give every rank as much, or cut one dim only",
        )

    def _piece(self, total: int, cut: ShardedDim, part: int | None = None) -> tuple[int, int]:
        """Start and length of a part, this rank's by default."""
        mesh, axes = self.world.mesh, tuple((a, self.world.mesh.axis_size(a)) for a in cut.axes)
        coordinate: Mapping[str, int] = self.world.coordinate
        if part is not None:
            rank = next(r for r in range(mesh.size) if self.part_of(r, cut) == part)
            coordinate = mesh.coordinate(rank)
        return Extent(total, axes, start=True).at(coordinate), Extent(total, axes).at(coordinate)

    def _gathered(self, leaf: torch.Tensor, cut: ShardedDim, lengths: Sequence[int]) -> torch.Tensor:
        """The whole batch of one leaf. Ranks apart along other axes may have nothing to gather."""
        rows = leaf.movedim(cut.dim, 0).contiguous()
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        assert self.world.devices is not None, "batches are cut among several ranks"
        for axis in reversed(cut.axes):
            pieces = [torch.empty_like(padded) for _ in range(self.world.mesh.axis_size(axis))]
            dist.all_gather(pieces, padded, group=self.world.devices.get_group(axis))
            padded = torch.cat(pieces)
        parts = torch.split(padded, max(lengths))
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]).movedim(0, cut.dim)

    def _together(self, rank: int) -> bool:
        """True for a rank that shares its batch with this one."""
        theirs = self.world.mesh.coordinate(rank)
        return all(theirs[axis] == self.world.coordinate[axis] for axis in self.own)

    def _from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        out = [torch.empty_like(tensor) for _ in range(self.world.mesh.size)]
        dist.all_gather(out, tensor)
        return out


def batch_sharder(
    strategies: Strategies, names: Sequence[str], leaves: Sequence[Any], world: World
) -> BatchSharder | None:
    """How batches of this kind are sharded; None where each rank runs on its own batch.

    Raises:
        PlanError: the batch has more tensors than one exchange of sizes holds.
    """
    options, mesh = strategies.options, world.mesh
    shared = tuple(
        ShardedDim(i, cut.dim, cut.axes)
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        for cut in (strategies.batch_cuts(mesh, name, leaf.dim()) if isinstance(leaf, torch.Tensor) else ())
    )
    several = [a for a in options.axes(mesh) if mesh.axis_size(a) > 1]
    if not shared and (options.semantics == "per_rank" or not several):
        return None
    own = options.axes(mesh) if options.semantics == "per_rank" else ()
    whole, exchange = options.inputs == "global", options.inputs == "local" and options.uneven_batches
    if exchange and len(shared) > MOST_TENSORS:
        raise PlanError(
            f"the batch has {len(shared)} tensors that are cut",
            f"at most {MOST_TENSORS} with uneven_batches=True",
            "give equal batches and uneven_batches=False, or fewer tensors",
        )
    return BatchSharder(shared, tuple(names), world, own, whole, exchange)
