"""Stages with the groups and the orders that devices get, on gloo ranks against one process, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.stage_models import batches, maker, train
from wholestep import _torch
from wholestep.distributed import channels
from wholestep.partition import stage_blocks

TOLERANCE = 1e-10


def _always(device: str) -> bool:
    return True


def _apart(
    rank: int, world: int, mesh: str, order: str, tied: bool
) -> tuple[float, dict[str, str], set[tuple[str, int]]]:
    """How far two steps are from one process; the group of each channel, and which groups sent to which stage. All
    messages have one tag, as NCCL knows none.
    """
    torch.set_default_dtype(torch.float64)
    sent, start_send, start_receive = set[tuple[str, int]](), _torch.start_send, _torch.start_receive

    def sending(value: Tensor, target: int, tag: int, group: str) -> Any:
        sent.add((group, target))
        return start_send(value, target, 0, group)

    def receiving(out: Tensor, source: int, tag: int, group: str) -> Any:
        return start_receive(out, source, 0, group)

    _torch.start_send, _torch.start_receive = sending, receiving  # the process ends with the test
    channels.APART, stage_blocks.is_alone = ("gloo",), _always
    torch.manual_seed(0)
    model, optimizer = maker(3, tied, 0.0)()
    expected = [train(model, optimizer, *batch) for batch in batches(8, 2)]
    expected += [p.detach() for p in model.parameters()]
    torch.manual_seed(0)
    model, optimizer = maker(3, tied, 0.0)()
    parallel: list[Any] = [ws.Pipeline(micro_batches=4, schedule=order)]  # type: ignore[arg-type]
    if "dp" in mesh:
        parallel.append(ws.DataParallel("zero1", axis="dp", semantics="global"))
    step = ws.compile(train, parallel=parallel, mesh=mesh)
    found = [step(model, optimizer, *batch) for batch in batches(8, 2)]
    with ws.whole(model, writeback=False):
        found += [p.detach().clone() for p in model.parameters()]
    worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    assert step.world is not None
    links = {key: name for key, name in step.world.groups.items() if ">" in key}
    return worst, links, sent


@pytest.mark.parametrize(("mesh", "order", "tied"), [
    ("pp=2", "1f1b", True),
    pytest.param("pp=2", "interleaved", False, marks=pytest.mark.full),
    pytest.param("pp=2", "gpipe", True, marks=pytest.mark.full),
    pytest.param("pp=2", "zero_bubble", True, marks=pytest.mark.full),
    pytest.param("dp=2,pp=2", "1f1b", True, marks=pytest.mark.full),
])  # fmt: skip
def test_each_direction_has_a_group(mesh: str, order: str, tied: bool) -> None:
    ranks = run_ranks(_apart, 4 if "dp" in mesh else 2, mesh, order, tied)
    for worst, links, sent in ranks:
        assert worst < TOLERANCE
        assert list(links) == ["pp 0>1", "pp 1>0"]
        assert len(set(links.values())) == 2
        assert len(sent) == 1, "each rank sends in one direction"
        assert sent < {(links["pp 0>1"], 1), (links["pp 1>0"], 0)}
