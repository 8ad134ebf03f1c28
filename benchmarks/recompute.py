"""Memory and arithmetic of `Recompute` beside torch.utils.checkpoint on every block of a GPT; nothing is run.

python -m benchmarks.recompute [CONFIG] [ROWS]     by default M (10.9 M parameters) and 16 rows a rank
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import wholestep as ws
from benchmarks.peers.models import blocks, build, train_step
from benchmarks.peers.sizes import CONFIGS, Config
from wholestep.cost.compute import flops
from wholestep.passes.reinplace import Reinplace

STYLES: tuple[tuple[str, bool | None], ...] = (("replicate", None), ("fully_shard", False), ("fully_shard", True))


class Checkpointed(nn.Module):
    """A block that keeps its input alone for the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """What the block makes."""
        run: Any = checkpoint.checkpoint  # pyright: ignore[reportUnknownMemberType]  # torch gives it no types
        return run(self.block, x, use_reentrant=False)


def program(config: Config, rows: int, style: str, again: bool | None, checkpoints: bool) -> ws.LocalGraph:
    """What one of two ranks runs."""
    with torch.device("meta"):
        model, x = build(config), torch.zeros(rows, config.context, dtype=torch.int64)
    if checkpoints:
        model.blocks = nn.ModuleList(Checkpointed(block) for block in blocks(model))
    graph = ws.capture(train_step, model, torch.optim.AdamW(model.parameters(), fused=True), x, x)
    return ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel(style, reshard_after_forward=again)))  # type: ignore[arg-type]


def arithmetic(local: ws.LocalGraph) -> float:
    """Multiplications and additions of a step."""
    return sum(flops(node) for node in local.graph.nodes if node.op == "call_function")


def peak_bytes(local: ws.LocalGraph) -> int:
    """Of the program as it runs."""
    return ws.peak_memory(Reinplace()(local)).size_bytes


def main() -> None:
    """One row for each style."""
    config = CONFIGS[sys.argv[1] if len(sys.argv) > 1 else "M"]
    rows = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    print(f"{'style':34} {'as written':>12} {'checkpoint of each block':>28} {'Recompute':>28}")
    for style, again in STYLES:
        plain, theirs = (program(config, rows, style, again, checkpoints) for checkpoints in (False, True))
        ours = ws.Recompute(peak_bytes(theirs))(plain)
        name = style if again is None else f"{style}, {'re-gathered' if again else 'kept'}"
        cells = [
            f"{peak_bytes(one) / 2**20:.1f} MiB {arithmetic(one) / arithmetic(plain) - 1:+.1%}"
            for one in (theirs, ours)
        ]
        print(f"{name:34} {peak_bytes(plain) / 2**20:8.1f} MiB {cells[0]:>28} {cells[1]:>28}", flush=True)


if __name__ == "__main__":
    main()
