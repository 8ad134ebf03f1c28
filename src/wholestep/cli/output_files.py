"""Files that a command writes: whether they can be is known before its work, and a failure then loses nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .target import refuse


def check(**files: Path | None) -> None:
    """Refuse what could not be written, by option; folders that are missing are made."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        first = seen.setdefault(path.absolute(), option)
        if first != option:
            refuse(f"--{option} {path}: --{first} writes there already")
        _make(path.parent, f"--{option} {path}")
        if path.is_dir():
            refuse(f"--{option} {path} is a folder: needed the name of a file, as {path / 'step.json'}")
        _may_write(path if path.exists() else path.parent, f"--{option} {path}")


def written(path: Path | None, write: Callable[[Path], object], note: Callable[[str], None]) -> None:
    """Write it, if there is something to be written, and say so."""
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror}")
    note(f"written to {path}")


def _make(path: Path, given: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{given}: there is no folder {path}, and none can be made: {error.strerror}")


def _may_write(path: Path, given: str) -> None:
    if not os.access(path, os.W_OK):
        refuse(f"{given}: no permission to write {path}")
