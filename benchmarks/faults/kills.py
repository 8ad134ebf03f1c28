"""Plays a case: starts, kills and restarts of one job, and what each restart must show."""

import shutil
import statistics
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path

import wholestep as ws
from wholestep.errors import CheckpointError

from .cases import Case, Kill, Setup
from .ranks import Job
from .results import Outcome
from .training import Life, train

MANIFEST = "manifest.json"
LIFE_S = 90.0  # a start that takes longer hangs
USUAL_SAVE_S, USUAL_STEP_S = 0.04, 0.005
Curve = list[dict[int, str]]  # by rank: the loss of each step, to the bit

_references: dict[Setup, tuple[Curve, list[str]]] = {}
_save_seconds: dict[int, deque[float]] = defaultdict(lambda: deque([USUAL_SAVE_S], maxlen=50))


def play(case: Case) -> list[Outcome]:
    """Each start of a job and how it ended. A start that fails is the last one."""
    outcomes: list[Outcome] = []
    folder = Path(tempfile.mkdtemp(prefix="wholestep-faults-"))
    safe = 0
    try:
        for number, kill in enumerate([*case.kills, None]):
            begun = time.monotonic()
            outcome, safe = _live(case, number, kill, folder, safe)
            outcome.seconds = time.monotonic() - begun
            outcomes.append(outcome)
            if outcome.failures:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def reference(setup: Setup) -> tuple[Curve, list[str]]:
    """Losses and final digests by rank of a run that nothing interrupts and that saves nothing."""
    if setup not in _references:
        with Job(setup.ranks, train, Life(setup), timeout_s=LIFE_S) as job:
            if not job.listen(LIFE_S, lambda: len(job.of_kind("end")) == setup.ranks):
                raise RuntimeError(f"{setup} without a kill hangs:\n{job.stacks()}")
        if errors := job.of_kind("error"):
            raise RuntimeError(f"{setup} without a kill: {errors[0][1]}")
        _references[setup] = curve_of(job), [job.of_kind("done", rank)[0][1] for rank in range(setup.ranks)]
    return _references[setup]


def curve_of(job: Job) -> Curve:
    """What each rank has said of its steps."""
    return [{number: loss for _, number, loss in job.of_kind("step", rank)} for rank in range(len(job.said))]


def _live(case: Case, number: int, kill: Kill | None, folder: Path, safe: int) -> tuple[Outcome, int]:
    """One start. `safe` is the newest checkpoint that a save has returned from; returned anew."""
    curve, digests = reference(case.setup)
    resume = bool(published(folder))
    within = kill is not None and kill.where == "save"
    life = Life(
        case.setup, str(folder), resume, case.every, case.keep, case.wait,
        victim=kill.rank if kill is not None and within else -1,
        call=kill.call if kill is not None and within else 0, operation=kill.operation if kill is not None else 0,
    )  # fmt: skip
    outcome = Outcome(case.seed, number, kill is not None, resume)
    with Job(case.setup.ranks, train, life, timeout_s=LIFE_S) as job:
        if kill is None:
            ended = job.listen(LIFE_S, lambda: len(job.of_kind("end")) == case.setup.ranks)
            if not ended:
                outcome.failures.append(f"hangs: {job.stacks()}")
        else:
            outcome.failures += _kill(job, case, kill)
    if kill is not None:
        rank = kill.rank
        outcome.within_save = len(job.of_kind("saving", rank)) > len(job.of_kind("saved", rank))
        outcome.everyone = kill.everyone
    _save_seconds[case.setup.ranks].extend(seconds for _, _, seconds in job.of_kind("saved"))
    outcome.failures += _errors(job, kill is not None)
    outcome.failures += _lost(job, safe, outcome)
    outcome.failures += differences(curve, curve_of(job))
    if kill is None and not outcome.failures:
        found = [job.of_kind("done", rank)[0][1] for rank in range(case.setup.ranks)]
        wrong = [rank for rank, (here, there) in enumerate(zip(found, digests, strict=True)) if here != there]
        if wrong:
            outcome.failures.append(f"curve: the final state of ranks {wrong} differs from the uninterrupted run's")
    outcome.failures += damaged(folder)
    return outcome, max([safe, *(message[1] for message in job.of_kind("saved"))])


def _kill(job: Job, case: Case, kill: Kill) -> list[str]:
    """Wait for the moment and kill; why that moment did not come."""
    victim = kill.rank

    def started(kind: str) -> bool:
        """Whether the victim said so at call `kill.call` or later; steps are counted from 0, calls from 1."""
        calls = [message[1] + (kind == "step") for message in job.of_kind(kind, victim)]
        return any(call - resumed[1] >= kill.call for resumed in job.of_kind("resumed", victim) for call in calls)

    if kill.where == "start":
        job.listen(kill.moment, lambda: bool(job.of_kind("step", victim)))
    else:
        kind = "saving" if kill.where == "save" else "step"
        stopped = lambda: job.dead(victim) or bool(job.of_kind("error") or job.of_kind("end"))  # noqa: E731
        if not job.listen(LIFE_S, lambda: started(kind) or stopped()) and not stopped():
            return [f"hangs: {job.stacks()}"]
        if kill.where == "save" and kill.operation:
            if not job.listen(LIFE_S, stopped) and not stopped():
                return [f"hangs: {job.stacks()}"]
        else:
            usual = statistics.median(_save_seconds[case.setup.ranks]) if kill.where == "save" else USUAL_STEP_S
            job.listen(kill.moment * usual, lambda: False)
    if kill.everyone:
        job.kill(range(case.setup.ranks))
    else:
        job.kill([victim])
        job.listen(kill.grace_s, lambda: False)
    return []


def _errors(job: Job, killed: bool) -> list[str]:
    """What ranks raised; after a kill the others may raise."""
    errors = [message[1] for message in job.of_kind("error")]
    return [f"error: {text}" for text in errors if not (killed and ended_by_other(text))]


def ended_by_other(text: str) -> bool:
    """True for what a rank raises because another one is gone."""
    last = text.rstrip().rpartition("\nTraceback")[2]
    return any(word in last for word in ("RankFailedError", "Connection", "closed", "Broken pipe", "DistNetworkError"))


def _lost(job: Job, safe: int, outcome: Outcome) -> list[str]:
    """Whether the job went on from an older checkpoint than the newest that a save has returned from."""
    found = {message[1] for message in job.of_kind("resumed")}
    if not found:
        return []
    outcome.resumed = min(found)
    if len(found) > 1:
        return [f"lost: ranks went on from different checkpoints, {sorted(found)}"]
    return [f"lost: it went on from {outcome.resumed}, and {safe} was saved"] if outcome.resumed < safe else []


def differences(expected: Curve, found: Curve) -> list[str]:
    """The first step of each rank whose loss is another one."""
    lines: list[str] = []
    for rank, (right, here) in enumerate(zip(expected, found, strict=True)):
        wrong = [number for number, loss in here.items() if right[number] != loss]
        if wrong:
            first = wrong[0]
            lines.append(f"curve: rank {rank} has {here[first]} at step {first}, uninterrupted {right[first]}")
    return lines


def published(folder: Path) -> list[Path]:
    """Folders of checkpoints: those with a manifest, which is written last."""
    return sorted(path.parent for path in folder.glob(f"step-*/{MANIFEST}") if not path.parent.suffix)


def damaged(folder: Path) -> list[str]:
    """Published checkpoints that are not whole."""
    lines: list[str] = []
    for path in published(folder):
        try:
            ws.load(path)
        except CheckpointError as error:
            lines.append(f"damaged: {path.name}: {error.found}")
    return lines
