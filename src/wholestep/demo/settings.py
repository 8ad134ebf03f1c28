"""What one run of the demo is made of, as a value that survives in `run.json`. Imports no torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STYLES = ("fully_shard", "replicate", "zero1", "zero2", "default", "hybrid")
BACKENDS = ("eager", "inductor")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model (`layers`, `width`, `heads`, `context`), the batch (`rows`) and the text."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int
    text_bytes: int
    steps: int


STANDARD = Sizes(layers=4, width=256, heads=4, context=128, rows=12, text_bytes=1 << 24, steps=60)
QUICK = Sizes(layers=2, width=64, heads=2, context=32, rows=12, text_bytes=1 << 18, steps=6)


@dataclass(frozen=True)
class Settings:
    """All that a rank needs to know.

    `rows` of `sizes` is the global batch, so a run means the same on any number of ranks.
    """

    directory: str
    style: str = "fully_shard"
    ranks: int = 2
    steps: int = STANDARD.steps
    backend: str = "eager"
    seed: int = 0
    compare: bool = True
    resume: bool = False
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    save_every: int = 25
    sizes: Sizes = STANDARD

    @property
    def mesh(self) -> str:
        """The mesh as text: two axes for `hybrid`, else one."""
        return f"replicate={self.ranks // 2},shard=2" if self.style == "hybrid" else f"dp={self.ranks}"

    @property
    def files(self) -> "Files":
        """Where this run's files are."""
        return Files(Path(self.directory))

    def to_json(self) -> str:
        """The settings as JSON text."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Inverse of `to_json`; raises ValueError, KeyError or TypeError for other text."""
        fields: dict[str, Any] = json.loads(text)
        fields["sizes"] = Sizes(**fields["sizes"])
        return cls(**fields)


@dataclass(frozen=True)
class Files:
    """The files of one run, all in one directory."""

    root: Path

    @property
    def run(self) -> Path:
        """The settings the run was started with."""
        return self.root / "run.json"

    @property
    def checkpoint(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoint"

    @property
    def plan(self) -> Path:
        """The printed plan."""
        return self.root / "plan.txt"

    @property
    def program(self) -> Path:
        """The printed program of one rank, with its collectives."""
        return self.root / "program.txt"

    @property
    def events(self) -> Path:
        """Everything rank 0 reported, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def result(self) -> Path:
        """The comparison as JSON."""
        return self.root / "result.json"

    def log(self, rank: int) -> Path:
        """What a rank printed."""
        return self.root / f"rank{rank}.log"

    def all(self) -> list[Path]:
        """Every file and folder a run may have written that exists."""
        named = [self.run, self.checkpoint, self.plan, self.program, self.events, self.result]
        return [path for path in named if path.exists()] + sorted(self.root.glob("rank*.log"))


def problem_with(settings: Settings) -> str | None:
    """What is wrong with these settings and what to choose instead, or None."""
    rows = settings.sizes.rows
    if settings.style not in STYLES:
        return f"--style {settings.style!r} is unknown: choose one of {', '.join(STYLES)}"
    if settings.backend not in BACKENDS:
        return f"--backend {settings.backend!r} is unknown: choose one of {', '.join(BACKENDS)}"
    if settings.ranks < 1 or rows % settings.ranks:
        fits = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        return f"--ranks {settings.ranks} cannot share the batch of {rows} rows equally: choose one of {fits}"
    if settings.style == "hybrid" and settings.ranks % 2:
        return f"--style hybrid needs an even number of ranks (2 shard, the others replicate), not {settings.ranks}"
    if settings.steps < 1:
        return f"--steps {settings.steps} trains nothing: give at least 1"
    return None
