"""Compares the program of each compile with those of the other ranks.

What must be equal on all ranks is compared as sections of lines: versions, options, numbers, graph. A graph depends on
the sizes of the batch, which may differ between ranks under per-rank semantics. Then each rank captures the step once
more, for the first rank's call, so that ranks compare functions and not batches.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from itertools import product
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Node
from torch.optim import Optimizer

from .. import _torch
from ..cache.key import digest, own_source
from ..capture.assumptions import Assumption
from ..capture.capture import Capture
from ..capture.state import Hyper, StepState, in_order
from ..distributed.launch import World
from ..distributed.rendezvous import Calls, Rendezvous
from ..distributed.sections import CONSTANTS, GRAPH, LAYOUTS, SEPARATOR, UNKNOWN, USER_LINES, Section, parting
from ..graph import meta
from ..graph.graph import LocalGraph, Role
from ..graph.loop import with_bodies
from ..graph.nodes import communicates, operands
from ..graph.text import op_name, short_dtype
from ..plan.plan import Plan
from ..tuning import TUNING
from .compile_options import StepOptions
from .progress import Stages
from .said_call import SaidCall, as_said, said_of
from .step_inputs import StepInputs

VERSIONS, STEP, OPTIMIZERS, NUMBERS = "versions", "options of the step", "options of optimizers", "scheduled numbers"
MEMBERS = "parameters of optimizers"

Recapture = Callable[[Any, Any], Capture]
"""Captures the step for other arguments."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_SHOWN = 4


@dataclass(frozen=True)
class RankProgram:
    """The captured step, its plan and the program of the rank; `before` is the program before passes. Ranks compare
    `shared`, lines without the sizes of other ranks' batches, and know them as `compared`.
    """

    capture: Capture
    plan: Plan
    local: LocalGraph
    before: LocalGraph
    lines: tuple[str, ...]
    shared: tuple[str, ...]
    compared: str = ""


