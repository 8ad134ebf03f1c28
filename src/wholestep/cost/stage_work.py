"""What one stage of a pipeline does in a step, in numbers that are linear in its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.messages import STARTED
from ..graph.nodes import communicates, is_collective
from ..graph.region import region_of
from ..graph.stage_part import transfer
from ..graph.text import collective_bytes
from ..graph.written_out import blocks_in, calls_in
from .block_runs import BlockCost, Spent
from .compute import peak_us
from .extrapolate import extrapolated
from .memory import bytes_held, peak_beside, peak_memory
from .stage_costs import BlockPrices


@dataclass(frozen=True)
class AroundLoop:
    """What the ranks of a stage do outside of the loop, in front of each exchange of stages and after the last one.

    Args:
        alone: of the stage alone.
        common: work that every stage repeats and that grows with all layers (the vector of norms).
    """

    alone: tuple[Spent, ...]
    common: tuple[Spent, ...]


@dataclass(frozen=True)
class StageWork:
    """What the ranks of a stage do.

    Args:
        blocks: what its blocks take and send, in their order.
        outside: what it does around these.
        rest_bytes: that it keeps between steps.
        loop_bytes: that it holds while pieces run, besides what they hold; `kinds` of tensors.
        other_bytes: that it holds at most outside of the loop.
        piece_us, once_us: its arithmetic at the peak rate of the hardware, for each piece and for a step; the second
            number is of what is recomputed.
        piece_sent, once_sent: bytes and number of the collectives along other axes.
    """

    blocks: tuple[BlockCost, ...]
    outside: AroundLoop
    rest_bytes: float
    loop_bytes: float
    other_bytes: float
    kinds: Mapping[str, float]
    piece_us: tuple[float, float]
    once_us: tuple[float, float]
    piece_sent: tuple[float, float]
    once_sent: tuple[float, float]

    def towards(self, larger: StageWork, times: float, times_all: float) -> StageWork:
        """This plus `times` the difference to `larger`; `times_all` for what depends on the layers of all stages."""
        grown = extrapolated(self, larger, times)
        common = extrapolated(self.outside.common, larger.outside.common, times_all)
        return replace(grown, outside=replace(grown.outside, common=common))


def exchanges(local: LocalGraph) -> dict[str, Node]:
    """What stages exchange in the program of all of them, outside of loops, and the loops that they share, by name."""
    return {node.name: node for node in local.graph.nodes if _is_exchange(node, local.stage_axis)}


def _is_exchange(node: Node, axis: str) -> bool:
    loop = loop_of(node)
    shares_all = is_collective(node) and node.args[-1] == axis
    return node.target is transfer or (loop is not None and loop.stages is not None) or shares_all


def work_of(
    plain: LocalGraph, program: LocalGraph, position: Mapping[str, int], costs: Mapping[str, BlockCost],
    prices: BlockPrices,
) -> StageWork:  # fmt: skip
    """The work of a stage, from its program as `partition` leaves it, and after all passes. `position` of all exchanges
    by name; `costs` of its blocks, in their order.
    """
    name, calls = next(iter(calls_in(plain.graph).items()), ("", list[Node]()))
    loop = peak_beside(plain, name) if name else peak_memory(program)
    held_bytes = zip((n for n in program.graph.nodes if n.op == "call_function"), bytes_held(program), strict=True)
    outside_bytes = [size for node, size in held_bytes if meta.piece(node) is None]
    bodies = [block.body for block in blocks_in(calls)]
    each, behind = [peak_us(body, prices.hardware) for body in bodies], position[name] + 1 if name else 0
    walk = _Walk(program, position, behind, costs, prices)
    inside = [node for body in bodies for node in body.nodes]
    merged = [node for block in blocks_in(program.graph.nodes) for node in block.body.nodes]
    once = [node for node in program.graph.nodes if meta.block(node) is None]
    return StageWork(
        walk.blocks, walk.outside, loop.rest_bytes, loop.size_bytes, max(outside_bytes, default=loop.rest_bytes),
        dict[str, float](loop.by_kind()), (sum(us for us, _ in each), sum(again for _, again in each)),
        peak_us(plain.graph, prices.hardware, region_of),
        (_sent_bytes(plain, inside), _collectives(program, merged)),
        (_sent_bytes(plain, plain.graph.nodes), _collectives(program, once)),
    )  # fmt: skip


def _sent_bytes(program: LocalGraph, nodes: Iterable[Node]) -> float:
    return float(sum(collective_bytes(node, program)[1] for node in nodes if _is_beside(program, node)))


def _collectives(program: LocalGraph, nodes: Iterable[Node]) -> float:
    return float(sum(_is_beside(program, node) for node in nodes))


def _is_beside(program: LocalGraph, node: Node) -> bool:
    """True for a collective along another axis than that of stages."""
    return communicates(node) and node.args[-1] != program.stage_axis


@dataclass
class _Walk:
    """A clock that goes through the program of a stage which waits for no other one.

    `behind`: the number of exchanges up to the loop. `alone`, `common`: what runs in front of each exchange and after
    the last one, as in `AroundLoop`. `runs`: the runs of blocks that are written out, by block and piece.
    `loose`: what ran since, between the calls of the loop.
    """

    program: LocalGraph
    position: Mapping[str, int]
    behind: int
    costs: Mapping[str, BlockCost]
    prices: BlockPrices
    runs: dict[tuple[str, int], Spent] = field(default_factory=dict[tuple[str, int], Spent])
    loose: Spent = field(default_factory=Spent)
    pieces: int = 0

    def __post_init__(self) -> None:
        self.alone, self.common = ([Spent() for _ in range(len(self.position) + 1)] for _ in range(2))
        graph = self.program.graph
        self.clock = self.prices.clock(graph)
        remaining = Counter(key for node in graph.nodes if (key := _run_of(node)) is not None)
        self.pieces = 1 + max((piece for _, piece in remaining), default=0)
        left, at, run, is_inside = remaining.total(), 0, None, False
        for node in graph.nodes:
            if node.op != "call_function" or node.target in STARTED:
                continue
            if is_inside and not left:
                is_inside, self.alone[at], self.loose = False, self.alone[at].plus(self.loose), Spent()
            key = _run_of(node)
            if key is not None:
                at, is_inside, left = self.behind, True, left - 1
                remaining[key] -= 1
            if key is not None and region_of(node):
                self.clock.compute(self.costs[key[0]].us)
                self.clock.host = self.clock.now
                continue
            if node.name in self.position:
                at = self.position[node.name] + 1
                if not is_collective(node):
                    continue
            if key not in (None, run):
                run, self.clock.host = key, self.clock.now
            self._note(node, at, run, is_inside)
            run = run if run is not None and remaining[run] else None
        self.alone[at] = self.alone[at].plus(self.loose)

    @property
    def outside(self) -> AroundLoop:
        """What ran around the blocks."""
        return AroundLoop(tuple(self.alone), tuple(self.common))

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        """The costs of the blocks, with their first and last runs where these are written out."""
        blocks: list[BlockCost] = []
        for name, cost in self.costs.items():
            first, last = self.runs.get((name, 0)), self.runs.get((name, self.pieces - 1))
            blocks.append(replace(cost, needs=(), after=(), first=first, last=last))
        return tuple(blocks)

    def _note(self, node: Node, at: int, run: tuple[str, int] | None, is_inside: bool) -> None:
        spent = self._run(node)
        if run is not None:
            self.runs[run], self.loose = self.runs.get(run, Spent()).plus(self.loose).plus(spent), Spent()
            return
        if is_inside:
            self.loose = self.loose.plus(spent)
            return
        into = self.common if meta.stage(node) is None else self.alone
        into[at] = into[at].plus(spent)

    def _run(self, node: Node) -> Spent:
        before, waited = self.clock.now, self.clock.waited
        self.clock.run(node)
        return Spent(self.clock.now - before, self.clock.waited - waited)


def _run_of(node: Node) -> tuple[str, int] | None:
    """The run of a block that a node is a part of, where that is written out: the block, and the piece."""
    block, piece = meta.block(node), meta.piece(node)
    return None if block is None or piece is None else (block.name, piece)


def is_chain(local: LocalGraph) -> bool:
    """True if stages hand values to their neighbours alone while pieces run, and outside of loops the first and the
    last stage to each other alone: then further stages between them are like those that are there.
    """
    last = local.mesh.axis_size(local.stage_axis) - 1
    loops = [loop for node in local.graph.nodes if (loop := loop_of(node)) is not None and loop.stages is not None]
    if len(loops) != 1:
        return False
    stages = loops[0].stages
    assert stages is not None, "of stages"
    near = all(abs(message.source - message.target) == 1 for message in stages.parts[0].messages.values())
    ends = {(node.args[1], node.args[2]) for node in local.graph.nodes if node.target is transfer}
    turn = [len(part.blocks) == (1 if part.stage == last else 2) for part in stages.parts]
    return near and ends <= {(0, last), (last, 0)} and all(turn) and all(
        meta.stage(node) in (None, 0, last) or not is_collective(node) or node.args[-1] != local.stage_axis
        for node in local.graph.nodes
    )  # fmt: skip
