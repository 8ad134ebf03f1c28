"""Schedules that take turns: whose turn it is, what is beyond the noise, and when a trial ends. No clock is read."""

from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square
from wholestep.distributed.launch import World
from wholestep.mesh import Mesh
from wholestep.passes.order_collectives import collectives_of
from wholestep.passes.other_schedules import schedules_to_try, sums_of
from wholestep.runtime.compile_options import CompileOptions, StepOptions, not_tuned
from wholestep.runtime.trial import Round, Trial, for_one_batch, merged
from wholestep.runtime.tuner import ScheduleTuning
from wholestep.tuning import TUNING


def rounds(trial: Trial, *found: Round) -> Trial:
    for one in found:
        trial = trial.after(one)
    return trial


CLEAR: Round = {0: (2.0, 2.1), 1: (1.0, 1.1), 2: (3.0, 3.1)}


def test_each_schedule_has_a_turn_in_a_round_and_each_round_begins_with_another() -> None:
    trial = Trial(3)
    assert trial.turns == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    even = dict.fromkeys(range(3), (1.0, 2.0))
    assert trial.after(even).turns == (1, 1, 1, 2, 2, 2, 0, 0, 0)


def test_what_is_slower_beyond_the_noise_is_out_after_two_rounds() -> None:
    once = Trial(3).after(CLEAR)
    assert once.left == (0, 1, 2)  # two times of each say nothing yet
    twice = once.after(CLEAR)
    assert twice.left == (1,)
    assert twice.is_over(calls=20)
    assert twice.fastest == 1


def test_a_machine_that_gets_slower_counts_for_nothing() -> None:
    slower: Round = {number: tuple(10 * one for one in times) for number, times in CLEAR.items()}
    assert rounds(Trial(3), CLEAR, slower).left == (1,)


def test_times_of_batches_of_several_sizes_are_those_of_the_first() -> None:
    """The second rank has the larger batch in the first call, and a call that does not count in the last."""
    rows = [[(1.0, 50.0), (2.5, 200.0), (9.0, 10.0)], [(1.1, 100.0), (2.4, 100.0), None]]
    seconds, usual_us = for_one_batch(rows, 0.0)
    assert usual_us == 100.0
    assert seconds == [[1.0, 1.25, 90.0], [1.1, 1.2, None]]
    again, same = for_one_batch([[(1.0, 50.0)], [(1.0, 25.0)]], usual_us)
    assert (again, same) == ([[2.0], [2.0]], usual_us)


def test_noise_goes_on_until_the_calls_are_used_up() -> None:
    noise: Round = {0: (1.0, 2.0), 1: (2.0, 1.0), 2: (1.5, 1.5)}
    trial, calls = Trial(3), TUNING.calls_before_trial
    while not trial.is_over(calls):
        calls += len(trial.turns)
        trial = trial.after(noise)
    assert trial.left == (0, 1, 2)
    assert calls <= TUNING.trial_calls < calls + len(trial.turns)


def test_schedules_that_were_not_timed_leave_the_first() -> None:
    """Another kind of call may have taken all of its turns."""
    trial = rounds(Trial(2), {0: (2.0, 2.0), 1: ()}, {0: (2.0,), 1: ()})
    assert trial.fastest == 0
    assert trial.left == (0, 1)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_equal_schedules_seldom_lose(number: int) -> None:
    """Over all orders of the four times of two equal schedules in each round."""
    orders = [
        {0: tuple(float(at) for at in mine), 1: tuple(float(at) for at in range(4) if at not in mine)}
        for mine in combinations(range(4), 2)
    ]
    lost = [rounds_of(found).loses(0, 1) for found in product(orders, repeat=number)]
    assert 0 < sum(lost) / len(lost) < 0.03


def rounds_of(found: tuple[Any, ...]) -> Trial:
    return Trial(2, found)


def test_the_least_time_of_the_ranks_counts_and_the_first_call_of_a_turn_does_not() -> None:
    turns = (0, 0, 0, 1, 1, 1)
    late = merged(turns, [[9.0, 2.0, 7.0, 9.0, 4.0, 5.0], [1.0, 3.0, 3.0, 1.0, 4.5, 4.0]])
    assert late == {0: (2.0, 3.0), 1: (4.0, 4.0)}
    other_kind = merged(turns, [[9.0, 2.0, None, 9.0, None, None], [9.0, 3.0, 3.0, 9.0, 4.5, 4.0]])
    assert other_kind == {0: (2.0,), 1: ()}


def local_of(style: str, ranks: int) -> ws.LocalGraph:
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    graph = ws.capture(mean_square, model, optimizer, torch.randn(16, 128))
    return ws.partition(graph, ws.plan(graph, f"dp={ranks}", ws.DataParallel(style)))


