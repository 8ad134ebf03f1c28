"""One rank fails in each way of `examples/failures.py`: how long until every other rank has ended, and what it says."""

import re
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.dist.scripts import Ranks, start

EXAMPLE = Path(__file__).parents[2] / "examples" / "failures.py"
RANKS, TIMEOUT_S = 3, 8
LIMIT_S = 60.0  # a rank that has not ended by then hangs
WAYS = {
    "kill": "dies (SIGKILL)",
    "raise": "raises an exception",
    "leave": "returns early, and ends",
    "exit": "leaves by `sys.exit`",
    "stop": "is stopped (SIGSTOP)",
    "stop at 1": "is stopped after its first step",
    "hang": "hangs in user code",
    "hang in C": "hangs outside of Python",
    "hang in the loader": "hangs in a data loader",
}


def run(rounds: int, ways: Collection[str] = WAYS) -> tuple[str, bool]:
    """The table of `rounds` failures of each kind and rank, and whether a rank hung or did not name the failed one."""
    lines = [
        f"`examples/failures.py` on {RANKS} ranks, `timeout={TIMEOUT_S}s`, {rounds} times for each row. Seconds from "
        "the failure until every other rank has ended, and what they say.",
        "",
        "| a rank | which | seconds, median | most | hangs | not named | error of the others |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = False
    for how in ways:
        for rank in (0, 1):
            seconds, hangs, unnamed, text = list[float](), 0, 0, ""
            for _ in range(rounds):
                took, ended, errors = _play(how, rank)
                seconds.append(took)
                hangs += not ended
                unnamed += ended and not all(f"rank {rank} " in error for error in errors)
                text = errors[0] if errors else ""
            middle = sorted(seconds)[len(seconds) // 2]
            found = re.sub(r"\d+(\.\d+)? s\b", "N s", re.sub(r" \(host [^)]*\)", "", text))
            row = [WAYS[how], str(rank), f"{middle:.1f}", f"{max(seconds):.1f}", str(hangs), str(unnamed), found]
            lines.append(f"| {' | '.join(row)} |")
            failed |= bool(hangs or unnamed)
    return "\n".join(lines) + "\n", failed


def _play(how: str, rank: int) -> tuple[float, bool, list[str]]:
    """Seconds from the failure to the end of the last other rank, whether all ended, and their errors."""
    with tempfile.TemporaryDirectory(prefix="wholestep-failures-") as folder:
        name, _, at = how.partition(" at ")
        options = ["--how", name, "--at", at or "5", "--rank", str(rank), "--timeout", f"{TIMEOUT_S}s"]
        with start(EXAMPLE, options, RANKS, Path(folder)) as ranks:
            others = [other for other in range(RANKS) if other != rank]
            ranks.wait_for_line(rank, f"fails now: {name}")
            begun = time.monotonic()
            codes = ranks.wait(others, LIMIT_S)
            took = time.monotonic() - begun
            return took, all(codes[other] == 1 for other in others), list(_errors(ranks, others))


def _errors(ranks: Ranks, others: list[int]) -> Iterator[str]:
    for other in others:
        found = re.findall(r"^(?:\S+\.)?RankFailedError: (.*)", ranks.output(other), re.MULTILINE)
        yield found[0] if found else ""