@dataclass
class ConsistencyCheck:
    """The comparisons of one step. `label` is the step's, the same on all ranks; `which` says which step it is; `round`
    counts the comparisons. `before`: why the program that ran last does not fit a call, and its capture.

    What was compared is remembered in the same order on all ranks, so they forget the oldest at the same comparison. A
    rank lets go of the programs for it then (`knows`): no rank runs one while others wait to compare it again.
    """

    options: StepOptions
    world: World
    rendezvous: Rendezvous
    stages: Stages
    label: str
    which: str
    round: int = 0
    before: tuple[str, Capture] | None = None
    _agreed: dict[str, str] = field(default_factory=dict[str, str])
    _options: set[str] = field(default_factory=set[str])
    _assumptions: list[list[Assumption]] = field(default_factory=list[list[Assumption]])

    @property
    def is_new(self) -> bool:
        """True until ranks have agreed on something."""
        return not self._agreed

    @property
    def round_label(self) -> str:
        """The label of what ranks exchange in this round."""
        return f"{self.label}/{self.round}"

    def knows(self, compared: str) -> bool:
        """True while ranks remember to have compared a program."""
        return compared in self._agreed.values()

    def forget(self) -> None:
        """Ranks, all of them, compare what they compile next."""
        self._agreed.clear()
        self._assumptions.clear()

    def alone(self, program: RankProgram) -> RankProgram:
        """A program of a job of one rank."""
        program = replace(program, compared=digest(program.lines))
        self._remember(program.compared)
        return program

    def fail(self, failure: str) -> None:
        """Stop the other ranks: this rank has no program."""
        self._compare({}, failure=failure)

    def before_choosing(self, description: str) -> None:
        """Before the first rank chooses for all, a rank that failed until here stops all. Compares once."""
        section = Section.of([description, cache_line(self.options)])
        if section.fingerprint not in self._agreed:
            self._compare({LAYOUTS: section})
            self._remember(section.fingerprint)

    def program(self, program: RankProgram, inputs: StepInputs, recapture: Recapture) -> RankProgram:
        """Compare a program with those of all ranks, unless its layouts, collectives and options were compared before,
        and so was what Python says now where the step reads it: the other ranks do not compile when one rank gets a
        batch of another size, or one that it has forgotten.
        """
        state = program.capture.state
        baked, numbers = option_lines(state, program.capture.hypers, program.capture.effects.group_options())
        settings = {VERSIONS: Section.of(versions()), STEP: Section.of([self.which, *step_lines(self.options)])}
        rests = {LAYOUTS: Section.of(program.shared), MEMBERS: Section.of(member_lines(state))}
        compared = digest([section.fingerprint for section in (*settings.values(), *rests.values())])
        key = digest([compared, *program.lines])
        is_known = any(all(assumption.holds for assumption in assumptions) for assumptions in self._assumptions)
        if key in self._agreed and self._options.issuperset(baked) and is_known:
            return replace(program, compared=compared)
        options = {OPTIMIZERS: Section.of(baked), NUMBERS: Section.of([*numbers, *state_lines(state)])}
        graphs = graph_sections(program.capture, self.world.device)
        call, news = call_fingerprint(inputs, program.capture), self._news(graphs[USER_LINES].lines)
        causes_first = {**settings, **options, **rests, **_sizes(program, self.world.coordinate), **graphs}
        calls = self._compare(causes_first, call=call, news=news)
        if calls.first_other:
            reads = bool(program.capture.values and program.capture.values.reads)
            self._for_first_call(graphs if calls.same else None, inputs, reads, recapture)
        self._remember(key, compared)
        self._options.update(baked)
        self._assumptions = [*self._assumptions[1 - TUNING.kept_comparisons :], _read_outside(program.capture, inputs)]
        return replace(program, compared=compared)

    def _news(self, lines: Sequence[str]) -> str:
        if self.before is None:
            return "it is the first one there"
        why, last = self.before
        return why + parting(lines, meta.lines_in_order(last.traced.graph), f"rank {self.world.rank}", "earlier calls")

    def _remember(self, key: str, compared: str = "") -> None:
        self._agreed[key] = compared or key
        for oldest in list(self._agreed)[: -TUNING.kept_comparisons]:
            del self._agreed[oldest]

    def _compare(self, sections: Mapping[str, Section], **about: str) -> Calls:
        with self.stages.stage("agree"):
            before = self.round_label
            self.round += 1
            calls = self.rendezvous.all_equal(self.round_label, sections, **about)
        if "failure" not in about:  # a rank that failed waited for nobody: others may still read what was before
            self.rendezvous.forget(before)
        return calls

    def _for_first_call(
        self, graphs: Mapping[str, Section] | None, inputs: StepInputs, reads: bool, recapture: Recapture
    ) -> None:
        """Compare the graphs that all ranks have for the first rank's call; `graphs` where that is this rank's."""
        call = said_of(inputs, reads) if self.world.rank == 0 else None
        if self.world.rank == 0 or graphs is None:
            what, kind = "for which call it compiled its step", tuple[SaidCall | None]
            (call,) = self.rendezvous.broadcast(f"{self.round_label}/call", (call,), what, kind)
        if graphs is None:
            with self.stages.stage("capture for the first rank's batch"):
                graphs = _recaptured(call, inputs, self.world.device, recapture)
        self._compare(graphs)


def _read_outside(capture: Capture, inputs: StepInputs) -> list[Assumption]:
    """What the step has read on the host that is no part of an argument, which ranks may have of their own."""
    shared = nn.Module, Optimizer
    names = tuple(n for n, leaf in zip(inputs.names, inputs.leaves, strict=True) if not isinstance(leaf, shared))
    return [assumption for assumption in capture.effects.expected if not assumption.place.path.startswith(names)]


def _recaptured(call: SaidCall | None, inputs: StepInputs, device: str, recapture: Recapture) -> dict[str, Section]:
    """Sections of this rank's step for another rank's call; UNKNOWN where it cannot be captured for that call."""
    try:
        args, kwargs = as_said(call, inputs, device)
        capture = recapture(args, kwargs)
    except Exception:  # what this rank can do with its own batch it need not be able to do with that one
        return {CONSTANTS: Section(UNKNOWN), GRAPH: Section(UNKNOWN)}
    return graph_sections(capture, device)


def versions() -> list[str]:
    """Versions of the packages on this rank."""
    try:
        version = metadata.version("wholestep")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        version = "not installed"
    packages = {"torch": torch.__version__, "wholestep": version, "Python": platform.python_version()}
    return [f"{name}{SEPARATOR}{text}" for name, text in {**packages, "source of wholestep": own_source()[:12]}.items()]


