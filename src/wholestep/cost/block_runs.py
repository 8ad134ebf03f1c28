"""Simulates the blocks of a pipeline in an order: when each begins, and what stages hold.

A stage runs one block at a time. A block begins once the blocks before it of its piece are done and what it reads has
arrived. A message leaves when the block that makes it ends; messages of one channel follow each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import GraphError, PlanError

Task = tuple[str, int]
"""A block by name, and a piece."""
Orders = tuple[tuple[Task, ...], ...]
"""The tasks of each stage, in order."""


@dataclass(frozen=True)
class Spent:
    """Microseconds of a stage, and the part of them in which it waits for collectives."""

    us: float = 0.0
    waited_us: float = 0.0

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """This and `times` the other."""
        return Spent(self.us + times * other.us, self.waited_us + times * other.waited_us)

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
    what its first and its last run take, where collectives run beside these (`passes.peel_pieces`). `label`: what it is
    in its stage. `chunk`: the number of its stage among those of its rank.
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
    label: str = ""
    chunk: int = 0

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
            extra_us = self.first.waited_us - self.waited_us
            return self.first.without(min(extra_us, begin))
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
class BlockRuns:
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
            finding = f"a stage would send {unsent[0]!r} for each piece, and computes it in no block"
            needed = "values that the blocks of a stage compute; parameters that are gathered once a step"
            raise PlanError(finding, needed, "DataParallel(reshard_after_forward=False), or one micro-batch")
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
        ready: list[Task] = []
        for other in self.followers.get(name, ()):
            ready += self._arrived((other, piece), end)
        for message, target, us in block.sends:
            channel = (block.stage, target)
            self.channels[channel] = max(self.channels.get(channel, 0.0), end) + us
            for other in self.readers.get(message, ()):
                ready += self._arrived((other, piece), self.channels[channel])
        return ready

    def _arrived(self, task: Task, when: float) -> list[Task]:
        self.waits[task] -= 1
        self.ready_at[task] = max(self.ready_at.get(task, 0.0), when)
        return [task] if self.waits[task] == 0 else []

    def result(self) -> OrderResult:
        """The order that was run."""
        ordered = sorted(self.spans, key=lambda span: (span[3], span[4]))
        by_stage: list[list[Task]] = [[] for _ in range(self.stages)]
        for stage, name, piece, _, _ in ordered:
            by_stage[stage].append((name, piece))
        orders, end_us = tuple(map(tuple, by_stage)), max(self.free, default=0.0)
        return OrderResult(orders, end_us, tuple(ordered), peaks(self.blocks, orders), tuple(self.waited))


@dataclass
class HeldBytes:
    """What pieces in flight hold on a stage: what a block leaves is there until the last block of its piece has run.
    `remaining`: of each piece, the blocks that have not. `most_bytes`: that were held at once.
    """

    blocks: Mapping[str, BlockCost]
    remaining: dict[int, int]
    held_bytes: int = 0
    most_bytes: int = 0
    of_piece: dict[int, int] = field(default_factory=dict[int, int])

    def adds(self, task: Task) -> int:
        """The most bytes that a task adds to what is there."""
        block = self.blocks[task[0]]
        return max(block.work_bytes, block.holds_bytes - block.frees_bytes)

    def run(self, task: Task) -> None:
        """A task begins and ends."""
        name, piece = task
        self.most_bytes = max(self.most_bytes, self.held_bytes + self.adds(task))
        added = self.blocks[name].holds_bytes - self.blocks[name].frees_bytes
        self.of_piece[piece] = self.of_piece.get(piece, 0) + added
        self.held_bytes += added
        self.remaining[piece] -= 1
        if not self.remaining[piece]:
            self.held_bytes -= self.of_piece[piece]


def peaks(blocks: Mapping[str, BlockCost], orders: Orders) -> tuple[int, ...]:
    """The most bytes that pieces in flight hold on each stage."""
    stage_peaks: list[int] = []
    for tasks in orders:
        in_flight = HeldBytes(blocks, dict(Counter(piece for _, piece in tasks)))
        for task in tasks:
            in_flight.run(task)
        stage_peaks.append(in_flight.most_bytes)
    return tuple(stage_peaks)


def simulate_orders(
    blocks: Mapping[str, BlockCost], pieces: int, orders: Orders, starts: Sequence[float] = (), crowd: float = 1.0
) -> OrderResult:
    """Run given orders, each stage from when it `starts` on. `crowd`: ranks that share a core. Blocks take what they
    take while all ranks compute, and less while some wait. Raises GraphError if stages wait for each other.
    """
    run, at = BlockRuns(blocks, pieces, len(orders), starts), [0] * len(orders)
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


def _share_cores(run: BlockRuns, orders: Orders, at: list[int], crowd: float) -> None:
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
        ends: dict[int, float] = {stage: now + remaining / speed for stage, (_, _, remaining) in running.items()}
        if not ends and not later:
            return
        then: float = min([*later, *ends.values()])
        for stage, (task, begin, remaining) in list(running.items()):
            if ends[stage] <= then:
                del running[stage]
                run.end(task, begin, then)
            else:
                running[stage] = task, begin, remaining - (then - now) * speed
        now = then


def on_shared_cores(blocks: Mapping[str, BlockCost], pieces: int, order: OrderResult, crowd: float) -> OrderResult:
    """`order`, of ranks with a core each, with the time that it takes where ranks share cores."""
    return order if crowd <= 1 else replace(order, us=simulate_orders(blocks, pieces, order.orders, crowd=crowd).us)
