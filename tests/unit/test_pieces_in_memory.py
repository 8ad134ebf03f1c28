"""Pieces lie anyhow in memory, as views with offsets and gaps: rules, views by strides, kernels that care."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import wholestep as ws
from tests.simulate import run_one
from tests.together import OneDevice, compare
from tests.tp_models import SEQUENCE, VOCAB, Llama, next_token, step_of
from wholestep.capture import capture_step
from wholestep.graph import meta
from wholestep.graph.graph import Role
from wholestep.graph.op_kinds import depends_on_strides
from wholestep.proof import interpret
from wholestep.rules import registry
from wholestep.rules.call import Call
from wholestep.rules.localize import as_complex
from wholestep.rules.registry import bind_rule
from wholestep.rules.testing.harness import FORMS, laid

aten = torch.ops.aten
STYLES = ("replicate", "fully_shard")


@pytest.fixture(autouse=True)
def _double(double: None) -> None:
    """Everything here is float64, from one seed."""


@pytest.fixture
def table_restored() -> Iterator[None]:
    kept = dict(registry.RULES)
    yield
    registry.RULES.clear()
    registry.RULES.update(kept)
    registry.bound = {}


def test_pieces_that_are_said_to_lie_row_by_row_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy makes them contiguous, for kernels that ask for it and views that need it."""
    told, traced = list[str](), interpret.as_traced

    def checked(node: Node, made: Any) -> Any:
        found = meta.tensor(node)
        turned = node.target in (aten.permute.default, aten.t.default)  # for a copy behind it
        if found is not None and found.is_contiguous and not (turned or meta.is_strided(node)):
            assert made.is_contiguous(), node.format_node()
            told.append(str(node.target))
        return traced(node, made)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Llama(heads=4, kv=2)
        return model, SGD(model.parameters(), lr=0.1)

    monkeypatch.setattr(interpret, "as_traced", checked)
    batch = torch.randint(0, VOCAB, (3, 12)), torch.randint(0, VOCAB, (3, 12))
    for parallel in (ws.TensorParallel(SEQUENCE), ws.TensorParallel({"layers.*.mlp.w[13]": "colwise"})):
        assert compare(OneDevice(make, step_of(next_token), [batch]), "tp=2", parallel).worst < 1e-10
    assert {"aten.mm.default", "aten.view.default", "aten.mul.Tensor"} <= set(told)


# -- the check -------------------------------------------------------------------------------
@pytest.mark.crossed
@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (4, 5, 6), (0, 3)])
def test_a_tensor_lies_as_asked(form: int, shape: tuple[int, ...]) -> None:
    given = torch.randn(shape)
    made = laid(given, form)
    assert torch.equal(made, given)
    assert made.data_ptr() != given.data_ptr() or not given.numel()
    if form and given.numel():
        assert made.storage_offset() > 0
        assert made.untyped_storage().nbytes() > given.nbytes
    if form > 1 and len(shape) > 1 and given.numel():
        assert not made.is_contiguous()


def test_elements_that_share_a_place_stay_together() -> None:
    given = torch.arange(6.0).unfold(0, 3, 1)
    made = laid(given, 1)
    assert torch.equal(made, given)
    assert (made.stride(), made.storage_offset()) == (given.stride(), 3)


@torch.library.custom_op("rules_test::from_the_start", mutates_args=())
def from_the_start(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, x.stride(), 0).clone()


def _row_by_row(start: int, length: int, x: Tensor) -> Tensor:
    return torch.as_strided(x, [length, x.shape[1]], [x.shape[1], 1]).clamp_min(0)


def _from_the_start(start: int, length: int, x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, x.stride(), 0).clamp_min(0)


@pytest.mark.usefixtures("table_restored")
@pytest.mark.parametrize("local", [_row_by_row, _from_the_start])
def test_a_rule_that_is_right_of_contiguous_pieces_alone_is_refused(local: Callable[..., Any]) -> None:
    ws.rule(aten.relu.default, "a b! -> a b!", local={"a": local})
    with pytest.raises(ws.RuleError) as caught:
        ws.check_rule(aten.relu.default, torch.randn(4, 6))
    assert "factor 'a' cut into 2, pieces that are views" in caught.value.found
    assert caught.value.next_step == (
        "correct the rule: read operands by index, not by their place in memory: a piece is a view of a larger tensor"
    )


@pytest.mark.usefixtures("table_restored")
def test_an_op_that_counts_from_the_start_of_memory_is_refused() -> None:
    ws.rule(from_the_start, "a b -> a b")
    with pytest.raises(ws.RuleError, match="read operands by index"):
        ws.check_rule(from_the_start, torch.randn(4, 6))
    ws.rule(from_the_start, "a! b! -> a! b!")
    with pytest.raises(ws.RuleError, match="operands at an offset"):
        ws.check_rule(from_the_start, torch.randn(4, 6))


def test_as_strided_from_the_start_of_memory_has_no_rule() -> None:
    x, new = torch.randn(4, 6), torch.randn(4, 6)
    for op, *args in ((aten.as_strided.default, x), (aten.as_strided_scatter.default, x, new)):
        said = Call.on(op, (*args, [4, 6], [6, 1], 0), {}, x)
        assert bind_rule(said) is None
        outside = Call.on(op, (*args, [4, 6], [7, 1]), {}, x)
        assert bind_rule(outside) is None
        inside = Call.on(op, (*args, [4, 6], [6, 1]), {}, x)
        assert bind_rule(inside) is not None


def test_ops_that_go_by_memory() -> None:
    assert depends_on_strides(aten.as_strided.default)
    assert depends_on_strides(aten._fused_adamw.tensor_lr)
    assert depends_on_strides(aten._foreach_addcdiv.Tensor)
    assert not depends_on_strides(aten._foreach_addcdiv.Scalar)
    assert not depends_on_strides(from_the_start)


