"""The parts of a plan: the decision about each operation, options that are not layouts, the estimates of `Auto`."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.text import seconds
from ..layout import Layout


@dataclass(frozen=True)
class Decision:
    """The layouts of the operands (in order, lists flattened) and results of one node, and what decided them.

    `why`: the rule's origin, or the reason why no rule was used. `reshards_to`: the layout to which the result is
    resharded at once, for all readers. `because`, `moves`: the reasons, and the operands (by name) that are resharded
    for this node and how, to display. `reads`: names of the operands. `gradient_of`: the parameter, if the node marks
    its complete gradient.
    """

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    why: str
    reshards_to: Layout | None = None
    because: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()
    gradient_of: str = ""

    @property
    def given(self) -> tuple[Layout, ...]:
        """The output layouts that readers of the node see."""
        return self.outputs if self.reshards_to is None else (self.reshards_to,)


@dataclass(frozen=True)
class Options:
    """Choices of a plan that are not layouts.

    `keep_gathered_bytes` bounds the gathered parameters that are kept from forward to backward; parameters beyond it
    are re-gathered (0: all, None: none). `regathered` names further ones. `reduce_dtype` is the dtype of gradient
    reductions, None for the dtype of the gradient. `reduces_each_piece`: with micro-batches, the gradient of each
    piece is reduced over ranks and accumulates as a shard; else it accumulates whole and is reduced once.
    `order`: of the blocks of stages, as `Pipeline.schedule`. `regathered_along`: axes along which activations are
    re-gathered for the backward. `balanced`: calls of causal attention for which ranks exchange queries. `host_reads`:
    the host counts rows that are sent to experts.
    """

    keep_gathered_bytes: int | None = None
    reduce_dtype: str | None = None
    broadcast_buffers: bool = False
    regathered: tuple[str, ...] = ()
    reduces_each_piece: bool = False
    order: str = ""
    regathered_along: tuple[str, ...] = ()
    balanced: tuple[str, ...] = ()
    host_reads: bool = True


@dataclass(frozen=True)
class Saving:
    """How a plan that `Auto` chose saves memory: long products in `tiles` of rows; what layers save on the host, from
    where it comes back `ahead` layers before its use (0: on the device).
    """

    tiles: int = 1
    ahead: int = 0

    def __str__(self) -> str:
        parts = [f", {self.tiles} tiles of rows"] * (self.tiles > 1) + [", saved values on the host"] * bool(self.ahead)
        return "".join(parts)


NO_SAVING = Saving()


@dataclass(frozen=True)
class Objective:
    """The estimates by which `Auto` chose a plan.

    `batch_s`: simulated seconds for each captured batch. `bound_s`: a lower bound for all schedules of all plans that
    were considered. `peak_bytes`: peak memory of a rank, within `budget_bytes`. `rematerialized`: names of the values
    that are, for that, as is `saving`. Where an integer program chose the layouts, `model_s` is the shortest step by
    its cost model, and `model_bound_s` its proven lower bound.
    """

    batch_s: float
    bound_s: float
    peak_bytes: int
    budget_bytes: int | None = None
    rematerialized: tuple[str, ...] = ()
    saving: Saving = NO_SAVING
    model_s: float = 0.0
    model_bound_s: float = 0.0

    @property
    def gap(self) -> float:
        """The part of `batch_s` above the bound; 0 if nothing could be faster."""
        return 1 - self.bound_s / self.batch_s if self.batch_s else 0.0

    def __str__(self) -> str:
        batch, bound = seconds(self.batch_s), seconds(self.bound_s)
        return f"{batch} for a batch by simulation, at least {bound}, gap {self.gap:.1%}{self.saving}"
