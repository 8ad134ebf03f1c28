"""The folder that programs are kept in: a file for each, written aside and renamed, with a checksum of its own.

Several ranks and jobs may use one folder at once; it may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .key import FORMAT
from .ran import Witness

MAGIC = f"wholestep-program {FORMAT} ".encode()
ENDING = ".program"
MOST_OF_A_KEY = 8
_LOOKED_AT = 16


class DamagedError(Exception):
    """A file that is no whole entry of this version."""


@dataclass(frozen=True)
class Entry:
    """One program in a file: its key part by part, what else must be as it was, the bytes of `cache.program`."""

    parts: Mapping[str, str]
    witness: Witness
    baked: str
    program: bytes

    def to_bytes(self) -> bytes:
        """The content of the file."""
        head = {"parts": list(self.parts.items()), "witness": self.witness.to_json(), "baked": self.baked}
        rest = json.dumps(head).encode() + b"\n" + self.program
        return MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest

    @staticmethod
    def from_bytes(data: bytes) -> Entry:
        """Inverse of `to_bytes`.

        Raises:
            DamagedError: it is cut short, changed, of another version, or nothing of ours.
        """
        first, _, rest = data.partition(b"\n")
        if not first.startswith(MAGIC):
            other = first.startswith(MAGIC.split()[0])
            raise DamagedError("is of another version" if other else "is no program of wholestep")
        if first[len(MAGIC) :] != hashlib.sha256(rest).hexdigest().encode():
            raise DamagedError("is cut short or changed")
        head, _, program = rest.partition(b"\n")
        try:
            found: dict[str, Any] = json.loads(head)
            return Entry(dict(found["parts"]), Witness.from_json(found["witness"]), found["baked"], program)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"cannot be read ({error})") from error


def name_of(key: str, entry: Entry, reads: str) -> str:
    """The name of an entry's file. Programs of one key differ in what else they follow from, as `reads` of a batch."""
    variant = hashlib.sha256(json.dumps([entry.witness.to_json(), entry.baked, reads]).encode()).hexdigest()[:16]
    return f"{key}-{variant}{ENDING}"


def files_of(folder: Path, key: str) -> list[Path]:
    """The files of a key, the newest first."""
    return sorted(folder.glob(f"{key}-*{ENDING}"), key=_age, reverse=True)


def write(folder: Path, key: str, name: str, data: bytes) -> None:
    """Put a file into the folder as one act; the oldest of its key go when there are many.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=folder, prefix=f".{key[:8]}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(aside, 0o644)  # it was made for this user alone
        os.replace(aside, folder / name)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    for old in files_of(folder, key)[MOST_OF_A_KEY:]:
        old.unlink(missing_ok=True)


def nearest(folder: Path, parts: Mapping[str, str]) -> str:
    """What differs from the entry that differs least, of the newest ones; empty where there is none."""
    best: list[str] = []
    for path in sorted(folder.glob(f"*{ENDING}"), key=_age, reverse=True)[:_LOOKED_AT]:
        try:
            theirs = Entry.from_bytes(path.read_bytes()).parts
        except (OSError, DamagedError):
            continue
        differing = [name for name in {**parts, **theirs} if parts.get(name) != theirs.get(name)]
        if differing and (not best or len(differing) < len(best)):
            best = differing
    inner = [name for name in best if best and name.startswith(f"module {best[0]}")]
    return max(inner, key=lambda name: name.count(".")) if inner else best[0] if best else ""


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
