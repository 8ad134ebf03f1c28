"""The training loop: every way to train takes each step in turn, on the same data."""

import json
import shlex
import shutil
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import wholestep as ws

from . import ways
from .corpus import Corpus, standard_library
from .model import GPT, GPTConfig, build
from .options import Options
from .step import new_optimizer
from .table import Measured, comparison
from .traffic import Traffic, bytes_stored, traffic
from .ways import Start, Way, largest_difference, whole_parameters

COMPARED_STEPS = 5  # parameters are compared after so many: rounding differences grow with further steps
UNTIMED_STEPS = 2
SAVE_EVERY = 25
PRINT_EVERY = 10
PLAN_LINES = 10
OF_TORCH = "FSDP2-wrapped module|Full backward hook"  # warnings about its FSDP2, and about counting collectives


@dataclass
class Job:
    """All that one rank holds while it trains. `others` are compared with `own`, which `step` runs."""

    options: Options
    corpus: Corpus
    first: int
    own: Way
    step: "ws.CompiledStep"
    others: list[Way]

    @property
    def all(self) -> list[Way]:
        """All ways to train, ours last."""
        return [*self.others, self.own]


def run(options: Options) -> None:
    """Train from the start or from the checkpoint, then compare. Every rank calls it."""
    warnings.filterwarnings("ignore", OF_TORCH)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() > 0, markup=False, highlight=False, soft_wrap=True)
    job = prepare(options, console)
    if job.first >= options.steps:
        more = 2 * job.first
        console.print(f"nothing is left to do: the checkpoint has {job.first} steps; train on with --steps {more}")
        return
    done, differences = train(job, console)
    if done == options.steps:
        finish(job, differences, console)
        return
    again = shlex.join(word for word in sys.argv[1:] if word != "--resume")
    console.print(f"Saved step {done} of {options.steps} in {options.checkpoint}.")
    console.print(f"Continue with: python -m examples.demo --resume {again}")


def train(job: Job, console: Console) -> tuple[int, dict[str, dict[str, float]]]:
    """Take all steps, or those until Ctrl-C; save now and then, and at the end.

    Returns the number of the last step, and how far parameters were from one another after `COMPARED_STEPS`.
    """
    options, done = job.options, job.first
    differences: dict[str, dict[str, float]] = {}
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))  # torchrun sends it to all ranks
    columns = TextColumn("{task.description}"), BarColumn(32), TimeElapsedColumn()
    live = console.is_terminal and not console.quiet
    with Progress(*columns, console=console, transient=True, disable=not live) as progress:
        bar = progress.add_task("", total=options.steps, completed=done)
        stopping = False
        while done < options.steps and not stopping:
            losses = [take(job, way, done) for way in job.all]
            done += 1
            stopping = share(job, losses, bool(interrupts))
            text = status(job, done)
            progress.update(bar, completed=done, description=text)
            if done in (job.first + 1, options.steps) or done % PRINT_EVERY == 0:
                console.print(text)
            if done == min(job.first + COMPARED_STEPS, options.steps):
                differences = compare(job.all)
            if stopping or done == options.steps or done % SAVE_EVERY == 0:
                ws.save(options.checkpoint, job.step, number=done, extra=identity(options, job.corpus))
    return done, differences


def prepare(options: Options, console: Console) -> Job:
    """Read the data, make or load the weights, and set up every way to train them."""
    corpus = standard_library(options.sizes.text_bytes)
    sizes = options.sizes
    model = build(GPTConfig(sizes.layers, sizes.width, sizes.heads, sizes.context), options.seed)
    optimizer = new_optimizer(model)
    done = restore(options, corpus, model, optimizer) if options.resume else 0
    if not options.resume and dist.get_rank() == 0:
        make_room(options.checkpoint)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{len(corpus.text) / 1e6:.1f} MB of text, {count / 1e6:.2f} M parameters")

    def show(stage: str, state: str, seconds: float) -> None:
        if state == "done":
            console.print(f"{stage}: {seconds:.2f} s")

    start = Start(options, model, optimizer, done)
    own, step = ways.compiled(start, show)
    others = [make(start) for make in (ways.one_process, ways.ddp, ways.fsdp2)] if options.compare else []
    return Job(options, corpus, done, own, step, others)


def identity(options: Options, corpus: Corpus) -> dict[str, object]:
    """What a run that goes on must share with the one that saved."""
    return {"corpus": corpus.fingerprint, "seed": options.seed}


