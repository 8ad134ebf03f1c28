"""The manifest of a checkpoint: its tensors, the size and checksum of each file; and the folder of checkpoints."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import CheckpointError, shown
from ..typed_json import MalformedError, parse, wrong
from ..typed_json import read as decoded
from . import durable

FORMAT = "wholestep.checkpoint"
VERSION = 2
NAME = "manifest.json"
LATEST = "latest"
VALUES = "values.pt"
SHOWN = 10
MOST_BYTES = 1 << 30  # three tensors for each of 1,000 parameters on 4,000 ranks have 0.7 GB
_ROLES = ("param", "buffer", "state", "rank")
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor. `role`: param, buffer, state (`owner`, `key`, `optimizer` are set), or rank: one rank alone had it. A
    buffer that is the attribute `key` of a module says which: `owner`.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    owner: str = ""
    key: str = ""
    optimizer: str = ""

    @staticmethod
    def of(role: str, tensor: Tensor, owner: str = "", key: str = "", optimizer: str = "") -> CheckpointTensor:
        """What a manifest says of a tensor."""
        return CheckpointTensor(
            role, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), owner, key, optimizer
        )

    def empty(self, device: str) -> Tensor:
        """A tensor like it, whose values are not said."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file: where it starts in each dim, its size in each, the file, and its bytes there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedOptimizer:
    """The class of an optimizer and the parameters of each of its groups."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files` gives size in bytes and CRC-32 by name; `saved_at` is in seconds since 1970, and
    later than that of the checkpoints before it. `chunks` are those of each tensor. `stateful` gives, for each object
    beside the step, the ranks whose state differs from the first rank's.
    """

    number: int
    calls: int
    world_size: int
    mesh: str
    saved_at: float
    tensors: Mapping[str, CheckpointTensor]
    optimizers: Mapping[str, SavedOptimizer]
    files: Mapping[str, tuple[int, int]]
    chunks: Mapping[str, tuple[Chunk, ...]]
    stateful: Mapping[str, tuple[int, ...]]

    def file_of(self, name: str, rank: int) -> str:
        """The file with the state of an object: they are numbered, as names may hold what no file name can."""
        return f"stateful-{sorted(self.stateful).index(name)}-{rank}.pt"

    def to_json(self) -> str:
        """Text that `read` reads back; it holds its own checksum."""
        rows = {name: [list(vars(chunk).values()) for chunk in chunks] for name, chunks in self.chunks.items()}
        content = {"format": FORMAT, "version": VERSION, **asdict(replace(self, chunks={})), "chunks": rows}
        return json.dumps({**content, "checksum": _checksum(content)})


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError: there is none that is whole and of this version."""
    try:
        if not durable.is_plain_file(folder / NAME):
            what = "is no folder" if not folder.is_dir() else f"has no {NAME}"
            raise CheckpointError(f"checkpoint {folder} {what}", "a folder written by wholestep.save", "")
        if (size := (folder / NAME).stat().st_size) > MOST_BYTES:
            raise _damaged(folder, f" {NAME} has {size:,} bytes, it can have {MOST_BYTES:,}")
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise _damaged(folder, f" {NAME} cannot be read ({error.strerror})") from error
    try:
        content = parse(text)
    except MalformedError as error:
        raise _damaged(folder, f" {NAME} is cut off or altered ({error.found})") from error
    if not isinstance(content, dict) or cast(dict[str, Any], content).get("format") != FORMAT:
        problem = f"checkpoint {folder}: its {NAME} is not of format {FORMAT!r}"
        raise CheckpointError(problem, "a folder written by wholestep.save", "")
    fields = cast(dict[str, Any], content)
    version = fields.pop("version", None)
    if version != VERSION:
        problem = f"checkpoint {folder} has version {shown(version)}"
        raise CheckpointError(problem, f"version {VERSION}", "load it with the wholestep that wrote it")
    if fields.pop("checksum", None) != _checksum({"format": FORMAT, "version": version, **fields}):
        raise _damaged(folder, f" {NAME} does not match its own checksum")
    del fields["format"]
    try:
        manifest = cast(Manifest, decoded(Manifest, fields))
        _check(manifest)
    except MalformedError as error:
        problem = f"checkpoint {folder}: its {NAME} is malformed: {error.found}"
        raise CheckpointError(problem, error.needed, "") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise MalformedError for a value that `save` never writes: a checksum proves only that no value has changed."""
    for name, least in (("number", 0), ("calls", 0), ("world_size", 1)):
        if getattr(manifest, name) < least:
            raise wrong(name, getattr(manifest, name), f"a number from {least}")
    params = {name for name, saved in manifest.tensors.items() if saved.role == "param"}
    for name, saved in manifest.tensors.items():
        at = f"tensors[{shown(name)}]"
        if saved.role not in _ROLES:
            raise wrong(f"{at}.role", saved.role, f"one of {', '.join(_ROLES)}")
        if min(saved.shape, default=0) < 0:
            raise wrong(f"{at}.shape", saved.shape, "sizes from 0")
        if not isinstance(getattr(torch, saved.dtype, None), torch.dtype):
            raise wrong(f"{at}.dtype", saved.dtype, "a dtype of torch")
        if saved.role == "state" and saved.owner not in params:
            raise wrong(f"{at}.owner", saved.owner, "the name of a parameter in 'tensors'")
        if saved.role == "state" and saved.optimizer not in manifest.optimizers:
            raise wrong(f"{at}.optimizer", saved.optimizer, "a name in 'optimizers'")
    for label, saved in manifest.optimizers.items():
        for name in chain.from_iterable(saved.groups):
            if name not in params:
                raise wrong(f"optimizers[{shown(label)}].groups", name, "the name of a parameter in 'tensors'")
    for name, (size, _) in manifest.files.items():
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise wrong("files", name, "the name of a file in the folder")
        if size < 0:
            raise wrong(f"files[{shown(name)}]", size, "a size from 0")
    for name, ranks in manifest.stateful.items():
        for rank in ranks:
            if not 0 < rank < manifest.world_size:
                raise wrong(f"stateful[{shown(name)}]", rank, f"a rank from 1 to {manifest.world_size - 1}")
    needed = [
        VALUES,
        *(manifest.file_of(name, rank) for name, ranks in manifest.stateful.items() for rank in (0, *ranks)),
    ]
    for name in needed:
        if name not in manifest.files:
            raise MalformedError(f"'files' lacks {name}", "every file of the checkpoint, with its size and checksum")
    if manifest.chunks.keys() != manifest.tensors.keys():
        name = min(manifest.chunks.keys() ^ manifest.tensors.keys())
        raise wrong("chunks", name, "the names of 'tensors', each with its parts")
    for name, chunks in manifest.chunks.items():
        _check_chunks(f"chunks[{shown(name)}]", manifest.tensors[name], chunks, manifest.files)


