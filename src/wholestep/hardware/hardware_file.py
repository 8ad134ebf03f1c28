"""Hardware as JSON: written field by field, read with a check that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

from ..errors import PlanError
from .curves import ALGORITHMS, KINDS

if TYPE_CHECKING:
    from .hardware import Hardware

FORMAT = 1
_SIMPLE = {int: "a whole number", float: "a number", str: "a text"}


def load(path: str | Path) -> Hardware:
    """Read a file of `Hardware.save`.

    Raises:
        PlanError: the file is missing or not JSON, or a field is missing, unknown or of the wrong type.
    """
    try:
        body = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(
            f"hardware {str(path)!r} cannot be read: {error}", "JSON as `Hardware.save` writes it"
        ) from error
    return from_json(body, str(path))


def to_json(hardware: Hardware) -> dict[str, Any]:
    """The fields of `hardware`, and the version of the format."""
    return {"format": FORMAT, **asdict(hardware)}


def from_json(body: Any, name: str = "hardware") -> Hardware:
    """Inverse of `to_json`. Errors name the file `name`."""
    from .hardware import Hardware

    if not isinstance(body, Mapping) or cast(Mapping[str, Any], body).get("format") != FORMAT:
        found = cast(Mapping[str, Any], body).get("format") if isinstance(body, Mapping) else body
        raise PlanError(f"{name}: format is {found!r}", f'an object with "format": {FORMAT}')
    given = {key: value for key, value in cast(Mapping[str, Any], body).items() if key != "format"}
    return cast("Hardware", _read(Hardware, given, name, ""))


def check(hardware: Hardware) -> None:
    """Raise PlanError if a figure is out of range; the message has the path of its field."""
    found = next(_wrong_figures(hardware, ""), None) or next(_wrong_levels(hardware), None)
    if found:
        where, value, needed = found
        raise PlanError(f"hardware {hardware.name!r}: {where} is {value!r}", needed, "correct that field")


_Figure = tuple[str, object, str]
_ABOVE_0 = {
    "memory_bytes", "memory_bytes_per_us", "memory_rate", "processors", "flops_per_us", "rate", "m", "n",
    "bytes_per_us", "least_ranks",
}  # fmt: skip
_ONE_OF = {"kind": KINDS, "algorithm": tuple(ALGORITHMS)}
_AT_LEAST_1 = {"contention", "overlap_slowdown"}
_FILLED = {"ceilings", "levels", "regimes"}


def _wrong_figures(value: Any, at: str) -> Iterator[_Figure]:
    """Fields at any depth whose values are out of range."""
    for one in fields(value):
        found, where = getattr(value, one.name), f"{at}.{one.name}" if at else one.name
        if isinstance(found, tuple):
            if one.name in _FILLED and not found:
                yield where, [], "at least one"
            for i, inner in enumerate(cast(tuple[Any, ...], found)):
                if is_dataclass(inner):
                    yield from _wrong_figures(inner, f"{where}[{i}]")
        elif is_dataclass(found):
            yield from _wrong_figures(found, where)
        elif one.name in _ONE_OF and found not in _ONE_OF[one.name]:
            yield where, found, f"one of {', '.join(_ONE_OF[one.name])}"
        elif one.name in _ABOVE_0 and not found > 0:
            yield where, found, "a number above 0"
        elif one.name in _AT_LEAST_1 and not found >= 1:
            yield where, found, "at least 1"
        elif isinstance(found, float) and not 0 <= found < float("inf"):
            yield where, found, "a finite number, 0 or above"


def _wrong_levels(hardware: Hardware) -> Iterator[_Figure]:
    inner, last = 1, len(hardware.levels) - 1
    for i, level in enumerate(hardware.levels):
        if not (i == last and level.ranks == 0) and (level.ranks <= inner or level.ranks % inner):
            yield f"levels[{i}].ranks", level.ranks, f"a multiple of {inner}, above it (0, for any number, in the last)"
        inner = max(level.ranks, 1)


def _read(kind: Any, value: Any, name: str, at: str) -> Any:
    """`value` as a `kind`: an object as a dataclass, a list as a tuple, a number or text unchanged. A union of
    dataclasses is read as the one of which `value` has all required fields, else as the first.
    """
    if get_origin(kind) is UnionType:
        kind = _alternative(get_args(kind), value)
    if is_dataclass(kind):
        return _object(cast(type[Any], kind), value, name, at)
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(name, at, value, "a list")
        inner = get_args(kind)[0]
        return tuple(_read(inner, one, name, f"{at}[{i}]") for i, one in enumerate(cast(list[Any], value)))
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise _wrong(name, at, value, _SIMPLE[kind])
    return float(value) if kind is float else value


def _object(kind: type[Any], value: Any, name: str, at: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(name, at, value, f"an object ({kind.__name__})")
    given = cast(Mapping[str, Any], value)
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)
    prefix = f"{at}." if at else ""
    for key in given:
        if key not in known:
            raise PlanError(
                f"{name}: unknown field {prefix}{key}", f"one of {', '.join(known)}", "correct or remove it"
            )
    for key, one in known.items():
        if key not in given and one.default is MISSING:
            raise PlanError(f"{name}: field {prefix}{key} is missing", _named(hints[key]), "add it")
    return kind(**{key: _read(hints[key], one, name, f"{prefix}{key}") for key, one in given.items()})


def _alternative(kinds: tuple[type[Any], ...], value: object) -> type[Any]:
    given = set(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else set[str]()
    required = ({f.name for f in fields(kind) if f.default is MISSING} for kind in kinds)
    return next((kind for kind, names in zip(kinds, required, strict=True) if names <= given), kinds[0])


def _named(kind: Any) -> str:
    return _SIMPLE.get(kind, "a list" if get_origin(kind) is tuple else "an object")


def _wrong(name: str, at: str, found: object, needed: str) -> PlanError:
    return PlanError(f"{name}: {at or 'the file'} is {found!r}", needed, "correct that field")
