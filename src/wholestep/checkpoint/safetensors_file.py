"""Files of the safetensors format: the length of a header in 8 bytes, the header as JSON, then the values.

They are written here tensor by tensor, where the library takes all tensors of a file at once.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .durable import ChecksummedFile

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8


def split(tensors: Mapping[str, Tensor], most_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors in each file, by its name. A file exceeds `most_bytes` only where one tensor does."""
    parts, room = [list[str]()], most_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append([])
            room = most_bytes
        parts[-1].append(name)
        room -= tensor.nbytes
    if len(parts) == 1:
        return {NAME: parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def index(tensors: Mapping[str, Tensor], files: Mapping[str, list[str]]) -> str:
    """The text of the file that says which file holds a tensor."""
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of their values in a file: wide elements first, so that each value is aligned."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def write(path: Path, tensors: Mapping[str, Tensor], values: Iterable[Tensor]) -> None:
    """Write a file through to the disk. `tensors` gives shapes and dtypes, `values` gives values in `order`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start, names = 0, order(tensors)
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with ChecksummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, value in zip(names, values, strict=True):
            contiguous = value.to("cpu", tensors[name].dtype).contiguous()
            file.write(contiguous.reshape(-1).view(torch.uint8).numpy().data)


def check(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where the format has no name for a dtype."""
    wrong = next((name for name, tensor in tensors.items() if tensor.dtype not in DTYPES), None)
    if wrong is not None:
        problem = f"{wrong} is {str(tensors[wrong].dtype).removeprefix('torch.')}, which safetensors does not have"
        raise CheckpointError(problem, "floating-point numbers, integers or bool", 'export with format="dcp"')
