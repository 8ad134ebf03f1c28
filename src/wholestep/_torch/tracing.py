"""Traces with make_fx: fake tensors, annotations on nodes, and settings of torch during a trace."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch._decomp import get_decompositions  # pyright: ignore[reportUnknownVariableType]  # torch leaves its result open
from torch._guards import SLoc
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental import recording, sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from .attributes import attributes_set, flags_set, forms_set, here_only
from .dispatch import quick_dispatch
from .op_schemas import FUSED
from .undo import undo

try:
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
except ImportError:  # graph modules generate code eagerly
    _LazyGraphModule, _use_lazy_graph_module = torch.fx.GraphModule, contextlib.nullcontext


_TRACE_LOGGERS = (
    "torch._subclasses.fake_tensor", "torch._subclasses.fake_impls", "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.recording", "torch.fx.experimental.symbolic_shapes", "torch._meta_registrations",
    "torch._decomp.decompositions", "torch._prims_common", "torch._dynamo", "torch._functorch",
)  # fmt: skip
_SYMBOL_LOGGERS = (sym_node.sym_node_log.name, recording.trace_shape_events_log.name)  # called for each sum of sizes
_OPTION = "_disable_torch_fn_metadata_mode"  # the mode counts torch functions by name
_WITHOUT_NAMES: Any = {_OPTION: True} if _OPTION in inspect.signature(make_fx).parameters else {}
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_aten = torch.ops.aten


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """`native_batch_norm` with the schema that declares the write into its running statistics. Same kernel."""
    if mean is None:
        return _aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return _aten._native_batch_norm_legit.default(x, weight, bias, mean, var, training, momentum, eps)


class _NoGuards(ShapeEnv):
    """A ShapeEnv of static shapes, which nothing guards: torch suspends guards for each tensor that it makes, and notes
    the user's line of each number that is read, for which it imports all that is not the user's.
    """

    def suppress_guards(self) -> Any:
        return contextlib.nullcontext()

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return SLoc(None, None), ""


def fake_mode() -> FakeTensorMode:
    """Return a fake mode with static shapes, in which scalars read by optimizers stay symbolic."""
    shape_env = _NoGuards(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    with forms_set([(traceback, "extract_stack", lambda *_: traceback.StackSummary())]):  # torch reads all its sources
        return FakeTensorMode(
            allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True
        )


def is_fake(value: object) -> bool:
    """Return whether a value is a fake tensor."""
    return isinstance(value, FakeTensor)


def known_constant(value: torch.Tensor) -> bool:
    """Return whether a traced tensor was created from a literal, so that its value is known."""
    return isinstance(value, FakeTensor) and value.constant is not None


def traced_node(value: torch.Tensor) -> tuple[torch.fx.Node, torch.nn.Module] | None:
    """Return the node of `value` in the active trace, and the module with the constants of the trace."""
    tracer, slot = _slot(value)
    return (slot.proxy.node, tracer.root) if slot is not None else None


def version(value: torch.Tensor) -> int:
    """Return how often a tensor, or what it is a view of, was changed in place."""
    return value._version


def _slot(value: torch.Tensor) -> tuple[Any, Any]:
    """Return the active tracer and its record of `value`; None if there is none."""
    mode = get_proxy_mode()
    tracer: Any = mode.tracer if mode is not None else None
    return tracer, None if tracer is None else get_proxy_slot(value, tracer, None)


def inside_transform() -> bool:
    """Return whether a `torch.func` transform is active, whose tensors are no values of the trace."""
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # it is missing from torch's types
    return functorch.peek_interpreter_stack() is not None


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Trace `tensor.data = value`, for which torch dispatches no op: `tensor` then has the node of `value`."""
    source = value.detach()
    tensor.data = source
    tracer, slot = _slot(source)
    if slot is not None:
        set_proxy_slot(tensor, tracer, slot)


@contextlib.contextmanager
def outside_of_trace() -> Generator[None]:
    """Run operations on real tensors inside this context, outside of the active trace."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def unobserved() -> Generator[None]:
    """Like `outside_of_trace`, and also outside of torch function modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def tensor_only_optimizers() -> contextlib.AbstractContextManager[None]:
    """Make `torch.compiler.is_compiling()` true inside this context, so that torch.optim takes its capturable form."""
    return flags_set([(torch.compiler, "_is_compiling_flag", True)])


def note_line(line: tuple[str, int] | None) -> None:
    """Annotate the nodes traced from now on with a line of the user's."""
    if line is None or fx_traceback.current_meta.get("custom", {}).get("line") != line:
        note_on_nodes(line=line)


def note_on_nodes(**notes: object) -> None:
    """Annotate the nodes traced from now on; None removes an annotation."""
    custom = {**fx_traceback.current_meta.get("custom", {}), **notes}
    fx_traceback.current_meta["custom"] = {k: v for k, v in custom.items() if v is not None}


def noted(key: str) -> Any:
    """Return the current annotation called `key`."""
    return fx_traceback.current_meta.get("custom", {}).get(key)


_MOST_FAKE_RESULTS = 1 << 12  # of about 1.5 KiB each
_fused_library = torch.library.Library("aten", "IMPL")


