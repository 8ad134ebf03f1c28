"""Attention of all backends, and recurrent layers: batch and heads may be sharded, and queries where keys are whole.

With grouped queries, query head i uses key and value head i // r, so query heads are a merged dim `(g r)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...graph.op_kinds import packet_name
from ..call import Call
from ..dsl import WHOLE, rand, row, sample, text
from ..registry import Bind
from .query_pieces import query_piece

# -- scaled dot product attention ---------------------------------------------------------------
_KERNELS = [
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
]  # fmt: skip
_MATH = ["_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"]
_SEQUENCE_FIRST = [
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
    "_flash_attention_backward", "_efficient_attention_backward", "_cudnn_attention_backward",
]  # fmt: skip
_PADS_SUMS = "_scaled_dot_product_efficient_attention"  # so that sums of pieces are no pieces of the sums
_BY_PIECE = {f"{name}{end}" for name in _KERNELS[:-1] if name != _PADS_SUMS for end in ("", "_backward")}
_ROLES = {
    "query": "query", "key": "key", "value": "value", "out": "out", "grad_out": "out", "grad_out_": "out",
    "logsumexp": "sums", "attn_mask": "bias", "attn_bias": "bias", "bias": "bias", "dropout_mask": "scores",
}  # fmt: skip


@row(" ".join([*_KERNELS, *(f"{name}_backward" for name in _KERNELS), *_MATH, *_SEQUENCE_FIRST]))
def attention(call: Call) -> Bind:
    """The rule of any attention op, from the roles of its operands and outputs.

    Further outputs are bookkeeping (random state, lengths) and the same on every rank or never read.
    """
    name = packet_name(call.target)
    terms = _terms(call, name)
    roles = ["out", "scores" if name in _MATH else "sums"]
    if name.endswith("_backward"):
        roles = ["query", "key", "value", "bias"]
    inputs = [terms.get(_ROLES.get(slot.name, ""), "*") for slot in call.slots]
    outputs = [terms[role] for role in roles] + ["*"] * (len(call.outputs) - len(roles))
    grad = next((str(i) for i, slot in enumerate(call.slots) if slot.name.startswith("grad_out")), "")
    same = {"v": ""} if name in _MATH else {}  # the weights do not depend on the values
    local = {"q": query_piece(call.target)} if name in _BY_PIECE and _shards_queries(call, name) else {}
    rule_text = text(inputs, outputs[: len(call.outputs)])
    return Bind(rule_text, grad, reduces=same, local=local, filled=frozenset("bgrq"))


def _shards_queries(call: Call, name: str) -> bool:
    """Whether ranks may have pieces of the queries. Kernels draw dropout by local index, and have no call for a piece
    of what is both causal and masked.
    """
    causal = call.argument("is_causal")
    if name in _MATH:
        return not causal
    masked = any(slot.positions for slot in call.slots if _ROLES.get(slot.name) == "bias")
    return name in _BY_PIECE and len(call.shape(0)) == 4 and not call.argument("dropout_p") and not (causal and masked)


def _terms(call: Call, name: str) -> dict[str, str]:
    """The term of each role."""
    shapes = {slot.name: call.shape(slot.positions[0]) for slot in call.slots if slot.positions}
    lead = ["b", *(f"b{i}" for i in range(1, len(shapes["query"]) - 3))] if len(shapes["query"]) > 3 else []
    q = "q" if _shards_queries(call, name) else "q!"
    v = "v" if name in _MATH else "v!"

    def full(heads: str, sequence: str, size: str) -> str:
        middle = [sequence, heads] if name in _SEQUENCE_FIRST else [heads, sequence]
        return " ".join([*lead, *middle, size])

    scores = " ".join([*lead, "(g r)", q, "k!"])
    biased = any(_ROLES.get(slot) == "bias" and shape for slot, shape in shapes.items())
    return {
        "query": full("(g r)", q, "e!"),
        "key": full("g", "k!", "e!"),
        "value": full("g", "k!", v),
        "out": full("(g r)", q, v),
        "scores": scores,
        "bias": f"{{{scores}}}" if biased else "*",
        "sums": _sums(shapes.get("logsumexp", call.made(1)), lead, q),
    }


def _sums(shape: tuple[int, ...], lead: list[str], q: str) -> str:
    """(batch, heads, queries), perhaps padded; (heads, all tokens) for packed sequences."""
    if q == "q":
        return " ".join([*lead, "(g r)", q, *["1"] * (len(shape) - 3)])
    if len(shape) == 2 and not lead:
        return "(g r) l!"
    rest = [f"l{i}!" for i in range(2, len(shape))]
    return " ".join([lead[0] if lead else "c!", "(g r)", *rest]) if rest else "*"


def _operands(heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    return rand(5, heads, 6, 4), rand(5, kv_heads, 7, 4, seed=1), rand(5, kv_heads, 7, 4, seed=2)


def _cpu() -> Iterator[tuple[Any, ...]]:
    yield *_operands(6, 6), 0.0, True, {}
    yield *_operands(6, 2), 0.0, False, {}
    yield *_operands(3, 3), 0.0, False, {"attn_mask": rand(1, 1, 6, 7, seed=3)}
    yield *_operands(6, 6), 0.0, False, {"attn_mask": rand(5, 6, 6, 7, seed=3)}


def _math() -> Iterator[tuple[Any, ...]]:
    yield *_operands(6, 6), None, 0.0, True
    yield *_operands(3, 3), rand(6, 7, seed=3), 0.0, False
    yield *_operands(6, 2), None, 0.0, False, None, {"enable_gqa": True}


sample(_KERNELS[0], _cpu)
sample("_scaled_dot_product_attention_math", _math)

# -- recurrent cells and layers on CUDA: gates stay whole -----------------------------------------
row("_thnn_fused_lstm_cell", "n g!, n g!, n h!, g!, g! -> n h, n h, n g")
row("_thnn_fused_lstm_cell_backward_impl", "n h!, n h!, n h!, n h!, n g! -> n g, n h, g")
row("_thnn_fused_gru_cell", "n g!, n g!, n h!, g!, g! -> n h, n w")
row("_thnn_fused_gru_cell_backward", "n h!, n w! -> n g, n g, n h, g, g", linear="0")

# (sequences, weights, states) -> sequences, states; the reserve differs between ranks. Gradients of weights are sums
# over the batch. Packed sequences stay whole.
_HIDDEN, _CELL = "l! n h!", "l! n c!"
_FORWARD = f"{{0}}, *, *, {_HIDDEN}, {_CELL}, * -> {{1}}, {_HIDDEN}, {_CELL}*, *, *"
_BACKWARD = (
    f"{{0}}, *, *, {_HIDDEN}, {_CELL}, {{1}}, {{1}}, {_HIDDEN}, {_CELL}, *, * -> {{0}}, {_HIDDEN}, {_CELL}*, ...!+"
)
for _name, _text in (("_cudnn_rnn", _FORWARD), ("_cudnn_rnn_backward", _BACKWARD)):
    _rows, _columns = _text.format("n t! i!", "n t! o!"), _text.format("t! n i!", "t! n o!")
    row(_name, f"batch_sizes: {WHOLE} | batch_first: {_rows} | {_columns}")
