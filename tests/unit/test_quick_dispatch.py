"""What the quick way records of a step is what torch's own tracer records."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests import catalogue
from tests.catalogue import CASES, OPTIMIZERS
from tests.steps import mean_square
from wholestep import _torch
from wholestep._torch import dispatch
from wholestep.graph import meta
from wholestep.graph.sizes_in_graph import without_size_nodes
from wholestep.sizes import text_of

Step = Callable[[Tensor, Tensor], Any]


@pytest.fixture
def own_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches the quick way off, and remembers no results."""

    def switch() -> None:
        monkeypatch.setattr(dispatch, "_NEEDED", ("a name that torch does not have",))
        monkeypatch.setattr(_torch, "fake_result", lambda op, args, kwargs: op(*args, **kwargs))

    return switch


def text(module: GraphModule) -> list[str]:
    return [
        f"{node.format_node()} {meta.tensors(node)} {meta.is_backward(node)} {meta.source_line(node)}"
        for node in module.graph.nodes
    ]


def literals(x: Tensor, y: Tensor) -> Any:
    scale = torch.tensor(2.0)
    scale += 1
    return x * scale, y * torch.tensor([1.0, float(scale)]).sum()


def beside_constants(x: Tensor, y: Tensor) -> Any:
    joined, first = torch.cat([torch.tensor([[1.0, 2.0, 3.0, 4.0]]), x]), torch.tensor([1.0])
    first += x[0, 0]
    x = x.detach().requires_grad_()
    (F.silu(x)[:, :-1] * torch.where(torch.tensor(True), y, 0.0)[:, 1:]).sum().backward()
    return joined, first * float(torch.tensor([2.0]) + torch.tensor([1.0])), x.grad


def views_in_place(x: Tensor, y: Tensor) -> Any:
    flat = x.clone().unsqueeze_(0).transpose_(1, 2)
    flat.squeeze_(0)[1].add_(y[:, 0])
    return flat, y.t_().clone()


def several_results(x: Tensor, y: Tensor) -> Any:
    values, at = x.max(0)
    parts = [p * 2 for p in y.split(2)]
    return values, at, parts, torch._foreach_add(parts, parts), torch.linalg.qr(x).R


def composed(x: Tensor, y: Tensor) -> Any:
    z = F.group_norm(torch.einsum("ij,kj->ik", x, y)[None], 2)
    return F.scaled_dot_product_attention(z, z, z, is_causal=True), F.dropout(x, 0.3)


def made_without_tensors(x: Tensor, y: Tensor) -> Any:
    at = torch.arange(4)
    return x[at.flip(0)], torch.zeros(2, 4).sum() + y, torch.full_like(y, 3, dtype=torch.complex64) * 2j


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 + ctx.saved_tensors[0] * 0


def differentiated(x: Tensor, y: Tensor) -> Any:
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    out = checkpoint(lambda a, b: torch.tanh(a @ b) * F.dropout(b, 0.5), Doubled.apply(x), y, use_reentrant=False)
    out.sum().backward()
    return x.grad, y.grad


def test_it_is_taken(monkeypatch: pytest.MonkeyPatch, own_way: Callable[[], None]) -> None:
    taken: list[Any] = []
    record = dispatch._record

    def counted(tracer: Any, node: Any, op: Any, *rest: Any) -> Any:
        taken.append(op)
        return record(tracer, node, op, *rest)

    def captured() -> list[Any]:
        case = next(iter(CASES.values()))
        model = case.build()
        graph = ws.capture(case.step, model, OPTIMIZERS["AdamW-plain"].make(model.parameters()), case.batches(0))
        return [node.target for node in graph.graph.nodes if node.op == "call_function"]

    monkeypatch.setattr(dispatch, "_record", counted)
    ops = captured()
    assert len(taken) > 0.9 * len(ops), "all but what torch's own way is needed for"
    taken.clear()
    own_way()
    assert captured() == ops
    assert not taken


