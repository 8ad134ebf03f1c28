"""Sections of lines that ranks compare by fingerprint, and the errors that show the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import RankMismatchError

LAYOUTS, GRAPH, CONSTANTS = "layouts and collectives", "graphs", "constants"
USER_LINES = "lines of the step"  # behind its ops, in order: they explain another section that differs
PER_CALL = (CONSTANTS, GRAPH)  # they depend on the batch: compared among ranks of the same kind of call
SEPARATOR = ": "  # in a line, between the name of a value and the value
UNKNOWN = "?"

_SHOWN = 8

Pair = tuple[Sequence[str], Sequence[str]]  # lines of a section, and of `USER_LINES`
Entry = tuple[str, tuple[tuple[str, str], ...]]
"""What one rank contributes: the fingerprint of its call, and of each section by name."""
Tally = Mapping[Entry, Sequence[tuple[int, int]]]
"""Ranges of ranks (first, last) by the entry that they share: small where ranks agree."""


@dataclass(frozen=True)
class Section:
    """Lines that ranks compare by their fingerprint; the fingerprint UNKNOWN equals any other. `where` returns the
    user's source line behind a line.
    """

    fingerprint: str
    lines: Sequence[str] = ()
    where: Callable[[str], str] = field(default=lambda _: "", compare=False)

    @classmethod
    def of(cls, lines: Sequence[str], where: Callable[[str], str] = lambda _: "") -> Section:
        """These lines."""
        return cls(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24], lines, where)


@dataclass(frozen=True)
class SectionDifference:
    """The first section that differs, and the ranks by its fingerprint."""

    section: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]


def merged(tallies: Iterable[Tally]) -> Tally:
    """One tally of neighbours in rank order; adjacent ranges are joined."""
    out: dict[Entry, list[tuple[int, int]]] = {}
    for tally in tallies:
        for entry, ranges in tally.items():
            into = out.setdefault(entry, [])
            for first, last in ranges:
                if into and into[-1][1] + 1 == first:
                    into[-1] = into[-1][0], last
                else:
                    into.append((first, last))
    return out


def difference(tally: Tally) -> SectionDifference | None:
    """The first section of which ranks have different fingerprints, sections of `PER_CALL` within each kind of call."""
    rows = sorted((ranges[0][0], entry, ranges) for entry, ranges in tally.items())
    calls = list(dict.fromkeys(call for _, (call, _), _ in rows))
    for section in dict.fromkeys(name for _, (_, prints), _ in rows for name, _ in prints):
        for among in calls if section in PER_CALL else [None]:
            groups: dict[str, list[int]] = {}
            for _, (call, prints), ranges in rows:
                fingerprint = dict(prints).get(section, "")
                if fingerprint != UNKNOWN and (among is None or call == among):
                    ranks = [rank for first, last in ranges for rank in range(first, last + 1)]
                    groups.setdefault(fingerprint, []).extend(ranks)
            if len(groups) > 1:
                return SectionDifference(section, tuple((key, tuple(sorted(ranks))) for key, ranks in groups.items()))
    return None


def first_other_call(tally: Tally) -> tuple[str, int]:
    """The first rank's call, and the lowest rank of another call; 0 where there is none."""
    rows = sorted((ranges[0][0], call) for (call, _), ranges in tally.items())
    return rows[0][1], next((rank for rank, call in rows if call != rows[0][1]), 0)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[int, int, str, str]:
    """The number of the first line that differs, the number of lines, and that line on both sides."""
    length = max(len(ours), len(theirs))
    at = next(i for i in range(length) if ours[i : i + 1] != theirs[i : i + 1])
    here, there = ((x[at] if at < len(x) else "nothing more") for x in (ours, theirs))
    return at + 1, length, here, there


def parting(ours: Sequence[str], theirs: Sequence[str], who: str, other: str) -> str:
    """The user's lines at which two programs part, a line each; "" where they take the same ones."""
    if list(ours) == list(theirs):
        return ""
    *_, here, there = _first_difference(ours, theirs)
    return f"\n  the step parts at\n    {who}: {here}\n    {other}: {there}"


def cure(lines: str) -> str:
    """The next step where programs part in `lines` of the step, if they do."""
    if lines:
        return "run this part on every rank: on zeros, with torch.where, or times a tensor that is 0 or 1"
    return "look for code that depends on the rank or on its data"


def other_program(
    rank: int, ours: Pair, other: int, theirs: Pair, section: str, where: Callable[[str], str] | None
) -> RankMismatchError:
    """Shows the first line in which two programs differ, and the user's lines at which they part."""
    at, length, here, there = _first_difference(ours[0], theirs[0])
    lines = parting(ours[1], theirs[1], f"rank {rank}", f"rank {other}")
    next_step = cure(lines)
    if section == GRAPH:
        next_step += "; what may differ between ranks (a batch, its weight) is an argument of the step"
    return RankMismatchError(
        f"rank {rank} and rank {other} compiled different programs; the first difference is at line {at} of "
        f"{length}:\n    rank {rank}: {here}\n    rank {other}: {there}{lines}",
        "the same model, optimizer and options on every rank",
        next_step,
        where(here) if where else "",
    )


def other_value(
    section: str, ranks: Sequence[int], first: Sequence[str], other_ranks: Sequence[int], second: Sequence[str]
) -> RankMismatchError:
    """`weight_decay of group 0: 0.5 on rank 1, 0.01 on rank 0`."""
    _, _, here, there = _first_difference(first, second)
    values = dict(line.split(SEPARATOR, 1) for line in first if SEPARATOR in line)
    name, value = there.split(SEPARATOR, 1) if SEPARATOR in there else here.split(SEPARATOR, 1)
    there = value if SEPARATOR in there else "nothing"
    here = values.get(name, "nothing")
    problem = f"ranks differ in {section}: {name}: {there} on {show_ranks(other_ranks)}, {here} on {show_ranks(ranks)}"
    needed = "the same on every rank: what each one computes for itself would drift apart"
    return RankMismatchError(problem, needed, "look for code that depends on the rank")


def show_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
