"""Moves nodes that wait for the last reductions of a step into the next call, just before their results are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar

from torch.fx import Graph, Node

from ..graph import meta
from ..graph.graph import Input, LocalGraph, Output, Role
from ..graph.nodes import is_collective, is_wait, operands, reached
from ..graph.sizes_in_graph import sizes_among
from ..layout import replicated
from ..rules.registry import is_random
from .bucket import REDUCE, SCATTER
from .forward_backward import forward_backward

_LASTING = frozenset({Role.PARAM, Role.BUFFER, Role.STATE, Role.CONST})


@dataclass(frozen=True)
class CrossStep:
    """Leaves the end of a step to the next call, which waits for the reductions that are in flight.

    Takes a functional program with buckets, and splits it at its reductions of gradients. All nodes that depend on
    such a reduction move to the next call, unless the forward, the backward, a result or a kept gradient needs them, or
    they compute with sizes of the batch, which is another one then. A program in which nothing moves is returned
    unchanged.

    The result is three programs, which update parameters one call late. The returned one runs in all calls but the
    first. Its `across` has `first`, for a call with nothing carried, and `flush`, which completes the last call.
    Each takes the inputs of the step, then the carried tensors; `flush` takes only the inputs that outlast a call.
    A call of `first` or of the returned program, then `flush`, computes what `local` does, bitwise.

    Raises:
        GraphError: optimizers over lists are not split by bucket yet, or the graph already updates in place.
    """

    must_follow: ClassVar[tuple[str, ...]] = ("SplitOptimizer",)
    must_precede: ClassVar[tuple[str, ...]] = ("Reinplace",)

    def __call__(self, local: LocalGraph) -> LocalGraph:
        """The steady program, with the two others in `across`."""
        work = _Work(local)
        return work.split() if work.late else local


@dataclass
class _Work:
    """`late`: nodes that move to the next call. `body`: nodes that stay. Functions of stored tensors may be in both."""

    local: LocalGraph
    late: set[Node] = field(default_factory=set[Node])
    body: set[Node] = field(default_factory=set[Node])

    def __post_init__(self) -> None:
        self.calls = [n for n in self.local.graph.nodes if n.op == "call_function"]
        self.inputs = {node: program_input for program_input, node in self.local.placeholders()}
        self.roles = {program_input.name: program_input.role for program_input in self.inputs.values()}
        self.results = self.local.results()
        self.batch_dependent, main = forward_backward(self.local)
        reductions = [c for c in self.calls if c.target in (REDUCE, SCATTER) and c in self.batch_dependent]
        followers = {c: reached(c.users, attrgetter("users")) for c in reductions}
        lasting = [
            name for name, role in self.roles.items() if role in (Role.PARAM, Role.STATE)
        ]  # read in the next call
        fixed = main | {node for out, node in self.results if out.kind != "update" or out.target not in lasting}
        fixed |= {node for node in self.calls if _has_sizes(node)}
        movable = [c for c, after in followers.items() if after and not after & fixed]
        self.late = set[Node]().union(*(followers[c] for c in movable))
        self.carried = [c for c in movable if c not in self.late]
        self._move_operands()

    def _move_operands(self) -> None:
        """Move operands of `late` that are functions of stored tensors along; the body computes its own copies."""
        lasting = reached([n for node in self.late for n in operands(node)], where=self._lasts)
        moves = self.late | lasting
        staying = [n for out, n in self.results if isinstance(n, Node) and (out.kind == "result" or n not in moves)]
        self.body = reached([*self.carried, *staying, *self._crossing(moves)])
        self.updated = {out.target: node for out, node in self.results if out.kind == "update" and node in self.body}
        stale = {node for node, program_input in self.inputs.items() if program_input.name in self.updated}
        for node in self.calls:
            if any(n in stale for n in operands(node)):
                stale.add(node)
        self.late |= {n for n in lasting if n not in self.body or n not in stale}

    def _lasts(self, node: Node) -> bool:
        changes = node in self.late or node in self.batch_dependent
        return not (changes or is_collective(node) or is_wait(node) or is_random(node) or _has_sizes(node))

    def _crossing(self, late: set[Node]) -> list[Node]:
        """The operands of `late` outside of it, each once."""
        return list(dict.fromkeys(n for node in self.calls if node in late for n in operands(node) if n not in late))

    def _sources(self) -> tuple[list[Node], dict[Node, Node]]:
        """Operands of `late` to be carried; and operands that are inputs of the next call, with those inputs."""
        inputs = {program_input.name: node for node, program_input in self.inputs.items()}
        at_hand = {node: inputs[name] for name, node in self.updated.items() if name in inputs}
        at_hand |= {
            n: n for n, stored in self.inputs.items() if stored.role in _LASTING and stored.name not in self.updated
        }
        crossing = self._crossing(self.late)
        return [n for n in crossing if n not in at_hand], {n: at_hand[n] for n in crossing if n in at_hand}

    def split(self) -> LocalGraph:
        """The three programs."""
        sources, at_hand = self._sources()
        carries = [self._carry(number, node) for number, node in enumerate(sources)]
        ends = [(out, n) for out, n in self.results if n in self.late and out.target not in self.updated]
        body_ends = [(out, n) for out, n in self.results if (out, n) not in ends]
        body_ends += [(Output("carry", carry.name), n) for carry, n in zip(carries, sources, strict=True)]
        first, steady, flush = (_Writer(self.local) for _ in range(3))

        copies = first.run(self.calls, self.body, first.take(self.inputs))
        programs = [first.end([(out, copies.get(n, n)) for out, n in body_ends])]

        inputs = steady.take(self.inputs)
        carried = steady.take_carried(carries, sources)
        late = steady.run(self.calls, self.late, {**{n: inputs[at] for n, at in at_hand.items()}, **carried})
        new = [(out, late[n]) for out, n in ends]
        newest = {out.target: n for out, n in new}
        ended = [n for at, n in inputs.items() if self.inputs[at].name in newest]
        for node in (*late.values(), *ended):
            if node.op == "call_function" or node in ended or node in carried.values():
                meta.set_late(node, True)
        copies = steady.run(self.calls, self.body, {n: newest.get(self.inputs[n].name, at) for n, at in inputs.items()})
        programs.append(steady.end([*[(out, copies.get(n, n)) for out, n in body_ends], *new]))

        inputs = flush.take({n: i for n, i in self.inputs.items() if i.role in _LASTING})
        carried = flush.take_carried(carries, sources)
        late = flush.run(self.calls, self.late, {**{n: inputs[at] for n, at in at_hand.items()}, **carried})
        programs.append(flush.end([(out, late[n]) for out, n in ends]))
        return replace(programs[1], across=(programs[0], programs[2]))

    def _carry(self, number: int, node: Node) -> Input:
        """The next call's input for the result of `node`."""
        axis = str(node.args[-1]) if is_collective(node) else ""
        key = str(node.args[1]) if node.target is SCATTER else ""
        return Input(f"carried/{number}", Role.CARRY, meta.one_tensor(node), owner=axis, key=key)


