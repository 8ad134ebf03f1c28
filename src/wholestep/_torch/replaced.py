"""Replaces methods and functions of torch while a step is traced."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
import torch.optim._adafactor
import torch.optim.swa_utils
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data.dataloader import _BaseDataLoaderIter

Method = Callable[..., Any]

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip
PLACES: dict[str, tuple[tuple[Any, str], ...]] = {
    "anomaly": ((torch, "set_anomaly_enabled"),),
    "averaged model": ((torch.optim.swa_utils.AveragedModel, "update_parameters"),),
    "adafactor": (
        (torch.optim._adafactor, "_single_tensor_adafactor"),
        (torch.optim._adafactor, "_multi_tensor_adafactor"),
    ),
    "batch norm": ((_BatchNorm, "forward"),),
    "collectives": tuple((dist, name) for name in _COLLECTIVES if hasattr(dist, name)),
    "cond": ((torch, "cond"),),
    "loader": ((_BaseDataLoaderIter, "__next__"),),
    "seeds": ((torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed"), (torch.random, "seed")),
    "sync batch norm": ((torch.nn.SyncBatchNorm, "forward"),),
    "scaler: unscale gradients": ((torch.amp.GradScaler, "_unscale_grads_"),),
    "scaler: update": ((torch, "_amp_update_scale_"),),
    "scaler: step": ((torch.amp.GradScaler, "step"),),
}

ELSEWHERE = {"adafactor of transformers": ("transformers.optimization", "Adafactor", "_get_lr")}  # if imported


@contextlib.contextmanager
def replaced(forms: Mapping[str, Method]) -> Generator[None]:
    """Replace the functions that `forms` names by `form(original, ...)`, and run compiled modules uncompiled."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for name, form in forms.items():
            for owner, attribute in _places(name):
                original: Any = cast(dict[str, Any], vars(owner)).get(attribute)
                run = _bound(form, getattr(owner, attribute))
                undo.append((owner, attribute, original))
                setattr(owner, attribute, staticmethod(run) if isinstance(original, staticmethod) else run)
        with _uncompiled():
            yield
    finally:
        for owner, attribute, original in reversed(undo):
            setattr(owner, attribute, original)


def _places(name: str) -> tuple[tuple[Any, str], ...]:
    if name not in ELSEWHERE:
        return PLACES[name]
    module, kind, attribute = ELSEWHERE[name]
    return ((getattr(sys.modules[module], kind), attribute),) if module in sys.modules else ()


def _bound(form: Method, original: Method) -> Method:
    def run(*args: Any, **kwargs: Any) -> Any:
        return form(original, *args, **kwargs)

    return run


@contextlib.contextmanager
def _uncompiled() -> Generator[None]:
    """Make results of `torch.compile` run the original; without dynamo there are none."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo.eval_frame import OptimizedModule

    original = OptimizedModule.__call__
    OptimizedModule.__call__ = lambda self, *args, **kwargs: self._orig_mod(*args, **kwargs)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        OptimizedModule.__call__ = original


def scaler_tensors(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return the attributes of a scaler, after creating its tensors `SCALER_TENSORS`, which torch creates lazily."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    return vars(scaler)


SCALER_TENSORS = ("_scale", "_growth_tracker")


def scaler_options(scaler: torch.amp.GradScaler) -> tuple[object, ...]:
    """Return the numbers of a scaler that are constants of a trace."""
    return scaler._enabled, scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval


def scaler_calls(scaler: torch.amp.GradScaler) -> dict[int, dict[str, Any]]:
    """Return a scaler's state per optimizer, which lives from `unscale_` to `update`."""
    return scaler._per_optimizer_states


def set_scaler_calls(scaler: torch.amp.GradScaler, calls: Any) -> None:
    """Set a scaler's state per optimizer."""
    scaler._per_optimizer_states = calls


def inf_checks(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the inf checks of `unscale_`, calling it if it has not run yet; mark the optimizer as stepped.

    Raises:
        RuntimeError: the optimizer has stepped since the last `update`.
    """
    from torch.amp.grad_scaler import OptState

    scaler._check_scale_growth_tracker("step")
    notes = scaler._per_optimizer_states[id(optimizer)]
    if notes["stage"] is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update().")
    if notes["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    notes["stage"] = OptState.STEPPED
    return list(notes["found_inf_per_device"].values())
