"""What is on the wire while a step computes. G starts a gather, R a reduction, W waits, U updates, a dot computes."""

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep.graph.nodes import is_collective, is_wait

MACHINE = ws.Hardware.measured(flops_per_us=10, memory_bytes_per_us=100, launch_us=1, link_us=5, link_bytes_per_us=20)


def picture(local: ws.LocalGraph) -> str:
    def sign(node: torch.fx.Node) -> str:
        if is_wait(node):
            return "W"
        if is_collective(node):
            return "G" if "gather" in str(node.target) else "R"
        return "U" if "fused" in str(node.target) else "."

    return "".join(sign(n) for n in local.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target))


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_order_of_a_step(golden, style):
    model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    graph = ws.capture(train_step, model, optimizer, torch.randn(30, 12))
    plan = ws.plan(graph, "dp=2", ws.DataParallel(style, reshard_after_forward=True))
    local = ws.partition(graph, plan)
    scheduled = ws.Schedule(MACHINE, bucket_bytes=1000, first_bucket_bytes=500)(local)
    rows = [("as it is", local), ("scheduled", scheduled)]
    text = [f"{name:9} {ws.simulate(one, MACHINE).exposed_us:5.0f} us exposed  {picture(one)}" for name, one in rows]
    golden(f"overlap_{style}", "\n".join(text))
