"""A trace without its mutation computes what the mutating step computes, views of views included."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wholestep as ws
from wholestep import _torch
from wholestep.capture.functional import functionalize

foreach_add_: Any = torch.ops.aten._foreach_add_.Scalar
foreach_lerp_: Any = torch.ops.aten._foreach_lerp_.Scalar
Step = Callable[[Tensor, Tensor], Any]


def row_of_transposed(x: Tensor, y: Tensor) -> Any:
    view = x.t()[1]
    view.add_(y[0, 0])
    return x * 2, view


def views_read_after_the_base_changed(x: Tensor, y: Tensor) -> Any:
    base = x.clone()
    rows, flat, columns = base[1:], base.view(-1), base.unbind(1)
    base.mul_(y)
    columns[2].zero_()
    rows[0].copy_(y[0])
    return base, rows, flat, columns


def parts(x: Tensor, y: Tensor) -> Any:
    base = x + 0
    a, b = torch.split(base, [1, 3], dim=1)
    b.sub_(1).clamp_(max=0.5)
    a.fill_(3)
    base.unsqueeze(0).permute(2, 0, 1)[0].exp_()
    return base, a, b


def diagonal_and_strides(x: Tensor, y: Tensor) -> Any:
    base = x * 1
    base.diagonal().add_(1)
    base.as_strided((2, 2), (4, 2)).neg_()
    base.view(2, 2, 4).squeeze().select(1, 0).tanh_()
    return base


def lists(x: Tensor, y: Tensor) -> Any:
    a: Tensor = x * 2
    b: Tensor = y * 2
    whole = torch.cat([a, b])
    foreach_add_([a, whole[:2], whole[2:3]], 1.0)
    foreach_lerp_([a, b], [y, x], 0.25)
    return a, b, whole


def index_put(x: Tensor, y: Tensor) -> Any:
    base = x + y
    kept = base.detach()
    base[:, 1][y[:, 0] > 0] = 0
    base[torch.tensor([0, 2])] += 1
    return base, kept


def mixed_dtypes(x: Tensor, y: Tensor) -> Any:
    base = x.float()
    base[:2].add_(y[:2])
    base.add_(y.double() / 3)
    return base, base.dtype == torch.float32


def out_variants(x: Tensor, y: Tensor) -> Any:
    out = torch.empty_like(x)
    torch.mul(x, y, out=out)
    values, indices = torch.empty(4, dtype=x.dtype), torch.empty(4, dtype=torch.long)
    torch.max(x, 0, out=(values, indices))
    return out, values, indices


def inputs_change(x: Tensor, y: Tensor) -> Any:
    seen = x[0]
    x.add_(y)
    y[:, 0].copy_(seen)
    return seen, x.sum()


def one_made_and_one_written(x: Tensor, y: Tensor) -> Any:
    noise = torch.zeros_like(x)
    made = torch.ops.aten.rrelu_with_noise(x, noise, 0.25, 0.25, True)
    return made * 2, noise + y


CATALOGUE = [
    row_of_transposed, views_read_after_the_base_changed, parts, diagonal_and_strides, lists, index_put, mixed_dtypes,
    out_variants, inputs_change, one_made_and_one_written,
]  # fmt: skip


def assert_same(mine: Any, own: Any) -> None:
    if isinstance(own, Tensor):
        torch.testing.assert_close(mine, own, rtol=0, atol=0)
    else:
        assert mine == own


def compare(step: Step) -> None:
    def all_of(x: Tensor, y: Tensor) -> Any:
        return _torch.tree_flatten((step(x, y), x.detach(), y.detach()))[0]

    def given() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator).unbind()
        return x.clone(), y.clone()

    with _torch.fake_mode() as mode:
        fakes = [mode.from_tensor(t) for t in given()]
    traced = _torch.trace(all_of, fakes, {})
    module = functionalize(traced, fakes)
    mutable = [n for n in module.graph.nodes if _torch.is_op(n.target) and _torch.schema_of(n.target).is_mutable]
    assert all(n.target is torch.ops.aten.copy_.default for n in mutable)
    assert not mutable or {n.args[0].op for n in mutable} == {"placeholder"}
    expected = all_of(*given())
    for mine, own in zip(torch.fx.Interpreter(module).run(*given()), expected, strict=True):
        assert type(mine) is type(own)
        assert_same(mine, own)


@pytest.fixture
def never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the step was traced a second time")

    monkeypatch.setattr(_torch, "functionalize", refuse)


@pytest.mark.usefixtures("never_again")
@pytest.mark.parametrize("step", CATALOGUE, ids=lambda step: step.__name__)
def test_writes_through_views(step: Step) -> None:
    compare(step)


def normed_columns(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Autograd writes into a gradient that lies by columns; the kernel that reads it next takes it for rows."""
    optimizer.zero_grad()
    y = F.group_norm(model(x).transpose(1, 2), 2).transpose(1, 2)
    loss = y.norm() + y.norm(dim=-1).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.usefixtures("never_again")
