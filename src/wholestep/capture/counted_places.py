"""Places that a mask has, in a trace: their number is a constant that each call compares, or a symbol."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _torch
from ..errors import CaptureError
from ..graph.ops import ROWS_OF
from ..sizes import evaluate
from .branches import Branches
from .effects import ANY_COUNT, CountsRowsError, SizesFixedError
from .fake_inputs import Request


@dataclass
class CountedPlaces:
    """The masks of one trace. `known(tensor, counts)` reads what the batch determines; `line` is the one that runs."""

    request: Request
    symbols: _torch.Symbols | None
    branches: Branches
    known: Callable[[torch.Tensor, bool], torch.Tensor | None]
    line: Callable[[], str]
    numbers: dict[Any, torch.SymInt] = field(default_factory=dict[Any, torch.SymInt])
    rows: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    taken: dict[str, bool | None] = field(default_factory=dict[str, bool | None])

    def of(self, mask: torch.Tensor) -> Any:
        """Return the places that a traced mask has. Their number is a symbol, the same one for the same mask; but for
        the first number that the batch determines at a line.
        """
        traced = _torch.traced_node(mask)
        lines = self.request.promoted.numbers & {ANY_COUNT, self.line()}
        if traced is None or not lines or not self.branches.depends_on_tensors(traced[0]):
            total = self.known((mask != 0).sum(), True)
            if total is not None:
                with _torch.outside_of_trace():
                    count = int(total)
                return torch.nonzero_static(mask, size=count)
        if traced is None or not mask.dim() or _torch.inside_transform():
            return NotImplemented
        if self.request.dynamic:
            raise SizesFixedError("the step counts rows", self.line())
        if self.symbols is None:
            raise CountsRowsError("the step counts rows", where=self.line())
        key = traced[0], _torch.version(mask)
        if key not in self.numbers:
            self.numbers[key] = self.symbols.count(mask.numel())
        places = ROWS_OF(mask, self.numbers[key])
        self.rows.setdefault(str(self.numbers[key]), places)
        return places

    def branch(self, text: str) -> bool | None:
        """Return what a comparison of numbers of rows is taken for: the same wherever Python asks again."""
        if text not in self.taken:
            used = {symbol: self.rows[symbol] for symbol in re.findall(r"\w+", text) if symbol in self.rows}
            numbers = {symbol: rows.new_ones(rows.shape[0]).sum() for symbol, rows in used.items()}
            bounds = {"min": _bound(torch.minimum), "max": _bound(torch.maximum)}
            value = evaluate(text, {**numbers, **bounds})
            self.taken[text] = self.branches.take(value, self.line(), self._likely(text))
        return self.taken[text]

    def _likely(self, text: str) -> bool:
        """What the comparison is for many rows, or for the first number that earlier answers leave."""
        assert self.symbols is not None, "numbers of rows are symbols"
        hints = self.symbols.record.hints
        for sizes in (hints, *(dict.fromkeys(hints, few) for few in range(3))):
            if all(bool(evaluate(other, sizes)) is answer for other, answer in self.taken.items()):
                return bool(evaluate(text, sizes))
        return bool(evaluate(text, hints))


def _bound(of_two: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *values: functools.reduce(of_two, map(torch.as_tensor, values))


def asked_number(error: Exception, where: str) -> CaptureError | None:
    """Return the error of Python that asks for a number of rows; None for another error."""
    if not (asked := _torch.asked_of(error)):
        return None
    return CaptureError(
        f"Python asks for a number of rows that the step counts while it runs: {asked}",
        "numbers of rows that operations alone read: one graph is captured and run for every batch",
        "compare it, or compute with it as it is: `max(1, x.shape[0])`, `len(x) == 0`; or leave the question out, as "
        "operations on no rows are right",
        where,
    )
