"""Measures the peers of one scene: all are built, then take turns, then are looked at."""

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from . import machine
from .launch import Peer, PeerFailed, Site, end_all
from .results import Measured
from .spec import Spec
from .turns import QUIET_CORES, Turn, order, step_times_ms, usual_figures

BUILD_SECONDS, COMPILE_SECONDS, TURN_SECONDS = 300.0, 1200.0, 180.0
WARM_STEPS = 4
NAP_SECONDS = 0.2
ANCHOR = "floor"


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: turns of each peer.
        steps: steps of a turn that count; one before them does not.
        together: most peers that are held in memory at once.
        patience_seconds: how long a turn may wait for a quiet moment.
    """

    rounds: int = 5
    steps: int = 4
    together: int = 8
    patience_seconds: float = 1.0


@dataclass(frozen=True)
class Said:
    """What happens, for whoever watches: `kind` is building, ready, round, turn or failed."""

    kind: str
    peer: str
    detail: str = ""


Watch = Callable[[Said], None]


@dataclass
class Running:
    """A peer that is up, and what is known of it so far."""

    peer: Peer
    measured: Measured
    turns: list[Turn] = field(default_factory=list[Turn])
    losses: list[float] = field(default_factory=list[float])
    hardware: list[str] = field(default_factory=list[str])
    peak_bytes: int = 0
    last: "TurnTaken | None" = None

    @property
    def name(self) -> str:
        """What the user calls it."""
        return str(self.peer.spec)


@dataclass(frozen=True)
class TurnTaken:
    """One turn as measured, not yet beside the floor's."""

    step_ms: float
    cpu_ms: float
    sent_bytes: float
    update_ms: float
    others: float
    speed_ms: float
    calling_ms: float
    packets_ms: float
    peak_bytes: int


def groups(specs: Sequence[Spec], together: int) -> list[list[Spec]]:
    """Peers that are up at the same time, the floor in each group."""
    anchor = [spec for spec in specs if str(spec) == ANCHOR]
    others = [spec for spec in specs if str(spec) != ANCHOR]
    size = max(1, together - len(anchor))
    return [[*anchor, *others[i : i + size]] for i in range(0, len(others), size)] or [anchor]


def measure(site: Site, specs: Sequence[Spec], effort: Effort, watch: Watch) -> Iterator[dict[str, Measured]]:
    """Measure group after group; what each group gave comes as soon as it is done. The floor keeps the turns of all."""
    floor: tuple[Turn, ...] = ()
    for group in groups(specs, effort.together):
        found = _measure_group(site, group, effort, watch)
        if ANCHOR in found:
            floor = (*floor, *found[ANCHOR].turns)
            found[ANCHOR] = replace(found[ANCHOR], turns=floor)
        yield found


def _measure_group(site: Site, specs: Sequence[Spec], effort: Effort, watch: Watch) -> dict[str, Measured]:
    failed: dict[str, Measured] = {}
    up: dict[str, Running] = {}

    @contextmanager
    def excused(spec: Spec) -> Generator[None]:
        """A peer that fails is ended and told of; the others go on."""
        name = str(spec)
        try:
            yield
        except PeerFailed as failure:
            failed[name] = Measured(name, error=str(failure))
            watch(Said("failed", name, str(failure)))
            if name in up:
                up.pop(name).peer.end()

    peers = [Peer(spec, site) for spec in specs]
    try:
        for peer in peers:
            watch(Said("building", str(peer.spec)))
            with excused(peer.spec):
                up[str(peer.spec)] = _built(peer)
                watch(Said("ready", str(peer.spec), f"{up[str(peer.spec)].measured.first_step_seconds:.1f} s"))
        for number in range(effort.rounds):
            watch(Said("round", f"{number + 1} of {effort.rounds}"))
            for name in order(number, list(up), ANCHOR):
                if name in up:
                    with excused(up[name].peer.spec):
                        _turn(up, name, effort)
                watch(Said("turn", name))
        found: dict[str, Measured] = {}
        common = usual_figures([text for running in up.values() for text in running.hardware])
        for spec in specs:
            with excused(spec):
                if str(spec) in up:
                    found[str(spec)] = _looked_at(up[str(spec)], common)
        if ANCHOR in found:
            floor_ms = found[ANCHOR].simulated_ms
            found = {name: replace(peer, simulated_floor_ms=floor_ms) for name, peer in found.items()}
        return {str(spec): {**failed, **found}[str(spec)] for spec in specs}
    finally:
        end_all(peers)


