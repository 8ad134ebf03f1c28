"""Compares a plan with one device: all ranks of its program in one process, on the batch that the device is given."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tests.oracle import relative, twin
from tests.simulate import Simulation, cut
from wholestep import partition, plan
from wholestep.capture import Capture, capture_step
from wholestep.capture.call_structure import leaf_names, take_apart
from wholestep.graph.graph import LocalGraph, Role
from wholestep.passes.base import Pass
from wholestep.passes.reinplace import Reinplace
from wholestep.plan.plan import Plan

Make = Callable[[], tuple[nn.Module, Optimizer]]
Step = Callable[..., Any]
NOISE = 1e-13  # absolute: what is zero in exact arithmetic


@dataclass
class Comparison:
    """The largest relative difference, where it is, and the program that was run."""

    worst: float
    where: str
    plan: Plan
    local: LocalGraph

    @property
    def ruleless(self) -> list[str]:
        """Operations without a rule."""
        return [name for name, d in self.plan.decisions.items() if d.why == "no rule"]


class OneDevice:
    """A step captured once and run on one device: `losses[i]` of each step, `state` after the last.

    `streams[i]` is where torch's generator stood before a step: ranks that draw whole tensors draw what this did.
    """

    def __init__(self, make: Make, step: Step, batches: Sequence[tuple[Any, ...]]) -> None:
        (model, optimizer), (self.model, self.optimizer) = twin(make)
        self.batches, self.step, self.make = batches, step, make
        self.capture: Capture = capture_step(step, (model, optimizer, *batches[0]), {})
        self.streams, self.losses = list[Tensor](), list[list[Tensor]]()
        for batch in batches:
            self.streams.append(torch.get_rng_state())
            self.losses.append(_flat(step(self.model, self.optimizer, *batch)))
        self.state = {n: p.detach() for n, p in self.model.named_parameters()} | dict(self.model.named_buffers())


def compare(
    one: OneDevice,
    mesh: str,
    parallel: Any,
    in_place: bool = False,
    passes: tuple[Pass, ...] = (),
    room: int | None = None,
    edit: Callable[[LocalGraph], LocalGraph] = lambda local: local,
) -> Comparison:
    """Run the captured step by `parallel` on all ranks of `mesh`; the state that the device began with is untouched.
    `passes`: of the programs of the stages of a pipeline; `room`: messages that a channel between them holds.
    `edit`: changes the program before all passes.
    """
    graph = one.capture.graph
    planned = plan(graph, mesh, parallel)
    local = edit(partition(graph, planned))
    simulation = Simulation(one.capture, planned, Reinplace()(local) if in_place else local, passes=passes)
    simulation.room = simulation.room if room is None else room
    simulation.start()
    found = Comparison(0.0, "", planned, local)
    layouts = {i.name: layout for i, layout in zip(local.inputs, local.layouts, strict=True)}
    names = [i.name for i in planned.inputs if i.role is Role.BATCH]
    for number, batch in enumerate(one.batches):
        leaves = _named(batch, one)
        ranks: list[dict[str, Tensor]] = [{} for _ in range(local.mesh.size)]
        for name in names:
            for rank, piece in enumerate(cut(leaves[name], layouts[name], local.mesh)):
                ranks[rank][name] = piece
        torch.set_rng_state(one.streams[number])
        for rank, results in enumerate(simulation.step(ranks)):
            for position, (value, expected) in enumerate(zip(results, one.losses[number], strict=True)):
                _note(found, f"result {position} of step {number} on rank {rank}", value, expected)
    assert set(simulation.pieces) & set(one.state), "names of the state are those of the model"
    for name in sorted(set(simulation.pieces) & set(one.state)):
        _note(found, name, simulation.whole(name), one.state[name])
    return found


def _note(found: Comparison, where: str, value: Tensor, expected: Tensor) -> None:
    if value.is_floating_point() and value.shape == expected.shape and torch.allclose(value, expected, 0, NOISE):
        return
    difference = relative(value, expected)
    if not difference <= found.worst:
        found.worst, found.where = difference, where


def _named(batch: tuple[Any, ...], one: OneDevice) -> dict[str, Tensor]:
    """Leaves of a batch by the names that the capture gave them."""
    args = (one.model, one.optimizer, *batch)
    call = take_apart((args, {}))
    names = leaf_names(one.step, call.structure)
    return {n: v for n, v in zip(names, call.leaves, strict=True) if isinstance(v, Tensor)}


def _flat(value: Any) -> list[Tensor]:
    return [v for v in take_apart(value).leaves if isinstance(v, Tensor)]


def without_chance(model: nn.Module) -> nn.Module:
    """`model` with every dropout at zero: pieces of a tensor draw from other streams than the whole does."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several batches as one, in double precision."""
    out: dict[str, Any] = {}
    for name, first in batches[0].items():
        whole = torch.cat([b[name] for b in batches]) if isinstance(first, Tensor) else first
        out[name] = whole.double() if isinstance(whole, Tensor) and whole.is_floating_point() else whole
    return out


class Double(TorchFunctionMode):
    """Casts to single precision, which many models write out, go to double: what is compared is the plan."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)
