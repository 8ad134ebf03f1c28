"""A restart from copies in memory, one node of which was lost, beside a restart from the checkpoint on disk."""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import wholestep as ws

from .ranks import Job
from .save_blocking import STATES, WIDTH, train_step
from .training import Say

RANKS, MESH, LOST = 4, "replicate=2,shard=2", 3
MEMORY = Path("/dev/shm")
WAIT_S = 300.0
COPIES = 5
Restarted = tuple[float, float, int]  # seconds, seconds of the CPU, bytes read


def _built(state_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer, ws.CompiledStep]:
    torch.manual_seed(0)
    layers = max(1, round(state_bytes / STATES / (4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    parallel = ws.DataParallel("hybrid")
    step = ws.compile(train_step, parallel=parallel, mesh=MESH, schedule=None, progress=None)
    return model, torch.optim.AdamW(model.parameters()), step


def prepare(state_bytes: int, disk: str, memory: str, rank: int, say: Say) -> None:
    """Train, and keep the state in both ways; says how long each copy took, and the loss that comes next."""
    model, optimizer, step = _built(state_bytes)
    copies = ws.MemoryCopies(f"{memory}/node-{rank}")
    for _ in range(COPIES):
        step(model, optimizer, torch.randn(1, WIDTH))
        begun = time.monotonic()
        copies.save(step)
        say("copied", time.monotonic() - begun)
    ws.save(disk, step)
    torch.manual_seed(rank)
    say("next", step(model, optimizer, torch.randn(1, WIDTH)).item().hex())


def restart(state_bytes: int, how: str, folder: str, rank: int, say: Say) -> None:
    """Restore and train one step; says the seconds of both, those of the CPU, the bytes that were read, the loss."""
    model, optimizer, step = _built(state_bytes)
    begun, cpu, before = time.monotonic(), time.process_time(), _read_bytes()
    if how == "memory":
        assert ws.MemoryCopies(f"{folder}/node-{rank}").load(step) is not None
    elif how == "disk":
        ws.load(folder, step)
    torch.manual_seed(rank)
    loss = step(model, optimizer, torch.randn(1, WIDTH)).item()
    say("restarted", time.monotonic() - begun, time.process_time() - cpu, _read_bytes() - before, loss.hex())


def _read_bytes() -> int:
    """Bytes that this process has got from files by read calls, from the page cache or from a device."""
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.split()[1])


def run(state_bytes: int, rounds: int) -> tuple[str, bool]:
    """The table, and whether a restart came to another loss."""
    disk = Path(tempfile.mkdtemp(prefix="wholestep-restart-"))
    memory = Path(tempfile.mkdtemp(prefix="wholestep-restart-", dir=MEMORY))
    try:
        with Job(RANKS, prepare, state_bytes, str(disk), str(memory), timeout_s=WAIT_S) as job:
            job.listen(WAIT_S, lambda: len(job.of_kind("end")) == RANKS)
        expected = [job.of_kind("next", rank)[0][1] for rank in range(RANKS)]
        copies = [seconds for _, seconds in job.of_kind("copied", 0)[2:]]
        held = sum(path.stat().st_size for path in (memory / f"node-{LOST}").glob("*/pieces")) / 2
        rows, wrong = dict[str, list[Restarted]](), False
        for _ in range(rounds):
            for how, folder in (("nothing", disk), ("disk", disk), ("memory", memory)):
                shutil.rmtree(memory / f"node-{LOST}", ignore_errors=True)
                _forget(disk)
                with Job(RANKS, restart, state_bytes, how, str(folder), timeout_s=WAIT_S) as job:
                    job.listen(WAIT_S, lambda job=job: len(job.of_kind("end")) == RANKS)
                said = [job.of_kind("restarted", rank)[0] for rank in range(RANKS)]
                wrong |= how != "nothing" and [message[4] for message in said] != expected
                numbers = max(m[1] for m in said), sum(m[2] for m in said), sum(m[3] for m in said)
                rows.setdefault(how, []).append(numbers)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return _table(state_bytes, rows, copies, held, wrong), wrong


def _forget(folder: Path) -> None:
    """Drop files from the page cache: they are on the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _table(state_bytes: int, rows: dict[str, list[Restarted]], copies: list[float], held: float, wrong: bool) -> str:
    names = {
        "nothing": "a new start, nothing restored",
        "disk": "`ws.load` of the checkpoint on disk",
        "memory": f"`MemoryCopies.load`, the node of rank {LOST} lost",
    }
    lines = [
        f"State of {state_bytes / 1e9:.2f} GB, `hybrid` on {MESH}, each rank a node of its own; medians of "
        f"{len(rows['disk'])}. {'A restart came to ANOTHER loss.' if wrong else 'All restarts come to the same bits.'}",
        "",
        "| | seconds to the end of the first step | least | of the CPU, all ranks | read from files by all ranks, MB |",
        "|---|---|---|---|---|",
    ]
    for how, found in rows.items():
        seconds, cpu, read = (statistics.median(values) for values in zip(*found, strict=True))
        least = min(one[0] for one in found)
        lines.append(f"| {names[how]} | {seconds:.2f} | {least:.2f} | {cpu:.2f} | {read / 1e6:.0f} |")
    copy = statistics.median(copies)
    lines += ["", f"A copy of {held / 1e6:.0f} MB into the node's memory, as each rank makes it: {copy * 1e3:.0f} ms."]
    return "\n".join(lines) + "\n"
