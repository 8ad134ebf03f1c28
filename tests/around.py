"""Optimizers around other optimizers, and objects that hold them, as their public implementations are written."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

Update = Callable[[Any, Any, Tensor, Tensor], Tensor]


class Sam(Optimizer):
    """Sharpness-aware minimisation: two gradients a step, the groups shared with the optimizer inside."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, dict(rho=rho, **options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]), p=2)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)).to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


class Lookahead(Optimizer):
    """Slow weights beside those of the optimizer inside, whose groups and hooks it shares; no `__init__` of torch's."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state, self.fast_state = defaultdict(dict), optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    held = self.state[fast]
                    if "slow_param" not in held:
                        held["slow_param"] = torch.zeros_like(fast.data)
                        held["slow_param"].copy_(fast.data)
                    held["slow_param"] += (fast.data - held["slow_param"]) * self.alpha
                    fast.data.copy_(held["slow_param"])
            group["counter"] = (group["counter"] + 1) % self.k
        return loss


class SlowList(Optimizer):
    """Slow weights in a list; all else is that of the optimizer inside."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.optimizer, self.k, self.alpha, self.calls = optimizer, k, alpha, 0
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state
        self.slow_weights = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.calls += 1
        if self.calls % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.data.add_(p.data - q.data, alpha=self.alpha)
                    p.data.copy_(q.data)
        return loss


class ScheduledOptim:
    """A plain object with an optimizer, whose rate it sets in each call."""

    def __init__(self, optimizer: Optimizer, d_model: int, warmup: int) -> None:
        self._optimizer, self.d_model, self.warmup, self.n_steps = optimizer, d_model, warmup, 0

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self.n_steps += 1
        lr = self.d_model**-0.5 * min(self.n_steps**-0.5, self.n_steps * self.warmup**-1.5)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()


class Agent:
    """A model and an optimizer in an object, and what its method does with them."""

    def __init__(self, model: nn.Module, opt: Any) -> None:
        self.model, self.opt, self.never_read = model, opt, nn.Linear(2, 2)

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        return plain(self.model, self.opt, x, y)


def plain(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.first_step()
    F.mse_loss(model(x), y).backward()
    optimizer.second_step()
    return loss.detach()


def of_agents(agents: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    return agents["a"].update(x, y)


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), 0.1, momentum=0.9)


def bound(name: str, model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a batch, which has the model and the optimizer in the way of row `name`."""
    made, how, step = AROUND[name]
    optimizer = made(model)
    if how == "agent":
        held = {"a": Agent(model, optimizer)}
        return lambda x, y: of_agents(held, x, y)
    return Agent(model, optimizer).update if how == "method" else lambda x, y: step(model, optimizer, x, y)


AROUND: dict[str, tuple[Callable[[nn.Module], Any], str, Update]] = {
    "sam": (lambda m: Sam(m.parameters(), SGD, lr=0.1, momentum=0.9), "closure", twice),
    "lookahead": (lambda m: Lookahead(_sgd(m)), "closure", plain),
    "slow list": (lambda m: SlowList(_sgd(m)), "closure", plain),
    "scheduled": (lambda m: ScheduledOptim(Adam(m.parameters()), 64, 3), "closure", plain),
    "lookahead of an agent": (lambda m: Lookahead(Adam(m.parameters())), "agent", plain),
    "method of an agent": (lambda m: ScheduledOptim(_sgd(m), 64, 3), "method", plain),
}
