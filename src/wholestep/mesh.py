"""A mesh of ranks: named axes and their sizes. Needs no process group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from .errors import MeshError, shown

_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([0-9]+)")
_MOST_RANKS = (1 << 31) - 1  # that torch and NCCL count
TIME = "time"
"""The axis that ranks do not share but go through, piece after piece. `MicroBatches` adds it to the mesh of a plan."""
STAGES = "pp"
"""A name that stands for stages of a pipeline: other strategies do not take an axis called so."""
CONTEXT = "cp"
"""A name that stands for ranks that share tokens: other strategies do not take an axis called so."""
_RESERVED = {"ep": ("experts have no axis of their own", 'give ExpertParallel(axis="dp"), or split them along tp')}
"""Names that stand for a parallelism that an axis does not have yet, and what there is in its place."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a mesh.

    Example:
        >>> ws.Mesh((ws.Axis("dp", 4), ws.Axis("tp", 2))).size
        8
    """

    name: str
    size: int


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes, outermost first: ranks are numbered row-major over them.

    Example:
        >>> Mesh("dp=4,tp=2").coordinate(5)
        {'dp': 2, 'tp': 1}

    Raises:
        MeshError: the text is not `name=size,...`, a name repeats or is reserved (ep), or a size is not
            positive.
    """

    axes: tuple[Axis, ...]

    def __init__(self, spec: str | tuple[Axis, ...]) -> None:
        axes = parse(spec) if isinstance(spec, str) else spec
        names = [axis.name for axis in axes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            problem = f"mesh {shown(spec)} names axis {repeated[0]!r} twice"
            raise MeshError(problem, "each axis name once", "rename one of them")
        if prod(axis.size for axis in axes) > _MOST_RANKS:
            problem = f"mesh {shown(spec)} has more ranks than torch counts"
            raise MeshError(problem, f"at most {_MOST_RANKS} ranks", "correct the sizes")
        empty = [axis for axis in axes if axis.size < 1]
        if empty:
            problem = f"axis {empty[0].name!r} has size {empty[0].size}"
            raise MeshError(problem, "a size of at least 1", "drop the axis or give it ranks")
        reserved = next((axis.name for axis in axes if axis.name in _RESERVED), None)
        if reserved:
            reason, next_step = _RESERVED[reserved]
            needed = "axes of batches (dp, or any other name), of layers (tp), of tokens (cp) and of stages (pp)"
            raise MeshError(f"mesh {shown(spec)} has an axis {reserved!r}: {reason}", needed, next_step)
        object.__setattr__(self, "axes", axes)

    @property
    def pieces(self) -> int:
        """Number of micro-batches that each rank goes through: the size of the axis `time`, or 1."""
        return next((axis.size for axis in self.axes if axis.name == TIME), 1)

    @property
    def of_ranks(self) -> Mesh:
        """The mesh without the axis `time`: what ranks share."""
        return Mesh(tuple(axis for axis in self.axes if axis.name != TIME)) if TIME in self.names else self

    @property
    def size(self) -> int:
        """Number of ranks; in the mesh of a plan with micro-batches, times their number."""
        return prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(axis.name for axis in self.axes)

    def axis_size(self, name: str) -> int:
        """Return the size of the axis called `name`.

        Raises:
            MeshError: there is no such axis.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        problem = f"mesh {self} has no axis {name!r}"
        raise MeshError(problem, f"one of {', '.join(map(repr, self.names))}", "correct the axis name or the mesh")

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` along each axis."""
        out: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, out[axis.name] = divmod(rank, axis.size)
        return dict(reversed(out.items()))

    def rank(self, coordinate: dict[str, int]) -> int:
        """Return the rank at a position (inverse of `coordinate`)."""
        rank = 0
        for axis in self.axes:
            rank = rank * axis.size + coordinate[axis.name]
        return rank

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that communicate along axis `name`, in a fixed order."""
        ranges = [range(1) if axis.name == name else range(axis.size) for axis in self.axes]
        corners = [dict(zip(self.names, corner, strict=True)) for corner in product(*ranges)]
        return tuple(tuple(self.rank({**c, name: i}) for i in range(self.axis_size(name))) for c in corners)

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)


def channel(axis: str, source: int, target: int) -> str:
    """The name of what one coordinate of an axis sends another one on."""
    return f"{axis} {source}>{target}"


def with_pieces(mesh: Mesh, pieces: int) -> Mesh:
    """`mesh` with an axis `time` of so many pieces. It is outermost: ranks keep their numbers and their distances."""
    return Mesh((Axis(TIME, pieces), *mesh.axes))


def refuse_time(mesh: Mesh) -> Mesh:
    """Return `mesh`. Raises MeshError if it has an axis `time`, which is no axis of ranks."""
    if TIME in mesh.names:
        needed = "axes of ranks: MicroBatches adds the axis 'time'"
        raise MeshError(f"mesh {mesh} has an axis {TIME!r}", needed, "rename it, or give parallel=MicroBatches(...)")
    return mesh


def mesh_of_torch(names: tuple[str, ...], sizes: tuple[int, ...]) -> Mesh:
    """The axes of a DeviceMesh, whose names mean nothing here."""
    mesh = Mesh(tuple(Axis(f"d{dim}", size) for dim, size in enumerate(sizes)))
    object.__setattr__(mesh, "axes", tuple(Axis(*pair) for pair in zip(names, sizes, strict=True)))
    return mesh


def parse(text: str) -> tuple[Axis, ...]:
    """Parse `"dp=4,tp=2"`."""
    axes: list[Axis] = []
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if not match:
            raise MeshError(
                f"mesh {shown(text)}: cannot parse {shown(part.strip())}",
                'axes as name=size, e.g. "dp=4,tp=2"',
                f'write "dp={text}", or "auto={text}" to have axes chosen'
                if text.isdecimal() and len(text) < 9
                else "correct the text",
            )
        if len(match[2]) > len(str(_MOST_RANKS)):
            needed = f"at most {_MOST_RANKS} ranks"
            raise MeshError(f"axis {match[1]!r} has a size of {len(match[2])} digits", needed, "correct the size")
        axes.append(Axis(match[1], int(match[2])))
    return tuple(axes)