def _shapes_for_fused_optimizers() -> None:
    """Register shape functions of fused optimizers with a tensor learning rate; in-place ops have no result."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for name in FUSED:
        for overload in getattr(torch.ops.aten, name).overloads():
            full = f"aten::{name}" + (f".{overload}" if overload != "default" else "")
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"):
                _fused_library.impl(full.removeprefix("aten::"), nothing, "Meta")


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Of batch norm, and of the ops that cuDNN has for it. Torch searches its whole table for them."""
    hidden_on_cuda = [_aten.cudnn_batch_norm, _aten.cudnn_batch_norm_backward]
    return {**get_decompositions(hidden_on_cuda), _aten.native_batch_norm.default: _batch_norm}


def _as_they_are(_: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def trace(
    fn: Callable[..., Any], inputs: Sequence[Any], forms: Mapping[Any, Callable[..., Any]],
    at_op: Callable[[Any, Any, Any], tuple[Any, Any]] = _as_they_are,
) -> torch.fx.GraphModule:  # fmt: skip
    """Trace `fn(*inputs)` into one ATen graph with in-place ops; nodes have the annotations of `note_on_nodes`.

    `forms` are decompositions; one that returns NotImplemented keeps the op. `at_op(op, args, kwargs)` exchanges real
    tensors in the arguments of an op.
    """
    _shapes_for_fused_optimizers()
    with fx_traceback.preserve_node_meta():
        fx_traceback.current_meta.pop("custom", None)
        table = {**_decompositions(), **forms}
        quick_end = forms_set([(torch.fx.Graph, "eliminate_dead_code", _dead_only)])
        with _use_lazy_graph_module(True), quick_dispatch(table, at_op), fake_results_bounded(), quick_end:
            return make_fx(fn, table, tracing_mode="fake", _allow_non_fake_inputs=True, **_WITHOUT_NAMES)(*inputs)


def _dead_only(original: Any, graph: torch.fx.Graph, is_impure_node: Any = None) -> bool:
    """Ask of the nodes that nothing reads alone whether they may go, without a check of the graph."""
    if is_impure_node is None:
        return original(graph)
    for node in reversed(graph.nodes):
        if not node.users and not is_impure_node(node):
            graph.erase_node(node)
    return True


@contextlib.contextmanager
def fake_results_bounded() -> Generator[None]:
    """Empty torch's table of results on fake tensors at the end if it is large: each new size of a batch adds to it."""
    try:
        yield
    finally:
        if FakeTensorMode.cache_info().size > _MOST_FAKE_RESULTS:
            FakeTensorMode.cache_clear()


def graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """Return a module of `graph` that generates its code at its first call.

    `torch.fx.GraphModule` generates code when it is created, which takes longer than any pass over a deep step, and
    a captured graph is not called as a module (`torch.fx._lazy_graph_module`, 2.11 to 2.15).
    """
    return _LazyGraphModule(root, graph)


def trace_plain(fn: Callable[..., Any], fakes: Sequence[Any]) -> torch.fx.Graph:
    """Trace `fn` on fake tensors into a graph of ATen calls."""
    with _use_lazy_graph_module(True), quick_dispatch({}, _as_they_are):
        return make_fx(fn, **_WITHOUT_NAMES)(*fakes).graph


@contextlib.contextmanager
def without_onednn() -> Generator[None]:
    """Disable oneDNN, whose recurrent layers need what only autograd makes, for all threads. Python sees no change."""
    before, flags = torch._C._get_mkldnn_enabled(), vars(type(sys.modules["torch.backends.mkldnn"]))
    with attributes_set([(flags["enabled"], "getter", lambda: before)]):
        undo(torch._C._set_mkldnn_enabled, before)
        torch._C._set_mkldnn_enabled(False)
        yield


@contextlib.contextmanager
def without_logs() -> Generator[None]:
    """Silence torch's loggers of fake tensors and symbols, unless TORCH_LOGS is set: a CaptureError has the message."""
    loggers = [logging.getLogger(name) for name in _TRACE_LOGGERS if not os.environ.get("TORCH_LOGS")]
    idle = [logging.getLogger(name) for name in _SYMBOL_LOGGERS if loggers]
    drop = here_only(_drop, _keep)
    with attributes_set([(logger, "debug", _drop) for logger in idle if not logger.isEnabledFor(logging.DEBUG)]):
        for logger in loggers:
            undo(logger.removeFilter, drop)
            logger.addFilter(drop)
        yield


def _drop(*_: object) -> bool:
    return False


def _keep(_: logging.LogRecord) -> bool:
    return True


class _Replay(torch.fx.Interpreter):
    """Runs a graph for functionalization, which does not support the empty lists of fused optimizers."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(getattr(target, "_overloadpacket", None), "__name__", "")
        if packet not in FUSED:
            return super().call_function(target, args, kwargs)
        functional = getattr(getattr(torch.ops.aten, packet.removesuffix("_")), target._overloadname)
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        arguments = {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}
        for name, new in zip(written, functional(*args, **kwargs), strict=True):
            if name != "grads" or arguments.get("grad_scale") is not None:
                for tensor, value in zip(arguments[name], new, strict=True):
                    tensor.copy_(value)
        return None


def functionalize(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """Return the graph without mutation; trailing copies update the inputs."""
    with fx_traceback.preserve_node_meta():
        run = torch.func.functionalize(_Replay(module).run, remove="mutations")
        return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
