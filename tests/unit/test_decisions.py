"""Decisions of ranks, with threads as ranks: whose proposal is taken, who makes one, and how long it holds."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

import wholestep as ws
from tests.unit.test_rendezvous import on_ranks
from wholestep.distributed.rendezvous import Rendezvous
from wholestep.passes.context import Choice, Fitting
from wholestep.passes.fit_memory import FITTING, FITTING_OF_STAGE
from wholestep.passes.order_collectives import ORDER
from wholestep.runtime.decisions import Decisions

MESH = ws.Mesh("dp=2,pp=2")
SHARED: Choice[tuple[int, ...]] = Choice(
    "shared",
    "which numbers it has",
    tuple[int, ...],
    lambda first, of_all: tuple(sorted({*first}.intersection(*of_all))),
)


def decisions(ranks: Rendezvous) -> Decisions:
    world = SimpleNamespace(mesh=MESH, coordinate=MESH.coordinate(ranks.rank))
    return Decisions(cast(Any, world), ranks, lambda: "step/1")


def of_stage(rank: int) -> Any:
    return SimpleNamespace(stage_axis="pp", stage=MESH.coordinate(rank)["pp"])


def test_only_the_first_rank_proposes_and_the_decision_is_kept_for_its_key() -> None:
    def act(ranks: Rendezvous) -> Any:
        decided, proposals = decisions(ranks), list[str]()

        def propose() -> tuple[str, ...]:
            proposals.append(f"of {ranks.rank}")
            return tuple(proposals)

        answers = [decided.decide(ORDER, "a program", propose) for _ in range(3)]
        assert decided.has(ORDER, "a program")
        assert not decided.has(ORDER, "another")
        decided.forget(lambda key: key != "a program")
        assert not decided.has(ORDER, "a program")
        return answers, proposals

    first, *others = on_ranks(act, 4)
    assert first == ([("of 0",)] * 3, ["of 0"])
    assert others == [([("of 0",)] * 3, [])] * 3


def test_what_is_forgotten_is_decided_again() -> None:
    def act(ranks: Rendezvous) -> Any:
        decided = decisions(ranks)
        first = decided.decide(ORDER, "a program", lambda: ("as before",))
        decided.forget(lambda key: False)
        decided.label = lambda: "step/2"
        return first, decided.decide(ORDER, "a program", lambda: ("as now",))

    assert on_ranks(act, 2) == [(("as before",), ("as now",))] * 2


def test_proposals_of_all_ranks_are_combined() -> None:
    numbers = [(3, 1, 2), (2, 3), (4, 3, 2), (2, 3, 5)]
    assert on_ranks(lambda ranks: decisions(ranks).decide(SHARED, "", lambda: numbers[ranks.rank]), 4) == [(2, 3)] * 4


def test_a_stage_has_what_its_first_rank_proposes() -> None:
    """Ranks 0 and 2 run the first stage, 1 and 3 the second one."""

    def act(ranks: Rendezvous) -> Any:
        decided, about = decisions(ranks), of_stage(ranks.rank)
        order = decided.decide(ORDER, "", lambda: (f"of {ranks.rank}",), about)
        fitting = Fitting(ranks.rank, (f"kept by {ranks.rank}",))
        return order, decided.decide(FITTING_OF_STAGE, "", lambda: fitting, about)

    stages = [(("of 0",), Fitting(3, ("kept by 0",))), (("of 1",), Fitting(3, ("kept by 1",)))]
    assert on_ranks(act, 4) == stages * 2


def test_what_the_first_rank_refuses_is_refused_on_all() -> None:
    def act(ranks: Rendezvous) -> str:
        def refuse() -> Fitting:
            raise ws.PlanError(f"rank {ranks.rank} finds nothing that fits", "a larger budget")

        with pytest.raises(ws.PlanError) as refused:
            decisions(ranks).decide(FITTING, "", refuse)
        return refused.value.found

    assert on_ranks(act, 3) == ["rank 0 finds nothing that fits"] * 3
