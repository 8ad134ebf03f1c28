"""Graphs as JSON values and a table of tensors: every node with what stages recorded about it, and back.

Nothing is ever unpickled: ops are looked up by name in `torch.ops`, functions in wholestep and `operator` alone.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from keyword import iskeyword
from types import FunctionType
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..layout import Extent, Layout
from ..mesh import Mesh
from . import meta
from .graph import Input, LocalGraph, Output, Role, TrainGraph
from .meta import TensorMeta

HERE = "@"
"""Stands for the device of the rank, which may have another number on another rank."""
_PLAIN = (type(None), bool, int, float, str)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PYTHON = {"_operator": operator, "operator": operator}
_OF_TORCH = {f"torch:{name}": getattr(torch, name) for name in ("sym_float", "sym_int", "sym_max", "sym_min")}


class StoreError(Exception):
    """A value that cannot be written to a file, or text that no graph can be made of."""


@dataclass
class Writer:
    """Turns graphs into JSON values; equal metas and layouts are written once, tensors go to `constants` by a key."""

    device: str = ""
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _metas: dict[TensorMeta, int] = field(default_factory=dict[TensorMeta, int])
    _layouts: dict[Layout, int] = field(default_factory=dict[Layout, int])
    _keys: dict[int, str] = field(default_factory=dict[int, str])
    _nodes: dict[Node, int] = field(default_factory=dict[Node, int])

    def tables(self) -> dict[str, Any]:
        """What graphs refer to by number, to be written beside them."""
        metas = [
            [list(m.shape), list(m.stride), name_of_dtype(m.dtype), self.place(m.device)] for m in list(self._metas)
        ]
        layouts = [[list(map(list, x.dims)), list(map(list, x.partial)), list(x.varies)] for x in self._layouts]
        return {"metas": metas, "layouts": layouts}

    def train_graph(self, train: TrainGraph) -> dict[str, Any]:
        """A graph of one device."""
        return {**self._ends(train), "losses": list(train.losses), "nodes": self.nodes(train.graph)}

    def local_graph(self, local: LocalGraph) -> dict[str, Any]:
        """The program of one rank."""
        layouts = [self._layout(x) for x in local.layouts]
        own = {"mesh": str(local.mesh), "layouts": layouts, "passes": list(local.passes)}
        return {**self._ends(local), **own, "nodes": self.nodes(local.graph)}

    def _ends(self, graph: TrainGraph | LocalGraph) -> dict[str, Any]:
        inputs = [
            [i.name, i.role.value, self._meta(i.meta), i.owner, i.key, i.trainable, i.optimizer] for i in graph.inputs
        ]
        constants = {name: self.constant(tensor) for name, tensor in graph.constants.items()}
        return {"inputs": inputs, "outputs": [[o.kind, o.target] for o in graph.outputs], "constants": constants}

    def nodes(self, graph: Graph) -> list[Any]:
        """Every node in order: operation, name, target, arguments, notes."""
        self._nodes = {}
        out: list[Any] = []
        for node in graph.nodes:
            called = node.op == "call_function"
            target = name_of(node.target) if called else str(node.target)
            try:
                notes = {key: self._note(key, note) for key, note in meta.notes(node).items()}
                row = [node.op, node.name, target, self.value(node.args), self.value(node.kwargs), notes]
            except StoreError as error:
                raise StoreError(f"%{node.name} ({target}): {error}") from error
            self._nodes[node] = len(out)
            out.append(row)
        return out

    def constant(self, tensor: torch.Tensor) -> str:
        """The key of a tensor in `constants`."""
        if not _torch.is_plain(tensor.detach()) or tensor.is_meta:
            raise StoreError(f"a constant of type {type(tensor).__name__} on {tensor.device}")
        key = self._keys.setdefault(id(tensor), f"c{len(self._keys)}")
        self.constants[key] = tensor
        return key

    def place(self, device: str) -> str:
        """The text for a device."""
        return HERE if device == self.device and device != "cpu" else device

    def _note(self, key: str, note: Any) -> Any:
        return self._made(note) if key == "val" else self.value(note)

    def _made(self, made: Any) -> Any:
        """What the tracer recorded: of tensors their metas, of unknown numbers their kind."""
        if isinstance(made, torch.Tensor):
            return {"v": self._meta(meta.meta_of(made))}
        if isinstance(made, (tuple, list)):
            items = [self._made(item) for item in cast(list[Any], made)]
            return items if isinstance(made, list) else {"t": items}
        return {"?": type(made).__name__} if isinstance(made, _SYMBOLS) else self.value(made)

    def value(self, value: Any) -> Any:
        """An argument or a note."""
        if type(value) in _PLAIN:
            return {"@": 0} if value == self.device and value != "cpu" else value
        if isinstance(value, Node):
            return {"%": self._nodes[value]}
        if isinstance(value, list):
            return [self.value(item) for item in cast(list[Any], value)]
        if isinstance(value, tuple):
            return {"t": [self.value(item) for item in cast(tuple[Any, ...], value)]}
        if isinstance(value, Mapping):
            pairs = cast(Mapping[Any, Any], value).items()
            return {"m": [[self.value(k), self.value(v)] for k, v in pairs]}
        return self._single(value)

    def _single(self, value: Any) -> dict[str, Any]:
        if isinstance(value, TensorMeta):
            return {"T": self._meta(value)}
        if isinstance(value, Layout):
            return {"l": self._layout(value)}
        if isinstance(value, Extent):
            return {"e": [value.size, [list(axis) for axis in value.axes], value.chunks, value.start]}
        if isinstance(value, slice):
            cut = cast(Any, value)
            return {"s": [self.value(cut.start), self.value(cut.stop), self.value(cut.step)]}
        if isinstance(value, torch.device):
            return {"D": self.place(str(value))}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"w": str(value).removeprefix("torch.")}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        return {"f": name_of(value)}

    def _meta(self, found: TensorMeta) -> int:
        return self._metas.setdefault(found, len(self._metas))

    def _layout(self, layout: Layout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))


class Reader:
    """Inverse of `Writer`, on a rank that computes on `device`."""

    def __init__(self, tables: Mapping[str, Any], constants: Mapping[str, torch.Tensor], device: str = "") -> None:
        self.device, self.constants = device, constants
        self._metas: list[TensorMeta] = [
            TensorMeta(tuple(shape), tuple(stride), dtype_of(dtype), self.place(where))
            for shape, stride, dtype, where in tables["metas"]
        ]
        self._layouts: list[Layout] = [
            Layout(tuple(map(tuple, dims)), tuple(map(tuple, partial)), tuple(varies))
            for dims, partial, varies in tables["layouts"]
        ]
        self._mode = _torch.fake_mode()
        self._fakes: dict[int, torch.Tensor] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._nodes: list[Node] = []

    def train_graph(self, data: Mapping[str, Any]) -> TrainGraph:
        """Inverse of `Writer.train_graph`."""
        inputs, outputs, constants = self._ends(data)
        return TrainGraph(self.graph(data["nodes"]), inputs, outputs, constants, tuple(data["losses"]))

    def local_graph(self, data: Mapping[str, Any]) -> LocalGraph:
        """Inverse of `Writer.local_graph`."""
        inputs, outputs, constants = self._ends(data)
        layouts = tuple(self.layout(i) for i in data["layouts"])
        graph, passes = self.graph(data["nodes"]), tuple(data["passes"])
        return LocalGraph(graph, Mesh(data["mesh"]), inputs, outputs, layouts, constants, passes)

    def _ends(self, data: Mapping[str, Any]) -> tuple[tuple[Input, ...], tuple[Output, ...], dict[str, torch.Tensor]]:
        inputs = tuple(
            Input(name, Role(role), self.meta(int(number)), owner, key, trainable, optimizer)
            for name, role, number, owner, key, trainable, optimizer in data["inputs"]
        )
        constants = {name: self.constants[key] for name, key in data["constants"].items()}
        return inputs, tuple(Output(kind, target) for kind, target in data["outputs"]), constants

    def graph(self, rows: list[Any]) -> Graph:
        """A graph of nodes with the names they had.

        Raises:
            StoreError: a name, a function or an argument that no graph of wholestep has.
        """
        graph, names = Graph(), set[str]()
        self._nodes = []
        for op, name, target, args, kwargs, notes in rows:
            called = self._function(target) if op == "call_function" else target
            named: dict[str, Any] = self.value(kwargs)
            known = op in ("placeholder", "get_attr", "call_function", "output")
            if not known or not all(map(str.isidentifier, named)):
                raise StoreError(f"a node {op} {name!r} with arguments {list(named)}")
            if name in names or not name.isidentifier() or iskeyword(name):
                raise StoreError(f"a second node called {name!r}, or no name")
            names.add(name)
            node = graph.create_node(op, called, self.value(args), named, name=name)
            node.name = name  # torch would not give the name of a builtin, which a capture does
            meta.set_notes(node, {k: self._made(v) if k == "val" else self.value(v) for k, v in notes.items()})
            self._nodes.append(node)
        return graph

    def place(self, text: str) -> str:
        """The device that a text stands for."""
        return self.device if text == HERE else text

    def _made(self, data: Any) -> Any:
        if isinstance(data, dict):
            (kind, inner), *_ = cast(dict[str, Any], data).items()
            if kind == "v":
                return self._fake(inner)
            if kind == "t":
                return tuple(self._made(item) for item in inner)
            return None if kind == "?" else self.value(cast(Any, data))
        return [self._made(item) for item in cast(list[Any], data)] if isinstance(data, list) else data

    def _fake(self, number: int) -> torch.Tensor:
        """One fake tensor stands for all that are alike: later stages look at its shape alone."""
        if number not in self._fakes:
            found = self._metas[number]
            with self._mode:
                self._fakes[number] = torch.empty_strided(
                    found.shape, found.stride, dtype=found.dtype, device=found.device
                )
        return self._fakes[number]

    def value(self, data: Any) -> Any:
        """Inverse of `Writer.value`."""
        if isinstance(data, list):
            return [self.value(item) for item in cast(list[Any], data)]
        if not isinstance(data, dict):
            return data
        (kind, inner), *_ = cast(dict[str, Any], data).items()
        if kind == "%":
            return self._nodes[int(inner)]
        if kind == "t":
            return tuple(self.value(item) for item in inner)
        read = _SINGLE.get(kind)
        if read is None:
            raise StoreError(f"a value of the kind {kind!r}")
        return read(self, inner)

    def pairs(self, data: list[Any]) -> dict[Any, Any]:
        """A mapping."""
        return {self.value(key): self.value(item) for key, item in data}

    def meta(self, number: int) -> TensorMeta:
        """A row of the table of metas."""
        return self._metas[number]

    def layout(self, number: int) -> Layout:
        """A row of the table of layouts."""
        return self._layouts[number]

    def _function(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            self._functions[name] = function_called(name)
        return self._functions[name]


_SINGLE: dict[str, Callable[[Reader, Any], Any]] = {
    "@": lambda reader, _: reader.device,
    "m": Reader.pairs,
    "T": Reader.meta,
    "l": Reader.layout,
    "e": lambda _, v: Extent(v[0], tuple((a, n) for a, n in v[1]), v[2], v[3]),
    "s": lambda reader, v: slice(*map(reader.value, v)),
    "D": lambda reader, v: torch.device(reader.place(v)),
    "w": lambda _, v: word_of_torch(v),
    "c": lambda _, v: complex(*v),
    "f": lambda _, v: function_called(v),
}


def name_of(target: Any) -> str:
    """How a file names what a node calls.

    Raises:
        StoreError: it is neither an op nor a function of wholestep.
    """
    if _torch.is_op(target):
        schema = _torch.schema_of(target)
        return f"{schema.name}.{schema.overload_name or 'default'}"
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    if getattr(_PYTHON.get(module), name or " ", None) is target:
        return f"operator:{name}"
    known = next((key for key, function in _OF_TORCH.items() if function is target), "")
    if known:
        return known
    if isinstance(target, FunctionType) and module.startswith("wholestep.") and name.isidentifier():
        return f"{module}:{name}"
    kind = type(cast(object, target)).__name__
    raise StoreError(f"{name or kind} ({module or kind}) is no torch op and no function of wholestep")


def function_called(name: str) -> Callable[..., Any]:
    """Inverse of `name_of`.

    Raises:
        StoreError: there is no such op or function here; an op of yours may not be registered yet.
    """
    space, colon, rest = name.partition("::")
    if colon:
        packet, _, overload = rest.rpartition(".")
        found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
        if _torch.is_op(found):
            return found
        raise StoreError(f"no op {name!r} is registered")
    module, _, function = name.partition(":")
    if module == "operator" and callable(getattr(operator, function, None)):
        return getattr(operator, function)
    if name in _OF_TORCH:
        return _OF_TORCH[name]
    found = getattr(importlib.import_module(module), function, None) if module.startswith("wholestep.") else None
    if isinstance(found, FunctionType) and found.__module__ == module:
        return found
    raise StoreError(f"no function {name!r} in wholestep")


def name_of_dtype(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `name_of_dtype`."""
    return cast(torch.dtype, word_of_torch(name))


def word_of_torch(name: str) -> torch.dtype | torch.layout | torch.memory_format:
    """A dtype, layout or memory format by its name."""
    found = getattr(torch, name, None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise StoreError(f"torch has no {name!r}")
    return found
