"""Writes what each stage of a compile returns to the folder that WHOLESTEP_DUMP names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..graph.graph import LocalGraph
from ..passes.base import Watch


@dataclass
class Dump:
    """The files of one compile: `rank0/train_step-1-2-plan.txt` is the plan of the first capture of `train_step`."""

    folder: str | None
    name: str
    rank: int
    capture: int
    passes: int = 0

    @staticmethod
    def of_compile(name: str, rank: int, capture: int) -> Dump:
        """Where WHOLESTEP_DUMP says; nothing is written where it is not set."""
        return Dump(os.environ.get("WHOLESTEP_DUMP"), name, rank, capture)

    def write(self, stage: str, value: object) -> None:
        """Write what a stage returned, as text."""
        if self.folder:
            path = Path(self.folder) / f"rank{self.rank}" / f"{self.name}-{self.capture}-{stage}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    @property
    def watch(self) -> Watch | None:
        """Writes the program after each pass."""
        return self._after_pass if self.folder else None

    def _after_pass(self, name: str, local: LocalGraph) -> None:
        self.passes += 1
        self.write(f"3-pass-{self.passes:02}-{name}", local)
