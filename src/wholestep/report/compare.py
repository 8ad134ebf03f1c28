"""Plans beside each other: one graph, every template, what each costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, cast

from ..cost.machine import Machine
from ..cost.memory import peak_memory
from ..cost.schedule import simulate
from ..cost.speeds import Speeds
from ..cost.topology import Topology
from ..errors import WholestepError
from ..graph.graph import LocalGraph, TrainGraph
from ..graph.text import human
from ..mesh import Mesh
from ..partition.lower import partition
from ..passes.base import run_passes
from ..passes.fill import Fill
from ..passes.reinplace import Reinplace
from ..passes.schedule import Schedule
from ..plan.data_parallel import DataParallel
from ..plan.make import plan
from ..plan.plan import Plan
from ..plan.strategy import Strategies, Strategy, compose


@dataclass(frozen=True)
class Template:
    """A named way to use a mesh. `strategies` is an error where the model allows none."""

    name: str
    strategies: tuple[Strategy, ...] | WholestepError


@dataclass(frozen=True)
class Costs:
    """What one rank's program costs, a step each: bytes between steps and at most, bytes sent, seconds."""

    rest_bytes: int
    peak_bytes: int
    sent_bytes: int
    collectives: int
    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class Row:
    """One template: its costs, or why it has none. `batches` of those that were captured make up a step of the mesh."""

    name: str
    batches: int
    costs: Costs | None
    error: str = ""

    @property
    def batch_s(self) -> float:
        """Seconds for each captured batch: what rows are ranked by."""
        return self.costs.step_s / self.batches if self.costs else float("inf")


def templates(
    mesh: Mesh,
    tensor: Strategy | WholestepError | None = None,
    tensor_axis: str = "tp",
    semantics: Literal["per_rank", "global"] = "per_rank",
) -> list[Template]:
    """Every data-parallel style on all axes, and on those that `tensor` leaves with it on its own.

    Raises:
        MeshError: `tensor` is given, and the mesh has no `tensor_axis`.
    """
    found = [Template(name, (data,)) for name, data in _styles(mesh.names, semantics)]
    if tensor is None:
        return found
    mesh.axis_size(tensor_axis)
    others = tuple(name for name in mesh.names if name != tensor_axis)
    if isinstance(tensor, WholestepError):
        return [*found, Template(f"tensor parallel on {tensor_axis}", tensor)]
    if not others:
        return [*found, Template(f"tensor parallel on {tensor_axis}", (tensor,))]
    return found + [
        Template(f"{name} + tensor parallel on {tensor_axis}", (data, tensor))
        for name, data in _styles(others, semantics)
    ]


def _styles(axes: tuple[str, ...], semantics: Literal["per_rank", "global"]) -> Iterator[tuple[str, DataParallel]]:
    for style in ("replicate", "zero1", "zero2"):
        yield f"{style} on {','.join(axes)}", DataParallel(style, axis=axes, semantics=semantics)
    for style in ("fully_shard", "hybrid") if len(axes) > 1 else ("fully_shard",):
        for again, how in ((False, "kept"), (True, "gathered again")):
            data = DataParallel(style, axis=axes, semantics=semantics, reshard_after_forward=again)
            yield f"{style}, {how} on {','.join(axes)}", data


def costs(local: LocalGraph, planned: Plan, machine: Speeds) -> Costs:
    """What the program of a rank costs on `machine`, as a compiled step would run it."""
    local = run_passes(local, [Schedule(machine), Fill(), Reinplace()])
    took, totals = simulate(local, machine), local.collectives().values()
    return Costs(
        planned.bytes_at_rest("param") + planned.bytes_at_rest("state"),
        peak_memory(local).size_bytes,
        sum(total.bytes for total in totals),
        sum(total.count for total in totals),
        took.step_us / 1e6,
        took.exposed_us / 1e6,
    )


def compare(
    graph: TrainGraph,
    mesh: Mesh,
    chosen: Sequence[Template],
    machine: Speeds | None = None,
    watch: Callable[[str], None] | None = None,
) -> list[Row]:
    """A row for each template, the fastest for each batch first; those that cannot be planned last, with the reason.

    `watch` is told the name of each template before it is planned.
    """
    rows: list[Row] = []
    for template in chosen:
        if watch is not None:
            watch(template.name)
        rows.append(_row(graph, mesh, template, machine or Machine()))
    return sorted(rows, key=lambda row: row.batch_s)


def _row(graph: TrainGraph, mesh: Mesh, template: Template, machine: Speeds) -> Row:
    if isinstance(template.strategies, WholestepError):
        return Row(template.name, 1, None, _first_line(template.strategies))
    try:
        strategies = compose(template.strategies)
        planned = plan(graph, mesh, strategies)
        return Row(template.name, _batches(strategies, mesh), costs(partition(graph, planned), planned, machine))
    except WholestepError as error:
        return Row(template.name, 1, None, _first_line(error))


def _batches(strategies: Strategies, mesh: Mesh) -> int:
    data = strategies.data
    per_rank = data is not None and data.semantics == "per_rank"
    return prod(mesh.axis_size(axis) for axis in data.axes(mesh)) if data is not None and per_rank else 1


def _first_line(error: WholestepError) -> str:
    return f"{error.found.splitlines()[0]}; needed: {error.needed}" if error.needed else error.found.splitlines()[0]


def show(rows: Sequence[Row]) -> str:
    """The rows as a table of text."""
    head = ("template", "at rest", "peak", "sent/step", "collectives", "step", "exposed", "batches", "per batch")
    cells = [head, *(_cells(row) for row in rows if row.costs is not None)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    failed = [row for row in rows if row.costs is None]
    return "\n".join([*(line.rstrip() for line in lines), *(f"{row.name}: no plan: {row.error}" for row in failed)])


def _cells(row: Row) -> tuple[str, ...]:
    found = row.costs
    assert found is not None, "only rows with costs have cells"
    return (
        row.name, human(found.rest_bytes), human(found.peak_bytes), human(found.sent_bytes), str(found.collectives),
        _seconds(found.step_s), f"{found.exposed_s / found.step_s:.0%}" if found.step_s else "-", str(row.batches),
        _seconds(row.batch_s),
    )  # fmt: skip


def _seconds(value: float) -> str:
    """`1.25 s`, `12.5 ms` or `125 us`: three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:#.3g} {unit}".replace(". ", " ")
    return f"{value * 1e6:.3g} us"


def as_json(rows: Sequence[Row], mesh: Mesh, model: str, machine: Speeds | None = None) -> dict[str, Any]:
    """The rows with what they were made from, in bytes and seconds."""
    return {
        "format": "wholestep comparison",
        "version": 1,
        "model": model,
        "mesh": str(mesh),
        "machine": machine.name if isinstance(machine, Topology) else asdict(cast(Machine, machine or Machine())),
        "rows": [
            {"template": r.name, "batches": r.batches, "error": r.error or None, **(asdict(r.costs) if r.costs else {})}
            for r in rows
        ],
    }
