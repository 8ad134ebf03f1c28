"""Every few calls, ranks compare a checksum of the tensors that should be equal on them, in one small collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
import torch.distributed as dist

from ..distributed.launch import World
from ..distributed.rendezvous import Rendezvous
from ..distributed.sections import other_value, show_ranks
from ..errors import RankMismatchError
from ..graph.graph import LocalGraph
from ..graph.loop import with_bodies
from ..graph.nodes import communicates
from ..tuning import TUNING
from .consistency import OPTIMIZERS, option_lines, state_lines
from .program import Program

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMEOUT_S = 600.0
_POSITIVE = (1 << 62) - 1  # so that a checksum and its negative fit


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 tensor on the device of `tensor`: the sum of its bits as integers, modulo 2**64."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    if flat.dtype is torch.bool or flat.dtype.itemsize not in _INTEGERS:
        flat = flat.to(torch.uint8)
    return flat.view(_INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64)


def connects_all_ranks(local: LocalGraph) -> bool:
    """True where the collectives of a program connect all ranks, so that all of them call it as often."""
    met = {str(node.args[-1]) for node, _ in with_bodies(local.graph) if communicates(node)}
    return {axis.name for axis in local.mesh.axes if axis.size > 1} <= met


@dataclass
class ReplicaCheck:
    """Compares replicas after each `every` calls. Along the axes of `data` they are equal to the bit; along other axes
    each rank may have computed its own, and rounded differently.
    """

    every: int
    world: World
    data: Sequence[str]
    calls: int = 0

    def count(self, program: Program) -> None:
        """Count a call of `program`, and compare if it is time. Raises RankMismatchError, on every rank."""
        self.calls += 1
        if self.calls % self.every == 0:
            self._compare(program)

    def _compare(self, program: Program) -> None:
        state = program.capture.state
        said = [*chain(*option_lines(state, ())), *state_lines(state)]
        axes = [axis.name for axis in self.world.mesh.axes if axis.size > 1]
        held = {axis: program.alike_along(axis) for axis in axes}
        sums = {axis: self._sums(held[axis]) for axis in axes}
        number = int.from_bytes(hashlib.sha256("\n".join(said).encode()).digest()[:8], "big") & _POSITIVE
        differs = {axis: self._differs(sums[axis], number, axis) for axis in axes}
        flags = torch.stack([differs[axis] for axis in axes])
        if len(axes) > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        if not flags.any():
            return
        flagged = [axis for axis, flag in zip(axes, cast("list[int]", flags.tolist()), strict=True) if flag]
        ranks = Rendezvous.of_job(_TIMEOUT_S)
        label, what = ranks.next_label("replicas"), "the search for what differs"
        lines: list[tuple[str, ...]] = ranks.gather(label, said, what, tuple[str, ...])
        own = [self._explain(axis, held[axis], sums[axis], lines) for axis in flagged]  # all take part in each
        texts = ranks.gather(f"{label}/texts", next((text for text in own if text), ""), what, str)
        found = next((text for text in texts if text), "")
        if found:
            what = f"{found}; found after call {self.calls}, with check_every={self.every}"
            next_step = "look for what only some ranks do between calls: a scheduler, a load, a change of weights"
            raise RankMismatchError(what, "the same on these ranks: each computes on with what it has", next_step)

    def _sums(self, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One checksum for each tensor, on the device of the collectives."""
        if not held:
            return torch.zeros(0, dtype=torch.int64, device=self.world.device)
        return torch.stack([checksum(tensor).to(self.world.device, non_blocking=True) for tensor in held.values()])

    def _differs(self, sums: torch.Tensor, number: int, axis: str) -> torch.Tensor:
        """1 where ranks along `axis` have other checksums, or other numbers; else 0."""
        odd = 2 * torch.arange(len(sums), device=sums.device) + 1
        own = torch.stack([(sums * odd).sum() & _POSITIVE, torch.tensor(number, device=sums.device)])
        most = torch.cat([own, -own])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group(axis))
        return (most[:2] != -most[2:]).any().to(torch.int64)

    def _group(self, axis: str) -> dist.ProcessGroup:
        assert self.world.devices is not None, "there are other ranks"
        return self.world.devices.get_group(axis)

    def _explain(
        self, axis: str, held: Mapping[str, torch.Tensor], sums: torch.Tensor, said: Sequence[tuple[str, ...]]
    ) -> str:
        """What differs first along `axis`, of what each rank `said`; empty where nothing does but rounding."""
        group = self._group(axis)
        ranks = dist.get_process_group_ranks(group)
        lines = [said[rank] for rank in ranks]
        other = next((i for i, one in enumerate(lines) if one != lines[0]), 0)
        if other:
            theirs = [rank for rank, one in zip(ranks, lines, strict=True) if one == lines[other]]
            ours = [rank for rank, one in zip(ranks, lines, strict=True) if one == lines[0]]
            return other_value(OPTIMIZERS, ours, lines[0], theirs, lines[other]).found
        rows = [torch.zeros_like(sums) for _ in ranks]
        dist.all_gather(rows, sums, group=group)
        table = cast("list[list[int]]", torch.stack(rows).tolist())
        for i, (name, tensor) in enumerate(held.items()):
            values = [row[i] for row in table]
            if len(set(values)) > 1 and (axis in self.data or self._is_far(tensor, ranks[0], group)):
                sides = [[r for r, v in zip(ranks, values, strict=True) if v == one] for one in dict.fromkeys(values)]
                parts = [f"one value on {show_ranks(sides[0])}", *(f"another on {show_ranks(s)}" for s in sides[1:3])]
                return f"{name!r} is not the same on ranks that hold the same of it: {', '.join(parts)}"
        return ""

    def _is_far(self, tensor: torch.Tensor, first: int, group: dist.ProcessGroup) -> bool:
        """True where a tensor differs from the first rank's by more than rounding."""
        own = tensor.detach().to(self.world.device).contiguous()
        other = own.clone()
        dist.broadcast(other, first, group=group)
        if own.is_complex() or not own.is_floating_point() or not own.numel():
            return True
        apart = (own - other).abs().max().double()
        far = (~(apart <= TUNING.checksum_rounding * other.abs().max().double())).to(torch.int64)
        dist.all_reduce(far, dist.ReduceOp.MAX, group=group)
        return bool(far)
