"""Files that survive a crash, on file systems and on object stores.

On a file system, written data is on disk on return. An object store puts whole objects. A folder of a store is a
`UPath`, which has the methods of `Path`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ..errors import CheckpointError, shown

BLOCK_BYTES = 1 << 20
_REASONS = {
    errno.ENOSPC: ("the disk is full", "free space for one more checkpoint than keep="),
    errno.EDQUOT: ("the quota of disk space is used up", "free space for one more checkpoint than keep="),
    errno.EFBIG: ("the file is larger than the system allows", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "save to a folder that can be written to"),
    errno.EACCES: ("this user may not write there", "save to a folder that can be written to"),
    errno.EPERM: ("this user may not write there", "save to a folder that can be written to"),
    errno.EIO: ("the disk failed to read or write", "look at the system's log"),
    errno.ESTALE: ("the file system is no longer mounted", "mount it again"),
    errno.ENOTCONN: ("the file system is no longer mounted", "mount it again"),
    errno.ENODEV: ("the file system is no longer mounted", "mount it again"),
    errno.ENOENT: ("the folder is gone", "look who removed it, or whether its file system is still mounted"),
}


def folder_at(directory: str | Path) -> Path:
    """The folder, local or remote (`s3://bucket/run`, or a `UPath`). Raises CheckpointError: it is none, or what remote
    folders need is missing.
    """
    if not isinstance(directory, str):
        if not hasattr(directory, "iterdir"):
            raise CheckpointError(f"directory={shown(directory)}", "a path, as text or Path", "correct it")
        return directory
    if "://" not in directory:
        return Path(directory)
    try:
        from upath import UPath

        return cast(Path, UPath(directory, use_listings_cache=False))
    except (ImportError, ValueError) as error:
        problem = f"{directory} cannot be opened: {error}"
        needed = "universal-pathlib, and fsspec's package for such a store (s3fs, gcsfs, adlfs)"
        raise CheckpointError(problem, needed, "pip install universal-pathlib, and that package") from error


def is_remote(path: Path) -> bool:
    """True for a folder or file of an object store."""
    return not isinstance(cast(object, path), Path)


class ChecksummedFile(io.RawIOBase):
    """A new file that counts the bytes and their CRC-32 as they are written; `close` brings it to the disk."""

    def __init__(self, path: Path) -> None:
        self.size, self.crc = 0, 0
        self.failure: OSError | None = None
        self._path = path
        self._file: IO[bytes] = path.open("wb")

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`. The first failure is kept: torch.save raises another error after it."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size, self.crc = self.size + len(view), zlib.crc32(view, self.crc)
        return len(view)

    def close(self) -> None:
        """Bring the content to the disk."""
        if not self.closed:
            super().close()
            try:
                if not is_remote(self._path) and self.failure is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()


def write(path: Path, data: bytes) -> tuple[int, int]:
    """Write a file through to the disk; its size in bytes and CRC-32."""
    file = ChecksummedFile(path)
    with file:
        file.write(data)
    return file.size, file.crc


def replace(path: Path, data: bytes, lasting: bool = True) -> None:
    """Write a file so that readers find the old content or the new one. With `lasting`, wait until it is on disk."""
    if is_remote(path):
        path.write_bytes(data)
        return
    aside = path.with_name(path.name + ".tmp")
    if lasting:
        write(aside, data)
    else:
        aside.write_bytes(data)
    os.replace(aside, path)
    if lasting:
        sync(path.parent)


def create(path: Path, data: bytes) -> bool:
    """Create a file; False if it exists. Of several processes, on any hosts, one gets True.

    Exclusive creation is atomic on local disks, on NFS from version 3 and on stores with conditional puts.
    """
    try:
        if is_remote(path):
            store: Any = path
            store.fs.pipe_file(store.path, data, mode="create")
            return True
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return True


def sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    if is_remote(folder):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, and bring their names to the disk. A store has no folders."""
    if is_remote(folder):
        return
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        sync(path.parent)


def remove(folder: Path, first: str, last: str) -> None:
    """Remove a folder: the file `first` before all others, as nobody takes the rest for the whole, and `last` after
    them, as it says whose folder it is.
    """
    if (folder / first).exists():
        (folder / first).unlink()
        sync(folder)
    for path in entries(folder):
        if path.is_dir() and not is_remote(path) and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (first, last):
            path.unlink()
    if (folder / last).exists():
        (folder / last).unlink()
    if not is_remote(folder):
        folder.rmdir()


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_plain_file(path: Path) -> bool:
    """True for a file that can be read to an end: no link to elsewhere, no pipe, no device."""
    return path.is_file() if is_remote(path) else path.exists() and stat.S_ISREG(path.lstat().st_mode)


def read_plain_file(path: Path, size: int) -> bytes | None:
    """The content of a plain file, up to one byte more than `size`; None for a link, a pipe or a device."""
    if is_remote(path):
        return path.read_bytes()
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        return file.read(size + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else None


def checksum(path: Path) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


@contextmanager
def explained(folder: Path) -> Generator[None]:
    """Raise CheckpointError, which says what the system refused, in place of an OSError."""
    try:
        yield
    except OSError as error:
        code = -1 if error.errno is None else error.errno
        reason, advice = _REASONS.get(code, (error.strerror or str(error), "look at the folder"))
        if code in (errno.ENOSPC, errno.EDQUOT) and not is_remote(folder) and folder.parent.exists():
            reason += f" ({shutil.disk_usage(folder.parent).free >> 20} MiB free)"
        problem = f"checkpoint {folder} could not be written: {reason}"
        raise CheckpointError(problem, "a folder with space, that can be written to", advice) from error
