"""The verdict on one case: a typed error with a text, or a result; in time, and in memory."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from wholestep.errors import WholestepError

LIMIT_S = 10.0
LIMIT_BYTES = 8 << 30


class TooSlowError(BaseException):
    """The case did not end in time. No `except Exception` of the code under test sees it."""


def verdict(call: Callable[[], Any]) -> str:
    """Why the case fails; empty where it does not."""
    try:
        with warnings.catch_warnings(), _in_a_folder_of_its_own(), _limited():
            warnings.simplefilter("ignore")
            call()
    except WholestepError as error:
        text = str(error)
        text.encode()  # it can be printed
        return (
            "" if error.found.strip() and len(text) < 20_000 else f"a {type(error).__name__} that says {text[:200]!r}"
        )
    except TooSlowError:
        return f"no end after {LIMIT_S:.0f} s:\n{traceback.format_exc(limit=-8)}"
    except Exception:
        return traceback.format_exc(limit=-8)[-4000:]
    return ""


@contextmanager
def _in_a_folder_of_its_own() -> Iterator[None]:
    """A case may write to any name, and to names with `..`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "1", "2", "3")
        inner.mkdir(parents=True)
        os.chdir(inner)
        try:
            yield
        finally:
            os.chdir(before)


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TooSlowError after `LIMIT_S`; the process ends, with its stack, where that is not seen. MemoryError for
    more than `LIMIT_BYTES` of addresses beyond those that are in use now. A timer that runs already goes on after that.
    """
    before, (left, _) = signal.signal(signal.SIGALRM, _ring), signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    began = time.monotonic()
    faulthandler.dump_traceback_later(4 * LIMIT_S, exit=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001))


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooSlowError
