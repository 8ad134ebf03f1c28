"""Collectives as gloo runs them best, and without a crash."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import _torch
from ...graph import meta
from ...graph.nodes import is_wait, node_at
from ...graph.op_kinds import collective
from ...partition.owned_rows import add_parts
from ...passes.bucket import (
    join_rows,
    part_of_coalesced_shared_sum,
    part_of_gather,
    part_of_scatter,
    part_of_shared_sum,
)
from ...passes.coalesced import coalesce, part_of_coalesced_gather, part_of_coalesced_scatter

funcol = torch.ops._c10d_functional


def exchanges(device: str) -> bool:
    """True where a reduce-scatter runs as an exchange and a local sum: on the CPU."""
    return device.startswith("cpu")


@collective("all_gather")
def gather(value: Tensor, parts: int, group: str) -> Tensor:
    """all_gather_into_tensor, by way of its out variant on the CPU: two of the plain one in flight can crash gloo.

    Each of gloo's two threads stores the name of the operation it completed in one string, without a lock. The plain
    variant's name, ALLGATHER_COALESCED, is too long to be stored in place: when both threads complete one at once, its
    memory is freed twice (torch 2.11 and 2.13). The out variant has a short name, as the other collectives here have.
    """
    if value.device.type != "cpu" or value.is_complex():
        return funcol.all_gather_into_tensor.default(value, parts, group)
    gathered = value.new_empty((value.shape[0] * parts, *value.shape[1:]))
    return funcol.all_gather_into_tensor_out.default(value, parts, group, out=gathered)


def in_buckets(graph: Graph) -> None:
    """Copy the tensors of each coalesced collective into one: gloo would start each of them by itself."""
    copies: dict[Any, Any] = {
        part_of_coalesced_gather: part_of_gather, part_of_coalesced_scatter: part_of_scatter,
        part_of_coalesced_shared_sum: part_of_shared_sum,
    }  # fmt: skip
    for node in graph.nodes:
        if node.target is coalesce:
            sent = next(iter(node.users))
            scatters = sent.target is funcol.reduce_scatter_tensor.default
            node.target, node.args = join_rows, (node.args[0], sent.args[2] if scatters else 1)
        if node.target in copies:
            node.target = copies[node.target]


def to_exchange(graph: Graph, node: Node) -> None:
    """Parts for all ranks go out in place of a reduce-scatter, and what arrived is added up after the wait."""
    value, op, parts, group = node.args
    node.target, node.args = swap, (value, parts, group)
    meta.set_tensors(node, meta.tensors(node_at(node, 0)))
    add_up(graph, node, op, parts)


def add_up(graph: Graph, node: Node, op: Any, parts: Any) -> None:
    """Add up the parts that `node`, an exchange or its result in flight, has received."""
    for wait in [user for user in node.users if is_wait(user)]:
        with graph.inserting_after(wait):
            added = graph.call_function(add_parts, (wait, parts, op))
        meta.copy(wait, added)
        wait.replace_all_uses_with(added, delete_user_cb=lambda user, added=added: user is not added)


@collective("all_to_all")
def swap(value: Tensor, parts: int, group: str) -> Tensor:
    """Part number i of `value` goes to rank i of the group."""
    rows = [value.shape[0] // parts] * parts
    swapped = funcol.all_to_all_single.default(_torch.numbers(value), rows, rows, group)
    return torch.view_as_complex(swapped) if value.is_complex() else swapped
