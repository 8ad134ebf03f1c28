"""Flattens the arguments of a step, and finds the modules and optimizers that the step uses."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .._torch import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten
from ..errors import StateError, shown
from .wrappers import attributes_of, unwrapped

T = TypeVar("T")
Trainable = nn.Module | Optimizer | GradScaler
_NOT_SEARCHED = (type, ModuleType, FunctionType, torch.Tensor, str, bytes, int, float, type(None))

LENGTHS = "pad_to.lengths"
"""The argument by name with the lengths of a batch before it was padded: the program gets it, and the function not."""
_PLAIN_LEAVES = frozenset({bool, int, float, str, type(None), torch.Tensor, nn.Parameter})
_PLAIN = _PLAIN_LEAVES | {tuple, list, dict}  # most values
_LEAF = "leaf"
_WRAPPED = "_orig_mod"


@dataclass(frozen=True)
class Structure:
    """Tree structure of a nested value, including dataclasses and mapping objects."""

    spec: TreeSpec
    opened: tuple[tuple[int, type, tuple[str, ...], Structure], ...] = ()


@dataclass(frozen=True)
class StepCall:
    """Leaves and structure of the arguments of one call."""

    structure: Structure
    leaves: tuple[Any, ...]


def take_apart(value: Any) -> StepCall:
    """Flatten nested containers, dataclasses and mappings (a BatchEncoding, say); modules and optimizers are leaves."""
    plain: list[Any] = []
    outline = _outline((value,), plain)
    structure = _structure_of(outline[0]) if outline else None
    return _take_apart(value) if structure is None else StepCall(structure, tuple(plain))


def _take_apart(value: Any) -> StepCall:
    """What `take_apart` returns, by the pytrees of torch, which take ten times as long."""
    leaves, spec = tree_flatten(value, is_leaf=_is_leaf)
    flat: list[Any] = []
    opened: list[tuple[int, type, tuple[str, ...], Structure]] = []
    for i, leaf in enumerate(leaves):
        fields = _fields(leaf)
        if fields is None:
            flat.append(leaf)
            continue
        inner = _take_apart(fields)
        opened.append((i, cast(type[object], type(leaf)), tuple(fields), inner.structure))
        flat.extend(inner.leaves)
    return StepCall(Structure(spec, tuple(opened)), tuple(flat))


def _outline(items: Iterable[object], leaves: list[Any]) -> tuple[Any, ...] | None:
    """What each of `items` is built of, as a key, and its leaves in order; None where that is more than tuples, lists,
    dicts with names or numbers as keys, and usual leaves.
    """
    found: list[Any] = []
    for item in items:
        kind = type(item)
        if kind in _PLAIN_LEAVES or isinstance(item, (nn.Module, Optimizer, GradScaler)):
            leaves.append(item)
            found.append(_LEAF)
            continue
        if kind is dict:
            named = cast(dict[object, object], item)
            keys, values = (*named,), named.values()
            if not {*map(type, keys)} <= {str, int}:
                return None
        elif kind is tuple or kind is list:
            keys, values = (), cast(Iterable[object], item)
        else:
            return None
        inner = _outline(values, leaves)
        if inner is None:
            return None
        found.append((kind, keys, inner))
    return tuple(found)


@lru_cache(maxsize=1024)
def _structure_of(outline: Any) -> Structure | None:
    """The structure of values with this outline; None where a torch takes their leaves in another order."""
    numbers = count()
    call = _take_apart(_built(outline, numbers))
    return call.structure if [*call.leaves] == [*range(next(numbers))] else None


def _built(outline: Any, numbers: Iterator[int]) -> Any:
    """A value with this outline, whose leaves are numbers."""
    if outline == _LEAF:
        return next(numbers)
    kind, keys, inner = outline
    items = [_built(one, numbers) for one in inner]
    return dict(zip(keys, items, strict=True)) if kind is dict else kind(items)


def put_together(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Inverse of `take_apart`."""
    rest = iter(leaves)
    opened = {i: (kind, inner) for i, kind, _, inner in structure.opened}
    flat: list[Any] = []
    for i in range(structure.spec.num_leaves):
        kind, inner = opened.get(i, (None, None))
        flat.append(next(rest) if kind is None or inner is None else _rebuild(kind, put_together(inner, rest)))
    return tree_unflatten(flat, structure.spec)


