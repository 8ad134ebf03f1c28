"""From orders of blocks to the actions of stages: when what is sent and received starts, and is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost.block_runs import Orders, Task
from ..graph.stage_part import Action, Message, StageBlock


def actions_of(
    orders: Orders, blocks: Mapping[str, StageBlock], messages: Mapping[str, Message], alone: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each stage. A send starts as soon as its value exists. What a block reads is received from when
    the block before it begins, in the order in which the other end sends, and is waited for in front of the block.
    With `alone`, orders end on stages that may do one thing at a time (`check_orders`).
    """
    exchanged = _Exchanged(orders, blocks, messages)
    actions = _Alone(exchanged).actions() if alone else [_actions(stage, exchanged) for stage in range(len(orders))]
    return _replied(actions, messages)


@dataclass(frozen=True)
class _Exchanged:
    """What stages run and send each other. `channels`: by both ends, the messages in the order in which they are sent;
    `sent_by`: those of each task.
    """

    orders: Orders
    blocks: Mapping[str, StageBlock]
    messages: Mapping[str, Message]
    channels: dict[tuple[int, int], list[Task]] = field(default_factory=dict[tuple[int, int], list[Task]])
    sent_by: dict[Task, list[Task]] = field(default_factory=dict[Task, list[Task]])

    def __post_init__(self) -> None:
        for stage, tasks in enumerate(self.orders):
            for task in tasks:
                self.sent_by[task] = [(message.name, task[1]) for message in self.blocks[task[0]].sends]
                for message in self.blocks[task[0]].sends:
                    self.channels.setdefault((stage, message.target), []).append((message.name, task[1]))

    def read_by(self, task: Task) -> list[Task]:
        """The messages that a task reads."""
        return [(message.name, task[1]) for message in self.blocks[task[0]].receives]


def _replied(by_stage: Sequence[Sequence[Action]], messages: Mapping[str, Message]) -> tuple[tuple[Action, ...], ...]:
    """Actions where a stage lets go of a message once it has an answer: one that the other end sent after it had waited
    for that message; of others at its end. Links tell of nothing that has left unless asked, and to ask earlier
    might block.
    """
    waited: dict[int, list[Task]] = {}
    answers: dict[Task, list[Task]] = {}
    for actions in by_stage:
        for action in actions:
            if action.kind == "wait":
                waited.setdefault(messages[action.name].source, []).append(action.key)
            elif action.kind == "send":
                answers[action.key] = waited.pop(messages[action.name].target, [])
        waited.clear()
    replied: list[tuple[Action, ...]] = []
    for actions in by_stage:
        answered = ((a, answers.get(a.key, ()) if a.kind == "wait" else ()) for a in actions)
        listed = [action for first, keys in answered for action in (first, *(Action("sent", *key) for key in keys))]
        left = {action.key for action in listed if action.kind == "sent"}
        sent = [action.key for action in listed if action.kind == "send"]
        replied.append((*listed, *(Action("sent", *key) for key in sent if key not in left)))
    return tuple(replied)


def _actions(stage: int, exchanged: _Exchanged) -> tuple[Action, ...]:
    """The actions of one stage."""
    coming = {source: iter(keys) for (source, target), keys in exchanged.channels.items() if target == stage}
    tasks, posted, waited, actions = exchanged.orders[stage], set[Task](), set[Task](), list[Action]()
    for number, task in enumerate(tasks):
        for key in (key for reader in tasks[number : number + 2] for key in exchanged.read_by(reader)):
            while key not in posted:  # and what the other end sends before that
                other = next(coming[exchanged.messages[key[0]].source])
                posted.add(other)
                actions.append(Action("post", *other))
        reads = [key for key in exchanged.read_by(task) if key not in waited]
        waited.update(reads)
        actions += [*(Action("wait", *key) for key in reads), Action("run", *task)]
        actions += [Action("send", *key) for key in exchanged.sent_by[task]]
    return tuple(actions)


