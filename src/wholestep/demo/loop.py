"""The demo's training loop: every way of training takes each step in turn, on the same data."""

import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

import wholestep as ws

from . import peers
from .channel import Channel, Refused
from .corpus import Corpus, standard_library
from .peers import Peer, Start
from .settings import Settings
from .traffic import bytes_at_rest, traffic
from .train import digest, full_parameters, largest_difference, new_model, new_optimizer

EARLY_STEPS = 5
UNTIMED_STEPS = 2


@dataclass
class Run:
    """All that one rank holds while it trains."""

    settings: Settings
    channel: Channel
    corpus: Corpus
    start: Start
    peer: Peer
    step: "ws.CompiledStep"
    others: list[Peer]
    early: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])

    @property
    def everyone(self) -> list[Peer]:
        """All that train: wholestep first."""
        return [self.peer, *self.others]


def run(settings: Settings, channel: Channel) -> None:
    """Train from the start or from the checkpoint, then compare."""
    state = prepare(settings, channel)
    done = state.start.done
    while done < settings.steps:
        losses = [take(state, peer, done) for peer in state.everyone]
        done += 1
        stop = report(state, done, losses)
        if done - state.start.done == EARLY_STEPS:
            state.early = differences(state)
        if stop or done == settings.steps or done % settings.save_every == 0:
            ws.save(settings.files.checkpoint, state.step, number=done, extra={"corpus": state.corpus.fingerprint})
        if stop and done < settings.steps:
            channel.send("interrupted", step=done)
            return
    compare(state)


def prepare(settings: Settings, channel: Channel) -> Run:
    """Data, weights and every way of training them."""
    begun = time.perf_counter()
    channel.send("stage", name="data", state="start", seconds=0.0)
    corpus = standard_library(settings.sizes.text_bytes)
    model = new_model(settings)
    optimizer = new_optimizer(model, settings)
    done = restore(settings, corpus, model, optimizer) if settings.resume else 0
    start = Start(model, optimizer, done)
    size = sum(parameter.numel() for parameter in model.parameters())
    detail = f"{len(corpus.text) / 1e6:.1f} MB of text, {size / 1e6:.2f} M parameters"
    channel.send("stage", name="data", state="done", seconds=time.perf_counter() - begun, detail=detail)

    def progress(stage: str, state: str, seconds: float) -> None:
        channel.send("stage", name=stage, state=state, seconds=seconds)

    peer, step = peers.wholestep(start, settings, progress if dist.get_rank() == 0 else None)
    others = [peers.one_process, peers.ddp, peers.fsdp2] if settings.compare else []
    return Run(settings, channel, corpus, start, peer, step, [make(start, settings) for make in others])


