"""Seconds to the end of the first step, without a program in the compile cache and with one; each in a new process.

    python benchmarks/cache.py             # the byte-GPT of benchmarks/peers (S): 1 and 2 ranks, eager and inductor
    python benchmarks/cache.py 8 32        # Llama-3-8B's shapes on dp=4,tp=2, by layers: planning only (transformers)

Inductor's own cache of kernels gets a folder that is empty at the cold start too. Run it with OMP_NUM_THREADS=1.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import wholestep as ws
from benchmarks.peers.models import build
from benchmarks.peers.sizes import CONFIGS

ROWS = ((1, "eager", "replicate"), (2, "eager", "zero1"), (2, "eager", "fully_shard"), (1, "inductor", "replicate"))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward with loss, backward, update."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def one_start(backend: str, style: str, folder: str, out: str) -> None:
    """What one rank does; the first prints what it saw."""
    stages: dict[str, float] = {}

    def tell(stage: str, what: str, seconds: float) -> None:
        if what == "done":
            stages[stage] = stages.get(stage, 0.0) + seconds

    cache = "" if folder == "-" else folder
    model = build(CONFIGS["S"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = ws.compile(train_step, parallel=ws.DataParallel(style), backend=backend, cache=cache, progress=tell)
    rank = int(os.environ.get("RANK", "0"))
    batch = torch.randint(256, (16, 128), generator=torch.Generator().manual_seed(rank))
    start, cpu = time.perf_counter(), time.process_time()
    loss = step(model, optimizer, batch, batch).item()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    said = {"rank": rank, "seconds": seconds, "cpu": cpu, "loss": loss, "log": step.cache_log, "stages": stages}
    Path(out, f"said-{rank}.json").write_text(json.dumps(said))


def measure(ranks: int, backend: str, style: str) -> str:
    """One row: off, cold, warm."""
    cells: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for kept in ("off", "kept", "kept"):
            here = Path(folder, kept)
            here.mkdir(exist_ok=True)
            script = [__file__, "one-start", backend, style, str(here) if kept == "kept" else "-", folder]
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(here / "inductor")}
            subprocess.run([sys.executable, *launcher, *script], check=True, env=variables, capture_output=True)
            said = [json.loads(Path(folder, f"said-{rank}.json").read_text()) for rank in range(ranks)]
            slowest = max(s["seconds"] for s in said)
            cells.append(f"{slowest:6.2f} s, {sum(s['cpu'] for s in said):6.2f} CPU s")
            backend_seconds = said[0]["stages"].get("backend", 0.0)
            cells[-1] += f", backend {backend_seconds:5.2f} s  {[s['log'] for s in said] if kept == 'kept' else ''}"
    return f"{ranks} x {backend} {style}:\n" + "\n".join(
        f"  {name}: {cell}" for name, cell in zip(("off ", "cold", "warm"), cells, strict=True)
    )


def planning(layers: int) -> str:
    """CPU seconds to make and keep a program on meta, to look it up again, and its bytes."""
    from benchmarks import planning as llama
    from wholestep.cache.key import Situation, key_of
    from wholestep.cache.program import Compiled, read, write
    from wholestep.cache.ran import Ran
    from wholestep.capture.capture import capture_step, find_state

    model, optimizer, ids, strategies = llama.situation(layers)
    args = (model, optimizer, ids)
    times = [time.process_time()]

    def now() -> Any:
        state, structure, leaves, names = find_state(llama.train_step, args, {}, {})
        return Situation(llama.train_step, structure, leaves, names, state, "cpu", {"parallel": strategies}, (), {})

    key = key_of(now())
    times.append(time.process_time())
    ran = Ran(key.values)
    with ran.watching():
        captured = capture_step(llama.train_step, args, {})
        plan = ws.plan(captured.graph, "dp=4,tp=2", strategies)
        local = ws.partition(captured.graph, plan)
    local = ws.run_passes(local, [ws.Schedule()])
    times.append(time.process_time())
    witness = ran.witness(key.values.codes)
    data = write(Compiled(captured, plan, local), "cpu", key.values.tensors)
    times.append(time.process_time())
    situation = now()
    again = key_of(situation)
    assert (again.text, witness.changed(again.values)) == (key.text, ""), "the same step has the same key"
    found = read(data, "cpu", again.values.tensors, situation.state)
    times.append(time.process_time())
    assert str(found.local) == str(local), "what was read is what was written"
    keyed, compiled, kept, warm = (b - a for a, b in pairwise(times))
    return (
        f"{layers:6} {len(local.graph.nodes):8} {keyed:6.2f} {compiled:10.1f} {kept:7.2f} {warm:7.2f} "
        f"{len(data) / 1e6:8.2f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["one-start"]:
        one_start(*sys.argv[2:])
    elif sys.argv[1:]:
        print("layers    nodes  key s  compile s  keep s  warm s       MB")
        for count in sys.argv[1:]:
            print(planning(int(count)), flush=True)
    else:
        for row in ROWS:
            print(measure(*row), flush=True)
