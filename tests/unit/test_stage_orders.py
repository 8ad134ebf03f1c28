"""Orders of the blocks of pipelines: their bubbles by simulation against formulas, and the proof that they end."""

import random
from dataclasses import replace

import pytest
from torch import float32

from tests.random_orders import by_stage, change, equal_stages, hangs, random_order, stages_in_v, with_blocks
from wholestep.cost.block_runs import BlockCost, peaks, simulate_orders
from wholestep.cost.list_schedule import list_schedule
from wholestep.cost.stage_orders import (
    NAMED,
    enough_in_flight,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulated_orders,
    zero_bubble,
)
from wholestep.errors import GraphError
from wholestep.graph.deadlock import check_orders
from wholestep.graph.stage_part import Action, Message
from wholestep.hardware.curves import CollectiveCost, sent_bytes
from wholestep.partition.stage_actions import actions_of


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_bubbles_of_equal_stages_are_the_formulas(ranks: int, pieces: int) -> None:
    plain, apart, twice = equal_stages(ranks), equal_stages(ranks, apart=True), equal_stages(ranks, 2)
    formula = (ranks - 1) / (pieces + ranks - 1)
    assert gpipe(plain, pieces, ranks).bubble == pytest.approx(formula)
    assert one_forward_one_backward(plain, pieces, ranks).bubble == pytest.approx(formula)
    assert interleaved(twice, pieces, ranks).bubble == pytest.approx((ranks - 1) / (2 * pieces + ranks - 1))
    idle = {name: found.us - pieces * 3 for name, found in (
        ("1f1b", one_forward_one_backward(plain, pieces, ranks)), ("zero_bubble", zero_bubble(apart, pieces, ranks)),
    )}  # fmt: skip
    assert idle["zero_bubble"] == pytest.approx(idle["1f1b"] / 3)


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 32), (4, 8), (4, 32)])
def test_gradients_of_weights_that_wait_hold_no_more_than_1f1b(ranks: int, pieces: int) -> None:
    """What a forward holds is let go with the gradients of its weights."""
    draw, last = random.Random(ranks), f"b{ranks - 1}"
    for _ in range(5):  # stages of unlike length: list scheduling may be faster than the order of the paper
        us = {name: draw.uniform(0.5, 2) for name in equal_stages(ranks, apart=True)}
        costs, base = (
            {name: replace(one, us=us[name]) for name, one in equal_stages(ranks, apart=apart).items()}
            for apart in (True, False)
        )
        costs[last] = replace(costs[last], holds_bytes=1)
        most = max(one_forward_one_backward(base, pieces, ranks).peak_bytes)
        assert max(zero_bubble(costs, pieces, ranks).peak_bytes) <= most


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 4), (4, 8), (3, 7)])
def test_auto_is_never_slower_than_the_named_orders_within_the_memory_of_1f1b(ranks: int, pieces: int) -> None:
    draw = random.Random(ranks)
    us = (draw.uniform(1, 2), draw.uniform(1, 2), draw.uniform(1, 2))
    plain, apart = equal_stages(ranks, us=us), equal_stages(ranks, apart=True, us=us)
    tried = simulated_orders(plain, apart, pieces, ranks)
    found = tried[tried.fitting()[0]]
    bound = max(one_forward_one_backward(plain, pieces, ranks).peak_bytes)
    assert max(found.peak_bytes) <= bound
    for other, order in NAMED.items():
        made = order(apart if other == "zero_bubble" else plain, pieces, ranks)
        assert found.us <= made.us or max(made.peak_bytes) > bound
        assert tried[other].us == made.us


def test_auto_may_hold_more_where_the_fullest_stage_does_not() -> None:
    """What gradients of weights wait with on the last stage counts with what that stage holds anyway."""
    plain, apart = (dict(equal_stages(3, apart=some)) for some in (False, True))
    for costs in (plain, apart):
        costs["b2"] = replace(costs["b2"], holds_bytes=4)
    found = simulated_orders(plain, apart, 6, 3)
    assert found.fitting()[0] == "1f1b"
    first = found.fitting([20, 0, 0])[0]
    assert found[first].us <= found["zero_bubble"].us < found["1f1b"].us
    assert found[first].peak_bytes[0] <= found["1f1b"].peak_bytes[0]
    assert found.fitting([0, 0, 20])[0] == "1f1b"


