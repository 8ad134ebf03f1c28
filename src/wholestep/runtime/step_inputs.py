"""The inputs of a call, and batches that ranks share: each computes on its part of the batch that one device would get.

Ranks tell each other the sizes of their parts: a rank with fewer samples would otherwise run another program. Sizes
that they have exchanged have a number, and a call exchanges that alone. A rank gives its own as the call begins, and
takes those of the others once it has done what does not depend on them. Parts that are not sharded as layouts are (as
`torch.chunk` does) are gathered and sharded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..capture.call_structure import Structure
from ..capture.state import StepState
from ..distributed.host_exchange import HostExchange
from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..errors import PlanError, RankMismatchError
from ..layout import Extent
from ..mesh import Axis, Mesh
from ..plan.strategies import Strategies
from ..plan.strategy import BatchCut

MOST_TENSORS = 63
MOST_LENGTH = (1 << 20) - 1
_SIZES = (1 << 40) - 1  # numbers that ranks exchange
_MOST_KNOWN, _MOST_EXCHANGES = 1024, 1 << 19  # numbers of what is known differ, and a `Lockstep` can hold them
BatchSizes = tuple[tuple[int, ...], ...]
"""For each sharded dim, the sizes of its parts in order."""


@dataclass(frozen=True)
class ShardedDim:
    """Dim `dim` of leaf number `leaf` of a call is shared by the ranks of the mesh `parts`: a rank of it has a part.
    `given_whole`: each is given all of it, and takes its part.
    """

    leaf: int
    dim: int
    parts: Mesh
    given_whole: bool


@dataclass
class KnownSizes:
    """The sizes that the ranks of a step have exchanged. An exchange has the same number on all ranks; they forget the
    oldest alike. `newest` is the last exchange in which this rank gave certain sizes.
    """

    exchange: HostExchange
    exchanges: int = 0
    newest: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    sizes: dict[int, tuple[Hashable, BatchSizes]] = field(default_factory=dict[int, tuple[Hashable, BatchSizes]])

    @staticmethod
    def of(ranks: Rendezvous) -> KnownSizes:
        """None are known yet (collective)."""
        return KnownSizes(HostExchange.of(ranks, MOST_TENSORS + 1))

    def give(self, key: Hashable, row: Sequence[int]) -> None:
        """Tell the others the sizes of this rank's batch, as a `row` (collective)."""
        self.exchange.give(self.newest.get(key, 0), row)

    def agreed(self) -> BatchSizes | None:
        """The sizes on all ranks, which have given theirs; None where these are new."""
        least, greatest = self.exchange.extremes()
        return self.sizes[least][1] if 0 < least == greatest else None

    def next_number(self) -> int:
        """Of the exchange that begins. Forgets an old one."""
        self.exchanges = self.exchanges % _MOST_EXCHANGES + 1
        if len(self.sizes) == _MOST_KNOWN:
            number, (key, _) = next(iter(self.sizes.items()))
            del self.sizes[number]
            if self.newest[key] == number:
                del self.newest[key]
        return self.exchanges

    def note(self, number: int, key: Hashable, sizes: BatchSizes) -> None:
        """What ranks have exchanged."""
        self.newest[key], self.sizes[number] = number, (key, sizes)


