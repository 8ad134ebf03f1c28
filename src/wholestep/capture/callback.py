"""`wholestep.callback`: a host call that each step makes with its own values."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Record = Callable[[Callable[..., object], tuple[Any, ...], dict[str, Any]], None]
_recording: ContextVar[Record | None] = ContextVar("_recording", default=None)


def callback(fn: Callable[..., object], *values: Any, **named: Any) -> None:
    """Call `fn(*values)` on the host in every step, with the real values of that step. Works in eager code too.

    A compiled step makes the calls after the step, in program order, and drops the return value of `fn`. Tensors are
    passed as device tensors without synchronization: `float(tensor)` or `print(tensor)` in `fn` waits for the device,
    `list.append` does not. Under `semantics="per_rank"` each rank passes its own values. Every rank calls `fn`; check
    `torch.distributed.get_rank()` to print on one rank only.

    Args:
        fn: any function: `print`, `losses.append`, `progress.update`, a logger's method.
        *values: tensors, numbers that the step changes, containers of them, or any other object, passed unchanged.
        **named: keyword arguments of `fn`, likewise.

    Example:
        >>> def train_step(model, optimizer, batch):
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     ws.callback(losses.append, loss.detach())
    """
    record = _recording.get()
    if record is None:
        fn(*values, **named)
    else:
        record(fn, values, named)


@contextmanager
def recorded(record: Record) -> Generator[None]:
    """Inside this context, `callback` passes its arguments to `record` instead of calling `fn`."""
    token = _recording.set(record)
    try:
        yield
    finally:
        _recording.reset(token)
