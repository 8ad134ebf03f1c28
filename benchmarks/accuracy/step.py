"""Seconds of a transformer's training step, from the cost functions that simulation uses: `Hardware`'s.

A layer's products, attention and ops on elements are priced one by one; a layer is then as slow as the slowest of its
device, its host (which starts op by op unless compiled) and the communication that may hide behind it.
"""

from dataclasses import dataclass
from math import log2

import wholestep as ws
from benchmarks.accuracy.config import Run
from benchmarks.accuracy.read import data_sheet

_HALF, _FULL = 2, 4  # bytes
_BUCKET = 25 << 20
# of a forward's ops, that are started again in the backward
_AGAIN = {"full": 1.0, "ops": 0.7, "attention": 0.2, "none": 0.0}


@dataclass(frozen=True)
class Host:
    """What starting ops takes: microseconds of one in a forward under Megatron-DeepSpeed's Python (others take the
    device's `host_us`); what autograd takes for one, as a share of that.
    """

    megatron_us: float = 57.0
    backward: float = 0.1


HOST = Host()


@dataclass(frozen=True)
class Part:
    """One layer, or the ends of the model: microseconds of the device forward and backward, ops of the forward."""

    forward_us: float
    backward_us: float
    again_us: float
    ops: float
    exposed_us: float = 0.0


