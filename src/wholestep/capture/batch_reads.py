"""Guards on tensor values that a step reads during its capture and that depend on integers of the batch only.

A step may read padding masks, token ids, lengths and sizes (`if mask.all():`, `sizes.tolist()`): the value is computed
from the real batch, and the program applies to batches with the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.graph import Input
from ..graph.nodes import copy_node, drop_dead, is_mutating, operands, reached
from ..graph.op_kinds import COUNTS_ROWS
from ..rules.registry import is_random

READS: dict[Any, str] = {
    torch.Tensor.item: "item()", torch.Tensor.tolist: "tolist()", torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy()", torch.Tensor.__dlpack__: "DLPack", torch.Tensor.__contains__: "`in`",
    torch.Tensor.__bool__: "bool(), which `if`, `while` and `and` call", torch.Tensor.is_nonzero: "is_nonzero()",
    torch.Tensor.__float__: "float()", torch.Tensor.__int__: "int()", torch.Tensor.__complex__: "complex()",
    torch.Tensor.__index__: "use as an index", torch.is_nonzero: "is_nonzero()", _torch.ASSERT: "an assertion",
}  # fmt: skip


def value_read(text: str, next_step: str, where: str = "") -> CaptureError:
    """Return the error for a step that reads a value that is known only when it runs."""
    needed = "a step whose operations do not depend on values: one graph is captured and run for every batch"
    error = CaptureError(text, needed, next_step, where)
    error.reads_value = True
    return error


def read_refused(function: Any, tensor: torch.Tensor) -> CaptureError:
    """Return the error for a step that calls a function of `READS`."""
    how = READS[function]
    return value_read(
        f"the step reads the value of a tensor of shape {tuple(tensor.shape)} with {how} while it is being captured",
        "return the tensor and read it after the call, or choose with torch.where; "
        "wholestep.callback(fn, tensor) calls fn with its value in each step"
        + ("; a function of arrays can be an op: torch.library.custom_op" if how == "numpy()" else "")
        + ("; item() and tolist() give numbers of rows to cut by" if how == "int()" else ""),
    )


@dataclass(frozen=True)
class Read:
    """One value that a step read, and the source line. `counts`: it is the number of rows that a mask picks."""

    expected: torch.Tensor
    where: str
    counts: bool = False


@dataclass(frozen=True)
class ReadValues:
    """The values that a step read: `module` computes `reads`, in order, from the inputs `names`."""

    module: GraphModule
    names: tuple[str, ...]
    reads: tuple[Read, ...]

    def changed(self, batch: Mapping[str, Any]) -> Read | None:
        """Return the first value that differs for this batch, if there is one."""
        values = _run(self.module, [batch[name] for name in self.names])
        return next((r for r, now in zip(self.reads, values, strict=True) if not _same(r.expected, now)), None)


@dataclass
class Reader:
    """Answers reads during a trace. `inputs`: the graph's, to which it adds numbers; `batch`: real tensors, by name."""

    inputs: Sequence[Input]
    batch: Mapping[str, Any]
    reads: list[Read] = field(default_factory=list[Read])
    _nodes: list[Node] = field(default_factory=list[Node])
    _root: Any = None

    def known(self, tensor: torch.Tensor, where: str, counts: bool = False) -> torch.Tensor | None:
        """Return the real value of a traced tensor that depends on integers of the batch only, else None."""
        traced = _torch.traced_node(tensor.clone())  # a copy: later in-place ops do not change it
        value = None if traced is None else self.now(*traced, floats=False)
        if traced is not None and value is not None:
            self._nodes.append(traced[0])
            self.reads.append(Read(value, where, counts))
        return value

    def now(self, node: Node, root: Any, floats: bool = True) -> torch.Tensor | None:
        """Return the value in this call of what depends on the batch only; without `floats`, on its integers only."""
        self._root = root
        part = self._part([node], floats)
        return None if part is None else _run(part[0], [*part[1].values()])[0]

    def values(self) -> ReadValues | None:
        """Return the values read so far, as a program that computes them for other batches; None if there are none."""
        part = self._part(self._nodes) if self._nodes else None
        return None if part is None else ReadValues(part[0], (*part[1],), tuple(self.reads))

    def _part(
        self, targets: Sequence[Node], floats: bool = False
    ) -> tuple[GraphModule, dict[str, torch.Tensor]] | None:
        """Extract the program that computes `targets` from those that it needs; None if it needs other inputs."""
        tensors = {n: t for n, t in self.batch.items() if isinstance(t, torch.Tensor) and not t.is_meta}
        given = {n: t for n, t in tensors.items() if floats or not (t.is_floating_point() or t.is_complex())}
        new, copied = Graph(), dict[Node, Node]()
        spoiled: set[int] = set()  # storages with unknown contents
        inputs = {name: new.placeholder(f"given_{i}") for i, name in enumerate(given)}
        pairs = zip(targets[0].graph.find_nodes(op="placeholder"), self.inputs, strict=False)
        copied |= {node: inputs[spec.name] for node, spec in pairs if spec.name in inputs}
        if any(n.op == "placeholder" and n not in copied for node in reached(targets) for n in operands(node)):
            return None  # as of a learning rate, which some optimizers read for each parameter
        for node in targets[0].graph.nodes:
            if node.op == "get_attr":
                copied[node] = copy_node(node, new, copied.__getitem__)
            elif node.op == "call_function":
                reads = {key for n in operands(node) for key in _storages(n)}
                new_here = is_random(node) or node.target in COUNTS_ROWS  # whose numbers are symbols of the trace
                if all(n in copied for n in operands(node)) and not reads & spoiled and not new_here:
                    copied[node] = copy_node(node, new, copied.__getitem__)
                elif is_mutating(node):
                    spoiled |= reads
        if any(node not in copied for node in targets):
            return None
        new.output(tuple(copied[node] for node in targets))
        drop_dead(new, is_mutating)
        for name in [name for name, node in inputs.items() if not node.users]:
            new.erase_node(inputs[name])
            del given[name]
        return GraphModule(self._root, new), given


class _Copying(Interpreter):
    """Interpreter that copies constants, so that in-place ops do not change real tensors."""

    def fetch_attr(self, target: str) -> Any:
        constant = super().fetch_attr(target)
        return constant.clone() if isinstance(constant, torch.Tensor) else constant


def _run(module: GraphModule, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    with _torch.outside_of_trace(), torch.no_grad():
        return _Copying(module).run(*[t.detach().clone() for t in tensors])


def _storages(node: Node) -> set[int]:
    values = meta.value(node)
    items = cast(Sequence[Any], values) if isinstance(values, (tuple, list)) else (values,)
    return {_torch.storage_key(t) for t in items if isinstance(t, torch.Tensor)}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))
