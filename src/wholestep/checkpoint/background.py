"""Saves that go on while the step trains: one at a time, in a thread that the process waits for at its end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from . import lease
from .tensor_files import Piece

_current: Future[Path] | None = None
_host = WeakKeyDictionary[object, dict[str, Tensor]]()
"""Host memory that pieces are copied to, by what is saved and by name: it lasts as long as that does."""


def wait() -> None:
    """Wait for the save that goes on. Raises its CheckpointError, unless `result()` of its future has raised it."""
    global _current
    saving, _current = _current, None
    if saving is not None:
        saving.result()


def at_exit() -> None:
    """Release leases when the process ends. It ends with status 1 if a save failed and nobody asked for its result."""
    atexit.unregister(_finish)
    atexit.register(_finish)


def _finish() -> None:
    try:
        wait()
    except Exception:
        lease.release_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    lease.release_all()


class _Seen(Future[Path]):
    """A future whose failure is raised once: by `result()`, or by the next save."""

    def result(self, timeout: float | None = None) -> Path:
        global _current
        if _current is self and (timeout is None or self.done()):
            _current = None
        return super().result(timeout)


def start(work: Callable[[], Path]) -> Future[Path]:
    """Run `work` in the background; the result is what it returns. The interpreter ends after it."""
    global _current
    saving = _current = _Seen()
    saving.set_running_or_notify_cancel()

    def run() -> None:
        try:
            saving.set_result(work())
        except BaseException as error:
            print(f"a checkpoint was not saved\n{type(error).__name__}: {error}", file=sys.stderr)
            saving.set_exception(error)

    threading.Thread(target=run, name="wholestep-save").start()
    return saving


def staged(pieces: Mapping[str, Piece], owner: object) -> dict[str, Piece]:
    """The pieces, copied to host memory. Memory of the last save of `owner` is used again."""
    out, memory = dict[str, Piece](), _host.setdefault(owner, {})
    for name, piece in pieces.items():
        values, copy = piece.values.detach(), memory.get(name)
        if copy is None or copy.shape != values.shape or copy.dtype != values.dtype:
            copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            memory[name] = copy
        copy.copy_(values, non_blocking=True)
        out[name] = Piece(piece.offsets, copy)
    for name in memory.keys() - pieces.keys():
        del memory[name]
    if any(piece.values.is_cuda for piece in pieces.values()):
        torch.cuda.current_stream().synchronize()
    return out
