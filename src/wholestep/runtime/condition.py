"""A conjunction of many small comparisons, compiled into one function, because every call of a step checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Condition:
    """Terms that all have to hold. One costs 20 ns in the generated function; in a loop, 50 to 120.

    Example:
        >>> c = Condition()
        >>> c.add("{}[{}] is {}", container, "lr", value)
        >>> holds = c.compiled()
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._terms: list[str] = []

    def add(self, term: str, *values: Any) -> None:
        """An expression of Python, where each `{}` stands for one of `values`."""
        names = [f"v{len(self._names) + i}" for i in range(len(values))]
        self._names.update(zip(names, values, strict=True))
        self._terms.append(term.format(*names))

    def compiled(self) -> Callable[[], bool]:
        """True when all terms hold; false also where something that a term looks up is gone."""
        body = " and ".join(self._terms) or "True"
        absent = "KeyError, IndexError, AttributeError, ValueError"
        exec(f"def holds():\n try:\n  return {body}\n except ({absent}):\n  return False", self._names)
        return self._names["holds"]
