"""Bytes that a rank holds while a step runs, node by node, from the order of its program: nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.storage import Storage, storage_bytes, storages
from ..graph.text import human, short_dtype
from ..graph.verify import is_wait

_ROLES = {
    Role.PARAM: "parameter", Role.BUFFER: "buffer", Role.STATE: "state", Role.GRAD: "gradient", Role.HYPER: "number",
    Role.BATCH: "batch", Role.CONST: "constant", Role.CARRY: "carried",
}  # fmt: skip
_SHOWN = 10


@dataclass(frozen=True)
class LiveTensor:
    """One tensor in memory: `name` is that of the node that made it, or of the input.

    `kind` is parameter, buffer, state, gradient, batch, constant, number or carried for an input; activation (made by
    the forward, read by the backward), gathered, sent (a collective reads it), gradient (reduced), update (follows
    from complete gradients) or temporary for what the program makes. `module` is the path of the module whose forward
    made it.

    Example:
        >>> largest = ws.peak_memory(local).live[0]
        >>> print(largest.name, largest.kind, largest.size_bytes)
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    module: str = ""

    def __str__(self) -> str:
        size = f"{self.dtype}[{' '.join(map(str, self.shape))}]"
        where = f"  {self.module}" if self.module else ""
        return f"{human(self.size_bytes):>10}  {self.kind:<10} {self.name}: {size}{where}"


@dataclass(frozen=True)
class PeakMemory:
    """The most bytes a rank holds at once: `size_bytes`, while the node `at` runs; `live` is all that is there, the
    largest first. `rest_bytes` of it are inputs, held from the start of the step to its end.

    Example:
        >>> peak = ws.peak_memory(local)
        >>> print(peak.size_bytes, peak.at, peak.by_kind())
    """

    size_bytes: int
    rest_bytes: int
    at: str
    module: str
    live: tuple[LiveTensor, ...]

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind, the largest first."""
        found: dict[str, int] = {}
        for one in self.live:
            found[one.kind] = found.get(one.kind, 0) + one.size_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        kinds = ", ".join(f"{kind} {human(size)}" for kind, size in self.by_kind().items())
        left = len(self.live) - _SHOWN
        rows = [f"  {one}" for one in self.live[:_SHOWN]]
        rows += [f"  ... and {left} smaller"] if left > 0 else []
        return "\n".join([f"peak {human(self.size_bytes)} at %{self.at}{where}: {kinds}", *rows])


def memory_curve(local: LocalGraph) -> tuple[tuple[str, int], ...]:
    """For each node that runs, in order: its name and the bytes held while it does.

    That counts tensors, as the program frees them; not what a kernel takes for itself, nor what an allocator keeps.

    Example:
        >>> name, size_bytes = max(ws.memory_curve(local), key=lambda row: row[1])
    """
    return tuple(zip((n.name for n in _calls(local.graph)), bytes_held(local), strict=True))


def bytes_held(local: LocalGraph) -> list[int]:
    """The figures of `memory_curve`."""
    return curve(storages(local.graph), len(_calls(local.graph)))


def curve(held: Sequence[Storage], calls: int) -> list[int]:
    """Bytes held at each of so many call nodes."""
    steps = [0] * (calls + 1)
    rest = sum(s.size_bytes for s in held if s.first < 0)
    for one in held:
        if one.first >= 0:
            steps[one.first] += one.size_bytes
            if one.last is not None:
                steps[one.last + 1] -= one.size_bytes
    return [rest + size for size in accumulate(steps[:calls])]


def peak_memory(local: LocalGraph) -> PeakMemory:
    """Where a rank holds the most, how much, and what.

    Example:
        >>> print(wholestep.peak_memory(step.local_graph))
    """
    held, calls = storages(local.graph), _calls(local.graph)
    sizes = curve(held, len(calls))
    rest = sum(s.size_bytes for s in held if s.first < 0)
    at = max(range(len(sizes)), key=sizes.__getitem__, default=-1)
    roles = {node: (given.name, _ROLES[given.role]) for given, node in local.placeholders()}
    alive = [s for s in held if s.first <= at and (s.first < 0 or s.last is None or s.last >= at)]
    rows = sorted((_row(s, roles) for s in alive), key=lambda row: -row.size_bytes)
    if at < 0:
        return PeakMemory(rest, rest, "", "", tuple(rows))
    return PeakMemory(sizes[at], rest, calls[at].name, meta.module_path(calls[at]), tuple(rows))


def _row(storage: Storage, roles: dict[Node, tuple[str, str]]) -> LiveTensor:
    node = storage.node
    made = meta.tensors(node)[storage.index]
    assert made is not None, "storage is made by a tensor"
    name, kind = roles.get(node) or (node.name, _kind(storage))
    return LiveTensor(name, kind, made.shape, short_dtype(made.dtype), storage_bytes(made), meta.module_path(node))


def _kind(storage: Storage) -> str:
    node = storage.node
    if _is_sent(node):
        return "gathered" if "gather" in str(node.target) else "gradient"
    readers = [user for member in storage.members for user in member.users]
    if any(_is_sent(user) for user in readers):
        return "sent"
    if meta.is_batch_invariant(node):
        return "update"
    if not meta.is_backward(node) and any(meta.is_backward(user) for user in readers):
        return "activation"
    return "temporary"


def _is_sent(node: Node) -> bool:
    """True for a collective, in whatever form a rank runs it."""
    return any(is_wait(user) for user in node.users)


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]
