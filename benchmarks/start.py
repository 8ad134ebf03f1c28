"""CPU seconds from the start of Python to the third size of a batch: narrow layers of Llama, AdamW, clipped gradients.

    python benchmarks/start.py                           # 4 and 24 layers, medians of 3 fresh processes
    python benchmarks/start.py --layers 1 --repeat 1
    python benchmarks/start.py --peer                    # torch.compile(backend="aot_eager") too; takes minutes

One rank and one thread: CPU seconds change little with what else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"first call": (2, 32), "second call": (2, 32), "second size": (2, 40), "third size": (3, 24)}
"""Samples and tokens of each call; the second one proves the capture by a repetition."""
WAYS = {
    "eager": ["import torch", "import transformers", "model and optimizer", "first step", "eager step"],
    "wholestep": ["import wholestep", "first public name", *SIZES],
    "Auto": ["first call, Auto"],
    "Auto, warm": ["first call, Auto, warm"],
    "aot_eager": [f"{call}, aot_eager" for call in SIZES],
}
"""Rows by the way the step runs, each in processes of its own. `Auto, warm` finds the compile cache of a call before;
with a given strategy a cache has nothing to keep on one rank.
"""
SOURCE = Path(__file__).resolve().parents[1] / "src"


@contextmanager
def seconds_of(row: str, rows: dict[str, float]) -> Iterator[None]:
    """Write the CPU seconds that the block takes into `rows`."""
    before = time.process_time()
    yield
    rows[row] = time.process_time() - before


def run(way: str, layers: int, cache: str) -> dict[str, float]:
    """What one process measures: CPU seconds by row."""
    rows: dict[str, float] = {}
    with seconds_of("import torch", rows):
        import torch
    torch.set_num_threads(1)
    with seconds_of("import wholestep", rows):
        import wholestep as ws
    with seconds_of("import transformers", rows):
        from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=256, intermediate_size=688, num_attention_heads=4, vocab_size=1024
    )
    with seconds_of("model and optimizer", rows):
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, backend="aot_eager") if way == "aot_eager" else model

    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        optimizer.zero_grad()
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    called: Callable[..., Any] = step
    if way in ("wholestep", "Auto", "Auto, warm"):
        with seconds_of("first public name", rows):
            parallel = ws.DataParallel("fully_shard") if way == "wholestep" else ws.Auto()
        called = ws.compile(step, mesh="dp=1", parallel=parallel, cache=cache or None, progress=None)
    elif way == "aot_eager":
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
    calls = {"first step": (2, 32), "eager step": (2, 32)} if way == "eager" else SIZES
    for row, size in calls.items():
        tokens = torch.randint(config.vocab_size, size)
        with seconds_of(row if way in ("eager", "wholestep") else f"{row}, {way}", rows):
            called(model, optimizer, tokens)
        if "Auto" in way:
            break
    return rows


def measured(way: str, layers: int, cache: str = "") -> dict[str, float]:
    """`run` in a fresh process."""
    command = [sys.executable, __file__, "--run", way, str(layers), cache]
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def starts(way: str, layers: int, repeat: int) -> dict[str, float]:
    """Medians of fresh processes, of the rows of this way."""
    with tempfile.TemporaryDirectory() as folder:
        cache = folder if "warm" in way else ""
        if cache:
            measured(way, layers, cache)
        times = [measured(way, layers, cache) for _ in range(repeat)]
    return {row: statistics.median(rows[row] for rows in times) for row in WAYS[way]}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes of each way")
    parser.add_argument("--peer", action="store_true", help='also torch.compile(backend="aot_eager")')
    parser.add_argument("--run", nargs=3, metavar=("WAY", "LAYERS", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way, layers, cache = options.run
        print(json.dumps(run(way, int(layers), cache)))
        return
    ways = [way for way in WAYS if way != "aot_eager" or options.peer]
    columns = [{r: s for way in ways for r, s in starts(way, n, options.repeat).items()} for n in options.layers]
    print("| CPU seconds |", *(f"{layers} layers |" for layers in options.layers))
    print("| --- |" + " --- |" * len(columns))
    for row in columns[0]:
        print(f"| {row} |", *(f"{column[row]:.2f} |" for column in columns))


if __name__ == "__main__":
    main()
