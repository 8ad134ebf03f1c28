"""Process groups, DTensor and DistributedDataParallel."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch


def count_our_collectives() -> None:
    """Let torch's CommDebugMode count a gather's out variant and an all-reduce in place: its table lacks them."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor.debug import _comm_mode

        table: dict[Any, Any] = _comm_mode.NATIVE_TO_PY_MAPPING
        native = torch.ops._c10d_functional
        table.setdefault(native.all_gather_into_tensor_out, table[native.all_gather_into_tensor])
        table.setdefault(native.all_reduce_, table[native.all_reduce])


def default_store() -> Any:
    """The key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def start_exchange(value: torch.Tensor, out: torch.Tensor, group: str) -> torch.Tensor:
    """Equal rows of `value` go to the ranks of a registered group, theirs into `out`; `wait_tensor(out)` waits for it.

    As `_c10d_functional.all_to_all_single`, which has no variant that is given its result (2.11 to 2.15).
    """
    c10d = cast(Any, torch._C)._distributed_c10d
    work = c10d._resolve_process_group(group).alltoall_base(out, value, [], [])
    c10d._register_work(out, work)
    return out


def forget_shardings() -> None:
    """Drop DTensor's table of shardings met, which holds meshes and, through them, process groups.

    `torch._C._clear_DTensor_sharding_propagator_cache` (2.11 to 2.15): there is no public way to empty it.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def strided_shard(dim: int, split_factor: int) -> Any:
    """DTensor's placement for an inner axis sharding a dim that an outer-in-layout axis shards too."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def dtensor(
    local: torch.Tensor, devices: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> Any:
    """A DTensor around this rank's piece, wherever that lies: `DTensor.from_local` moves it to the mesh's devices."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(devices, tuple(placements), tensor_meta=whole)
    return cast(Any, DTensor)(local, spec, requires_grad=False)


def shard_of(placement: object) -> tuple[int, int] | None:
    """The dim that a placement shards and its split factor, 1 for a plain shard; None for other placements."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(placement, (Shard, _StridedShard)):
        return None
    known = cast(Any, placement)
    return int(known.dim), int(getattr(known, "split_factor", 1))


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """The tensor this rank holds of a DTensor, by reference; other tensors as they are."""
    inner = getattr(value, "_local_tensor", None)
    return value.detach() if inner is None else inner


def ddp_in_use() -> torch.nn.parallel.DistributedDataParallel | None:
    """The DDP module whose forward runs now; the inner one where they are nested."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def buckets_are_settled(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """True once the reducer has made its buckets anew, in the order in which gradients first came."""
    return ddp._has_rebuilt_buckets


def first_bucket_bytes() -> int:
    """DDP's default limit of the bucket that is reduced first, in bytes."""
    return int(cast(Any, torch.distributed)._DEFAULT_FIRST_BUCKET_BYTES) if torch.distributed.is_available() else 2**20
