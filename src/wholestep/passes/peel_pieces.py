"""Writes out, in the program of a stage, the runs of blocks beside which collectives can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import cast

from torch.fx import Node

from .. import _torch
from ..cost.stage_costs import LeftMemory
from ..graph import meta
from ..graph.graph import LocalGraph
from ..graph.loop import bodies_of
from ..graph.nodes import add_call, copy_node, ends_of, is_collective, is_wait, operands, reached
from ..graph.stage_part import TOTAL, Action, Held, OfPiece, StagePart, part_of
from ..partition.batch_dependent import batch_dependent
from .base import InPlace


@dataclass(frozen=True)
class PeelPieces(InPlace):
    """Writes out the last run of each block that completes gradients which ranks of a stage reduce, and the first run
    of each that reads parameters which they gather: the passes that follow merge and overlap these collectives as in
    a program without pieces. Bitwise the same.

    A block is still compiled once for all other pieces: the program grows by one run of it, whatever their number, and
    by what parts of the stage hand each other.
    """

    def change(self, local: LocalGraph) -> LocalGraph:
        """Write out runs of blocks in `local`."""
        for node in list(local.graph.nodes):
            part = part_of(node)
            if part is not None and part.runs_all:
                peeled = {*_last_runs(local, node, part), *_first_runs(local, node, part)}
                if peeled:
                    _Peel(local, node, part, peeled).run()
        if any(bodies_of(node)[1] for node in local.graph.nodes):
            _start_early(local)
        return local


def _start_early(local: LocalGraph) -> None:
    """Start collectives as soon as what they send is there, as a program without pieces does: what a loop has
    accumulated was waited for where it is first read.
    """
    place = {node: number for number, node in enumerate(local.graph.nodes)}

    def raised(node: Node) -> None:
        reads = node.all_input_nodes
        if len(reads) == 1 and len(reads[0].users) == 1 and len(reads[0].all_input_nodes) == 1 and _moves(reads[0]):
            raised(reads[0])
        last = max(reads, key=place.__getitem__)
        if last.op == "call_function":
            place[node] = place[last]
            last.append(node)

    for node in list(local.graph.nodes):
        if is_collective(node) and _is_shared(local, node):
            raised(node)


def _moves(node: Node) -> bool:
    return node.op == "call_function" and not is_wait(node) and not is_collective(node) and not bodies_of(node)[1]


def _last_runs(local: LocalGraph, node: Node, part: StagePart) -> Iterable[int]:
    """The actions that complete what ranks of the stage reduce."""
    items = {cast(int, item.args[1]): item for item in node.users}
    ends = dict(part.totals)
    reduced = {
        ends[before] for number, (before, _) in enumerate(part.leaving)
        if number in items and _is_exchanged(local, items[number])
    }  # fmt: skip
    blocks = {block.name for block in part.blocks if not reduced.isdisjoint(block.gives)}
    last = {action.name: at for at, action in enumerate(part.actions) if action.kind == "run" and action.name in blocks}
    return last.values()


def _is_exchanged(local: LocalGraph, item: Node) -> bool:
    """True if the first collectives that read a value are of ranks of this stage."""
    readers = reached([item], attrgetter("users"), lambda node: not is_collective(node))
    return any(is_collective(user) and _is_shared(local, user) for node in readers for user in node.users)


def _is_shared(local: LocalGraph, node: Node) -> bool:
    axis = str(node.args[-1])
    return axis != local.stage_axis and local.mesh.axis_size(axis) > 1


def _first_runs(local: LocalGraph, node: Node, part: StagePart) -> list[int]:
    """The actions that are the first to read what ranks of the stage gather."""
    varying, gathered = batch_dependent(local), set[str]()
    for name, operand in zip(part.operands, operands(node), strict=True):
        sources = reached([operand]) if operand not in varying else ()
        gathered |= {name} if any(is_collective(n) and _is_shared(local, n) for n in sources) else set()
    blocks, runs = {block.name: block for block in part.blocks}, list[int]()
    for at, action in enumerate(part.actions):
        if action.kind == "run" and not gathered.isdisjoint(blocks[action.name].takes):
            runs.append(at)
            gathered -= set(blocks[action.name].takes)
    return runs


@dataclass
class _Peel:
    """Replaces `node` by parts and, in between, by the runs of blocks that are actions number `peeled`.

    `reads`, `makes`: values of pieces, by action. `last`: the action that reads each of them last. `values`: what is
    there so far; `held`: the bytes of pieces then.
    """

    local: LocalGraph
    node: Node
    part: StagePart
    peeled: set[int]
    reads: list[list[OfPiece]] = field(default_factory=list[list[OfPiece]])
    makes: list[list[OfPiece]] = field(default_factory=list[list[OfPiece]])
    last: dict[OfPiece, int] = field(default_factory=dict[OfPiece, int])
    values: dict[OfPiece, Node] = field(default_factory=dict[OfPiece, Node])

    def __post_init__(self) -> None:
        self.graph, self.actions, part = self.local.graph, self.part.actions, self.part
        self.blocks = {block.name: block for block in part.blocks}
        self.fixed = dict(zip(part.operands, operands(self.node), strict=True))
        self.befores = {end: before for before, end in part.totals}
        inner = [pair for block in part.blocks for pair in zip(block.takes, block.body.nodes, strict=False)]
        ends = [pair for block in part.blocks for pair in zip(block.gives, ends_of(block.body), strict=True)]
        self.metas = {name: meta.one_tensor(node) for name, node in [*inner, *ends]}
        self.metas |= {before: self.metas[end] for before, end in part.totals}
        sent = [message for message in part.messages.values() if message.source == part.stage]
        self.metas |= {message.name: self.metas[message.value] for message in sent}
        values = dict[object, str]()
        memory = LeftMemory(part.blocks, part.messages)
        viewed = {
            node: s.node.name for several in memory.storages for s in several if s.first < 0 for node in s.members
        }
        self.views = {name: viewed[node] for name, node in ends if node in viewed}
        self.views |= {name: values.setdefault(root, name) for name, root in memory.root.items()}
        self.views |= {message.name: self.views.get(message.value, message.value) for message in sent}
        self.held, there = Held(self.blocks, part.messages), dict[OfPiece, None]()
        for action in self.actions:
            self.reads.append(part.reads(action, there))
            self.makes.append(self._made(action))
            self.last |= dict.fromkeys(self.reads[-1], len(self.reads) - 1)
            for key in self.reads[-1] if action.kind in ("sent", "complete") else ():
                del there[key]
            there |= dict.fromkeys(self.makes[-1])
        ran_last = {action.name: at for at, action in enumerate(self.actions) if action.kind == "run"}
        complete = {end for name, at in ran_last.items() if at in self.peeled for end in self.blocks[name].gives}
        returned = (key for key in part.leaving if dict(part.totals)[key[0]] not in complete)
        self.reads.append([*returned])
        self.last |= dict.fromkeys(self.reads[-1], len(self.actions))

    def _made(self, action: Action) -> list[OfPiece]:
        """The values of pieces, accumulators, and messages under way or received that an action leaves."""
        if action.kind == "run":
            return [key for name in self.blocks[action.name].gives for key in self._keys(name, action.piece)]
        return [(action.name, action.piece)] if action.kind in ("send", "post", "wait") else []

    def _keys(self, name: str, piece: int) -> list[OfPiece]:
        return [(name, piece), *([(self.befores[name], TOTAL)] if name in self.befores else ())]

    def run(self) -> None:
        begin = 0
        with self.graph.inserting_before(self.node):
            for at in sorted(self.peeled):
                self._write_part(begin, at)
                begin = at + 1
                while self.actions[begin].kind in ("send", "post"):
                    begin += 1
                self._write_block(at, begin)
            self._write_part(begin, len(self.actions))
        for item in list(self.node.users):
            end = self.values[self.part.leaving[cast(int, item.args[1])]]
            meta.copy(item, end)
            item.replace_all_uses_with(end)
            self.graph.erase_node(item)
        self.graph.erase_node(self.node)

    def _write_part(self, begin: int, end: int) -> None:
        """Write a part for the actions from `begin` to `end`."""
        actions, entering, computed = self.actions[begin:end], dict[OfPiece, None](), dict[OfPiece, None]()
        most, is_last = 0, end == len(self.actions)
        for at, action in enumerate(actions, begin):
            entering |= dict.fromkeys(key for key in self.reads[at] if key not in computed)
            computed |= dict.fromkeys(self.makes[at])
            held_bytes = self.held.after(action)
            most = max(most, held_bytes if action.kind == "run" else 0)
        for key in self.reads[-1] if is_last else ():
            entering |= {} if key in computed else {key: None}
            computed[key] = None
        leaving = [key for key in computed if self.last.get(key, -1) >= end]
        names = {name for action in actions if action.kind == "run" for name in self.blocks[action.name].takes}
        fixed = tuple(name for name in self.part.operands if name in names)
        args = (*(self.fixed[name] for name in fixed), *(self.values[key] for key in entering))
        target = replace(
            self.part, actions=tuple(actions), operands=fixed, entering=tuple(entering), leaving=tuple(leaving),
            views=self.views,
        )  # fmt: skip
        node = add_call(self.graph, target, args, next(iter(self.metas.values())), self.node, self.node.name)
        meta.set_tensors(node, [self.metas[name] for name, _ in leaving])
        meta.set_kept(node)
        for number, key in enumerate(leaving):
            self.values[key] = self._item(node, number, key[0])
        there = (key for key in self.values if key[1] != TOTAL and self.last.get(key, -1) >= end)
        outside = {(self.views.get(name, name), piece): self.metas[name].size_bytes for name, piece in there}
        outside_bytes = sum(size for (name, _), size in outside.items() if name not in self.fixed)
        node.target = replace(target, peak_bytes=max(0, most - outside_bytes))

    def _item(self, node: Node, number: int, name: str) -> Node:
        item = self.graph.create_node("call_function", _torch.GETITEM, (node, number), name=name)
        meta.copy(node, item)
        meta.set_kept(item, False)
        meta.set_tensors(item, (meta.tensors(node)[number],))
        return item

    def _write_block(self, at: int, end: int) -> None:
        """Write out the run of a block. What it sends leaves as soon as it is there, with the actions up to `end`."""
        action, following = self.actions[at], self.actions[at + 1 : end]
        block, piece = self.blocks[action.name], action.piece
        takes = [self.fixed.get(name) or self.values.get(self.part.key_of(name, piece)) for name in block.takes]
        inside = dict(zip(block.body.nodes, takes, strict=False))
        gives = dict(zip(ends_of(block.body), block.gives, strict=True))
        unsent = {self.part.messages[later.name].value for later in following if later.kind == "send"}
        for node in block.body.nodes:
            if node.op == "call_function":
                copied = inside[node] = copy_node(node, self.graph, cast("Callable[[Node], Node]", inside.__getitem__))
                meta.set_piece(copied, piece)
                meta.set_block(copied, action.name)
                if name := gives.get(node):
                    self.values |= dict.fromkeys(self._keys(name, piece), copied)
                    unsent.discard(name)
                if following and not unsent:
                    self._write_part(at + 1, end)
                    following = ()
        self.held.after(action)
