"""Ctrl-C in a call takes effect before what the call changes, or after it."""

from __future__ import annotations

import signal
import threading
from inspect import unwrap
from types import FrameType
from typing import Any

_handler_of, _set_handler = unwrap(signal.getsignal), unwrap(signal.signal)  # without slow conversions to enums


class uninterrupted:  # used like a function
    """Inside this context, Ctrl-C waits for its end; a second one does not wait."""

    _handler: Any = None
    _came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():  # no other one handles signals
            handler = _handler_of(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._handler(number, frame)
        self._came = number, frame
