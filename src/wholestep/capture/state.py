"""The state of a step between calls: parameters, buffers, optimizer state, gradients and hypers, with their places."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
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
from ..graph.origin import is_user_file, warn_once
from .call_structure import walk
from .optimizer_entries import Entry
from .wrappers import unwrapped

UNSUPPORTED = {
    "LBFGS": "its step calls a closure a number of times that depends on the data",
    "SparseAdam": "its update needs sparse gradients, whose sizes depend on the data",
}
WHOLE = "whole"  # note of an unsharded copy of a parameter: its purpose
_NOT_THE_USERS = ("_is_param", "_is_hf_initialized", "_dynamo")
_STATE = (torch.Tensor, int, float, complex, str, type(None), torch.dtype, torch.device)


def is_users(attribute: str) -> bool:
    """Return whether an attribute of a tensor is one that the user, or a library of theirs, has set to be read."""
    return not attribute.startswith(_NOT_THE_USERS)


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the user has set as attributes of a tensor."""
    attributes = vars(tensor)
    return {key: value for key, value in attributes.items() if is_users(key)} if attributes else attributes


@dataclass
class StepTensor:
    """One tensor of the state, and every place that refers to it, as `(container, key)` pairs."""

    input: Input
    places: list[tuple[Any, Any]]

    @property
    def tensor(self) -> torch.Tensor:
        """The current tensor."""
        container, key = self.places[0]
        return container[key]


@dataclass
class Hyper:
    """An optimizer option that is an input: `optimizer.param_groups[group][key]`, or item `index` of that tuple."""

    name: str
    optimizer: int
    group: int
    key: str
    index: int | None = None