def _built(peer: Peer) -> Running:
    """Start the ranks and warm up."""
    peer.start()
    built = peer.answers(BUILD_SECONDS)
    patience = COMPILE_SECONDS if peer.spec.compiled else BUILD_SECONDS
    first = peer.ask("run", patience, steps=1)
    rest = peer.ask("run", patience, steps=WARM_STEPS)
    peer.ask("forget", TURN_SECONDS)
    measured = Measured(
        str(peer.spec),
        build_seconds=max(answer["build"] for answer in built),
        first_step_seconds=step_times_ms(first, [a["begin"] for a in first])[0] / 1e3,
        empty_bytes=max(answer["empty"] for answer in built),
    )
    return Running(peer, measured, losses=[*_losses(first), *_losses(rest)])


def _losses(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Means over the ranks that know the loss."""
    rows = zip(*(answer["losses"] for answer in answers), strict=True)
    return [statistics.fmean(loss for loss in row if not math.isnan(loss)) for row in rows]


def _turn(up: dict[str, Running], name: str, effort: Effort) -> None:
    """A turn of one peer; the floor's own is its latest."""
    running = up[name]
    _wait_for_quiet(effort.patience_seconds)
    taken = running.last = _take(running, effort.steps)
    running.peak_bytes = running.peak_bytes or taken.peak_bytes  # nothing was measured before: that takes memory too
    floor = up[ANCHOR].last if ANCHOR in up else None
    beside = floor or taken
    running.turns.append(
        Turn(
            step_ms=taken.step_ms,
            cpu_ms=taken.cpu_ms,
            sent_bytes=taken.sent_bytes,
            others=taken.others,
            speed_ms=taken.speed_ms,
            floor_ms=beside.step_ms,
            floor_update_ms=beside.update_ms,
            floor_others=beside.others,
            calling_ms=taken.calling_ms,
            packets_ms=taken.packets_ms,
        )
    )
    if running.peer.spec.measures:
        running.hardware.append(running.peer.ask("measure", TURN_SECONDS)[0]["hardware"])


def _take(running: Running, steps: int) -> TurnTaken:
    peer = running.peer
    busy, packets, begun = machine.busy_seconds(), machine.packet_seconds(), time.monotonic()
    answers = peer.ask("run", TURN_SECONDS, steps=1 + steps)
    seconds, busy = time.monotonic() - begun, machine.busy_seconds() - busy
    packets = machine.packet_seconds() - packets
    running.losses += _losses(answers)
    cpu = sum(answer["cpu"] for answer in answers)
    speed = sum(answer["speed"] for answer in answers)
    sent = sum(answer["sent"] for answer in answers) / len(answers)
    if peer.site.network.one_interface:
        sent /= len(answers)  # each rank read the sum of all
    return TurnTaken(
        step_ms=statistics.median(step_times_ms(answers, [a["begin"] for a in answers])[1:]),
        cpu_ms=1e3 * cpu / (1 + steps),
        sent_bytes=sent / (1 + steps),
        update_ms=1e3 * max(answer["update"] for answer in answers) / (1 + steps),
        others=max(0.0, busy - cpu - speed) / seconds,
        speed_ms=1e3 * max(answer["speed"] for answer in answers),
        calling_ms=1e3 * sum(answer["calling"] for answer in answers) / (1 + steps),
        packets_ms=1e3 * packets / (1 + steps),
        peak_bytes=max(answer["peak"] for answer in answers),
    )


def _wait_for_quiet(patience_seconds: float) -> None:
    """Until others leave the machine alone for a moment, or patience ends."""
    until = time.monotonic() + patience_seconds
    while time.monotonic() < until:
        busy = machine.busy_seconds()
        time.sleep(NAP_SECONDS)
        if (machine.busy_seconds() - busy) / NAP_SECONDS <= QUIET_CORES:
            return


def _looked_at(running: Running, common: str) -> Measured:
    """What does not depend on time, after all turns. `common`: the usual machine of the group."""
    machines = [common, *running.hardware] if common else []
    answers = running.peer.ask("look", TURN_SECONDS, hardware=machines)
    on_common, *simulated = answers[0]["simulated"] or [0.0]
    turns = running.turns
    if simulated:
        turns = [replace(turn, simulated_ms=ms) for turn, ms in zip(turns, simulated, strict=True)]
    return replace(
        running.measured,
        note=answers[0]["note"],
        rest_bytes=max(answer["rest"] for answer in answers),
        parameter_bytes=max(answer["parameters"] for answer in answers),
        peak_bytes=running.peak_bytes,
        collectives=answers[0]["collectives"],
        tensor_bytes=max(answer["tensors"] for answer in answers),
        simulated_ms=on_common,
        turns=tuple(turns),
        losses=tuple(running.losses),
    )
