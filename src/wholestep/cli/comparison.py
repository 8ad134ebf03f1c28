"""The demo's comparison as a table: a column per way of training, a row per quantity."""

from typing import Any

from rich.table import Table

Rows = list[dict[str, Any]]


def comparison(result: dict[str, Any], *, ranks: int, backend: str) -> Table:
    """The table.

    Args:
        result: the `result` event of rank 0.
        ranks: how many there were.
        backend: wholestep's.
    """
    rows = _in_order(result["rows"])
    details = {"one process": f"{ranks} threads" if ranks > 1 else "1 thread", "wholestep": backend}
    since = f" from step {result['since']} on" if result["since"] else ""
    table = Table(title=f"Same weights and same data{since}, steps taken in turn", title_justify="left")
    table.add_column("")
    for row in rows:
        detail = details.get(row["name"])
        table.add_column(row["name"] + (f"\n{detail}" if detail else ""), justify="right")
    for label, cells in _quantities(rows, result["early_steps"]):
        table.add_row(label, *cells, end_section=label.startswith(("loss", "MB at rest")))
    return table


def _quantities(rows: Rows, early_steps: int) -> list[tuple[str, list[str]]]:
    out = [("loss at the end", [f"{row['loss']:.4f}" for row in rows])]
    known = {row["name"] for row in rows}
    for place, oracle in enumerate(("one process", "DDP")):
        if oracle not in known or len(rows) < 2:
            continue
        label = f"largest parameter difference\nto {oracle}"
        if early_steps:
            out.append((f"{label}, after {early_steps} steps", _differences(rows, "early_difference", place, oracle)))
            label = "... at the end"
        out.append((label, _differences(rows, "difference", place, oracle)))
    out += [
        ("ms per step, median", [_milliseconds(row["seconds"]) for row in rows]),
        ("MB at rest per rank", [f"{row['rest_bytes'] / 1e6:.1f}" for row in rows]),
    ]
    for kind in sorted({kind for row in rows for kind in row["collectives"]}):
        out.append((f"{kind} per step", [str(row["collectives"].get(kind, "-")) for row in rows]))
    out.append(("MB sent per rank and step", [_sent(row) for row in rows]))
    return out


def _sent(row: dict[str, Any]) -> str:
    return f"{row['sent_bytes'] / 1e6:.1f}" if row["sent_bytes"] else "-"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def _differences(rows: Rows, key: str, place: int, oracle: str) -> list[str]:
    return ["-" if row["name"] == oracle else f"{row[key][place]:.1e}" for row in rows]


def _in_order(rows: Rows) -> Rows:
    """The peers first, wholestep last."""
    return rows[1:] + rows[:1]
