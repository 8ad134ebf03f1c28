"""The input of a trace, and its fake tensors in the order of the graph's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import _torch
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta, meta_of, row_major, with_shape
from . import state as held_state
from .call_structure import StepCall
from .capture_options import CaptureOptions
from .effects import Promoted
from .reachable import Reach
from .state import Hyper, StepState


@dataclass(frozen=True)
class Request:
    """Input of a trace: the function, its `arguments`, these taken apart (`call`, with `names`), its state.

    `full_shapes` gives global shapes of batch tensors of which the call has parts. With `options.offload`, parameters
    and optimizer state in host memory are traced as if they were on `device`. `find` is a path whose change is located.
    `dynamic` names the dims of batch tensors whose sizes are symbols. `counts`: the step counts rows while it runs.
    """

    fn: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    call: StepCall
    names: Sequence[str]
    state: StepState
    hypers: Sequence[Hyper]
    device: str
    options: CaptureOptions
    fused: bool
    full_shapes: Mapping[str, tuple[int, ...]]
    reach: Reach
    promoted: Promoted
    find: str = ""
    dynamic: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    counts: bool = False

    @property
    def traced_for(self) -> tuple[str, bool]:
        """The device, and whether what values are is asked: each answer is a branch."""
        return self.device, self.options.branches is not None


@dataclass
class FakeInputs:
    """Inputs of a graph before its trace, each with its fake tensor. `primed`: names of state that is not there yet."""

    device: str
    host_state: bool = False
    symbols: _torch.Symbols | None = None
    inputs: list[Input] = field(default_factory=list[Input])
    fakes: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    primed: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.mode: Any = _torch.fake_mode() if self.symbols is None else self.symbols.mode

    def add(self, source: Input, requires_grad: bool = False) -> None:
        """Create a fake tensor, in the fake mode; on the step's device if the real one is on `meta` or offloaded, or if
        an optimizer holds it: torch leaves counts of steps in host memory, and wholestep moves them to the parameters.
        """
        in_host = self.host_state and source.role in (Role.PARAM, Role.BUFFER, Role.GRAD)
        if source.meta.device.startswith("meta") or in_host or source.role is Role.STATE:
            source = replace(source, meta=replace(source.meta, device=self.device))
        meta = source.meta
        fake = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        if source.role is Role.PARAM:
            fake = nn.Parameter(fake, requires_grad=requires_grad)
        elif requires_grad:
            fake.requires_grad_()
        self.put(source, fake)

    def add_dynamic(self, source: Input, dims: tuple[int, ...], requires_grad: bool) -> None:
        """Create a row-major fake tensor of the batch with symbols for the sizes of `dims`."""
        symbols, shape = self.symbols, list[Any](source.meta.shape)
        device = self.device if source.meta.device.startswith("meta") else source.meta.device
        assert symbols is not None, "a capture with dims that are symbols has symbols"
        for dim in dims:
            shape[dim] = symbols.new(source.name, dim, shape[dim])
        with self.mode:
            fake = torch.empty_strided(shape, row_major(shape), dtype=source.meta.dtype, device=device)
        self.put(replace(source, meta=meta_of(fake)), fake.requires_grad_(requires_grad))

    def put(self, source: Input, fake: torch.Tensor, position: int | None = None) -> None:
        """Insert an existing fake tensor as the last input or at `position`."""
        position = len(self.inputs) if position is None else position
        self.inputs.insert(position, source)
        self.fakes.insert(position, fake)


def stand_ins(request: Request, line: Callable[[], str]) -> FakeInputs:
    """Create fakes for parameters, buffers, optimizer state, gradients, hypers and the batch, in this order.

    Missing optimizer state is created as in the first step. `line` returns the user's line that runs.
    """
    symbols = _torch.Symbols(line) if request.dynamic or request.counts else None
    state, out = request.state, FakeInputs(request.device, request.options.offload is not None, symbols)
    with out.mode, _torch.Remembering():
        for entry in [*state.params.values(), *state.buffers.values()]:
            out.add(entry.input, entry.tensor.requires_grad)
        _add_optimizer_state(out, state)
        for name, entry in state.params.items():
            if entry.tensor.grad is not None:
                out.add(Input(f"{name}/grad", Role.GRAD, entry.input.meta, name))
        for hyper in request.hypers:
            out.add(Input(hyper.name, Role.HYPER, TensorMeta((), (), torch.float64, "cpu"), key=hyper.key))
    for name, leaf in zip(request.names, request.call.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            meta = with_shape(meta_of(leaf), request.full_shapes.get(name, tuple(leaf.shape)))
            source, dims = Input(name, Role.BATCH, meta), dynamic_dims(meta, request.dynamic.get(name, ()))
            if dims:
                out.add_dynamic(source, dims, leaf.requires_grad)
            else:
                with out.mode, _torch.Remembering():
                    out.add(source, leaf.requires_grad)
    return out


def _add_optimizer_state(out: FakeInputs, state: StepState) -> None:
    """Add optimizer state, by optimizer, parameter and key; what is not there yet, the optimizer creates for a fake."""
    fakes = {i.name: fake for i, fake in zip(out.inputs, out.fakes, strict=True)}
    created = dict[tuple[int, object], list[tuple[str, torch.Tensor]]]()  # for fakes that are alike, once
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for name, parameter in state.params.items():
            entry, group = optimizer.state.get(parameter.tensor), groups.get(id(parameter.tensor))
            if not entry and group is not None and parameter.tensor.requires_grad:
                alike = id(group), _torch.kind_of([fakes[name]])
                new = created.get(alike)
                if new is None:
                    _torch.undo(optimizer.state.pop, fakes[name], None)
                    with _torch.tensor_only_optimizers():
                        held_state.prime(optimizer, fakes[name], group, out.device)
                    entries = held_state.in_order(optimizer.state.pop(fakes[name], {}))
                    new = [(key, value) for key, value in entries if isinstance(value, torch.Tensor)]
                    if alike[1] is not None:
                        created[alike] = new
                for key, value in new:
                    out.put(held_state.state_input(name, key, value, o, label), _torch.other_fake(value))
                    out.primed.add(out.inputs[-1].name)
            for key, value in held_state.in_order(entry or {}):
                if isinstance(value, torch.Tensor):
                    out.add(held_state.state_input(name, key, value, o, label))


def dynamic_dims(meta: TensorMeta, dims: Sequence[int]) -> tuple[int, ...]:
    """Those of the asked dims of a batch tensor that can be symbols: of 2 or more, as torch treats 0 and 1 apart."""
    return tuple(dim for dim in dims if meta.shape[dim] > 1)
