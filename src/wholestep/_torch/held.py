"""What modules and tensors hold, and containers of them."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

TreeSpec = pytree.TreeSpec


def tree_flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Leaves of a nested container and its structure."""
    return pytree.tree_flatten(value, is_leaf=is_leaf)


def tree_flatten_with_path(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Like `tree_flatten`, each leaf with its path as text."""
    leaves, spec = pytree.tree_flatten_with_path(value, is_leaf=is_leaf)
    return [(pytree.keystr(path), leaf) for path, leaf in leaves], spec


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """Inverse of `tree_flatten`."""
    return pytree.tree_unflatten(list(leaves), spec)


def write_spec(spec: TreeSpec) -> str:
    """A structure as text that `read_spec` reads back.

    Raises:
        NotImplementedError: it has a container that torch knows no name for.
    """
    return pytree.treespec_dumps(spec)


def read_spec(text: str) -> TreeSpec:
    """Inverse of `write_spec`."""
    return pytree.treespec_loads(text)


def storage_key(value: torch.Tensor) -> int:
    """The same for all tensors that share memory, fake ones included."""
    if value.layout is not torch.strided:
        return id(value)
    return value.untyped_storage()._cdata


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and Python objects, hold the memory of `tensor`, this count's own included.

    `torch._C._storage_Use_Count` (2.11 to 2.15): there is no public way to ask whether memory is used by others.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_LOOKERS = (
    "wholestep.", "torch.utils.module_tracker", "torch.utils.flop_counter", "torch.distributed._tools",
    "torch.distributed.tensor.debug",
)  # fmt: skip


def only_looks(hook: object) -> bool:
    """True for hooks of wholestep and of torch's tools that count and follow what runs: they change no number."""
    return callable(hook) and str(getattr(hook, "__module__", "")).startswith(_LOOKERS)


def is_plain(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that holds all its values itself; ops on others may crash."""
    odd = tensor.is_quantized or tensor.is_conj() or tensor._is_zerotensor()
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not odd


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters a module holds itself, to read and to replace."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers a module holds itself, to read and to replace."""
    return module._buffers


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The modules a module holds itself, to read and to replace."""
    return module._modules


def is_compiled(module: torch.nn.Module) -> bool:
    """True after `module.compile()`."""
    return getattr(module, "_compiled_call_impl", None) is not None


def move_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give `new` the hooks of `old`: their handles go on to remove them."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))


_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
)  # fmt: skip


ALL_MODULES = torch.nn.modules.module  # holds hooks of every module


def hook_tables(holder: object) -> list[dict[int, Any]]:
    """The hooks of a module, a parameter, an optimizer or ALL_MODULES that run within a step, as torch keeps them."""
    found = [getattr(holder, name, None) for name in _HOOKS]
    return [table for table in found if table is not None]
