"""Collectives: what the presets say, and what curves fitted without the sizes or the ranks that are tested say."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import log2

import wholestep as ws
from foresight.accuracy.read import Case, Left, Row, data_sheet, hardware_of, number, whole
from wholestep.hardware.curves import KINDS, curve_us
from wholestep_foresight.calibration import TimeSample, fit_curve

COLUMNS = ("device", "collective", "n_ranks", "ranks_per_node", "message_bytes", "time_us")
LARGE, MIDDLE = 64 << 20, 1 << 20
_FOLDS = 5


@dataclass(frozen=True)
class Measured:
    """One row on its machine."""

    row: Row
    hardware: ws.Hardware
    sample: TimeSample
    algorithm: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What shares a curve."""
        return self.row["device"], self.row["collective"], self.algorithm


def size_class(size_bytes: float) -> str:
    """The three that are reported apart."""
    return ">= 64 MiB" if size_bytes >= LARGE else "1-64 MiB" if size_bytes >= MIDDLE else "< 1 MiB"


def read(rows: Iterable[Row]) -> tuple[list[Measured], list[Left]]:
    """Rows that can be predicted, and the others with the reason."""
    found: list[Measured] = []
    left: list[Left] = []
    for row in rows:
        hardware = hardware_of(row["device"])
        size, us, ranks = (number(row, name) for name in ("message_bytes", "time_us", "n_ranks"))
        label = f"{row['device']} {row['collective']} {row['n_ranks'] or '?'} ranks {row['message_bytes'] or '?'} B"
        if size is None or us is None or ranks is None:
            why = "a peak only: no time" if us is None else "no size" if size is None else "no number of ranks"
            left.append(Left(row.get("source_id", ""), label, why))
        elif hardware is None:
            left.append(Left(row.get("source_id", ""), label, "no preset for this device"))
        elif row["collective"] not in KINDS:
            left.append(Left(row.get("source_id", ""), label, f"no such collective: {row['collective']}"))
        elif ranks < 2 or us <= 0 or size <= 0:
            left.append(Left(row.get("source_id", ""), label, "one rank, no bytes or no time"))
        else:
            n = int(ranks)
            per_node = min(whole(row, "ranks_per_node", hardware.ranks_per_node) or hardware.ranks_per_node, n)
            units = (n, -(-n // per_node), 1) if n > per_node else (n, 1, 1)
            found.append(
                Measured(row, hardware, _sample(size, units, us), _algorithm(hardware, row["collective"], units))
            )
    return found, left


def _sample(size: float, units: tuple[int, ...], us: float) -> TimeSample:
    """Small messages are noise, and count for little."""
    levels = max(i for i, (under, over) in enumerate(pairwise(units)) if under > over)
    weight = 1.0 if size >= LARGE else 0.35 if size >= MIDDLE else 0.03
    return TimeSample(size, units[: levels + 2], us, weight)


def _algorithm(hardware: ws.Hardware, kind: str, units: tuple[int, ...]) -> str:
    """What the preset expects the library to use for a large message."""
    levels = max(i for i, (under, over) in enumerate(pairwise(units)) if under > over)
    rates, late = _links(hardware, levels)
    curves = hardware.levels[levels].curves_for(kind, units[0])
    return min(curves, key=lambda c: curve_us(c, 1 << 30, units[: levels + 2], rates, late)).algorithm


def _links(hardware: ws.Hardware, levels: int) -> tuple[list[float], list[float]]:
    crossed = hardware.levels[: levels + 1]
    return [level.bytes_per_us for level in crossed], [level.latency_us for level in crossed]


def in_sample(found: Iterable[Measured]) -> list[Case]:
    """What the presets say."""
    return [
        _case(one, one.hardware.units_us(one.row["collective"], one.sample.size_bytes, _padded(one))) for one in found
    ]


def by_size(found: Iterable[Measured]) -> list[Case]:
    """Every curve fitted without a fifth of the sizes, tested on those."""
    return _held_out(found, lambda one: round(log2(one.sample.size_bytes)) % _FOLDS)


def by_ranks(found: Iterable[Measured]) -> list[Case]:
    """Every curve fitted without groups of one size, tested on those; only where there are other sizes of groups."""
    return _held_out(found, lambda one: one.sample.units[0])


def _held_out(found: Iterable[Measured], fold: Callable[[Measured], int]) -> list[Case]:
    groups: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
    for one in found:
        groups[one.key].append(one)
    cases: list[Case] = []
    for members in groups.values():
        for number_ in sorted({fold(one) for one in members}):
            train = [one for one in members if fold(one) != number_]
            if len(train) >= 6:
                cases += _fitted(train, [one for one in members if fold(one) == number_])
    return cases


def _fitted(train: list[Measured], test: list[Measured]) -> list[Case]:
    first = train[0]
    rates, late = _links(first.hardware, len(first.sample.units) - 2)
    own = _own_rate(first)
    kind = first.row["collective"]
    ring = first.algorithm in ("ring", "pairwise")
    curve = fit_curve(kind, first.algorithm, [o.sample for o in train], rates, late, own if ring else 0.0)
    return [_case(one, curve_us(curve, one.sample.size_bytes, one.sample.units, rates, late)) for one in test]


def _own_rate(one: Measured) -> float:
    """Bytes per microsecond at which a rank handles the piece that it keeps, where groups of one size cannot tell.

    A ring that reduces adds the last piece that arrives in a step of its own, as fast as it sends; others copy theirs.
    """
    if one.row["collective"] == "reduce_scatter":
        return one.hardware.levels[len(one.sample.units) - 2].bytes_per_us
    passes = 2 if one.row["collective"] == "all_to_all" else 3  # read, written, by way of a buffer
    return data_sheet(one.hardware).memory_bytes_per_us * data_sheet(one.hardware).memory_rate / passes


def _padded(one: Measured) -> tuple[int, ...]:
    units = one.sample.units
    return (*units, *(1 for _ in range(len(one.hardware.levels) + 1 - len(units))))


def _case(one: Measured, us: float) -> Case:
    size = one.sample.size_bytes
    label = f"{one.row['collective']} {one.sample.units[0]} ranks {size / 2**20:g} MiB"
    return Case(
        one.row.get("source_id", ""), one.row["device"], label, size_class(size), one.sample.us, us,
        "messages this small carry some 50 % noise" if size <= 4 << 20 else "",
    )  # fmt: skip
