"""What ranks tell each other, as text: JSON of values whose types the reader names. Nothing in it is ever run.

A message starts with a checksum of its key and its text. So what another process writes, or copies from another key,
is found out when it is read, as is a message that is too long.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from ..errors import PlanError, StoreError, shown
from ..typed_json import MalformedError, Readers, parse, read, wrong

MOST_BYTES = 1 << 30
"""Of a message: 4,000 ranks say where they wrote three tensors for each of 1,000 parameters in 0.7 GB."""
_CHECK_BYTES = 16


def encode(key: str, value: object) -> bytes:
    """A message for `key`. Raises PlanError: the value is not of numbers, text, bytes, collections and dataclasses."""
    text = zlib.compress(json.dumps(plain(value), separators=(",", ":")).encode(), 1)
    return _checksum(key, text) + text


def decode(key: str, data: bytes, kind: Any) -> Any:
    """The value of a message as the type `kind`. Raises StoreError: it is none that a rank wrote."""
    text = data[_CHECK_BYTES:]
    if _checksum(key, text) != data[:_CHECK_BYTES]:
        raise malformed(key, f"{len(data):,} bytes that no rank wrote")
    with reading(key):
        return of_plain(kind, parse(_inflated(key, text)), "the message")


def of_plain(kind: Any, value: Any, name: str) -> Any:
    """The value of `plain` as the type `kind`. Raises MalformedError, which calls it `name`."""
    return read(kind, value, name, _READERS)


def _inflated(key: str, text: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(text, MOST_BYTES)
    except zlib.error as error:
        raise malformed(key, f"no message ({error})") from error
    if inflate.unconsumed_tail or not inflate.eof:
        raise malformed(key, f"more than {MOST_BYTES:,} bytes, or a part of a message")
    return plain


@contextmanager
def reading(key: str) -> Generator[None]:
    """Raise StoreError, which names the key, in place of a MalformedError."""
    try:
        yield
    except MalformedError as error:
        raise malformed(key, error.found, error.needed) from error


def malformed(key: str, content: str, needed: str = "") -> StoreError:
    """The error of a key that holds something else than ranks write."""
    needed = needed or "what a rank of this job writes"
    next_step = "look what else connects to the store of the job (MASTER_ADDR, MASTER_PORT): it trusts its network"
    return StoreError(f"the store of the job holds under {key}: {content}", needed, next_step)


def _checksum(key: str, text: bytes) -> bytes:
    return hashlib.sha256(f"wholestep {len(key)} {key} ".encode() + text).digest()[:_CHECK_BYTES]


def plain(value: Any) -> Any:
    """JSON values; of a mapping whose keys are no texts, a list of pairs. Raises PlanError as `encode` does."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        items = [(key, plain(element)) for key, element in cast(Mapping[Any, Any], value).items()]
        texts = all(isinstance(key, str) for key, _ in items)
        return dict(items) if texts else [[plain(key), element] for key, element in items]
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in cast(list[Any], value)]
    if is_dataclass(value) and not isinstance(value, type):
        return {element.name: plain(getattr(value, element.name)) for element in fields(value)}
    raise PlanError(f"ranks cannot tell each other {shown(value)}", "numbers, text, and collections of these")


def _bytes(value: Any, at: str) -> bytes:
    try:
        return base64.b64decode(cast(str, read(str, value, at)), validate=True)
    except ValueError as error:
        raise wrong(at, value, "bytes in base 64") from error


def _path(value: Any, at: str) -> Path:
    return Path(read(str, value, at))


_READERS: Readers = {bytes: _bytes, Path: _path}
