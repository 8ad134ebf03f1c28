"""The full text of what users meet. `<here>` stands for this file's path."""

import re
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import wholestep as ws


def make(optimizer: Any = torch.optim.SGD) -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 2)
    return model, optimizer(model.parameters(), lr=0.1)


def reads_item(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    print(loss.item())
    optimizer.step()


def counts(model, optimizer, x):
    loss = model(x).square().mean() + torch.bincount((x[:, 0] > 0).long()).sum()
    loss.backward()
    optimizer.step()


LOSSES: list[Any] = []


def keeps_losses(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.detach())


def wrong_shape(model, optimizer, x):
    loss = F.mse_loss(model(x), x.new_zeros(3, 3))
    loss.backward()
    optimizer.step()


def plain(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()


def text(error: pytest.ExceptionInfo[ws.WholestepError]) -> str:
    return re.sub(r"\S*test_errors\.py:\d+", "<here>", str(error.value))


ONE_GRAPH = "  needed: a step whose operations do not depend on values: one graph is captured and run for every batch"
READ = (
    "  next: return the tensor and read it after the call, or choose with torch.where; "
    "wholestep.callback(fn, tensor) calls fn with its value in each step"
)


@pytest.mark.parametrize(
    ("fn", "lines"),
    [
        (
            reads_item,
            [
                "the step reads the value of a tensor of shape () with item() while it is being captured",
                "  at: <here>  print(loss.item())",
                ONE_GRAPH,
                READ,
            ],
        ),
        (
            counts,
            [
                "the step has an operation whose result depends on values: aten.bincount.default",
                "  at: <here>  loss = model(x).square().mean() + torch.bincount((x[:, 0] > 0).long()).sum()",
                ONE_GRAPH,
                "  next: use an operation with fixed sizes (torch.where, masks, padding) or keep it outside the step",
            ],
        ),
        (
            keeps_losses,
            [
                "the step changes LOSSES: 0 items -> 1 items; lists must keep their length",
                "  at: <here>  LOSSES.append(loss.detach())",
                "  needed: assignments of numbers, tensors and plain values, which each call repeats",
                "  next: return it from the step, or use `wholestep.callback(fn, *values)`, "
                "which calls fn with the values of each step",
            ],
        ),
    ],
)
def test_what_cannot_be_one_graph(fn, lines):
    model, optimizer = make()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(fn)(model, optimizer, torch.randn(3, 4))
    assert text(caught).splitlines() == lines


@pytest.mark.smoke
def test_a_failed_capture_changes_nothing():
    model, optimizer = make(torch.optim.AdamW)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    params = [*model.parameters()]
    with pytest.raises(ws.CaptureError):
        ws.compile(reads_item)(model, optimizer, torch.randn(3, 4))
    assert [*model.parameters()] == params or all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in params)
    plain(model, optimizer, torch.randn(3, 4))  # eager mode still works


def test_attention_that_cannot_be_captured_has_another_form() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attends(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        x = model(x)[None, None]
        return flex_attention(x, x, x).square().mean()  # type: ignore[union-attr]

    model, optimizer = make()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(attends)(model, optimizer, torch.randn(3, 4))
    *_, where, _, cure = text(caught).splitlines()
    assert where.startswith("  at: <here>  return flex_attention(x, x, x)")
    assert cure.startswith("  next: use scaled_dot_product_attention with a mask, as ids[:, None, :, None] == ")


def test_an_error_of_the_users_own_names_the_line_and_keeps_its_cause():
    model, optimizer = make()
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(wrong_shape)(model, optimizer, torch.randn(3, 4))
    first, where, *_ = text(caught).splitlines()
    assert first.startswith("the step failed while it was being captured: RuntimeError: ")
    assert where == "  at: <here>  loss = F.mse_loss(model(x), x.new_zeros(3, 3))"
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (torch.optim.LBFGS, "its step calls a closure a number of times that depends on the data"),
        (torch.optim.SparseAdam, "its update needs sparse gradients, whose sizes depend on the data"),
    ],
)
def test_optimizers_that_are_not_tensor_only(kind, why):
    model, optimizer = make(kind)
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(plain)(model, optimizer, torch.randn(3, 4))
    assert text(caught).splitlines() == [
        f"optimizer {kind.__name__} cannot be captured: {why}",
        "  needed: an optimizer whose step is made of tensor operations (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, "
        "Adadelta, Adamax, RMSprop, Rprop, ASGD)",
        "  next: use one of these, or call this optimizer outside the compiled step",
    ]


@dataclass
class Hidden:
    """What wholestep does not search."""

    thing: Any


class Opaque:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


def test_an_optimizer_or_module_that_was_not_found():
    model, optimizer = make()
    other, box = nn.Linear(4, 2), Opaque(optimizer)

    def hidden_optimizer(model, box, x):
        model(x).sum().backward()
        next(iter(vars(box).values())).step()

    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(hidden_optimizer)(model, box, torch.randn(3, 4))
    assert text(caught).splitlines()[0] == ("the step runs an optimizer (SGD) that wholestep did not find")

    def hidden_module(model, optimizer, box, x):
        (model(x) + next(iter(vars(box).values()))(x)).sum().backward()
        optimizer.step()

    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(hidden_module)(model, optimizer, Opaque(other), torch.randn(3, 4))
    assert text(caught).splitlines()[:2] == [
        "the step uses a trainable tensor of shape (2, 4) that belongs to none of its modules and optimizers",
        "  at: <here>  (model(x) + next(iter(vars(box).values()))(x)).sum().backward()",
    ]