_Part = tuple[tuple[int, ...], tuple[int, ...]]  # where it starts in each dim, and its size in each


def _check_chunks(
    at: str, saved: CheckpointTensor, chunks: tuple[Chunk, ...], files: Mapping[str, tuple[int, int]]
) -> None:
    """The chunks have the elements of the tensor, each once, in files that have as many bytes: none is left unread, and
    a shape in a manifest cannot ask for more memory than there are bytes on disk.
    """
    itemsize = cast(torch.dtype, getattr(torch, saved.dtype)).itemsize
    for chunk in chunks:
        ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=False)]
        fits = len(chunk.offsets) == len(chunk.sizes) == len(saved.shape)
        if not fits or min((*chunk.offsets, *chunk.sizes), default=0) < 0 or any(map(int.__gt__, ends, saved.shape)):
            raise wrong(at, (chunk.offsets, chunk.sizes), f"offsets and sizes inside {list(saved.shape)}")
        if chunk.file not in files:
            raise wrong(f"{at}.file", chunk.file, "a name in 'files'")
        if min(chunk.start, chunk.length - prod(chunk.sizes) * itemsize) < 0:
            raise wrong(at, (chunk.start, chunk.length), f"a start from 0 and the bytes of {list(chunk.sizes)}")
        if chunk.start + chunk.length > files[chunk.file][0]:
            raise wrong(at, (chunk.start, chunk.length), f"bytes inside {chunk.file}")
    parts = [(chunk.offsets, chunk.sizes) for chunk in chunks if prod(chunk.sizes)]
    if sum(prod(sizes) for _, sizes in parts) != prod(saved.shape) or _overlap(parts, 0, 0):
        raise wrong(at, parts, f"all elements of {list(saved.shape)}, each once")


