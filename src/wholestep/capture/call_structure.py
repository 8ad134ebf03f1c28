"""Takes the arguments and results of a step apart."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from types import CodeType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import nn

from .._torch import undo, undone
from ..errors import StateError, shown
from .holdings import FIXED, TRAINABLE, Form, form_of
from .wrappers import unwrapped

T = TypeVar("T")

LENGTHS = "pad_to.lengths"
"""The argument by name with the lengths of a batch before it was padded: the program gets it, and the function not."""
_kind: Callable[[Any], type[Any]] = type
_LEAF, _ARRAY, _AGAIN, _WEAK = "leaf", "array", "again", "weak"
_MOST_LEAVES = 10_000  # of an object; one that holds more is itself a leaf
_WRAPPED = "_orig_mod"
_VALUES = (bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, torch.Size, PurePath, range)


@dataclass(frozen=True)
class Structure:
    """What a nested value is built of. `outline` is "leaf", or "array" whose leaf is a tensor, or the class of a
    container or an object, keys, names of attributes, and the outlines of these; or the number of an earlier object.
    """

    outline: Any

    @property
    def is_leaf(self) -> bool:
        """True for a value that is one leaf."""
        return self.outline == _LEAF

    @property
    def is_plain(self) -> bool:
        """True for tuples, lists and dicts, which can be built without the classes of a user."""
        return all(kind in (_LEAF, tuple, list, dict) or isinstance(kind, tuple) for _, kind in self._places())

    def names(self) -> list[str]:
        """The path of each leaf, in order, as the user writes it."""
        return [path for path, kind in self._places() if isinstance(kind, str)]

    def lines(self) -> list[str]:
        """A text that is equal in every process for equal structures."""
        return [
            f"{path} is {kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else f"{path} is {kind}"
            for path, kind in self._places()
        ]

    def _places(self) -> Iterator[tuple[str, Any]]:
        return _places(self.outline, "")


@dataclass(frozen=True)
class StepCall:
    """Leaves and structure of the arguments of a call; `objects` are what it opened that can change, in order, and
    `arrays` the numbers of the leaves that have the memory of an array of numpy.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    objects: tuple[Any, ...] = ()
    arrays: Collection[int] = ()


def take_apart(value: Any, objects: bool = True) -> StepCall:
    """Open containers, mappings and dataclasses, and with `objects` every object that holds no module or optimizer, and
    arrays of numpy as tensors. What is not opened is a leaf.
    """
    opening = _Opening(objects)
    outline = opening.outlines((value,))[0]
    return StepCall(Structure(outline), tuple(opening.leaves), tuple(opening.objects), opening.arrays)


def opener(structure: Structure, leaves: Iterable[Any]) -> Callable[[Any], StepCall | None]:
    """A generated function that takes apart, as `take_apart` does, a value that is built as one with this structure,
    from leaves of the same classes; for any other value, and where no class says what is a leaf, it returns None.
    """
    lines, leaf_names, objects, arrays, rest = list[str](), list[str](), list[str](), list[int](), iter(leaves)
    values: dict[str, Any] = {"Call": StepCall, "structure": structure, "arrays": arrays, "tensor_of": _tensor_of}
    values |= {"array": np.ndarray, "ref": weakref.ref, "parts": parts}

    def known(value: Any) -> str:
        values[name := f"k{len(values)}"] = value
        return name

    def add_leaf(kind: type[Any], name: str) -> None:
        by_class = form_of(kind) is None and kind not in (np.ndarray, weakref.ref)
        require(f"type({name}) is {known(kind)}" if by_class else "False")
        leaf_names.append(name)

    def require(term: str) -> None:
        lines.append(f"if not ({term}): return None")

    def add(outline: Any, name: str) -> None:
        if outline == _ARRAY:
            require(f"type({name}) is array and ({name} := tensor_of({name})) is not None")
            arrays.append(len(leaf_names))
        if isinstance(outline, str):
            return add_leaf(_kind(next(rest)), name)
        kind, keys, *below = outline
        if kind is _AGAIN or kind is _WEAK:
            is_there = f"{name} is" if kind is _AGAIN else f"type({name}) is ref and {name}() is"
            return require(f"{is_there} {objects[keys]}")
        (names, inner), form = below, cast(Form, form_of(kind))
        require(f"type({name}) is {known(kind)}")
        if form.items not in FIXED:
            objects.append(name)
        if kind in (dict, list, tuple):
            require(f"[*{name}] == {known([*keys])}" if kind is dict else f"len({name}) == {len(inner)}")
            items = f"{name}.values()" if kind is dict else name
        else:
            lines.append(f"k, i, n, a = parts({known(form)}, {name})")
            require(f"(k, n) == {known((keys, names))} and len(i) + len(a) == {len(inner)}")
            items = "*i, *a"
        inner_names = [f"{name}_{i}" for i in range(len(inner))]
        lines.append(f"[{', '.join(inner_names)}] = {items}")
        for part, inner_name in zip(inner, inner_names, strict=True):
            add(part, inner_name)
        return None

    add(structure.outline, "v")
    if ids := ", ".join(f"id({name})" for name in objects):  # one that occurs again is _AGAIN
        require(f"len({{{ids}}}) == {len(objects)}")
    of_leaves, of_objects = ("".join(f"{name}, " for name in names) for names in (leaf_names, objects))
    text = "\n ".join([*lines, f"return Call(structure, ({of_leaves}), ({of_objects}), arrays)"])
    exec(f"def opened(v):\n {text}", values)
    return values["opened"]