def test_memory_of_1f1b_is_that_of_as_many_pieces_as_stages_follow() -> None:
    plain = equal_stages(4)
    assert one_forward_one_backward(plain, 8, 4).peak_bytes == (4, 3, 2, 1)
    assert gpipe(plain, 8, 4).peak_bytes == (8, 8, 8, 1)


def test_a_list_holds_what_there_is_room_for() -> None:
    """But for the first piece that is not through, which may always go on."""
    apart = equal_stages(4, apart=True)
    free = list_schedule(apart, 16, 4, [16] * 4, forward_first=True)
    assert free.peak_bytes[0] > 5
    assert list_schedule(apart, 16, 4, [16] * 4, forward_first=True, room_bytes=[16] * 4).orders == free.orders
    for room in (1, 2, 5):
        held = list_schedule(apart, 16, 4, [16] * 4, forward_first=True, room_bytes=[room] * 4)
        assert max(held.peak_bytes) == room
        assert (held.us > free.us) == (room < 5)


def test_a_v_takes_less_time_in_the_memory_of_a_chain() -> None:
    """Two ranks, each with half of the model: the second one waits for half a stage, and begins."""
    us = (2.0, 2.0, 2.0)
    chain = simulated_orders(equal_stages(2, us=us), equal_stages(2, apart=True, us=us), 8, 2)
    shape = simulated_orders(stages_in_v(), stages_in_v(apart=True), 8, 2)
    assert [enough_in_flight(equal_stages(4), 4), enough_in_flight(stages_in_v(), 2)] == [[4, 3, 2, 1], [2, 2]]
    first = shape[shape.fitting()[0]]
    assert first.us < chain[chain.fitting()[0]].us
    assert max(first.peak_bytes) <= 2 * max(chain["1f1b"].peak_bytes), "a stage of the chain holds as much as two"


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_changed_orders_that_break_are_caught(count: int) -> None:
    draw = random.Random(7)
    made = [change(draw) for _ in range(count)]
    broken = [said for ends, said in made if not ends]
    assert all(broken)
    assert len(broken) > count / 2, "most changes break something"


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_orders_end_whatever_channels_hold(count: int) -> None:
    draw = random.Random(11)
    assert [found for _ in range(count) if (found := hangs(draw))] == []


def test_random_orders_take_and_hold_what_a_simulation_of_them_says() -> None:
    draw = random.Random(5)
    for _ in range(100):
        costs, ranks, pieces, found = random_order(draw)
        if len(found.spans) == len(costs) * pieces:
            assert found.us == pytest.approx(simulate_orders(costs, pieces, found.orders).us), ranks
            assert found.peak_bytes == peaks(costs, found.orders)


@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
def test_a_stage_keeps_no_more_of_what_it_sent_for_more_pieces(order: str) -> None:
    kept: list[list[int]] = []
    for pieces in (8, 32):
        costs = equal_stages(4, apart=order == "zero_bubble")
        blocks, messages = with_blocks(costs)
        kept.append([])
        for actions in actions_of(NAMED[order](costs, pieces, 4).orders, blocks, messages):
            open_, most = set[tuple[str, int]](), 0
            for action in actions:
                key = (action.name, action.piece)
                open_ = open_ | {key} if action.kind == "send" else open_ - {key} if action.kind == "sent" else open_
                most = max(most, len(open_))
            kept[-1].append(most)
    assert kept[0] == kept[1]


def test_a_hang_is_told_by_stage_and_message() -> None:
    messages = {"a": Message("a", "x", 0, 1, (), float32), "b": Message("b", "y", 1, 0, (), float32)}
    hang = [
        [Action("post", "b"), Action("wait", "b"), Action("send", "a"), Action("sent", "a")],
        [Action("post", "a"), Action("wait", "a"), Action("send", "b"), Action("sent", "b")],
    ]
    with pytest.raises(
        GraphError, match=r"stages wait for each other: stage 0 at 'wait b\[0\]'; stage 1 at 'wait a\[0\]'"
    ):
        check_orders(hang, messages, [[], []], 0)
    with pytest.raises(GraphError, match=r"stage 0 is at 'sent b\[0\]', which it does not send"):
        check_orders([[*hang[0][:2], Action("sent", "b"), *hang[0][2:]], hang[1]], messages, [[], []], 0)
    early = [Action("send", "a"), Action("sent", "a"), Action("post", "b"), Action("wait", "b")]
    other = [Action("send", "b"), Action("sent", "b"), Action("post", "a"), Action("wait", "a")]
    with pytest.raises(GraphError, match=r"stage 0 at 'sent a\[0\]'; stage 1 at 'sent b\[0\]'"):
        check_orders([early, other], messages, [[], []], 0)
    with pytest.raises(GraphError, match=r"stage 1 never receives a\[0\]"):
        check_orders([[Action("send", "a"), Action("sent", "a")], []], messages, [[], []], 0)


