"""What an optimizer may keep, and what a call could not carry to the next one."""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import wholestep as ws
from tests.eager import batches, same_as_eager


class Keeps(Optimizer):
    """Momentum, kept as `put` says and `get` finds it."""

    def __init__(self, params: Any, put: Callable[[Any, Tensor, Tensor], None], get: Callable[[Any, Tensor], Tensor]):
        super().__init__(params, {"lr": 0.1})
        self.put, self.get = put, get

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.put(self, p, torch.zeros_like(p))
                p.sub_(group["lr"] * self.get(self, p).mul_(0.9).add_(p.grad))


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.softplus(model(x)).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


class _Object:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _beside(o: Any, p: Tensor, m: Tensor) -> None:
    o.state[p]["there"] = torch.zeros(())
    o.state["all"] = {**o.state.get("all", {}), "m": m}


def _shared(o: Any, p: Tensor, m: Tensor) -> None:
    first = next(iter(o.state.values())).get("count")
    o.state[p] = {"m": m, "count": torch.zeros(()) if first is None else first}


KEPT: dict[str, tuple[Any, Any, str]] = {
    "item": (
        lambda o, p, m: o.state[p].update(m=[[_Object(m)]]), lambda o, p: o.state[p]["m"][0][0].tensor, "a _Object",
    ),
    "twice": (
        lambda o, p, m: o.state[p].update({"m": [m], "m.0": torch.ones(())}), lambda o, p: o.state[p]["m"][0],
        "two things in its state that have the name 'm.0'",
    ),
    "deque": (lambda o, p, m: o.state[p].update(m=deque([m])), lambda o, p: o.state[p]["m"][0], "which is a deque"),
    "object": (
        lambda o, p, m: o.state[p].update(m=_Object(m)), lambda o, p: o.state[p]["m"].tensor, "a _Object",
    ),
    "beside": (_beside, lambda o, p: o.state["all"]["m"], "'all' in its state, which belongs to no parameter"),
    "number": (lambda o, p, m: o.state[p].update({0: m}), lambda o, p: o.state[p][0], "state under 0, which is no"),
    "path": (lambda o, p, m: o.state[p].update({"a/b": m}), lambda o, p: o.state[p]["a/b"], "state under 'a/b'"),
    "shared": (_shared, lambda o, p: o.state[p]["m"], "one tensor twice in its state, as 'count' and as 'count'"),
}  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("kind", KEPT)
def test_what_cannot_be_carried_is_refused(kind: str, made: bool) -> None:
    """At the first call, also where an eager step made the state before; and nothing was changed."""
    put, get, text = KEPT[kind]
    model, x = nn.Linear(3, 2), torch.ones(2, 3)
    optimizer = Keeps(model.parameters(), put, get)
    if made:
        train(model, optimizer, x)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ws.CaptureError, match=text) as found:
        ws.compile(train)(model, optimizer, x)
    assert "optimizer" in str(found.value).splitlines()[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert bool(optimizer.state) is made


def _replace_item(s: Any, grad: Tensor) -> Tensor:
    s["m"][0] = s["m"][0] * 0.9 + grad
    return s["m"][0]


def _replace_list(s: Any, grad: Tensor) -> Tensor:
    s["m"] = [s["m"][0] * 0.9 + grad, s["m"][1]]
    return s["m"][0]


def _replace_tuple(s: Any, grad: Tensor) -> Tensor:
    h, c = s["m"]
    s["m"] = (h * 0.9 + grad, c + h.square())
    return s["m"][0] + s["m"][1]


def _change_inside(s: Any, grad: Tensor) -> Tensor:
    for beta, m in s["m"].items():
        m[0].mul_(beta).add_(grad)
    return s["m"][0.9][0] + s["m"][0.5][0]


def _come_later(s: Any, grad: Tensor) -> Tensor:
    s["n"] += 1
    if s["n"] == 2:
        s["m"] = [torch.zeros_like(grad)]
    if s["m"] is not None:
        s["m"][0].mul_(0.9).add_(grad)
    return grad if s["m"] is None else s["m"][0]


def _grow(s: Any, grad: Tensor) -> Tensor:
    s["m"].append(grad.clone())
    if len(s["m"]) > 2:
        s["m"].pop(0)
    return s["m"][0]


def _count(s: Any, grad: Tensor) -> Tensor:
    s["m"][0] += 1
    return s["m"][1].add_(grad / s["m"][0])


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], Tensor]]] = {
    "item": (lambda p: {"m": [torch.zeros_like(p), torch.eye(3)]}, _replace_item),
    "list": (lambda p: {"m": [torch.zeros_like(p), torch.ones(())]}, _replace_list),
    "tuple": (lambda p: {"m": (torch.zeros_like(p), torch.zeros_like(p))}, _replace_tuple),
    "nested": (lambda p: {"m": {0.9: [torch.zeros_like(p)], 0.5: [torch.zeros_like(p)]}}, _change_inside),
    "later": (lambda p: {"m": None, "n": 0}, _come_later),
    "grows": (lambda p: {"m": []}, _grow),
    "number": (lambda p: {"m": [0, torch.zeros_like(p), None]}, _count),
    "gradient": (lambda p: {"grad": torch.zeros_like(p)}, lambda s, grad: s["grad"].mul_(0.9).add_(grad)),
}


