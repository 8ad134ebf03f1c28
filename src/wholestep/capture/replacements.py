"""Traceable replacements for functions of torch that read tensor values on the host.

tests/unit/test_replacements.py compares each row with its original over several steps, forward and backward. Functions
in private modules of torch are in `_torch/replaced.py`.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from ..graph.ops import CTC_LOSS
from ..graph.origin import warn_once
from .stand_ins import Unread

aten = torch.ops.aten
Known = Callable[[Tensor], Tensor | None]


def form_of(function: Any) -> Callable[..., Any] | None:
    """Return the replacement of a torch function; None if it can be traced itself.

    It is called with `(original, known, *args, **kwargs)`; `known` gives the real value of a traced tensor that
    depends on integers of the batch only, else None.
    """
    try:
        return _FORMS.get(function)
    except TypeError:  # unhashable, hence not a function of torch
        return None


def _depends_on_rank(part: str, path: str) -> NoReturn:
    problem = f"the step uses {part} of torch.linalg.lstsq, whose sizes or values depend on the rank of the matrix"
    needed = "its solution only"
    raise CaptureError(problem, needed, "use `.solution`, and compute residuals as `(A @ x - b).square().sum(-2)`")


def _lstsq(
    original: Any, value_of: Known, A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Least squares by the pseudo-inverse, which has the same least-norm solution and gradient."""
    vector = A.dim() == B.dim() + 1 and B.shape == A.shape[:-1]
    tolerance = torch.finfo(A.dtype).eps * max(A.shape[-2:]) if rcond is None else rcond
    inverse: Tensor = cast(Any, torch.linalg).pinv(A, rtol=0.0 if driver == "gels" else tolerance)
    solution = inverse @ (B.unsqueeze(-1) if vector else B)
    solution = solution.squeeze(-1) if vector else solution
    rest = [Unread(object, None, partial(_depends_on_rank, n), None) for n in ("residuals", "rank", "singular_values")]
    return cast(Any, torch).return_types.linalg_lstsq((solution, *rest))


