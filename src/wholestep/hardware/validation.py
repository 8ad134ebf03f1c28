"""How far predicted step times were from published runs, by device: the table that `foresight.accuracy` writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..typed_json import read

FILE = Path(__file__).parent / "validation.json"


@dataclass(frozen=True)
class Validation:
    """Published runs on one device, compared with the simulator as shipped. Of measured by predicted step times, `low`
    is the 10th percentile, `middle` the median and `high` the 90th; `mean_error` is the mean of
    |predicted - measured| / measured. `sources` are the names of those who published them.
    """

    device: str
    runs: int
    sources: tuple[str, ...]
    mean_error: float
    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        sources = "1 source" if len(self.sources) == 1 else f"{len(self.sources)} sources"
        return (
            f"{self.low:.2f} to {self.high:.2f} times as long were steps of {self.runs} published runs from {sources}, "
            f"median {self.middle:.2f}"
        )


def validation_of(device: str) -> Validation | None:
    """The comparison for a device, by its name; None where no published runs were compared.

    Example:
        >>> print(validation_of(ws.Hardware.preset("dgx-h100").device.name))
    """
    return _table().get(device)


@functools.cache
def _table() -> Mapping[str, Validation]:
    body: dict[str, list[object]] = json.loads(FILE.read_text())
    validations = [cast(Validation, read(Validation, row)) for row in body["devices"]]
    return {validation.device: validation for validation in validations}
