"""Keeps what the forward saves for the backward in host memory, from where it comes back ahead of its use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import Node

from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.nodes import add_call, is_collective
from ..graph.storage import Storage
from ..graph.text import human
from ..partition.host_copies import arrived, fetched, kept, kept_on_host
from .base import InPlace
from .recompute_layers import layers_of
from .saved_tensors import SavedTensors
from .tile_rows import long_bytes


@dataclass(frozen=True)
class OffloadSaved(InPlace):
    """Copies what layers save for their backward to host memory, and back before it is read. Results are bitwise equal.
    Copies run beside the step: each has the time in which `ahead` layers compute. So the device holds what the layer
    that computes saves, and `ahead` layers more. What the last `ahead` layers save is not copied.

    Args:
        ahead: layers, which are modules whose name is a number, as `layers.3`.
        over_bytes: smaller tensors stay on the device. None, for a search: those below 16 MiB or, if less, a 64th of
            the largest; and nothing is said where no copy is needed.

    Example:
        >>> offload = ws.OffloadSaved(ahead=2)
        >>> step = ws.compile(train_step, passes=lambda passes: [offload, *passes])

    Raises:
        PlanError: `ahead` is not positive; or, of a step: it has stages or micro-batches.
    """

    ahead: int = 1
    over_bytes: int | str | None = "16MiB"

    must_precede: ClassVar[tuple[str, ...]] = ("SizeBuckets", "Reinplace")

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise PlanError(f"OffloadSaved(ahead={self.ahead})", "at least one layer", "correct the number")
        long_bytes(self.over_bytes, "16MiB", ())

    def change(self, local: LocalGraph) -> LocalGraph:
        """Insert copies into `local`; with a warning none, where nothing so large is saved."""
        in_pieces = "TileRows" not in local.passes and any(map(loop_of, local.graph.nodes))
        if local.stage is not None or in_pieces:
            problem = f"OffloadSaved({self.ahead}) in a step with stages or micro-batches"
            raise PlanError(problem, "one of them", "leave out OffloadSaved: micro-batches save less at a time")
        saved = SavedTensors(local)
        layers, calls = layers_of(local), list(saved.position)
        values = [value for storage in saved.storages if (value := _value(saved, storage)) is not None]
        least = long_bytes(self.over_bytes, "16MiB", (value.storage.size_bytes for value in values))
        values = [value for value in values if value.storage.size_bytes >= least]
        moved = 0
        for segment in sorted({saved.segment[value.base] for value in values}):
            saved_there = [value for value in values if saved.segment[value.base] == segment]
            groups = _by_layer(saved_there, saved, layers)
            for group, earlier in zip(groups[self.ahead :], groups, strict=False):
                created = min(saved.position[value.storage.node] for value in earlier)
                read = min(saved.position[value.reads[0][0]] for value in earlier)
                moved += len(group)
                for value in group:
                    value.move(calls[max(created, value.last_read)], calls[read])
        if not moved and self.over_bytes is not None:
            few = f"no more than {self.ahead} of the layers saves {human(least)}"
            warnings.warn(f"OffloadSaved({self.ahead}) copies nothing: {few}", stacklevel=2)
        return local


@dataclass
class _Value:
    """A saved storage: `base`, the first node that is all of it; its `members`, views that lead to what is read; those
    that read it in the backward, with the member, in order; and the position of the last other call that reads it.
    """

    storage: Storage
    base: Node
    members: set[Node]
    reads: list[tuple[Node, Node]]
    last_read: int
    back: dict[Node, Node] = field(default_factory=dict[Node, Node])

    def move(self, behind: Node, ahead_of: Node) -> None:
        """Copy it to the host, where the device has it until `behind` ran; start to copy it back before `ahead_of`."""
        graph, tensor, first = self.base.graph, meta.one_tensor(self.base), self.reads[0][0]
        with graph.inserting_after(self.base):
            start = add_call(graph, kept_on_host, (self.base,), tensor, self.base)
        with graph.inserting_after(start if behind is self.base else behind):
            host = add_call(graph, kept, (start, self.base), tensor, self.base)
        with graph.inserting_before(ahead_of):
            coming = add_call(graph, fetched, (host, tensor.device), tensor, self.base)
        with graph.inserting_before(first):
            self.back[self.base] = add_call(graph, arrived, (coming,), tensor, self.base)
        for node in (coming, self.back[self.base]):
            meta.set_backward(node)
        for reader, member in self.reads:
            reader.replace_input_with(member, self._again(member, reader))

    def _again(self, member: Node, reader: Node) -> Node:
        """`member` of what came back, made before `reader` if it is not there yet."""
        if member not in self.back:
            inputs = {n: self._again(n, reader) for n in member.all_input_nodes if n in self.members}
            with reader.graph.inserting_before(reader):
                self.back[member] = reader.graph.node_copy(member, lambda n: inputs.get(n, n))
            meta.set_backward(self.back[member])
        return self.back[member]


def _value(saved: SavedTensors, storage: Storage) -> _Value | None:
    """What is saved of a storage that the forward computes, later segments read, and one copy holds."""
    node, inside = storage.node, set(storage.members)
    born = saved.segment.get(node, -1)
    if node not in saved.batch_dependent or meta.is_backward(node) or storage.last is None:
        return None
    base = next((m for m in storage.members if _is_all(m, storage)), None)
    read = [(user, m) for m in storage.members for user in m.users if user not in inside or saved.segment[user] > born]
    reads = [(user, m) for user, m in read if saved.segment[user] > born == saved.segment[m]]
    if base is None or not reads:
        return None
    members = {base}
    for member in storage.members:
        if not members.isdisjoint(member.all_input_nodes):
            members.add(member)
    if not members.issuperset(m for _, m in reads):
        return None
    last_read = max(saved.position[user] for user, _ in [*read, (base, base)] if saved.segment[user] == born)
    return _Value(storage, base, members, sorted(reads, key=lambda pair: saved.position[pair[0]]), last_read)


def _is_all(node: Node, storage: Storage) -> bool:
    """True for a tensor, complete, that is a storage without gaps."""
    tensor = None if is_collective(node) else meta.tensor(node)
    return (
        tensor is not None
        and tensor.size_bytes == storage.size_bytes
        and tensor.numel > 0
        and not meta.overlaps(tensor.shape, tensor.stride)
    )


def _by_layer(values: Sequence[_Value], saved: SavedTensors, layers: Mapping[Node, str]) -> list[list[_Value]]:
    """`values` in the order in which they are read, those of one layer together; what is of no layer, as of a head, is
    of the one whose values are read next.
    """
    groups, layer = list[list[_Value]](), None
    for value in sorted(values, key=lambda value: saved.position[value.reads[0][0]], reverse=True):
        layer_of_value = layers[value.base] or layer or ""
        groups = groups if layer_of_value == layer else [[], *groups]
        groups[0].insert(0, value)
        layer = layer_of_value
    return groups
