"""What the kernel counts: processor time, memory, bytes sent. Imports no torch."""

import os
import resource
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Processor seconds that everything on this machine has used, and those that a hypervisor kept from it.

    Soft interrupts are left out: they are the benchmark's own packets.
    """
    columns = _processor_columns()
    user, nice, system, steal = columns[0], columns[1], columns[2], columns[7]
    return (user + nice + system + steal) / TICKS


def packet_seconds() -> float:
    """Processor seconds of soft interrupts, in which the kernel handles packets; to a hundredth."""
    return _processor_columns()[6] / TICKS


def _processor_columns() -> list[int]:
    """Ticks of all processors: user, nice, system, idle, waiting, interrupts, soft interrupts, stolen."""
    return [int(column) for column in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def own_seconds() -> float:
    """Processor seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def sent_bytes(interface: str) -> int:
    """Bytes sent so far over an interface of this process's namespace, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            return int(columns.split()[8])
    raise ValueError(f"this namespace has no interface {interface!r}")


def resident_bytes(field: str = "VmRSS") -> int:
    """Resident memory of this process: now (VmRSS) or its peak (VmHWM) since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"the kernel does not tell {field}")


def forget_peak() -> None:
    """Let the peak of resident memory start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def available_bytes() -> int:
    """Memory that processes may still take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the kernel does not tell MemAvailable")
