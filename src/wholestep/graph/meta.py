"""Access to `node.meta`, for all other modules: a node's values, source line, module, and autograd phase."""

from __future__ import annotations

import linecache
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import _torch
from .origin import is_user_file
from .stage_part import StageBlock

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s+(?P<code>[^\n]+)')

_NO_ORIGIN: dict[str, object] = {}
T = TypeVar("T")
Rows = tuple[str, tuple[int | None, ...]]
Outputs = tuple[tuple[str, int], ...]
KnownRule = tuple[Any, ...]
Along = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""A sort by name, and the dim of each output of a node that has rows in its order."""


@dataclass(frozen=True)
class TensorMeta:
    """Shape, stride, dtype and device of one tensor; `shape` and `stride` count elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements: a plain number, which prices programs."""
        return int(self.numel) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True for row-major strides (ignoring dims of size 1)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return the TensorMeta of a real or fake tensor."""
    shape, stride = _torch.plain_numbers(tensor.shape), _torch.plain_numbers(tensor.stride())
    numbers = (*shape, *stride)
    make = _equal_is_one if all(type(n) is int for n in numbers) else TensorMeta  # a symbol would be compared
    return make(shape, stride, tensor.dtype, str(tensor.device))


_equal_is_one = lru_cache(maxsize=4096)(TensorMeta)  # thousands of nodes have a few dozen


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of `shape`."""
    strides = accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


def contiguous(shape: Sequence[int], template: TensorMeta) -> TensorMeta:
    """Return a row-major TensorMeta of `shape` with the dtype and device of `template`."""
    return TensorMeta(tuple(shape), row_major(shape), template.dtype, template.device)


def with_shape(tensor_meta: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    """Return a dense TensorMeta of another shape with the same order of dims in memory."""
    if shape == tensor_meta.shape:
        return tensor_meta
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (tensor_meta.stride[d], -d)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return TensorMeta(shape, tuple(strides), tensor_meta.dtype, tensor_meta.device)


def same_strides(first: TensorMeta, second: TensorMeta) -> bool:
    """Return whether two tensors have the same shape and strides (ignoring dims of size 1)."""
    pairs = zip(first.shape, first.stride, second.stride, strict=True)
    return first.shape == second.shape and all(a == b or size == 1 for size, a, b in pairs)


def value(node: Node) -> Any:
    """Return the fake value that the tracer recorded: a tensor, a tuple or list of tensors, a number, or None."""
    return node.meta.get("val")


def set_value(node: Node, new: Any) -> None:
    """Record the fake value of `node`."""
    node.meta["val"] = new
    node.meta.pop("starts", None)
    node.meta.pop("rule", None)


def recompute_value(node: Node) -> None:
    """Recompute the fake value of `node` from the fake values of its operands."""
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        replace_value(node, cast(Any, node.target)(*args, **kwargs))


def replace_value(node: Node, new: Any) -> None:
    """Record a new fake value of `node`."""
    set_value(node, new)
    node.meta.pop("wholestep_tensors", None)


def tensors(node: Node) -> tuple[TensorMeta | None, ...]:
    """Return a TensorMeta for each flat output of `node`; None for an output that is no tensor."""
    stored = node.meta.get("wholestep_tensors")
    if stored is None:
        recorded = value(node)
        flat = [x for item in _opened(recorded) for x in _opened(item)]
        stored = tuple(meta_of(item) if isinstance(item, torch.Tensor) else None for item in flat)
        node.meta["wholestep_tensors"] = stored
    return stored


def global_shapes(node: Node) -> tuple[tuple[int, ...] | None, ...]:
    """Return the global shapes of the outputs of `node`, also in a local graph; None if the trace recorded none."""
    flat = [x for item in _opened(value(node)) for x in _opened(item)]
    return tuple(_torch.plain_numbers(x.shape) if isinstance(x, torch.Tensor) else None for x in flat)


def _opened(item: Any) -> Sequence[Any]:
    return cast(Sequence[Any], item) if isinstance(item, (tuple, list)) else (item,)


def tensor(node: Node) -> TensorMeta | None:
    """Return the TensorMeta of a node with one tensor output, else None."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return None
    metas = node.meta.get("wholestep_tensors") or tensors(node)
    return metas[0] if len(metas) == 1 else None


def one_tensor(node: Node) -> TensorMeta:
    """Return the TensorMeta of a node with one tensor output."""
    tensor_meta = tensor(node)
    assert tensor_meta is not None, f"%{node.name} is one tensor"
    return tensor_meta


def size_bytes(node: Node) -> int:
    """Return the bytes of all outputs of `node`."""
    return sum(tensor_meta.size_bytes for tensor_meta in tensors(node) if tensor_meta is not None)


