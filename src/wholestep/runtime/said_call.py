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


def said_of(given: StepInputs, reads: bool) -> SaidCall | None:
    """A call for other ranks, with integers where the step `reads` some. None: it has no form as text, or is large."""
    leaves = [_said(given, name, leaf, reads) for name, leaf in zip(given.names, given.leaves, strict=True)]
    said = [leaf for leaf in leaves if leaf is not None]
    size = sum(len(leaf.values or b"") for leaf in said if isinstance(leaf, SaidTensor))
    size += sum(len(leaf.text) for leaf in said if isinstance(leaf, SaidValue))
    if len(said) < len(leaves) or size > TUNING.guarded_call_bytes:
        return None
    plain = _outline(put_together(given.structure, range(len(leaves)))) if given.structure.is_plain else None
    containers = "" if plain is None else json.dumps(plain)
    return SaidCall(containers, digest(given.structure.lines()), tuple(said))


def as_said(call: SaidCall | None, given: StepInputs, device: str) -> tuple[Any, Any]:
    """The arguments of that call, with the modules and optimizers of this rank. Raises StateError: it was not said."""
    if call is None or not (call.containers or call.fingerprint == digest(given.structure.lines())):
        raise StateError("the first rank's call is not known here", "a call that has a form as text")
    own = dict(zip(given.names, given.leaves, strict=True))
    leaves = [_leaf(one, own, device) for one in call.leaves]
    made = _built(parse(call.containers), leaves) if call.containers else put_together(given.structure, leaves)
    return cast(tuple[Any, Any], made)


def _said(given: StepInputs, name: str, leaf: Any, reads: bool) -> SaidTensor | SaidOwn | SaidValue | None:
    if isinstance(leaf, Tensor):
        integers, parts = not leaf.is_floating_point(), name in given.whole
        if leaf.layout != torch.strided or (reads and integers and parts):
            return None
        shape = given.whole.get(name, tuple(leaf.shape))
        stride = torch.empty(shape, device="meta").stride() if parts else leaf.stride()
        values = _bytes(leaf) if reads and integers else None
        dtype = str(leaf.dtype).removeprefix("torch.")
        return SaidTensor(tuple(shape), tuple(stride), dtype, leaf.device.type, leaf.requires_grad, values)
    if isinstance(leaf, (torch.dtype, torch.device)):
        return SaidValue(type(leaf).__name__, str(leaf).removeprefix("torch."))
    if type(leaf) is float:
        return SaidValue("float", leaf.hex())
    return SaidValue("", repr(leaf)) if type(leaf) in _LITERALS and _is_literal(leaf) else SaidOwn(name)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_literal(value: Any) -> bool:
    """Whether Python reads back what it writes: a set may hold anything."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _leaf(said: SaidTensor | SaidOwn | SaidValue, own: Mapping[str, Any], device: str) -> Any:
    if isinstance(said, SaidOwn):
        return own[said.name]
    if isinstance(said, SaidTensor):
        where = device if torch.device(device).type == said.device else said.device
        dtype = getattr(torch, said.dtype)
        made = torch.empty_strided(said.shape, said.stride, dtype=dtype, device=where)
        values = torch.zeros((), dtype=dtype)
        if said.values is not None and made.numel():
            values = torch.frombuffer(bytearray(said.values), dtype=dtype).view(said.shape)
        return made.copy_(values).requires_grad_(said.requires_grad)
    if said.kind == "dtype":
        return getattr(torch, said.text)
    if said.kind == "device":
        return torch.device(said.text)
    return float.fromhex(said.text) if said.kind == "float" else ast.literal_eval(said.text)


def _outline(value: Any) -> Any:
    """Tuples, lists and dicts with names or numbers as keys, as JSON; None where there is something else."""
    if type(value) is int:
        return value
    if type(value) is dict:
        named = cast(dict[Any, Any], value)
        inner = [_outline(one) for one in named.values()]
        plain = {*map(type, named)} <= {str, int} and None not in inner
        return ["dict", [[key, one] for key, one in zip(named, inner, strict=True)]] if plain else None
    if type(value) not in (tuple, list):
        return None
    inner = [_outline(one) for one in cast(Sequence[Any], value)]
    return None if None in inner else [type(value).__name__, inner]


def _built(outline: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(outline, int):
        return leaves[outline]
    kind, inner = outline
    if kind == "dict":
        return {key: _built(one, leaves) for key, one in inner}
    made = [_built(one, leaves) for one in inner]
    return tuple(made) if kind == "tuple" else made
