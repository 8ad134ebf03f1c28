"""DTensors of which only the ranks at one coordinate of an axis have anything, as stages of a pipeline have parameters.

DTensor knows no such placement (`dtensor.Owned`). An op that treats elements alike runs on what each rank has; another
one that makes a new tensor runs on the whole tensor, which all ranks get; what would write elsewhere is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .. import _torch
from ..dtensor import Owned
from ..errors import StateError
from ..graph.op_kinds import is_pointwise, packet_name
from .full_tensors import gather, own_piece

_NEXT = "do it inside of `with ws.whole(model, optimizer):`, on all ranks"
_COPIES = frozenset({"copy_", "zero_", "fill_", "_to_copy", "detach", "alias"})


@_torch.dispatched
class OwnedTensor(DTensor):
    """A DTensor that some ranks own; local tensors of others are empty."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about = _torch.schema_of(func)
        written = [operand for operand, argument in zip(args, about.arguments, strict=False) if argument.is_write]
        owned = [isinstance(tensor, OwnedTensor) for tensor in _leaves(written)]
        if all(owned) and "out" not in kwargs and _is_of_elements(func):
            try:
                pieces = func(*(_pieces(operand, args) for operand in args), **_pieces(kwargs, args))
                return (args[0] if owned else _wrapped(pieces, args)) if about.returns else pieces
            except StateError:
                if owned:
                    raise
        views = [schema for schema in about.returns if schema.alias_info is not None and not schema.alias_info.is_write]
        if any(owned) or views or "out" in kwargs or torch.Tag.nondeterministic_seeded in func.tags:
            problem = f"{func} of a tensor of which only one stage of a pipeline has anything"
            raise StateError(problem, "an op that treats elements alike, or one that makes a new tensor", _NEXT)
        plain = [tensor for tensor in _leaves((args, kwargs)) if not isinstance(tensor, DTensor)]
        send = _sent if not any(tensor.dim() for tensor in plain) else OwnedTensor.full_tensor
        args, kwargs = _torch.tree_map_only(OwnedTensor, send, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def placements(self) -> tuple[Any, ...]:
        """A placement for each axis of the mesh, as torch's functions for state dicts and checkpoints read them."""
        rows = _torch.OwnedRows if self.dim() else Owned
        return tuple(rows(at.coordinate) if isinstance(at, Owned) else at for at in _stored(self))

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return cast(Any, DTensor).__create_write_items__(self, fqn, object) if self._local_tensor.numel() else []

    def __create_chunk_list__(self) -> list[Any]:
        return cast(Any, DTensor).__create_chunk_list__(self) if self._local_tensor.numel() else []

    def to_local(self, **options: Any) -> torch.Tensor:
        """What this rank has; no rows where another one owns the tensor."""
        local = super().to_local(**options)
        return local.view(0, *self.shape[1:]) if local.shape == (0,) else local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole tensor, on all ranks, which have to call this."""
        return gather([self])[id(self)]

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        """This tensor placed otherwise; all ranks have to call this."""
        if placements is not None and tuple(placements) == self.placements:
            return self
        return _sent(self).redistribute(device_mesh, placements, **options)


def wrap(local: torch.Tensor, devices: DeviceMesh | None, placed: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of global `shape` with this local tensor, which may be in host memory; no communication."""
    assert devices is not None, "only a world of several ranks shards"
    kind = OwnedTensor if any(isinstance(placement, Owned) for placement in placed) else DTensor
    return _torch.dtensor(kind, local, devices, placed, shape)


def placed_as(target: DTensor, value: DTensor) -> DTensor:
    """`value` placed as `target`, of its shape; all ranks have to call this."""
    if isinstance(target, OwnedTensor):
        return cast(DTensor, torch.empty_like(target.detach(), dtype=value.dtype).copy_(value))
    return value.redistribute(placements=target.placements)


def _stored(tensor: Any) -> tuple[Any, ...]:
    return tensor._spec.placements


def _is_of_elements(func: Any) -> bool:
    """Whether each element of what an op makes follows from the elements at its place."""
    if torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.data_dependent_output in func.tags:
        return False
    name = packet_name(func)
    reduces = name.startswith(("_foreach_norm", "_foreach_max", "_foreach_powsum"))
    return name in _COPIES or name.endswith("_like") or (is_pointwise(func) and not reduces)


def _leaves(args: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _torch.tree_flatten(args)[0] if isinstance(leaf, torch.Tensor)]


def _first(args: Any) -> OwnedTensor:
    return next(leaf for leaf in _leaves(args) if isinstance(leaf, OwnedTensor))


def _pieces(value: Any, args: Sequence[Any]) -> Any:
    """An argument of an op of elements as this rank has it: like the first tensor that is owned, or, of an op on lists,
    like the tensor at its place in the first list.
    """
    if isinstance(value, (list, tuple)) and isinstance(args[0], (list, tuple)):
        return list(map(_piece, cast(Sequence[Any], value), cast(Sequence[Any], args[0])))
    return _torch.tree_map_only(torch.Tensor, partial(_piece, owned=_first(args)), value)


def _piece(value: Any, owned: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if (
        isinstance(value, DTensor)
        and value.placements == getattr(owned, "placements", None)
        and value.shape == owned.shape
    ):
        return _torch.local_tensor(value)
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(owned, DTensor) or (full.dim() and full.shape != owned.shape):
        problem = f"an operand of shape {list(full.shape)} for a tensor of which one stage of a pipeline has everything"
        raise StateError(problem, f"a number, or a tensor of shape {list(owned.shape)}", _NEXT)
    return own_piece(owned, full) if full.dim() else full


def _wrapped(pieces: Any, args: Sequence[Any]) -> Any:
    """What an op of elements has made of pieces."""
    if not isinstance(pieces, torch.Tensor):
        return list(map(_wrapped, cast(Sequence[Any], pieces), zip(args[0], strict=True)))
    owned = _first(args)
    return wrap(pieces, owned.device_mesh, _stored(owned), owned.shape)


def _sent(tensor: OwnedTensor) -> DTensor:
    """A tensor that is owned, as all ranks have it."""
    everywhere = [Replicate()] * tensor.device_mesh.ndim
    return DTensor.from_local(tensor.full_tensor(), tensor.device_mesh, everywhere, run_check=False)
