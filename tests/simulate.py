"""Runs a captured step for all ranks of a mesh in one process: shards inputs by the plan, joins what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from tests.interpret_stages import run_stages
from wholestep.backend.rank_binding import bound_arguments
from wholestep.capture import Capture
from wholestep.capture import state as held_state
from wholestep.graph.graph import Input, LocalGraph, Role, TrainGraph
from wholestep.graph.nodes import function_of
from wholestep.layout import Layout, chunk_range
from wholestep.mesh import Mesh
from wholestep.passes.base import Pass
from wholestep.plan.plan import Plan
from wholestep.proof.interpret import as_traced, run_all


def run_one(train: TrainGraph, inputs: Sequence[Tensor]) -> list[Any]:
    """Run `train` and return its outputs in order."""
    nodes = [n for n in train.graph.nodes if n.op == "placeholder"]
    env: dict[Node, Any] = dict(zip(nodes, inputs, strict=True))
    for node in train.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = as_traced(node, function_of(node)(*args, **kwargs))
    return [env[n] if isinstance(n, Node) else n for _, n in train.results()]


def index_of(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The part of a tensor of global `shape` that `rank` holds."""
    out: list[slice] = []
    for size, axes in zip(shape, layout.dims, strict=True):
        start = 0
        for axis in axes:
            begin, size = chunk_range(size, mesh.axis_size(axis), mesh.coordinate(rank)[axis])
            start += begin
        out.append(slice(start, start + size))
    return tuple(out)


