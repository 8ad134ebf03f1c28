"""`wholestep calibrate` on two gloo ranks and alone: what it writes is a Hardware, and fits what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import wholestep as ws
from tests.dist.launch import run_ranks
from wholestep.cli import app
from wholestep.hardware.curves import KINDS
from wholestep_foresight.calibrate_command import write
from wholestep_foresight.calibration import Measurements, TimedCollective, TimedProduct, TimeSample, fit
from wholestep_foresight.measure_mesh import CalibrationSizes, count_measurements, measure_mesh

TINY = CalibrationSizes(
    (4096, 8192, 16384, 32768, 65536, 131072), ((1, 32, 32, 32), (2, 16, 16, 16)), ("float32",), (65536,), 2
)


def _calibrate(rank: int, world: int, out: str) -> int:
    write("cpu", TINY, "tiny", Path(out))
    said: list[str] = []
    measure_mesh("cpu", TINY, said.append)
    assert len(said) == count_measurements(TINY)
    assert dist.is_initialized()
    return len(said)


def test_two_ranks_measure_and_the_first_one_writes(tmp_path: Path) -> None:
    out = tmp_path / "hardware.json"
    assert len(set(run_ranks(_calibrate, 2, str(out)))) == 1
    found = ws.Hardware.load(out)
    assert found.name == "tiny"
    assert {c.kind for c in found.levels[0].curves} == {
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
    }
    for kind in KINDS:
        assert 0 < found.group_us(kind, 4096, 2) <= found.group_us(kind, 1 << 24, 2)
    assert found.matmul_us(1, 32, 32, 32, "float32") > 0


def test_alone_the_links_are_those_of_loopback(tmp_path: Path) -> None:
    out = tmp_path / "new" / "hardware.json"
    write("cpu", TINY, "alone", out)
    found, loopback = ws.Hardware.load(out), ws.Hardware.preset("loopback")
    assert found.levels == loopback.levels
    assert found.device != loopback.device


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--device", "tpu", "--out", str(tmp_path / "hardware.json")])
    assert done.exit_code == 2
    assert done.stderr == "wholestep calibrate: no device 'tpu'\n  needed: cpu, or cuda with a GPU\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_fit_finds_the_machine_that_made_the_times(nodes: int) -> None:
    h100 = ws.Hardware.preset("dgx-h100+ethernet-10")
    units = [(8, 1)] if nodes == 1 else [(8, 1), (16, 2, 1)]
    levels = (("node", 0),) if nodes == 1 else (("node", 8), ("nodes", 0))
    sent = [
        TimedCollective(
            kind, level, TimeSample(2.0**i, units[level], h100.units_us(kind, 2.0**i, (*units[level], 1)[:3]))
        )
        for level in range(nodes)
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for i in range(12, 29)
    ]
    products = tuple(TimedProduct("float32", 1, n, n, n, 5 + 2 * n**3 / 50e6) for n in (512, 1024, 2048))
    moved = ((1 << 20, 5.0 + 1.0), (1 << 24, 5.0 + 16.0))
    measured = Measurements("made", 1 << 34, 5.0, moved, products, levels, tuple(sent), "nccl")
    found, errors = fit("made", measured, h100.levels)
    assert found.ranks_per_node == (0 if nodes == 1 else 8)
    assert max(one.median for one in errors) < 0.1, errors
    assert found.device.ceiling("float32").flops_per_us == pytest.approx(50e6, rel=1e-6)
    assert found.device.memory_bytes_per_us == pytest.approx((1 << 24) / 16)
    assert replace(found, name="other") != found
