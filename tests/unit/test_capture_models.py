"""Models and autograd: what a step may do inside, compiled against eager in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.catalogue import CASES, OPTIMIZERS
from tests.eager import batches, same_as_eager
from tests.steps import mse as train

Made = tuple[nn.Module, Optimizer]
F64 = torch.float64


def with_sgd(model: Callable[[], nn.Module], dtype: torch.dtype = F64, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = model().to(dtype)
        return made, torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9, **options)

    return make


@pytest.mark.crossed
@pytest.mark.parametrize("recipe", ["AdamW-plain", "SGD-momentum"])
@pytest.mark.parametrize("case", CASES)
def test_catalogue(case: str, recipe: str) -> None:
    chosen = CASES[case]

    def make() -> Made:
        model = chosen.build()
        return model, OPTIMIZERS[recipe].make(model.parameters())

    step = same_as_eager(chosen.step, make, [(chosen.batches(i),) for i in range(3)], tolerance=2e-8)
    assert step.captures == 1


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.tanh(self.first(x)), 0.5, self.training))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dropout_is_bitwise(dtype: torch.dtype) -> None:
    same_as_eager(train, with_sgd(Dropped, dtype), batches((6, 6), (6, 3), dtype=dtype), tolerance=0)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_batch_norm_statistics(momentum: float) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Flatten(), nn.Linear(64, 2))

    step = same_as_eager(train, with_sgd(model), batches((5, 3, 6, 6), (5, 2)))
    assert step.captures == 1


def test_eval_and_back() -> None:
    """Modes decide what is captured: no stale dropout, no stale batch norm."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        model.train(i % 2 == 0)

    step = same_as_eager(train, with_sgd(model), batches((6, 6), (6, 3), count=5), between=between)
    assert step.captures == 2


