"""A step in which what the backward needs is made again there."""

import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep.passes.recompute import in_place_peak


def test_made_again(golden):
    model = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 40), nn.Dropout(0.1), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = ws.capture(train_step, model, optimizer, torch.randn(50, 6))
    plan = ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", reshard_after_forward=False))
    local = ws.partition(graph, plan)
    changed = ws.Recompute(46_000, gathers=True)(local)
    before, after = in_place_peak(local), in_place_peak(changed)
    golden("recompute", f"before: {before}\n\nafter: {after}\n\n{changed}")
