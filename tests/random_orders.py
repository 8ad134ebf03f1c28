"""Random orders of the blocks of pipelines, run with channels that hold little, and orders in which something is
changed: `python -m tests.random_orders --seed 0 --count 10000 --changed 1000`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import float32
from torch.fx import Graph

from wholestep.cost.block_runs import BlockCost, OrderResult
from wholestep.cost.list_schedule import list_schedule
from wholestep.cost.stage_orders import NAMED, simulated_orders
from wholestep.errors import GraphError
from wholestep.graph.deadlock import check_orders
from wholestep.graph.stage_part import Action, Message, StageBlock
from wholestep.partition.stage_actions import actions_of

Orders = Sequence[Sequence[Action]]
Key = tuple[str, int]


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


def stages_in_v(apart: bool = False) -> dict[str, BlockCost]:
    """Blocks of four equal stages that go forth and back over two ranks: those of the second rank are one block."""
    found = dict[str, BlockCost]()
    for name, block in equal_stages(3, apart=apart).items():
        sends, times = tuple((message, target % 2, us) for message, target, us in block.sends), 1 + block.stage % 2
        found[name] = replace(
            block, stage=block.stage % 2, us=times * block.us, holds_bytes=times * block.holds_bytes, sends=sends
        )
    return found


def with_blocks(costs: Mapping[str, BlockCost]) -> tuple[dict[str, StageBlock], dict[str, Message]]:
    """Blocks and messages of the same graph; a message has the name of its value. A block that runs after another one
    reads a value that this one leaves.
    """
    messages = {
        name: Message(name, f"value of {name}", block.stage, target, (1,), float32)
        for block in costs.values()
        for name, target, _ in block.sends
    }
    blocks = {
        name: StageBlock(
            name, Graph(), (*cost.needs, *(f"kept by {other}" for other in cost.after)),
            (*(f"value of {m}" for m, _, _ in cost.sends), f"kept by {name}"), cost.level, cost.is_backward,
            receives=tuple(messages[m] for m in cost.needs), sends=tuple(messages[m] for m, _, _ in cost.sends),
        )
        for name, cost in costs.items()
    }  # fmt: skip
    return blocks, messages


def by_stage(costs: Mapping[str, BlockCost], blocks: Mapping[str, StageBlock], stages: int) -> list[list[StageBlock]]:
    """The blocks of each stage."""
    return [[blocks[name] for name, cost in costs.items() if cost.stage == stage] for stage in range(stages)]


def runs(
    orders: Orders, messages: Mapping[str, Message], blocks: Sequence[Sequence[StageBlock]], pieces: int, room: int,
    draw: random.Random,
) -> bool:  # fmt: skip
    """Whether stages end in a random interleaving, with room for so many messages in each channel, each block has run
    once for each piece, and all that was read was there: an oracle with the rules of a network, which knows nothing of
    the proof.
    """
    at, channels = [0] * len(orders), dict[tuple[int, int], list[list[Key]]]()
    own = [{block.name: block for block in several} for several in blocks]
    have, ran = [set[Key]() for _ in orders], [list[Key]() for _ in orders]
    made = {name for several in blocks for block in several for name in block.gives}

    def waits(stage: int) -> bool:
        action, key = orders[stage][at[stage]], (orders[stage][at[stage]].name, orders[stage][at[stage]].piece)
        if action.kind == "wait":
            sent, posted = channels.get((messages[action.name].source, stage), [[], []])
            return key not in posted or len(sent) <= posted.index(key) or sent[posted.index(key)] != key
        if action.kind == "sent":
            sent, posted = channels.get((stage, messages[action.name].target), [[], []])
            return key not in sent or sent.index(key) >= len(posted) + room
        return False

    while able := [s for s, actions in enumerate(orders) if at[s] < len(actions) and not waits(s)]:
        stage = draw.choice(able)
        action = orders[stage][at[stage]]
        key = (action.name, action.piece)
        at[stage] += 1
        if action.kind == "run":
            block = own[stage].get(action.name)
            if block is None or any(
                (name, action.piece) not in have[stage] for name in block.takes if name in made or name in messages
            ):
                return False
            ran[stage].append(key)
            have[stage].update((name, action.piece) for name in block.gives)
        elif action.kind == "wait":
            have[stage].add(key)
        elif action.kind in ("send", "post"):
            message = messages[action.name]
            if action.kind == "send" and (message.value, action.piece) not in have[stage]:
                return False
            channels.setdefault((message.source, message.target), [[], []])[action.kind == "post"].append(key)
    return (
        all(at[stage] == len(actions) for stage, actions in enumerate(orders))
        and all(sent == posted for sent, posted in channels.values())
        and all(sorted(ran[s]) == sorted((name, i) for name in own[s] for i in range(pieces)) for s in range(len(own)))
    )


def mutated(orders: Orders, draw: random.Random) -> Orders:
    """Orders with one action gone, twice, or elsewhere: a run, a send, a receive, or a wait."""
    out = [list(actions) for actions in orders]
    actions = draw.choice(out)
    number, kind = draw.randrange(len(actions)), draw.choice(["drop", "repeat", "move", "swap"])
    if kind == "drop":
        del actions[number]
    elif kind == "repeat":
        actions.insert(draw.randrange(len(actions)), actions[number])
    elif kind == "move":
        actions.insert(draw.randrange(len(actions)), actions.pop(number))
    else:
        other = draw.randrange(len(actions))
        actions[number], actions[other] = actions[other], actions[number]
    return out


def refusal(
    orders: Orders, messages: Mapping[str, Message], blocks: Sequence[Sequence[StageBlock]], pieces: int
) -> str:
    """What the proof finds wrong; "" for nothing."""
    try:
        check_orders(orders, messages, blocks, pieces)
    except GraphError as error:
        return error.found
    return ""


def random_order(draw: random.Random) -> tuple[dict[str, BlockCost], int, int, OrderResult]:
    """Blocks, stages, pieces, and an order of them: a named one, the fastest, or a list schedule."""
    ranks, chunks, pieces = draw.randint(2, 5), draw.randint(1, 3), draw.randint(1, 6)
    us = (draw.random(), draw.random(), draw.random())
    apart, name = draw.random() < 0.5, draw.choice([*NAMED, "auto", *["list"] * 4])
    costs = equal_stages(ranks, chunks, apart, us)
    if draw.random() < 0.2:
        costs, ranks = stages_in_v(apart), 2
    if name in NAMED:
        return costs, ranks, pieces, NAMED[name](costs, pieces, ranks)
    if name == "auto":
        tried = simulated_orders(costs, costs, pieces, ranks)
        return costs, ranks, pieces, tried[tried.fitting()[0]]
    limits = [draw.randint(1, pieces) for _ in range(ranks)]
    room = [draw.uniform(0, pieces) for _ in range(ranks)] if draw.random() < 0.5 else None
    return costs, ranks, pieces, list_schedule(costs, pieces, ranks, limits, draw.random() < 0.5, room_bytes=room)


def hangs(draw: random.Random) -> str:
    """What is wrong with a random order: "" unless the proof refuses it, or it does not end."""
    costs, ranks, pieces, found = random_order(draw)
    blocks, messages = with_blocks(costs)
    actions, own = actions_of(found.orders, blocks, messages), by_stage(costs, blocks, ranks)
    said = refusal(actions, messages, own, pieces)
    return said or ("" if runs(actions, messages, own, pieces, draw.randint(0, 3), draw) else f"hangs: {actions}")


def change(draw: random.Random) -> tuple[bool, str]:
    """Whether a random order with a random change still ends by the oracle, in two interleavings without buffers, and
    what the proof says of it.
    """
    costs, ranks, pieces, found = random_order(draw)
    blocks, messages = with_blocks(costs)
    own = by_stage(costs, blocks, ranks)
    changed = mutated(actions_of(found.orders, blocks, messages), draw)
    ends = all(runs(changed, messages, own, pieces, 0, draw) for _ in range(2))
    return ends, refusal(changed, messages, own, pieces)


def main() -> int:
    """1 where a plan hangs, or a change that breaks it is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_orders", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="random orders")
    parser.add_argument("--changed", type=int, default=1000, help="random orders with one change")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    wrong = [found for _ in range(given.count) if (found := hangs(draw))]
    print(f"{given.count} random orders: {len(wrong)} hang")
    made = [change(draw) for _ in range(given.changed)]
    broken = [said for ends, said in made if not ends]
    print(
        f"{len(made)} changed orders: {len(broken)} are broken, of which {sum(map(bool, broken))} are caught;"
        f" {sum(ends and bool(said) for ends, said in made)} of the others are refused"
    )
    for found in wrong[:3]:
        print(found)
    return int(bool(wrong) or not all(broken))


if __name__ == "__main__":
    sys.exit(main())
