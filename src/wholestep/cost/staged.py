"""The step of a pipeline from the work of its stages: an order of blocks, what surrounds it, times and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..graph.stage_part import StageParts
from ..graph.text import human, seconds, table
from ..precision import StepPrecision
from .block_runs import BlockCost, OrderResult, Orders, on_shared_cores, simulate_orders
from .memory import LiveTensor, PeakMemory
from .simulation import SimulationResult
from .stage_orders import NAMED, blocks_of, simulated_orders
from .stage_work import StageWork
from .timeline import STAGE, Span, Timeline

BEFORE, AFTER = "before pieces", "after pieces"
_Chunk = tuple[StageWork, int | None]  # the work of a stage, and its equal layers where they are known
Variant = tuple[Sequence[Sequence[_Chunk]], Mapping[str, BlockCost]]
"""The chunks of each rank, and the blocks of all: with gradients of weights in blocks of their own, or not."""


@dataclass(frozen=True)
class Exchange:
    """An exchange of stages outside of loops: of all ranks of the axis, or a message from `source` to `target`, in
    microseconds; or the loop itself. `phase`: of the step, when stages get there.
    """

    is_loop: bool = False
    source: int | None = None
    target: int | None = None
    us: float = 0.0
    phase: str = "forward"


@dataclass(frozen=True)
class StageOfStep:
    """What the ranks at one coordinate of the axis spend and hold in a step; `busy_us` without waits for collectives,
    `idle_us`: in which they wait for other stages. `in_flight`: pieces at most, over all chunks. `layers`: equal layers
    of each chunk, where they are known.
    """

    layers: tuple[int, ...]
    busy_us: float
    waited_us: float
    idle_us: float
    in_flight: int
    rest_bytes: int
    peak_bytes: int
    kinds: Mapping[str, int]


@dataclass(frozen=True)
class StagedStep:
    """A simulated step of a pipeline.

    Args:
        order: of the blocks, by name; `tried`: microseconds of the loop in each order that was simulated.
        step_us: until the last stage ends.
        stages: by coordinate of the axis.
        model_us, again_us: arithmetic at the peak rate of the hardware, of a rank on average; and what is recomputed.
        sent_bytes, collectives: of the rank that sends most in collectives.
        spans: of all stages.
        precision: of the whole step.
    """

    order: str
    tried: Mapping[str, float]
    pieces: int
    step_us: float
    stages: tuple[StageOfStep, ...]
    model_us: float
    again_us: float
    sent_bytes: int
    collectives: int
    spans: tuple[Span, ...]
    precision: StepPrecision | None = None

    @property
    def bubble(self) -> float:
        """The share of the step in which a rank waits for other stages, on average."""
        idle = sum(stage.idle_us for stage in self.stages) / len(self.stages)
        return idle / self.step_us if self.step_us else 0.0

    @property
    def waited_us(self) -> float:
        """Microseconds in which a rank waits for collectives, on average."""
        return sum(stage.waited_us for stage in self.stages) / len(self.stages)

    @property
    def fullest(self) -> StageOfStep:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def timeline(self) -> Timeline:
        """All stages below each other, with their bubbles."""
        once, again = (us / self.step_us if self.step_us else 0.0 for us in (self.model_us, self.again_us))
        idle = self.bubble * self.step_us
        took = SimulationResult(self.step_us, idle + self.waited_us, once, 0.0, once + again)
        full = self.fullest
        live = tuple(LiveTensor(kind, kind, (), "", size) for kind, size in full.kinds.items())
        at = f"{STAGE}{self.stages.index(full)}"
        return Timeline(self.spans, took, (), PeakMemory(full.peak_bytes, full.rest_bytes, at, "", live))

    def __str__(self) -> str:
        head = ("stage", "layers", "computes", "collectives", "bubble", "in flight", "stored", "peak")
        rows = [head] + [
            (
                str(number), str(sum(stage.layers)) if stage.layers else "", seconds(stage.busy_us / 1e6),
                seconds(stage.waited_us / 1e6), f"{stage.idle_us / self.step_us:.1%}", str(stage.in_flight),
                human(stage.rest_bytes), human(stage.peak_bytes),
            )
            for number, stage in enumerate(self.stages)
        ]  # fmt: skip
        return "\n".join(table(rows, left=()))


def staged_step(
    variants: Sequence[Variant], exchanges: Sequence[Exchange], pieces: int, order: str | StageParts, crowd: float,
    peak_bytes: tuple[int, ...] = (),
) -> StagedStep:  # fmt: skip
    """The step of ranks in the last of `variants` where the order moves gradients of weights, else in the first.
    `order`: by name, `auto`, or that of a program, whose pieces hold at most `peak_bytes` on each rank. Without blocks,
    stages run the whole batch one after the other. `crowd`: ranks that share a core.
    """
    (works, full), (works_apart, apart) = variants[0], variants[-1]
    ranks = len(works)
    beside = [sum(work.loop_bytes for work, _ in several) for several in works]
    name, loop, tried = _ordered(full, apart, pieces, beside, order, crowd)
    costs = blocks_of(loop.orders, full, apart)
    works = works_apart if costs is apart else works
    outside = [[work.outside for work, _ in variant] for variant in works]
    spans, waited = list[Span](), [0.0] * ranks
    now: list[float] = [0.0] * ranks
    ends = dict[int, float]()  # of each stage: when its last block ends

    def spend(at: int) -> None:
        for rank, several in enumerate(outside):
            common = max((work.common[at] for work in several), key=lambda run: run.us)
            alone = [work.alone[at] for work in several]
            if at and exchanges[at - 1].is_loop:  # beside the runs of a rank's later chunks, collectives went on
                alone = [run.without(now[rank] - ends.get(rank + i * ranks, now[rank])) for i, run in enumerate(alone)]
            spent = [*alone, common]
            us = sum(run.us for run in spent)
            waited[rank] += sum(run.waited_us for run in spent)
            if us > 0:
                what, phase = _between(exchanges, at, rank)
                spans.append(Span(what, what, f"{STAGE}{rank}", now[rank], us, phase, stage=rank))
                now[rank] += us

    for at, exchange in enumerate(exchanges):
        spend(at)
        if exchange.is_loop:
            begin = min(now)
            delayed = simulate_orders(costs, pieces, loop.orders, [us - begin for us in now], crowd)
            loop = replace(delayed, peak_bytes=peak_bytes or delayed.peak_bytes)
            for rank, block, _, _, end in loop.spans:
                stage = rank + costs[block].chunk * ranks
                ends[stage] = max(ends.get(stage, begin), begin + end)
                now[rank] = max(now[rank], begin + end)
            spans += _of_blocks(loop, costs, begin)
            waited = [us + added for us, added in zip(waited, loop.waited_us, strict=True)]
        elif exchange.source is None or exchange.target is None:
            now = [max(now)] * ranks
        else:
            now[exchange.source] += exchange.us
            now[exchange.target] = max(now[exchange.target], now[exchange.source])
    spend(len(exchanges))
    step_us = max(now)
    ran = [sum(span.us for span in spans if span.stage == rank) for rank in range(ranks)]
    by_rank = tuple(_stage(rank, works[rank], loop, ran[rank], waited[rank], step_us) for rank in range(ranks))
    arithmetic = [
        sum(pieces * work.piece_us[i] + work.once_us[i] for several in works for work, _ in several) / ranks
        for i in range(2)
    ]
    sent = max(
        (sum(pieces * w.piece_sent[0] + w.once_sent[0] for w, _ in several),
         sum(pieces * w.piece_sent[1] + w.once_sent[1] for w, _ in several)) for several in works
    )  # fmt: skip
    ordered = tuple(sorted(spans, key=lambda span: span.start_us))
    return StagedStep(
        name, tried, pieces, step_us, by_rank, arithmetic[0], arithmetic[1], round(sent[0]), round(sent[1]), ordered
    )


def _between(exchanges: Sequence[Exchange], at: int, rank: int) -> tuple[str, str]:
    """What a rank does in front of exchange number `at`, and the phase of the step."""
    places = [i for i, exchange in enumerate(exchanges) if exchange.is_loop]
    if places:
        return (AFTER, "update") if at > places[0] else (BEFORE, "forward")
    before = exchanges[at - 1].phase if at else "forward"
    if before == "forward" and at < len(exchanges) and exchanges[at].phase != before and exchanges[at].source == rank:
        return "forward and backward", "backward"  # of the last stage, which answers at once
    return before, before


def _ordered(
    full: Mapping[str, BlockCost], apart: Mapping[str, BlockCost], pieces: int, beside: Sequence[float],
    order: str | StageParts, crowd: float,
) -> tuple[str, OrderResult, Mapping[str, float]]:  # fmt: skip
    """The order's name, the order, and the simulated microseconds of each order that was tried. Every run of a block
    takes what it takes in the middle of the loop. `beside`: bytes that each rank holds besides those of pieces.
    """
    ranks = len(beside)
    steady, cut = ({name: cost.steady for name, cost in costs.items()} for costs in (full, apart))
    if isinstance(order, StageParts):
        simulated = simulate_orders(cut if order.has_fillers else steady, pieces, order.tasks)
        return order.order, simulated, order.simulated_us
    if not full:
        return order, OrderResult(((),) * ranks, 0.0, (), (0,) * ranks, (0.0,) * ranks), {}
    if order == "auto":
        tried = simulated_orders(steady, cut, pieces, ranks, crowd)
        best = tried.fitting(beside)[0]
        return best, tried[best], tried.us
    costs = cut if order == "zero_bubble" else steady
    loop = on_shared_cores(costs, pieces, NAMED[order](costs, pieces, ranks), crowd)
    return order, loop, {order: loop.us}


def _of_blocks(loop: OrderResult, costs: Mapping[str, BlockCost], begin: float) -> list[Span]:
    spans: list[Span] = []
    for stage, name, piece, start, end in loop.spans:
        cost, of_piece, stream = costs[name], f"{name} of piece {piece}", f"{STAGE}{stage}"
        phase = "backward" if cost.is_backward or cost.is_filler else "forward"
        spans.append(Span(of_piece, cost.label, stream, begin + start, end - start, phase, stage=stage))
    return spans


def _stage(
    rank: int, works: Sequence[_Chunk], loop: OrderResult, ran: float, waited_us: float, step_us: float
) -> StageOfStep:
    rest, loop_bytes = (sum(getattr(work, name) for work, _ in works) for name in ("rest_bytes", "loop_bytes"))
    other_bytes = max(rest + work.other_bytes - work.rest_bytes for work, _ in works)
    kinds: dict[str, float] = {}
    for work, _ in works:
        for kind, size in work.kinds.items():
            kinds[kind] = kinds.get(kind, 0.0) + size
    pieces = loop.peak_bytes[rank]
    kinds["activation"] = kinds.get("activation", 0.0) + pieces
    layers = tuple(count for _, count in works if count is not None)
    return StageOfStep(
        layers, ran - waited_us, waited_us, step_us - ran, in_flight(loop.orders, rank) or 1, round(rest),
        round(max(loop_bytes + pieces, other_bytes)),
        {kind: round(size) for kind, size in sorted(kinds.items(), key=lambda item: -item[1]) if size >= 1},
    )  # fmt: skip


def in_flight(orders: Orders, rank: int) -> int:
    """The most pieces that a rank has begun and not ended, each of its chunks by itself."""
    remaining: dict[int, int] = {}
    for _, piece in orders[rank]:
        remaining[piece] = remaining.get(piece, 0) + 1
    totals, flying, most = dict(remaining), 0, 0
    for _, piece in orders[rank]:
        flying += remaining[piece] == totals[piece]
        most = max(most, flying)
        remaining[piece] -= 1
        flying -= not remaining[piece]
    return most


def chain(works: Sequence[StageWork], ranks: int) -> dict[str, BlockCost]:
    """The blocks of a chain of stages, of which each of `ranks` has every so manieth: a block of the forward, one of
    the backward, and perhaps one for gradients of weights; the last stage has no forward of its own.
    """
    last, blocks = len(works) - 1, dict[str, BlockCost]()
    halves = [_halves(work, stage == last) for stage, work in enumerate(works)]
    for stage, (forward, backward, weights) in enumerate(halves):
        labels = {"forward": "forward", "backward": "forward and backward" if stage == last else "backward"}
        names = {kind: f"{STAGE}{stage}, {label}" for kind, label in labels.items()}
        before, behind = (halves[stage - 1] if stage else None), (halves[stage + 1] if stage < last else None)
        up = tuple(_message(stage - 1, stage, i) for i in range(len((before[0] or before[1]).sends if before else ())))
        down = tuple(_message(stage + 1, stage, i) for i in range(len(behind[1].sends if behind else ())))
        shared = {"stage": stage % ranks, "chunk": stage // ranks}
        if forward is not None:
            sends = tuple(
                (_message(stage, stage + 1, i), (stage + 1) % ranks, s[2]) for i, s in enumerate(forward.sends)
            )
            blocks[names["forward"]] = replace(
                forward, level=stage, label="forward", is_backward=False, needs=up, after=(), sends=sends, **shared
            )
        sends = tuple((_message(stage, stage - 1, i), (stage - 1) % ranks, s[2]) for i, s in enumerate(backward.sends))
        needs, after = (up, ()) if forward is None else (down, (names["forward"],))
        shared["level"] = 2 * last - stage
        blocks[names["backward"]] = replace(
            backward, label=labels["backward"], is_backward=True, needs=needs, after=after, sends=sends, **shared
        )
        if weights is not None:
            after = tuple(name for name in names.values() if name in blocks)
            name = f"{STAGE}{stage}, weights"
            blocks[name] = replace(weights, label="weights", needs=(), after=after, sends=(), **shared)
    return blocks


def _halves(work: StageWork, is_last: bool) -> tuple[BlockCost | None, BlockCost, BlockCost | None]:
    """The forward, the backward, and the gradients of weights where they are apart."""
    weights = next((block for block in work.blocks if block.is_filler), None)
    parts = [block for block in work.blocks if not block.is_filler]
    return (None, parts[0], weights) if is_last else (parts[0], parts[1], weights)


def _message(source: int, target: int, number: int) -> str:
    return f"{source} to {target}, {number}"
