"""Graphs as readable text with stable names; inputs of a local graph have layouts in their types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from . import meta
from .loop import loop_of, with_bodies
from .nodes import communicates, ends_of, node_at, ranks_in_ring
from .op_kinds import MULTIPLY_AND_SCATTER, collective_kind
from .region import region_of
from .stage_part import StageParts

if TYPE_CHECKING:
    from .graph import LocalGraph, TrainGraph

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_dtype(dtype: torch.dtype) -> str:
    """Abbreviate a dtype: `f32` for torch.float32."""
    name = str(dtype).removeprefix("torch.")
    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    return _DTYPES.get(match[1], match[1]) + match[2] if match else name


def human(size_bytes: float, up: bool = False) -> str:
    """Format bytes in decimal units, rounded to the nearest tenth or `up`: `1.5 MB`."""
    if size_bytes < 1000:
        return f"{ceil(size_bytes) if up else size_bytes:.0f} B"
    sizes = [size_bytes / 1000**power for power in (1, 2, 3, 4)]
    tenths = [ceil(size * 10) / 10 if up else size for size in sizes]
    unit = next((i for i, size in enumerate(tenths[:3]) if size < 999.95), 3)
    return f"{tenths[unit]:,.1f} {('kB', 'MB', 'GB', 'TB')[unit]}"


def human_at_least(size_bytes: float) -> str:
    """As `human`, rounded up, so that as much memory suffices: `1.6 MB` for 1.51 MB."""
    return human(size_bytes, up=True)


def seconds(value: float) -> str:
    """Format a duration with three digits, never with an exponent: `1,250 s`, `1.25 s`, `12.5 ms` or `125 us`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 0.9995:
            text = f"{value * factor:,.0f}" if value * factor >= 999.5 else f"{value * factor:#.3g}".rstrip(".")
            return f"{text} {unit}"
    return f"{value * 1e6:.3g} us" if value * 1e6 >= 5e-4 else "0 us"


def table(rows: Sequence[tuple[str, ...]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows as lines with aligned columns: those in `left` left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def show_train_graph(train: TrainGraph) -> str:
    """Format the graph of one device."""
    roles = Counter(i.role.value for i in train.inputs)
    head = "train_graph  " + ", ".join(f"{n} {role}" for role, n in roles.items())
    return _shown(train, head, [_typed(node) for _, node in train.placeholders()])


def show_local_graph(local: LocalGraph) -> str:
    """Format the program of one rank; shapes are the first rank's."""
    placed = zip(local.inputs, local.layouts, strict=True)
    types = [f"{short_dtype(i.meta.dtype)}[{layout.show(i.meta.shape)}]" for i, layout in placed]
    stage = f", stage {local.stage} of {local.stage_axis}" if local.stage is not None else ""
    return _shown(local, f"local_graph  mesh {local.mesh}{stage}", types)


def _shown(graph: TrainGraph | LocalGraph, head: str, types: Sequence[str]) -> str:
    """The text of a graph; `types` are those of its inputs."""
    rows = [head]
    for (program_input, node), of in zip(graph.placeholders(), types, strict=True):
        alias = "" if program_input.name == node.name else f"  {program_input.name}"
        rows.append(f"  {node.name}: {of}  {program_input.role.value}{alias}")
    return "\n".join([*rows, *_body(graph.graph), *_returns(graph)])


def _typed(node: Node) -> str:
    metas = meta.tensors(node)
    texts = [f"{short_dtype(m.dtype)}[{' '.join(map(str, m.shape))}]" if m else "-" for m in metas]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _body(graph: Graph) -> list[str]:
    lines: list[str] = []
    where, shown = "", set[Graph]()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        module = meta.module_path(node) + (" (backward)" if meta.is_backward(node) else "")
        if module != where:
            lines.append(f"  # {module}" if module else "  #")
            where = module
        at = "" if (owner := meta.owner(node)) is None else f" at {owner}"
        lines.append(f"  %{node.name} = {show_call(node)} : {_typed(node)}{at}")
        if loop := loop_of(node):
            ends = ", ".join(f"%{end.name}" for end in ends_of(loop.body))
            lines.append(f"    for each of {loop.pieces} pieces:")
            lines += [f"    {line}" for line in (*_body(loop.body), f"  accumulates {ends}")]
            lines += [f"    {line}" for line in _orders(loop.stages)] if loop.stages else []
        block = meta.block(node) if region_of(node) else None
        if block and block.body not in shown:
            shown.add(block.body)
            lines.append(f"    {block.name}: from {_names(block.takes)}")
            lines += [f"    {line}" for line in (*_body(block.body), f"  leaves {_names(block.gives)}")]
    return lines


def _orders(stages: StageParts) -> list[str]:
    """The blocks of each stage in their order."""
    lines = [f"  order {stages.order}:"]
    for part in stages.parts:
        labels = {block.name: block.label for block in part.blocks}
        runs = [f"{labels[action.name]}[{action.piece}]" for action in part.actions if action.kind == "run"]
        lines.append(f"    stage {part.stage}: {'; '.join(runs)}")
    return lines


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"%{name}" for name in names) or "nothing"


def show_call(node: Node) -> str:
    """Format a call with its arguments."""
    args = [_show(a) for a in node.args] + [f"{k}={_show(v)}" for k, v in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(args)})"


