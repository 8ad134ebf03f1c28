"""Step times with the fitted figures held out too: they are fitted again, to half of the models of every source.

What is fitted are the six figures of the device and of the host that published runs decided (see `cost/presets.py`):
rates of tiles, of attention forward and backward and of memory, what a tile takes besides, what the host takes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

import wholestep as ws
from benchmarks.accuracy import runs, step
from benchmarks.accuracy.config import Run
from benchmarks.accuracy.read import Case, data_sheet, hardware_of
from wholestep.hardware.calibration import Array, simplex

_START = (1.0, 0.6, 0.3, 0.8, 2.0, 50.0)
_ROUNDS, _WIDTH = 50, 0.15


def halves(found: Sequence[runs.Predicted]) -> list[Case]:
    """Models of a name's odd and even place in the alphabet, each predicted by figures and scalars of the others.

    Of vTrain's names that leaves out one width of layers altogether.
    """
    models = sorted({one.run.model for one in found})
    cases: list[Case] = []
    for part in (0, 1):
        train = [one.run for one in found if models.index(one.run.model) % 2 == part]
        test = [one.run for one in found if models.index(one.run.model) % 2 != part]
        if train and test:
            figures = simplex(lambda p, train=train: _loss(p, train), np.log(_START), _WIDTH, _ROUNDS)
            scalars = {name: runs.fit_scalar(made) for name, made in _predicted(figures, train).items()}
            for name, made in _predicted(figures, test).items():
                cases += [runs.case(one, scalars.get(name, 1.0)) for one in made]
    return cases


def _predicted(figures: Array, found: Sequence[Run]) -> dict[str, list[runs.Predicted]]:
    machines = {name: _changed(figures, name) for name in {run.hardware for run in found}}
    host = step.Host(float(np.exp(figures[5])))
    made: dict[str, list[runs.Predicted]] = defaultdict(list)
    for run in found:
        made[run.hardware].append(runs.Predicted(run, step.step_s(run, machines[run.hardware], host)))
    return made


def _changed(figures: Array, name: str) -> ws.Hardware:
    tiles, forward, backward, memory, wave, _ = (float(v) for v in np.exp(figures))
    hardware = hardware_of(name)
    assert hardware is not None, "runs have hardware"
    ceilings = tuple(
        replace(
            top, tiles=tuple(replace(tile, rate=tile.rate * tiles) for tile in top.tiles), attention=forward,
            attention_backward=backward, wave_us=wave,
        ) if top.tiles else top
        for top in data_sheet(hardware).ceilings
    )  # fmt: skip
    return replace(hardware, device=replace(data_sheet(hardware), ceilings=ceilings, memory_rate=memory))


def _loss(figures: Array, found: Sequence[Run]) -> float:
    """Mean errors of each hardware after its scalar; scalars far from 1 count a little too."""
    if figures[3] > 0 or figures[0] > log(1.25):
        return 9.0
    total = 0.0
    for made in _predicted(figures, found).values():
        scalar = runs.fit_scalar(made)
        wrong = [abs(scalar * one.step_s / (one.run.step_s or 1.0) - 1) for one in made]
        total += sum(wrong) / len(wrong) + 0.25 * abs(log(scalar))
    return total
