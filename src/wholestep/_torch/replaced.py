"""Replaces methods and functions of torch while a step is traced."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch._refs.nn.functional
import torch.optim._adafactor
import torch.utils.checkpoint
from torch.utils import _foreach_utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .attributes import Form, attributes_set, forms_of, forms_set
from .tracing import note_on_nodes, noted
from .types_shown import FAKE_TYPES

ADAFACTOR, BATCH_NORM = torch.optim._adafactor, torch.nn.modules.batchnorm._BatchNorm
ASSERT, LOADER_ITERATOR = cast(Any, torch)._assert, _BaseDataLoaderIter


@contextlib.contextmanager
def replaced(forms: Iterable[tuple[Any, str, Form]]) -> Generator[list[tuple[Any, str, Any]]]:
    """Replace functions by `forms`, as `forms_set` does; run compiled modules uncompiled. Yields what is set."""
    if "torch._dynamo" in sys.modules:  # there may be results of torch.compile
        from torch._dynamo import eval_frame

        compiled, stance = eval_frame.OptimizedModule, "_callback_from_stance"
        forms = [*forms, (compiled, "__call__", _run_original), (eval_frame, stance, _force_eager)]
    changes = forms_of(forms)
    with attributes_set(changes):
        yield changes


def _run_original(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._orig_mod(*args, **kwargs)


def _force_eager(original: Any, callback: Any) -> None:
    """What the stance "force_eager" of `torch.compiler.set_stance`, which is that of all threads, does."""


@dataclass
class _Number:
    fake: torch.Tensor


@contextlib.contextmanager
def patched_for_tracing(
    in_backward: Callable[[Sequence[Any]], AbstractContextManager[None]],
    is_number: Callable[[torch.Tensor], bool],
    device: str,
    validates: bool,
) -> Generator[None]:
    """Run each backward in the context `in_backward(tensors that it starts from)`; annotate its nodes with `backward`.

    Hooks of saved tensors, as those of checkpointing, do not see a fake tensor that `is_number`: torch shows them no
    Python number.

    Validation in torch.distributions asks what values are: not unless the trace `validates`. For a GPU, torch takes its
    foreach kernels by default, as for tensors that are not fake. Selective checkpointing recomputes by its policy,
    as it does uncompiled; for a compiler it would keep everything and leave the choice to it.
    """

    def backward(original: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        nested, module = noted("backward"), noted("module")
        note_on_nodes(backward=True)
        try:
            with in_backward(outputs):
                return original(outputs, *args, **kwargs)
        finally:
            note_on_nodes(backward=nested, module=module)  # checkpointing leaves modules by an exception

    def save_by(original: Any, self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        def packed(tensor: torch.Tensor) -> Any:
            return _Number(tensor) if is_number(tensor) else pack(tensor)

        def unpacked(saved: Any) -> Any:
            return saved.fake if isinstance(saved, _Number) else unpack(saved)

        original(self, packed, unpacked)

    forms: list[tuple[Any, str, Form]] = [
        (torch.autograd.graph.saved_tensors_hooks, "__init__", save_by),
        (torch.nn.Module, "_apply", _apply_unless_idle),
        (torch.autograd.graph, "_engine_run_backward", backward),
        (torch.utils.checkpoint, "_is_compiling", _never),
        (torch.autograd.profiler.record_function, "__enter__", _unmarked),
        (torch.autograd.profiler.record_function, "__exit__", _never),
    ]
    changes: list[tuple[Any, str, Any]] = []
    if not validates:
        changes.append((torch.distributions.Distribution, "_validate_args", False))
    if not device.startswith("cpu"):
        modules: tuple[Any, ...] = sys.modules[torch.optim.Optimizer.__module__], _foreach_utils
        lists = [(module, module._foreach_supported_types) for module in modules]
        changes += [(module, "_foreach_supported_types", [*types, *FAKE_TYPES]) for module, types in lists]
    with attributes_set(changes), forms_set(forms):
        yield


def entrances_replaced(enter: Form) -> AbstractContextManager[None]:
    """Run `enter` in place of the functions by which tensors get into torch past its function modes."""
    transforms: Any = torch._functorch.eager_transforms
    return forms_set([
        (torch.autograd.Function, "apply", enter),
        (torch.nn.Parameter, "__new__", enter),
        (torch.nn.Buffer, "__new__", enter),
        (torch.Tensor, "_make_subclass", enter),
        (torch.Tensor, "as_subclass", enter),
        (torch._functorch.vmap, "_add_batch_dim", enter),
        (transforms, "_wrap_for_grad", enter),
        (transforms, "_wrap_functional_tensor", enter),
        (torch.autograd, "_engine_run_backward", enter),
        (torch.autograd.graph, "_engine_run_backward", enter),
    ])  # fmt: skip


def of_tensors(function: Any) -> Callable[..., Any] | None:
    """The reference of a function in `torch._refs`, which takes tensors for numbers; of those with equal gradients."""
    name: str = getattr(function, "__name__", "")
    return getattr(torch._refs.nn.functional, name) if name in _OF_TENSORS else None


def _check(original: Callable[..., None], holds: Any, *message: Any) -> None:
    original(bool(holds), *message)


CHECKS_OF_NUMBERS = [(torch, "_check", _check)]
_OF_TENSORS = ("huber_loss", "smooth_l1_loss", "margin_ranking_loss", "triplet_margin_loss", "softshrink")


def _never(*_: object) -> bool:
    return False


def _unmarked(original: Any, mark: Any) -> Any:
    """Enter a mark for a profiler, as of each step of an optimizer, without its ops: a captured step has none."""
    return mark


def _apply_unless_idle(
    original: Any, self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> Any:
    """Skip `module.to(...)` that changes nothing: torch cannot swap fake parameters."""
    tensors = [*self.parameters(recurse), *self.buffers(recurse)]
    return self if all(fn(tensor) is tensor for tensor in tensors) else original(self, fn, recurse)


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return the attributes of a scaler, after creating its tensors `SCALER_TENSORS`, which torch creates lazily."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    return vars(scaler)


SCALER_TENSORS = ("_scale", "_growth_tracker")
SCALER_CALLS = "_per_optimizer_states"


def scaler_options(scaler: torch.amp.GradScaler) -> tuple[object, ...]:
    """Return the numbers of a scaler that are constants of a trace."""
    return scaler._enabled, scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


def scaler_calls(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return a scaler's state per optimizer, which lives from `unscale_` to `update`."""
    return scaler._per_optimizer_states


def inf_checks(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the inf checks of `unscale_`, calling it if it has not run yet; mark the optimizer as stepped."""
    from torch.amp.grad_scaler import OptState

    scaler._check_scale_growth_tracker("step")
    notes = scaler._per_optimizer_states[id(optimizer)]
    if notes["stage"] is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")
    if notes["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    notes["stage"] = OptState.STEPPED
    return list(notes["found_inf_per_device"].values())
