"""A guard on the hooks of modules, parameters and optimizers, which a program contains as they were captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

from .. import _torch


class HookGuard:
    """Compares the hooks of `holders` with those at its creation. Hooks that only observe do not count."""

    def __init__(self, holders: Iterable[object]) -> None:
        self._holders = [*holders, _torch.ALL_MODULES]
        self._expected = self._now()
        self._registered = RemovableHandle.next_id
        tables = [table for holder in self._holders for table in _torch.hook_tables(holder)]
        self._sizes = [(table, len(table)) for table in tables if table]

    def changed(self) -> bool:
        """True if hooks were added or removed. Compares them only if a hook was registered since, or is gone."""
        if RemovableHandle.next_id == self._registered and all(len(table) == size for table, size in self._sizes):
            return False
        self._registered = RemovableHandle.next_id
        return self._now() != self._expected

    def _now(self) -> list[tuple[int, Any]]:
        found = [item for holder in self._holders for table in _torch.hook_tables(holder) for item in table.items()]
        return [(key, hook) for key, hook in found if not _torch.only_looks(hook)]
