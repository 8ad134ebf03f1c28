"""The reasons behind a plan as text: stored with each decision, printed by `Plan.explain`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from torch.fx import Node

from ..errors import LayoutError, PlanError
from ..graph import meta
from ..graph.graph import Role
from ..graph.meta import TensorMeta
from ..graph.text import seconds
from ..hardware.hardware import Hardware
from ..layout import AxisState, Layout
from ..mesh import Mesh
from ..reshard import reshard
from ..rules.rule import Group
from .op_strategies import NEAR, PART, RING, OpStrategy

if TYPE_CHECKING:
    from .decision import Decision
    from .plan import Plan

_PLACE = re.compile("\0(\\d+)\0")
_KINDS = {"slice": "its own piece taken", "mask": "kept on one rank", "vary": "taken as each rank's own"}


def in_place(inputs: Sequence[Node], number: int) -> str:
    """What stands in a text for the name of an operand, until `with_names`."""
    return f"\0{inputs.index(inputs[number])}\0"


def with_names(text: str, names: Sequence[str]) -> str:
    """`text` about a call whose operands have these names."""
    return _PLACE.sub(lambda place: names[int(place[1])], text) if "\0" in text else text


def reason(option: OpStrategy, group: Group, nodes: Sequence[Node], states: Sequence[AxisState]) -> str:
    """Why an op strategy was chosen: an operand that is sharded, partial values that pass through, or neither."""
    if option.name == NEAR:
        return "a window: queries stay, and ranks send keys and values to those whose queries are near by the mask"
    if option.name == PART:
        return "a part of a dim: ranks send each other what is in pieces of others before or behind the call"
    if option.name == RING:
        return "a ring: queries stay, and keys and values go from rank to rank"
    if option.factor:
        by = [i for i in sorted(group.operands) if group.factor_at(0, i, states[i]) == option.factor]
        as_is = f", as %{in_place(nodes, by[0])} is" if by else ""
        return f"cut along {_factor(option.factor)} of '{_shown(group)}'{as_is}"
    if option.whole:
        return f"whole: no operand is cut where '{_shown(group)}' may be"
    names = [f"%{in_place(nodes, i)}" for i, state in option.takes.items() if state.kind == "P"]
    return f"stays partial: the op is linear in {' and '.join(dict.fromkeys(names))}"


def _shown(group: Group) -> str:
    """`m k, k n -> m n`: the factors of a call's tensors; `_` for a dim that cannot be sharded."""
    sides = (group.operands.values(), group.outputs.values())
    return " -> ".join(", ".join(" ".join(map(_factor, term)) or "()" for term in side) for side in sides)


def _factor(name: str | None) -> str:
    return ("d" + name[1:] if name.startswith(".") else name.replace(".", "")) if name else "_"


def moves(
    nodes: Sequence[Node], have: Sequence[Layout], want: Sequence[Layout], mesh: Mesh, hardware: Hardware
) -> Iterator[tuple[str, str]]:
    """Operands that are resharded, by place: the layouts, the collectives, and their time on `hardware`."""
    for number, (before, after) in enumerate(zip(have, want, strict=True)):
        tensor = meta.tensor(nodes[number])
        if before != after and tensor is not None:
            yield in_place(nodes, number), _move(tensor, before, after, mesh, hardware)


def settled(tensor: TensorMeta | None, before: Layout, after: Layout, mesh: Mesh, hardware: Hardware) -> str:
    """Sentence about a result that is resharded at once."""
    return f"the result {_move(tensor, before, after, mesh, hardware)}, once for all readers" if tensor else ""


def _move(tensor: TensorMeta, before: Layout, after: Layout, mesh: Mesh, hardware: Hardware) -> str:
    layouts = f"{before.show(tensor.shape)} becomes {after.show(tensor.shape)}"
    try:
        path = reshard(before, after, tensor.shape, tensor.dtype.itemsize, mesh, hardware)
    except LayoutError:
        return layouts
    steps = [f"{_KINDS.get(s.kind, s.kind)} over {s.axis}" for s in path.steps]
    return f"{layouts}: {', '.join(steps)} ({seconds(path.cost_us / 1e6)})"


def _explain_op(plan: Plan, name: str, decision: Decision) -> str:
    """The layouts of one operation, the reasons for them, and the cost of resharding its operands."""
    lines = [f"%{name}  {_takes(decision)}"]
    lines += [f"  {line}" for line in _reasons(decision)]
    readers = [n for n, d in plan.decisions.items() if name in d.reads]
    if readers:
        lines.append(f"  read by {', '.join('%' + n for n in readers[:8])}{' ...' if len(readers) > 8 else ''}")
    return "\n".join(lines)


def _reasons(decision: Decision) -> list[str]:
    """Why the layouts are as they are, and what is resharded."""
    reasons = [*decision.because, *(f"%{name} {text}" for name, text in decision.moves)]
    return reasons or [f"gradient of {decision.gradient_of}" if decision.gradient_of else decision.why]


def _moves_of(decision: Decision, operand: str) -> list[str]:
    return [f"%{name} {text}" for name, text in decision.moves if name == operand]


def _takes(decision: Decision) -> str:
    gives = ", ".join(str(layout) for layout in decision.given)
    takes = ", ".join(f"%{n} {layout}" for n, layout in zip(decision.reads, decision.operands, strict=False))
    return f"({takes}) -> {gives}" if takes else f"-> {gives}"


def explain(plan: Plan, name: str) -> str:
    """The storage layout of an input and the reason for it; its readers with layouts and costs. Raises PlanError, which
    names near ones, if the plan knows neither an input nor an operation of this name.
    """
    spec = next((i for i in plan.inputs if i.name == name), None)
    if spec is None:
        decision = plan.decisions.get(name.removeprefix("%"))
        if decision is not None:
            return _explain_op(plan, name.removeprefix("%"), decision)
        names = [*(i.name for i in plan.inputs), *plan.decisions]
        raise PlanError(f"the plan has no input and no operation {name!r}", _near(name, names), "correct the name")
    layout = plan.storage[name]
    lines = [f"{name}  {spec.role.value} {layout.show(spec.meta.shape)}"]
    for axis in [*layout.shard_axes(), *layout.varies]:
        lines.append(f"  {axis}: {plan.axis_strategies.get(axis, plan.strategy)}")
    if not layout.axes:
        lines.append(f"  whole on every rank: {plan.strategy}")
    if plan.objective is not None:
        lines.append(f"  chosen by Auto: {plan.objective}")
    node = plan.input_nodes.get(name, "")
    for reader, decision in plan.decisions.items():
        if node and node in decision.reads:
            layout = decision.operands[decision.reads.index(node)]
            lines.append(f"  read by %{reader} as {layout.show(spec.meta.shape)}")
            lines += [f"    {line}" for line in _moves_of(decision, node)]
    gradients = [n for n, d in plan.decisions.items() if d.gradient_of == name]
    for gradient in gradients if spec.role is Role.PARAM else ():
        lines.append(f"  gradient %{gradient}: {plan.decisions[gradient].outputs[0].show(spec.meta.shape)}")
        lines += [f"    {line}" for line in plan.decisions[gradient].because]
        for reader, decision in plan.decisions.items():
            if gradient in decision.reads:
                lines += [f"    %{reader}: {line}" for line in _moves_of(decision, gradient)]
    return "\n".join(lines)


def _near(name: str, names: Sequence[str]) -> str:
    matches = get_close_matches(name, names, 3, 0.4)
    return f"one of its names, as {', '.join(matches)}" if matches else "one of its names"
