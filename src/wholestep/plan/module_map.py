"""The modules of a captured step: the nodes of each, the tensors that it reads from outside, and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch.fx import Node

from ..graph import meta
from ..graph.graph import Role, TrainGraph
from ..graph.nodes import operands
from ..graph.op_kinds import arithmetic

aten = torch.ops.aten
EMBEDDINGS = (aten.embedding.default,)
TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
CONVOLUTIONS = (aten.convolution, aten._convolution, aten.convolution_overrideable, aten.cudnn_convolution)


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
        return {given.name: node for given, node in self.graph.placeholders() if given.role is Role.PARAM}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of all modules and parameters."""
        owners = [path for name in self.params for path in _above(name.rpartition(".")[0])]
        return tuple(dict.fromkeys([*self._inside, *owners, *self.params]))

    def matching(self, pattern: str) -> list[str]:
        """Paths that match `pattern`, one glob for each name; a pattern may omit the first name of a path."""
        return [path for path in self.paths if fits(path, pattern) or fits(path.partition(".")[2], pattern)]

    def held(self, path: str) -> list[str]:
        """Direct parameters of a module, or the (tied) parameters that it reads if it has none; a parameter itself."""
        direct = [name for name in self.params if name == path or name.rpartition(".")[0] == path]
        inside = self._inside.get(path, {})
        return direct or [name for name, node in self.params.items() if any(u in inside for u in node.users)]

    def uses(self, param: str, path: str) -> list[Node]:
        """Forward nodes of a module that read a parameter; all forward readers if the module has none."""
        users = [u for u in self.params[param].users if not meta.is_backward(u)]
        return [u for u in users if u in self._inside.get(path, {})] or users

    def inside(self, path: str) -> list[Node]:
        """Forward nodes of a module and its submodules, in order."""
        return list(self._inside.get(path, {}))

    def outputs(self, path: str) -> list[Node]:
        """Tensors of a module that nodes outside of it read in the forward, in order."""
        inside = self._inside.get(path, {})
        found = [n for n in inside if any(u not in inside and not meta.is_backward(u) for u in n.users)]
        return [n for n in found if meta.tensor(n) is not None]

    def inputs(self, path: str, among: frozenset[Node]) -> dict[Node, list[Node]]:
        """Floating-point tensors of `among` that a module reads from outside, each with its readers."""
        inside = self._inside.get(path, {})
        found: dict[Node, list[Node]] = {}
        for node in inside:
            for given in operands(node):
                made = meta.tensor(given)
                if given in among and given not in inside and made is not None and made.dtype.is_floating_point:
                    found.setdefault(given, []).append(node)
        return found

    def is_embedding(self, param: str, path: str) -> bool:
        """True for the table of an embedding."""
        return any(u.target in EMBEDDINGS for u in self.uses(param, path))

    def is_convolution(self, param: str, path: str) -> bool:
        """True for a weight of a convolution: [out, in, ...]."""
        return any((a := arithmetic(u.target)) and a.kind == "convolution" for u in self.uses(param, path))

    def is_in_out(self, param: str, path: str) -> bool:
        """True for a weight stored as [in, out]: its readers do not transpose it, as they do for `Linear`."""
        reads = self.uses(param, path)
        return bool(reads) and not any(u.target in TRANSPOSES for u in reads)


def fits(path: str, pattern: str) -> bool:
    """True if `path` matches `pattern` name by name."""
    have, want = path.split("."), pattern.split(".")
    return len(have) == len(want) and all(fnmatchcase(h, w) for h, w in zip(have, want, strict=True))


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
