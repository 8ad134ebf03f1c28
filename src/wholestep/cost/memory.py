"""The live tensors of a rank while a step runs, node by node, from the order of its program. Nothing is executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Graph, Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import is_wait
from ..graph.op_kinds import collective_kind
from ..graph.region import region_of
from ..graph.storage import PIECES, Storage, storage_bytes, storages
from ..graph.text import human, short_dtype

_ROLES = {
    Role.PARAM: "parameter", Role.BUFFER: "buffer", Role.STATE: "state", Role.GRAD: "gradient", Role.HYPER: "number",
    Role.BATCH: "batch", Role.CONST: "constant", Role.CARRY: "carried",
}  # fmt: skip
_SHOWN = 10


@dataclass(frozen=True)
class LiveTensor:
    """One tensor in memory.

    Args:
        name: of the node that returns it, or of the input.
        kind: of an input: parameter, buffer, state, gradient, batch, constant, number or carried. Of a result:
            activation (returned by the forward, read by the backward), gathered, sent (a collective reads it),
            gradient (reduced), update (depends on complete gradients) or temporary.
        shape: of the rank's part.
        dtype: short, as `f32`.
        size_bytes: of its storage.
        module: path of the module whose forward it belongs to.

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
    """The peak of live bytes on a rank.

    Args:
        size_bytes: at the peak.
        rest_bytes: of inputs, which are live during the whole step.
        at: the node that runs at the peak.
        module: path of the module that `at` belongs to.
        live: the live tensors at the peak, the largest first.

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
        by_kind: dict[str, int] = {}
        for tensor in self.live:
            by_kind[tensor.kind] = by_kind.get(tensor.kind, 0) + tensor.size_bytes
        return dict(sorted(by_kind.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        kinds = ", ".join(f"{kind} {human(size)}" for kind, size in self.by_kind().items())
        hidden = len(self.live) - _SHOWN
        rows = [f"  {tensor}" for tensor in self.live[:_SHOWN]]
        rows += [f"  ... and {hidden} smaller"] if hidden > 0 else []
        return "\n".join([f"peak {human(self.size_bytes)} at %{self.at}{where}{kinds and ': '}{kinds}", *rows])


def bytes_held(local: LocalGraph) -> list[int]:
    """The live bytes while each call node runs, in order.

    Tensors count from their first use to the point where the program frees them. Workspaces of kernels and memory that
    an allocator caches do not count.
    """
    return curve(storages_here(local, storages(local.graph)), len(_calls(local.graph)))


def storages_here(local: LocalGraph, buffers: list[Storage]) -> list[Storage]:
    """Those of the storages of a program that are no empty ones of another stage of a pipeline or another owner."""
    if local.owner_axis:
        buffers = [buffer for buffer in buffers if meta.runs_on_first(buffer.node)]
    if local.stage is None:
        return buffers
    return [buffer for buffer in buffers if buffer.first >= 0 or meta.stage(buffer.node) in (None, local.stage)]


def curve(buffers: Sequence[Storage], calls: int) -> list[int]:
    """Live bytes at each of `calls` call nodes."""
    steps = [0] * (calls + 1)
    rest = sum(s.size_bytes for s in buffers if s.first < 0)
    for buffer in buffers:
        if buffer.first >= 0:
            steps[buffer.first] += buffer.size_bytes
            if buffer.last is not None:
                steps[buffer.last + 1] -= buffer.size_bytes
    return [rest + size for size in accumulate(steps[:calls])]


def peak_memory(local: LocalGraph) -> PeakMemory:
    """The peak of live bytes on a rank, and the tensors that are live there (`planner.prediction.peak_memory`)."""
    assert local.stage is not None or not local.stage_axis, "of all stages: planner.prediction"
    buffers, calls = storages_here(local, storages(local.graph)), _calls(local.graph)
    sizes = curve(buffers, len(calls))
    at = max(range(len(sizes)), key=sizes.__getitem__, default=-1)
    return _live(local, [s for s in buffers if _is_live(s, at, at)], calls[at] if calls else None)


def peak_of_pieces(local: LocalGraph) -> int:
    """The most live bytes of a stage while it runs pieces."""
    held_bytes = zip(_calls(local.graph), bytes_held(local), strict=True)
    return max((size for node, size in held_bytes if meta.piece(node) is not None), default=0)


def peak_beside(local: LocalGraph, loop: str) -> PeakMemory:
    """The live bytes of a stage while it runs the pieces of a loop, besides values of pieces."""
    calls, buffers = _calls(local.graph), storages_here(local, storages(local.graph))
    inside = [i for i, n in enumerate(calls) if meta.piece(n) is not None and meta.part_of(n) == loop]
    lasting = [s for s in buffers if s.first < inside[0] or s.last is None or s.last > inside[-1]]
    return _live(local, [s for s in lasting if _is_live(s, inside[0], inside[-1])], calls[inside[0]])


def _is_live(storage: Storage, begin: int, end: int) -> bool:
    return storage.first < 0 or (storage.first <= end and (storage.last is None or storage.last >= begin))


def _live(local: LocalGraph, alive: Sequence[Storage], at: Node | None) -> PeakMemory:
    roles = {node: (graph_input.name, _ROLES[graph_input.role]) for graph_input, node in local.placeholders()}
    rows = sorted((_row(s, roles) for s in alive), key=lambda row: -row.size_bytes)
    rest = sum(s.size_bytes for s in alive if s.first < 0)
    name, path = (at.name, meta.module_path(at)) if at else ("", "")
    return PeakMemory(sum(s.size_bytes for s in alive), rest, name, path, tuple(rows))


def _row(storage: Storage, roles: dict[Node, tuple[str, str]]) -> LiveTensor:
    node = storage.node
    region = region_of(node)
    is_complete = any(_torch.is_getitem(n.target) and meta.piece(n) is None for n in storage.members)
    if storage.index == PIECES or (region and region.shares[storage.index] < 0 and not is_complete):
        return LiveTensor(node.name, "activation", (), "values of pieces", storage.size_bytes)
    part = meta.tensors(node)[storage.index]
    assert part is not None, "a storage belongs to a tensor"
    name, kind = roles.get(node) or (node.name, _kind(storage))
    return LiveTensor(name, kind, part.shape, short_dtype(part.dtype), storage_bytes(part), meta.module_path(node))


def _kind(storage: Storage) -> str:
    node = storage.node
    if _is_sent(node) and (collective_kind(node.target) == "all_gather" or meta.is_backward(node)):
        return "gathered" if collective_kind(node.target) == "all_gather" else "gradient"
    readers = [user for member in storage.members for user in member.users]
    if any(_is_sent(user) for user in readers):
        return "sent"
    if meta.is_batch_invariant(node):
        return "update"
    if not meta.is_backward(node) and any(meta.is_backward(user) for user in readers):
        return "activation"
    return "temporary"


def _is_sent(node: Node) -> bool:
    """True for a collective, also for a function that replaces it in a bound graph."""
    return any(is_wait(user) for user in node.users)


def _calls(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]
