"""Sizes in bytes, times in seconds, counts and prices from text."""

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
_COUNTS = {"": 1, "K": 10**3, "KI": 1 << 10, "M": 10**6, "MI": 1 << 20, "B": 10**9, "T": 10**12}
_MOST = 10**18  # of anything that is counted
_PRICE = re.compile(r"\s*\$?\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(?:/\s*h)?\s*")


def parse_seconds(duration: float | str, option: str) -> float:
    """Seconds of `"60s"`, `"5min"`, `"2h"` or a number. Raises PlanError, which names the option: it is none of these,
    or not positive.
    """
    seconds, number = 0.0, plain_number(duration)
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        seconds = number
    elif isinstance(duration, str) and (match := _SIZE.fullmatch(duration)):
        seconds = float(match[1]) * _TIMES.get(match[2].upper(), 0)
    if not 0 < seconds <= _LONGEST_S:
        needed = f'a positive number of seconds up to {_LONGEST_S:,}, or text like "60s" or "5min"'
        raise PlanError(f"{option}={shown(duration)}", needed, "correct it")
    return float(seconds)


def parse_bytes(size: int | str, name: str = "memory_bytes") -> int:
    """Bytes of `"3GiB"`, `"500 MB"` or a number. Raises PlanError if it is none of these, or not positive."""
    number = plain_number(size)
    if isinstance(number, int) and not isinstance(number, bool):
        return _positive(number, size, name)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    return _positive(float(match[1]) * unit if match else 0, size, name)


def parse_count(text: str, option: str, least: int = 1) -> float:
    """A number of `"300B"`, `"1.5T"`, `"4k"`, `"128Ki"` or digits. Raises PlanError, which names the option."""
    match = _SIZE.fullmatch(text)
    count = float(match[1]) * _COUNTS.get(match[2].upper(), 0) if match else 0
    if not least <= count <= _MOST:
        raise PlanError(f"{option}={shown(text)}", f'{least} or more, or text like "300B" or "1T"', "correct it")
    return count


def parse_price(text: str, option: str) -> float:
    """The price of one device for an hour, of `"2.5/h"` or `"2.5"`. Raises PlanError, which names the option."""
    match = _PRICE.fullmatch(text)
    if match is None:
        needed = 'a price of one device for an hour, 0 or above, as "2.5/h"'
        raise PlanError(f"{option}={shown(text)}", needed, "correct it")
    return float(match[1])


def _positive(size: float, original: object, name: str) -> int:
    if not 1 <= size < 1 << 63:
        needed = 'a positive number of bytes, or text like "3GiB" or "500MB"'
        raise PlanError(f"{name}={shown(original)}", needed, "correct it")
    return int(size)
