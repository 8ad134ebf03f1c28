"""One whole training step on one device, by runner: eager, torch.compile, wholestep with each of its backends.

    python benchmarks/gpu.py --sizes small,medium,large --json runs/gpu.json
    python benchmarks/gpu.py --device cpu --sizes tiny          # dry run, without a GPU

A GPT and fused AdamW. `bf16` holds parameters and state in bfloat16; `autocast` holds them in float32 and computes
matrix products in bfloat16. All runners of a size start from the same weights and see the same batches; they
take turns, so that whatever the machine does besides meets all of them alike. A runner that fails is a row that says
how. Two ceilings are measured in the same run: a large matrix product in bfloat16, and a copy within the device.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import wholestep as ws

TURN_STEPS, UNTIMED_STEPS = 5, 1
PROFILED_STEPS = 3
BYTES_OF_A_COPY, SIDE_OF_A_PRODUCT = {"cuda": 2 << 30, "cpu": 64 << 20}, {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Size:
    """A GPT: `width` splits into `heads`; a batch is `rows` times `context` tokens."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int
    vocabulary: int = 32768


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=32, rows=2, vocabulary=256),
    "small": Size(layers=6, width=512, heads=8, context=1024, rows=8),  # 36 M
    "medium": Size(layers=24, width=1024, heads=16, context=1024, rows=8),  # 337 M
    "large": Size(layers=24, width=2048, heads=16, context=1024, rows=4),  # 1.28 G
}


class Block(nn.Module):
    """One pre-norm transformer layer, (b, t, d) -> (b, t, d)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d, self.heads = size.width, size.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix over tokens, then over features."""
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, dim=-1)
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (b, t) -> logits of the next one (b, t, vocabulary); the head is the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits at each place."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.linear(self.norm(h), self.tokens.weight)