def op_name(node: Node) -> str:
    """Return `aten.add` for an op overload, the name of any other function."""
    target = node.target
    if not _torch.is_op(target):
        return getattr(target, "__name__", str(target))
    return str(target).removesuffix(".default").removeprefix("_c10d_functional.")


def _show(value: Any) -> str:
    text = f"%{value.name}" if isinstance(value, Node) else repr(map_arg(value, cast(Any, _Name)))
    return text.replace("torch.", "")


@dataclass(frozen=True)
class _Name:
    node: Node

    def __repr__(self) -> str:
        return f"%{self.node.name}"


def _returns(graph: TrainGraph | LocalGraph) -> list[str]:
    lines: list[str] = []
    for output, node in graph.results():
        text = f"%{node.name}" if isinstance(node, Node) else repr(node)
        to = {"update": output.target, "carry": f"next call's {output.target}"}
        lines.append(f"  return {text}" if output.kind == "result" else f"  {to[output.kind]} <- {text}")
    return lines


@dataclass(frozen=True)
class CollectiveTotal:
    """Number of collectives of one kind in a step, and the bytes a rank sends for them with the ring algorithm."""

    count: int
    bytes: int


def collective_totals(local: LocalGraph) -> dict[str, CollectiveTotal]:
    """Count collectives by kind, with the bytes a rank sends: (n-1)/n of the tensor, twice for an all-reduce."""
    totals: dict[str, CollectiveTotal] = {}
    for node, times in with_bodies(local.graph):
        if communicates(node):
            kind, sent = collective_bytes(node, local)
            before = totals.get(kind, CollectiveTotal(0, 0))
            totals[kind] = CollectiveTotal(before.count + times, before.bytes + times * sent)
    return totals


def collective_bytes(node: Node, local: LocalGraph) -> tuple[str, int]:
    """Return the kind of a collective and the bytes a rank sends for it with the ring algorithm."""
    kind = collective_kind(node.target)
    assert kind is not None, f"%{node.name} is a collective"
    n = local.mesh.axis_size(str(node.args[-1]))
    fused = node.target in MULTIPLY_AND_SCATTER  # nothing holds the whole that it scatters
    full = meta.tensor(node if fused else node_at(node, 0))
    assert full is not None, f"{node.name} has no input shape"
    size_bytes = full.size_bytes * (n if fused or kind == "all_gather" else 1)
    if ranks_in_ring(node):
        return kind, size_bytes
    return kind, size_bytes * (n - 1) * (2 if kind == "all_reduce" else 1) // n
