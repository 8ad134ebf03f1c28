"""Updates bfloat16 parameters in float32 while a step is traced, and rounds the result up or down at random."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CaptureError
from ..graph.ops import ROUND_AT_RANDOM
from .optimizer_entries import Entry
from .state import SeenState

_COUNT = "step"  # the key of torch.optim for how many updates a parameter has had
_OPTION = "MixedPrecision(stochastic_rounding=True)"


@dataclass
class RoundedUpdates:
    """Hooks around the steps of optimizers. `names` are those of parameters, by the identity of what is traced.

    Before a step, each bfloat16 parameter of a group, with its gradient and its state, is replaced by a float32 copy.
    After it the parameter takes the copy, rounded at random, and bfloat16 state the nearest value.
    """

    names: Mapping[int, str]
    used: bool = False
    _wide: list[tuple[Optimizer, dict[str, Any], int, Tensor, Tensor]] = field(default_factory=list[Any])

    def __enter__(self) -> None: ...

    def __exit__(self, *raised: object) -> None:
        self._restore()  # a step may have failed

    def before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Replace the parameters that the step updates by float32 copies."""
        state = cast(SeenState, optimizer.state)
        for group in optimizer.param_groups:
            for place, param in enumerate(group["params"]):
                if param.dtype is not torch.bfloat16 or param.grad is None:
                    continue
                state.make(param)
                self._check(optimizer, param, state.get(param, {}))
                wide = param.detach().float()
                wide.grad = param.grad.detach().float()
                state[wide] = Entry(state[param]).copy(
                    lambda v: v.float() if isinstance(v, Tensor) and v.dtype is torch.bfloat16 else v
                )
                group["params"][place] = wide
                self._wide.append((optimizer, group, place, param, wide))

    def after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Write the copies back."""
        for _, _, _, param, wide in self._wide:
            state = cast(dict[Tensor, dict[str, Any]], optimizer.state)
            wide_state, narrow_state = state[wide], state[param]
            salt = zlib.crc32(self.names[id(param)].encode()) & 0x7FFFFFFF
            shape = list(param.shape)
            with torch.no_grad():
                param.copy_(ROUND_AT_RANDOM(wide, wide_state[_COUNT], [0] * len(shape), shape, salt))
                narrow = Entry(narrow_state).leaves()
                for key, value in Entry(wide_state).leaves().items():
                    if isinstance(value, Tensor) and value is not narrow.get(key):
                        narrow[key].copy_(value)
            self.used = True
        self._restore()

    def check_used(self) -> None:
        """Raise CaptureError if the step updated no bfloat16 parameter."""
        if not self.used:
            raise CaptureError(
                f"{_OPTION}: the step updates no parameter in bfloat16",
                "parameters in bfloat16, which the optimizer updates",
                "convert the model (model.bfloat16()), or leave out stochastic_rounding=",
            )

    def _restore(self) -> None:
        for optimizer, group, place, param, wide in self._wide:
            group["params"][place] = param
            cast(dict[Tensor, Any], optimizer.state).pop(wide, None)
        self._wide.clear()

    def _check(self, optimizer: Optimizer, param: Tensor, state: Mapping[str, Any]) -> None:
        if not isinstance(state.get(_COUNT), Tensor):
            raise CaptureError(
                f"{_OPTION}: {type(optimizer).__name__} keeps no count of the updates of {self.names[id(param)]!r}",
                f"an optimizer whose state has a tensor {_COUNT!r}, from which random numbers follow, as AdamW's",
                "use another optimizer, or leave out stochastic_rounding=",
            )
