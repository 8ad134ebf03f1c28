"""Bucket: which collectives are merged, by name, and in which order."""

import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep.graph.nodes import is_collective
from wholestep.passes.bucket import Bucket


def picture(local: ws.LocalGraph) -> str:
    return "\n".join(line for line in str(local).splitlines() if "join" in line)


def test_buckets(golden):
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = ws.capture(train_step, model, optimizer, torch.randn(3, 6))
    local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=True)))
    merged = {most: ws.run_passes(local, [Bucket(most)]) for most in (200, 25 << 20)}
    golden("bucket", "\n\n".join(f"{most} bytes\n{picture(one)}" for most, one in merged.items()))
    assert len([n for n in merged[25 << 20].graph.nodes if is_collective(n)]) == 3  # forward, backward, gradients
