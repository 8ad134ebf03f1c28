"""Rates that a GPU measures become a device: what each op then takes. The measurement itself is in tests/gpu."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import wholestep as ws
from tests.steps import mean_square as train
from wholestep.hardware.device import Work
from wholestep.profiling.measure_gpu import GpuRates

# microseconds an operation: 800 TFLOP/s in bfloat16, attention at 1/2 and 1/4 of it, 4 TB/s, 2 us a kernel, 5 an op
RATES = GpuRates((1.25e-9, 1.25e-9, 2e-8, 4e-8), 2.5e-9, 5e-9, 2.5e-7, 2.0, 5.0)


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> ws.Hardware:
    about = SimpleNamespace(name="A GPU", total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    return replace(ws.Hardware.measured(), device=RATES.device("cuda:0"))


def test_rates_survive_the_exchange_among_ranks() -> None:
    assert GpuRates.of(RATES.flat()) == RATES


def test_products_take_the_rate_of_their_dtype(hardware: ws.Hardware) -> None:
    side = 8192
    us = {d: hardware.device.matmul_us(1, side, side, side, d) for d in ("bfloat16", "float32", "float64")}
    rate = {"bfloat16": 1.25e-9, "float32": 2e-8, "float64": 4e-8}
    assert us == pytest.approx({name: 2 * side**3 * per_operation for name, per_operation in rate.items()})


def test_attention_bytes_and_launches(hardware: ws.Hardware) -> None:
    shape, flops = (4, 16, 4096, 4096, 64), 4.0 * 4 * 16 * 4096 * 4096 * 64
    forward = hardware.work_us(Work(8, flops, "bfloat16", attention=shape))
    assert forward == pytest.approx(2 + flops * 2.5e-9)
    backward = hardware.work_us(Work(8, 2.5 * flops, "bfloat16", attention=shape, backward=True))
    assert backward == pytest.approx(2 + 2.5 * flops * 5e-9)
    assert hardware.work_us(Work(4e6)) == pytest.approx(2 + 1)


def test_the_host_needs_its_time_for_each_kernel(hardware: ws.Hardware) -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.empty(4, 8)
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), x)
    local = ws.partition(graph, ws.plan(graph, "dp=1", ws.DataParallel("replicate")))
    found = ws.simulate(local, hardware)
    kernels, rest = divmod(found.host_us, 5.0)
    assert rest == 0
    assert kernels >= 8  # a linear, its activation and loss, their backwards, two updates
    assert found.step_us >= 2.0 * kernels
    on_host = ws.simulate(local, ws.Hardware.measured(flops_per_us=1000, memory_bytes_per_us=1000, launch_us=1))
    assert on_host.host_us == 0
