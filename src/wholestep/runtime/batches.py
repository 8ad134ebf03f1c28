"""Batches under global semantics: what each rank holds of the batch that one device would be given.

Ranks tell each other their batch sizes at every call, a few bytes: one that has fewer samples would otherwise run
another program. Parts that are not cut as layouts are (`torch.chunk`) are dealt out anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import PlanError, RankMismatchError
from ..layout import Extent
from ..plan.data_parallel import DataParallel, batch_dim
from .launch import World

MOST_TENSORS = 63
Sizes = tuple[tuple[int, ...], ...]
"""For each part of the batch, in order, the size of each of its cut tensors."""


@dataclass(frozen=True)
class Dealer:
    """Turns what a rank is given into its part of the batch. `dims[i]` is the dim of leaf i that is cut, or None."""

    dims: tuple[int | None, ...]
    names: tuple[str, ...]
    world: World
    axes: tuple[str, ...]
    whole: bool
    exchange: bool

    @property
    def cut(self) -> list[int]:
        """Numbers of the leaves that are cut."""
        return [i for i, dim in enumerate(self.dims) if dim is not None]

    @property
    def parts(self) -> int:
        """Number of parts."""
        return prod(self.world.mesh.axis_size(a) for a in self.axes)

    def part_of(self, rank: int) -> int:
        """The part that `rank` holds; ranks along other axes hold the same."""
        coordinate = self.world.mesh.coordinate(rank)
        number = 0
        for axis in self.axes:
            number = number * self.world.mesh.axis_size(axis) + coordinate[axis]
        return number

    def sizes(self, leaves: Sequence[Any]) -> Sizes:
        """Sizes of all parts.

        Raises:
            RankMismatchError: ranks that hold the same part were given different sizes, or another number of tensors.
        """
        own = tuple(leaves[i].shape[self.dims[i]] for i in self.cut)
        if self.whole or not self.exchange:
            return (own,) * self.parts
        vector = torch.zeros(MOST_TENSORS + 1, dtype=torch.int64)
        vector[0], vector[1 : len(own) + 1] = len(own), torch.tensor(own, dtype=torch.int64)
        vector = vector.to(self.world.device)
        found: dict[int, tuple[int, ...]] = {}
        for rank, row in enumerate(self._from_all(vector)):
            count, *numbers = cast(list[int], row.tolist())
            part, given = self.part_of(rank), tuple(numbers[:count])
            if count != len(own) or found.setdefault(part, given) != given:
                raise RankMismatchError(
                    f"rank {rank} was given a batch of sizes {list(given)}, another one {list(found.get(part, own))}",
                    f"the same batch on ranks that differ only outside {', '.join(self.axes)}",
                    f"give ranks the batch of their coordinate on {', '.join(self.axes)}",
                )
        return tuple(found[part] for part in range(self.parts))

    def whole_shapes(self, leaves: Sequence[Any], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole batch, by name of the leaf."""
        out: dict[str, tuple[int, ...]] = {}
        for column, i in enumerate(self.cut):
            shape, dim = list(leaves[i].shape), self.dims[i]
            assert dim is not None, "cut leaves have a dim"
            shape[dim] = sizes[0][column] if self.whole else sum(part[column] for part in sizes)
            out[self.names[i]] = tuple(shape)
        return out

    def deal(self, leaves: Sequence[Any], sizes: Sizes) -> Sequence[Any]:
        """This rank's part of every cut leaf."""
        out = list(leaves)
        for column, i in enumerate(self.cut):
            dim = self.dims[i]
            assert dim is not None, "cut leaves have a dim"
            lengths = [part[column] for part in sizes]
            total = lengths[0] if self.whole else sum(lengths)
            start, length = self._piece(total)
            if self.whole:
                out[i] = leaves[i].narrow(dim, start, length)
            elif lengths != [self._piece(total, part)[1] for part in range(self.parts)]:
                out[i] = self._gathered(leaves[i], dim, lengths).narrow(dim, start, length).contiguous()
        return out

    def _piece(self, total: int, part: int | None = None) -> tuple[int, int]:
        """Start and length of a part, this rank's by default."""
        mesh, cut = self.world.mesh, tuple((a, self.world.mesh.axis_size(a)) for a in self.axes)
        coordinate: Mapping[str, int] = self.world.coordinate
        if part is not None:
            rank = next(r for r in range(mesh.size) if self.part_of(r) == part)
            coordinate = mesh.coordinate(rank)
        return Extent(total, cut, start=True).at(coordinate), Extent(total, cut).at(coordinate)

    def _gathered(self, leaf: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The whole batch of one leaf."""
        rows = leaf.movedim(dim, 0).contiguous()
        padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        pieces = self._from_all(padded)
        first = {self.part_of(r): r for r in reversed(range(self.world.mesh.size))}
        return torch.cat([pieces[first[p]][:n] for p, n in enumerate(lengths)]).movedim(0, dim)

    def _from_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        out = [torch.empty_like(tensor) for _ in range(self.world.mesh.size)]
        dist.all_gather(out, tensor)
        return out


def dealer(options: DataParallel, names: Sequence[str], leaves: Sequence[Any], world: World) -> Dealer | None:
    """How batches of this kind are dealt; None where each rank runs on what it is given.

    Raises:
        PlanError: the batch has more tensors than ranks tell each other about.
    """
    axes = tuple(a for a in options.axes(world.mesh) if world.mesh.axis_size(a) > 1)
    if options.semantics != "global" or not axes:
        return None
    dims = tuple(
        batch_dim(options.input_batch_dim, name, leaf.dim()) if isinstance(leaf, torch.Tensor) else None
        for name, leaf in zip(names, leaves, strict=True)
    )
    made = Dealer(
        dims, tuple(names), world, axes, options.inputs == "global",
        options.inputs == "local" and options.uneven_batches,
    )  # fmt: skip
    if made.exchange and len(made.cut) > MOST_TENSORS:
        raise PlanError(
            f"the batch has {len(made.cut)} tensors that are cut",
            f"at most {MOST_TENSORS} with uneven_batches=True",
            "give equal batches and uneven_batches=False, or fewer tensors",
        )
    return made