def tried(local: ws.LocalGraph) -> list[Any]:
    hardware = ws.Hardware.measured(link_us=1000.0, link_bytes_per_us=500)
    passes = ws.default_passes(hardware)
    found = schedules_to_try(local, passes, hardware, lambda made: ws.peak_memory(made).size_bytes)
    assert found[0].order == tuple(collectives_of(ws.run_passes(local, passes)))
    return found


@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_fewer_and_more_collectives_are_tried_beside_the_first(style: str) -> None:
    first, *others = tried(local_of(style, 2))
    assert 1 <= len(others) <= 2
    counts = [len(one.order) for one in others]
    smallest = min(first.sizes.bucket_bytes, TUNING.smallest_bucket_bytes)
    assert all(one.sizes.bucket_bytes >= smallest for one in others)
    assert len({first.order, *(one.order for one in others)}) == 1 + len(others)
    assert any(count > len(first.order) for count in counts)


@pytest.mark.full
def test_sums_over_more_than_two_ranks_stay_as_they_are() -> None:
    """Where in a sum a gradient is decides in which order gloo adds the ranks."""
    local = local_of("replicate", 4)
    assert sums_of(local)
    assert not sums_of(local_of("replicate", 2))
    assert len(tried(local)) == 1
    exchanged = tried(local_of("fully_shard", 4))  # is added in the order of the ranks, whatever is in a bucket
    assert len(exchanged) > 1


def chosen(true: tuple[float, ...], noise: float, random: Random) -> int:
    """What a trial chooses of schedules that truly take `true`: a tenth of the calls are disturbed, rounds differ."""
    trial, calls = Trial(len(true)), TUNING.calls_before_trial
    while not trial.is_over(calls):
        speed = random.uniform(0.9, 1.2)
        seconds: list[float | None] = []
        for number in trial.turns:
            disturbed = random.uniform(1.2, 2.0) if random.random() < 0.1 else 1.0
            seconds.append(true[number] * speed * disturbed * random.lognormvariate(0, noise))
        calls += len(trial.turns)
        trial = trial.after(merged(trial.turns, [seconds]))
    return trial.fastest


@pytest.mark.parametrize("true", [(1.0, 1.1, 1.2), (1.1, 1.0, 1.2), (1.25, 1.0, 1.1)])
def test_the_fastest_is_found_in_noise(true: tuple[float, ...]) -> None:
    random = Random(1)
    found = [chosen(true, 0.05, random) for _ in range(300)]
    assert found.count(true.index(1.0)) >= 0.95 * len(found)


class Mine:
    """A backend of a user's."""

    name = "mine"
    fused_optimizers, in_place_buffers, splits_steps, times_nodes, recordable = True, True, False, False, False

    def compile(self, *_: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("given", "device", "why"),
    [
        ({}, "cpu", ""),
        ({"tune": "off"}, "cpu", 'tune="off"'),
        ({"schedule": None}, "cpu", "schedule= was given"),
        ({"schedule": ws.Schedule()}, "cpu", "schedule= was given"),
        ({"schedule": "across_steps"}, "cpu", "a schedule across steps leaves collectives to the next call"),
        ({"memory_bytes": "1GiB"}, "cpu", "a budget of memory is fitted to one schedule"),
        ({"parallel": ws.Auto("1GiB")}, "cpu", "a budget of memory is fitted to one schedule"),
        ({"backend": "inductor"}, "cpu", "backend 'inductor' may round otherwise in each"),
        ({"backend": Mine()}, "cpu", "backend 'mine' may round otherwise in each"),
        ({}, "cuda:0", "on GPUs bits of sums depend on buckets, and calls are recorded"),
    ],
)
def test_what_is_not_tuned_says_why(given: dict[str, Any], device: str, why: str) -> None:
    options = StepOptions.of(CompileOptions(**{"tune": "auto", **given}))
    assert not_tuned(options, World(Mesh("dp=2"), 0, device, None, {}, device)) == why
    alone = World(Mesh("dp=1"), 0, device, None, {}, device)
    assert not_tuned(options, alone) == (why if given.get("tune") else "one rank sends nothing")
    assert str(ScheduleTuning(why)) == (f"not tuned: {why}" if why else str(ScheduleTuning()))


def test_a_word_that_is_none_is_named() -> None:
    with pytest.raises(ws.PlanError) as caught:
        ws.compile(mean_square, tune="on")  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert (
        str(caught.value) == "CompileOptions(tune='on')\n  needed: tune of type 'auto' | 'off'\n  next: correct tune="
    )


def test_one_rank_has_nothing_to_tune() -> None:
    step = ws.compile(mean_square, tune="auto")
    assert str(step.tuning) == "not tuned: there was no call"
    model = nn.Linear(4, 4)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4))
    assert str(step.tuning) == "not tuned: one rank sends nothing"
