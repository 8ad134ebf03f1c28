"""Stores parameters and optimizer state in host memory, where the update runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .. import _torch
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.nodes import add_call, is_collective, is_wait
from ..partition.rank_ops import to_device, to_host
from .base import InPlace, batch_dependent

_HOST = frozenset({Role.PARAM, Role.STATE, Role.GRAD})


@dataclass(frozen=True)
class Offload(InPlace):
    """Moves parameters, state and updates to host memory in a program with `offload`; other programs do not change.

    Shards are copied to the device before they are gathered, reduced gradients to the host. Where the device is the
    CPU, `to_host` and `to_device` return their operand.
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
        roles = {node: given.role for given, node in self.local.placeholders()}
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

    def _stored(self, target: str) -> bool:
        """True for a tensor that is stored on the host."""
        return next((i.role for i in self.local.inputs if i.name == target), Role.STATE) in _HOST

    def _is_host(self, node: Node, varies: bool) -> bool:
        """Updates run on the host, functions of parameters alone where their operands are, all else on the device."""
        if is_collective(node) or is_wait(node):
            return False
        if _torch.is_getitem(node.target):
            return self.host[node.all_input_nodes[0]]
        if not meta.is_batch_invariant(node):
            return False
        return varies or all(self.host[n] for n in node.all_input_nodes if not self._is_number(n))

    def _is_number(self, node: Node) -> bool:
        """Scheduled numbers and counts stay on the CPU; kernels of any device read them there."""
        found = meta.tensor(node)
        return found is not None and not found.shape and found.device == "cpu"

    def _move_operands(self, node: Node, host: bool) -> None:
        for given in node.all_input_nodes:
            if self.host[given] != host and not self._is_number(given):
                node.replace_input_with(given, self._copied(given, node, host))

    def _copied(self, given: Node, reader: Node, host: bool) -> Node:
        """`given` on the host or on the device, copied once."""
        if self.host.get(given, host) == host or meta.tensor(given) is None:
            return given
        if given not in self.moved:
            with self.local.graph.inserting_before(reader):
                args = (given,) if host else (given, self.local.offload)
                new = add_call(self.local.graph, to_host if host else to_device, args, meta.one_tensor(given), given)
            self.moved[given], self.host[new] = new, host
        return self.moved[given]
