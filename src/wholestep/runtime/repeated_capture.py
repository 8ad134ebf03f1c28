"""Traces a step again, before a call runs its program, and compares: what the step reads and no guard knows is found.

A capture changes nothing, so it can be repeated. Ranks do it at the same calls and tell each other what they found, so
that all of them raise.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import zip_longest
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch

from .. import _torch
from ..capture.capture import Capture, capture_again
from ..capture.capture_options import CaptureOptions
from ..capture.effects import Effects, Extra, Recipe, Write
from ..capture.host_numbers import At
from ..capture.locations import MISSING, SIMPLE, Location
from ..distributed.rendezvous import Rendezvous
from ..distributed.sections import show_ranks
from ..errors import CaptureError, RankMismatchError, WholestepError, shown
from ..graph import meta
from ..tuning import TUNING
from .consistency import graph_lines
from .program import Program
from .step_inputs import StepInputs

_ALWAYS, _QUICK_S = (2, 8), 1.0  # calls that are verified whatever it takes; a trace that call 5 waits for, too


@dataclass
class Verification:
    """When to trace a step again: at calls 2 and 8, at 5 if that took a second at most, at 17, 32, ... while that takes
    `TUNING.verify_share` of the run time; always if `option` is True. Every second is odd: what alternates is found.
    """

    fn: Callable[..., Any]
    name: str
    options: CaptureOptions
    option: bool | str
    _spent: float = 0.0
    _longest: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _last: int = 1
    _seen: int = 1
    _exchanges: int = 0

    def is_due(self, call: int) -> bool:
        """Whether it may be the turn of a call, counted from 1. The same on all ranks."""
        power = call.bit_length() - 1
        return bool(self.option) and call == 2**power + (power % 2 == 0) and call > self._seen

    def verify(self, call: int, program: Program, inputs: StepInputs | None, ranks: Rendezvous, label: str) -> None:
        """Raise CaptureError, on all ranks, if the step, traced now, is not what the program of one of them runs.

        Without `inputs`, this rank has traced this call already. Ranks whose program has no collectives may call it
        alone: they tell each other nothing.
        """
        tell = partial(self._told_by_all, call, ranks if program.meets else None, label)
        begin, self._seen = time.monotonic(), call
        share = self._spent + self._longest <= TUNING.verify_share * (begin - self._began)
        allowed = share if call > _ALWAYS[-1] else self._longest <= _QUICK_S
        if call not in _ALWAYS and self.option is not True and any(tell(() if allowed else ("no time",))):
            return
        failure: WholestepError | None = None
        try:
            difference = self._difference(program.capture, inputs, program) if inputs is not None else None
            failure = None if difference is None else self._error(call, *difference)
        except WholestepError as error:
            failure = error
        took = time.monotonic() - begin
        self._spent, self._longest = self._spent + took, max(self._longest, took)
        texts = tell(() if failure is None else (failure.found, failure.needed, failure.next_step, failure.where))
        if failure is not None:
            raise failure
        for rank, parts in enumerate(texts):
            if parts:
                raise CaptureError(f"on {show_ranks([rank])}: {parts[0]}", *parts[1:])
        self._last = call

    def _told_by_all(self, call: int, ranks: Rendezvous | None, label: str, texts: tuple[str, ...]) -> list[Any]:
        if ranks is None or ranks.size == 1:
            return [texts]
        self._exchanges += 1
        what = f"what call {call} of {self.name} is, traced again"
        rows: list[tuple[int, tuple[str, ...]]] = ranks.gather(
            f"{label}/verify/{self._exchanges}", (call, texts), what, tuple[int, tuple[str, ...]]
        )
        if any(number != call for number, _ in rows):
            problem = f"ranks trace {self.name} again at different calls: {[number for number, _ in rows]}"
            raise RankMismatchError(problem, "the same calls on all ranks", "call the step equally often on every rank")
        return [parts for _, parts in rows]

    def _error(self, call: int, was: str, now: str, where: str) -> CaptureError:
        return CaptureError(
            f"call {call} of {self.name} is not what its program does: the step reads a value that has changed and "
            f"that wholestep does not compare. The program has {was}; traced now, the step has {now}. Calls after "
            f"call {self._last} may have run with the old value",
            "values that each call compares: numbers, text, containers and attributes of objects that the step's "
            "function, its arguments, closures or globals lead to",
            "pass the value to the step, or keep it in an attribute",
            where,
        )

    def _difference(self, captured: Capture, inputs: StepInputs, program: Program) -> tuple[str, str, str] | None:
        options = replace(self.options, device=program.world.device)
        try:
            again = capture_again(self.fn, inputs.args, inputs.kwargs, options, captured, inputs.global_shapes)
        except CaptureError as error:
            return "no such line", error.found, error.where
        if captured.symbols is not None and captured.symbols.record.hints != again.sized.record.hints:
            return None  # numbers that torch computes from sizes may have another form
        return _first_difference(captured, again, program)


def _first_difference(captured: Capture, again: Capture, program: Program) -> tuple[str, str, str] | None:
    """What a capture and the next one have in other words: two texts, and the user's line."""
    device = program.world.device
    captures = () if again.traced.graph is captured.traced.graph else (captured, again)
    texts = [graph_lines(capture, device) for capture in captures]
    for was, now, *numbered in zip_longest(*texts, *map(_numbered, texts), fillvalue=""):
        if numbered[0] != numbered[1]:
            line = meta.line_behind(again.traced.graph, now) or meta.line_behind(captured.traced.graph, was)
            return was.strip() or "no more", now.strip() or "no more", line
    inputs = {spec.name: node for spec, node in again.traced.placeholders()}
    for name, old, new in _constants(captured, again, program):
        if name in inputs and not _same_tensor(old, new):  # others nothing reads
            users = [meta.source_line(user) for user in inputs[name].users]
            return f"a constant {_values(old)}", _values(new), next(filter(None, users), "")
    for was, now in zip_longest(*map(list, map(_host_lines, (captured, again))), fillvalue="nothing"):
        if was != now:
            return was, now, ""
    return None


