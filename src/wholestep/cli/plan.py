"""`wholestep plan`: where every tensor of a step would rest on a mesh, and why, without a process group or a device."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from rich.console import Console

if TYPE_CHECKING:
    from wholestep.graph.graph import TrainGraph
    from wholestep.plan.strategy import Strategy

Style = StrEnum("Style", ["fully_shard", "replicate", "zero1", "zero2", "default", "hybrid"])
Semantics = StrEnum("Semantics", ["per_rank", "global"])


def plan(
    target: Annotated[
        str, typer.Argument(help="file.py:function or module:function that returns (train_step, arguments).")
    ] = "wholestep.demo.train:example_step",
    mesh: Annotated[str, typer.Option(help="Axes and sizes, as dp=4,tp=2.")] = "dp=2",
    style: Annotated[Style, typer.Option(help="Where the data-parallel axes keep parameters.")] = Style.fully_shard,
    semantics: Annotated[
        Semantics, typer.Option(help="per_rank: as DDP; global: as one device on the whole batch.")
    ] = Semantics.per_rank,
    tp: Annotated[
        list[str] | None, typer.Option("--tp", help="Tensor parallel: pattern=colwise|rowwise|..., repeatable.")
    ] = None,
    tp_axis: Annotated[str, typer.Option(help="The axis of --tp.")] = "tp",
    explain: Annotated[
        list[str] | None, typer.Option("--explain", help="Why a tensor or operation is laid out so; repeatable.")
    ] = None,
    show: Annotated[bool, typer.Option("--program", help="Print the program of one rank too.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON.")] = None,
) -> None:
    """Plan a training step: capture it, decide where every tensor rests, print that as a table.

    Without a target it plans the demo's own step. Nothing is trained and no rank is started.
    """
    import wholestep as ws

    console = Console(stderr=True)
    try:
        with console.status("capture"):
            graph = _captured(target)
        with console.status("plan"):
            made = ws.plan(graph, mesh, _strategies(style, semantics, mesh, tp or [], tp_axis))
        typer.echo(str(made))
        for name in explain or []:
            typer.echo(f"\n{made.explain(name)}")
        if show:
            typer.echo(f"\n{ws.partition(graph, made)}")
    except ws.WholestepError as error:
        _refuse(str(error))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(made.to_json())
        console.print(f"written to {out}")


def _strategies(style: Style, semantics: Semantics, mesh: str, tp: list[str], tp_axis: str) -> "list[Strategy]":
    import wholestep as ws

    kind = cast(Any, semantics.value)
    if not tp:
        return [ws.DataParallel(cast(Any, style.value), semantics=kind)]
    pairs: dict[str, str] = {}
    for entry in tp:
        pattern, _, how = entry.rpartition("=")
        if not pattern:
            _refuse(f"--tp {entry}: needed pattern=colwise, pattern=rowwise or the like")
        pairs[pattern] = how
    others = tuple(name for name in ws.Mesh(mesh).names if name != tp_axis)
    tensor: list[Strategy] = [ws.TensorParallel(pairs, axis=tp_axis)]
    return [ws.DataParallel(cast(Any, style.value), axis=others, semantics=kind), *tensor] if others else tensor


def _captured(target: str) -> "TrainGraph":
    import wholestep as ws

    made = _function(target)()
    parts = list(cast(tuple[Any, ...], made)) if isinstance(made, tuple) else list[Any]()
    if len(parts) not in (2, 3):
        found = type(cast(object, made)).__name__
        _refuse(f"{target} returned {found}: needed (train_step, arguments) or (..., keyword arguments)")
    return ws.capture(parts[0], *parts[1], **(parts[2] if len(parts) > 2 else {}))


def _function(target: str) -> Callable[[], Any]:
    where, colon, name = target.rpartition(":")
    if not colon:
        _refuse(f"{target!r} names no function: needed file.py:function or module:function")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        _refuse(f"{where!r} cannot be imported: {error}")
    found = getattr(module, name, None)
    if not callable(found):
        _refuse(f"{where!r} has no function {name!r}")
    return cast(Callable[[], Any], found)


def _from_file(file: Path) -> Any:
    if not file.is_file():
        _refuse(f"there is no file {file}")
    sys.path.insert(0, str(file.parent.absolute()))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _refuse(text: str) -> NoReturn:
    typer.echo(f"wholestep plan: {text}", err=True)
    raise typer.Exit(2)
