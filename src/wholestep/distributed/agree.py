"""Ranks compare their programs before the first step, in the job's store: one that differs is an error, not a hang."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from .. import _torch
from ..errors import RankMismatchError

LAYOUTS, GRAPH, CONSTANTS = "layouts and collectives", "graphs", "constants"
PER_CALL = (CONSTANTS, GRAPH)  # follow from the batch: compared among ranks that were given the like
SAYS = ": "  # in a line, between the name of a value and the value
UNKNOWN = "?"

_PIECE_BYTES = 4 << 20  # a store takes values of 8 MiB at most
_POSTED_S = 10.0  # for what another rank is about to post
_TELL_S = 5.0  # between two words on who is waited for
_POLL_S = 0.1
_SHOWN = 8


@dataclass(frozen=True)
class Section:
    """Lines that ranks compare by their fingerprint; one of UNKNOWN is compared with none.

    `where` gives the user's line that a line comes from.
    """

    print: str
    lines: Sequence[str] = ()
    where: Callable[[str], str] = field(default=lambda _: "", compare=False)

    @classmethod
    def of(cls, lines: Sequence[str], where: Callable[[str], str] = lambda _: "") -> Section:
        """These lines."""
        return cls(hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24], lines, where)


def from_first_rank(
    label: str, value: list[str], timeout_s: float, what: str = "in which order collectives run"
) -> list[str]:
    """The first rank's `value`, on every rank. `what` it says is for the error.

    Raises:
        RankMismatchError: the first rank does not say it in time.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    rank, store = dist.get_rank(), _torch.default_store()
    if rank == 0:
        store.set(label, json.dumps(value))
        return value
    try:
        store.wait([label], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankMismatchError(
            f"rank 0 did not say within {timeout_s:g} s {what}",
            "every rank to compile its step",
            "read rank 0's own error, or give a longer agree_timeout",
        ) from error
    return list(json.loads(store.get(label)))


def agree(
    label: str, said: Mapping[str, Section], failure: str, timeout_s: float,
    waiting: Callable[[list[int]], None] | None = None, call: str = "",
) -> Others:  # fmt: skip
    """Compare what this rank says of its program (or why it has none) with what every other rank says.

    A rank posts one fingerprint of each section; the last one to come compares them all, and posts the verdict. Lines
    are exchanged where they differ. Those of `PER_CALL` are compared among ranks of the same `call` alone.

    Raises:
        RankMismatchError: on every rank, naming the ranks and the first difference, or the rank that failed or is late.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Others(0, True)
    meeting = Meeting(_torch.default_store(), label, dist.get_rank(), dist.get_world_size(), timeout_s)
    return meeting.hold(said, failure, waiting, call)


@dataclass(frozen=True)
class Others:
    """What became of a comparison: `first` is the lowest rank whose call is another one than the first rank's, or 0;
    `is_alike` is true on ranks whose call is the first rank's.
    """

    first: int
    is_alike: bool


@dataclass(frozen=True)
class Meeting:
    """One comparison of all ranks, by way of `store`."""

    store: Any
    label: str
    rank: int
    size: int
    timeout_s: float

    def hold(
        self, said: Mapping[str, Section], failure: str, waiting: Callable[[list[int]], None] | None, call: str
    ) -> Others:
        """As `agree`."""
        if failure:
            self._settle({"failed": [self.rank, failure]})
            return Others(0, True)
        prints = {name: section.print for name, section in said.items()}
        self.store.set(f"{self.label}/{self.rank}", json.dumps({"prints": prints, "call": call}))
        if self.store.add(f"{self.label}/count", 1) == self.size:
            self._settle(self._verdict())
        verdict = self._wait(waiting)
        if "failed" in verdict:
            other, text = verdict["failed"]
            raise RankMismatchError(
                f"rank {other} could not compile its step: {text}",
                "a step that every rank can compile",
                f"read rank {other}'s own error",
            )
        if "late" in verdict:
            raise self._too_late(verdict["late"])
        if "section" in verdict:
            self._explain(verdict, said)
        return Others(verdict["other"], call == verdict["call"])

    def _settle(self, verdict: Mapping[str, Any]) -> None:
        """Post the verdict, unless there is one."""
        if self.store.add(f"{self.label}/verdicts", 1) == 1:
            self.store.set(f"{self.label}/verdict", json.dumps(verdict))

    def _verdict(self) -> dict[str, Any]:
        """What differs, and which ranks hold what, by all fingerprints."""
        found = self.store.multi_get([f"{self.label}/{rank}" for rank in range(self.size)])
        posted = [json.loads(one) for one in found]
        calls = [one["call"] for one in posted]
        for section in dict.fromkeys(name for one in posted for name in one["prints"]):
            for among in [None] if section not in PER_CALL else dict.fromkeys(calls):
                groups: dict[str, list[int]] = {}
                for rank, one in enumerate(posted):
                    said = one["prints"].get(section, "")
                    if said != UNKNOWN and (among is None or one["call"] == among):
                        groups.setdefault(said, []).append(rank)
                if len(groups) > 1:
                    return {"section": section, "groups": list(groups.items())}
        return {"call": calls[0], "other": next((rank for rank, one in enumerate(calls) if one != calls[0]), 0)}

    def _wait(self, waiting: Callable[[list[int]], None] | None) -> dict[str, Any]:
        """The verdict. Whoever waits too long says who is late, for all."""
        key, pause = f"{self.label}/verdict", 0.001
        start = told = time.monotonic()
        while not self.store.check([key]):
            now = time.monotonic()
            if now - start > self.timeout_s:
                self._settle({"late": self._missing()})
                wait_for(self.store, key, _POSTED_S)
                break
            if waiting and now - told > _TELL_S:
                waiting(self._missing())
                told = now
            time.sleep(pause)
            pause = min(1.2 * pause, _POLL_S)
        return json.loads(self.store.get(key))

    def _missing(self) -> list[int]:
        """Ranks that have posted nothing."""
        return [r for r in range(self.size) if r != self.rank and not self.store.check([f"{self.label}/{r}"])]

    def _too_late(self, ranks: list[int]) -> RankMismatchError:
        if self.rank in ranks or not ranks:
            return RankMismatchError(
                f"rank {self.rank} compiled its program when others no longer waited for it ({self.timeout_s:.0f} s)",
                "all ranks to call the step at about the same time",
                "find out why this rank is slow, or raise agree_timeout",
            )
        return RankMismatchError(
            f"ranks {ranks} compiled no program while rank {self.rank} did, within {self.timeout_s:.0f} s",
            "every rank to call the step with the same kind of arguments (structure, training mode, requires_grad)",
            "look for a call that only some ranks make, or raise agree_timeout if those ranks are slow",
        )

    def _explain(self, verdict: Mapping[str, Any], said: Mapping[str, Section]) -> None:
        """Exchange the lines of the section that differs: the lowest rank of those that say the same posts them."""
        section, groups = str(verdict["section"]), cast("list[tuple[str, list[int]]]", verdict["groups"])
        own = next((print_ for print_, ranks in groups if self.rank in ranks), groups[0][0])
        for print_, ranks in groups:
            if ranks[0] == self.rank:
                _post(self.store, f"{self.label}/lines/{print_}", said[section].lines if section in said else ())
        theirs = next(print_ for print_, _ in groups if print_ != own) if own == groups[0][0] else groups[0][0]
        texts = {name: _read(self.store, f"{self.label}/lines/{name}") for name in (own, theirs)}
        ranks = dict(groups)
        if section in (LAYOUTS, GRAPH):
            rank = self.rank if self.rank in ranks[own] else ranks[own][0]
            where = said[section].where if section in said and self.rank in ranks[own] else None
            raise _other_program(rank, texts[own], ranks[theirs][0], texts[theirs], section, where)
        first, second = groups[0][0], theirs if own == groups[0][0] else own
        raise other_value(section, ranks[first], texts[first], ranks[second], texts[second])


def _post(store: Any, key: str, lines: Sequence[str]) -> None:
    data = zlib.compress(json.dumps(list(lines)).encode(), 1)
    pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, str(len(pieces)))


def wait_for(store: Any, key: str, timeout_s: float) -> None:
    """Wait for what another rank is about to post.

    Raises:
        RankMismatchError: it does not.
    """
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankMismatchError(
            f"a rank did not say within {timeout_s:g} s what the others have to compare with",
            "ranks that live until all have compared their programs",
            "read the errors of the other ranks",
        ) from error


def _read(store: Any, key: str) -> list[str]:
    wait_for(store, key, _POSTED_S)
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    return json.loads(zlib.decompress(b"".join(pieces)))


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[int, int, str, str]:
    """The number of the line, how many there are, and what is there on both sides."""
    length = max(len(ours), len(theirs))
    at = next(i for i in range(length) if ours[i : i + 1] != theirs[i : i + 1])
    here, there = ((x[at] if at < len(x) else "nothing more") for x in (ours, theirs))
    return at + 1, length, here, there


def _other_program(
    rank: int, ours: Sequence[str], other: int, theirs: Sequence[str], section: str,
    where: Callable[[str], str] | None,
) -> RankMismatchError:  # fmt: skip
    at, length, here, there = _first_difference(ours, theirs)
    next_step = "look for code that depends on the rank or on its data"
    if section == GRAPH:
        next_step += "; what may differ between ranks (a batch, its weight) is an argument of the step"
    return RankMismatchError(
        f"rank {rank} and rank {other} compiled different programs; the first difference is at line {at} of "
        f"{length}:\n    rank {rank}: {here}\n    rank {other}: {there}",
        "the same model, optimizer and options on every rank",
        next_step,
        where(here) if where else "",
    )


def other_value(
    section: str, ranks: list[int], first: Sequence[str], others: list[int], second: Sequence[str]
) -> RankMismatchError:
    """`weight_decay of group 0: 0.5 on rank 1, 0.01 on rank 0`."""
    _, _, here, there = _first_difference(first, second)
    known = dict(line.split(SAYS, 1) for line in first if SAYS in line)
    name, value = there.split(SAYS, 1) if SAYS in there else here.split(SAYS, 1)
    there = value if SAYS in there else "nothing"
    here = known.get(name, "nothing")
    return RankMismatchError(
        f"ranks differ in {section}: {name}: {there} on {show_ranks(others)}, {here} on {show_ranks(ranks)}",
        "the same on every rank: what each one computes for itself would drift apart",
        "look for code that depends on the rank",
    )


def show_ranks(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2, 3 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
