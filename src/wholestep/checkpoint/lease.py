"""One job at a time writes checkpoints to a folder: a lease with an owner, a host and a heartbeat.

A lease is a file `.writer-N.json`; the highest N counts. To take over a lease without heartbeats, a job creates
the next number: of several jobs, one succeeds. So neither locks of the file system nor equal clocks are needed, and
`create` is the only atomic operation.

The lease keeps jobs from saving by turns. Whole checkpoints do not depend on it: names are claimed by `create` as well,
a manifest comes last, and what another process may still write is never removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import uuid
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..distributed.process import Process, process
from ..errors import CheckpointError
from ..typed_json import MalformedError, parse
from ..typed_json import read as decoded
from . import durable

BEAT_S = 10.0  # a write of some hundred bytes each: no load, also for a store that charges for them
STALE_S = 60.0  # six beats: a file system that hangs for half a minute loses no lease
_FORGOTTEN_S = 3600.0  # no clocks differ by so much: such a lease is stale without a wait
_NAME = re.compile(r"\.writer-(\d{1,18})\.json")


@dataclass(frozen=True)
class Owner(Process):
    """A process that writes checkpoints; `at` is in seconds since 1970, and `beat` counts heartbeats."""

    token: str
    at: float
    beat: int = 0

    @staticmethod
    def this_process() -> Owner:
        """A new owner in this process."""
        return Owner(**vars(_here()), token=uuid.uuid4().hex, at=time.time())

    @property
    def is_dead(self) -> bool:
        """True for a process of this host that has ended."""
        return self.is_gone(_here())

    @property
    def is_this_process(self) -> bool:
        """True for this process, which may have other tokens."""
        return self.is_seen_from(_here()) and self.pid == os.getpid()

    def to_json(self) -> bytes:
        """Text that `owner_of` reads back."""
        return json.dumps(asdict(self)).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _here() -> Process:
    return process(os.getpid())


def owner_of(path: Path) -> Owner | None:
    """The owner that a file names; None for a file that is gone, half written or malformed."""
    try:
        return decoded(Owner, parse(path.read_bytes())) if durable.is_plain_file(path) else None
    except (OSError, MalformedError):
        return None


@dataclass
class Lease:
    """The right of this process to write checkpoints to `root`."""

    root: Path
    owner: Owner
    number: int
    lost_to: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _beats: threading.Thread | None = None

    def check(self) -> None:
        """Raise CheckpointError if another job has taken over."""
        highest, holder = _highest(self.root)
        if not self.lost_to and holder is not None and holder.token != self.owner.token:
            self.lost_to = str(holder)
        if self.lost_to or highest < self.number:
            who = f"by {self.lost_to}" if self.lost_to else "away"
            text = f"{self.root} was taken {who}: this job sent no heartbeat for {STALE_S:.0f} s"
            raise CheckpointError(text, "one job at a time that saves there", _ADVICE)

    def _keep(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_S):
            beat += 1
            with contextlib.suppress(OSError):
                highest, holder = _highest(self.root)
                if highest != self.number or (holder is not None and holder.token != self.owner.token):
                    return  # `check` says so at the next save
                content = replace(self.owner, at=time.time(), beat=beat)
                durable.replace(_path(self.root, self.number), content.to_json(), lasting=False)  # one may be lost
                for older in range(max(1, self.number - 8), self.number):
                    _unlink(_path(self.root, older))

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._beats = threading.Thread(target=self._keep, name="wholestep-lease", daemon=True)
        self._beats.start()

    def release(self) -> None:
        """Let the next job have it at once."""
        self._ended.set()
        if self._beats is not None:
            self._beats.join(5.0)  # one that is being written would be left
        with contextlib.suppress(OSError):
            holder = owner_of(_path(self.root, self.number))
            if holder is not None and holder.token == self.owner.token:
                _unlink(_path(self.root, self.number))


_leases: dict[str, Lease] = {}
_ADVICE = "end one of the two jobs, or save to another folder"


def acquire(root: Path) -> Lease:
    """The lease of this process on `root`. Waits while it is unclear whether another owner lives.

    Raises CheckpointError: another job saves there, or has taken over from this one.
    """
    current = _leases.get(str(root))
    if current is not None and current.owner.pid == os.getpid():
        try:
            current.check()
            return current
        except CheckpointError:
            current.release()
            del _leases[str(root)]
            if current.lost_to:
                raise
    owner = Owner.this_process()
    while True:
        number, other = _highest(root)
        if number and not _is_stale(root, number, other):
            text = f"another job saves to {root}: {other or 'an unknown process'}"
            raise CheckpointError(text, "one job at a time that saves there", _ADVICE)
        if durable.create(_path(root, number + 1), owner.to_json()):
            break
    if number:
        if other is None or not (other.is_dead or other.is_this_process):
            warnings.warn(
                f"{root}: took over from {other or 'an unknown process'}, which sends no heartbeat", stacklevel=2
            )
        _unlink(_path(root, number))
    lease = _leases[str(root)] = Lease(root, owner, number + 1)
    lease.start()
    return lease


def held(root: Path, token: str) -> Lease:
    """The lease on `root` that `acquire` returned to this process."""
    lease = _leases.get(str(root))
    if lease is None or lease.owner.token != token:
        raise CheckpointError(f"this process no longer holds the lease on {root}", "one that lasts as long as a save")
    return lease


def release_all() -> None:
    """Release every lease of this process."""
    for lease in _leases.values():
        if lease.owner.pid == os.getpid():
            lease.release()
    _leases.clear()


def _is_stale(root: Path, number: int, other: Owner | None) -> bool:
    """Whether a lease is left over. Looks for heartbeats until it is sure; clocks of hosts are not compared."""
    if other is not None and (other.is_dead or other.is_this_process or time.time() - other.at > _FORGOTTEN_S):
        return True  # a lease of this process that it does not hold came with a copy of the folder
    if other is not None and other.is_seen_from(_here()) and not other.is_stopped(_here()):
        return False
    whose = f"that of {other}" if other else f"{_path(root, number).name}, which is damaged or half written"
    warnings.warn(
        f"{root}: another job may save there. Waits for up to {STALE_S:.0f} s whether its lease changes: {whose}",
        stacklevel=4,
    )
    return _unchanged(root, number, STALE_S)


def _unchanged(root: Path, number: int, seconds: float) -> bool:
    """True when the lease did not change for `seconds`. Bytes are compared: the text of an owner that lives may be
    damaged, and it writes the whole file with each heartbeat.
    """
    before, end = _content(root, number), time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(0.2, seconds / 10))
        highest = _highest_number(root)
        if highest < number:
            return True  # released; the next number is still free
        if highest > number or _content(root, number) != before:
            return False
    return True


def _content(root: Path, number: int) -> bytes | None:
    path = _path(root, number)
    try:
        return path.read_bytes() if durable.is_plain_file(path) else None
    except OSError:
        return None


def _highest(root: Path) -> tuple[int, Owner | None]:
    """The number and the owner of the lease that counts; 0 for none."""
    highest = _highest_number(root)
    return highest, owner_of(_path(root, highest)) if highest else None


def _highest_number(root: Path) -> int:
    return max((int(match[1]) for path in durable.entries(root) if (match := _NAME.fullmatch(path.name))), default=0)


def _path(root: Path, number: int) -> Path:
    return root / f".writer-{number}.json"


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
