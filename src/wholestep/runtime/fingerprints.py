"""Everything that must be equal on all ranks of a step, as sections of lines: versions, options, numbers, graph."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..cache.key import own_source
from ..capture.call_structure import Structure
from ..capture.capture import Capture
from ..capture.state import Hyper, StepState
from ..distributed.launch import World
from ..distributed.sections import CONSTANTS, GRAPH, LAYOUTS, SEPARATOR, Section
from ..graph import meta
from ..graph.graph import LocalGraph, Role, TrainGraph
from ..graph.nodes import is_collective, node_at
from ..graph.text import short_dtype, show_call
from ..plan.plan import Plan
from .compile_options import StepOptions
from .placement import local
from .step_inputs import StepInputs

VERSIONS, STEP, OPTIMIZERS, NUMBERS = "versions", "options of the step", "options of optimizers", "scheduled numbers"
MEMBERS = "parameters of optimizers"
ORDER = (
    VERSIONS,
    STEP,
    OPTIMIZERS,
    NUMBERS,
    LAYOUTS,
    MEMBERS,
    CONSTANTS,
    GRAPH,
)  # causes before their effects

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_SHOWN = 4


def versions() -> list[str]:
    """Versions of the packages on this rank."""
    try:
        own = metadata.version("wholestep")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        own = "not installed"
    return [
        f"torch{SEPARATOR}{torch.__version__}",
        f"wholestep{SEPARATOR}{own}",
        f"Python{SEPARATOR}{platform.python_version()}",
        f"source of wholestep{SEPARATOR}{own_source()[:12]}",
    ]


def step_lines(options: StepOptions) -> list[str]:
    """Options of the step that shape what it computes."""
    given, schedule = options.given, options.given.schedule
    return [
        f"backend{SEPARATOR}{options.backend.name}",
        f"keep_grads{SEPARATOR}{options.capture.keep_grads}",
        f"schedule{SEPARATOR}{schedule if schedule is None or isinstance(schedule, str) else type(schedule).__name__}",
        f"check_every{SEPARATOR}{given.check_every}",
        f"mixed_precision{SEPARATOR}{options.capture.mixed_precision}",
        f"module_overrides{SEPARATOR}{', '.join(sorted(options.capture.module_overrides)) or 'none'}",
        f"passes{SEPARATOR}{_name(given.passes)}",
        cache_line(options),
    ]


def cache_line(options: StepOptions) -> str:
    """Whether the compile cache is on."""
    return f"compile cache{SEPARATOR}{'compile cache on' if options.cache else 'off'}"


def program_lines(local: LocalGraph, plan: Plan) -> list[str]:
    """Storage layouts of the state, and every collective in order. They do not depend on the size of the batch."""
    lines = [f"mesh {plan.mesh}; {plan.strategy}"]
    for i in plan.inputs:
        if i.role in (Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD):
            lines.append(
                f"{i.role.value} {i.name}: {short_dtype(i.meta.dtype)}[{plan.storage[i.name].show(i.meta.shape)}]"
            )
    for node in local.graph.nodes:
        if is_collective(node):
            source = meta.tensor(node_at(node, 0))
            shape = f"{short_dtype(source.dtype)}{list(source.shape)}" if source else ""
            rest = ", ".join(map(str, node.args[1:-1]))
            lines.append(f"collective {show_call(node).split('(')[0]} of {shape} over {node.args[-1]} ({rest})")
    return lines


def option_lines(
    state: StepState, live: Sequence[Hyper], carried: Collection[tuple[int, int, Any]] = ()
) -> tuple[list[str], list[str]]:
    """Every option of every parameter group: first the constants of the program, then those that may change.

    Options that schedulers add to a group may appear later. `carried` are options that the step itself changes:
    identity of the optimizer, number of the group, key.
    """
    numbers_of = {id(optimizer): o for o, optimizer in enumerate(state.optimizers.values())}
    changing = {(h.optimizer, h.group, h.key) for h in live} | {(numbers_of.get(i), g, key) for i, g, key in carried}
    baked, numbers = [f"number of optimizers{SEPARATOR}{len(state.optimizers)}"], list[str]()
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        of = f" of {label}" if len(state.optimizers) > 1 else ""
        own = cast(dict[str, object], getattr(optimizer, "defaults", {}))
        baked.append(f"kind of {label}{SEPARATOR}{_name(type(optimizer))}")
        for g, group in enumerate(optimizer.param_groups):
            for key in sorted(map(str, group)):
                if key != "params":
                    into = numbers if (o, g, key) in changing or key not in own else baked
                    into.append(f"{key} of group {g}{of}{SEPARATOR}{show(group[key])}")
    return baked, numbers


def state_lines(state: StepState) -> list[str]:
    """Python numbers in the state of optimizers."""
    return [
        f"{key} of {name} in the state of {label}{SEPARATOR}{value!r}"
        for label, optimizer in state.optimizers.items()
        for name, held in state.params.items()
        for key, value in optimizer.state.get(held.tensor, {}).items()
        if isinstance(value, (bool, int, float))
    ]


def member_lines(state: StepState) -> list[str]:
    """Which parameters each group has."""
    names = {id(held.tensor): name for name, held in state.params.items()}
    return [
        f"parameter {i} of group {g} of {label}{SEPARATOR}{names.get(id(param), '?')}"
        for label, optimizer in state.optimizers.items()
        for g, group in enumerate(optimizer.param_groups)
        for i, param in enumerate(group["params"])
    ]


def show(value: object) -> str:
    """A value of an option, the same text in every process for equal values."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return show_tensor(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(show, cast(Sequence[object], value)))
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(k)}: {show(v)}" for k, v in cast(dict[object, object], value).items()) + "}"
    return torch.device(value).type if isinstance(value, torch.device) else _name(value)


