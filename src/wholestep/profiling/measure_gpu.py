"""How fast one GPU computes, measured in a fraction of a second: products by dtype, attention, memory, launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..hardware.device import Ceiling, Device

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SIDE, _STREAMED_BYTES = 4096, 64 << 20  # fills every processor; larger than caches
_BATCH, _HEADS, _LENGTH, _WIDTH = 4, 16, 4096, 64  # a backward takes longer than the host needs to start it
_RUNS, _KERNELS, _CALLS, _TIMES = 4, 200, 300, 3


@dataclass(frozen=True)
class GpuRates:
    """Microseconds: of an operation of a product by dtype, of attention forward and backward, of a byte read or
    written, of a kernel however small, and of the host for one op.
    """

    product: tuple[float, ...]
    attention: float
    attention_backward: float
    byte: float
    kernel: float
    host: float

    def flat(self) -> list[float]:
        """All of them in a row."""
        rest = self.attention, self.attention_backward, self.byte, self.kernel, self.host
        return [*self.product, *rest]

    @staticmethod
    def of(flat: list[float]) -> GpuRates:
        """The opposite of `flat`."""
        return GpuRates(tuple(flat[: len(_DTYPES)]), *flat[len(_DTYPES) :])

    def device(self, device: str) -> Device:
        """As the device of a `Hardware`. What is measured is reached: shares of peaks are 1."""
        about = cast(Any, torch.cuda).get_device_properties(device)
        half = self.product[0]
        ceilings = tuple(
            Ceiling(
                str(dtype).removeprefix("torch."), 1 / us, attention=half / self.attention,
                attention_backward=half / self.attention_backward,
            )
            if dtype.itemsize == 2 else Ceiling(str(dtype).removeprefix("torch."), 1 / us)
            for dtype, us in zip(_DTYPES, self.product, strict=True)
        )  # fmt: skip
        return Device(
            about.name, about.total_memory, 1 / self.byte, ceilings, memory_rate=1.0, launch_us=self.kernel,
            host_us=self.host, processors=about.multi_processor_count,
        )  # fmt: skip


def measure_gpu(device: str) -> GpuRates:
    """The rates of the current process on `device`. Random streams stay as they are."""
    with torch.random.fork_rng([torch.device(device)]), torch.no_grad():
        product = tuple(_product(dtype, device) for dtype in _DTYPES)
        forward, backward = _attention(device)
        return GpuRates(product, forward, backward, _byte(device), _kernel(device), _host(device))


def _product(dtype: torch.dtype, device: str) -> float:
    """As float32 is set to be multiplied (`torch.set_float32_matmul_precision`)."""
    side = _SIDE if dtype.itemsize <= 4 else _SIDE // 2
    factor, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))  # zeros are multiplied faster
    product = torch.empty_like(factor)
    return _us(lambda: torch.mm(factor, other, out=product)) / (2.0 * side**3)


def _attention(device: str) -> tuple[float, float]:
    """Microseconds of an operation that a causal mask leaves, in bfloat16."""
    shape = _BATCH, _HEADS, _LENGTH, _WIDTH
    q, k, v = [torch.randn(shape, device=device).bfloat16() for _ in range(3)]
    flops = 0.5 * 4.0 * _BATCH * _HEADS * _LENGTH**2 * _WIDTH
    forward_us = _us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    inputs = [part.requires_grad_() for part in (q, k, v)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    backward_us = _us(lambda: torch.autograd.grad(out, inputs, out, retain_graph=True))
    return forward_us / flops, backward_us / (2.5 * flops)


def _byte(device: str) -> float:
    first, second, total = (torch.ones(_STREAMED_BYTES // 2, dtype=torch.bfloat16, device=device) for _ in range(3))
    return _us(lambda: torch.add(first, second, out=total)) / (3.0 * _STREAMED_BYTES)


def _kernel(device: str) -> float:
    """In a CUDA graph: the host would launch more slowly than the device runs."""
    little, graph, side = torch.ones(8, device=device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for _ in range(_KERNELS):
            little.add_(1.0)
    return _us(graph.replay) / _KERNELS


def _host(device: str) -> float:
    """Of an op called as a program calls it."""
    little, op = torch.ones(8, device=device), torch.ops.aten.mul.Tensor
    times: list[float] = []
    for _ in range(_TIMES):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(_CALLS):
            op(little, little)
        times.append((time.perf_counter() - begun) * 1e6 / _CALLS)
    torch.cuda.synchronize(device)
    return statistics.median(times)


def _us(run: Callable[[], object]) -> float:
    """Of one run on the device, where each takes longer than its launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # libraries are set up
    times: list[float] = []
    for _ in range(_TIMES):
        begin.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / _RUNS)
    return statistics.median(times)
