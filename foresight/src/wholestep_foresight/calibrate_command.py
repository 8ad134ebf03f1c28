"""`wholestep calibrate`: measures the hardware of the job it runs in, and writes a fitted hardware description."""

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from wholestep.cli.target import check_outputs

if TYPE_CHECKING:
    from .calibration import FitError

_MIB = 1 << 20


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("hardware.json"),
    name: Annotated[str, typer.Option("--name", help="Name of the machine.")] = "calibrated",
    largest: Annotated[
        float, typer.Option("--largest", help="MiB of the largest collective; 0: 64 on CPUs, 1024 on GPUs.", min=0)
    ] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda; cuda if available.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that a collective may take.", min=1)] = 300,
) -> None:
    """Measure collectives by size, matrix products by shape and dtype, and copies; write a fitted hardware description.

    Run it with the launcher of your jobs, on nodes whose links you want to measure:
    torchrun --nproc-per-node 8 -m wholestep calibrate. A single process measures its device, and uses the links of
    the loopback preset. `wholestep.Hardware.load` reads the file.
    """
    import torch
    import torch.distributed as dist

    from wholestep.errors import WholestepError

    from .measure_mesh import calibration_sizes

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        typer.echo(f"wholestep calibrate: no device {kind!r}\n  needed: cpu, or cuda with a GPU", err=True)
        raise typer.Exit(2)
    if os.environ.get("RANK", "0") == "0":
        check_outputs(out=out)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    starts_group = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    try:
        if kind == "cuda":
            torch.cuda.set_device(local)
        if starts_group:
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
        sizes = calibration_sizes(kind, int((largest or (1024 if kind == "cuda" else 64)) * _MIB))
        write(f"cuda:{local}" if kind == "cuda" else kind, sizes, name, out)
    except (WholestepError, OSError) as error:
        typer.echo(f"wholestep calibrate: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        if starts_group and dist.is_initialized():
            dist.destroy_process_group()


def write(device: str, sizes: object, name: str, out: Path) -> None:
    """Measure, fit, write on the first rank, and show the error of the fit. All ranks of the job call it."""
    import torch.distributed as dist

    from wholestep.hardware.hardware import Hardware

    from .calibration import fit
    from .measure_mesh import CalibrationSizes, count_measurements, measure_mesh

    assert isinstance(sizes, CalibrationSizes)
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first)
    columns = TextColumn("{task.description:<28}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not first) as progress:
        task = progress.add_task("measure", total=count_measurements(sizes))
        measured = measure_mesh(device, sizes, lambda what: progress.update(task, advance=1, description=what))
    if not first:
        return
    hardware, errors = fit(name, measured, Hardware.preset("loopback").levels)
    hardware.save(out)
    console.print(_table(errors))
    console.print(f"{hardware}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"written to {out}", markup=False, highlight=False, soft_wrap=True)


def _table(errors: "list[FitError]") -> Table:
    table = Table(title="error of the fit", title_justify="left")
    for column in ("what", "measured", "median", "worst"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for error in errors:
        table.add_row(error.what, str(error.count), f"{error.median:.1%}", f"{error.worst:.1%}")
    return table
