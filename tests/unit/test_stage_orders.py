"""Orders of the blocks of pipelines: their bubbles by simulation against formulas, and the proof that they end."""

import random
from collections.abc import Mapping, Sequence

import pytest
from torch import float32
from torch.fx import Graph

from wholestep.cost.stage_orders import (
    NAMED,
    BlockCost,
    best_order,
    gpipe,
    interleaved,
    list_schedule,
    one_forward_one_backward,
    peaks,
    simulate_orders,
    zero_bubble,
)
from wholestep.errors import GraphError
from wholestep.graph.deadlock import check_orders
from wholestep.graph.stage_part import Action, Message, StageBlock
from wholestep.partition.stage_actions import actions_of

Orders = Sequence[Sequence[Action]]


def equal_stages(
    ranks: int, chunks: int = 1, apart: bool = False, us: tuple[float, float, float] = (1, 1, 1)
) -> dict[str, BlockCost]:
    """Blocks of equal stages: forward, gradients of inputs, gradients of weights, each of so many microseconds. The
    last chunk has its forward and backward in one block.
    """
    forward, inputs, weights = us
    last, blocks = ranks * chunks - 1, dict[str, BlockCost]()
    for chunk in range(last + 1):
        rank, after = chunk % ranks, (f"f{chunk}",) if chunk < last else ()
        needs = (f"activation {chunk}",) if chunk else ()
        gradient = ((f"gradient {chunk}", (chunk - 1) % ranks, 0.0),) if chunk else ()
        split = apart and chunk > 0
        backward = inputs + (0 if split else weights)
        if chunk < last:
            sends = ((f"activation {chunk + 1}", (chunk + 1) % ranks, 0.0),)
            blocks[f"f{chunk}"] = BlockCost(rank, forward, chunk, needs=needs, sends=sends, holds_bytes=1)
            needs = (f"gradient {chunk + 1}",)
        us_here = backward + (forward if chunk == last else 0)
        blocks[f"b{chunk}"] = BlockCost(
            rank, us_here, 2 * last - chunk, True, needs=needs, after=after, sends=gradient,
            work_bytes=chunk == last,
        )  # fmt: skip
        if split:
            blocks[f"w{chunk}"] = BlockCost(rank, weights, 2 * last - chunk, True, True, after=(f"b{chunk}",))
    return blocks


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


@pytest.mark.parametrize(("ranks", "pieces"), [(2, 4), (4, 8), (3, 7)])
def test_auto_is_never_slower_than_the_named_orders_within_the_memory_of_1f1b(ranks: int, pieces: int) -> None:
    draw = random.Random(ranks)
    us = (draw.uniform(1, 2), draw.uniform(1, 2), draw.uniform(1, 2))
    plain, apart = equal_stages(ranks, us=us), equal_stages(ranks, apart=True, us=us)
    name, found, tried = best_order(plain, apart, pieces, ranks)
    bound = max(one_forward_one_backward(plain, pieces, ranks).peak_bytes)
    assert max(found.peak_bytes) <= bound
    for other, order in NAMED.items():
        made = order(apart if other == "zero_bubble" else plain, pieces, ranks)
        assert found.us <= made.us or max(made.peak_bytes) > bound
        assert tried[other] == made.us
    assert tried[name] == found.us


def test_memory_of_1f1b_is_that_of_as_many_pieces_as_stages_follow() -> None:
    plain = equal_stages(4)
    assert one_forward_one_backward(plain, 8, 4).peak_bytes == (4, 3, 2, 1)
    assert gpipe(plain, 8, 4).peak_bytes == (8, 8, 8, 1)


def with_blocks(costs: Mapping[str, BlockCost]) -> tuple[dict[str, StageBlock], dict[str, Message]]:
    """Blocks and messages of the same graph; a message has the name of its value."""
    messages = {
        name: Message(name, f"value of {name}", block.stage, target, (1,), float32)
        for block in costs.values()
        for name, target, _ in block.sends
    }
    blocks = {
        name: StageBlock(
            name, Graph(), cost.needs, tuple(f"value of {m}" for m, _, _ in cost.sends), cost.level, cost.is_backward
        )
        for name, cost in costs.items()
    }
    return blocks, messages


