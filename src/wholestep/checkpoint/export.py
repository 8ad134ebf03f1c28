"""`wholestep.export`: the parameters and buffers of a model, for programs that do not know wholestep."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..distributed.full_tensors import gather
from ..errors import CheckpointError
from ..runtime.between_steps import flush_pending
from ..units import parse_bytes
from . import durable, manifest, plain_dcp, safetensors_file, stored_tensors
from .collective_calls import on_every_rank, on_first_rank, rank_and_size
from .new_folder import new_folder

Format = Literal["safetensors", "dcp"]
FORMATS = ("safetensors", "dcp")


def export(
    directory: str | Path,
    model: nn.Module | str | Path,
    format: Format = "safetensors",
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | str = "5GB",
) -> Path:
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
    """
    if format not in FORMATS:
        raise CheckpointError(f"export(format={format!r})", f"one of {', '.join(FORMATS)}", "correct it")
    most_bytes, target = parse_bytes(max_file_bytes, "max_file_bytes"), Path(directory)
    flush_pending()
    if isinstance(model, nn.Module):
        found = on_every_rank(lambda: _of_module(model, dtype))
    else:
        found = _of_checkpoint(Path(model), dtype)
    with new_folder(target) as aside:
        if format == "dcp":
            on_every_rank(lambda: _write_dcp(aside, found, dtype))
        else:
            _write_safetensors(aside, found, most_bytes)
        if format == "safetensors" and isinstance(model, nn.Module):
            on_first_rank(lambda: _write_config(aside, model, found))
    return target


@dataclass(frozen=True)
class _Exported:
    """What to export by name: `tensors` give shapes and dtypes and `values` the whole tensors that have given names.
    All ranks take all values, where `live` ones are gathered.
    """

    tensors: Mapping[str, Tensor]
    values: Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
    live: Mapping[str, Tensor] | None = None


def _of_module(model: nn.Module, dtype: torch.dtype | None) -> _Exported:
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            found = f"{name} of the model's state_dict() is a {type(value).__name__}"
            raise CheckpointError(found, "tensors alone", "save it beside the export")
        if value.is_meta:
            raise CheckpointError(f"{name!r} is on 'meta'", "values", "call the step first, or load the model")
    live: dict[str, Tensor] = {name: value.detach() for name, value in state.items()}
    once: dict[int, str] = {}
    for name, value in state.items():
        once.setdefault(id(value), name)

    def values(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            given = live[name]
            yield name, next(iter(gather([given]).values())) if isinstance(given, DTensor) else given

    ignored: Iterable[str] = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = [name for name in once.values() if name not in ignored]
    return _Exported({name: _on_meta(live[name], dtype) for name in kept}, values, live)


def _of_checkpoint(directory: Path, dtype: torch.dtype | None) -> _Exported:
    folder = on_first_rank(lambda: manifest.locate(directory))
    found = on_every_rank(lambda: manifest.read(folder))
    on_first_rank(lambda: manifest.check_files(folder, found, sorted(found.files)))
    saved = {name: one for name, one in found.tensors.items() if one.role in ("param", "buffer")}
    tensors = on_every_rank(lambda: stored_tensors.described(saved))

    def values(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return stored_tensors.read(folder, found, names) if rank_and_size()[0] == 0 else iter(())

    return _Exported({name: _on_meta(one, dtype) for name, one in tensors.items()}, values)


def _on_meta(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(tensor.shape, dtype=_target(tensor, dtype), device="meta")


def _target(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _write_safetensors(aside: Path, found: _Exported, most_bytes: int) -> None:
    on_every_rank(lambda: safetensors_file.check(found.tensors))
    files = safetensors_file.split(found.tensors, most_bytes)
    for file, names in files.items():
        part = {name: found.tensors[name] for name in names}
        on_every_rank(lambda file=file, part=part: _write_file(aside / file, part, found))
    if len(files) > 1:
        text = safetensors_file.index(found.tensors, files)
        on_first_rank(lambda: durable.write(aside / safetensors_file.INDEX, text.encode()))


def _write_file(path: Path, tensors: Mapping[str, Tensor], found: _Exported) -> None:
    """Ranks gather each tensor, and the first one writes it; after a failure it gathers on with the others."""
    values = found.values(safetensors_file.order(tensors))
    try:
        if rank_and_size()[0] == 0:
            cast_values = (value.to("cpu", tensors[name].dtype) for name, value in values)
            safetensors_file.write(path, tensors, cast_values)
    finally:
        deque(values, maxlen=0)


def _write_dcp(aside: Path, found: _Exported, dtype: torch.dtype | None) -> None:
    rank, size = rank_and_size()
    if found.live is not None:
        own = {name: one for name, one in found.live.items() if rank == 0 or isinstance(one, DTensor)}
        parts = {name: one.to(_target(one, dtype)) for name, one in own.items()}
        plain_dcp.write(aside, parts, alone=size == 1)
    elif rank == 0:
        with plain_dcp.on_disk(aside, found.tensors, found.values(list(found.tensors))) as parts:
            plain_dcp.write(aside, parts)


def _write_config(aside: Path, model: nn.Module, found: _Exported) -> None:
    """The config of a model of transformers, as its `save_pretrained` writes it."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    first = next((one.dtype for one in found.tensors.values() if one.is_floating_point()), torch.float32)
    config.dtype = str(first).removeprefix("torch.")
    config.save_pretrained(aside)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(aside)
