"""One rank of a job on null devices: prints the collectives of a step that nothing orders with what reads them."""

import os
import sys

import nullcuda
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from tests.steps import clipped


def main(style: str, semantics: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    mesh = "node=2,rank=2" if style == "hybrid" else None
    schedule = ws.Schedule(hardware=ws.Hardware.preset("dgx-h100"))
    parallel = ws.DataParallel(style, semantics=semantics)
    step = ws.compile(
        clipped, parallel=parallel, mesh=mesh, schedule=schedule, timeout=None, check_every=0, cuda_graphs=False
    )
    x = torch.zeros(8, 256, device="cuda")
    for _ in range(3):
        step(model, optimizer, x)
    with nullcuda.counting() as counted, nullcuda.tracing() as calls:
        step(model, optimizer, x)
        torch.cuda.synchronize()
    found = f"collectives {counted.counts.collectives} syncs {counted.counts.syncs}"
    os.write(1, f"{found} unordered {nullcuda.unordered(calls)}\n".encode())  # both ranks write to one pipe
    dist.destroy_process_group()


main(*sys.argv[1:])
