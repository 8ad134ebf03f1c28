"""What a call does on the host: checks what its program takes for granted, computes numbers, assigns, calls back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _torch
from ..capture.effects import Effects
from ..capture.expect import Expected
from ..capture.places import MISSING, Cell
from ..capture.state import StepState


class HostWork:
    """The work of one program beside its tensors."""

    def __init__(self, effects: Effects, state: StepState) -> None:
        self.effects, self._state = effects, state
        self._holds = _compiled(effects.expected)
        self._hooks, self._hooked = _torch.hook_count(), _hooks(state)
        self.missed: Expected | None = None

    def difference(self) -> str:
        """What the program takes for granted and is otherwise now; empty if nothing is."""
        self.missed = None
        if not self._holds():
            self.missed = next((e for e in self.effects.expected if not e.holds), None)
            if self.missed is not None:
                return self.missed.difference
        if _torch.hook_count() != self._hooks:
            self._hooks = _torch.hook_count()
            if _hooks(self._state) != self._hooked:
                return "the hooks of a module or of an optimizer changed"
        where = self.effects.program.decided_otherwise() if self.effects.program.decisions else ""
        return f"the choice made at {where} is another one" if where else ""

    def finish(self, numbers: Sequence[Any], extra: Sequence[Any]) -> None:
        """Assign what the step assigns, then make its callbacks, in order."""
        effects = self.effects
        for write in effects.writes:
            write.place.set(MISSING if write.made is None else write.made.value(numbers, extra))
        for name, flag in effects.flags:
            self._state.params[name].tensor.requires_grad_(flag)
        for called in effects.calls:
            args, kwargs = called.made.value(numbers, extra)
            called.fn(*args, **kwargs)


def _hooks(state: StepState) -> list[tuple[int, ...]]:
    """Which hooks modules, parameters and optimizers have, other than wholestep's own."""
    modules = [m for root in state.modules.values() for m in root.modules()]
    tables = [getattr(m, name) for m in modules for name in _MODULE_HOOKS]
    tables += [getattr(o, name) for o in state.optimizers.values() for name in _OPTIMIZER_HOOKS]
    found = [tuple(id(f) for f in table.values() if not _is_ours(f)) for table in tables]
    params = [h.tensor for h in state.params.values()]
    return found + [tuple(map(id, [*_torch.tensor_hooks(p), *_torch.accumulation_hooks(p)])) for p in params]


_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _is_ours(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("wholestep")


def _compiled(expected: Sequence[Expected]) -> Callable[[], bool]:
    """One function that is true when all that is expected is there, object for object; false says little.

    It is generated: a comparison costs 20 ns there, and a step reads hundreds of attributes.
    """
    names: dict[str, Any] = {}
    terms: list[str] = []
    for i, one in enumerate(expected):
        holder, key = one.place.holder, one.place.key
        names |= {f"e{i}": one, f"v{i}": one.value, f"h{i}": holder, f"k{i}": key}
        if one.kind == "content":
            terms.append(f"e{i}.holds")
        elif one.kind == "size":
            terms.append(f"len(h{i}) == v{i}")
        elif one.kind == "type":
            terms.append(f"type(h{i}[k{i}]) is v{i}")
        elif one.value is MISSING and isinstance(holder, dict):
            terms.append(f"k{i} not in h{i}")
        elif one.kind == "tensor" or one.value is MISSING:
            terms.append(f"e{i}.holds")
        elif isinstance(holder, Cell):
            names[f"h{i}"] = holder.cell
            terms.append(f"h{i}.cell_contents is v{i}")
        else:
            terms.append(f"h{i}[k{i}] is v{i}")
    body = " and ".join(terms) or "True"
    absent = "KeyError, IndexError, AttributeError, ValueError"
    exec(f"def holds():\n try:\n  return {body}\n except ({absent}):\n  return False", names)
    return names["holds"]
