"""Layer, group, RMS and batch norm, forward and backward: whole over what they normalize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .call import Call
from .registry import Bind, rule
from .terms import aten, dims_of, ops, rand, term, text


# -- over trailing dims -------------------------------------------------------------------
def _trailing(call: Call) -> tuple[str, str, str]:
    """Terms of the input, of the weights, of the statistics."""
    count = len(call.argument("normalized_shape"))
    names = [f"n{i}" for i in range(count)]
    weights = term(names, names)
    return f"... {weights}", weights, " ".join(["...", *["1"] * count])


@rule(
    aten.native_layer_norm.default, samples=lambda: [(rand(5, 7, 4, 3), [4, 3], rand(4, 3), rand(4, 3, seed=1), 1e-5)]
)
def layer_norm(call: Call) -> Bind:
    """(input, weight, bias) -> output, mean, reciprocal deviation."""
    full, weights, stats = _trailing(call)
    return Bind(text([full, weights, weights], [full, stats, stats]))


def _layer_norm_gradients() -> Iterator[tuple[Any, ...]]:
    x, weight, bias = rand(5, 7, 4), rand(4), rand(4, seed=1)
    _, mean, rstd = aten.native_layer_norm(x, [4], weight, bias, 1e-5)
    yield rand(5, 7, 4, seed=2), x, [4], mean, rstd, weight, bias, [True, True, True]


@rule(aten.native_layer_norm_backward.default, samples=_layer_norm_gradients)
def layer_norm_backward(call: Call) -> Bind:
    """Gradients of the weights are sums over all rows."""
    full, weights, stats = _trailing(call)
    return Bind(text([full, full, stats, stats, weights, weights], [full, weights, weights]), "0")


@rule(ops("_fused_rms_norm"), samples=lambda: [(rand(5, 7, 4), [4], rand(4), 1e-5)])
def rms_norm(call: Call) -> Bind:
    """(input, weight) -> output, reciprocal root of the mean square."""
    full, weights, stats = _trailing(call)
    return Bind(text([full, weights], [full, stats]))


@rule(ops("rms_norm"), samples=lambda: [(rand(5, 7, 4), [4], rand(4), 1e-5)])
def plain_rms_norm(call: Call) -> Bind:
    """(input, weight) -> output."""
    full, weights, _ = _trailing(call)
    return Bind(text([full, weights], [full]))


def _rms_norm_gradients() -> Iterator[tuple[Any, ...]]:
    x = rand(5, 7, 4)
    yield rand(5, 7, 4, seed=2), x, [4], x.square().mean(-1, keepdim=True).rsqrt(), rand(4), [True, True]


@rule(ops("_fused_rms_norm_backward"), samples=_rms_norm_gradients)
def rms_norm_backward(call: Call) -> Bind:
    """Gradients of the input and of the weight, a sum over all rows."""
    full, weights, stats = _trailing(call)
    return Bind(text([full, full, stats, weights], [full, weights]), "0")


# -- over groups of channels ---------------------------------------------------------------
def _channels(call: Call) -> str:
    spatial = [f"s{i}" for i in range(len(call.shape(0)) - 2)]
    return term(["n", "c", *spatial], ["c", *spatial])


@rule(
    aten.native_group_norm.default,
    samples=lambda: [(rand(5, 6, 3, 2), rand(6), rand(6, seed=1), 5, 6, 6, 3, 1e-5)],
)
def group_norm(call: Call) -> Bind:
    """(input, weight, bias) -> output, mean and reciprocal deviation of each group."""
    full = _channels(call)
    return Bind(text([full, "c!", "c!"], [full, "n g", "n g"]), sizes={"N": "n"})


def _group_norm_gradients() -> Iterator[tuple[Any, ...]]:
    x, weight = rand(5, 6, 3, 2), rand(6)
    _, mean, rstd = aten.native_group_norm(x, weight, None, 5, 6, 6, 3, 1e-5)
    yield rand(5, 6, 3, 2, seed=2), x, mean, rstd, weight, 5, 6, 6, 3, [True, True, True]


@rule(aten.native_group_norm_backward.default, samples=_group_norm_gradients)
def group_norm_backward(call: Call) -> Bind:
    """Gradients of the weights are sums over the batch."""
    full = _channels(call)
    return Bind(text([full, full, "n g!", "n g!", "c!"], [full, "c!", "c!"]), "0", sizes={"N": "n"})


# -- over the batch ------------------------------------------------------------------------
def _batch(call: Call, training: bool) -> str:
    """Where it trains, statistics are over the batch and all places: both stay whole. Channels may be cut."""
    dims = dims_of(call)
    dims[1:2] = ["c"] if len(dims) > 1 else []
    return term(dims, [d for d in dims if d != "c"] if training else [])


def _stats(call: Call, at: int) -> str:
    """`c`, or nothing where an op that does not train returns empty statistics."""
    return "c" if call.made(at) == call.made(0)[1:2] else "*"


_TRAINS = {"_batch_norm_with_update": True, "_batch_norm_with_update_functional": True, "_batch_norm_no_update": False,
           "_native_batch_norm_legit_no_training": False}  # fmt: skip
_X, _CHANNEL = (5, 6, 3), 6


def _batch_norm_samples(stats: bool = True, switch: bool = True) -> Iterator[tuple[Any, ...]]:
    """Arguments with or without running statistics, and with or without the switch for training."""
    weights = rand(_CHANNEL), rand(_CHANNEL, seed=1)
    running = (rand(_CHANNEL, seed=2), rand(_CHANNEL, seed=3).exp()) if stats else ()
    for training in (True, False) if stats and switch else (True,):
        yield rand(*_X), *weights, *running, *([training] if switch else []), 0.1, 1e-5


def batch_norm(call: Call) -> Bind:
    """(input, weight, bias, running statistics) -> output, statistics of the batch, new running statistics."""
    name = str(call.target._overloadpacket.__name__)
    training = _TRAINS[name] if name in _TRAINS else bool(call.argument("training"))
    full = _batch(call, training)
    weights = ["c"] * (len(call.slots) - 1)
    made = [full, *(_stats(call, i) for i in range(1, len(call.outputs)))]
    cut = [d for d in full.split() if not d.endswith("!")]
    same = {} if training else {d: "" for d in cut if d != "c"}
    return Bind(text([full, *weights], made), reduces=same, filled=frozenset(cut))


rule(
    ops("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
        "miopen_batch_norm"), samples=_batch_norm_samples,
)(batch_norm)  # fmt: skip
rule(
    ops("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_with_update_functional",
        "_batch_norm_no_update"), samples=lambda: _batch_norm_samples(switch=False),
)(batch_norm)  # fmt: skip
rule(ops("_native_batch_norm_legit.no_stats"), samples=lambda: _batch_norm_samples(stats=False))(batch_norm)


def _batch_norm_gradients() -> Iterator[tuple[Any, ...]]:
    for train in (True, False):
        stats = rand(6, seed=1), rand(6, seed=2).exp()
        yield rand(5, 6, 3), rand(5, 6, 3, seed=1), rand(6), *stats, *stats, train, 1e-5, [True, True, True]


@rule(ops("cudnn_batch_norm_backward", "miopen_batch_norm_backward"))
@rule(ops("batch_norm_backward"), samples=lambda: [(*given, rand(0).byte()) for given in _batch_norm_gradients()])
@rule(ops("native_batch_norm_backward"), samples=_batch_norm_gradients)
def batch_norm_backward(call: Call) -> Bind:
    """Gradients of the input and of the weights, which sum over the batch. Always trains where the op does not say."""
    full = _batch(call, bool(call.argument("train", call.argument("update", True))))
    terms: list[str] = []
    for slot in call.slots:
        shape = call.shape(slot.positions[0]) if slot.positions else ()
        is_full = slot.name in ("grad_out", "grad_output", "input")
        terms.append(full if is_full else "c" if slot.positions and shape == call.shape(0)[1:2] else "*")
    grad = next(i for i, slot in enumerate(call.slots) if slot.name.startswith("grad"))
    cut = frozenset(d for d in full.split() if not d.endswith("!"))
    return Bind(text(terms, [full, "c", "c"]), str(grad), filled=cut)


# -- weights ------------------------------------------------------------------------------------
def _weight_norm() -> Iterator[tuple[Any, ...]]:
    yield rand(5, 4, 3), rand(5, 1, 1), 0
    yield rand(5, 4, 3), rand(1, 1, 3), 2


@rule(ops("_weight_norm_interface"), samples=_weight_norm)
def weight_norm(call: Call) -> Bind:
    """(directions, lengths) -> weights, norms: whole but for the dim that has lengths of its own."""
    dims = dims_of(call)
    at = dims[int(call.argument("dim", 0)) % len(dims)]
    full, line = term(dims, [d for d in dims if d != at]), " ".join(at if d == at else "1" for d in dims)
    return Bind(text([full, line], [full, line]), filled=frozenset({at}))


def _weight_norm_gradients() -> Iterator[tuple[Any, ...]]:
    for v, g, dim in _weight_norm():
        norms = aten._weight_norm_interface(v, g, dim)[1]
        yield rand(5, 4, 3, seed=3), v, g, norms, dim


@rule(ops("_weight_norm_interface_backward"), samples=_weight_norm_gradients)
def weight_norm_backward(call: Call) -> Bind:
    """Gradients of directions and lengths."""
    dims = dims_of(call)
    at = dims[int(call.argument("dim", 0)) % len(dims)]
    full, line = term(dims, [d for d in dims if d != at]), " ".join(at if d == at else "1" for d in dims)
    return Bind(text([full, full, line, line], [full, line]), "0", filled=frozenset({at}))
