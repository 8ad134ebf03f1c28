"""Counts and traces what a program asks of the null CUDA device, in a process that the script `nullcuda` started."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

_lib = ctypes.CDLL(None)
if not hasattr(_lib, "nullcuda_counts"):
    raise ImportError("nullcuda counts only in a process that the nullcuda script started")


@dataclasses.dataclass(frozen=True)
class Counts:
    """Calls since the process began, or their difference; work that a capture recorded counts as captured only."""

    launches: int = 0  # kernels
    blas: int = 0  # cuBLAS products: one or more kernels each on a real device
    memcpys: int = 0
    memsets: int = 0
    mallocs: int = 0  # cudaMalloc: misses of torch's caching allocator
    syncs: int = 0  # of a stream, an event or the device
    events: int = 0  # recorded
    waits: int = 0  # of a stream for an event
    captured: int = 0  # nodes recorded into CUDA graphs
    graphs: int = 0  # CUDA graph launches
    collectives: int = 0  # NCCL calls
    cudnn: int = 0  # plans executed
    other: int = 0  # calls that are not emulated, see others()
    h2d_bytes: int = 0
    d2h_bytes: int = 0

    def __sub__(self, before: "Counts") -> "Counts":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Counts(*(a - b for a, b in pairs))

    def __truediv__(self, n: int) -> "Counts":
        return Counts(*(a / n for a in dataclasses.astuple(self)))

    def __str__(self) -> str:
        return " ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(self).items() if v) or "nothing"


_COUNTERS = [f.name for f in dataclasses.fields(Counts)]
_KINDS = (
    "launch", "blas", "memcpy", "memset", "malloc", "sync", "event", "wait", "captured", "graph", "nccl", "cudnn",
    "other",
)  # fmt: skip


def counts() -> Counts:
    """What the process has asked for so far."""
    found = (ctypes.c_long * len(_COUNTERS))()
    _lib.nullcuda_counts(found, len(found))
    return Counts(*found)


def others() -> dict[str, int]:
    """Calls that are not emulated, by name."""
    name, number = ctypes.c_char_p(), ctypes.c_long()
    found: dict[str, int] = {}
    while _lib.nullcuda_others(len(found), ctypes.byref(name), ctypes.byref(number)):
        found[(name.value or b"").decode()] = number.value
    return found


@dataclasses.dataclass
class Counted:
    """What a block asked for, once it has ended."""

    counts: Counts = dataclasses.field(default_factory=Counts)


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Count what a block asks for: afterwards `counts` of the given object holds it."""
    before, result = counts(), Counted()
    try:
        yield result
    finally:
        result.counts = counts() - before


class _Record(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_int),
        ("captured", ctypes.c_int),
        ("peers", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("bytes", ctypes.c_long),
        ("at", ctypes.c_void_p * 3),
        ("span", ctypes.c_long * 3),
        ("clock", ctypes.c_uint32 * _lib.nullcuda_streams()),
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of CUDA's runtime or of a library.

    `stream` counts by order of first use, -1 is the host. `ranges` are (address, bytes) of known operands; bytes 1:
    only the start is known. Operands of kernels are not known.
    """

    kind: str  # of _KINDS
    name: str
    stream: int
    bytes: int
    captured: bool
    ranges: tuple[tuple[int, int], ...]
    clock: tuple[int, ...] = dataclasses.field(repr=False, default=())

    def before(self, other: "Call") -> bool:
        """Whether streams, events and syncs make this call end before `other` begins."""
        return self.stream >= 0 and self.clock[self.stream] <= other.clock[self.stream]

    def overlaps(self, other: "Call") -> bool:
        """Whether both touch the same known memory."""
        return any(a < d + e and d < a + b for a, b in self.ranges for d, e in other.ranges)

    @property
    def kernel(self) -> str:
        """The name in C++ spelling."""
        demangle: Any = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
        demangle.restype, demangle.argtypes = ctypes.c_void_p, [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
        at = demangle(self.name.encode(), None, None, None)
        return ctypes.string_at(at).decode() if at else self.name


@contextlib.contextmanager
def tracing() -> Iterator[list[Call]]:
    """Fill the given list with the calls of the block, in the order in which the host made them."""
    calls: list[Call] = []
    _lib.nullcuda_trace(1)
    try:
        yield calls
    finally:
        _lib.nullcuda_trace(0)
        _lib.nullcuda_record.restype = ctypes.POINTER(_Record)
        _lib.nullcuda_record.argtypes = [ctypes.c_long]
        _lib.nullcuda_records.restype = ctypes.c_long
        calls += [_call(_lib.nullcuda_record(i).contents) for i in range(_lib.nullcuda_records())]


def _call(record: Any) -> Call:
    ranges = tuple((a, n) for a, n in zip(record.at, record.span, strict=True) if a and n)
    name, captured = record.name.decode(), bool(record.captured)
    return Call(_KINDS[record.kind], name, record.stream, record.bytes, captured, ranges, tuple(record.clock))


def unordered(calls: Sequence[Call]) -> list[tuple[Call, Call | None]]:
    """Pairs on different streams that touch the same known memory, one of them a collective, in no order.

    Then collectives that no other stream and no sync ever waits for, paired with None. Operands of kernels are not
    known: a kernel that reads too early is not seen, unless nothing at all waits for the collective.
    """
    work = [c for c in calls if c.ranges and c.stream >= 0]
    found: list[tuple[Call, Call | None]] = []
    for i, c in enumerate(work):
        if c.kind != "nccl":
            continue
        for j, d in enumerate(work):
            if d.stream == c.stream or (j < i and d.kind == "nccl") or not c.overlaps(d):
                continue
            if not (c.before(d) if j > i else d.before(c)):
                found.append((c, d))
        if not any(c.before(d) for d in calls if d.stream != c.stream):
            found.append((c, None))
    return found


def _check() -> None:
    """A small step on the device, counted."""
    import torch

    assert torch.cuda.is_available(), "torch sees no CUDA device"
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with counting() as c:
            model(torch.zeros(8, 64, device="cuda")).sum().backward()
            optimizer.step()
    assert c.counts.launches > 0, c.counts
    assert c.counts.blas > 0, c.counts
    print(f"nullcuda: torch {torch.__version__} on {torch.cuda.get_device_name()}; a step of a Linear: {c.counts}")


if __name__ == "__main__":
    _check()
