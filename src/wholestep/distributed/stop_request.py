"""A job that is asked to end (SIGTERM) ends after the same step on all ranks.

The signal comes to one rank or to all, at different moments. Ranks tell each other with their heartbeats, so a step
sends nothing. A rank that hears of the signal contributes the number of its last step, and waits in its next question
until all have contributed. The largest of these numbers is known then, and nobody is past the step after it: they end
after that one. It does not matter whether steps have collectives, or whether a device is behind the main thread.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch.distributed as dist

from ..errors import PlanError
from .activity import ACTIVITY
from .heartbeat import end_process
from .peers import Peers, current_peers
from .store_tree import StoreTree, get, pause_s, put
from .typed_messages import decode, encode


class StopRequest:
    """A request to end the job. `install` makes the one of this process, and sets the handler of SIGTERM."""

    def __init__(self, grace_s: float, peers: Peers | None) -> None:
        self.grace_s = grace_s
        self._peers = peers
        self._label = f"{peers.label}/stop" if peers is not None else ""
        self._signals, self._asked_by = 0, ""
        self._number = 0
        self._last = 0 if peers is None else None
        self._heard = self._contributed = self._finished = False

    @staticmethod
    def install(grace_s: float) -> StopRequest:
        """Handle SIGTERM from now on: the first one asks the job to end, the second one ends this process at once.

        All ranks call it, on the main thread, after the first call of a compiled step. Raises PlanError: the ranks are
        not watched.
        """
        peers = current_peers()
        if peers is None and dist.is_initialized() and dist.get_world_size() > 1:
            problem = "grace= where ranks send no heartbeats, with which they would agree on the last step"
            raise PlanError(problem, "a step with a timeout", 'give ws.compile(..., timeout="5min")')
        request = StopRequest(grace_s, peers)
        signal.signal(signal.SIGTERM, request._on_signal)
        if peers is not None:
            peers.listeners.append(request)
            peers.wake()
        return request

    def agreed_at(self, number: int) -> bool:
        """Whether the job ends after step `number`: the same on all ranks, which ask after the same steps, in order."""
        self._number = number  # before `_heard` is read: the thread sets that first, and then reads this
        if not self._heard:
            return False
        start = time.monotonic()
        with ACTIVITY.waiting("the choice of the last step"):
            while self._last is None:
                ACTIVITY.raise_failure()
                time.sleep(pause_s(time.monotonic() - start))
        return number > self._last

    def finish(self) -> None:
        """What had to be done before the end is done: `grace_s` does not matter any more."""
        self._finished = True

    # -- with the heartbeats
    @property
    def urgent(self) -> bool:
        """Ranks talk more often until they have agreed."""
        return self._heard and self._last is None

    def exchange(self, store: Any) -> None:
        """Tell of a signal, hear of one; contribute the last step, and hear after which one all end."""
        if self._last is not None or self._peers is None:
            return
        key = f"{self._label}/asked"
        if self._signals and not self._heard:
            store.compare_set(key, "", encode(key, self._asked_by))
        if not self._heard and store.check([key]):
            self._hear(decode(key, store.get(key), str))
        if not self._heard:
            return
        if not self._contributed:
            self._contributed = True
            tree = StoreTree(store, self._label, self._peers.rank, self._peers.size, int)
            for largest in tree.contribute(self._number, max):
                put(store, f"{self._label}/last", largest)
        if store.check([f"{self._label}/last"]):
            self._last = get(store, f"{self._label}/last", int)

    # -- in this process
    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if self._heard:  # of another rank's signal
            return
        self._asked_by = f"SIGTERM on rank {self._peers.rank if self._peers else 0}"
        if self._peers is not None:
            self._peers.wake()
        else:
            self._hear(self._asked_by)

    def _hear(self, asked_by: str) -> None:
        """The time until the end runs from now on."""
        self._asked_by = asked_by
        self._heard = True
        timer = threading.Timer(self.grace_s, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """End the process, with the reason: it has not saved in time."""
        if self._finished:
            return
        text = f"the job was asked to end ({self._asked_by}), and has not saved within grace={self.grace_s:,.9g} s"
        end_process(f"wholestep: {text}")
