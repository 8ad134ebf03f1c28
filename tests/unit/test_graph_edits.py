"""Nodes that take the place of others; which of the flat outputs of an op a getitem picks."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from wholestep.graph import meta
from wholestep.graph.nodes import operands, redirect

aten = torch.ops.aten


@pytest.mark.smoke
def test_readers_follow_chains_in_lists_and_keywords_too() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    first = graph.call_function(aten.detach.default, (a,))
    second = graph.call_function(aten.detach.default, (first,))
    joined = graph.call_function(aten.cat.default, ([second, b, first],), {"dim": second})
    graph.output((joined, second))
    redirect({first: a, second: first})
    assert operands(joined) == [a, b, a, a]
    assert operands(graph.output_node()) == [joined, a]
    assert not second.users
    graph.erase_node(second)
    graph.erase_node(first)
    graph.lint()


def test_a_pick_counts_the_tensors_of_lists_before_it() -> None:
    graph = Graph()
    made = graph.call_function(aten.cat.default, ([],))
    one = torch.zeros(())
    meta.set_value(made, ([one, one, one], one, [one, one]))

    def pick(index: int) -> Node:
        return graph.call_function(operator.getitem, (made, index))

    assert [meta.picked(pick(i)) for i in (0, 1, 2, -1)] == [slice(0, 3), slice(3, 4), slice(4, 6), slice(4, 6)]
    meta.set_value(made, (one, [one, one]))
    assert meta.picked(pick(1)) == slice(1, 3), "what was counted of an earlier value is not kept"
