"""The protocol of a backend: a bound graph in, a Python callable out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.fx import Graph, Node

from ..graph.graph import Input

Run = Callable[[Sequence[Any]], list[Any]]
"""From the list of inputs of a program to the list of its outputs."""
RunBody = Callable[[list[Any], int], list[Any]]
"""Runs the body of a region: from inputs, which it takes out of the list, and the number of the piece, to outputs."""


class NodeClock(Protocol):
    """Measures the calls of nodes."""

    def timed(self, node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with its time recorded for `node`; `call` itself where the clock does not measure `node`."""
        ...


class Backend(Protocol):
    """Compiles the program of one rank into a Python callable: `compile(backend=...)` takes an object of this protocol.

    The graph is a `torch.fx.Graph` of one whole step (forward, backward, update) that is *bound* to the rank: mesh
    coordinates and names of process groups are constants. Its nodes are `placeholder`, `call_function` and one `output`
    with a flat tuple; targets are `torch.ops` overloads, `operator.getitem` and functions of wholestep, all of which
    can be called as they are. Parameters and optimizer state are placeholders, as local shards.

    - `compile` and the callable run under `torch.no_grad()`.
    - The graph belongs to the backend, which may edit it.
    - The callable mutates an input only where a node of the graph mutates it.
    - Collectives (`torch.ops._c10d_functional`) return at once and `wait_tensor` waits. All of them run in the order of
      the graph: it is the same on all ranks.
    - The callable frees each value after its last use, or the peak exceeds what `peak_memory` predicts.

    Every attribute is required. The ranks of a job compare `name`, and the compile cache stores it.

    Example:
        >>> class Interpreted:
        ...     name = "interpreted"
        ...     fused_optimizers, in_place_buffers, splits_steps, times_nodes = True, True, False, False
        ...     recordable = False
        ...
        ...     def compile(self, graph, inputs, example_inputs, clock):
        ...         module = torch.fx.GraphModule(torch.nn.Module(), graph)
        ...         return lambda values: list(torch.fx.Interpreter(module).run(*values))
        >>> step = ws.compile(train_step, backend=Interpreted())
    """

    @property
    def name(self) -> str:
        """The name in messages, in the comparison of ranks and in the key of the compile cache."""
        ...

    @property
    def fused_optimizers(self) -> bool:
        """True: optimizers keep their fused and foreach kernels. False: they are captured as plain ops."""
        ...

    @property
    def in_place_buffers(self) -> bool:
        """True: the pass `WriteIntoBuckets` lets nodes write into the buckets of collectives. A compiler that does not
        see through such writes sets False.
        """
        ...

    @property
    def splits_steps(self) -> bool:
        """True: `schedule="across_steps"` is possible. `compile` then gets three programs a step; inputs of the role
        `CARRY` are results of the last call, to which a collective may still write until the graph waits for it.
        """
        ...

    @property
    def times_nodes(self) -> bool:
        """True: `compile` uses the clock, so that `compile(measure=True)` and `CompiledStep.profile` are possible."""
        ...

    @property
    def recordable(self) -> bool:
        """True: each call of what `compile` returns launches the same work on the device, and Python beside it does
        nothing that counts. `compile(cuda_graphs=...)` may then record it as a CUDA graph, and not call it again.
        """
        ...

    def compile(
        self, graph: Graph, inputs: Sequence[Input], example_inputs: Sequence[Any], clock: NodeClock | None
    ) -> Run:
        """Compile `graph` into a function from a list of inputs to the list of outputs.

        Args:
            graph: the bound graph.
            inputs: the name, role and global shape of each placeholder.
            example_inputs: a value of each placeholder: tensors, and 0-dim tensors for numbers that change (a learning
                rate); None for the role `CARRY`. They are the tensors of the first call: do not change them.
            clock: None unless `times_nodes`; the backend then calls `clock.timed(node, function)` in place of
                `function` for each node that it runs by itself.

        Raises:
            BackendError: the graph cannot be compiled.
        """
        ...
