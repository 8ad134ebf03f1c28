"""Checkpoints: written aside, synced to disk, renamed; checked before they are loaded; resharded on load.

A folder `step-00000120` holds torch.distributed.checkpoint files (tensors, named as in `state_dict()`; optimizer state
as `parameter/key`), `values.pt` (plain values) and `manifest.json`; next to it the file `latest` names the newest.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.call_structure import by_name
from ..capture.scheduled_numbers import to_save
from ..capture.state import StepState, collect
from ..distributed.launch import join
from ..errors import CheckpointError
from ..graph.graph import Role
from ..runtime import random_state
from ..runtime.between_steps import flush_pending
from ..runtime.nonfinite import read_all_nonfinite
from ..runtime.step import CompiledStep
from . import durable, manifest, snapshot
from .collective_calls import gather_from_ranks, on_every_rank, on_first_rank, rank_and_size
from .manifest import CheckpointTensor, Manifest

VALUES = "values.pt"
Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: its number, what the user put beside the state, its folder.

    Example:
        >>> checkpoint = ws.load("checkpoints", step)
        >>> print(checkpoint.number, checkpoint.extra, checkpoint.path)
    """

    number: int
    extra: dict[str, Any]
    path: Path


def save(
    directory: str | Path,
    step: CompiledStep | None = None,
    *,
    model: Modules | None = None,
    optimizer: Optimizers | None = None,
    number: int | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save parameters, buffers, optimizer state and options, the number of calls and every rank's random state.

    Called on every rank, with a step that was called or with `model` and `optimizer`. A crash at any point leaves the
    checkpoints that were there. Gradients are not saved.

    Args:
        directory: the folder that checkpoints go to, on a file system that all ranks share.
        step: what to save.
        model: a module, or several in a list or by name, instead of `step`.
        optimizer: likewise.
        number: of the checkpoint; `step.calls` by default.
        extra: tensors and plain values to keep as well (the first rank's), such as a scheduler's `state_dict()`.
        keep: how many checkpoints to leave in `directory`, this one included.

    Example:
        >>> wholestep.save("checkpoints", step, extra={"epoch": 3})

    Raises:
        CheckpointError: on every rank, when it could not be saved on any.
        NonFiniteError: on every rank: with `on_nonfinite="raise"`, the last call was not finite; nothing is saved.
    """
    flush_pending()
    read_all_nonfinite()
    root, state = Path(directory), _state_of(step, model, optimizer)
    number = step.calls if number is None and step is not None else number
    if state is None or number is None or number < 0 or keep < 1:
        found = f"save({'no step that was called, no model' if state is None else f'number={number}, keep={keep}'})"
        needed = "a step that was called, or model= and number=; a number from 0, keep from 1"
        raise CheckpointError(found, needed, "call the step first, or give what is missing")
    if step is None:
        join(None, str(next((h.tensor.device for h in state.params.values()), "cpu")))
    now = snapshot.take(state)
    snapshot.add_own(now)
    content = {
        "extra": dict(extra or {}), "options": now.options, "values": now.values,
        "scheduled": to_save(state.optimizers),
    }  # fmt: skip
    aside = on_first_rank(lambda: _new_aside(root, number))
    on_every_rank(lambda: _write_own(aside, now.tensors, content))
    sums = gather_from_ranks(lambda: _own_files(aside))
    files = {name: found for part in sums for name, found in part.items()}
    tensors = _saved_of_all(now.saved)
    mesh = str(step.world.mesh) if step is not None and step.world is not None else ""
    calls = step.calls if step is not None else number
    written = Manifest(number, calls, len(sums), mesh, time.time(), tensors, now.optimizers, files)
    return on_first_rank(lambda: _publish(root, aside, written, keep))


def _saved_of_all(own: dict[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """What all ranks saved, by name: the first rank's, and what other ranks have beside it."""
    first = on_first_rank(lambda: own)
    beside = gather_from_ranks(lambda: {name: saved for name, saved in own.items() if first.get(name) != saved})
    return first | {name: saved for part in beside for name, saved in part.items()}


def _new_aside(root: Path, number: int) -> Path:
    """An empty folder to write to; what an interrupted save has left is removed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob("step-*.tmp"):
        durable.remove(left)
    aside = root / f"{manifest.new_name(root, number)}.tmp"
    aside.mkdir()
    return aside


def _write_own(aside: Path, tensors: dict[str, torch.Tensor], content: dict[str, Any]) -> None:
    rank, size = rank_and_size()
    if rank == 0:
        durable.write(aside / VALUES, _plain_bytes(content))
    with _dcp() as dcp:
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(aside), no_dist=size == 1)


def _plain_bytes(content: dict[str, Any]) -> bytes:
    """`content` as a file that can be read back without running code: tensors and plain values."""
    for part, value in content.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        except Exception as error:
            what = {"extra": "extra", "values": "optimizer state"}.get(part, "a parameter group")
            found = f"{what} holds what cannot be saved ({str(error).splitlines()[0]})"
            raise CheckpointError(found, "tensors, numbers, text, None; lists, tuples and dicts of these") from error
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _own_files(aside: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of the files this rank wrote; the first rank wrote those that belong to no rank."""
    rank, _ = rank_and_size()
    names = [path.name for path in aside.iterdir()]
    own = [n for n in names if n.startswith(f"__{rank}_") or (rank == 0 and not n.startswith("__"))]
    return {name: durable.checksum(aside / name) for name in sorted(own)}


def _publish(root: Path, aside: Path, written: Manifest, keep: int) -> Path:
    durable.write(aside / manifest.NAME, written.to_json().encode())
    durable.sync(aside)
    folder = aside.with_suffix("")
    durable.move(aside, folder)
    durable.replace(root / manifest.LATEST, f"{folder.name}\n".encode())
    others = [path for path in manifest.checkpoints(root) if path != folder]
    for old in others[keep - 1 :]:
        durable.remove(old)
    return folder


def load(
    directory: str | Path,
    step: CompiledStep | None = None,
    *,
    model: Modules | None = None,
    optimizer: Optimizers | None = None,
) -> Checkpoint:
    """Load a checkpoint into a step, or into a model and an optimizer; into nothing, it is only checked and described.

    Called on every rank; any number of ranks and any layout may load what any other saved. Random state comes back
    where the number of ranks is the same. A step that was not called yet is restored at its first call, and a
    checkpoint of another model is found out then. Buffers that differ between ranks come back into a step; those of a
    model that a step takes over later are the first rank's. A second copy of the state is held while it is read.

    Args:
        directory: what `save` was given (then its `latest` is followed), or the folder of one checkpoint.
        step: what to load into.
        model: a module, or several in a list or by name, instead of `step`.
        optimizer: likewise; without it, optimizer state is left out.

    Example:
        >>> checkpoint = wholestep.load("checkpoints", step)
        >>> for number in range(checkpoint.number, 1000): ...

    Raises:
        CheckpointError: on every rank: there is none, or it is damaged or does not fit; nothing was changed then.
    """
    flush_pending()
    root, state = Path(directory), _state_of(step, model, optimizer)
    folder, found, content = _open(root)
    if state is not None:
        _restore(folder, found, content, state, keep_primed=False)
    if state is not None or step is not None:
        _restore_random(folder, found)
    if step is not None:
        step.calls = found.calls
        if state is None:
            waiting = [call for call in step.on_placed if not isinstance(call, _Waiting)]
            step.on_placed[:] = [*waiting, _Waiting(folder, found, content)]
    return Checkpoint(found.number, content["extra"], folder)


def _open(root: Path) -> tuple[Path, Manifest, dict[str, Any]]:
    """Find a checkpoint and check every file of it; the ranks share the work."""
    folder: Path | None = None
    try:
        folder = place = on_first_rank(lambda: manifest.locate(root))
        found = on_every_rank(lambda: manifest.read(place))
        rank, size = rank_and_size()
        on_every_rank(lambda: manifest.check_files(place, found, sorted(found.files)[rank::size]), name_rank=False)
        return place, found, on_every_rank(lambda: torch.load(place / VALUES, weights_only=True))
    except CheckpointError as error:
        damage = error
    raise on_first_rank(lambda: manifest.with_alternative(damage, root, folder)) from damage


@dataclass(frozen=True)
class _Waiting:
    """Restores a step once its state is where it rests."""

    folder: Path
    manifest: Manifest
    content: Mapping[str, Any]

    def __call__(self, step: CompiledStep) -> None:
        assert step.state is not None, "called when the state is placed"
        _restore(self.folder, self.manifest, self.content, step.state, keep_primed=True)


def _restore(folder: Path, found: Manifest, content: Mapping[str, Any], state: StepState, keep_primed: bool) -> None:
    def check() -> None:
        lines = snapshot.differences(found, state)
        lines += [f"{n}: on 'meta' here" for n, held in state.params.items() if held.tensor.is_meta]
        if lines:
            text = f"checkpoint {folder} does not fit:{manifest.shorten(lines)}"
            advice = "load it into what it was saved from; several models or optimizers by the names they had then"
            raise CheckpointError(text, "the same model and optimizer", advice)

    on_every_rank(check)
    restore = snapshot.Restore(found, state)
    on_every_rank(lambda: _read(folder, restore.staged))
    restore.commit(content, keep_primed)


def _restore_random(folder: Path, found: Manifest) -> None:
    names = {n: full for n, full in snapshot.own_names(found).items() if n.startswith("random/")}
    staged = {full: torch.empty(found.tensors[full].shape, dtype=torch.uint8) for full in names.values()}
    on_every_rank(lambda: _read(folder, staged))
    if names:
        random_state.put({name.removeprefix("random/"): staged[full] for name, full in names.items()})


def _read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    if tensors:
        with _dcp() as dcp:
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(folder), no_dist=True)


@contextmanager
def _dcp() -> Generator[Any]:
    """torch.distributed.checkpoint, imported where it is used: it takes a tenth of a second and 10 MB. It does not warn
    that there are no other ranks; what failed is an exception that `except Exception` sees.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield dcp
        except CheckpointException as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _state_of(step: CompiledStep | None, model: Modules | None, optimizer: Optimizers | None) -> StepState | None:
    """The state to save or to load into; None for a step that was not called, or where nothing is given."""
    if step is not None:
        if model is not None or optimizer is not None:
            raise CheckpointError("both a step and model= or optimizer= were given", "one of them", "leave one out")
        if step.programs and any(i.role is Role.GRAD for i in step.programs[-1].plan.inputs):
            text = "this step carries gradients from one call to the next, and a checkpoint does not hold them"
            warnings.warn(text, stacklevel=3)
        return step.state
    if model is None and optimizer is None:
        return None
    return collect(by_name("model", model, nn.Module), by_name("optimizer", optimizer, Optimizer), {})
