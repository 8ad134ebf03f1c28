"""Channels between stages where a communicator carries its messages one after the other, as NCCL does."""

import random

import pytest
from torch import float32, nn
from torch.fx import Graph
from torch.optim import AdamW

import wholestep as ws
from tests.device_streams import ends, of_channel, of_group, of_pair
from tests.random_orders import by_stage, equal_stages, random_order, with_blocks
from tests.stage_models import batches, maker, train
from wholestep.backend.rank_binding import bind
from wholestep.cost.stage_orders import NAMED
from wholestep.distributed.channels import disjoint
from wholestep.errors import BackendError, GraphError
from wholestep.graph.deadlock import check_orders
from wholestep.graph.messages import POINT_TO_POINT, SENDS
from wholestep.graph.stage_part import Action, Message, StageBlock
from wholestep.partition.stage_actions import actions_of
from wholestep.partition.stage_program import channels_of, stage_program


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.full)])
def test_random_orders_end_on_devices_with_a_communicator_for_each_channel(count: int) -> None:
    """Also where a device has one queue for all streams, and is idle before each block. With one communicator for both
    directions, or for all channels, many hang: a receive that was started early is in front of the send that it needs.
    """
    draw, hang = random.Random(3), {of_pair: 0, of_group: 0}
    for _ in range(count):
        costs, ranks, pieces, found = random_order(draw)
        blocks, messages = with_blocks(costs)
        orders = actions_of(found.orders, blocks, messages, alone=True)
        check_orders(orders, messages, by_stage(costs, blocks, ranks), pieces, alone=True)
        assert ends(orders, messages, of_channel)
        assert ends(orders, messages, of_channel, one_queue=True, drained=True), orders
        for shared in hang:
            hang[shared] += not ends(orders, messages, shared)
    assert hang[of_group] >= hang[of_pair] > count / 10


@pytest.mark.parametrize("order", NAMED)
def test_orders_for_cpus_end_on_devices_that_run_all_streams_at_once_alone(order: str) -> None:
    """Why devices have orders of their own: both ends receive early what the other one sends after its next block."""
    costs = equal_stages(3, 2 if order == "interleaved" else 1, apart=order == "zero_bubble")
    blocks, messages = with_blocks(costs)
    orders = actions_of(NAMED[order](costs, 8, 3).orders, blocks, messages)
    assert ends(orders, messages)
    assert not ends(orders, messages, of_pair)
    assert not ends(orders, messages, drained=True)
    with pytest.raises(GraphError, match="stages wait for each other"):
        check_orders(orders, messages, by_stage(costs, blocks, 3), 8, alone=True)


@pytest.mark.parametrize("order", ["1f1b", "zero_bubble"])
def test_what_a_forward_reads_comes_while_the_block_before_it_runs(order: str) -> None:
    """In steady state: gradients come later anyway, and no stage holds more of what it receives than on CPUs."""
    costs = equal_stages(4, apart=order == "zero_bubble")
    blocks, messages = with_blocks(costs)
    for stage, actions in enumerate(actions_of(NAMED[order](costs, 16, 4).orders, blocks, messages, alone=True)):
        posted, most, early = dict[tuple[str, int], int](), 0, list[int]()
        runs = [at for at, action in enumerate(actions) if action.kind == "run"]
        for at, action in enumerate(actions):
            if action.kind == "post":
                posted[action.name, action.piece] = at
            elif action.kind == "wait":
                begun = posted.pop((action.name, action.piece))
                if action.name.startswith("activation") and any(begun < run < at for run in runs):
                    early.append(action.piece)
            most = max(most, len(posted))
        assert most <= 2
        assert stage == 0 or early == list(range(1, 16))


def test_a_message_that_needs_the_block_in_front_of_which_it_is_received_is_refused_on_devices() -> None:
    messages = {"a": Message("a", "x", 0, 1, (), float32), "b": Message("b", "y", 1, 0, (), float32)}
    run, last = [Action("run", "f"), Action("send", "a")], [Action("wait", "b"), Action("sent", "a")]
    other = [Action("post", "a"), Action("wait", "a"), Action("run", "g"), Action("send", "b"), Action("sent", "b")]
    blocks = [[StageBlock("f", Graph(), (), ("x",), 0, False)], [StageBlock("g", Graph(), ("a",), ("y",), 1, False)]]
    early, late = [Action("post", "b"), *run, *last], [*run, Action("post", "b"), *last]
    for orders in ([early, other], [late, other]):
        check_orders(orders, messages, blocks, 1)
        assert ends(orders, messages)
    check_orders([late, other], messages, blocks, 1, alone=True)
    assert not ends([early, other], messages, drained=True)
    with pytest.raises(GraphError, match=r"wait for each other: stage 0 at 'run f\[0\]'; stage 1 at 'wait a\[0\]'"):
        check_orders([early, other], messages, blocks, 1, alone=True)


@pytest.mark.parametrize(("channels", "groups"), [
    ([(0, 1), (1, 0)], 2),
    ([(s, t) for s in range(8) for t in (s - 1, s + 1) if 0 <= t < 8], 4),
    ([(s, t % 8) for s in range(8) for t in (s + 7, s + 1)], 4),
    ([(s, t) for s in range(5) for t in range(5) if s != t], 14),
    ([], 0),
])  # fmt: skip
def test_a_stage_has_one_channel_in_each_group(channels: list[tuple[int, int]], groups: int) -> None:
    found = disjoint(reversed(channels))
    assert sorted(pair for one in found for pair in one) == sorted(channels)
    assert all(len({end for pair in one for end in pair}) == 2 * len(one) for one in found)
    assert len(found) <= groups


@pytest.mark.usual("4")
@pytest.mark.parametrize("pieces", [1, 4])
def test_messages_go_through_the_group_of_their_channel(pieces: int) -> None:
    """Those of pieces, and weights and gradients that two stages share."""
    graph = ws.capture(train, *maker(3, True, 0.0)(), *batches(8, 1)[0])
    local = ws.partition(graph, ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=pieces, schedule="1f1b")))
    assert channels_of(local) == {(0, 1), (1, 0)}
    groups = {"pp": "line", "pp 0>1": "down", "pp 1>0": "up"}
    for stage in range(2):
        seen, own = set[str](), ["down", "up"] if stage == 0 else ["up", "down"]  # of what it sends, and receives
        for node in bind(stage_program(local, stage), {"pp": stage}, groups).nodes:
            if node.target in POINT_TO_POINT:
                assert node.args[-1] == own[node.target not in SENDS]
                seen.add(str(node.args[-1]))
        assert seen == {"down", "up"}
        shared = bind(stage_program(local, stage), {"pp": stage}, {"pp": "line"})
        assert {node.args[-1] for node in shared.nodes if node.target in POINT_TO_POINT} <= {"line"}


def test_stages_are_not_recorded() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(BackendError, match="cuda_graphs=True, but stages of a pipeline run op by op"):
        ws.compile(train, parallel=ws.Pipeline(), cuda_graphs=True)(model, AdamW(model.parameters()), {})
