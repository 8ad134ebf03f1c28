"""The candidates of a search: standard strategies by template, and the meshes of a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ..errors import WholestepError
from ..hardware.hardware import Hardware
from ..mesh import Axis, Mesh
from ..plan.data_parallel import DataParallel
from ..plan.storage_styles import STYLES, reduced_once
from ..plan.strategies import Strategies
from ..plan.strategy import Strategy
from ..tuning import TUNING
from .ilp.solve import IlpResult

_OPEN = "auto"


@dataclass(frozen=True)
class TemplateKey:
    """A data-parallel style over `axes`, beside tensor parallelism on `tensor_axis` if that is not empty.

    `regathers`: sharded parameters are all-gathered a second time in the backward; None for styles that shard none.
    """

    style: str | None
    regathers: bool | None = None
    axes: tuple[str, ...] = ()
    tensor_axis: str = ""

    @property
    def sending_less(self) -> TemplateKey:
        """The template with the same computation and no collective that this one lacks: parameters are gathered once,
        and gradients reduced once for all micro-batches. Its lower bound holds for this one.
        """
        style = self.style and reduced_once(self.style)
        return replace(self, style=style, regathers=None if self.regathers is None else False)

    def __str__(self) -> str:
        how = "" if self.regathers is None else ", re-gathered" if self.regathers else ", kept"
        tensor = f"tensor parallel on {self.tensor_axis}"
        if self.style is None:
            return tensor
        return f"{self.style}{how} on {','.join(self.axes)}" + (f" + {tensor}" if self.tensor_axis else "")


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
) -> list[Template]:  # fmt: skip
    """Every data-parallel style on all axes, and on the axes that `tensor` leaves, beside it.

    `base` gives the options of data parallelism that a template does not set. Without `alone`, templates that do not
    use `tensor` are left out. `symmetric` is nearly the same as `tensor`, and equal in all equal layers. Raises
    MeshError if `tensor` is given, and the mesh has no `tensor_axis`.
    """
    base, alone = base or DataParallel(), alone or tensor is None
    candidates = [Template(str(key), (data,), key) for key, data in _styles(mesh.names, base)] if alone else []
    if tensor is None:
        return candidates
    mesh.axis_size(tensor_axis)
    data_axes = tuple(name for name in mesh.names if name != tensor_axis)
    only = TemplateKey(None, tensor_axis=tensor_axis)
    if isinstance(tensor, WholestepError):
        return [*candidates, Template(str(only), tensor, only)]
    beside = [((data,), replace(key, tensor_axis=tensor_axis)) for key, data in _styles(data_axes, base)]
    for data, key in beside if data_axes else [((), only)]:
        alike = (*data, symmetric) if symmetric is not None else None
        candidates.append(Template(str(key), (*data, tensor), key, symmetric=alike))
    return candidates


def _styles(axes: tuple[str, ...], base: DataParallel) -> Iterator[tuple[TemplateKey, DataParallel]]:
    for style in STYLES.values():
        if not style.searched or (style.grouped and len(axes) < 2):
            continue
        for regathers in (False, True) if style.gathers_parameters else (None,):
            data = replace(base, style=style.name, axis=axes, reshard_after_forward=regathers)
            yield TemplateKey(style.name, regathers, axes), data


def batches(strategies: Strategies, mesh: Mesh) -> int:
    """How many captured batches one step of the mesh trains on."""
    data = strategies.data
    per_rank = data is not None and data.semantics == "per_rank"
    return prod(mesh.axis_size(axis) for axis in data.axes(mesh)) if data is not None and per_rank else 1


# -- meshes --------------------------------------------------------------------------------------------
def is_open(mesh: Mesh) -> bool:
    """True for a mesh `"auto=N"`: N ranks, axes to be chosen."""
    return mesh.names == (_OPEN,)


def meshes(ranks: int, hardware: Hardware, tensor_axis: str | None = None) -> list[Mesh]:
    """Factorizations of `ranks`: tensor parallelism innermost and inside a node, data parallelism outside; for
    `hybrid` also data-parallel groups (`shard`) of one node or of eight.
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
    return factorizations