class InContainers(Optimizer):
    """Descends along what `change` makes of the gradient and of its state, which `new` makes."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.new, self.change = CONTAINERS[kind]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] = self.new(p)
            p.sub_(0.1 * self.change(self.state[p], p.grad))


def setup(kind: str) -> tuple[nn.Module, InContainers]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, InContainers(model.parameters(), kind)


def same(ours: Any, theirs: Any) -> None:
    """Equal structures, with equal tensors."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, (dict, list, tuple)):
        assert len(ours) == len(theirs)
        keys = ours if isinstance(ours, dict) else range(len(ours))
        for key in keys:
            same(ours[key], theirs[key])
    else:
        assert ours == theirs


def flat_state(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return [dict(optimizer.state[p]) for p in model.parameters()] + list(model.parameters())


@pytest.mark.parametrize("kind", CONTAINERS)
def test_lists_tuples_and_dicts_are_state(kind: str, tmp_path: Any) -> None:
    """As eager over six calls, of which the last two are after a checkpoint and after another state dict."""
    (model, optimizer), (other, theirs) = setup(kind), setup(kind)
    step = ws.compile(train)
    for call in range(6):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(call))
        if call == 4:
            ws.save(tmp_path, step)
            model, optimizer = setup(kind)
            step = ws.compile(train)
            ws.load(tmp_path, model=model, optimizer=optimizer)
        if call == 5:
            optimizer.load_state_dict(optimizer.state_dict())
            with ws.whole(model, optimizer, writeback=True):
                same(flat_state(model, optimizer), flat_state(other, theirs))
        same(step(model, optimizer, x), train(other, theirs, x))
        same(flat_state(model, optimizer), flat_state(other, theirs))
    if kind == "nested":
        assert "weight/m.0.9.0" in {i.name for i in step.train_graph.inputs}  # type: ignore[union-attr]


def test_containers_may_be_replaced_between_calls() -> None:
    """An item, a list by another one, a longer list, which is captured again."""
    (model, optimizer), (other, theirs), step = setup("list"), setup("list"), ws.compile(train)
    for call in range(6):
        for m, o in ((model, optimizer), (other, theirs)):
            held = o.state[m.weight].get("m") if o.state else None
            if call == 2:
                held[0] = torch.ones(2, 3)
            if call == 3:
                o.state[m.weight]["m"] = [torch.full((2, 3), 2.0), held[1]]
            if call == 4:
                held.append(torch.zeros(()))
            if call == 5:
                o.state[m.weight]["m"] = [torch.full((2, 3), 3.0), *held[1:2]]
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(call))
        same(step(model, optimizer, x), train(other, theirs, x))
        same(flat_state(model, optimizer), flat_state(other, theirs))
    assert step.captures == 3


def doubled(model: nn.Module, optimizer: Optimizer) -> None:
    entry = optimizer.state[model.weight]
    entry["exp_avg"] = entry["exp_avg"] * 2


def exchanged(model: nn.Module, optimizer: Optimizer) -> None:
    entry = optimizer.state[model.weight]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"].abs(), entry["exp_avg"].abs()


def renamed(model: nn.Module, optimizer: Optimizer) -> None:
    """The same tensors in the same order, by other names."""
    entry = optimizer.state[model.weight]
    step, first, second = entry["step"], entry["exp_avg"].abs_(), entry["exp_avg_sq"]
    entry.clear()
    entry.update({"step": step, "exp_avg_sq": first, "exp_avg": second})


def copied(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model.weight] = dict(optimizer.state[model.weight])


def copied_and_doubled(model: nn.Module, optimizer: Optimizer) -> None:
    copied(model, optimizer)
    doubled(model, optimizer)


