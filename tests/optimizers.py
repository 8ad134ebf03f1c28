"""Every optimizer of torch with its options, the most used ones of other libraries: how each is made for a model."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


@dataclass(frozen=True)
class Kind:
    """One optimizer with its options. `library` is what has to be installed, `refused` how a capture refuses it.

    `closure`: its step wants a function that computes the loss. `matrices`: it takes nothing else.
    """

    name: str
    make: Callable[[nn.Module], Optimizer]
    library: str = "torch"
    refused: str = ""
    closure: bool = False
    matrices: bool = False

    def __str__(self) -> str:
        return self.name


def build(kind: Kind, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    """A convolution, a linear layer and a norm, or two linear layers without biases; the optimizer of these."""
    torch.manual_seed(0)
    layers = nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4)
    if kind.matrices:
        layers = nn.Flatten(), nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 4, bias=False)
    model = nn.Sequential(*layers).to(dtype)
    return model, kind.make(model)


def data(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 1, 6, generator=generator), torch.randn(5, 4, generator=generator)
    return x.to(dtype), y.to(dtype)


def train_by_closure(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()  # type: ignore[arg-type, union-attr]


class Counting(Optimizer):
    """Counts its updates of each parameter in a number of Python, and passes its rate to an op as one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["n"] = torch.zeros_like(p), 0
                state["n"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mean"] / (1 - 0.9 ** state["n"]), alpha=-group["lr"])


# -- torch ----------------------------------------------------------------------------------
_DECAY = {"weight_decay": 0.1}
_DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
_UP = {"maximize": True}
TORCH: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, **_DECAY}, {"momentum": 0.9, **_UP},
    ],
    "Adam": [{}, {"amsgrad": True}, _DECAY, _DECOUPLED, _UP],
    "AdamW": [{}, {"amsgrad": True}, _UP],
    "NAdam": [{}, {"momentum_decay": 0.1}, _DECAY, _DECOUPLED, _UP],
    "RAdam": [{}, {"betas": (0.9, 0.9)}, _DECAY, _DECOUPLED, _UP],
    "ASGD": [{}, {"t0": 3}, {"lambd": 0.1, "alpha": 0.5}, _DECAY, _UP],
    "Adagrad": [{}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.3}, _DECAY, _UP],
    "Adadelta": [{}, _DECAY, _UP],
    "Adamax": [{}, _DECAY, _UP],
    "RMSprop": [{}, {"centered": True}, {"momentum": 0.9}, {"centered": True, "momentum": 0.9, **_DECAY}, _UP],
    "Rprop": [{}, {"etas": (0.4, 1.3)}, _UP],
    "Muon": [{}, {"nesterov": False}, {"weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}],
    "Adafactor": [{}, _UP],
    "SparseAdam": [{}],
    "LBFGS": [{}],
}  # fmt: skip
_REFUSED_OF_TORCH = {
    "SparseAdam": "its update needs sparse gradients",
    "LBFGS": "its step calls a closure a number of times",
}


def of_torch() -> Iterator[Kind]:
    """All of `torch.optim` x options x single, foreach, fused where there are such forms."""
    for name, several in TORCH.items():
        cls = getattr(torch.optim, name)
        forms: list[dict[str, Any]] = [{}]
        if "foreach" in inspect.signature(cls).parameters:
            forms = [{"foreach": False}, {"foreach": True}]
        if "fused" in inspect.signature(cls).parameters:
            forms += [{"fused": True}]
        for options in several:
            for form in forms:
                given = {"lr": 0.02, **options, **form}
                text = ",".join(f"{k}={v}" for k, v in {**options, **form}.items())

                def make(model: nn.Module, cls: Any = cls, given: dict[str, Any] = given) -> Optimizer:
                    return cls(model.parameters(), **given)

                refused = _REFUSED_OF_TORCH.get(name, "")
                yield Kind(f"{name}({text})", make, "torch", refused, name == "LBFGS", name == "Muon")


# -- other libraries --------------------------------------------------------------------------
PYTORCH_OPTIMIZER = """
    AccSGD AdaBelief AdaBound AdaFactor AdaGC AdaMod AdaNorm AdaPNM AdaShift AdaSmooth Adai Adalite AdamC AdamG AdamP
    AdamS AdamWSN AdaMax Adan ADOPT AdEMAMix AggMo AvaGrad CAME DAdaptAdam DiffGrad EXAdam Fromage GaLore Grams
    GrokFastAdamW Kate Kron Lamb LaProp LARS Lion MADGRAD MARS NovoGrad PAdam PID PNM Prodigy QHAdam QHM RAdam Ranger
    ScalableShampoo ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SCION SGDP SGDW Shampoo SignSGD SM3 SOAP SPAM
    SimplifiedAdEMAMix A2Grad
    SPlus StableAdamW Tiger VSGD Yogi
"""
SCHEDULE_FREE = """
    AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference RAdamScheduleFree SGDScheduleFree
    SGDScheduleFreeReference AdamWScheduleFreeClosure RAdamScheduleFreeClosure SGDScheduleFreeClosure
"""
_READS, _OBJECT = "the step reads the value of a tensor", "in its state, which (is a|belongs to no parameter)"
_REFUSED = {
    "AdaShift": _OBJECT, "MADGRAD": _OBJECT, "SPAM": _OBJECT,
    "ScalableShampoo": "the step creates an object", "Kron": "draws numbers from numpy.random",
    "AvaGrad": _READS, "DAdaptAdam": _READS, "Prodigy": _READS,
}  # fmt: skip


def of_others() -> Iterator[Kind]:
    """The most used of `pytorch_optimizer`, all of `schedulefree`, `lion-pytorch`."""

    def loaded(name: str) -> Callable[[nn.Module], Optimizer]:
        def make(model: nn.Module) -> Optimizer:
            import pytorch_optimizer

            return getattr(pytorch_optimizer, name)(model.parameters(), lr=0.01)

        return make

    def free(name: str) -> Callable[[nn.Module], Optimizer]:
        def make(model: nn.Module) -> Optimizer:
            import schedulefree

            made = getattr(schedulefree, name)(model.parameters(), lr=0.01)
            if hasattr(made, "train"):  # those with a closure switch by themselves
                made.train()
            return made

        return make

    def lion(model: nn.Module) -> Optimizer:
        from lion_pytorch import Lion

        return Lion(model.parameters(), lr=0.01, weight_decay=0.1)

    for name in PYTORCH_OPTIMIZER.split():
        yield Kind(name, loaded(name), "pytorch_optimizer", _REFUSED.get(name, ""))
    for name in SCHEDULE_FREE.split():
        yield Kind(name, free(name), "schedulefree", _REFUSED.get(name, ""), name.endswith("Closure"))
    yield Kind("lion_pytorch.Lion", lion, "lion_pytorch")
