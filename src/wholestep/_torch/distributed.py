"""Private names of process groups, DTensor and DistributedDataParallel."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

from .placed import Placed

D = TypeVar("D", bound=torch.Tensor)


@cache
def count_our_collectives() -> None:
    """Make torch's CommDebugMode count `all_gather_into_tensor_out` and `all_reduce_`, which its table lacks."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor.debug import _comm_mode

        table: dict[Any, Any] = _comm_mode.NATIVE_TO_PY_MAPPING
        native = torch.ops._c10d_functional
        table.setdefault(native.all_gather_into_tensor_out, table[native.all_gather_into_tensor])
        table.setdefault(native.all_reduce_, table[native.all_reduce])


def default_store() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def launcher_hosts_store() -> bool:
    """Whether torchrun's agent hosts the default store; else rank 0 does, unless a script made the store itself."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def numbers(value: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones in the same memory, which is all that backends send."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def start_exchange(value: torch.Tensor, out: torch.Tensor, group: str) -> torch.Tensor:
    """Start an all-to-all of equal rows of `value` into `out`; `wait_tensor(out)` waits for it.

    `_c10d_functional.all_to_all_single` has no out variant (2.11 to 2.15).
    """
    c10d = cast(Any, torch._C)._distributed_c10d
    work = c10d._resolve_process_group(group).alltoall_base(numbers(out), numbers(value), [], [])
    c10d._register_work(out, work)
    return out


def start_send(value: torch.Tensor, target: int, tag: int, group: str) -> Any:
    """Start to send `value` to the rank `target` of a group; the result has a `wait`, until which `value` is read."""
    c10d = cast(Any, torch._C)._distributed_c10d
    return c10d._resolve_process_group(group).send([numbers(value)], target, tag)


def start_receive(out: torch.Tensor, source: int, tag: int, group: str) -> Any:
    """Start to receive from the rank `source` of a group into `out`, which may be read after the result's `wait`."""
    c10d = cast(Any, torch._C)._distributed_c10d
    return c10d._resolve_process_group(group).recv([numbers(out)], source, tag)


def start_coalesced_gather(
    pieces: Sequence[torch.Tensor], received: Sequence[torch.Tensor], row: torch.Tensor, group: str
) -> torch.Tensor:
    """Start all-gathers of `pieces` into `received`, views of `row`, as one launch; `wait_tensor(row)` waits for all.

    `_c10d_functional.all_gather_into_tensor_coalesced` allocates each result, which needs a wait of its own (2.11 to
    2.15). gloo starts one by one, under a name that crashes it (`backend.gloo.exchange.gather`): only tests do that.
    """
    c10d = cast(Any, torch._C)._distributed_c10d
    sent, got = [numbers(piece) for piece in pieces], [numbers(place) for place in received]
    work = c10d._resolve_process_group(group).allgather_into_tensor_coalesced(got, sent)
    c10d._register_work(row, work)
    return row


def start_coalesced_scatter(
    pieces: Sequence[torch.Tensor], received: Sequence[torch.Tensor], row: torch.Tensor, op: str, group: str
) -> torch.Tensor:
    """Start reduce-scatters of `pieces` into `received`, as `start_coalesced_gather`. `op`: sum, avg, max or min."""
    c10d = cast(Any, torch._C)._distributed_c10d
    options = c10d.ReduceScatterOptions()
    options.reduceOp = getattr(c10d.ReduceOp, op.upper())
    sent, got = [numbers(piece) for piece in pieces], [numbers(place) for place in received]
    work = c10d._resolve_process_group(group).reduce_scatter_tensor_coalesced(got, sent, options)
    c10d._register_work(row, work)
    return row


def forget_shardings() -> None:
    """Clear DTensor's sharding cache, which keeps meshes and their process groups alive.

    `torch._C._clear_DTensor_sharding_propagator_cache` (2.11 to 2.15) has no public equivalent.
    """
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def strided_shard(dim: int, split_factor: int) -> Any:
    """Return DTensor's placement for an axis that shards a dim after an axis that is further inside the mesh."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)


def dtensor(kind: type, local: torch.Tensor, devices: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return a DTensor of this `kind` with a local tensor on any device: `DTensor.from_local` would move it."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    spec = DTensorSpec(devices, tuple(placements), tensor_meta=meta)
    return cast(Any, kind)(local, spec, requires_grad=False)


def dispatched(kind: type[D]) -> type[D]:
    """`kind`, a DTensor, as a class decorator: ops on it reach its `__torch_dispatch__`. Torch 2.11 takes it for a
    DTensor and calls that of C++, so functions of torch run in a mode that asks `kind`.
    """
    from torch.distributed.tensor import DTensor

    if "NotImplementedError" not in DTensor.__torch_dispatch__.__code__.co_names:
        return kind

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kinds: list[Any] = [k for k in (Placed, kind) if any(issubclass(t, k) for t in types)]
            dispatch = kinds[0].__torch_dispatch__ if kinds else None
            return dispatch(func, types, args, kwargs) if dispatch else func(*args, **(kwargs or {}))

    def function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), Asked():
            return func(*args, **(kwargs or {}))

    type.__setattr__(kind, "__torch_function__", classmethod(function))
    return kind


class OwnedRows(Shard):
    """`dtensor.Owned` as torch knows it, which stores shards alone: of dim 0, one rank has all rows, others none."""

    def __init__(self, coordinate: int) -> None:
        super().__init__(0)
        self.coordinate = coordinate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnedRows) and other.coordinate == self.coordinate

    def __hash__(self) -> int:
        return hash(("OwnedRows", self.coordinate))

    def __repr__(self) -> str:
        return f"Owned({self.coordinate})"

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, int]:
        return curr_local_size if rank == self.coordinate else 0, 0


def shard_of(placement: object) -> tuple[int, int] | None:
    """Return the dim and the split factor of a shard placement (1 for a plain shard); None for other placements."""
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(placement, (Shard, _StridedShard)):
        return None
    shard = cast(Any, placement)
    return int(shard.dim), int(getattr(shard, "split_factor", 1))


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, by reference; any other tensor unchanged."""
    inner = getattr(value, "_local_tensor", None)
    return value.detach() if inner is None else inner


local_tensors: Callable[[Sequence[Any]], Iterable[torch.Tensor]] = partial(map, attrgetter("_local_tensor"))
"""The local tensors of DTensors, by reference."""


def ddp_in_use() -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the DDP module whose forward is running, the innermost one if nested."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def buckets_are_rebuilt(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the reducer has rebuilt its buckets in the order of arrival of the gradients."""
    return ddp._has_rebuilt_buckets


def first_bucket_bytes() -> int:
    """Return DDP's default cap of the first bucket, in bytes."""
    return int(cast(Any, torch.distributed)._DEFAULT_FIRST_BUCKET_BYTES) if torch.distributed.is_available() else 2**20


StoredTensor = tuple[str, torch.dtype, Sequence[int], Sequence[tuple[Any, ...]]]
"""Name, dtype, shape and parts of a tensor: of each part offsets, sizes, file, first byte and number of bytes."""


def dcp_metadata(tensors: Sequence[StoredTensor]) -> object:
    """The `Metadata` of torch.distributed.checkpoint for tensors in files."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    about, where = dict[str, Any](), dict[Any, Any]()
    for name, dtype, shape, parts in tensors:
        chunks = [dcp.ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes, *_ in parts]
        about[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), chunks)
        for index, (begin, _, file, start, length) in enumerate(parts):
            where[dcp.MetadataIndex(name, begin, index)] = _StorageInfo(file, start, length)
    return dcp.Metadata(about, None, where)
