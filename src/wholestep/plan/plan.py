"""A Plan: where every tensor rests, what each operation takes and gives, and why. A value; JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..errors import PlanError
from ..graph.decompose import expand
from ..graph.graph import Input, Role, TrainGraph
from ..graph.text import seconds
from ..hardware.hardware import Hardware
from ..hardware.presets import one_host
from ..layout import Layout
from ..mesh import Mesh
from ..precision import MixedPrecision

if TYPE_CHECKING:
    from .plan_diff import Difference
    from .strategy import Strategies

FORMAT = "wholestep.plan"
VERSION = 4


@dataclass(frozen=True)
class Decision:
    """Layouts one node takes its operands in (in order, lists opened) and gives its outputs in, and what decided it.

    `settle` is set where a result is resharded at once, to that layout. `because` says it in words, `reads` names the
    operands.
    """

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    why: str
    settle: Layout | None = None
    because: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def given(self) -> tuple[Layout, ...]:
        """The layouts that users of the node see."""
        return self.outputs if self.settle is None else (self.settle,)


@dataclass(frozen=True)
class Options:
    """Choices of a plan that are not layouts.

    `keep_gathered_bytes` is what gathered parameters may hold from forward to backward; parameters beyond it are
    gathered again (0: all are, None: none is), and so are those that `again` names. `reduce_dtype` is the dtype of
    gradient reductions, None for the gradient's own.
    """

    keep_gathered_bytes: int | None = None
    reduce_dtype: str | None = None
    broadcast_buffers: bool = False
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Objective:
    """What a plan was chosen for: simulated seconds for each captured batch, and what no schedule of any plan that was
    considered takes less than; bytes that a rank holds at most, of those that it may; values to be made `again` in the
    backward for that, by name.

    Where layouts were solved for, `model_s` is the shortest step that the program found by its own model of time, and
    `model_bound_s` what it proved that no assignment of layouts takes less than, by that model.
    """

    batch_s: float
    bound_s: float
    peak_bytes: int
    budget_bytes: int | None = None
    again: tuple[str, ...] = ()
    model_s: float = 0.0
    model_bound_s: float = 0.0

    @staticmethod
    def of(values: Mapping[str, Any]) -> Objective:
        """Of its fields, as JSON gives them."""
        budget = values["budget_bytes"]
        return Objective(
            float(values["batch_s"]), float(values["bound_s"]), int(values["peak_bytes"]),
            None if budget is None else int(budget), tuple(map(str, values["again"])),
            float(values.get("model_s", 0)), float(values.get("model_bound_s", 0)),
        )  # fmt: skip

    @property
    def gap(self) -> float:
        """The part of `batch_s` that is above the bound: 0 where nothing could be faster."""
        return 1 - self.bound_s / self.batch_s if self.batch_s else 0.0

    @property
    def model_gap(self) -> float:
        """The part of `model_s` that is above its bound; 0 where nothing was solved for."""
        return max(0.0, 1 - self.model_bound_s / self.model_s) if self.model_s else 0.0

    def __str__(self) -> str:
        return (
            f"{seconds(self.batch_s)} for a batch by simulation, at least {seconds(self.bound_s)}, gap {self.gap:.1%}"
        )


@dataclass(frozen=True)
class Plan:
    """Where every tensor rests on a mesh.

    `created` lays out state that the step makes at its first call; `expanded` names ops that are written out in
    smaller ones, whose layouts the decisions give. `deciders` says which strategy uses an axis, `nodes` what an input
    is called in the graph. `objective` is set where `Auto` chose the plan. `strategies` made it; None where they cannot
    be read back from a file. `mixed_precision` and `offload` are those of the captured graph. Layouts and the way
    from one to another are the cheapest on `hardware`.
    Invariants (`check`): one layout per input, each fits its shape and the mesh; every call in the graph is decided.

    Example:
        >>> plan = ws.plan(graph, "dp=8", ws.DataParallel("fully_shard"))
        >>> print(plan.rest["0.weight"], plan.bytes_at_rest())
        >>> print(plan.explain("0.weight"))
        >>> plan.save("plan.json")
    """

    mesh: Mesh
    strategy: str
    inputs: tuple[Input, ...]
    rest: Mapping[str, Layout]
    decisions: Mapping[str, Decision]
    options: Options = Options()
    notes: tuple[str, ...] = ()
    created: Mapping[str, Layout] = field(default_factory=dict[str, Layout])
    expanded: tuple[str, ...] = ()
    deciders: Mapping[str, str] = field(default_factory=dict[str, str])
    nodes: Mapping[str, str] = field(default_factory=dict[str, str])
    objective: Objective | None = None
    strategies: Strategies | None = field(default=None, compare=False)
    mixed_precision: MixedPrecision | None = None
    offload: bool = False
    hardware: Hardware = field(default_factory=one_host)

    def explain(self, name: str) -> str:
        """Where an input rests and why, what reads it and at which cost; or the same of an operation.

        Raises:
            PlanError: the plan knows no such name; says which are near.
        """
        from .explain import explain

        return explain(self, name)

    def explain_op(self, name: str) -> str:
        """The layouts of an operation, the rule and the neighbour that decided them, what it reshards and the cost.

        Raises:
            PlanError: the plan has no such operation; says which are near.
        """
        from .explain import explain_op

        return explain_op(self, name)

    def expand(self, graph: TrainGraph) -> TrainGraph:
        """`graph` with the ops that this plan cuts finer than they are written out (`graph.decompose`)."""
        return expand(graph, frozenset(self.expanded)) if self.expanded else graph

    def check(self, graph: TrainGraph) -> None:
        """Raise PlanError naming what differs when the plan was not made for `graph`."""
        ours = {i.name: (i.meta.shape, str(i.meta.dtype)) for i in self.inputs}
        theirs = {i.name: (i.meta.shape, str(i.meta.dtype)) for i in graph.inputs}
        differing = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
        if differing:
            name = differing[0]
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise PlanError(
                f"the plan has {name!r} as {_about(ours.get(name))}, the graph as {_about(theirs.get(name))}{more}",
                "a plan made for this model, optimizer and batch",
                "plan this graph again",
            )
        for given in self.inputs:
            self.rest[given.name].check(given.meta.shape, self.mesh, given.name)
        graph = self.expand(graph)
        missing = [n.name for n in graph.graph.nodes if n.op == "call_function" and n.name not in self.decisions]
        if missing:
            raise PlanError(
                f"the plan says nothing about %{missing[0]}", "a decision for every operation", "plan this graph again"
            )

    def bytes_at_rest(self, role: str | None = None) -> int:
        """Bytes the first rank holds between calls, of inputs with `role` (param, state, buffer, grad) or of all."""
        roles = {Role(role)} if role else {Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD}
        first = self.mesh.coordinate(0)
        total = 0
        for given in self.inputs:
            if given.role in roles:
                shape = self.rest[given.name].local_shape(given.meta.shape, self.mesh, first)
                total += prod(shape) * given.meta.dtype.itemsize
        return total

    def with_notes(self, *notes: str) -> Plan:
        """This plan with more notes for the reader."""
        return replace(self, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        from .plan_table import show_plan

        return show_plan(self)

    def __repr__(self) -> str:
        from .plan_table import plan_line

        return plan_line(self)

    def _repr_html_(self) -> str:
        from .plan_table import plan_html

        return plan_html(self)

    def to_json(self) -> str:
        """The plan as text that `from_json` reads back to an equal plan."""
        from .plan_file import encode

        return json.dumps({"format": FORMAT, "version": VERSION, **encode(self)}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, which `load` reads; folders on the way are made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a file of `save`, or of `wholestep plan --json`.

        Raises:
            PlanError: there is no such file, or it holds no plan; names the file.
        """
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"{path} cannot be read: {error}", "a file of Plan.save", "correct the path, or write the plan again"
            ) from error
        except PlanError as error:
            raise PlanError(f"{path}: {error.found}", error.needed, error.next_step) from error

    def diff(self, other: Plan) -> Difference:
        """What rests elsewhere in `other`, and the bytes that makes on a rank."""
        from .plan_diff import diff

        return diff(self, other)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: not a plan, of another version, or malformed; names the field.
        """
        from .plan_file import decode

        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"the plan is not JSON: {error}", "text made by Plan.to_json", "write the plan again"
            ) from error
        if not isinstance(data, dict) or cast(dict[str, Any], data).get("format") != FORMAT:
            raise PlanError(
                "field 'format': this JSON is no wholestep plan",
                f"format {FORMAT!r}",
                "give a file written by Plan.to_json",
            )
        fields = cast(dict[str, Any], data)
        if fields.get("version") != VERSION:
            raise PlanError(
                f"field 'version': found {fields.get('version')!r}",
                f"version {VERSION}",
                "write the plan again with this wholestep",
            )
        return decode(fields)


def _about(found: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if found is None else f"{found[1].removeprefix('torch.')}{list(found[0])}"
