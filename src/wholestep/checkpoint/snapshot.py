"""The state of a step as named tensors and plain values, and back."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch
from ..capture.call_structure import walk
from ..capture.locations import Location
from ..capture.optimizer_entries import Entry
from ..capture.scheduled_numbers import note
from ..capture.state import StepState, carry
from ..distributed.full_tensors import copy
from ..distributed.launch import job
from ..errors import CheckpointError
from ..runtime import random_state
from ..runtime.failed_call import restored
from ..typed_values import is_a
from .manifest import VALUES, CheckpointTensor, Manifest, SavedOptimizer
from .stateful import extra_states, is_extra_state, read_file

IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Options of a parameter group that select an implementation."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a step now. `options` are those of each optimizer's groups, `values` its state that is not a tensor,
    by parameter ("" for state of the optimizer itself).
    """

    tensors: dict[str, torch.Tensor]
    saved: dict[str, CheckpointTensor]
    optimizers: dict[str, SavedOptimizer]
    options: dict[str, list[dict[str, Any]]]
    values: dict[str, dict[str, dict[Any, Any]]]


def take(state: StepState) -> Snapshot:
    """A snapshot by reference: nothing is copied. Tied parameters appear once."""
    saved: dict[str, CheckpointTensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    owners = {id(vars(module)): path for path, module in walk(state.modules)}
    for role, table in (("param", state.params), ("buffer", state.buffers)):
        for name, step_tensor in table.items():
            holder, key = step_tensor.places[0]
            of_module = (owners[id(holder)], key) if id(holder) in owners else ()
            tensors[name] = step_tensor.tensor.detach()
            saved[name] = CheckpointTensor.of(role, step_tensor.tensor, *of_module)
    values: dict[str, dict[str, dict[Any, Any]]] = {}
    for label, optimizer in state.optimizers.items():
        entries = cast(dict[Any, Any], optimizer.state)
        plain = values[label] = {"": {k: v for k, v in entries.items() if not isinstance(k, torch.Tensor)}}
        for owner, param in state.params.items():
            entry = Entry(entries.get(param.tensor, {}))
            rest = entry.copy(lambda value: None if isinstance(value, torch.Tensor) else value)
            rest = {k: v for k, v in rest.items() if not isinstance(entry.table[k], torch.Tensor)}
            plain |= {owner: rest} if rest else {}
            for key, value in entry.leaves().items():
                if not isinstance(value, torch.Tensor):
                    continue
                name = f"{owner}/{key}" + (f"@{label}" if len(state.optimizers) > 1 else "")
                tensors[name] = value.detach()
                saved[name] = CheckpointTensor.of("state", value, owner, str(key), label)
    options = {n: [options_of(group) for group in o.param_groups] for n, o in state.optimizers.items()}
    names = {id(param.tensor): name for name, param in state.params.items()}
    optimizers = {
        label: SavedOptimizer(type(o).__name__, tuple(tuple(names[id(p)] for p in g["params"]) for g in o.param_groups))
        for label, o in state.optimizers.items()
    }
    return Snapshot(tensors, saved, optimizers, options, values)


def with_attributes(state: StepState, manifest: Manifest) -> StepState:
    """State of modules alone, and the attributes of modules (`self.ema`) that were state of the step that was saved."""
    holders = {path: vars(module) for path, module in walk(state.modules)}
    attributes = {
        name: (held, Location(name, holders[saved.owner], saved.key))
        for name, saved in manifest.tensors.items()
        if saved.role == "buffer" and saved.key and name not in state.buffers
        and isinstance(held := holders.get(saved.owner, {}).get(saved.key), torch.Tensor)
    }  # fmt: skip
    carry(both := replace(state, buffers=dict(state.buffers)), attributes)
    return both


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that are saved."""
    return {key: value for key, value in group.items() if key not in IMPLEMENTATION and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in cast(list[Any], value))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.Tensor))


def read_values(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The plain values of a checkpoint, in the form that `save` writes. Raises CheckpointError for any other."""
    content = read_file(folder, VALUES, manifest)
    if not _are_values(content, manifest):
        text = f"checkpoint {folder} is damaged: {VALUES} holds something else"
        raise CheckpointError(text, "extra, and options and state of the optimizers in the manifest")
    return cast(dict[str, Any], content)


_VALUES: dict[str, Any] = {
    "extra": dict[Any, Any], "options": dict[str, Sequence[dict[Any, Any]]],
    "values": dict[str, dict[Any, dict[Any, Any]]], "scheduled": dict[str, Sequence[str]],
}  # fmt: skip
"""The types of the plain values, by name; all but the first are by optimizer."""


def _are_values(content: Any, manifest: Manifest) -> bool:
    parts = cast(dict[str, Any], content)
    if not isinstance(content, dict) or parts.keys() != _VALUES.keys():
        return False
    if not all(is_a(parts[name], kind) for name, kind in _VALUES.items()):
        return False
    owners = {"", *(name for name, saved in manifest.tensors.items() if saved.role == "param")}
    options, values = parts["options"], parts["values"]
    return all(parts[name].keys() == manifest.optimizers.keys() for name in ("options", "values", "scheduled")) and all(
        len(options[label]) == len(saved.groups)
        and not any(IMPLEMENTATION & group.keys() for group in options[label])
        and values[label].keys() <= owners
        for label, saved in manifest.optimizers.items()
    )


def fingerprint(snapshot: Snapshot) -> str:
    """What is saved, in words: equal on ranks that save the same model."""
    params = [f"{name} {saved}" for name, saved in snapshot.saved.items() if saved.role == "param"]
    return f"{len(params)} parameters with fingerprint {zlib.crc32(repr(params).encode()):08x}"


def buffer_sums(snapshot: Snapshot) -> dict[str, int]:
    """A checksum of each buffer, which ranks compare."""
    return {n: _checksum(snapshot.tensors[n]) for n, saved in snapshot.saved.items() if saved.role == "buffer"}


def add_own(snapshot: Snapshot, rank: int, sums: Mapping[str, int], first: Mapping[str, int]) -> None:
    """Add the state of this rank alone: random state, and buffers that differ from the first rank's."""
    rank_tensors = {f"random/{name}": tensor for name, tensor in random_state.take().items()}
    rank_tensors |= {name: snapshot.tensors.pop(name) for name in sums if sums[name] != first.get(name)}
    for name, tensor in rank_tensors.items():
        snapshot.tensors[f"rank{rank}/{name}"] = tensor
        snapshot.saved[f"rank{rank}/{name}"] = CheckpointTensor.of("rank", tensor)


def _checksum(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return 0
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def pair(saved: Mapping[str, SavedOptimizer], live: Mapping[str, Any]) -> dict[str, str]:
    """The saved name of each live optimizer: the same, or whatever it was called where there is one only."""
    if len(saved) == len(live) == 1:
        return dict(zip(live, saved, strict=True))
    return {name: name for name in live if name in saved}


def differences(manifest: Manifest, state: StepState) -> list[str]:
    """Why a checkpoint cannot be loaded into `state`, line by line; optimizers only when `state` has some."""
    now = take(state)
    lines = list(_different_names(manifest, now.saved))
    extra = {name for name in manifest.stateful if is_extra_state(name)}, extra_states(state.modules).keys()
    lines += [f"{name}: kept by a module in the checkpoint, not here" for name in sorted(extra[0] - extra[1])]
    lines += [f"{name}: kept by a module here, missing in the checkpoint" for name in sorted(extra[1] - extra[0])]
    if not state.optimizers:
        return lines
    pairs = pair(manifest.optimizers, now.optimizers)
    lines += [f"optimizer {n!r} is missing in the checkpoint" for n in now.optimizers if n not in pairs]
    lines += [f"optimizer {n!r} is missing here" for n in manifest.optimizers if n not in pairs.values()]
    for label, theirs in pairs.items():
        before, here = manifest.optimizers[theirs], now.optimizers[label]
        if before.kind != here.kind:
            lines.append(f"optimizer {label!r}: {before.kind} in the checkpoint, {here.kind} here")
        elif before.groups != here.groups:
            counts = " and ".join(str([len(g) for g in groups]) for groups in (before.groups, here.groups))
            lines.append(
                f"optimizer {label!r}: other parameter groups ({counts} parameters in the checkpoint and here)"
            )
    ours = {(s.owner, s.key, pairs.get(s.optimizer)): s for s in now.saved.values() if s.role == "state"}
    for name, saved in manifest.tensors.items():
        here = ours.get((saved.owner, saved.key, saved.optimizer))
        if saved.role == "state" and here and str(saved) != str(here):
            lines.append(f"{name}: {saved} in the checkpoint, {here} here")
    return lines


def _different_names(manifest: Manifest, live: Mapping[str, CheckpointTensor]) -> Iterator[str]:
    roles = ("param", "buffer")
    before = {n: s for n, s in manifest.tensors.items() if s.role in roles}
    here = {n: s for n, s in live.items() if s.role in roles}
    for name in {**here, **before}:
        if name not in before:
            yield f"{name}: {here[name]} here, missing in the checkpoint"
        elif name not in here:
            yield f"{name}: {before[name]} in the checkpoint, missing here"
        elif str(before[name]) != str(here[name]):
            yield f"{name}: {before[name]} in the checkpoint, {here[name]} here"


@dataclass
class Restore:
    """New tensors to read a checkpoint into, laid out as `state` is now; `commit` then changes the live state."""

    manifest: Manifest
    state: StepState
    staged: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def __post_init__(self) -> None:
        self._own = own_names(self.manifest)
        self._pairs = pair(self.manifest.optimizers, self.state.optimizers)
        for name, step_tensor in {**self.state.params, **self.state.buffers}.items():
            self.staged[self._own.get(name, name)] = torch.empty_like(step_tensor.tensor.detach())
        for name, saved, optimizer, param in self._states():
            live = Entry(optimizer.state.get(param, {})).leaves().get(saved.key)
            self.staged[name] = torch.empty_like(live.detach()) if _fits(live, saved) else _new(saved, optimizer, param)

    def _states(self) -> Iterator[tuple[str, CheckpointTensor, Optimizer, torch.Tensor]]:
        theirs = {saved: self.state.optimizers[label] for label, saved in self._pairs.items()}
        for name, saved in self.manifest.tensors.items():
            if saved.role == "state" and saved.optimizer in theirs:
                yield name, saved, theirs[saved.optimizer], self.state.params[saved.owner].tensor

    @torch.no_grad()
    def commit(self, content: Mapping[str, Any], keep_primed: bool) -> None:
        """Copy into the live state what was read, and the values that are no tensors. State that the checkpoint does
        not have goes; `keep_primed` spares that of parameters it has no state of at all.
        """
        for name, step_tensor in {**self.state.params, **self.state.buffers}.items():
            copy(_torch.local_tensor(step_tensor.tensor), _torch.local_tensor(self.staged[self._own.get(name, name)]))
        for label, theirs in self._pairs.items():
            optimizer, values = self.state.optimizers[label], content["values"].get(theirs, {})
            self._drop(optimizer, theirs, values, keep_primed)
            for owner, entry in values.items():
                target = optimizer.state[self.state.params[owner].tensor] if owner else optimizer.state
                target.update(Entry(entry).copy())
            for group, options in zip(optimizer.param_groups, content["options"][theirs], strict=True):
                set_options(group, options)
            note(optimizer, content.get("scheduled", {}).get(theirs, ()))
        for name, saved, optimizer, param in self._states():
            entry = Entry(optimizer.state[param])
            live = entry.leaves().get(saved.key)
            if _fits(live, saved):
                copy(_torch.local_tensor(live), _torch.local_tensor(self.staged[name]))
            else:
                entry[saved.key] = self.staged[name]
        if self.state.optimizers:
            restored(self.state)

    def _drop(self, optimizer: Optimizer, theirs: str, values: Mapping[str, Any], keep_primed: bool) -> None:
        saved_keys: dict[str, set[str]] = {owner: set(entry) for owner, entry in values.items()}
        for saved in self.manifest.tensors.values():
            if saved.role == "state" and saved.optimizer == theirs:
                saved_keys.setdefault(saved.owner, set()).add(saved.key)
        for owner, param in self.state.params.items():
            entry = optimizer.state.get(param.tensor)
            if not entry or (keep_primed and owner not in saved_keys):
                continue
            for key in [key for key in entry if key not in saved_keys.get(owner, ())]:
                del entry[key]
            if not entry:
                del optimizer.state[param.tensor]


def own_names(manifest: Manifest) -> dict[str, str]:
    """Names of this rank's copies of random state and buffers, by plain name; nothing in a job of another size."""
    rank, size = job()
    prefix = f"rank{rank}/"
    names = [n for n, saved in manifest.tensors.items() if saved.role == "rank" and n.startswith(prefix)]
    return {n.removeprefix(prefix): n for n in names} if size == manifest.world_size else {}


def _fits(live: Any, saved: CheckpointTensor) -> TypeGuard[torch.Tensor]:
    return isinstance(live, torch.Tensor) and tuple(live.shape) == saved.shape


def _new(saved: CheckpointTensor, optimizer: Optimizer, param: torch.Tensor) -> torch.Tensor:
    """State that does not exist yet is cut as its parameter is, or whole; counts stay on the CPU, as in torch.optim."""
    dtype = getattr(torch, saved.dtype)
    cut = isinstance(param, DTensor) and not all(placement.is_replicate() for placement in param.placements)
    if cut and saved.shape == tuple(param.shape):
        return torch.empty_like(param.detach(), dtype=dtype)
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    counts = saved.key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.empty(saved.shape, dtype=dtype, device="cpu" if counts else param.device)


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """A number that the live group keeps in a tensor stays in that tensor."""
    for key, value in options.items():
        live = group.get(key)
        if isinstance(live, torch.Tensor):
            live.copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and key in group else value
