"""Batches of real bytes: the source text of the Python standard library. Imports numpy and no torch."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .sizes import Config

LIMIT_BYTES = 4 << 20


def write_corpus(path: Path) -> None:
    """Write the text that all ranks of all peers read, as one row of uint8."""
    pieces: list[bytes] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(file.read_bytes())
    np.save(path, np.frombuffer(b"\n".join(pieces)[:LIMIT_BYTES], dtype=np.uint8))


@dataclass(frozen=True)
class Batches:
    """One rank's rows of the global batch of each step, which is the same for any number of ranks."""

    text: NDArray[np.uint8]
    config: Config
    rank: int
    ranks: int

    def at(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs (rows / ranks, context); targets alike for the GPT, (rows / ranks,) for the MLP."""
        config = self.config
        starts = np.random.default_rng([1000, step]).integers(0, len(self.text) - config.context - 1, config.rows)
        local = config.rows // self.ranks
        mine = starts[self.rank * local : (self.rank + 1) * local]
        rows = np.stack([self.text[s : s + config.context + 1] for s in mine]).astype(np.int64)
        targets = rows[:, 1:] if config.kind == "gpt" else rows[:, -1]
        return rows[:, :-1].copy(), targets.copy()
