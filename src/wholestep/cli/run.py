"""One run of the demo as its parent process sees it."""

import json
import shutil
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from wholestep.demo.settings import Files, Settings

from .comparison import comparison
from .launch import RankFailed, Ranks
from .screen import Progressed, Screen, screen

FAILED = 1
INTERRUPTED = 130
PLAN_LINES = 10


def run_demo(settings: Settings) -> int:
    """Start the ranks, show what they do, compare. Returns the exit status."""
    console = Console()
    files = settings.files
    moved = make_room(files, settings.resume)
    if not settings.resume:
        remember(settings)
    if moved:
        say(console, f"The files of an earlier run are now in {moved}.")
    show = screen(console)
    plan: list[str] = []
    result: dict[str, Any] = {}
    interrupted: list[int] = []
    try:
        with Ranks(settings) as ranks, stopping(ranks), files.events.open("a", buffering=1) as log:
            follow(ranks, show, log, plan, result, interrupted)
    except RankFailed as failure:
        show.close()
        say_failed(console, failure, files)
        return FAILED
    except KeyboardInterrupt:
        show.close()
        say(console, "Stopped at once; nothing more was saved.")
        return INTERRUPTED
    show.close()
    remember(settings)
    if interrupted:
        say_interrupted(console, settings, interrupted[0])
        return INTERRUPTED
    files.result.write_text(json.dumps(result, indent=2) + "\n")
    say_finished(console, settings, "".join(plan), result)
    return 0


def remember(settings: Settings) -> None:
    """Write what a later --resume starts from."""
    settings.files.run.write_text(replace(settings, resume=False).to_json() + "\n")


def make_room(files: Files, resume: bool) -> Path | None:
    """Make the directory; move what an earlier run left there aside, unless it is to be resumed."""
    files.root.mkdir(parents=True, exist_ok=True)
    old = [] if resume else files.all()
    if not old:
        return None
    aside = files.root / "previous"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    return aside


@contextmanager
def stopping(ranks: Ranks) -> Generator[None]:
    """Inside, the first Ctrl-C (or SIGTERM) asks the ranks to save and stop, the second stops them at once."""
    asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ranks.ask_to_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(
    ranks: Ranks, show: Screen, log: IO[str], plan: list[str], result: dict[str, Any], interrupted: list[int]
) -> None:
    """Show and log what rank 0 reports until all ranks are done."""
    begun = time.monotonic()
    show.stage("processes", False, 0.0)
    heard = False
    for event, fields in ranks.events():
        if not heard and event != "stopping":
            heard = True
            show.stage("processes", True, time.monotonic() - begun)
        log.write(json.dumps({"event": event, **fields}) + "\n")
        match event:
            case "stage":
                show.stage(fields["name"], fields["state"] == "done", fields["seconds"], fields.get("detail", ""))
            case "step":
                names = ("step", "steps", "loss", "tokens_per_second", "exposed")
                show.step(Progressed(**{name: fields[name] for name in names}))
            case "plan":
                plan.append(fields["text"])
            case "result":
                result.update(fields)
            case "stopping":
                show.note("Stopping after this step and saving; Ctrl-C again stops at once.")
            case "interrupted":
                interrupted.append(fields["step"])
            case _:
                raise AssertionError(f"unknown event {event!r}")


def say(console: Console, text: str) -> None:
    """Text as it is: no colours, no wrapping, so that paths can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_failed(console: Console, failure: RankFailed, files: Files) -> None:
    """The failing rank's own text."""
    text = failure.text.rstrip()
    if failure.refused:
        say(console, f"wholestep demo: {text}")
        return
    say(console, f"rank {failure.rank} failed:\n{text}\nIts log is {files.log(failure.rank)}.")


def say_interrupted(console: Console, settings: Settings, step: int) -> None:
    """How to go on."""
    text = f"Saved step {step} of {settings.steps} in {settings.files.checkpoint}.\n"
    text += "Continue with: wholestep demo --resume"
    if Path(settings.directory) != Path("runs/demo").absolute():
        text += f" --dir {settings.directory}"
    say(console, text)


def shortened(plan: str, file: Path) -> str:
    """The first lines of the plan's text and its totals and notes, and where the others are."""
    lines = plan.rstrip().splitlines()
    totals = next((i for i, line in enumerate(lines) if line.lstrip().startswith("at rest")), len(lines) - 1)
    hidden = totals - PLAN_LINES
    if hidden < 2:
        return "\n".join(lines)
    return "\n".join([*lines[:PLAN_LINES], f"  ... ({hidden} more lines in {file})", *lines[totals:]])


def say_finished(console: Console, settings: Settings, plan: str, result: dict[str, Any]) -> None:
    """The plan in short, the comparison, the files."""
    files = settings.files
    say(console, f"\n{shortened(plan, files.plan)}\n")
    console.print(comparison(result, ranks=settings.ranks, backend=settings.backend))
    for what, where in (
        ("checkpoint", files.checkpoint),
        ("plan", files.plan),
        ("one rank's program", files.program),
        ("log", files.events),
    ):
        say(console, f"{what + ':':20}{where}")
