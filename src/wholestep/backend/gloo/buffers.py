"""Memory that collectives send from and receive into, kept from step to step.

What is allocated anew comes from the system in pages that are zeroed one fault at a time, and goes back when it is
freed: on the CPU that can take as long as the copies themselves. Devices have allocators that keep memory; nothing is
done there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor
from torch.fx import Graph

from ... import _torch
from ...passes import bucket, write_into_buckets
from ...tuning import TUNING
from .exchange import add_parts, gather, swap


@dataclass(eq=False)
class _Buffer:
    memory: Tensor  # one row
    holders: int  # of its storage, while nobody but this pool holds it
    used: int = 0

    @property
    def is_free(self) -> bool:
        return _torch.storage_holders(self.memory) <= self.holders


@dataclass
class Buffers:
    """Tensors to be written to, in memory that is used again once every tensor in it is gone. `kept_bytes` is at most
    twice what was in use at once.
    """

    buffers: list[_Buffer] = field(default_factory=list[_Buffer])
    most_bytes: int = 0
    takes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of all memory that is held."""
        return sum(buffer.memory.nbytes for buffer in self.buffers)

    def take(self, numel: int, example: Tensor) -> Tensor:
        """One row of `numel` elements with the dtype and device of `example`; what is in it is not said."""
        if example.device.type != "cpu" or numel * example.itemsize < TUNING.pooled_bytes:
            return example.new_empty(numel)
        self.takes += 1
        alike, most = (b for b in self.buffers if b.memory.dtype == example.dtype), numel * TUNING.pool_fit
        fits = (b for b in alike if numel <= b.memory.numel() <= most and b.is_free)
        buffer = min(fits, key=lambda b: b.memory.numel(), default=None) or self._more(example.new_empty(numel))
        buffer.used = self.takes
        return buffer.memory[:numel]

    def _more(self, memory: Tensor) -> _Buffer:
        free = sorted((b for b in self.buffers if b.is_free), key=lambda b: b.used)
        total_bytes = self.kept_bytes
        in_use = total_bytes - sum(b.memory.nbytes for b in free) + memory.nbytes
        self.most_bytes = max(self.most_bytes, in_use)
        for old in free:
            if total_bytes + memory.nbytes <= TUNING.pool_kept * self.most_bytes:
                break
            total_bytes -= old.memory.nbytes
            self.buffers.remove(old)
        self.buffers.append(_Buffer(memory, _torch.storage_holders(memory)))
        return self.buffers[-1]

    # What the graph calls in place of the functions of the same names.
    def join_rows(self, pieces: Sequence[Tensor], parts: int) -> Tensor:
        """See `bucket.join_rows`."""
        joined = self.take(sum(piece.numel() for piece in pieces), pieces[0])
        torch.cat([piece.reshape(parts, -1) for piece in pieces], 1, out=joined.view(parts, -1))
        return joined

    def new_bucket(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `fill.new_bucket`."""
        return self.take(numel, torch.empty(0, dtype=dtype, device=device))

    def part_of_gather(
        self, joined: Tensor, outlines: Sequence[Tensor | tuple[int, ...]], number: int, parts: int
    ) -> Tensor:
        """See `bucket.part_of_gather`."""
        rows = bucket.rows_of_gather(joined, outlines, number, parts)
        outline = outlines[number]
        shape = tuple(outline.shape) if isinstance(outline, Tensor) else outline
        full_shape = (parts * shape[0], *shape[1:])
        if not rows.is_contiguous():
            rows = self.take(prod(full_shape), rows).view(rows.shape).copy_(rows)
        return rows.view(full_shape)

    def gather(self, value: Tensor, parts: int, group: str) -> Tensor:
        """See `exchange.gather`."""
        if value.device.type != "cpu" or value.is_complex():
            return gather(value, parts, group)
        gathered = self.take(value.numel() * parts, value).view(value.shape[0] * parts, *value.shape[1:])
        return torch.ops._c10d_functional.all_gather_into_tensor_out.default(value, parts, group, out=gathered)

    def swap(self, value: Tensor, parts: int, group: str) -> Tensor:
        """See `exchange.swap`."""
        if value.device.type != "cpu":
            return swap(value, parts, group)
        return _torch.start_exchange(value, self.take(value.numel(), value).view(value.shape), group)

    def add_parts(self, value: Tensor, parts: int, op: str) -> Tensor:
        """See `exchange.add_parts`."""
        rows = value.view(parts, value.shape[0] // parts, *value.shape[1:])
        total = self.take(rows[0].numel(), value).view(rows.shape[1:])
        return add_parts(value, parts, op, total)


def with_buffers(graph: Graph, buffers: Buffers) -> Graph:
    """`graph`, bound to a rank, with its collectives in `buffers`."""
    ours = {
        bucket.join_rows: buffers.join_rows, bucket.part_of_gather: buffers.part_of_gather,
        write_into_buckets.new_bucket: buffers.new_bucket, gather: buffers.gather, swap: buffers.swap,
        add_parts: buffers.add_parts,
    }  # fmt: skip
    for node in graph.nodes:
        if node.op == "call_function" and node.target in ours:
            node.target = ours[node.target]
    return graph
