"""Casts of activations to fewer bytes: a gather that a style asks for sends what is cast, not what it is cast from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Node

from ..graph import meta
from ..graph.nodes import operands, reached
from ..graph.op_kinds import is_pointwise, packet_name
from ..layout import AxisState

Reads = dict[tuple[str, str], dict[str, AxisState]]


def reads_after_casts(requests: Mapping[Node, Mapping[Node, AxisState]], axis: str) -> Reads:
    """States along `axis` by the names of a reader and of what it reads, from those that modules ask for: by value, and
    by reader of it.

    Where all readers of a value only cast it, or compute the scale for that, it is the cast that is laid out so: ranks
    cast their pieces. Where another one reads the value itself, that is sent once, and its casts in the backward are
    cast from what was sent.
    """
    reads: Reads = {}
    for value, readers in requests.items():
        states = set(readers.values())
        ways = list(_ways_to_casts(value, value)) if len(states) == 1 else []
        on_the_way = _with_scales(value, ways)
        ends = [way[-1] for way in ways]
        sent = [end for end in ends if not meta.is_backward(end)]
        fewer = sum(meta.one_tensor(end).dtype.itemsize for end in ends) <= meta.one_tensor(value).dtype.itemsize
        pins = [(reader, value, state) for reader, state in readers.items()]
        if len(sent) == 1 and fewer and on_the_way.issuperset(readers):
            pins = [(u, sent[0], state) for state in states for u in sent[0].users if not meta.is_backward(u)]
        elif sent:
            pins += [(u, value, s) for s in states for u in value.users if u in on_the_way and meta.is_backward(u)]
        for reader, source, state in pins:
            reads.setdefault((reader.name, source.name), {})[axis] = state
    return reads


def _ways_to_casts(node: Node, source: Node, *before: Node) -> Iterator[tuple[Node, ...]]:
    """The nodes from `source` to each of its casts to fewer bytes: of its elements, or of these times a scale."""
    original = meta.one_tensor(source)
    for user in node.users:
        tensor = meta.tensor(user) if user.op == "call_function" else None
        if tensor is None or tensor.shape != original.shape or not _keeps_elements(user, node):
            continue
        if tensor.dtype.itemsize < original.dtype.itemsize:
            yield (*before, user)
        else:
            yield from _ways_to_casts(user, source, *before, user)


def _keeps_elements(user: Node, node: Node) -> bool:
    """True for a cast of `node`, and for its product with what has fewer elements."""
    tensors = [meta.tensor(n) for n in operands(user) if n is not node]
    small = all(m is not None and m.numel < meta.one_tensor(node).numel for m in tensors)
    return packet_name(user.target) in ("_to_copy", "clone") or (packet_name(user.target) == "mul" and small)


def _with_scales(source: Node, ways: list[tuple[Node, ...]]) -> set[Node]:
    """The nodes of `ways`, and what the factors in these are computed of, back to `source`."""
    on_the_way, size = {node for way in ways for node in way}, meta.one_tensor(source).numel

    def is_factor(node: Node) -> bool:
        tensor = meta.tensor(node)
        return node is not source and tensor is not None and (tensor.numel < size or is_pointwise(node.target))

    return on_the_way | reached((operand for node in on_the_way for operand in operands(node)), where=is_factor)
