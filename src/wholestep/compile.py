"""`wholestep.compile`: the pipeline in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Protocol, cast, overload

from .capture.capture import capture_step
from .capture.capture_options import CaptureOptions
from .graph.graph import TrainGraph
from .runtime.compile_options import CompileOptions, StepOptions
from .runtime.step import CompiledStep

P = ParamSpec("P")


class _Compile(Protocol[P]):
    """`compile`, as a type checker sees it: `P` are the options."""

    @overload
    def __call__(self, train_step: Callable[..., Any], *args: P.args, **options: P.kwargs) -> CompiledStep: ...
    @overload
    def __call__(
        self, train_step: None = None, *args: P.args, **options: P.kwargs
    ) -> Callable[[Callable[..., Any]], CompiledStep]: ...


def _compile(
    train_step: Callable[..., Any] | None = None, **options: Any
) -> CompiledStep | Callable[[Callable[..., Any]], CompiledStep]:
    """Compile a training step written for one device into what this rank of a mesh runs. Also a decorator.

    Args:
        train_step: the step: forward, backward, optimizer, on one device.
        **options: those of `CompileOptions`.

    Example:
        >>> step = wholestep.compile(train_step, parallel=wholestep.DataParallel("fully_shard"))
        >>> loss = step(model, optimizer, batch)

    Raises:
        CaptureError: an option is unknown.
        PlanError, BackendError, MeshError, CacheError: one is malformed; what depends on the model comes later.
    """
    decorate = partial(CompiledStep, options=StepOptions.of(CompileOptions(**options)))
    return decorate if train_step is None else decorate(train_step)


def _with_options(function: Callable[..., Any], options: Callable[P, CompileOptions]) -> _Compile[P]:
    """`function` with the signature and the documentation of the options, which are declared in one place."""
    signature, theirs = inspect.signature(function), inspect.signature(options)
    parameters = [signature.parameters["train_step"], *theirs.parameters.values()]
    described = (options.__doc__ or "").partition("    Args:\n        ")[2].partition("\n\n    Raises:")[0]
    untyped: Any = function
    untyped.__signature__ = signature.replace(parameters=parameters)
    untyped.__name__ = untyped.__qualname__ = "compile"
    untyped.__doc__ = (function.__doc__ or "").replace("**options: those of `CompileOptions`.", described)
    return cast(_Compile[P], function)


compile = _with_options(_compile, CompileOptions)


def capture(fn: Callable[..., Any], *args: Any, options: CaptureOptions | None = None, **kwargs: Any) -> TrainGraph:
    """The graph of `fn(*args, **kwargs)` on one device; nothing real is computed or changed.

    The graph depends on `fn`, its arguments and `options`, on nothing else. With the options that `compile` is given,
    `plan`, `partition` and `default_passes` make the program that runs.

    Example:
        >>> options = wholestep.CaptureOptions(offload="cpu")
        >>> graph = wholestep.capture(train_step, model, optimizer, batch, options=options)
        >>> plan = wholestep.plan(graph, "dp=8")

    Raises:
        CaptureError: the step cannot become one graph.
    """
    return capture_step(fn, args, kwargs, options).graph
