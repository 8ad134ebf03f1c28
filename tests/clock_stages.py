"""All stages of a pipeline in time: each runs its program node by node, and waits for what others send."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch.fx import Node

import wholestep as ws
from wholestep.cost.simulation import Clock, clock_of
from wholestep.graph import meta
from wholestep.graph.messages import (
    POINT_TO_POINT,
    STARTED,
    complete,
    receive,
    send,
    start_receive,
    start_send,
)
from wholestep.graph.nodes import is_collective
from wholestep.graph.region import region_of
from wholestep.passes.base import Pass


@dataclass
class Stages:
    """`arrives`: when a message is there, by its name and piece, or tag. `met`: when stages began a collective of all
    of them. `free`: until when a channel sends.
    """

    local: ws.LocalGraph
    hardware: ws.Hardware
    passes: Sequence[Pass]
    arrives: dict[object, float] = field(default_factory=dict[object, float])
    met: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    free: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    waited: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        self.count = self.local.mesh.axis_size(self.local.stage_axis)
        self.programs = [
            ws.run_passes(ws.stage_program(self.local, stage), self.passes) for stage in range(self.count)
        ]  # fmt: skip

    def step_us(self) -> float:
        """Until the last stage ends."""
        clocks = [clock_of(one.graph, one.mesh, self.hardware) for one in self.programs]
        running = [self._stage(stage, clock) for stage, clock in enumerate(clocks)]
        left, rounds = set(range(self.count)), 0
        while left:
            for stage in sorted(left):
                if next(running[stage], "ends") == "ends":
                    left.remove(stage)
            rounds += 1
            assert rounds < 100_000, "stages wait for each other"
        self.waited = [clock.waited for clock in clocks]
        return max(clock.now for clock in clocks)

    def _stage(self, stage: int, clock: Clock) -> Generator[str]:
        for node in self.programs[stage].graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in STARTED or region_of(node):
                yield from self._piece(node, stage, clock)
            elif node.target in POINT_TO_POINT:
                yield from self._message(node, stage, clock)
            elif is_collective(node) and node.args[-1] == self.local.stage_axis:
                clock.run(node)
                begun = self.met.setdefault(node.name, {})
                begun[stage] = clock.begun[node]
                yield from _until(lambda begun=begun: len(begun) == self.count)
                late = max(begun.values()) - begun[stage]
                clock.begun[node] += late
                clock.ends[node] += late
            else:
                clock.run(node)

    def _piece(self, node: Node, stage: int, clock: Clock) -> Generator[str]:
        if region := region_of(node):
            clock.compute(region.us)
        elif node.target is start_send:
            _, target, tag, axis = node.args
            channel = stage, target
            sent = self.hardware.collective_us("send", meta.size_bytes(node), self.local.mesh, axis)
            self.arrives[tag] = self.free[channel] = max(self.free.get(channel, 0.0), clock.now) + sent
        elif node.target is complete and (begun := cast(Node, node.args[0])).target is start_receive:
            tag = begun.args[4]
            yield from _until(lambda: tag in self.arrives)
            clock.now = max(clock.now, self.arrives[tag])

    def _message(self, node: Node, stage: int, clock: Clock) -> Generator[str]:
        if node.target is send:
            given = cast(Node, node.args[0])
            clock.now += self.hardware.collective_us(
                "send", meta.size_bytes(given), self.local.mesh, self.local.stage_axis
            )
            self.arrives[node.args[2]] = clock.now
        else:
            assert node.target is receive, "the other one"
            tag = node.args[4]
            yield from _until(lambda: tag in self.arrives)
            clock.now = max(clock.now, self.arrives[tag])


def _until(is_there: Callable[[], bool]) -> Generator[str]:
    while not is_there():
        yield "waits"
