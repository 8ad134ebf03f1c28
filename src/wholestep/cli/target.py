"""The step that a command works on: from a function of the user, or a transformers config."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from rich.console import Console

from wholestep.plan.storage_styles import STYLES

from .screen import Screen, screen

if TYPE_CHECKING:
    from torch import nn

    from wholestep.hardware.hardware import Hardware

Style = StrEnum("Style", list(STYLES))
FULLY_SHARD = Style("fully_shard")
RETURNS = "(train_step, model, optimizer, batch), or (train_step, arguments) with or without keyword arguments"

Hf = Annotated[
    str | None, typer.Option("--hf", help="In place of MODEL: a transformers config, by preset name or file.")
]
Batch = Annotated[int, typer.Option(min=1, help="With --hf: sequences for each rank.")]
Seq = Annotated[int | None, typer.Option(min=2, help="With --hf: tokens in each (2048, or the model's limit if less).")]
Layers = Annotated[int | None, typer.Option(min=1, help="With --hf: number of layers to keep.")]


@dataclass(frozen=True)
class Target:
    """A training step, called as `step(*args, **kwargs)`; `name` is its name on the command line."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def models(self) -> list[nn.Module]:
        """The modules among the arguments."""
        from torch import nn

        return [given for given in (*self.args, *self.kwargs.values()) if isinstance(given, nn.Module)]


def refuse(text: str) -> NoReturn:
    """End the command with an error message and exit status 2."""
    typer.echo(f"wholestep: {text}", err=True)
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

    shown = screen(Console(stderr=True))
    try:
        yield shown
    except WholestepError as error:
        shown.close()
        refuse(str(error))
    finally:
        shown.close()


def check_mesh(mesh: str) -> None:
    """Raise MeshError for a malformed mesh, before the long work."""
    from wholestep.mesh import Mesh

    Mesh(mesh)


def hardware_of(given: str | None) -> Hardware:
    """The hardware of a preset or file; the default for None."""
    from wholestep.hardware.hardware import Hardware

    if given is None:
        return Hardware.default()
    return Hardware.load(given) if Path(given).is_file() else Hardware.preset(given)


def from_function(target: str) -> Target:
    """The step that `file.py:function` or `module:function` returns."""
    made = _function(target)()
    parts = list(cast(tuple[Any, ...], made)) if isinstance(made, tuple) else list[Any]()
    if len(parts) == 4:
        return Target(target, parts[0], tuple(parts[1:]))
    if len(parts) not in (2, 3) or not isinstance(parts[1], (tuple, list)):
        kinds = ", ".join(type(part).__name__ for part in parts)
        found = f"({kinds})" if isinstance(made, tuple) else type(cast(object, made)).__name__
        refuse(f"{target} returned {found}: needed {RETURNS}")
    return Target(target, parts[0], tuple(cast(Sequence[Any], parts[1])), parts[2] if len(parts) == 3 else {})


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon:
        refuse(f"{target!r} names no function: needed file.py:function or module:function")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        refuse(f"{where!r} cannot be imported: {error}")
    found = getattr(module, name, None)
    if not callable(found):
        refuse(f"{where!r} has no function {name!r}")
    return cast(Callable[[], Any], found)


def _from_file(file: Path) -> Any:
    if not file.is_file():
        refuse(f"there is no file {file}")
    sys.path.insert(0, str(file.parent.absolute()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
