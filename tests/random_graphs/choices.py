"""What a random program may do next: each choice takes a builder and adds one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.random_graphs.builder import SIZES, Builder, Unfit, is_real

aten = torch.ops.aten
Choice = Callable[[Builder], None]


def _above(x: Tensor) -> Tensor:
    return x.abs() + 0.5


UNARY: tuple[Callable[[Tensor], Any], ...] = (
    torch.relu, torch.tanh, torch.sigmoid, torch.neg, torch.abs, torch.square, torch.cos, torch.exp, F.gelu, F.silu,
    F.softplus, F.leaky_relu, F.elu, F.hardtanh, torch.erf, torch.atan, lambda x: _above(x).sqrt(),
    lambda x: _above(x).log(), lambda x: _above(x).rsqrt(), lambda x: _above(x).reciprocal(), lambda x: x * 1.5,
    lambda x: x + 0.5, lambda x: 2.0 - x, lambda x: x / 3, lambda x: x**3, lambda x: x.clamp(-0.5, 1.0),
    lambda x: x.clamp(min=0.1), lambda x: torch.where(x > 0.1, x, -x), lambda x: x.masked_fill(x > 0.3, 0.0),
    lambda x: (x > 0.2).to(x.dtype), lambda x: x.float().double(), lambda x: x.sign() * x, lambda x: x.clone(),
    lambda x: torch.ones_like(x) - x, lambda x: torch.zeros_like(x), lambda x: torch.full_like(x, 0.5) * x,
    lambda x: x + torch.arange(x.shape[-1]), lambda x: x * x.new_ones(x.shape), lambda x: x - x.new_zeros(x.shape),
)  # fmt: skip
BINARY: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: x / _above(y), torch.hypot,
    lambda x, y: torch.where(x > y, x, y * 2), lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: torch.addcmul(x, x, y, value=0.5),
    lambda x, y: torch.addcdiv(x, x, _above(y), value=-0.1), lambda x, y: x + y + x,
    lambda x, y: torch.logaddexp(x, y), lambda x, y: (x > y) & (y > 0),
)  # fmt: skip


def unary(b: Builder) -> None:
    b.call(b.rng.choice(UNARY), b.pick())


def binary(b: Builder) -> None:
    x = b.pick()
    pair = [x, b.broadcasting(x)]
    b.rng.shuffle(pair)
    b.call(b.rng.choice(BINARY), *pair)


# -- products -----------------------------------------------------------------------------
def product(b: Builder) -> None:
    x = b.pick(low=1)
    *lead, k = b.of(x).shape
    n = b.rng.choice(SIZES)
    kind = b.rng.choice(["mm", "linear", "bias", "bmm", "baddbmm", "gram", "addmm", "mv", "outer"])
    if kind in ("linear", "bias"):
        b.call(F.linear, x, b.like((n, k)), *([b.like((n,))] if kind == "bias" else []))
    elif kind == "mm":
        b.call(torch.matmul, x, b.like((k, n)))
    elif kind == "addmm" and len(lead) == 1:
        bias = b.like(b.rng.choice([(n,), (lead[0], n), (1, n), (lead[0], 1)]))
        b.call(lambda i, x, y: torch.addmm(i, x, y, beta=0.5, alpha=2), bias, x, b.like((k, n)))
    elif kind == "bmm" and len(lead) == 2:
        b.call(torch.bmm, x, b.like((lead[0], k, n)))
    elif kind == "baddbmm" and len(lead) == 2:
        b.call(torch.baddbmm, b.like((lead[0], lead[1], n)), x, b.like((lead[0], k, n)))
    elif kind == "gram":
        b.call(lambda x: x @ x.transpose(-1, -2), x)
    elif kind == "mv" and len(lead) == 1:
        b.call(torch.mv, x, b.like((k,)))
    elif kind == "outer" and not lead:
        b.call(torch.outer, x, b.like((n,)))
    else:
        raise Unfit


# -- views -----------------------------------------------------------------------------
def _factors(b: Builder, count: int) -> list[int]:
    """`count` as a product of random sizes."""
    out: list[int] = []
    while count > 1 and len(out) < 3:
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        out.append(b.rng.choice(divisors))
        count //= out[-1]
    return [*out, count] if count > 1 or not out else out


def reshape(b: Builder) -> None:
    x = b.pick()
    shape = list(b.of(x).shape)
    kind = b.rng.choice(["any", "split", "merge", "merge", "flat"])
    if kind == "any":
        shape = _factors(b, b.of(x).numel())
    elif kind == "flat":
        shape = [b.of(x).numel()]
    elif kind == "split":
        d = b.dim(x)
        shape[d : d + 1] = _factors(b, shape[d])
    else:
        d = b.dim(x)
        if d + 1 >= len(shape):
            raise Unfit
        shape[d : d + 2] = [shape[d] * shape[d + 1]]
    b.call(lambda x: x.reshape(shape), x)


def turn(b: Builder) -> None:
    x = b.pick(low=2)
    order = list(range(b.of(x).dim()))
    b.rng.shuffle(order)
    i, j = order[:2]
    b.call(b.rng.choice([lambda x: x.permute(order), lambda x: x.transpose(i, j)]), x)


def spread(b: Builder) -> None:
    x = b.pick(high=3)
    shape = [b.rng.choice(SIZES) if n == 1 else n for n in b.of(x).shape]
    lead, d = [b.rng.choice(SIZES)] * b.rng.randint(0, 1), b.rng.randint(0, b.of(x).dim())
    n = b.rng.choice([1, 2, 3])
    b.call(
        b.rng.choice(
            [
                lambda x: x.expand(*lead, *shape), lambda x: x.unsqueeze(d), lambda x: x.repeat(n, *[1] * x.dim()),
                lambda x: x.repeat(*[n] * max(x.dim(), 1)), lambda x: x.repeat_interleave(n, 0),
                lambda x: x.expand(*lead, *shape).clone(),
            ]
        ), x,
    )  # fmt: skip


def squeeze(b: Builder) -> None:
    x = b.pick(lambda v: is_real(v) and 1 in v.shape)
    d = list(b.of(x).shape).index(1)
    b.call(b.rng.choice([lambda x: x.squeeze(), lambda x: x.squeeze(d)]), x)


def cut(b: Builder) -> None:
    x = b.pick(low=1)
    d = b.dim(x)
    n = b.of(x).shape[d]
    start, end, step = b.rng.randrange(n), b.rng.randint(1, n), b.rng.choice([1, 1, 1, 2])
    size, many = b.rng.randint(1, n), b.rng.randint(1, 3)
    b.call(
        b.rng.choice(
            [
                lambda x: aten.slice.Tensor(x, d, min(start, end - 1), end, step), lambda x: x.select(d, start),
                lambda x: x.split(size, d), lambda x: x.chunk(many, d), lambda x: x.narrow(d, start, n - start),
                lambda x: x.unbind(d)[:3], lambda x: x.unfold(d, size, 1 + many), lambda x: x.roll(start, d),
                lambda x: x.flip(d), lambda x: x.tril(start - 1), lambda x: x.triu(many - 2), lambda x: x.diagonal(),
            ]
        ), x,
    )  # fmt: skip


def pad(b: Builder) -> None:
    x = b.pick(low=1, high=4)
    sizes = [b.rng.choice([0, 0, 1, 2, -1]) for _ in range(2 * b.rng.randint(1, b.of(x).dim()))]
    value = b.rng.choice([0.0, 0.5])
    b.call(lambda x: F.pad(x, sizes, value=value), x)


def join(b: Builder) -> None:
    x = b.pick(low=1)
    d, shape = b.dim(x), list(b.of(x).shape)
    if b.rng.random() < 0.4:
        b.call(lambda *xs: torch.stack(xs, d), x, b.like(shape))
        return
    shape[d] = b.rng.choice(SIZES)
    b.call(lambda *xs: torch.cat(xs, d), x, b.like(shape), *([x] if b.rng.random() < 0.3 else []))


# -- indices ---------------------------------------------------------------------------
def index(b: Builder) -> None:
    x = b.pick(low=1)
    d, shape = b.dim(x), list(b.of(x).shape)
    n, count = shape[d], b.rng.choice(SIZES)
    flat, many = b.ints(n, count), [count if i == d else s for i, s in enumerate(shape)]
    kind = b.rng.choice(["select", "tensor", "two", "add", "put", "copy", "mask"])
    at = (slice(None),) * d
    if kind == "select":
        b.call(lambda x, i: x.index_select(d, i), x, flat)
    elif kind == "tensor":
        b.call(lambda x, i: x[(*at, i)], x, flat)
    elif kind == "two" and d + 1 < len(shape):
        b.call(lambda x, i, j: x[(*at, i, j)], x, flat, b.ints(shape[d + 1], b.rng.choice(SIZES), 1))
    elif kind == "add":
        b.call(lambda x, i, y: x.index_add(d, i, y), x, flat, b.like(many))
    elif kind == "put":
        b.call(lambda x, i, y: torch.index_put(x, [*[None] * d, i], y, True), x, flat, b.like(many))
    elif kind == "copy":
        order = torch.randperm(n, generator=b.source)[: min(n, count)]
        many[d] = len(order)
        b.call(lambda x, i, y: torch.index_put(x, [*[None] * d, i], y), x, b.give(order), b.like(many))
    elif kind == "mask":
        b.call(lambda x, m: torch.where(m, x, 0.25), x, b.give(b.of(x) > 0.1))
    else:
        raise Unfit


def gather(b: Builder) -> None:
    x = b.pick(low=1)
    d, shape = b.dim(x), list(b.of(x).shape)
    n, picked = shape[d], list(shape)
    picked[d] = b.rng.choice(SIZES)
    if b.rng.random() < 0.3:
        e = b.dim(x)
        picked[e] = b.rng.randint(1, picked[e])
    i = b.ints(n, *picked)
    kind = b.rng.choice(["gather", "gather", "scatter_add", "scatter", "value"])
    if kind == "gather":
        b.call(lambda x, i: x.gather(d, i), x, i)
    elif kind == "scatter_add":
        b.call(lambda x, i, y: x.scatter_add(d, i, y), x, i, b.like(picked))
    elif kind == "value":
        b.call(lambda x, i: x.scatter(d, i, 0.0), x, i)
    else:
        single = [1 if e == d else s for e, s in enumerate(shape)]
        b.call(lambda x, i, y: x.scatter(d, i, y), x, b.ints(n, *single), b.like(single))


def embed(b: Builder) -> None:
    rows, width = b.rng.choice(SIZES), b.rng.choice(SIZES)
    i = b.ints(rows, *b.shape(1, 2))
    if b.rng.random() < 0.3:
        b.call(lambda i: F.one_hot(i, rows).double(), i)
    else:
        padding = b.rng.choice([None, 0])
        b.call(lambda w, i: F.embedding(i, w, padding), b.like((rows, width)), i)


# -- reductions and what looks along a dim ------------------------------------------------
def reduce(b: Builder) -> None:
    x = b.pick()
    dims = sorted(b.rng.sample(range(b.of(x).dim()), b.rng.randint(0, min(2, b.of(x).dim()))))
    keep, order = b.rng.random() < 0.4, b.rng.choice([1, 3])
    ops: list[Callable[[Tensor], Any]] = [
        lambda x: x.sum(dims, keep), lambda x: x.mean(dims, keep), lambda x: x.amax(dims, keep), lambda x: x.sum(),
        lambda x: x.mean(), lambda x: x.amin(dims, keep), lambda x: x.var(dims or None, correction=0, keepdim=keep),
        lambda x: torch.linalg.vector_norm(x, 2, dims or None, keep), lambda x: x.max(),
        lambda x: x.logsumexp(dims or 0, keep),
        lambda x: torch.linalg.vector_norm(x, order, dims or None), lambda x: (x > 0.1).any(),
        lambda x: (_above(x)).std(dims or None, correction=0), lambda x: (x > 0.1).sum(dims), lambda x: x.norm(),
        lambda x: torch.var_mean(x, dims or None, correction=0, keepdim=keep), lambda x: x.square().sum().sqrt(),
    ]  # fmt: skip
    b.call(b.rng.choice(ops), x)


def along(b: Builder) -> None:
    """What mixes the values of one dim; those with ties are left out."""
    x = b.pick(low=1)
    d = b.dim(x)
    n = b.of(x).shape[d]
    k = b.rng.randint(1, n)
    smooth: list[Callable[[Tensor], Any]] = [
        lambda x: x.softmax(d), lambda x: x.log_softmax(d), lambda x: x.cumsum(d), lambda x: x.cumprod(d),
        lambda x: x.prod(d), lambda x: F.normalize(x, dim=d), lambda x: x.cumsum(d).flip(d),
        lambda x: x.logcumsumexp(d),
    ]  # fmt: skip
    picks: list[Callable[[Tensor], Any]] = [
        lambda x: x.max(d), lambda x: x.sort(d), lambda x: x.topk(k, d), lambda x: x.argmax(d),
        lambda x: x.min(d, True), lambda x: x.median(d), lambda x: x.kthvalue(k, d), lambda x: x.argsort(d, True),
        lambda x: x.cummax(d),
    ]  # fmt: skip
    unique = b.of(x).unique().numel() == b.of(x).numel()
    b.call(b.rng.choice(smooth + picks if unique else smooth), x)


# -- layers -----------------------------------------------------------------------------
def norm(b: Builder) -> None:
    kind = b.rng.choice(["layer", "layer", "rms", "batch", "group"])
    x = b.pick(low=1 if kind in ("layer", "rms") else 2, high=4)
    shape = list(b.of(x).shape)
    if kind in ("layer", "rms"):
        last = shape[-b.rng.randint(1, min(2, len(shape))) :]
        if torch.Size(last).numel() < 2:
            raise Unfit
        weights = [b.like(last) for _ in range(b.rng.choice([0, 1, 2]))]
        if kind == "layer":
            b.call(lambda x, *w: F.layer_norm(x, last, *w), x, *weights)
        else:
            b.call(lambda x, *w: F.rms_norm(x, last, *w), x, *weights[:1])
    elif kind == "group":
        groups = b.rng.choice([g for g in range(1, shape[1] + 1) if shape[1] % g == 0])
        if torch.Size(shape[1:]).numel() // groups < 2:
            raise Unfit
        weights = [b.like(shape[1:2]) for _ in range(b.rng.choice([0, 2]))]
        b.call(lambda x, *w: F.group_norm(x, groups, *w), x, *weights)
    else:
        stats = [b.new(shape[1]), b.give(torch.rand(shape[1], generator=b.source, dtype=torch.float64) + 0.5)]
        op = aten._native_batch_norm_legit_functional.default
        b.call(
            lambda x, w, s, m, v: op(x, w, s, m, v, True, 0.1, 1e-2), x, b.like(shape[1:2]), b.like(shape[1:2]), *stats
        )


def image(b: Builder) -> None:
    x = b.pick(low=3, high=4)
    shape = b.of(x).shape
    c, o, flat = shape[1], b.rng.choice([1, 2, 3, 4]), len(shape) == 3
    kernel, stride, padding = b.rng.randint(1, 2), b.rng.randint(1, 2), b.rng.randint(0, 1)
    kind = b.rng.choice(["conv", "conv", "transposed", "max", "avg", "adaptive"])
    ks = [kernel] * (len(shape) - 2)
    size = b.rng.randint(1, 2)
    if kind == "conv":
        groups = b.rng.choice([1, 1, c])
        conv = F.conv1d if flat else F.conv2d
        bias = [b.like((o * groups,))] if b.rng.random() < 0.5 else []
        b.call(
            lambda x, w, s=None: conv(x, w, s, stride, padding, 1, groups),
            x,
            b.like((o * groups, c // groups, *ks)),
            *bias,
        )
    elif kind == "transposed":
        conv = F.conv_transpose1d if flat else F.conv_transpose2d
        b.call(lambda x, w: conv(x, w, None, stride), x, b.like((c, o, *ks)))
    elif kind == "max":
        if b.of(x).unique().numel() < b.of(x).numel():
            raise Unfit
        b.call(lambda x: (F.max_pool1d if flat else F.max_pool2d)(x, 2, stride), x)
    elif kind == "avg":
        b.call(lambda x: (F.avg_pool1d if flat else F.avg_pool2d)(x, 2, stride, padding), x)
    else:
        b.call(lambda x: (F.adaptive_avg_pool1d if flat else F.adaptive_avg_pool2d)(x, size), x)


def attention(b: Builder) -> None:
    batch, heads, t, s, e = (b.rng.choice((1, 2, 3, 4)) for _ in range(5))
    q = b.like((batch, heads, t, e))
    k, v = b.like((batch, heads, s, e)), b.like((batch, heads, s, e))
    causal = b.rng.random() < 0.4
    mask = [b.like(b.rng.choice([(t, s), (batch, 1, t, s)]))] if not causal and b.rng.random() < 0.4 else []
    b.call(lambda q, k, v, *m: F.scaled_dot_product_attention(q, k, v, *m, is_causal=causal), q, k, v, *mask)


def loss(b: Builder) -> None:
    x = b.pick(low=1)
    shape = b.of(x).shape
    how = b.rng.choice(["none", "mean", "sum"])
    kind = b.rng.choice(["pair", "pair", "bce", "classes", "classes", "kl"])
    if kind == "pair":
        op = b.rng.choice([F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss])
        b.call(lambda x, y: op(x, y, reduction=how), x, b.like(shape))
    elif kind == "bce":
        target = b.give(torch.rand(shape, generator=b.source, dtype=torch.float64))
        b.call(lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction=how), x, target)
    elif kind == "kl":
        b.call(lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=how), x, b.like(shape))
    elif len(shape) > 1:
        ignored, smooth = b.rng.choice([-100, 0]), b.rng.choice([0.0, 0.0, 0.1])
        weight = (
            [b.give(torch.rand(shape[1], generator=b.source, dtype=torch.float64) + 0.1)]
            if b.rng.random() < 0.3
            else []
        )
        b.call(
            lambda x, y, *w: F.cross_entropy(x, y, *w, ignore_index=ignored, reduction=how, label_smoothing=smooth),
            x, b.ints(shape[1], shape[0], *shape[2:]), *weight,
        )  # fmt: skip
    else:
        raise Unfit


def many(b: Builder) -> None:
    """Lists of tensors."""
    xs = [b.pick(), b.pick(), *([b.pick()] if b.rng.random() < 0.5 else [])]
    ys = [b.like(b.of(x).shape) for x in xs]
    n = len(xs)
    scalar = b.new() if b.rng.random() < 0.3 else None
    ops: list[Callable[..., Any]] = [
        lambda *a: torch._foreach_add(a[:n], a[n:], alpha=0.5), lambda *a: torch._foreach_mul(a[:n], a[n:]),
        lambda *a: torch._foreach_lerp(a[:n], a[n:], 0.3), lambda *a: torch._foreach_norm(a[:n]),
        lambda *a: torch._foreach_sub(a[:n], a[n:]), lambda *a: torch._foreach_tanh(a[:n]),
        lambda *a: torch._foreach_addcmul(a[:n], a[n:], a[n:], 0.5), lambda *a: torch._foreach_maximum(a[:n], a[n:]),
        lambda *a: torch._foreach_mul(a[:n], 0.5), lambda *a: torch._foreach_norm(a[:n], 1),
    ]  # fmt: skip
    if scalar is not None:
        b.call(lambda *a: torch._foreach_mul(a[:-1], a[-1]), *xs, scalar)
    else:
        b.call(b.rng.choice(ops), *xs, *ys)


WEIGHTS: dict[Choice, int] = {
    unary: 6, binary: 8, product: 8, reshape: 7, turn: 4, spread: 3, squeeze: 1, cut: 6, pad: 2, join: 4, index: 4,
    gather: 3, embed: 2, reduce: 6, along: 4, norm: 3, image: 4, attention: 2, loss: 4, many: 3,
}  # fmt: skip
