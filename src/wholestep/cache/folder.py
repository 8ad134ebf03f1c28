"""The folder of the compile cache: a JSON file for each key, written aside and renamed, with a checksum.

Several ranks and jobs may use one folder at once; it may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ..tuning import TUNING
from .choices import Choices
from .key import Key, digest

FORMAT, VERSION = "wholestep.choices", 4
ENDING = ".choices.json"
MOST_FILES = TUNING.cached_files
_LOOKED_AT = TUNING.compared_files


class DamagedError(Exception):
    """A file that is no whole entry of this version."""


def path_of(folder: Path, key: Key) -> Path:
    """The file of a key."""
    return folder / f"{key.text}{ENDING}"


def read(folder: Path, key: Key) -> Choices | None:
    """The choices that are kept under a key; None where there is no file.

    Raises:
        DamagedError: the file is cut short, changed, of another version, or no entry.
        OSError: it cannot be read.
    """
    try:
        data = path_of(folder, key).read_bytes()
    except FileNotFoundError:
        return None
    found = _opened(data)
    if found["key"] != dict(key.parts):
        raise DamagedError("is the entry of another key")
    try:
        return Choices.from_json(found["choices"])
    except Exception as error:
        raise DamagedError(f"cannot be read ({type(error).__name__}: {error})") from error


def write(folder: Path, key: Key, choices: Choices) -> None:
    """Put an entry into the folder as one act; the oldest go where there are many.

    Raises:
        OSError: the folder cannot be written.
    """
    body = {"key": dict(key.parts), "choices": choices.to_json()}
    entry = {"format": FORMAT, "version": VERSION, "sum": _sum_of(body), **body}
    folder.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=folder, prefix=f".{key.text[:8]}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=1)
        os.chmod(aside, 0o644)  # it was made for this user alone
        os.replace(aside, path_of(folder, key))
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    for old in _newest(folder)[MOST_FILES:]:
        old.unlink(missing_ok=True)


def nearest(folder: Path, key: Key) -> list[str]:
    """The parts in which the entry differs that differs least, of the newest ones; empty where there is none."""
    best: list[str] = []
    for path in _newest(folder)[:_LOOKED_AT]:
        try:
            differing = key.differing(_opened(path.read_bytes())["key"])
        except (OSError, DamagedError):
            continue
        if differing and (not best or len(differing) < len(best)):
            best = differing
    return best


def _opened(data: bytes) -> Mapping[str, Any]:
    """The content of a file, which is as it was written."""
    try:
        found: Any = json.loads(data)
    except ValueError as error:
        raise DamagedError("is no JSON") from error
    entry: dict[str, Any] = cast(dict[str, Any], found) if isinstance(found, dict) else {}
    if entry.get("format") != FORMAT:
        raise DamagedError("is no entry of wholestep's compile cache")
    if entry.get("version") != VERSION:
        raise DamagedError("is of another version")
    body = {"key": entry.get("key"), "choices": entry.get("choices")}
    if entry.get("sum") != _sum_of(body):
        raise DamagedError("was changed")
    return body


def _sum_of(body: Mapping[str, Any]) -> str:
    return digest([json.dumps(body, sort_keys=True)])


def _newest(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"), key=_age, reverse=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
