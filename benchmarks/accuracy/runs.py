"""Published training runs: step times after one scalar for each hardware, fitted without the model that is tested."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy import config, memory, step
from benchmarks.accuracy.read import Case, Left, Row, hardware_of

_FAR, _NEARLY_FULL = 0.2, 0.9


@dataclass(frozen=True)
class Predicted:
    """A run, and seconds of its step by the model as it is."""

    run: config.Run
    step_s: float


def read(rows: Iterable[Row]) -> tuple[list[Predicted], list[Case], list[Left]]:
    """Runs with a time, memory cases, and rows that cannot be expressed."""
    found: list[Predicted] = []
    held: list[Case] = []
    left: list[Left] = []
    for row in rows:
        run, hardware = config.read(row), hardware_of(row["hw"])
        label = f"{row['model']} on {row['n_gpus']} {row['hw']}"
        if isinstance(run, str) or hardware is None:
            left.append(Left(row["source_id"], label, run if isinstance(run, str) else "no preset for this hardware"))
            continue
        if run.step_s:
            found.append(Predicted(run, step.step_s(run, hardware)))
        if run.memory_gib:
            held.append(Case(run.source, run.hardware, _label(run), run.model, run.memory_gib, memory.peak_gib(run)))
    return found, held, left


def held_out(found: Sequence[Predicted]) -> list[Case]:
    """For each model, the scalar of its hardware from all other models there; 1 where there are none."""
    cases: list[Case] = []
    for members in _by_hardware(found):
        for model in sorted({one.run.model for one in members}):
            others = [one for one in members if one.run.model != model]
            scalar = fit_scalar(others)
            cases += [case(one, scalar, alone=not others) for one in members if one.run.model == model]
    return cases


def in_sample(found: Sequence[Predicted]) -> list[Case]:
    """The scalar of a hardware from all of its rows."""
    return [case(one, fit_scalar(members)) for members in _by_hardware(found) for one in members]


def scalars(found: Sequence[Predicted]) -> dict[str, float]:
    """That of each hardware, from all of its rows."""
    return {members[0].run.hardware: fit_scalar(members) for members in _by_hardware(found)}


def fit_scalar(members: Sequence[Predicted]) -> float:
    """The factor that makes the mean absolute error least. At the least, one row is exact: each is tried."""
    pairs = [(one.step_s, one.run.step_s or 1.0) for one in members]

    def mean(scalar: float) -> float:
        return sum(abs(scalar * made / measured - 1) for made, measured in pairs)

    return min((measured / made for made, measured in pairs), key=mean, default=1.0)


def _by_hardware(found: Sequence[Predicted]) -> list[list[Predicted]]:
    groups: dict[str, list[Predicted]] = defaultdict(list)
    for one in found:
        groups[one.run.hardware].append(one)
    return list(groups.values())


def case(one: Predicted, scalar: float, alone: bool = False) -> Case:
    """A run as predicted after a scalar."""
    run = one.run
    made = Case(run.source, run.hardware, _label(run), _kind(run), run.step_s or 0.0, scalar * one.step_s)
    return replace(made, reason=_reason(run, made.error, alone) if abs(made.error) > _FAR / 2 else "")


def _kind(run: config.Run) -> str:
    data, split = run.replicate * run.shard > 1, run.tp > 1
    return "DP and TP" if data and split else "TP" if split else "DP" if data else "one rank"


def _label(run: config.Run) -> str:
    return (
        f"{run.model} L{run.layers} d{run.width} s{run.length} mb{run.micro}x{run.accumulate} ac={_recomputed(run)} "
        f"dp{run.replicate * run.shard} tp{run.tp}"
    )


def _recomputed(run: config.Run) -> str:
    return run.ac if run.checkpointed == 1 else f"{run.checkpointed:.0%} of layers"


def _is_nearly_full(run: config.Run) -> bool:
    """Whether it held nine tenths of its device, as measured, else as predicted."""
    return (run.memory_gib or memory.peak_gib(run)) > _NEARLY_FULL * run.device_gib


def _reason(run: config.Run, error: float, alone: bool) -> str:
    """What is known about rows like it that the model leaves out."""
    if alone:
        return "the only model on this hardware: no scalar could be fitted"
    if run.slow_host and run.tp > 1 and run.micro <= 2:
        return "bound by the host: at tp 4 it took 3.1 ms for a layer of 2048, 3.6 for the same ops of 1024"
    if run.slow_host:
        return "host and device take alike: how far the host runs ahead is not modelled"
    if error < 0 and _is_nearly_full(run):
        return "slower than its neighbours in the source: a nearly full memory is not modelled"
    return "not explained"
