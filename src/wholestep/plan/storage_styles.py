"""The data-parallel styles, one row each: how parameters and their optimizer state are stored.

Imports no torch, so that the command line reads the names before it loads anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ..graph.graph import Input
    from ..layout import Layout
    from ..mesh import Mesh

Store: TypeAlias = Callable[["Input", "Layout", "Mesh", tuple[str, ...]], tuple["Layout", "Layout"]]
"""From a parameter, the layout that other strategies give it, the mesh and the data-parallel axes to the layouts of the
parameter and of its optimizer state.
"""


@dataclass(frozen=True)
class StorageStyle:
    """A data-parallel style.

    Args:
        store: a parameter's gradient is reduced to the layout of its optimizer state.
        shards_state: most state is sharded; False: gradients are all-reduced and every rank does the whole update.
        shards_gradients: the gradient of each micro-batch is reduce-scattered at once, and accumulates as a shard.
        gathers_parameters: most parameters are stored as shards and gathered before use (`reshard_after_forward`).
        grouped: shards on the last axis and replicates on the others, so it needs two axes.
    """

    name: str
    store: Store
    shards_state: bool = True
    shards_gradients: bool = False
    gathers_parameters: bool = False
    grouped: bool = False


def style_named(style: str | Store) -> StorageStyle:
    """The style of a name; a function as a style, named `module:function`.

    Only `TensorParallel("auto")` needs to know what such a style stores before it is asked: it expects shards.
    """
    if isinstance(style, str):
        return STYLES[style]
    function = getattr(style, "__qualname__", type(style).__name__)
    return StorageStyle(f"{style.__module__}:{function}", style, gathers_parameters=True)


def reduced_once(name: str) -> str:
    """The style that stores the same, and reduces gradients once for all micro-batches."""
    style = STYLES[name]
    stores = replace(style, name="", store=_replicate, shards_gradients=False)
    alike = (s for s in STYLES.values() if replace(s, name="", store=_replicate) == stores)
    return next(alike, style).name


def _sharded(param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Layout:
    """One dim sharded over all axes, inside the axes that shard it already: dim 0, or where it is shorter than they, as
    that of a stack of experts, the one that is padded least. A 0-dim tensor stays whole.

    The innermost axis of the mesh cuts first: a reduce-scatter goes along it first, a gather last, so that the outer
    axes, which have the slower links, carry pieces only (decision 0057).
    """
    if not have.dims:
        return have
    inner_first, ranks = tuple(name for name in reversed(mesh.names) if name in axes), prod(map(mesh.axis_size, axes))
    sizes = have.local_shape(param.meta.shape, mesh, mesh.coordinate(0))
    padded = [ceil(size / ranks) * ranks / max(size, 1) for size in sizes]
    long = 0 if sizes[0] >= ranks else padded.index(min(padded))
    return replace(have, dims=tuple((*of, *inner_first) if dim == long else of for dim, of in enumerate(have.dims)))


def _replicate(param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Layout, Layout]:
    return have, have


def _zero(param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Layout, Layout]:
    return have, _sharded(param, have, mesh, axes)


def _fully_shard(param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Layout, Layout]:
    return _sharded(param, have, mesh, axes), _sharded(param, have, mesh, axes)


def _hybrid(param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Layout, Layout]:
    return _fully_shard(param, have, mesh, axes[-1:])


STYLES: dict[str, StorageStyle] = {
    style.name: style
    for style in (
        StorageStyle("replicate", _replicate, shards_state=False),  # as DDP
        StorageStyle("zero1", _zero),
        StorageStyle("zero2", _zero, shards_gradients=True),
        StorageStyle("fully_shard", _fully_shard, gathers_parameters=True),  # ZeRO-3, FSDP
        StorageStyle("hybrid", _hybrid, gathers_parameters=True, grouped=True),  # HSDP
    )
}
