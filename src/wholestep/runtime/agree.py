"""Ranks compare their programs before the first step, in the job's store: one that differs is an error, not a hang."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import _torch
from ..errors import RankMismatchError
from ..graph import meta
from ..graph.graph import LocalGraph, Role, node_at
from ..graph.text import short_dtype, show_call
from ..graph.verify import is_collective
from ..plan.plan import Plan


def program_lines(local: LocalGraph, plan: Plan) -> list[str]:
    """What must be the same on all ranks: where state rests, and every collective in order. Batch sizes may differ."""
    lines = [f"mesh {plan.mesh}; {plan.strategy}"]
    for i in plan.inputs:
        if i.role in (Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD):
            lines.append(
                f"{i.role.value} {i.name}: {short_dtype(i.meta.dtype)}[{plan.rest[i.name].show(i.meta.shape)}]"
            )
    for node in local.graph.nodes:
        if is_collective(node):
            source = meta.tensor(node_at(node, 0))
            shape = f"{short_dtype(source.dtype)}{list(source.shape)}" if source else ""
            rest = ", ".join(map(str, node.args[1:-1]))
            lines.append(f"collective {show_call(node).split('(')[0]} of {shape} over {node.args[-1]} ({rest})")
    return lines


def order_lines(local: LocalGraph) -> list[str]:
    """Every collective in order: its name, what it is of, over which axis."""
    lines: list[str] = []
    for node in local.graph.nodes:
        if is_collective(node):
            source = meta.tensor(node_at(node, 0))
            shape = f"{short_dtype(source.dtype)}{list(source.shape)}" if source else ""
            lines.append(f"{node.name} of {shape} over {node.args[-1]}")
    return lines


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
    label: str, lines: list[str], failure: str, timeout_s: float, waiting: Callable[[list[int]], None] | None = None
) -> None:
    """Post this rank's program (or why it has none) and compare it with every other rank's.

    Raises:
        RankMismatchError: on every rank, naming the ranks and the first difference, or the rank that failed or is late.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, size, store = dist.get_rank(), dist.get_world_size(), _torch.default_store()
    store.set(f"{label}/{rank}", json.dumps({"lines": lines, "failure": failure}))
    if failure:
        return
    others = _collect(store, label, rank, size, timeout_s, waiting)
    for other, said in sorted(others.items()):
        if said["failure"]:
            raise RankMismatchError(
                f"rank {other} could not compile its step: {said['failure']}",
                "a step that every rank can compile",
                f"read rank {other}'s own error",
            )
    for other, said in sorted(others.items()):
        if said["lines"] != lines:
            _explain(rank, lines, other, said["lines"])


def _collect(
    store: Any, label: str, rank: int, size: int, timeout_s: float, waiting: Callable[[list[int]], None] | None
) -> dict[int, Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    told = time.monotonic() + 5.0
    while len(found) < size - 1:
        for other in range(size):
            if other != rank and other not in found and store.check([f"{label}/{other}"]):
                found[other] = json.loads(store.get(f"{label}/{other}"))
        missing = [r for r in range(size) if r != rank and r not in found]
        if not missing or any(said["failure"] for said in found.values()):
            break
        if time.monotonic() > end:
            raise RankMismatchError(
                f"ranks {missing} compiled no program while rank {rank} did, within {timeout_s:.0f} s",
                "every rank to call the step with the same kind of arguments (structure, training mode, requires_grad)",
                "look for a call that only some ranks make, or raise agree_timeout if those ranks are slow",
            )
        if waiting and time.monotonic() > told:
            waiting(missing)
            told = time.monotonic() + 5.0
        time.sleep(0.01)
    return found


def _explain(rank: int, ours: list[str], other: int, theirs: list[str]) -> None:
    length = max(len(ours), len(theirs))
    at = next(i for i in range(length) if ours[i : i + 1] != theirs[i : i + 1])
    here, there = ((x[at] if at < len(x) else "nothing more") for x in (ours, theirs))
    raise RankMismatchError(
        f"rank {rank} and rank {other} compiled different programs; the first difference is at line {at + 1} of "
        f"{length}:\n    rank {rank}: {here}\n    rank {other}: {there}",
        "the same model, optimizer and options on every rank",
        "look for code that depends on the rank or on its data",
    )