def equal_objects(a: Any, b: Any) -> bool:
    """Whether two values are alike but for the identity of what they are built of. Tensors, arrays, modules, and what
    is no plain value and is not opened, are alike with themselves alone.
    """
    if a is b:
        return True
    first, second = take_apart(a), take_apart(b)
    return first.structure == second.structure and all(map(_equal_leaves, first.leaves, second.leaves))


def _equal_leaves(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) in (set, frozenset):
        return {(_kind(item), item) for item in a} == {(_kind(item), item) for item in b}
    if not isinstance(a, _VALUES) or a != b:
        return False
    return str(cast(object, a)) == str(cast(object, b))  # 0.0 is equal to -0.0


class _HolderError(Exception):
    """An object holds a module or an optimizer, or very much."""


class _Opening:
    """One walk through what a value holds."""

    def __init__(self, objects: bool) -> None:
        self.leaves: list[Any] = []
        self.objects: list[Any] = []
        self.arrays: list[int] = []
        self._numbers: dict[int, int] = {}
        self._opens, self._inside = objects, False

    def outlines(self, items: Iterable[Any]) -> tuple[Any, ...]:
        """The outlines of values, whose leaves are added in order."""
        return tuple([self._outline(item, _kind(item)) for item in items])

    def _outline(self, item: Any, kind: type[Any]) -> Any:
        form = form_of(kind)
        if form is not None and (form.is_record or self._opens):
            return self._opened(item, kind, form)
        if self._inside and issubclass(kind, TRAINABLE):
            raise _HolderError
        if kind is np.ndarray and self._opens and (tensor := _tensor_of(item)) is not None:
            self.arrays.append(len(self.leaves))
            self.leaves.append(tensor)
            return _ARRAY
        if kind is weakref.ref and (number := self._numbers.get(id(item()))) is not None:
            return (_WEAK, number)
        self.leaves.append(item)
        return _LEAF

    def _opened(self, item: Any, kind: type[Any], form: Form) -> Any:
        number = self._numbers.get(id(item))
        if number is not None:
            return (_AGAIN, number)
        at_leaf, at_object, outermost = len(self.leaves), len(self.objects), not (form.is_record or self._inside)
        if form.items not in FIXED:
            self._numbers[id(item)] = at_object
            self.objects.append(item)
        self._inside |= outermost
        try:
            keys, items, names, values = parts(form, item)
            inner = self.outlines((*items, *values))
            leaves = self.leaves[at_leaf:] if outermost else ()
            if len(leaves) > _MOST_LEAVES or any(type(leaf) is nn.Parameter for leaf in leaves):  # no data
                raise _HolderError
        except _HolderError:
            if not outermost:
                raise
            self._numbers = {key: n for key, n in self._numbers.items() if n < at_object}
            del self.objects[at_object:]
            self.leaves[at_leaf:] = [item]
            self.arrays = [i for i in self.arrays if i < at_leaf]
            return _LEAF
        finally:
            self._inside &= not outermost
        return kind, keys, names, inner


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor with the contents of an array, whose memory it shares if one may write there; None if torch has none."""
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # another dtype, or negative strides
        return None


def parts(form: Form, value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]:
    """Return keys, items, names of attributes and their values. An attribute that is one of the items is left out."""
    keys, items = form.contents(value)
    attributes = form.attributes(value)
    if items and attributes:
        item_ids = {id(item) for item in items}
        attributes = {k: v for k, v in attributes.items() if not (isinstance(v, torch.Tensor) and id(v) in item_ids)}
    return keys, items, tuple(attributes), tuple(attributes.values())


def put_together(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Inverse of `take_apart`: containers and objects are new ones, of the same classes."""
    return _put_together(structure.outline, iter(leaves), [])


def _put_together(outline: Any, rest: Iterator[Any], objects: list[Any]) -> Any:
    if isinstance(outline, str):
        return next(rest) if outline == _LEAF else next(rest).numpy()
    kind, keys, *below = outline
    if kind is _AGAIN:
        return objects[keys]
    if kind is _WEAK:
        return weakref.ref(objects[keys])
    names, inner = below
    if kind is tuple:
        return tuple([_put_together(part, rest, objects) for part in inner])
    form = cast(Form, form_of(kind))
    number = len(objects)
    if form.items not in FIXED:
        objects.append(form.made(kind, (), (), {}))
    values = [_put_together(part, rest, objects) for part in inner]
    count = len(values) - len(names)
    attributes = dict(zip(names, values[count:], strict=True))
    if form.items in FIXED:
        return form.made(kind, keys, tuple(values[:count]), attributes)
    form.set_contents(objects[number], keys, tuple(values[:count]))
    form.set_attributes(objects[number], attributes)
    return objects[number]


