"""Files and folders that survive a crash: written data is on disk on return, a rename is atomic."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

BLOCK_BYTES = 1 << 20


def write(path: Path, data: bytes) -> None:
    """Write a file through to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write a file so that readers find the old content or the new one."""
    aside = path.with_name(path.name + ".tmp")
    write(aside, data)
    move(aside, path)


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename a file, or a folder to a free name, as one act."""
    os.replace(source, target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder; its name goes first, so that no half of it is ever taken for the whole."""
    if folder.suffix != ".tmp":
        aside = folder.with_name(folder.name + ".tmp")
        move(folder, aside)
        folder = aside
    shutil.rmtree(folder)


def checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
