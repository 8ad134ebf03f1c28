"""Starts parameter gathers before they are needed: a window of them is on the wire while the step computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..graph.graph import LocalGraph, copy_graph, operands
from ..graph.verify import is_collective, is_wait


@dataclass(frozen=True)
class Prefetch:
    """Gather number i starts as soon as gather number i - `window` was waited for. Bitwise the same.

    Only gathers of what rests on the rank (a parameter's shard, padded or cast) move, in their order; ranks run the
    same graph, so they agree on the order of all collectives. At most `window` gathered parameters wait for their use.
    """

    window: int = 8

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """Move the gathers of `local` forward."""
        graph = copy_graph(local.graph)
        gathers = [n for n in graph.nodes if _gathers(n) and chain_of(n) is not None]
        for i, gather in enumerate(gathers):
            after = _start_of(graph) if i < self.window else _wait_of(gathers[i - self.window])
            if i and (after is None or after < gathers[i - 1]):
                after = gathers[i - 1]
            if after is not None and after < gather:
                _move(gather, after)
        return replace(local, graph=graph)


def _gathers(node: Node) -> bool:
    return is_collective(node) and "all_gather" in str(node.target)


def chain_of(node: Node) -> list[Node] | None:
    """The nodes between the inputs of the graph and `node`, in order; None when others read them or it needs more."""
    chain: list[Node] = []
    at = node
    while at.op == "call_function":
        chain.insert(0, at)
        given = operands(at)
        if len(given) != 1 or (at is not node and len(at.users) != 1):
            return None
        at = given[0]
    return chain if at.op == "placeholder" else None


def _start_of(graph: Graph) -> Node | None:
    return next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)


def _wait_of(gather: Node) -> Node | None:
    return next((user for user in gather.users if is_wait(user)), None)


def _move(gather: Node, after: Node) -> None:
    for node in chain_of(gather) or ():
        after.append(node)
        after = node
