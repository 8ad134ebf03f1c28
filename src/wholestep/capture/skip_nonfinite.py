"""Makes a step that changes nothing if its loss or a gradient is not finite, decided by the graph itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.graph import NONFINITE, Output, Role, TrainGraph
from ..graph.nodes import node_at, operands
from ..graph.ops import GRAD_READY, OVER_RANKS
from .effects import Effects, Extra
from .locations import GroupEntry, StateEntry
from .state import StepState

aten = torch.ops.aten
LOSS = "loss"
_KEPT = frozenset({Role.PARAM, Role.STATE, Role.BUFFER, Role.GRAD})
_SCHEDULED = frozenset({"lr", "initial_lr", "momentum", "betas"})
_HALF = (torch.float16, torch.bfloat16)
_NEEDED = "state that the step keeps as tensors which exist before it, so that a step can leave them as they were"


def skip_nonfinite(graph: TrainGraph, fresh_grads: bool, foreach: bool) -> tuple[TrainGraph, tuple[str, ...]]:
    """Return the step with updates that keep the old value if the loss or a gradient is not finite, and what it checks.

    Two results follow those of the step: whether it is skipped, and whether each of the named values is not finite.
    `fresh_grads`: the step resets gradients before it computes them; otherwise gradients that a skipped step creates
    are zero. A step without a backward stays as it is.

    Raises:
        CaptureError: the step creates optimizer state.
    """
    checked = _checked(graph)
    if all(name == LOSS for name, _ in checked):
        return graph, ()
    flags = _flags(checked, foreach)
    updates = Updates(flags[0])
    inputs = {source.name: (source.role, node) for source, node in graph.placeholders()}
    pairs: list[tuple[Output, Node]] = []
    for out, new in graph.results():
        role, old = inputs.get(out.target, (None, None)) if out.kind == "update" else (None, None)
        created = out.kind == "update" and old is None
        if old is not None and role in _KEPT:
            place = After(updates.last(new))
            new = updates.kept(new, old) or place.call(aten.where.self, flags[0], old, new)
        elif created and out.optimizer is not None:
            text = f"a step that may be skipped creates {out.key!r} of {out.owner!r}, state of its optimizer"
            raise CaptureError(text, _NEEDED, "call the step once without on_nonfinite, or use another optimizer")
        elif created and not fresh_grads:
            place = After(updates.last(new))
            new = place.call(aten.where.self, flags[0], place.call(aten.zeros_like.default, new), new)
        pairs.append((out, new))
    results = sum(out.kind == "result" for out, _ in pairs)
    pairs[results:results] = [(Output("result", NONFINITE), flag) for flag in flags]
    output = next(iter(reversed(graph.graph.nodes)))
    output.args = (tuple(node for _, node in pairs),)
    return replace(graph, outputs=tuple(out for out, _ in pairs)), tuple(name for name, _ in checked)


def refuse_unskippable(state: StepState, effects: Effects) -> None:
    """Raise CaptureError if a skipped step would change state on the host, or is skipped by a GradScaler already."""
    if state.scalers:
        problem = "the step has a GradScaler, which skips a step whose gradients are not finite, and on_nonfinite"
        raise CaptureError(problem, "one of them", "leave out on_nonfinite, or use bfloat16 without a scaler")
    buffers = {(id(container), key): name for name, buffer in state.buffers.items() for container, key in buffer.places}
    for write in effects.writes:
        holder, key = write.place.holder, write.place.key
        of_graph = write.recipe is not None and any(isinstance(leaf, Extra) for leaf in write.recipe.leaves)
        name = write.place.path if of_graph and isinstance(holder, StateEntry) else buffers.get((id(holder), key))
        if name:
            text = f"a step that may be skipped replaces {name!r} by a tensor of another shape or dtype"
            raise CaptureError(text, _NEEDED, "call the step once without on_nonfinite, or keep its shape and dtype")
        if isinstance(holder, StateEntry) or (isinstance(holder, GroupEntry) and key not in _SCHEDULED):
            text = f"a step that may be skipped changes the number {write.place.path}, which Python computes"
            raise CaptureError(text, _NEEDED, f"keep {key!r} as a tensor in the state of the optimizer")


def _checked(graph: TrainGraph) -> list[tuple[str, Node]]:
    """Return losses, and complete gradients in the order of the parameters, by name.

    A complete gradient is a sum of those of all backwards, or a gradient that is in no such sum.
    """
    params = [source.name for source in graph.inputs if source.role is Role.PARAM]
    parts: dict[Node, str] = {n: i.owner for i, n in graph.placeholders() if i.role is Role.GRAD}
    ends: dict[Node, str] = {}
    for node in graph.graph.nodes:
        if node.target is GRAD_READY:
            parts[node] = ends[node] = str(node.args[1])
        elif node.target in (aten.add.Tensor, aten.clone.default):
            terms = operands(node)
            names = {parts.get(n, "") for n in terms}
            if len(names) == 1 and "" not in names:
                (parts[node],) = names
                ends = {n: name for n, name in ends.items() if n not in terms}
                ends[node] = parts[node]
    losses = [(LOSS, node) for node in graph.graph.nodes if node.name in graph.losses]
    return losses + sorted(((name, node) for node, name in ends.items()), key=lambda pair: params.index(pair[0]))


def _flags(checked: Sequence[tuple[str, Node]], foreach: bool) -> tuple[Node, Node]:
    """Return whether any value is not finite, and whether each is not, from their norms.

    Norms with which the step clips gradients are taken; others are computed after the last value.
    """
    order = {node: i for i, node in enumerate(checked[0][1].graph.nodes)}
    dtypes = {meta.one_tensor(node).dtype for _, node in checked}
    wide = torch.float64 if dtypes & {torch.float64, torch.complex128} else torch.float32
    grads = [node for name, node in checked if name != LOSS]
    norms = _known_norms(grads, wide)
    place = After(max([*(node for _, node in checked), *norms.values()], key=order.__getitem__))
    sizes = [place.size(node, 1, wide) for name, node in checked if name == LOSS]
    unclipped = [node for node in grads if node not in norms]
    if foreach and len({meta.one_tensor(node).dtype for node in unclipped}) == 1:
        norms |= dict(zip(unclipped, place.sizes(unclipped, wide), strict=True))
    sizes += [norms.get(node) or place.size(node, 2, wide) for node in grads]
    stacked = place.call(aten.stack.default, [place.call(OVER_RANKS, size) for size in sizes])
    flags = place.call(aten.ne.Scalar, place.call(aten.sub.Tensor, stacked, stacked), 0)
    return place.call(aten.any.default, flags), flags


def _known_norms(grads: Sequence[Node], wide: torch.dtype) -> dict[Node, Node]:
    """Return 2-norms that the step itself computes of gradients, in the dtype `wide`."""
    norms: dict[Node, Node] = {}
    for grad in grads:
        for user in grad.users:
            norm: Node | None = None
            if user.target is aten.linalg_vector_norm.default and user.args[1:] in ((), (2,)):
                norm = user
            elif user.target is aten._foreach_norm.Scalar and user.args[1:] in ((), (2,)):
                number = cast("list[Node]", user.args[0]).index(grad)
                norm = next((item for item in user.users if item.args[1] == number), None)
            if norm is not None and meta.one_tensor(norm).dtype == wide:
                norms[grad] = norm
    return norms


class Updates:
    """Updates that keep the old value by themselves, without a copy: of fused optimizers, which a flag can stop, and of
    counts, which grow by 0 in a skipped step.
    """

    def __init__(self, skipped: Node) -> None:
        place = After(skipped)
        self._number = place.call(aten._to_copy.default, skipped, dtype=torch.float32)
        self._one = place.call(aten.rsub.Scalar, self._number, 1)
        self._order = {node: i for i, node in enumerate(skipped.graph.nodes)}

    def last(self, node: Node) -> Node:
        """Return the later one of `node` and the flag."""
        return max(node, self._one, key=self._order.__getitem__)

    def kept(self, new: Node, old: Node) -> Node | None:
        """Return `made`, or a new value, that is `old` in a skipped step; None if neither is possible."""
        if not _torch.is_getitem(new.target):
            return None
        listed, index = node_at(new, 0), cast(int, new.args[1])
        source: Any = listed.args[0]
        if listed.target is aten._foreach_add.Scalar and listed.args[1] == 1 and self._counts(listed):
            listed.target, listed.args = aten._foreach_add.Tensor, (source, self._one)
        if listed.target is aten._foreach_add.Tensor and listed.args[1] is self._one:
            return new if source[index] is old else None
        if not _torch.is_getitem(listed.target) or not _torch.is_fused_optimizer(source.target):
            return None
        kernel, entries = cast(Node, source), source.args[listed.args[1]]
        if self.last(kernel) is not kernel or entries[index] is not old:
            return None
        kernel.kwargs = {**kernel.kwargs, "found_inf": self._number}
        return new

    def _counts(self, added: Node) -> bool:
        """Return whether `whole`, which adds 1 to a list, can add a number that is known by then."""
        return self.last(added) is added and all(item.dtype.is_floating_point for item in meta.tensors(added) if item)


@dataclass
class After:
    """Inserts calls after a node, in order."""

    node: Node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call; its value is computed from the recorded ones."""
        graph, name = self.node.graph, getattr(target, "__name__", "call").split(".")[0]
        with graph.inserting_after(self.node):
            self.node = graph.create_node("call_function", target, args, kwargs, name)
        meta.recompute_value(self.node)
        return self.node

    def size(self, node: Node, order: int, wide: torch.dtype) -> Node:
        """A norm of a tensor, in float32 or wider."""
        return self._cast(self.call(aten.linalg_vector_norm.default, node, order, **_dtype(node)), wide)

    def sizes(self, nodes: Sequence[Node], wide: torch.dtype) -> list[Node]:
        """The 2-norms of tensors of one dtype."""
        norms = self.call(aten._foreach_norm.Scalar, list(nodes), 2, **_dtype(nodes[0]))
        return [self._cast(self.call(_torch.GETITEM, norms, i), wide) for i in range(len(nodes))]

    def _cast(self, node: Node, wide: torch.dtype) -> Node:
        return node if meta.one_tensor(node).dtype == wide else self.call(aten._to_copy.default, node, dtype=wide)


def _dtype(node: Node) -> dict[str, torch.dtype]:
    return {"dtype": torch.float32} if meta.one_tensor(node).dtype in _HALF else {}
