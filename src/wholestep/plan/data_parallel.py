"""Data parallelism: a batch for each rank, and a style by which ranks store parameters and optimizer state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, cast

from ..errors import PlanError
from ..graph.graph import Input, Role, TrainGraph
from ..layout import Layout, owned_by
from ..mesh import Mesh
from ..tuning import TUNING
from .owned_updates import owners_of_nodes
from .storage_styles import STYLES, StorageStyle, Store, style_named
from .strategy import BatchCut, Pins, Stored, Strategy

BatchDim = int | Mapping[str, int | None]


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Batches are cut over ranks. `per_rank`: each rank runs the step on its own, gradients are averaged, as under DDP
    and FSDP. `global`: the step computes what one device computes on the whole batch.

    Args:
        style: how parameters and optimizer state are stored: a name of the table `plan.storage_styles.STYLES`, as
            `"replicate"` (DDP) and `"fully_shard"` (FSDP); or a function `(parameter, layout, mesh, axes)` that returns
            the layout of a parameter and the layout of its optimizer state.
        axis: the mesh axis or axes to use; all of them by default.
        reshard_after_forward: re-gather sharded parameters for the backward (True), keep them (False), or keep up to
            `keep_gathered_bytes` of them (None): the parameters that the backward needs first.
        keep_gathered_bytes: see above.
        semantics: `per_rank` or `global`, see above.
        inputs: what a rank is given: its `local` part of the batch, or the `global` batch, of which it takes its part
            (`global` semantics only). Parts may differ in size.
        uneven_batches: under `global` with local inputs, ranks tell each other their batch sizes at every call. Give
            False where they are always equal: sizes are then taken to be the same on all ranks.
        reduce: `mean` over ranks, as DDP, or `sum` (`per_rank` only: `global` needs neither).
        sync_state: start from the first rank's parameters, buffers and optimizer state, as DDP does.
        broadcast_buffers: every call starts from the first rank's buffers.
        owners: give each parameter whose update needs it whole (Newton-Schulz in Muon, the matrices of Shampoo) to one
            rank, which has its optimizer state, is sent the sum of its gradient, updates it and sends it to all. Ranks
            own about equal work. Or who owns which parameter, by name. With `zero1` and `zero2` only.
        input_batch_dim: the dim of batch tensors that counts samples; or by argument, globs allowed, None for tensors
            that are the same on all ranks: `{"mask": None, "*": 0}`. Tensors without that dim are the same everywhere.

    Example:
        >>> plan = ws.plan(graph, "dp=8", ws.DataParallel("zero1", semantics="global"))
        >>> step = ws.compile(train_step, parallel=ws.DataParallel("fully_shard", reshard_after_forward=True))
    """

    style: str | Store = "fully_shard"
    axis: str | tuple[str, ...] | None = None
    reshard_after_forward: bool | None = None
    keep_gathered_bytes: int = TUNING.keep_gathered_bytes
    semantics: Literal["per_rank", "global"] = "per_rank"
    inputs: Literal["local", "global"] = "local"
    uneven_batches: bool = True
    reduce: Literal["mean", "sum"] = "mean"
    sync_state: bool = True
    broadcast_buffers: bool = False
    input_batch_dim: BatchDim = 0
    owners: bool | Mapping[str, int] = False

    def __post_init__(self) -> None:
        if isinstance(self.style, str) and self.style not in STYLES:
            names = ", ".join(map(repr, STYLES)) + " or a function"
            raise PlanError(f"DataParallel(style={self.style!r})", f"style one of {names}", "correct the name")
        if self.owners is not False and (self.kind.gathers_parameters or not self.kind.shards_state):
            needed = "a style in which ranks share out the state of parameters that rest whole"
            raise PlanError(f"owners= with style {self.kind.name!r}", needed, 'give "zero1" or "zero2"')
        if self.semantics == "per_rank" and self.inputs == "global":
            problem = 'inputs="global" with semantics="per_rank"'
            raise PlanError(problem, "a batch of its own for each rank, or global semantics", 'give semantics="global"')
        if self.semantics == "global" and (self.reduce != "mean" or self.broadcast_buffers):
            option = "reduce" if self.reduce != "mean" else "broadcast_buffers"
            needed = "nothing: the step computes what one device computes, buffers are the same on all ranks"
            raise PlanError(f'{option}={getattr(self, option)!r} with semantics="global"', needed, f"drop {option}")

    @property
    def kind(self) -> StorageStyle:
        """The style with its properties."""
        return style_named(self.style)

    def storage_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """All that it uses."""
        return self.axes(mesh)

    @property
    def shares_batches(self) -> bool:
        """Under `global`."""
        return self.semantics == "global"

    def batch_cut(self, mesh: Mesh, name: str, ndim: int) -> BatchCut | None:
        """Under `global`, the dim that counts samples."""
        dim = batch_dim(self.input_batch_dim, name, ndim) if self.semantics == "global" else None
        return None if dim is None else BatchCut(dim, self.axes(mesh))

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes used on `mesh`.

        Raises:
            MeshError: an axis does not exist.
            PlanError: a style that needs two axes on one.
        """
        names = mesh.of_ranks.names if self.axis is None else (self.axis,) if isinstance(self.axis, str) else self.axis
        for name in names:
            mesh.axis_size(name)
        if self.kind.grouped and len(names) < 2:
            problem = f"style {self.kind.name!r} on mesh {mesh} with axes {', '.join(names)}"
            needed = "two axes: one to replicate on and one to shard on"
            raise PlanError(problem, needed, 'give mesh="replicate=2,shard=2"')
        return names

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Where each parameter and its optimizer state rest.

        Raises:
            PlanError: the style is a function, and its layouts cannot be those of a parameter and its state.
        """
        axes, storage = self.axes(mesh), dict[str, Stored]()
        axis, owners = self.owner_axis(mesh), self.named_owners
        for spec in graph.inputs:
            if spec.role is Role.PARAM:
                have = before[spec.name].param
                storage[spec.name] = stored(self.kind, spec, before[spec.name], mesh, axes)
                if axis and spec.name in owners:
                    if have.is_sharded:
                        text = f"owners= names {spec.name!r}, which is {have.show(spec.meta.shape)}"
                        raise PlanError(text, "a parameter that no other axis shards", "leave it out")
                    storage[spec.name] = Stored(have, have.put(axis, owned_by(owners[spec.name])))
        if axis and (unknown := [name for name in owners if name not in storage]):
            names = ", ".join(map(repr, list(storage)[:3]))
            raise PlanError(f"owners= names {unknown[0]!r}", f"a parameter, as {names}", "correct it")
        return storage

    def pins(self, graph: TrainGraph, mesh: Mesh) -> Pins:
        """Who runs the update of what has an owner. Activations stay where the batch puts them."""
        axis = self.owner_axis(mesh)
        at = owners_of_nodes(graph, self.named_owners) if axis and self.named_owners else {}
        return Pins(owners={name: {axis: owned_by(owner)} for name, owner in at.items()})

    @property
    def named_owners(self) -> Mapping[str, int]:
        """The owners of parameters, as far as they are known."""
        return {} if isinstance(self.owners, bool) else self.owners

    def owner_axis(self, mesh: Mesh) -> str:
        """The axis of owners; empty where no parameter may have one. Raises PlanError for two data-parallel axes."""
        several = [axis for axis in self.axes(mesh) if mesh.axis_size(axis) > 1] if self.owners is not False else []
        if not several:
            return ""
        if len(several) > 1:
            text = f"DataParallel(owners={self.owners!r}) over {' and '.join(several)}"
            raise PlanError(text, "one axis of data parallelism", "leave out owners, or give one axis")
        if mesh.pieces > 1 and self.kind.shards_gradients:
            text, needed = f"owners= with style {self.kind.name!r} and MicroBatches", "gradients that are reduced once"
            raise PlanError(text, needed, 'give "zero1"')
        return several[0]

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        suffix = f", {len(owned)} parameters with owners" if (owned := self.named_owners) else ""
        return f"{self.kind.name} on {', '.join(self.axes(mesh))}, {self.how}{suffix}"

    @property
    def how(self) -> str:
        """What becomes of gradients, in words."""
        return "global" if self.semantics == "global" else f"{self.reduce} over ranks"

    @property
    def regathered(self) -> tuple[str, ...]:
        """Parameters that are always re-gathered for the backward: none by name."""
        return ()


