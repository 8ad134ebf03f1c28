"""What happens to a model between steps: the end of a step runs later, and eager calls find gathered parameters.

With a schedule across steps, the last reductions and updates complete in the next call, or when the step is flushed.
Every module of a model that a step has placed gets hooks; its outermost eager call gathers for all modules below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch
from ..backend.protocol import Run
from ..backend.reached import reached, rest_of
from ..capture.call_structure import walk
from ..capture.state import WHOLE
from ..distributed.full_tensors import gather
from ..distributed.rendezvous import Rendezvous
from ..errors import StateError, first_line


class CrossStepRunner:
    """Runs the first call, each later call, and the completion of the last call as three programs. `count` values are
    carried from a call to the next. `lasting` returns the other inputs of `finish`: parameters, state and constants.
    `torn` marks these, with what has left them in the middle of a change. Ranks `settle` a call that raised first.
    """

    def __init__(
        self, first: Run, steady: Run, finish: Run, count: int, lasting: Callable[[], Sequence[Any]],
        torn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._first, self._steady, self._finish = first, steady, finish
        self._count, self._lasting, self._torn = count, lasting, torn
        self._carried: list[Any] = []
        self._rest: Callable[[], None] | None = None
        self.settle: Callable[[], Any] = bool

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Complete the last call, and run this one up to the part that is left to the next."""
        try:
            out = self._steady([*inputs, *self._carried]) if self._carried else self._first(inputs)
        except BaseException as error:
            self._forget_if_changed(error)
            raise
        self._carried = out[len(out) - self._count :]
        _pending.add(self)
        return out[: len(out) - self._count]

    def flush(self) -> None:
        """Complete the last call."""
        if self._carried:
            self.settle()
        if self._carried:
            lasting = self._lasting()
            try:
                self._finish([*lasting, *self._carried]) if self._rest is None else self._rest()
            except BaseException as error:
                self._forget_if_changed(error)
                raise
            self._carried, self._rest = [], None
        _pending.discard(self)

    def _forget_if_changed(self, error: BaseException) -> None:
        """A program that has begun to complete the last call cannot do it once more, but may do the rest of it."""
        if self._carried and not reached(error).changed:
            self._rest = self._rest or rest_of(error)
        elif reached(error).changed:
            self._carried, self._rest = [], None
            _pending.discard(self)
            self._torn(f"the end of the last call raised {type(error).__name__}: {first_line(error)}")


# The steps of this process with a call to complete. Any other use of their model has to find them, and no reference
# leads to them from the model, or from another step that uses it.
_pending = WeakSet[CrossStepRunner]()


def flush_pending(but: object = None) -> None:
    """Complete the last call of every step in this process, except for `but`."""
    if _pending:
        for runner in list(_pending):
            if runner is not but:
                runner.flush()


def flush_before_use(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """From now on pending steps are flushed before an eager update, and before state is read or loaded."""
    for module in modules:
        module.register_state_dict_pre_hook(_flush)
        module.register_load_state_dict_pre_hook(_flush)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(_flush)
        optimizer.register_state_dict_pre_hook(_flush)
        optimizer.register_load_state_dict_pre_hook(_flush)


def _flush(*_: Any, **__: Any) -> None:
    flush_pending()


_Place = tuple[dict[str, Any], str, Tensor]


@dataclass
class EagerGather:
    """Gathers parameters for the calls of one module; those stored elsewhere move to `device`.

    `inside` has the modules that each running call of any module has gathered for, `running` the parameters that each
    running call of this module has replaced: None for a call inside another one.
    """

    path: str
    device: str | None
    timeout_s: float
    inside: list[set[int]]
    running: list[list[_Place] | None] = field(default_factory=list[list[_Place] | None])

    def begin(self, module: nn.Module, args: Any) -> None:
        """Replace sharded parameters by gathered ones, except inside another call or a capture."""
        if torch.compiler.is_compiling() or any(id(module) in module_ids for module_ids in self.inside):
            self.running.append(None)
            return
        put: list[_Place] = []
        self.running.append(put)
        self.inside.append({id(sub) for sub in module.modules()})
        containers = [_torch.parameters_of(sub) for sub in module.modules()]
        slots = [(params, key, tensor) for params in containers for key, tensor in params.items() if tensor is not None]
        cut = [tensor for _, _, tensor in slots if isinstance(tensor, DTensor)]
        if not cut and not _pending and self.device is None:
            return
        name = f"{type(module).__name__} {self.path!r}" if self.path else type(module).__name__
        if cut or _pending:
            Rendezvous.of_job(self.timeout_s).barrier(f"a call of {name} outside of a compiled step")
            flush_pending()
        full = gather(cut)
        if self.device is not None:
            plain, kind = [t for _, _, t in slots if not isinstance(t, DTensor)], torch.device(self.device).type
            full |= {id(t): t.detach().to(self.device) for t in plain if t.device.type != kind}
        full |= {id(t): t.detach() for _, _, t in slots if cut and _needs_grad(t) and id(t) not in full}
        stand_ins = {id(t): _plain(t, full[id(t)], name) for _, _, t in slots if id(t) in full}
        for container, key, tensor in slots:
            if id(tensor) in stand_ins:
                put.append((container, key, tensor))
                container[key] = stand_ins[id(tensor)]

    def end(self, module: nn.Module, args: Any, result: Any) -> None:
        """Put the sharded parameters back, also after a call that failed."""
        put = self.running.pop() if self.running else None
        if put is not None:
            self.inside.pop()
            for container, key, tensor in put:
                container[key] = tensor


def gather_before_eager_call(modules: Mapping[str, nn.Module], timeout_s: float, device: str | None = None) -> None:
    """From now on, on all ranks, these modules and those below them can be called outside of a step, on `device`."""
    inside: list[set[int]] = []
    for path, module in walk(modules):
        hooks = (hook for table in _torch.hook_tables(module) for hook in table.values())
        if not any(isinstance(getattr(hook, "__self__", None), EagerGather) for hook in hooks):
            calls = EagerGather(path, device, timeout_s, inside)
            module.register_forward_pre_hook(calls.begin, prepend=True)
            module.register_forward_hook(calls.end, always_call=True)


def _needs_grad(param: Tensor) -> bool:
    return param.requires_grad and torch.is_grad_enabled()


def _plain(param: Tensor, full: Tensor, name: str) -> nn.Parameter:
    """A parameter in place of `param` during one call. A backward must not reach it: it is gone after the call."""
    parameter = stand_in(param, full, _needs_grad(param), f"a call of {name}")
    if parameter.requires_grad:
        parameter.register_hook(partial(_refuse, name))
    return parameter


def stand_in(param: Tensor, full: Tensor, requires_grad: bool, where: str) -> nn.Parameter:
    """A parameter with the values of `full` that stands in for `param`, with its attributes, inside `where`."""
    parameter = _torch.like(param, full, requires_grad)
    vars(parameter).update({key: value for key, value in vars(param).items() if key not in vars(parameter)})
    _torch.notes_of(parameter)[WHOLE] = where
    return parameter


def _refuse(name: str, grad: Tensor) -> None:
    problem = f"a backward outside of the compiled step reaches parameters of {name}, which were gathered for that call"
    needed = "gradients of a compiled step, which reduces them over ranks"
    instead = "put forward, backward and update into a function for wholestep.compile"
    raise StateError(problem, needed, f"call the model under torch.no_grad(), or {instead}")
