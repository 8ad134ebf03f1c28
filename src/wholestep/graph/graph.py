"""The graphs that stages exchange: TrainGraph (one device) and LocalGraph (one rank)."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..layout import Layout
from ..mesh import Mesh
from ..precision import MixedPrecision
from .meta import TensorMeta
from .nodes import copy_graph
from .text import CollectiveTotal, collective_totals, show_local_graph, show_train_graph

NONFINITE = "not finite"
"""The target of two results: whether the step is skipped, and which values are not finite."""

BRANCHES = "branches"
"""The target of a result: on how many ranks each branch is another one than the step takes, and on how many not."""

EXPERT_ROWS = "rows of experts of "
"""Before the path of a layer: the target of a result, the rows that each of its experts has."""


class Role(enum.Enum):
    """Kind of an input of the step."""

    PARAM = "param"
    BUFFER = "buffer"
    STATE = "state"
    GRAD = "grad"
    HYPER = "hyper"
    BATCH = "batch"
    CONST = "const"
    CARRY = "carry"


@dataclass(frozen=True)
class Input:
    """One input of a graph.

    Of optimizer state and gradients, `owner` is the parameter, `key` the name in the state of optimizer number
    `optimizer`. A CARRY input comes from the previous call; if it is the result of a reduce-scatter in flight, `owner`
    is the axis and `key` the reduction.
    """

    name: str
    role: Role
    meta: TensorMeta
    owner: str = ""
    key: str = ""
    trainable: bool = False
    optimizer: int = 0


@dataclass(frozen=True)
class Output:
    """One output of a graph: a result of the step, the new value of input `target`, or the next call's `target`.

    Of optimizer state, `owner`, `key` and `optimizer` are those of an `Input`; a gradient has an `owner` alone.
    """

    kind: str  # "result" | "update" | "carry"
    target: str
    owner: str = ""
    key: str = ""
    optimizer: int | None = None


@dataclass(frozen=True)
class TrainGraph:
    """Forward, backward and optimizer of one device as one functional ATen graph.

    Invariants (`verify.check_train_graph`): placeholders match `inputs` in order and count; the output node is one flat
    tuple that matches `outputs`; no node mutates its inputs; every update names an input; each node has recorded
    values. `offload` is the compute device if state is stored in host memory, else "".

    Example:
        >>> graph = ws.capture(train_step, model, optimizer, batch)
        >>> print(graph, [given.name for given in graph.inputs])
    """

    graph: Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    losses: tuple[str, ...] = ()
    mixed_precision: MixedPrecision | None = None
    offload: str = ""

    def placeholders(self) -> Iterator[tuple[Input, Node]]:
        """Return each input with its node."""
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        return zip(self.inputs, nodes, strict=True)

    def results(self) -> list[tuple[Output, Any]]:
        """Return each output with its node."""
        node = next(iter(reversed(self.graph.nodes)))
        return list(zip(self.outputs, node.args[0], strict=True))

    def __str__(self) -> str:
        return show_train_graph(self)


@dataclass(frozen=True)
class BucketSizes:
    """Bucket sizes of a program in bytes, chosen by `passes.bucket_sizes.SizeBuckets`.

    `first_bytes` is the size of the first bucket of a kind, `summed_bytes` the size for all-reduces. All-gathers and
    reduce-scatters of `alone_bytes` or more are not bucketed. At most `in_flight_bytes`, or `in_flight` collectives,
    are in flight, and with `puts_off` gradients wait for them. `coalesces`: one can carry several tensors uncopied.
    """

    bucket_bytes: int
    first_bytes: int
    summed_bytes: int
    alone_bytes: int
    in_flight_bytes: int
    in_flight: int
    coalesces: bool = False
    puts_off: bool = True


@dataclass(frozen=True)
class LocalGraph:
    """The program of one rank: local shapes, explicit collectives and waits.

    It is the same for all ranks: rank-dependent ops name a mesh axis, for which `backend.rank_binding` inserts the
    coordinate. `passes` names the applied passes. `async_axes` are those of `TensorParallel(async_tp=True)`.
    With `across`, a call completes the previous step: this program runs in all calls except the first;
    `across` has the program of the first call, and the one that completes the last step. With `stage_axis`, it is the
    program of all stages of a pipeline, which does not run (`partition.stage_program` has that of one), or that of
    `stage`: coordinates of the axis run different nodes. Along `owner_axis` each coordinate updates what it owns: a
    node may have an owner, and binding to a rank leaves out what others own (`graph.owned`).
    Invariants (`verify.check_local_graph`): those of a TrainGraph, except that nodes may mutate; every collective is
    waited for or carried to the next call; no dead node.

    Example:
        >>> local = ws.partition(graph, ws.plan(graph, "dp=8"))
        >>> print(local, local.collectives())
    """

    graph: Graph
    mesh: Mesh
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    layouts: tuple[Layout, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    passes: tuple[str, ...] = ()
    offload: str = ""
    sizes: BucketSizes | None = None
    async_axes: tuple[str, ...] = ()
    across: tuple[LocalGraph, LocalGraph] | None = None
    stage_axis: str = ""
    stage: int | None = None
    owner_axis: str = ""

    placeholders = TrainGraph.placeholders
    results = TrainGraph.results

    def copy(self) -> LocalGraph:
        """Return a copy with its own graph, which a pass may change.

        Example:
            >>> changed = local.copy()
            >>> for node in changed.graph.nodes: ...
        """
        return replace(self, graph=copy_graph(self.graph))

    def collectives(self) -> dict[str, CollectiveTotal]:
        """Return number and bytes of each kind of collective."""
        return collective_totals(self)

    def __str__(self) -> str:
        return show_local_graph(self)