def restore(settings: Settings, corpus: Corpus, model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint and return how many steps it holds; raises Refused when it does not fit."""
    checkpoint = ws.load(settings.files.checkpoint, model=model, optimizer=optimizer)
    found = checkpoint.extra.get("corpus")
    if found != corpus.fingerprint:
        raise Refused(
            f"the text has changed since the checkpoint ({found} then, {corpus.fingerprint} now): another Python? "
            "Start again without --resume."
        )
    if checkpoint.number >= settings.steps:
        raise Refused(
            f"nothing is left to do: the checkpoint has {checkpoint.number} of {settings.steps} steps. "
            f"Train on with --resume --steps {checkpoint.number + settings.steps}."
        )
    return checkpoint.number


def batch(state: Run, peer: Peer, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `peer` sees on this rank at step `number`."""
    sizes, seed = state.settings.sizes, state.settings.seed
    if peer.whole_batch:
        return state.corpus.batch(number, seed=seed, rows=sizes.rows, context=sizes.context)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return state.corpus.batch(number, seed=seed, rows=sizes.rows, context=sizes.context, rank=rank, ranks=ranks)


def take(state: Run, peer: Peer, number: int) -> float:
    """One step of one peer; its own seconds are kept. Returns the loss on this rank (0 where it does not run)."""
    if state.others:
        dist.barrier()  # nobody's work runs beside another's step
    if peer.whole_batch and dist.get_rank():
        return 0.0
    tokens, targets = batch(state, peer, number)
    begun = time.perf_counter()
    loss = peer.run(tokens, targets).item()
    peer.seconds.append(time.perf_counter() - begun)
    peer.scheduler.step()
    return loss


def report(state: Run, done: int, losses: list[float]) -> bool:
    """Share losses and requests to stop among the ranks; rank 0 reports. True when all ranks are to stop."""
    shared = torch.tensor([float(state.channel.stop_asked.is_set()), *losses], dtype=torch.float64)
    dist.all_reduce(shared)
    stop, *sums = cast(list[float], shared.tolist())
    for peer, total in zip(state.everyone, sums, strict=True):
        peer.loss = total if peer.whole_batch else total / dist.get_world_size()
    if dist.get_rank() == 0:
        seconds = state.peer.seconds[-1]
        sizes = state.settings.sizes
        state.channel.send(
            "step",
            step=done,
            steps=state.settings.steps,
            loss=state.peer.loss,
            seconds=seconds,
            tokens_per_second=sizes.rows * sizes.context / seconds,
            exposed=state.step.waited_seconds / seconds if state.settings.backend == "eager" else None,
        )
        if state.step.calls == 1:
            show_plan(state)
    return stop > 0


def show_plan(state: Run) -> None:
    """Write the plan and the program to files, and report the plan's text."""
    files, plan = state.settings.files, str(state.step.plan)
    files.plan.write_text(plan + "\n")
    files.program.write_text(f"{state.step.local_graph}\n")
    state.channel.send("plan", text=plan)


def differences(state: Run) -> dict[str, list[float | None]]:
    """Per peer the largest parameter difference against one process and against DDP (None where there is none)."""
    whole = {peer.name: full_parameters(peer.model) for peer in state.everyone}
    oracles = [peers.ONE_PROCESS, peers.DDP]
    return {
        name: [largest_difference(whole[oracle], mine) if oracle in whole else None for oracle in oracles]
        for name, mine in whole.items()
    }


def compare(state: Run) -> None:
    """Report the comparison. Runs one step more of each peer, after everything is saved, to watch its collectives."""
    final = differences(state)
    digests = digest(full_parameters(state.peer.model))
    rows: list[dict[str, object]] = []
    for peer in state.everyone:
        rest = torch.tensor(bytes_at_rest(peer.optimizer))
        dist.all_reduce(rest, op=dist.ReduceOp.MAX)
        row: dict[str, object] = {
            "name": peer.name,
            "loss": peer.loss,
            "early_difference": state.early.get(peer.name),
            "difference": final[peer.name],
            "seconds": median(peer.seconds[UNTIMED_STEPS:] or peer.seconds or [0.0]),
            "rest_bytes": int(rest),
        }
        if not peer.whole_batch:
            tokens, targets = batch(state, peer, state.settings.steps)
            moved = traffic(lambda peer=peer, tokens=tokens, targets=targets: peer.run(tokens, targets))
            row |= {"collectives": moved.counts, "sent_bytes": moved.sent_bytes}
        else:
            row |= {"collectives": {}, "sent_bytes": 0}
        rows.append(row)
    program, plan = state.step.local_graph, state.step.plan
    assert program is not None, "the step has run"
    assert plan is not None, "the step has run"
    in_graph = {kind: asdict(total) for kind, total in program.collectives().items()}
    state.channel.send(
        "result",
        rows=rows,
        since=state.start.done,
        early_steps=EARLY_STEPS if state.early else 0,
        in_graph=in_graph,
        planned_rest_bytes=plan.bytes_at_rest("param") + plan.bytes_at_rest("state"),
        parameters=digests,
    )