def _overlap(parts: list[_Part], dim: int, tried: int) -> bool:
    """Whether parts share elements. Those that lie apart in a dim are told apart there, the others in the next one."""
    if len(parts) < 2:
        return False
    dims = len(parts[0][0])
    if tried == dims:  # no dim tells any of them apart
        pairs = (zip(*first, *other, strict=True) for i, first in enumerate(parts) for other in parts[:i])
        return any(all(a < b + m and b < a + n for a, n, b, m in dims) for dims in pairs)
    groups, end = list[list[_Part]](), 0
    for part in sorted(parts, key=lambda part: part[0][dim]):
        if not groups or part[0][dim] >= end:
            groups.append([])
        groups[-1].append(part)
        end = max(end, part[0][dim] + part[1][dim])
    return any(_overlap(group, (dim + 1) % dims, tried + 1 if len(groups) == 1 else 0) for group in groups)


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def check_files(
    folder: Path, manifest: Manifest, names: Iterable[str], progress: Callable[[int], None] = lambda _: None
) -> None:
    """Raise CheckpointError, which names the first of them, where files are missing or not as the manifest says.
    `progress` is called with the bytes of each file.
    """
    wrong: list[str] = []
    for name in names:
        size, crc = manifest.files[name]
        path = folder / name
        if not durable.is_plain_file(path):
            wrong.append(f"{name} is {'no plain file' if path.exists() else 'missing'}")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size:,} bytes, it had {size:,}")
        elif durable.checksum(path)[1] != crc:
            wrong.append(f"{name} does not match its checksum")
        progress(size)
    if wrong:
        raise _damaged(folder, shorten(wrong))


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged:{what}", "the files as they were saved", "")


def shorten(lines: list[str]) -> str:
    """To go after a colon: the first lines, and how many more there are; one alone stays on its line."""
    if len(lines) == 1:
        return f" {lines[0]}"
    tail = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n    {line}" for line in [*lines[:SHOWN], *tail])


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, the one saved last first; those without a readable manifest come last. A folder
    without any manifest is unfinished, and none of them.
    """
    entries: list[tuple[float, int, int, Path]] = []
    for path in folders(root):
        match = _FOLDER.fullmatch(path.name)
        if match and (path / NAME).exists():
            try:
                saved_at = read(path).saved_at
            except CheckpointError:
                saved_at = 0.0
            entries.append((saved_at, int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(entries, reverse=True, key=lambda entry: entry[:3])]


def folders(root: Path) -> list[Path]:
    """The folders in `root` with the name of a checkpoint, finished or not."""
    return [path for path in durable.entries(root) if _FOLDER.fullmatch(path.name)]


def names_for(number: int) -> Iterator[str]:
    """Folder names for checkpoint `number`, to be tried in turn."""
    first = f"step-{number:08d}"
    return chain([first], (f"{first}-{again}" for again in count(2)))


def is_checkpoint(directory: Path) -> bool:
    """True for the folder of one checkpoint, false for one that holds checkpoints."""
    return bool(_FOLDER.fullmatch(directory.name)) or (directory / NAME).exists()


def candidates(directory: Path) -> list[Path]:
    """The checkpoint that `directory` is; or those in it, the one saved last first, but before it the one that `latest`
    names if its manifest cannot be read. Raises CheckpointError: there is none.
    """
    if is_checkpoint(directory):
        return [directory]
    paths, pointer = checkpoints(directory), directory / LATEST
    while not paths and any((path / NAME).exists() for path in folders(directory)):
        paths = checkpoints(directory)  # those listed before were removed meanwhile, as newer ones exist
    if durable.is_plain_file(pointer):
        name = pointer.read_bytes()[:4096].decode(errors="replace").strip()
        named = directory / name if _FOLDER.fullmatch(name) else directory
        if named != directory and named.is_dir() and not is_readable(named):
            paths = [named, *(path for path in paths if path != named)]
    if not paths:
        what = "holds no checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(f"{directory} {what}", "a folder that wholestep.save wrote to", "correct the path")
    return paths


def name_in(directory: Path, folder: Path) -> str:
    """One of the `candidates` of a folder as text, which `folder_in` reads back: "" for the folder itself."""
    return "" if folder == directory else folder.name


def folder_in(directory: Path, name: str) -> Path:
    """What `name_in` named. Raises CheckpointError: it names none."""
    if name and not _FOLDER.fullmatch(name):
        raise CheckpointError(f"{shown(name)} is no checkpoint in {directory}", "a folder written by wholestep.save")
    return directory / name if name else directory


def is_readable(folder: Path) -> bool:
    """True for a folder whose manifest can be read."""
    try:
        read(folder)
    except CheckpointError:
        return False
    return True


def is_intact(folder: Path) -> bool:
    """True for a checkpoint whose files are all as its manifest says."""
    try:
        manifest = read(folder)
        check_files(folder, manifest, manifest.files)
    except CheckpointError:
        return False
    return True
