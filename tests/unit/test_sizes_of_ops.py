"""Ops that models are made of, captured with symbols: at other sizes, what is captured for these."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import wholestep as ws
from tests.steps import mean_square
from wholestep.capture.capture import Capture, capture_step
from wholestep.graph import meta
from wholestep.graph.sizes_in_graph import planned_at

D = 6
Op = Callable[[Tensor, Tensor, Tensor], Tensor]


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def image(x: Tensor) -> Tensor:
    """Of three channels, of two columns, strided as a view."""
    return x.unflatten(-1, (2, 3)).permute(0, 3, 1, 2)


def volume(x: Tensor) -> Tensor:
    return image(x)[:, None]


def numbers(x: Tensor, most: int) -> Tensor:
    return torch.arange(x.shape[1]).expand(x.shape[:2]) * 7 % most


def mask(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[1]) % 3 != 1).expand(x.shape[:2])


def wide(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers[..., None].expand(x.shape)


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2)


def kernel(w: Tensor, width: int) -> Tensor:
    return w[..., None].expand(D, D, width)


POOLS: dict[str, Op] = {
    "adaptive average of all": lambda x, w, v: F.adaptive_avg_pool1d(turned(x), 1),
    "adaptive average of three": lambda x, w, v: F.adaptive_avg_pool1d(turned(x), 3),
    "adaptive maximum": lambda x, w, v: F.adaptive_max_pool1d(turned(x), 2),
    "average": lambda x, w, v: F.avg_pool1d(turned(x), 3, 1, 1),
    "maximum": lambda x, w, v: F.max_pool1d(turned(x), 2),
    "norm": lambda x, w, v: F.lp_pool1d(turned(x), 2.0, 2),
    "adaptive average 2d": lambda x, w, v: F.adaptive_avg_pool2d(image(x), 1),
    "adaptive average 2d, rows": lambda x, w, v: F.adaptive_avg_pool2d(image(x).contiguous(), (3, 2)),
    "adaptive maximum 2d": lambda x, w, v: F.adaptive_max_pool2d(image(x), 1),
    "average 2d": lambda x, w, v: F.avg_pool2d(image(x), 2),
    "maximum 2d": lambda x, w, v: F.max_pool2d(image(x), 2, 2, ceil_mode=True),
    "adaptive average 3d": lambda x, w, v: F.adaptive_avg_pool3d(volume(x), 1),
    "maximum 3d": lambda x, w, v: F.max_pool3d(volume(x), 2),
}
RESIZES: dict[str, Op] = {
    "nearest": lambda x, w, v: F.interpolate(turned(x), scale_factor=2),
    "nearest, half": lambda x, w, v: F.interpolate(turned(x), scale_factor=0.5),
    "to eight": lambda x, w, v: F.interpolate(turned(x), size=8),
    "to a length": lambda x, w, v: F.interpolate(turned(x), size=x.shape[1]),
    "linear": lambda x, w, v: F.interpolate(turned(x), scale_factor=2, mode="linear"),
    "area": lambda x, w, v: F.interpolate(turned(x), size=2, mode="area"),
    "exact": lambda x, w, v: F.interpolate(turned(x), scale_factor=2.0, mode="nearest-exact"),
    "nearest 2d": lambda x, w, v: F.interpolate(image(x), scale_factor=2),
    "bilinear": lambda x, w, v: F.interpolate(image(x), scale_factor=1.5, mode="bilinear"),
    "bilinear, to": lambda x, w, v: F.interpolate(image(x), size=(8, 4), mode="bilinear", align_corners=True),
    "bicubic": lambda x, w, v: F.interpolate(image(x), scale_factor=2, mode="bicubic"),
    "bicubic, smoothed": lambda x, w, v: F.interpolate(image(x), size=(4, 4), mode="bicubic", antialias=True),
    "trilinear": lambda x, w, v: F.interpolate(volume(x), scale_factor=2, mode="trilinear"),
    "grid": lambda x, w, v: F.grid_sample(image(x), x[..., :2, None].expand(-1, -1, -1, 2).tanh()),
}
WINDOWS: dict[str, Op] = {
    "constant": lambda x, w, v: F.pad(x, (0, 0, 1, 2), value=1.0),
    "less": lambda x, w, v: F.pad(x, (0, 0, 0, -1)),
    "reflected": lambda x, w, v: F.pad(turned(x), (1, 1), mode="reflect"),
    "replicated": lambda x, w, v: F.pad(turned(x), (1, 1), mode="replicate"),
    "circular": lambda x, w, v: F.pad(turned(x), (1, 1), mode="circular"),
    "conv": lambda x, w, v: F.conv1d(turned(x), kernel(w, 3), v, padding="same"),
    "conv, strided": lambda x, w, v: F.conv1d(turned(x), kernel(w, 3), v, stride=2, padding=1),
    "conv, dilated": lambda x, w, v: F.conv1d(turned(x), kernel(w, 2), v, dilation=2, padding=2),
    "conv of each channel": lambda x, w, v: F.conv1d(turned(x), w[:, :3].unsqueeze(1), v, padding=1, groups=D),
    "conv, transposed": lambda x, w, v: F.conv_transpose1d(turned(x), kernel(w, 3), v, stride=2),
    "conv 2d": lambda x, w, v: F.conv2d(image(x), w[:, :3, None, None].expand(D, 3, 2, 2), v, padding=1),
    "unfold": lambda x, w, v: F.unfold(image(x), 2),
    "fold": lambda x, w, v: F.fold(F.unfold(image(x), 2), (x.shape[1], 2), 2),
    "windows": lambda x, w, v: x.unfold(1, 2, 1),
    "pixels": lambda x, w, v: F.pixel_unshuffle(x.repeat(1, 2, 1)[:, None], 2),
}
PLACES: dict[str, Op] = {
    "embedding": lambda x, w, v: x + F.embedding(numbers(x, 6), w, padding_idx=0),
    "bag": lambda x, w, v: F.embedding_bag(numbers(x, 6), w) + x.mean(1),
    "bag, maximum": lambda x, w, v: F.embedding_bag(numbers(x, 6), w, mode="max") + x.mean(1),
    "one hot": lambda x, w, v: x * F.one_hot(numbers(x, 6), 6),
    "sums": lambda x, w, v: x.cumsum(1),
    "log sums": lambda x, w, v: x.logcumsumexp(1),
    "top": lambda x, w, v: x.topk(2, 1)[0],
    "sorted": lambda x, w, v: x.sort(1)[0],
    "scatter": lambda x, w, v: torch.zeros_like(x).scatter(1, wide(numbers(x, 2), x), x),
    "scatter, added": lambda x, w, v: torch.zeros(x.shape[0], 4, D).scatter_add(1, wide(numbers(x, 4), x), x),
    "gather": lambda x, w, v: x.gather(1, wide(numbers(x, 2), x)),
    "take along": lambda x, w, v: x.take_along_dim(numbers(x, 2)[..., None], 1),
    "selected": lambda x, w, v: x.index_select(1, torch.arange(x.shape[1]).flip(0)),
    "added by number": lambda x, w, v: torch.zeros(4, D).index_add(0, numbers(x, 4).flatten(), x.flatten(0, 1)),
    "last of each row": lambda x, w, v: x[torch.arange(x.shape[0]), -1],
    "where": lambda x, w, v: torch.where(mask(x)[..., None], x, v),
    "masked scatter": lambda x, w, v: x.masked_scatter(mask(x)[..., None], x * 2),
    "einsum": lambda x, w, v: torch.einsum("btd,bsd->bts", x, x),
    "dim of one": lambda x, w, v: heads(x)[:, :, None].expand(*heads(x).shape[:2], 1, -1, -1).flatten(1, 2).sum(1),
    "rolled": lambda x, w, v: x.roll(x.shape[1] // 2, 1),
    "chunks": lambda x, w, v: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x, w, v: torch.cat(x.split([1, x.shape[1] - 1], 1)[::-1], 1),
    "repeated": lambda x, w, v: x.repeat_interleave(2, 1),
    "diagonal": lambda x, w, v: (x @ turned(x)).diagonal(dim1=1, dim2=2),
}
MIXED: dict[str, Op] = {
    "sdpa": lambda x, w, v: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), mask(x)[:, None, None]),
    "sdpa, grouped": lambda x, w, v: F.scaled_dot_product_attention(
        heads(x), heads(x)[:, :1], heads(x)[:, :1], enable_gqa=True
    ),
    "batch norm": lambda x, w, v: F.batch_norm(turned(x), torch.zeros(D), torch.ones(D), training=True),
    "instance norm": lambda x, w, v: F.instance_norm(turned(x)),
    "group norm": lambda x, w, v: F.group_norm(turned(x), 2),
    "rms norm": lambda x, w, v: F.rms_norm(x, (D,)),
    "local response": lambda x, w, v: F.local_response_norm(turned(x), 2),
    "lerp": lambda x, w, v: x.lerp(v, 0.3),
    "addcmul": lambda x, w, v: torch.addcmul(x, x, v),
    "bilinear": lambda x, w, v: F.bilinear(x, x, w.expand(D, D, D)),
    "distances": lambda x, w, v: torch.cdist(x, x.detach() + 1),
    "rotated": lambda x, w, v: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (3, 2)).contiguous()) * torch.polar(*[torch.ones(x.shape[1], 3)] * 2)
    ),
    "fft": lambda x, w, v: torch.fft.fft(x, dim=1).real,
    "rfft": lambda x, w, v: torch.fft.rfft(x, dim=1).abs(),
    "quantile": lambda x, w, v: x.quantile(0.5, dim=1),
    "root of a length": lambda x, w, v: x * x.shape[1] ** -0.5,
}
OF_PYTHON: dict[str, Op] = {
    "root": lambda x, w, v: x / math.sqrt(x.shape[1]),
    "logarithms": lambda x, w, v: x * math.log(x.shape[1]) + math.log2(x.shape[0] * x.shape[1]),
    "logarithm of a base": lambda x, w, v: x * math.log(x.shape[1], 2.5),
    "exponential": lambda x, w, v: x * math.exp(-x.shape[1] / 8),
    "half": lambda x, w, v: x[:, : math.ceil(x.shape[1] / 2)],
    "branch": lambda x, w, v: x * 2 if math.sqrt(x.shape[1]) > 1.5 else x,
}
FORMS: dict[str, Op] = {
    "products": lambda x, w, v: x.cumprod(1),
    "products of zeros": lambda x, w, v: torch.cumprod(x * mask(x)[..., None], dim=-2),
    "products of a dtype": lambda x, w, v: torch.cumprod(x.float(), 1, dtype=torch.float64),
    "steps": lambda x, w, v: x + torch.linspace(0, 1, x.shape[1])[:, None],
    "steps of a dtype": lambda x, w, v: x + torch.linspace(-3, end=2.5, steps=x.shape[1], dtype=torch.float)[:, None],
    "pairs": lambda x, w, v: torch.kron(x[0], w),
    "pairs of other dims": lambda x, w, v: x.kron(w) if x.shape[0] > 1 else x,
    "places of an image": lambda x, w, v: F.affine_grid(
        x[:, 0].unflatten(1, (2, 3)), [x.shape[0], 1, x.shape[1], 3], align_corners=False
    ),
    "places of a volume": lambda x, w, v: F.affine_grid(
        w[None, :3, :4].expand(x.shape[0], 3, 4), [x.shape[0], 1, x.shape[1], 1, 2], align_corners=True
    ),
}
LOSSES: dict[str, Op] = {
    "classes": lambda x, w, v: F.cross_entropy(turned(x), numbers(x, 6), label_smoothing=0.1),
    "classes, weighed": lambda x, w, v: F.cross_entropy(x.flatten(0, 1), numbers(x, 6).flatten(), v.detach()),
    "probabilities": lambda x, w, v: F.cross_entropy(x.flatten(0, 1), x.flatten(0, 1).softmax(-1).detach()),
    "two": lambda x, w, v: F.binary_cross_entropy_with_logits(x, wide(mask(x), x).float()),
    "divergence": lambda x, w, v: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    "huber": lambda x, w, v: F.huber_loss(x, x.detach() * 0.5),
    "triplet": lambda x, w, v: F.triplet_margin_loss(x, x.detach() + 1, x.detach() - 1),
    "ctc": lambda x, w, v: F.ctc_loss(
        x.transpose(0, 1).log_softmax(-1), numbers(x, 5)[:, :2] + 1, torch.full((x.shape[0],), x.shape[1]),
        torch.full((x.shape[0],), 2),
    ),
    "margins": lambda x, w, v: F.multi_margin_loss(x.flatten(0, 1), numbers(x, 6).flatten()),
}  # fmt: skip
FAMILIES = {
    "pool": POOLS, "resize": RESIZES, "window": WINDOWS, "place": PLACES, "mixed": MIXED, "python": OF_PYTHON,
    "form": FORMS, "loss": LOSSES,
}  # fmt: skip
OPS = {f"{family} {name}": op for family, ops in FAMILIES.items() for name, op in ops.items()}
FIXED: dict[str, Op] = {  # each names the line
    "a number of Python": lambda x, w, v: x / float(x.shape[1]),
    "a tensor of a length": lambda x, w, v: x / torch.tensor(x.shape[1]),
    "steps of powers": lambda x, w, v: x + torch.logspace(0, 1, x.shape[1])[:, None],
}
QUICK = (
    "pool adaptive average of all", "pool maximum", "resize bilinear", "mixed addcmul", "python root", "form products",
    "form steps", "loss ctc", "place dim of one",
)  # fmt: skip


class Model(nn.Module):
    """An op behind a layer, also of its parameters."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op, self.w, self.v = op, nn.Parameter(torch.rand(D, D)), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(F.linear(x, self.w, self.v), self.w, self.v)


