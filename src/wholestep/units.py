"""Sizes in bytes from text."""

from __future__ import annotations

import re

from .errors import PlanError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(given: int | str, name: str = "memory_bytes") -> int:
    """Bytes of `"3GiB"`, `"500 MB"` or a number. Raises PlanError if it is none of these, or not positive."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(given))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise PlanError(f"{name}={given!r}", 'a positive number of bytes, or text like "3GiB" or "500MB"', "correct it")
    return int(float(found[1]) * unit)
