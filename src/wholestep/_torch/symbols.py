"""Sizes of the batch as symbols of a trace: torch's symbolic ints, and what they become in a graph (`sizes`)."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import operator
import os
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch._decomp import decomposition_table  # pyright: ignore[reportUnknownVariableType]  # torch leaves it untyped
from torch._decomp import decompositions as torch_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import SLoc
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _constrain_range_for_size,
    statically_known_true,
)
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.printers import PythonPrinter

from ..sizes import SizeFloat, SizeGuard, SizeGuards, SizeInt, evaluate, for_several

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
MATH: dict[str, Any] = {
    name: getattr(sympy_functions, f"OpaqueUnaryFn_{name}") for name in ("sqrt", "log", "log2", "exp")
}
"""Functions of Python's `math` that torch has an expression for (2.11 to 2.13)."""


def math_of(name: str, value: Any) -> Any:
    """One of `MATH` of a number, symbolic if this is."""
    apply = getattr(math, name)
    if not isinstance(value, SYMBOLIC):
        return apply(value)
    node = cast(Any, torch).sym_float(value).node
    hint = None if node.hint is None else apply(node.hint)  # None: it is counted while the step runs
    return node.shape_env.create_symfloatnode(MATH[name](node.expr), hint=hint)


SYMBOLIC_FUNCTIONS: dict[str, Any] = {
    "min": torch.sym_min, "max": torch.sym_max, "float": cast(Any, torch).sym_float,
    "quotient": operator.truediv,
    "math": SimpleNamespace(**vars(math) | {name: partial(math_of, name) for name in MATH}),
}  # fmt: skip
"""What stands for Python's functions where torch's symbolic ints, or proxies of them, are computed with."""
_RESIZES = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
RESIZES_OWNER: Any = cast(Any, torch._C)._nn
RESIZES: dict[str, Any] = {name: getattr(torch.ops.aten, name).default for name in _RESIZES}
"""What torch.nn.functional.interpolate calls, and the ops that these call (2.11 to 2.13)."""
RECURRENT: dict[str, Callable[..., Any]] = {
    name: getattr(torch_decompositions, f"{name}_impl") for name in ("lstm", "gru")
}
"""Recurrent layers as torch's loops over places, of sequences that are not packed."""
_PAD = torch.ops.aten.constant_pad_nd.default
_LOSSES = (
    torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor,
    torch.ops.aten.multi_margin_loss_backward.default, torch.ops.aten.multilabel_margin_loss_backward.default,
)  # fmt: skip
_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"
_NUMBERS = (f"{_TORCH}__init__.py", f"{_TORCH}fx/experimental/", f"{_TORCH}utils/_stats.py", __file__)
_MODULES = f"{_TORCH}nn{os.sep}"
REMEMBERED = tuple(
    f"_{name}" for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")
)
"""What torch computes of two numbers, by the name of its method (2.11 to 2.13)."""
_MOST_TEXT = 4000  # characters of an expression; longer ones cost more than a capture


class _Printer(PythonPrinter):
    """Prints expressions of ints as Python computes them, without torch's functions for symbols."""

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: Any) -> str:
        return f"(float({self._print(expr)}) ** 0.5)"

    def _print_OpaqueUnaryFn_sqrt(self, expr: Any) -> str:
        return f"math.{expr.func.__name__.removeprefix('OpaqueUnaryFn_')}({self._listed(expr)})"

    _print_OpaqueUnaryFn_log = _print_OpaqueUnaryFn_log2 = _print_OpaqueUnaryFn_exp = _print_OpaqueUnaryFn_sqrt

    def _print_And(self, expr: Any) -> str:  # of tensors, too, which `and` would read
        return "(" + " & ".join(f"({cast(Any, self)._print(argument)})" for argument in expr.args) + ")"

    def _print_Min(self, expr: Any) -> str:
        return f"min({self._listed(expr)})"

    def _print_Max(self, expr: Any) -> str:
        return f"max({self._listed(expr)})"

    def _print_Quotient(self, expr: Any) -> str:
        return f"quotient({self._listed(expr)})"

    def _listed(self, expr: Any) -> str:
        return ", ".join(cast(Any, self)._print(argument) for argument in expr.args)