@dataclass(frozen=True)
class BatchSharder:
    """Makes this rank's part of a batch. Ranks at different coordinates along `own_axes` have separate batches.
    `known_sizes`: parts may differ in size. `tensors`: those leaves.
    """

    shared: tuple[ShardedDim, ...]
    names: tuple[str, ...]
    world: World
    own_axes: tuple[str, ...]
    known_sizes: KnownSizes | None
    tensors: tuple[int, ...] = ()

    def give(self, leaves: Sequence[Any]) -> GivenSizes:
        """Tell the others the sizes of this rank's part (collective where parts may differ)."""
        local_sizes = tuple(int(leaves[cut.leaf].shape[cut.dim]) for cut in self.shared)
        if self.known_sizes is None:
            equal = tuple((n,) * cut.parts.size for n, cut in zip(local_sizes, self.shared, strict=True))
            return GivenSizes(self, leaves, local_sizes, (), equal)
        rest = self._rest(leaves)
        self.known_sizes.give((self.shared, local_sizes, rest), (*local_sizes, hash(rest) & _SIZES))
        return GivenSizes(self, leaves, local_sizes, rest)

    def taken(self, leaves: Sequence[Any], local_sizes: tuple[int, ...], rest: Hashable) -> BatchSizes:
        """Sizes of all parts, where ranks have given theirs. Raises RankMismatchError: ranks with the same part were
        given different sizes, or ranks that share a batch parts that differ in other dims.
        """
        assert self.known_sizes is not None, "parts may differ"
        sizes = self.known_sizes.agreed()
        if sizes is None:
            number = self.known_sizes.next_number()
            rows = self.known_sizes.exchange.rows()
            self._check_rest(rows, leaves)
            sizes = self._found([row[:-1] for row in rows], local_sizes)
            self.known_sizes.note(number, (self.shared, local_sizes, rest), sizes)
        return sizes

    def greatest(self, length: int) -> int:
        """The greatest of the lengths that ranks give (collective where parts may differ)."""
        if self.known_sizes is None:
            return length
        self.known_sizes.exchange.give(min(length, MOST_LENGTH))
        return self.known_sizes.exchange.extremes()[1]

    def _rest(self, leaves: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        """The sizes of the dims that are not cut."""
        cut = {(sharded.leaf, sharded.dim) for sharded in self.shared}
        return tuple(
            tuple(size for dim, size in enumerate(leaves[i].shape) if (i, dim) not in cut) for i in self.tensors
        )

    def _shares(self, rank: int) -> bool:
        """True for a rank that shares its batch with this one."""
        theirs = self.world.mesh.coordinate(rank)
        return all(theirs[axis] == self.world.coordinate[axis] for axis in self.own_axes)

    def _check_rest(self, rows: Sequence[Sequence[int]], leaves: Sequence[Any]) -> None:
        here = rows[self.world.rank][-1]
        other = next((rank for rank, row in enumerate(rows) if self._shares(rank) and row[-1] != here), None)
        if other is not None:
            shapes = ", ".join(f"{self.names[i]} of {list(leaves[i].shape)}" for i in self.tensors)
            dims = ", ".join(f"dim {cut.dim} of {self.names[cut.leaf]}" for cut in self.shared) or "none"
            text = f"rank {other} was given a batch of other sizes than rank {self.world.rank}, with {shapes}"
            needed = f"one batch of which ranks have parts: they differ in the dims that ranks share alone ({dims})"
            raise RankMismatchError(text, needed, "pad the batch of each rank to one length (compile(pad_to=...) does)")

    def _found(self, rows: Sequence[Sequence[int]], local_sizes: tuple[int, ...]) -> BatchSizes:
        """Sizes of all parts, from what each rank was given."""
        by_part: list[dict[int, int]] = [{} for _ in self.shared]
        for rank, row in enumerate(rows):
            theirs = self.world.mesh.coordinate(rank)
            if self._shares(rank):
                parts = [cut.parts.rank(theirs) for cut in self.shared]
                agreed = [f.setdefault(p, n) for f, p, n in zip(by_part, parts, row, strict=False)]
                if len(row) != len(local_sizes) or agreed != row:
                    axes = ", ".join(dict.fromkeys(axis for cut in self.shared for axis in cut.parts.names))
                    text = f"rank {rank} was given a batch of sizes {row}, another one {agreed}"
                    needed = f"the same batch on ranks that differ only outside {axes}"
                    raise RankMismatchError(text, needed, f"give ranks the batch of their coordinate on {axes}")
        return tuple(tuple(f[p] for p in range(cut.parts.size)) for f, cut in zip(by_part, self.shared, strict=True))

    def global_shapes(self, leaves: Sequence[Any], sizes: BatchSizes) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole batch, by name of the leaf."""
        out: dict[str, tuple[int, ...]] = {}
        for cut, lengths in zip(self.shared, sizes, strict=True):
            name = self.names[cut.leaf]
            shape: list[int] = list(out.get(name, tuple(leaves[cut.leaf].shape)))
            shape[cut.dim] = lengths[0] if cut.given_whole else sum(lengths)
            out[name] = tuple(shape)
        return out

    def shard(self, leaves: Sequence[Any], sizes: BatchSizes) -> Sequence[Any]:
        """This rank's part of every cut leaf. Raises RankMismatchError: unequal parts of one cut along two dims."""
        out = list(leaves)
        often = Counter(cut.leaf for cut in self.shared)
        for cut, lengths in zip(self.shared, sizes, strict=True):
            total = lengths[0] if cut.given_whole else sum(lengths)
            start, length = self._piece(total, cut)
            if cut.given_whole:
                out[cut.leaf] = out[cut.leaf].narrow(cut.dim, start, length)
            elif list(lengths) != [self._piece(total, cut, part)[1] for part in range(cut.parts.size)]:
                if often[cut.leaf] > 1:
                    name, axes = self.names[cut.leaf], ", ".join(cut.parts.names)
                    problem = f"parts of {name!r} along {axes} have sizes {list(lengths)}"
                    needed = "parts as torch.chunk makes them where a tensor is cut along two dims"
                    raise RankMismatchError(problem, needed, "give every rank as much, or cut one dim only")
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


@dataclass(slots=True)
class GivenSizes:
    """Sizes of the parts of a batch, of which this rank has given its `local_sizes` to the others."""

    sharder: BatchSharder
    leaves: Sequence[Any]
    local_sizes: tuple[int, ...]
    rest: Hashable
    _agreed: BatchSizes | None = None

    @property
    def of_all(self) -> BatchSizes:
        """On all ranks; waits for those that have not given theirs. Raises RankMismatchError: see `taken`."""
        if self._agreed is None:
            self._agreed = self.sharder.taken(self.leaves, self.local_sizes, self.rest)
        return self._agreed


def batch_sharder(
    strategies: Strategies, names: Sequence[str], leaves: Sequence[Any], world: World,
    known_sizes: Callable[[], KnownSizes],
) -> BatchSharder | None:  # fmt: skip
    """How batches of this kind are sharded; None where each rank runs on its own batch. Ranks whose parts may differ
    in size use `known_sizes`.
    """
    options, mesh, on_host = strategies.options, world.mesh, world.device.startswith("cpu")
    tensors = tuple(i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and (on_host or not v.is_cpu))
    shared = tuple(
        ShardedDim(
            i, cut.dim, Mesh(tuple(Axis(a, mesh.axis_size(a)) for a in cut.axes)), _is_given_whole(cut, strategies)
        )
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        for cut in (strategies.batch_cuts(mesh, name, leaf.dim()) if i in tensors else ())
    )
    several = [a for a in options.axes(mesh) if mesh.axis_size(a) > 1]
    if not shared and (options.semantics == "per_rank" or not several):
        return None
    own_axes = options.axes(mesh) if options.semantics == "per_rank" else ()
    parts_differ = not all(cut.given_whole for cut in shared) if shared else options.inputs == "local"
    exchange = parts_differ and options.uneven_batches
    if exchange and len(shared) > MOST_TENSORS:
        problem = f"the batch has {len(shared)} tensors that are cut"
        needed = f"at most {MOST_TENSORS} with uneven_batches=True"
        raise PlanError(problem, needed, "give equal batches and uneven_batches=False, or fewer tensors")
    return BatchSharder(shared, tuple(names), world, own_axes, known_sizes() if exchange else None, tensors)


def _is_given_whole(cut: BatchCut, strategies: Strategies) -> bool:
    whole = {strategies.given_whole(axis) for axis in cut.axes}
    if len(whole) > 1:
        problem = f"dim {cut.dim} of the batch is cut along {' and '.join(cut.axes)}, one of which is given all of it"
        raise PlanError(problem, "one inputs= for both", "give DataParallel and ContextParallel the same inputs=")
    return whole.pop()


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a call as leaves with names, and the modules and optimizers that the step uses.

    `sharder` makes this rank's part of a batch that ranks share; `sizes` are those of the parts on all ranks, and
    `global_shapes` the shapes of the batch tensors that leaves are parts of, by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    structure: Structure
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    state: StepState
    sharder: BatchSharder | None
    sizes: BatchSizes | None
    global_shapes: Mapping[str, tuple[int, ...]]


def batch_shapes(inputs: StepInputs) -> dict[str, tuple[int, ...]]:
    """Shapes of the batch tensors of a call by name, of the whole where ranks have parts."""
    pairs = zip(inputs.names, inputs.leaves, strict=True)
    shapes = {name: tuple(leaf.shape) for name, leaf in pairs if isinstance(leaf, torch.Tensor)}
    return {**shapes, **inputs.global_shapes}
