"""What is to be restored after a capture, also where it is interrupted in the middle of restoring.

A change is noted before it is made. `undone` takes the notes back at its end, the latest first, and drops each after it
ran. What an interruption leaves is taken back by the `undone` around it: one Ctrl-C at any point leaves nothing.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode, _get_current_function_mode


class _Notes(threading.local):
    def __init__(self) -> None:
        self.taken = list[tuple[Callable[..., object], tuple[Any, ...]]]()


_notes, TURN = _Notes(), threading.RLock()
REPLACES = "_wholestep_replaces"  # attribute of a function: the one that it stands for
_KEYS: list[Any] = [*torch._C._TorchDispatchModeKey.__members__.values()]
_TRACING: list[tuple[Any, str]] = [
    (torch.nn.Module, "__call__"), (torch.nn.Module, "__getattr__"), (_symbolic_trace, "_is_fx_tracing_flag"),
    (fx_traceback, "should_preserve_node_meta"),
]  # fmt: skip


def undo(fn: Callable[..., object], *args: Any) -> None:
    """Call `fn(*args)`, which may run twice, at the end of the innermost `undone`."""
    _notes.taken.append((fn, args))


class undone:  # used like a function
    """Take back, at the end of this context, what was noted in it."""

    def __enter__(self) -> None:
        undo(self._begin)

    def _begin(self) -> None:
        """The note that begins this context."""

    def __exit__(self, *_: object) -> None:
        stack, begin = _notes.taken, (self._begin, ())
        if begin in stack:  # else the context around this one has taken it back
            while stack[-1] != begin:
                fn, args = stack[-1]
                fn(*args)
                stack.pop()
            stack.pop()


@contextmanager
def one_thread() -> Generator[None]:
    """Let one thread at a time replace, inside this context, what all threads share. What torch itself sets while it
    traces is set back here too: it restores it at the end of its own contexts, which an interruption leaves out.
    """
    with TURN, undone(), undone():
        undo(_clean, set(sys.modules))
        undo(drop_modes, modes_now())
        for owner, name in _TRACING:
            undo(setattr, owner, name, getattr(owner, name))
        undo(setattr, fx_traceback, "current_meta", fx_traceback.current_meta.copy())
        yield


def _clean(before: set[str]) -> None:
    """Give modules that were imported meanwhile the functions whose replacements they have."""
    for module in map(sys.modules.get, sys.modules.keys() - before):
        for name, function in [*getattr(module, "__dict__", {}).items()]:
            if isinstance(function, FunctionType) and (original := vars(function).get(REPLACES)) is not None:
                setattr(module, name, original)


class FunctionMode(TorchFunctionMode):
    """A mode that may be gone when it is left: Ctrl-C may come in a call, during which torch has it off its stack."""

    def __exit__(self, *error: Any) -> None:
        if _get_current_function_mode() is self:
            super().__exit__(*error)


def modes_now() -> tuple[bool, int, int, tuple[Any, ...]]:
    """The modes of torch that are active: whether it records gradients, numbers of both kinds, and single ones."""
    return (
        torch.is_grad_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        tuple(map(torch._C._get_dispatch_mode, _KEYS)),
    )


def drop_modes(before: tuple[bool, int, int, tuple[Any, ...]]) -> None:
    """Leave the modes that became active since `modes_now` said `before`."""
    grad, functions, dispatches, single = before
    torch.set_grad_enabled(grad)
    while torch._C._len_torch_function_stack() > functions:
        torch._C._pop_torch_function_stack()
    for key, mode in zip(_KEYS, single, strict=True):
        if torch._C._get_dispatch_mode(key) is not mode:
            torch._C._unset_dispatch_mode(key)
            if mode is not None:
                torch._C._set_dispatch_mode(mode)
    while torch._C._len_torch_dispatch_stack() > dispatches:
        torch._C._pop_torch_dispatch_stack()