def show_tensor(tensor: torch.Tensor) -> str:
    """Type, shape, first values and a fingerprint of all."""
    head = f"{short_dtype(tensor.dtype)}{list(tensor.shape)}"
    if tensor.is_meta or tensor.layout != torch.strided:
        return head
    flat = local(tensor.detach()).cpu().reshape(-1)
    few = str(cast(list[Any], flat[:_SHOWN].tolist())).removesuffix("]")
    if flat.numel() <= _SHOWN:
        return f"{head} {few}]"
    data = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{head} {few}, ...] with fingerprint {hashlib.sha256(data).hexdigest()[:12]}"


def _name(value: object) -> str:
    """The name of an object, without its address in memory."""
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return "None" if value is None else f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True)
class GraphFingerprint:
    """The captured graph as sections; `call` is the fingerprint of the call that it was captured for."""

    call: str
    graph: Section
    constants: Section

    @property
    def sections(self) -> dict[str, Section]:
        """As `Rendezvous.all_equal` takes them."""
        return {CONSTANTS: self.constants, GRAPH: self.graph}


def graph_fingerprint(capture: Capture, inputs: StepInputs, world: World) -> GraphFingerprint:
    """The sections of a capture."""
    graph = Section.of(graph_lines(capture, world.device), partial(_source_of, capture.graph))
    return GraphFingerprint(call_fingerprint(inputs, world.rank, capture), graph, Section.of(constant_lines(capture)))


def constant_lines(capture: Capture) -> list[str]:
    """Each constant of the captured graph: its type, shape, first values and a fingerprint of all."""
    return [f"{name}{SEPARATOR}{show_tensor(tensor)}" for name, tensor in capture.graph.constants.items()]


def _source_of(train: TrainGraph, line: str) -> str:
    """The user's line behind a line of the graph's text."""
    name = line.strip().removeprefix("%").split(" ")[0]
    return next((meta.source_line(node) for node in train.graph.nodes if node.name == name), "")


def graph_lines(capture: Capture, device: str) -> list[str]:
    """The captured graph, with the same name for each rank's own device."""
    text = str(capture.graph)
    kind = torch.device(device).type
    if kind != "cpu":
        text = re.sub(rf"{kind}:\d+|(?<=type='{kind}'), index=\d+", kind, text)
    return re.sub(r" at 0x[0-9a-f]+", "", text).splitlines()


def call_fingerprint(given: StepInputs, rank: int, capture: Capture) -> str:
    """A fingerprint of all in the arguments that a graph may depend on: structure, sizes, Python values, values read.

    An argument of an unknown class makes it differ from every other rank's.
    """
    lines = _structure_lines(given.structure)
    for name, leaf in zip(given.names, given.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            parts = name in given.whole
            shape = given.whole[name] if parts else tuple(leaf.shape)
            stride = leaf.stride() if not parts and leaf.layout == torch.strided else ()
            lines.append(f"{name} {leaf.dtype} {shape} {stride} {leaf.requires_grad}")
        elif isinstance(leaf, _PLAIN):
            lines.append(f"{name} {leaf!r}")
        elif isinstance(leaf, (nn.Module, Optimizer)):
            lines.append(name)
        else:
            lines.append(f"{name} {_name(leaf)} of rank {rank}")
    lines += [str(cast(list[Any], read.expected.tolist())) for read in (capture.values.reads if capture.values else ())]
    return Section.of(lines).fingerprint


def _structure_lines(structure: Structure) -> list[str]:
    inside = [line for *_, inner in structure.opened for line in _structure_lines(inner)]
    return [
        str(structure.spec),
        *(f"{i} {kind.__qualname__} {fields}" for i, kind, fields, _ in structure.opened),
        *inside,
    ]