def test_a_run_that_is_missing_or_early_is_told_by_stage_and_block() -> None:
    costs = equal_stages(2)
    blocks, messages = with_blocks(costs)
    own, (one, other) = by_stage(costs, blocks, 2), actions_of(NAMED["1f1b"](costs, 1, 2).orders, blocks, messages)
    first, second = Action("run", "f0"), Action("run", "b0")
    with pytest.raises(GraphError, match=r"stage 0 never runs b0\[0\]"):
        check_orders([[a for a in one if a != second], other], messages, own, 1)
    swapped = [{first: second, second: first}.get(a, a) for a in one]
    with pytest.raises(GraphError, match=r"stage 0 has to run b0\[0\] before gradient 1 is there"):
        check_orders([swapped, other], messages, own, 1)
    with pytest.raises(GraphError, match=r"stage 0 has to send activation 1\[0\] before its value is there"):
        check_orders([[one[0], one[2], one[1], *one[3:]], other], messages, own, 1)
    with pytest.raises(GraphError, match=r"stage 0 has to run f0\[0\], which is not its own or done"):
        check_orders([[first, *one], other], messages, own, 1)


@pytest.mark.parametrize("order", NAMED)
def test_orders_of_blocks_that_are_no_chain_end(order: str) -> None:
    """A first stage whose value the last one reads late, and which has a block more for it."""
    costs = {
        "a": BlockCost(0, 1, 0, sends=(("x", 1, 0.0),), holds_bytes=1),
        "b": BlockCost(1, 1, 1, needs=("x",), sends=(("y", 0, 0.0),), holds_bytes=1),
        "c": BlockCost(0, 1, 2, needs=("y",), after=("a",), sends=(("z", 1, 0.0),)),
        "d": BlockCost(1, 1, 3, True, needs=("z",), after=("b",), sends=(("g", 0, 0.0),)),
        "e": BlockCost(0, 1, 4, True, needs=("g",), after=("c",)),
    }
    found = NAMED[order](costs, 4, 2)
    blocks, messages = with_blocks(costs)
    check_orders(actions_of(found.orders, blocks, messages), messages, by_stage(costs, blocks, 2), 4)
    assert sorted(task for tasks in found.orders for task in tasks) == [(n, i) for n in sorted(costs) for i in range(4)]


def test_ranks_that_share_a_core_are_faster_while_others_wait() -> None:
    """Blocks take what they take while all ranks compute: with two ranks on a core, one that is alone is twice as fast.
    No core does more than one rank's work at a time, so a step takes at least what cores need for all blocks.
    """
    for ranks, crowd in ((2, 2.0), (4, 2.0), (4, 4.0), (3, 1.5)):
        for name, build in NAMED.items():
            costs = equal_stages(ranks, apart=name == "zero_bubble")
            alone = build(costs, 6, ranks)
            shared = simulate_orders(costs, 6, alone.orders, crowd=crowd)
            assert shared.orders == alone.orders, name
            least = 6 * sum(cost.us for cost in costs.values()) / ranks
            assert least <= shared.us * (1 + 1e-9), name
            assert shared.us <= alone.us, name
            if crowd == ranks:  # one core, which is never idle
                assert shared.us == pytest.approx(least), name


def test_messages_beyond_a_burst_keep_to_the_rate_of_the_link() -> None:
    cost = CollectiveCost("send", 100.0, 0.001, 10.0, 0.002, 5.0, 0.003, burst_bytes=1000.0, over_byte_us=1.0)
    assert [cost.us(size) for size in (0, 1000, 1500)] == [100.0, 101.0, 601.0]
    assert cost.end_us(1000) == pytest.approx(20.0)
    assert sent_bytes("send", 1000, 2) == 1000, "to one other rank, whole"