class _Alone:
    """Writes the actions of all stages by running them one thing at a time: in front of a block all that its stage has
    started is carried. A message is received from in front of the block before its reader if it can be sent without
    that block, else behind it. Of two blocks each of which could let the other's message come early, the forward runs
    first, and what it sends is early: a backward takes longer, and its gradient comes later. A message that nobody
    would receive before its sender has to go on is received at once.
    """

    def __init__(self, exchanged: _Exchanged) -> None:
        self.exchanged, self.orders, self.channels = exchanged, exchanged.orders, exchanged.channels
        self.place = {key: (pair, at) for pair, keys in self.channels.items() for at, key in enumerate(keys)}
        self.sent, self.posted = dict.fromkeys(self.channels, 0), dict.fromkeys(self.channels, 0)
        self.at, self.waited = [0] * len(self.orders), set[Task]()
        self.sending: list[list[Task]] = [[] for _ in self.orders]
        self.by_stage: list[list[Action]] = [[] for _ in self.orders]
        self.out = [[pair for pair in self.channels if pair[0] == stage] for stage in range(len(self.orders))]
        self.read = {task: [key for key in exchanged.read_by(task) if key in self.place] for task in exchanged.sent_by}

    def actions(self) -> list[list[Action]]:
        stages, blocks = range(len(self.orders)), self.exchanged.blocks
        while True:
            moved = [self._go_on(stage) for stage in stages]
            if any(moved):
                continue
            able = [stage for stage in stages if self._may_run(stage, ahead=False)]
            pending = (pair for pair in self.channels if self.posted[pair] < self.sent[pair])
            if able:
                self._run(min(able, key=lambda stage: blocks[self.orders[stage][self.at[stage]][0]].is_backward))
            elif (pair := next(pending, None)) is not None:
                self._post(pair)
            else:
                return self.by_stage

    def _go_on(self, stage: int) -> bool:
        """Send, receive and run what needs no choice. False for nothing."""
        before = len(self.by_stage[stage])
        while self._send(stage) or self._receive(stage) or (self._may_run(stage, ahead=True) and self._run(stage)):
            pass
        return len(self.by_stage[stage]) > before

    def _send(self, stage: int) -> bool:
        """Start the next send of a stage, if the message before it in its channel is carried."""
        if not self.sending[stage] or not self._is_idle(pair := self.place[self.sending[stage][0]][0]):
            return False
        self.by_stage[stage].append(Action("send", *self.sending[stage].pop(0)))
        self.sent[pair] += 1
        return True

    def _receive(self, stage: int) -> bool:
        """Receive what was sent and the next two blocks read."""
        for task in self.orders[stage][self.at[stage] : self.at[stage] + 2]:
            for pair, at in map(self.place.__getitem__, self.read[task]):
                if self.posted[pair] <= at < self.sent[pair]:
                    self._post(pair)
                    return True
        return False

    def _post(self, pair: tuple[int, int]) -> None:
        self.by_stage[pair[1]].append(Action("post", *self.channels[pair][self.posted[pair]]))
        self.posted[pair] += 1

    def _is_idle(self, pair: tuple[int, int]) -> bool:
        return self.posted[pair] == self.sent[pair]

    def _may_run(self, stage: int, ahead: bool) -> bool:
        """True if the next block of a stage has all that it reads, and with `ahead` the one behind it, too."""
        tasks = self.orders[stage][self.at[stage] : self.at[stage] + 1 + ahead]
        places = (self.place[key] for task in tasks for key in self.read[task])
        is_free = bool(tasks) and not self.sending[stage] and all(map(self._is_idle, self.out[stage]))
        return is_free and all(self.posted[pair] > at for pair, at in places)

    def _run(self, stage: int) -> bool:
        task = self.orders[stage][self.at[stage]]
        for key in self.read[task]:
            if key not in self.waited:
                self.waited.add(key)
                self.by_stage[stage].append(Action("wait", *key))
        self.by_stage[stage].append(Action("run", *task))
        self.sending[stage] = list(self.exchanged.sent_by[task])
        self.at[stage] += 1
        return True
