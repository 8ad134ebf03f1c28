"""One rank of a training job on a GPU, with data of its own; prints JSON. Ranks share GPUs where there are few."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import wholestep as ws

SAVED_AFTER = 4  # steps


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batch(step: int, rank: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 64, generator=generator)
    return x.to(device), torch.randint(10, (16,), generator=generator).to(device)


def main(style: str, library: str, folder: str, first: int, last: int) -> None:
    device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    dist.init_process_group(library)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = ws.compile(train_step, parallel=ws.DataParallel(style), device=device)
    if first:
        ws.load(folder, step)
    losses: list[float] = []
    for number in range(first, last):
        losses.append(step(model, optimizer, *batch(number, rank, device)).item())
        if number + 1 == SAVED_AFTER:
            ws.save(folder, step, wait=False)
    with ws.whole(model, writeback=False):
        parameters = [float(p.detach().double().sum()) for p in model.parameters()]
    if rank == 0:
        print(json.dumps({"losses": losses, "parameters": parameters}))
    dist.destroy_process_group()


if __name__ == "__main__":
    style, library, folder, first, last = sys.argv[1:]
    main(style, library, folder, int(first), int(last))
