"""Prints a plan as a table of storage layouts and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ..graph.graph import Input, Role
from ..graph.text import human, table

if TYPE_CHECKING:
    from .plan import Plan


_SHOWN = 20  # rows of the table in a notebook


def show_plan(plan: Plan) -> str:
    """Parameters with their layouts and bytes per rank, totals, notes."""
    lines = [f"plan  {plan.strategy}; mesh {plan.mesh}", *(f"  {row}" for row in table(_rows(plan), left=(0, 1, 3)))]
    lines += [f"  {line}" for line in _stages(plan)]
    total = sum(i.meta.size_bytes for i in plan.inputs if i.role in (Role.PARAM, Role.STATE))
    params, state = plan.stored_bytes("param"), plan.stored_bytes("state")
    of_all = f"of {human(total)} in all ({(params + state) / max(total, 1):.1%})"
    lines.append(f"  stored per rank: {human(params)} parameters + {human(state)} state, {of_all}")
    lines += [f"  precision: {plan.precision}"] if plan.precision else []
    lines += [f"  {line}" for line in _movement(plan)]
    calls = len(plan.options.balanced)
    text = f"  queries of {calls} calls of causal attention are exchanged, so that ranks work alike"
    lines += [text] if calls else []
    if plan.objective is not None:
        lines.append(f"  chosen by Auto: {plan.objective}")
    lines += [f"  note: {note}" for note in (*plan.repeated, *plan.notes)]
    if plan.decomposed:
        lines.append(f"  decomposed into smaller operations that can be sharded: {_some(plan.decomposed)}")
    discovered = sorted(name for name, d in plan.decisions.items() if d.why == "discovered")
    if discovered:
        lines.append(f"  sharded by discovered rules (see wholestep.rule to write your own): {_some(discovered)}")
    ruleless = sorted({name for name, d in plan.decisions.items() if d.why == "no rule"})
    if ruleless:
        lines.append(f"  {len(ruleless)} operations without a rule take whole operands: {_some(ruleless)}")
    return "\n".join(lines)


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    """The table of parameters, header first."""
    params = [i for i in plan.inputs if i.role is Role.PARAM]
    states: dict[str, list[Input]] = {p.name: [] for p in params}
    for i in plan.inputs:
        if i.role is Role.STATE and i.owner in states:
            states[i.owner].append(i)
    rows = [("parameter", "stored as", "bytes/rank", "state stored as", "bytes/rank")]
    for p in params:
        big = [s for s in states[p.name] if s.meta.shape == p.meta.shape]
        layout = plan.storage[big[0].name].show(p.meta.shape) if big else "-"
        state = human(sum(plan.input_bytes(s) for s in states[p.name]))
        rows.append((p.name, plan.storage[p.name].show(p.meta.shape), human(plan.input_bytes(p)), layout, state))
    return rows


def _stages(plan: Plan) -> list[str]:
    """A line for each stage of a pipeline: where it is, what it has and stores."""
    pipeline = plan.strategies.pipeline if plan.strategies is not None else None
    if pipeline is None or not plan.owners:
        return []
    stored, lines = {i.name: i for i in plan.inputs if i.role in (Role.PARAM, Role.STATE)}, list[str]()
    ranks = plan.mesh.axis_size(pipeline.axis)
    for stage, names in enumerate(pipeline.stages or ()):
        size = sum(plan.input_bytes(i) for i in stored.values() if (i.owner or i.name) in names)
        parts = of_stage(names, [i.name for i in plan.inputs if i.role is Role.PARAM])
        lines.append(f"stage {stage} on {pipeline.axis}:{pipeline.rank_of(stage, ranks)}: {parts}; {human(size)}")
    return lines


def of_stage(names: Sequence[str], of_all: Sequence[str]) -> str:
    """The parameters of a stage in few words: the shortest paths that no parameter of another stage shares."""
    mine, out = set(names), dict[str, None]()
    for name in names:
        parts = name.split(".")
        heads = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        out[next(h for h in heads if all(o in mine for o in of_all if o == h or o.startswith(h + ".")))] = None
    return ", ".join(out) or "no parameters"


def plan_line(plan: Plan) -> str:
    """Strategy, mesh, number of parameters and bytes per rank in one line."""
    params = sum(i.role is Role.PARAM for i in plan.inputs)
    rest = plan.stored_bytes("param") + plan.stored_bytes("state")
    return f"<Plan {plan.strategy}; mesh {plan.mesh}; {params} parameters, {human(rest)} stored per rank>"


def plan_html(plan: Plan) -> str:
    """`plan_line` and the first rows of the table, as HTML."""
    head, *rows = ([escape(cell) for cell in row] for row in _rows(plan))
    tail = f"<p>and {len(rows) - _SHOWN} more: print(plan) shows all</p>" if len(rows) > _SHOWN else ""
    lines = [f"<p>{escape(plan_line(plan).strip('<>'))}</p>", "<table>", f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows[:_SHOWN]]
    return "\n".join([*lines, f"</table>{tail}"])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def _movement(plan: Plan) -> list[str]:
    limit = plan.options.keep_gathered_bytes
    if not any(plan.storage[i.name].is_sharded for i in plan.inputs if i.role is Role.PARAM):
        return []
    kept, count = "kept from forward to backward", len(plan.options.regathered) if limit is None else 0
    bounded = f"{kept} up to {human(limit)}, re-gathered beyond" if limit else "re-gathered for the backward"
    named = f"; {count} of them are re-gathered" if count else ""
    return [f"gathered parameters are {kept if limit is None else bounded}{named}"]
