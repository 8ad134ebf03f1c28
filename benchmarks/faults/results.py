"""A line of JSON for each start of each job, and the report of them. Imports no torch."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .cases import Case, case_of

FAILURES = ("damaged", "lost", "curve", "hangs", "error")


@dataclass
class Outcome:
    """One start of the job of a case: whether it was to be killed, resumed a checkpoint, was within a save when killed,
    and what was wrong; each failure begins with one of `FAILURES`.
    """

    seed: int
    start: int
    killed: bool
    resume: bool
    within_save: bool = False
    everyone: bool = False
    resumed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list[str])


def append(path: Path, outcomes: Iterable[Outcome]) -> None:
    """Add what a case came to, at once: a run that is interrupted leaves whole cases."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(asdict(one)) + "\n" for one in outcomes))


def read(path: Path) -> list[Outcome]:
    """What `append` wrote; a line that was cut off is left out."""
    if not path.exists():
        return []
    found: list[Outcome] = []
    for line in path.read_text().splitlines():
        try:
            found.append(Outcome(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return found


def failures(outcomes: Iterable[Outcome]) -> Counter[str]:
    """How many of each kind."""
    return Counter(text.partition(":")[0] for one in outcomes for text in one.failures)


def report(outcomes: list[Outcome]) -> str:
    """The table of a run: kills by ranks, styles and schedules, and every failure with its seed."""
    cases = {one.seed: case_of(one.seed) for one in outcomes}
    groups: list[tuple[str, Callable[[Case], str]]] = [
        ("ranks", lambda case: str(case.setup.ranks)),
        ("style", lambda case: case.setup.style),
        ("schedule", lambda case: case.setup.schedule),
        ("semantics", lambda case: case.setup.semantics),
        ("save", lambda case: "wait=True" if case.wait else "wait=False"),
    ]
    lines = [
        "| | kills | in a save | of all ranks | restarts | damaged | lost | other curve | hangs | errors |",
        "|---|---|---|---|---|---|---|---|---|---|",
        _row("all", outcomes),
    ]
    for name, key in groups:
        by = defaultdict[str, list[Outcome]](list)
        for one in outcomes:
            by[key(cases[one.seed])].append(one)
        lines += [_row(f"{name} {value}", by[value]) for value in sorted(by)]
    wrong = [one for one in outcomes if one.failures]
    lines += ["", f"{len(cases)} jobs, {sum(one.seconds for one in outcomes) / 60:.0f} minutes."]
    lines += [f"- `--case {one.seed}`, start {one.start}: {one.failures[0].splitlines()[0]}" for one in wrong]
    return "\n".join(lines) + "\n"


def _row(name: str, outcomes: list[Outcome]) -> str:
    killed, count = [one for one in outcomes if one.killed], failures(outcomes)
    numbers = [
        len(killed), sum(one.within_save for one in killed), sum(one.everyone for one in killed),
        sum(one.resume for one in outcomes), *(count[kind] for kind in FAILURES),
    ]  # fmt: skip
    return f"| {name} | " + " | ".join(map(str, numbers)) + " |"


def into(document: str, mode: str, text: str) -> str:
    """`document` with `text` between the marks of a mode; with marks and text at its end where it has none."""
    begin, end = f"<!-- {mode}: begin -->", f"<!-- {mode}: end -->"
    head, found, rest = document.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        head, tail = document.rstrip() + "\n\n", "\n"
    return f"{head}{begin}\n\n{text}\n{end}{tail}"
