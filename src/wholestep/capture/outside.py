"""What a step reads from and does to the world outside of Python's objects while it is captured: text and log records
are written again in each call, variables of the environment are compared, and all else is refused with its line.
"""

from __future__ import annotations

import functools
import logging
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import torch

from .. import _torch
from ..errors import CaptureError
from ..graph.meta import show_line
from ..graph.origin import is_of_python, is_own_code
from .assumptions import Assumption, expect
from .call_structure import take_apart
from .function_caches import CachedCalls, done_once
from .locations import MISSING, Location, Reads
from .random_numbers import drawn_once

_OF_IDENTIFIERS = ("secrets", "random", "uuid")  # modules that draw from the system for their caller
_OF_LOGGING = ("logging",)
_EVENTS = ("open", "os.", "shutil.", "subprocess.", "socket.", "sqlite3.", "tempfile.")
_HARMLESS = ("socket.gethostname", "socket.__new__")
_FREQUENT = frozenset({"builtins.id", "object.__getattr__", "object.__setattr__", "sys._getframe"})
_OF_SOURCES = frozenset(["importlib", "inspect", "linecache", "tokenize", "warnings"])  # they read the source of code
_OF_RECORDS = frozenset(vars(logging.makeLogRecord({})))
_listeners: dict[int, Callable[[str, tuple[Any, ...]], None]] = {}


