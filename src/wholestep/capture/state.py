"""What a step holds between calls, and where: parameters, buffers, optimizer state, gradients, scheduled numbers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import _torch
from ..errors import CaptureError, StateError
from ..graph.graph import Input, Role
from ..graph.meta import TensorMeta
from .call_structure import walk
from .replacements import say_once
from .wrappers import unwrapped

UNSUPPORTED = {
    "LBFGS": "its step calls a closure again and again, as often as the data says",
    "SparseAdam": "its update works on sparse gradients, whose sizes depend on the data",
}
MOVED = "_wholestep_moved"  # on a parameter that another has taken the place of: that one
WHOLE = "_wholestep_whole"  # on a parameter that stands for one in parts: what for
_STATE = (torch.Tensor, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass
class StepTensor:
    """One tensor that lives between calls and every place that refers to it: `(container, key)` pairs."""

    input: Input
    places: list[tuple[Any, Any]]

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor as it is now."""
        container, key = self.places[0]
        return container[key]


@dataclass
class Hyper:
    """One scheduled number: `optimizer.param_groups[group][key]`, or item `index` of it where it is a tuple."""

    name: str
    optimizer: int
    group: int
    key: str
    index: int | None = None


@dataclass
class StepState:
    """Everything a step holds, found in its modules and optimizers."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    params: dict[str, StepTensor] = field(default_factory=dict[str, StepTensor])
    buffers: dict[str, StepTensor] = field(default_factory=dict[str, StepTensor])
    wrappers: list[Any] = field(default_factory=list[Any])
    scalers: dict[str, GradScaler] = field(default_factory=dict[str, GradScaler])

    def param_name(self, tensor: object) -> str:
        """The name of a parameter, by identity."""
        return next(name for name, held in self.params.items() if held.tensor is tensor)


def collect(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], scalers: Mapping[str, GradScaler]
) -> StepState:
    """Find every parameter and buffer once, with all its names; tied ones keep one entry. Scalers hold buffers too.

    Optimizers may be wrapped.

    Raises:
        CaptureError: an optimizer is of a kind that cannot be captured.
        StateError: a module is wrapped for another way of running in parallel.
    """
    wrappers = [one for one in optimizers.values() if unwrapped(one) is not one]
    optimizers = {name: unwrapped(one) for name, one in optimizers.items()}
    state = StepState(_roots(modules), dict(optimizers), scalers=dict(scalers), wrappers=wrappers)
    for optimizer in optimizers.values():
        kind = type(optimizer).__name__
        if kind in UNSUPPORTED and type(optimizer).__module__.startswith("torch.optim"):
            raise CaptureError(
                f"optimizer {kind} cannot be captured: {UNSUPPORTED[kind]}",
                "an optimizer whose step is made of tensor operations (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, "
                "Adadelta, Adamax, RMSprop, Rprop, ASGD)",
                "use one of those, or call this optimizer outside the compiled step",
            )
    _follow(optimizers.values())
    by_id: dict[int, StepTensor] = {}
    for prefix, root in state.modules.items():
        _refuse_wrapped(prefix, root)
    for base, module in walk(state.modules):
        _collect_module(module, base, by_id, state)
    for label, scaler in scalers.items():
        attributes = _torch.scaler_tensors(scaler)
        for key in _torch.SCALER_TENSORS:
            name = f"{label}.{key}"
            state.buffers[name] = StepTensor(_input(name, Role.BUFFER, attributes[key]), [(attributes, key)])
    for label, optimizer in optimizers.items():
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                if id(param) not in by_id:
                    name = f"{label}.group{g}.{i}"
                    by_id[id(param)] = state.params[name] = StepTensor(_input(name, Role.PARAM, param), [])
                by_id[id(param)].places.append((group["params"], i))
    return state


def _roots(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules that are not inside another one; a single one needs no prefix."""
    inside = {id(sub) for m in modules.values() for sub in m.modules() if sub is not m}
    roots: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if id(module) not in inside and all(module is not other for other in roots.values()):
            roots[name] = module
    return {"": next(iter(roots.values()))} if len(roots) == 1 else roots


def _refuse_wrapped(prefix: str, root: nn.Module) -> None:
    wrapped = [
        type(m).__name__
        for m in root.modules()
        if type(m).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
    ]
    if wrapped:
        raise StateError(
            f"module {prefix or type(root).__name__!r} is wrapped in {wrapped[0]}",
            "the plain module, as one device runs it: wholestep adds the communication itself",
            "remove the wrapper; Accelerate, and the Trainer through it, add none with "
            "`accelerator.prepare_model(model, evaluation_mode=True)`",
        )
    compiled = [m for m in root.modules() if type(m).__name__ == "OptimizedModule" or _torch.is_compiled(m)]
    if compiled:
        say_once(
            f"module {prefix or type(root).__name__!r} is compiled by torch.compile: a compiled step runs the "
            "original, with all else of the step in one graph; backend='inductor' runs that through Inductor"
        )


