"""The modules of a captured step: the nodes of each, the tensors that it reads from outside, and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import is_pointwise
from .propagation_inputs import moving

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Modules:
    """Modules by path (dots between names), as far as they take part in the forward of a step."""

    graph: TrainGraph
    _inside: dict[str, dict[Node, None]] = field(default_factory=dict[str, dict[Node, None]])

    def __post_init__(self) -> None:
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and not meta.is_backward(node):
                for path in _above(meta.module_path(node)):
                    self._inside.setdefault(path, {})[node] = None

    @cached_property
    def params(self) -> Mapping[str, Node]:
        """Parameters by name."""
        return {spec.name: node for spec, node in self.graph.placeholders() if spec.role is Role.PARAM}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all modules and parameters."""
        owners = [path for name in self.params for path in _above(name.rpartition(".")[0])]
        return tuple(dict.fromkeys([*self._inside, *owners, *self.params]))

    def matching(self, pattern: str) -> list[str]:
        """Paths that match `pattern`, one glob for each name; a pattern may omit the first name of a path."""
        return [path for path in self.paths if fits(path, pattern) or fits(path.partition(".")[2], pattern)]

    def near(self, pattern: str) -> str:
        """Paths that resemble `pattern`, for an error."""
        return ", ".join(map(repr, get_close_matches(pattern, self.paths, n=3, cutoff=0.3) or self.paths[:3]))

    def held(self, path: str) -> list[str]:
        """Direct parameters of a module, or the (tied) parameters that it reads if it has none; a parameter itself."""
        direct = [name for name in self.params if name == path or name.rpartition(".")[0] == path]
        inside = self._inside.get(path, {})
        return direct or [name for name, node in self.params.items() if any(u in inside for u in _readers(node))]

    def uses(self, param: str, path: str) -> list[Node]:
        """Forward nodes of a module that read a parameter; all forward readers if the module has none. What reads its
        cast reads the parameter (`MixedPrecision`), and so does what reads its elements scaled (`Float8`).
        """
        inside = self._inside.get(path, {})
        users = [u for u in _readers(self.params[param]) if not meta.is_backward(u)]
        readers = [u for u in users if u in inside]
        for node in readers:
            readers += [u for u in _readers(node) if u in inside] if self._is_scaled(node) else []
        return readers or users

    @cached_property
    def _moving(self) -> frozenset[Node]:
        return moving(self.graph)

    def _is_scaled(self, node: Node) -> bool:
        """True if the elements of `node` are those of a tensor that it reads, changed alike in every step."""
        tensor = meta.tensor(node)
        shapes = [source.shape for operand in operands(node) if (source := meta.tensor(operand))]
        return tensor is not None and is_pointwise(node.target) and node not in self._moving and tensor.shape in shapes

    def inside(self, path: str) -> list[Node]:
        """Forward nodes of a module and its submodules, in order."""
        return list(self._inside.get(path, {}))

    def outputs(self, path: str) -> list[Node]:
        """Tensors of a module that nodes outside of it read in the forward, in order."""
        inside = self._inside.get(path, {})
        nodes = [n for n in inside if any(u not in inside and not meta.is_backward(u) for u in n.users)]
        return [n for n in nodes if meta.tensor(n) is not None]

    def inputs(self, path: str, among: frozenset[Node]) -> dict[Node, list[Node]]:
        """Floating-point tensors of `among` that a module reads from outside, each with its readers."""
        inside = self._inside.get(path, {})
        readers: dict[Node, list[Node]] = {}
        for node in inside:
            for operand in operands(node):
                tensor = meta.tensor(operand)
                if operand in among and operand not in inside and tensor is not None and tensor.dtype.is_floating_point:
                    readers.setdefault(operand, []).append(node)
        return readers


def fits(path: str, pattern: str) -> bool:
    """True if `path` matches `pattern` name by name."""
    have, want = path.split("."), pattern.split(".")
    return len(have) == len(want) and all(fnmatchcase(h, w) for h, w in zip(have, want, strict=True))


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if user.target is _CAST else (user,)


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
