"""Other threads that use a model while its parameters are exchanged for those of a trace: they wait for its end."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from .attributes import attributes_set
from .undo import TURN

_USES = ("__call__", "state_dict", "load_state_dict", "named_parameters", "named_buffers")
_IN_USE = frozenset(
    vars(torch.nn.Module)[name].__code__ for name in ("__call__", "_call_impl", "state_dict", "load_state_dict")
)
_A_MOMENT = 0.001
_PATIENCE = 1.0


@contextmanager
def others_wait(modules: Sequence[torch.nn.Module]) -> Generator[None]:
    """Inside this context, which holds the turn, a use of one of `modules` in another thread waits for its end.

    At its begin, it waits for the uses that are under way.
    """
    used, thread = {id(module) for module in modules}, get_ident()

    def waits(name: str) -> tuple[type, str, Callable[..., Any]]:
        original: Callable[..., Any] = getattr(torch.nn.Module, name)

        def use(module: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread and id(module) in used and not _is_within(used, sys._getframe()):
                _wait_for(thread)
            return original(module, *args, **kwargs)

        return torch.nn.Module, name, use

    with attributes_set(map(waits, _USES)):
        while any(_is_within(used, top) for other, top in sys._current_frames().items() if other != thread):
            time.sleep(_A_MOMENT)
        yield


def _wait_for(thread: int) -> None:
    """Wait until a thread has ended its turn; raise RuntimeError if it waits for this one meanwhile."""
    while not TURN.acquire(timeout=_PATIENCE):
        frame = sys._current_frames().get(thread)
        if frame is not None and frame.f_code.co_filename == threading.__file__:
            raise RuntimeError("a compiled step waits for this thread while it is captured: use its model in the step")
    TURN.release()


def _is_within(used: set[int], top: FrameType) -> bool:
    """Return whether a call that uses one of the modules leads to a frame."""
    frame: FrameType | None = top
    while frame is not None:
        if frame.f_code in _IN_USE and id(frame.f_locals.get("self")) in used:
            return True
        frame = frame.f_back
    return False