def _collect_module(module: nn.Module, base: str, by_id: dict[int, StepTensor], state: StepState) -> None:
    for container, role, table in (
        (_torch.parameters_of(module), Role.PARAM, state.params),
        (_torch.buffers_of(module), Role.BUFFER, state.buffers),
    ):
        for key, tensor in container.items():
            if tensor is None:
                continue
            name = f"{base}.{key}" if base else key
            if WHOLE in vars(tensor):
                raise StateError(
                    f"{name!r} is a whole copy, for {vars(tensor)[WHOLE]}, and no parameter that a step can update",
                    "the parameters themselves, which are back after it",
                    "end it first: a compiled step, or another `ws.whole`, cannot run inside",
                )
            if id(tensor) not in by_id:
                by_id[id(tensor)] = table[name] = StepTensor(_input(name, role, tensor), [])
            by_id[id(tensor)].places.append((container, key))


def carry(state: StepState, tensors: Mapping[str, tuple[torch.Tensor, Any]]) -> None:
    """Hold tensors of attributes, variables and items, by path, as the buffers of modules are held.

    Each comes with its place, which has a `holder` and a `key`.
    """
    for path, (tensor, place) in tensors.items():
        if path not in state.buffers:
            state.buffers[path] = StepTensor(_input(path, Role.BUFFER, tensor), [(place.holder, place.key)])


def _input(name: str, role: Role, tensor: torch.Tensor, owner: str = "", key: str = "") -> Input:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    meta = TensorMeta(tuple(tensor.shape), stride, tensor.dtype, str(tensor.device))
    return Input(name, role, meta, owner, key, trainable=role is Role.PARAM and tensor.requires_grad)


def find_hypers(state: StepState, keys: Iterable[str]) -> list[Hyper]:
    """The scheduled numbers called `keys`, group by group; a tuple such as betas gives one for each float."""
    found: list[Hyper] = []
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        for g, group in enumerate(optimizer.param_groups):
            for key in keys:
                value = group.get(key)
                name = f"{label}.{key}" + (f"[{g}]" if len(optimizer.param_groups) > 1 else "")
                if _is_number(value):
                    found.append(Hyper(name, o, g, key))
                elif isinstance(value, tuple):
                    parts = cast(tuple[object, ...], value)
                    if all(_is_number(v) for v in parts):
                        found += [Hyper(f"{name}.{i}", o, g, key, i) for i in range(len(parts))]
    return found


def state_input(owner: str, key: str, tensor: torch.Tensor, number: int, label: str) -> Input:
    """The input for one tensor of optimizer state; optimizers after the first are named in it."""
    plain = _input(f"{owner}/{key}" + (f"@{label}" if number else ""), Role.STATE, tensor, owner, key)
    return dataclasses.replace(plain, optimizer=number)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) is int


def optimizer_state(state: StepState) -> list[StepTensor]:
    """Every tensor in `optimizer.state`, named `parameter/key`."""
    out: list[StepTensor] = []
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        for name, held in state.params.items():
            entry = optimizer.state.get(held.tensor, {})
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    out.append(StepTensor(state_input(name, key, value, o, label), [(entry, key)]))
    return out


def refuse_objects(optimizers: Iterable[Optimizer], numbers: Container[object] = ()) -> None:
    """State that would be lost, or torn apart, between calls: what is no tensor or number under a name of its own.

    While a step is traced `numbers` of Python are tensors too.

    Raises:
        CaptureError: names the optimizer and the key.
    """
    for optimizer in optimizers:
        met = dict[int, str]()
        for owner, entry in cast(dict[Any, Any], optimizer.state).items():
            if not isinstance(owner, torch.Tensor):
                raise _lost(optimizer, f"{owner!r} in its state, which belongs to no parameter")
            for key, value in cast(dict[Any, Any], entry).items():
                if not isinstance(value, _STATE):
                    raise _lost(optimizer, f"{key!r} in its state, which is a {type(value).__name__}")
                if not isinstance(key, str) or set(key) & set("/@"):
                    raise _lost(optimizer, f"state under {key!r}, which is no plain name")
                if isinstance(value, torch.Tensor) and value not in numbers:
                    if id(value) in met:
                        raise _lost(optimizer, f"one tensor twice in its state, as {met[id(value)]!r} and as {key!r}")
                    met[id(value)] = key


