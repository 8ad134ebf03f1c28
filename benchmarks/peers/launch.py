"""The processes of one peer: started, asked, and ended by their ids."""

import json
import os
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from .job import Job
from .network import Network
from .sizes import Config
from .spec import Spec

ROOT = Path(__file__).resolve().parents[2]


class PeerFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the text says which, and where its log is."""


@dataclass(frozen=True)
class Site:
    """What the peers of one run share: where they run, what they read, where they log."""

    network: Network
    config: Config
    folder: Path
    jax_python: str = sys.executable

    @property
    def corpus(self) -> Path:
        """The text."""
        return self.folder / "corpus.npy"

    @property
    def weights(self) -> Path:
        """The initial weights, for peers that cannot build the model with torch."""
        return self.folder / f"weights-{self.config.name}.npz"

    def command(self, spec: Spec, rank: int) -> list[str]:
        """What starts one rank."""
        job = Job(spec, self.config, rank, self.network.world, str(self.corpus), str(self.weights))
        python = self.jax_python if spec.base == "jax" else sys.executable
        return [*self.network.prefix(rank), python, "-m", "benchmarks.peers.worker", job.to_json()]

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """What a rank finds in its environment: one thread, its place in the network."""
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        fixed = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.network.world),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",  # ranks share cores: an idle thread must not spin
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "NPROC": "1",  # XLA's threads per rank
        }
        return os.environ | self.network.environment(rank) | fixed


@dataclass
class Peer:
    """Running ranks of one peer. None of them outlives `end`."""

    spec: Spec
    site: Site
    processes: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])
    logs: list[Path] = field(default_factory=list[Path])

    def start(self) -> None:
        """Start every rank; `answers` waits until they are built."""
        port = free_port()
        name = "".join(c if c.isalnum() else "-" for c in str(self.spec))
        for rank in range(self.spec.processes(self.site.network.world)):
            log = self.site.folder / f"{name}-{rank}.log"
            self.logs.append(log)
            with log.open("w") as stderr:
                self.processes.append(
                    subprocess.Popen(
                        self.site.command(self.spec, rank),
                        env=self.site.environment(rank, port),
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        start_new_session=True,  # Ctrl-C reaches the parent alone
                    )
                )

    def ask(self, do: str, timeout: float, **fields: Any) -> list[dict[str, Any]]:
        """Tell every rank the same and return their answers by rank.

        Raises:
            PeerFailed: as `answers`.
        """
        for rank, process in enumerate(self.processes):
            stdin = cast(IO[str], process.stdin)
            try:
                stdin.write(json.dumps({"do": do, **fields}) + "\n")
                stdin.flush()
            except BrokenPipeError:
                raise PeerFailed(self._died(rank)) from None
        return self.answers(timeout)

    def answers(self, timeout: float) -> list[dict[str, Any]]:
        """One answer of each rank.

        Raises:
            PeerFailed: a rank failed, died or was late; the first to say so is named.
        """
        until, found = time.monotonic() + timeout, dict[int, dict[str, Any]]()
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                waiting.register(cast(IO[str], process.stdout), selectors.EVENT_READ, rank)
            while len(found) < len(self.processes):
                ready = waiting.select(max(0.0, until - time.monotonic()))
                if not ready:
                    late = sorted(set(range(len(self.processes))) - set(found))
                    raise PeerFailed(f"ranks {late} had not answered after {timeout:g} s; see {self.logs[late[0]]}")
                for key, _ in ready:
                    found[key.data] = self._answer(key.data, cast(IO[str], key.fileobj).readline())
                    waiting.unregister(key.fileobj)
        return [found[rank] for rank in range(len(self.processes))]

    def _answer(self, rank: int, line: str) -> dict[str, Any]:
        if not line:
            raise PeerFailed(self._died(rank))
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"rank {rank}: {answer['error']}; see {self.logs[rank]}")
        return answer

    def _died(self, rank: int) -> str:
        return f"rank {rank} died with status {self.processes[rank].wait(5)}; see {self.logs[rank]}"

    def end(self) -> None:
        """Kill what still runs, each process by its id."""
        with ExitStack() as stack:
            for process in self.processes:
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        stack.callback(_close, pipe)
                if process.poll() is None:
                    process.kill()
            for process in self.processes:
                process.wait()


def _close(pipe: IO[str]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was still to be said to a rank that is gone
        return


def free_port() -> int:
    """A port of this machine that nobody listens on; in a namespace of its own every port is free.

    One that the system gives no connection of itself: peers that run open some in the seconds until a rank listens.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    given_from = int(limits.read_text().split()[0]) if limits.exists() else 32768
    for port in [*random.sample(range(10_000, max(given_from, 11_000)), 100), 0]:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no free port: 100 were tried, and the system has none to give")


def end_all(peers: Sequence[Peer]) -> None:
    """End every peer, whatever one of them raises."""
    with ExitStack() as stack:
        for peer in peers:
            stack.callback(peer.end)