@contextlib.contextmanager
def in_place(value: Any, structure: Structure, leaves: Iterable[Any]) -> Generator[Any]:
    """`value` with other leaves, in the same containers and objects, which have their own leaves again afterwards,
    whatever happens; only tuples, and views of dicts, are new ones.
    """
    with undone():
        yield _put_in_place(value, structure.outline, iter(leaves))


def _put_in_place(value: Any, outline: Any, rest: Iterator[Any]) -> Any:
    if isinstance(outline, str):
        return next(rest)
    if outline[0] in (_AGAIN, _WEAK):
        return value
    kind, _, names, inner = outline
    form = cast(Form, form_of(kind))
    contents, attributes = form.contents(value), form.attributes(value)
    values = [*contents[1], *(attributes[name] for name in names)]
    new = [_put_in_place(part, below, rest) for part, below in zip(values, inner, strict=True)]
    count = len(values) - len(names)
    follow = {id(was): now for was, now in zip(contents[1], new, strict=False) if isinstance(was, torch.Tensor)}
    changed = {name: follow.get(id(part), part) for name, part in attributes.items()}
    changed |= zip(names, new[count:], strict=True)
    if form.items in FIXED:
        same = all(a is b for a, b in zip(values, new, strict=True))
        return value if same else form.made(kind, contents[0], tuple(new[:count]), changed)
    undo(form.set_contents, value, *contents)
    undo(form.set_attributes, value, attributes)
    form.set_contents(value, contents[0], tuple(new[:count]))
    form.set_attributes(value, changed)
    return value


def _places(outline: Any, path: str, plain: bool = True) -> Iterator[tuple[str, Any]]:
    """The path of each leaf, and that it is one; and of each container and object, and its class, or the number of the
    object that it is. `plain`: items of a dict are written as items, and not as attributes.
    """
    if isinstance(outline, str) or outline[0] in (_AGAIN, _WEAK):
        yield path, outline
        return
    kind, keys, names, inner = outline
    count = len(inner) - len(names)
    yield path, kind
    fields: tuple[str, ...] = getattr(cast(Any, kind), "_fields", ()) if issubclass(kind, tuple) else ()
    for i, part in enumerate(inner):
        if i >= count:
            of_mapping = issubclass(kind, UserDict) and names[i - count] == "data"
            yield from _places(part, path if of_mapping else f"{path}.{names[i - count]}", not of_mapping)
        elif keys:
            yield from _places(part, f"{path}[{keys[i]!r}]" if plain else f"{path}.{keys[i]}")
        else:
            yield from _places(part, f"{path}.{fields[i]}" if i < len(fields) else f"{path}[{i}]")


def leaf_names(fn: Callable[..., Any], structure: Structure, objects: bool = False) -> list[str]:
    """Name each leaf of `(args, kwargs)` by the parameter of `fn` and the path inside that argument; or instead the
    `objects` that can change: kwargs is "".
    """
    _, _, _, (args, kwargs) = structure.outline
    named = zip(argument_names(fn, len(args[3])), args[3], strict=True), zip(kwargs[1], kwargs[3], strict=True)
    positional, by_name = ([place for name, part in parts for place in _places(part, name)] for parts in named)
    places = [*positional, ("", dict), *by_name]
    if objects:
        return [path for path, kind in places if isinstance(kind, type) and not issubclass(kind, (*FIXED,))]
    return [path for path, kind in places if isinstance(kind, str)]


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` parameters of `fn`."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def walk(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module below `roots` with its path, without the `_orig_mod` that torch.compile inserts."""
    for prefix, root in roots.items():
        for path, module in cast(Iterator[tuple[str, nn.Module]], root.named_modules()):
            parts = [prefix, *(part for part in path.split(".") if part != _WRAPPED)]
            yield ".".join(part for part in parts if part), module


class AnyOptimizer(Protocol):
    """An optimizer of torch, or a wrapper around one, such as Accelerate's and Lightning's."""

    param_groups: list[dict[str, Any]]


Modules = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = AnyOptimizer | Sequence[AnyOptimizer] | Mapping[str, AnyOptimizer]


def by_name(name: str, trainable: Any, kind: type[T]) -> dict[str, T]:
    """Return modules or optimizers by name: the keys of a mapping, else `name`, or `name0`, `name1`, ..."""
    if trainable is None:
        return {}
    if isinstance(trainable, Mapping):
        by_label = dict(cast(Mapping[str, T], trainable))
    else:
        several = isinstance(trainable, Iterable) and not isinstance(trainable, (str, torch.Tensor))
        alone = isinstance(unwrapped(trainable), kind) or not several
        items = [cast(T, trainable)] if alone else list(cast(Iterable[T], trainable))
        by_label = {name if len(items) == 1 else f"{name}{i}": item for i, item in enumerate(items)}
    for label, member in by_label.items():
        if not isinstance(unwrapped(member), kind):
            text = f"{name}={shown(member)}" if label == name else f"{name}: {label} is {shown(member)}"
            raise StateError(text, f"a {kind.__name__}, several in a list, or by name")
    return by_label


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