def _lost(optimizer: Optimizer, what: str) -> CaptureError:
    return CaptureError(
        f"optimizer {type(optimizer).__name__} keeps {what}",
        "state made of tensors and numbers, each under a name of its own for each parameter: what is elsewhere cannot "
        "be carried to the next call",
        "keep it so, or call this optimizer outside the compiled step",
    )


def prime(optimizer: Optimizer, param: torch.Tensor, group: Mapping[str, Any]) -> bool:
    """Give `param` the optimizer state that the first step would create, where the first update is known to stay exact.

    Only torch.optim's own classes are primed (their `_init_group`); a first step that differs from the later ones
    (SGD with dampening) and any other optimizer is captured twice instead. Returns whether state was created.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or optimizer.state.get(param):
        return False
    init = getattr(optimizer, "_init_group", None)
    if init is None or isinstance(optimizer, torch.optim.SGD):
        momentum = isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0
        if momentum:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False).detach()
        return momentum
    lists = [list[Any]() for _ in inspect.signature(init).parameters][1:]
    before, param.grad = param.grad, param.detach()
    try:
        init({**group, "params": [param]}, *lists)
    finally:
        param.grad = before
    return True


@contextlib.contextmanager
def put_in_place(
    state: StepState, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> Generator[None]:
    """Inside, modules and optimizers hold the given tensors; afterwards all is as it was, groups and state included."""
    helds = [*state.params.values(), *state.buffers.values()]
    before = [(held, held.tensor) for held in helds]
    lists = [(o.param_groups, list(o.param_groups)) for o in state.optimizers.values()]
    groups = [(g, dict(g)) for o in state.optimizers.values() for g in o.param_groups]
    states = [(o, o.state) for o in state.optimizers.values()]
    calls = [(scaler, _torch.scaler_calls(scaler)) for scaler in state.scalers.values()]
    modes = [(m, m.training) for root in state.modules.values() for m in root.modules()]
    try:
        for name, tensor in [*params.items(), *buffers.items()]:
            put(state.params.get(name) or state.buffers[name], tensor)
        for optimizer, _ in states:
            optimizer.state = defaultdict(dict)
        for scaler, noted in calls:
            _torch.set_scaler_calls(scaler, copy.deepcopy(noted))
        yield
    finally:
        for held_groups, before_groups in lists:
            held_groups[:] = before_groups
        for group, items in groups:
            group.clear()
            group.update(items)
        for optimizer, entries in states:
            optimizer.state = entries
        for held, tensor in before:
            put(held, tensor)
        for scaler, noted in calls:
            _torch.set_scaler_calls(scaler, noted)
        for module, training in modes:
            module.training = training


def put(held: StepTensor, tensor: torch.Tensor) -> None:
    """Store `tensor` everywhere `held` is referred to."""
    for container, key in held.places:
        container[key] = tensor


def replace(state: StepState, held: StepTensor, new: torch.Tensor) -> None:
    """Put a parameter or buffer in the place of another for good, here and in optimizers that are not known yet."""
    old = held.tensor
    put(held, new)
    rekey(state.optimizers.values(), old, new)
    vars(old)[MOVED] = new


def _follow(optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers the parameters that a step without them (an evaluation, say) has put in the place of theirs."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params: list[torch.Tensor] = group["params"]
            for i, old in enumerate(params):
                while (new := vars(params[i]).get(MOVED)) is not None:
                    params[i] = new
                rekey([optimizer], old, params[i])


def rekey(optimizers: Iterable[Optimizer], old: torch.Tensor, new: torch.Tensor) -> None:
    """Move the optimizer state of parameter `old` to parameter `new`."""
    for optimizer in optimizers:
        if old is not new and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def is_zero(state: StepState, hyper: Hyper) -> bool:
    """True where a scheduled number is zero now."""
    value = list(state.optimizers.values())[hyper.optimizer].param_groups[hyper.group][hyper.key]
    return not (value if hyper.index is None else value[hyper.index])


def baked_numbers(state: StepState, scheduled: Sequence[Hyper]) -> list[tuple[Optimizer, int, str, Any]]:
    """Every option of every parameter group that the trace bakes in: `(optimizer, group number, key, value)`."""
    live = {(h.optimizer, h.group, h.key) for h in scheduled}
    out: list[tuple[Optimizer, int, str, Any]] = []
    for o, optimizer in enumerate(state.optimizers.values()):
        for g, group in enumerate(optimizer.param_groups):
            out += [
                (optimizer, g, key, value)
                for key, value in group.items()
                if key != "params" and (o, g, key) not in live
            ]
    return out