def captured(op: Op, rows: int, length: int, dynamic: bool = False) -> Capture:
    model, x = Model(op), torch.zeros(rows, length, D)
    arguments = model, SGD(model.parameters(), lr=0.1), x
    return capture_step(mean_square, arguments, {}, dynamic={"x": (0, 1)} if dynamic else None)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in OPS])
def test_an_op_is_captured_for_all_sizes(name: str) -> None:
    """Text and strides of all nodes."""
    made, applies = captured(OPS[name], 4, 7, dynamic=True), 0
    assert made.symbols is not None
    assert not made.symbols.fixed()
    for rows, length in ((3, 9), (5, 12), (6, 5)):
        sizes = {symbol: (rows, length)[dim] for symbol, (_, dim) in made.symbols.record.dims.items()}
        if not made.symbols.hold(sizes):
            continue
        applies += 1
        fixed, filled = captured(OPS[name], rows, length).graph, planned_at(made.graph, sizes)
        assert str(filled) == str(fixed)
        for mine, theirs in zip(filled.graph.nodes, fixed.graph.nodes, strict=True):
            for one, other in zip(meta.tensors(mine), meta.tensors(theirs), strict=True):
                assert one is other is None or (one and other and meta.same_strides(one, other)), mine
    assert applies, [guard.text for guard in made.symbols.guards()]


