"""CSV files of measurements, and the machine that a row's name of a device means."""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import wholestep as ws
from wholestep.hardware.device import Device
from wholestep.hardware.presets import LINKS

Row = dict[str, str]
_FIGURE = r"\d+(?:\.\d+)?"

# the first whose pattern is found in what a source calls its hardware
_MACHINES = (
    (r"a3", "a3-mega"), (r"b[23]00", "b200-nvl72"), (r"h200", "h200"), (r"h100.*\b9[456] ?gi?b", "h100-96gb-500w"),
    (r"h100", "dgx-h100"), (r"a100.*\b40 ?gi?b", "dgx-a100-40gb"), (r"a100", "dgx-a100"),
)  # fmt: skip
_BOARDS_OF_4 = {"dgx-a100": "hgx-a100-4", "dgx-h100": "hgx-h100-4", "h200": "hgx-h200-4"}
_KINDS_OF_LINK = (r"\broce", "roce"), (r"\befa", "efa"), (r"ethernet|\btcp", "ethernet"), (r"infiniband", "infiniband")
_RATE = re.compile(r"(\d+) ?gb(?:it/s|/s|ps)[ -]*(?:a |per )?(gpu|node)")


@dataclass(frozen=True)
class Case:
    """One row with what was measured and what is predicted; `group` is what a fold leaves out as a whole."""

    source: str
    hardware: str
    label: str
    group: str
    measured: float
    predicted: float
    reason: str = ""

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured; above 0 where it is too slow or too large."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Left:
    """One row that cannot be predicted, and why."""

    source: str
    label: str
    reason: str


def rows(path: Path, needed: Iterable[str]) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        SystemExit: it is missing, or lacks a column.
    """
    try:
        with path.open(newline="") as file:
            found = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from error
    lacking = sorted(set(needed) - set(found[0] if found else ()))
    if found and lacking:
        raise SystemExit(f"{path} has no column {', '.join(lacking)}")
    return found


def data_sheet(hardware: ws.Hardware) -> Device:
    """The device of hardware that is described, as every preset is."""
    assert isinstance(hardware.device, Device), "presets have data sheets"
    return hardware.device


@cache
def hardware_of(name: str, links: str = "", per_node: int = 8) -> ws.Hardware | None:
    """The preset that a name of hardware means; None where there is none. `links`: what a source says of those between
    nodes, as "400 Gbit/s a node" or "1600 Gbps node-node interconnect (RoCE)"; else they are the preset's. Of a node
    of four the board is one without a switch.
    """
    preset = next((preset for pattern, preset in _MACHINES if re.search(pattern, name.lower())), None)
    if preset is None:
        return None
    hardware = ws.Hardware.preset(_BOARDS_OF_4.get(preset, preset) if per_node == 4 else preset)
    rate = _RATE.search(links.lower())
    if rate is None:
        return hardware
    gbit = int(rate[1]) / (per_node if rate[2] == "node" else 1)
    kinds = (kind for pattern, kind in _KINDS_OF_LINK if re.search(pattern, links.lower()))
    kind = next(kinds, hardware.levels[-1].name.partition("-")[0])
    near = LINKS.get(f"{kind}-{gbit:g}") or LINKS[f"{kind}-400"]
    made = replace(near, name=f"{kind}-{gbit:g}", bytes_per_us=gbit / 8 * 1e3)
    return replace(hardware, name=f"{hardware.name}+{made.name}", levels=(*hardware.levels[:-1], made))


def number(row: Row, column: str) -> float | None:
    """A figure, the middle of a range (6100-6300), or a share of a figure (30% of 95); None where the cell has none."""
    text = row.get(column, "").strip().replace(",", "")
    if found := re.fullmatch(rf"({_FIGURE})-({_FIGURE})", text):
        return (float(found[1]) + float(found[2])) / 2
    if found := re.fullmatch(rf"({_FIGURE}) ?% of ({_FIGURE})", text):
        return float(found[1]) * float(found[2]) / 100
    try:
        return float(text)
    except ValueError:
        return None


def whole(row: Row, column: str, default: int = 0) -> int:
    """A whole number; `default` where there is none."""
    found = number(row, column)
    return default if found is None else round(found)
