"""Bytes of a rank while it works on micro-batches: bounds, gradients that add up, and what is held besides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch.fx import Node

from wholestep.cost.memory import curve
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph, Role
from wholestep.graph.storage import Storage, storages
from wholestep.passes.forward_backward import forward_backward


def least_bytes(local: LocalGraph) -> int:
    """Bytes that a rank holds at least, whatever passes do to `local`: its inputs, and between two ops of the forward
    and backward, whose order no pass changes, what ops before made and ops behind read. Gathered parameters and
    gradients come and go as they are scheduled, and do not count.
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    varying, main = forward_backward(local, later_stages=False)
    ordered = {node for node in calls if node in varying and node in main}
    changes, rest = [0] * (len(calls) + 1), 0
    for storage in storages(local.graph):
        if storage.first < 0:
            rest += storage.size_bytes
            continue
        reads = [place[user] for member in storage.members for user in member.users if user in ordered]
        last = max(reads, default=0)
        if storage.node in ordered and last > storage.first + 1:
            changes[storage.first + 1] += storage.size_bytes
            changes[last] -= storage.size_bytes
    return rest + max(accumulate(changes), default=0)


def peak_beside_gradients(program: LocalGraph) -> int:
    """The most bytes that a rank holds besides the gradients of parameters and what is made of them."""
    varying, main = forward_backward(program, later_stages=False)
    all_storages, calls = storages(program.graph), sum(node.op == "call_function" for node in program.graph.nodes)
    gradients = _gradients(all_storages, varying, main)

    def counts(storage: Storage) -> bool:
        node, index = storage.node, storage.index
        return storage.first < 0 or node not in varying or (node in main and (node, index) not in gradients)

    return max(curve([storage for storage in all_storages if counts(storage)], calls), default=0)


def gradients_of(program: LocalGraph) -> set[tuple[Node, int]]:
    """The gradients of parameters, whole as a backward leaves them: nodes, and the numbers of their outputs."""
    return _gradients(storages(program.graph), *forward_backward(program, later_stages=False))


def _gradients(all_storages: Sequence[Storage], varying: set[Node], main: set[Node]) -> set[tuple[Node, int]]:
    """The results of the backward that are read behind it, themselves or views of them."""
    results = [storage for storage in all_storages if storage.node in main and meta.is_backward(storage.node)]
    return {
        (storage.node, storage.index) for storage in results
        if any(user in varying and user not in main for member in storage.members for user in member.users)
    }  # fmt: skip


def held_between(local: LocalGraph) -> int:
    """Bytes of what depends on the batch that a rank holds when it begins the last of several micro-batches, each an
    input of its own: gradients that add up, as they are then. Some are whole on each rank until they are summed along
    tensor parallelism.
    """
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    place = {node: i for i, node in enumerate(calls)}
    batches = [node for graph_input, node in local.placeholders() if graph_input.role is Role.BATCH]
    begins = max((min(place[user] for user in node.users) for node in batches if node.users), default=0)
    varying, _ = forward_backward(local, later_stages=False)
    live = [storage for storage in storages(local.graph) if storage.node in varying and 0 <= storage.first < begins]
    return sum(storage.size_bytes for storage in live if storage.last is not None and storage.last >= begins)