def step_lines(options: StepOptions) -> list[str]:
    """Options of the step that shape what it computes."""
    user, schedule = options.user, options.user.schedule
    return [
        f"backend{SEPARATOR}{options.backend.name}", f"cuda_graphs{SEPARATOR}{user.cuda_graphs}",
        f"keep_grads{SEPARATOR}{options.capture.keep_grads}",
        f"on_nonfinite{SEPARATOR}{'a function' if callable(user.on_nonfinite) else user.on_nonfinite}",
        f"schedule{SEPARATOR}{schedule if schedule is None or isinstance(schedule, str) else type(schedule).__name__}",
        f"check_every{SEPARATOR}{user.check_every}", f"verify{SEPARATOR}{user.verifies}",
        f"mixed_precision{SEPARATOR}{options.capture.mixed_precision}", f"float8{SEPARATOR}{options.capture.float8}",
        f"module_overrides{SEPARATOR}{', '.join(sorted(options.capture.module_overrides)) or 'none'}",
        f"passes{SEPARATOR}{_name(user.passes)}", cache_line(options),
    ]  # fmt: skip


def cache_line(options: StepOptions) -> str:
    """Whether the compile cache is on."""
    return f"compile cache{SEPARATOR}{'compile cache on' if options.cache else 'off'}"


def _with_other_batches(plan: Plan) -> list[str]:
    """Axes along which each rank has a batch of its own."""
    layouts = [plan.storage[i.name] for i in plan.inputs if i.role is Role.BATCH]
    return sorted({axis for layout in layouts for axis in layout.varies if plan.mesh.axis_size(axis) > 1})


def _sizes(program: RankProgram, coordinate: Mapping[str, int]) -> dict[str, Section]:
    """A section for the ranks of each batch, with its sizes: UNKNOWN for those of others."""
    axes, mesh = _with_other_batches(program.plan), program.plan.mesh
    own, sections = tuple(coordinate[axis] for axis in axes), dict[str, Section]()
    for at in product(*(range(mesh.axis_size(axis)) for axis in axes)) if program.shared != program.lines else ():
        where = ", ".join(f"{axis}={number}" for axis, number in zip(axes, at, strict=True))
        sections[f"{LAYOUTS} at {where}"] = Section.of(program.lines) if at == own else Section(UNKNOWN)
    return sections


def program_lines(local: LocalGraph, plan: Plan, shared: bool = False) -> tuple[str, ...]:
    """Storage layouts of the state, every collective in order, and what is updated: not by the size of the batch. With
    `shared`, without sizes of what ranks exchange that share a batch, where others have batches of their own.
    """
    lines = [f"mesh {plan.mesh.of_ranks}; {plan.strategy}"]
    for i in plan.inputs:
        if i.role in (Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD):
            lines.append(
                f"{i.role.value} {i.name}: {short_dtype(i.meta.dtype)}[{plan.storage[i.name].show(i.meta.shape)}]"
            )
    apart = _with_other_batches(plan)
    for node, times in with_bodies(local.graph):
        if communicates(node):
            tensors = [source for operand in operands(node) if (source := meta.tensor(operand)) is not None]
            counted = any(isinstance(argument, Node) for argument in node.args[1:])  # rows, while it runs
            sized = not (shared and apart) or node.args[-1] in apart
            sizes = (str(list(tensor.shape[counted:])) if sized else "" for tensor in tensors)
            shapes = ", ".join(f"{short_dtype(t.dtype)}{size}" for t, size in zip(tensors, sizes, strict=True))
            rest = ", ".join(str(argument) for argument in node.args[1:-1] if not isinstance(argument, (Node, list)))
            often = f", {times} times" if times > 1 else ""
            lines.append(f"collective {op_name(node)} of {shapes} over {node.args[-1]} ({rest}){often}")
    buffers = {i.name for i in plan.inputs if i.role is Role.BUFFER}  # of each rank, under per-rank semantics
    updated = {out.target for out in local.outputs if out.kind == "update"}
    return (*lines, *(f"update of {name}" for name in sorted(updated - buffers)))


def option_lines(
    state: StepState, live: Sequence[Hyper], carried: Collection[tuple[int, int, Any]] = ()
) -> tuple[list[str], list[str]]:
    """Two lists of optimizer options, a line each: constants of the program, and options that may change. A scheduler
    may add an option to a group. The step itself changes `carried` options: id of the optimizer, number of the group,
    key.
    """
    numbers_of = {id(optimizer): o for o, optimizer in enumerate(state.optimizers.values())}
    changing = {(h.optimizer, h.group, h.key) for h in live} | {(numbers_of.get(i), g, key) for i, g, key in carried}
    baked, numbers = [f"number of optimizers{SEPARATOR}{len(state.optimizers)}"], list[str]()
    for o, (label, optimizer) in enumerate(state.optimizers.items()):
        of = f" of {label}" if len(state.optimizers) > 1 else ""
        defaults = cast(dict[str, object], getattr(optimizer, "defaults", {}))
        baked.append(f"kind of {label}{SEPARATOR}{_name(type(optimizer))}")
        for g, group in enumerate(optimizer.param_groups):
            for key in sorted(map(str, group)):
                if key != "params":
                    into = numbers if (o, g, key) in changing or key not in defaults else baked
                    into.append(f"{key} of group {g}{of}{SEPARATOR}{show(group[key])}")
    return baked, numbers


