"""The rows of the comparison, as a table and as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .workload import Setting


@dataclass
class Row:
    """What is known of one runner in one setting; `error` says what failed. `step_ms` has one figure for each turn."""

    size: str
    optimizer: str
    runner: str
    error: str = ""
    parameters: int = 0
    first_step_s: float = 0.0
    step_ms: list[float] = field(default_factory=list[float])
    host_ms: float | None = None
    idle_ms: float | None = None
    launches: float | None = None
    kernels: float | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    predicted_ms: float | None = None
    predicted_bytes: int | None = None
    exit_s: float | None = None
    losses: list[float] = field(default_factory=list[float])
    loss_gap: float | None = None

    @property
    def usual_ms(self) -> float | None:
        """The median turn."""
        return statistics.median(self.step_ms) if self.step_ms else None


@dataclass
class Report:
    """All that was measured so far. `ceilings`: operations/s of a product in bfloat16, bytes/s of a copy."""

    about: dict[str, Any]
    path: Path | None
    rows: list[Row] = field(default_factory=list[Row])

    def flush(self) -> None:
        """Write what is known."""
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(
                json.dumps({**self.about, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n"
            )

    def compare_losses(self, setting: Setting) -> None:
        """The largest difference to the losses of the first runner of the setting."""
        alike = [row for row in self.rows if (row.size, row.optimizer) == (setting.size_name, setting.optimizer)]
        reference = next((row.losses for row in alike if row.losses), [])
        for row in alike:
            if row.losses:
                row.loss_gap = max(abs(a - b) for a, b in zip(row.losses, reference, strict=True))


HEADS = (
    "size", "AdamW", "runner", "first s", "step ms", "predicted", "host ms", "idle ms", "launches", "kernels",
    "allocated GiB", "predicted", "reserved GiB", "of peak", "loss gap", "exit s",
)  # fmt: skip


def table(report: Report, settings: Sequence[Setting]) -> str:
    """Markdown. A failure takes the place of the figures that are missing."""
    sizes = {setting.size_name: setting for setting in settings}
    peak = report.about.get("product_flops_per_s")
    lines = [f"| {' | '.join(HEADS)} |", f"| {' | '.join(['---'] * len(HEADS))} |"]
    for row in report.rows:
        ms = row.usual_ms
        flops = sizes[row.size].flops(row.parameters) if row.parameters else None
        share = flops / (ms / 1e3) / peak if ms and flops and peak else None
        cells = [
            _shown(row.first_step_s or None, ".1f"), _shown(ms, ".2f"), _shown(row.predicted_ms, ".2f"),
            _shown(row.host_ms, ".2f"), _shown(row.idle_ms, ".2f"), _shown(row.launches, ".0f"),
            _shown(row.kernels, ".0f"), _gib(row.allocated_bytes), _gib(row.predicted_bytes), _gib(row.reserved_bytes),
            _shown(share, ".0%"), _shown(row.loss_gap, ".0e"), _shown(row.exit_s, ".1f"),
        ]  # fmt: skip
        if row.error:
            known = [cell for cell in cells if cell != "-"]
            cells = [*known, row.error]
        lines.append(f"| {' | '.join([row.size, row.optimizer, row.runner, *cells])} |")
    return "\n".join(lines)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.2f}" if size else "-"
