"""What holds of every plan, whichever graph it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import PlanError, shown
from ..graph.graph import Role
from ..typed_values import check_fields

if TYPE_CHECKING:
    from .plan import Plan


def check_form(plan: Plan) -> None:
    """Raise PlanError or LayoutError: fields are of other types, or an input has no layout that fits it."""
    if len({spec.name for spec in plan.inputs}) < len(plan.inputs):
        raise _again("the plan names an input twice", "distinct names")
    for spec in plan.inputs:
        check_fields(spec)
        if spec.name not in plan.storage:
            raise _again(f"the plan has no storage layout for {spec.name!r}", "one for each input")
        plan.storage[spec.name].check(spec.meta.shape, plan.mesh, spec.name)
    for name, layout in plan.created_storage.items():
        layout.check((0,) * len(layout.dims), plan.mesh, name)
    if plan.owner_axis:
        plan.mesh.axis_size(plan.owner_axis)
    params = {spec.name for spec in plan.inputs if spec.role is Role.PARAM}
    if set(plan.update_owners) - params or bool(plan.update_owners) != bool(plan.owner_axis):
        owned = ", ".join(plan.update_owners) or "nothing"
        problem = f"the plan has owner_axis {plan.owner_axis!r} and owners of {owned}"
        raise _again(problem, "an axis of the mesh, and owners of parameters")
    check_fields(options := plan.options)
    torch_dtype = getattr(torch, "float32" if options.reduce_dtype is None else options.reduce_dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise _again(f"options.reduce_dtype is {shown(options.reduce_dtype)}", "a floating dtype of torch, or None")
    if (options.keep_gathered_bytes or 0) < 0:
        raise _again(f"options.keep_gathered_bytes is {shown(options.keep_gathered_bytes)}", "at least 0")


def _again(problem: str, needed: str) -> PlanError:
    return PlanError(problem, needed, "plan this graph again")