def leaf_names(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Name each leaf of `(args, kwargs)` by the parameter of `fn` and the path inside that argument."""
    names = _argument_names(fn, len(args)) + list(kwargs)
    values = [*args, *kwargs.values()]
    return [name + path for name, value in zip(names, values, strict=True) for path in _paths(value)]


def _paths(value: Any) -> list[str]:
    out: list[str] = []
    for path, leaf in tree_flatten_with_path(value, is_leaf=_is_leaf):
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
    """Return the fields of a dataclass or of a mapping that is not a dict; None for any other value."""
    if type(value) in _PLAIN or isinstance(value, (torch.Tensor, nn.Module, dict)):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else None


def walk(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below `roots` with its path, without the `_orig_mod` that torch.compile inserts."""
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
    """Return modules or optimizers by name: the keys of a mapping, else `name`, or `name0`, `name1`, ..."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        found = dict(cast(Mapping[str, T], given))
    else:
        several = isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor))
        alone = isinstance(unwrapped(given), kind) or not several
        items = [cast(T, given)] if alone else list(cast(Iterable[T], given))
        found = {name if len(items) == 1 else f"{name}{i}": item for i, item in enumerate(items)}
    for label, one in found.items():
        if not isinstance(unwrapped(one), kind):
            needed = f"a {kind.__name__}, several in a list, or by name"
            raise StateError(f"{name}={shown(one)}" if label == name else f"{name}: {label} is {shown(one)}", needed)
    return found


def closed_over(fn: Callable[..., Any]) -> dict[str, Trainable]:
    """Return modules, optimizers and gradient scalers that a function closes over, reads as globals, or is bound to.

    Also searched: the attributes of these objects that the function reads, and lists and dicts in them.
    """
    function = inspect.unwrap(fn) if isinstance(fn, (FunctionType, MethodType)) else fn
    function = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType):
        return {}
    code = function.__code__
    names = dict.fromkeys(name for inner in codes_in(code) for name in inner.co_names)
    found: dict[str, Any] = {name: function.__globals__.get(name) for name in names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        found[name] = None
        with contextlib.suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    out: dict[str, Trainable] = {}
    for name, value in found.items():
        out |= _trainables_in(name, value, names)
    owner: Any = fn.__self__ if isinstance(fn, MethodType) else None
    if owner is not None:
        out |= {"self": owner} if isinstance(owner, nn.Module) else {}
        for name, value in (attributes_of(owner) or {}).items():
            out |= _trainables_in(name, value, names, 2 if name in names else 0)
    return out


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _trainables_in(name: str, value: Any, names: Container[str], depth: int = 2) -> dict[str, Trainable]:
    if isinstance(value, _NOT_SEARCHED):
        return {}
    if isinstance(unwrapped(value), (nn.Module, Optimizer, GradScaler)):
        return {name: value}
    if not depth:
        return {}
    if isinstance(value, (list, tuple, dict)):
        items = cast(dict[Any, Any], value) if isinstance(value, dict) else dict(enumerate(cast(list[Any], value)))
        inner = [(f"{name}[{key!r}]", item) for key, item in items.items() if not isinstance(item, _NOT_SEARCHED)]
    else:
        read = attributes_of(value) or {}
        inner = [(f"{name}.{key}", item) for key, item in read.items() if key in names]
    out: dict[str, Trainable] = {}
    for path, item in inner:
        out |= _trainables_in(path, item, names, depth - 1)
    return out
