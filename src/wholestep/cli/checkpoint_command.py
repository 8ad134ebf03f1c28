"""`wholestep checkpoint`: shows, verifies, compares, exports and rewrites checkpoints."""

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
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of checkpoints; s3://bucket/run as well.")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, and compare its checksum.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare tensors with those of another checkpoint.")
    ] = None,
    export: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Write parameters and buffers as safetensors or dcp to --to.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --export: of what is floating-point, as bfloat16.")] = None,
    reshard: Annotated[
        int | None, typer.Option(metavar="FILES", min=1, help="Write all of it to --to, with tensors in so many files.")
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="FOLDER", help="The folder to make.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write what was found as JSON.")] = None,
) -> None:
    """Show what is in a checkpoint, verify it, compare it with another, export it, or write it in other files.

    Of a folder of checkpoints, all are shown; the other options take the newest. Any number of ranks loads a checkpoint
    in any number of files. Exit status 1: a checkpoint is damaged, or differs from the other; 2: there is none.
    Nothing in the folder is run.
    """
    if sum(option is not None for option in (compare, export, reshard)) > 1:
        refuse("--compare, --export and --reshard: needed one of them")
    if (to is None) is not (export is None and reshard is None):
        refuse("--to FOLDER goes with --export FORMAT or --reshard FILES")
    if dtype is not None and export is None:
        refuse("--dtype goes with --export FORMAT")
    if out is not None and to is not None:
        refuse("--json says what is found: --export and --reshard only write to --to")
    check_outputs(json=out)
    with working() as shown:
        from wholestep.checkpoint.durable import folder_at

        folder, other = folder_at(directory), None if compare is None else folder_at(compare)
        if export is not None and to is not None:
            _export(folder, to, export, dtype)
            shown.note(f"written to {to}")
            return
        if reshard is not None and to is not None:
            _reshard(shown, folder, to, reshard)
            return
        same, text, body = _look(shown, folder, verify) if other is None else _compare(shown, folder, other)
    typer.echo(text)
    with working() as shown:
        write_output(shown, out, lambda path: path.write_text(json.dumps(body, indent=1) + "\n"))
    if not same:
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


def _compare(shown: Screen, directory: Path, other: Path) -> tuple[bool, str, Any]:
    from wholestep.checkpoint import contents, manifest

    here, there = (_contents(shown, manifest.candidates(path)[0], verify=False) for path in (directory, other))
    for content in (here, there):
        _refuse_damaged(content)
    with shown.amount("compare", here.size_bytes) as advance:
        compared = list(contents.compare(here, there, advance))
    differences, count = [row for row in compared if row is not None], len(compared)
    rows = [{"name": row.name, "here": row.here, "there": row.there, "largest": row.shown} for row in differences]
    text = "\n".join([*map(str, differences), f"{count - len(differences)} of {count} tensors have the same bits"])
    return not differences, text, {"here": str(here.path), "there": str(there.path), "tensors": count, "differ": rows}


def _refuse_damaged(content: Contents) -> None:
    if content.fault:
        typer.echo(f"wholestep: {content.path}: {content.fault}", err=True)
        raise typer.Exit(1)


def _export(directory: Path, to: str, format: str, dtype: str | None) -> None:
    import torch

    from wholestep.checkpoint.export import export

    torch_dtype = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        refuse(f"--dtype {dtype}: needed a floating-point dtype of torch, as bfloat16")
    if format not in ("safetensors", "dcp"):
        refuse(f"--export {format}: needed safetensors or dcp")
    export(to, str(directory), format, dtype=torch_dtype)


def _reshard(shown: Screen, directory: Path, to: str, files: int) -> None:
    from wholestep.checkpoint import contents, durable, manifest

    content = _contents(shown, manifest.candidates(directory)[0], verify=True)
    _refuse_damaged(content)
    with shown.stage("write"):
        contents.rewrite(content, durable.folder_at(to), files)
    shown.note(f"written to {to}")
