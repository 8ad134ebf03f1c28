"""What is in a checkpoint folder, described and checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from ..errors import CheckpointError
from ..graph.text import human, table
from . import durable, manifest
from .manifest import VALUES, Manifest
from .stateful import read_file


@dataclass(frozen=True)
class Contents:
    """A checkpoint folder. `fault` is why it is not intact, empty if it is. Without a `manifest` it cannot be read."""

    path: Path
    manifest: Manifest | None
    fault: str = ""

    @property
    def size_bytes(self) -> int:
        """Of its files."""
        return sum(size for size, _ in self.manifest.files.values()) if self.manifest else 0


def look(folder: Path, watch: Callable[[int], None] | None = None) -> Contents:
    """Read the manifest, and check that each file is there and has its size; with `watch`, which is told of the bytes
    of each file, its checksum.
    """
    try:
        record = manifest.read(folder)
    except CheckpointError as error:
        return Contents(folder, None, error.found)
    if watch is not None:
        try:
            manifest.check_files(folder, record, record.files, watch)
        except CheckpointError as error:
            return Contents(folder, record, error.found)
    lost = [
        name for name, (size, _) in record.files.items()
        if not durable.is_plain_file(folder / name) or (folder / name).stat().st_size != size
    ]  # fmt: skip
    return Contents(folder, record, f"missing or of another size: {', '.join(lost)}" if lost else "")


# -- text --------------------------------------------------------------------------------------------------


def show_all(several: list[Contents], verified: bool) -> str:
    """A table of the checkpoints of a folder, and the names of unfinished ones."""
    rows = [("checkpoint", "number", "saved", "ranks", "mesh", "files", "size", "intact")]
    for contents in several:
        record = contents.manifest
        intact = _printed(contents.fault) or _checked(verified)
        if record is None:
            rows.append((_printed(contents.path.name), "", "", "", "", "", "", intact))
            continue
        rows.append((
            _printed(contents.path.name), str(record.number), _when(record.saved_at), str(record.world_size),
            _printed(record.mesh) or "-", str(len(record.files)), human(contents.size_bytes), intact,
        ))  # fmt: skip
    complete = {contents.path for contents in several}
    unfinished = [path for path in manifest.folders(several[0].path.parent) if path not in complete]
    return "\n".join([
        *table(rows, left=(0, 2, 4, 7)),
        *(f"{_printed(path.name)} has no {manifest.NAME}: its save has not ended" for path in unfinished),
    ])  # fmt: skip


def show(contents: Contents, verified: bool) -> str:
    """What is in a checkpoint: its parameters with their optimizer state, buffers, random state and extra values."""
    record = contents.manifest
    assert record is not None, "there is something to show"
    lines = [
        f"checkpoint {record.number} in {contents.path}",
        f"  saved {_when(record.saved_at)} after {record.calls} calls, by {_ranks(record.world_size)}"
        + (f", mesh {_printed(record.mesh)}" if record.mesh else ""),
        f"  {len(record.files)} files, {human(contents.size_bytes)}: "
        + (_printed(contents.fault) or f"intact {_checked(verified)}"),
    ]
    sizes = {name: saved.empty("meta").nbytes for name, saved in record.tensors.items()}
    state = defaultdict[str, list[str]](list)
    for name, saved in record.tensors.items():
        if saved.role == "state":
            state[saved.owner].append(name)
    rows = [("tensor", "role", "dtype", "shape", "bytes", "optimizer state", "bytes")]
    for name, saved in record.tensors.items():
        if saved.role in ("param", "buffer"):
            keys = ", ".join(record.tensors[key].key for key in state[name])
            state_bytes = sum(sizes[key] for key in state[name])
            rows.append((
                _printed(name), saved.role, saved.dtype, str(list(saved.shape)), human(sizes[name]),
                _printed(keys) or "-", human(state_bytes) if keys else "-",
            ))  # fmt: skip
    lines += [f"  {row}" for row in table(rows, left=(0, 1, 2, 3, 5))]
    for role, what in (("param", "parameters"), ("buffer", "buffers"), ("state", "tensors of optimizer state")):
        names = [name for name, saved in record.tensors.items() if saved.role == role]
        lines.append(f"  {len(names)} {what}, {human(sum(sizes[name] for name in names))}")
    for label, saved in record.optimizers.items():
        counts = ", ".join(str(len(group)) for group in saved.groups)
        lines.append(f"  {_printed(label)}: {_printed(saved.kind)}, groups of {counts} parameters")
    lines += [f"  {_printed(line)}" for line in _of_ranks(record)]
    lines += [f"  stateful: {_printed(', '.join(record.stateful))}"] if record.stateful else []
    lines += [f"  extra: {_printed(', '.join(extra(contents))) or 'none'}"] if not contents.fault else []
    return "\n".join(lines)


def _of_ranks(record: Manifest) -> Iterator[str]:
    """The tensors that ranks have of their own, each with the number of those ranks."""
    names = [name.partition("/")[2] for name, saved in record.tensors.items() if saved.role == "rank"]
    counts = Counter(names)
    for kind, chosen in (
        ("random state", [name for name in counts if name.startswith("random/")]),
        ("buffers that differ", [name for name in counts if not name.startswith("random/")]),
    ):
        several = defaultdict[int, list[str]](list)
        for name in chosen:
            several[counts[name]].append(name.removeprefix("random/"))
        yield from (f"{kind} of {_ranks(ranks)}: {', '.join(names)}" for ranks, names in several.items())


def extra(contents: Contents) -> list[str]:
    """The names of what the user has put beside the state. Raises CheckpointError: the file cannot be read."""
    assert contents.manifest is not None
    content = read_file(contents.path, VALUES, contents.manifest)
    extras: Any = cast(dict[str, Any], content).get("extra") if isinstance(content, dict) else None
    return [str(name) for name in cast(dict[Any, Any], extras)] if isinstance(extras, dict) else []


def as_json(contents: Contents) -> dict[str, Any]:
    """The same as a JSON value, in bytes and seconds since 1970."""
    record = contents.manifest
    if record is None:
        return {"path": str(contents.path), "fault": contents.fault}
    tensors = {
        name: {"role": saved.role, "dtype": saved.dtype, "shape": saved.shape, "bytes": saved.empty("meta").nbytes}
        for name, saved in record.tensors.items()
    }
    optimizers = {label: {"kind": saved.kind, "groups": saved.groups} for label, saved in record.optimizers.items()}
    beside = {"stateful": list(record.stateful), "extra": None if contents.fault else extra(contents)}
    return {
        "path": str(contents.path), "fault": contents.fault or None, "number": record.number, "calls": record.calls,
        "saved_at": record.saved_at, "ranks": record.world_size, "mesh": record.mesh, "bytes": contents.size_bytes,
        "tensors": tensors, "optimizers": optimizers, **beside,
    }  # fmt: skip


def _checked(verified: bool) -> str:
    return "by checksum" if verified else "by size"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _when(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "?"


def _printed(text: str) -> str:
    """Text that cannot steer a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]
