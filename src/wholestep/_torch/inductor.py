"""Private names of TorchInductor."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import _guards
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import BackendError
from .attributes import attributes_set
from .tracing import fake_mode


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
