"""One call of a step, taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..capture.call_structure import StepCall, Structure
from ..capture.capture import find_state
from ..capture.state import StepState
from .batch_sharding import BatchSharder, BatchSizes


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a call as leaves with names, and the modules and optimizers that the step uses.

    `sharder` makes this rank's part of a batch that ranks share; `sizes` are those of the parts on all ranks, and
    `whole` the shapes of the batch tensors that leaves are parts of, by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    structure: Structure
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    state: StepState
    sharder: BatchSharder | None = None
    sizes: BatchSizes | None = None
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @staticmethod
    def of(
        fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> StepInputs:
        """The inputs of `fn(*args, **kwargs)`; `extra` are modules and optimizers by name that it is not given.

        Raises:
            CaptureError: there is no model and no optimizer.
        """
        state, structure, leaves, names = find_state(fn, args, kwargs, extra)
        return StepInputs(args, kwargs, structure, leaves, tuple(names), state)

    def sharing(self, sharder: BatchSharder | None, sizes: BatchSizes | None) -> StepInputs:
        """The same, of ranks that share the batch."""
        whole = sharder.global_shapes(self.leaves, sizes) if sharder is not None and sizes else {}
        return replace(self, sharder=sharder, sizes=sizes, whole=whole)

    @property
    def call(self) -> StepCall:
        """Leaves and structure."""
        return StepCall(self.structure, self.leaves)
