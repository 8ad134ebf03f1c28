"""Proves that stages which send each other messages end, whatever is buffered, and read only what they have.

Each ordered pair of stages has a channel of its own, which carries its messages one after the other in the order in
which they were started. A message is carried once both ends have started it: no end buffers anything. A stage stops at
a wait alone. So what is possible at one moment stays possible whatever other stages do first: one run that ends proves
that all end, and buffers only let more happen.

A GPU may stop more often: it does nothing beside what it was given before where memory is returned to it and where a
kernel is used for the first time, and it may have one queue for all streams. There a stage stops in front of a block
until all that it has started is carried, and in front of a message until the one before it in its channel is. The same
holds for that run, and to go on beside messages only lets more happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import GraphError
from .stage_part import Action, Message, OfPiece, StageBlock


def check_orders(
    orders: Sequence[Sequence[Action]], messages: Mapping[str, Message], blocks: Sequence[Sequence[StageBlock]],
    pieces: int, alone: bool = False,
) -> None:  # fmt: skip
    """Raise GraphError, naming the stage and the message or block, unless all stages end; every message is sent,
    received and waited for once, in the same order at both ends of its channel; and each stage runs each of its
    `blocks` once for each piece, after all that it reads. With `alone`, stages may do one thing at a time, as GPUs do.
    """
    sent, posted = _started(orders, messages, "send"), _started(orders, messages, "post")
    for channel in {**sent, **posted}:
        sends, posts = sent.get(channel, []), posted.get(channel, [])
        for a, b in zip(sends, posts, strict=False):
            if a != b:
                problem = f"stage {channel[0]} sends {_shown(a)} where stage {channel[1]} receives {_shown(b)}"
                raise GraphError(problem, "one order of messages at both ends")
        if len(sends) != len(posts):
            lone, end = (sends[len(posts)], channel[1]) if len(sends) > len(posts) else (posts[len(sends)], channel[0])
            verb = "receives" if end == channel[1] else "sends"
            raise GraphError(f"stage {end} never {verb} {_shown(lone)}", "both ends of each message")
    _check_waits(orders)
    _run(orders, messages, alone)
    for stage, actions in enumerate(orders):
        _check_runs(stage, actions, messages, {block.name: block for block in blocks[stage]}, pieces)


def _started(
    orders: Sequence[Sequence[Action]], messages: Mapping[str, Message], kind: str
) -> dict[tuple[int, int], list[OfPiece]]:
    """By channel, the messages that one end starts, in order."""
    started: dict[tuple[int, int], list[OfPiece]] = {}
    seen = set[OfPiece]()
    for stage, actions in enumerate(orders):
        for action in actions:
            if action.kind != kind:
                continue
            message = messages.get(action.name)
            at = None if message is None else message.source if kind == "send" else message.target
            if message is None or at != stage or action.key in seen:
                raise GraphError(f"stage {stage} has to {action}, which is not its own or done", "each message once")
            seen.add(action.key)
            started.setdefault((message.source, message.target), []).append(action.key)
    return started


def _check_waits(orders: Sequence[Sequence[Action]]) -> None:
    """Each message is waited for once after it was started, where it is sent and where it is received."""
    for stage, actions in enumerate(orders):
        for start, end, verb in (("post", "wait", "receive"), ("send", "sent", "send")):
            under_way = set[OfPiece]()
            for action in actions:
                if action.kind == start:
                    under_way.add(action.key)
                elif action.kind == end:
                    if action.key not in under_way:
                        problem = f"stage {stage} is at '{action}', which it does not {verb}"
                        raise GraphError(problem, f"{start} before {end}")
                    under_way.remove(action.key)
            if under_way:
                raise GraphError(f"stage {stage} never waits for {_shown(min(under_way))}", "a wait for each message")


def _check_runs(
    stage: int, actions: Sequence[Action], messages: Mapping[str, Message], blocks: Mapping[str, StageBlock],
    pieces: int,
) -> None:  # fmt: skip
    """Each block runs once for each piece, and values are read and sent once they are there."""
    values = {*messages, *(name for block in blocks.values() for name in block.gives)}
    have, pending = set[OfPiece](), {(name, piece) for name in blocks for piece in range(pieces)}
    for action in actions:
        if action.kind == "wait":
            have.add(action.key)
        elif action.kind == "send" and (messages[action.name].value, action.piece) not in have:
            problem = f"stage {stage} has to {action} before its value is there"
            raise GraphError(problem, "each value before its readers")
        elif action.kind == "run":
            if action.key not in pending:
                raise GraphError(f"stage {stage} has to {action}, which is not its own or done", "each run once")
            pending.remove(action.key)
            absent = [name for name in blocks[action.name].takes if name in values and (name, action.piece) not in have]
            if absent:
                problem = f"stage {stage} has to {action} before {absent[0]} is there"
                raise GraphError(problem, "each value before its readers")
            have.update((name, action.piece) for name in blocks[action.name].gives)
    if pending:
        raise GraphError(f"stage {stage} never runs {_shown(min(pending))}", "each block for each piece")


def _run(orders: Sequence[Sequence[Action]], messages: Mapping[str, Message], alone: bool) -> None:
    """Run all stages as far as they get."""
    at = [0] * len(orders)
    heads: dict[tuple[int, int], tuple[list[OfPiece], list[OfPiece]]] = {}
    ended, started = set[OfPiece](), [set[OfPiece]() for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(orders):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                if action.kind in ("wait", "sent") and action.key not in ended:
                    break
                if alone and action.kind == "run":
                    if not started[stage] <= ended:
                        break
                    started[stage].clear()
                if action.kind in ("send", "post"):
                    message = messages[action.name]
                    end = heads.setdefault((message.source, message.target), ([], []))[action.kind == "post"]
                    if alone and end:
                        break
                    end.append(action.key)
                    started[stage].add(action.key)
                at[stage] += 1
                moved = True
        for begun, expected in heads.values():
            carried = min(len(begun), len(expected))
            ended.update(begun[:carried])
            moved = moved or carried > 0
            del begun[:carried], expected[:carried]
    stuck = [stage for stage, actions in enumerate(orders) if at[stage] < len(actions)]
    if stuck:
        waits = "; ".join(f"stage {stage} at '{orders[stage][at[stage]]}'" for stage in stuck)
        raise GraphError(f"stages wait for each other: {waits}", "orders that end")


def _shown(key: OfPiece) -> str:
    return f"{key[0]}[{key[1]}]"