def traced_stride(node: Node) -> tuple[int, ...] | None:
    """Return the traced strides of the output of `node`, if it has the traced shape or is a shard of separate rows."""
    traced, local = value(node), tensor(node)
    if not isinstance(traced, torch.Tensor) or local is None or traced.dim() != len(local.shape):
        return None
    stride = _torch.plain_numbers(traced.stride())
    if _torch.plain_numbers(traced.shape) == local.shape:
        return stride
    full = meta_of(traced)
    rows = full.shape[1:] == local.shape[1:] and rows_are_separate(full)
    strided = is_strided(node) or not same_strides(local, replace(local, stride=stride))
    return stride if rows and not strided else None


def rows_are_separate(tensor_meta: TensorMeta) -> bool:
    """Return whether rows are consecutive, separate ranges of memory."""
    return bool(tensor_meta.stride) and tensor_meta.stride[0] == max(tensor_meta.stride) and min(tensor_meta.stride) > 0


def with_stride(source: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return `source` if it has these strides (ignoring dims of size 1), else a copy with them."""
    strides = source.stride()
    if strides == stride or all(a == b or size == 1 for a, b, size in zip(strides, stride, source.shape, strict=True)):
        return source
    if not overlaps(source.shape, stride):
        return torch.empty_strided(source.shape, stride, dtype=source.dtype, device=source.device).copy_(source)
    length = span(source.shape, stride)
    places = torch.arange(length, device=source.device).as_strided(source.shape, stride)
    return source.new_empty(length).index_put_((places,), source).as_strided(source.shape, stride)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last, in memory."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether several elements share an address."""
    reach = 0
    if 0 in shape:
        return False
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size > 1 and step <= reach:
            return True
        reach += max(size - 1, 0) * step
    return False


def rng_segment(node: Node) -> int:
    """Return the segment of the trace, between two resets of the random generator, that has the node."""
    return int(node.meta.get("custom", {}).get("rng_segment", 0))


def origin(node: Node) -> Mapping[str, object]:
    """Return what the tracer notes of where a node comes from; one mapping for all nodes of the same origin."""
    return node.meta.get("custom", _NO_ORIGIN)


def is_backward(node: Node) -> bool:
    """Return whether autograd made the node in a backward."""
    return bool(node.meta.get("custom", {}).get("backward"))


def set_backward(node: Node) -> None:
    """Mark `node` as part of the backward."""
    node.meta["custom"] = {**node.meta.get("custom", {}), "backward": True}


def module_path(node: Node) -> str:
    """Return the path of the module whose forward made the node, or ""."""
    return str(node.meta.get("custom", {}).get("module", ""))


def set_module_path(node: Node, path: str) -> None:
    """Change the path of the module that made the node, if it has one."""
    if path != module_path(node):
        node.meta["custom"] = {**node.meta["custom"], "module": path}


def source_line(node: Node) -> str:
    """Return `file:line  code` of the user's line that made the node, or ""."""
    line = node.meta.get("custom", {}).get("line")
    return show_line(*line) if line else ""


def line_behind(graph: Graph, text: str) -> str:
    """Return the user's line of the node that a line of a graph's text shows, or ""."""
    name = text.strip().removeprefix("%").split(" ")[0]
    return next((source_line(node) for node in graph.nodes if node.name == name), "")


def lines_in_order(graph: Graph) -> list[str]:
    """Return the user's line of each op that makes a tensor, in order: no sizes, in which ranks may differ."""
    calls = (node for node in graph.nodes if node.op == "call_function" and tensor(node) is not None)
    return list(filter(None, map(source_line, calls)))


def show_line(file: str, number: int) -> str:
    """Format a source line as `file:line  code`."""
    return f"{file}:{number}  {linecache.getline(file, number).strip()}".rstrip()


def last_user_frame(stack: str) -> str:
    """Return the innermost frame outside torch and wholestep in a formatted stack, as `file:line  code`, or ""."""
    frames = [f for f in _FRAME.finditer(stack) if is_user_file(f["file"])]
    frame = frames[-1] if frames else None
    return f"{frame['file']}:{frame['line']}  {frame['code'].strip()}" if frame else ""


def user_frame_of(error: BaseException) -> str:
    """Return the innermost frame of the traceback of `error` that is the user's, as `file:line  code`, or ""."""
    return last_user_frame("".join(traceback.format_tb(error.__traceback__)))


def set_tensors(node: Node, metas: Iterable[TensorMeta | None]) -> None:
    """Record the TensorMeta of each flat output of `node`."""
    node.meta["wholestep_tensors"] = tuple(metas)


def item_starts(node: Node) -> Sequence[int]:
    """Return where each item of the recorded value of `node` starts in its flat outputs, and their number."""
    starts = node.meta.get("starts")
    if starts is None:
        starts = node.meta["starts"] = [0, *accumulate(len(_opened(item)) for item in _opened(value(node)))]
    return starts


def picked(item: Node) -> slice:
    """Return the flat outputs of its operand that a getitem selects: one, or a list of an op that returns lists."""
    source, index = cast(tuple[Node, int], item.args)
    if not isinstance(value(source), (list, tuple)):
        return slice(index, index + 1)
    starts = item_starts(source)
    index %= len(starts) - 1
    return slice(starts[index], starts[index + 1])


def _entry(key: str, unset: T) -> tuple[Callable[[Node, T], None], Callable[[Node], T]]:
    """Return functions that set and get a value of a node, which is `unset` before."""

    def put(node: Node, value: T) -> None:
        node.meta[key] = value

    def get(node: Node) -> T:
        return node.meta.get(key, unset)

    return put, get


set_batch_invariant, is_batch_invariant = _entry("wholestep_batch_invariant", False)
"""Whether a node of a local graph depends on parameters, state and complete gradients only."""

set_strided, is_strided = _entry("wholestep_strided", False)
"""Whether the output of a node on a rank may have other strides than recorded."""

set_recomputed, is_recomputed = _entry("wholestep_again", False)
"""Whether a node recomputes the value of another node."""

set_received_of_batch, is_received_of_batch = _entry("wholestep_received_of_batch", False)
"""Whether a node receives what depends on the batch from another stage."""

set_late, is_late = _entry("wholestep_late", False)
"""Whether a node completes the last call, or is an input that nothing else writes into (`passes/cross_step.py`)."""
set_kept, is_kept = _entry("wholestep_kept", False)
"""Whether a node of a local graph stays where nothing reads it: it sends, or advances a random stream."""

set_stage, stage = _entry("wholestep_stage", cast("int | None", None))
"""Which coordinate of the axis of stages runs the node of a local graph; None for all."""

set_owner, owner = _entry("wholestep_owner", cast("int | None", None))
"""Which coordinate of the axis of owners runs the node of a local graph; None for all."""

set_piece, piece = _entry("wholestep_piece", cast("int | None", None))
"""For which piece of the batch a node outside of loops runs what the body of a loop says; None for most."""

set_block, block = _entry("wholestep_block", cast("StageBlock | None", None))
"""The block of a stage whose run a node is a part of, or calls, as it was priced; None for most."""

set_computes, computes = _entry("wholestep_computes", cast("Outputs | None", None))
"""For each output of a node of a local graph: the node of the planned graph that has it, in the layout that the plan
says, and which of its outputs it is.
"""

set_rows, rows = _entry("wholestep_rows", cast("Rows | None", None))
"""The sort in whose order outputs of a node have rows (`plan.rows_in_any_order`), and the dim of each that has them."""

set_along, along = _entry("wholestep_along", cast("Along | None", None))
"""The axis whose ranks have groups in a node (`plan.rows_in_any_order`), and the states of operands and outputs."""

set_known_rule, known_rule = _entry("rule", cast("KnownRule | None", None))
"""The sharding rule that a node has, and its arguments then: a search plans one graph many times. A new value of the
node clears it, copies do not have it.
"""


def runs_on_first(node: Node) -> bool:
    """Return whether ranks at the first coordinate of the axis of owners run the node."""
    return owner(node) in (None, 0)


def set_part_of(node: Node, op: str) -> None:
    """Record the captured op that was decomposed into `node` and others."""
    node.meta["wholestep_part_of"] = op


def part_of(node: Node) -> str:
    """Return the name of the captured op that was decomposed into `node` and others; its own if none was."""
    return node.meta.get("wholestep_part_of", node.name)


def copy_origin(source: Node, target: Node) -> None:
    """Copy source line, module and autograd phase from `source` to `target`."""
    if "custom" in source.meta:
        target.meta["custom"] = source.meta["custom"]


def copy(source: Node, target: Node) -> None:
    """Copy everything recorded about `source` to `target`, except the cached rule."""
    target.meta.update(source.meta)
    target.meta.pop("rule", None)


def example(node: Node) -> Any:
    """Return the example value that dynamo recorded: a fake tensor, a number that may be symbolic, or None."""
    return node.meta.get("example_value")


def share_notes(source: GraphModule, target: GraphModule) -> None:
    """Copy the metadata of the module `source` to `target`."""
    target.meta.update(source.meta)
