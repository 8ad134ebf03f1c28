"""The command line."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import results

PAGE = Path(__file__).parents[1] / "faults.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a mode; results are kept, and a rerun goes on. Exit status 1 where something was damaged, lost or hung."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("mode", nargs="?", default="kills", choices=MODES)
    parser.add_argument("--kills", type=int, default=1000, help="in all, those of earlier runs included")
    parser.add_argument("--minutes", type=float, help="of this run: 60 by default, 1 for two-jobs")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--case", type=int, help="play this case alone, and keep nothing")
    parser.add_argument("--ranks", type=int, nargs=2, default=(2, 1), help="two-jobs: of each")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="save-blocking, restart: of state")
    parser.add_argument("--rounds", type=int, default=7, help="save-blocking, restart, rank-failures: how often")
    parser.add_argument("--dir", type=Path, default=Path("runs/faults"), help="where results are kept")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--ways", nargs="+", help="rank-failures: only these, such as stop")
    given = parser.parse_args(argv)
    if given.case is not None:
        return _one(given.case)
    text, failed = MODES[given.mode](given)
    print(text)
    if given.write:
        PAGE.write_text(results.into(PAGE.read_text() if PAGE.exists() else "", given.mode, text))
    return int(failed)


def _one(seed: int) -> int:
    from .kills import play

    case = results.case_of(seed)
    print(case)
    outcomes = play(case)
    for one in outcomes:
        print(one)
    return int(any(one.failures for one in outcomes))


def _kills(given: argparse.Namespace) -> tuple[str, bool]:
    path: Path = given.dir / "kills.jsonl"
    outcomes = results.read(path)
    end, seed, done = time.monotonic() + 60 * (given.minutes or 60), given.seed, {one.seed for one in outcomes}
    while sum(one.killed for one in outcomes) < given.kills and time.monotonic() < end:
        if seed not in done:
            from .kills import play  # what is done already is shown without torch

            new = play(results.case_of(seed))
            results.append(path, new)
            outcomes += new
            _show(seed, outcomes, new)
        seed += 1
    return results.report(outcomes), any(one.failures for one in outcomes)


def _show(seed: int, outcomes: list[results.Outcome], new: list[results.Outcome]) -> None:
    killed = [one for one in outcomes if one.killed]
    bad = sum(bool(one.failures) for one in outcomes)
    within = sum(one.within_save for one in killed)
    line = f"{len(killed)} kills, {within} in a save, {bad} failures; case {seed}"
    tty = sys.stdout.isatty()
    print(f"\r{line}   " if tty else line, end="" if tty else "\n", flush=True)
    for one in new:
        for text in one.failures:
            print(f"\n--case {one.seed}, start {one.start}: {text}", flush=True)


def _two_jobs(given: argparse.Namespace) -> tuple[str, bool]:
    from .two_jobs import run

    return run(60 * (given.minutes or 1), tuple(given.ranks))


def _save_blocking(given: argparse.Namespace) -> tuple[str, bool]:
    from .save_blocking import run

    return run(int(given.gigabytes * 1e9), given.rounds), False


def _restart(given: argparse.Namespace) -> tuple[str, bool]:
    from .restart import run

    return run(int(given.gigabytes * 1e9), given.rounds)


def _rank_failures(given: argparse.Namespace) -> tuple[str, bool]:
    from .rank_failures import WAYS, run

    return run(given.rounds, given.ways or WAYS)


MODES = {
    "kills": _kills, "two-jobs": _two_jobs, "save-blocking": _save_blocking, "restart": _restart,
    "rank-failures": _rank_failures,
}  # fmt: skip