def batch_dim(input_dim: BatchDim, name: str, ndim: int) -> int | None:
    """The dim of batch tensor `name` that counts samples; None if ranks share it. PlanError for a missing named dim."""
    if isinstance(input_dim, int):
        return input_dim % ndim if -ndim <= input_dim < ndim else None
    key = next((k for k in input_dim if fnmatchcase(name, k)), None)
    dim = None if key is None else input_dim[key]
    if dim is not None and not -ndim <= dim < ndim and key == name:
        problem = f"input_batch_dim={dim} is out of range for {name!r} with {ndim} dims"
        raise PlanError(problem, "a dim it has, or None", "correct it")
    return dim % ndim if dim is not None and -ndim <= dim < ndim else None


def stored(style: StorageStyle, param: Input, before: Stored, mesh: Mesh, axes: tuple[str, ...]) -> Stored:
    """The layouts of a parameter and of its state; `before` is those that other strategies give it. Raises PlanError
    if the style gives something else, or layouts that cannot be those of a parameter and its state.
    """
    at_rest = _stored(style, param, before.param, mesh, axes)
    if before.state == before.param:
        return at_rest
    return Stored(at_rest.param, _stored(style, param, before.state, mesh, axes).state)


def _stored(style: StorageStyle, param: Input, have: Layout, mesh: Mesh, axes: tuple[str, ...]) -> Stored:
    returned = cast(object, style.store(param, have, mesh, axes))
    pair = tuple(cast(Sequence[object], returned)) if isinstance(returned, (tuple, list)) else ()
    wrong = "" if len(pair) == 2 and all(isinstance(entry, Layout) for entry in pair) else "no pair of layouts"
    layouts = cast(tuple[Layout, ...], () if wrong else pair)
    for name, layout in zip(("parameter", "state"), layouts, strict=False):
        wrong = wrong or _unfit(name, layout, have, axes)
    if not wrong and any(set(p) - set(s) for p, s in zip(layouts[0].dims, layouts[1].dims, strict=True)):
        wrong = "the parameter is sharded over an axis that does not shard its state"
    if wrong:
        problem = f"style {style.name!r} gives {returned} for {param.name!r} of shape {list(param.meta.shape)}: {wrong}"
        needed = f"(layout of the parameter, layout of its state), each {have} with axes of {', '.join(axes)} added"
        raise PlanError(problem, needed, "correct the function")
    return Stored(*cast(tuple[Layout, Layout], pair))


