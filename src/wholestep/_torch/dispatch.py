"""Records an op of a trace without the detours of `ProxyTorchDispatchMode`, which take twice what the op itself does.

What it does for ops like any other: constants, ops in other terms, values that are read and views made in place are
left to torch's own way. The graph is the same, node for node.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor

from .op_schemas import is_op, set_operands

_DEVICE = torch.ops.prim.device.default
_SPECIAL = {
    _DEVICE,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.size.default,
    torch.ops.aten.stride.default,
    torch.ops.aten.storage_offset.default,
}
_SPECIAL_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_SEQUENCES: set[Any] = {tuple, list}
_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_own: Any = proxy_tensor
_kind: Callable[[Any], Any] = type
_NEEDED = ("_ProxyTensor", "extract_val", "track_tensor_tree")


class _OwnWay(Exception):
    """Torch's own way is to be taken."""


@contextlib.contextmanager
def quick_dispatch(forms: Mapping[Any, Any]) -> Generator[None]:
    """Inside, what make_fx traces is recorded the quick way, and fake tensors are computed without dynamo's guard.

    Both modes' `__torch_dispatch__` are replaced; `forms` are the ops that are given in other terms. A torch without
    the names that this needs keeps its own.
    """
    modes: tuple[Any, ...] = (proxy_tensor.ProxyTorchDispatchMode, FakeTensorMode)
    before = [mode.__dict__["__torch_dispatch__"] for mode in modes]
    if all(hasattr(_own, name) for name in _NEEDED):
        modes[0].__torch_dispatch__ = _quick(before[0], forms)
        modes[1].__torch_dispatch__ = _innermost(before[1])
    try:
        yield
    finally:
        for mode, original in zip(modes, before, strict=True):
            mode.__torch_dispatch__ = original


def _innermost(function: Any) -> Any:
    """What decorators are around, of those that say so."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _quick(own_way: Callable[..., Any], forms: Mapping[Any, Any]) -> Callable[..., Any]:
    """The dispatch of one trace; `own_way` is torch's, for traces inside it too."""
    ours: Any = None
    plain: dict[Any, bool] = {}

    def dispatch(mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        nonlocal ours
        if op is _DEVICE and type(args[0]) is FakeTensor:
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        ours = ours or mode
        if op not in plain:
            plain[op] = _is_plain(op, forms)
        named: dict[str, Any] = kwargs or {}
        try:
            if mode is not ours or not plain[op]:
                raise _OwnWay
            nodes = _nodes(mode, args), {key: _nodes(mode, value) for key, value in named.items()}
        except _OwnWay:
            return own_way(mode, op, types, args, kwargs)
        return _recorded(mode, op, (args, named), nodes)

    return dispatch


def _is_plain(op: Any, forms: Mapping[Any, Any]) -> bool:
    """An op that is one node and whose results follow from shapes."""
    if not is_op(op) or op in _SPECIAL or op in forms or _SPECIAL_TAGS & set(op.tags):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _nodes(mode: Any, value: Any) -> Any:
    """`value` with the nodes of its traced tensors."""
    kind = _kind(value)
    if kind is FakeTensor:
        slot = mode.tracer.tensor_tracker.get(value)
        if slot is None or slot.constant is not None:
            raise _OwnWay
        return slot.proxy.node
    if kind in _SEQUENCES:
        return kind([_nodes(mode, v) for v in value])
    if kind not in _VALUES:
        raise _OwnWay
    return value


def _recorded(mode: Any, op: Any, called: tuple[Any, Any], nodes: tuple[Any, Any]) -> Any:
    """The results of `op`, each known to the tracer by a node with a copy of its shape."""
    tracer, node = mode.tracer, _added(mode.tracer.graph, op, nodes)
    out: Any = op(*called[0], **called[1])
    if _kind(out) is FakeTensor:
        _track(tracer, node, out)
    elif _kind(out) in _SEQUENCES and all(_kind(v) is FakeTensor for v in out):
        for at, value in enumerate(out):
            _track(tracer, _added(tracer.graph, operator.getitem, ((node, at), {})), value)
        node.meta["val"] = _own.extract_val(out)
    elif out is not None:
        _own.track_tensor_tree(out, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return out


def _added(graph: Any, op: Any, nodes: tuple[Any, Any]) -> torch.fx.Node:
    """A new node with the notes of `note_on_nodes`; of what torch notes besides, nothing here is read."""
    packet = getattr(op, "overloadpacket", op)
    node = graph.create_node("call_function", op, (), {}, graph._target_to_str(packet.__name__))
    set_operands(node, *nodes)
    notes = fx_traceback.current_meta.get("custom")
    if notes:
        node.meta["custom"] = notes
    return node


def _track(tracer: Any, node: torch.fx.Node, value: Any) -> None:
    node.meta["val"] = _own.extract_val(value)
    tracer.tensor_tracker[value] = _own._ProxyTensor(torch.fx.Proxy(node, tracer), None)
