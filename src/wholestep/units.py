"""Sizes in bytes and times in seconds from text."""

from __future__ import annotations

import re

from .errors import PlanError, shown
from .typed_values import plain_number

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-zA-Z]*)\s*")
_LONGEST_S = 10**8  # three years
_TIMES = {"": 1, "MS": 1e-3, "S": 1, "SEC": 1, "MIN": 60, "H": 3600}


def parse_seconds(given: float | str, option: str) -> float:
    """Seconds of `"60s"`, `"5min"`, `"2h"` or a number. Raises PlanError, which names the option: it is none of these,
    or not positive.
    """
    seconds, number = 0.0, plain_number(given)
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        seconds = number
    elif isinstance(given, str) and (found := _SIZE.fullmatch(given)):
        seconds = float(found[1]) * _TIMES.get(found[2].upper(), 0)
    if not 0 < seconds <= _LONGEST_S:
        needed = f'a positive number of seconds up to {_LONGEST_S:,}, or text like "60s" or "5min"'
        raise PlanError(f"{option}={shown(given)}", needed, "correct it")
    return float(seconds)


def parse_bytes(given: int | str, name: str = "memory_bytes") -> int:
    """Bytes of `"3GiB"`, `"500 MB"` or a number. Raises PlanError if it is none of these, or not positive."""
    number = plain_number(given)
    if isinstance(number, int) and not isinstance(number, bool):
        return _positive(number, given, name)
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    unit = _UNITS.get(found[2].upper(), 0) if found else 0
    return _positive(float(found[1]) * unit if found else 0, given, name)


def _positive(size: float, given: object, name: str) -> int:
    if not 1 <= size < 1 << 63:
        needed = 'a positive number of bytes, or text like "3GiB" or "500MB"'
        raise PlanError(f"{name}={shown(given)}", needed, "correct it")
    return int(size)
