"""What commands share: the step that they work on, options, output files and errors."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar, cast

import typer
from rich.console import Console

from wholestep.plan.storage_styles import STYLES

from .screen import Screen

if TYPE_CHECKING:
    from torch import nn

    from wholestep.hardware.hardware import Hardware
    from wholestep.mesh import Mesh

P = ParamSpec("P")
R = TypeVar("R")
Style = StrEnum("Style", list(STYLES))
_LONGEST = 1000  # characters of a line of an error: a name may be anything
FULLY_SHARD, ZERO1 = Style("fully_shard"), Style("zero1")
RETURNS = "(train_step, model, optimizer, batch), or (train_step, arguments) with or without keyword arguments"

Hf = Annotated[
    str | None, typer.Option("--hf", help="In place of MODEL: a transformers config, by preset name or file.")
]
Layers = Annotated[int | None, typer.Option(min=1, help="With --hf: number of layers to keep.")]
AsyncTp = Annotated[
    bool, typer.Option("--async-tp", help="Fuse products and collectives of it, on GPUs of a node; rounded otherwise.")
]
Tp = Annotated[
    list[str] | None,
    typer.Option(
        "--tp",
        help="Tensor parallel: pattern=colwise|rowwise|..., repeatable; model: its own plan; sequence: that, with "
        "sequence and loss parallel; auto.",
    ),
]
HardwareName = Annotated[str | None, typer.Option(help="A preset (dgx-h100, ...) or a file of `wholestep calibrate`.")]


@dataclass(frozen=True)
class Target:
    """A training step, called as `step(*args, **kwargs)`; `name` is its name on the command line.
    `with_layers`: the step of the model with so many layers, for a batch that may be another.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    with_layers: Callable[[int], Target] | None = None

    def models(self) -> list[nn.Module]:
        """The modules among the arguments."""
        from torch import nn

        return [argument for argument in (*self.args, *self.kwargs.values()) if isinstance(argument, nn.Module)]


def loaded(command: Callable[P, R]) -> Callable[P, R]:
    """`command`, which first imports all of wholestep, and torch: `--help` needs neither."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        importlib.import_module("wholestep.public")
        return command(*args, **kwargs)

    return run


def refuse(text: str) -> NoReturn:
    """End the command with an error message and exit status 2."""
    lines = (line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..." for line in text.splitlines())
    shown = "\n".join(lines).encode("utf-8", "backslashreplace").decode()
    typer.echo(f"wholestep: {shown}", err=True)
    raise typer.Exit(2)


def check_given(target: str | None, hf: str | None) -> None:
    """Refuse two models, and none."""
    if target is not None and hf is not None:
        refuse(f"both {target} and --hf {hf}: needed one of them")
    if target is None and hf is None:
        refuse("no model: needed MODEL, as my_script.py:build, or --hf, as --hf gpt2")


@contextmanager
def working() -> Generator[Screen]:
    """A progress display. A WholestepError ends the command with its text."""
    from wholestep.errors import WholestepError

    shown = Screen(Console(stderr=True))
    try:
        yield shown
    except WholestepError as error:
        shown.close()
        refuse(str(error))
    finally:
        shown.close()


def check_outputs(**files: Path | None) -> None:
    """Refuse paths that cannot be written, by option, before the long work; missing folders are created."""
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        first = seen.setdefault(path.absolute(), option)
        if first != option:
            refuse(f"--{option} {path}: --{first} writes there already")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_dir = path.is_dir()
        except (OSError, ValueError) as error:  # also a null in the name
            refuse(f"--{option} {path}: folder {path.parent} cannot be created: {_reason(error)}")
        if is_dir:
            refuse(f"--{option} {path} is a folder: needed the name of a file, as {path / 'step.json'}")
        written_to = path if path.exists() else path.parent
        if not os.access(written_to, os.W_OK):
            refuse(f"--{option} {path}: no permission to write {written_to}")


def write_output(screen: Screen, path: Path | None, write: Callable[[Path], object]) -> None:
    """Call `write` with `path`, if that is given, and note it."""
    if path is None:
        return
    try:
        write(path)
    except (OSError, ValueError) as error:  # also a null in the name
        refuse(f"{str(path)!r} cannot be written: {_reason(error)}")
    screen.note(f"written to {path}")


def _reason(error: OSError | ValueError) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def check_mesh(mesh: str) -> Mesh:
    """The mesh; raises MeshError for a malformed one, before the long work."""
    from wholestep.mesh import Mesh

    return Mesh(mesh)


def hardware_of(name: str | None) -> Hardware:
    """The hardware of a preset or file; the default for None."""
    from wholestep.hardware.hardware import Hardware

    if name is None:
        return Hardware.default()
    return Hardware.load(name) if is_file(Path(name)) else Hardware.preset(name)


def is_file(path: Path) -> bool:
    """Whether there is a file; False for a name that the file system does not take."""
    try:
        return path.is_file()
    except OSError:
        return False


def from_function(target: str) -> Target:
    """The step that `file.py:function` or `module:function` returns."""
    returned = _function(target)()
    parts = list(cast(tuple[Any, ...], returned)) if isinstance(returned, tuple) else list[Any]()
    if len(parts) == 4:
        return Target(target, parts[0], tuple(parts[1:]))
    if len(parts) not in (2, 3) or not isinstance(parts[1], (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        described = f"({kinds})" if isinstance(returned, tuple) else type(cast(object, returned)).__name__
        refuse(f"{target} returned {described}: needed {RETURNS}")
    return Target(target, parts[0], tuple(cast(Sequence[Any], parts[1])), parts[2] if len(parts) == 3 else {})


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon:
        refuse(f"{target!r} names no function: needed file.py:function or module:function")
    if not where.endswith(".py") and not all(part.isidentifier() for part in where.split(".")):
        refuse(f"{where!r} is no module: needed file.py:function or module:function")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        refuse(f"{where!r} cannot be imported: {error}")
    function = getattr(module, name, None)
    if not callable(function):
        refuse(f"{where!r} has no function {name!r}")
    return cast(Callable[[], Any], function)


def _from_file(file: Path) -> Any:
    if not is_file(file):
        refuse(f"there is no file {file}")
    sys.path.insert(0, str(file.parent.absolute()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
