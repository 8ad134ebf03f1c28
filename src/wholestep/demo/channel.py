"""How a rank talks to the process that started it: JSON lines on stdin and stdout. Imports no torch."""

import json
import os
import queue
import sys
import threading
import time
from typing import Any


class Refused(Exception):
    """The run cannot be done as asked; the text says why and needs no traceback."""


class Channel:
    """This rank's end. Whatever else prints goes to stderr, which is the rank's log.

    When the other end goes away, the rank ends at once: no rank outlives the process that started it.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self.stop_asked = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Report something."""
        line = json.dumps({"event": event, "time": time.time(), **fields})
        with self._writing:
            self._out.write(line + "\n")
            self._out.flush()

    def receive(self) -> dict[str, Any]:
        """The next message, waiting for it. A request to stop only sets `stop_asked`."""
        return self._messages.get()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("stop"):
                self.stop_asked.set()
            else:
                self._messages.put(message)
        os._exit(1)
