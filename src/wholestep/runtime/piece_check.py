"""Ranks with batches of their own tell each other, before a call, in how many micro-batches they go through these.

A rank with fewer samples than micro-batches has fewer of them, and runs another program. Where ranks exchange something
in each micro-batch these programs do not meet: they would wait for each other, or take one tensor for another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.call_structure import StepCall, Structure
from ..distributed.host_exchange import HostExchange
from ..distributed.rendezvous import Rendezvous
from ..errors import RankMismatchError
from ..graph.graph import LocalGraph
from ..graph.loop import with_bodies
from ..graph.nodes import communicates
from ..mesh import TIME, Mesh, with_pieces
from ..plan.strategies import Strategies


@dataclass
class PieceCheck:
    """Of the calls of one step. `dims`: the dims that count samples, by leaf, of the calls of one `structure`."""

    strategies: Strategies
    mesh: Mesh
    exchange: HostExchange
    structure: Structure | None = None
    dims: Sequence[tuple[int, int]] = ()

    def check(self, call: StepCall, names: Callable[[], Sequence[str]], programs: Sequence[LocalGraph]) -> None:
        """Raise RankMismatchError, on all ranks, if some have one micro-batch and others several, or other numbers
        where one of the `programs` exchanges something in each (collective). `names` of the leaves of the call.
        """
        leaves = call.leaves
        if call.structure is not self.structure and call.structure != self.structure:
            self.structure, self.dims = call.structure, self._dims_of(names(), leaves)
        rows = [int(leaves[i].shape[dim]) for i, dim in self.dims]
        pieces = max((self.strategies.pieces_of(n) for n in rows if n), default=1)
        self.exchange.give(pieces)
        least, greatest = self.exchange.extremes()
        if least == greatest or (least > 1 and not any(map(self._exchanges_in_each, programs))):
            return
        why = "one exchanges once what others exchange in each" if least == 1 else "ranks exchange gradients in each"
        raise RankMismatchError(
            f"ranks go through their batches in {least} to {greatest} micro-batches, this one through "
            f"{max(rows, default=0)} samples in {pieces}",
            f"as many on every rank: {why}",
            f"give every rank {self.strategies.pieces} samples or more (DataLoader(drop_last=True)), or pad the batch",
        )

    def _dims_of(self, names: Sequence[str], leaves: Sequence[Any]) -> list[tuple[int, int]]:
        mesh = with_pieces(self.mesh, 2)
        return [
            (i, cut.dim)
            for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
            for cut in (self.strategies.batch_cuts(mesh, name, leaf.dim()) if isinstance(leaf, torch.Tensor) else ())
            if TIME in cut.axes
        ]

    def _exchanges_in_each(self, local: LocalGraph) -> bool:
        data = self.strategies.options.axes(self.mesh)
        inside = (node for node, times in with_bodies(local.graph) if times > 1 and communicates(node))
        return any(node.args[-1] in data for node in inside)


def piece_check(strategies: Strategies, mesh: Mesh, ranks: Rendezvous) -> PieceCheck | None:
    """None where all ranks go through their batches in as many micro-batches (collective)."""
    options = strategies.options
    several = any(mesh.axis_size(axis) > 1 for axis in options.axes(mesh))
    if not several or options.semantics != "per_rank" or strategies.micro_batches is None:
        return None
    return PieceCheck(strategies, mesh, HostExchange.of(ranks, 0))
