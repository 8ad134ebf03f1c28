"""Recomputes activations of layers by a rule, as activation checkpointing does, whatever the memory."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import Node

from ..errors import PlanError
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.nodes import operands, reached
from ..graph.op_kinds import arithmetic
from ..graph.region import region_of
from ..graph.storage import Storage
from ..hardware.hardware import Hardware
from ..typed_values import check_fields
from .saved_tensors import SavedTensors
from .saved_values import SavedValues

_LAYER = re.compile(r"(?:^|.*?[./])\d+(?=[./]|$)")


@dataclass(frozen=True)
class RecomputeLayers:
    """Recomputes in the backward what the layers of a model save from the forward. A layer is a module whose name is a
    number, as `layers.3`. Bitwise the same.

    `full` keeps what a layer hands to others, and gathers or exchanges again what ranks that share sequences gathered
    or exchanged in it. `selective`
    recomputes only what needs no matrix product, convolution or attention to run twice. Sums over ranks and random
    numbers are always kept.

    Example:
        >>> full = wholestep.passes.recompute_layers.RecomputeLayers("full")
        >>> step = wholestep.compile(train_step, passes=lambda passes: [full, *passes])

    Raises:
        PlanError: an unknown kind; no list of layers.
    """

    kind: Literal["full", "selective"] = "full"

    must_precede: ClassVar[tuple[str, ...]] = ("TileRows", "OffloadSaved", "SizeBuckets", "Reinplace")

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """A copy in which layers recompute."""
        saved = SavedValues(local, gathers=False, activations=self.kind == "full")
        layers = {place: layers_of(tensors.local) for place, tensors in saved.places.items()}
        if any(map(region_of, local.graph.nodes)):
            problem, needed = f"recompute {self.kind}: the program of a stage", "a program without stages"
            raise PlanError(problem, needed, "give memory_bytes=, or torch.utils.checkpoint in the model")
        if not any(any(of.values()) for of in layers.values()):
            problem = f"recompute {self.kind}: found no list of layers (no module is named by a number)"
            needed = "layers in a ModuleList or Sequential"
            raise PlanError(problem, needed, "let a budget of memory decide (recompute auto)")
        names = [saved.full_name(place, name) for place, tensors in saved.places.items()
                 for name in self._dropped(tensors, layers[place])]  # fmt: skip
        return saved.applied(names, Hardware.default())

    def _dropped(self, saved: SavedTensors, layers: dict[Node, str]) -> list[str]:
        dropped: dict[int, str] = {}
        saved.kept_ids |= {
            id(storage) for storage in saved.storages
            if storage.node in saved.batch_dependent and not meta.is_backward(storage.node)
            and not _stays_inside(storage, saved, layers)
        }  # fmt: skip
        for value in saved.candidates:
            if _stays_inside(value.storage, saved, layers):
                segment = min(value.reads)
                if self.kind == "full" or not _repeats_products(value.storage.node, segment, saved, dropped):
                    dropped[id(value.storage)] = value.name
        return list(dropped.values())


def _stays_inside(storage: Storage, saved: SavedTensors, layers: dict[Node, str]) -> bool:
    """True for what a layer computes from the batch, and no other layer reads in the forward."""
    node = storage.node
    if not layers[node] or node not in saved.batch_dependent:
        return False
    readers = {user for member in storage.members for user in member.users}
    return all(
        layers.get(user) == layers[node] for user in readers if saved.segment.get(user) == saved.segment.get(node)
    )


def _repeats_products(target: Node, segment: int, saved: SavedTensors, dropped: Collection[int]) -> bool:
    """True if a product runs again when `target` is recomputed in `segment` from what is alive there."""
    runs_again = reached([target], where=lambda n: n is target or not saved.is_alive(n, segment, dropped))
    return any(arithmetic(node.target) for node in runs_again)


def layers_of(local: LocalGraph) -> dict[Node, str]:
    """The path of the layer that each node belongs to; a node that partitioning made, by its operands; else ""."""
    layers: dict[Node, str] = {}
    for node in local.graph.nodes:
        path = meta.module_path(node)
        match = _LAYER.match(path)
        above = () if path or node.op != "call_function" else (layers[operand] for operand in operands(node))
        layers[node] = match[0] if match else next((layer for layer in above if layer), "")
    return layers