def restore(options: Options, corpus: Corpus, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint and return how many steps it holds; raises ValueError for one of other data."""
    checkpoint = ws.load(options.checkpoint, model=model, optimizer=optimizer)
    wanted = identity(options, corpus)
    if checkpoint.extra != wanted:
        raise ValueError(f"{options.checkpoint} was trained with {checkpoint.extra}, this run has {wanted}")
    return checkpoint.number


def make_room(checkpoint: Path) -> None:
    """Move the checkpoints of an earlier run aside; those that were moved before go."""
    if checkpoint.is_dir():
        previous = checkpoint.with_name("previous")
        shutil.rmtree(previous, ignore_errors=True)
        checkpoint.rename(previous)


def batch(job: Job, way: Way, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and targets of this rank at step `number`."""
    rank, ranks = (0, 1) if way.whole_batch else (dist.get_rank(), dist.get_world_size())
    sizes, seed = job.options.sizes, job.options.seed
    return job.corpus.batch(number, seed=seed, rows=sizes.rows, context=sizes.context, rank=rank, ranks=ranks)


def take(job: Job, way: Way, number: int) -> float:
    """Take one step in one way and keep its seconds. Returns the loss on this rank (0 where it does not run)."""
    dist.barrier()  # no rank computes beside another way's step
    if way.whole_batch and dist.get_rank():
        return 0.0
    tokens, targets = batch(job, way, number)
    torch.set_num_threads(way.threads)
    begun = time.perf_counter()
    loss = way.run(tokens, targets).item()
    way.seconds.append(time.perf_counter() - begun)
    torch.set_num_threads(1)
    way.scheduler.step()
    return loss


def share(job: Job, losses: list[float], interrupted: bool) -> bool:
    """Average the losses over ranks. True on all ranks when any was interrupted: they save after the same step."""
    shared = torch.tensor([float(interrupted), *losses], dtype=torch.float64)
    dist.all_reduce(shared)
    stopping, *sums = cast(list[float], shared.tolist())
    for way, total in zip(job.all, sums, strict=True):
        way.loss = total if way.whole_batch else total / dist.get_world_size()
    return stopping > 0


def status(job: Job, done: int) -> str:
    """Where training stands, and the share of the last step that rank 0 waited for other ranks."""
    seconds, sizes = job.own.seconds[-1], job.options.sizes
    text = f"step {done}/{job.options.steps} | loss {job.own.loss:.3f}"
    text += f" | {sizes.rows * sizes.context / seconds:,.0f} tokens/s"
    if job.options.backend == "eager":
        text += f" | exposed communication {job.step.waited_seconds / seconds:.0%}"
    return text


def compare(found: list[Way]) -> dict[str, dict[str, float]]:
    """The largest parameter difference of each way to one process and to DDP, where they train too."""
    whole = {way.name: whole_parameters(way.model) for way in found}
    others = [name for name in (ways.ONE_PROCESS, ways.DDP) if name in whole]
    return {
        name: {other: largest_difference(whole[other], mine) for other in others if other != name}
        for name, mine in whole.items()
    }


def finish(job: Job, differences: dict[str, dict[str, float]], console: Console) -> None:
    """Write plan, program and result, and show them. Takes one more step, after the last save, to watch collectives."""
    found = [measure(job, way, differences[way.name]) for way in job.all]
    plan, program = job.step.plan, job.step.local_graph
    assert plan is not None, "the step has run"
    assert program is not None, "the step has run"
    result = {
        "ways": [asdict(one) for one in found],
        "first": job.first,
        "collectives_of_program": {kind: total.count for kind, total in program.collectives().items() if total.count},
        "bytes_of_plan": plan.stored_bytes("param") + plan.stored_bytes("state"),
    }
    folder = job.options.directory
    texts = {"plan.txt": f"{plan}\n", "program.txt": f"{program}\n", "result.json": json.dumps(result, indent=2) + "\n"}
    if dist.get_rank() == 0:
        for name, text in texts.items():
            (folder / name).write_text(text)
    console.print("", in_short(str(plan), folder / "plan.txt"), "", sep="\n")
    console.print(comparison(found, min(COMPARED_STEPS, job.options.steps - job.first)), soft_wrap=False)
    console.print(f"checkpoint, plan.txt, program.txt (of one rank) and result.json are in {folder}")


def in_short(plan: str, file: Path) -> str:
    """The first lines of the plan's text, its totals and notes, and where the others are."""
    lines = plan.splitlines()
    totals = next(i for i, line in enumerate(lines) if line.lstrip().startswith("stored per rank"))
    return "\n".join([*lines[:PLAN_LINES], f"  ... (all of it in {file})", *lines[totals:]])


def measure(job: Job, way: Way, differences: dict[str, float]) -> Measured:
    """What one way came to. All ranks call it."""
    stored = torch.tensor(bytes_stored(way.optimizer))
    dist.all_reduce(stored, op=dist.ReduceOp.MAX)
    moved = Traffic({}, 0)
    if not way.whole_batch:
        moved = traffic(partial(way.run, *batch(job, way, job.options.steps)))
    seconds = median(way.seconds[UNTIMED_STEPS:] or way.seconds or [0.0])
    return Measured(way.name, way.loss, differences, seconds, int(stored), moved.counts, moved.sent_bytes)