def cut(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Each rank's own piece of a tensor; row by row in memory where it is not all of it."""
    order = torch.contiguous_format if layout.is_sharded else torch.preserve_format
    here = [layout.is_held_at(mesh.coordinate(rank)) for rank in range(mesh.size)]
    at = [index_of(whole.shape, layout, mesh, rank) for rank in range(mesh.size)]
    return [(whole[at[r]] if here[r] else whole.new_empty(0)).clone(memory_format=order) for r in range(mesh.size)]


def join(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, shape: Sequence[int]) -> Tensor:
    """The tensor of global `shape` whose pieces these are; ranks that hold the same part must hold the same bits."""
    whole = torch.zeros(tuple(shape), dtype=pieces[0].dtype)
    here = [rank for rank in range(mesh.size) if layout.is_held_at(mesh.coordinate(rank))]
    assert all(pieces[rank].numel() == 0 for rank in range(mesh.size) if rank not in here), "others hold nothing"
    whole = whole.to(pieces[here[0]].dtype)
    for rank, piece in ((rank, pieces[rank]) for rank in here):
        at = index_of(shape, layout, mesh, rank)
        assert piece.shape == whole[at].shape, f"rank {rank} holds {list(piece.shape)}, planned {list(whole[at].shape)}"
        whole[at] = piece
    for rank, piece in ((rank, pieces[rank]) for rank in here):
        assert _same(whole[index_of(shape, layout, mesh, rank)], piece), f"rank {rank} holds other values"
    return whole


def _put(held: Tensor | None, new: Tensor) -> Tensor:
    """`new` in the memory of what is held, as a runtime writes it."""
    return new.clone() if held is None else torch.empty_like(held).copy_(new)


def _same(one: Tensor, other: Tensor) -> bool:
    """True for the same values; what is not a number is the same as that."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@dataclass
class Simulation:
    """All ranks of one program. `pieces[name][rank]` is what a rank holds of an input between calls.

    `room` and `passes` are of `run_stages`.

    With `local.across`, a step ends in the next one, or in `flush`; `carried[rank]` is what one leaves to the next.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    pieces: dict[str, list[Tensor]] = field(default_factory=dict)
    carried: list[list[Tensor]] = field(default_factory=list)
    room: int = 0
    passes: tuple[Pass, ...] = ()

    def start(self) -> None:
        """Take parameters, buffers and optimizer state (as the first step would create it) from the captured step."""
        for given in self.plan.inputs:
            if given.role in (Role.PARAM, Role.BUFFER, Role.STATE):
                whole = self._now(given)
                self.pieces[given.name] = cut(whole, self.plan.storage[given.name], self.local.mesh)

    def _now(self, given: Input) -> Tensor:
        state = self.capture.state
        if given.role is not Role.STATE:
            return (state.params.get(given.name) or state.buffers[given.name]).tensor.detach()
        optimizer, owner = list(state.optimizers.values())[given.optimizer], state.params[given.owner].tensor
        group = next(g for g in optimizer.param_groups if any(p is owner for p in g["params"]))
        kept = optimizer.state.get(owner)
        if not kept:
            held_state.prime(optimizer, owner, group, "cpu")
        value = optimizer.state[owner][given.key]
        if not kept:
            del optimizer.state[owner]
        return value

    def step(self, batches: Sequence[Mapping[str, Tensor]]) -> list[list[Any]]:
        """One step with one batch for each rank, by leaf name; returns the results of each rank."""
        numbers = {h.name: self._number(h) for h in self.capture.hypers}
        given = [
            [self._value(i, r, batches[r], numbers) for i in self.plan.inputs] for r in range(self.local.mesh.size)
        ]
        local = self.local
        if local.across is not None and not self.carried:
            local = local.across[0]
        return self._run(local, given)

    def flush(self) -> None:
        """Complete what is carried."""
        if self.local.across is not None and self.carried:
            flush = self.local.across[1]
            kept, ranks = [i for i in flush.inputs if i.role is not Role.CARRY], range(self.local.mesh.size)
            self._run(flush, [[self._value(i, r, {}, {}) for i in kept] for r in ranks])

    def _run(self, local: LocalGraph, given: list[list[Tensor]]) -> list[list[Any]]:
        if any(i.role is Role.CARRY for i in local.inputs):
            given = [[*row, *carried] for row, carried in zip(given, self.carried, strict=True)]
        if local.stage_axis:
            return self._run_stages(local, given)
        made = run_all(local, given, bound_arguments)
        for position, i in enumerate(local.inputs):
            if i.name in self.pieces:
                self.pieces[i.name] = [row[position] for row in given]
        for position, output in enumerate(local.outputs):
            if output.kind == "update":
                held = self.pieces.get(output.target, [None] * len(made))
                self.pieces[output.target] = [_put(h, row[position]) for h, row in zip(held, made, strict=True)]
        kinds = [o.kind for o in local.outputs]
        self.carried = [[x for x, kind in zip(row, kinds, strict=True) if kind == "carry"] for row in made]
        self.carried = self.carried if "carry" in kinds else []
        return [[x for x, kind in zip(row, kinds, strict=True) if kind == "result"] for row in made]

    def _run_stages(self, local: LocalGraph, given: list[list[Tensor]]) -> list[list[Any]]:
        """Each rank runs and updates what its stage has."""
        out: list[list[Any]] = []
        ran = run_stages(local, given, self.room, self.passes)
        for position, i in enumerate(local.inputs):
            if i.name in self.pieces:
                self.pieces[i.name] = [row[position] for row in given]
        for rank, (program, made) in enumerate(ran):
            row: list[Any] = []
            for output, value in zip(program.outputs, made, strict=True):
                if output.kind == "update":
                    held = self.pieces.setdefault(output.target, [torch.empty(0)] * len(ran))
                    held[rank] = value.clone()
                else:
                    row.append(value)
            out.append(row)
        return out

    def _number(self, hyper: held_state.Hyper) -> float:
        group = list(self.capture.state.optimizers.values())[hyper.optimizer].param_groups[hyper.group]
        return float(group[hyper.key] if hyper.index is None else group[hyper.key][hyper.index])

    def _value(self, i: Input, rank: int, batch: Mapping[str, Tensor], numbers: Mapping[str, float]) -> Tensor:
        if i.role is Role.HYPER:
            return torch.tensor(numbers[i.name], dtype=torch.float64)
        if i.role is Role.CONST:
            return self.local.constants[i.name]
        return batch[i.name] if i.role is Role.BATCH else self.pieces[i.name][rank]

    def whole(self, name: str) -> Tensor:
        """An input as one tensor."""
        given = next(i for i in self.plan.inputs if i.name == name)
        return join(self.pieces[name], self.plan.storage[name], self.local.mesh, given.meta.shape)
