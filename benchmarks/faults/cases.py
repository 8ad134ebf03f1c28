"""Jobs and kills, drawn from seeds. Imports no torch."""

import random
from dataclasses import dataclass
from typing import Literal

STYLES = ("replicate", "zero1", "zero2", "fully_shard", "hybrid")
SCHEDULES = ("auto", "across_steps", "none")
SCHEDULERS = ("one_cycle", "cosine")
SEMANTICS = ("per_rank", "global")
MESHES = {1: ("r=1,s=1",), 2: ("r=2,s=1", "r=1,s=2"), 3: ("r=3,s=1", "r=1,s=3"), 4: ("r=2,s=2",)}
STEPS = 64  # of a job
LIVES = 11  # of a job: each but the last ends in a kill
MOST_CALLS = 7  # of a life, before it is killed
MOST_OPERATIONS = 30  # on files, in one save of one rank
LONGEST_START_S = 1.5
LONGEST_GRACE_S = 0.3


@dataclass(frozen=True)
class Setup:
    """What a curve of losses follows from. `mesh` is "" where one axis is meant; with `two_sizes` every fourth batch
    has fewer rows, so that a step holds two programs.
    """

    ranks: int
    style: str
    mesh: str
    schedule: str
    scheduler: str
    semantics: str
    two_sizes: bool


@dataclass(frozen=True)
class Kill:
    """One kill of `rank`, or with `everyone` of all ranks at that moment.

    `where`: "start" is `moment` seconds after the ranks were started, the first step at the latest; "step" is after the
    call number `call`, a `moment` of a step later; "save" is within the first save from that call on: after a `moment`
    of the time that a save takes, or with `operation` before that operation on a file or folder. Other ranks live on
    for `grace_s`.
    """

    rank: int
    everyone: bool
    where: Literal["start", "step", "save"]
    call: int
    moment: float
    operation: int
    grace_s: float


@dataclass(frozen=True)
class Case:
    """A job with its kills: it saves after every `every` calls and keeps `keep` checkpoints; `wait=False` saves beside
    the next steps.
    """

    seed: int
    setup: Setup
    every: int
    keep: int
    wait: bool
    kills: tuple[Kill, ...]


def case_of(seed: int) -> Case:
    """The case of a seed, the same in every run."""
    draw = random.Random(seed)
    ranks, style = draw.choice((1, 2, 2, 3, 4)), draw.choice(STYLES)
    mesh = draw.choice(MESHES[ranks]) if style == "hybrid" else ""
    setup = Setup(
        ranks,
        style,
        mesh,
        draw.choice(SCHEDULES),
        draw.choice(SCHEDULERS),
        draw.choice(SEMANTICS),
        draw.random() < 0.25,
    )
    every, keep, wait = draw.randint(1, 3), draw.randint(1, 3), draw.random() < 0.5
    return Case(seed, setup, every, keep, wait, tuple(_kill(draw, ranks) for _ in range(LIVES - 1)))


def _kill(draw: random.Random, ranks: int) -> Kill:
    places: tuple[Literal["save", "step", "start"], ...] = ("save", "step", "start")
    where = draw.choices(places, (60, 30, 10))[0]
    operation = draw.randint(1, MOST_OPERATIONS) if where == "save" and draw.random() < 0.5 else 0
    moment = draw.random() * (LONGEST_START_S if where == "start" else 1.0)
    grace = 0.0 if draw.random() < 0.3 else draw.random() * LONGEST_GRACE_S
    call = draw.randint(1, MOST_CALLS - 3)
    return Kill(draw.randrange(ranks), draw.random() < 0.5, where, call, moment, operation, grace)
