"""A folder that appears whole or not at all, on every rank."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ..errors import CheckpointError
from . import durable
from .lease import Owner, owner_of
from .ranks import Ranks


@contextmanager
def new_folder(target: Path, ranks: Ranks) -> Generator[Path]:
    """A folder beside `target` to write to. At the end it is synced to disk and gets the name `target`; after an
    exception it is removed, and after a kill by the next call. Raises CheckpointError, on every rank: `target` is there
    and not empty.
    """
    aside = target.with_name(Path(ranks.on_first_rank(lambda: _aside(target).name, str)).name)
    try:
        yield aside
        ranks.first_does(lambda: _publish(aside, target))
    except BaseException:
        if ranks.rank == 0:
            _remove(aside)
        raise


def _aside(target: Path) -> Path:
    if durable.is_remote(target):
        raise CheckpointError(
            f"{target} is on an object store", "a folder of a file system", "copy the files there later"
        )
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise CheckpointError(f"{target} is there already", "a new folder, or an empty one", "name another")
    with durable.explained(target):
        durable.make_folder(target.parent)
        for leftover in target.parent.glob(f".{glob.escape(target.name)}-*.tmp"):
            owner = owner_of(_owner_file(leftover))
            if owner is not None and owner.is_dead:
                _remove(leftover)
        aside = target.with_name(f".{target.name}-{uuid4().hex[:12]}.tmp")
        _owner_file(aside).write_bytes(Owner.this_process().to_json())
        aside.mkdir()
    return aside


def _owner_file(aside: Path) -> Path:
    """The file that says which process publishes the folder: only one that has ended leaves it for ever."""
    return aside.with_suffix(".json")


def _remove(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    _owner_file(aside).unlink(missing_ok=True)


def _publish(aside: Path, target: Path) -> None:
    with durable.explained(target):
        for path in (*aside.iterdir(), aside):
            durable.sync(path)
        os.replace(aside, target)
        _owner_file(aside).unlink(missing_ok=True)
        durable.sync(target.parent)
