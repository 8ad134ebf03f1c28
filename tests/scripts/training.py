"""Rows about losses, backward passes, gradients and precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.scripts.models import dropout
from tests.scripts.row import Made, Row, floats, mlp, pair, sgd, squares, steps, train, update, with_labels


def accumulated(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    total = x.new_zeros(())
    for part in x.chunk(2):
        loss = squares(model, part) / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


def scaled(model: nn.Module, optimizer: Any, scaler: GradScaler, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, x)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach().nan_to_num()


def with_scaler() -> Made:
    return *pair()(), GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def overflowing(rank: int) -> list[Made]:
    made = floats((5, 4))(rank)
    made[2][0][0] = torch.inf
    return made


def lower(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def single() -> nn.Module:
    return mlp().float()


def single_floats(rank: int) -> list[Made]:
    return [(x.float(),) for (x,) in floats((5, 4))(rank)]


def again(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def twice(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    first, second = out.square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    return (first + second).detach()


def clipped(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def clipped_values(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return loss.detach()


def clipped_or_error(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    optimizer.step()
    return loss.detach()


def centred(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = squares(model, x)
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad -= param.grad.mean()
        param.grad.add_(torch.ones_like(param), alpha=0.01)
    optimizer.step()
    return loss.detach()


def several(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    losses = {
        "class": F.cross_entropy(out, y, label_smoothing=0.1),
        "size": out.square().mean(),
        "l1": out.abs().mean(),
    }
    return sum(0.5 * v for v in losses.values())


def dictionary(model: nn.Module, optimizer: Any, x: Tensor) -> dict[str, Any]:
    loss = squares(model, x)
    update(optimizer, loss)
    return {"loss": loss.detach(), "parts": [loss.detach() * 2], "name": "train"}


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    a, b = F.normalize(model(x), dim=-1), F.normalize(model(x.flip(0)), dim=-1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


def triplets(model: nn.Module, x: Tensor) -> Tensor:
    return F.triplet_margin_loss(model(x), model(x.roll(1, 0)), model(x.roll(2, 0)))


def distilled(model: nn.Module, optimizer: Any, teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = teacher(x).softmax(-1)
    return update(optimizer, F.kl_div(model(x).log_softmax(-1), target, reduction="batchmean"))


def inferred(model: nn.Module, optimizer: Any, teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = teacher(x)
    return update(optimizer, F.mse_loss(model(x), target.clone()))


def with_teacher() -> Made:
    return *pair()(), mlp().requires_grad_(False)


def hooked(model: nn.Module, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []
    handles = [
        model[1].register_forward_hook(lambda m, i, o: seen.append(o) or o * 1.1),
        model[0].register_full_backward_hook(lambda m, i, o: None),
    ]
    loss = squares(model, x)
    loss = loss + seen[0].square().mean()
    result = update(optimizer, loss)
    for handle in handles:
        handle.remove()
    return result, seen[0].detach()


def tensor_hooked(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.register_hook(lambda grad: grad * 0.5)
    return out.square().mean()


def hooked_model() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return model


def stepping_hooks() -> nn.Module:
    model = mlp()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_halve)
    return model


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def saved(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return squares(model, x)


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in grads)


def anomalous(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly():
        return squares(model, x)


def profiled(model: nn.Module, x: Tensor) -> Tensor:
    with torch.profiler.record_function("forward"):
        return squares(model, x)


def gan(models: list[nn.Module], optimizers: list[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    generator, critic = models
    fake = generator(x)
    first = critic(fake.detach()).mean() - critic(x[:, :3]).mean()
    update(optimizers[1], first)
    critic.requires_grad_(False)
    second = -critic(fake).mean()
    update(optimizers[0], second)
    critic.requires_grad_(True)
    return first.detach(), second.detach()


def two_models() -> Made:
    models = [mlp(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))]
    return models, [sgd(m) for m in models]


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).clone()
    out[:, 0] *= 2
    out[1:].add_(1).clamp_(max=3)
    out.masked_fill_(x[:, :3] > 1, 0.0)
    return out.square().mean()


def nan_check(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = squares(model, x)
    return update(optimizer, loss) if torch.isfinite(loss) else loss.detach()


G = "Loss, backward, gradients"
ROWS = (
    Row(
        G,
        "cross entropy: label smoothing, `ignore_index`",
        train(lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1, ignore_index=2), calls=with_labels()),
        ranks=True,
    ),
    Row(G, "a weighted sum of several losses", train(several, calls=with_labels()), ranks=True),
    Row(G, "returns a dict of losses", steps(dictionary), ranks=True),
    Row(G, "a contrastive loss within the batch", train(contrastive), ranks=True),
    Row(
        G,
        "triplet, KL, Gaussian NLL losses",
        train(lambda m, x: triplets(m, x) + F.gaussian_nll_loss(m(x), x[:, :3], m(x).square())),
    ),
    Row(G, "distillation from a frozen teacher under `no_grad`", steps(distilled, with_teacher), ranks=True),
    Row(G, "a teacher under `torch.inference_mode()`", steps(inferred, with_teacher)),
    Row(G, "accumulates gradients of micro-batches in the step", steps(accumulated, calls=floats((6, 4))), ranks=True),
    Row(G, "`backward(retain_graph=True)`, two backward passes", steps(twice), ranks=True),
    Row(G, "gradients of gradients (`create_graph=True`)", train(hessian)),
    Row(G, "`clip_grad_norm_`, the norm is returned", steps(clipped), ranks=True),
    Row(G, "`clip_grad_value_`", steps(clipped_values), ranks=True),
    Row(
        G,
        "`clip_grad_norm_(error_if_nonfinite=True)`",
        steps(clipped_or_error),
        ranks=True,
    ),
    Row(G, "changes gradients by hand (noise, centralization)", steps(centred)),
    Row(G, "activation checkpointing", train(again, dropout), ranks=True),
    Row(G, "`torch.autocast` in bfloat16", train(lower, single, calls=single_floats, tolerance=1e-5), ranks=True),
    Row(G, "`GradScaler`: unscale, clip, skipped steps", steps(scaled, with_scaler, overflowing), ranks=True),
    Row(G, "forward hooks, backward hooks", steps(hooked)),
    Row(G, "`tensor.register_hook`", train(tensor_hooked)),
    Row(G, "hooks on parameters' gradients", train(model=hooked_model)),
    Row(G, "`register_post_accumulate_grad_hook`", train(model=stepping_hooks)),
    Row(G, "`saved_tensors_hooks`", train(saved)),
    Row(G, "in-place operations on activations", train(in_place), ranks=True),
    Row(
        G,
        "`detect_anomaly`, `set_detect_anomaly`",
        train(anomalous),
        line="run the uncompiled function with it",
        runs=False,
    ),
    Row(G, "`torch.profiler.record_function`", train(profiled)),
    Row(G, "several models and optimizers, `requires_grad_` toggled (GAN)", steps(gan, two_models), ranks=True),
    Row(
        G,
        "skips a step by `if torch.isfinite(loss):`",
        steps(nan_check),
    ),
)
