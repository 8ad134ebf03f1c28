"""What a step may ask of parameters, buffers and batch tensors besides their values, as a table of steps."""

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholestep as ws

CALLS = 4


class Marked(nn.Parameter):
    """A user's own kind of parameter."""

    scale = 0.25


@dataclass
class Spec:
    scale: float


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
        self.marked = Marked(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.register_buffer("shift", torch.full((4,), 0.5, dtype=torch.float64))
        self.register_buffer("rate", torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.marked + self.shift


class Step:
    """Trains; each gradient is multiplied by `rule(param)`, the loss by `weight(x, h)`; `between` is called then."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.params = dict(self.model.named_parameters())
        self.bias = self.model.first.bias
        self.prepare()

    def prepare(self) -> None: ...

    def between(self, call: int) -> None: ...

    def batch(self, x: torch.Tensor, call: int) -> torch.Tensor:
        return x

    def rule(self, param: Any) -> Any:
        return 1.0

    def weight(self, x: Any, h: Any) -> Any:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        h = self.forward(x)
        loss = h.square().mean() * self.weight(x, h)
        loss.backward()
        for param in self.model.parameters():
            param.grad.mul_(self.rule(param))
        self.optimizer.step()
        return loss.detach()


STEPS: dict[str, type[Step]] = {}


def add(name: str, **methods: Callable[..., Any]) -> None:
    STEPS[name] = type(name, (Step,), methods)


Rule = Callable[[Step, Any, Any], Any]
RULES: dict[str, tuple[Callable[[Step], Any], Rule, bool]] = {}


def keep(name: str, made: Callable[[Step], Any], rule: Rule) -> None:
    """A row whose rule asks of a parameter something that is `made` before the first call, in and between steps."""
    RULES[name] = made, rule, True


def in_step(name: str, made: Callable[[Step], Any], rule: Rule) -> None:
    """A row whose rule is asked in steps only: spread over ranks, a parameter has another class between them."""
    RULES[name] = made, rule, False


class AllRules(Step):
    """Asks every rule of every parameter, and notes the answers."""

    def prepare(self) -> None:
        self.kept = {name: made(self) for name, (made, _, _) in RULES.items()}
        self.noted, self.before = list[dict[str, list[float]]](), dict[str, list[float]]()

    def answers(self, between: bool) -> dict[str, list[float]]:
        params = [*self.model.parameters()]
        asked = {name: rule for name, (_, rule, kept) in RULES.items() if kept or not between}
        return {name: [float(rule(self, self.kept[name], p)) for p in params] for name, rule in asked.items()}

    def between(self, call: int) -> None:
        self.before = self.before or self.answers(True)
        assert self.answers(True) == self.before

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.forward(x).square().mean()
        loss.backward()
        answers = self.answers(False)
        ws.callback(self.noted.append, answers)
        for number, param in enumerate(self.model.parameters()):
            param.grad.mul_(sum(row[number] for row in answers.values()) / len(answers))
        self.optimizer.step()
        return loss.detach()


keep("set", lambda s: {s.bias}, lambda s, k, p: 0.0 if p in k else 1.0)
keep("frozenset", lambda s: frozenset([s.bias]), lambda s, k, p: 0.0 if p in k else 1.0)
keep("dict get", lambda s: {s.bias: 0.5}, lambda s, k, p: k.get(p, 1.0))
keep("dict item", lambda s: {p: 0.1 + i for i, p in enumerate(s.params.values())}, lambda s, k, p: k[p])
keep("dict of sets", lambda s: {"no decay": {s.bias}}, lambda s, k, p: 0.0 if p in k["no decay"] else 1.0)
keep(
    "names by parameter", lambda s: {p: n for n, p in s.params.items()}, lambda s, k, p: 0.5 if "bias" in k[p] else 1.0
)
keep("key of a tuple", lambda s: {("no decay", s.bias)}, lambda s, k, p: 0.0 if ("no decay", p) in k else 1.0)
keep("hash", lambda s: {hash(s.bias)}, lambda s, k, p: 0.0 if hash(p) in k else 1.0)
keep("is", lambda s: s.bias, lambda s, k, p: 0.0 if p is k else 1.0)
keep("id in a set", lambda s: {id(s.bias)}, lambda s, k, p: 0.0 if id(p) in k else 1.0)
keep("dict by id", lambda s: {id(p): n for n, p in s.params.items()}, lambda s, k, p: 0.5 if "bias" in k[id(p)] else 1)
keep("any is", lambda s: [s.bias], lambda s, k, p: 0.0 if any(p is q for q in k) else 1.0)
keep("pairs", lambda s: [*s.params.items()], lambda s, k, p: 0.5 if "bias" in next(n for n, q in k if q is p) else 1)
keep("a weak reference", lambda s: weakref.ref(s.bias), lambda s, k, p: 0.0 if p is k() else 1.0)
keep("in a group", lambda s: None, lambda s, k, p: any(p is q for q in s.optimizer.param_groups[0]["params"]) * 0.5)
keep("a second name", lambda s: None, lambda s, k, p: 0.5 if p is s.model.first.weight else 1.0)
in_step("type is", lambda s: None, lambda s, k, p: 0.5 if type(p) is nn.Parameter else 1.0)
in_step("type equals", lambda s: None, lambda s, k, p: 0.5 if type(p) == Marked else 1.0)  # noqa: E721
keep("isinstance of a subclass", lambda s: None, lambda s, k, p: p.scale if isinstance(p, Marked) else 1.0)
in_step("class", lambda s: None, lambda s, k, p: 0.5 if p.__class__ is nn.Parameter else 1.0)
keep("name of a type", lambda s: None, lambda s, k, p: 0.5 if type(p).__name__ == "Marked" else 1.0)
in_step("type in a dict", lambda s: {nn.Parameter: 0.5, Marked: 2.0}, lambda s, k, p: k[type(p)])
keep("returns itself", lambda s: None, lambda s, k, p: 0.5 if p.requires_grad_() is p else 1.0)
keep("in place, itself", lambda s: {s.bias}, lambda s, k, p: 0.5 if p.data is not p and p.detach() not in k else 1.0)

keep(
    "attribute", lambda s: setattr(s.bias, "no_decay", True), lambda s, k, p: 0.0 if getattr(p, "no_decay", 0) else 1.0
)
keep("private attribute", lambda s: setattr(s.bias, "_skip", 1), lambda s, k, p: 0.0 if hasattr(p, "_skip") else 1.0)
keep("number", lambda s: setattr(s.bias, "lr", 0.5), lambda s, k, p: p.lr if p.dim() == 1 and hasattr(p, "lr") else 1.0)
keep("object", lambda s: setattr(s.bias, "spec", Spec(0.5)), lambda s, k, p: p.spec.scale if hasattr(p, "spec") else 1)
keep("vars", lambda s: setattr(s.bias, "lr", 0.5), lambda s, k, p: vars(p).get("lr", 1.0))
keep("class attribute", lambda s: None, lambda s, k, p: getattr(p, "scale", 1.0))
STEPS["all rules"] = AllRules
add(
    "attribute that changes", prepare=lambda self: setattr(self.bias, "lr", 1.0),
    between=lambda self, call: setattr(self.model.first.bias, "lr", 1.0 / (1 + call)),
    rule=lambda self, p: getattr(p, "lr", 1.0),
)  # fmt: skip
add(
    "attribute that comes later",
    between=lambda self, call: setattr(self.model.first.bias, "frozen", True) if call == 2 else None,
    rule=lambda self, p: 0.0 if getattr(p, "frozen", False) else 1.0,
)  # fmt: skip
add(
    "set that is made between calls", prepare=lambda self: setattr(self, "kept", set()),
    between=lambda self, call: setattr(self, "kept", {self.model.last.bias, self.bias} if call > 1 else set()),
    rule=lambda self, p: 0.5 if p in self.kept else 1.0,
)  # fmt: skip
add(
    "set that grows", prepare=lambda self: setattr(self, "kept", {self.bias}),
    between=lambda self, call: self.kept.add(self.model.last.bias),
    rule=lambda self, p: 0.5 if p in self.kept else 1.0,
)  # fmt: skip


def add_hook(self: Any) -> None:
    self.seen = {self.bias: 0.5}
    for param in self.params.values():
        param.register_post_accumulate_grad_hook(lambda p: multiply(p, self.seen.get(p, 1.0)))


def multiply(param: Any, factor: float) -> None:
    param.grad.mul_(factor)


add("parameter given to a hook", prepare=add_hook)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0) * getattr(weight, "lr", 1.0)


add(
    "a Function", prepare=lambda self: setattr(self.model.marked, "lr", 0.5),
    forward=lambda self, x: Scaled.apply(self.model.first(x)[:, :4], self.model.marked),
    rule=lambda self, p: 1.0,
    step=lambda self, x: partial_step(self, x),
)  # fmt: skip


def partial_step(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.optimizer.zero_grad()
    loss = self.forward(x).square().mean()
    loss.backward()
    self.optimizer.step()
    return loss.detach()


def functional(self: Any, x: torch.Tensor) -> torch.Tensor:
    held = {name: p * 1.0 for name, p in self.model.named_parameters()}
    return torch.func.functional_call(self.model, held, x)


def gradients(self: Any, x: torch.Tensor) -> torch.Tensor:
    def loss_of(params: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.model, params, row).square().mean()

    params = dict(self.model.named_parameters())
    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))({k: p.detach() for k, p in params.items()}, x)
    for name, param in params.items():
        param.grad = each[name].mean(0)
    self.optimizer.step()
    return self.model(x).square().mean().detach()


add("functional_call", forward=functional)
add("gradients of each sample", step=gradients)
add("vmap of a module", forward=lambda self, x: torch.vmap(self.model)(x))
add("checkpoint", forward=lambda self, x: checkpoint(self.model, x, use_reentrant=False))
add("checkpoint, reentrant", forward=lambda self, x: checkpoint(self.model, x.requires_grad_(), use_reentrant=True))
add(
    "torch.autograd.grad",
    step=lambda self, x: grads_by_hand(self, x),
)  # fmt: skip
add("a copy of a parameter", forward=lambda self, x: self.model(x) + nn.Parameter(self.model.last.bias) * 0.5)
add("a deep copy", forward=lambda self, x: self.model(x) + copy.deepcopy(self.model.first)(x)[:, :4].detach())


def grads_by_hand(self: Any, x: torch.Tensor) -> torch.Tensor:
    params = [*self.model.parameters()]
    loss = self.model(x).square().mean()
    for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = grad * (0.5 if param is self.model.marked else 1.0)
    self.optimizer.step()
    return loss.detach()


def buffers(name: str, weight: Callable[..., Any], prepare: Callable[..., Any] = lambda self: None) -> None:
    add(name, weight=lambda self, x, h: weight(self, self.model.shift), prepare=prepare)


buffers("a set of buffers", lambda s, b: 2.0 if b in s.kept else 1.0, lambda s: setattr(s, "kept", {s.model.shift}))
buffers("type of a buffer", lambda s, b: 2.0 if type(b) is torch.Tensor else 1.0)
buffers("attribute of a buffer", lambda s, b: b.factor, lambda s: setattr(s.model.shift, "factor", 2.0))
add("type of a batch tensor", weight=lambda self, x, h: 2.0 if type(x) is torch.Tensor else 1.0)
add("class of a batch tensor", weight=lambda self, x, h: 2.0 if x.__class__.__name__ == "Tensor" else 1.0)
add("type of a result", weight=lambda self, x, h: 2.0 if type(h) is torch.Tensor else 1.0)
add("class of a result", weight=lambda self, x, h: 2.0 if h.__class__ is torch.Tensor else 1.0)
add("types compared", weight=lambda self, x, h: 2.0 if type(x) is type(h) and type(type(h)) is type(int) else 1.0)
add("type of a gradient", rule=lambda self, p: 0.5 if type(p.grad) is torch.Tensor else 1.0)


def tagged(self: Any, x: torch.Tensor, call: int) -> torch.Tensor:
    x = x.clone()
    x.factor = 2.0 + call
    return x


@functools.singledispatch
def kind_of(value: object) -> float:
    return 1.0


@kind_of.register
def _(value: torch.Tensor) -> float:
    return 2.0


@kind_of.register
def _(value: nn.Parameter) -> float:
    return 0.5


def keep_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    loss = partial_step(self, x) + 0.1 * self.last.sum()
    self.last = x
    ws.callback(self.seen.append, x)
    return loss


def compare_batches(self: Any, call: int) -> None:
    assert [float(x.sum()) for x in self.seen] == [float(x.sum()) for x in self.given[:call]]


def note_batch(self: Any, x: torch.Tensor, call: int) -> torch.Tensor:
    self.given.append(x)
    return x


add(
    "batch tensor kept for the next call", batch=note_batch, step=keep_batch, between=compare_batches,
    prepare=lambda self: vars(self).update(last=torch.zeros(6, 4, dtype=torch.float64), seen=[], given=[]),
)  # fmt: skip
add("attribute of a batch tensor", batch=tagged, weight=lambda self, x, h: getattr(x, "factor", 1.0))
add("batch tensor as a key", weight=lambda self, x, h: {x: 2.0}.get(x, 1.0))
add("addresses of parameters", weight=lambda self, x, h: len({p.data_ptr() for p in self.model.parameters()}) / 4)
add(
    "a tensor of the same memory",
    weight=lambda self, x, h: 1.0 + h.is_set_to(h.view(h.shape)) + 2.0 * h.is_set_to(h[:2]),
)
add(
    "addresses of views", weight=lambda self, x, h: 1.0 + (h.data_ptr() == h.view(-1).data_ptr()) +
    2.0 * (x.data_ptr() == h.data_ptr()) + 4.0 * (h[1].data_ptr() - h.data_ptr()) / h.element_size(),
)  # fmt: skip
add("singledispatch", rule=lambda self, p: kind_of(p), weight=lambda self, x, h: kind_of(h))


def leaf_of_batch(self: Any, x: torch.Tensor, call: int) -> torch.Tensor:
    return x.clone().requires_grad_()


def leaf_with_its_gradient(self: Any, x: torch.Tensor, call: int) -> torch.Tensor:
    self.leaf = x.clone().requires_grad_()
    (self.expected,) = torch.autograd.grad(copy.deepcopy(self.model)(self.leaf).square().mean(), self.leaf)
    return self.leaf


def compare_gradients(self: Any, call: int) -> None:
    if call:
        torch.testing.assert_close(self.leaf.grad, self.expected, rtol=1e-9, atol=1e-12)


add("gradient that is read after the call", batch=leaf_with_its_gradient, between=compare_gradients)
add("gradient of a batch tensor", batch=leaf_of_batch, step=lambda self, x: adversarial(self, x))


def adversarial(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.optimizer.zero_grad()
    self.model(x).square().mean().backward()
    with torch.no_grad():
        moved = x + 0.1 * x.grad.sign()
    return partial_step(self, moved)
