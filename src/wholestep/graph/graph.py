"""The two graphs that pass between stages: what one device computes, and what one rank runs."""

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
    """What an input of the step is."""

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
    """One input of a graph. `owner` is the parameter a state or gradient belongs to, `key` its name in the state
    of the optimizer numbered `optimizer`.

    What the call before left behind (CARRY) may be the result of a reduce-scatter that is on its way still: `owner` is
    then its axis, `key` the operation.
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
    """One output of a graph: a tensor the step returned, the new value of the input called `target`, or what the next
    call gets as its input `target`.
    """

    kind: str  # "result" | "update" | "carry"
    target: str


@dataclass(frozen=True)
class TrainGraph:
    """Forward, backward and optimizer of one device as one functional ATen graph.

    Invariants (`verify.check_train_graph`): placeholders match `inputs` in order and count; the output node is one flat
    tuple that matches `outputs`; no node mutates anything; every update names an input; each node knows what it makes.
    `mixed_precision` is that of the capture. `offload` is the device that computes while state rests in host memory;
    empty where state rests on it.

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
        """Each input with its node."""
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        return zip(self.inputs, nodes, strict=True)

    def results(self) -> list[tuple[Output, Any]]:
        """Each output with the node that makes it."""
        node = next(iter(reversed(self.graph.nodes)))
        return list(zip(self.outputs, node.args[0], strict=True))

    def __str__(self) -> str:
        from .text import show_train_graph

        return show_train_graph(self)


@dataclass(frozen=True)
class CollectiveTotal:
    """How many collectives of one kind a step runs and what a rank sends for them, in bytes, by the ring algorithm."""

    count: int
    bytes: int


@dataclass(frozen=True)
class BucketSizes:
    """What the collectives of a program carry, in bytes, as `passes.bucket_sizes.SizeBuckets` decides it.

    `first_bytes` are those of the first bucket of a kind, `summed_bytes` those of all-reduces. Gathers and scatters of
    `alone_bytes` or more are not bucketed. `in_flight_bytes` may be in flight at once, or `in_flight` collectives.
    """

    bucket_bytes: int
    first_bytes: int
    summed_bytes: int
    alone_bytes: int
    in_flight_bytes: int
    in_flight: int


@dataclass(frozen=True)
class LocalGraph:
    """What one rank runs: local shapes, explicit collectives and waits.

    The same for all ranks: pieces that depend on the rank name a mesh axis, and `backend` binds the coordinate.
    `passes` names the passes that were applied. With `across`, the end of a step is left to the next call: this program
    runs in all calls but the first, `across` holds that of the first call and the one that completes the last call.
    Invariants (`verify.check_local_graph`): those of a TrainGraph but for mutation; every collective is waited for, or
    carried to the next call; no dead node.

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
        """The same program with a graph of its own, which a pass may change.

        Example:
            >>> changed = local.copy()
            >>> for node in changed.graph.nodes: ...
        """
        return replace(self, graph=copy_graph(self.graph))

    def collectives(self) -> dict[str, CollectiveTotal]:
        """Number and bytes of each kind of collective."""
        from .text import collective_totals

        return collective_totals(self)

    def __str__(self) -> str:
        from .text import show_local_graph

        return show_local_graph(self)


def operands(node: Node) -> list[Node]:
    """Every node `node` reads, in argument order, lists opened, repeats kept."""
    found: list[Node] = []
    args, kwargs = node.args, node.kwargs
    for given in (*args, *kwargs.values()) if kwargs else args:
        if type(given) is Node:
            found.append(given)
        elif isinstance(given, (list, tuple)):  # by hand: `map_arg` makes another list, and calls for each entry
            for one in cast("Sequence[Any]", given):
                if type(one) is Node:
                    found.append(one)
                elif isinstance(one, (list, tuple, dict, slice)):
                    map_arg(cast(Any, one), found.append)
        elif isinstance(given, (dict, slice)):
            map_arg(given, found.append)
    return found


def node_at(node: Node, position: int) -> Node:
    """The node that `node` reads as its argument `position`."""
    return cast(Node, node.args[position])


def function_of(node: Node) -> Callable[..., Any]:
    """What a call node calls."""
    return cast(Callable[..., Any], node.target)


def copy_graph(graph: Graph) -> Graph:
    """An independent copy: same names, same metadata."""
    return copy_with(graph)[0]


def copy_with(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """An independent copy, and its node for each of `graph`."""
    new, twins = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        twins[node] = copy_node(node, new, twins.__getitem__)
    return new, twins


def copy_node(node: Node, graph: Graph, twin: Callable[[Node], Node]) -> Node:
    """A copy of `node` at the end of `graph`, with its name and metadata, that reads the `twin` of each operand.

    As `Graph.node_copy`, in a third of the time.
    """
    args, kwargs = map_arg(node.args, twin), map_arg(node.kwargs, twin)
    new = add_node(graph, node.op, node.target, args, kwargs, node.name)
    meta.copy(node, new)
    return new


def redirect(moved: Mapping[Node, Node]) -> None:
    """Who reads a key of `moved` reads its value from now on, or that one's where it is a key itself.

    As `Node.replace_all_uses_with` of each, which goes through all operands of a reader for each that it replaces:
    through the thousands of an output or an optimizer over lists, thousands of times.
    """

    def final(node: Node) -> Node:
        while node in moved:
            node = moved[node]
        return node

    for reader in {reader: None for old in moved for reader in old.users}:
        reader.args, reader.kwargs = map_arg(reader.args, final), map_arg(reader.kwargs, final)


def add_node(graph: Graph, op: str, target: Any, args: Any, kwargs: Any, name: str) -> Node:
    """As `Graph.create_node`, which looks into every argument for symbolic numbers: most of what it takes."""
    node = graph.create_node(op, target, name=name)
    _torch.set_operands(node, args, kwargs)
    return node
