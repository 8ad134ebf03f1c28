"""Traceable replacements for methods of torch that read tensor values on the host.

tests/unit/test_replacements.py compares each form with its original.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

from .. import _torch
from ..errors import CaptureError
from ..graph import meta
from .optimizer_entries import Entry
from .random_numbers import refuse_seeds

_SEEDED: tuple[Any, ...] = (torch.random, torch.cuda, torch.mps, torch.xpu, torch.mtia)
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def _adafactor(
    original: Any, params: list[Tensor], grads: list[Tensor], row_vars: list[Any], col_vars: list[Any],
    variances: list[Any], state_steps: list[Tensor], grad_scale: Any, found_inf: Any, *, d: float, lr: Any,
    beta2_decay: float, weight_decay: float, eps1: float | None, eps2: float, maximize: bool, has_complex: bool,
) -> None:  # fmt: skip
    """`torch.optim.Adafactor` with step sizes as float64 tensors instead of Python numbers."""
    for i, param in enumerate(params):
        grad, step = -grads[i] if maximize else grads[i], state_steps[i]
        eps1 = torch.finfo(param.dtype).eps if eps1 is None else eps1
        step += 1
        count = step.double()
        forget = count**beta2_decay
        rate = torch.minimum(torch.as_tensor(lr, dtype=torch.float64), count**-0.5)
        size = _rms(param).clamp(min=eps2) * rate
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        if grad.dim() > 1:
            rows, cols = row_vars[i], col_vars[i]
            for average, dim in ((rows, -1), (cols, -2)):
                mean: Any = cast(Any, torch.norm)(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
                average.lerp_(mean, forget.to(average.dtype))
            estimate = (rows @ cols).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            estimate = variances[i].lerp_(grad * grad, forget.to(grad.dtype)).clone()
        update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        param.add_(update * (-size / (_rms(update) / d).clamp(min=1.0)))


def _rate_of_transformers(original: Any, group: dict[str, Any], state: dict[str, Any]) -> Any:
    """`Adafactor._get_lr` of transformers, with tensors in place of Python numbers."""
    rate = group["lr"]
    if group["relative_step"]:
        count = torch.as_tensor(state["step"]).double()
        highest = 1e-6 * count if group["warmup_init"] else torch.tensor(1e-2, dtype=torch.float64)
        rate = torch.minimum(highest, count**-0.5)
    return state["RMS"].clamp(min=group["eps"][1]) * rate if group["scale_parameter"] else rate


_SAME_LAST = frozenset({
    torch.ops.aten.unsqueeze.default, torch.ops.aten.expand.default, torch.ops.aten.add.Tensor,
    torch.ops.aten.clone.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default,
})  # fmt: skip
_COUNTS = frozenset({torch.ops.aten.arange.default, torch.ops.aten.arange.start})


def _packed_sequences(original: Any, position_ids: Any, *rest: Any, **named: Any) -> Any:
    """`find_packed_sequence_indices` of transformers, which asks whether positions begin anew inside of a row. While it
    is traced it does not look, and masks in case they do, so that attention gets a mask where it could be causal.
    """
    traced = _torch.traced_node(position_ids) if isinstance(position_ids, Tensor) else None
    return None if traced is not None and _counts_up(traced[0]) else original(position_ids, *rest, **named)


def _counts_up(node: Any) -> bool:
    """True for what counts up by 1 along its last dim, for any size: an `arange` plus a number, in rows alike."""
    while node.op == "call_function" and node.target in _SAME_LAST:
        source, *rest = node.args
        rank = len(meta.value(source).shape)
        if node.target is torch.ops.aten.unsqueeze.default and rest[0] % (rank + 1) == rank:
            return False
        if node.target is torch.ops.aten.expand.default and rest[0][-1] != -1:
            return False
        if node.target is torch.ops.aten.add.Tensor and not isinstance(rest[0], int):
            return False
        node = source
    return node.op == "call_function" and node.target in _COUNTS


def _rms(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).norm(2).double() / tensor.numel() ** 0.5


@torch.no_grad()
def _update_average(original: Any, self: Any, model: nn.Module) -> None:
    """`AveragedModel.update_parameters`: `torch.where` chooses between the copy of the first call and the average."""
    pairs = list(zip(_tensors(self.module, self.use_buffers), _tensors(model, self.use_buffers), strict=False))
    averaged, current = [a.detach() for a, _ in pairs], [c.detach().to(a.device) for a, c in pairs]
    first, count = self.n_averaged == 0, self.n_averaged
    new = [a.clone() for a in averaged]
    if self.multi_avg_fn is not None or self.avg_fn is None:
        average = self.multi_avg_fn or get_swa_multi_avg_fn()
        for kind in dict.fromkeys((a.device, a.dtype) for a in averaged):
            chosen = [i for i, a in enumerate(averaged) if (a.device, a.dtype) == kind]
            if self.multi_avg_fn is None and not (kind[1].is_floating_point or kind[1].is_complex):
                for i in chosen:  # as on a CPU: torch divides no list of integers
                    new[i] = get_swa_avg_fn()(averaged[i], current[i], count.to(kind[0]))
            else:
                average([new[i] for i in chosen], [current[i] for i in chosen], count.to(kind[0]))
    else:
        new = [self.avg_fn(a, c, count.to(a.device)) for a, c in zip(averaged, current, strict=True)]
    for a, c, n in zip(averaged, current, new, strict=True):
        a.copy_(torch.where(first.to(a.device), c.to(a.dtype), n.to(a.dtype)))
    if not self.use_buffers:
        for old, new_value in zip(self.module.buffers(), model.buffers(), strict=True):
            old.detach().copy_(new_value.detach().to(old.device))
    self.n_averaged += 1


def _tensors(module: nn.Module, buffers: bool) -> list[Tensor]:
    return [*module.parameters(), *(module.buffers() if buffers else ())]


def _batch_norm(original: Any, self: Any, input: Tensor) -> Tensor:
    """Batch norm with `momentum=None` (a cumulative average): the weight of a new batch is a tensor."""
    averages = self.training and self.track_running_stats and self.momentum is None
    if not averages or self.num_batches_tracked is None:
        return original(self, input)
    self._check_input_dim(input)
    self.num_batches_tracked.add_(1)
    mean, var = self.running_mean.clone(), self.running_var.clone()  # no rows leave them
    out = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    weight = self.num_batches_tracked.double().reciprocal()
    with torch.no_grad():
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(new * weight + running * (1 - weight))
    return out


def _cond(
    original: Any, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """`torch.cond`: traces the branch that is taken, as an `if`."""
    return true_fn(*operands) if pred else false_fn(*operands)


def _refuse_anomaly(original: Any, enabled: bool, check_nan: bool = True) -> None:
    if enabled:
        refuse_anomaly_mode()
    original(enabled, check_nan)


def refuse_anomaly_mode() -> None:
    """Raise CaptureError: a compiled backward does not run autograd, which anomaly detection needs."""
    raise CaptureError(
        "torch.autograd's anomaly detection is on (detect_anomaly, set_detect_anomaly)",
        "anomaly detection off: the compiled backward is part of one graph and does not run autograd",
        "switch it off for the compiled step; to search for NaN, run the uncompiled function with it",
    )


def _unscale(original: Any, self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
    """`GradScaler._unscale_grads_`: unscale gradients and return, per device, whether one is not finite."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not allow_fp16 and any(g.dtype == torch.float16 for g in grads):
        raise ValueError("Attempting to unscale FP16 gradients.")
    if not grads:
        return {}
    with torch.no_grad():
        finite = torch.stack([g.isfinite().all() for g in grads]).all()
        for grad in grads:
            grad.mul_(inv_scale)
    return {found_inf.device: finite.logical_not().to(found_inf.dtype)}


