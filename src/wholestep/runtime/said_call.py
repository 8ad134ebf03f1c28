"""The call of one rank as text for the others: its containers, shapes, Python values, and integers that the step reads.

Tuples, lists and dicts are described. Of other containers a rank says which they are, and others use their own: nobody
looks up a class by a name that came from elsewhere.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..cache.key import digest
from ..capture.call_structure import put_together
from ..errors import StateError
from ..tuning import TUNING
from ..typed_json import parse
from .step_inputs import StepInputs

_LITERALS = (bool, int, complex, str, bytes, type(None), set)


@dataclass(frozen=True)
class SaidTensor:
    """A tensor; `values` are the bytes of its elements, where others need them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    values: bytes | None


@dataclass(frozen=True)
class SaidOwn:
    """A module, an optimizer, or an object of which nothing is known: each rank has its own."""

    name: str


@dataclass(frozen=True)
class SaidValue:
    """A value that is no tensor: as Python writes it, or of a `kind` that has a form of its own."""

    kind: str
    text: str


@dataclass(frozen=True)
class SaidCall:
    """`containers`: as JSON, with the numbers of leaves; empty where they are those that have a `fingerprint`."""

    containers: str
    fingerprint: str
    leaves: tuple[SaidTensor | SaidOwn | SaidValue, ...]


def said_of(inputs: StepInputs, reads: bool) -> SaidCall | None:
    """A call for other ranks, with integers where the step `reads` some. None: it has no form as text, or is large."""
    leaves = [_said(inputs, name, leaf, reads) for name, leaf in zip(inputs.names, inputs.leaves, strict=True)]
    encoded = [leaf for leaf in leaves if leaf is not None]
    size = sum(len(leaf.values or b"") for leaf in encoded if isinstance(leaf, SaidTensor))
    size += sum(len(leaf.text) for leaf in encoded if isinstance(leaf, SaidValue))
    if len(encoded) < len(leaves) or size > TUNING.guarded_call_bytes:
        return None
    plain = _outline(put_together(inputs.structure, range(len(leaves)))) if inputs.structure.is_plain else None
    containers = "" if plain is None else json.dumps(plain)
    return SaidCall(containers, digest(inputs.structure.lines()), tuple(encoded))


def as_said(call: SaidCall | None, inputs: StepInputs, device: str) -> tuple[Any, Any]:
    """The arguments of that call, with the modules and optimizers of this rank. Raises StateError: it was not said."""
    if call is None or not (call.containers or call.fingerprint == digest(inputs.structure.lines())):
        raise StateError("the first rank's call is not known here", "a call that has a form as text")
    by_name = dict(zip(inputs.names, inputs.leaves, strict=True))
    leaves = [_leaf(leaf, by_name, device) for leaf in call.leaves]
    arguments = _built(parse(call.containers), leaves) if call.containers else put_together(inputs.structure, leaves)
    return cast(tuple[Any, Any], arguments)


def _said(inputs: StepInputs, name: str, leaf: Any, reads: bool) -> SaidTensor | SaidOwn | SaidValue | None:
    if isinstance(leaf, Tensor):
        integers, parts = not leaf.is_floating_point(), name in inputs.global_shapes
        if leaf.layout != torch.strided or (reads and integers and parts):
            return None
        shape = inputs.global_shapes.get(name, tuple(leaf.shape))
        stride = torch.empty(shape, device="meta").stride() if parts else leaf.stride()
        values = None
        if reads and integers:
            values = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(leaf.dtype).removeprefix("torch.")
        return SaidTensor(tuple(shape), tuple(stride), dtype, leaf.device.type, leaf.requires_grad, values)
    if isinstance(leaf, (torch.dtype, torch.device)):
        return SaidValue(type(leaf).__name__, str(leaf).removeprefix("torch."))
    if type(leaf) is float:
        return SaidValue("float", leaf.hex())
    return SaidValue("", repr(leaf)) if type(leaf) in _LITERALS and _is_literal(leaf) else SaidOwn(name)


def _is_literal(value: Any) -> bool:
    """Whether Python reads back what it writes: a set may hold anything."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _leaf(encoded: SaidTensor | SaidOwn | SaidValue, by_name: Mapping[str, Any], device: str) -> Any:
    if isinstance(encoded, SaidOwn):
        return by_name[encoded.name]
    if isinstance(encoded, SaidTensor):
        where = device if torch.device(device).type == encoded.device else encoded.device
        dtype = getattr(torch, encoded.dtype)
        tensor = torch.empty_strided(encoded.shape, encoded.stride, dtype=dtype, device=where)
        values = torch.zeros((), dtype=dtype)
        if encoded.values is not None and tensor.numel():
            values = torch.frombuffer(bytearray(encoded.values), dtype=dtype).view(encoded.shape)
        return tensor.copy_(values).requires_grad_(encoded.requires_grad)
    if encoded.kind == "dtype":
        return getattr(torch, encoded.text)
    if encoded.kind == "device":
        return torch.device(encoded.text)
    return float.fromhex(encoded.text) if encoded.kind == "float" else ast.literal_eval(encoded.text)


def _outline(value: Any) -> Any:
    """Tuples, lists and dicts with names or numbers as keys, as JSON; None where there is something else."""
    if type(value) is int:
        return value
    if type(value) is dict:
        named = cast(dict[Any, Any], value)
        inner = [_outline(child) for child in named.values()]
        plain = {*map(type, named)} <= {str, int} and None not in inner
        return ["dict", [[key, child] for key, child in zip(named, inner, strict=True)]] if plain else None
    if type(value) not in (tuple, list):
        return None
    inner = [_outline(child) for child in cast(Sequence[Any], value)]
    return None if None in inner else [type(value).__name__, inner]


def _built(outline: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(outline, int):
        return leaves[outline]
    kind, inner = outline
    if kind == "dict":
        return {key: _built(child, leaves) for key, child in inner}
    children = [_built(child, leaves) for child in inner]
    return tuple(children) if kind == "tuple" else children
