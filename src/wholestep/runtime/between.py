"""Calls of a model between steps: what its parameters are cut into is whole for the time of the call.

Every module of a model that a step has placed gets these hooks; the outermost call gathers for all below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..capture.find import walk
from ..capture.state import WHOLE
from ..errors import StateError
from .agree import meet
from .carry import settle, unfinished
from .pieces import gather

_HOOKED = "_wholestep_gathers"
_Place = tuple[dict[str, Any], str, Tensor]


@dataclass
class Calls:
    """What gathers for the calls of one module.

    `inside` has, for each call that runs of any module, the modules that it has gathered for; `running` has for each
    call of this one what it has replaced, None where an outer call did.
    """

    path: str
    timeout_s: float
    inside: list[set[int]]
    running: list[list[_Place] | None] = field(default_factory=list[list[_Place] | None])

    def begin(self, module: nn.Module, args: Any) -> None:
        """Put whole parameters where cut ones are; nothing to do inside another call, or while a step is captured."""
        if any(id(module) in known for known in self.inside):
            self.running.append(None)
            return
        put: list[_Place] = []
        self.running.append(put)
        self.inside.append({id(sub) for sub in module.modules()})
        found = _parameters_below(module)
        if not found and not unfinished():
            return
        name = f"{type(module).__name__} {self.path!r}" if self.path else type(module).__name__
        meet(f"a call of {name} outside of a compiled step", self.timeout_s)
        settle()
        cut = list({id(tensor): tensor for _, _, tensor in found if isinstance(tensor, DTensor)}.values())
        whole = dict(zip(map(id, cut), gather(cut), strict=True))
        made = {id(t): _plain(t, whole.get(id(t)), name) for _, _, t in found if id(t) in whole or _needs_grad(t)}
        for container, key, tensor in found:
            if id(tensor) in made:
                put.append((container, key, tensor))
                container[key] = made[id(tensor)]

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """Put the parameters themselves back; also after a call that failed."""
        put = self.running.pop() if self.running else None
        if put is not None:
            self.inside.pop()
            for container, key, tensor in put:
                container[key] = tensor


def gather_before_use(modules: Mapping[str, nn.Module], timeout_s: float) -> None:
    """From now on these modules and all below them can be called outside of a step, on all ranks."""
    inside: list[set[int]] = []
    for path, module in walk(modules):
        if _HOOKED not in vars(module):
            calls = Calls(path, timeout_s, inside)
            module.register_forward_pre_hook(calls.begin, prepend=True)
            module.register_forward_hook(calls.end, always_call=True)
            vars(module)[_HOOKED] = True


def _parameters_below(module: nn.Module) -> list[_Place]:
    """Where its parameters are; nothing where none is cut."""
    places: list[_Place] = [
        (container, key, tensor)
        for sub in module.modules()
        for container in (_torch.parameters_of(sub),)
        for key, tensor in container.items()
        if tensor is not None
    ]
    return places if any(isinstance(tensor, DTensor) for _, _, tensor in places) else []


def _needs_grad(param: Tensor) -> bool:
    return param.requires_grad and torch.is_grad_enabled()


def _plain(param: Tensor, whole: Tensor | None, name: str) -> nn.Parameter:
    """A parameter that stands for `param` during one call; a backward may not end in it, as it is gone then."""
    made = nn.Parameter(param.detach() if whole is None else whole, requires_grad=_needs_grad(param))
    vars(made).update({key: value for key, value in vars(param).items() if key not in vars(made)})
    vars(made)[WHOLE] = f"a call of {name}"
    if made.requires_grad:
        made.register_hook(_refuse(name))
    return made


def _refuse(name: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise StateError(
            f"a backward outside of the compiled step reaches parameters of {name}, which ranks hold in parts",
            "gradients of a compiled step, which sums them over ranks",
            "call the model under torch.no_grad(), or put forward, backward and update into a function for "
            "wholestep.compile",
        )

    return refuse
