"""The error bars that `wholestep simulate` prints: measured by predicted step times, by device."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from foresight.accuracy.read import Case, data_sheet, hardware_of
from wholestep.hardware.validation import Validation

_LEAST = 5  # runs: fewer have no percentiles


def validations(cases: Iterable[Case]) -> list[Validation]:
    """A row for each device with enough runs. `cases` are predictions of the simulator as shipped, nothing fitted to
    their runs.
    """
    found: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        hardware = hardware_of(case.hardware)
        if hardware is not None:
            found[data_sheet(hardware).name].append(case)
    return [_row(device, some) for device, some in sorted(found.items()) if len(some) >= _LEAST]


def _row(device: str, cases: list[Case]) -> Validation:
    times = sorted(case.measured / case.predicted for case in cases)

    def at(share: float) -> float:
        return round(times[min(round(share * (len(times) - 1)), len(times) - 1)], 3)

    mean = sum(abs(case.error) for case in cases) / len(cases)
    sources = tuple(sorted({case.source for case in cases}))
    return Validation(device, len(cases), sources, round(mean, 4), at(0.1), at(0.5), at(0.9))


def write(path: Path, made_by: str, rows: list[Validation]) -> None:
    """Write the table: `made_by` is the command."""
    body = {"made_by": made_by, "devices": [asdict(row) for row in sorted(rows, key=lambda row: row.device)]}
    path.write_text(json.dumps(body, indent=1) + "\n")
