"""Takes a call of the step apart: modules, optimizers, tensors and plain values, wherever they are nested."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .._torch import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten
from .wrappers import unwrapped

T = TypeVar("T")
Held = nn.Module | Optimizer | GradScaler
_NO_HOLDERS = (type, ModuleType, FunctionType, torch.Tensor, str, bytes, int, float, type(None))

_PLAIN = frozenset({tuple, list, dict, bool, int, float, str, type(None), torch.Tensor, nn.Parameter})  # most values

_WRAPPED = "_orig_mod"


@dataclass(frozen=True)
class Structure:
    """Shape of a nested value; dataclasses and mapping objects are opened too."""

    spec: TreeSpec
    opened: tuple[tuple[int, type, tuple[str, ...], Structure], ...] = ()


@dataclass(frozen=True)
class StepCall:
    """The arguments of one call as leaves and structure."""

    structure: Structure
    leaves: tuple[Any, ...]


def take_apart(value: Any) -> StepCall:
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
    return StepCall(Structure(spec, tuple(opened)), tuple(flat))


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
    return type(value) not in _PLAIN and (isinstance(value, (nn.Module, Optimizer)) or _fields(value) is not None)


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or of a mapping object that is no plain dict; None for anything else."""
    if type(value) in _PLAIN or isinstance(value, (torch.Tensor, nn.Module, dict)):
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


def by_name(name: str, given: Any, kind: type[T]) -> dict[str, T]:
    """Modules or optimizers as `wholestep.compile` names its arguments; as they are named in a mapping."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(cast(Mapping[str, T], given))
    items = cast(list[T], [given] if isinstance(unwrapped(given), kind) else list(given))
    return {name if len(items) == 1 else f"{name}{i}": item for i, item in enumerate(items)}


def held_by(fn: Callable[..., Any]) -> dict[str, Held]:
    """Modules, optimizers and gradient scalers a function closes over, reads from its globals, or is bound to.

    Also those in attributes that it reads of such objects, in their lists and dicts; optimizers may be in wrappers.
    """
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return {}
    function: Any = inspect.unwrap(fn)
    names = _names_in(code)
    found: dict[str, Any] = {name: function.__globals__.get(name) for name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found[name] = None if _is_empty(cell) else cell.cell_contents
    out: dict[str, Held] = {}
    for name, value in found.items():
        out |= _held_in(name, value, names)
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        out |= {"self": owner} if isinstance(owner, nn.Module) else {}
        for name, value in cast(dict[str, Any], getattr(owner, "__dict__", {})).items():
            out |= _held_in(name, value, names, 2 if name in names else 0)
    return out


def _names_in(code: CodeType) -> dict[str, None]:
    """Every global and attribute that code names, in order; functions inside it included."""
    names = dict.fromkeys(code.co_names)
    for const in code.co_consts:
        names |= _names_in(const) if isinstance(const, CodeType) else {}
    return names


def _held_in(name: str, value: Any, names: Container[str], depth: int = 2) -> dict[str, Held]:
    """Modules and optimizers by path: the value itself, or up to `depth` levels inside of it."""
    if isinstance(value, _NO_HOLDERS):
        return {}
    if isinstance(unwrapped(value), (nn.Module, Optimizer, GradScaler)):
        return {name: value}
    if not depth:
        return {}
    inner: Iterable[tuple[str, Any]]
    if isinstance(value, (list, tuple)):
        held = enumerate(cast(list[Any], value))
        inner = ((f"{name}[{i}]", item) for i, item in held if not isinstance(item, _NO_HOLDERS))
    elif isinstance(value, dict):
        entries = cast(dict[Any, Any], value).items()
        inner = ((f"{name}[{key!r}]", item) for key, item in entries if not isinstance(item, _NO_HOLDERS))
    else:
        read = cast(dict[str, Any], getattr(value, "__dict__", {}))
        inner = ((f"{name}.{key}", item) for key, item in read.items() if key in names)
    out: dict[str, Held] = {}
    for path, item in list(inner):
        out |= _held_in(path, item, names, depth - 1)
    return out


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
