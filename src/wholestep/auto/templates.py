"""Named ways to use a mesh: every data-parallel style, on its own and beside tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ..errors import WholestepError
from ..mesh import Mesh
from ..plan.data_parallel import DataParallel
from ..plan.optimal.find import Solved
from ..plan.storage_styles import STYLES
from ..plan.strategy import Strategies, Strategy


@dataclass(frozen=True)
class Template:
    """A named way to use a mesh. `strategies` is an error where the model allows none; `solved` is set where it is the
    solution of a program. `alike` is nearly the same, but the same in all equal layers, where `strategies` are not.
    """

    name: str
    strategies: tuple[Strategy, ...] | WholestepError
    solved: Solved | None = None
    alike: tuple[Strategy, ...] | None = None


def templates(
    mesh: Mesh,
    tensor: Strategy | WholestepError | None = None,
    tensor_axis: str = "tp",
    semantics: Literal["per_rank", "global"] = "per_rank",
    base: DataParallel | None = None,
    alone: bool = True,
) -> list[Template]:
    """Every data-parallel style on all axes, and on those that `tensor` leaves with it on its own.

    `base` gives all options of a style but those that a template sets. Without `alone`, templates in which `tensor` is
    not used are left out.

    Raises:
        MeshError: `tensor` is given, and the mesh has no `tensor_axis`.
    """
    base = replace(base or DataParallel(), semantics=base.semantics if base else semantics)
    found = [Template(name, (data,)) for name, data in _styles(mesh.names, base)] if alone or tensor is None else []
    if tensor is None:
        return found
    mesh.axis_size(tensor_axis)
    others = tuple(name for name in mesh.names if name != tensor_axis)
    if isinstance(tensor, WholestepError):
        return [*found, Template(f"tensor parallel on {tensor_axis}", tensor)]
    if not others:
        return [*found, Template(f"tensor parallel on {tensor_axis}", (tensor,))]
    return found + [
        Template(f"{name} + tensor parallel on {tensor_axis}", (data, tensor)) for name, data in _styles(others, base)
    ]


def _styles(axes: tuple[str, ...], base: DataParallel) -> Iterator[tuple[str, DataParallel]]:
    for style in STYLES.values():
        if not style.searched or (style.grouped and len(axes) < 2):
            continue
        ways = ((False, ", kept"), (True, ", gathered again")) if style.gathers_parameters else ((None, ""),)
        for again, how in ways:
            data = replace(base, style=style.name, axis=axes, reshard_after_forward=again)
            yield f"{style.name}{how} on {','.join(axes)}", data


def batches(strategies: Strategies, mesh: Mesh) -> int:
    """How many of the captured batches make up a step of the mesh."""
    data = strategies.data
    per_rank = data is not None and data.semantics == "per_rank"
    return prod(mesh.axis_size(axis) for axis in data.axes(mesh)) if data is not None and per_rank else 1
