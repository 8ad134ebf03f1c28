"""Tensor and sequence parallelism along one axis: styles of named modules, or layouts that are solved for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.fx import Node

from ..errors import PlanError, shown
from ..graph import meta
from ..graph.graph import TrainGraph
from ..graph.nodes import node_at
from ..graph.op_kinds import arithmetic
from ..hardware.hardware import Hardware
from ..layout import REPLICATED, AxisState
from ..mesh import Mesh
from .data_parallel import BatchDim, batch_dim
from .decision import Decision
from .module_map import Modules
from .module_styles import NAMES, ModuleStyle, Wanted, style_of
from .narrow_casts import reads_after_casts
from .propagation_inputs import moving
from .strategy import BatchCut, Pins, Stored, Strategy

aten = torch.ops.aten
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class OneAxis(Strategy):
    """Uses one axis, which shards `input_dim` of the batch where that is given."""

    axis: str
    input_dim: BatchDim | None
    async_tp: bool
    reshard_after_forward: bool

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Its axis. Raises MeshError if the mesh has none of this name."""
        mesh.axis_size(self.axis)
        return (self.axis,)

    @property
    def shares_batches(self) -> bool:
        """Ranks have parts of one batch."""
        return self.input_dim is not None

    @property
    def _options(self) -> str:
        text = ", async" if self.async_tp else ""
        return text + (", activations re-gathered" if self.reshard_after_forward else "")

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """The dim `input_dim`."""
        dim = None if self.input_dim is None else batch_dim(self.input_dim, name, ndim)
        return None if dim is None else BatchCut(dim, (self.axis,))