def test_what_is_written_keeps_its_order_in_memory() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6).double()
    other, x = copy.deepcopy(model), torch.randn(6, 5, 6, dtype=torch.float64)
    step = ws.compile(normed_columns)
    for _ in range(2):
        loss = step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
        torch.testing.assert_close(loss, normed_columns(other, torch.optim.SGD(other.parameters(), lr=0.1), x))
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-12, atol=1e-12)


def test_writes_it_does_not_know_are_traced_again() -> None:
    def becomes_another_view(x: Tensor, y: Tensor) -> Any:
        base = x + 1
        base.t_().mul_(y)
        return base

    compare(becomes_another_view)


VIEW: list[Callable[[Tensor, random.Random], Tensor]] = [
    lambda t, _: t.transpose(0, -1),
    lambda t, r: t[r.randrange(t.shape[0])] if t.dim() > 1 else t[: 1 + r.randrange(t.shape[0])],
    lambda t, r: t.narrow(-1, 0, 1 + r.randrange(t.shape[-1])),
    lambda t, _: t.unsqueeze(0),
    lambda t, _: t.squeeze(),
    lambda t, r: t.unbind(0)[r.randrange(t.shape[0])] if t.dim() > 1 else t,
    lambda t, r: t.chunk(2, -1)[-1],
    lambda t, _: t.flatten(),
    lambda t, _: t.detach(),
    lambda t, _: t.diagonal() if t.dim() == 2 else t,
]
WRITE: list[Callable[[Tensor, Tensor], Any]] = [
    lambda t, _: t.mul_(2),
    lambda t, o: t.add_(o.sum()),
    lambda t, _: t.zero_(),
    lambda t, o: t.copy_(o.flatten()[: t.numel()].view(t.shape)) if o.numel() >= t.numel() else t.neg_(),
    lambda t, _: foreach_add_([t], 1.0),
]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.full if n >= 20 else ()) for n in range(60)])
def test_random_writes(seed: int) -> None:
    """Views of views of one tensor, written and read in random order."""

    def step(x: Tensor, y: Tensor) -> Any:
        choose = random.Random(seed)
        members = [x * 1, x]
        for _ in range(12):
            member = choose.choice(members)
            if choose.random() < 0.6:
                view = choose.choice(VIEW)(member, choose)
                members.append(view if view.dim() else member)
            else:
                choose.choice(WRITE)(member, choose.choice(members) * 1)
        return [member * 1 for member in members]

    compare(step)


def test_the_conjugate_of_a_number() -> None:
    """The gradient of a product with 1j is one with its conjugate, which is a view of no tensor."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.exp(1j * model(x)).real.mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    other = copy.deepcopy(model)
    compiled = ws.compile(step, progress=None)
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    for _ in range(2):
        torch.testing.assert_close(compiled(model, optimizer, x), step(other, plain, x))
    torch.testing.assert_close(model.state_dict(), other.state_dict())
