"""Nodes that are alike: the same op on the same shapes, reading and read by the same, as in layers that repeat.

A class is refined in rounds: at first it is the op with its arguments, shapes and module (numbers in paths left out),
then that and the classes of what a node reads and of what reads it. After a few rounds a node has its place in a layer,
while layers but for the first and last few stay alike. What is put together by mistake shares a choice: that may cost
time, never correctness.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

from torch.fx import Node
from torch.fx.node import map_arg

from ...graph import meta
from ...graph.graph import operands
from ...graph.ops import GRAD_READY
from ...tuning import TUNING

_ROUNDS = TUNING.class_rounds
_NUMBER = re.compile(r"\d+")


def classes(nodes: Sequence[Node], marks: Mapping[Node, Hashable]) -> dict[Node, int]:
    """The number of the class of each node, in order of appearance. `marks` tells nodes apart from the start."""
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


def starred(name: str) -> str:
    """`name` without its numbers: the same in every layer."""
    return _NUMBER.sub("*", name)


def _about(node: Node) -> Hashable:
    made = tuple(m and (m.shape, m.stride, m.dtype) for m in meta.tensors(node))
    if node.op != "call_function":
        return node.op, made
    if node.target is GRAD_READY:  # it names its parameter
        return node.target, made
    args = repr(map_arg((node.args, node.kwargs), lambda _: "%"))
    return node.target, args, made, meta.is_backward(node), starred(meta.module_path(node))


def _numbered(keys: Mapping[Node, Hashable]) -> dict[Node, int]:
    table: dict[Hashable, int] = {}
    return {node: table.setdefault(key, len(table)) for node, key in keys.items()}
