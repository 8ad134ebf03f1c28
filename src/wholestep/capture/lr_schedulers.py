"""Learning-rate schedulers inside a step: each call runs them on the host; options that they set are host numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .. import _torch
from ..errors import CaptureError
from .effects import RefusedError
from .host_numbers import Numbers, preserved
from .locations import MISSING, Location, NumberLocation, is_number
from .reachable import Reach
from .state import put_back

_SCHEDULED = ("lr", "momentum", "betas")


class Schedulers:
    """The schedulers of one trace. `needed` are paths of options that must become state of the step.

    `line` returns the user's line.
    """

    def __init__(self, numbers: Numbers, reach: Reach, promoted: frozenset[str], line: Callable[[], str]) -> None:
        self._numbers, self._reach, self._promoted, self._line = numbers, reach, promoted, line
        self._running, self._shown, self.needed = False, set[int](), set[str]()

    def step(self, original: Callable[..., None], scheduler: LRScheduler, *args: Any, **kwargs: Any) -> None:
        """Record a scheduler's step as a host effect; the options that it sets are new numbers afterwards."""
        if self._running:
            return original(scheduler, *args, **kwargs)
        every = _torch.schedulers_of(scheduler)
        self._refuse_metrics(scheduler, every, [*args, *kwargs.values()])
        optimizers = {id(s.optimizer): s.optimizer for s in every if getattr(s, "optimizer", None) is not None}
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        for optimizer in optimizers.values():
            self._flush_groups(optimizer)
        tables = [*groups, *(vars(s) for s in every)]
        called = scheduler, tuple(optimizers.values()), tuple(kwargs), *args, *kwargs.values()
        self._numbers.effect(tables, _run_scheduler, *called)
        after = self._dry_run(scheduler, tables, args, kwargs)
        for optimizer in optimizers.values():
            self._replace_options(optimizer, after)
        for inner in every:
            self.show(inner, after[id(vars(inner))], late=True)
        return None

    def _refuse_metrics(self, scheduler: LRScheduler, every: Sequence[LRScheduler], arguments: Sequence[Any]) -> None:
        if any(isinstance(s, ReduceLROnPlateau) for s in every):
            raise CaptureError(
                "the step calls ReduceLROnPlateau.step, which reads a metric on the host",
                "schedulers that depend on the number of steps only",
                "return the metric and call scheduler.step(metric) after the compiled step",
                self._line(),
            )
        if any(isinstance(v, torch.Tensor) and v not in self._numbers for v in arguments):
            problem = f"the step passes a tensor to {type(scheduler).__name__}.step"
            needed = "a scheduler's step without arguments, or with numbers"
            raise CaptureError(problem, needed, "call it after the compiled step", self._line())

    def _dry_run(
        self, scheduler: LRScheduler, tables: Sequence[dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """Run a scheduler's step, undo it, and return the contents of schedulers and groups after it, by identity."""
        plain = self._numbers.plain
        with preserved(tables), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for table in tables:
                for key, value in list(table.items()):
                    table[key] = type(value)(map(plain, value)) if type(value) in (list, tuple) else plain(value)
            self._running = True
            try:
                scheduler.step(*map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
            finally:
                self._running = False
            return {id(table): dict(table) for table in tables}

    def _flush_groups(self, optimizer: Any) -> None:
        """Write the options that the step has set so far into the groups, where the scheduler reads them."""
        for container in self._reach.groups_of(optimizer):
            for key, _, after in container.changes():
                index, before = self._numbers.index_of(after), container.original.get(key, MISSING)
                path = container.path_of(key)
                if is_number(before) and path not in self._promoted:
                    self.needed |= {path}
                elif index is None and isinstance(after, torch.Tensor):
                    why = "a scheduler, which computes with numbers, steps after the change"
                    raise RefusedError(path, before, after, why, "call the scheduler after the step")
                self._numbers.effect([container.holder], container.place_of(key).set, after)
                container.before = {**container.before, key: after}

    def _replace_options(self, optimizer: Any, tables: Mapping[int, dict[str, Any]]) -> None:
        """Replace the options that a scheduler's step changes by new numbers."""
        for container in self._reach.groups_of(optimizer):
            after = tables[id(container.holder)]
            for key, value in after.items():
                before = self._numbers.plain(container.holder.get(key))
                if key != "lr" and (key not in _SCHEDULED or (type(before) is type(value) and before == value)):
                    continue
                place = container.place_of(key)
                if isinstance(value, tuple):
                    new: Any = tuple(self._items(place, place.path, cast(tuple[Any, ...], value), late=True))
                else:
                    new = self._numbers.read(NumberLocation(place.path, place, None), float(value), late=True)
                container.put(key, new)

    def show(self, scheduler: LRScheduler, values: Mapping[str, Any], late: bool) -> None:
        """Replace numeric attributes of a scheduler by numbers read at this point of the step."""
        attributes, name = vars(scheduler), type(scheduler).__name__
        if id(scheduler) not in self._shown:
            self._shown.add(id(scheduler))
            _torch.undo(put_back, attributes, dict(attributes))
        for key, value in list(values.items()):
            place = Location(f"{name}.{key}", attributes, key)
            if is_number(value):
                attributes[key] = self._numbers.read(place, value, late)
            elif key == "_last_lr" and isinstance(value, list):
                attributes[key] = self._items(place, f"{name}.get_last_lr()", map(float, cast(list[Any], value)), late)

    def _items(self, place: Location, path: str, values: Iterable[Any], late: bool) -> list[torch.Tensor]:
        """Read the numbers of the list or tuple at `place`."""
        numbered = enumerate(values)
        return [self._numbers.read(NumberLocation(f"{path}[{i}]", place, i), value, late) for i, value in numbered]


def _run_scheduler(scheduler: LRScheduler, optimizers: Sequence[Any], names: Sequence[str], *values: Any) -> None:
    """Step a scheduler; mark its optimizers as called, because the compiled program runs their updates."""
    for optimizer in optimizers:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            optimizer._opt_called = True
    count = len(values) - len(names)
    scheduler.step(*values[:count], **dict(zip(names, values[count:], strict=True)))
