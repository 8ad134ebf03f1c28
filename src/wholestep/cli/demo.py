"""`wholestep demo`: options in, ranks started, what they report shown, exit status out."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from wholestep.demo.settings import QUICK, STANDARD, Settings, problem_with

from . import output
from .target import Style

Backend = StrEnum("Backend", ["eager", "inductor"])


def demo(
    style: Annotated[Style | None, typer.Option(help="Where tensors rest (default: fully_shard).")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes, one thread each (default: 2).")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps in all (default: 60, with --quick 6).")] = None,
    backend: Annotated[Backend | None, typer.Option(help="What runs each rank's program (default: eager).")] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where the run's files go.")] = Path("runs/demo"),
    seed: Annotated[int | None, typer.Option(help="Of the weights and the order of the data (default: 0).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --dir, on any style and number of ranks.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Train one process, DDP and FSDP2 beside it.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps, for tests.")] = False,
) -> None:
    """Train a byte-level GPT on Python's own source text, from a step written for one device.

    Ranks are processes of this machine that talk over gloo. After training, one process, DDP, FSDP2 and wholestep are
    compared on the same data. Ctrl-C saves a checkpoint; --resume continues from it.
    """
    directory = directory.expanduser().absolute()
    asked = {"style": style and style.value, "ranks": ranks, "steps": steps, "backend": backend and backend.value}
    given = {name: value for name, value in asked.items() if value is not None}
    if resume:
        settings = _saved(directory, seed, quick)
    else:
        sizes = QUICK if quick else STANDARD
        settings = Settings(directory=str(directory), sizes=sizes, steps=sizes.steps, seed=seed or 0)
    settings = replace(settings, directory=str(directory), resume=resume, compare=compare, **given)
    problem = problem_with(settings)
    if problem:
        _refuse(problem)
    output.make_folder(directory, f"--dir {directory}")
    from .run import run_demo

    raise typer.Exit(run_demo(settings))


def _saved(directory: Path, seed: int | None, quick: bool) -> Settings:
    """The settings of the run to be resumed."""
    files = Settings(directory=str(directory)).files
    if not files.run.exists():
        _refuse(f"--resume: {directory} holds no run (no {files.run.name}); leave --resume out to start one")
    try:
        settings = Settings.from_json(files.run.read_text())
    except (ValueError, KeyError, TypeError) as error:
        _refuse(f"--resume: {files.run} is damaged ({error}); leave --resume out to start again")
    if not files.checkpoint.is_dir():
        _refuse(f"--resume: the run in {directory} has saved no checkpoint yet; leave --resume out to start again")
    if seed is not None and seed != settings.seed:
        _refuse(f"--seed {seed}: the run in {directory} was started with seed {settings.seed}; leave --seed out")
    if quick and settings.sizes != QUICK:
        _refuse(f"--quick: the run in {directory} was started without it; leave --quick out")
    return settings


def _refuse(text: str) -> NoReturn:
    typer.echo(f"wholestep demo: {text}", err=True)
    raise typer.Exit(2)
