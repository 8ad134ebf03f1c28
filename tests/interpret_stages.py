"""Interprets the programs of all ranks of a pipeline in one process: a thread for each rank, channels between them.

A channel of `room` messages holds what was sent until it is received. With no room a send ends when the other end
receives, as a rendezvous does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from wholestep.backend.rank_binding import bound_arguments
from wholestep.graph.graph import LocalGraph
from wholestep.graph.messages import RECEIVES, SENDS, complete, receive, send
from wholestep.graph.nodes import copy_graph, function_of, is_collective, is_wait
from wholestep.graph.op_kinds import collective_kind
from wholestep.graph.region import region_of
from wholestep.graph.written_out import written_out
from wholestep.mesh import TIME
from wholestep.partition.stage_program import stage_program
from wholestep.passes.base import Pass, run_passes
from wholestep.proof.interpret import COMPUTE, as_traced, is_random

PATIENCE_S = 60.0


@dataclass
class Channel:
    """Messages from one rank to another, first in, first out."""

    room: int
    changed: threading.Condition
    sent: list[tuple[int, Tensor]] = field(default_factory=list)
    received: int = 0
    posted: int = 0
    begun: int = 0


@dataclass
class Begun:
    """A started send or receive."""

    fabric: Fabric
    channel: Channel
    number: int
    into: Tensor | None = None
    tag: int = 0

    def is_completed(self) -> bool:
        if self.into is not None:
            return len(self.channel.sent) > self.number
        return self.channel.posted + self.channel.room > self.number

    def wait(self) -> None:
        with self.channel.changed:
            done = self.channel.changed.wait_for(self.is_completed, PATIENCE_S)
            assert done, "a rank waits for ever"
            if self.into is not None:
                tag, value = self.channel.sent[self.number]
                assert tag == self.tag, "both ends of a channel have one order"
                assert (value.shape, value.dtype) == (self.into.shape, self.into.dtype)
                self.into.copy_(value)


@dataclass
class Fabric:
    """Channels between ranks, and places where the ranks of a group meet."""

    local: LocalGraph
    room: int = 0
    passes: tuple[Pass, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    channels: dict[tuple[int, int], Channel] = field(default_factory=dict)
    meetings: dict[Any, tuple[threading.Barrier, dict[int, Any]]] = field(default_factory=dict)
    random: threading.Lock = field(default_factory=threading.Lock)

    def channel(self, source: int, target: int) -> Channel:
        with self.lock:
            made = Channel(self.room, threading.Condition())
            return self.channels.setdefault((source, target), made)

    def meet(self, key: Any, group: Sequence[int], rank: int, value: Any) -> list[Any]:
        with self.lock:
            barrier, given = self.meetings.setdefault(key, (threading.Barrier(len(group), timeout=PATIENCE_S), {}))
        given[rank] = value
        barrier.wait()
        return [given[one] for one in group]


@dataclass
class Rank:
    """One rank: the program of its stage, bound to it; `stream` is its state of torch's generator."""

    fabric: Fabric
    rank: int
    stream: Tensor
    met: dict[str, int] = field(default_factory=dict)
    result: Any = None
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        whole = self.fabric.local
        self.mesh, self.place = whole.mesh, whole.mesh.coordinate(self.rank)
        self.program = run_passes(stage_program(whole, self.place[whole.stage_axis]), self.fabric.passes)

    def peer(self, coordinate: int, axis: str) -> int:
        return self.mesh.rank({**self.place, axis: coordinate})

    def start_send(self, value: Tensor, target: int, tag: int, axis: str) -> Begun:
        channel = self.fabric.channel(self.rank, self.peer(target, axis))
        with channel.changed:
            channel.sent.append((tag, value.clone()))
            channel.changed.notify_all()
            return Begun(self.fabric, channel, len(channel.sent) - 1)

    def start_receive(self, out: Tensor, source: int, tag: int, axis: str) -> Begun:
        channel = self.fabric.channel(self.peer(source, axis), self.rank)
        with channel.changed:
            channel.posted += 1
            channel.changed.notify_all()
            return Begun(self.fabric, channel, channel.posted - 1, out, tag)

    def collective(self, node: Node, args: Any, out: Tensor | None) -> Any:
        kind, axis = collective_kind(node.target), str(args[-1])
        assert kind is not None
        group = next(g for g in self.mesh.groups(axis) if self.rank in g)
        self.met[axis] = self.met.get(axis, 0) + 1
        sent = args[0].clone()  # what follows the wait may write there
        given = self.fabric.meet((axis, group, self.met[axis]), group, self.rank, (kind, sent, args[1:3]))
        assert len({kind for kind, *_ in given}) == 1, "ranks run one order of collectives"
        args = (None, *zip(*(splits for *_, splits in given), strict=True)) if kind == "all_to_all" else args
        made = COMPUTE[kind]([value for _, value, _ in given], args)[group.index(self.rank)]
        return made if out is None else out.copy_(made)

    def run(self, inputs: Sequence[Tensor]) -> None:
        try:
            with torch.no_grad():
                self.result = self._run(inputs)
        except BaseException as error:  # the thread's: told by the caller
            self.failure = error
            for barrier, _ in list(self.fabric.meetings.values()):
                barrier.abort()

    def _run(self, inputs: Sequence[Tensor]) -> list[Any]:
        graph = copy_graph(self.program.graph)
        written_out(graph)
        return self.nodes(graph, inputs, {})

    def nodes(self, graph: Graph, inputs: Sequence[Any], piece: dict[str, int]) -> list[Any]:
        """Run a graph on this rank; `piece` is the number of the piece in a body."""
        nodes = list(graph.nodes)
        env: dict[Node, Any] = dict(zip([n for n in nodes if n.op == "placeholder"], inputs, strict=True))
        for node in nodes:
            if node.op == "call_function":
                args, kwargs = map_arg(bound_arguments(node, {**self.place, **piece}), env.__getitem__)
                env[node] = self.call(node, args, kwargs)
        return [env[n] if isinstance(n, Node) else n for n in nodes[-1].args[0]]  # type: ignore[union-attr]

    def call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if is_collective(node):
            return self.collective(node, args, kwargs.get("out"))
        if is_wait(node):
            return args[0]
        if node.target in SENDS:
            begun = self.start_send(*args), args[0]
            return complete(begun) if node.target is send else begun
        if node.target in RECEIVES:
            out = torch.empty(args[0], dtype=args[1], device=args[2])
            begun = self.start_receive(out, *args[3:]), out
            return complete(begun) if node.target is receive else begun
        if region := region_of(node):
            return self.nodes(region.body, args[0], {TIME: args[1]})
        if not is_random(node):
            return as_traced(node, function_of(node)(*args, **kwargs))
        with self.fabric.random:
            torch.set_rng_state(self.stream)
            made = as_traced(node, function_of(node)(*args, **kwargs))
            self.stream = torch.get_rng_state()
        return made


def run_stages(
    local: LocalGraph, inputs: Sequence[Sequence[Tensor]], room: int = 0, passes: tuple[Pass, ...] = ()
) -> list[tuple[LocalGraph, list[Any]]]:
    """Run the program of every rank, after `passes`, on `inputs[rank]`; by rank its program, and what it returns."""
    fabric, stream = Fabric(local, room, passes), torch.get_rng_state()
    ranks = [Rank(fabric, rank, stream) for rank in range(local.mesh.size)]
    threads = [threading.Thread(target=one.run, args=(inputs[one.rank],), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    failures = [one.failure for one in ranks if one.failure is not None]
    failures.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))  # follows from another's
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return [(one.program, one.result) for one in ranks]