@dataclass(frozen=True)
class TensorParallel(OneAxis):
    """Shards layers over the ranks of one axis, which compute one result together, by default on the same batch.

    `plan` maps globs of module paths (one for each name between dots, as "layers.*.attn.wq") to styles: `"colwise"`,
    `"rowwise"`, `"sequence"`, the classes of `torch.distributed.tensor.parallel`, or the words in the plans of
    transformers models. Propagation lays out all other operations.

    `"auto"` solves an integer program for the layouts of all operations along the axis, for the shortest step by a cost
    model. It needs no names, and finds sequence parallelism too.

    Args:
        plan: styles by module, or `"auto"`.
        axis: the mesh axis.
        sequence_dim: the dim that `"sequence"` shards.
        loss_parallel: the results of the last column-parallel layer stay sharded (torch's `loss_parallel`): the loss is
            computed without gathering logits, even if the plan asks for a gather (`colwise_gather_output`).
        input_dim: the dim of batch tensors of which each rank of the axis gets its part: 0 for samples, 1 for a
            sequence (torch's `input_layouts=Shard(...)`); or by argument, as `DataParallel.input_batch_dim`. None: all
            ranks get the same.
        strict: every pattern must match a module.
        async_tp: async tensor parallelism: gathers and reduce-scatters along the axis, and the products next to them,
            become one op of `torch.ops.symm_mem` on GPUs of one node, where that is simulated to gain. Sums are rounded
            otherwise. On CPUs and between nodes it changes nothing.
        reshard_after_forward: activations that are gathered along the axis, as column-parallel layers gather what
            `"sequence"` shards, are freed after the forward and re-gathered for the backward, as in Megatron's sequence
            parallelism. False: they are kept.
        hardware: for `"auto"`, the same on all ranks; by default `Hardware.default()`, a slow CPU on a slow link.
        pinned: layouts along the axis, by glob, that `"auto"` has to use for parameters and for the results of modules:
            `{"lm_head": Shard(2), "embed.weight": Replicate()}`.
        replicated: globs of modules (and parameters) whose forward and parameters `"auto"` replicates on the axis.

    Example:
        >>> TensorParallel({"*.w1": "colwise", "*.w2": "rowwise"}).axis
        'tp'
    """

    plan: Mapping[str, str | ParallelStyle | ModuleStyle] | Literal["auto"] = field(hash=False)
    axis: str = "tp"
    sequence_dim: int = 1
    loss_parallel: bool = False
    input_dim: BatchDim | None = None
    strict: bool = True
    async_tp: bool = False
    reshard_after_forward: bool = False
    hardware: Hardware | None = None
    pinned: Mapping[str, Shard | Replicate] = field(default_factory=dict[str, Shard | Replicate], hash=False)
    replicated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.is_open:
            if self.loss_parallel:
                problem = 'loss_parallel with TensorParallel("auto")'
                raise PlanError(problem, "nothing: it solves for that", "drop loss_parallel")
            return
        unused = next((name for name in ("hardware", "pinned", "replicated") if getattr(self, name)), None)
        if unused:
            needed = f'TensorParallel("auto", {unused}=...)'
            raise PlanError(f"{unused} with a plan by module", needed, f"drop {unused}")
        if not self.plan:
            raise PlanError(
                f"TensorParallel({shown(self.plan)})",
                'styles by module path, as {"layers.*.wq": "colwise"}',
                'pass such a plan, or "auto", or use TensorParallel.of(model) for a model that has a plan',
            )
        self.styles()

    @staticmethod
    def of(model: nn.Module, axis: str = "tp", *, sequence: bool = False, **options: Any) -> TensorParallel:
        """The plan of a transformers model (`model.tp_plan`). `sequence`: what its row-parallel layers and embeddings
        return is sharded along `sequence_dim` (1), and so is what follows from it up to the next column-parallel layer.

        Raises:
            PlanError: the model has none.
        """
        config: Any = getattr(model, "config", None)
        plan: Any = getattr(model, "tp_plan", None) or getattr(config, "base_model_tp_plan", None)
        if not plan:
            raise PlanError(
                f"{type(model).__name__} has no tensor-parallel plan",
                "a model with tp_plan, or config.base_model_tp_plan",
                'pass a plan by module, as TensorParallel({"layers.*.wq": "colwise", ...}), or TensorParallel("auto")',
            )
        strategy = TensorParallel(dict(plan), axis, strict=False, **options)
        return replace(strategy, plan=_along_sequence(strategy, model)) if sequence else strategy

    @property
    def is_open(self) -> bool:
        """True for `"auto"`: `planner.ilp` solves for the layouts on a graph and a mesh."""
        return isinstance(self.plan, str) and self.plan == "auto"

    def styles(self) -> dict[str, ModuleStyle]:
        """The style of each pattern; empty for `"auto"`."""
        if isinstance(self.plan, str):
            return {}
        return {pattern: style_of(style, pattern, self.sequence_dim) for pattern, style in self.plan.items()}

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Shards the parameters of named modules, and their optimizer state with them."""
        modules, out = Modules(graph), dict(before)
        for path, style in self._named(modules).items():
            for name in modules.held(path) if style.cut else ():
                dim = _cut_dim(modules, name, path, style)
                if dim is not None:
                    cut, have = AxisState("S", dim), before[name]
                    out[name] = Stored(have.param.put(self.axis, cut), have.state.put(self.axis, cut))
        return out

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Inputs and outputs of named modules."""
        if mesh.axis_size(self.axis) == 1:
            return Pins()
        modules, results = Modules(graph), dict[str, dict[str, AxisState]]()
        requests: dict[Node, dict[Node, AxisState]] = {}
        named, moves = self._named(modules), moving(graph)
        head = self._head(modules, named)
        for path, style in named.items():
            gives = (AxisState("S", -1),) if path == head else style.gives
            for node, state in _paired(modules.outputs(path), gives):
                results[node.name] = {self.axis: state}
            inputs = modules.inputs(path, moves)
            for node, state in _paired(list(inputs), style.reads):
                requests[node] = requests.get(node, {}) | dict.fromkeys(inputs[node], state)
        return Pins(results, reads_after_casts(requests, self.axis))

    def check(self, graph: TrainGraph, mesh: Mesh, decisions: Mapping[str, Decision]) -> None:
        """Check that the axis divides attention heads evenly.

        Raises:
            PlanError: it does not.
        """
        if mesh.axis_size(self.axis) > 1:
            check_heads(graph, mesh, self.axis, decisions)

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        tail = ", loss parallel" if self.loss_parallel else ", layouts to be solved for" if self.is_open else ""
        return f"tensor parallel on {self.axis}{tail}{self._options}"

    def _head(self, modules: Modules, named: Mapping[str, ModuleStyle]) -> str:
        """With `loss_parallel`, the last column-parallel layer, whose results stay sharded."""
        order = {n: i for i, n in enumerate(modules.graph.graph.nodes)}
        outputs = {p: modules.outputs(p) for p, s in named.items() if self.loss_parallel and s.cut == "col"}
        return max((p for p, nodes in outputs.items() if nodes), key=lambda p: order[outputs[p][-1]], default="")

    def _named(self, modules: Modules) -> dict[str, ModuleStyle]:
        """The style of each module or parameter, by the last pattern that matches; PlanError if one matches nothing."""
        styles: dict[str, ModuleStyle] = {}
        missing: list[str] = []
        for pattern, style in self.styles().items():
            paths = modules.matching(pattern)
            styles |= dict.fromkeys(paths, style)
            missing += [] if paths else [pattern]
        if missing and (self.strict or not styles):
            raise _unmatched(missing, modules)
        return styles


