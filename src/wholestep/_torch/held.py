"""Private names of modules, tensors, their hooks, and pytrees."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

tree_flatten, tree_map_only = pytree.tree_flatten, pytree.tree_map_only


def other_kind(value: torch.Tensor) -> str:
    """Return what a tensor is that is not dense, or spread over ranks; "" for any other one."""
    if value.is_nested:
        return "nested tensor"
    if isinstance(value, DTensor):
        return "DTensor"
    return "" if value.layout is torch.strided else f"sparse tensor ({value.layout})"


def memory_overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether one tensor begins in the part of a storage that the other one spans."""
    if storage_key(a) != storage_key(b) or not (a.numel() and b.numel()):
        return False
    ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (a, b)]
    return a.storage_offset() <= ends[1] and b.storage_offset() <= ends[0]


def flags_check(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """Return a function that is true only while dtype and requires_grad of `tensors` stay. It may be false without
    a change: under a dispatch mode, or with a torch that lacks the guards of Dynamo, which take a third of the time.
    """
    dims = [[None] * tensor.dim() for tensor in tensors]
    try:
        guards: Any = cast(Any, torch._C)._dynamo.guards.TensorGuards
        check: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check
    except (AttributeError, TypeError, SystemError):
        return bool
    return lambda: check(*tensors)


class _ByIdentity(TorchFunctionMode):
    """No tensor equals another one: `==` compares lists by identity, in a tenth of the time that a loop takes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> bool:
        return False


_BY_IDENTITY = _ByIdentity()


def same_tensors(now: Sequence[Any], had: Sequence[Any]) -> bool:
    """Return whether these are the same tensors, also in lists and dicts. `with` takes three times as long."""
    torch._C._push_on_torch_function_stack(_BY_IDENTITY)
    try:
        return now == had
    finally:
        torch._C._pop_torch_function_stack()


def storage_key(value: torch.Tensor) -> int:
    """Return a key that is equal for tensors with the same storage, also for fake tensors."""
    if value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage()._cdata


def address_of(fake: torch.Tensor) -> int:
    """A number in place of an address, the same for views that start at the same element; 0 without elements."""
    return 0 if 0 in fake.shape else (storage_key(fake) << 24) + int(fake.storage_offset()) * fake.element_size()


def without_address(fake: torch.Tensor) -> None:
    """Let torch raise where the address of a fake tensor's storage is read, which is 0."""
    torch._C._set_throw_on_mutable_data_ptr(fake)


def storage_holders(tensor: torch.Tensor) -> int:
    """Return the number of references to the storage of `tensor`, including the one of this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_OBSERVERS = (
    "wholestep.", "torch.utils.module_tracker", "torch.utils.flop_counter", "torch.distributed._tools",
    "torch.distributed.tensor.debug",
)  # fmt: skip


def only_looks(hook: object) -> bool:
    """Return whether a hook is an observer of wholestep or of torch's tools, which changes no tensor."""
    return callable(hook) and str(getattr(hook, "__module__", "")).startswith(_OBSERVERS)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is strided and stores its values; ops may crash on other tensors."""
    odd = tensor.is_quantized or tensor.is_conj() or tensor._is_zerotensor()
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not odd


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own parameters, as a dict that may be changed."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers, as a dict that may be changed."""
    return module._buffers


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return a module's children, as a dict that may be changed."""
    return module._modules


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Share the hooks of `old` with `new`, so that their handles still remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))


_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks",
)  # fmt: skip


_OPTIMIZERS = sys.modules[torch.optim.Optimizer.__module__]
FOR_ALL = torch.nn.modules.module, _OPTIMIZERS  # they have the hooks of all modules, and of all optimizers


def hook_tables(holder: object) -> list[dict[int, Any]]:
    """Return the hook dicts of a module, tensor, optimizer or of one FOR_ALL that run within a step."""
    tables = [getattr(holder, name, None) for name in _HOOKS]
    return [table for table in tables if table is not None]