# -- captured views by strides -----------------------------------------------------------------
def _first(x: Tensor) -> Tensor:
    return torch.as_strided(x[1:], (3, 2), (4, 1), x.storage_offset() + 1)  # before and past the ends of the view


def _turned(x: Tensor) -> Tensor:
    return torch.as_strided(x.t(), (2, 3), (1, 4), 5)


def _windows(x: Tensor) -> Tensor:
    return torch.as_strided(x.flatten(), (5, 4), (2, 1))


def _gaps(x: Tensor) -> Tensor:
    return torch.as_strided(x[:, ::2], (4, 2), (4, 1), 1)


def _copy(x: Tensor) -> Tensor:
    return torch.as_strided_copy(x[2:], (2, 2), (4, 1), 9)


def _scatter(x: Tensor) -> Tensor:
    return torch.as_strided_scatter(x * 2, x[:2, :3], (2, 3), (4, 1), 4)


def _scatter_turned(x: Tensor) -> Tensor:
    return torch.as_strided_scatter((x.detach() * 2).t(), x[:2, :2], (2, 2), (1, 4), 5)


def _written(x: Tensor) -> Tensor:
    base = x * 2
    view = base[1:]
    view.add_(1)
    torch.as_strided(view, (2, 2), (4, 1), view.storage_offset() + 1).mul_(3)
    return base


SEEN = [_first, _turned, _windows, _gaps, _copy, _scatter, _scatter_turned, _written]


@pytest.mark.parametrize("see", SEEN)
def test_views_by_strides_are_those_of_one_device(see: Callable[[Tensor], Tensor]) -> None:
    """All ranks of every plan, on parameters that come as views of a bucket and on batches that come as pieces."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.randn(3))
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return see(self.w * self.odd.sum()).sum() * see(x * self.w).square().sum() + see(self.w).cos().sum()

    def make() -> tuple[nn.Module, Optimizer]:
        model = Seen()
        return model, SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(make, step, [(torch.randn(4, 4),) for _ in range(3)])
    for mesh in ("dp=2", "dp=3"):
        for style in STYLES:
            found = compare(one, mesh, ws.DataParallel(style, semantics="global"))
            assert found.worst < 1e-12, f"{mesh} {style}: {found.where} differs by {found.worst:.1e}"


@pytest.mark.parametrize("see", SEEN)
def test_no_view_counts_from_the_start_of_memory(see: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 4)
    captured = capture_step(lambda model, given: see(given), (nn.Linear(2, 2), x), {})
    for node in captured.graph.graph.nodes:
        if "as_strided" in str(node.target):
            assert node.kwargs == {}
            assert isinstance(node.args[-1], list)
    given = [laid(x, 1) if i.role is Role.BATCH else torch.zeros(i.meta.shape) for i in captured.graph.inputs]
    (found,) = run_one(captured.graph, given)
    assert torch.equal(found, see(x))


def test_memory_of_no_tensor_is_refused() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return torch.as_strided(x, (3, 2), (4, 1), 1).sum()  # leaves x[:, :2], whose base the step is not given

    with pytest.raises(ws.CaptureError) as caught:
        capture_step(step, (nn.Linear(2, 2), torch.randn(4, 4)[:, :2]), {})
    text = str(caught.value)
    assert "as_strided of size (3, 2), strides (4, 1) and offset 1 leaves the 8 elements" in text
    assert "torch.as_strided(x, (3, 2), (4, 1), 1).sum()" in text
    assert "next: call as_strided on the tensor that has these elements" in text


# -- pooling ---------------------------------------------------------------------------------------
class Vit(nn.Module):
    """Patches, one layer of attention, a pooled classifier."""

    def __init__(self, pooled: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.pool = nn.AdaptiveAvgPool1d(pooled)
        self.head = nn.Linear(8 * pooled, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layer(self.patch(x).flatten(2).transpose(1, 2))
        return self.head(self.pool(tokens.transpose(1, 2)).flatten(1))


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
@pytest.mark.parametrize("pooled", [1, 2, 3])
@pytest.mark.parametrize("rows", [6, 5], ids=["even", "uneven"])
def test_a_vision_transformer_that_pools(pooled: int, rows: int, mesh: str, style: Any) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Vit(pooled)
        return model, AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(make, step, [(torch.randn(rows, 3, 8, 8), torch.randint(0, 5, (rows,))) for _ in range(4)])
    found = compare(one, mesh, ws.DataParallel(style, semantics="global"))
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


# -- kernels that care ------------------------------------------------------------------------------
class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).mean((2, 3)))


FUSED: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_of_channels_last_parameters(name: str) -> None:
    """Its kernel walks through a parameter, its gradient and its state alike; a reduced gradient lies row by row."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Pixels().to(memory_format=torch.channels_last)
        return model, FUSED[name](model.parameters())

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [(torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last),) for _ in range(3)]
    one = OneDevice(make, step, batches)
    for style in STYLES:
        found = compare(one, "dp=2", ws.DataParallel(style, semantics="global"))
        assert found.worst < 1e-10, f"{style}: {found.where} differs by {found.worst:.1e}"


@pytest.mark.crossed
@pytest.mark.parametrize("form", range(len(FORMS)))
@pytest.mark.parametrize("shape", [(4, 2), (4, 3, 2)])
def test_complex_views_of_pieces(form: int, shape: tuple[int, ...]) -> None:
    given = torch.randn(shape)
    assert torch.equal(as_complex(laid(given, form)), torch.view_as_complex(given))
