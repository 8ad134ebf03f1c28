"""What predictions assume of devices and stacks, as tables made from the values."""

from collections.abc import Iterator

import wholestep as ws
from foresight.accuracy.read import data_sheet
from foresight.accuracy.report import Table
from wholestep_foresight import Stack
from wholestep_foresight.stack import STACKS


def tables() -> Iterator[Table]:
    """A table of devices, one of stacks."""
    machines = [ws.Hardware.preset(name) for name in ws.Hardware.presets()]
    rows = [_device(one) for one in machines if data_sheet(one).ceiling("bfloat16").tiles]
    columns = ("preset", "peak bf16 TFLOPS", "best tile", "clock under load", "attention forward", "backward",
               "memory GB/s", "reached", "host us an op", "slower beside NCCL", "from")  # fmt: skip
    yield Table("Assumed of devices", "shares of the peaks of data sheets", columns, tuple(rows))
    columns = ("stack", "ops on elements fused", "norms fused", "loss fused", "flash attention", "update fused",
               "buckets copied", "overlap", "gradients that fill waits", "regathers", "recompute", "CUDA graph",
               "host us a kernel", "from")  # fmt: skip
    said = "which kernels exist; recompute where a run does not say"
    yield Table("Assumed of stacks", said, columns, tuple(map(_stack, STACKS)))


def _stack(one: Stack) -> tuple[str, ...]:
    flags = (one.compiled, one.fused_norms, one.compiled and one.fused_loss, one.fused_optimizer, one.copies,
             one.overlaps, one.recorded)  # fmt: skip
    fused, norms, loss, update, copied, overlap, recorded = ("yes" if flag else "" for flag in flags)
    again = {"parameters": one.regathers, "activations": one.regathers_activations}
    host = f"{one.start_us:g}" if one.start_us else ""
    attention = str(one.flash_attention or "none")
    return (
        one.name,
        fused,
        norms,
        loss,
        attention,
        update,
        copied,
        overlap,
        "" if one.fills == "none" else one.fills,
        ", ".join(what for what, flag in again.items() if flag),
        one.recompute,
        recorded,
        host,
        one.source,
    )


def _device(hardware: ws.Hardware) -> tuple[str, ...]:
    device, top = data_sheet(hardware), data_sheet(hardware).ceiling("bfloat16")
    return (
        hardware.name, f"{top.flops_per_us / 1e6:g}", f"{max(tile.rate for tile in top.tiles):.0%}",
        f"{device.sustained:.0%}", f"{top.attention:.0%}", f"{top.attention_backward:.0%}",
        f"{device.memory_bytes_per_us / 1e3:g}", f"{device.memory_rate:.0%}", f"{device.host_us:g}",
        f"{device.contention - 1:.0%}", "; ".join(hardware.sources),
    )  # fmt: skip