def _along_sequence(strategy: TensorParallel, model: nn.Module) -> dict[str, ModuleStyle]:
    """The styles of `strategy`, with row-parallel layers and embeddings that return pieces of the sequence."""
    cut = (AxisState("S", strategy.sequence_dim),)
    modules: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    tables = {name: NAMES["rowwise"] for name, module in modules.items() if isinstance(module, nn.Embedding)}
    styles = {**tables, **strategy.styles()}
    return {name: replace(style, gives=cut) if style.cut == "row" else style for name, style in styles.items()}


def _cut_dim(modules: Modules, name: str, path: str, style: ModuleStyle) -> int | None:
    """The dim of a parameter that a style shards; None if the parameter stays whole."""
    tensor = meta.tensor(modules.params[name])
    assert tensor is not None, "a parameter is one tensor"
    ndim = len(tensor.shape)
    if style.cut == "experts":
        return 0 if ndim else None
    if ndim < 2:
        return 0 if ndim and style.cut == "col" else None
    readers = [u.target for u in modules.uses(name, path)]
    if aten.embedding.default in readers:
        return 1 if style.cut == "col" else 0
    if any((operation := arithmetic(target)) and operation.kind == "convolution" for target in readers):
        return 0 if style.cut == "col" else 1  # [out, in, ...]
    if name.rpartition(".")[2].endswith("bias"):
        return ndim - 1 if style.cut == "col" else None
    # stored as [in, out]: the readers do not transpose it, as they do for `Linear`
    in_out = ndim == 2 and bool(readers) and not any(target in _TRANSPOSES for target in readers)
    return ndim - 1 if (style.cut == "col") == in_out else ndim - 2


def _paired(nodes: list[Node], states: Wanted) -> list[tuple[Node, AxisState]]:
    """Tensors with the required state of each; dims are made non-negative."""
    out: list[tuple[Node, AxisState]] = []
    if len(states) == 1 and states[0] == REPLICATED:
        states = states * len(nodes)
    for node, state in zip(nodes, states, strict=False):
        tensor = meta.tensor(node)
        if state is None or tensor is None:
            continue
        ndim = len(tensor.shape)
        if state.kind == "S" and not -ndim <= state.dim < ndim:
            problem = f"Shard({state.dim}) for a result of {ndim} dims, {list(tensor.shape)}"
            raise PlanError(problem, f"a dim from 0 to {ndim - 1}", "correct the layout", meta.source_line(node))
        out.append((node, replace(state, dim=state.dim % ndim) if state.kind == "S" else state))
    return out


