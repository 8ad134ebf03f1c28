"""Iterators of which a step may not take an item: later calls would reuse it."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

from ..errors import CaptureError
from ..graph.origin import is_own_function
from .effects import RefusedError
from .locations import Words
from .reachable import leads_to


def is_foreign_iterator(value: object) -> bool:
    """Return whether `next` of a value runs code that is not the user's, whose effects a trace does not see.

    An iterator of a user's class is an object like others. A weak proxy of any object has `__next__` too.
    """
    kind: Any = type(value)
    if not issubclass(kind, Iterator) or issubclass(kind, io.IOBase) or leads_to(value) is not None:
        return False
    return not is_own_function(cast(Any, kind).__next__)


class RefusedIterator:
    """Replaces an iterator during a trace and refuses `next`. Attributes are those of the iterator."""

    def __init__(
        self, path: str, original: Any, line: Callable[[], str], refuse: Callable[[CaptureError], NoReturn]
    ) -> None:
        vars(self).update(_path=path, _original=original, _line=line, _refuse=refuse)

    def __iter__(self) -> RefusedIterator:
        return self

    def __next__(self) -> Any:
        error = RefusedError(
            self._path, Words(f"a {type(self._original).__name__}"), Words("the same, one item further"),
            "all later calls would reuse this item", "take the item before the step, and pass it in",
        )  # fmt: skip
        error.where = self._line()
        self._refuse(error)

    def __length_hint__(self) -> int:
        return operator.length_hint(self._original)

    def send(self, value: object) -> Any:
        """Refuse `send` of a generator likewise."""
        return self.__next__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._original, name, value)
