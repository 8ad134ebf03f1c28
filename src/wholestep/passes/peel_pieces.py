"""Writes out, in the program of a stage, the runs of blocks beside which collectives can run."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from torch.fx import Node

from ..graph.graph import LocalGraph
from ..graph.loop import bodies_of, loop_of
from ..graph.messages import start_receive, start_send
from ..graph.nodes import is_collective, is_wait, move_up, reached
from ..graph.region import inputs_of, region_of
from ..graph.written_out import inline
from ..partition.batch_dependent import batch_dependent
from .base import InPlace


@dataclass(frozen=True)
class PeelPieces(InPlace):
    """Writes the body in place of the last call of each block that completes gradients which ranks of a stage reduce,
    and of the first call of each that reads parameters which they gather: the passes that follow merge and overlap
    these collectives as in a program without pieces. Bitwise the same.

    A block is still compiled once for all other pieces: the program grows by one run of it, whatever their number, and
    by a call for each further piece.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Write out runs of blocks in `local`."""
        runs = [node for node in local.graph.nodes if region_of(node)]
        last = [run for run in runs if any(_is_exchanged(local, item) for item in run.users)]
        for run in dict.fromkeys([*last, *_first_runs(local, runs)]):
            _write_body(run)
        if runs or any(map(loop_of, local.graph.nodes)):
            _start_early(local)
        return local


def _start_early(local: LocalGraph) -> None:
    """Start collectives as soon as what they send is there, as a program without pieces does: what a loop has
    accumulated was waited for where it is first read.
    """
    starts = [node for node in local.graph.nodes if is_collective(node) and _is_shared(local, node)]
    move_up(local.graph, starts, _moves)


def _moves(node: Node) -> bool:
    """True for a call that computes what one other reads from one, and that is all which that one reads."""
    if node.op != "call_function" or is_wait(node) or is_collective(node) or bodies_of(node)[1]:
        return False
    return len(node.users) == len(node.all_input_nodes) == len(next(iter(node.users)).all_input_nodes) == 1


def _is_exchanged(local: LocalGraph, item: Node) -> bool:
    """True if the first collectives that read a value are of ranks of this stage."""
    readers = reached([item], attrgetter("users"), lambda node: not is_collective(node) and region_of(node) is None)
    return any(is_collective(user) and _is_shared(local, user) for node in readers for user in node.users)


def _is_shared(local: LocalGraph, node: Node) -> bool:
    axis = str(node.args[-1])
    return axis != local.stage_axis and local.mesh.axis_size(axis) > 1


def _first_runs(local: LocalGraph, runs: list[Node]) -> list[Node]:
    """The calls that are the first to read what ranks of the stage gather."""
    varying, seen, first = batch_dependent(local), set[Node](), list[Node]()
    for run in runs:
        inputs = {node for node in inputs_of(run) if node is not None} - varying - seen
        seen |= inputs
        if any(is_collective(n) and _is_shared(local, n) for operand in inputs for n in reached([operand])):
            first.append(run)
    return first


def _write_body(run: Node) -> None:
    """Write the body in place of a call. What it sends leaves as soon as it is there, with what is begun behind it."""
    following, node = list[Node](), run.next
    while node.target in (start_send, start_receive) or node in run.users:
        following += [] if node in run.users else [node]
        node = node.next
    nodes = inline(run)
    sent = {operand for start in following for operand in start.all_input_nodes}
    last = next((node for node in reversed(nodes) if node in sent), nodes[0])
    for start in reversed(following):
        last.append(start)
