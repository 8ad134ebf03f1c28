"""A compiled step in one line, and for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..plan.data_parallel import DataParallel
from ..plan.strategy import Strategy

if TYPE_CHECKING:
    from .step import CompiledStep


def step_line(step: CompiledStep) -> str:
    """Its name, how it runs, and how often it did."""
    options, plan = step.options, step.plan
    if plan is not None:
        how = f"{plan.strategy}; mesh {plan.mesh}"
    elif options.auto is not None:
        how = "Auto"
    else:
        how = ", ".join(map(_name, options.strategies.parts))
        how += f"; mesh {options.mesh}" if options.mesh is not None else ""
    calls = f"{step.calls} call" + ("" if step.calls == 1 else "s")
    captures = f"{step.captures} capture" + ("" if step.captures == 1 else "s")
    state = f"{calls}, {captures}" if plan is not None else "not compiled yet"
    return f"<CompiledStep {step.__name__}: {how}; backend {options.backend.name}; {state}>"


def step_html(step: CompiledStep) -> str:
    """The line, and the plan that ran last."""
    plan = f"\n{step.plan._repr_html_()}" if step.plan is not None else ""  # pyright: ignore[reportPrivateUsage]
    return f"<p>{escape(step_line(step).strip('<>'))}</p>{plan}"


def _name(part: Strategy) -> str:
    return part.kind.name if isinstance(part, DataParallel) else type(part).__name__