class Quotient(sympy_functions.FloatTrueDiv):
    """A quotient as C++ computes it, which Python refuses for no rows."""


class _Env(ShapeEnv):
    """A ShapeEnv whose guards have the user's line; torch formats whole stacks, of which dynamo knows the lines."""

    line: Callable[[], str]
    sizes: Symbols

    def _get_sloc(self, framework_loc: str | None = None) -> SLoc:
        return SLoc(framework_loc=traceback.FrameSummary("", 0, ""), maybe_user_loc=self.line())

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return self._get_sloc(), ""

    def evaluate_expr(self, orig_expr: Any, *args: Any, **named: Any) -> Any:
        """What torch compares of rows that are counted is as for many rows; Python's own code takes a branch."""
        try:
            return super().evaluate_expr(orig_expr, *args, **named)
        except GuardOnDataDependentSymNode:
            answer = self.sizes.for_python(orig_expr) if _python_asks() else self.sizes.for_many(orig_expr)
            if answer is None:
                raise
            return answer


def asked_of(error: Exception) -> str:
    """What Python asks of a number that is not known while a step is traced; "" for another error."""
    return str(error.cond) if isinstance(error, GuardOnDataDependentSymNode) else ""


def _python_asks() -> bool:
    """Whether code that is not torch's own, or is of its modules, asks for the value of a symbolic number."""
    frame, of_number = inspect.currentframe(), False
    while frame is not None and frame.f_code.co_filename.startswith(_NUMBERS):
        of_number |= frame.f_code.co_filename.startswith(_NUMBERS[0])
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return of_number and (not file.startswith(_TORCH) or file.startswith(_MODULES))


def _like_input(grad: torch.Tensor, output_size: Any, input_size: Any, *rest: Any) -> torch.Tensor:
    """The gradient of what `interpolate` was given: its kernels in C++ need ints, and torch has no other fakes."""
    order = suggest_memory_format(grad)
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=order)