def runs(orders: Orders, messages: Mapping[str, Message], room: int, draw: random.Random) -> bool:
    """Whether stages end, in a random interleaving, with room for so many messages in each channel: an oracle with the
    rules of a network, which knows nothing of the proof.
    """
    at, channels = [0] * len(orders), dict[tuple[int, int], list[list[tuple[str, int]]]]()
    while True:
        able: list[int] = []
        for stage, actions in enumerate(orders):
            if at[stage] == len(actions):
                continue
            action, key = actions[at[stage]], (actions[at[stage]].name, actions[at[stage]].piece)
            if action.kind == "wait":
                message = messages[action.name]
                sent, posted = channels.get((message.source, stage), [[], []])
                if key not in posted or len(sent) <= posted.index(key) or sent[posted.index(key)] != key:
                    continue
            if action.kind == "sent":
                sent, posted = channels.get((stage, messages[action.name].target), [[], []])
                if key not in sent or sent.index(key) >= len(posted) + room:
                    continue
            if action.kind == "complete" and any(
                len(sent) > len(posted) + room for (source, _), (sent, posted) in channels.items() if source == stage
            ):
                continue
            able.append(stage)
        if not able:
            return all(at[stage] == len(actions) for stage, actions in enumerate(orders)) and all(
                sent == posted for sent, posted in channels.values()
            )
        stage = draw.choice(able)
        action = orders[stage][at[stage]]
        at[stage] += 1
        if action.kind in ("send", "post"):
            message = messages[action.name]
            ends = channels.setdefault((message.source, message.target), [[], []])
            ends[action.kind == "post"].append((action.name, action.piece))


def mutated(orders: Orders, draw: random.Random) -> Orders:
    """Orders with one action gone, twice, or elsewhere: a send, a receive, or a wait."""
    out = [list(actions) for actions in orders]
    actions = draw.choice(out)
    numbers = [n for n, action in enumerate(actions) if action.kind != "run"]
    number, kind = draw.choice(numbers), draw.choice(["drop", "repeat", "move", "swap"])
    if kind == "drop":
        del actions[number]
    elif kind == "repeat":
        actions.insert(draw.randrange(len(actions)), actions[number])
    elif kind == "move":
        actions.insert(draw.randrange(len(actions)), actions.pop(number))
    else:
        other = draw.choice(numbers)
        actions[number], actions[other] = actions[other], actions[number]
    return out


def accepts(orders: Orders, messages: Mapping[str, Message]) -> bool:
    try:
        check_orders(orders, messages)
    except GraphError:
        return False
    return True


@pytest.mark.parametrize("count", [1000])
def test_mutated_orders_that_hang_are_caught(count: int) -> None:
    draw, caught = random.Random(7), 0
    cases = [(NAMED[name], ranks, pieces, chunks) for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
             for ranks, pieces in ((2, 2), (3, 3))]  # fmt: skip
    for number in range(count):
        order, ranks, pieces, chunks = cases[number % len(cases)]
        costs = equal_stages(ranks, chunks)
        blocks, messages = with_blocks(costs)
        actions = actions_of(order(costs, pieces, ranks).orders, blocks, messages)
        assert accepts(actions, messages)
        changed = mutated(actions, draw)
        ends = all(runs(changed, messages, 0, draw) for _ in range(2))
        if not ends:
            assert not accepts(changed, messages), f"{changed}"
        caught += not ends
    assert caught > count / 2, "most mutations break something"


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_random_plans_end_whatever_channels_hold(count: int) -> None:
    draw = random.Random(11)
    for _ in range(count):
        ranks, chunks, pieces = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 6)
        us = (draw.random(), draw.random(), draw.random())
        costs = equal_stages(ranks, chunks, draw.random() < 0.5, us)
        limits = [draw.randint(1, pieces) for _ in range(ranks)]
        found = list_schedule(costs, pieces, ranks, limits, draw.random() < 0.5)
        assert found.us == pytest.approx(simulate_orders(costs, pieces, found.orders).us)
        assert found.peak_bytes == peaks(costs, found.orders)
        blocks, messages = with_blocks(costs)
        actions = actions_of(found.orders, blocks, messages)
        check_orders(actions, messages)
        assert runs(actions, messages, draw.randint(0, 3), draw)


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
        [Action("post", "b"), Action("wait", "b"), Action("send", "a"), Action("complete")],
        [Action("post", "a"), Action("wait", "a"), Action("send", "b"), Action("complete")],
    ]
    with pytest.raises(
        GraphError, match=r"stages wait for each other: stage 0 at 'wait b\[0\]'; stage 1 at 'wait a\[0\]'"
    ):
        check_orders(hang, messages)
    with pytest.raises(GraphError, match=r"stage 0 waits until b\[0\] has left, which it does not send"):
        check_orders([[*hang[0][:2], Action("sent", "b"), *hang[0][2:]], hang[1]], messages)
    early = [Action("send", "a"), Action("sent", "a"), Action("post", "b"), Action("wait", "b"), Action("complete")]
    with pytest.raises(GraphError, match=r"stage 0 at 'sent a\[0\]'; stage 1 at 'sent b\[0\]'"):
        other = [Action("send", "b"), Action("sent", "b"), Action("post", "a"), Action("wait", "a"), Action("complete")]
        check_orders([early, other], messages)
    with pytest.raises(GraphError, match=r"stage 1 never receives a\[0\]"):
        check_orders([[Action("send", "a"), Action("complete")], []], messages)


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
    check_orders(actions_of(found.orders, blocks, messages), messages)
    assert sorted(task for tasks in found.orders for task in tasks) == [(n, i) for n in sorted(costs) for i in range(4)]