def state_lines(state: StepState) -> list[str]:
    """Python numbers in the state of optimizers."""
    return [
        f"{key} of {name} in the state of {label}{SEPARATOR}{value!r}"
        for label, optimizer in state.optimizers.items()
        for name, param in state.params.items()
        for key, value in in_order(optimizer.state.get(param.tensor, {}))
        if isinstance(value, (bool, int, float))
    ]


def member_lines(state: StepState) -> list[str]:
    """Which parameters each group has."""
    names = {id(param.tensor): name for name, param in state.params.items()}
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
        pairs = sorted(f"{show(k)}: {show(v)}" for k, v in cast(dict[object, object], value).items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (set, frozenset)):
        kind: type = set if isinstance(value, set) else frozenset
        return f"{kind.__name__}({sorted(map(show, cast(set[object], value)))})"
    return torch.device(value).type if isinstance(value, torch.device) else _name(value)


def show_tensor(tensor: torch.Tensor) -> str:
    """Type, shape, first values and a fingerprint of all."""
    head = f"{short_dtype(tensor.dtype)}{list(tensor.shape)}"
    if tensor.is_meta or tensor.layout != torch.strided:
        return head
    flat = _torch.local_tensor(tensor.detach()).cpu().reshape(-1)
    values = str(cast(list[Any], flat[:_SHOWN].tolist())).removesuffix("]")
    if flat.numel() <= _SHOWN:
        return f"{head} {values}]"
    data = flat.contiguous().view(torch.uint8).numpy().tobytes()
    return f"{head} {values}, ...] with fingerprint {hashlib.sha256(data).hexdigest()[:12]}"


def _name(value: object) -> str:
    """The name of an object, without its address in memory."""
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return "None" if value is None else f"{named.__module__}.{named.__qualname__}"


def graph_sections(capture: Capture, device: str) -> dict[str, Section]:
    """The captured graph and its constants as sections."""
    graph, made_at = capture.traced.graph, Section(UNKNOWN, meta.lines_in_order(capture.traced.graph))
    text = Section.of(graph_lines(capture, device), partial(meta.line_behind, graph))
    return {CONSTANTS: Section.of(constant_lines(capture)), GRAPH: text, USER_LINES: made_at}


def constant_lines(capture: Capture) -> list[str]:
    """Each constant of the captured graph: its type, shape, first values and a fingerprint of all."""
    return [f"{name}{SEPARATOR}{show_tensor(tensor)}" for name, tensor in capture.graph.constants.items()]


def graph_lines(capture: Capture, device: str) -> list[str]:
    """The captured graph, with the same name for each rank's own device."""
    text = str(capture.traced)
    kind = torch.device(device).type
    if kind != "cpu":
        text = re.sub(rf"{kind}:\d+|(?<=type='{kind}'), index=\d+", kind, text)
    return re.sub(r" at 0x[0-9a-f]+", "", text).splitlines()


def call_fingerprint(inputs: StepInputs, capture: Capture) -> str:
    """A fingerprint of all that a graph may depend on in a call, as far as it is known: of other objects the class."""
    lines = inputs.structure.lines()
    for name, leaf in zip(inputs.names, inputs.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            parts = name in inputs.global_shapes
            shape = inputs.global_shapes[name] if parts else tuple(leaf.shape)
            stride = leaf.stride() if not parts and leaf.layout == torch.strided else ()
            lines.append(f"{name} {leaf.dtype} {shape} {stride} {leaf.requires_grad}")
        elif isinstance(leaf, _PLAIN):
            lines.append(f"{name} {leaf!r}")
        elif isinstance(leaf, (nn.Module, Optimizer)):
            lines.append(name)
        else:
            lines.append(f"{name} {_name(cast(object, type(leaf)))}")
    reads = capture.values.reads if capture.values else ()
    lines += [str(cast(list[Any], value_read.expected.tolist())) for value_read in reads]
    return Section.of(lines).fingerprint
