"""`wholestep.export`: the parameters and buffers of a model, for programs that do not know wholestep."""

from __future__ import annotations

import copy
import glob
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..distributed.full_tensors import gather
from ..errors import CheckpointError
from ..runtime.between_steps import flush_pending
from ..runtime.failed_call import refuse_torn
from ..units import parse_bytes
from . import durable, manifest, safetensors_file, tensor_files
from .lease import Owner, owner_of
from .manifest import CheckpointTensor, Chunk, Manifest
from .ranks import Ranks
from .tensor_files import Piece, pieces_to_write, read_full

Format = Literal["safetensors", "dcp"]


def export(
    directory: str | Path, model: nn.Module | str | Path, format: Format = "safetensors", *,
    dtype: torch.dtype | None = None, max_file_bytes: int | str = "5GB",
) -> Path:  # fmt: skip
    """Write the parameters and buffers of a model to a new folder, as safetensors or as plain DCP.

    Called on every rank. `"safetensors"` is what `from_pretrained` of transformers reads: one file or several with an
    index, and of a model of transformers `config.json` and its generation config. Tied parameters are written once.
    The first rank gathers and writes one tensor after the other. `"dcp"` is what `torch.distributed.checkpoint.load`
    reads into `model.state_dict()`; every rank writes its part. The folder appears whole or not at all.

    Args:
        directory: the folder to make; it may exist if it is empty.
        model: a module, whether a step has placed it yet or not; or the folder of a checkpoint, or of checkpoints
            (then the newest), which has no config.
        format: `"safetensors"` or `"dcp"`.
        dtype: of what is floating-point; the model's own by default.
        max_file_bytes: of one safetensors file, as `"5GB"`.

    Example:
        >>> path = wholestep.export("exported", model, dtype=torch.bfloat16)

    Raises:
        CheckpointError: on every rank, when it could not be written on any; nothing is left in `directory` then.
        PlanError: `max_file_bytes` is no size.
    """
    most_bytes = parse_bytes(max_file_bytes, "max_file_bytes")
    what = type(model).__name__ if isinstance(model, nn.Module) else model
    target, ranks = durable.folder_at(directory), Ranks.of_job("export", directory, what, format, dtype)
    flush_pending()
    if isinstance(model, nn.Module):
        ranks.on_every_rank(lambda: refuse_torn(model.parameters()))
        exported = ranks.on_every_rank(lambda: _of_module(model, dtype, ranks))
    else:
        exported = _of_checkpoint(durable.folder_at(model), dtype, ranks)
    with new_folder(target, ranks) as aside:
        if format == "dcp":
            _write_dcp(aside, target, exported, ranks)
        else:
            _write_safetensors(aside, target, exported, most_bytes, ranks)
        if format == "safetensors" and isinstance(model, nn.Module):
            ranks.first_does(lambda: _write_config(aside, model, exported))
    return target


@dataclass(frozen=True)
class _Exported:
    """What to export. `tensors` gives shapes and dtypes by name, `distinct` has one name of tied ones. `full` returns
    a tensor in full; where it `gathers`, all ranks call it. `pieces` returns what this rank writes of all tensors, by
    name; an empty tuple or list where that is nothing.
    """

    tensors: Mapping[str, Tensor]
    distinct: Sequence[str]
    full: Callable[[str], Tensor]
    gathers: bool
    pieces: Callable[[], Iterable[tuple[str, Piece]]]


def _of_module(model: nn.Module, dtype: torch.dtype | None, ranks: Ranks) -> _Exported:
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            problem = f"{name} of the model's state_dict() is a {type(value).__name__}"
            raise CheckpointError(problem, "tensors alone", "save it beside the export")
        if value.is_meta:
            raise CheckpointError(f"{name!r} is on 'meta'", "values", "call the step first, or load the model")
    live: dict[str, Tensor] = {name: value.detach() for name, value in state.items()}
    tensors = {name: _on_meta(tensor, dtype) for name, tensor in live.items()}
    first: dict[int, str] = {}
    for name, value in state.items():
        first.setdefault(id(value), name)
    ignored: Iterable[str] = getattr(model, "_keys_to_ignore_on_save", None) or ()

    def full(name: str) -> Tensor:
        tensor = live[name]
        return next(iter(gather([tensor]).values())) if isinstance(tensor, DTensor) else tensor

    def pieces() -> list[tuple[str, Piece]]:
        roles = {name: "param" if isinstance(value, nn.Parameter) else "buffer" for name, value in state.items()}
        saved = {name: CheckpointTensor.of(roles[name], tensor) for name, tensor in live.items()}
        parts = pieces_to_write(live, saved, ranks.rank, ranks.size)
        return [(name, replace(piece, values=piece.values.to(tensors[name].dtype))) for name, piece in parts.items()]

    return _Exported(tensors, [name for name in first.values() if name not in ignored], full, True, pieces)


