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
    names = [spec.name for spec in plan.inputs]
    if len({*names}) < len(names):
        raise PlanError("the plan names an input twice", "distinct names", "plan this graph again")
    for spec in plan.inputs:
        check_fields(spec)
        if spec.name not in plan.storage:
            raise PlanError(
                f"the plan has no storage layout for {spec.name!r}", "one for each input", "plan this graph again"
            )
        layout = plan.storage[spec.name]
        layout.check(spec.meta.shape, plan.mesh, spec.name)
    for name, layout in plan.created_storage.items():
        layout.check((0,) * len(layout.dims), plan.mesh, name)
    if plan.owner_axis:
        plan.mesh.axis_size(plan.owner_axis)
    params = {spec.name for spec in plan.inputs if spec.role is Role.PARAM}
    if set(plan.update_owners) - params or bool(plan.update_owners) != bool(plan.owner_axis):
        owned = ", ".join(plan.update_owners) or "nothing"
        problem = f"the plan has owner_axis {plan.owner_axis!r} and owners of {owned}"
        raise PlanError(problem, "an axis of the mesh, and owners of parameters", "plan this graph again")
    check_fields(plan.options)
    dtype = plan.options.reduce_dtype
    torch_dtype = getattr(torch, dtype, None) if dtype is not None else torch.float32
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise PlanError(
            f"options.reduce_dtype is {shown(dtype)}", "a floating dtype of torch, or None", "plan this graph again"
        )
    if (plan.options.keep_gathered_bytes or 0) < 0:
        problem = f"options.keep_gathered_bytes is {shown(plan.options.keep_gathered_bytes)}"
        raise PlanError(problem, "at least 0", "plan this graph again")
