"""One rank of a job on null devices: writes what a call asks of the device, by method of experts."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import nullcuda
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.partition import rows_by_rank

LAYERS, EXPERTS, WIDTH, TOKENS = 2, 4, 32, 32  # of each rank


class Layer(nn.Module):
    """Two experts for each token, by grouped products of rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, ids = self.gate(tokens).softmax(-1).topk(2)
        of, order = torch.sort(ids.flatten())
        ends = torch.cumsum(torch.histc(of.float(), EXPERTS, 0, EXPERTS - 1), 0, dtype=torch.int32)
        rows = nn.functional.grouped_mm(tokens[order // 2].bfloat16(), self.experts.bfloat16(), offs=ends).float()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return x + (rows[back].view(*ids.shape, WIDTH) * weights[..., None]).sum(1).view(x.shape)


def as_many_for_each(counts: Tensor, row: int) -> list[int]:
    """What the host reads of a device that counts nothing."""
    return [TOKENS for _ in counts[row].tolist()]


def main() -> None:
    rank, (folder,) = int(os.environ["LOCAL_RANK"]), sys.argv[1:]
    torch.cuda.set_device(rank)
    rows_by_rank.numbers_of = as_many_for_each
    schedule, found = ws.Schedule(hardware=ws.Hardware.preset("dgx-h100")), dict[str, dict[str, int]]()
    for method, reads, recorded in (
        ("weights", True, False),
        ("rows", True, False),
        ("rows", False, False),
        ("rows", False, True),
    ):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        parallel = [
            ws.DataParallel("fully_shard", semantics="global"),
            ws.ExpertParallel("dp", method, host_reads=reads),
        ]
        options: dict[str, Any] = {"schedule": schedule, "backend": "eager", "timeout": None, "check_every": 0}
        step = ws.compile(mean_square, parallel=parallel, cuda_graphs=recorded, **options)
        for _ in range(4):
            x = torch.zeros(4, TOKENS // 4, WIDTH, device="cuda")
            with nullcuda.counting() as counted:
                step(model, optimizer, x)
        found[f"{method}{' counted' * (method == 'rows' and reads)}{' recorded' * recorded}"] = dataclasses.asdict(
            counted.counts
        )
        del step
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


main()
