"""Prefetch: what is on the wire while the step computes. G starts a gather, R a reduction, W waits, a dot computes."""

import pytest
import torch
from torch import nn

import wholestep as ws
from wholestep.graph.verify import is_collective, is_wait
from wholestep.passes.prefetch import Prefetch


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def picture(local: ws.LocalGraph) -> str:
    def sign(node: torch.fx.Node) -> str:
        kind = "G" if "gather" in str(node.target) else "R"
        return "W" if is_wait(node) else kind if is_collective(node) else "."

    return "".join(sign(n) for n in local.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("again", [False, True])
def test_a_window_of_gathers_is_in_flight(golden, again):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = ws.capture(train_step, model, optimizer, torch.randn(3, 6))
    plan = ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=again))
    local = ws.partition(graph, plan)
    windows = {window: ws.run_passes(local, [Prefetch(window)]) for window in (1, 2, 4)}
    golden(
        f"prefetch_{'again' if again else 'kept'}",
        "\n".join([f"none {picture(local)}", *(f"{w}    {picture(moved)}" for w, moved in windows.items())]),
    )
    for window, moved in windows.items():
        flying = most = 0
        waits = {n for n in moved.graph.nodes if is_wait(n) and "gather" in str(n.args[0].target)}
        for node in moved.graph.nodes:
            flying += ("gather" in str(node.target)) - (node in waits)
            most = max(most, flying)
        assert most <= window, "no more than the window is on the wire"
        assert moved.collectives() == local.collectives()
