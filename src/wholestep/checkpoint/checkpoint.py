"""Checkpoints: written by all ranks into a new folder, published as a whole, checked before they are loaded, resharded
on load.

A folder `step-00000120` holds the tensors in the files of torch.distributed.checkpoint (named as in `state_dict()`;
optimizer state as `parameter/key`), plain values in `values.pt`, and `manifest.json`, which says what belongs to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ..capture.call_structure import Modules, Optimizers, by_name
from ..capture.state import StepState, collect
from ..distributed.launch import ensure_group
from ..distributed.peers import watch_peers
from ..distributed.stop_request import StopRequest
from ..errors import CheckpointError, shown
from ..graph.graph import Role
from ..runtime import random_state
from ..runtime.between_steps import flush_pending
from ..runtime.nonfinite import read_all_nonfinite
from ..runtime.step import CompiledStep
from ..units import parse_seconds
from . import background, durable, manifest, snapshot, tensor_files
from .first_call import at_first_call
from .manifest import Manifest
from .ranks import Ranks
from .stateful import Stateful, extra_states, is_extra_state, load_stateful, read_stateful
from .write import Progress, to_write


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


@overload
def save(
    directory: str | Path, step: CompiledStep | None = None, *, model: Modules | None = None,
    optimizer: Optimizers | None = None, number: int | None = None, extra: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Stateful] | None = None, keep: int = 2, every: None = None, wait: Literal[True] = True,
    grace: float | str | None = None,
) -> Path: ...  # fmt: skip
@overload
def save(
    directory: str | Path, step: CompiledStep | None = None, *, model: Modules | None = None,
    optimizer: Optimizers | None = None, number: int | None = None, extra: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Stateful] | None = None, keep: int = 2, every: int | None = None, wait: bool = True,
    grace: float | str | None = None,
) -> Path | Future[Path] | None: ...  # fmt: skip
def save(
    directory: str | Path, step: CompiledStep | None = None, *, model: Modules | None = None,
    optimizer: Optimizers | None = None, number: int | None = None, extra: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Stateful] | None = None, keep: int = 2, every: int | None = None, wait: bool = True,
    grace: float | str | None = None,
) -> Path | Future[Path] | None:  # fmt: skip
    """Save parameters, buffers, optimizer state and options, the number of calls and every rank's random state.

    Called on every rank, with a step that was called or with `model` and `optimizer`. A crash at any point leaves the
    checkpoints that were there. Gradients are not saved. One job at a time saves to a folder.

    Args:
        directory: the folder that checkpoints go to, on a file system that all ranks share, or on an object store
            (`s3://bucket/run`, with universal-pathlib and s3fs installed).
        step: what to save.
        model: a module, or several in a list or by name, instead of `step`.
        optimizer: likewise.
        number: of the checkpoint; `step.calls` by default.
        extra: tensors and plain values to keep as well (the first rank's).
        stateful: objects with `state_dict` and `load_state_dict` to keep as well, by name: schedulers, data loaders.
            Each rank's own state is kept where ranks differ.
        keep: how many checkpoints to leave in `directory`, this one included.
        every: save only where `step.calls` is a multiple of it; other calls return None.
        wait: whether to write before it returns. Otherwise it copies the state to host memory, returns a future of the
            folder, and writes in the background. The next save waits for that, and raises what went wrong. The process
            does not end before it is written, and ends with status 1 if it cannot be.
        grace: end well when the job is asked to (SIGTERM): all ranks save after the same step, whatever `every` says,
            and end with status 0. A job that needs longer than this (`"30s"`, or seconds) ends with status 1 and the
            reason. To be called after each step.

    Example:
        >>> wholestep.save("checkpoints", step, every=100, wait=False, extra={"epoch": 3})

    Raises:
        CheckpointError: on every rank, when it could not be saved on any, or another job saves there.
        NonFiniteError: on every rank: with `on_nonfinite="raise"`, the last call was not finite; nothing is saved.
    """
    _check_stateful(stateful)
    for name, value, least in (("number", number, 0), ("keep", keep, 1), ("every", every, 1)):
        if value is not None and value < least:
            raise CheckpointError(f"save({name}={value})", f"a whole number from {least}", "correct it")
    if step is None and (every is not None or grace is not None):
        problem = f"save(every={every}, grace={grace}) without a step"
        raise CheckpointError(problem, "a step whose calls it counts", "leave it out")
    stop = _stop_after(step, grace) if step is not None and grace is not None else None
    if step is not None and every is not None and stop is None and (step.calls == 0 or step.calls % every):
        return None
    flush_pending()
    read_all_nonfinite()
    background.wait()
    state = _state_of(step, model, optimizer)
    number = step.calls if number is None and step is not None else number
    if state is None or number is None:
        problem = f"save({'no step that was called, no model' if state is None else 'number=None'})"
        raise CheckpointError(problem, "a step that was called, or model= and number=", "give what is missing")
    if step is None:
        ensure_group(_device_of(state))
    calls = step.calls if step is not None else number
    mesh = str(step.world.mesh) if step is not None and step.world is not None else ""
    described = Manifest(number, calls, 1, mesh, 0.0, {}, {}, {}, {}, {})
    write = to_write(durable.folder_at(directory), state, described, dict(extra or {}), dict(stateful or {}), keep)
    background.at_exit()
    if stop is not None:
        write.run()
        stop.finish()
        raise SystemExit(0)
    if wait:
        return write.run()
    owner = step if step is not None else next(iter((*state.modules.values(), *state.optimizers.values())))
    return background.start(replace(write, pieces=background.staged(write.pieces, owner)).run)


_stop_request: StopRequest | None = None


def _stop_after(step: CompiledStep, grace: float | str) -> StopRequest | None:
    """The request to end the job, if all ranks end after this call of the step."""
    global _stop_request
    if step.calls == 0:
        return None
    if _stop_request is None:
        _stop_request = StopRequest.install(parse_seconds(grace, "grace"))
    return _stop_request if _stop_request.agreed_at(step.calls) else None


def _check_stateful(stateful: Mapping[str, Stateful] | None) -> None:
    for name, component in (stateful or {}).items():
        if is_extra_state(name):
            problem = f"stateful {name!r}, a name that torch gives to what a module keeps"
            raise CheckpointError(problem, "another name", "leave it out: what modules keep is saved with them")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(component, method, None)):
                problem = f"stateful {name!r} is {shown(component)}"
                raise CheckpointError(problem, f"an object with {method}()", "leave it out")


def load(
    directory: str | Path, step: CompiledStep | None = None, *, model: Modules | None = None,
    optimizer: Optimizers | None = None, stateful: Mapping[str, Stateful] | None = None, strict: bool = False,
) -> Checkpoint:  # fmt: skip
    """Load a checkpoint into a step, or into a model and an optimizer; into nothing, it is only checked and described.

    Called on every rank; any number of ranks and any layout may load what any other saved. Random state comes back
    where the number of ranks is the same. A step that was not called yet is restored at its first call, but for options
    of the optimizer that were set meanwhile; a checkpoint of another model is found out then. Buffers that differ
    between ranks come back into a step; those of a model that a step takes over later are the first rank's. A second
    copy of the state is held while it is read.

    Loading executes no code from the folder. A malformed checkpoint raises CheckpointError.

    Args:
        directory: what `save` was given, or the folder of one checkpoint. Of several the newest one that is intact is
            taken, with a warning where a newer one is damaged.
        step: what to load into.
        model: a module, or several in a list or by name, instead of `step`.
        optimizer: likewise; without it, optimizer state is left out.
        stateful: objects that were given to `save`, by name; each gets this rank's state.
        strict: whether to refuse a folder whose newest checkpoint is damaged.

    Example:
        >>> checkpoint = wholestep.load("checkpoints", step)
        >>> for number in range(checkpoint.number, 1000): ...

    Raises:
        CheckpointError: on every rank: there is none, or it is damaged or does not fit; nothing was changed then.
    """
    _check_stateful(stateful)
    flush_pending()
    background.wait()
    state, objects = _state_of(step, model, optimizer), dict(stateful or {})
    if state is not None or step is not None or objects:
        ensure_group(_device_of(state) if state is not None else None)
    if step is not None:
        watch_peers(step.options.user.timeout_s)  # others may be in its first call
    into = "nothing" if state is None and step is None else "a state" if state is not None else "a step to be called"
    ranks = Ranks.of_job("load", directory, into, *sorted(objects))
    root = durable.folder_at(directory)
    while True:
        folder, record, content = _open(root, ranks, strict)
        if state is not None and step is None:
            state = snapshot.with_attributes(state, record)
        try:
            restore = _staged(folder, record, state, ranks) if state is not None else None
            components = {**objects, **(extra_states(state.modules) if state is not None else {})}
            states = ranks.on_every_rank(partial(read_stateful, folder, record, components, ranks))
            drawn = _random(folder, record, ranks) if state is not None or step is not None else {}
            break
        except CheckpointError:
            if not _was_removed(root, folder, ranks):
                raise
    ranks.on_every_rank(lambda: load_stateful(components, states))
    if restore is not None:
        restore.commit(content, keep_primed=False)
    if drawn:
        random_state.put(drawn)
    if step is not None:
        step.calls = record.calls
        if state is None:
            at_first_call(step, partial(_restore, folder, record, content))
    return Checkpoint(record.number, content["extra"], folder)


def _open(directory: Path, ranks: Ranks, strict: bool) -> tuple[Path, Manifest, dict[str, Any]]:
    """The newest intact checkpoint, its manifest and plain values. The ranks share the work of checking files."""
    names = ranks.on_first_rank(
        lambda: [manifest.name_in(directory, path) for path in manifest.candidates(directory)], Sequence[str]
    )
    folders, damage = [manifest.folder_in(directory, name) for name in names], list[CheckpointError]()
    for folder in folders:
        try:
            record = ranks.on_every_rank(lambda folder=folder: manifest.read(folder))
            mine = sorted(record.files)[ranks.rank :: ranks.size]
            total = sum(record.files[name][0] for name in mine)
            progress = Progress(f"checkpoint {folder.name}: {{}} checked by rank 0", total, quiet=ranks.rank != 0)
            check = partial(manifest.check_files, folder, record, mine, progress)
            ranks.on_every_rank(check, name_rank=False)
            content = ranks.on_every_rank(partial(snapshot.read_values, folder, record))
        except CheckpointError as error:
            if error.next_step:  # it is whole, and cannot be read here
                raise
            if _was_removed(directory, folder, ranks):
                return _open(directory, ranks, strict)
            damage.append(error)
            continue
        if damage and strict:
            raise CheckpointError(damage[0].found, damage[0].needed, f"load {str(folder)!r}, which is intact")
        for error in damage if ranks.rank == 0 else ():
            warnings.warn(f"{error.found}; loaded {folder} instead, which is intact", stacklevel=3)
        return folder, record, content
    raise CheckpointError(damage[0].found, damage[0].needed, _alternative(directory, folders, ranks)) from damage[0]


def _was_removed(directory: Path, folder: Path, ranks: Ranks) -> bool:
    """True when the job that saves there has removed a checkpoint meanwhile, as newer ones exist."""
    return ranks.on_first_rank(lambda: folder not in manifest.candidates(directory), bool)


def _alternative(directory: Path, tried: Sequence[Path], ranks: Ranks) -> str:
    """The next step after damage: an intact checkpoint beside the one that was asked for."""

    def look() -> str:
        siblings = manifest.checkpoints(directory.parent) if manifest.is_checkpoint(directory) else []
        for other in siblings:
            if other not in tried and manifest.is_intact(other):
                return f"load {str(other)!r}, which is intact"
        return "correct the path, or start anew: no other checkpoint is intact"

    return ranks.on_first_rank(look, str)


def _restore(folder: Path, record: Manifest, content: Mapping[str, Any], step: CompiledStep) -> None:
    assert step.state is not None, "its state is placed"
    ranks, components = Ranks.of_job("load", folder), extra_states(step.state.modules)
    restore = _staged(folder, record, step.state, ranks)
    states = ranks.on_every_rank(partial(read_stateful, folder, record, components, ranks))
    ranks.on_every_rank(lambda: load_stateful(components, states))
    restore.commit(content, keep_primed=True)


def check_fits(record: Manifest, state: StepState, what: str) -> None:
    """Raise CheckpointError where `what` cannot be loaded into `state`."""
    lines = snapshot.differences(record, state)
    lines += [f"{n}: on 'meta' here" for n, param in state.params.items() if param.tensor.is_meta]
    if lines:
        text = f"{what} does not fit:{manifest.shorten(lines)}"
        advice = "load it into what it was saved from; several models or optimizers by the names they had then"
        raise CheckpointError(text, "the same model and optimizer", advice)


def _staged(folder: Path, record: Manifest, state: StepState, ranks: Ranks) -> snapshot.Restore:
    """What `state` is to become, read and checked; nothing is changed yet."""
    ranks.on_every_rank(lambda: check_fits(record, state, f"checkpoint {folder}"))
    restore = ranks.on_every_rank(lambda: snapshot.Restore(record, state))
    total = sum(tensor.nbytes for tensor in restore.staged.values())
    progress = Progress(f"checkpoint {folder.name}: {{}} read by rank 0", total, quiet=ranks.rank != 0)
    ranks.on_every_rank(lambda: tensor_files.read(folder, record.chunks, restore.staged, progress))
    return restore


def _random(folder: Path, record: Manifest, ranks: Ranks) -> dict[str, torch.Tensor]:
    """The state of this rank's generators; nothing in a job of another size."""
    names = {n: full for n, full in snapshot.own_names(record).items() if n.startswith("random/")}
    staged = {full: torch.empty(record.tensors[full].shape, dtype=torch.uint8) for full in names.values()}
    states = {name.removeprefix("random/"): staged[full] for name, full in names.items()}

    def read() -> None:
        tensor_files.read(folder, record.chunks, staged, lambda _: None)
        try:
            random_state.check(states)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {folder} is damaged: {error}", "states as they were saved") from error

    ranks.on_every_rank(read)
    return states


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


def _device_of(state: StepState) -> str | None:
    """The kind of device of the parameters; None for none, or `meta`."""
    kinds = {param.tensor.device.type for param in state.params.values()} - {"meta"}
    return kinds.pop() if len(kinds) == 1 else None