def step_s(run: Run, hardware: ws.Hardware, starting: Host = HOST) -> float:
    """Seconds of one step."""
    layer, ends = _layer(run, hardware), _ends(run, hardware)
    gather, scatter = _sharing_us(run, hardware, run.layer_parameters // run.tp)
    slower = data_sheet(hardware).contention - 1

    def beside(compute: float, sent: float) -> float:
        return max(compute, sent) + slower * min(compute, sent)

    forward = beside(layer.forward_us + layer.exposed_us / 3, gather)
    backward = beside(layer.backward_us + layer.again_us + 2 * layer.exposed_us / 3, gather + scatter)
    first, last = _sharing_us(run, hardware, run.vocabulary * run.width // run.tp)
    edges = (gather + scatter + first + last) if run.style == "full" else 0.0
    host, again = _host_us(run, hardware, starting), _AGAIN[run.ac] * run.checkpointed
    ahead = max(run.layers * forward + ends.forward_us + ends.exposed_us, (run.layers * layer.ops + ends.ops) * host)
    back_ops = run.layers * layer.ops * (again + 2 * starting.backward) + 2 * ends.ops * starting.backward
    back = max(run.layers * backward + ends.backward_us, back_ops * host)
    once = _reduce_us(run, hardware, run.layers * (layer.backward_us + layer.again_us)) + _update_us(run, hardware)
    return (run.accumulate * (ahead + back + edges) + once) / 1e6


def _host_us(run: Run, hardware: ws.Hardware, starting: Host) -> float:
    """Of one op. Ranks that share a layer wait in each for the slowest of them, the more the more there are."""
    own = starting.megatron_us if run.slow_host else data_sheet(hardware).host_us
    return own * (1 + 0.06 * log2(run.tp))


def _layer(run: Run, hardware: ws.Hardware) -> Part:
    tokens, tp = run.tokens, run.tp
    products = [
        (run.head * (run.heads + 2 * max(run.kv_heads, tp)) // tp, run.width), (run.width, run.width // tp),
        *([(run.hidden // tp, run.width)] * (2 if run.gated else 1)), (run.width, run.hidden // tp),
    ]  # fmt: skip
    forward = sum(hardware.matmul_us(1, tokens, n, k) for n, k in products)
    backward = sum(hardware.matmul_us(1, tokens, k, n) + hardware.matmul_us(1, n, k, tokens) for n, k in products)
    attention, attention_back, attention_ops = _attention(run, hardware)
    elements, ops = _elements(run, hardware)
    exposed = 0.0
    if tp > 1:
        whole = tokens * run.width * _HALF
        kinds = ("all_gather", "reduce_scatter") if run.sequence else ("all_reduce",)
        once = sum(hardware.group_us(kind, whole, tp, min(tp, run.per_node)) for kind in kinds)
        exposed = once * (4 + 2 * run.checkpointed if run.ac == "full" else 4)
    again = {
        "full": (forward + attention + elements) * run.checkpointed,
        "ops": forward / 2 + elements, "attention": 0.0 if run.flash else attention, "none": 0.0,
    }[run.ac]  # fmt: skip
    ops_forward = len(products) + attention_ops + ops
    return Part(forward + attention + elements, backward + attention_back + 2 * elements, again, ops_forward, exposed)


def _attention(run: Run, hardware: ws.Hardware) -> tuple[float, float, int]:
    """Forward, backward and the ops of a forward."""
    heads, length = run.heads // run.tp, run.length
    if run.flash:
        given = run.micro, heads, length, length, run.head
        return hardware.attention_us(*given), hardware.attention_us(*given, backward=True), 6
    scores = run.micro * heads * length * length * _HALF
    batch = run.micro * heads
    one = hardware.matmul_us(batch, length, length, run.head) + hardware.matmul_us(batch, length, run.head, length)
    # scaled, masked and softmax as one kernel reads and writes; dropout reads and writes a mask of half the bytes
    if batch % 4:
        # Megatron's fused softmax takes four heads at a time: else scaling, mask, softmax and casts run one by one
        return one + hardware.bytes_us(12 * scores), 2 * one + hardware.bytes_us(12 * scores), 17
    return one + hardware.bytes_us(4.5 * scores), 2 * one + hardware.bytes_us(6 * scores), 10


def _elements(run: Run, hardware: ws.Hardware) -> tuple[float, int]:
    """Norms, residuals, activations, rotations, casts: microseconds of a forward, and how many ops those are."""
    wide = run.tokens * run.width * _HALF / (run.tp if run.sequence else 1)
    hidden, qkv = run.tokens * run.hidden * _HALF / run.tp, run.tokens * run.width * _HALF / run.tp
    passes = 2 * 2 + 2 * 3  # two norms, two residuals
    if run.compiled:
        moved, ops = (passes - 4) * wide + (3 if run.gated else 2) * hidden + 2 * qkv, 6
    elif run.gated:
        # norms of these models go through float32 op by op
        moved, ops = (passes + 8) * wide + 5 * hidden + 8 * qkv, 24
    else:
        moved, ops = (passes + (0 if run.flash else 6)) * wide + (2 if run.flash else 4) * hidden + 2 * qkv, 14
    return hardware.bytes_us(moved), ops


def _ends(run: Run, hardware: ws.Hardware) -> Part:
    """Embedding, last norm, logits and loss."""
    tokens, vocabulary = run.tokens, run.vocabulary // run.tp
    product = hardware.matmul_us(1, tokens, vocabulary, run.width)
    back = hardware.matmul_us(1, tokens, run.width, vocabulary) + hardware.matmul_us(1, vocabulary, run.width, tokens)
    # cast to float32, log-softmax and its gradient, cast back
    loss = hardware.bytes_us(tokens * vocabulary * (24 if run.compiled else 40))
    lookup = hardware.bytes_us(tokens * run.width * 16)
    exposed = 0.0
    if run.tp > 1:
        exposed = 2 * hardware.group_us("all_reduce", tokens * run.width * _HALF, run.tp, min(run.tp, run.per_node))
    return Part(product + loss / 2 + lookup, back + loss / 2 + lookup, 0.0, 60, exposed)


def _sharing_us(run: Run, hardware: ws.Hardware, parameters: int) -> tuple[float, float]:
    """Gathering so many parameters of a rank's layer in half precision, and scattering their gradients."""
    if run.style != "full" or run.shard == 1:
        return 0.0, 0.0
    per_node = max(1, run.per_node // run.tp)
    near = min(run.shard, per_node)
    gather = hardware.group_us("all_gather", parameters * _HALF, run.shard, near)
    wide = _HALF if run.pure else _FULL
    scatter = hardware.group_us("reduce_scatter", parameters * wide, run.shard, near)
    if run.replicate > 1:
        between = max(1, per_node // run.shard)
        scatter += hardware.group_us("all_reduce", parameters * wide / run.shard, run.replicate, between)
    return gather, scatter


def _reduce_us(run: Run, hardware: ws.Hardware, hidden_us: float) -> float:
    """What reducing the gradients of whole parameters adds to a step, and gathering parameters where ranks share the
    update.
    """
    if run.style == "full" or run.replicate * run.shard == 1:
        return 0.0
    ranks, size = run.replicate * run.shard, run.parameters // run.tp * _HALF
    near = min(ranks, max(1, run.per_node // run.tp))
    if run.style == "replicate":
        sent, last = (
            hardware.group_us("all_reduce", size, ranks, near),
            hardware.group_us("all_reduce", _BUCKET, ranks, near),
        )
        return max(sent - hidden_us, last) if run.overlapped else sent
    scatter = hardware.group_us("reduce_scatter", 2 * size, ranks, near)
    gather = hardware.group_us("all_gather", size, ranks, near)
    return max(scatter - hidden_us, 0.0) + max(gather - hidden_us / 2, gather / 4)


def _update_us(run: Run, hardware: ws.Hardware) -> float:
    """Adam in float32 (seven accesses, and the norm of the gradients), and casts from and to half precision."""
    shared = 1 if run.style == "replicate" else run.replicate * run.shard if run.style != "full" else run.shard
    return hardware.bytes_us(run.parameters / run.tp / shared * (7 * _FULL + _FULL + 2 * _HALF))