@dataclass
class StepState:
    """The state of a step, found in its modules, optimizers and gradient scalers."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    params: dict[str, StepTensor] = field(default_factory=dict[str, StepTensor])
    buffers: dict[str, StepTensor] = field(default_factory=dict[str, StepTensor])
    wrappers: list[Any] = field(default_factory=list[Any])
    scalers: dict[str, GradScaler] = field(default_factory=dict[str, GradScaler])

    def has_first(self, number: int, group: object) -> bool:
        """Whether optimizer `number` is the first that has a group: those around another one share its groups."""
        return all(group is not earlier for o in list(self.optimizers.values())[:number] for earlier in o.param_groups)


def collect(
    modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], scalers: Mapping[str, GradScaler]
) -> StepState:
    """Find every parameter and buffer once, with all its places; tied parameters share an entry.

    Tensors of scalers are buffers. Optimizers may be wrapped. Optimizers that cannot be captured (`UNSUPPORTED`) and
    modules wrapped in DDP, FSDP or DataParallel are refused.
    """
    wrappers = [optimizer for optimizer in optimizers.values() if unwrapped(optimizer) is not optimizer]
    optimizers = {name: unwrapped(optimizer) for name, optimizer in optimizers.items()}
    state = StepState(_roots(modules), dict(optimizers), scalers=dict(scalers), wrappers=wrappers)
    for optimizer in optimizers.values():
        kind = type(optimizer).__name__
        if kind in UNSUPPORTED and type(optimizer).__module__.startswith("torch.optim"):
            raise CaptureError(
                f"optimizer {kind} cannot be captured: {UNSUPPORTED[kind]}",
                "an optimizer whose step is made of tensor operations (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, "
                "Adadelta, Adamax, RMSprop, Rprop, ASGD)",
                "use one of these, or call this optimizer outside the compiled step",
            )
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
    """Return the modules that are not inside another one; a single root has the name ""."""
    inside = {id(sub) for m in modules.values() for sub in m.modules() if sub is not m}
    roots: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if id(module) not in inside and all(module is not other for other in roots.values()):
            roots[name] = module
    return {"": next(iter(roots.values()))} if len(roots) == 1 else roots


def _refuse_wrapped(prefix: str, root: nn.Module) -> None:
    data_parallel = "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"
    wrapped = [type(m).__name__ for m in root.modules() if type(m).__name__ in data_parallel]
    if wrapped:
        raise StateError(
            f"module {prefix or type(root).__name__!r} is wrapped in {wrapped[0]}",
            "the plain module for one device: wholestep adds the communication",
            "remove the wrapper; Accelerate, and the Trainer through it, add none with "
            "`accelerator.prepare_model(model, evaluation_mode=True)`",
        )
    modules = cast("Iterable[tuple[str, nn.Module]]", root.named_modules())
    scripted = [path for path, module in modules if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        problem = f"module {scripted[0] or prefix or type(root).__name__!r} is under torch.jit.script"
        needed = "modules in Python: TorchScript hides its parameters, and its gradients take another form in each call"
        raise StateError(problem, needed, "remove torch.jit.script: the whole step is compiled anyway")
    compiled = [m for m in root.modules() if type(m).__name__ == "OptimizedModule" or _torch.is_compiled(m)]
    if compiled:
        warn_once(
            f"module {prefix or type(root).__name__!r} is compiled by torch.compile: wholestep captures the original "
            "module, with the rest of the step, in one graph; backend='inductor' compiles that graph with Inductor"
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
            if purpose := _torch.notes_of(tensor).get(WHOLE):
                raise StateError(
                    f"{name!r} is an unsharded copy, for {purpose}, which a step cannot update",
                    "the parameters themselves, which are restored after it",
                    "end it first: a compiled step, or another `ws.whole`, cannot run inside",
                )
            if id(tensor) not in by_id:
                by_id[id(tensor)] = table[name] = StepTensor(_input(name, role, tensor), [])
            by_id[id(tensor)].places.append((container, key))


def carry(state: StepState, tensors: Mapping[str, tuple[torch.Tensor, Any]]) -> None:
    """Add tensors of attributes, variables and items as buffers, after those of modules and in the order of their paths
    (not in that of the traces that met them); `tensors` maps a path to a tensor and its Place.
    """
    for path, (tensor, place) in sorted(tensors.items(), key=lambda item: item[0]):
        entry = state.buffers.pop(path, None)
        state.buffers[path] = entry or StepTensor(_input(path, Role.BUFFER, tensor), [(place.holder, place.key)])


def _input(name: str, role: Role, tensor: torch.Tensor, owner: str = "", key: str = "") -> Input:
    stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
    meta = TensorMeta(tuple(tensor.shape), stride, tensor.dtype, str(tensor.device))
    return Input(name, role, meta, owner, key, trainable=role is Role.PARAM and tensor.requires_grad)


def find_hypers(state: StepState, keys: Iterable[str]) -> list[Hyper]:
    """Return the options `keys` as hypers, group by group; a tuple such as betas gives one for each float."""
    hypers: list[Hyper] = []
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        for g, group in enumerate(optimizer.param_groups):
            for key in keys if state.has_first(o, group) else ():
                value = group.get(key)
                name = f"{label}.{key}" + (f"[{g}]" if len(optimizer.param_groups) > 1 else "")
                if _is_number(value):
                    hypers.append(Hyper(name, o, g, key))
                elif isinstance(value, tuple):
                    parts = cast(tuple[object, ...], value)
                    if all(_is_number(v) for v in parts):
                        hypers += [Hyper(f"{name}.{i}", o, g, key, i) for i in range(len(parts))]
    return hypers


def state_name(owner: str, key: str, number: int, label: str) -> str:
    """Return the name of one tensor of optimizer state: with the optimizer's label, except for the first."""
    return f"{owner}/{key}" + (f"@{label}" if number else "")


def state_input(owner: str, key: str, tensor: torch.Tensor, number: int, label: str) -> Input:
    """Return the input for one tensor of optimizer state."""
    plain = _input(state_name(owner, key, number, label), Role.STATE, tensor, owner, key)
    return dataclasses.replace(plain, optimizer=number)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1) or type(value) is int


def optimizer_state(state: StepState) -> list[StepTensor]:
    """Return every tensor of optimizer state, named `parameter/key`: by optimizer, parameter, and when it was made."""
    return [
        StepTensor(state_input(name, key, value, o, label), [(Entry(entry), key)])
        for o, (label, optimizer) in enumerate(state.optimizers.items())
        for name, param in state.params.items()
        if (entry := optimizer.state.get(param.tensor))
        for key, value in Entry(entry).leaves().items()
        if isinstance(value, torch.Tensor)
    ]


