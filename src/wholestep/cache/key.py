"""What a program follows from, as far as it is known before the step is captured: the key that it is kept under."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import _torch
from ..capture.find import Structure, walk
from ..capture.state import Hyper, StepState, baked_numbers, is_zero, optimizer_state
from ..graph.meta import TensorMeta, meta_of, with_shape
from ..layout import Layout
from ..rules.registry import BUILT_IN, RULES
from .origin import own_source
from .values import Values

FORMAT = 2


@dataclass(frozen=True)
class Situation:
    """All that a capture and a plan are made from. `options` are those of the step that shape its program.

    `names` has one for each of `leaves`; `whole` gives shapes of batch tensors that they are parts of.
    """

    fn: Callable[..., Any]
    structure: Structure
    leaves: Sequence[Any]
    names: Sequence[str]
    state: StepState
    device: str
    options: Mapping[str, Any]
    ambient: Sequence[Any]
    placed: Mapping[str, Layout]
    scheduled: Collection[str] = ("lr",)
    whole: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Key:
    """The key of a program. `parts` are fingerprints by what they are of; `values` can take more of them."""

    parts: Mapping[str, str]
    values: Values

    @property
    def text(self) -> str:
        """The name that the program is kept under."""
        return hashlib.sha256(json.dumps(list(self.parts.items())).encode()).hexdigest()[:40]


def key_of(now: Situation) -> Key:
    """The key of the program for a call.

    Raises:
        UnknownValueError: the program may depend on a value that has no fingerprint; names it.
    """
    tensors, modules, optimizers = _held(now.state)
    values = Values({**tensors, **modules, **optimizers}, now.device)
    made: dict[str, str] = {}

    def add(part: str, *found: Any) -> None:
        made[part] = values.digest(part, found[0] if len(found) == 1 else found)

    add("versions", *_versions())
    add("settings of torch", *_settings(now.device))
    for name, option in now.options.items():
        add(f"option {name}", option)
    add("grad mode, autocast, default dtype or the whole batch", *now.ambient)
    add("the structure of the arguments", _structure(now.structure))
    for name, leaf in zip(now.names, now.leaves, strict=True):
        add(f"argument {name}", _leaf(name, leaf, now.whole or {}) if isinstance(leaf, torch.Tensor) else leaf)
    add("the step function", now.fn)
    add("sharding rules of yours", *[(rule.target, rule.body) for rule in RULES.values() if rule.origin != BUILT_IN])
    values.held = {**tensors, **optimizers}
    for name, module in now.state.modules.items():
        add(name or "model", module)
    for name, optimizer in now.state.optimizers.items():
        own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups", "defaults")}
        defaults = {k: v for k, v in optimizer.defaults.items() if k not in now.scheduled}
        hooks = {k: list(v.values()) for k, v in own.items() if k.endswith("_hooks")}
        made[name] = values.class_digest(name, type(optimizer))
        add(f"attributes of {name}", {**own, **hooks}, defaults)
    made |= {f"module {path}": digest for path, digest in values.parts.items()}
    add("parameters and buffers", *_tensors(now.state))
    add("optimizer state", *_states(now.state))
    add("options of the optimizers", *_groups(now.state, now.scheduled))
    add("layouts of what is placed", {name: str(layout) for name, layout in now.placed.items()})
    values.held = {**values.held, **modules}
    return Key(made, values)


def baked(state: StepState, live: Sequence[Hyper], values: Values) -> str:
    """The fingerprint of every option that a capture bakes in, and of whether scheduled numbers are zero."""
    numbers = [(number_of(state, o), g, key, value) for o, g, key, value in baked_numbers(state, live)]
    return Values(values.held, values.device).digest(
        "options", [numbers, [(h.name, is_zero(state, h)) for h in live if h.key != "lr"]]
    )


def number_of(state: StepState, optimizer: torch.optim.Optimizer) -> int:
    """Position of an optimizer."""
    return next(i for i, other in enumerate(state.optimizers.values()) if other is optimizer)


def _held(state: StepState) -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    """Names of what the step holds, by id: tensors, modules, optimizers."""
    tensors = {id(h.tensor): name for name, h in [*state.params.items(), *state.buffers.items()]}
    modules = {id(m): f"module {path}" for path, m in walk(state.modules)}
    return tensors, modules, {id(o): f"optimizer {label}" for label, o in state.optimizers.items()}


def _versions() -> list[Any]:
    return [
        FORMAT, own_source(), sys.version, platform.machine(), str(torch.__version__), torch.version.git_version,
        np.__version__,
    ]  # fmt: skip


def _settings(device: str) -> list[Any]:
    """Switches of torch, and the kind of device, by which it chooses kernels while a step is traced."""
    found: list[Any] = [
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.cpu.get_cpu_capability(), torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled, torch.device(device).type,
    ]  # fmt: skip
    if device.startswith("cuda"):
        found += [torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.version.cuda]
    return found


def _structure(structure: Structure) -> list[Any]:
    opened = [(i, kind, names, _structure(inner)) for i, kind, names, inner in structure.opened]
    return [str(structure.spec), opened]


def _leaf(name: str, leaf: torch.Tensor, whole: Mapping[str, tuple[int, ...]]) -> list[Any]:
    found = meta_of(leaf)
    found = with_shape(found, whole[name]) if name in whole else found
    return ["tensor", *_meta(found), leaf.requires_grad, type(leaf)]


def _meta(found: TensorMeta) -> list[Any]:
    return [found.shape, found.stride, found.dtype, torch.device(found.device)]


def _tensors(state: StepState) -> list[Any]:
    rows: list[Any] = []
    for name, held in [*state.params.items(), *state.buffers.items()]:
        tensor = held.tensor
        rows.append([name, held.input.role, *_meta(held.input.meta), tensor.requires_grad, len(held.places)])
        rows += [tensor.grad is not None, *_torch.tensor_hooks(tensor), *_torch.accumulation_hooks(tensor)]
    return rows


def _states(state: StepState) -> list[Any]:
    rows: list[Any] = [[h.input.name, *_meta(h.input.meta)] for h in optimizer_state(state)]
    for optimizer in state.optimizers.values():
        for name, held in state.params.items():
            entry = optimizer.state.get(held.tensor, {})
            rows += [[name, k, v] for k, v in entry.items() if not isinstance(v, torch.Tensor)]
    return rows


def _groups(state: StepState, scheduled: Collection[str]) -> list[Any]:
    rows: list[Any] = []
    names = {id(h.tensor): name for name, h in state.params.items()}
    for label, optimizer in state.optimizers.items():
        for group in optimizer.param_groups:
            rows.append([label, [names[id(p)] for p in group["params"]]])
            for key, value in group.items():
                if key != "params":
                    rows.append([key, type(value) if key in scheduled else value])
    return rows
