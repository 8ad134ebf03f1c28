"""What data parallel training must compute, by hand in one process: a copy per rank, gradients averaged by hand."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.catalogue import Batch, Case, Recipe


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; exact for integers and booleans."""
    assert found.shape == expected.shape, f"{list(found.shape)} is not {list(expected.shape)}"
    assert found.dtype == expected.dtype, f"{found.dtype} is not {expected.dtype}"
    if torch.equal(found, expected) or found.numel() == 0:
        return 0.0
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state by the names that a captured graph gives them."""
    out = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                out[f"{name}/{key}"] = value
    return out


class Oracle:
    """`world` eager copies of a model and its optimizer, kept equal by averaging their gradients."""

    def __init__(self, case: Case, recipe: Recipe, world: int, reduce: str = "mean") -> None:
        self.case, self.reduce = case, reduce
        self.models = [case.build() for _ in range(world)]
        self.optimizers = [recipe.make(m.parameters()) for m in self.models]

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """One step, each rank on its own batch; the losses of the ranks."""
        losses: list[Tensor] = []
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            losses.append(self.case.backward(model, batch).detach())
        self._reduce()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.case.adjust(model)
            optimizer.step()
        return losses

    def _reduce(self) -> None:
        for params in zip(*(m.parameters() for m in self.models), strict=True):
            grads = [p.grad for p in params]
            if grads[0] is not None:
                total = torch.stack(grads).sum(0)
                for param in params:
                    param.grad = total / len(grads) if self.reduce == "mean" else total.clone()

    def state(self, rank: int) -> dict[str, Tensor]:
        """Parameters, buffers and optimizer state of one rank."""
        return state_of(self.models[rank], self.optimizers[rank])


def twin(make: Callable[[], tuple[Any, ...]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Two independent results of a seeded maker, bit for bit alike."""
    made: list[tuple[Any, ...]] = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made[0], made[1]


def clone(value: Any) -> Any:
    """A deep copy of arguments that keeps modules and optimizers as they are."""
    if isinstance(value, (nn.Module, Optimizer)):
        return value
    if isinstance(value, Mapping) and type(value) is dict:
        return {k: clone(v) for k, v in value.items()}
    return copy.deepcopy(value)
