"""A model of GPUs that run the actions of stages, as torch and NCCL put them on streams. It knows nothing of the proof.

The host of a stage launches all of its actions without waiting. A stream runs what it was given one after the other. A
message begins once the computing stream has done what it was given before, and is over once both ends have begun it:
NCCL buffers nothing that one may count on, and tells messages of a communicator by their order alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from wholestep.graph.stage_part import Action, Message

Pair = tuple[int, int]
StreamOf = Callable[[Pair], Hashable]
"""On both of its stages, the stream of a channel."""


def of_channel(pair: Pair) -> Hashable:
    """A communicator for each channel."""
    return pair


def of_pair(pair: Pair) -> Hashable:
    """One for each pair of ranks, as torch has them in a group that is bound to no device."""
    return frozenset(pair)


def of_group(pair: Pair) -> Hashable:
    """One for all stages, as torch has them in a group that is bound to a device."""
    return "group"


@dataclass
class _Call:
    """What the host has launched. `after`: the calls that it waits for. `message`: its channel, whether this is the end
    that sends, and its number there.
    """

    stream: Hashable
    after: list[_Call]
    is_run: bool = False
    message: tuple[Pair, bool, int] | None = None
    begun: bool = False
    done: bool = False


def _launched(
    stage: int, actions: Sequence[Action], messages: Mapping[str, Message], stream_of: StreamOf
) -> list[_Call]:
    """The calls of one stage, in order."""
    calls, last = list[_Call](), dict[Hashable, _Call]()
    by_key, counts = dict[tuple[str, int], _Call](), dict[tuple[Pair, bool], int]()

    def launch(stream: Hashable, *after: _Call, **about: object) -> _Call:
        before = [last[one] for one in {"compute", stream} if one in last]
        made = _Call(stream, [*before, *after], **about)  # type: ignore[arg-type]
        calls.append(made)
        last[stream] = made
        return made

    for action in actions:
        key = (action.name, action.piece)
        if action.kind in ("send", "post"):
            pair = messages[action.name].source, messages[action.name].target
            end = pair, action.kind == "send"
            counts[end] = counts.get(end, 0) + 1
            by_key[key] = launch(stream_of(pair), message=(*end, counts[end]))
        elif action.kind in ("wait", "sent"):
            launch("compute", by_key[key])
        else:
            launch("compute", is_run=True)
    return calls


def ends(
    orders: Sequence[Sequence[Action]], messages: Mapping[str, Message], stream_of: StreamOf = of_channel,
    *, one_queue: bool = False, drained: bool = False,
) -> bool:  # fmt: skip
    """Whether all stages end. With `one_queue`, a device begins its calls in the order in which the host launched them,
    and one that waits holds up those behind it; with `drained`, it has done all of them before a block runs.
    """
    stages = [_launched(stage, actions, messages, stream_of) for stage, actions in enumerate(orders)]
    begun = set[tuple[Pair, bool, int]]()

    def may_begin(calls: list[_Call], number: int) -> bool:
        call, before = calls[number], calls[:number]
        if not all(one.done for one in call.after):
            return False
        held = one_queue and not all(one.begun for one in before)
        return not held and not (drained and call.is_run and not all(one.done for one in before))

    moved = True
    while moved:
        moved = False
        for calls in stages:
            for number, call in enumerate(calls):
                if not call.begun and may_begin(calls, number):
                    call.begun = moved = True
                    if call.message:
                        begun.add(call.message)
                if call.begun and not call.done:
                    pair, sends, count = call.message or ((0, 0), False, 0)
                    call.done = call.message is None or (pair, not sends, count) in begun
                    moved = moved or call.done
    return all(call.done for calls in stages for call in calls)
