"""What a step costs and yields: throughput, utilization, memory, and the time and price of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..graph.text import human, seconds
from ..hardware.hardware import Hardware
from ..hardware.validation import Validation, validation_of
from ..planner.bounds import Costs

_DAY, _HOUR = 86_400, 3_600


@dataclass(frozen=True)
class Figures:
    """The figures of one step on `ranks` devices, each of which has `costs`.

    Args:
        costs: simulated, of a rank.
        hardware: that they were simulated for.
        ranks: that run the step.
        step_tokens: that all of them train on in a step; None where that is not known.
        memory_bytes: that a rank may use; None where that is not known.
        run_tokens: of the run whose time is asked for.
        gpu_hour: price of one device for an hour.

    Example:
        >>> print(Figures(costs, ws.Hardware.preset("dgx-h100"), ranks=64, step_tokens=64 * 8192))
    """

    costs: Costs
    hardware: Hardware
    ranks: int
    step_tokens: float | None = None
    memory_bytes: int | None = None
    run_tokens: float | None = None
    gpu_hour: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks."""
        return None if self.step_tokens is None else self.step_tokens / self.costs.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Of one rank."""
        return None if self.tokens_per_s is None else self.tokens_per_s / self.ranks

    @property
    def run_s(self) -> float | None:
        """Seconds of the run; None without `run_tokens`."""
        return self.run_tokens / self.tokens_per_s if self.run_tokens and self.tokens_per_s else None

    @property
    def run_price(self) -> float | None:
        """Of the run, in the currency of `gpu_hour`."""
        return None if self.run_s is None or self.gpu_hour is None else self.run_s / _HOUR * self.ranks * self.gpu_hour

    @property
    def validation(self) -> Validation | None:
        """How far predictions for this device were from published runs; None where they were not compared."""
        return validation_of(self.hardware.device.name)

    def as_json(self) -> dict[str, Any]:
        """The figures in seconds, bytes, tokens and shares."""
        costs, validated = self.costs, self.validation
        return {
            "ranks": self.ranks, "step_s": costs.step_s, "step_tokens": self.step_tokens,
            "tokens_per_s": self.tokens_per_s, "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "mfu": costs.mfu,
            "hfu": costs.hfu, "peak_bytes": costs.peak_bytes, "peak_bytes_by_kind": dict(costs.by_kind),
            "reserved_bytes": costs.reserved_bytes, "memory_bytes": self.memory_bytes, "exposed_s": costs.exposed_s,
            "idle_s": costs.idle_s, "host_s": costs.host_s,
            "precision": asdict(costs.precision) if costs.precision else None,
            "run_tokens": self.run_tokens, "run_s": self.run_s, "run_price": self.run_price,
            "validation": asdict(validated) if validated else None,
        }  # fmt: skip

    def __str__(self) -> str:
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:{width}}  {text}" for name, text in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        costs, validated = self.costs, self.validation
        tokens = "" if self.step_tokens is None else f", {self.step_tokens:,.0f} tokens"
        yield "step", f"{seconds(costs.step_s)} on {self.ranks:,} GPUs{tokens}"
        if self.tokens_per_s is not None:
            yield "tokens/s", f"{self.tokens_per_s:,.0f}, {self.tokens_per_s / self.ranks:,.0f} a GPU"
        else:
            yield "tokens/s", "unknown: give --batch-tokens, the tokens in the batch"
        yield "MFU, HFU", f"{costs.mfu:.1%}, {costs.hfu:.1%} with what is recomputed"
        if costs.precision is not None:
            yield "precision", str(costs.precision)
        yield "peak a GPU", self._memory()
        if self.hardware.has_gpus and (costs.reserved_bytes is not None or not costs.idle_s):
            yield "reserved", self._reserved()
        share = costs.exposed_s / costs.step_s if costs.step_s else 0.0
        yield "exposed", f"{seconds(costs.exposed_s)} of communication, {share:.1%} of the step"
        if costs.idle_s:
            yield "bubble", f"{seconds(costs.idle_s)} for other stages, {costs.idle_s / costs.step_s:.1%} of the step"
        if costs.host_s > costs.step_s:
            yield "host", f"needs {seconds(costs.host_s)} to start the ops: the step takes less only as a CUDA graph"
        if self.run_s is not None:
            yield f"{count(self.run_tokens or 0)} tokens", self._run(self.run_s)
        device = self.hardware.device.name
        yield "error", str(validated) if validated else f"not validated: no published run on {device} was compared"

    def _memory(self) -> str:
        costs, room = self.costs, self.memory_bytes
        large = ((kind, size) for kind, size in costs.by_kind.items() if size >= 1e-3 * costs.peak_bytes)
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in large)
        over = "" if room is None else f" of {human(room)}" + (", too much" if costs.peak_bytes > room else "")
        return f"{human(costs.peak_bytes)}{over}" + (f": {parts}" if parts else "")

    def _reserved(self) -> str:
        costs, room = self.costs, self.memory_bytes
        if costs.reserved_bytes is None:
            return "not known from few layers: `simulate` of this step has it"
        over = ", more than there is," if room is not None and costs.reserved_bytes > room else ""
        between = max(costs.reserved_bytes - costs.peak_bytes, 0)
        return (
            f"{human(costs.reserved_bytes)}{over} by torch's allocator, {human(between)} of it between tensors; "
            "driver and NCCL take more"
        )

    def _run(self, took_s: float) -> str:
        hours = took_s / _HOUR * self.ranks
        price = "" if self.run_price is None else f", {self.run_price:,.0f} at {self.gpu_hour:,.9g} each"
        took = f"{took_s / _HOUR:,.1f} hours" if took_s >= _HOUR else seconds(took_s)
        took = f"{took_s / _DAY:,.1f} days" if took_s >= _DAY else took
        return f"{took}, {hours:,.0f} GPU hours{price}"


def count(number: float) -> str:
    """A large number with its letter: 1T, 300B, 2.5M."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:,.9g}{letter}"
    return f"{number:,.9g}"
