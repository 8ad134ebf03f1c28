"""A job of one rank that replays an all-reduce and ends while its recording lives, in the way that is asked for."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Graph

import wholestep as ws
from wholestep.backend.cuda_recorder import CudaRecorder
from wholestep.backend.eager import eager
from wholestep.backend.recordings import Recordings
from wholestep.graph import meta
from wholestep.graph.graph import Input, Role

funcol = torch.ops._c10d_functional


def all_reduce() -> tuple[Recordings, object]:
    """A recorded all-reduce: a mesh of one rank has none in its steps."""
    x, graph = torch.ones(1 << 20, device="cuda"), Graph()
    made = meta.meta_of(x)
    node = graph.placeholder("x")
    group = dist.group.WORLD.group_name
    started = graph.call_function(funcol.all_reduce.default, (node, "sum", group))
    waited = graph.call_function(funcol.wait_tensor.default, (started,))
    for one in (node, started, waited):
        meta.set_tensors(one, (made,))
    graph.output((waited,))
    recordings = Recordings(CudaRecorder("cuda:0"), warns=True)
    run = recordings.compiled(graph, [Input("x", Role.BATCH, made)], [x], lambda graph, _: eager(graph))
    for number in range(5):
        (result,) = run([x * number])
        assert result.mean().item() in (number, 0.0), "0 on a device that computes nothing"
    assert recordings.recorded == 1
    return recordings, run


def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def main(way: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    kept = all_reduce()
    model = nn.Linear(64, 64).cuda()
    optimizer, step = torch.optim.AdamW(model.parameters(), fused=True), ws.compile(train_step)
    for _ in range(4):
        step(model, optimizer, torch.ones(8, 64, device="cuda"))
    print("replayed", step.cuda_graph, kept[0], flush=True)
    if way == "raise":
        raise RuntimeError("as a user's step does")
    if way == "destroy":
        dist.destroy_process_group()


main(sys.argv[1])
