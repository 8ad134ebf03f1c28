"""The modules of a captured step: which nodes each made, what it reads from outside and what leaves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import Role, TrainGraph, operands

aten = torch.ops.aten
EMBEDDINGS = (aten.embedding.default,)
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Modules:
    """Modules by their path (dots between names), as far as the forward of a step shows them."""

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
        return {given.name: node for given, node in self.graph.placeholders() if given.role is Role.PARAM}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every module, and every parameter."""
        owners = [path for name in self.params for path in _above(name.rpartition(".")[0])]
        return tuple(dict.fromkeys([*self._inside, *owners, *self.params]))

    def matching(self, pattern: str) -> list[str]:
        """Paths that `pattern` names, one glob for each name; the first name of a path may be left out."""
        return [path for path in self.paths if fits(path, pattern) or fits(path.partition(".")[2], pattern)]

    def held(self, path: str) -> list[str]:
        """Parameters of one module itself, or those it reads where it has none (tied ones); a parameter by its name."""
        own = [name for name in self.params if name == path or name.rpartition(".")[0] == path]
        inside = self._inside.get(path, {})
        return own or [name for name, node in self.params.items() if any(u in inside for u in node.users)]

    def uses(self, param: str, path: str) -> list[Node]:
        """Forward nodes that read a parameter: those of one module, or all where it has none."""
        users = [u for u in self.params[param].users if not meta.is_backward(u)]
        return [u for u in users if u in self._inside.get(path, {})] or users

    def inside(self, path: str) -> list[Node]:
        """Forward nodes of a module and of those in it, in order."""
        return list(self._inside.get(path, {}))

    def outputs(self, path: str) -> list[Node]:
        """Tensors made in a module that its surroundings read in the forward, in order."""
        inside = self._inside.get(path, {})
        found = [n for n in inside if any(u not in inside and not meta.is_backward(u) for u in n.users)]
        return [n for n in found if meta.tensor(n) is not None]

    def inputs(self, path: str, among: frozenset[Node]) -> dict[Node, list[Node]]:
        """Floating-point tensors of `among` made outside a module, each with the nodes in it that read it."""
        inside = self._inside.get(path, {})
        found: dict[Node, list[Node]] = {}
        for node in inside:
            for given in operands(node):
                made = meta.tensor(given)
                if given in among and given not in inside and made is not None and made.dtype.is_floating_point:
                    found.setdefault(given, []).append(node)
        return found

    def is_embedding(self, param: str, path: str) -> bool:
        """True for a table that rows are taken from."""
        return any(u.target in EMBEDDINGS for u in self.uses(param, path))

    def is_convolution(self, param: str, path: str) -> bool:
        """True for a weight of a convolution: [out, in, ...]."""
        return any("convolution" in str(u.target) for u in self.uses(param, path))

    def is_turned(self, param: str, path: str) -> bool:
        """True for a weight that is multiplied as it is stored, [in, out]: not turned around first, as Linear's is."""
        reads = self.uses(param, path)
        return bool(reads) and not any(u.target in TURNS for u in reads)


def fits(path: str, pattern: str) -> bool:
    """True when a path has the names that a pattern asks for, one by one."""
    have, want = path.split("."), pattern.split(".")
    return len(have) == len(want) and all(fnmatchcase(h, w) for h, w in zip(have, want, strict=True))


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
