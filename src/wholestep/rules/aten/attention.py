"""Scaled dot product attention of all backends: batch and heads may be sharded, and queries for some kernels.

With grouped queries, query head i uses key and value head i // r, so query heads are a merged dim `(g r)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..call import Call
from ..dsl import aten, rand, row, sample, text
from ..registry import Bind

# Outputs in order; those left out are bookkeeping (random state, lengths) and the same on every rank or never read.
_OUTPUTS = {
    "_scaled_dot_product_flash_attention_for_cpu": ["out", "sums"],
    "_scaled_dot_product_flash_attention": ["out", "sums"],
    "_scaled_dot_product_efficient_attention": ["out", "sums"],
    "_scaled_dot_product_cudnn_attention": ["out", "sums"],
    "_scaled_dot_product_fused_attention_overrideable": ["out", "sums"],
    "_scaled_dot_product_attention_math": ["out", "scores"],
    "_scaled_dot_product_attention_math_for_mps": ["out", "scores"],
    "_flash_attention_forward": ["out", "sums"],
    "_efficient_attention_forward": ["out", "sums"],
    "_cudnn_attention_forward": ["out", "sums"],
}
_GRADIENTS = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": ["query", "key", "value"],
    "_scaled_dot_product_flash_attention_backward": ["query", "key", "value"],
    "_scaled_dot_product_efficient_attention_backward": ["query", "key", "value", "bias"],
    "_scaled_dot_product_cudnn_attention_backward": ["query", "key", "value"],
    "_scaled_dot_product_fused_attention_overrideable_backward": ["query", "key", "value", "bias"],
    "_flash_attention_backward": ["query", "key", "value"],
    "_efficient_attention_backward": ["query", "key", "value", "bias"],
    "_cudnn_attention_backward": ["query", "key", "value"],
}
_ROLES = {
    "query": "query", "key": "key", "value": "value", "out": "out", "grad_out": "out", "grad_out_": "out",
    "logsumexp": "sums", "attn_mask": "bias", "attn_bias": "bias", "bias": "bias", "dropout_mask": "scores",
}  # fmt: skip
_MATH = ("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps")
_CUT_QUERIES = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
                *_MATH)  # fmt: skip
_SEQUENCE_FIRST = {name for name in (*_OUTPUTS, *_GRADIENTS) if not name.startswith("_scaled")}


def attention(call: Call) -> Bind:
    """The rule of any attention op, from the roles of its operands and outputs."""
    name = str(call.target._overloadpacket.__name__)
    terms = _terms(call, name)
    inputs = [terms.get(_ROLES.get(slot.name, ""), "*") for slot in call.slots]
    made = _OUTPUTS.get(name) or _GRADIENTS[name]
    outputs = [terms.get(role, "*") for role in made] + ["*"] * (len(call.outputs) - len(made))
    grad = next((str(i) for i, slot in enumerate(call.slots) if slot.name.startswith("grad_out")), "")
    same = {"v": ""} if name in _MATH else {}  # the weights do not depend on the values
    return Bind(text(inputs, outputs[: len(call.outputs)]), grad, reduces=same, filled=frozenset("bgrq"))


def _terms(call: Call, name: str) -> dict[str, str]:
    """The term of each role. Queries stay whole if a kernel masks by position or pads its sums."""
    shapes = {slot.name: call.shape(slot.positions[0]) for slot in call.slots if slot.positions}
    sequence_first = name in _SEQUENCE_FIRST
    lead = ["b", *(f"b{i}" for i in range(1, len(shapes["query"]) - 3))] if len(shapes["query"]) > 3 else []
    q = "q" if name in _CUT_QUERIES and not call.argument("is_causal") else "q!"
    v = "v" if name in _MATH else "v!"

    def full(heads: str, sequence: str, size: str) -> str:
        middle = [sequence, heads] if sequence_first else [heads, sequence]
        return " ".join([*lead, *middle, size])

    scores = [*lead, "(g r)", q, "k!"]
    bias = next((shape for slot, shape in shapes.items() if _ROLES.get(slot) == "bias"), ())
    return {
        "query": full("(g r)", q, "e!"),
        "key": full("g", "k!", "e!"),
        "value": full("g", "k!", v),
        "out": full("(g r)", q, v),
        "scores": " ".join(scores),
        "bias": f"{{{' '.join(scores)}}}" if bias else "*",
        "sums": _sums(call, shapes, lead, q),
    }


def _sums(call: Call, shapes: dict[str, tuple[int, ...]], lead: list[str], q: str) -> str:
    """(batch, heads, queries), perhaps padded; (heads, all tokens) for packed sequences."""
    shape = shapes.get("logsumexp", call.made(1))
    if q == "q":
        return " ".join([*lead, "(g r)", q])
    rest = [f"l{i}!" for i in range(len(shape))]
    if len(shape) == 2 and not lead:
        return f"(g r) {rest[0]}"
    return " ".join([lead[0] if lead else "c!", "(g r)", *rest[2:]]) if len(shape) > 2 else "*"


# -- samples ------------------------------------------------------------------------------
def _operands(heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    return rand(5, heads, 6, 4), rand(5, kv_heads, 7, 4, seed=1), rand(5, kv_heads, 7, 4, seed=2)


def _cpu() -> Iterator[tuple[Any, ...]]:
    yield *_operands(6, 6), 0.0, True, {}
    yield *_operands(6, 2), 0.0, False, {}
    yield *_operands(3, 3), 0.0, False, {"attn_mask": rand(1, 1, 6, 7, seed=3)}
    yield *_operands(6, 6), 0.0, False, {"attn_mask": rand(5, 6, 6, 7, seed=3)}


def _cpu_gradients() -> Iterator[tuple[Any, ...]]:
    for *given, dropout, causal, more in _cpu():
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(*given, dropout, causal, **more)
        yield rand(*out.shape, seed=5), *given, out, sums, dropout, causal, more


def _math() -> Iterator[tuple[Any, ...]]:
    yield *_operands(6, 6), None, 0.0, True
    yield *_operands(3, 3), rand(6, 7, seed=3), 0.0, False
    yield *_operands(6, 2), None, 0.0, False, None, {"enable_gqa": True}


row(" ".join((*_OUTPUTS, *_GRADIENTS)))(attention)
sample("_scaled_dot_product_flash_attention_for_cpu", _cpu)
sample("_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_gradients)
sample("_scaled_dot_product_attention_math", _math)
