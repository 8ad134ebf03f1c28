"""`wholestep.callback`: a call on the host, in each step, with the values of that step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from collections.abc import Generator
from typing import Any

Record = Callable[[Callable[..., object], tuple[Any, ...], dict[str, Any]], None]
_recording: ContextVar[Record | None] = ContextVar("_recording", default=None)


def callback(fn: Callable[..., object], *values: Any, **named: Any) -> None:
    """Call `fn(*values)` on the host in every step, with the real values of that step. Works in eager code too.

    In a compiled step the calls come after the step, in the order in which the step makes them; what `fn` returns is
    dropped. Tensors are given as they are on the device, without waiting for it: `float(tensor)` or `print(tensor)` in
    `fn` waits, `list.append` does not. Under `semantics="per_rank"` a rank is given its own values. Every rank calls
    `fn`; look at `torch.distributed.get_rank()` to let one of them print.

    Args:
        fn: any function: `print`, `losses.append`, `progress.update`, a logger's method.
        *values: tensors, numbers that the step changes, containers of them, or anything else, which is given as it is.
        **named: the same, by name.

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
    """Inside, calls are written down by `record` in place of being made."""
    token = _recording.set(record)
    try:
        yield
    finally:
        _recording.reset(token)
