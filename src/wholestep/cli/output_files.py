"""Output files of a command: checked before its work, so that a path that cannot be written loses nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from .target import refuse


def check(**files: Path | None) -> None:
    """Refuse paths that cannot be written, by option; missing folders are created."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        first = seen.setdefault(path.absolute(), option)
        if first != option:
            refuse(f"--{option} {path}: --{first} writes there already")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            refuse(f"--{option} {path}: folder {path.parent} cannot be created: {error.strerror}")
        if path.is_dir():
            refuse(f"--{option} {path} is a folder: needed the name of a file, as {path / 'step.json'}")
        written_to = path if path.exists() else path.parent
        if not os.access(written_to, os.W_OK):
            refuse(f"--{option} {path}: no permission to write {written_to}")


def written(path: Path | None, write: Callable[[Path], object], note: Callable[[str], None]) -> None:
    """Call `write` with `path`, if that is given, and note it."""
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror}")
    note(f"written to {path}")
