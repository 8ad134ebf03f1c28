"""The only place that touches `node.meta`: what a node makes, where in the user's code, in which pass of autograd."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..layout import Layout

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (
    os.path.dirname(torch.__file__) + os.sep,
    *(os.path.join(_ROOT, d) + os.sep for d in ("_torch", "capture", "graph", "distributed", "runtime", "plan")),
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s+(?P<code>[^\n]+)')


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
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True for row-major strides (dims of size 1 do not count)."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The TensorMeta of a real or fake tensor."""
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device))


def with_shape(found: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    """A TensorMeta of another shape with the same order of dims in memory, dense."""
    if shape == found.shape:
        return found
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (found.stride[d], -d)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return TensorMeta(shape, tuple(strides), found.dtype, found.device)


def lie_alike(one: TensorMeta, other: TensorMeta) -> bool:
    """True for tensors of one shape whose elements lie in memory in the same way (dims of size 1 do not count)."""
    pairs = zip(one.shape, one.stride, other.stride, strict=True)
    return one.shape == other.shape and all(a == b or size == 1 for size, a, b in pairs)


def value(node: Node) -> Any:
    """The fake value the tracer recorded: a tensor, a tuple or list of them, a number, or None."""
    return node.meta.get("val")


def set_value(node: Node, new: Any) -> None:
    """Record what `node` makes."""
    node.meta["val"] = new
    node.meta.pop("starts", None)
    node.meta.pop("rule", None)


def known_rule(node: Node) -> Any:
    """What `set_known_rule` noted, until `node` makes something else; copies of it do not have it."""
    return node.meta.get("rule")


def set_known_rule(node: Node, known: Any) -> None:
    """Note what was found for `node`: a search plans one graph many times."""
    node.meta["rule"] = known


def set_made_again(node: Node) -> None:
    """Record what `node` makes of what its operands make now, by running it on the values of the trace.

    Raises:
        Exception: whatever the operation raises.
    """
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        replace_value(node, cast(Any, node.target)(*args, **kwargs))


def replace_value(node: Node, new: Any) -> None:
    """Record that `node` makes something else than before."""
    set_value(node, new)
    node.meta.pop("wholestep_tensors", None)


def tensors(node: Node) -> tuple[TensorMeta | None, ...]:
    """One TensorMeta for each output of `node`; None where an output is no tensor."""
    stored = node.meta.get("wholestep_tensors")
    if stored is None:
        made = value(node)
        flat = [x for item in _opened(made) for x in _opened(item)]
        stored = tuple(meta_of(item) if isinstance(item, torch.Tensor) else None for item in flat)
        node.meta["wholestep_tensors"] = stored
    return stored


def whole_shapes(node: Node) -> tuple[tuple[int, ...] | None, ...]:
    """Global shapes of the tensors that `node` makes, in a local graph too; None where the trace recorded none."""
    flat = [x for item in _opened(value(node)) for x in _opened(item)]
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in flat)


def _opened(item: Any) -> Sequence[Any]:
    return cast(Sequence[Any], item) if isinstance(item, (tuple, list)) else (item,)


def tensor(node: Node) -> TensorMeta | None:
    """The TensorMeta of a node that makes one tensor, else None."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return None
    found = node.meta.get("wholestep_tensors") or tensors(node)
    return found[0] if len(found) == 1 else None


def traced_stride(node: Node) -> tuple[int, ...] | None:
    """The strides in the trace of the one tensor `node` makes, whole or some of its rows; None where it makes another.

    Rows that lie one after the other have the strides of the whole.
    """
    traced, here = value(node), tensor(node)
    if not isinstance(traced, torch.Tensor) or here is None or traced.dim() != len(here.shape):
        return None
    stride = tuple(traced.stride())
    if tuple(traced.shape) == here.shape:
        return stride
    rows = tuple(traced.shape[1:]) == here.shape[1:] and in_rows(meta_of(traced))
    return stride if rows and not is_loose(node) and lie_alike(here, replace(here, stride=stride)) else None


def in_rows(found: TensorMeta) -> bool:
    """True where each row lies in a stretch of memory of its own, one row after the other."""
    return bool(found.stride) and found.stride[0] == max(found.stride) and min(found.stride) > 0


def with_stride(made: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """`made` itself if it has these strides (dims of size 1 do not count), else a copy that has them."""
    if all(a == b or size == 1 for a, b, size in zip(made.stride(), stride, made.shape, strict=True)):
        return made
    if not overlaps(made.shape, stride):
        return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)
    extent = 1 + sum((n - 1) * step for n, step in zip(made.shape, stride, strict=True))
    places = torch.arange(extent, device=made.device).as_strided(made.shape, stride)
    return made.new_empty(extent).index_put_((places,), made).as_strided(made.shape, stride)


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True where several elements lie at one place in memory."""
    reach = 0
    if 0 in shape:
        return False
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size > 1 and step <= reach:
            return True
        reach += max(size - 1, 0) * step
    return False