def test_a_step_without_an_optimizer_or_a_model():
    model = nn.Linear(4, 2)

    def only_gradients(model, x):
        model.zero_grad()
        model(x).sum().backward()

    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(only_gradients)(model, torch.randn(3, 4))
    assert text(caught).splitlines()[0] == "the step computes gradients and has no optimizer that uses them"

    def nothing(x):
        return x + 1

    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(nothing)(torch.randn(3, 4))
    assert text(caught).splitlines() == [
        "'nothing' was given no model and no optimizer, and closes over none",
        "  needed: the modules and optimizers that the step uses",
        "  next: pass them as arguments, or give model= and optimizer= to wholestep.compile",
    ]


def test_a_model_on_another_device():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(plain, device="cuda")(model, optimizer, torch.randn(3, 4))
    assert text(caught).splitlines() == [
        "'weight' is on device cpu (and 2 more)",
        "  needed: everything on 'cuda', where this step runs",
        "  next: move it: .to('cuda')",
    ]


def test_a_model_on_meta_and_a_batch_on_a_gpu():
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ws.CaptureError) as caught:
        ws.compile(plain)(model, optimizer, x)
    assert text(caught).splitlines() == [
        "'x' is on device cuda:0, the model is on 'meta'",
        "  needed: the device to make the model on; without one, the step runs on 'cpu'",
        "  next: give device='cuda'",
    ]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch can trace for CUDA")
def test_a_torch_that_knows_no_cuda():
    with torch.device("meta"):
        model, x = nn.Linear(4, 2), torch.empty(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ws.CaptureError, match=r"device='cuda', with torch .*, which was built without CUDA"):
        ws.capture(plain, model, optimizer, x, options=ws.CaptureOptions(device="cuda"))


@pytest.mark.parametrize(
    ("make_error", "kind", "lines"),
    [
        (
            lambda: ws.DataParallel("zero4"),
            ws.PlanError,
            [
                "DataParallel(style='zero4')",
                "  needed: style one of 'replicate', 'zero1', 'zero2', 'fully_shard', 'hybrid' or a function",
                "  next: correct the name",
            ],
        ),
        (
            lambda: ws.compile(plain, backend="tvm"),
            ws.BackendError,
            [
                "backend 'tvm' is unknown",
                "  needed: one of 'eager', 'inductor', or a Backend",
                "  next: correct the name",
            ],
        ),
        (
            lambda: ws.compile(plain, cuda_graphs=True, measure=True),
            ws.BackendError,
            [
                "cuda_graphs=True, but measure=True times the ops of each call",
                "  needed: one of them",
                '  next: leave out cuda_graphs=True: it is "auto"',
            ],
        ),
        (
            lambda: ws.compile(plain, parallel=cast(Any, "zero1")),
            ws.PlanError,
            [
                "parallel='zero1'",
                "  needed: a strategy, as DataParallel or TensorParallel, or a list of them",
                '  next: pass parallel=wholestep.DataParallel("zero1")',
            ],
        ),
        (
            lambda: ws.compile(plain, mesh="dp=2", parallel=ws.DataParallel(axis="tp")),
            ws.MeshError,
            ["mesh dp=2 has no axis 'tp'", "  needed: one of 'dp'", "  next: correct the axis name or the mesh"],
        ),
        (
            lambda: ws.compile(plain, parallel=ws.DataParallel("hybrid")),
            ws.MeshError,
            [
                "style 'hybrid' without a mesh",
                "  needed: a mesh of two axes",
                '  next: give mesh="replicate=2,shard=2", say',
            ],
        ),
        (
            lambda: ws.compile(plain, mesh="dp=2")(*make(), torch.randn(3, 4)),
            ws.MeshError,
            [
                "mesh dp=2 has 2 ranks, the job has 1",
                "  needed: axis sizes whose product is 1",
                '  next: give mesh="dp=1", or start 2 processes (torchrun --nproc-per-node 2)',
            ],
        ),
        (
            lambda: ws.compile(plain, parallel=ws.DataParallel(input_batch_dim=2))(*make(), torch.randn(3, 4)),
            ws.PlanError,
            [
                "input_batch_dim=2 is out of range for 'x' of shape [3, 4]",
                "  needed: a dim from 0 to 1",
                "  next: correct input_batch_dim",
            ],
        ),
    ],
)
def test_malformed_options(make_error, kind, lines):
    with pytest.raises(kind) as caught:
        make_error()
    assert text(caught).splitlines() == lines


def test_a_value_that_differs_between_ranks_may_not_reach_a_parameter():
    model, optimizer = make()

    def drifts(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.bias.add_(x.mean())

    graph = ws.capture(drifts, model, optimizer, torch.randn(3, 4))
    with pytest.raises(ws.PlanError) as caught:
        ws.plan(graph, "dp=2")
    assert text(caught).splitlines()[:2] == [
        "'bias' would be updated with a value that differs between ranks",
        "  at: <here>  model.bias.add_(x.mean())",
    ]
    assert ws.plan(graph, "dp=1")


def test_modules_wrapped_for_something_else():
    model, optimizer = make()
    with pytest.raises(ws.StateError) as caught:
        ws.compile(plain)(nn.DataParallel(model), optimizer, torch.randn(3, 4))
    assert text(caught).splitlines()[0] == "module 'DataParallel' is wrapped in DataParallel"


def test_a_batch_of_another_structure_is_captured_again():
    model, optimizer = make()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = sum(model(x).square().mean() for x in batch)
        loss.backward()
        optimizer.step()
        return loss

    compiled = ws.compile(step)
    compiled(model, optimizer, [torch.randn(3, 4)])
    compiled(model, optimizer, [torch.randn(3, 4), torch.randn(3, 4)])
    compiled(model, optimizer, [torch.randn(3, 4)])
    assert compiled.captures == 2
    assert compiled.misses == ["the arguments have another structure"]
