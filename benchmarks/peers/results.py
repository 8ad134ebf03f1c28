"""What was measured, as values that survive in JSON, and what follows from them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .limits import least_bytes, limit, link_bytes_per_second
from .spec import parse
from .turns import Turn, counted, median_ratio


@dataclass(frozen=True)
class Measured:
    """One peer of one scene; bytes and seconds are those of the rank that has most.

    `error` says why there are no turns, `note` what the peer chose by itself. `simulated_ms`: of a step, on the machine
    whose rates are the median of those measured beside all turns; 0 where nothing is simulated. The floor's likewise.
    """

    peer: str
    error: str = ""
    note: str = ""
    build_seconds: float = 0.0
    first_step_seconds: float = 0.0
    rest_bytes: int = 0
    parameter_bytes: int = 0
    peak_bytes: int = 0
    empty_bytes: int = 0
    tensor_bytes: int = 0
    simulated_ms: float = 0.0
    simulated_floor_ms: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])
    turns: tuple[Turn, ...] = ()
    losses: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Where peers were measured: what was trained, over which link, on how many ranks."""

    config: str
    rate: str
    world: int
    shaped: bool = True
    peers: Mapping[str, Measured] = field(default_factory=dict[str, Measured])

    @property
    def name(self) -> str:
        """As in the name of its file."""
        return f"{self.config}-{self.rate}-w{self.world}"

    def merged(self, more: Mapping[str, Measured]) -> "Scene":
        """With what was measured later in place of what was measured before."""
        return replace(self, peers={**self.peers, **more})

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that were not measured, or failed."""
        return [name for name in names if name not in self.peers or self.peers[name].error]

    def to_json(self) -> str:
        """The scene as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Scene":
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        peers: dict[str, dict[str, Any]] = fields.pop("peers")
        return cls(**fields, peers={name: _measured(peer) for name, peer in peers.items()})


def _measured(fields: dict[str, Any]) -> Measured:
    turns: list[dict[str, Any]] = fields.pop("turns")
    losses: list[float] = fields.pop("losses")
    return Measured(**fields, turns=tuple(Turn(**turn) for turn in turns), losses=tuple(losses))


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in milliseconds, bytes of one rank."""

    peer: str
    step_ms: float
    to_floor: float
    limit_ms: float
    to_limit: float
    cpu_ms: float
    calling_ms: float
    packets_ms: float
    sent_bytes: float
    least_bytes: float
    collectives: Mapping[str, int]
    rest_bytes: int
    peak_bytes: int
    tensor_bytes: int
    simulated_ms: float
    simulated_to_floor: float
    simulated_to_step: float
    first_step_seconds: float
    loss_gap: float | None
    quiet: int
    turns: int
    note: str


def read(folder: Path) -> list[Scene]:
    """The scenes that `folder` holds, in the order of their names."""
    return [Scene.from_json(path.read_text()) for path in sorted(folder.glob("*-w*.json"))]


def rows(scene: Scene) -> list[Row]:
    """A row of each peer that ran, in the order in which they were asked for."""
    good = [peer for peer in scene.peers.values() if peer.turns]
    faster = _compiler_gain(scene)
    return [_row(scene, peer, faster if parse(peer.peer).compiled else 1.0) for peer in good]


def _row(scene: Scene, peer: Measured, compute_factor: float) -> Row:
    spec, rate = parse(peer.peer), link_bytes_per_second(scene.rate) if scene.shaped else None
    turns = counted(peer.turns)
    limits = [
        limit(spec, scene.world, peer.parameter_bytes, rate, turn.floor_ms * compute_factor, turn.floor_update_ms).ms
        for turn in turns
    ]
    return Row(
        peer=peer.peer,
        step_ms=statistics.median(turn.step_ms for turn in turns),
        to_floor=median_ratio([(turn.step_ms, turn.floor_ms) for turn in turns]),
        limit_ms=statistics.median(limits),
        to_limit=median_ratio([(turn.step_ms, least) for turn, least in zip(turns, limits, strict=True)]),
        cpu_ms=statistics.median(turn.cpu_ms for turn in turns),
        calling_ms=statistics.median(turn.calling_ms for turn in turns),
        packets_ms=statistics.fmean(turn.packets_ms for turn in turns),
        sent_bytes=statistics.median(turn.sent_bytes for turn in turns),
        least_bytes=least_bytes(spec, scene.world, peer.parameter_bytes),
        collectives=peer.collectives,
        rest_bytes=peer.rest_bytes,
        peak_bytes=peer.peak_bytes - peer.empty_bytes,
        tensor_bytes=peer.tensor_bytes,
        simulated_ms=peer.simulated_ms,
        simulated_to_floor=peer.simulated_ms / peer.simulated_floor_ms if peer.simulated_floor_ms else 0.0,
        simulated_to_step=median_ratio([(turn.simulated_ms, turn.step_ms) for turn in turns]),
        first_step_seconds=peer.first_step_seconds,
        loss_gap=loss_gap(scene, peer),
        quiet=sum(turn.quiet for turn in peer.turns),
        turns=len(peer.turns),
        note=peer.note,
    )


def _compiler_gain(scene: Scene) -> float:
    """What a compiled floor takes beside the plain one: the arithmetic that a compiled peer cannot do without."""
    compiled = scene.peers.get("floor:compile")
    if compiled is None or not compiled.turns:
        return 1.0
    return min(1.0, median_ratio([(turn.step_ms, turn.floor_ms) for turn in counted(compiled.turns)]))


def loss_gap(scene: Scene, peer: Measured) -> float | None:
    """The largest difference of its loss at any step from one process on the whole batch, or else from the first peer
    that exchanges; None for those whose ranks train on their own.
    """
    named = [p for p in scene.peers.values() if p.losses and not parse(p.peer).trains_alone]
    reference = next((p for p in named if parse(p.peer).base == "one"), named[0] if named else None)
    if reference is None or parse(peer.peer).trains_alone:
        return None
    return max(abs(a - b) for a, b in zip(peer.losses, reference.losses, strict=False))