def in_order(entry: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the state of one parameter, flat, in the order of the keys, which may be of any type until refused.

    Inputs of a program are in this order, which ranks compare: an entry has that of the first step, or of a load.
    """
    return sorted(Entry(entry).leaves().items(), key=lambda item: str(item[0]))


def refuse_objects(optimizers: Iterable[Optimizer], numbers: Container[object] = ()) -> None:
    """Refuse optimizer state that is no tensor or number of one parameter, or in a container, under a name of its own.

    `numbers` are Python numbers that a trace represents as tensors.
    """
    for optimizer in optimizers:
        names = dict[int, str]()
        for owner, entry in cast(dict[Any, Any], optimizer.state).items():
            if not isinstance(owner, torch.Tensor):
                raise _lost(optimizer, f"{owner!r} in its state, which belongs to no parameter")
            flat = Entry(cast(dict[Any, Any], entry))
            if (double := flat.double()) is not None:
                raise _lost(optimizer, f"two things in its state that have the name {double!r}")
            for key, value in flat.leaves().items():
                if not isinstance(value, _STATE):
                    raise _lost(optimizer, f"{key!r} in its state, which is a {type(value).__name__}")
                if not isinstance(key, str) or set(key) & set("/@"):
                    raise _lost(optimizer, f"state under {key!r}, which is no plain name")
                if isinstance(value, torch.Tensor) and value not in numbers:
                    if id(value) in names:
                        raise _lost(optimizer, f"one tensor twice in its state, as {names[id(value)]!r} and as {key!r}")
                    names[id(value)] = key


def _lost(optimizer: Optimizer, what: str) -> CaptureError:
    return CaptureError(
        f"optimizer {type(optimizer).__name__} keeps {what}",
        "tensors and numbers in `optimizer.state[parameter]`, also in lists, tuples and dicts, each under a name of "
        "its own: other state is not carried to the next call",
        "store it there, or call this optimizer outside the compiled step",
    )


def implementation(optimizer: Optimizer, group: Mapping[str, Any], device: str, fused: bool = True) -> dict[str, Any]:
    """Return the options of `group` that choose kernels on `device`; without `fused`, neither fused nor foreach ones.

    On a GPU, Adam and AdamW take their fused form unless the user chose otherwise: the foreach form that torch takes by
    default computes bias corrections on the host, and with counts on the device takes several kernels a parameter.
    """
    if not fused:
        return {key: False for key in ("fused", "foreach") if key in group}
    params: list[torch.Tensor] = group["params"]
    is_adam = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and not group["differentiable"]
    free = group.get("fused", False) is None and group["foreach"] is not False
    if is_adam and free and torch.device(device).type == "cuda" and all(p.is_floating_point() for p in params):
        return {"fused": True, "foreach": False}
    return {}


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the state that one of torch.optim makes."""
    return getattr(optimizer, "_init_group", optimizer.step).__module__.startswith("torch.optim")


def set_options(
    state: StepState, hypers: Sequence[Hyper], fakes: Mapping[str, torch.Tensor], device: str, fused: bool
) -> None:
    """Set hypers in the groups as tensors, the implementation, and `capturable`."""
    optimizers = list(state.optimizers.values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(implementation(optimizer, group, device, fused))
            group.update({"capturable": True} if "capturable" in group else {})
    for hyper in hypers:
        group, tensor = optimizers[hyper.optimizer].param_groups[hyper.group], fakes[hyper.name]
        old = group[hyper.key]
        group[hyper.key] = (
            tensor if hyper.index is None else tuple(tensor if i == hyper.index else v for i, v in enumerate(old))
        )


class _ReadOptions(dict[str, Any]):
    """Options of a parameter group, of which it is noted what was `read`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def prime(optimizer: Optimizer, param: torch.Tensor, group: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """Create the state that a first step on `device` would; return the options that it begins with, if there is any.

    Done only for torch.optim (by `_init_group`), where the first update stays exact. A first step that differs from
    later ones (SGD with dampening), and any other optimizer, is captured twice instead.
    """
    if not is_of_torch(optimizer) or optimizer.state.get(param):
        return None
    with _torch.outside_of_trace():
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    if not begins(optimizer):
        momentum = isinstance(optimizer, torch.optim.SGD) and plain["momentum"] != 0 and plain["dampening"] == 0
        if momentum:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False).detach()
        return {} if momentum else None
    options = _ReadOptions({**plain, **implementation(optimizer, group, device), "params": [param]})
    before, param.grad = param.grad, param.detach()
    try:
        begin(optimizer, options)
    finally:
        param.grad = before
    return {key: plain[key] for key in options.read - {"params"}}


def begins(optimizer: Optimizer) -> bool:
    """Return whether `begin` creates the state of an optimizer. SGD's is a first gradient."""
    return is_of_torch(optimizer) and hasattr(optimizer, "_init_group") and not isinstance(optimizer, torch.optim.SGD)


def begin(optimizer: Optimizer, options: dict[str, Any]) -> None:
    """Create the state that an optimizer of torch.optim begins with, of the parameters in a group's options."""
    init: Callable[..., Any] = cast(Any, optimizer)._init_group
    init(options, *(list[Any]() for _ in [*inspect.signature(init).parameters][1:]))


class SeenState(defaultdict[Any, dict[Any, Any]]):
    """The state of an optimizer in a trace. What it has for the trace alone is `later`, by parameter, until its update
    makes it: the user's code does not see it before, and `asked` are the parameters for which it might have.
    """

    later: dict[Any, dict[Any, Any]]
    asked: set[Any]

    def __new__(cls, *of: Any) -> SeenState:
        """Make one; a step may give a copy away, for which `__init__` does not run."""
        table = super().__new__(cls)
        table.later, table.asked = dict[Any, dict[Any, Any]](), set[Any]()
        return table

    def make(self, param: Any) -> None:
        """Make the state of a parameter, if it has none."""
        entry = self.later.pop(param, {})
        now = self.setdefault(param, {}) if entry else {}
        if not now or [*entry] == ["momentum_buffer"]:  # SGD alone looks for it beside other state
            now.update({key: value for key, value in entry.items() if key not in now})


def _seen(name: str) -> Callable[..., Any]:
    read = getattr(defaultdict, name)

    def run(self: SeenState, *args: Any) -> Any:
        code = sys._getframe(1).f_code  # pyright: ignore[reportPrivateUsage]  # of the caller
        if self.later and (is_user_file(code.co_filename) or code.co_name == "state_dict"):
            self.asked.update(self.later)
        elif self.later and code.co_name == "_init_group":
            self.make(args[0])
        return read(self, *args)

    return run


_NO_USES = {"__class_getitem__", "__doc__", "__getattribute__", "__hash__", "__init__", "__new__", "default_factory"}
for _name in {*vars(dict), *vars(defaultdict)} - {*_NO_USES, "__missing__", "fromkeys"}:
    setattr(SeenState, _name, _seen(_name))
for _name in ("__name__", "__qualname__", "__module__"):  # a step may print it
    setattr(SeenState, _name, getattr(defaultdict, _name))


@contextlib.contextmanager
def restored(state: StepState) -> Generator[None]:
    """Restore parameters, buffers, groups, state and modes at the end of this context, in which state is empty."""
    optimizers = list(state.optimizers.values())
    before = [(entry, entry.tensor) for entry in (*state.params.values(), *state.buffers.values())]
    changes: list[tuple[Any, str, Any]] = [(o, "state", SeenState(dict)) for o in optimizers]
    changes += [(s, _torch.SCALER_CALLS, copy.deepcopy(_torch.scaler_calls(s))) for s in state.scalers.values()]
    changes += [(m, "training", m.training) for root in state.modules.values() for m in root.modules()]
    modules = [module for root in state.modules.values() for module in root.modules()]
    with _torch.undone(), _torch.others_wait(modules), _torch.attributes_set(changes):
        for entry, tensor in before:
            _torch.undo(put, entry, tensor)
        for optimizer in optimizers:
            _torch.undo(optimizer.param_groups.__setitem__, slice(None), list(optimizer.param_groups))
            for group in optimizer.param_groups:
                _torch.undo(put_back, group, dict(group))
        for entry in state.params.values():
            _torch.as_before(entry.tensor)
        yield


def put_back(items: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Give a dict the items that it had before."""
    if list(items) != list(before):
        items.clear()
    items.update(before)


def put(entry: StepTensor, tensor: torch.Tensor) -> None:
    """Store `tensor` in every place of `held`."""
    for container, key in entry.places:
        container[key] = tensor


def option_of(state: StepState, hyper: Hyper) -> Any:
    """Return what a hyper is now: a number, or a tensor with one."""
    value = list(state.optimizers.values())[hyper.optimizer].param_groups[hyper.group][hyper.key]
    return value if hyper.index is None else value[hyper.index]


def baked_numbers(state: StepState, scheduled: Sequence[Hyper]) -> list[tuple[Optimizer, int, str, Any]]:
    """Return the options that are constants of the trace, as `(optimizer, group index, key, value)`."""
    live = {(h.optimizer, h.group, h.key) for h in scheduled}
    out: list[tuple[Optimizer, int, str, Any]] = []
    for o, optimizer in enumerate(state.optimizers.values()):
        for g, group in enumerate(optimizer.param_groups):
            baked = {k: v for k, v in group.items() if k != "params" and (o, g, k) not in live}
            out += [(optimizer, g, key, value) for key, value in baked.items() if state.has_first(o, group)]
    return out
