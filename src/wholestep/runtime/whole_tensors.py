"""`wholestep.whole`: plain, whole tensors in a model and its optimizer for the time of a block."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..cache.key import digest
from ..capture.call_structure import Modules, Optimizers, by_name
from ..capture.optimizer_entries import Entry
from ..capture.state import StepState, collect, put
from ..distributed.full_tensors import copy, gather, put_piece
from ..distributed.rendezvous import Rendezvous
from ..errors import RankMismatchError, StateError
from .between_steps import flush_pending, stand_in
from .replica_check import checksum

_INSIDE = "`with ws.whole(...)`"


@contextmanager
def whole(
    model: Modules, optimizer: Optimizers | None = None, *, writeback: bool = True, timeout: float = 120.0,
) -> Generator[None]:  # fmt: skip
    """Inside the block, every rank has plain, whole tensors to read and write: for EMA, surgery, export.

    `model.parameters()` are plain `nn.Parameter`s then, `state_dict()` holds plain tensors, and the optimizer's groups
    and state belong to them. They are copies. At the end ranks keep their parts of what was written, the parameters
    of the compiled step are back in place, and the next call uses the new values without another capture. After an
    exception nothing is kept. All ranks must enter and leave the block, and write the same: they compare what they
    leave. Gradients stay outside.

    Args:
        model: a module, or several; whether a step has placed them yet or not.
        optimizer: the optimizers whose state is to be whole too, also in a wrapper (Accelerate's, Lightning's).
        writeback: keep what was written; False drops it, and saves the comparison.
        timeout: seconds to wait for the other ranks.

    Example:
        >>> with ws.whole(model, writeback=False):
        ...     if rank == 0:
        ...         torch.save(model.state_dict(), "model.pt")

    Raises:
        RankMismatchError: a rank did not come within `timeout`, or ranks have written different values; nothing is
            kept then.
        StateError: a block inside another one, or a compiled step inside it; a parameter got another shape or
            dtype; the model is still on `meta`.
    """
    state = collect(by_name("model", model, nn.Module), by_name("optimizer", optimizer, Optimizer), {})
    names = ", ".join(dict.fromkeys(type(module).__name__ for module in state.modules.values()))
    rendezvous = Rendezvous.of_job(timeout)
    rendezvous.barrier(f"`with ws.whole({names})`")
    flush_pending()
    swap = _Swap(state)
    swap.enter()
    try:
        yield
        if writeback:
            rendezvous.barrier(f"the end of `with ws.whole({names})`")
            swap.check(rendezvous)
            swap.keep()
    finally:
        swap.leave()


class _Swap:
    """Replaces all that `state` holds by whole copies, and puts it back."""

    def __init__(self, state: StepState) -> None:
        self.state = state
        self.slots = [*state.params.values(), *state.buffers.values()]
        self.outside = [slot.tensor for slot in self.slots]
        self.entries = [(optimizer, optimizer.state, dict(optimizer.state)) for optimizer in state.optimizers.values()]
        self.inside: list[Tensor] = []

    def enter(self) -> None:
        """Gather, and put the copies everywhere."""
        for name, slot in self.state.params.items():
            if slot.tensor.is_meta:
                raise StateError(f"{name!r} is on 'meta'", "values", "call the step first, or load the model")
        values = [v for _, _, entries in self.entries for entry in entries.values() for _, v in _tensors(entry)]
        tensors = [*self.outside, *values]
        plain = {id(t): t.detach().clone() for t in tensors if not isinstance(t, DTensor)}
        full = gather(tensors, at_home=True) | plain
        for old in self.outside:
            new = full[id(old)]
            is_param = isinstance(old, nn.Parameter)
            self.inside.append(stand_in(old, new, old.requires_grad, _INSIDE) if is_param else new)
        for slot, new in zip(self.slots, self.inside, strict=True):
            put(slot, new)
        stand_ins = {id(old): new for old, new in zip(self.outside, self.inside, strict=True)}
        for optimizer, state, entries in self.entries:
            state.clear()
            for key, entry in entries.items():
                state[stand_ins.get(id(key), key)] = _copied(entry, full) if id(key) in stand_ins else entry
            assert optimizer.state is state, "nobody runs meanwhile"

    def leave(self) -> None:
        """Put back what was there, with what `keep` has written to it."""
        originals = {id(new): old for old, new in zip(self.outside, self.inside, strict=True)}
        for slot, old in zip(self.slots, self.outside, strict=True):
            put(slot, old)
        for optimizer, state, entries in self.entries:
            for group in optimizer.param_groups:
                group["params"][:] = [originals.get(id(p), p) for p in group["params"]]
            state.clear()
            state.update(entries)
            optimizer.state = state

    def check(self, rendezvous: Rendezvous) -> None:
        """Raise StateError where what was written does not fit here, RankMismatchError where it differs elsewhere."""
        failure, sums = self._misfit(), dict[str, int]()
        for name, slot in () if failure else self.state.params.items():  # buffers are each rank's own
            sums[name] = int(checksum(slot.tensor))
            for (optimizer, _, _), label in zip(self.entries, self.state.optimizers, strict=True):
                entry = optimizer.state.get(slot.tensor, {})
                sums |= {f"{label}.state[{name}][{k!r}]": int(checksum(v)) for k, v in _tensors(entry)}
        try:
            _compare(rendezvous, sums, failure.found if failure else "")
        finally:
            if failure:
                raise failure

    def _misfit(self) -> StateError | None:
        names = [*self.state.params, *self.state.buffers]
        for name, slot, old in zip(names, self.slots, self.outside, strict=True):
            now = slot.tensor
            if isinstance(now, DTensor) or _about(now) != _about(old):
                actual = f"a DTensor, {_about(now)}," if isinstance(now, DTensor) else _about(now)
                text = f"{name!r} has become {actual} inside {_INSIDE}"
                needed = f"a plain tensor like the one that was there, {_about(old)}"
                return StateError(text, needed, "change shapes and dtypes before the first call of the step")
        return None

    @torch.no_grad()
    def keep(self) -> None:
        """Write what is inside to what is outside."""
        for slot, old in zip(self.slots, self.outside, strict=True):
            now = slot.tensor
            _write(old, now)
            if isinstance(old, nn.Parameter):
                old.requires_grad_(now.requires_grad)
        for optimizer, _, entries in self.entries:
            for slot, old, new in zip(self.slots, self.outside, self.inside, strict=True):
                entry = optimizer.state.get(slot.tensor, optimizer.state.get(new))
                if entry is not None:
                    entries[old] = _kept_entry(entries.get(old), entry)
                else:
                    entries.pop(old, None)


def _tensors(entry: object) -> list[tuple[Any, Tensor]]:
    items = Entry(cast(dict[Any, Any], entry)).leaves().items() if isinstance(entry, dict) else ()
    return [(key, value) for key, value in items if isinstance(value, Tensor)]


def _copied(entry: Any, full: Mapping[int, Tensor]) -> Any:
    if not isinstance(entry, dict):
        return deepcopy(entry)
    flat = Entry(cast(dict[Any, Any], entry))
    return flat.copy(lambda value: full[id(value)] if id(value) in full else deepcopy(value))


def _write(old: Tensor, now: Tensor) -> None:
    put_piece(old, now.detach()) if isinstance(old, DTensor) else copy(old.detach(), now.detach())


def _kept_entry(old: Any, now: Any) -> Any:
    """The state of one parameter: what is there already keeps its tensors; what is new is cut by the next step."""
    if not isinstance(old, dict) or not isinstance(now, dict):
        return now
    merged, entry = cast(dict[Any, Any], old), {**cast(dict[Any, Any], now)}
    was = Entry({**merged}).leaves()
    merged.clear()
    merged.update(entry)
    flat = Entry(merged)
    for key, value in flat.leaves().items():
        before = was.get(key)
        if isinstance(before, Tensor) and isinstance(value, Tensor) and _about(before) == _about(value):
            _write(before, value)
            flat[key] = before
    return merged


def _compare(rendezvous: Rendezvous, sums: Mapping[str, int], failure: str) -> None:
    """Raise RankMismatchError, on every rank, where another rank has a failure or ranks have different sums by name."""
    here = failure, digest([repr(dict(sums))])
    label = rendezvous.next_label("whole")
    messages: list[tuple[str, str]] = rendezvous.gather(label, here, f"the end of {_INSIDE}", tuple[str, str])
    failures = [(rank, failed) for rank, (failed, _) in enumerate(messages) if failed]
    if failures and not failure:
        rank, failed = failures[0]
        raise RankMismatchError(f"on rank {rank}, {failed}", "the same on all ranks", "nothing was kept")
    other = next((rank for rank, message in enumerate(messages) if message != messages[0]), 0)
    if other and not failures:
        what = f"the end of {_INSIDE}"
        by_rank: list[dict[str, int]] = rendezvous.gather(f"{label}/sums", dict(sums), what, Mapping[str, int])
        first, theirs = by_rank[0], by_rank[other]
        wrong = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if wrong:
            text = f"{wrong[0]} is not the same on ranks 0 and {other} at the end of {_INSIDE}"
            next_step = "write on every rank, not on one; draw random numbers from one seed; nothing was kept"
            raise RankMismatchError(text, "the same values on all ranks, each of which keeps its own part", next_step)


def _about(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
