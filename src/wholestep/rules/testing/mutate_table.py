"""Mutates the whole table in a process that may crash: some ops write past their tensors on wrong shapes."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from ... import _torch
from .check import Sample, cases_of
from .mutate import Key, Mutation, mutate_op

_PATIENCE_SECONDS = 30.0  # one try takes milliseconds

Samples = Callable[[Any], Sequence[Sample]]


def mutate_table(targets: Iterable[Any], samples: Samples) -> Iterator[tuple[Any, list[Mutation]]]:
    """Every op with the mutations of its rule. A mutation that crashes the process counts as caught.

    Memory that one op damages may crash the process at a later op, so an op is blamed only if it crashes a new process
    too.
    """
    context = multiprocessing.get_context("fork")
    remaining = list(targets)
    crashing: set[Key] = set()
    while remaining:
        receive, send = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(remaining, samples, frozenset(crashing), send))
        worker.start()
        send.close()
        last: Key | None = None
        new = True
        while (message := _next(receive, worker)) is not None:
            if isinstance(message, list):
                yield remaining.pop(0), cast(list[Mutation], message)
                crashing.clear()
                last, new = None, False
            else:
                last = cast(Key, message)
        worker.join()
        if remaining and new and last is None:
            op = remaining.pop(0)
            yield op, [Mutation(str(op), "", f"none: the process ended with {worker.exitcode}", False, "survived")]
            crashing.clear()
        elif new and last is not None:
            crashing.add(last)


def _next(receive: Connection, worker: BaseProcess) -> Any:
    """The next message of the worker; None if it crashed or hangs."""
    if not receive.poll(_PATIENCE_SECONDS):
        worker.kill()
    try:
        return receive.recv()
    except EOFError:
        return None


def _work(targets: Sequence[Any], samples: Samples, crashing: frozenset[Key], send: Connection) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for number, target in enumerate(targets):
        runs = not _torch.is_op(target) or _torch.runs_on_cpu(target)
        cases = cases_of(target, samples(target)) if runs else []
        try:
            send.send(mutate_op(cases, crashing if number == 0 else (), send.send))
        except Exception as error:  # a bug in the check itself must not count as a caught mutation
            send.send([Mutation(str(target), "", f"none: {type(error).__name__}: {error}", False, "survived")])
