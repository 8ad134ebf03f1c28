"""Simulates the program of all stages of a pipeline: a clock for each stage.

Blocks of a loop take place as they were ordered. Outside of loops, what stages exchange is waited for where it starts;
collectives along other axes are not overlapped, as the programs of stages run them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.nodes import is_collective
from ..graph.op_kinds import collective_kind
from ..graph.stage_part import transfer
from ..hardware.hardware import Hardware
from .compute import node_us

SEND = "send"


@dataclass(frozen=True)
class StageSpan:
    """What one stage does for some time: a node outside of loops, or a block for a piece. Times in microseconds."""

    stage: int
    name: str
    start_us: float
    us: float
    node: Node
    piece: int | None = None


@dataclass
class StageClocks:
    """The clocks of the stages: `now`, in microseconds since the start of the step, and what they have run."""

    local: LocalGraph
    hardware: Hardware
    now: list[float] = field(init=False)
    spans: list[StageSpan] = field(default_factory=list[StageSpan])

    def __post_init__(self) -> None:
        self.now = [0.0] * self.local.mesh.axis_size(self.local.stage_axis)

    def run(self) -> StageClocks:
        """Run the whole program."""
        for node in self.local.graph.nodes:
            if node.op != "call_function":
                continue
            loop = loop_of(node)
            if loop is not None and loop.stages is not None:
                self._run_loop(node)
            elif node.target is transfer:
                self._send(node)
            elif is_collective(node):
                self._meet(node)
            else:
                self._run(node, node_us(node, self.hardware))
        return self

    @property
    def step_us(self) -> float:
        """When the last stage ends."""
        return max(self.now)

    @property
    def idle_us(self) -> float:
        """How long a stage does nothing, on average."""
        busy = sum(span.us for span in self.spans)
        return self.step_us - busy / len(self.now)

    def _stages(self, node: Node) -> range | tuple[int, ...]:
        at = meta.stage(node)
        return range(len(self.now)) if at is None else (at,)

    def _run(self, node: Node, us: float) -> None:
        for stage in self._stages(node):
            if us > 0:
                self.spans.append(StageSpan(stage, node.name, self.now[stage], us, node))
                self.now[stage] += us

    def _run_loop(self, node: Node) -> None:
        loop = loop_of(node)
        assert loop is not None, "a loop"
        assert loop.stages is not None, "of stages"
        begin = max(self.now)
        for stage, name, piece, start, end in loop.stages.spans:
            self.spans.append(StageSpan(stage, name.partition(", ")[2], begin + start, end - start, node, piece))
            self.now[stage] = max(self.now[stage], begin + end)

    def _send(self, node: Node) -> None:
        _, source, target, _, axis = node.args
        assert isinstance(source, int), "a coordinate"
        assert isinstance(target, int), "a coordinate"
        us = self.hardware.collective_us(SEND, meta.size_bytes(node), self.local.mesh, str(axis))
        self.now[source] += us
        self.now[target] = max(self.now[target], self.now[source])

    def _meet(self, node: Node) -> None:
        from_all, axis = str(node.args[-1]) == self.local.stage_axis, str(node.args[-1])
        kind = collective_kind(node.target)
        size = max(meta.size_bytes(node), *(meta.size_bytes(given) for given in node.all_input_nodes))
        us = self.hardware.collective_us(kind or SEND, size, self.local.mesh, axis)
        stages = range(len(self.now)) if from_all else self._stages(node)
        begin = max(self.now[stage] for stage in stages) if from_all else 0.0
        for stage in stages:
            self.now[stage] = max(self.now[stage], begin) + us
