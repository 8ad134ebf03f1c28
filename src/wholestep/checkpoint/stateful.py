"""Objects beside the step whose state a resume needs: data loaders, schedulers, anything with `state_dict`."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..capture.call_structure import walk
from ..errors import CheckpointError, first_line
from . import durable
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


EXTRA_STATE = "_extra_state"
"""The last part of the name that torch gives to what a module keeps beside its tensors."""


@dataclass(frozen=True)
class ExtraState:
    """What a module keeps beside its tensors (`get_extra_state`): in a job of another size, the first rank's."""

    module: nn.Module

    def state_dict(self) -> dict[str, Any]:
        """As the module says it."""
        return {EXTRA_STATE: self.module.get_extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Back to the module."""
        self.module.set_extra_state(state_dict[EXTRA_STATE])


def extra_states(modules: Mapping[str, nn.Module]) -> dict[str, Stateful]:
    """What modules keep beside their tensors, by the names that torch gives it."""
    owners = [(path, m) for path, m in walk(modules) if type(m).get_extra_state is not nn.Module.get_extra_state]
    return {".".join(part for part in (path, EXTRA_STATE) if part): ExtraState(module) for path, module in owners}


def is_extra_state(name: str) -> bool:
    """True for a name of `extra_states`, which no other object may have."""
    return name.rpartition(".")[2] == EXTRA_STATE


def take(objects: Mapping[str, Stateful]) -> dict[str, bytes]:
    """The state of each object on this rank as it is now, as the content of a file."""
    return {name: to_bytes(_called(name), component.state_dict()) for name, component in objects.items()}


def _called(name: str) -> str:
    return f"get_extra_state() of a module, {name!r}," if is_extra_state(name) else f"stateful {name!r}"


def read_stateful(
    folder: Path, manifest: Manifest, objects: Mapping[str, Stateful], ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """The state of each object for this rank. Raises CheckpointError: the checkpoint does not have it, or it belongs to
    the ranks of a job of another size.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, component in objects.items():
        differing, same_size = manifest.stateful.get(name), ranks.size == manifest.world_size
        if differing is None:
            text = f"checkpoint {folder} holds no state of {name!r}: it has {sorted(manifest.stateful) or 'none'}"
            raise CheckpointError(text, "what was given to save as stateful", f"leave out {name!r}")
        if differing and not same_size and not isinstance(component, ExtraState):
            text = f"{name!r} has a state of its own on ranks {list(differing)} of {manifest.world_size}"
            needed = f"{manifest.world_size} ranks: a rank of {ranks.size} has no part in another job's rank"
            raise CheckpointError(text, needed, f"leave out {name!r} and place it anew")
        out[name] = read_file(
            folder, manifest.file_of(name, ranks.rank if same_size and ranks.rank in differing else 0), manifest
        )
    return out


def load_stateful(objects: Mapping[str, Stateful], states: Mapping[str, dict[str, Any]]) -> None:
    """Give each object its state. Raises CheckpointError, which names the object that refuses."""
    for name, state in states.items():
        try:
            objects[name].load_state_dict(state)
        except Exception as error:
            problem = f"{_called(name)} does not take its state back: {first_line(error)}"
            needed = "the object that was saved, or one like it"
            raise CheckpointError(problem, needed, "look at its own error") from error


def to_bytes(what: str, value: Any) -> bytes:
    """A file that can be read back without running code: tensors and plain values. `what` names it in an error."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        problem = f"{what} holds what cannot be saved ({first_line(error)})"
        raise CheckpointError(problem, "tensors, numbers, text, None; lists, tuples and dicts of these") from error
    return buffer.getvalue()


def read_file(folder: Path, name: str, manifest: Manifest) -> Any:
    """The values of a file. Raises CheckpointError: it is not the file in the manifest, or there is something else in
    it than tensors and plain values.
    """
    size, crc = manifest.files[name]
    try:
        data = durable.read_plain_file(folder / name, size)
        if data is None or len(data) != size or zlib.crc32(data) != crc:
            raise ValueError("it is not as it was saved")
        return read_plain(data)
    except Exception as error:
        text = f"checkpoint {folder} is damaged: {name} cannot be read ({first_line(error)})"
        raise CheckpointError(text, "tensors and plain values") from error


def read_plain(data: bytes) -> Any:
    """Tensors and plain values; nothing in the data is run, and it is not larger than it looks."""
    if not all(entry.compress_type == zipfile.ZIP_STORED for entry in zipfile.ZipFile(io.BytesIO(data)).infolist()):
        raise ValueError("compressed data, which wholestep never writes")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
