"""The load of storing one parameter by a storage option: collectives, copies and bytes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...hardware.hardware import Hardware
from ...mesh import Mesh
from ...plan.per_parameter_storage import StorageOption
from .formulation import StepLoad
from .prices import bulk_us, copy_us

_FORWARD, _BACKWARD, _UPDATE = range(3)


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter, its optimizer state and its gradient."""

    param: float
    state: float
    grad: float


def storage_load(
    option: StorageOption, sizes: ParameterBytes, hardware: Hardware, mesh: Mesh, axes: Sequence[str]
) -> StepLoad:
    """What a parameter stored over `axes` adds to the step of a rank; its tensor-parallel axis is not counted."""
    inside, across = (axes[-1:], axes[:-1]) if option.is_hybrid else (axes, ())
    ranks = prod(mesh.axis_size(a) for a in inside)
    sent = [0.0, 0.0, 0.0]
    if option.replicates_state:
        sent[_BACKWARD] += sum(bulk_us(hardware, "all_reduce", sizes.grad, mesh, a) for a in inside)
    elif sizes.grad:
        sent[_BACKWARD] += _staged_us(hardware, "reduce_scatter", sizes.grad, mesh, inside)
        sent[_BACKWARD] += sum(bulk_us(hardware, "all_reduce", sizes.grad / ranks, mesh, a) for a in across)
    if option.replicates_parameter and not option.replicates_state and sizes.grad:
        sent[_UPDATE] += _staged_us(hardware, "all_gather", sizes.param, mesh, inside)
    if not option.replicates_parameter:
        gathered = _staged_us(hardware, "all_gather", sizes.param, mesh, inside)
        sent[_FORWARD] += gathered
        sent[_BACKWARD] += gathered if option.regathers else 0.0
    state_share = 1 if option.replicates_state else ranks
    rest = sizes.param / (1 if option.replicates_parameter else ranks) + sizes.state / state_share
    kept = 0.0 if option.replicates_parameter or option.regathers or ranks == 1 else sizes.param
    copied = copy_us(hardware, sizes.param) if any(sent) else 0.0
    spent = (copied if sent[0] else 0.0, copied, copied if sent[2] else 0.0)
    return StepLoad(spent, stored=(sent[0], sent[1], sent[2]), rest=rest, kept=kept, made=sizes.grad / state_share)


def update_parts(option: StorageOption, mesh: Mesh, axes: Sequence[str]) -> int:
    """The number of ranks that share the update of a parameter."""
    over = axes[-1:] if option.is_hybrid else axes
    return 1 if option.replicates_state else prod(mesh.axis_size(a) for a in over)


def _staged_us(hardware: Hardware, kind: str, size: float, mesh: Mesh, axes: Sequence[str]) -> float:
    """A hierarchical collective, one stage an axis, the last axis first: each stage leaves a part for the next."""
    total = 0.0
    for axis in reversed(axes):
        total += bulk_us(hardware, kind, size, mesh, axis)
        size /= mesh.axis_size(axis)
    return total
