"""The table of buckets."""

from __future__ import annotations

from .split import Split

HEAD = ("bucket", "bytes", "parameters, in the order in which DDP gets their gradients", "")


def headline(split: Split) -> str:
    """One line: the limits and how many parts there are."""
    caps = " bytes, then ".join(f"{limit:,}" for limit in split.limits)
    count = len(split.buckets)
    return f"bucket cap {caps} bytes: {count} {'bucket' if count == 1 else 'buckets'}, compiled one by one"


def table(split: Split) -> str:
    """The buckets, the one nearest the input first; those of DDP's own that a part holds share its row."""
    sent = {name: number for number, bucket in enumerate(split.reduced) for name in bucket}
    rows = [HEAD]
    for index, bucket in enumerate(split.buckets):
        names = [p.name for p in bucket.params] or ["-"]
        notes = [f"DDP's bucket {sent[name]}" if name in sent else "" for name in names]
        rows += [
            (str(index) if i == 0 else "", f"{bucket.size_bytes:,}" if i == 0 else "", name, note)
            for i, (name, note) in enumerate(zip(names, notes, strict=True))
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column < 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def extension(split: Split) -> str:
    """What to say about buckets that were extended."""
    lines = [
        f"  bucket {index}: {bucket.extra_ops} more ops, {bucket.extra_bytes:,} more bytes"
        for index, bucket in enumerate(split.buckets)
        if bucket.extra_ops
    ]
    why = "buckets were extended, since nothing outside them used what they make (in-place writes only)"
    return "\n".join([why, *lines])