def _index_fill(original: Any, value_of: Known, input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill` with a tensor value, whose backward in torch reads the distinct indices."""
    if not isinstance(value, Tensor):
        return original(input, dim, index, value)
    filled = torch.where(_filled(input, dim, index), value.to(input.dtype), input)
    return input.copy_(filled) if original is Tensor.index_fill_ else filled


def _filled(input: Tensor, dim: int, index: Tensor) -> Tensor:
    size = input.size(dim) if input.dim() else 1
    mask = torch.zeros(size, dtype=torch.bool, device=input.device).index_fill(0, index.reshape(-1), True)
    return mask.reshape([size if i == dim % input.dim() else 1 for i in range(input.dim())])


def _tensor_split(
    original: Any, value_of: Known, input: Tensor, tensor_indices_or_sections: Any = None, dim: int = 0, **named: Any
) -> Any:
    """`tensor_split` at points that are constants or depend on integers of the batch."""
    points = tensor_indices_or_sections
    if not isinstance(points, Tensor):
        sections = () if points is None else (points,)
        return original(input, *sections, dim=dim, **named)
    indices = _read(value_of, points, "split points", "tensor_split")
    return input.tensor_split(cast(Any, indices.tolist()), dim=dim)


def _repeat_interleave(
    original: Any, value_of: Known, input: Any, repeats: Any = None, dim: int | None = None, *,
    output_size: int | None = None,
) -> Tensor:  # fmt: skip
    """`repeat_interleave` with a number of output rows that depends on integers of the batch."""
    counts = input if repeats is None else repeats
    if isinstance(counts, Tensor) and output_size is None:
        rows = 1 if repeats is None or counts.numel() != 1 else (input.numel() if dim is None else input.size(dim))
        output_size = rows * int(
            _read(value_of, counts.sum(), "number of repeats", "repeat_interleave(output_size=None)")
        )
    if repeats is None:
        return original(input, output_size=output_size)
    return original(input, repeats, dim, output_size=output_size)


def _read(value_of: Known, tensor: Tensor, what: str, who: str) -> Tensor:
    value = value_of(tensor)
    if value is None:
        raise CaptureError(
            f"{who} is given a {what} that depends on values of tensors",
            "sizes from Python numbers or from integers of the batch: one graph is captured and run for every batch",
            "pass Python numbers or output_size=, or use masks",
        )
    return value


def _dense(original: Any, value_of: Known, *args: Any, **kwargs: Any) -> Any:
    """An embedding with a dense gradient: the size of a sparse gradient depends on the batch."""
    names = list(inspect.signature(original).parameters)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if arguments.get("sparse"):
        warn_once(
            "an embedding with sparse=True has a dense gradient in a compiled step: "
            "its values are the same, and it needs no optimizer for sparse gradients"
        )
    return original(**{**arguments, "sparse": False})


def _one_hot(original: Any, value_of: Known, input: Tensor, num_classes: int = -1) -> Tensor:
    """`one_hot` by a lookup, whose kernels refuse what is no class, as the original does."""
    out = original(input, num_classes)
    if _torch.inside_transform() or _is_place_below(input, out.shape[-1]):
        return out
    classes: Tensor = cast(Any, torch).arange(out.shape[-1], device=input.device)
    return (F.embedding(input, classes.unsqueeze(1)) == classes).long()


def _is_place_below(index: Tensor, size: int) -> bool:
    """Whether these are places in a dim of at most so many elements, by what computed them."""
    traced, pick = _torch.traced_node(index), None
    node = traced[0] if traced is not None else None
    while node is not None and node.target in _REARRANGED:
        node, pick = cast(Node, node.args[0]), node.args[1] if node.target is operator.getitem else pick
    first = _FINDS_PLACES.get(node.target) if node is not None else None
    if node is None or first is None or pick not in (None, 1):
        return False
    shape = meta.value(node.all_input_nodes[0]).shape
    dim: Any = node.kwargs.get("dim", node.args[first] if len(node.args) > first else None)
    dim = -1 if dim is None and pick == 1 else dim
    return bool(shape) and (math.prod(shape) if dim is None else shape[dim]) <= size


def _deep_copy(original: Any, value_of: Known, input: Tensor, memo: dict[int, Any]) -> Tensor:
    """The copy that `copy.deepcopy` makes of a tensor, which torch makes of its storage."""
    traced = _torch.is_fake(input) and input.is_leaf and input.grad is None
    return input.detach().clone().requires_grad_(input.requires_grad) if traced else original(input, memo)


_REARRANGED = (
    operator.getitem, aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default,
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor,
    aten.select.int, aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default,
)  # fmt: skip
_FINDS_PLACES: dict[Any, int] = {
    aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 9, aten.argmax.default: 1, aten.argmin.default: 1,
    aten.max.dim: 1, aten.min.dim: 1,
}  # fmt: skip
"""Ops that find places in a dim, with the position of that argument."""

_FORMS: dict[Any, Callable[..., Any]] = {  # each with the value that the original reads
    cast(Any, torch.linalg).lstsq: _lstsq,  # the rank of the matrix
    torch.index_fill: _index_fill, Tensor.index_fill: _index_fill,  # which indices differ, in the backward
    Tensor.index_fill_: _index_fill,
    torch.tensor_split: _tensor_split, Tensor.tensor_split: _tensor_split,  # the split points
    torch.repeat_interleave: _repeat_interleave, Tensor.repeat_interleave: _repeat_interleave,  # the number of repeats
    Tensor.__deepcopy__: _deep_copy,  # the bytes
    F.one_hot: _one_hot,  # whether all are classes
    F.embedding: _dense, F.embedding_bag: _dense,  # which rows the batch names
}  # fmt: skip


def fixed_sizes(
    value_of: Known, nonzero: Callable[[Tensor], Any], truth: Callable[..., bool | None]
) -> dict[Any, Callable[..., Any]]:
    """Return a table for the tracer: forms of ops whose result size depends on values. `nonzero` returns the places
    of a mask; NotImplemented where their number may be neither read nor a symbol. `truth` makes a branch of a value.
    """

    def read(x: Tensor, likely: bool | None = None) -> Any:
        value = value_of(x)
        if value is None:  # torch asks: questions of Python do not come here
            taken = truth(x, likely) if x.dtype is torch.bool else None
            return NotImplemented if taken is None else taken
        with _torch.outside_of_trace():
            return value.item()

    def masked_select(x: Tensor, mask: Tensor) -> Any:
        both = cast("list[Tensor]", torch.broadcast_tensors(x, mask))
        return NotImplemented if (rows := nonzero(both[1])) is NotImplemented else both[0][rows.unbind(1)]

    def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
        if not any(_is_mask(i) for i in indices):
            return NotImplemented
        places: list[Tensor | None] = []
        for i in indices:
            positions = nonzero(i) if i is not None and _is_mask(i) else None
            if positions is NotImplemented:
                return NotImplemented
            places += [i] if positions is None else positions.unbind(1)
        return aten.index.Tensor(x, places)

    def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        fewest = value_of((x.sum() - 1 if _is_empty(x) else x.max()).clamp(min=minlength - 1) + 1)
        if fewest is not None:
            with _torch.outside_of_trace():
                size = int(fewest)
        elif minlength and likely(((x >= 0) & (x < minlength)).all()):
            size, x = minlength, x.clamp(0, minlength - 1)  # where it is otherwise, all ranks hear of it at the end
        else:
            return NotImplemented
        if weights is None:
            return x.new_zeros(size, dtype=torch.int64).index_add(0, x, torch.ones_like(x, dtype=torch.int64))
        weights = weights if weights.dtype == torch.float32 else weights.double()
        return weights.new_zeros(size).index_add(0, x, weights)

    def unique_consecutive(x: Tensor, inverse: bool = False, counts: bool = False, dim: int | None = None) -> Any:
        flat = x.reshape(-1)
        begins = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
        positions = NotImplemented if _is_empty(x) or (dim is not None and x.dim() != 1) else nonzero(begins)
        if positions is NotImplemented:
            return NotImplemented
        first, end = cast(Tensor, positions[:, 0]), flat.new_full((1,), x.numel(), dtype=torch.int64)
        ends = torch.cat([first, end]).narrow(0, 1, first.shape[0])
        return flat[first], (begins.cumsum(0) - 1).view(x.shape), ends - first

    def unique(x: Tensor, sorted: bool = True, inverse: bool = False, counts: bool = False) -> Any:
        ordered, order = x.reshape(-1).sort(stable=True)
        runs = unique_consecutive(ordered)
        return runs if runs is NotImplemented else (runs[0], order.scatter(0, order, runs[1]).view(x.shape), runs[2])

    def asserted(x: Tensor, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
        holds = likely(x)
        if not (bool(x) if holds is None else holds):
            raise RuntimeError(message)

    def close(x: Tensor, other: Tensor, *tolerances: Any, compare: Callable[..., Any] = torch.isclose) -> Any:
        return read(compare(x, other, *tolerances).all(), likely=True)

    def equal(x: Tensor, other: Tensor) -> Any:
        return x.shape == other.shape and close(x, other, compare=torch.eq)

    likely = partial(truth, likely=True)
    return {
        aten._local_scalar_dense.default: read,
        aten._assert_async.default: asserted,
        aten._assert_async.msg: asserted,
        aten.allclose.default: close,
        aten.equal.default: equal,
        aten._unique2.default: unique,
        aten.unique_consecutive.default: unique_consecutive,
        aten.bincount.default: bincount,
        aten.nonzero.default: nonzero,
        aten.masked_select.default: masked_select,
        aten.index.Tensor: index,
        aten._ctc_loss.Tensor: _ctc_loss,
        aten._ctc_loss.default: _ctc_loss,
    }


def _is_empty(x: Tensor) -> bool:
    """Whether a tensor has no elements in each call: of rows that are counted, this would be a question."""
    return not isinstance(cast(object, x.numel()), torch.SymInt) and not x.numel()


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, blank: int = 0, zero_infinity: bool = False
) -> Any:
    return CTC_LOSS(log_probs, targets, torch.as_tensor(inputs), torch.as_tensor(lengths), blank, zero_infinity)
