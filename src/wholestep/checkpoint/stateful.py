"""Objects beside the step whose state a resume needs: data loaders, schedulers, anything with `state_dict`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ..errors import CheckpointError, first_line
from .manifest import Manifest
from .ranks import Ranks


class Stateful(Protocol):
    """What `save` and `load` take as `stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take a state over."""
        ...


def file_of(name: str, rank: int, found: Manifest) -> str:
    """The file with the state of an object: they are numbered, as names may hold what no file name can."""
    return f"stateful-{sorted(found.stateful).index(name)}-{rank}.pt"


def take(objects: Mapping[str, Stateful]) -> dict[str, bytes]:
    """The state of each object on this rank as it is now, as the content of a file."""
    return {name: to_bytes(f"stateful {name!r}", one.state_dict()) for name, one in objects.items()}


def read_stateful(folder: Path, found: Manifest, names: Iterable[str], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """The state of each object for this rank. Raises CheckpointError: the checkpoint does not have it, or it belongs to
    the ranks of a job of another size.
    """
    out: dict[str, dict[str, Any]] = {}
    for name in names:
        differing = found.stateful.get(name)
        if differing is None:
            text = f"checkpoint {folder} holds no state of {name!r}: it has {sorted(found.stateful) or 'none'}"
            raise CheckpointError(text, "what was given to save as stateful", f"leave out {name!r}")
        if differing and ranks.size != found.world_size:
            text = f"{name!r} has a state of its own on ranks {list(differing)} of {found.world_size}"
            needed = f"{found.world_size} ranks: a rank of {ranks.size} has no part in another job's rank"
            raise CheckpointError(text, needed, f"leave out {name!r} and place it anew")
        out[name] = read_file(folder / file_of(name, ranks.rank if ranks.rank in differing else 0, found))
    return out


def load_stateful(objects: Mapping[str, Stateful], states: Mapping[str, dict[str, Any]]) -> None:
    """Give each object its state. Raises CheckpointError, which names the object that refuses."""
    for name, state in states.items():
        try:
            objects[name].load_state_dict(state)
        except Exception as error:
            found = f"stateful {name!r} does not take its state back: {first_line(error)}"
            raise CheckpointError(
                found, "the object that was saved, or one like it", "look at its own error"
            ) from error


def to_bytes(what: str, value: Any) -> bytes:
    """A file that can be read back without running code: tensors and plain values. `what` names it in an error."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        found = f"{what} holds what cannot be saved ({first_line(error)})"
        raise CheckpointError(found, "tensors, numbers, text, None; lists, tuples and dicts of these") from error
    return buffer.getvalue()


def read_file(path: Path) -> Any:
    """The values of a file. Raises CheckpointError: there is something else in it than tensors and plain values."""
    try:
        with path.open("rb") as file:
            return read_plain(io.BytesIO(file.read()))
    except CheckpointError:
        raise
    except Exception as error:
        found = f"checkpoint {path.parent} is damaged: {path.name} cannot be read ({first_line(error)})"
        raise CheckpointError(found, "tensors and plain values") from error


def read_plain(data: io.BytesIO) -> Any:
    """Tensors and plain values; nothing in the data is run, and it is not larger than it looks."""
    if not all(entry.compress_type == zipfile.ZIP_STORED for entry in zipfile.ZipFile(data).infolist()):
        raise ValueError("compressed data, which wholestep never writes")
    data.seek(0)
    return torch.load(data, map_location="cpu", weights_only=True)