def _scaled_step(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler._maybe_opt_step`: run the update, and restore all changed tensors if a gradient is not finite."""
    if not self.is_enabled() or "closure" in kwargs:
        return original(self, optimizer, *args, **kwargs)
    checks = _torch.inf_checks(self, optimizer)
    if not checks:
        raise AssertionError("No inf checks were recorded for this optimizer.")
    skipped = torch.stack(checks).sum() > 0
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for param in getattr(optimizer.state, "later", {}).copy():
        optimizer.state.make(param)
    before, old = _entries(optimizer, params), {id(t): t.detach().clone() for t in _updated(optimizer, params)}
    result = optimizer.step(*args, **kwargs)
    for place, value in _entries(optimizer, params).items():
        if before.get(place, place) is not value:  # a number, or a tensor that did not exist before
            raise CaptureError(
                f"GradScaler may skip a step of {type(optimizer).__name__}, which creates or assigns {place[1]!r}",
                "state that exists before the step and that the step changes in place",
                "run the first step without the scaler, use an optimizer of torch.optim, or bfloat16 without a scaler",
            )
    with torch.no_grad():
        for tensor in _updated(optimizer, params):
            tensor.copy_(torch.where(skipped, old[id(tensor)], tensor))
    return result


def _updated(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    return [
        *params,
        *(v for p in params for v in Entry(optimizer.state.get(p, {})).leaves().values() if isinstance(v, Tensor)),
    ]


def _entries(optimizer: Any, params: Sequence[Tensor]) -> dict[tuple[str, str], Any]:
    entries = {(f"group {i}", k): v for i, g in enumerate(optimizer.param_groups) for k, v in g.items()}
    return entries | {
        (f"state {i}", k): v
        for i, p in enumerate(params)
        for k, v in Entry(optimizer.state.get(p, {})).leaves().items()
    }


def _update_scale(
    original: Any, scale: Tensor, tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """`_amp_update_scale_`, whose functional form differs: the scale grows after `interval` steps without an inf."""
    bad = found_inf > 0
    good = tracker + 1
    due = good == interval
    grown = scale * growth
    higher = torch.where(due & grown.isfinite(), grown, scale)
    scale.copy_(torch.where(bad, scale * backoff, higher))
    tracker.copy_(torch.where(bad | due, 0, good))
    return scale


def refuse_open_scalers(scalers: Iterable[torch.amp.GradScaler]) -> None:
    """Raise CaptureError if the step uses a scaler and does not call its `update()`."""
    if any(_torch.scaler_calls(scaler) for scaler in scalers):
        problem = "the step uses a GradScaler and does not call its update()"
        needed = "scale, step and update of one call in the compiled step"
        raise CaptureError(problem, needed, "call scaler.update() at the end of the step")


def _refuse_batches_inside(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the iteration over a DataLoader."""
    problem = "the step takes a batch from a DataLoader while it is captured: all later steps would reuse it"
    needed = "batches as arguments of the step"
    raise CaptureError(problem, needed, "iterate over the loader outside, and call the step with each batch")


def _refuse_collective(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the functions of torch.distributed."""
    raise _collective(f"torch.distributed.{getattr(original, '__name__', 'a collective')}()")


def refuse_collectives(module: torch.fx.GraphModule) -> None:
    """Raise CaptureError if a trace contains a collective of the user's."""
    for node in module.graph.nodes:
        if _torch.is_op(node.target) and node.target.namespace in _COLLECTIVES:
            error = _collective(str(node.target))
            error.where = meta.source_line(node)
            raise error


def _collective(what: str) -> CaptureError:
    return CaptureError(
        f"the step calls {what} itself",
        "a step for one device: wholestep derives the communication from the plan",
        'remove the call; for results over the whole batch use DataParallel(..., semantics="global")',
    )


def _sync_batch_norm(original: Any, self: Any, input: torch.Tensor) -> torch.Tensor:
    """Replace `SyncBatchNorm.forward`, which communicates if there are several ranks."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if ranks > 1 and self.training:
        raise CaptureError(
            "SyncBatchNorm averages over ranks itself",
            "a step for one device",
            'use BatchNorm with DataParallel(..., semantics="global"), which computes statistics of the whole batch',
        )
    return original(self, input)


_FUNCTIONS_OF_GROUPS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip


def methods() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the replacements as (owner, name, form); each form is called with the original and its arguments."""
    transformers: Any = sys.modules.get("transformers.optimization")
    masks: Any = sys.modules.get("transformers.masking_utils")
    packed = [(masks, "find_packed_sequence_indices", _packed_sequences)] if masks else []
    return [
        (_torch.LOADER_ITERATOR, "__next__", _refuse_batches_inside),
        *((place, name, refuse_seeds) for place in _SEEDED for name in _SEEDS if hasattr(place, name)),
        *((dist, name, _refuse_collective) for name in _FUNCTIONS_OF_GROUPS if hasattr(dist, name)),
        (nn.SyncBatchNorm, "forward", _sync_batch_norm),
        (torch, "set_anomaly_enabled", _refuse_anomaly),
        (AveragedModel, "update_parameters", _update_average),
        (_torch.ADAFACTOR, "_single_tensor_adafactor", _adafactor),
        (_torch.ADAFACTOR, "_multi_tensor_adafactor", _adafactor),
        *([(transformers.Adafactor, "_get_lr", _rate_of_transformers)] if transformers else []),
        *(form for form in packed if hasattr(masks, form[1])),
        (_torch.BATCH_NORM, "forward", _batch_norm),
        (torch, "cond", _cond),
        (torch.amp.GradScaler, "_unscale_grads_", _unscale),
        (torch, "_amp_update_scale_", _update_scale),
        (torch.amp.GradScaler, "step", _scaled_step),
    ]
