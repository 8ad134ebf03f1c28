"""Moves parameters, buffers and optimizer state to their storage layouts, and finds the local tensors again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch, dtensor
from ..capture import state as held_state
from ..capture.call_structure import walk
from ..capture.optimizer_entries import Entry
from ..capture.state import StepState
from ..distributed.launch import World
from ..distributed.owned_tensors import placed_as, wrap
from ..errors import StateError
from ..graph.graph import Input, Output, Role
from ..layout import Layout, cut, replicated
from ..plan.plan import Plan

_PLACED = "layout"  # note of a tensor


class Primed:
    """Optimizer state that a program takes and no call has made: in its place inside of this context, and in calls."""

    def __init__(self) -> None:
        self.entries: list[tuple[Optimizer, Tensor, bool, dict[str, Any]]] = []
        self._options: dict[tuple[Optimizer, int], dict[str, Any]] = {}
        self._is_there = False

    def add(self, optimizer: Optimizer, param: Tensor, number: int, device: str) -> None:
        """Create the state of a parameter that has none, in the group of a number."""
        had_entry, group = param in optimizer.state, optimizer.param_groups[number]
        if (options := held_state.prime(optimizer, param, group, device)) is not None:
            self.entries.append((optimizer, param, had_entry, optimizer.state[param]))
            self._options[optimizer, number] = options

    @property
    def is_late(self) -> bool:
        """Whether an option that the state begins with is another one now."""
        groups = ((optimizer.param_groups[n], options) for (optimizer, n), options in self._options.items())
        return bool(self.entries) and any(
            group[key] != was for group, options in groups for key, was in options.items()
        )

    def put(self) -> None:
        """Put it where there is none by now."""
        if not self._is_there:
            before = [(o, param, o.state.get(param), entry) for o, param, _, entry in self.entries]
            self.entries = [(o, param, now is not None, entry) for o, param, now, entry in before if not now]
            for optimizer, param, _, entry in self.entries:
                optimizer.state.setdefault(param, entry).update(entry)
        self._is_there = True

    def take_away(self) -> None:
        """Leave each optimizer as it was without."""
        for at, (optimizer, param, had_entry, _) in enumerate(self.entries if self._is_there else ()):
            entry = optimizer.state.pop(param)
            if had_entry:
                optimizer.state[param], entry = entry, entry.copy()
                optimizer.state[param].clear()
            self.entries[at] = optimizer, param, had_entry, entry
        self._is_there = False

    def __enter__(self) -> Primed:
        self.put()
        return self

    def __exit__(self, *_: object) -> None:
        self.take_away()


def place(state: StepState, plan: Plan, updates: Iterable[Output], world: World, sync: bool, primed: Primed) -> None:
    """Shard parameters and optimizer state as planned; what is placed already stays. `sync` starts from the first
    rank's values. Parameters on `meta` are initialized here, one module at a time. `primed` takes what it creates.
    """
    materialize(state, world.home)
    shared = sync and world.mesh.size > 1
    sharded = {i.owner or i.name for i in plan.inputs if is_apart(plan.storage[i.name])}
    created = ((out.owner, plan.created_storage.get(out.target)) for out in updates)
    sharded |= {owner for owner, layout in created if layout is not None and is_apart(layout)}
    for name, param in state.params.items():
        if _PLACED in _torch.notes_of(param.tensor) or isinstance(param.tensor, DTensor):
            continue
        if shared:
            _from_first_rank(param.tensor.detach(), world)
        if name in sharded:
            _shard(param.tensor, name, plan.storage[name], world)
        else:
            param.tensor.data = _at_home(param.tensor.data, world)
        _torch.notes_of(param.tensor)[_PLACED] = plan.storage[name]
    for name, buffer in state.buffers.items():
        if buffer.tensor.device.type != torch.device(world.device).type:
            buffer.tensor.data = buffer.tensor.data.to(world.device)
        if shared and _PLACED not in _torch.notes_of(buffer.tensor):
            _from_first_rank(buffer.tensor.detach(), world)
        _torch.notes_of(buffer.tensor)[_PLACED] = plan.storage[name]
    _prime(state, plan, world, shared, primed)


def is_apart(layout: Layout) -> bool:
    """True if ranks hold different parts of a tensor, which a DTensor knows of."""
    return layout.is_sharded or bool(layout.owned)


def _from_first_rank(tensor: torch.Tensor, world: World) -> None:
    """Fill `tensor` with the first rank's values, by way of the device of the process group.

    A process group writes as many bytes as there are elements, one after the other, whatever the strides are. So an
    expanded tensor takes each element once, and one with gaps takes them from a copy.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    moved = tensor.to(world.device).contiguous()
    dist.broadcast(moved, 0)
    if moved is not tensor:
        tensor.copy_(moved)