class _Writer:
    """Copies parts of a program into a new one."""

    def __init__(self, local: LocalGraph) -> None:
        self.local, self.graph = local, Graph()
        self.layouts = dict(zip((i.name for i in local.inputs), local.layouts, strict=True))
        self.inputs = list[Input]()

    def take(self, inputs: dict[Node, Input]) -> dict[Node, Node]:
        """Placeholders for inputs of the program."""
        self.inputs += inputs.values()
        return {node: self.graph.node_copy(node) for node in inputs}

    def take_carried(self, carries: Sequence[Input], sources: Sequence[Node]) -> dict[Node, Node]:
        """Placeholders for the tensors carried from the call before."""
        placeholders = dict[Node, Node]()
        for carry, node in zip(carries, sources, strict=True):
            placeholders[node] = self.graph.placeholder(carry.name.replace("/", "_"))
            meta.copy(node, placeholders[node])
            self.inputs.append(carry)
            self.layouts[carry.name] = replicated(len(carry.meta.shape))
        return placeholders

    def run(self, calls: Sequence[Node], part: set[Node], env: dict[Node, Node]) -> dict[Node, Node]:
        """Copies of the nodes of `calls` that are in `part`, in their order."""
        env = dict(env)
        for node in calls:
            if node in part:
                env[node] = self.graph.node_copy(node, env.__getitem__)
        return env

    def end(self, results: Sequence[tuple[Output, Any]]) -> LocalGraph:
        """The program with these outputs."""
        self.graph.output(tuple(node for _, node in results))
        layouts = tuple(self.layouts[i.name] for i in self.inputs)
        outputs = tuple(out for out, _ in results)
        return replace(self.local, graph=self.graph, inputs=tuple(self.inputs), outputs=outputs, layouts=layouts)


def _has_sizes(node: Node) -> bool:
    """True for a call that computes with sizes of the batch."""
    shapes = [tensor.shape for tensor in meta.tensors(node) if tensor is not None]
    return bool(sizes_among([node.args, node.kwargs, shapes]))
