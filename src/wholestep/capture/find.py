"""Takes a call of the step apart: modules, optimizers, tensors and plain values, wherever they are nested."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .._torch import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten

_WRAPPED = "_orig_mod"


@dataclass(frozen=True)
class Structure:
    """Shape of a nested value; dataclasses and mapping objects are opened too."""

    spec: TreeSpec
    opened: tuple[tuple[int, type, tuple[str, ...], Structure], ...] = ()


@dataclass(frozen=True)
class Call:
    """The arguments of one call as leaves and structure."""

    structure: Structure
    leaves: tuple[Any, ...]


def take_apart(value: Any) -> Call:
    """Flatten nested containers, dataclasses and mappings (a BatchEncoding, say); modules and optimizers are leaves."""
    leaves, spec = tree_flatten(value, is_leaf=_is_leaf)
    flat: list[Any] = []
    opened: list[tuple[int, type, tuple[str, ...], Structure]] = []
    for i, leaf in enumerate(leaves):
        fields = _fields(leaf)
        if fields is None:
            flat.append(leaf)
            continue
        inner = take_apart(fields)
        opened.append((i, cast(type[object], type(leaf)), tuple(fields), inner.structure))
        flat.extend(inner.leaves)
    return Call(Structure(spec, tuple(opened)), tuple(flat))


def put_together(structure: Structure, leaves: tuple[Any, ...] | list[Any]) -> Any:
    """Inverse of `take_apart`."""
    return _build(structure, iter(leaves))


def _build(structure: Structure, leaves: Any) -> Any:
    opened = {i: (kind, inner) for i, kind, _, inner in structure.opened}
    flat: list[Any] = []
    for i in range(structure.spec.num_leaves):
        if i not in opened:
            flat.append(next(leaves))
            continue
        kind, inner = opened[i]
        fields = _build(inner, leaves)
        flat.append(_rebuild(kind, fields))
    return tree_unflatten(flat, structure.spec)


def leaf_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """A name for each leaf of `(args, kwargs)`: the parameter of `fn` it is passed to and its path inside."""
    names = _argument_names(fn, len(args)) + list(kwargs)
    out: list[str] = []
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        out += [name + path for path in _paths(value)]
    return out


def _paths(value: Any) -> list[str]:
    pairs, _ = tree_flatten_with_path(value, is_leaf=_is_leaf)
    out: list[str] = []
    for path, leaf in pairs:
        fields = _fields(leaf)
        out += [path] if fields is None else [f"{path}.{n}{p}" for n, v in fields.items() for p in _paths(v)]
    return out


def _argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (nn.Module, Optimizer)) or _fields(value) is not None


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or of a mapping object that is no plain dict; None for anything else."""
    if isinstance(value, (torch.Tensor, nn.Module, dict)):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else None


def walk(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module below `roots` with its full path, without what `torch.compile` adds to it, each root's once."""
    for prefix, root in roots.items():
        for path, module in cast(Iterator[tuple[str, nn.Module]], root.named_modules()):
            parts = [prefix, *(part for part in path.split(".") if part != _WRAPPED)]
            yield ".".join(part for part in parts if part), module


def _rebuild(kind: type[Any], fields: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(kind):
        return kind(fields)
    made: Any = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def held_by(fn: Callable[..., Any]) -> dict[str, nn.Module | Optimizer | GradScaler]:
    """Modules, optimizers and gradient scalers a function closes over, reads from its globals, or is bound to."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    found: dict[str, Any] = {}
    if code is None:
        return {}
    function: Any = inspect.unwrap(fn)
    for name in code.co_names:
        found[name] = function.__globals__.get(name)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with_value = not _is_empty(cell)
        found[name] = cell.cell_contents if with_value else None
    owner = getattr(fn, "__self__", None)
    if owner is not None and not isinstance(owner, nn.Module):
        found.update(cast(dict[str, Any], vars(owner)) if hasattr(owner, "__dict__") else {})
    elif owner is not None:
        found["self"] = owner
    return {name: value for name, value in found.items() if isinstance(value, (nn.Module, Optimizer, GradScaler))}


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
