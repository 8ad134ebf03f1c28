"""Places that a mask has, in a trace: their number is a constant that each call compares, or a symbol."""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch.fx import Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.ops import BEHIND, NUMBERS_OF, ROWS_OF
from ..sizes import evaluate
from .branches import MOST, Branches, usual
from .cuda_attention import of_counted_rows
from .effects import ANY_COUNT, CountsRowsError, SizesFixedError
from .fake_inputs import Request
from .sized_forms import COUNTED

aten = torch.ops.aten
_OF_NUMPY: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.item: np.ndarray.item, torch.Tensor.tolist: np.ndarray.tolist, torch.Tensor.numpy: np.asarray,
}  # fmt: skip

_VIEWS = (
    aten.select.int, aten.squeeze.dim, aten.squeeze.default, aten.view.default, aten.unbind.int, operator.getitem,
    aten.detach.default,
)  # fmt: skip
"""Views that, if they have as many elements as there are, have them in order."""


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
    wholes: dict[str, int] = field(default_factory=dict[str, int])
    taken: dict[str, bool | None] = field(default_factory=dict[str, bool | None])
    masks: dict[Node, tuple[torch.Tensor, ...]] = field(default_factory=dict[Node, tuple[torch.Tensor, ...]])
    shared: list[tuple[Any, Any, str]] = field(default_factory=list[tuple[Any, Any, str]])

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
            self.numbers[key] = self.symbols.count(self.symbols.most(mask.numel()))
        places = ROWS_OF(mask, self.numbers[key])
        picked = mask != 0
        self.rows.setdefault(str(self.numbers[key]), BEHIND(picked.sum(), places))
        placed = _torch.traced_node(places)
        if placed is not None and mask.dim() == 1:
            self.masks[placed[0]] = picked, places
        return places

    def each(self, original: Any, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """`Tensor.__iter__`: the places that a mask of few elements has are constants, of which each is a branch."""
        if (places := self._places(rows)) is None:
            return original(rows)
        items = [torch.tensor(n, dtype=rows.dtype, device=rows.device).view(rows.shape[1:]) for n in places]
        self._share(rows, *items)
        return iter(items)

    def picked(self, x: torch.Tensor, index: Any) -> Any:
        """`x[index]` by computed integers: a copy, where eager has a view. NotImplemented for other indices."""
        parts: tuple[Any, ...] = cast(Any, index) if isinstance(index, tuple) else (index,)
        number = next((n for n, part in enumerate(parts) if self._is_place(part)), None)
        plain = all(type(part) in (int, slice, type(None), type(...)) or _is_places(part) for part in parts)
        if number is None or not plain or _torch.inside_transform():
            return NotImplemented
        before, behind = parts[:number], parts[number + 1 :]
        dim = sum(part is not None for part in before)
        if any(part is Ellipsis for part in before):
            dim = x.dim() - 1 - sum(part is not None for part in behind)
        out = x[(*[slice(None)] * dim, parts[number].reshape(1))].select(dim, 0)
        self._share(x, out)
        others = (*before, *behind)
        again = self.picked(out, others) if others else out
        return out[others] if again is NotImplemented else again

    def _is_place(self, part: Any) -> bool:
        if not _is_places(part) or part.dim() or _torch.traced_node(part) is None or _torch.known_constant(part):
            return False
        return self.known(part, False) is None

    def _share(self, *values: Any) -> None:
        """Eagerly, these have one memory."""
        self.shared += [(value, _content(value), self.line()) for value in values]

    def _refuse_writes(self) -> None:
        """Raise CaptureError if the step has written into what it has looped over, or read by numpy()."""
        for value, before, line in self.shared:
            if _content(value) != before:
                problem = (
                    "the step writes into what it has picked by a computed integer, or computed and read in Python"
                )
                raise CaptureError(problem, "values that stay", "copy them first: clone(), numpy().copy()", line)

    def _places(self, rows: torch.Tensor) -> list[int] | None:
        """The places of a mask, where `rows` are these, in order; each element of the mask is taken for true."""
        traced = _torch.traced_node(rows) if self.masks and _torch.is_fake(rows) else None
        node = traced and traced[0]
        while node is not None and node not in self.masks and node.target in _VIEWS:
            node = node.all_input_nodes[0]
        if node not in self.masks:
            return None
        picked, places = self.masks[node]
        shapes = [str([*shape]) for shape in (places.shape, places.shape[:1])]
        if str([*rows.shape]) not in shapes or _torch.version(rows) or _torch.version(places):
            return None
        if (number := len(self.branches.decided) + picked.numel()) > MOST:
            raise CaptureError(
                f"the step loops over the places of a mask of {picked.numel()} elements, each of which is a branch: "
                f"{number} with those before it",
                f"at most {MOST} branches in a step, of which each chosen set is a program",
                'take products of all experts at once: model.set_experts_implementation("grouped_mm") in transformers, '
                "wholestep.ExpertParallel on several ranks; or loop over all, as operations on no rows are right",
                self.line(),
            )
        elements = [self.branches.take(e, self.line(), True, together=True) for e in picked.unbind()]
        return None if None in elements else [n for n, there in enumerate(elements) if there]

    def read(self, function: Any, values: torch.Tensor, refusal: CaptureError) -> Any:
        """Return what a function of a tensor (`tolist`) makes of the traced integers `values`, as numbers; raises the
        `refusal` where Python gets none. The graph checks that they are at most the elements that they follow from.
        """
        if function in _OF_NUMPY and (places := self._places(values)) is not None:
            return self._numbers(function, values, np.array(places, dtype=np.int64).reshape(-1, *values.shape[1:]))
        traced = None if _torch.inside_transform() else _torch.traced_node(values)
        integral = not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)
        if function not in _OF_NUMPY or traced is None or not integral or self.request.options.branches is None:
            raise refusal
        if self.request.dynamic:
            raise SizesFixedError("the step reads integers that it computes", self.line())
        if self.symbols is None:
            raise CountsRowsError("the step reads integers that it computes", where=self.line()) from refusal
        read, most, values = values, _most(traced[0], self.symbols), values.detach().reshape(-1)
        numbers = [self.symbols.count(most) for _ in range(values.numel())]
        values = NUMBERS_OF(values, numbers)
        if not self.truth(((values >= 0) & (values <= most)).all(), likely=True):
            raise refusal
        self.rows |= {str(number): value for number, value in zip(numbers, values.unbind(), strict=True)}
        return self._numbers(function, read, np.array(numbers, dtype=object).reshape(read.shape))

    def _numbers(self, function: Any, values: torch.Tensor, numbers: np.ndarray[Any, Any]) -> Any:
        if function is torch.Tensor.numpy:
            self._share(values, numbers)
        return _OF_NUMPY[function](numbers)

    def truth(self, value: torch.Tensor, likely: bool | None = None) -> bool | None:
        """What a value that torch asks for is taken for, which most often is `likely`. Offline, nothing is asked."""
        if likely is None and self.request.options.branches is None:
            return usual(value)
        return self.branches.take(value, self.line(), likely)

    def asked(self) -> AbstractContextManager[None]:
        """Inside this context, a question of Python about numbers of rows is a branch."""
        return _torch.attributes_set([(self.symbols, "branch", self.branch)] if self.request.counts else [])

    def forms(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Functions, by owner and name, and what runs in their place in a trace that counts."""
        if not self.request.counts:
            return []
        attended = (torch.nn.functional, "scaled_dot_product_attention", of_counted_rows)
        own = (torch, "cat", self._joined), (torch.Tensor, "__iter__", self.each), (torch, "batch_norm", _normed)
        return [*COUNTED, attended, *own, (torch, "instance_norm", _normed_apart)]

    def ops(self) -> dict[Any, Callable[..., Any]]:
        """The same for ops."""
        return {aten.slice.Tensor: self._cut, aten.split_with_sizes.default: self._apart} if self.request.counts else {}

    def _settled(self, condition: Any) -> bool:
        if isinstance(condition, bool):
            return condition
        return self.symbols is not None and self.symbols.settled(condition)

    def _cut(self, x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        """Keep a slice; between numbers that were counted, it most often is inside of what it cuts."""
        size: Any = x.shape[dim]
        if type(size) is int and (isinstance(start, torch.SymInt) or isinstance(end, torch.SymInt)):
            first, last = 0 if start is None else start, size if end in (None, sys.maxsize) else end
            if all(map(self._settled, (first >= 0, first <= last, last <= size))):
                self.wholes[str(last - first)] = size
        return NotImplemented

    def _apart(self, x: torch.Tensor, sizes: Sequence[Any], dim: int = 0) -> Any:
        """Keep the pieces of a tensor, which are all of it."""
        whole: Any = x.shape[dim]
        if any(isinstance(size, torch.SymInt) for size in sizes) and self._settled(sum(sizes) == whole):
            self.wholes |= {str(size): whole for size in sizes}
        return NotImplemented

    def _joined(self, original: Any, tensors: Any, dim: Any = 0, **named: Any) -> torch.Tensor:
        """`torch.cat`: pieces of one tensor most often have as many rows together as that one."""
        out: torch.Tensor = original(tensors, dim, **named)
        sizes = {self.wholes.get(str(piece.shape[dim])) for piece in tensors} if self.wholes else {None}
        size, rows = sizes.pop() if len(sizes) == 1 else None, cast(Any, out.shape[dim])
        if size is None or not self._settled(rows == size):
            return out
        return torch.nn.functional.pad(out, [0, 0] * (out.dim() - 1 - dim % out.dim()) + [0, size - rows])

    def unchecked(self) -> list[str]:
        """What torch took for given, and cannot be a branch of the step. Raises CaptureError as `_refuse_writes`."""
        self._refuse_writes()
        assumed = self.symbols.assumed if self.symbols is not None and self.request.counts else []
        return [text for text in assumed if not self.branch(f"({text})", True)]

    def branch(self, text: str, likely: bool | None = None) -> bool | None:
        """Return what a comparison of numbers of rows is taken for: the same wherever Python asks again."""
        if text not in self.taken:
            numbers = {symbol: self.rows[symbol] for symbol in re.findall(r"\w+", text) if symbol in self.rows}
            bounds = {"min": _bound(torch.minimum), "max": _bound(torch.maximum)}
            value = evaluate(text, {**numbers, **bounds})
            likely = self._likely(text) if likely is None else likely
            self.taken[text] = self.branches.take(value, self.line(), likely, text)
        return self.taken[text]

    def _likely(self, text: str) -> bool:
        """What the comparison is for many rows, or for the first number that earlier answers leave."""
        assert self.symbols is not None, "numbers of rows are symbols"
        hints = self.symbols.record.hints
        for sizes in (hints, *(dict.fromkeys(hints, few) for few in range(3))):
            if all(bool(evaluate(other, sizes)) is answer for other, answer in self.taken.items()):
                return bool(evaluate(text, sizes))
        return bool(evaluate(text, hints))


def _normed(
    original: Any, input: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float,
    eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    """`batch_norm` of rows that are counted: kernels refuse none, or divide by their number."""
    if not any(isinstance(size, torch.SymInt) for size in input.shape):
        return original(input, weight, bias, mean, var, training, momentum, eps, cudnn)
    dims, shape = [d for d in range(input.dim()) if d != 1], [1, -1, *[1] * (input.dim() - 2)]
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    center = (wide.mean(dims) if training else mean).view(shape)
    apart = wide - center
    spread = (apart.square().mean(dims) if training else var).view(shape)
    if training and mean is not None:
        rows = torch.ones_like(wide[:, :1]).sum()
        for kept, now in ((mean, center), (var, spread * (rows / (rows - 1)))):
            kept.copy_(torch.where(rows > 0, kept + momentum * (now.detach().view(-1) - kept), kept))
    out = apart * (spread + eps).rsqrt()
    out = out if weight is None else out * weight.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(input.dtype)


def _normed_apart(original: Any, input: torch.Tensor, weight: Any, bias: Any, mean: Any, *rest: Any) -> torch.Tensor:
    """`instance_norm` of rows that are counted, by a kernel that refuses none."""
    if mean is not None or not isinstance(cast(object, input.shape[0]), torch.SymInt):
        return original(input, weight, bias, mean, *rest)
    return torch.group_norm(input, input.shape[1], weight, bias, rest[3])


def _most(node: Node, symbols: _torch.Symbols) -> int:
    """The most elements of the integers that those of a node follow from."""
    most, waiting, seen = 1, [node], set[Node]()
    while waiting:
        value = meta.value(node := waiting.pop())
        values = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
        if whole := [v.numel() for v in values if isinstance(v, torch.Tensor) and not v.is_floating_point()]:
            most = max(most, *map(symbols.most, whole))
            waiting += [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(node.all_input_nodes)
    return most


def _is_places(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _content(value: Any) -> Any:
    """What a write into a tensor or an array of numpy changes."""
    return _torch.version(value) if isinstance(value, torch.Tensor) else value.tobytes()


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
