"""The options of a run. Imports no torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Style = Literal["fully_shard", "replicate", "zero1", "zero2", "default", "hybrid"]
Backend = Literal["eager", "inductor"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model (`layers`, `width`, `heads`, `context`), of the global batch (`rows`) and of the text."""

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
class Options:
    """All that a rank needs to know. The batch is global, so a run means the same on any number of ranks."""

    style: Style
    backend: Backend
    ranks: int
    steps: int
    seed: int
    directory: Path
    resume: bool
    compare: bool
    sizes: Sizes

    @property
    def mesh(self) -> str:
        """Two axes for `hybrid`, else one."""
        return f"replicate={self.ranks // 2},shard=2" if self.style == "hybrid" else f"dp={self.ranks}"

    @property
    def checkpoint(self) -> Path:
        """The folder of checkpoints."""
        return self.directory / "checkpoint"


def parse(words: Sequence[str] | None = None) -> Options:
    """Read the command line; ends the process with status 2 and a message where that cannot be run."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a byte-level GPT on Python's own source text, from a step written for one device.",
        epilog="Ranks are processes of this machine, on gloo. Ctrl-C saves a checkpoint; --resume goes on from it.",
    )
    parser.add_argument("--style", choices=get_args(Style), default="fully_shard", help="where tensors rest")
    parser.add_argument("--backend", choices=get_args(Backend), default="eager", help="what runs a rank's program")
    ranks = int(os.environ.get("WORLD_SIZE", "2"))  # torchrun sets it
    parser.add_argument("--ranks", type=int, default=ranks, help="processes, of one thread each (2)")
    parser.add_argument("--steps", type=int, help="steps in all (60, with --quick 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the data (0)")
    parser.add_argument("--dir", dest="directory", type=Path, default=Path("runs/demo"), help="folder of its files")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, with any style and ranks")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="do not train the other ways too")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps, for tests")
    given: dict[str, Any] = vars(parser.parse_args(words))
    given["sizes"] = QUICK if given.pop("quick") else STANDARD
    given["steps"] = given["sizes"].steps if given["steps"] is None else given["steps"]
    given["directory"] = given["directory"].absolute()
    options = Options(**given)
    problem = problem_with(options) or no_room_in(options.directory)
    if problem is not None:
        parser.error(problem)
    return options


def problem_with(options: Options) -> str | None:
    """Say what is wrong and what to choose instead; None where nothing is."""
    ranks, rows = options.ranks, options.sizes.rows
    if ranks < 1 or rows % ranks:
        fits = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        return f"--ranks {ranks} cannot share the batch of {rows} rows equally: choose one of {fits}"
    if options.style == "hybrid" and ranks % 2:
        return f"--style hybrid needs an even number of ranks (2 shard, the others replicate), not {ranks}"
    if options.steps < 1:
        return f"--steps {options.steps} trains nothing: give at least 1"
    if options.resume and not options.checkpoint.is_dir():
        return f"--resume: {options.directory} holds no checkpoint; leave --resume out to start a run"
    return None


def no_room_in(directory: Path) -> str | None:
    """Make the folder; say why nothing can be written there, None where it can."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--dir {directory}: the folder cannot be made: {error.strerror}"
    return None if os.access(directory, os.W_OK) else f"--dir {directory}: no permission to write there"