class Outside:
    """Recorder of what the code of the user does outside of Python's objects during one trace.

    `call` records a call that each step makes. `refuse` raises an error, also if the step catches it. `has_value` says
    whether a tensor has its value on the host. `read` are the variables of the environment, and the levels of loggers,
    that were read, with what they were. What a `cached` function does happens once, in eager code too.
    """

    def __init__(
        self, call: Callable[..., None], refuse: Callable[[CaptureError], NoReturn],
        has_value: Callable[[torch.Tensor], bool], cached: CachedCalls,
    ) -> None:  # fmt: skip
        self._cached = cached
        self._call, self._refuse, self._has_value, self._thread = call, refuse, has_value, threading.get_ident()
        self.read: dict[str, Assumption] = {}

    @contextmanager
    def heard(self) -> Generator[None]:
        """Hear of files, processes and sockets (audit events) in this thread."""
        _hear_events()
        with _torch.undone():
            _torch.undo(_listeners.pop, self._thread, None)
            _listeners[self._thread] = self._on_event
            yield

    def on_print(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """In place of `print`."""
        line = self._own_line()
        if not line:
            original(*args, **kwargs)
            return
        self._refuse_tensors("prints", (args, kwargs), f"wholestep.callback({original.__name__}, ...)", line)
        self._call(original, args, kwargs)

    def on_log(self, original: Callable[..., None], logger: logging.Logger, record: logging.LogRecord) -> None:
        """In place of `Logger.handle`."""
        line = self._own_line(_is_of(_OF_LOGGING))
        if not line:
            original(logger, record)
            return
        self._refuse_tensors("logs", (record.msg, record.args), f"wholestep.callback({logger.name}.info, ...)", line)
        extra = {key: value for key, value in vars(record).items() if key not in _OF_RECORDS}
        fields = record.levelno, record.pathname, record.lineno, record.msg, record.args, record.exc_info
        self._call(_log, (logger, *fields, record.funcName, extra or None, record.stack_info), {})

    def on_level(self, original: Callable[..., bool], logger: logging.Logger, level: int) -> bool:
        """In place of `Logger.isEnabledFor`."""
        enabled = original(logger, level)
        if self._own_line(_is_of(_OF_LOGGING)):
            self._note(Location(f"{logger.name}.isEnabledFor({level})", Reads(logger.isEnabledFor), level), enabled)
        return enabled

    def on_profiler(self, original: Callable[..., None], profiler: Any) -> None:
        """In place of `step` of `torch.profiler.profile`."""
        self._call(original, (profiler,), {})

    def on_text(self, stream: str, original: Callable[[str], int], text: str) -> int:
        """In place of `write` of `sys.stdout` or `sys.stderr`."""
        if not self._own_line(_is_outside):
            return original(text)
        self._call(_write, (stream, text), {})
        return len(text)

    def on_act(self, text: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of what acts outside, which `text` says of its name and first argument."""
        if line := self._own_line(_is_outside):
            self._refuse(done_once(text.format(original.__name__, *args), line))
        return original(*args, **kwargs)

    def on_clock(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of what reads a clock."""
        name = original.__qualname__
        name = name if "." in name else f"{original.__module__}.{name}"
        self._refuse_at(
            self._own_line(_is_of(_OF_IDENTIFIERS)),
            f"the step reads the clock with {name}(): all later steps would reuse that time",
            "a step whose work does not depend on the time",
            "read the clock outside the step, or in a function passed to wholestep.callback; "
            "step.profile() times a step",
        )
        return original(*args, **kwargs)

    def on_entropy(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of what reads random bits of the system, and of `random.Random.__init__`."""
        seeded = isinstance(args[0], random.Random) and {*args[1:], *kwargs.values()} - {None}
        self._refuse_at(
            "" if seeded else self._own_line(_is_of(_OF_IDENTIFIERS)),
            "the step makes a random generator without a seed, or reads random bits of the system: "
            "all later steps would reuse what it draws while it is captured",
            "random numbers from torch (torch.rand, dropout), which each step draws again",
            "draw them before the step and pass them in",
        )
        return original(*args, **kwargs)

    def _refuse_at(self, line: str, text: str, needed: str, next_step: str) -> None:
        if line:
            self._refuse(CaptureError(text, needed, next_step, line))

    def on_draw(self, module: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of what draws from the global generator of `random` or `numpy.random`, or seeds it."""
        self._refuse(drawn_once(module, self._own_line(lambda frame: not is_own_code(frame.f_code.co_filename))))

    def on_variable(self, original: Callable[..., str], environment: Any, name: str) -> str:
        """In place of `os.environ[name]`."""
        value: Any = MISSING
        with suppress(KeyError):
            value = original(environment, name)
        if self._own_line(_is_outside):
            self._note(Location(f"os.environ[{name!r}]", environment, name), value)
        if value is MISSING:
            raise KeyError(name)
        return value

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if line := self._own_line(_is_outside):
            shown = [args[0], *args[1:2]] if event == "open" and args[1] is not None else args[:1]
            self._refuse(done_once(f"calls {event}({', '.join(map(repr, shown))})", line))

    def _note(self, place: Location, value: Any) -> None:
        self.read.setdefault(place.path, expect(place, value))

    def _refuse_tensors(self, verb: str, values: Any, instead: str, line: str) -> None:
        tensors = [v for v in take_apart(values, objects=False).leaves if isinstance(v, torch.Tensor)]
        self._refuse_at(
            "" if all(map(self._has_value, tensors)) else line,
            f"the step {verb} a tensor, which has no value while the step is captured",
            "a host call that each step makes with its own values",
            f"write {instead} with the same arguments",
        )

    def _own_line(self, passes: Callable[[FrameType], bool] | None = None) -> str:
        """Return the user's line that called the patched function, at once or through frames that pass, or ""."""
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # of the patched function's caller
        while frame is not None and (
            "wholestep/_torch/" in (file := frame.f_code.co_filename) or file == __file__ or (passes and passes(frame))
        ):
            frame = frame.f_back
        if frame is None or not is_own_code(frame.f_code.co_filename) or _is_in_handler(frame):
            return ""
        line = show_line(frame.f_code.co_filename, frame.f_lineno)
        if self._cached.is_running:
            self._cached.reached.append(line)
        return "" if self._cached.is_running else line


def _is_in_handler(frame: FrameType | None) -> bool:
    """Return whether a frame runs for a handler of signals, which interrupts the step and is no part of it."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    while frame is not None and frame.f_code not in handlers:
        frame = frame.f_back
    return frame is not None


def _is_of(modules: tuple[str, ...]) -> Callable[[FrameType], bool]:
    return lambda frame: frame.f_globals.get("__name__") in modules


def _is_outside(frame: FrameType) -> bool:
    """Return whether a frame reads or writes for its caller: of the standard library, or of numpy."""
    name: str = frame.f_globals.get("__name__", "")
    if name.partition(".")[0] in _OF_SOURCES:
        return False
    file = frame.f_code.co_filename
    return file.startswith("<frozen ") or is_of_python(file) or name.partition(".")[0] == "numpy"


def _log(
    logger: logging.Logger, level: int, path: str, line: int, message: object, args: Any, error: Any, function: str,
    extra: Mapping[str, object] | None, stack: str | None,
) -> None:  # fmt: skip
    logger.handle(logger.makeRecord(logger.name, level, path, line, message, args, error, function, extra, stack))


def _write(stream: str, text: str) -> None:
    getattr(sys, stream).write(text)


@functools.cache
def _hear_events() -> None:
    sys.addaudithook(_on_audit)  # for the rest of the process: no hook can be removed


def _on_audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _FREQUENT or not _listeners:  # first, and cheap: each `id` and each frame that is looked at is an event
        return
    listener = _listeners.get(threading.get_ident())
    if listener is not None and event.startswith(_EVENTS) and event not in _HARMLESS:
        listener(event, args)