def _numbered(lines: Sequence[str]) -> Iterator[str]:
    """Lines in which nodes have numbers: a trace names a node after those before it, also after some that are gone."""
    numbers = dict[str, str]()
    for line in lines:
        if defined := re.match(r" *(%\w+) = ", line):
            numbers[defined[1]] = f"%{len(numbers)}"
        yield re.sub(r"%\w+", lambda name: numbers.get(name[0], name[0]), line)


def _constants(captured: Capture, again: Capture, program: Program) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Each constant of a trace: its name, the tensor that the program reads, the tensor that the step reads now."""
    for name, new in again.traced.constants.items():
        old = program.local.constants.get(name, new)
        if old.shape != new.shape:  # a shard
            old = captured.traced.constants.get(name, new)
        yield name, old, new


def _same_tensor(old: torch.Tensor, new: torch.Tensor) -> bool:
    if (old.shape, old.dtype) != (new.shape, new.dtype) or old.is_meta or new.is_meta or old is new:
        return (old.shape, old.dtype) == (new.shape, new.dtype)
    bits = [_torch.local_tensor(t.detach()).cpu().reshape(-1).contiguous().view(torch.uint8) for t in (old, new)]
    return torch.equal(*bits)


def _values(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {shown(cast(Any, tensor.detach().reshape(-1)[:3]).tolist())}"


def _host_lines(captured: Capture) -> Iterator[str]:
    """What the host does in each call, and what the call returns, as text."""
    effects: Effects = captured.effects
    yield f"the result {captured.results.outline} of {[_text(leaf) for leaf in captured.result_leaves]}"
    for number, line in enumerate(effects.program.instructions):
        yield f"the number {number} = {_called(line)}"
    for choice in effects.program.decisions:
        yield f"the choice {choice.expected} at {choice.where}"
    for write in (write for write in effects.writes if not _is_done(write)):
        yield f"{write.place.path} = {'nothing' if write.recipe is None else _recipe(write.recipe)}"
    for call in effects.calls:
        yield f"the call {_name(call.fn)}{_recipe(call.recipe)}"
    yield f"{len(effects.rebound)} replaced tensors, flags {effects.flags}, gradients cleared {captured.cleared_grads}"


def _is_done(write: Write) -> bool:
    """Whether its place holds already what a write assigns: a trace does not see such a write."""
    now = write.place.get()
    if write.recipe is None or any(isinstance(leaf, (At, Extra)) for leaf in write.recipe.leaves):
        return write.recipe is None and now is MISSING
    then = write.recipe.value((), {})
    return now is then or (isinstance(now, SIMPLE) and type(now) is type(then) and now == then)


def _called(line: partial[Any]) -> str:
    place = getattr(cast(Any, line.func), "__self__", None)
    where = f" {place.path}" if isinstance(place, Location) else ""
    return f"{_name(line.func)}{where}({', '.join(map(_text, line.args))})"


def _recipe(recipe: Recipe) -> str:
    return f"({', '.join(map(_text, recipe.leaves))})"


def _text(value: object) -> str:
    if isinstance(value, (At, Extra)):
        return f"{type(value).__name__} {value.index}"
    if isinstance(value, (*SIMPLE, Enum)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, cast(Sequence[object], value)))})"
    return value.path if isinstance(value, Location) else _name(value)


def _name(value: object) -> str:
    named = isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodType))
    return value.__qualname__ if named else type(value).__name__
