"""The key of an entry: fingerprints of the captured graph, the options, the mesh, the machine and the versions."""

from __future__ import annotations

import enum
import hashlib
import json
import os
import platform
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..graph import meta
from ..graph.graph import TrainGraph
from ..plan.module_styles import style_of

_ROOT = Path(__file__).resolve().parents[1]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Shard, Replicate)
_CPUS = Path("/proc/cpuinfo")


class UnknownValueError(Exception):
    """A value without a text that another process could compare; says where it is, and its class."""


@dataclass(frozen=True)
class Key:
    """Fingerprints by what they are of."""

    parts: Mapping[str, str]

    @staticmethod
    def of(values: Mapping[str, object]) -> Key:
        """The key of `values`. Raises UnknownValueError: one has no text."""
        return Key({name: digest([text_of(name, value)]) for name, value in values.items()})

    @property
    def text(self) -> str:
        """The name of the entry's file."""
        return digest([json.dumps(list(self.parts.items()))])[:40]

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """The parts that are not as in `other`."""
        return [name for name in {**self.parts, **other} if self.parts.get(name) != other.get(name)]


def digest(lines: Sequence[str]) -> str:
    """A fingerprint of a few lines."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def text_of(where: str, value: object) -> str:
    """A value of an option as text, the same in every process for equal values. Raises UnknownValueError."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, ParallelStyle):
        return repr(style_of(value, where, 1))
    if is_dataclass(value) and not isinstance(value, type):
        entries = ((f.name, getattr(value, f.name)) for f in fields(value))
        inside = ", ".join(f"{name}={text_of(f'{where}.{name}', entry)}" for name, entry in entries)
        return f"{type(value).__module__}.{type(value).__qualname__}({inside})"
    if isinstance(value, (dict, types.MappingProxyType)):
        items = cast(Mapping[object, object], value).items()
        return "{" + ", ".join(f"{text_of(where, k)}: {text_of(f'{where}[{k!r}]', v)}" for k, v in items) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text_of(f'{where}[{i}]', v) for i, v in enumerate(cast(Sequence[object], value)))}]"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(text_of(where, entry) for entry in cast(Set[object], value))}"
    raise UnknownValueError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}")


def metas_of(graph: TrainGraph) -> Iterator[str]:
    """What the text of a graph leaves out: precision, offload, owners of inputs, strides, dtypes, devices, losses."""
    yield f"{graph.mixed_precision} {bool(graph.offload)}"
    yield from (f"{i.name} {i.role.value} {i.owner} {i.key} {i.trainable} {i.optimizer}" for i in graph.inputs)
    for node in graph.graph.nodes:
        for leaf in meta.tensors(node):
            yield f"{node.name} {leaf.stride} {leaf.dtype} {torch.device(leaf.device).type}" if leaf else node.name
    yield from graph.losses


def hardware(device: str) -> list[Any]:
    """The hardware: processor, number of cores, device, and ranks on this host."""
    kind = torch.device(device).type
    lines = _CPUS.read_text(errors="replace").splitlines() if _CPUS.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    parts = [kind, platform.machine(), model, os.cpu_count() or 0, torch.get_num_threads()]
    parts += [torch.backends.cpu.get_cpu_capability(), os.environ.get("LOCAL_WORLD_SIZE", "")]
    if kind == "cuda":
        parts += [torch.cuda.get_device_name(device), list(torch.cuda.get_device_capability(device))]
    return parts


def versions() -> list[str]:
    """Of torch, and of all of wholestep's source."""
    return [str(torch.__version__), str(torch.version.git_version), own_source()]


@cache
def own_source() -> str:
    """A fingerprint of all of wholestep's source."""
    source_hash = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        source_hash.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return source_hash.hexdigest()
