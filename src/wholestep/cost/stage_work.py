"""What one stage of a pipeline does in a step, in numbers that are linear in its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch.fx import Node

from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import loop_of
from ..graph.nodes import communicates, is_collective
from ..graph.stage_part import part_of, transfer
from ..graph.text import collective_bytes
from .compute import peak_us
from .memory import bytes_held, memory_at
from .stage_costs import BlockPrices
from .stage_orders import BlockCost

T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Microseconds of a stage, and the part of them in which it waits for collectives."""

    us: float = 0.0
    waited_us: float = 0.0

    def plus(self, more: Spent, times: float = 1.0) -> Spent:
        """This and `times` another."""
        return Spent(self.us + times * more.us, self.waited_us + times * more.waited_us)


@dataclass(frozen=True)
class StageWork:
    """What the ranks of a stage do.

    Args:
        whole, apart: what its blocks take and send, in their order; `apart` has gradients of weights in blocks of
            their own.
        between: what it does outside of the loop, in front of each exchange of stages and after the last one.
        common: the same of what all stages do alike, whose size depends on the layers of all of them.
        further: the same for each piece above two, of loops that stages do not share.
        rest_bytes: that it keeps between steps.
        loop_bytes: that it holds while pieces run, besides what they hold; `kinds` of tensors.
        other_bytes: that it holds at most outside of the loop.
        piece_us, once_us: its arithmetic at the peak rate of the hardware, for each piece and for a step; the second
            number is of what is recomputed.
        piece_sent, once_sent: bytes and number of the collectives along other axes.
    """

    whole: tuple[BlockCost, ...]
    apart: tuple[BlockCost, ...]
    between: tuple[Spent, ...]
    common: tuple[Spent, ...]
    further: tuple[Spent, ...]
    rest_bytes: float
    loop_bytes: float
    other_bytes: float
    kinds: Mapping[str, float]
    piece_us: tuple[float, float]
    once_us: tuple[float, float]
    piece_sent: tuple[float, float]
    once_sent: tuple[float, float]

    def towards(self, more: StageWork, times: float, times_all: float) -> StageWork:
        """This plus `times` the difference to `more`; `times_all` for what depends on the layers of all stages."""
        kinds = {kind: (self.kinds.get(kind, 0.0), more.kinds.get(kind, 0.0)) for kind in {**self.kinds, **more.kinds}}
        made = _line(replace(self, kinds={}), replace(more, kinds={}), times)
        common = _line(self.common, more.common, times_all)
        return replace(
            made, common=common, kinds={kind: few + (many - few) * times for kind, (few, many) in kinds.items()}
        )


def _line(few: T, more: T, times: float) -> T:
    """`few` plus `times` the difference to `more`, number by number."""
    made: Any = few
    if isinstance(few, tuple):
        two = cast("tuple[tuple[Any, ...], tuple[Any, ...]]", (few, more))
        made = tuple(_line(a, b, times) for a, b in zip(*two, strict=True))
    elif is_dataclass(few) and not isinstance(few, type):
        changed = {one.name: _line(getattr(few, one.name), getattr(more, one.name), times) for one in fields(few)}
        made = replace(few, **changed)
    elif isinstance(few, (int, float)) and few != more:
        made = max(few + (cast(float, more) - few) * times, 0.0)
    return made


def exchanges(local: LocalGraph) -> dict[str, Node]:
    """What stages exchange in the program of all of them, outside of loops, and the loops that they share, by name."""
    return {node.name: node for node in local.graph.nodes if _is_exchange(node, local.stage_axis)}


def _is_exchange(node: Node, axis: str) -> bool:
    loop = loop_of(node)
    shares_all = is_collective(node) and node.args[-1] == axis
    return node.target is transfer or (loop is not None and loop.stages is not None) or shares_all


def work_of(
    program: LocalGraph, position: Mapping[str, int], whole: Sequence[BlockCost], apart: Sequence[BlockCost],
    prices: BlockPrices,
) -> StageWork:  # fmt: skip
    """The work of a stage with `program`. `position` of all exchanges by name; `whole` and `apart` are the costs of its
    blocks.
    """
    at = next(node for node in program.graph.nodes if part_of(node) is not None)
    part = part_of(at)
    assert part is not None, "a part"
    loop, kinds = memory_at(program, at), dict[str, float]()
    for one in loop.live:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.size_bytes
    kinds["activation"] = kinds.get("activation", 0.0) - part.peak_bytes
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    others = [size for node, size in zip(calls, bytes_held(program), strict=True) if node is not at]
    each = [peak_us(block.body, prices.hardware) for block in part.blocks]
    outside = _without_blocks(program)
    piece_sent = _sent(program, (node for block in part.blocks for node in block.body.nodes))
    return StageWork(
        tuple(replace(one, needs=(), after=()) for one in whole),
        tuple(replace(one, needs=(), after=()) for one in apart),
        *_between(outside, position, prices), loop.rest_bytes, loop.size_bytes - part.peak_bytes,
        max(others, default=loop.rest_bytes), kinds, (sum(once for once, _ in each), sum(again for _, again in each)),
        peak_us(outside.graph, prices.hardware), piece_sent, _sent(program, program.graph.nodes),
    )  # fmt: skip


def _sent(program: LocalGraph, nodes: Iterable[Node]) -> tuple[float, float]:
    sent = [
        collective_bytes(node, program)[1]
        for node in nodes if communicates(node) and node.args[-1] != program.stage_axis
    ]  # fmt: skip
    return float(sum(sent)), float(len(sent))


def _without_blocks(program: LocalGraph) -> LocalGraph:
    """`program` with what it runs outside of the loop alone."""
    made = program.copy()
    for node in made.graph.nodes:
        if (part := part_of(node)) is not None:
            node.target = replace(part, blocks=(), actions=())
    return made


def _between(
    program: LocalGraph, position: Mapping[str, int], prices: BlockPrices
) -> tuple[tuple[Spent, ...], tuple[Spent, ...], tuple[Spent, ...]]:
    """What runs around each exchange: of this stage, of all stages alike, and for further pieces. Changes loops."""
    clock, at = prices.clock(program.graph), 0
    own, common, further = ([Spent() for _ in range(len(position) + 1)] for _ in range(3))

    def ran(node: Node) -> Spent:
        before, waited = clock.now, clock.waited
        clock.run(node)
        return Spent(clock.now - before, clock.waited - waited)

    for node in program.graph.nodes:
        name = node.name.removesuffix("_send")
        if node.op != "call_function":
            continue
        if name in position:
            at = position[name] + 1
            if not is_collective(node):
                continue
        into = common if meta.stage(node) is None else own
        if (loop := loop_of(node)) is None:
            into[at] = into[at].plus(ran(node))
            continue
        node.target = replace(loop, pieces=2)
        two = ran(node)
        node.target = replace(loop, pieces=3)
        into[at], further[at] = into[at].plus(two), further[at].plus(ran(node)).plus(two, -1)
    return tuple(own), tuple(common), tuple(further)


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
    near = all(abs(one.source - one.target) == 1 for one in stages.parts[0].messages.values())
    ends = {(node.args[1], node.args[2]) for node in local.graph.nodes if node.target is transfer}
    turn = [len(part.blocks) == (1 if part.stage == last else 2) for part in stages.parts]
    return near and ends <= {(0, last), (last, 0)} and all(turn) and all(
        meta.stage(node) in (None, 0, last) or not is_collective(node) or node.args[-1] != local.stage_axis
        for node in local.graph.nodes
    )  # fmt: skip
