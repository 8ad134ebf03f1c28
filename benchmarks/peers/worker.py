"""One rank of one peer: `python -m benchmarks.peers.worker JOB`, told what to do by JSON lines on stdin.

    {"do": "run", "steps": n}   n steps: when they began and ended, losses, processor seconds, bytes sent, peak memory
    {"do": "measure"}           the machine as it is now, for simulations
    {"do": "look", "hardware": []}  one step under the profiler: collectives; bytes at rest, tensors;
                                what a step takes on these machines by simulation
    {"do": "forget"}            peak memory starts again

It ends when stdin does, also in the middle of a step: no rank outlives the process that started it.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import machine
from .batches import Batches
from .job import Job, Trainer


def messages() -> Iterator[dict[str, Any]]:
    """What the parent says. A thread reads it, so that the end of stdin is noticed whatever the rank is doing."""
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            told.put(json.loads(line))
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield told.get()


def trainer_of(job: Job) -> Trainer:
    """The peer's own code, imported only here: some peers run in an interpreter that lacks what others need."""
    if job.spec.base == "jax":
        from .jax_trainer import JaxTrainer

        return JaxTrainer(job)
    from .torch_trainer import torch_trainer

    return torch_trainer(job)


def speed_seconds() -> float:
    """Seconds that a fixed piece of arithmetic takes: how fast this core runs just now."""
    a = np.ones((384, 384), np.float32)
    begun = time.monotonic()
    for _ in range(4):
        np.matmul(a, a)
    return time.monotonic() - begun


class Rank:
    """Drives a trainer and counts."""

    def __init__(self, job: Job) -> None:
        self.interface = os.environ["GLOO_SOCKET_IFNAME"]
        self.batches = Batches(np.load(job.corpus), job.config, *job.share)
        begun = time.monotonic()
        self.trainer = trainer_of(job)
        self.build_seconds = time.monotonic() - begun
        self.done = 0

    def take(self, count: int) -> list[Any]:
        """The next batches."""
        made = [self.trainer.prepare(*self.batches.at(self.done + i)) for i in range(count)]
        self.done += count
        return made

    def run(self, steps: int) -> dict[str, Any]:
        """Steps that count."""
        batches, ends, losses, trainer = self.take(steps), list[float](), list[float](), self.trainer
        speed, update = speed_seconds(), trainer.update_seconds
        sent, begin = machine.sent_bytes(self.interface), time.monotonic()
        cpu, calling = machine.own_seconds(), time.thread_time()
        for batch in batches:
            losses.append(trainer.step(batch))
            ends.append(time.monotonic())
        cpu, calling = machine.own_seconds() - cpu, time.thread_time() - calling
        trainer.finish()
        return {
            "begin": begin,
            "ends": ends,
            "losses": losses,
            "cpu": cpu,
            "calling": calling,
            "sent": machine.sent_bytes(self.interface) - sent,
            "update": trainer.update_seconds - update,
            "speed": speed,
            "peak": machine.resident_bytes("VmHWM"),
        }

    def look(self, hardware: list[str]) -> dict[str, Any]:
        """What does not depend on time."""
        return {
            "tensors": self.trainer.tensor_bytes(self.take(1)[0]),
            "collectives": self.trainer.collectives(self.take(1)[0]),
            "rest": self.trainer.rest_bytes(),
            "parameters": self.trainer.parameter_bytes(),
            "note": self.trainer.note,
            "simulated": self.trainer.simulated_ms(hardware),
        }

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what the parent asks."""
        if message["do"] == "run":
            return self.run(message["steps"])
        if message["do"] == "look":
            return self.look(message["hardware"])
        if message["do"] == "measure":
            return {"hardware": self.trainer.hardware()}
        machine.forget_peak()
        return {}


def main() -> None:
    """Build the trainer, then obey until stdin ends; a failure is the last answer."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log

    def answer(fields: dict[str, Any]) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    told = messages()
    try:
        empty = machine.resident_bytes()
        rank = Rank(Job.from_json(sys.argv[1]))
        answer({"build": rank.build_seconds, "empty": empty})
        for message in told:
            answer(rank.obey(message))
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"[:600]})
    sys.stderr.flush()
    os._exit(1)  # no tidy end: it could wait for peers that are gone


if __name__ == "__main__":
    main()