def _unmatched(missing: list[str], modules: Modules) -> PlanError:
    tail = f" (and {len(missing) - 1} more: {', '.join(map(repr, missing[1:4]))})" if len(missing) > 1 else ""
    problem = f"the pattern {missing[0]!r} of a tensor-parallel plan names no module{tail}"
    needed = f"modules of the step, as {modules.near(missing[0])}"
    return PlanError(problem, needed, "correct the pattern: one glob for each name between dots")


# -- layouts that are solved for -----------------------------------------------------------------------
@dataclass(frozen=True)
class SolvedLayouts(OneAxis):
    """Tensor parallelism along `axis` by the solution of an integer program. Tensors that it does not name follow by
    propagation. It holds for the graph that was solved, and for the same graph with fewer equal layers.

    `params`: the state of each parameter between steps along the axis. `solution` describes the integer program.
    """

    axis: str
    params: Mapping[str, AxisState]
    found: Pins = field(repr=False, default_factory=Pins)
    solution: str = ""
    input_dim: BatchDim | None = None
    async_tp: bool = False
    reshard_after_forward: bool = False

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Storage layouts of the parameters that the step has, and of their optimizer state."""
        out = dict(before)
        for name in self.params.keys() & before.keys():
            have, state = before[name], self.params[name]
            out[name] = Stored(have.param.put(self.axis, state), have.state.put(self.axis, state))
        return out

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """The pins of the solution."""
        return self.found if mesh.axis_size(self.axis) > 1 else Pins()

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        return f"tensor parallel on {self.axis}, layouts solved for{self._options}"


# -- attention heads -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Split:
    """A hidden dim that a view splits into heads; `maker` is the module that computed it."""

    node: Node
    maker: str
    heads: int
    width: int


def check_heads(graph: TrainGraph, mesh: Mesh, axis: str, decisions: Mapping[str, Decision]) -> None:
    """Raise PlanError naming every module whose heads do not divide over `axis`."""
    parts = mesh.axis_size(axis)
    splits = [s for node in graph.graph.nodes if (s := _split(node, axis, decisions)) is not None]
    bad = [s for s in splits if s.heads % parts]
    if not bad:
        return
    first = bad[0]
    where = meta.module_path(first.node)
    same_module = [s for s in splits if meta.module_path(s.node) == where]
    heads = ", ".join(f"{s.maker} makes {s.heads} heads of {s.width}" for s in same_module)
    fits = gcd(*(s.heads for s in splits))
    sizes = [str(n) for n in range(1, fits + 1) if fits % n == 0]
    count = len({meta.module_path(s.node) for s in bad}) - 1
    tail = f" (and {count} more modules)" if count else ""
    raise PlanError(
        f"{where or 'the step'}{tail}: {heads}; they do not divide over {axis}={parts}",
        f"an axis whose size divides all head counts: {', '.join(sizes)}",
        "choose another size, or leave those projections out of the plan",
        meta.source_line(first.node),
    )


def _split(node: Node, axis: str, decisions: Mapping[str, Decision]) -> _Split | None:
    """The heads into which a forward view splits a dim that is sharded along `axis`."""
    if node.op != "call_function" or node.target not in _VIEWS or meta.is_backward(node):
        return None
    source = node_at(node, 0)
    maker = decisions.get(source.name)
    have, split = meta.tensor(source), meta.tensor(node)
    if maker is None or not maker.given or have is None or split is None:
        return None
    state = maker.given[0].state(axis)
    if state.kind != "S":
        return None
    before, after = have.shape, split.shape
    lead = state.dim
    same_front = before[:lead] == after[:lead]
    rest = len(before) - lead - 1
    inner = after[lead : len(after) - rest]
    same_back = not rest or before[-rest:] == after[len(after) - rest :]
    if not (same_front and same_back) or sum(size > 1 for size in inner) < 2 or inner[0] == 1:
        return None  # dims of size one are no heads
    return _Split(node, meta.module_path(source) or f"%{source.name}", inner[0], before[lead] // inner[0])