def annotated(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state[model.weight]["seen"] = 1


def loaded(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    doubled(model, optimizer)


def other_weight(model: nn.Module, optimizer: Optimizer) -> None:
    """A parameter with the old one's state, as weight and in the optimizer."""
    old, new = model.weight, nn.Parameter(model.weight.detach() + 1)
    model.weight = new
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new


def other_mean(model: nn.Module, optimizer: Optimizer) -> None:
    model.mean = torch.ones(())


CHANGES = (doubled, exchanged, renamed, copied, copied_and_doubled, annotated, loaded, other_weight, other_mean)


class Follows(nn.Linear):
    """Each call leaves another tensor as its attribute."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean()
        return super().forward(x) * self.mean


@pytest.mark.parametrize("bias", [True, False])
def test_what_is_replaced_between_calls_is_seen(bias: bool) -> None:
    """As eager, with each change followed by a call without one and by a change in place."""

    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = Follows(3, 2, bias=bias)
        model.mean = torch.ones(())
        return model, torch.optim.Adam(model.parameters(), 0.1)

    (model, optimizer), (other, theirs), step = made(), made(), ws.compile(train)
    calls = [None, None, *(change for one in CHANGES for change in (one, None, doubled))]
    for call, change in enumerate(calls):
        for m, o in ((model, optimizer), (other, theirs)):
            if change is not None:
                change(m, o)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(call))
        torch.testing.assert_close(step(model, optimizer, x), train(other, theirs, x))
        torch.testing.assert_close(model.mean, other.mean)
        torch.testing.assert_close(flat_state(model, optimizer), flat_state(other, theirs))
    assert step.captures <= 3


class Marked(nn.Module):
    """A buffer by whose attribute it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 2), nn.Buffer(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale * (2 if getattr(self.scale, "marked", False) else 1)


@pytest.mark.parametrize("marked", [False, True])
def test_a_buffer_is_replaced_by_one_with_other_attributes(marked: bool) -> None:
    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = Marked().double()
        model.scale.marked = marked  # type: ignore[attr-defined]
        return model, torch.optim.AdamW(model.parameters())

    def replaced(call: int, model: Marked, _: Optimizer) -> None:
        if call > 1:
            model.scale = model.scale.clone()
        if call > 2:
            model.scale.marked = call == 3 or not marked  # type: ignore[attr-defined]

    same_as_eager(train, made, batches((4, 3), count=5), between=replaced)


def has_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Another learning rate, as it were, from the second call on."""
    return train(model, optimizer, x if next(model.parameters()) in optimizer.state else 2 * x)


def counts_state(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    before, loss = len(optimizer.state), train(model, optimizer, x)
    return loss * (1 + before + 2 * len(optimizer.state_dict()["state"]))


def lookahead(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = train(model, optimizer, x)
    for p in model.parameters():
        slow = optimizer.state[p].setdefault("slow", p.detach().clone())
        p.data.copy_(slow.lerp_(p.detach(), 0.5))
    return loss


def sharpness_aware(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    """Its ascent is kept beside the momentum, before there is one."""
    loss = F.softplus(model(x)).mean()
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        optimizer.state[p]["ascent"] = 0.05 * grad
        p.data.add_(optimizer.state[p]["ascent"])
    optimizer.zero_grad()
    F.softplus(model(x)).mean().backward()
    for p in model.parameters():
        p.data.sub_(optimizer.state[p].pop("ascent"))
    optimizer.step()
    return loss.detach()


def ensured(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    entry = optimizer.state.setdefault(next(model.parameters()), {})
    return train(model, optimizer, x if entry else 2 * x)


def compared(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    return train(model, optimizer, x if optimizer.state != {} else 2 * x)


def asks_and_branches(model: nn.Module, optimizer: Optimizer, x: Tensor, above: Tensor) -> Tensor:
    """The program of the first call that is captured first may take the other branch, and then does not run."""
    x = x if model.weight in optimizer.state else 2 * x
    return train(model, optimizer, x if model(x).square().mean() > above else 3 * x)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_a_program_that_did_not_run_has_made_no_state(name: str, sign: float) -> None:
    calls = [(*call, torch.tensor(9.0 * sign * (-1) ** i)) for i, call in enumerate(batches((4, 3), count=4))]
    same_as_eager(asks_and_branches, lambda: with_state(name), calls)


def some_parts(model: nn.ModuleList, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model[0](x)
    for part in model[1:]:
        out = part(out) + out if out.sum() > 0 else out * 1.5 + 0.3
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_trace_is_the_same_once_other_parameters_have_state() -> None:
    """The fifth call is traced again: the names of nodes that are gone count them differently."""

    def made() -> tuple[nn.ModuleList, Optimizer]:
        torch.manual_seed(2)
        model = nn.ModuleList([nn.Linear(3, 3, bias=number == 0) for number in range(4)]).double()
        return model, torch.optim.AdamW(model.parameters(), 0.1)

    rows = [
        [[0.79, -0.28, -1.92], [-0.38, 0.88, 1.27]], [[-0.34, -0.81, 0.39], [-0.8, -0.39, -1.26]],
        [[1.3, -1.96, 0.03], [2.45, -0.78, 0.07]], [[-0.22, -0.75, -1.17], [0.21, 0.67, -0.13]],
        [[-0.27, -2.06, 0.32], [0.83, 0.75, 0.92]],
    ]  # fmt: skip
    calls = [(torch.tensor(batch, dtype=torch.float64),) for batch in rows]
    same_as_eager(some_parts, made, calls, verify=True)


def of_rows(model: nn.Module, optimizer: Optimizer, x: Tensor, rows: Tensor) -> Tensor:
    return has_state(model, optimizer, x[rows])


def test_an_entry_that_a_question_makes_after_a_failed_call_is_seen() -> None:
    found: list[list[float]] = []
    for compiled in (False, True):
        model, optimizer = with_state("adamw")
        step = ws.compile(of_rows) if compiled else of_rows
        with pytest.raises(IndexError):
            step(model, optimizer, *batches((4, 3))[0], torch.tensor([0, 9]))
        assert optimizer.state[model.weight] == {}  # makes an empty entry, which `in` sees
        losses = [step(model, optimizer, *call, torch.tensor([0, 3])).item() for call in batches((4, 3))]
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def cleared(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.state.clear()
    return train(model, optimizer, x)


def emptied(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.state[next(model.parameters())] = {}
    return train(model, optimizer, x)


def another(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    optimizer.state = defaultdict(dict)
    return train(model, optimizer, x)


class OwnAdamW(torch.optim.AdamW):
    """A class of the user's, whose update is torch's."""


ASKS = {
    "in": has_state, "len": counts_state, "lookahead": lookahead, "sam": sharpness_aware, "never": train,
    "setdefault": ensured, "!=": compared,
}  # fmt: skip
MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "own adamw": lambda params: OwnAdamW(params, 0.01, fused=False),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


def with_state(name: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    return model, MAKE[name](model.parameters())


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("asks", ASKS)
def test_state_is_there_when_the_optimizer_has_made_it(asks: str, name: str) -> None:
    step = same_as_eager(ASKS[asks], lambda: with_state(name), batches((4, 3)))
    assert step.captures == (1 if asks == "never" else 2)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("resets", [cleared, emptied, another], ids=lambda resets: resets.__name__)
def test_a_step_may_begin_without_the_state_of_the_last_one(resets: Callable[..., Tensor], name: str) -> None:
    same_as_eager(resets, lambda: with_state(name), batches((4, 3), count=4))


def test_a_step_may_print_or_return_the_state_of_its_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    def shows(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        print(optimizer.state, type(optimizer.state))
        return model(x).sum().detach(), optimizer.state

    model = nn.Linear(3, 2).double()
    _, state = ws.compile(shows)(model, torch.optim.SGD(model.parameters(), 0.1), *batches((4, 3))[0])
    assert capsys.readouterr().out == "defaultdict(<class 'dict'>, {}) <class 'collections.defaultdict'>\n"
    assert state == {}


@pytest.mark.parametrize("made", ["all", "one", "entry"])
def test_a_step_that_deletes_what_its_update_has_made_is_refused(made: str) -> None:
    def deletes(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss, state, weight = train(model, optimizer, x), optimizer.state, next(model.parameters())
        if made == "all":
            optimizer.state = defaultdict(dict)
        elif made == "one":
            del state[weight]
        else:
            state[weight].clear()
        return loss

    model, optimizer = with_state("adamw")
    with pytest.raises(ws.CaptureError, match=r"the step deletes 'weight/.*', which its update has made"):
        ws.compile(deletes)(model, optimizer, *batches((4, 3))[0])


def test_state_that_is_loaded_before_the_first_call_is_there(tmp_path: Any) -> None:
    (model, optimizer), step = with_state("adamw"), ws.compile(has_state)
    (other, theirs), again = with_state("adamw"), ws.compile(has_state)
    calls = batches((4, 3), count=3)
    step(model, optimizer, *calls[0])
    ws.save(tmp_path / "saved", step)
    ws.load(tmp_path / "saved", again)
    for call in calls[1:]:
        torch.testing.assert_close(again(other, theirs, *call), has_state(model, optimizer, *call), rtol=0, atol=1e-12)