@pytest.mark.parametrize("name", FIXED)
def test_an_op_that_fixes_a_size_names_its_line(name: str) -> None:
    made = captured(FIXED[name], 4, 7, dynamic=True)
    assert made.symbols is not None
    assert list(made.symbols.fixed()) == [("x", 1)]
    assert ".py:" in made.symbols.fixed()["x", 1]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_computes_what_its_op_does(name: str) -> None:
    """And its gradients."""
    torch.manual_seed(0)
    x, model = torch.randn(4, 7, D, dtype=torch.float64), Model(FORMS[name]).double()
    other = copy.deepcopy(model)
    loss = ws.compile(mean_square)(model, SGD(model.parameters(), lr=0.1), x)
    tolerance = 1e-5 if "of a dtype" in name else 1e-12
    torch.testing.assert_close(loss, mean_square(other, SGD(other.parameters(), lr=0.1), x), rtol=0, atol=tolerance)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_a_covariance_is_captured_for_each_size() -> None:
    """Torch asks of a value that follows from the size whether there are enough observations."""
    torch.manual_seed(0)
    model = Model(lambda x, w, v: torch.cov(x[0].t())).double()
    other = copy.deepcopy(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = ws.compile(mean_square)
    for length in (7, 9, 12):
        x = torch.randn(4, length, D, dtype=torch.float64)
        torch.testing.assert_close(step(model, optimizer, x), mean_square(other, plain, x), rtol=1e-12, atol=0)
    assert len(step.programs) == 3, step.misses


class Recurrent(nn.Module):
    """A layer that goes from place to place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(D, 5, batch_first=True, num_layers=2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", ["LSTM", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("GRU", "RNN"))])
def test_a_recurrent_layer_takes_all_rows(kind: str) -> None:
    """It is a loop over the length."""
    torch.manual_seed(0)
    model = Recurrent(kind).double()
    other = copy.deepcopy(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = ws.compile(mean_square)
    for rows in (4, 3, 9, 2):
        x = torch.randn(rows, 5, D, dtype=torch.float64)
        torch.testing.assert_close(step(model, optimizer, x), mean_square(other, plain, x), rtol=1e-12, atol=0)
    assert (step.captures, len(step.programs)) == (2, 2), step.misses
