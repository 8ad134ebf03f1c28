"""From orders of blocks to the actions of stages: when what is sent and received starts, and is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cost.stage_orders import Orders, Task
from ..graph.stage_part import Action, Message, StageBlock


def actions_of(
    orders: Orders, blocks: Mapping[str, StageBlock], messages: Mapping[str, Message]
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each stage. A send starts as soon as its value exists. What a block reads is received from when
    the block before it begins, in the order in which the other end sends, and is waited for in front of the block.
    """
    by_value: dict[tuple[int, str], list[Message]] = {}
    for message in messages.values():
        by_value.setdefault((message.source, message.value), []).append(message)
    channels: dict[tuple[int, int], list[Task]] = {}
    sent_by: dict[Task, list[Task]] = {}
    for stage, tasks in enumerate(orders):
        for task in tasks:
            sent_by[task] = []
            for value in blocks[task[0]].gives:
                for message in by_value.get((stage, value), ()):
                    sent_by[task].append((message.name, task[1]))
                    channels.setdefault((stage, message.target), []).append((message.name, task[1]))
    made = [_Stage(stage, orders, blocks, messages, channels, sent_by).actions() for stage in range(len(orders))]
    return _with_replies(made, messages)


def _with_replies(made: Sequence[Sequence[Action]], messages: Mapping[str, Message]) -> tuple[tuple[Action, ...], ...]:
    """`made`, where a stage lets go of a message once it has an answer: one that the other end sent after it had waited
    for that message. Links tell of nothing that has left unless they are asked, and to ask earlier might block.
    """
    waited: dict[int, list[Task]] = {}
    answers: dict[Task, list[Task]] = {}
    for actions in made:
        for action in actions:
            key = (action.name, action.piece)
            if action.kind == "wait":
                waited.setdefault(messages[action.name].source, []).append(key)
            elif action.kind == "send":
                answers[key] = waited.pop(messages[action.name].target, [])
        waited.clear()
    found: list[tuple[Action, ...]] = []
    for actions in made:
        several = [[one, *(Action("sent", *key) for key in _answered(one, answers))] for one in actions]
        found.append(tuple(action for some in several for action in some))
    return tuple(found)


def _answered(action: Action, answers: Mapping[Task, Sequence[Task]]) -> Sequence[Task]:
    return answers.get((action.name, action.piece), ()) if action.kind == "wait" else ()


class _Stage:
    """Writes the actions of one stage. `channels`: by both ends, the messages in the order in which they are sent;
    `sent_by`: those of each task.
    """

    def __init__(
        self,
        stage: int,
        orders: Orders,
        blocks: Mapping[str, StageBlock],
        messages: Mapping[str, Message],
        channels: Mapping[tuple[int, int], list[Task]],
        sent_by: Mapping[Task, list[Task]],
    ) -> None:
        self.stage, self.tasks, self.blocks, self.messages = stage, orders[stage], blocks, messages
        self.coming = {source: iter(keys) for (source, target), keys in channels.items() if target == stage}
        self.sent_by = sent_by
        self.posted, self.waited = set[Task](), set[Task]()
        self.made: list[Action] = []

    def actions(self) -> tuple[Action, ...]:
        for number, task in enumerate(self.tasks):
            self._post(task)
            if number + 1 < len(self.tasks):
                self._post(self.tasks[number + 1])
            for key in self._read(task):
                if key not in self.waited:
                    self.waited.add(key)
                    self.made.append(Action("wait", *key))
            self.made.append(Action("run", *task))
            self.made += [Action("send", *key) for key in self.sent_by[task]]
        return (*self.made, Action("complete"))

    def _read(self, task: Task) -> list[Task]:
        return [(name, task[1]) for name in self.blocks[task[0]].takes if name in self.messages]

    def _post(self, task: Task) -> None:
        """Start to receive what a task reads, and what the other end sends before that."""
        for key in self._read(task):
            while key not in self.posted:
                other = next(self.coming[self.messages[key[0]].source])
                self.posted.add(other)
                self.made.append(Action("post", *other))