def stretch(node: Node) -> int:
    """Number of the stretch between two settings of the random number generator in which the node was traced."""
    return int(node.meta.get("custom", {}).get("stretch", 0))


def is_backward(node: Node) -> bool:
    """True for a node that autograd made while running a backward."""
    return bool(node.meta.get("custom", {}).get("backward"))


def set_backward(node: Node) -> None:
    """Say that `node` runs in the backward, whatever made the one it is a copy of."""
    node.meta["custom"] = {**node.meta.get("custom", {}), "backward": True}


def module_path(node: Node) -> str:
    """Path of the module whose forward made the node; empty outside any."""
    return str(node.meta.get("custom", {}).get("module", ""))


def source_line(node: Node) -> str:
    """`file:line  code` of the user's line that made the node; empty when none is known."""
    line = node.meta.get("custom", {}).get("line")
    return show_line(*line) if line else ""


def show_line(file: str, number: int) -> str:
    """`file:line  code`."""
    return f"{file}:{number}  {linecache.getline(file, number).strip()}".rstrip()


def is_users(file: str) -> bool:
    """True for a source file that belongs neither to torch nor to wholestep's own stages."""
    return not any(part in file for part in _OURS) and not file.startswith("<")


def last_user_frame(stack: str) -> str:
    """The innermost frame outside torch and wholestep in a formatted stack, as `file:line  code`."""
    frames = list(_FRAME.finditer(stack))
    own = [f for f in frames if is_users(f["file"])]
    frame = (own or [None])[-1]
    return f"{frame['file']}:{frame['line']}  {frame['code'].strip()}" if frame else ""


def set_tensors(node: Node, made: Sequence[TensorMeta | None]) -> None:
    """Record the shapes of what `node` makes where no fake value exists."""
    node.meta["wholestep_tensors"] = tuple(made)


def picked(item: Node) -> slice:
    """Which of the flat outputs of its operand a getitem picks: one, or of an op that makes lists, one list."""
    source, index = cast(tuple[Node, int], item.args)
    if not isinstance(value(source), (list, tuple)):
        return slice(index, index + 1)
    made, starts = cast(Sequence[Any], value(source)), source.meta.get("starts")
    if starts is None:
        starts = source.meta["starts"] = [0, *accumulate(map(flat_length, made))]
    index %= len(made)
    return slice(starts[index], starts[index + 1])


def flat_length(item: Any) -> int:
    """How many flat outputs one item of a recorded value stands for."""
    return len(_opened(item))


def set_layouts(node: Node, layouts: Sequence[Layout]) -> None:
    """Record the layout of each output."""
    node.meta["wholestep_layouts"] = tuple(layouts)


def layouts(node: Node) -> tuple[Layout, ...]:
    """The layouts recorded by `set_layouts`, empty if none were."""
    return node.meta.get("wholestep_layouts", ())


def set_ranked(node: Node) -> None:
    """Record that arguments of `node` hold numbers that differ between ranks (`layout.Extent`)."""
    node.meta["wholestep_ranked"] = True


def is_ranked(node: Node) -> bool:
    """True after `set_ranked`."""
    return bool(node.meta.get("wholestep_ranked"))


def set_rests(node: Node, rests: bool) -> None:
    """Record whether what a node of a local graph computes follows from parameters and complete gradients alone."""
    node.meta["wholestep_rests"] = rests


def rests(node: Node) -> bool:
    """What `set_rests` recorded; False before."""
    return bool(node.meta.get("wholestep_rests"))


def set_loose(node: Node, loose: bool) -> None:
    """Record whether the strides of what `node` makes on a rank may differ from those recorded."""
    node.meta["wholestep_loose"] = loose


def is_loose(node: Node) -> bool:
    """What `set_loose` recorded; False before."""
    return bool(node.meta.get("wholestep_loose"))


def set_again(node: Node) -> None:
    """Record that `node` makes again what another node has made."""
    node.meta["wholestep_again"] = True


def is_again(node: Node) -> bool:
    """True after `set_again`."""
    return bool(node.meta.get("wholestep_again"))


def copy_origin(source: Node, target: Node) -> None:
    """Say that `target` comes from the same place in the user's code and the same pass of autograd as `source`."""
    if "custom" in source.meta:
        target.meta["custom"] = source.meta["custom"]


def copy(source: Node, target: Node) -> None:
    """Give `target` everything recorded about `source`."""
    target.meta.update(source.meta)
    target.meta.pop("rule", None)


def example(node: Node) -> Any:
    """What dynamo recorded that a node of its graph makes: a fake tensor, a number that may be symbolic, or None."""
    return node.meta.get("example_value")


def share_notes(source: GraphModule, target: GraphModule) -> None:
    """Give the module `target` what is recorded about the module `source`."""
    target.meta.update(source.meta)