def _of_checkpoint(directory: Path, dtype: torch.dtype | None, ranks: Ranks) -> _Exported:
    name = ranks.on_first_rank(lambda: manifest.name_in(directory, manifest.candidates(directory)[0]), str)
    folder = manifest.folder_in(directory, name)
    record = ranks.on_every_rank(lambda: manifest.read(folder))
    ranks.first_does(lambda: manifest.check_files(folder, record, sorted(record.files)))
    saved = {name: tensor for name, tensor in record.tensors.items() if tensor.role in ("param", "buffer")}
    tensors = {name: _on_meta(tensor.empty("meta"), dtype) for name, tensor in saved.items()}

    def full(name: str) -> Tensor:
        return read_full(folder, record, name).to(tensors[name].dtype)

    def pieces() -> Iterable[tuple[str, Piece]]:
        return ((name, Piece.full(full(name))) for name in tensors) if ranks.rank == 0 else ()

    return _Exported(tensors, list(tensors), full, False, pieces)


def _on_meta(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    chosen = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=chosen, device="meta")


def _write_safetensors(aside: Path, target: Path, exported: _Exported, most_bytes: int, ranks: Ranks) -> None:
    tensors = {name: exported.tensors[name] for name in exported.distinct}
    ranks.on_every_rank(lambda: safetensors_file.check(tensors))
    files = safetensors_file.split(tensors, most_bytes)
    for file, names in files.items():
        part = {name: tensors[name] for name in names}
        ranks.on_every_rank(lambda file=file, part=part: _write_file(aside / file, target, part, exported, ranks))
    if len(files) > 1:
        text = safetensors_file.index(tensors, files)
        ranks.first_does(lambda: durable.write(aside / safetensors_file.INDEX, text.encode()))


def _write_file(path: Path, target: Path, tensors: Mapping[str, Tensor], exported: _Exported, ranks: Ranks) -> None:
    """The first rank writes each tensor. After a failure it gathers on with the others."""
    values = map(exported.full, safetensors_file.order(tensors))
    try:
        if ranks.rank == 0:
            with durable.explained(target):
                safetensors_file.write(path, tensors, values)
    finally:
        if exported.gathers:
            deque(values, maxlen=0)


def _write_dcp(aside: Path, target: Path, exported: _Exported, ranks: Ranks) -> None:
    """Each rank writes its pieces. The first one writes the index that torch reads."""

    def write() -> Mapping[str, Chunk]:
        pieces = exported.pieces()
        with durable.explained(target):
            file = aside / f"__{ranks.rank}_0{tensor_files.SUFFIX}"
            return tensor_files.write(file, pieces, lambda _: None).chunks if pieces else {}

    parts = ranks.gather_on_first(write, Mapping[str, Chunk])

    def write_index() -> None:
        chunks = {name: tuple(part[name] for part in parts if name in part) for name in exported.tensors}
        saved = {name: CheckpointTensor.of("param", tensor) for name, tensor in exported.tensors.items()}
        about = Manifest(0, 0, ranks.size, "", 0.0, saved, {}, {}, chunks, {})
        durable.write(aside / tensor_files.DCP_INDEX, tensor_files.dcp_index(about))

    ranks.first_does(write_index)


def _write_config(aside: Path, model: nn.Module, exported: _Exported) -> None:
    """The config of a model of transformers, as its `save_pretrained` writes it."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    first = next((tensor.dtype for tensor in exported.tensors.values() if tensor.is_floating_point()), torch.float32)
    config.dtype = str(first).removeprefix("torch.")
    config.save_pretrained(aside)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(aside)


@contextmanager
def new_folder(target: Path, ranks: Ranks) -> Generator[Path]:
    """A folder beside `target` to write to. At the end it is synced to disk and gets the name `target`; after an
    exception it is removed, and after a kill by the next call. Raises CheckpointError, on every rank: `target` is there
    and not empty.
    """
    aside = target.with_name(Path(ranks.on_first_rank(lambda: _aside(target).name, str)).name)
    try:
        yield aside
        ranks.first_does(lambda: _publish(aside, target))
    except BaseException:
        if ranks.rank == 0:
            _remove(aside)
        raise


def _aside(target: Path) -> Path:
    if durable.is_remote(target):
        problem = f"{target} is on an object store"
        raise CheckpointError(problem, "a folder of a file system", "copy the files there later")
    if target.exists() and not (target.is_dir() and next(target.iterdir(), None) is None):
        raise CheckpointError(f"{target} is there already", "a new folder, or an empty one", "name another")
    with durable.explained(target):
        durable.make_folder(target.parent)
        for leftover in target.parent.glob(f".{glob.escape(target.name)}-*.tmp"):
            owner = owner_of(_owner_file(leftover))
            if owner is not None and owner.is_dead:
                _remove(leftover)
        aside = target.with_name(f".{target.name}-{uuid4().hex[:12]}.tmp")
        _owner_file(aside).write_bytes(Owner.this_process().to_json())
        aside.mkdir()
    return aside


def _owner_file(aside: Path) -> Path:
    """The file that says which process publishes the folder: only one that has ended leaves it for ever."""
    return aside.with_suffix(".json")


def _remove(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    _owner_file(aside).unlink(missing_ok=True)


def _publish(aside: Path, target: Path) -> None:
    with durable.explained(target):
        for path in (*aside.iterdir(), aside):
            durable.sync(path)
        os.replace(aside, target)
        _owner_file(aside).unlink(missing_ok=True)
        durable.sync(target.parent)
