"""Private names of Dynamo and TorchInductor."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy

# pyright: reportPrivateUsage=false
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import _guards
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import BackendError
from .attributes import attributes_set
from .tracing import fake_mode

Part = TypeVar("Part", bound=Callable[..., Any])


def dynamo_backend(name: str) -> Callable[..., Any]:
    """Return the `torch.compile` backend called `name`; raise BackendError if there is none."""
    import torch._dynamo as dynamo
    from torch._dynamo.exc import InvalidBackend

    try:
        return dynamo.lookup_backend(name)
    except InvalidBackend as error:
        names = ", ".join(dynamo.list_backends())
        raise BackendError(f"there is no torch.compile backend {name!r}", f"one of {names}, or a callable") from error


def disable_torch_splitter() -> bool:
    """Disable torch's splitter for DDP models in this process; return whether it was enabled."""
    import torch._dynamo.config as config

    mode: Any = config.optimize_ddp
    if mode not in (True, "ddp_optimizer"):
        return False
    config.optimize_ddp = False
    return True


@cache
def leave_uncompiled(package: str) -> None:
    """Make torch.compile run the code of a package as it is: it cannot trace what reads the local part of a tensor."""
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def split_by_torch() -> bool:
    """Return whether torch's splitter for DDP models made the current graph."""
    context = TracingContext.try_get()
    return context is not None and context.ddp_optimizer_ctx is not None


def give_origin(graph_module: torch.fx.GraphModule, part: torch.fx.GraphModule) -> None:
    """Copy the sources of inputs from dynamo's `graph_module` to its subgraph `part`."""
    sources = {n.name: getattr(n, "_dynamo_source", None) for n in graph_module.graph.find_nodes(op="placeholder")}
    for node in part.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(graph_module, name):
            setattr(part, name, getattr(graph_module, name))


def compiled_part(compiler: Callable[[], Part], fakes: Sequence[Any]) -> tuple[Part, Any]:
    """Compile one part of a dynamo graph, in a tracing context of its own, and call it on fakes.

    The result of the call has the strides of the real results, which aot_autograd may change; None without it.
    """
    notes: Any = copy.copy(TracingContext.get())
    notes.fw_metadata = None
    set_tracing: Any = cast(Any, torch._C)._autograd._saved_tensors_hooks_set_tracing
    with attributes_set([(notes, "fakify_first_call", True)]), _guards.tracing(notes):
        compiled = compiler()
        if notes.fw_metadata is None:
            return compiled, None
        previous = set_tracing(True)
        try:
            with attributes_set([(notes.fake_mode, "allow_non_fake_inputs", True)]), notes.fake_mode:
                return compiled, compiled(*fakes)
        finally:
            set_tracing(previous)


def is_grad_switch(target: object) -> bool:
    """Return whether a node begins or ends `no_grad` or `enable_grad` in dynamo's graphs."""
    return target is torch._C._set_grad_enabled


def in_dynamo() -> bool:
    """Return whether dynamo is compiling a graph."""
    context = TracingContext.try_get()
    return context is not None and context.fake_mode is not None


def inductor_compile(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Compile a graph of tensors with TorchInductor; `options` are names of `torch._inductor.config`."""
    try:
        from torch._inductor import compile as compile_graph
    except ImportError as error:
        raise BackendError(
            f"backend 'inductor' is not in torch {torch.__version__}: {error}", next_step='use backend="eager"'
        ) from error
    mode = next((t.fake_mode for t in example_inputs if isinstance(t, FakeTensor)), None) or fake_mode()
    with _guards.tracing(TracingContext(mode)):  # Inductor caches graphs on disk only in such a context
        return cast(Callable[..., Any], compile_graph(module, list(example_inputs), dict(options)))


@contextmanager
def kernels_built_together() -> Generator[None]:
    """Functions that Inductor compiles inside wait for their kernels at the end: compilers run while it goes on."""
    from torch._inductor.async_compile import AsyncCompile

    wait, pending = AsyncCompile.wait, list[tuple[Any, dict[str, Any]]]()

    def later(self: Any, scope: dict[str, Any]) -> None:
        pending.append((self, scope))

    with attributes_set([(AsyncCompile, "wait", later)]):
        yield
    for compiler, scope in pending:
        wait(compiler, scope)


def has_triton() -> bool:
    """Return whether Triton is there for the GPU of this process."""
    from torch.utils._triton import has_triton

    return has_triton()


def inductor_settings(mode: str | None = None, options: Mapping[str, Any] | None = None, **_: Any) -> dict[str, Any]:
    """Return the arguments of the "inductor" backend for the `mode` and `options` of `torch.compile`."""
    from torch._inductor import list_mode_options

    settings = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return {"config_patches": settings} if settings else {}
