"""What ranks measure at the first call: the same on all of them, of each kind of collective."""

import json
import os
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

import wholestep as ws
from tests.dist.launch import run_ranks
from wholestep.distributed.launch import join
from wholestep.hardware.device import MeasuredDevice
from wholestep.hardware.hardware_file import from_json, to_json
from wholestep.profiling.measure_hardware import crowded, measure_hardware


def figures(rank: int, world: int, mesh: str) -> None:
    joined = join(ws.Mesh(mesh), "cpu")
    random = torch.get_rng_state()
    found = measure_hardware(joined)
    assert torch.equal(random, torch.get_rng_state()), "the user's generator is left alone"
    said: list[object] = [None] * world
    dist.all_gather_object(said, asdict(found))
    assert all(one == said[0] for one in said), "ranks schedule alike"
    assert [wire.kind for wire in found.levels[0].costs[:3]] == ["all_reduce", "all_gather", "reduce_scatter"]
    for wire in found.levels[0].costs[:3]:
        assert wire.start_us > 0
        assert wire.byte_us > 0
        assert wire.cpu_us >= 0
        assert wire.host_us > 0
        assert wire.overlap_slowdown >= 1
        assert (wire.reduce_byte_us > 0) == (wire.kind == "reduce_scatter")
    assert isinstance(found.device, MeasuredDevice)
    assert found.device.bucket_copy_bytes_per_us > 0
    assert 0 <= crowded(joined) <= 1
    assert from_json(json.loads(json.dumps(to_json(found)))) == found


def messages(rank: int, world: int, mesh: str) -> None:
    joined = join(ws.Mesh(mesh), "cpu")
    found = measure_hardware(joined, "pp")
    said: list[object] = [None] * world
    dist.all_gather_object(said, asdict(found))
    assert all(one == said[0] for one in said), "ranks order blocks alike"
    (sent,) = (wire for wire in found.levels[0].costs if wire.kind == "send")
    assert sent.host_us > 0
    assert sent.us(1 << 20) >= sent.us(4 << 10) >= 0
    small, large = (
        sent.us(size) + 2 * sent.end_us(size) for size in (4 << 10, 4 << 20)
    )  # what a message needs from one stage to the next
    assert 0 < small < large
    assert found.message_end_us(1 << 20, joined.mesh, "pp") == sent.end_us(1 << 20)
    assert found.ranks_per_core == max(1.0, world / len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "pp=2"), pytest.param(3, "pp=3", marks=pytest.mark.full)])
def test_ranks_measure_messages_between_stages(ranks: int, mesh: str) -> None:
    run_ranks(messages, ranks, mesh)


def test_ranks_measure_the_same() -> None:
    run_ranks(figures, 2, "dp=2")


@pytest.mark.full
def test_ranks_of_two_axes_measure_the_same() -> None:
    run_ranks(figures, 4, "a=2,b=2")
