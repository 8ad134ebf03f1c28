"""Compares two plans: storage layouts, bytes of a rank, and layouts of operations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import PlanError
from ..graph.graph import Input, Role
from ..graph.text import human, short_dtype, table

if TYPE_CHECKING:
    from .plan import Plan


_ROLES = (Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD)
_SHOWN = 12
_HEAD = ("tensors", "role", "count", "from", "to", "bytes/rank", "becomes", "change")


@dataclass(frozen=True)
class Moved:
    """Tensors with the same change of storage layout: their names as one pattern, their number, bytes per rank in all.

    A layout is "-" where a plan lacks the tensors.
    """

    pattern: str
    role: str
    count: int
    before: str
    after: str
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class Difference:
    """Differences between two plans.

    `moved`: the largest change first. `stays`: how many tensors keep their storage layout. `operations`: names of
    those whose layouts differ, of `compared` in all.
    """

    before: Plan
    after: Plan
    moved: tuple[Moved, ...]
    stays: int
    operations: tuple[str, ...]
    compared: int

    def __str__(self) -> str:
        before, after = self.before, self.after
        lines = [f"from  {before.strategy}; mesh {before.mesh}", f"to    {after.strategy}; mesh {after.mesh}"]
        if self.moved:
            lines += ["", *table([_HEAD, *map(_row, self.moved)])]
        lines += ["", f"{sum(m.count for m in self.moved)} tensors have another storage layout, {self.stays} the same"]
        roles: dict[str, Literal["param", "state"] | None] = {"parameters": "param", "state": "state", "all": None}
        for words, role in roles.items():
            had, has = before.stored_bytes(role), after.stored_bytes(role)
            lines.append(f"stored per rank, {words}: {human(had)} -> {human(has)} ({_change(has - had)})")
        some = ", ".join(f"%{name}" for name in self.operations[:_SHOWN])
        tail = f": {some}{' ...' if len(self.operations) > _SHOWN else ''}" if some else ""
        lines.append(f"{len(self.operations)} of {self.compared} operations take or give other layouts{tail}")
        for plan, name in ((before, "from"), (after, "to")):
            if plan.objective is not None:
                lines.append(f"{name}: chosen by Auto: {plan.objective}")
        return "\n".join(lines)


def diff(before: Plan, after: Plan) -> Difference:
    """What is different in `after`."""
    had, has = _stored(before), _stored(after)
    groups: dict[tuple[str, str, str, str], list[tuple[int, int]]] = {}
    stays = 0
    for name in {**had, **has}:
        role, was, was_bytes = had.get(name, ("", "-", 0))
        role, now, now_bytes = has.get(name, (role, "-", 0))
        if (was, was_bytes) == (now, now_bytes):
            stays += 1
        else:
            groups.setdefault((re.sub(r"\d+", "*", name), role, was, now), []).append((was_bytes, now_bytes))
    moved = [
        Moved(pattern, role, len(sizes), was, now, sum(a for a, _ in sizes), sum(b for _, b in sizes))
        for (pattern, role, was, now), sizes in groups.items()
    ]
    moved.sort(key=lambda m: -abs(m.after_bytes - m.before_bytes))
    ops = {**before.decisions, **after.decisions}
    changed = tuple(name for name in ops if not _same(before, after, name))
    return Difference(before, after, tuple(moved), stays, changed, len(ops))


def refuse_other_parameters(plan: Plan, step_plan: Plan) -> None:
    """Raise PlanError naming the parameters that differ between `plan` and `step_plan`, the plan of this step."""
    if (plan.mixed_precision, plan.offload) != (step_plan.mixed_precision, step_plan.offload):
        raise PlanError(
            f"the plan was made with {plan.mixed_precision}, offload {plan.offload}; this step has "
            f"{step_plan.mixed_precision}, offload {step_plan.offload}",
            "the same mixed_precision= and offload= in compile as in the capture that was planned",
            "pass compile the options of the plan, or plan this step again",
        )
    expected, present = _params(plan), _params(step_plan)
    differing = [name for name in {**expected, **present} if expected.get(name) != present.get(name)]
    if differing:
        both = [(n, expected.get(n, "absent"), present.get(n, "absent")) for n in differing[:4]]
        layouts = "; ".join(f"{name}: {planned} in the plan, {actual} here" for name, planned, actual in both)
        tail = f" (and {len(differing) - 4} more)" if len(differing) > 4 else ""
        problem = f"the plan does not fit this step: {layouts}{tail}"
        raise PlanError(problem, "the parameters of the plan, in its layouts", "plan this step again")


def _params(plan: Plan) -> Mapping[str, str]:
    return {i.name: _layout(plan, i) for i in plan.inputs if i.role is Role.PARAM}


def _layout(plan: Plan, spec: Input) -> str:
    return f"{short_dtype(spec.meta.dtype)}[{plan.storage[spec.name].show(spec.meta.shape)}]"


def _stored(plan: Plan) -> dict[str, tuple[str, str, int]]:
    """Role, layout and bytes on the first rank of all tensors that a rank keeps between calls."""
    return {i.name: (i.role.value, _layout(plan, i), plan.input_bytes(i)) for i in plan.inputs if i.role in _ROLES}


def _same(before: Plan, after: Plan, name: str) -> bool:
    was, now = before.decisions.get(name), after.decisions.get(name)
    return was is not None and now is not None and (was.operands, was.given) == (now.operands, now.given)


def _row(moved: Moved) -> tuple[str, ...]:
    change = moved.after_bytes - moved.before_bytes
    return (
        moved.pattern, moved.role, str(moved.count), moved.before, moved.after, human(moved.before_bytes),
        human(moved.after_bytes), _change(change),
    )  # fmt: skip


def _change(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{human(abs(size_bytes))}"