@dataclass(frozen=True)
class Setting:
    """What all runners of a size share."""

    name: str
    size: Size
    device: str
    precision: str

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model that all start from, and its optimizer."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        with torch.device(self.device):
            model = GPT(self.size).to(dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and those that follow them, the same for all runners."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.size.rows, self.size.context + 1)
        rows = torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        with torch.autocast(self.device, torch.bfloat16) if self.precision == "autocast" else nullcontext():
            logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    def flops(self, parameters: int) -> float:
        """Of a step: 6 for each parameter and token, 12 for each pair of tokens, feature and layer, masked or not."""
        size = self.size
        tokens = size.rows * size.context
        return tokens * (6.0 * parameters + 12.0 * size.layers * size.width * size.context)

    def bytes(self, parameters: int) -> float:
        """Of a step, activations left out: a weight is read in forward and backward, its gradient written; the update
        reads both and two moments, and writes all but the gradient.
        """
        return 10.0 * parameters * (2 if self.precision == "bf16" else 4)


Step = Callable[[Tensor, Tensor], Tensor]


def plain_step(setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """The step as a user writes it; `model` and `optimizer` are its arguments too."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = setting.loss(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def torch_runner(setting: Setting, compiled: Sequence[str] = (), mode: str | None = None) -> tuple[Step, nn.Module]:
    """The step as written; `compiled` names what torch.compile gets in this mode: model, optimizer."""
    model, optimizer = setting.build()
    forward: Any = torch.compile(model, mode=mode) if "model" in compiled else model

    def update() -> None:
        optimizer.step()

    apply: Any = torch.compile(update, mode=mode) if "optimizer" in compiled else update

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = setting.loss(forward, x, y)
        loss.backward()
        apply()
        return loss.detach()

    return step, model


def wholestep_runner(setting: Setting, backend: str) -> tuple[Step, nn.Module]:
    """The whole step, compiled by wholestep."""
    model, optimizer = setting.build()
    compiled: Any = ws.compile(plain_step(setting, model, optimizer), backend=backend)
    return lambda x, y: compiled(model, optimizer, x, y), model


Make = Callable[[Setting], tuple[Step, nn.Module]]
RUNNERS: dict[str, Make] = {
    "eager": torch_runner,
    "compile:model": lambda s: torch_runner(s, ("model",)),
    "compile:model+optimizer": lambda s: torch_runner(s, ("model", "optimizer")),
    "compile:reduce-overhead": lambda s: torch_runner(s, ("model", "optimizer"), "reduce-overhead"),
    "wholestep:eager": lambda s: wholestep_runner(s, "eager"),
    "wholestep:inductor": lambda s: wholestep_runner(s, "inductor"),
    "wholestep:cudagraphs": lambda s: wholestep_runner(s, "cudagraphs"),
}


@dataclass
class Row:
    """What is known of one runner of one size; `error` says why nothing is. Times in ms but for the first step."""

    size: str
    runner: str
    parameters: int = 0
    first_step_s: float = 0.0
    step_ms: float = 0.0
    idle_ms: float | None = None
    peak_bytes: int = 0
    tokens_per_s: float = 0.0
    product_share: float = 0.0
    copy_share: float = 0.0
    loss_gap: float | None = None
    error: str = ""
    note: str = ""
    times_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


@dataclass
class Running:
    """A runner that is up."""

    step: Step
    row: Row
    number: int = 0

    def steps(self, setting: Setting, count: int) -> float:
        """Run `count` steps, each on the next batch; returns ms of one."""
        batches = [setting.batch(self.number + i) for i in range(count)]
        settle(setting.device)
        begun = time.perf_counter()
        losses = [self.step(x, y) for x, y in batches]
        settle(setting.device)
        took = 1e3 * (time.perf_counter() - begun) / count
        self.number += count
        self.row.losses += [float(loss) for loss in losses]
        return took


def settle(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def measured_ceilings(device: str) -> tuple[float, float]:
    """Operations per second of a bfloat16 matrix product, and bytes per second of a copy, read and written ones."""
    side, length = SIDE_OF_A_PRODUCT[device], BYTES_OF_A_COPY[device]
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.empty(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(_seconds(lambda: a @ b, device) for _ in range(10))
    copy = min(_seconds(lambda: target.copy_(source), device) for _ in range(10))
    return 2.0 * side**3 / product, 2.0 * length / copy


def _seconds(call: Callable[[], object], device: str) -> float:
    settle(device)
    begun = time.perf_counter()
    call()
    settle(device)
    return time.perf_counter() - begun


def measure(setting: Setting, names: Sequence[str], rounds: int, ceilings: tuple[float, float]) -> list[Row]:
    """All runners of one size, in turns, each alone where its peak of memory and its first step are measured."""
    up: dict[str, Running] = {}
    rows = {name: Row(setting.name, name) for name in names}
    for name in names:
        _guarded(rows[name], up, lambda name=name: up.__setitem__(name, _built(setting, rows[name])))
    for turn in range(rounds):
        ordered = list(up)[turn % max(len(up), 1) :] + list(up)[: turn % max(len(up), 1)]
        for name in ordered:
            _guarded(rows[name], up, lambda name=name: _turn(setting, up[name]))
    for name in list(up):
        _guarded(rows[name], up, lambda name=name: _looked_at(setting, up[name]))
    reference = next((row.losses for row in rows.values() if not row.error), [])
    for row in rows.values():
        if not row.error:
            row.step_ms = statistics.median(row.times_ms)
            row.tokens_per_s = 1e3 * setting.size.rows * setting.size.context / row.step_ms
            row.product_share = setting.flops(row.parameters) / (row.step_ms / 1e3) / ceilings[0]
            row.copy_share = setting.bytes(row.parameters) / (row.step_ms / 1e3) / ceilings[1]
            row.loss_gap = max(abs(a - b) for a, b in zip(row.losses, reference, strict=False))
    return list(rows.values())


def _guarded(row: Row, up: dict[str, Running], call: Callable[[], object]) -> None:
    """A runner that fails says so in its row, and gives its memory back."""
    try:
        call()
    except Exception as error:  # out of memory, a compiler's refusal: the others go on
        row.error = _said(error)
    if row.error:
        up.pop(row.runner, None)
        free()


def _said(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200].replace("|", "/")


def free() -> None:
    """Give back what nothing holds any longer."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _built(setting: Setting, row: Row) -> Running:
    """First step, then as many as any runner needs to settle; the peak is above what the runners before hold."""
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    begun = time.perf_counter()
    step, model = RUNNERS[row.runner](setting)
    running = Running(step, row)
    running.steps(setting, 1)
    row.first_step_s = time.perf_counter() - begun
    running.steps(setting, 4)
    row.parameters = sum(p.numel() for p in model.parameters())
    if setting.device == "cuda":
        row.peak_bytes = torch.cuda.max_memory_allocated() - before
    return running


def _turn(setting: Setting, running: Running) -> None:
    running.steps(setting, UNTIMED_STEPS)
    running.row.times_ms.append(running.steps(setting, TURN_STEPS))


def _looked_at(setting: Setting, running: Running) -> None:
    """Time per step in which the device runs nothing, between its first kernel and its last."""
    if setting.device != "cuda":
        return
    running.steps(setting, 1)
    try:
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            running.steps(setting, PROFILED_STEPS)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in found.events() or []
            if str(event.device_type).endswith("CUDA")
        ]
    except RuntimeError as error:  # counters of the device that only root may read
        running.row.note = f"not profiled: {_said(error)}"
        return
    running.row.idle_ms = idle_us(spans) / 1e3 / PROFILED_STEPS if spans else None


def idle_us(spans: Sequence[tuple[float, float]]) -> float:
    """Time between the first start and the last end that no span covers."""
    idle, until = 0.0, None
    for start, end in sorted(spans):
        idle += max(0.0, start - until) if until is not None else 0.0
        until = end if until is None else max(until, end)
    return idle


HEADS = ("size", "runner", "first s", "step ms", "idle ms", "peak GiB", "tokens/s", "of matmul", "of copy", "loss gap")


def table(rows: Sequence[Row]) -> str:
    """Markdown; a failure takes the place of its row's figures."""
    lines = [f"| {' | '.join(HEADS)} |", f"| {' | '.join(['---'] * len(HEADS))} |"]
    for row in rows:
        cells = [
            f"{row.first_step_s:.1f}", f"{row.step_ms:.2f}", "-" if row.idle_ms is None else f"{row.idle_ms:.2f}",
            f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else "-", f"{row.tokens_per_s:,.0f}",
            f"{row.product_share:.0%}", f"{row.copy_share:.0%}", "-" if row.loss_gap is None else f"{row.loss_gap:.0e}",
        ]  # fmt: skip
        cells = [row.error, *[""] * (len(HEADS) - 3)] if row.error else cells
        lines.append(f"| {' | '.join([row.size, row.runner, *cells])} |")
    return "\n".join(lines)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: a size or a runner is unknown, or there is no such device.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", "--size", default="small,medium,large", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--runners", default=",".join(RUNNERS), help=f"of {', '.join(RUNNERS)}")
    parser.add_argument("--precision", choices=["bf16", "autocast", "float32"], default="bf16")
    parser.add_argument("--rows", type=int, default=0, help="rows of a batch in place of the size's own")
    parser.add_argument("--context", type=int, default=0, help="tokens of a row in place of the size's own")
    parser.add_argument("--layers", type=int, default=0, help="layers in place of the size's own")
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of each runner, of {TURN_STEPS} steps")
    parser.add_argument("--alone", action="store_true", help="one runner at a time: for sizes that fill the memory")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    chosen = parser.parse_args(words)
    for given, known in ((chosen.sizes, SIZES), (chosen.runners, RUNNERS)):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is unknown: choose among {', '.join(known)}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: --device cpu --sizes tiny is a dry run")
    return chosen


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when every runner failed."""
    chosen = arguments(words)
    changed = {k: v for k in ("rows", "context", "layers") if (v := getattr(chosen, k))}
    product, copy = measured_ceilings(chosen.device)
    free()
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {chosen.precision}", file=sys.stderr)
    rows: list[Row] = []
    for size in chosen.sizes.split(","):
        setting = Setting(size, replace(SIZES[size], **changed), chosen.device, chosen.precision)
        names = chosen.runners.split(",")
        for group in [[n] for n in names] if chosen.alone else [names]:
            rows += measure(setting, group, chosen.rounds, (product, copy))
            free()
            torch.compiler.reset()
            print(table(rows), file=sys.stderr, flush=True)
    print(table(rows))
    for row in rows:
        if row.note:
            print(f"{row.size} {row.runner}: {row.note}")
    print(f"\nbfloat16 product {product / 1e12:.1f} TFLOP/s, copy {copy / 1e9:.0f} GB/s; {name}, {chosen.precision}")
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": name, "torch": str(torch.__version__), "precision": chosen.precision}
        measured = {"product_flops_per_s": product, "copy_bytes_per_s": copy, "rows": [asdict(row) for row in rows]}
        chosen.json.write_text(json.dumps({**about, **measured}, indent=1) + "\n")
    return int(all(row.error for row in rows))


if __name__ == "__main__":
    sys.exit(main())
