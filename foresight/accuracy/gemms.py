"""Matrix products: the presets against measured times by shape and dtype."""

import re
from collections.abc import Iterable
from dataclasses import replace

import wholestep as ws
from foresight.accuracy.read import Case, Left, Row, data_sheet, hardware_of, number

COLUMNS = ("device", "b", "m", "n", "k", "dtype", "time_us")
_DTYPES = ((r"f8|float8|fp8", "float8"), (r"bf16|bfloat16", "bfloat16"), (r"f16|float16|half", "float16"),
           (r"tf32", "tf32"), (r"f32|float32", "tf32"), (r"f64|float64", "float64"))  # fmt: skip


def read(rows: Iterable[Row]) -> tuple[list[Case], list[Left]]:
    """Every product that can be predicted, and the others. What XLA calls f32 runs in TF32 there."""
    cases: list[Case] = []
    left: list[Left] = []
    for row in rows:
        hardware, us = hardware_of(row["device"]), number(row, "time_us")
        sizes = [number(row, name) for name in ("b", "m", "n", "k")]
        given = row["dtype"].split("->")[0].lower()
        dtype = next((name for pattern, name in _DTYPES if re.search(pattern, given)), None)
        label = f"{row['b']}x {row['m']}x{row['n']}x{row['k']} {row['dtype']}"
        why = (
            "no preset for this device" if hardware is None else "no time" if not us
            else "sizes missing" if not all(sizes) else "no such dtype" if dtype is None else ""
        )  # fmt: skip
        if why or hardware is None or us is None or dtype is None:
            left.append(Left(row.get("source_id", ""), label, why))
            continue
        b, m, n, k = (int(size or 0) for size in sizes)
        made = _in_a_burst(hardware).matmul_us(b, m, n, k, dtype)
        rate = 2.0 * b * m * n * k / us
        why = "faster than the data sheet's peak" if rate > data_sheet(hardware).ceiling(dtype).flops_per_us else ""
        cases.append(Case(row.get("source_id", "gemms"), row["device"], label, dtype, us, made, why))
    return cases, left


def _in_a_burst(hardware: ws.Hardware) -> ws.Hardware:
    """At the clock of short runs, as tables of products are measured."""
    return replace(hardware, device=replace(data_sheet(hardware), sustained=1.0))
