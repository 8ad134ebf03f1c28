"""Eager calls of a model between steps: its sharded parameters are gathered for the time of the call.

Every module of a model that a step has placed gets these hooks; the outermost call gathers for all modules below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..capture.call_structure import walk
from ..capture.state import WHOLE
from ..distributed.full_tensors import gather
from ..distributed.rendezvous import Rendezvous
from ..errors import StateError
from .cross_step_runner import flush_pending, has_pending

_HOOKED = "_wholestep_gathers"
_Place = tuple[dict[str, Any], str, Tensor]


@dataclass
class EagerGather:
    """Gathers parameters for the calls of one module.

    Parameters stored elsewhere move to `device`. `inside` holds, for each running call of any module, the modules it
    has gathered for. `running` holds, for each running call of this module, the parameters it has replaced; None for
    a call inside another one.
    """

    path: str
    device: str | None
    timeout_s: float
    inside: list[set[int]]
    running: list[list[_Place] | None] = field(default_factory=list[list[_Place] | None])

    def begin(self, module: nn.Module, args: Any) -> None:
        """Replace sharded parameters by gathered ones, except inside another call or a capture."""
        if any(id(module) in known for known in self.inside):
            self.running.append(None)
            return
        put: list[_Place] = []
        self.running.append(put)
        self.inside.append({id(sub) for sub in module.modules()})
        found = [place for sub in module.modules() for place in _parameters_of(sub)]
        cut = list({id(tensor): tensor for _, _, tensor in found if isinstance(tensor, DTensor)}.values())
        if not cut and not has_pending() and self.device is None:
            return
        name = f"{type(module).__name__} {self.path!r}" if self.path else type(module).__name__
        if cut or has_pending():
            Rendezvous.of_job(self.timeout_s).barrier(f"a call of {name} outside of a compiled step")
            flush_pending()
        whole = dict(zip(map(id, cut), gather(cut), strict=True))
        if self.device is not None:
            plain = [tensor for _, _, tensor in found if not isinstance(tensor, DTensor)]
            whole |= {id(t): t.detach().to(self.device) for t in plain if _is_elsewhere(t, self.device)}
        whole |= {id(t): t.detach() for _, _, t in found if cut and _needs_grad(t) and id(t) not in whole}
        made = {id(t): _plain(t, whole[id(t)], name) for _, _, t in found if id(t) in whole}
        for container, key, tensor in found:
            if id(tensor) in made:
                put.append((container, key, tensor))
                container[key] = made[id(tensor)]

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """Put the sharded parameters back, also after a call that failed."""
        put = self.running.pop() if self.running else None
        if put is not None:
            self.inside.pop()
            for container, key, tensor in put:
                container[key] = tensor


def gather_before_eager_call(modules: Mapping[str, nn.Module], timeout_s: float, device: str | None = None) -> None:
    """From now on these modules and all below them can be called outside of a step, on all ranks.

    `device` is where they compute, given where parameters are stored elsewhere (`offload`).
    """
    inside: list[set[int]] = []
    for path, module in walk(modules):
        if _HOOKED not in vars(module):
            calls = EagerGather(path, device, timeout_s, inside)
            module.register_forward_pre_hook(calls.begin, prepend=True)
            module.register_forward_hook(calls.end, always_call=True)
            vars(module)[_HOOKED] = True


def _is_elsewhere(tensor: Tensor, device: str) -> bool:
    return tensor.device.type != torch.device(device).type


def _parameters_of(module: nn.Module) -> list[_Place]:
    container = _torch.parameters_of(module)
    return [(container, key, tensor) for key, tensor in container.items() if tensor is not None]


def _needs_grad(param: Tensor) -> bool:
    return param.requires_grad and torch.is_grad_enabled()


def _plain(param: Tensor, whole: Tensor, name: str) -> nn.Parameter:
    """A parameter in place of `param` during one call. A backward must not reach it: it is gone after the call."""
    made = nn.Parameter(whole, requires_grad=_needs_grad(param))
    vars(made).update({key: value for key, value in vars(param).items() if key not in vars(made)})
    vars(made)[WHOLE] = f"a call of {name}"
    if made.requires_grad:
        made.register_hook(_refuse(name))
    return made


def _refuse(name: str) -> Callable[[Tensor], None]:
    def refuse(grad: Tensor) -> None:
        raise StateError(
            f"a backward outside of the compiled step reaches parameters of {name}, which were gathered for that call",
            "gradients of a compiled step, which reduces them over ranks",
            "call the model under torch.no_grad(), or put forward, backward and update into a function for "
            "wholestep.compile",
        )

    return refuse
