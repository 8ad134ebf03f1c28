"""The first call of a step without a compile cache, with an empty one and with a filled one, each in new processes.

    python benchmarks/warm_start.py                        # all cases, medians of 3
    python benchmarks/warm_start.py --repeat 5 S deep      # some of them
    python benchmarks/warm_start.py --with ../other/src    # this source and another one, in turns

Run it with OMP_NUM_THREADS=1. Ranks are processes of this machine (gloo). Wall seconds are those of the slowest rank;
CPU seconds, which others on the machine change less, those of the first one, as a whole and by stage.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"S": (4, 256), "deep": (24, 64), "deeper": (48, 64)}
"""Layers and width of each model."""
CASES = {
    "S": (1, "S", "replicate"),
    "S-2": (2, "S", "fully_shard"),
    "deep-2": (2, "deep", "fully_shard"),
    "deeper-2": (2, "deeper", "fully_shard"),
    "auto-2": (2, "S", "auto"),
    "deep-auto-2": (2, "deep", "auto"),
    "memory-2": (2, "S", "memory"),
    "deep-memory-2": (2, "deep", "memory"),
    "tensor-2": (2, "S", "tensor"),
    "inductor": (1, "S", "inductor"),
}
"""Ranks, model, and what compiles it (`options_of`)."""
STAGES = ("measure", "capture", "choose", "plan", "partition", "agree", "memory", "schedule", "place", "backend")


class Block(nn.Module):
    """One pre-norm transformer layer. Shapes: (b, t, d) -> (b, t, d)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP."""
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 4, d // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (b, t) -> logits (b, t, 256)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(128, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte at each place."""
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward with loss, backward, update."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def options_of(case: str) -> dict[str, Any]:
    """Options of `ws.compile` for a case."""
    import wholestep as ws

    kind = CASES[case][2]
    if kind == "auto":
        return {"parallel": ws.Auto()}
    if kind == "memory":
        budget = {"S": "80MB", "deep": "80MB"}[CASES[case][1]]
        return {"parallel": ws.DataParallel("fully_shard"), "memory_bytes": budget}
    if kind == "tensor":
        return {"parallel": ws.TensorParallel("auto"), "mesh": "tp=2"}
    if kind == "inductor":
        return {"parallel": ws.DataParallel("replicate"), "backend": "inductor"}
    return {"parallel": ws.DataParallel(kind)}


def one_start(case: str, cache: str, out: str) -> None:
    """What one rank does; it writes what it saw."""
    import wholestep as ws

    stages: dict[str, float] = dict.fromkeys((*STAGES, "rest"), 0.0)
    under_way = ["rest"]
    last = time.process_time()

    def tell(stage: str, what: str, _: float) -> None:
        nonlocal last
        now = time.process_time()
        stages[under_way[-1]] += now - last
        last = now
        if stage in STAGES and what == "start":
            under_way.append(stage)
        elif stage in STAGES:
            under_way.remove(stage)

    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = GPT(*SIZES[CASES[case][1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = ws.compile(train_step, cache=cache, progress=tell, **options_of(case))
    batch = torch.randint(256, (16, 128), generator=torch.Generator().manual_seed(rank))
    start = time.perf_counter()
    last = time.process_time()
    loss = step(model, optimizer, batch, batch).item()
    seconds = time.perf_counter() - start
    tell("rest", "done", 0.0)
    said = {"seconds": seconds, "loss": loss, "log": step.cache_log, "stages": stages}
    Path(out, f"said-{rank}.json").write_text(json.dumps(said))


def start(case: str, source: str, cache: str) -> list[Any]:
    """One start of the job: what each rank said."""
    ranks = CASES[case][0]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as out:
        variables = {**os.environ, **job, "PYTHONPATH": source, "TORCHINDUCTOR_CACHE_DIR": f"{cache or out}/inductor"}
        command = [sys.executable, __file__, "one-start", case, cache, out]
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
        running = [subprocess.Popen(command, env={**variables, **names}) for names in own]
        if sum(one.wait() for one in running):
            raise SystemExit(f"{case} failed")
        return [json.loads(Path(out, f"said-{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    asked.add_argument("--repeat", type=int, default=3)
    asked.add_argument("--with", dest="other", help="the source folder of another version of wholestep")
    given = asked.parse_args()
    own = str(Path(__file__).resolve().parents[1] / "src")
    sources = {"this": own, "other": str(Path(given.other).resolve())} if given.other else {"": own}
    print(f"{'':28} {'wall s':>7} {'cpu s':>7} ", *(f"{name:>9}" for name in (*STAGES, "rest")))
    for case in given.cases:
        seen: dict[str, list[list[Any]]] = defaultdict(list)
        for _ in range(given.repeat):
            for which, source in sources.items():
                with tempfile.TemporaryDirectory() as folder:
                    for name, cache in (("off", ""), ("cold", folder), ("warm", folder)):
                        seen[f"{case} {name} {which}"].append(start(case, source, cache))
        for name, starts in seen.items():
            wall = statistics.median(max(said["seconds"] for said in ranks) for ranks in starts)
            stages = [statistics.median(ranks[0]["stages"][s] for ranks in starts) for s in (*STAGES, "rest")]
            cpu = statistics.median(sum(ranks[0]["stages"].values()) for ranks in starts)
            print(
                f"{name:28} {wall:7.2f} {cpu:7.2f} ", *(f"{s:9.2f}" for s in stages), starts[-1][0]["log"], flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["one-start"]:
        one_start(*sys.argv[2:])
    else:
        main()
