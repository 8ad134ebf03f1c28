"""The candidates of a search: standard strategies by template, and the meshes of a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ..errors import WholestepError
from ..hardware.hardware import Hardware
from ..mesh import Axis, Mesh
from ..plan.context_parallel import ContextParallel
from ..plan.data_parallel import DataParallel
from ..plan.storage_styles import STYLES, reduced_once
from ..plan.strategies import Strategies
from ..plan.strategy import Strategy
from ..tuning import TUNING
from .ilp.solve import IlpResult

_OPEN = "auto"


@dataclass(frozen=True)
class TemplateKey:
    """A data-parallel style over `axes`, beside tensor parallelism on `tensor_axis` and context parallelism on
    `context_axis` if these are not empty, in a `ring` or by what `ContextParallel.method` says.

    `regathers`: sharded parameters are all-gathered a second time in the backward; None for styles that shard none.
    """

    style: str | None
    regathers: bool | None = None
    axes: tuple[str, ...] = ()
    tensor_axis: str = ""
    context_axis: str = ""
    ring: bool = False

    @property
    def sending_less(self) -> TemplateKey:
        """The template with the same computation and no collective that this one lacks: parameters are gathered once,
        and gradients reduced once for all micro-batches. Its lower bound holds for this one.
        """
        style = self.style and reduced_once(self.style)
        return replace(self, style=style, regathers=None if self.regathers is None else False)

    def __str__(self) -> str:
        how = "" if self.regathers is None else ", re-gathered" if self.regathers else ", kept"
        parts = [f"{self.style}{how}" + (f" on {','.join(self.axes)}" if self.axes else "")] if self.style else []
        parts += [f"tensor parallel on {self.tensor_axis}"] if self.tensor_axis else []
        ring = " in a ring" if self.ring else ""
        parts += [f"context parallel on {self.context_axis}{ring}"] if self.context_axis else []
        return " + ".join(parts)


@dataclass(frozen=True)
class Template:
    """A strategy to try. `name` is unique on a mesh, `strategies` an error where the model allows none, `key` None for
    integer programs. `symmetric` is nearly the same, equal in all equal layers.
    """

    name: str
    strategies: tuple[Strategy, ...] | WholestepError
    key: TemplateKey | None = None
    solved: IlpResult | None = None
    symmetric: tuple[Strategy, ...] | None = None


def templates(
    mesh: Mesh, tensor: Strategy | WholestepError | None = None, tensor_axis: str = "tp",
    base: DataParallel | None = None, alone: bool = True, symmetric: Strategy | None = None,
    context: ContextParallel | None = None,
) -> list[Template]:  # fmt: skip
    """Every data-parallel style on all axes, and on the axes that `tensor` leaves, beside it. Where the mesh has the
    axis of `context`, ranks along it share sequences in all of them.

    `base` gives the options of data parallelism that a template does not set. Without `alone`, templates that do not
    use `tensor` are left out. `symmetric` is nearly the same as `tensor`, and equal in all equal layers. Raises
    MeshError if `tensor` is given, and the mesh has no `tensor_axis`.
    """
    base, alone = base or DataParallel(), alone or tensor is None
    context = context if context is not None and context.axis in mesh.names else None
    data_axes = tuple(name for name in mesh.names if context is None or name != context.axis)
    candidates = [Template(str(key), beside, key) for key, beside in _styles(data_axes, base, context)] if alone else []
    if tensor is None:
        return candidates
    mesh.axis_size(tensor_axis)
    data_axes = tuple(name for name in data_axes if name != tensor_axis)
    only = TemplateKey(None, tensor_axis=tensor_axis)
    if isinstance(tensor, WholestepError):
        return [*candidates, Template(str(only), tensor, only)]
    for key, beside in _styles(data_axes, base, context) if data_axes or context else [(only, ())]:
        key = replace(key, tensor_axis=tensor_axis)
        alike = (*beside, symmetric) if symmetric is not None else None
        candidates.append(Template(str(key), (*beside, tensor), key, symmetric=alike))
    return candidates


def _styles(
    axes: tuple[str, ...], base: DataParallel, context: ContextParallel | None
) -> Iterator[tuple[TemplateKey, tuple[Strategy, ...]]]:
    """Data parallelism on `axes` by each style, and `context`, which stores as it does, or by the style alone."""
    for style in STYLES.values():
        if style.grouped and len(axes) < 2:
            continue
        key = TemplateKey(style.name, None, axes, context_axis=context.axis if context else "")
        if context is not None and not axes:
            yield key, (replace(context, style=style.name),)
            continue
        for regathers in (False, True) if style.gathers_parameters else (None,):
            data = replace(base, style=style.name, axis=axes, reshard_after_forward=regathers)
            yield replace(key, regathers=regathers), (data, *filter(None, [context]))
    if context is not None and context.method == "auto":  # which takes less memory, and hides messages
        for key, beside in _styles(axes, base, replace(context, method="ring")):
            yield replace(key, ring=True), beside


def batches(strategies: Strategies, mesh: Mesh) -> int:
    """How many captured batches one step of the mesh trains on."""
    data = strategies.data
    per_rank = data is not None and data.semantics == "per_rank"
    return prod(mesh.axis_size(axis) for axis in data.axes(mesh)) if data is not None and per_rank else 1


# -- meshes --------------------------------------------------------------------------------------------
def is_open(mesh: Mesh) -> bool:
    """True for a mesh `"auto=N"`: N ranks, axes to be chosen."""
    return mesh.names == (_OPEN,)


def meshes(
    ranks: int, hardware: Hardware, tensor_axis: str | None = None, context_axis: str | None = None
) -> list[Mesh]:
    """Factorizations of `ranks`: tensor parallelism innermost and inside a node, then context parallelism, data
    parallelism outside; for `hybrid` also data-parallel groups (`shard`) of one node or of eight.
    """
    node = hardware.ranks_per_node
    node = min(node, ranks) if node else ranks
    factorizations: list[Mesh] = []
    for inside in range(1, node + 1 if tensor_axis else 2):
        if ranks % inside or node % inside:
            continue
        last = [Axis(tensor_axis, inside)] if tensor_axis and inside > 1 else []
        rest = ranks // inside
        factorizations.append(Mesh((*([Axis("dp", rest)] if rest > 1 or not last else []), *last)))
        for nodes in TUNING.nodes_in_a_group:
            group = node * nodes // inside
            if 1 < group < rest and rest % group == 0:
                factorizations.append(Mesh((Axis("replicate", rest // group), Axis("shard", group), *last)))
        for parts in range(2, rest + 1):
            if context_axis and rest % parts == 0:
                data = [Axis("dp", rest // parts)] if rest > parts else []
                factorizations.append(Mesh((*data, Axis(context_axis, parts), *last)))
    return factorizations