def _unfit(name: str, layout: Layout, have: Layout, axes: tuple[str, ...]) -> str:
    """Why `layout` is not `have` with some of `axes` added, or ''."""
    if len(layout.dims) != len(have.dims):
        return f"the layout of the {name} has {len(layout.dims)} dims"
    if layout.partial != have.partial or layout.varies != have.varies:
        return f"the layout of the {name} has partial or varying axes"
    extends = all(new[: len(old)] == old for new, old in zip(layout.dims, have.dims, strict=True))
    added = [axis for new, old in zip(layout.dims, have.dims, strict=True) for axis in new[len(old) :]]
    if not extends:
        return f"the layout of the {name} drops axes of another strategy"
    if set(added) - set(axes) or len(set(added)) != len(added):
        return f"the layout of the {name} adds {', '.join(added)}"
    return ""


# -- a storage option for each parameter --------------------------------------------------------------
@dataclass(frozen=True)
class StorageOption:
    """How data-parallel ranks store one parameter and its optimizer state. `regathers`: a sharded parameter is
    all-gathered a second time in the backward instead of being kept.
    """

    style: str
    regathers: bool = False

    @property
    def kind(self) -> StorageStyle:
        """The style with its properties."""
        return STYLES[self.style]

    def __str__(self) -> str:
        gathered = "re-gathered" if self.regathers else "kept"
        return f"{self.style} {gathered}" if self.kind.gathers_parameters else self.style


REPLICATE = StorageOption("replicate")
STORAGE_OPTIONS = tuple(
    StorageOption(style.name, regathers)
    for style in STYLES.values()
    if not style.shards_gradients  # styles that differ in gradients alone store a parameter alike
    for regathers in ((False, True) if style.gathers_parameters else (False,))
)


def storage_of(data: DataParallel) -> StorageOption:
    """The option by which the style of `data` stores most parameters."""

    def flags(kind: StorageStyle) -> tuple[bool, bool, bool]:
        return kind.gathers_parameters, kind.shards_state, kind.grouped

    options = [option for option in STORAGE_OPTIONS if flags(option.kind) == flags(data.kind)]
    return options[-1 if data.reshard_after_forward else 0]


@dataclass(frozen=True)
class PerParameterStorage(DataParallel):
    """`DataParallel` whose `style` holds for the parameters that `storage` does not name.

    `solution` describes the integer program that `storage` solves; empty where `storage` names exceptions to `style`.
    """

    storage: Mapping[str, StorageOption] = field(default_factory=dict[str, StorageOption], repr=False)
    solution: str = ""

    def storage_layouts(self, graph: TrainGraph, mesh: Mesh, before: Mapping[str, Stored]) -> dict[str, Stored]:
        """Storage layouts of each parameter and its optimizer state."""
        out, axes = super().storage_layouts(graph, mesh, before), self.axes(mesh)
        for spec in graph.inputs:
            if spec.role is Role.PARAM and spec.name in self.storage:
                style = STYLES[self.storage[spec.name].style]
                out[spec.name] = stored(style, spec, before[spec.name], mesh, axes)
        return out

    @property
    def regathered(self) -> tuple[str, ...]:
        """Parameters that are gathered a second time in the backward."""
        return tuple(name for name, option in self.storage.items() if option.regathers)

    def describe(self, mesh: Mesh) -> str:
        """One line for the head of a plan."""
        on = ", ".join(self.axes(mesh))
        if self.solution:
            return f"each parameter by itself on {on} ({self.shares}), {self.how}"
        return f"{self.kind.name} on {on} but for some parameters ({self.shares}), {self.how}"

    @property
    def shares(self) -> str:
        """The number of parameters of each storage option."""
        counted = Counter(self.storage.values())
        return ", ".join(f"{counted[option]} {option}" for option in STORAGE_OPTIONS if counted[option])
