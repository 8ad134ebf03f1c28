"""The work of one op on one rank, as the cost model describes it to a device."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Work:
    """What one op computes and how many bytes it moves.

    Args:
        moved_bytes: read plus written.
        flops: multiplications and additions; 0 for elementwise ops.
        dtype: of the arithmetic, without `torch.`.
        matmul: (b, m, n, k) of a matrix product.
        attention: (batch, heads, queries, keys, width) of fused attention.
        causal, backward: of that attention.
        streams: bound by memory bandwidth: at most a sum or a product for each byte (`graph.op_kinds.streams`).
        bucketed: copies into or out of a bucket of a collective.
    """

    moved_bytes: float
    flops: float = 0.0
    dtype: str = "float32"
    matmul: tuple[int, int, int, int] | None = None
    attention: tuple[int, int, int, int, int] | None = None
    causal: bool = False
    backward: bool = False
    streams: bool = True
    bucketed: bool = False


def product_work(b: int, m: int, n: int, k: int, dtype: str) -> Work:
    """The work of `b` products of (m, k) by (k, n), each operand and result moved once."""
    moved = b * (m * k + k * n + m * n) * item_bytes(dtype)
    return Work(moved, 2.0 * prod((b, m, n, k)), dtype, matmul=(b, m, n, k))


def attention_work(
    batch: int, heads: int, queries: int, keys: int, width: int, dtype: str, *, causal: bool, backward: bool
) -> Work:
    """The work of fused attention. A backward has five products, a forward two; masked elements count as computed."""
    flops = 4.0 * batch * heads * queries * keys * width * (2.5 if backward else 1.0)
    moved = batch * heads * (2 * queries + 2 * keys) * width * item_bytes(dtype) * (2 if backward else 1)
    return Work(moved, flops, dtype, None, (batch, heads, queries, keys, width), causal, backward)


_ITEM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a float dtype, given by name without `torch.`; 4 for any other dtype."""
    return _ITEM_BYTES.get("float8" if dtype.startswith("float8") else dtype, 4)
