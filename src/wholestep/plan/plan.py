"""A Plan: the storage layout of every tensor, the layouts of each operation, and the reasons. JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from ..errors import PlanError, shown
from ..graph.decompose import expand
from ..graph.graph import Input, Role, TrainGraph
from ..hardware.hardware import Hardware
from ..hardware.presets import one_host
from ..layout import Layout
from ..mesh import Mesh
from ..precision import MixedPrecision, StepPrecision
from ..typed_json import MalformedError, hints_of, parse, write_text
from . import explain as explanations
from .decision import Decision, Objective, Options
from .for_pieces import for_pieces
from .owned_updates import with_updates_by_owner
from .plan_file import decode, encode
from .plan_form import check_form
from .plan_table import plan_html, plan_line, show_plan
from .repeated_work import RepeatedWork
from .rows_in_any_order import with_shared_rows
from .stage_of_node import with_lists_by_owner
from .strategies import Strategies
from .whole_units import mark_units

FORMAT = "wholestep.plan"
VERSION = 7


@dataclass(frozen=True)
class Plan:
    """The layout of every tensor of a step on a mesh.

    Attributes:
        mesh: the mesh.
        strategy: the strategies, in words.
        inputs: the inputs of the step.
        storage: the storage layout of each input.
        decisions: the layouts of each operation.
        options: choices that are not layouts.
        notes: remarks for the reader.
        repeated: along each axis, the share of products that every rank does in full, and why.
        created_storage: layouts of state that the first call of the step creates.
        decomposed: ops that are decomposed; the decisions are about the smaller ops.
        axis_strategies: the strategy that uses each axis.
        input_nodes: the name of each input in the graph.
        objective: estimates, if `Auto` chose the plan.
        strategies: the strategies; None if a file could not store them.
        mixed_precision: of the captured graph.
        precision: dtypes of weights, compute and optimizer state.
        offload: of the captured graph.
        hardware: prices layouts and resharding.
        async_axes: the axes of `TensorParallel(async_tp=True)`.
        owners: with `Pipeline`, the coordinate of its axis that owns each parameter.
        owner_axis, update_owners: with `DataParallel(owners=...)`, the axis of owners, and the coordinate that has the
            state of each parameter whose update needs it whole.

    Invariants (`check`): one layout per input, which fits its shape and the mesh; a decision for every call.

    Example:
        >>> plan = ws.plan(graph, "dp=8", ws.DataParallel("fully_shard"))
        >>> print(plan.storage["0.weight"], plan.stored_bytes())
        >>> print(plan.explain("0.weight"))
        >>> plan.save("plan.json")
    """

    mesh: Mesh
    strategy: str
    inputs: tuple[Input, ...]
    storage: Mapping[str, Layout]
    decisions: Mapping[str, Decision]
    options: Options = field(default_factory=Options)
    notes: tuple[str, ...] = ()
    created_storage: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    decomposed: tuple[str, ...] = ()
    axis_strategies: Mapping[str, str] = field(default_factory=dict[str, str])
    input_nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    objective: Objective | None = None
    strategies: Strategies | None = field(default=None, compare=False)
    mixed_precision: MixedPrecision | None = None
    precision: StepPrecision | None = None
    offload: bool = False
    hardware: Hardware = field(default_factory=one_host)
    async_axes: tuple[str, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict[str, int])
    owner_axis: str = ""
    update_owners: Mapping[str, int] = field(default_factory=dict[str, int])
    repeated: tuple[RepeatedWork, ...] = field(default=(), compare=False)

    def explain(self, name: str) -> str:
        """The storage layout of an input and its reason, its readers and their costs; or the same for an operation.

        Raises:
            PlanError: the plan has no such name; lists similar ones.
        """
        return explanations.explain(self, name)

    def decompose(self, graph: TrainGraph) -> TrainGraph:
        """`graph` with the ops in `decomposed` decomposed, random numbers of all micro-batches drawn at once, the
        updates of each stage by themselves, and sorts of rows that ranks share.
        """
        graph = for_pieces(graph) if self.mesh.pieces > 1 or self.owners else graph
        graph = with_lists_by_owner(graph, self.owners) if self.owners else graph
        graph = with_updates_by_owner(graph, self.update_owners) if self.update_owners else graph
        graph = with_shared_rows(graph, self.decisions, self.mesh, self.options.host_reads)
        graph = expand(graph, frozenset(self.decomposed)) if self.decomposed else graph
        mark_units(graph, self.storage)
        return graph

    def check(self, graph: TrainGraph) -> None:
        """Raise PlanError naming the difference if the plan was not made for `graph`."""
        self.decomposed_graph(graph)

    def decomposed_graph(self, graph: TrainGraph) -> TrainGraph:
        """`decompose`, of a graph that has been checked as `check` does."""
        self.check_inputs(graph)
        graph = self.decompose(graph)
        self.check_decisions(graph)
        return graph

    def check_inputs(self, graph: TrainGraph) -> None:
        """Raise PlanError if the plan is for other inputs than those of `graph`, LayoutError if it cannot store one."""
        planned = {i.name: (i.meta.shape, str(i.meta.dtype)) for i in self.inputs}
        actual = {i.name: (i.meta.shape, str(i.meta.dtype)) for i in graph.inputs}
        differing = [n for n in {**planned, **actual} if planned.get(n) != actual.get(n)]
        if differing:
            name = differing[0]
            tail = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise PlanError(
                f"the plan has {name!r} as {_about(planned.get(name))}, the graph as {_about(actual.get(name))}{tail}",
                "a plan made for this model, optimizer and batch",
                "plan this graph again",
            )
        for spec in self.inputs:
            self.storage[spec.name].check(spec.meta.shape, self.mesh, spec.name)

    def check_decisions(self, graph: TrainGraph) -> None:
        """Raise PlanError if an op of a decomposed graph has no decision."""
        missing = [n.name for n in graph.graph.nodes if n.op == "call_function" and n.name not in self.decisions]
        if missing:
            problem = f"the plan has no decision for %{missing[0]}"
            raise PlanError(problem, "a decision for every operation", "plan this graph again")

    @property
    def stage_axis(self) -> str:
        """The axis whose coordinates own parameters; empty without a pipeline."""
        owned = (axis for layout in self.storage.values() for axis, _ in layout.owned)
        return next(owned, "") if self.owners else ""

    def stored_bytes(self, role: Literal["param", "state", "buffer", "grad"] | None = None) -> int:
        """Bytes the first rank holds between calls, of inputs with `role` (param, state, buffer, grad) or of all; of a
        pipeline, or with owners, the rank that holds most.
        """
        roles = {Role(role)} if role else {Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD}
        axis, stored = self.stage_axis or self.owner_axis, [i for i in self.inputs if i.role in roles]
        first = self.mesh.coordinate(0)
        places = [{**first, axis: at} for at in range(self.mesh.axis_size(axis))] if axis else [first]
        return max(sum(self.input_bytes(i) for i in stored if self.storage[i.name].is_held_at(at)) for at in places)

    def input_bytes(self, spec: Input) -> int:
        """Bytes of one input, as it is stored, on the first rank that has it."""
        shape = self.storage[spec.name].local_shape(spec.meta.shape, self.mesh, self.mesh.coordinate(0))
        return prod(shape) * spec.meta.dtype.itemsize

    def with_notes(self, *notes: str) -> Plan:
        """This plan with more notes for the reader."""
        return replace(self, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        return show_plan(self)

    def __repr__(self) -> str:
        return plan_line(self)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def to_json(self) -> str:
        """The plan as text, from which `from_json` reads an equal plan."""
        return json.dumps({"format": FORMAT, "version": VERSION, **encode(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file for `load`; missing folders are created."""
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file that `save` or `wholestep plan --json` wrote.

        Raises:
            PlanError: the file does not exist, or has no plan; names the file.
        """
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # also a path with a null
            problem = f"{path} cannot be read: {error}"
            raise PlanError(problem, "a file of Plan.save", "correct the path, or write the plan again") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error.found}", error.needed, error.next_step) from error

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: not a plan, of another version, or malformed; names the field.
        """
        try:
            data = parse(text)
        except MalformedError as error:
            raise PlanError(f"the plan: {error.found}", error.needed, "write the plan again") from error
        if not isinstance(data, dict) or cast(dict[str, Any], data).get("format") != FORMAT:
            problem = "field 'format': this JSON is not a wholestep plan"
            raise PlanError(problem, f"format {FORMAT!r}", "pass a file that Plan.save wrote")
        fields = cast(dict[str, Any], data)
        if fields.get("version") != VERSION:
            problem = f"field 'version': found {shown(fields.get('version'))}"
            raise PlanError(problem, f"version {VERSION}", "write the plan again with this wholestep")
        plan = Plan(**decode(fields, hints_of(Plan)))
        check_form(plan)
        return plan


def _about(form: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if form is None else f"{form[1].removeprefix('torch.')}{list(form[0])}"
