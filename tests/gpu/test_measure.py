"""What a GPU measures of itself predicts the time of its own ops."""

import pytest
import torch

from wholestep.distributed.launch import join
from wholestep.mesh import Mesh
from wholestep.profiling.measure_gpu import measure_gpu
from wholestep.profiling.measure_hardware import measure_hardware

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_rates_are_those_of_a_gpu_and_random_numbers_go_on() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(3)
    rates = measure_gpu("cuda:0")
    torch.testing.assert_close(torch.rand(4, device="cuda"), expected, rtol=0, atol=0)
    bfloat16, _, float32, _ = rates.product
    assert 0 < bfloat16 < float32
    assert bfloat16 <= rates.attention <= rates.attention_backward * 2
    assert 0 < rates.byte < 1e-3 * rates.kernel
    assert 0 < rates.kernel < rates.host


def test_the_hardware_of_a_gpu_is_a_data_sheet() -> None:
    hardware = measure_hardware(join(Mesh("dp=1"), "cuda"))
    assert hardware.device.name == torch.cuda.get_device_name()
    assert hardware.start_us > 0
