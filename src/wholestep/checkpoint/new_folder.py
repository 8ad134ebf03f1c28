"""A folder that appears whole or not at all, on every rank."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ..errors import CheckpointError
from . import durable
from .collective_calls import on_first_rank, rank_and_size


@contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """A folder beside `target` to write to. At the end it is synced to disk and gets the name `target`; after an
    exception it is removed. Raises CheckpointError, on every rank: `target` is there and not empty.
    """
    aside = on_first_rank(lambda: _aside(target))
    try:
        yield aside
        on_first_rank(lambda: _publish(aside, target))
    except BaseException:
        if rank_and_size()[0] == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _aside(target: Path) -> Path:
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise CheckpointError(f"{target} is there already", "a new folder, or an empty one", "name another")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}-{uuid4().hex[:12]}.tmp")
    aside.mkdir()
    return aside


def _publish(aside: Path, target: Path) -> None:
    for path in aside.iterdir():
        durable.sync(path)
    durable.sync(aside)
    durable.move(aside, target)