def placed(state: StepState, world: World) -> dict[str, Layout]:
    """Layouts of parameters and optimizer state that another step, or another call, has placed."""
    out: dict[str, Layout] = {}
    tensors = {n: h.tensor for n, h in state.params.items()}
    tensors |= {h.input.name: h.tensor for h in held_state.optimizer_state(state)}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            out[name] = dtensor.layout_of(tensor, world.mesh)
        elif layout := _torch.notes_of(tensor).get(_PLACED):
            out[name] = layout
    return out


def _shard(old: Tensor, name: str, layout: Layout, world: World) -> None:
    new = shard(old.detach(), layout, world).requires_grad_(old.requires_grad)
    if old.grad is not None:
        new.grad = shard(old.grad, layout, world)
    _torch.become(old, new, name)


def shard(tensor: torch.Tensor, layout: Layout, world: World) -> DTensor:
    """This rank's piece of a whole tensor, as a DTensor that owns its storage, on `world.home`."""
    piece = cut(tensor, layout, world.mesh, world.coordinate)
    owned = piece.clone(memory_format=torch.contiguous_format) if is_apart(layout) else piece
    return wrap(_at_home(owned, world), world.devices_of_state, dtensor.placements(layout, world.mesh), tensor.shape)


def _at_home(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """`tensor` where state rests. The memory of a host whose GPU computes is pinned: copies run beside the step."""
    if torch.device(world.home).type == "cpu" and torch.device(world.device).type == "cuda":
        return tensor.cpu().pin_memory()
    return tensor if tensor.device.type == torch.device(world.home).type else tensor.to(world.home)


def _prime(state: StepState, plan: Plan, world: World, shared: bool, primed: Primed) -> None:
    """Create the optimizer state that the graph takes, on this rank's pieces; place what exists."""
    state_inputs = {(i.optimizer, i.owner): i for i in plan.inputs if i.role is Role.STATE}
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        for number, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                name = next(name for name, entry in state.params.items() if entry.tensor is param)
                if (o, name) in state_inputs and not optimizer.state.get(param):
                    primed.add(optimizer, param, number, world.device)
                elif shared:
                    for value in Entry(optimizer.state.get(param, {})).leaves().values():
                        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                            _from_first_rank(value, world)
                place_entry(optimizer.state.get(param, {}), o, label, name, plan, world)


def place_loaded(optimizer: Optimizer, state: StepState, plan: Plan, world: World) -> None:
    """Put state of sharded parameters where the plan says: what was loaded since the last call may be whole."""
    number = next((i for i, other in enumerate(state.optimizers.values()) if other is optimizer), -1)
    names = {(id(where), key): name for name, held in state.params.items() for where, key in held.places}
    for params in [group["params"] for group in optimizer.param_groups if number >= 0]:
        for at, param in enumerate(params):
            name, entry = names.get((id(params), at)), optimizer.state.get(param)
            if name is not None and entry and isinstance(param, DTensor):
                place_entry(entry, number, [*state.optimizers][number], name, plan, world)
                for key, value in (flat := Entry(entry)).leaves().items():
                    if type(value) is Tensor and value.dim() and value.shape == param.shape:  # the plan has it whole
                        flat[key] = shard(value, dtensor.layout_of(param, world.mesh), world)


def gather_before_eager_step(optimizer: Optimizer, placing: WeakMethod[Callable[[Optimizer], None]]) -> None:
    """From now on, an eager `optimizer.step()` finds state laid out as its parameter, whoever has put it there; the
    next call shards it again. A step without gradients updates nothing: libraries count steps by it.
    """

    def gather(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if all(param.grad is None for group in optimizer.param_groups for param in group["params"]):
            return
        if (place_state := placing()) is not None:
            place_state(optimizer)
        entries = cast(dict[Any, Any], optimizer.state).items()
        for param, entry in [(p, Entry(entry)) for p, entry in entries if isinstance(p, DTensor)]:
            for key, value in entry.leaves().items():
                if isinstance(value, DTensor) and value.shape == param.shape and value.placements != param.placements:
                    value = placed_as(param, value)
                entry[key] = value

    optimizer.register_step_pre_hook(gather)
    _torch.leave_uncompiled("wholestep._torch")


def place_entry(entry: dict[str, Any], number: int, label: str, owner: str, plan: Plan, world: World) -> None:
    """Put the state tensors of one parameter where the plan says; those it does not name stay as they are."""
    flat = Entry(entry)
    for key, value in flat.leaves().items():
        if not isinstance(value, torch.Tensor):
            continue
        layout = plan.storage.get(held_state.state_input(owner, key, value, number, label).name)
        have = dtensor.layout_of(value, world.mesh) if isinstance(value, DTensor) else replicated(value.dim())
        if layout is not None and layout != have:
            flat[key] = _resharded(value, have, layout, world)
        elif layout is not None and value.device.type != torch.device(world.home).type:
            flat[key] = value.to(world.home)


def _resharded(value: torch.Tensor, have: Layout, layout: Layout, world: World) -> DTensor:
    """`value` as `layout` says. State of a parameter that one stage owns, whole there, is cut there."""
    if not isinstance(value, DTensor) or not have.owned:
        return shard(value.full_tensor() if isinstance(value, DTensor) else value, layout, world)
    if have.is_sharded or have.owned != layout.owned:
        problem = f"optimizer state stored as {have} where the step has {layout}"
        raise StateError(problem, "state of the same stages", "load it with wholestep.load, or start without it")
    piece = cut(value.to_local(), layout, world.mesh, world.coordinate).clone(memory_format=torch.contiguous_format)
    return wrap(_at_home(piece, world), world.devices_of_state, dtensor.placements(layout, world.mesh), value.shape)


def find_input(spec: Input, state: StepState) -> tuple[Any, Any]:
    """Container and key that hold an input now. Raises StateError: it is gone."""
    if spec.role is Role.PARAM:
        return state.params[spec.name].places[0]
    if spec.role is Role.BUFFER:
        return state.buffers[spec.name].places[0]
    return Entry(entry_of(spec, state)).place(spec.key)


def entry_of(spec: Input, state: StepState) -> dict[str, Any]:
    """What an optimizer has for the parameter of an input of its state. Raises StateError: it is gone."""
    entry = list(state.optimizers.values())[spec.optimizer].state.get(state.params[spec.owner].tensor, {})
    if not Entry(entry).has(spec.key):
        problem = f"optimizer state {spec.key!r} of parameter {spec.owner!r} is gone"
        needed = f"the state that the compiled step updates (found {sorted(entry) or 'nothing'})"
        raise StateError(problem, needed, "load a whole optimizer state, or compile the step again")
    return entry


def materialize(state: StepState, device: str) -> None:
    """Make parameters and buffers that are on `meta`, and initialize them by their modules' own `reset_parameters`."""
    on_meta = {n: h for n, h in {**state.params, **state.buffers}.items() if h.tensor.is_meta}
    if not on_meta:
        return
    for name, step_tensor in on_meta.items():
        old = step_tensor.tensor
        new = torch.empty_like(old, device=device, requires_grad=old.requires_grad)
        _torch.become(old, new, name)
    ours = {id(h.tensor) for h in on_meta.values()}
    for prefix, root in state.modules.items():
        for path, module in walk({prefix: root}):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(id(t) in ours for t in tensors):
                _initialize(root, module, path)


def _initialize(root: nn.Module, module: nn.Module, name: str) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    of_root = getattr(root, "_init_weights", None)
    with torch.no_grad():
        if of_root is not None:
            of_root(module)
        elif reset is not None:
            reset()
        else:
            kind = type(module).__name__
            text = f"module {name or kind!r} ({kind}) is on 'meta' and has no reset_parameters()"
            needed = "a way to initialize its parameters"
            raise StateError(text, needed, "give it a reset_parameters() method, or build the model on a real device")
