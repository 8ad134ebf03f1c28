"""A whole training step on one GPU: eager torch, torch.compile, FSDP2 on one rank, wholestep.

    python -m benchmarks.gpu --json runs/gpu.json                     # ten minutes
    python -m benchmarks.gpu --device cpu --sizes tiny --minutes 2    # dry run, without a GPU
    python -m benchmarks.gpu --counts --sizes small                   # launches, copies and syncs of a step; no times
    python -m benchmarks.gpu --nullcuda --sizes small                 # the same on a null device, without a GPU

First tests/gpu, then for each size and implementation of AdamW all runners, with gradients clipped. Every runner is a
process of its own under a time limit, and starts from the same weights with the same batches. Runners take turns, so
that whatever changes the machine's speed meets all of them, unless a size asks for more memory than there is. The ones
that compile kernels come last. Results are written as they come. Two ceilings are measured in the same run: a large
matrix product in bfloat16, and a copy within the device.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .counts import counts_table
from .report import Report, Row, table
from .runners import RUNNERS
from .worker import Worker, WorkerError, settle
from .workload import SIZES, Setting

BYTES_OF_A_COPY, SIDE_OF_A_PRODUCT = {"cuda": 2 << 30, "cpu": 64 << 20}, {"cuda": 8192, "cpu": 512}
ROOT = Path(__file__).parents[2]
NULL_DEVICE = ROOT / "build" / "nullcuda" / "nullcuda"
TESTS_LIMIT_S = 150.0
STARTED_TOGETHER = 3  # processes that import and build their model while others do
COMPARISONS = ("small/fused", "gpt2/fused", "llama1b/fused", "gpt2/default")
ALONE = ("llama1b",)  # several would not fit into 80 GB


def measured_ceilings(device: str) -> tuple[float, float]:
    """Operations per second of a bfloat16 matrix product, and bytes per second of a copy, read and written ones."""
    side, length = SIDE_OF_A_PRODUCT[device], BYTES_OF_A_COPY[device]
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.empty(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def seconds(call: Any) -> float:
        settle(device)
        begun = time.perf_counter()
        call()
        settle(device)
        return time.perf_counter() - begun

    product = min(seconds(lambda: a @ b) for _ in range(10))
    copy = min(seconds(lambda: target.copy_(source)) for _ in range(10))
    return 2.0 * side**3 / product, 2.0 * length / copy


def run_tests() -> str:
    """The last line of pytest over tests/gpu, and the tests that failed."""
    if importlib.util.find_spec("pytest") is None:
        return "not run: pytest is not installed"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=TESTS_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {TESTS_LIMIT_S:.0f} s"
    lines = found.stdout.strip().splitlines()
    return "\n".join([*(line for line in lines if line.startswith(("FAILED", "ERROR"))), *lines[-1:]])


class Comparison:
    """The runners of one setting: started in order, then in turns."""

    def __init__(self, setting: Setting, report: Report, limit_s: float, deadline: float) -> None:
        self.setting, self.report, self.limit_s, self.deadline = setting, report, limit_s, deadline
        self.up: dict[str, tuple[Row, Worker]] = {}

    def start(self, names: Sequence[str]) -> None:
        """Take the first steps with these runners: a few at a time where they only build a model."""
        for name in names:
            row = Row(self.setting.size_name, self.setting.optimizer, name)
            self.report.rows.append(row)
            if time.monotonic() > self.deadline:
                row.error = "not run: out of time"
                continue
            self.up[name] = row, Worker(self.setting, name)
        for name in names:
            if name in self.up:
                self._ask(name, "early")

    def turns(self, rounds: int) -> None:
        """All runners that are up, one after the other, each round in another order."""
        for turn in range(rounds):
            names = list(self.up)
            for name in names[turn % max(len(names), 1) :] + names[: turn % max(len(names), 1)]:
                self._ask(name, "turn")

    def finish(self) -> None:
        """Look at each one, and let its process leave."""
        for name in list(self.up):
            self._ask(name, "look")
        for name, (row, worker) in list(self.up.items()):
            try:
                row.exit_s = worker.leave()
            except WorkerError as error:
                row.error = str(error)
            del self.up[name]
        self.report.compare_losses(self.setting)
        self.report.flush()

    def _ask(self, name: str, what: str) -> None:
        row, worker = self.up[name]
        left = max(5.0, self.deadline - time.monotonic())
        try:
            for key, value in worker.ask(what, min(self.limit_s, left)).items():
                setattr(row, key, [*row.step_ms, value] if key == "step_ms" else value)
        except WorkerError as error:
            row.error = str(error)
            del self.up[name]
        self.report.flush()


def compare(
    setting: Setting, names: Sequence[str], rounds: int, report: Report, limit_s: float, deadline: float
) -> None:
    """All figures of one setting: of runners in turns, or one after the other where their memory asks for it."""
    comparison = Comparison(setting, report, limit_s, deadline)
    alone = [name for name in names if RUNNERS[name].aside or setting.size_name in ALONE]
    for name in alone:
        comparison.start([name])
        comparison.turns(rounds)
        comparison.finish()
    quick = [name for name in names if not RUNNERS[name].inductor and name not in alone]
    for at in range(0, len(quick), STARTED_TOGETHER):
        comparison.start(quick[at : at + STARTED_TOGETHER])
    comparison.turns(1)
    comparison.start([name for name in names if RUNNERS[name].inductor and name not in alone])
    comparison.turns(rounds)
    comparison.finish()


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: a size or a runner is unknown, or there is no such device.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--sizes", default=",".join(COMPARISONS), help=f"as gpt2 or gpt2/default, of {', '.join(SIZES)}"
    )
    parser.add_argument("--runners", default=",".join(RUNNERS), help=f"of {', '.join(RUNNERS)}")
    parser.add_argument("--precision", choices=["bf16", "autocast", "float32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each runner, of 5 steps")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each thing that a runner is asked")
    parser.add_argument("--minutes", type=float, default=10.0, help="after that, no other runner begins")
    parser.add_argument("--no-tests", action="store_true", help="leave out tests/gpu")
    parser.add_argument(
        "--counts", action="store_true", help="count launches, copies and syncs of a step; time nothing"
    )
    parser.add_argument("--nullcuda", action="store_true", help="as --counts, on the null device of tools/nullcuda")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    chosen = parser.parse_args(words)
    chosen.sizes, chosen.runners = chosen.sizes.split(","), chosen.runners.split(",")
    for given, known in (([size.partition("/")[0] for size in chosen.sizes], SIZES), (chosen.runners, RUNNERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"{unknown[0]!r} is unknown: choose among {', '.join(known)}")
    ways = ("", "default", "foreach", "fused")
    unknown = [size for size in chosen.sizes if size.partition("/")[2] not in ways]
    if unknown:
        parser.error(f"{unknown[0]!r} names no implementation of AdamW: write SIZE/ and one of {', '.join(ways[1:])}")
    if chosen.nullcuda and not NULL_DEVICE.exists():
        parser.error("there is no null device: `make test-nullcuda` builds it")
    if chosen.device == "cuda" and not chosen.nullcuda and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here: --device cpu --sizes tiny is a dry run")
    return chosen


def settings_of(chosen: argparse.Namespace) -> list[Setting]:
    """One for each size and implementation of AdamW that were asked for."""
    named = [size.partition("/") for size in chosen.sizes]
    return [Setting(name, SIZES[name], chosen.device, chosen.precision, how or "fused") for name, _, how in named]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when every runner failed."""
    chosen = arguments(words)
    if chosen.nullcuda:
        passed = [word for word in (sys.argv[1:] if words is None else words) if word != "--nullcuda"]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])  # the null device has an environment of its own
        words = [str(NULL_DEVICE), "python", "-m", "benchmarks.gpu", "--counts", *passed]
        return subprocess.call(words, env={**os.environ, "PYTHONPATH": path})
    settings = settings_of(chosen)
    if chosen.counts:
        print(counts_table(settings, chosen.runners))
        return 0
    deadline = time.monotonic() + 60 * chosen.minutes
    name = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
    about: dict[str, Any] = {"device": name, "torch": str(torch.__version__), "precision": chosen.precision}
    report = Report(about, chosen.json)
    if chosen.device == "cuda" and not chosen.no_tests:
        about["tests"] = run_tests()
        print(f"tests/gpu: {about['tests']}", file=sys.stderr, flush=True)
    about["product_flops_per_s"], about["copy_bytes_per_s"] = measured_ceilings(chosen.device)
    if chosen.device == "cuda":
        torch.cuda.empty_cache()
    for setting in settings:
        compare(setting, chosen.runners, chosen.rounds, report, chosen.limit, deadline)
        print(table(report, settings), file=sys.stderr, flush=True)
    product, copy = about["product_flops_per_s"] / 1e12, about["copy_bytes_per_s"] / 1e9
    print(table(report, settings))
    ceilings = f"bfloat16 product {product:.1f} TFLOP/s, copy {copy:.0f} GB/s"
    print(f"\n{name}, torch {torch.__version__}, {chosen.precision}; {ceilings}")
    report.flush()
    return int(all(row.error for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
