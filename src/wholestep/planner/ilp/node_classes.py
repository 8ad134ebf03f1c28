"""Classes of equal nodes: the same op on the same shapes with equal operands and readers, as in repeated layers.

Classes are refined in rounds. The first round compares op, arguments, shapes and module path without numbers; each
further round also the classes of operands and readers. After a few rounds a class is one place in a layer, and layers
but the first and the last few share classes. Nodes of one class share a choice: a class that is too coarse may cost
time, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

from torch.fx import Node
from torch.fx.node import map_arg

from ...graph import meta
from ...graph.nodes import operands
from ...graph.ops import GRAD_READY
from ...tuning import TUNING

_ROUNDS = TUNING.class_rounds
_NUMBER = re.compile(r"\d+")


def node_classes(nodes: Sequence[Node], marks: Mapping[Node, Hashable]) -> dict[Node, int]:
    """The class of each node, numbered by first appearance. Nodes with different `marks` are never equal."""
    inside = set(nodes)
    given = {node: [n for n in operands(node) if n in inside] for node in nodes}
    readers: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
    for node in nodes:
        for place, one in enumerate(given[node]):
            readers[one].append((node, place))
    found = _numbered({node: (_about(node), marks.get(node)) for node in nodes})
    for _ in range(_ROUNDS):
        found = _numbered({
            node: (
                found[node], tuple(found[n] for n in given[node]),
                tuple(sorted((found[n], place) for n, place in readers[node])),
            )
            for node in nodes
        })  # fmt: skip
    return found


def without_numbers(name: str) -> str:
    """`name` with `*` for each number: the same in every layer."""
    return _NUMBER.sub("*", name)


def _about(node: Node) -> Hashable:
    made = tuple(m and (m.shape, m.stride, m.dtype) for m in meta.tensors(node))
    if node.op != "call_function":
        return node.op, made
    if node.target is GRAD_READY:  # it names its parameter
        return node.target, made
    args = repr(map_arg((node.args, node.kwargs), lambda _: "%"))
    return node.target, args, made, meta.is_backward(node), without_numbers(meta.module_path(node))


def _numbered(keys: Mapping[Node, Hashable]) -> dict[Node, int]:
    table: dict[Hashable, int] = {}
    return {node: table.setdefault(key, len(table)) for node, key in keys.items()}
