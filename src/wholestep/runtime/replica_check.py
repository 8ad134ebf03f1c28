"""Before the first call, and every few calls, ranks compare checksums of what has to be equal on them, in one small
collective: the state that they hold alike, and the batch of ranks that compute one result together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
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
from ..plan.strategies import Strategies
from ..tuning import TUNING
from .consistency import OPTIMIZERS, constant_lines, graph_lines, option_lines, state_lines
from .program import Program

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMEOUT_S = 600.0
_POSITIVE = (1 << 62) - 1  # so that a checksum and its negative fit
_MIXERS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, from the golden ratio and from splitmix64
_Said = tuple[tuple[str, ...], tuple[tuple[str, str, int], ...]]
"""Options and numbers of a rank, a line each; axis, name and checksum of what it shares in a call."""
_STEP = "the captured step, with Python values of its arguments,"
_ALIKE = "", "", ""
_DRIFTS = (
    "the same on these ranks: each computes on with what it has",
    "look for what only some ranks do between calls: a scheduler, a load, a change of weights",
)
_OF_ONE_BATCH = (
    "one batch for ranks that compute one result together",
    "draw the batch by the rank's place on the axes of data parallelism alone (a sampler's `rank` and `num_replicas`), "
    'or give each rank its part: TensorParallel(input_dim=...), ContextParallel(inputs="local")',
)
_OF_PARTS = (
    'the same on these ranks, as it is not cut by rows: with semantics="global" they compute one result together',
    'give it a dim of rows, or all ranks the same; with semantics="per_rank" each has a batch of its own',
)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 tensor on the device of `tensor`: the sum of its bits as integers, modulo 2**64."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    if flat.dtype is torch.bool or flat.dtype.itemsize not in _INTEGERS:
        flat = flat.to(torch.uint8)
    return flat.view(_INTEGERS[flat.dtype.itemsize]).sum(dtype=torch.int64)


def ordered_checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The same, of the bits in their order, and of the shape: rows in another order are another batch."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    padded = flat.new_zeros(-(-len(flat) // 8) * 8)
    padded[: len(flat)] = flat
    words = padded.view(torch.int64)
    words += torch.arange(1, len(words) + 1, device=words.device) * _MIXERS[0]
    for mixer in _MIXERS:
        words ^= words >> 31
        words *= mixer
    return words.sum() + hash((*tensor.shape,))


def connects_all_ranks(local: LocalGraph) -> bool:
    """True where the collectives of a program connect all ranks, so that all of them call it as often."""
    met = {str(node.args[-1]) for node, _ in with_bodies(local.graph) if communicates(node)}
    return {axis.name for axis in local.mesh.axes if axis.size > 1} <= met


@dataclass
class ReplicaCheck:
    """Compares what ranks hold alike before the first call and before each `every`-th one. Along the axes of
    data and tokens replicas are equal to the bit; along others each rank may have computed its own, and rounded.
    """

    every: int
    world: World
    strategies: Strategies
    calls: int = 0

    def before(self, program: Program, leaves: Sequence[object]) -> None:
        """Count a call of `program`, and compare if it is time. Raises RankMismatchError, on every rank."""
        if self.calls == 0 or (self.calls + 1) % self.every == 0:
            self._compare(program, leaves)
        self.calls += 1

    def _compare(self, program: Program, leaves: Sequence[object]) -> None:
        state = program.capture.state
        lines = [*chain(*option_lines(state, ())), *state_lines(state)]
        axes = [axis.name for axis in self.world.mesh.axes if axis.size > 1]
        tensors = {axis: program.alike_along(axis) for axis in axes}
        batch = {axis: self._shared(program, leaves, axis) for axis in axes}
        sums = {axis: self._sums(map(checksum, tensors[axis].values())) for axis in axes}
        of_batch = {axis: self._sums(map(ordered_checksum, batch[axis].values())) for axis in axes}
        number = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:8], "big") & _POSITIVE
        differs = {axis: self._differs(torch.cat([sums[axis], of_batch[axis]]), number, axis) for axis in axes}
        flags = torch.stack([differs[axis] for axis in axes])
        if len(axes) > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        if not flags.any():
            return
        flagged = [axis for axis, flag in zip(axes, cast("list[int]", flags.tolist()), strict=True) if flag]
        ranks = Rendezvous.of_job(_TIMEOUT_S)
        label, what = ranks.next_label("replicas"), "the search for what differs"
        numbers = {axis: cast("list[int]", of_batch[axis].tolist()) for axis in flagged}
        shared = [(a, name, total) for a in flagged for name, total in zip(batch[a], numbers[a], strict=True)]
        rows: list[_Said] = ranks.gather(label, (tuple(lines), tuple(shared)), what, _Said)
        explained = [self._explain(axis, tensors[axis], sums[axis], rows) for axis in flagged]  # all take part in each
        texts = ranks.gather(f"{label}/texts", next(filter(any, explained), _ALIKE), what, tuple[str, str, str])
        problem, needed, next_step = next(filter(any, texts), _ALIKE)
        if problem:
            problem = f"{problem}; found before call {self.calls + 1}, with check_every={self.every}"
            raise RankMismatchError(problem, needed, next_step)

    def _shared(self, program: Program, leaves: Sequence[object], axis: str) -> dict[str, torch.Tensor]:
        """What has to be alike along `axis` of a call: arguments; and the step, as Python numbers among these are
        constants of a first program.
        """
        shared = program.shared_along(axis, leaves, self.strategies.given_whole(axis))
        data = self.strategies.options
        per_rank = data.semantics == "per_rank" and axis in data.axes(self.world.mesh)
        if self.calls == 0 and not per_rank:
            lines = [*graph_lines(program.capture, self.world.device), *constant_lines(program.capture)]
            text = "\n".join(line for line in lines if not line.strip().startswith("return "))  # a rank may log more
            shared[_STEP] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        return shared

    def _sums(self, sums: Iterable[torch.Tensor]) -> torch.Tensor:
        """Checksums as one tensor, on the device of the collectives."""
        moved = [tensor.to(self.world.device, non_blocking=True) for tensor in sums]
        return torch.stack(moved) if moved else torch.zeros(0, dtype=torch.int64, device=self.world.device)

    def _differs(self, sums: torch.Tensor, number: int, axis: str) -> torch.Tensor:
        """1 where ranks along `axis` have other checksums, or other numbers; else 0."""
        odd = 2 * torch.arange(len(sums), device=sums.device) + 1
        local = torch.stack([(sums * odd).sum() & _POSITIVE, torch.tensor(number, device=sums.device)])
        most = torch.cat([local, -local])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group(axis))
        return (most[:2] != -most[2:]).any().to(torch.int64)

    def _group(self, axis: str) -> dist.ProcessGroup:
        assert self.world.devices is not None, "there are other ranks"
        return self.world.devices.get_group(axis)

    def _explain(
        self, axis: str, tensors: Mapping[str, torch.Tensor], sums: torch.Tensor, rows: Sequence[_Said]
    ) -> tuple[str, str, str]:
        """What differs first along `axis`, of the `rows` of each rank and of what it holds, what was needed and what to
        do; empty where nothing does but rounding.
        """
        group, of_data = self._group(axis), axis in self.strategies.storage_axes(self.world.mesh)
        ranks = dist.get_process_group_ranks(group)
        lines = [rows[rank][0] for rank in ranks]
        other = next((i for i, rank_lines in enumerate(lines) if rank_lines != lines[0]), 0)
        if other:
            theirs = [rank for rank, rank_lines in zip(ranks, lines, strict=True) if rank_lines == lines[other]]
            ours = [rank for rank, rank_lines in zip(ranks, lines, strict=True) if rank_lines == lines[0]]
            return other_value(OPTIMIZERS, ours, lines[0], theirs, lines[other]).found, *_DRIFTS
        shared = [{name: total for along, name, total in rows[rank][1] if along == axis} for rank in ranks]
        for name in shared[0]:
            if text := _sides([by_name.get(name, 0) for by_name in shared], ranks):
                problem = f"{name} is not the same on ranks that share a batch along axis {axis!r}: {text}"
                cut_by_rows = axis in self.strategies.options.axes(self.world.mesh)
                needed, next_step = _OF_PARTS if cut_by_rows else _OF_ONE_BATCH
                return problem, needed, next_step
        parts = [torch.zeros_like(sums) for _ in ranks]
        dist.all_gather(parts, sums, group=group)
        table = cast("list[list[int]]", torch.stack(parts).tolist())
        for i, (name, tensor) in enumerate(tensors.items()):
            text = _sides([row[i] for row in table], ranks)
            if text and (of_data or self._is_far(tensor, ranks[0], group)):
                return f"{name!r} is not the same on ranks that hold the same of it: {text}", *_DRIFTS
        return _ALIKE

    def _is_far(self, tensor: torch.Tensor, first: int, group: dist.ProcessGroup) -> bool:
        """True where a tensor differs from the first rank's by more than rounding."""
        local = tensor.detach().to(self.world.device).contiguous()
        other = local.clone()
        dist.broadcast(other, first, group=group)
        if local.is_complex() or not local.is_floating_point() or not local.numel():
            return True
        apart = (local - other).abs().max().double()
        far = (~(apart <= TUNING.checksum_rounding * other.abs().max().double())).to(torch.int64)
        dist.all_reduce(far, dist.ReduceOp.MAX, group=group)
        return bool(far)


def _sides(values: Sequence[int], ranks: Sequence[int]) -> str:
    """`one value on rank 0, another on rank 1`; empty where all values are equal."""
    first, *later = [[r for r, v in zip(ranks, values, strict=True) if v == value] for value in dict.fromkeys(values)]
    return (
        ", ".join([f"one value on {show_ranks(first)}", *(f"another on {show_ranks(s)}" for s in later[:2])])
        if later
        else ""
    )
