"""Patches of torch that are active while a step is traced."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
import torch.autograd

from .tracing import note_on_nodes, noted


@contextlib.contextmanager
def patched_for_tracing(
    on_backward: Callable[[Sequence[Any]], None],
    on_zero_grad: Callable[[Sequence[Any]], None],
    on_rng: tuple[Callable[[torch.Tensor], None], Callable[[torch.Tensor], None]],
) -> Generator[None]:
    """Patch torch inside this context to observe backwards, `zero_grad`, and the random generator.

    Nodes made inside a backward get the annotation `backward`. `on_backward` receives the tensors that a backward
    starts from, `on_zero_grad` parameters whose gradient is set to None, `on_rng` generator states read and set.
    """
    places = cast(tuple[Any, ...], (torch.autograd, torch.autograd.graph))
    engine = torch.autograd.graph._engine_run_backward

    def backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        on_backward(outputs)
        nested, module = noted("backward"), noted("module")
        note_on_nodes(backward=True)
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            note_on_nodes(backward=nested, module=module)  # checkpointing leaves modules by an exception

    def watch_zero_grad(owner: type, parameters: Callable[[Any], list[Any]]) -> Callable[[], None]:
        original = owner.__dict__["zero_grad"]

        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            if set_to_none:
                on_zero_grad(parameters(self))
            original(self, set_to_none)

        owner.zero_grad = zero_grad
        return lambda: setattr(owner, "zero_grad", original)

    undo = [
        _skip_idle_conversions(),
        _skip_distribution_checks(),
        watch_zero_grad(torch.optim.Optimizer, lambda o: [p for g in o.param_groups for p in g["params"]]),
        watch_zero_grad(torch.nn.Module, lambda m: list(m.parameters())),
        _watch_generator(*on_rng),
    ]
    for place in places:
        place._engine_run_backward = backward
    try:
        yield
    finally:
        for place in places:
            place._engine_run_backward = engine
        for restore in undo:
            restore()


def _watch_generator(
    on_get: Callable[[torch.Tensor], None], on_set: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    """Observe reads and writes of the CPU generator's state; writes have no effect, since a trace draws no numbers."""
    get, set_ = torch.get_rng_state, torch.set_rng_state

    def get_rng_state() -> torch.Tensor:
        state = get()
        on_get(state)
        return state

    def undo() -> None:
        torch.get_rng_state, torch.set_rng_state = get, set_

    torch.get_rng_state, torch.set_rng_state = get_rng_state, on_set
    return undo


def _skip_idle_conversions() -> Callable[[], None]:
    """Skip `module.to(...)` that changes nothing: torch cannot swap fake parameters."""
    original = cast(Callable[..., Any], torch.nn.Module._apply)

    def apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        return self if all(fn(tensor) is tensor for tensor in held) else original(self, fn, recurse)

    torch.nn.Module._apply = apply
    return lambda: setattr(torch.nn.Module, "_apply", original)


def _skip_distribution_checks() -> Callable[[], None]:
    """Disable validation in torch.distributions, which reads values."""
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    return lambda: torch.distributions.Distribution.set_default_validate_args(before)
