"""Formats the buckets of a split."""

from __future__ import annotations

from ..graph import text
from .split import Split

HEAD = ("bucket", "bytes", "parameters, in the order in which DDP gets their gradients", "")


def headline(split: Split) -> str:
    """Return one line with the limits and the number of buckets."""
    caps = " bytes, then ".join(f"{limit:,}" for limit in split.limits)
    count = len(split.buckets)
    return f"bucket cap {caps} bytes: {count} {'bucket' if count == 1 else 'buckets'}, compiled one by one"


def table(split: Split) -> str:
    """Return a table of the buckets from the input to the output, with the numbers of DDP's buckets."""
    sent = {name: number for number, bucket in enumerate(split.reduced) for name in bucket}
    rows = [HEAD]
    for index, bucket in enumerate(split.buckets):
        names = [p.name for p in bucket.params] or ["-"]
        notes = [f"DDP's bucket {sent[name]}" if name in sent else "" for name in names]
        rows += [
            (str(index) if i == 0 else "", f"{bucket.size_bytes:,}" if i == 0 else "", name, note)
            for i, (name, note) in enumerate(zip(names, notes, strict=True))
        ]
    return "\n".join(text.table(rows, left=(2, 3)))


def extension(split: Split) -> str:
    """Return a warning about extended buckets."""
    lines = [
        f"  bucket {index}: {bucket.extra_ops} more ops, {bucket.extra_bytes:,} more bytes"
        for index, bucket in enumerate(split.buckets)
        if bucket.extra_ops
    ]
    why = "buckets were extended, because no op outside of them reads their results (in-place writes only)"
    return "\n".join([why, *lines])
