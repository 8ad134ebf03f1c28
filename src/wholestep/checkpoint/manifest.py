"""The manifest of a checkpoint: its tensors, the size and checksum of each file; and the folder of checkpoints."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import CheckpointError, shown
from ..typed_json import MalformedError, parse, wrong
from ..typed_json import read as decoded
from . import durable

FORMAT = "wholestep.checkpoint"
VERSION = 1
NAME = "manifest.json"
LATEST = "latest"
SHOWN = 10
_ROLES = ("param", "buffer", "state", "rank")
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor. `role`: param, buffer, state (`owner`, `key`, `optimizer` are set), or rank: one rank alone had it."""

    role: str
    shape: tuple[int, ...]
    dtype: str
    owner: str = ""
    key: str = ""
    optimizer: str = ""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class SavedOptimizer:
    """The class of an optimizer and the parameters of each of its groups."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `files` gives size in bytes and CRC-32 by name; `saved_at` is in seconds since 1970."""

    number: int
    calls: int
    world_size: int
    mesh: str
    saved_at: float
    tensors: Mapping[str, CheckpointTensor]
    optimizers: Mapping[str, SavedOptimizer]
    files: Mapping[str, tuple[int, int]]

    def to_json(self) -> str:
        """Text that `read` reads back; it holds its own checksum."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**content, "checksum": _checksum(content)})


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError: there is none that is whole and of this version."""
    try:
        text = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "is no folder" if not folder.is_dir() else f"has no {NAME}"
        raise CheckpointError(f"checkpoint {folder} {what}", "a folder written by wholestep.save", "") from error
    except OSError as error:
        raise _damaged(folder, f" {NAME} cannot be read ({error.strerror})") from error
    try:
        content = parse(text)
    except MalformedError as error:
        raise _damaged(folder, f" {NAME} is cut off or altered ({error.found})") from error
    if not isinstance(content, dict) or cast(dict[str, Any], content).get("format") != FORMAT:
        found = f"checkpoint {folder}: its {NAME} is not of format {FORMAT!r}"
        raise CheckpointError(found, "a folder written by wholestep.save", "")
    fields = cast(dict[str, Any], content)
    version = fields.pop("version", None)
    if isinstance(version, int) and version > VERSION:
        found = f"checkpoint {folder} has version {shown(version)}"
        raise CheckpointError(found, f"version {VERSION} or older", "load it with the wholestep that wrote it")
    if fields.pop("checksum", None) != _checksum({"format": FORMAT, "version": version, **fields}):
        raise _damaged(folder, f" {NAME} does not match its own checksum")
    del fields["format"]
    try:
        manifest = cast(Manifest, decoded(Manifest, fields))
        _check(manifest)
    except MalformedError as error:
        raise CheckpointError(
            f"checkpoint {folder}: its {NAME} is malformed: {error.found}", error.needed, ""
        ) from error
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


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def check_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise CheckpointError, which names the first of them, where files are missing or not as the manifest says."""
    wrong: list[str] = []
    for name in names:
        size, crc = manifest.files[name]
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes, it had {size}")
        elif durable.checksum(path)[1] != crc:
            wrong.append(f"{name} does not match its checksum")
    if wrong:
        raise _damaged(folder, shorten(wrong))


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged:{what}", "the files as they were saved", "")


def shorten(lines: list[str]) -> str:
    """To go after a colon: the first lines, and how many more there are; one alone stays on its line."""
    if len(lines) == 1:
        return f" {lines[0]}"
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n    {line}" for line in [*lines[:SHOWN], *more])


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, the one saved last first; those without a readable manifest come last."""
    found: list[tuple[float, int, int, Path]] = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            try:
                saved_at = read(path).saved_at
            except CheckpointError:
                saved_at = 0.0
            found.append((saved_at, int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found, reverse=True)]


def new_name(root: Path, number: int) -> str:
    """A free folder name for checkpoint `number`."""
    first = f"step-{number:08d}"
    names = chain([first], (f"{first}-{again}" for again in count(2)))
    return next(name for name in names if not (root / name).exists())


def locate(directory: Path) -> Path:
    """The checkpoint folder that `directory` is, or that its `latest` file names; without one, that saved last."""
    if (directory / NAME).exists() or _FOLDER.fullmatch(directory.name):
        return directory
    pointer = directory / LATEST
    if pointer.is_file():
        name = pointer.read_bytes().decode(errors="replace").strip()
        if _FOLDER.fullmatch(name):
            return directory / name
        found = f"{pointer} names {name[:80]!r}"
        raise CheckpointError(found, "the name of a checkpoint folder, such as 'step-00000120'", "")
    found = checkpoints(directory)
    if found:
        return found[0]
    what = "holds no checkpoint" if directory.is_dir() else "does not exist"
    raise CheckpointError(f"{directory} {what}", "a folder that wholestep.save wrote to", "")


def with_alternative(error: CheckpointError, directory: Path, folder: Path | None) -> CheckpointError:
    """The error, with the newest other checkpoint that is intact as its next step."""
    if error.next_step:
        return error
    for other in checkpoints(directory if folder is None or folder == directory / folder.name else folder.parent):
        if other == folder:
            continue
        try:
            manifest = read(other)
            check_files(other, manifest, manifest.files)
        except CheckpointError:
            continue
        return CheckpointError(error.found, error.needed, f"load {str(other)!r}, which is intact", error.where)
    return CheckpointError(error.found, error.needed, "correct the path, or start anew: no other checkpoint is intact")
