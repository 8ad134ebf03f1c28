"""Orders of blocks of a pipeline, by simulation: named ones, and list scheduling.

A stage runs one block at a time. A block begins once the blocks before it of its piece are done and what it reads has
arrived. A message leaves when the block that makes it ends; messages of one channel follow each other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import GraphError, PlanError
from ..tuning import TUNING

Task = tuple[str, int]
"""A block by name, and a piece."""
Orders = tuple[tuple[Task, ...], ...]
"""The tasks of each stage, in order."""


@dataclass(frozen=True)
class Spent:
    """Microseconds of a stage, and the part of them in which it waits for collectives."""

    us: float = 0.0
    waited_us: float = 0.0

    def plus(self, more: Spent, times: float = 1.0) -> Spent:
        """This and `times` another."""
        return Spent(self.us + times * more.us, self.waited_us + times * more.waited_us)

    def without(self, waited_us: float) -> Spent:
        """This with so much less waiting, down to none."""
        less = min(max(waited_us, 0.0), self.waited_us)
        return Spent(self.us - less, self.waited_us - less)


@dataclass(frozen=True)
class BlockCost:
    """What a block takes: `needs` are messages, `after` blocks of its stage, for the same piece. `sends`: messages, the
    stage that each goes to, and its microseconds. `holds_bytes`: of what it leaves to later blocks of its piece.
    `frees_bytes`: of what earlier ones have left, and it reads last. `work_bytes`: the most that it adds to what is
    there when it begins. `waited_us`: the part of `us` in which it waits for collectives. `first`, `last`:
    what its first and its last run take, where collectives run beside these (`passes.peel_pieces`).
    """

    stage: int
    us: float
    level: int = 0
    is_backward: bool = False
    is_filler: bool = False
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    sends: tuple[tuple[str, int, float], ...] = ()
    holds_bytes: int = 0
    work_bytes: int = 0
    waited_us: float = 0.0
    first: Spent | None = None
    last: Spent | None = None
    frees_bytes: int = 0

    @property
    def steady(self) -> BlockCost:
        """The same where all runs are alike: orders are chosen by those, before anything is written out."""
        return replace(self, first=None, last=None)

    @cached_property
    def spent(self) -> Spent:
        """What each of its runs takes, but for the first and the last."""
        return Spent(self.us, self.waited_us)

    def run(self, number: int, pieces: int, begin: float) -> Spent:
        """Its run `number`, for one of `pieces`. What the first one waits for has been under way since the loop began,
        `begin` microseconds ago.
        """
        if number == pieces - 1 and self.last is not None:
            return self.last
        if number == 0 and self.first is not None:
            more = self.first.waited_us - self.waited_us
            return self.first.without(min(more, begin))
        return self.spent


@dataclass(frozen=True)
class OrderResult:
    """A simulated order. `spans`: stage, block, piece, begin and end in microseconds. `peak_bytes` of each stage counts
    what blocks of pieces in flight hold. `waited_us`: of each stage, for collectives.
    """

    orders: Orders
    us: float
    spans: tuple[tuple[int, str, int, float, float], ...]
    peak_bytes: tuple[int, ...]
    waited_us: tuple[float, ...] = ()

    @property
    def bubble(self) -> float:
        """The share of the time of all stages in which they run nothing."""
        busy = sum(end - begin for _, _, _, begin, end in self.spans)
        return 1 - busy / (self.us * len(self.orders)) if self.us else 0.0


@dataclass
class _Run:
    """The state of a simulated run. `ready_at`: when the last of what a task waits for is there; `waits`: for how many
    things. `starts`: when each stage begins.
    """

    blocks: Mapping[str, BlockCost]
    pieces: int
    stages: int
    starts: Sequence[float] = ()
    free: list[float] = field(init=False)
    waits: dict[Task, int] = field(init=False)
    ready_at: dict[Task, float] = field(default_factory=dict[Task, float])
    channels: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    runs: dict[str, int] = field(default_factory=dict[str, int])
    waited: list[float] = field(init=False)
    spans: list[tuple[int, str, int, float, float]] = field(default_factory=list[tuple[int, str, int, float, float]])

    def __post_init__(self) -> None:
        self.starts = self.starts or [0.0] * self.stages
        self.free, self.waited = list(self.starts), [0.0] * self.stages
        self.readers: dict[str, list[str]] = {}
        self.followers: dict[str, list[str]] = {}
        for name, block in self.blocks.items():
            for message in block.needs:
                self.readers.setdefault(message, []).append(name)
            for before in block.after:
                self.followers.setdefault(before, []).append(name)
        sent = {message for block in self.blocks.values() for message, _, _ in block.sends}
        if unsent := sorted(self.readers.keys() - sent):
            found = f"a stage would send {unsent[0]!r} for each piece, and computes it in no block"
            needed = "values that the blocks of a stage compute; parameters that are gathered once a step"
            raise PlanError(found, needed, "DataParallel(reshard_after_forward=False), or one micro-batch")
        count = {name: len(block.needs) + len(block.after) for name, block in self.blocks.items()}
        self.waits = {(name, piece): count[name] for piece in range(self.pieces) for name in self.blocks}
        self.ready_at = {task: 0.0 for task, waits in self.waits.items() if waits == 0}

    def run(self, task: Task, begin: float) -> list[Task]:
        """Run a task; returns the tasks that wait for nothing more."""
        return self.end(task, begin, begin + self.begin(task, begin))

    def begin(self, task: Task, begin: float) -> float:
        """A task begins; returns the microseconds that it takes."""
        name = task[0]
        block, number = self.blocks[name], self.runs.get(name, 0)
        spent = block.run(number, self.pieces, begin - self.starts[block.stage])
        self.runs[name] = number + 1
        self.waited[block.stage] += spent.waited_us
        return spent.us

    def end(self, task: Task, begin: float, end: float) -> list[Task]:
        """A task ends; returns the tasks that wait for nothing more."""
        name, piece = task
        block = self.blocks[name]
        self.free[block.stage] = end
        self.spans.append((block.stage, name, piece, begin, end))
        found: list[Task] = []
        for other in self.followers.get(name, ()):
            found += self._arrived((other, piece), end)
        for message, target, us in block.sends:
            channel = (block.stage, target)
            self.channels[channel] = max(self.channels.get(channel, 0.0), end) + us
            for other in self.readers.get(message, ()):
                found += self._arrived((other, piece), self.channels[channel])
        return found

    def _arrived(self, task: Task, when: float) -> list[Task]:
        self.waits[task] -= 1
        self.ready_at[task] = max(self.ready_at.get(task, 0.0), when)
        return [task] if self.waits[task] == 0 else []

    def result(self) -> OrderResult:
        ordered = sorted(self.spans, key=lambda span: (span[3], span[4]))
        orders: list[list[Task]] = [[] for _ in range(self.stages)]
        for stage, name, piece, _, _ in ordered:
            orders[stage].append((name, piece))
        made = tuple(map(tuple, orders))
        return OrderResult(
            made, max(self.free, default=0.0), tuple(ordered), peaks(self.blocks, made), tuple(self.waited)
        )


def peaks(blocks: Mapping[str, BlockCost], orders: Orders) -> tuple[int, ...]:
    """The most bytes that pieces in flight hold on each stage: what a block leaves is there until the last block of its
    stage and piece has run.
    """
    found: list[int] = []
    for tasks in orders:
        left: dict[int, int] = {}
        for _, piece in tasks:
            left[piece] = left.get(piece, 0) + 1
        held, most, of_piece = 0, 0, dict[int, int]()
        for name, piece in tasks:
            most = max(most, held + blocks[name].work_bytes)
            more = blocks[name].holds_bytes - blocks[name].frees_bytes
            of_piece[piece] = of_piece.get(piece, 0) + more
            held += more
            most = max(most, held)
            left[piece] -= 1
            if not left[piece]:
                held -= of_piece[piece]
        found.append(most)
    return tuple(found)


def simulate_orders(
    blocks: Mapping[str, BlockCost], pieces: int, orders: Orders, starts: Sequence[float] = (), crowd: float = 1.0
) -> OrderResult:
    """Run given orders, each stage from when it `starts` on. `crowd`: ranks that share a core. Blocks take what they
    take while all ranks compute, and less while some wait. Raises GraphError if stages wait for each other.
    """
    run, at = _Run(blocks, pieces, len(orders), starts), [0] * len(orders)
    moved = crowd <= 1
    if not moved:
        _share_cores(run, orders, at, crowd)
    while moved:
        moved = False
        for stage, tasks in enumerate(orders):
            while at[stage] < len(tasks) and run.waits[tasks[at[stage]]] == 0:
                task = tasks[at[stage]]
                run.run(task, max(run.free[stage], run.ready_at[task]))
                at[stage] += 1
                moved = True
    for stage, tasks in enumerate(orders):
        if at[stage] < len(tasks):
            raise GraphError(f"stage {stage} waits for ever in front of {tasks[at[stage]]}", "an order that ends")
    return run.result()


def _share_cores(run: _Run, orders: Orders, at: list[int], crowd: float) -> None:
    """Run `orders` from `at` on, where a task is as fast as the cores that waiting ranks leave let it be."""
    now: float = 0.0
    running = dict[int, tuple[Task, float, float]]()  # of a stage: its task, begin, and microseconds left
    while True:
        later: list[float] = []
        for stage, tasks in enumerate(orders):
            if stage in running or at[stage] == len(tasks) or run.waits[tasks[at[stage]]]:
                continue
            task = tasks[at[stage]]
            begin = max(run.free[stage], run.ready_at[task])
            if begin > now:
                later.append(begin)
            else:
                running[stage] = task, now, run.begin(task, now)
                at[stage] += 1
        speed = min(crowd, len(orders) / len(running)) if running else 1.0
        ends: dict[int, float] = {stage: now + left / speed for stage, (_, _, left) in running.items()}
        if not ends and not later:
            return
        then: float = min([*later, *ends.values()])
        for stage, (task, begin, left) in list(running.items()):
            if ends[stage] <= then:
                del running[stage]
                run.end(task, begin, then)
            else:
                running[stage] = task, begin, left - (then - now) * speed
        now = then


def on_shared_cores(blocks: Mapping[str, BlockCost], pieces: int, found: OrderResult, crowd: float) -> OrderResult:
    """`found`, an order of ranks with a core each, with the time that it takes where ranks share cores."""
    return found if crowd <= 1 else replace(found, us=simulate_orders(blocks, pieces, found.orders, crowd=crowd).us)


def list_schedule(
    blocks: Mapping[str, BlockCost], pieces: int, stages: int, limits: Sequence[int], forward_first: bool = False,
    waiting: Sequence[int] | None = None,
) -> OrderResult:  # fmt: skip
    """List scheduling: a stage that is free runs what is ready, backwards before forwards (`forward_first`: the other
    way), earlier pieces first, fillers where nothing else is, or those of more than `waiting` pieces wait. It begins a
    piece while fewer than its limit are in flight, in the order of pieces: so the first one that is not through can
    always go on, and the schedule ends.
    """
    run = _Run(blocks, pieces, stages)
    ready: list[list[Task]] = [[] for _ in range(stages)]
    left = {
        (s, i): sum(b.stage == s and not b.is_filler for b in blocks.values())
        for s in range(stages)
        for i in range(pieces)
    }
    whole, flying, begun = dict(left), [set[int]() for _ in range(stages)], [0] * stages
    for task in run.ready_at:
        ready[blocks[task[0]].stage].append(task)
    events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]
    heapq.heapify(events)

    def rank(task: Task, overdue: bool) -> tuple[bool, bool, int, int]:
        block = blocks[task[0]]
        return block.is_filler != overdue, block.is_backward == forward_first, task[1], -block.level

    while events:
        now, stage = heapq.heappop(events)
        if run.free[stage] > now:
            continue
        admitted = flying[stage] | ({begun[stage]} if len(flying[stage]) < limits[stage] else set[int]())
        able = [t for t in ready[stage] if run.ready_at[t] <= now and (t[1] in admitted or blocks[t[0]].is_filler)]
        if not able:
            later = [run.ready_at[t] for t in ready[stage] if run.ready_at[t] > now]
            if later:
                heapq.heappush(events, (min(later), stage))
            continue
        late = {t[1] for t in able if blocks[t[0]].is_filler}
        overdue = waiting is not None and len(late) > waiting[stage]
        task = min(able, key=lambda one: rank(one, overdue))
        ready[stage].remove(task)
        if not blocks[task[0]].is_filler:
            key = (stage, task[1])
            if left[key] == whole[key]:
                flying[stage].add(task[1])
                begun[stage] += 1
            left[key] -= 1
            if not left[key]:
                flying[stage].discard(task[1])
        for other in run.run(task, now):
            at = blocks[other[0]].stage
            ready[at].append(other)
            heapq.heappush(events, (max(run.ready_at[other], run.free[at]), at))
        heapq.heappush(events, (run.free[stage], stage))
    if len(run.spans) < len(blocks) * pieces:
        raise GraphError("list scheduling ends before all blocks have run", "limits of at least one piece")
    return run.result()


def gpipe(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """All forwards of a stage, then all backwards: blocks by level, each for all pieces."""
    names = sorted(blocks, key=lambda name: (blocks[name].level, blocks[name].is_filler))
    orders = tuple(
        tuple((n, piece) for n in names if blocks[n].stage == stage for piece in range(pieces))
        for stage in range(stages)
    )
    return simulate_orders(blocks, pieces, orders)


def one_forward_one_backward(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """A backward as soon as there is one; stage `s` of `n` has at most `n - s` pieces in flight."""
    return list_schedule(blocks, pieces, stages, [stages - stage for stage in range(stages)])


def interleaved(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """The order of Megatron-LM for several chunks on each stage: pieces in groups of as many as there are stages, a
    group goes through all chunks of a stage. Where chunks are not alike on all stages, or pieces do not divide into
    groups: list scheduling with as many pieces in flight.
    """
    chunks, orders = _chunks(blocks, stages), list[tuple[Task, ...]]()
    count = max(1, round(len(blocks) / (2 * stages)))
    if chunks is None or pieces % stages:
        return list_schedule(blocks, pieces, stages, [stages * count] * stages)
    for stage, (forward, backward) in enumerate(chunks):
        ahead = min((stages - stage - 1) * 2 + (len(forward) - 1) * stages, pieces * len(forward))
        groups = [range(first, first + stages) for first in range(0, pieces, stages)]
        ups = [(name, piece) for group in groups for name in forward for piece in group]
        downs = [(name, piece) for group in groups for name in backward for piece in group]
        tasks = ups[:ahead]
        for up, down in zip(ups[ahead:], downs, strict=False):
            tasks += [up, down]
        tasks += downs[len(ups) - ahead :]
        orders.append(tuple(dict.fromkeys(tasks)))  # the last chunk is forward and backward at once
    made = _if_it_ends(blocks, pieces, orders)
    return made or list_schedule(blocks, pieces, stages, [stages * count] * stages)


def _if_it_ends(blocks: Mapping[str, BlockCost], pieces: int, orders: Sequence[tuple[Task, ...]]) -> OrderResult | None:
    """An order that was written for chains of stages. None where blocks wait for each other otherwise, as those that
    several stages read.
    """
    try:
        return simulate_orders(blocks, pieces, tuple(orders))
    except GraphError:
        return None


def _chunks(blocks: Mapping[str, BlockCost], stages: int) -> list[tuple[list[str], list[str]]] | None:
    """For each stage its chunks in the order of the forward and in that of the backward; None if they are not alike."""
    found: list[tuple[list[str], list[str]]] = []
    turn = (max(block.level for block in blocks.values()) + 1) // 2
    for stage in range(stages):
        own = sorted((n for n, b in blocks.items() if b.stage == stage), key=lambda name: blocks[name].level)
        forward = [name for name in own if blocks[name].level <= turn]
        backward = [name for name in own if blocks[name].level >= turn]
        found.append((forward, backward))
    alike = {len(half) for pair in found for half in pair}
    return found if len(alike) == 1 else None


def zero_bubble(blocks: Mapping[str, BlockCost], pieces: int, stages: int) -> OrderResult:
    """`1f1b` in which gradients of weights, as fillers, wait: those of stage `s` until `s` pieces later, so that no
    stage holds more than the first (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism"). Where stages have other
    blocks than one of each kind: list scheduling.
    """
    limits = [stages - stage for stage in range(stages)]
    listed = list_schedule(blocks, pieces, stages, limits, waiting=range(stages))
    orders: list[tuple[Task, ...]] = []
    for stage in range(stages):
        own = sorted((n for n, b in blocks.items() if b.stage == stage), key=lambda name: blocks[name].level)
        up = [name for name in own if not blocks[name].is_backward]
        down = [name for name in own if blocks[name].is_backward and not blocks[name].is_filler]
        late = [name for name in own if blocks[name].is_filler]
        if len(down) > 1 or len(up) > 1 or len(late) > 1:
            return listed
        ahead = min(stages - 1 - stage, pieces)
        tasks = [(name, piece) for piece in range(ahead) for name in up]
        for piece in range(pieces):
            tasks += [(name, piece + ahead) for name in up if piece + ahead < pieces]
            tasks += [(name, piece) for name in down]
            tasks += [(name, piece - stage) for name in late if piece >= stage]
        tasks += [(name, piece) for piece in range(max(0, pieces - stage), pieces) for name in late]
        orders.append(tuple(tasks))
    made = _if_it_ends(blocks, pieces, orders)
    return listed if made is None else min(made, listed, key=lambda found: found.us)


NAMED: dict[str, Callable[[Mapping[str, BlockCost], int, int], OrderResult]] = {
    "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved, "zero_bubble": zero_bubble,
}  # fmt: skip
"""Orders by name. Blocks of `zero_bubble` have fillers."""
APART = ("auto", "zero_bubble")
"""Orders in which gradients of weights may be blocks of their own."""


def simulated_orders(
    whole: Mapping[str, BlockCost], cut: Mapping[str, BlockCost], pieces: int, stages: int, crowd: float = 1.0
) -> dict[str, OrderResult]:
    """All orders that are tried, by name. `cut`: the blocks with fillers apart; `crowd`: as in `simulate_orders`."""
    found = {
        "1f1b": one_forward_one_backward(whole, pieces, stages), "gpipe": gpipe(whole, pieces, stages),
        "interleaved": interleaved(whole, pieces, stages), "zero_bubble": zero_bubble(cut, pieces, stages),
    }  # fmt: skip
    for wide in sorted({stages, 2 * stages - 1, pieces}):
        for name, blocks in (("whole", whole), ("fillers", cut)):
            for slope in (0, 1, 2):
                limits = [max(1, min(wide, pieces) - slope * stage) for stage in range(stages)]
                label = f"list of {name}, {wide} in flight, {slope} fewer a stage"
                found[label] = list_schedule(blocks, pieces, stages, limits)
        limits = [max(1, min(wide, pieces) - stage) for stage in range(stages)]
        label = f"list of fillers, {wide} in flight or waiting"
        found[label] = list_schedule(cut, pieces, stages, limits, waiting=range(stages))
    return {name: on_shared_cores(blocks_of(one.orders, whole, cut), pieces, one, crowd) for name, one in found.items()}


def blocks_of(orders: Orders, whole: Mapping[str, BlockCost], cut: Mapping[str, BlockCost]) -> Mapping[str, BlockCost]:
    """The blocks that orders run: those of `cut`, with fillers apart, if they run a filler."""
    fillers = cut.keys() - whole.keys()
    return cut if any(name in fillers for tasks in orders for name, _ in tasks) else whole


def fitting(
    found: Mapping[str, OrderResult], beside: Sequence[float] = (), more_share: float = TUNING.order_memory_share
) -> list[str]:
    """The names of orders that hold at most this share more of pieces in flight than `1f1b`, on the stage that then
    holds most; the fastest first. `beside`: bytes that each stage holds besides.
    """
    beside = beside or [0] * len(found["1f1b"].orders)
    most = {name: max(map(sum, zip(one.peak_bytes, beside, strict=True)), default=0) for name, one in found.items()}
    limit = most["1f1b"] + more_share * max(found["1f1b"].peak_bytes, default=0)
    fits = [name for name in found if most[name] <= limit]
    return sorted(fits, key=lambda name: (found[name].us, most[name]))


def others_to_try(found: Mapping[str, OrderResult], chosen: str, beside: Sequence[float] = ()) -> tuple[str, ...]:
    """Orders beside the `chosen` one that compute the same bits: every block adds up the pieces one after the other.
    Each once, the fastest first; what holds much more than `1f1b` is left out.
    """
    seen = {found[chosen].orders: chosen}
    for name in fitting(found, beside, TUNING.tried_memory_share) if _in_turn(found[chosen].orders) else ():
        if _in_turn(found[name].orders):
            seen.setdefault(found[name].orders, name)
    return tuple(name for name in seen.values() if name != chosen)


def _in_turn(orders: Orders) -> bool:
    """True if every block runs for the pieces one after the other."""
    last: dict[str, int] = {}
    for name, piece in (task for tasks in orders for task in tasks):
        if piece < last.get(name, 0):
            return False
        last[name] = piece
    return True
