"""Hardware as JSON: written field by field, read with a check that names what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import PlanError, shown
from ..typed_json import MalformedError, parse, read
from ..typed_values import check_fields
from .curves import ALGORITHMS, KINDS

if TYPE_CHECKING:
    from .hardware import Hardware

FORMAT = 1


def load(path: str | Path) -> Hardware:
    """Read a file of `Hardware.save`.

    Raises:
        PlanError: the file is missing or not JSON, or a field is missing, unknown or of the wrong type.
    """
    try:
        body = parse(Path(path).read_bytes())
    except (OSError, ValueError, MalformedError) as error:  # also a path with a null
        problem = f"hardware {str(path)!r} cannot be read: {error}"
        raise PlanError(problem, "JSON as `Hardware.save` writes it") from error
    return from_json(body, str(path))


def to_json(hardware: Hardware) -> dict[str, Any]:
    """The fields of `hardware`, and the version of the format."""
    return {"format": FORMAT, **asdict(hardware)}


def from_json(body: Any, name: str = "hardware") -> Hardware:
    """Inverse of `to_json`. Errors name the file `name`."""
    from .hardware import Hardware

    if not isinstance(body, Mapping) or cast(Mapping[str, Any], body).get("format") != FORMAT:
        written = cast(Mapping[str, Any], body).get("format") if isinstance(body, Mapping) else body
        raise PlanError(f"{name}: format is {shown(written)}", f'an object with "format": {FORMAT}')
    entries = {key: value for key, value in cast(Mapping[str, Any], body).items() if key != "format"}
    try:
        return cast("Hardware", read(Hardware, entries))
    except MalformedError as error:
        raise PlanError(f"{name}: {error.found}", error.needed, "correct that field") from error


def check(hardware: Hardware) -> None:
    """Raise PlanError if a figure is out of range; the message has the path of its field."""
    fault = next(_wrong_figures(hardware, ""), None) or next(_wrong_levels(hardware), None)
    if fault:
        where, value, needed = fault
        raise PlanError(f"hardware {hardware.name!r}: {where} is {value!r}", needed, "correct that field")


_Figure = tuple[str, object, str]
_ABOVE_0 = {
    "memory_bytes", "memory_bytes_per_us", "memory_rate", "processors", "flops_per_us", "rate", "m", "n",
    "bytes_per_us", "least_ranks", "host_bytes_per_us",
}  # fmt: skip
_ONE_OF = {"kind": KINDS, "algorithm": tuple(ALGORITHMS)}
_AT_LEAST_1 = {"contention", "overlap_slowdown", "ranks_per_core"}
_FILLED = {"ceilings", "levels", "regimes"}


def _wrong_figures(value: Any, at: str) -> Iterator[_Figure]:
    """Fields at any depth whose values are out of range. Raises PlanError: one is of another type."""
    check_fields(value)
    for field in fields(value):
        figure, where = getattr(value, field.name), f"{at}.{field.name}" if at else field.name
        if isinstance(figure, tuple):
            if field.name in _FILLED and not figure:
                yield where, [], "at least one"
            for i, inner in enumerate(cast(tuple[Any, ...], figure)):
                if is_dataclass(inner):
                    yield from _wrong_figures(inner, f"{where}[{i}]")
        elif is_dataclass(figure):
            yield from _wrong_figures(figure, where)
        elif field.name in _ONE_OF and figure not in _ONE_OF[field.name]:
            yield where, figure, f"one of {', '.join(_ONE_OF[field.name])}"
        elif field.name in _ABOVE_0 and not figure > 0:
            yield where, figure, "a number above 0"
        elif field.name in _AT_LEAST_1 and not figure >= 1:
            yield where, figure, "at least 1"
        elif isinstance(figure, float) and not 0 <= figure < float("inf"):
            yield where, figure, "a finite number, 0 or above"


def _wrong_levels(hardware: Hardware) -> Iterator[_Figure]:
    inner, last = 1, len(hardware.levels) - 1
    for i, level in enumerate(hardware.levels):
        if not (i == last and level.ranks == 0) and (level.ranks <= inner or level.ranks % inner):
            yield f"levels[{i}].ranks", level.ranks, f"a multiple of {inner}, above it (0, for any number, in the last)"
        inner = max(level.ranks, 1)
