"""Two jobs, as a job that was given up and its restart, save into one folder and load from it."""

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wholestep as ws
from wholestep.errors import CheckpointError

from .cases import Setup
from .kills import damaged, published
from .ranks import Job
from .training import Say, batch, compiled, make_model, make_optimizer

START_S = 60.0  # until both jobs train


def contend(folder: str, setup: Setup, seconds: float, offset: int, rank: int, say: Say) -> None:
    """Train and save into `folder`, load from it after every third save; says what came of each call."""
    torch.manual_seed(offset)
    model = make_model()
    step, optimizer = compiled(setup), make_optimizer(model)
    step(model, optimizer, *batch(setup, 0, rank))
    say("trains")
    end, saves = time.monotonic() + seconds, 0
    while _any(time.monotonic() < end):
        step(model, optimizer, *batch(setup, saves, rank))
        saves += 1
        _attempt("save", say, lambda: ws.save(folder, step, extra={"job": offset}))
        if saves % 3 == 0:
            _attempt("load", say, lambda: ws.load(folder, step))


def _any(here: bool) -> bool:
    """The same answer on all ranks: the first one's."""
    flag = torch.tensor([here])
    dist.broadcast(flag, 0)
    return bool(flag)


def _attempt(what: str, say: Say, call: Any) -> None:
    begun = time.monotonic()
    try:
        call()
        say(what, "", time.monotonic() - begun)
    except CheckpointError as error:
        say(what, str(error), time.monotonic() - begun)
        time.sleep(0.05)


def run(seconds: float, ranks: tuple[int, int]) -> tuple[str, bool]:
    """The table of `seconds` of two jobs with so many ranks, and whether anything was damaged or hung."""
    folder = Path(tempfile.mkdtemp(prefix="wholestep-two-jobs-"))
    setups = [Setup(size, "zero1", "", "none", "cosine", "per_rank", False) for size in ranks]
    wrong: list[str] = []
    try:
        with (
            Job(ranks[0], contend, str(folder), setups[0], seconds, 1) as one,
            Job(ranks[1], contend, str(folder), setups[1], seconds, 2) as other,
        ):
            for job in (one, other):
                if not job.listen(START_S, lambda job=job: len(job.of_kind("trains")) == len(job.said)):
                    wrong.append(f"a job does not start: {job.of_kind('error')}")
            seen = _watch([one, other], folder, seconds, wrong)
            for job in (one, other):
                if not job.listen(START_S, lambda job=job: len(job.of_kind("end")) == len(job.said)):
                    wrong.append(f"hangs: {job.stacks()}")
        wrong += damaged(folder)
        seen |= {path.name for path in published(folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong += [f"error: {message[1]}" for job in (one, other) for message in job.of_kind("error")]
    return _table([one, other], seconds, len(seen), wrong), bool(wrong)


def _watch(jobs: list[Job], folder: Path, seconds: float, wrong: list[str]) -> set[str]:
    """Check what is published as soon as it is; one that `keep` removes meanwhile is not damaged."""
    seen, end = set[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        for job in jobs:
            job.listen(0.02, lambda: False)
        for path in published(folder):
            if path.name in seen:
                continue
            try:
                ws.load(path)
            except (CheckpointError, OSError) as error:
                if path.exists():
                    wrong.append(f"damaged: {path.name}: {error}")
            seen.add(path.name)
    return seen


def _table(jobs: list[Job], seconds: float, seen: int, wrong: list[str]) -> str:
    lines = [
        f"Two jobs in one folder for {seconds:.0f} s; {seen} published checkpoints were checked, {len(wrong)} wrong.",
        "",
        "| job | ranks | saves | saves refused | loads | loads refused |",
        "|---|---|---|---|---|---|",
    ]
    told = Counter[str]()
    for number, job in enumerate(jobs, 1):
        counts = list[int]()
        for what in ("save", "load"):
            of_first = job.of_kind(what, 0)
            counts += [sum(not m[1] for m in of_first), sum(bool(m[1]) for m in of_first)]
            told.update(f"{what}: {_general(m[1])}" for m in of_first if m[1])
        lines.append(f"| {number} | {len(job.said)} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "What the refused ones said:", ""] if told else []
    lines += [f"- {count} times, {text}" for text, count in told.most_common(8)]
    lines += [f"- {text}" for text in wrong[:20]]
    return "\n".join(lines) + "\n"


def _general(text: str) -> str:
    """The first line without the names of folders and numbers."""
    words = text.splitlines()[0].split()
    return " ".join("FOLDER" if "/" in word else "N" if any(map(str.isdigit, word)) else word for word in words)
