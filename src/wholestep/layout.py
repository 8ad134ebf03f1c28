"""Layout: how one tensor is distributed over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any, Literal, cast

from torch import Tensor

from .errors import LayoutError
from .mesh import Mesh
from .sizes import SizeInt, in_units, least, most, unit_of, whole

NORMS = {"norm1": 1, "norm2": 2}
"""Reductions that make a norm of the norms of parts, and its order."""
PARTIAL_OPS = ("sum", "avg", "max", "min", *NORMS)


@dataclass(frozen=True)
class AxisState:
    """State of a tensor along one mesh axis.

    `R` replicated; `S` sharded along `dim`; `P` partial, to be reduced by `op`; `V` varying, without a global value;
    `O` owned: only the ranks at coordinate `at` have it. With `blocks` > 1 the dim is that many equal blocks one after
    another, and each of them is sharded: `S(0 in 4)` is an inner dim that was merged behind one of size 4.

    Example:
        >>> print(ws.AxisState("S", 1))
        S(1)
    """

    kind: Literal["R", "S", "P", "V", "O"]
    dim: int = -1
    op: str = ""
    at: int = -1
    blocks: int = 1

    def __str__(self) -> str:
        sharded = f"S({self.dim} in {self.blocks})" if self.blocks > 1 else f"S({self.dim})"
        return {"S": sharded, "P": f"P({self.op})", "O": f"O({self.at})"}.get(self.kind, self.kind)


REPLICATED, VARIES = AxisState("R"), AxisState("V")


@cache
def sharded_along(dim: int, blocks: int = 1) -> AxisState:
    """The state of a tensor that is sharded along `dim`; one object for each, which is found equal at once."""
    return AxisState("S", dim, blocks=blocks)


@cache
def partial_by(op: str) -> AxisState:
    """The state of a partial value that is to be reduced by `op`."""
    return AxisState("P", op=op)


@cache
def owned_by(coordinate: int) -> AxisState:
    """The state of a value that only the ranks at one coordinate of an axis have."""
    return AxisState("O", at=coordinate)


@dataclass(frozen=True)
class Layout:
    """Axes that shard each tensor dim (outermost first), axes with partial values, axes along which it varies, and axes
    of which one coordinate owns it. `blocks`: axes that shard each block of their dim, with the number of blocks, which
    have one size.

    Invariants: an axis appears once; `dims` has one entry per tensor dim; entries are sorted in `partial`, `varies`,
    `owned` and `blocks`.

    Example:
        >>> Layout((("tp", "dp"), ()), partial=(), varies=()).show((4096, 512))
        '4096@tp,dp 512'
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    varies: tuple[str, ...] = ()
    owned: tuple[tuple[str, int], ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()

    def state(self, axis: str) -> AxisState:
        """Return the state of the tensor along `axis`."""
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return sharded_along(dim, dict(self.blocks).get(axis, 1)) if self.blocks else sharded_along(dim)
        for name, op in self.partial:
            if name == axis:
                return partial_by(op)
        for name, coordinate in self.owned:
            if name == axis:
                return owned_by(coordinate)
        return VARIES if axis in self.varies else REPLICATED

    def owner_on(self, axis: str) -> AxisState | None:
        """Return the state of the tensor along `axis` if a coordinate owns it."""
        return next((owned_by(at) for name, at in self.owned if name == axis), None)

    def put(self, axis: str, state: AxisState) -> Layout:
        """Return this layout with `axis` in another state; a new shard is innermost."""
        return _put(self, axis, state)

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which the tensor is not replicated."""
        several = (*(a for axes in self.dims for a in axes), *(a for a, _ in self.partial), *self.varies)
        return frozenset((*several, *(a for a, _ in self.owned)))

    @property
    def is_sharded(self) -> bool:
        """True if some axis shards a dim."""
        return any(self.dims)

    def shard_axes(self) -> tuple[str, ...]:
        """Return the axes that shard a dim, by dim, outermost first."""
        return tuple(a for axes in self.dims for a in axes)

    def is_held_at(self, coordinate: Mapping[str, int]) -> bool:
        """True if the rank at `coordinate` has a part of the tensor; false if another coordinate owns it."""
        return all(coordinate[axis] == owner for axis, owner in self.owned)

    @property
    def transposed(self) -> Layout:
        """This layout with the dims in reverse order."""
        return replace(self, dims=self.dims[::-1])

    def without_partial(self) -> Layout:
        """Return this layout with every partial axis replicated."""
        return replace(self, partial=())

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Return the local shape at `coordinate` of a tensor of global `shape`, if it is there (`is_held_at`)."""
        out: list[int] = []
        for dim, size in enumerate(shape):
            length = 1
            for block, axes in self._blocks_of(dim, size):
                for axis in axes:
                    block = chunk_range(block, mesh.axis_size(axis), coordinate[axis])[1]
                length = block if length == 1 else length * block
            out.append(length)
        return tuple(out)

    def extents(self, shape: Sequence[int], mesh: Mesh) -> list[int | Extent]:
        """Return the local shape of a tensor of global `shape` on every rank."""
        out: list[int | Extent] = []
        for dim, size in enumerate(shape):
            lengths = [extent(block, axes, mesh) for block, axes in self._blocks_of(dim, size)]
            uneven = next((length for length in lengths if isinstance(length, Extent)), None)
            times = prod(length for length in lengths if not isinstance(length, Extent))
            out.append(lengths[0] if len(lengths) == 1 else replace(uneven, times=times) if uneven else times)
        return out

    def _blocks_of(self, dim: int, size: int) -> list[tuple[int, tuple[str, ...]]]:
        """A dim as several, merged: their sizes and the axes that shard them."""
        counts = sorted({1, *(self.state(axis).blocks for axis in self.dims[dim])}) if self.blocks else [1]
        if len(counts) == 1:
            return [(whole(size) if self.blocks else size, self.dims[dim])]
        pairs = zip(counts, [*counts[1:], whole(size)], strict=True)
        return [(after // n, tuple(a for a in self.dims[dim] if self.state(a).blocks == n)) for n, after in pairs]

    def check(self, shape: Sequence[int], mesh: Mesh, name: str = "tensor") -> None:
        """Raise LayoutError if the layout does not fit a tensor of `shape` on `mesh`."""
        if len(self.dims) != len(shape):
            problem = f"{name}: layout {self} has {len(self.dims)} dims, the tensor has {len(shape)}"
            raise LayoutError(problem, "one entry per tensor dim")
        used = [*self.shard_axes(), *(a for a, _ in self.partial), *self.varies, *(a for a, _ in self.owned)]
        for axis in used:
            mesh.axis_size(axis)
            if used.count(axis) > 1:
                raise LayoutError(f"{name}: axis {axis!r} appears twice in {self}", "each axis at most once")
        for _, op in self.partial:
            if op not in PARTIAL_OPS:
                raise LayoutError(f"{name}: unknown partial op {op!r}", f"one of {', '.join(PARTIAL_OPS)}")
        for axis, count in self.blocks:
            if count < 2 or axis not in self.shard_axes():
                problem = f"{name}: {axis!r} shards {count} blocks of a dim in {self}"
                raise LayoutError(problem, "two or more blocks, along an axis that shards a dim")
        split_at_blocks((self,), shape, mesh)
        for axis, owner in self.owned:
            if not 0 <= owner < mesh.axis_size(axis):
                problem = f"{name}: coordinate {owner} of axis {axis!r} owns it"
                raise LayoutError(problem, f"a coordinate from 0 to {mesh.axis_size(axis) - 1}")

    def show(self, shape: Sequence[int | str]) -> str:
        """Format as `33@dp 50 +tp(sum) ~x pp:1`: dims with their axes, partial sums, varying axes, owners."""
        blocks = {axis: f" in {count}" for axis, count in self.blocks}
        by = [",".join(axis + blocks.get(axis, "") for axis in axes) for axes in self.dims]
        parts = [f"{n}@{axes}" if axes else str(n) for n, axes in zip(shape, by, strict=True)]
        parts = parts or ["()"]
        parts += [f"+{a}({op})" for a, op in self.partial]
        parts += [f"~{a}" for a in self.varies]
        parts += [f"{a}:{owner}" for a, owner in self.owned]
        return " ".join(parts)

    def __str__(self) -> str:
        return self.show("_" * len(self.dims))


@lru_cache(maxsize=1 << 14)
def _put(layout: Layout, axis: str, state: AxisState) -> Layout:
    """`Layout.put`, cached: a step has few distinct layouts."""
    if layout.state(axis) == state:
        return layout
    dims = tuple(tuple(a for a in axes if a != axis) for axes in layout.dims)
    partial = tuple(p for p in layout.partial if p[0] != axis)
    varies = tuple(a for a in layout.varies if a != axis)
    owned = tuple(o for o in layout.owned if o[0] != axis)
    blocks = tuple(o for o in layout.blocks if o[0] != axis)
    if state.kind == "S":
        dims = tuple((*axes, axis) if d == state.dim else axes for d, axes in enumerate(dims))
        blocks = tuple(sorted((*blocks, (axis, state.blocks)))) if state.blocks > 1 else blocks
    elif state.kind == "P":
        partial = tuple(sorted((*partial, (axis, state.op))))
    elif state.kind == "V":
        varies = tuple(sorted((*varies, axis)))
    elif state.kind == "O":
        owned = tuple(sorted((*owned, (axis, state.at))))
    return Layout(dims, partial, varies, owned, blocks)


def split_at_blocks(
    layouts: Sequence[Layout], shape: Sequence[int], mesh: Mesh
) -> tuple[tuple[Layout, ...], tuple[int, ...]]:
    """`layouts` of one tensor, and its `shape`, with dims split where axes shard blocks of them, so that each axis
    shards a dim. Raises LayoutError: pieces of one axis would end within a block of another.
    """
    if not any(layout.blocks for layout in layouts):
        return tuple(layouts), tuple(shape)
    sizes, split = list[int](), [list[tuple[str, ...]]() for _ in layouts]
    for dim, size in enumerate(shape):
        counts = sorted({1, *(layout.state(axis).blocks for layout in layouts for axis in layout.dims[dim])})
        for count, after in zip(counts, [*counts[1:], size], strict=True):
            sizes.append(size if len(counts) == 1 else after // count)
            for layout, dims in zip(layouts, split, strict=True):
                dims.append(tuple(axis for axis in layout.dims[dim] if layout.state(axis).blocks == count))
                uneven = isinstance(extent(sizes[-1], dims[-1], mesh), Extent)
                if len(counts) > 1 and (after % count or (uneven and count != counts[-1])):
                    problem = f"{layout.show(shape)}: {size} in blocks of {after // count}"
                    raise LayoutError(problem, "blocks of one size; the innermost alone may be shared unevenly")
    new_layouts = (replace(layout, dims=tuple(dims), blocks=()) for layout, dims in zip(layouts, split, strict=True))
    return tuple(new_layouts), tuple(sizes)


@cache
def replicated(ndim: int) -> Layout:
    """Return the layout of a replicated tensor."""
    return Layout(((),) * ndim)


def sharded(ndim: int, dim: int, *axes: str) -> Layout:
    """Return the layout with dim `dim` sharded by `axes`, outermost first."""
    return Layout(tuple(axes if d == dim else () for d in range(ndim)))


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and length of piece `index`, as of `torch.chunk`: 11 over 8 gives 2,2,2,2,2,1,0,0. A size in units
    is cut as their number is.
    """
    if (unit := unit_of(size)) is not None:
        first, units = chunk_range(size // unit, parts, index)
        return first * unit, in_units(units * unit, unit)
    step = -(-size // parts)
    start = least(index * step, size)
    return start, least(step, size - start)


def dealt(size: int, parts: int, index: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Starts and lengths of the two pieces of a dim that rank `index` of `parts` gets for causal attention: one from
    the front, and one as far from the end. Ranks get as many places, to one, and their queries attend to as many keys.
    """
    size = whole(size)
    early = [-(-at * size // (2 * parts)) for at in (index, index + 1)]
    late = [size - (-at * size // (2 * parts)) + -at * size // parts for at in (index + 1, index)]
    return (early[0], early[1] - early[0]), (late[0], late[1] - late[0])


def shared(size: int, parts: int, piece: int, to: int) -> tuple[int, int]:
    """How many places of a piece of a dim are in the early and in the late piece that is `dealt` to another rank."""
    start, length = chunk_range(size, parts, piece)
    early, late = (
        most(0, least(start + length, first + count) - most(start, first)) for first, count in dealt(size, parts, to)
    )
    return early, late


def cut(full: Tensor, layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """Return the piece of a whole tensor at `coordinate`, as a view; an empty tensor if another coordinate owns it."""
    if not layout.is_held_at(coordinate):
        return full.new_empty(0)
    (split,), sizes = split_at_blocks((layout,), full.shape, mesh)
    piece = full.view(sizes) if layout.blocks else full
    for dim, axes in enumerate(split.dims):
        for axis in axes:
            start, length = chunk_range(piece.shape[dim], mesh.axis_size(axis), coordinate[axis])
            piece = piece.narrow(dim, start, length)
    return piece.reshape(layout.local_shape(full.shape, mesh, coordinate)) if layout.blocks else piece


@dataclass(frozen=True)
class Extent:
    """A rank-dependent number of a program: length or start of a rank's shard of a dim.

    `axes` shard the dim, outermost first, each with its size. With `chunks` > 1 it is the length of the largest of
    `chunks` parts of the shard, to which collectives pad. The dim has `times` blocks of `size`, each of them sharded.

    Example:
        >>> Extent(11, (("dp", 4),)).at({"dp": 3})
        2
    """

    size: int
    axes: tuple[tuple[str, int], ...]
    chunks: int = 1
    start: bool = False
    times: int = 1

    def at(self, coordinate: Mapping[str, int]) -> int:
        """Return the number on the rank at `coordinate`."""
        begin, size = 0, self.size
        for axis, parts in self.axes:
            offset, size = chunk_range(size, parts, coordinate[axis])
            begin += offset
        length = largest_part(size, self.chunks)
        return begin if self.start else length if self.times == 1 else self.times * length

    def __str__(self) -> str:
        unit = unit_of(self.size)
        size = f"{self.size}" if unit is None or int(unit) == 1 else f"{self.size // unit}*{unit}"
        text = f"{size}@{','.join(axis for axis, _ in self.axes)}"
        text = text if self.times == 1 else f"{self.times} x {text}"
        return f"start({text})" if self.start else f"{text}/{self.chunks}" if self.chunks > 1 else text

    __repr__ = __str__


@dataclass(frozen=True)
class OfOwner:
    """A rank-dependent number of a program: that of the rank's coordinate on `axis`. With `start` it is no size.

    Example:
        >>> OfOwner("dp", (12, 8)).at({"dp": 1})
        8
    """

    axis: str
    numbers: tuple[int, ...]
    start: bool = False

    def at(self, coordinate: Mapping[str, int]) -> int:
        """Return the number on the rank at `coordinate`."""
        return self.numbers[coordinate[self.axis]]

    def __str__(self) -> str:
        return f"{'|'.join(map(str, self.numbers))}@{self.axis}"

    __repr__ = __str__


def extent(size: int, axes: Sequence[str], mesh: Mesh, chunks: int = 1) -> int | Extent:
    """Return the length of a rank's shard of a dim: a number if it is equal on all ranks."""
    cut = tuple((axis, mesh.axis_size(axis)) for axis in axes)
    even, unit = size, unit_of(size)
    for _, parts in cut:
        if isinstance(even, SizeInt) or even // (unit or 1) % parts:
            return Extent(size, cut, chunks)
        even //= parts
    return largest_part(in_units(even, unit), chunks)


def largest_part(size: int, parts: int) -> int:
    """Return the length of the largest of `parts` pieces of a dim, to which collectives pad."""
    unit = unit_of(size)
    return -(-size // parts) if unit is None else -(-(size // unit) // parts) * unit


def resolve(value: Any, coordinate: Mapping[str, int]) -> Any:
    """Replace each `Extent` and `OfOwner` in `value`, also in lists, by its number at `coordinate`."""
    if isinstance(value, (Extent, OfOwner)):
        return value.at(coordinate)
    if isinstance(value, (list, tuple)):
        return cast(Any, type(cast(Any, value)))(resolve(v, coordinate) for v in cast(Sequence[Any], value))
    return value


def has_extent(value: Any, starts: bool = True) -> bool:
    """Return whether `value` is or contains an `Extent` or an `OfOwner`; without `starts`, one that is a size: a start
    is none, nor are parts that have one sum on all ranks.
    """
    if isinstance(value, (list, tuple)):
        values = cast(Sequence[Any], value)
        return any(has_extent(v, starts) for v in values) and (starts or not _are_parts(values))
    return isinstance(value, (OfOwner, Extent)) and (starts or not value.start)


def _are_parts(values: Sequence[Any]) -> bool:
    by_owner = [value.numbers for value in values if isinstance(value, OfOwner)]
    symbolic = any(isinstance(n, SizeInt) for numbers in by_owner for n in numbers)
    return len(by_owner) == len(values) and not symbolic and len(set(map(sum, zip(*by_owner, strict=True)))) == 1
