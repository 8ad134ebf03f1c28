"""One rank of a job on null devices: prints what it did in each call of a step that is recorded."""

import os

import nullcuda
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from tests.steps import clipped


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = ws.Schedule(hardware=ws.Hardware.preset("dgx-h100"))
    parallel, dynamic = ws.DataParallel("fully_shard"), {"x": (0,)}
    step = ws.compile(clipped, parallel=parallel, schedule=schedule, dynamic=dynamic, timeout=None, check_every=0)
    did = []
    for rows in (8, 8, 8, 8, 8 + rank, 8):
        with nullcuda.counting() as counted:
            step(model, optimizer, torch.zeros(rows, 256, device="cuda"))
        counts = counted.counts
        did.append("record" if counts.captured else "replay" if counts.graphs else "run")
    dist.destroy_process_group()  # lets go of the recording
    print(f"calls {' '.join(did)}; {step.cuda_graph}")


main()
