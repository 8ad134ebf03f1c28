"""The data: the source text of the installed Python standard library, as bytes."""

import sysconfig
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class Corpus:
    """Text as one row of uint8, with batches drawn by (seed, step) so that any run can be continued."""

    text: Tensor

    @cached_property
    def fingerprint(self) -> str:
        """Length and CRC-32, to recognise another text when a run is resumed."""
        return f"{len(self.text)}-{zlib.crc32(self.text.numpy().tobytes()):08x}"

    def batch(
        self, step: int, *, seed: int, rows: int, context: int, rank: int = 0, ranks: int = 1
    ) -> tuple[Tensor, Tensor]:
        """This rank's rows of the global batch of one step.

        Args:
            step: number of the step, from 0.
            seed: of the run.
            rows: of the global batch; `ranks` must divide it.
            context: bytes per row.
            rank: whose rows; ranks take consecutive rows, so the global batch does not depend on `ranks`.
            ranks: how many ranks share the batch.

        Returns:
            tokens and targets, both (rows / ranks, context) int64; targets are tokens one byte later.
        """
        draw = np.random.default_rng([seed, step])
        starts = draw.integers(0, len(self.text) - context - 1, size=rows)
        local = rows // ranks
        mine = starts[rank * local : (rank + 1) * local]
        window = torch.stack([self.text[int(at) : int(at) + context + 1] for at in mine]).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def standard_library(limit_bytes: int = 1 << 24) -> Corpus:
    """Every module of the standard library in sorted order, tests left out, cut at `limit_bytes`."""
    root = Path(sysconfig.get_path("stdlib"))
    pieces: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        if size >= limit_bytes:
            break
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            pieces.append(path.read_bytes())
            size += len(pieces[-1])
    text = np.frombuffer(b"\n".join(pieces)[:limit_bytes], dtype=np.uint8)
    return Corpus(torch.from_numpy(text.copy()))
