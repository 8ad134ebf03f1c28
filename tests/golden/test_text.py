"""What a person reads: plans and programs as text. The files are literal; `--accept` rewrites them."""

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import clipped as train_step


class Net(nn.Module):
    """One shared layer, one odd size, a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ws.capture(train_step, model, optimizer, torch.randn(3, 6))


def test_train_graph(graph, golden):
    golden("train_graph", str(graph))


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard", "hybrid"])
def test_plan_and_local_graph(graph, golden, style):
    mesh = "replicate=2,shard=2" if style == "hybrid" else "dp=2"
    plan = ws.plan(graph, mesh, ws.DataParallel(style))
    golden(f"plan_{style}", str(plan))
    golden(f"local_graph_{style}", str(ws.partition(graph, plan)))


def test_gathered_again_for_the_backward(graph, golden):
    plan = ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=True))
    golden("local_graph_gathered_again", str(ws.partition(graph, plan)))


def test_micro_batches(graph, golden):
    plan = ws.plan(graph, "dp=2", [ws.DataParallel("zero2"), ws.MicroBatches(2)])
    golden("local_graph_micro_batches", str(ws.partition(graph, plan)))


def test_text_of_two_captures_is_the_same(graph):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    assert str(ws.capture(train_step, model, optimizer, torch.randn(3, 6))) == str(graph)
