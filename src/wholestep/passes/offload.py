"""Stores parameters and optimizer state in host memory, where the update runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.loop import loop_of
from ..graph.nodes import add_call, is_collective, is_wait
from ..graph.storage import always_shares, shared_operand
from ..partition.batch_dependent import batch_dependent
from ..partition.host_copies import arrived, to_device, to_host
from .base import InPlace, meets_stages

_HOST = frozenset({Role.PARAM, Role.STATE, Role.GRAD})


@dataclass(frozen=True)
class Offload(InPlace):
    """Moves parameters, state and updates to host memory in a program with `offload`; other programs do not change.

    Shards are copied to the device before they are gathered, reduced gradients to the host. A copy to the host starts
    where its operand is there, one to the device where the copy before it is read. Where the device is the CPU, copies
    return their operand.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Insert copies between host and device into `local`."""
        if local.offload:
            _Work(local).run()
        return local


@dataclass
class _Work:
    local: LocalGraph
    host: dict[Node, bool] = field(default_factory=dict[Node, bool])
    moved: dict[Node, Node] = field(default_factory=dict[Node, Node])

    def run(self) -> None:
        roles = {node: program_input.role for program_input, node in self.local.placeholders()}
        varying = batch_dependent(self.local)
        for node in list(self.local.graph.nodes):
            if node.op == "placeholder":
                self.host[node] = roles[node] in _HOST
            elif node.op == "call_function":
                self.host[node] = self._is_host(node, node in varying)
                if self.host[node] and node.kwargs.get("device") is not None:
                    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
                if not _torch.is_getitem(node.target):
                    self._move_operands(node, self.host[node])
        output = next(iter(reversed(self.local.graph.nodes)))
        ends = [
            self._copied(node, output, host=True) if out.kind == "update" and self._stored(out.target) else node
            for out, node in self.local.results()
        ]
        output.args = (tuple(ends),)
        for node in reversed(list(self.moved)):  # views that only the device reads
            if not node.users and node.op == "call_function":
                self.local.graph.erase_node(node)
        self._start_early()

    def _stored(self, target: str) -> bool:
        """True for a tensor that is stored on the host."""
        return next((i.role for i in self.local.inputs if i.name == target), Role.STATE) in _HOST

    def _is_host(self, node: Node, varies: bool) -> bool:
        """Updates run on the host, functions of parameters alone where their operands are, all else on the device: a
        loop goes through pieces of the batch, also where it reads what another one has kept of them.
        """
        if is_collective(node) or is_wait(node) or meets_stages(self.local, node) or loop_of(node):
            return False
        if _torch.is_getitem(node.target):
            return self.host[node.all_input_nodes[0]]
        if not meta.is_batch_invariant(node):
            return False
        return varies or all(self.host[n] for n in node.all_input_nodes if not self._is_number(n))

    def _is_number(self, node: Node) -> bool:
        """Scheduled numbers and counts stay on the CPU; kernels of any device read them there."""
        tensor = meta.tensor(node)
        return tensor is not None and not tensor.shape and tensor.device == "cpu"

    def _move_operands(self, node: Node, host: bool) -> None:
        for operand in node.all_input_nodes:
            if self.host[operand] != host and not self._is_number(operand):
                node.replace_input_with(operand, self._copied(operand, node, host))

    def _copied(self, node: Node, reader: Node, host: bool) -> Node:
        """`node` on the host or on the device, copied once."""
        if self.host.get(node, host) == host or meta.tensor(node) is None:
            return node
        if node in self.moved:
            return self.moved[node]
        viewed = None if host else _viewed(node)
        if viewed is not None:
            base = self._copied(viewed, reader, host)
            with self.local.graph.inserting_before(reader):
                new = self.local.graph.node_copy(node, {viewed: base}.__getitem__)
            self.moved[node], self.host[new] = new, host
        else:
            with self.local.graph.inserting_before(reader):
                args = (node,) if host else (node, self.local.offload)
                start = add_call(self.local.graph, to_host if host else to_device, args, meta.one_tensor(node), node)
                new = add_call(self.local.graph, arrived, (start,), meta.one_tensor(node), node)
            self.moved[node], self.host[start], self.host[new] = new, host, host
        return self.moved[node]

    def _start_early(self) -> None:
        """Move starts of copies before their reads, where the host cannot overwrite what is still being copied."""
        before: Node | None = None
        for node in [node for node in self.local.graph.nodes if node.target is arrived]:
            start = node.all_input_nodes[0]
            source = start.all_input_nodes[0]
            if start.target is to_device:
                if before is not None and source.op == "placeholder":
                    before.append(start)
                before = node
            elif start.target is to_host and source.op != "placeholder":
                source.append(start)
        order = {node: at for at, node in enumerate(self.local.graph.nodes)}
        ends = [
            (order[start], order[node])
            for node in order
            for start in node.all_input_nodes
            if node.target is arrived and start.target is to_host
        ]
        for node, at in order.items():
            if node.target is to_device:
                first = min((order[user] for user in node.all_input_nodes[0].users if self.host[user]), default=None)
                if first is not None and not any(at < start and end < first for start, end in ends):
                    node.args = (*node.args, True)


def _viewed(node: Node) -> Node | None:
    """The node all of whose elements `node` is a view of."""
    is_view = node.op == "call_function" and (_torch.is_op(node.target) or always_shares(node.target))
    base = shared_operand(node) if is_view else None
    is_full = base is not None and meta.one_tensor(base).numel == meta.one_tensor(node).numel
    return base if is_full and node.all_input_nodes == [base] else None
