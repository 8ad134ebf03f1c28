"""Published training runs beside the simulator: from the data sheet, with a factor of other sources, after one row."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import wholestep as ws
from foresight.accuracy import config, simulated
from foresight.accuracy.read import Case, Left, Row, hardware_of

_FAR, _NEARLY_FULL = 0.2, 0.9
_HOSTED = 0.02
"""Share of a step that the host may cost where it counts as hidden."""
_SEVERAL, _SECANTS = 5, 5
"""Rows that tell a factor where several do, of which one is in the middle; simulations that find what a row tells."""


@dataclass(frozen=True)
class Predicted:
    """A run, seconds of its step on presets, and GiB that its allocator reserves, of a run that reports them. `hosted`:
    the share of the step that a host which takes no time would save.
    """

    run: config.Run
    step_s: float
    peak_gib: float = 0.0
    hosted: float = 0.0

    @property
    def ratio(self) -> float:
        """Measured time by simulated time."""
        return (self.run.step_s or 0.0) / self.step_s


def machine(run: config.Run) -> ws.Hardware | None:
    """The hardware of a run, with its own links."""
    return hardware_of(run.hardware, run.links, run.per_node)


def read(rows: Iterable[Row]) -> tuple[list[Predicted], list[Left]]:
    """Runs that the simulator can be asked about, and the others with the reason."""
    found: list[Predicted] = []
    left: list[Left] = []
    for row in rows:
        run = config.read(row)
        hardware = None if isinstance(run, str) else machine(run)
        where = f"{row['model']} on {row['n_gpus']} {row['hw']}"
        if isinstance(run, str) or hardware is None:
            left.append(Left(row["source_id"], where, run if isinstance(run, str) else "no preset for this hardware"))
            continue
        try:
            held = simulated.peak_gib(run, hardware) if run.memory_gib else 0.0
            step = simulated.step_s(run, hardware)
            hosted = 1 - simulated.step_s(run, hardware, replace(simulated.PREDICTED, host=0.0)) / step
            found.append(Predicted(run, step, held, hosted))
        except ws.WholestepError as error:
            left.append(Left(row["source_id"], where, str(error).splitlines()[0]))
    return found, left


def from_the_data_sheet(found: Sequence[Predicted]) -> list[Case]:
    """Presets as they are: their figures are from data sheets and isolated kernels, but for two of A100."""
    return [case(one, 1.0) for one in found if one.run.step_s]


def by_other_sources(found: Sequence[Predicted]) -> list[Case]:
    """With one factor for a device, from all other sources that ran on it; nothing where there are none."""
    cases: list[Case] = []
    for members in _grouped(found, lambda one: one.run.device):
        for source in sorted({one.run.source for one in members}):
            others = [one for one in members if one.run.source != source]
            if others:
                cases += [case(one, fit_factor(others)) for one in members if one.run.source == source]
    return cases


def after_one_row(found: Sequence[Predicted]) -> list[Case]:
    """With one factor for a source and a hardware, from one of its rows, which is left out: the one of median length by
    simulation. It stands for the profile of a layer that a user makes first.
    """
    cases: list[Case] = []
    for members in _grouped(found, _machine):
        (known,) = _spread(members, 1)
        cases += [case(one, known.ratio) for one in members if one is not known]
    return cases


def by_other_models(found: Sequence[Predicted]) -> list[Case]:
    """With one factor from all rows of a source's other models; where its host matters, with the device's and the
    host's, from a few of them. Nothing where there are none.
    """
    cases: list[Case] = []
    for members in _grouped(found, _machine):
        for name in sorted({one.run.model for one in members}):
            own, others = ([one for one in members if (one.run.model == name) is held] for held in (True, False))
            device, host = _told_by(others, _SEVERAL) if others else ([], [])
            if host:
                rates = _calibrated(device, host)
                cases += [_case(one, _step_s(one, rates)) for one in own]
            elif others:
                cases += [case(one, fit_factor(others)) for one in own]
    return cases


def after_calibration(found: Sequence[Predicted]) -> list[Case]:
    """With what a user measures first: the device's factor on all kernels from one row, and where the host matters, the
    host's factor from a second one. A profiled layer says both; a published row says one. They are left out.
    """
    cases: list[Case] = []
    for members in _grouped(found, _machine):
        device, host = _told_by(members, 1)
        rates = _calibrated(device, host)
        rest = [one for one in members if all(one is not known for known in (*device, *host))]
        cases += [_case(one, _step_s(one, rates)) for one in rest]
    return cases


def _told_by(members: Sequence[Predicted], count: int) -> tuple[list[Predicted], list[Predicted]]:
    """So many rows that tell what the device takes, in which the host matters least, and so many that tell what the
    host takes, in which it matters most; none where it matters in no row. All by simulation: nothing measured is read.
    """
    by_host = sorted(members, key=lambda one: one.hosted)
    most = by_host[-1].hosted
    least = max(by_host[:count][-1].hosted, _HOSTED)
    host = [one for one in by_host if one.hosted >= most / 2] if most >= _HOSTED else []
    return _spread([one for one in by_host if one.hosted <= least], count), _spread(host, count)


def _spread(members: Sequence[Predicted], count: int) -> list[Predicted]:
    """The rows in the middle of so many equal parts, by length."""
    by_length, n = sorted(members, key=lambda one: one.step_s), len(members)
    return [by_length[((2 * i + 1) * n - 1) // (2 * count)] for i in range(count)] if n > count else by_length


def _calibrated(device: Sequence[Predicted], host: Sequence[Predicted]) -> ws.KernelTimes:
    """The device's factor and the host's, each the median of what its rows tell."""
    rates = simulated.PREDICTED
    for _ in range(2 if host else 1):  # one matters a little where the other is measured
        rates = replace(
            rates, device=median(_solved(one, lambda x, now=rates: replace(now, device=x)) for one in device)
        )
        if host:
            rates = replace(rates, host=median(_solved(one, lambda x, now=rates: replace(now, host=x)) for one in host))
    return rates


def _step_s(one: Predicted, rates: ws.KernelTimes) -> float:
    hardware = machine(one.run)
    assert hardware is not None, "it was simulated"
    return simulated.step_s(one.run, hardware, rates)


def _solved(one: Predicted, rates: Callable[[float], ws.KernelTimes]) -> float:
    """The factor with which a run takes what was measured, as far as one between a third and three does that. By
    secants: times are nearly lines in it.
    """
    measured, before, factor = one.run.step_s or 0.0, (0.0, 0.0), 1.0
    for _ in range(_SECANTS):
        took = _step_s(one, rates(factor))
        grows = (took - before[1]) / (factor - before[0]) if took != before[1] else took / factor
        before, factor = (factor, took), min(max(factor + (measured - took) / grows, 1 / 3), 3.0)
        if factor == before[0]:
            break
    return factor


def memory(found: Sequence[Predicted]) -> list[Case]:
    """Peaks of the runs that report one."""
    return [
        Case(one.run.source, one.run.hardware, label(one.run), one.run.model, one.run.memory_gib, one.peak_gib)
        for one in found if one.run.memory_gib
    ]  # fmt: skip


def fit_factor(members: Sequence[Predicted]) -> float:
    """The factor that makes the mean absolute error least. At the least, one row is exact: each is tried."""

    def mean(factor: float) -> float:
        return sum(abs(factor / one.ratio - 1) for one in members)

    return min((one.ratio for one in members), key=mean)


def _machine(one: Predicted) -> tuple[str, str]:
    """What is calibrated: where a source ran. What ran there, its stack says."""
    return one.run.source, one.run.hardware


def _grouped(found: Sequence[Predicted], key: Callable[[Predicted], object]) -> list[list[Predicted]]:
    groups: dict[object, list[Predicted]] = defaultdict(list)
    for one in found:
        if one.run.step_s:
            groups[key(one)].append(one)
    return list(groups.values())


def case(one: Predicted, factor: float) -> Case:
    """A run as predicted after a factor."""
    return _case(one, factor * one.step_s)


def _case(one: Predicted, step_s: float) -> Case:
    run = one.run
    made = Case(run.source, run.hardware, label(run), kind(run), run.step_s or 0.0, step_s)
    return replace(made, reason=_reason(one, made.error) if abs(made.error) > _FAR / 2 else "")


def kind(run: config.Run) -> str:
    """What is parallel."""
    data, split = run.replicate * run.shard > 1, run.tp > 1
    if run.stages > 1:
        nodes = "several nodes" if run.stages * run.tp * run.replicate * run.shard > run.per_node else "one node"
        return f"pipeline, {nodes}"
    return "DP and TP" if data and split else "TP" if split else "DP" if data else "one rank"


def label(run: config.Run) -> str:
    """Model, sizes, recompute, ranks, stack."""
    again = run.ac if run.checkpointed == 1 else f"{run.checkpointed:.0%} of layers"
    stages = f"pp{run.stages} " if run.chunks == 1 else f"pp{run.stages}x{run.chunks} "
    return (
        f"{run.model} L{run.layers} d{run.width} s{run.length} mb{run.micro}x{run.accumulate} ac={again} "
        f"dp{run.replicate * run.shard} tp{run.tp} {stages if run.stages > 1 else ''}{run.stack.name}"
    )


def _reason(one: Predicted, error: float) -> str:
    """What is known about rows like it that the simulator leaves out."""
    if error < 0 and (one.run.memory_gib or 0) > _NEARLY_FULL * one.run.device_gib:
        return "a nearly full memory: the allocator's retries are not modelled"
    if one.run.stack.start_us > 0 and one.run.width <= 2048:
        return "bound by the host, whose time for a layer differs between runs"
    return "not explained"
