"""Runs a bound graph as plain Python: one line for each node, every temporary freed after its last use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import _torch
from ..graph.graph import function_of, operands
from ..graph.verify import is_wait

Run = Callable[[Sequence[Any]], list[Any]]


@dataclass
class WaitClock:
    """Adds up the seconds spent blocked in waits."""

    seconds: float = 0.0

    def timed(self, wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`wait`, on the clock."""

        def run(value: Any) -> Any:
            start = time.perf_counter()
            out = wait(value)
            self.seconds += time.perf_counter() - start
            return out

        return run


def eager(graph: Graph, clock: WaitClock | None = None) -> Run:
    """Compile `graph` to a Python function from the list of inputs to the list of outputs.

    Its source is kept in `run.source`.
    """
    writer = _Writer(clock)
    source = writer.write(graph)
    scope: dict[str, Any] = dict(writer.constants)
    exec(compile(source, "<wholestep eager>", "exec"), scope)
    run = torch.no_grad()(scope["run"])
    run.source = source
    return run


class _Writer:
    def __init__(self, clock: WaitClock | None) -> None:
        self.clock = clock
        self.constants: dict[str, Any] = {}
        self.names: dict[int, str] = {}

    def write(self, graph: Graph) -> str:
        nodes = list(graph.nodes)
        last = {given: node for node in nodes for given in operands(node)}
        dying: dict[Node, list[str]] = {}
        for given, node in last.items():
            if given.op != "placeholder" and node.op != "output":
                dying.setdefault(node, []).append(given.name)
        inputs = [n.name for n in nodes if n.op == "placeholder"]
        lines = ["def run(inputs):"]
        lines += [f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = inputs"] if inputs else []
        for node in nodes:
            if node.op == "call_function":
                lines.append(f"    {self._line(node)}")
            elif node.op == "output":
                lines.append(f"    return {self._value(list(cast(Sequence[Any], node.args[0])))}")
            if node in dying:
                lines.append(f"    del {', '.join(sorted(set(dying[node])))}")
        return "\n".join(lines) + "\n"

    def _line(self, node: Node) -> str:
        if _torch.is_getitem(node.target):
            call = f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        else:
            target = function_of(node)
            target = self.clock.timed(target) if self.clock and is_wait(node) else target
            args = [self._value(a) for a in node.args] + [f"{k}={self._value(v)}" for k, v in node.kwargs.items()]
            call = f"{self._constant(target, 'f')}({', '.join(args)})"
        return f"{node.name} = {call}" if node.users else call

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)):
            items = cast(Sequence[Any], value)
            inner = ", ".join(self._value(v) for v in items)
            return f"[{inner}]" if isinstance(items, list) else f"({inner}{',' if len(items) == 1 else ''})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value, "c")

    def _constant(self, value: Any, prefix: str) -> str:
        key = id(value)
        if key not in self.names:
            self.names[key] = f"_{prefix}{len(self.constants)}"
            self.constants[self.names[key]] = value
        return self.names[key]