def _like_operand(grad: torch.Tensor, operand: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """The gradient of a loss that has no fake: for known sizes, torch runs its kernel on zeros."""
    return torch.empty_like(operand, memory_format=torch.contiguous_format)


_FAKES: dict[Any, Callable[..., Any]] = {
    _PAD: cast(Any, decomposition_table)[_PAD],
    **{getattr(torch.ops.aten, f"{name}_backward").default: _like_input for name in RESIZES},
    **dict.fromkeys(_LOSSES, _like_operand),
}


class _Mode(FakeTensorMode):
    """Fakes that keep symbols where those of torch (2.11 to 2.13) are kernels that need ints. Those in Python call ops
    that have to run in Python, too.
    """

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        fake = _FAKES.get(func)
        if fake is None:
            with enable_python_dispatcher():
                return cast(Any, super())._dispatch_impl(func, types, args, kwargs)
        with self:
            return fake(*args, **kwargs)


class Symbols:
    """The symbols of one capture. `line` returns the line of the user's code that runs. `traced`: what the step itself
    compares of sizes, which is the same on all ranks. `branch(text, likely)`: what a trace takes a comparison for.

    A symbol is a size of 2 or more: torch treats 0 and 1 apart.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self.env = _Env(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
        self.env.line, self.env.sizes = line, self
        self.record = SizeGuards()
        self.mode = _Mode(
            allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=self.env, static_shapes=True
        )
        self.record.symbols = self
        self._ints: dict[str, torch.SymInt] = {}
        self._counted: dict[str, torch.SymInt] = {}
        self._plain: dict[Any, SizeInt | SizeFloat] = {}
        self._owned: dict[Any, bool] = {}
        self.computed: dict[Any, Any] = {}
        self.traced: list[SizeGuard] = []
        self._asked = 0
        self._given = set[str]()
        self.branch: Callable[..., bool | None] = lambda *_: None

    def end_of_trace(self) -> None:
        """What is compared from now on is compared for a plan and a program."""
        self.traced, self._asked = self.guards(), len(self.env.guards)

    def at(self, hints: dict[str, int]) -> Symbols | None:
        """The same symbols for another plan, made for these sizes; None if the trace does not apply to them.

        Nor may torch have compared sizes since: it takes what it has found for given.
        """
        if len(self.env.guards) > self._asked or not all(evaluate(guard.text, hints) for guard in self.traced):
            return None
        other = copy.copy(self)
        now, of = tuple(hints.values()), self.record
        other.record = SizeGuards(dict(of.dims), dict(hints), symbols=other, now=now, say=of.say, busy=of.busy)
        other.record.noted.update({guard.text: None for guard in self.traced})
        other._plain = {}
        self.env.sizes = other
        return other

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """In the block and after it, numbers of the trace are those of these symbols; `at` changes that."""
        self.env.sizes = self
        try:
            yield
        finally:
            self.env.sizes = self

    def apart(self, sizes: Mapping[str, int]) -> Symbols:
        """The same symbols in an environment of their own, at these sizes: what is compared there is no guard here."""
        other = Symbols(str)
        for (name, dim), symbol in zip(self.record.dims.values(), self.record.dims, strict=True):
            other.new(name, dim, sizes[symbol])
        assert list(other.record.dims) == list(self.record.dims), "torch names symbols by their source"
        return other

    def new(self, name: str, dim: int, hint: int) -> torch.SymInt:
        """A symbol for the size of a dim of the batch tensor `name`."""
        from torch._dynamo.source import ConstantSource  # here: an import of wholestep leaves dynamo out

        self._owned.clear()
        symbol = self.env.create_symbol(hint, ConstantSource(f"{name}.{dim}"), dynamic_dim=DimDynamic.DYNAMIC)
        text = str(symbol)
        self._ints[text] = cast(torch.SymInt, self.env.create_symintnode(symbol, hint=hint))
        self.record.dims[text], self.record.hints[text] = (name, dim), hint
        self.record.now = tuple(self.record.hints.values())
        return self._ints[text]

    def count(self, most: int) -> torch.SymInt:
        """A symbol for a number of rows that the step counts while it runs: from 0 to `most`, or to 2."""
        self._owned.clear()
        most = max(most, 2)  # nothing is compared that is right for fewer rows alone
        with self.env.ignore_fresh_unbacked_symbols():
            number = self.env.create_unbacked_symint()
        _constrain_range_for_size(number, 0, most)
        text = str(_node(number).expr)
        self._counted[text], self.record.counted[text] = number, most
        self.record.hints[text] = self._hint_above(most)
        return number

    def _hint_above(self, most: int) -> int:
        return next(n for n in itertools.count(most + 1) if _is_prime(n) and n not in self.record.hints.values())

    def most(self, number: Any) -> int:
        """The most that a number may be which follows from rows that are counted."""
        return number if type(number) is int else int(self.env.bound_sympy(_node(number).expr).upper)

    def for_many(self, expression: Any) -> bool | None:
        """What a comparison of counted rows is for as many as their hints, which is noted; None if it is none."""
        if (text := self._compared(expression)) is None:
            return None
        if text in self._given:
            return True
        size, limit = expression.args
        answer = None if "%" in text or not limit.is_Integer else for_several(expression.func, limit)
        if answer is not None and statically_known_true(self.env.create_symboolnode(size >= 0)):
            return answer
        outcome = bool(evaluate(text, self.record.hints))
        self.record.note(text, outcome)
        return outcome

    def settled(self, condition: Any) -> bool:
        """Return what `branch` takes a likely comparison of counted rows for; if true, it is given from then on."""
        if statically_known_true(condition):
            return True
        text = self._compared(condition.node.expr)
        if text is None or not self.branch(text, True):
            return False
        self._given.add(text)
        torch._check(cast(bool, condition))
        return True

    def for_python(self, expression: Any) -> bool | None:
        """What `branch` takes a comparison of rows that are counted for; None for another expression."""
        text = self._compared(expression)
        return None if text is None else self.branch(text)

    def _compared(self, expression: Any) -> str | None:
        counted = expression.is_Relational and {*map(str, expression.free_symbols)} <= self._counted.keys()
        return f"({self._printed(expression)})" if counted else None

    @property
    def assumed(self) -> list[str]:
        """What torch took for given of rows that are counted, which nothing checks."""
        deferred = [check.expr for checks in self.env.deferred_runtime_asserts.values() for check in checks]
        equal = [f"{symbol} == {self._printed(other)}" for symbol, other in self.env.replacements.items()]
        return [self._printed(e) for e in (*deferred, *(guard.expr for guard in self.env.guards))] + equal

    def ints(self) -> list[torch.SymInt]:
        """Torch's symbolic ints of the symbols, in order."""
        return list(self._ints.values())

    def plain(self, value: Any, own_name: bool = False) -> Any:
        """A symbolic number as an int or float that knows its expression; other values unchanged. `own_name`: also what
        torch takes for equal to another is called by its own.
        """
        if not self.owns(value):
            return value
        if isinstance(value, torch.SymBool):
            return bool(value)
        expression = value.node._expr if own_name else value.node.expr
        if not expression.free_symbols:
            return int(value) if isinstance(value, torch.SymInt) else float(value)
        kind = SizeInt if isinstance(value, torch.SymInt) else SizeFloat
        number = self._plain.get((kind, expression))
        if number is None:
            text = f"({self._printed(expression)})"
            hint = evaluate(text, self.record.hints)
            if hint < 0 and self.record.counted.keys() & set(map(str, expression.free_symbols)):
                hint = self._hint_above(self.most(value))  # of as many rows as there are not
            number = self._plain[kind, expression] = kind(hint, text, self.record)
        return number

    def owns(self, value: Any) -> bool:
        """Return whether a symbolic number follows from sizes alone, and not from the value of a tensor."""
        return isinstance(value, SYMBOLIC) and self.are_sizes(_node(value).expr)

    def are_sizes(self, expression: Any) -> bool:
        """Return whether an expression is one of the symbols alone."""
        if expression not in self._owned:
            self._owned[expression] = set(map(str, expression.free_symbols)) <= {*self._ints, *self._counted}
        return self._owned[expression]

    def symbolic(self, value: Any) -> Any:
        """The reverse of `plain`: numbers that follow from sizes, also in lists, as torch's symbolic ones."""
        if isinstance(value, (SizeInt, SizeFloat)):
            return evaluate(value.text, {**self._ints, **self._counted, **SYMBOLIC_FUNCTIONS})
        if isinstance(value, (list, tuple)):
            return type(cast(Any, value))(self.symbolic(v) for v in cast(Sequence[Any], value))
        if isinstance(value, dict):
            return {key: self.symbolic(v) for key, v in cast(dict[str, Any], value).items()}
        return value

    def guards(self) -> list[SizeGuard]:
        """What was compared of sizes so far, by torch while it traced and by wholestep since."""
        lines = {self._printed(g.expr): g.sloc.maybe_user_loc or "" for g in self.env.guards}
        for symbol, expression in self.env.replacements.items():
            lines.setdefault(f"{symbol} == {self._printed(expression)}", self._line_of(symbol))
        for symbol, bounds in self.env.var_to_range.items():
            if str(symbol) in self._ints:
                lower, upper = bounds.lower, bounds.upper
                lines.setdefault(f"{symbol} >= {max(int(lower), 2)}", self._line_of(symbol))
                if upper.is_Integer:
                    lines.setdefault(f"{symbol} <= {int(upper)}", self._line_of(symbol))
        lines |= {text: "" for text in self.record.noted if text not in lines}
        for text in lines:
            assert evaluate(text, self.record.hints), f"{text} holds for the sizes of the capture"
        return [SizeGuard(text, where) for text, where in lines.items()]

    def hold(self, sizes: Mapping[str, int]) -> bool:
        """Whether all that was compared so far ends alike for these sizes, by symbol."""
        return all(evaluate(guard.text, sizes) for guard in self.guards())

    def fixed(self) -> dict[tuple[str, int], str]:
        """The dims whose size the trace has fixed, and the user's line that did."""
        lines: dict[tuple[str, int], str] = {}
        for symbol, expression in self.env.replacements.items():
            if not expression.free_symbols and str(symbol) in self._ints:
                lines[self.record.dims[str(symbol)]] = self._line_of(symbol)
        return lines

    def _line_of(self, symbol: Any) -> str:
        lines = (g.sloc.maybe_user_loc for g in reversed(self.env.guards) if symbol in g.expr.free_symbols)
        return next((line for line in lines if line), "")

    def _printed(self, expression: Any) -> str:
        text = cast(Any, _Printer()).doprint(expression)
        if len(text) > _MOST_TEXT:
            raise ValueError("an expression of sizes is too long to be computed in each call")
        return text


@functools.cache
def matmul_fixes_sizes() -> bool:
    """Return whether a product of rows with a matrix asks in C++ how many rows there are (2.11)."""
    symbols = Symbols(str)
    with symbols.mode:
        rows = torch.empty(cast(int, symbols.new("rows", 0, 3)), 4, 5)
        try:
            rows.matmul(torch.empty(5, 2))
        except RuntimeError:  # it "cannot call sizes()"; in a trace it is answered, which fixes them
            return True
    return False


def truncated(value: Any) -> Any:
    """A float, which may be symbolic, without what is behind its point."""
    return cast(Any, torch).sym_int(value)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _node(value: Any) -> Any:
    return value.node


def symbols_of(value: Any) -> Symbols | None:
    """The symbols of the capture that made a symbolic number; None for any other."""
    return getattr(_node(value).shape_env, "sizes", None) if isinstance(value, SYMBOLIC) else None


@contextlib.contextmanager
def numbers_in_arguments(symbols: Symbols | None) -> Generator[None]:
    """Silence torch's warning of symbolic numbers as arguments of nodes, in a trace with symbols."""
    with warnings.catch_warnings() if symbols is not None else contextlib.nullcontext():
        if symbols is not None:
            warnings.filterwarnings("ignore", "Raw Sym", UserWarning)
        yield


def remembered(method: str, compute: Callable[[Any, Any], Any], number: Any, other: Any) -> Any:
    """What torch computes of two numbers (`SymNode`) that follow from sizes alone: from the same expressions the same,
    of which it makes a new one each time, through all modes of a trace.
    """
    symbols, pair = getattr(number.shape_env, "sizes", None), (number.expr, other.expr)
    if symbols is None or not all(map(symbols.are_sizes, pair)):
        return compute(number, other)
    flags = (getattr(node, "_optimized_summation", False) for node in (number, other))
    key = method, *pair, number.pytype, other.pytype, *flags
    if key not in symbols.computed:
        symbols.computed[key] = compute(number, other)
    return symbols.computed[key]


def quotient_in_cpp(divide: Callable[[Any, Any], Any], number: Any, other: Any) -> Any:
    """What C++ alone calls to divide two numbers (`SymNode`)."""
    symbols = getattr(number.shape_env, "sizes", None)
    if symbols is None or not symbols.record.counted.keys() & set(map(str, other.expr.free_symbols)):
        return divide(number, other)
    return number.shape_env.create_symfloatnode(Quotient(number.expr, other.expr), hint=None).node


def is_size(value: Any) -> bool:
    """Return whether a symbolic number follows from sizes of the batch alone: it is no node of a trace."""
    symbols = symbols_of(value)
    return symbols is not None and symbols.owns(value)


def plain_numbers(values: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes or strides of a tensor, where symbolic ones know their expression."""
    for value in values:
        if type(value) is not int:
            break
    else:
        return tuple(values)
    return tuple(v if (owner := symbols_of(v)) is None else owner.plain(v) for v in values)