def test_mode_set_inside_the_step() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        model.train()
        loss = train(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            return loss, model(x)

    same_as_eager(fn, with_sgd(Dropped), batches((6, 6), (6, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_checkpoint(reentrant: bool, dropout: bool) -> None:
    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Dropped() if dropout else nn.Linear(6, 6) for _ in range(2))
            self.join = nn.Linear(3, 6) if dropout else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            if reentrant:
                x.requires_grad_()
            for block in self.blocks:
                x = self.join(checkpoint(block, x, use_reentrant=reentrant))
            return x

    same_as_eager(train, with_sgd(Saved), batches((4, 6), (4, 6)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_their_random_numbers(reentrant: bool) -> None:
    """One inside another, draws in between and after: each is repeated where eager repeats it, bit for bit."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.join = Dropped(), Dropped(), nn.Linear(3, 6)

        def both(self, x: Tensor) -> Tensor:
            x = self.join(checkpoint(self.inner, F.dropout(x, 0.2), use_reentrant=reentrant))
            return self.outer(x)

        def forward(self, x: Tensor) -> Tensor:
            x = (x + torch.rand_like(x)).requires_grad_()
            first = checkpoint(self.both, x, use_reentrant=reentrant)
            return F.dropout(first, 0.1) + checkpoint(self.both, self.join(first), use_reentrant=reentrant)

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = train(model, optimizer, x, y)
        return loss, torch.rand(3), train(model, optimizer, x, y)

    same_as_eager(fn, with_sgd(Nested), batches((4, 6), (4, 3)), tolerance=0)


def test_autocast() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            loss = F.mse_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.detach(), out.detach()

    make = with_sgd(lambda: CASES["tiny"].build(torch.float32), torch.float32)
    step = same_as_eager(fn, make, batches((6, 6), (6, 3), dtype=torch.float32), tolerance=0)
    assert "bf16" in str(step.train_graph)


def test_autocast_around_the_call() -> None:
    class Around:
        """Autocast on, entered by whoever calls the step."""

        def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
            return train(model, optimizer, x, y)

    import wholestep as ws

    model, optimizer = with_sgd(lambda: CASES["tiny"].build(torch.float32), torch.float32)()
    step, batch = ws.compile(Around()), batches((6, 6), (6, 3), dtype=torch.float32)[0]
    step(model, optimizer, *batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(model, optimizer, *batch)
    assert step.captures == 2
    assert "bf16" in str(step.train_graph)


def test_requires_grad_changes() -> None:
    """Frozen after call 1, thawed before call 4: never a stale graph, and frozen parameters stay as they are."""

    def between(i: int, model: nn.Module, optimizer: Optimizer) -> None:
        model[0].requires_grad_(i < 2 or i >= 4)  # type: ignore[index]

    step = same_as_eager(
        train, with_sgd(CASES["tiny"].model), batches((6, 6), (6, 3), count=6), between=between, keep_grads=True
    )
    assert step.captures == 2


def test_second_batch_shape() -> None:
    calls = [*batches((6, 6), (6, 3), count=2), *batches((4, 6), (4, 3), count=2), *batches((6, 6), (6, 3), count=2)]
    assert same_as_eager(train, with_sgd(CASES["tiny"].model), calls).captures == 2


# -- autograd -----------------------------------------------------------------------------
def test_gradient_penalty() -> None:
    """Double backward through the input's gradient."""

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + (grad.norm(2, dim=1) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    same_as_eager(fn, with_sgd(CASES["tiny"].model), batches((6, 6), (6, 3)))


def test_gradients_by_autograd_grad() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        for param, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    same_as_eager(fn, with_sgd(CASES["tiny"].model), batches((6, 6), (6, 3)))


def test_update_by_hand() -> None:
    def fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
        return loss.detach()

    same_as_eager(fn, lambda: (CASES["tiny"].build(),), batches((6, 6), (6, 3)))


def test_custom_function() -> None:
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(-0.5, 0.5)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 0.7 + 0.1 * ctx.saved_tensors[0]

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return Clamp.apply(self.layer(x))  # type: ignore[no-any-return]

    same_as_eager(train, with_sgd(Clamped), batches((6, 6), (6, 3)))


def test_two_backwards_of_one_graph() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        out = model(x)
        first, second = F.mse_loss(out, y), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        return first.detach(), second.detach()

    same_as_eager(fn, with_sgd(CASES["tiny"].model), batches((6, 6), (6, 3)))


def test_tensor_hook_and_loss_scale() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        out.register_hook(lambda grad: grad * 2)
        loss = F.mse_loss(out, y)
        (loss * 8).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.grad /= 8
        optimizer.step()
        return loss.detach()

    same_as_eager(fn, with_sgd(CASES["tiny"].model), batches((6, 6), (6, 3)))


# -- several models -----------------------------------------------------------------------
def test_gan() -> None:
    def make() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
        critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1)).double()
        return (
            generator, critic,
            torch.optim.Adam(generator.parameters(), 0.01, (0.5, 0.9)),
            torch.optim.RMSprop(critic.parameters(), 0.005),
        )  # fmt: skip

    def fn(g: nn.Module, c: nn.Module, og: Optimizer, oc: Optimizer, real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = g(noise)
        oc.zero_grad()
        critic_loss = F.softplus(-c(real)).mean() + F.softplus(c(fake.detach())).mean()
        critic_loss.backward()
        oc.step()
        og.zero_grad()
        generator_loss = F.softplus(-c(fake)).mean()
        generator_loss.backward()
        og.step()
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

    same_as_eager(fn, make, batches((6, 6), (6, 4)))


def test_moving_average_of_parameters() -> None:
    def make() -> tuple[nn.Module, nn.Module, Optimizer]:
        model, average = CASES["tiny"].build(), CASES["tiny"].build()
        return model, average.requires_grad_(False), torch.optim.AdamW(model.parameters())

    def fn(model: nn.Module, average: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = train(model, optimizer, x, y)
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)
        return loss

    same_as_eager(fn, make, batches((6, 6), (6, 3)))


def test_distillation() -> None:
    """A frozen teacher in eval mode, a student in training mode."""

    def make() -> tuple[nn.Module, nn.Module, Optimizer]:
        teacher, student = Dropped().double().eval(), Dropped().double()
        return teacher, student, torch.optim.SGD(student.parameters(), 0.1)

    def fn(teacher: nn.Module, student: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return train(student, optimizer, x, target)

    same_as_eager(fn, make, batches((6, 6)))


# -- modules ------------------------------------------------------------------------------
class Sequence(nn.Module):
    """Any module over sequences, then a head."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        return self.head(out[0] if isinstance(out, tuple) else out).mean(1)


class Relu6Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.group, self.out = nn.RMSNorm(8), nn.GroupNorm(2, 4), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.group(self.norm(x)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Sequence(nn.LSTM(8, 5, num_layers=2, batch_first=True, bidirectional=True), 10),
    "GRU": lambda: Sequence(nn.GRU(8, 5, batch_first=True), 5),
    "RNN": lambda: Sequence(nn.RNN(8, 5, batch_first=True), 5),
    "MultiheadAttention": lambda: Sequence(nn.MultiheadAttention(8, 2, batch_first=True), 8),
    "TransformerEncoderLayer": lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 8),
    "TransformerDropout": lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), 8),
    "weight_norm": lambda: Sequence(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), 8),
    "spectral_norm": lambda: Sequence(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), 8),
    "orthogonal": lambda: Sequence(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), "weight", "householder"), 8),
    "old weight_norm": lambda: Sequence(nn.utils.weight_norm(nn.Linear(8, 8)), 8),  # type: ignore[no-untyped-call]
    "norms": lambda: Sequence(Relu6Norm(), 8),
    "Conv1d": lambda: Sequence(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GELU(), nn.AvgPool1d(2)), 4),
    "ConvTranspose1d": lambda: Sequence(nn.ConvTranspose1d(4, 4, 2, stride=2), 16),
    "Bilinear": lambda: Sequence(_Bilinear(), 3),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x / math.pi)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("module", MODULES)
def test_modules(module: str) -> None:
    same_as_eager(train, with_sgd(MODULES[module]), batches((3, 4, 8), (3, 2)))


@pytest.mark.parametrize("module", ["LSTM", "GRU", "Conv1d", "MultiheadAttention"])
def test_modules_in_single_precision(module: str) -> None:
    """Where torch has other kernels than in double."""
    make = with_sgd(MODULES[module], torch.float32)
    same_as_eager(train, make, batches((3, 4, 8), (3, 2), dtype=torch.float32), tolerance=1e-6)


def test_embeddings() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bag = nn.Embedding(9, 4, padding_idx=0), nn.EmbeddingBag(9, 4, mode="mean")
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).mean(1) + self.bag(x))

    calls = [(torch.randint(0, 9, (3, 5)), torch.randn(3, 2, dtype=F64)) for _ in range(3)]
    same_as_eager(train, with_sgd(Words), calls)


def test_buffers_that_the_step_writes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.shape[0]
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # a new tensor in place of the old one
            return self.layer(x - self.mean)

    same_as_eager(train, with_sgd(Counting), batches((6, 6), (6, 3)))
