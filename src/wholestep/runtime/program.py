"""One captured program with the tensors it works on: takes the leaves of a call, returns what the step returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import dtensor
from ..backend.eager import Run
from ..capture.capture import Capture
from ..capture.find import put_together
from ..capture.trace import TensorLeaf
from ..graph.graph import Input, LocalGraph, Role
from ..plan.plan import Plan
from .guards import Guards
from .launch import World
from .place import find_input, local, place_entry


@dataclass
class Program:
    """A compiled step for one kind of call.

    `run` maps the flat list from `gather_inputs` to results followed by state that the step creates.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    world: World
    guards: Guards
    run: Run
    names: Sequence[str]
    _held: list[Any] = field(default_factory=list[Any])
    _slots: list[tuple[Any, Any, Any]] = field(default_factory=list[tuple[Any, Any, Any]])
    _states: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def __post_init__(self) -> None:
        at = {name: i for i, name in enumerate(self.names)}
        inputs = self.local.inputs
        self._kept = [i for i in inputs if i.role in (Role.PARAM, Role.BUFFER, Role.STATE)]
        self._grads = [i for i in inputs if i.role is Role.GRAD]
        self._batch = [at[i.name] for i in inputs if i.role is Role.BATCH]
        self._constants = [self.local.constants[i.name] for i in inputs if i.role is Role.CONST]
        self._numbers = [torch.zeros((), dtype=torch.float64) for i in inputs if i.role is Role.HYPER]
        used = {i.name for i in inputs if i.role is Role.HYPER}
        optimizers = list(self.capture.state.optimizers.values())
        live = [h for h in self.capture.hypers if h.name in used]
        self._sources = [(optimizers[h.optimizer].param_groups[h.group], h.key, h.index) for h in live]
        self._last: list[Any] = [None] * len(live)
        self._count = sum(o.kind == "result" for o in self.local.outputs)
        self._created = [o.target for o in self.local.outputs if o.kind == "update"]
        self._single = (
            list(self.capture.result_leaves) == [TensorLeaf]
            and not self.capture.results.opened
            and self.capture.results.spec.num_nodes == 1
        )
        self._params = [h.tensor for h in self.capture.state.params.values()] if self.capture.fresh_grads else []
        self.bind_state()

    def bind_state(self) -> None:
        """Look up every tensor the program updates; those that someone replaced are placed as planned."""
        state = self.capture.state
        labels = list(state.optimizers)
        for given in self._kept:
            container, key = find_input(given, state)
            if given.role is Role.STATE and not isinstance(container[key], DTensor):
                place_entry(container, given.optimizer, labels[given.optimizer], given.owner, self.plan, self.world)
        places = [find_input(given, state) for given in self._kept]
        self._slots = [(container, key, container[key]) for container, key in places]
        self._held = [local(tensor) for _, _, tensor in self._slots]
        self._states = [(o, o.state) for o in state.optimizers.values()]

    def gather_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat inputs of `run` for a call with these leaves."""
        for container, key, tensor in self._slots:
            if container.get(key) is not tensor:
                self.bind_state()
                break
        else:
            for optimizer, entries in self._states:
                if optimizer.state is not entries:
                    self.bind_state()
                    break
        for i, (group, key, index) in enumerate(self._sources):
            value = group[key] if index is None else group[key][index]
            if isinstance(value, torch.Tensor) or value != self._last[i]:
                self._numbers[i].fill_(float(value))
                self._last[i] = value
        grads = [local(self.capture.state.params[g.owner].tensor.grad) for g in self._grads]  # type: ignore[arg-type]
        return [*self._held, *grads, *self._numbers, *[leaves[i] for i in self._batch], *self._constants]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run one step."""
        out = self.run(self.gather_inputs(leaves))
        for param in self._params:
            if param.grad is not None:
                param.grad = None
        if self._created:
            self._keep_created(dict(zip(self._created, out[self._count :], strict=True)))
        if self._single:
            return out[0]
        results = iter(out)
        return put_together(
            self.capture.results, [next(results) if leaf is TensorLeaf else leaf for leaf in self.capture.result_leaves]
        )

    def _keep_created(self, made: dict[str, torch.Tensor]) -> None:
        """State and gradients that this step created go where the optimizer would have put them."""
        state = self.capture.state
        optimizers = list(state.optimizers.items())
        for name, tensor in made.items():
            owner, _, key = name.rpartition("/")
            key, _, label = key.partition("@")
            held = state.params[owner]
            value: torch.Tensor = tensor
            like = held.tensor
            layout = self.plan.created[name]
            if isinstance(like, DTensor) and self.world.devices is not None and (layout.is_sharded or tensor.dim()):
                value = dtensor.wrap(tensor, layout, self.world.mesh, self.world.devices, like.shape)
            if key == "grad":
                like.grad = value
            else:
                number = next((i for i, (l, _) in enumerate(optimizers) if l == label), 0)
                optimizers[number][1].state[like][key] = value


def input_names(inputs: Sequence[Input]) -> list[str]:
    """Names of inputs in order."""
    return [i.name for i in inputs]


Progress = Callable[[str, str, float], None]
