"""The command line of the comparison."""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import batches, network
from .launch import Site
from .limits import link_bytes_per_second
from .machine import available_bytes
from .measure import ANCHOR, Effort, Said, groups, measure
from .plot import svg
from .results import Scene, read
from .sizes import CONFIGS, Config
from .spec import BASES, PRESETS, Spec, UnknownPeer, parse_all
from .table import NOTES, into, markdown, screen
from .turns import order

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
console = Console(stderr=True)
FOLDER = Path("runs/peers")
TABLE_WIDTH = 150
PROCESS_BYTES = 450 << 20  # what a rank holds beside its model

Folder = Annotated[Path, typer.Option("--dir", help="Where results and logs are kept.")]
Table = Annotated[
    Path | None,
    typer.Option(help="Write all tables of --dir to this file, as markdown; between its marks, if it has them."),
]
Plot = Annotated[Path | None, typer.Option(help="Draw all tables of --dir into this file, as SVG.")]


@app.command()
def run(
    peers: Annotated[str, typer.Option(help="Peers and presets, by spaces; see `list`.")] = "default",
    config: Annotated[list[str], typer.Option(help=f"What to train: {', '.join(CONFIGS)}; repeatable.")] = ["S"],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="Link: none, or as 1gbit, 250mbit; repeatable.")] = ["1gbit"],  # noqa: B006
    world: Annotated[list[int], typer.Option(help="Ranks; repeatable.")] = [2],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each peer.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn that count.")] = 4,
    together: Annotated[int, typer.Option(help="Most peers held in memory at once; 0: what memory allows.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds a turn may wait for a quiet moment.")] = 1.0,
    resume: Annotated[bool, typer.Option(help="Measure only what --dir lacks.")] = False,
    jax_python: Annotated[str, typer.Option(help="Python that has JAX, if not this one.")] = sys.executable,
    folder: Folder = FOLDER,
    json: Annotated[Path | None, typer.Option(help="Write all results of --dir to this file too.")] = None,
    table: Table = None,
    plot: Plot = None,
) -> None:
    """Measure peers side by side. Results are merged into --dir, one file for each config, rate and world."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is removed
    specs = _asked(peers, config, rate, world, jax_python)
    folder.mkdir(parents=True, exist_ok=True)
    obstacle = network.why_not_shaped()
    if not obstacle:
        network.clean()
    else:
        console.print(f"{obstacle}: links are not shaped, all ranks share this machine's loopback", style="yellow")
    for c in config:
        for r in rate:
            for w in world:
                scene = _scene(folder, Scene(c, r, w, shaped=not obstacle))
                todo = [s for s in specs if str(s) in scene.missing([str(s) for s in specs])] if resume else specs
                todo = [spec for spec in specs if str(spec) == ANCHOR or spec in todo] if todo else []
                memory = together or _together(CONFIGS[c], w)
                effort = Effort(rounds, steps, memory, patience)
                if todo:
                    scene = _measured(scene, todo, effort, folder, jax_python)
                _show(scene)
    _write(folder, json, table, plot)


@app.command()
def report(
    folder: Folder = FOLDER,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.")] = None,
    table: Table = None,
    plot: Plot = None,
) -> None:
    """Show what was measured so far."""
    for scene in read(folder):
        _show(scene)
    _write(folder, json, table, plot)


@app.command()
def clean() -> None:
    """Remove the network namespaces of runs that were killed."""
    removed = network.clean()
    console.print(f"removed {', '.join(removed)}" if removed else "nothing to remove")


@app.command(name="list")
def list_peers() -> None:
    """What can be compared."""
    for name, base in BASES.items():
        options = [*base.words, *(f"{number}=..." for number in base.numbers)]
        typer.echo(f"{name:10} {base.about}\n{'':10} options: {', '.join(options) or 'none'}")
    for name, members in PRESETS.items():
        typer.echo(f"{name:10} = {' '.join(members)}")


def _show(scene: Scene) -> None:
    out = Console()
    Console(width=max(out.width, TABLE_WIDTH) if not out.is_terminal else None).print(screen(scene))


def _refuse(text: str) -> NoReturn:
    console.print(text, style="red", highlight=False)
    raise typer.Exit(2)


def _asked(
    peers: str, configs: Sequence[str], rates: Sequence[str], worlds: Sequence[int], jax_python: str
) -> list[Spec]:
    """The peers to measure; leaves with what is wrong with the options."""
    try:
        specs = parse_all(peers.split())
        for rate in rates:
            link_bytes_per_second(rate)
    except (UnknownPeer, ValueError) as error:
        _refuse(str(error))
    for name in configs:
        if name not in CONFIGS:
            _refuse(f"config {name!r} is unknown: choose among {', '.join(CONFIGS)}")
        for world in worlds:
            if world < 2 or CONFIGS[name].rows % world:
                _refuse(f"{world} ranks cannot share the {CONFIGS[name].rows} rows of {name}: choose 2 or 4")
    if any(spec.base == "jax" for spec in specs) and not _has_jax(jax_python):
        console.print(
            f"jax is left out: {jax_python} has none. Install it with pip install '.\\[jax]', or name a Python that "
            "has it: --jax-python",
            style="yellow",
        )
        specs = [spec for spec in specs if spec.base != "jax"]
    return specs


def _has_jax(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("jax") is not None
    return subprocess.run([python, "-c", "import jax"], capture_output=True, check=False).returncode == 0


def _together(config: Config, world: int) -> int:
    """How many peers fit into memory: parameters, gradients, two states and as much again for what steps need."""
    from .models import build

    size = sum(parameter.numel() for parameter in build(config).parameters()) * 4
    return int(max(2, min(8, 0.7 * available_bytes() / (world * (PROCESS_BYTES + 8 * size)))))


def _scene(folder: Path, scene: Scene) -> Scene:
    """What is known of it already, if it was measured over the same link."""
    path = folder / f"{scene.name}.json"
    known = Scene.from_json(path.read_text()) if path.exists() else scene
    return known if known.shaped == scene.shaped else scene


def _measured(scene: Scene, specs: Sequence[Spec], effort: Effort, folder: Path, jax_python: str) -> Scene:
    """The scene with `specs` measured, written after every group."""
    config = CONFIGS[scene.config]
    logs = folder / "logs" / scene.name
    logs.mkdir(parents=True, exist_ok=True)
    with network.Network(scene.world, scene.rate, shaped=scene.shaped) as net:
        site = Site(net, config, logs.resolve(), jax_python)
        batches.write_corpus(site.corpus)
        if any(spec.base == "jax" for spec in specs):
            _write_weights(config, site.weights)
        turns = sum(effort.rounds * len(order(0, [str(s) for s in g], ANCHOR)) for g in groups(specs, effort.together))
        with _Screen(scene.name, len(specs), turns) as watch:
            for found in measure(site, specs, effort, watch.said):
                scene = scene.merged(found)
                (folder / f"{scene.name}.json").write_text(scene.to_json())
    return scene


def _write_weights(config: Config, path: Path) -> None:
    from .models import build

    np.savez(path, **{name: value.detach().numpy() for name, value in build(config).named_parameters()})


@dataclass
class _Screen:
    """Progress: peers built, turns taken."""

    name: str
    peers: int
    turns: int

    def __enter__(self) -> "_Screen":
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._progress.start()
        self._task = self._progress.add_task(self.name, total=self.peers + self.turns)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def said(self, said: Said) -> None:
        """Show what happens."""
        self._progress.update(self._task, description=f"{self.name}: {said.kind} {said.peer}")
        if said.kind in ("ready", "failed", "turn"):
            self._progress.advance(self._task)
        if said.kind == "ready":
            console.print(f"{self.name}: {said.peer} ready, first step {said.detail}", highlight=False)
        if said.kind == "round" and not console.is_terminal:
            console.print(f"{self.name}: round {said.peer}", highlight=False)
        if said.kind == "failed":
            console.print(f"{self.name}: {said.peer} failed: {said.detail}", style="red", highlight=False)


def _write(folder: Path, json: Path | None, table: Path | None, plot: Path | None) -> None:
    scenes = read(folder)
    tables = f"{markdown(scenes)}\n{NOTES}\n"
    if table is not None and table.exists():
        tables = into(table.read_text(), tables)
    texts = {json: f"[{','.join(scene.to_json() for scene in scenes)}]\n", table: tables, plot: svg(scenes)}
    for path, text in texts.items():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            console.print(f"wrote {path}", highlight=False)
