"""`wholestep checkpoint`: shows, verifies and exports checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .screen import Screen
from .target import check_outputs, refuse, working, write_output

if TYPE_CHECKING:
    from wholestep.checkpoint.contents import Contents


def checkpoint(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint or a folder of some; a URL too.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare its checksum.")] = False,
    export: Annotated[str | None, typer.Option(metavar="FORMAT", help="Write all to --to: safetensors or dcp.")] = None,
    dtype: Annotated[str | None, typer.Option(help="With --export: of what is floating-point, as bfloat16.")] = None,
    to: Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder to make.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write what was found as JSON.")] = None,
) -> None:
    """Show what is in a checkpoint, verify it, or export it.

    Of a folder of checkpoints, all are shown; --export takes the newest. Any number of ranks loads a checkpoint in any
    number of files. Exit status 1: a checkpoint is damaged; 2: there is none. Nothing in the folder is run.
    """
    if (to is None) is not (export is None):
        refuse("--to FOLDER goes with --export FORMAT")
    if dtype is not None and export is None:
        refuse("--dtype goes with --export FORMAT")
    if out is not None and to is not None:
        refuse("--json says what is found: --export only writes to --to")
    check_outputs(json=out)
    with working() as shown:
        from wholestep.checkpoint.durable import folder_at

        folder = folder_at(directory)
        if export is not None and to is not None:
            _export(folder, to, export, dtype)
            shown.note(f"written to {to}")
            return
        intact, text, body = _look(shown, folder, verify)
    typer.echo(text)
    with working() as shown:
        write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    if not intact:
        raise typer.Exit(1)


def _look(shown: Screen, directory: Path, verify: bool) -> tuple[bool, str, Any]:
    """Whether all is intact, the text to print, and the same as JSON."""
    from wholestep.checkpoint import contents, manifest

    if manifest.is_checkpoint(directory):
        content = _contents(shown, directory, verify)
        return not content.fault, contents.show(content, verify), contents.as_json(content)
    several = [_read(shown, path, verify) for path in manifest.candidates(directory)]
    rows = [contents.as_json(content) for content in several]
    return not any(content.fault for content in several), contents.show_all(several, verify), rows


def _read(shown: Screen, folder: Path, verify: bool) -> Contents:
    from wholestep.checkpoint.contents import look

    if not verify:
        return look(folder)
    size_bytes = look(folder).size_bytes
    with shown.amount(f"verify {folder.name}", size_bytes) as advance:
        return look(folder, advance)


def _contents(shown: Screen, folder: Path, verify: bool) -> Contents:
    """A checkpoint that has a manifest; without one the command ends."""
    content = _read(shown, folder, verify)
    if content.manifest is None:
        shown.close()
        typer.echo(f"wholestep: {content.fault}", err=True)
        raise typer.Exit(1)
    return content


def _export(directory: Path, to: str, format: str, dtype: str | None) -> None:
    import torch

    from wholestep.checkpoint.export import export

    torch_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        refuse(f"--dtype {dtype}: needed a floating-point dtype of torch, as bfloat16")
    if format not in ("safetensors", "dcp"):
        refuse(f"--export {format}: needed safetensors or dcp")
    export(to, str(directory), format, dtype=torch_dtype)
