"""The graphs that stages exchange: TrainGraph (one device) and LocalGraph (one rank)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import _torch
from ..layout import Layout
from ..mesh import Mesh
from ..precision import MixedPrecision
from . import meta
from .meta import TensorMeta


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
    """One output of a graph: a result of the step, the new value of input `target`, or the next call's `target`."""

    kind: str  # "result" | "update" | "carry"
    target: str


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
        from .text import show_train_graph

        return show_train_graph(self)


@dataclass(frozen=True)
class CollectiveTotal:
    """Number of collectives of one kind in a step, and the bytes a rank sends for them with the ring algorithm."""

    count: int
    bytes: int


@dataclass(frozen=True)
class BucketSizes:
    """Bucket sizes of a program in bytes, chosen by `passes.bucket_sizes.SizeBuckets`.

    `first_bytes` is the size of the first bucket of a kind, `summed_bytes` the size for all-reduces. All-gathers and
    reduce-scatters of `alone_bytes` or more are not bucketed. At most `in_flight_bytes`, or `in_flight` collectives,
    are in flight.
    """

    bucket_bytes: int
    first_bytes: int
    summed_bytes: int
    alone_bytes: int
    in_flight_bytes: int
    in_flight: int


@dataclass(frozen=True)
class LocalGraph:
    """The program of one rank: local shapes, explicit collectives and waits.

    It is the same for all ranks: rank-dependent ops name a mesh axis, for which `backend.rank_binding` inserts the
    coordinate.
    `passes` names the applied passes. With `across`, a call completes the previous step: this program runs in all
    calls except the first; `across` has the program of the first call, and the one that completes the last step.
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
    across: tuple[LocalGraph, LocalGraph] | None = None

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
        from .text import collective_totals

        return collective_totals(self)

    def __str__(self) -> str:
        from .text import show_local_graph

        return show_local_graph(self)


def operands(node: Node) -> list[Node]:
    """Return every node that `node` reads, in argument order, with repeats and the entries of lists."""
    found: list[Node] = []
    args, kwargs = node.args, node.kwargs
    for given in (*args, *kwargs.values()) if kwargs else args:
        if type(given) is Node:
            found.append(given)
        elif isinstance(given, (list, tuple)):  # faster than `map_arg`, which copies the list
            for one in cast("Sequence[Any]", given):
                if type(one) is Node:
                    found.append(one)
                elif isinstance(one, (list, tuple, dict, slice)):
                    map_arg(cast(Any, one), found.append)
        elif isinstance(given, (dict, slice)):
            map_arg(given, found.append)
    return found


def node_at(node: Node, position: int) -> Node:
    """Return the argument `position` of `node`, a node."""
    return cast(Node, node.args[position])


def function_of(node: Node) -> Callable[..., Any]:
    """Return the function that a call node calls."""
    return cast(Callable[..., Any], node.target)


def copy_graph(graph: Graph) -> Graph:
    """Return a copy with the same names and metadata."""
    return copy_with(graph)[0]


def copy_with(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy, and a dict from each node of `graph` to its copy."""
    new, twins = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        twins[node] = copy_node(node, new, twins.__getitem__)
    return new, twins


def copy_node(node: Node, graph: Graph, twin: Callable[[Node], Node]) -> Node:
    """Append a copy of `node` to `graph`, with its name and metadata, reading `twin(operand)` for each operand.

    Like `Graph.node_copy`, in a third of the time.
    """
    args, kwargs = map_arg(node.args, twin), map_arg(node.kwargs, twin)
    new = add_node(graph, node.op, node.target, args, kwargs, node.name)
    meta.copy(node, new)
    return new


def redirect(moved: Mapping[Node, Node]) -> None:
    """Replace all uses of each key of `moved` by its value, transitively.

    Like `Node.replace_all_uses_with` for each key, which visits all operands of a reader per replacement: quadratic
    for the thousands of operands of an output or a foreach optimizer.
    """

    def final(node: Node) -> Node:
        while node in moved:
            node = moved[node]
        return node

    for reader in {reader: None for old in moved for reader in old.users}:
        reader.args, reader.kwargs = map_arg(reader.args, final), map_arg(reader.kwargs, final)


def add_node(graph: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> Node:
    """Like `Graph.create_node`, without its search for symbolic numbers, which takes most of its time."""
    node = graph.create_node(op, target, name=name)
    _torch.set_operands(node, args, kwargs)
    return node