STEPS = [literals, beside_constants, views_in_place, several_results, composed, made_without_tensors, differentiated]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_of_functions(step: Step, own_way: Callable[[], None]) -> None:
    def traced() -> list[str]:
        with _torch.fake_mode() as mode:
            fakes = [mode.from_tensor(torch.ones(4, 4)) for _ in range(2)]
        return text(_torch.trace(lambda x, y: _torch.tree_flatten(step(x, y))[0], fakes, {}))

    quick, remembered = traced(), traced()
    own_way()
    assert quick == remembered == traced()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_of_functions_for_all_sizes(step: Step, own_way: Callable[[], None]) -> None:
    """A second call takes what the first one computed: the same expressions of sizes, and the same guards."""

    def traced() -> tuple[list[Any], set[str]]:
        symbols = _torch.Symbols(str)
        with symbols.mode:
            fakes: list[Tensor] = [torch.ones(*(symbols.new(name, dim, 4) for dim in range(2))) for name in "xy"]
        module = _torch.trace(lambda x, y: _torch.tree_flatten([step(x, y), step(x, y)])[0], fakes, {})
        without_size_nodes(module.graph, symbols)
        tensors = [(str(node.target), tensor) for node in module.graph.nodes for tensor in meta.tensors(node) if tensor]
        shapes = [(name, *map(text_of, (*tensor.shape, *tensor.stride)), tensor.dtype) for name, tensor in tensors]
        return shapes, {guard.text for guard in symbols.guards()}

    quick = traced()
    own_way()
    assert quick == traced()


def test_remembered_results_alias_as_torchs() -> None:
    """A view has the storage of its operand, a result in place is the operand, and all else has its own."""
    x, cases = torch.arange(6.0), [
        (torch.ops.aten.view.default, [2, 3]), (torch.ops.aten._unsafe_view.default, [2, 3]),
        (torch.ops.aten.mul.Tensor, 2), (torch.ops.aten.mul_.Tensor, 2), (torch.ops.aten.split.Tensor, 4),
        (torch.ops.aten.slice.Tensor, 0), (torch.ops.aten.sort.default, 0),
        (torch.ops.aten.as_strided.default, [2], [1]),
    ]  # fmt: skip
    for op, *args in cases:
        real = op(x.clone(), *args)
        with _torch.fake_mode() as mode:
            for _ in range(2):
                fake = mode.from_tensor(x)
                made = _torch.fake_result(op, (fake, *args), {})
                for ours, theirs in zip(
                    *([out] if isinstance(out, Tensor) else out for out in (made, real)), strict=True
                ):
                    assert meta.meta_of(ours) == meta.meta_of(theirs), op
                    assert ours.storage_offset() == theirs.storage_offset(), op
                    assert (_torch.storage_key(ours) == _torch.storage_key(fake)) == (op not in FRESH), op
                    assert (ours is fake) == (op is torch.ops.aten.mul_.Tensor), op


FRESH = (torch.ops.aten.mul.Tensor, torch.ops.aten.sort.default)
RECIPES = itertools.cycle(["AdamW-fused", "SGD-momentum-foreach", "Adam-tensor-lr"])


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        pytest.param(*pair, marks=pytest.mark.full if n % 4 else ())
        for n, pair in enumerate(zip(CASES, RECIPES, strict=False))
    ],
)
def test_of_whole_steps(case: str, recipe: str, own_way: Callable[[], None]) -> None:
    chosen = CASES[case]

    def captured() -> str:
        model = chosen.build()
        graph = ws.capture(chosen.step, model, OPTIMIZERS[recipe].make(model.parameters()), chosen.batches(0))
        return f"{graph}\n{graph.outputs}"

    quick = captured()
    own_way()
    assert quick == captured()


@pytest.mark.crossed
@pytest.mark.parametrize("calls", [0, 2])
@pytest.mark.parametrize("recipe", catalogue.RECIPES)
def test_updates_of_parameters_alike_are_those_of_each(
    recipe: str, calls: int, own_way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated: list[object] = []
    repeat = _torch.repeat_ops
    monkeypatch.setattr(_torch, "repeat_ops", lambda tape, fakes: repeated.append(repeat(tape, fakes)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.LayerNorm(4)).double()
    optimizer = OPTIMIZERS[recipe].make(model.parameters())
    for _ in range(calls):
        mean_square(model, optimizer, torch.ones(2, 4).double())

    def captured() -> str:
        graph = ws.capture(mean_square, model, optimizer, torch.ones(2, 4).double())
        nodes = [f"{meta.tensors(node)} {meta.source_line(node)}" for node in graph.graph.nodes]
        return "\n".join([str(graph), str(graph.outputs), *nodes])

    quick, several = captured(), len(repeated)
    own_way()
    assert quick == captured()
    assert len(repeated) == several
    if recipe.startswith("Adam-plain"):
        assert several == 3 - 2 + 5 - 2, "of equal weights and biases, all but two"


def test_torch_is_left_as_it_was() -> None:
    def fails(model: nn.Module, x: Tensor) -> None:
        raise ValueError("not this one")

    modes = (dispatch.proxy_tensor.ProxyTorchDispatchMode, FakeTensorMode)
    before = [mode.__torch_dispatch__ for mode in modes]
    with pytest.raises(ws.CaptureError):
        ws.capture(fails, nn.Linear(2, 2), torch.ones(2))
    assert [mode.__torch_dispatch__ for mode in modes] == before
