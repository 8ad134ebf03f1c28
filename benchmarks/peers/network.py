"""Network namespaces joined by a link of a set speed, so that communication takes the time it takes on a wire.

    with Network(world=2, rate="1gbit") as network:
        subprocess.Popen([*network.prefix(rank), ...], env=os.environ | network.environment(rank))

Rate "none": one namespace that holds all ranks, over a loopback of its own. Two ranks: a namespace each, and one veth
pair. More: a veth each to a bridge. tbf shapes both ends, so a rank sends and receives at that rate at once.
Without root all ranks share the machine's own loopback and nothing is shaped.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "wspeers"
BURST, LATENCY = "256kb", "50ms"
Execute = Callable[[Sequence[str]], str]


class NetworkError(RuntimeError):
    """A command that sets up the network failed; the text is what it said."""


def execute(command: Sequence[str]) -> str:
    """Run a command; returns what it printed."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise NetworkError(f"{command[0]} is not installed (Debian and Ubuntu: apt install iproute2)") from None
    except subprocess.CalledProcessError as failed:
        raise NetworkError(f"{' '.join(command)}: {failed.stderr.strip()}") from None


def why_not_shaped(run: Execute = execute) -> str:
    """Empty where this process may create namespaces, else what is in its way."""
    if os.geteuid() != 0:
        return "not root"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        run(["ip", "netns", "add", probe])
        run(["ip", "netns", "delete", probe])
    except NetworkError as error:
        return str(error)
    return ""


def may_shape() -> bool:
    """Whether this process may create namespaces and shape links."""
    return not why_not_shaped()


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its namespace ("" for the machine's own), its interface and address."""

    namespace: str
    interface: str
    address: str


@dataclass
class Network:
    """A context manager: what it creates is removed at its end, also after a failure on the way."""

    world: int
    rate: str
    run: Execute = execute
    shaped: bool = field(default_factory=may_shape)
    places: list[Place] = field(default_factory=list[Place])
    _namespaces: list[str] = field(default_factory=list[str])

    def __enter__(self) -> "Network":
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def one_interface(self) -> bool:
        """Whether all ranks send over one interface, whose counters hold the sum."""
        return len(set(self.places)) < self.world

    def prefix(self, rank: int) -> list[str]:
        """What a command of this rank begins with."""
        namespace = self.places[rank].namespace
        return ["ip", "netns", "exec", namespace] if namespace else []

    def environment(self, rank: int) -> dict[str, str]:
        """Where this rank finds the first one, and what it sends over."""
        place = self.places[rank]
        return {
            "MASTER_ADDR": self.places[0].address,
            "GLOO_SOCKET_IFNAME": place.interface,
            "PEERS_ADDRESS": place.address,
        }

    def close(self) -> None:
        """Remove every namespace; links go with them."""
        while self._namespaces:
            with suppress(NetworkError):
                self.run(["ip", "netns", "delete", self._namespaces.pop()])

    def _create(self) -> None:
        if not self.shaped or self.rate == "none":
            namespace = self._namespace("lo") if self.shaped else ""
            self.places = [Place(namespace, "lo", "127.0.0.1")] * self.world
            return
        spaces = [self._namespace(f"r{rank}") for rank in range(self.world)]
        links = [f"wp{os.getpid()}r{rank}" for rank in range(self.world)]
        if self.world == 2:
            self._join(spaces[0], links[0], spaces[1], links[1])
        else:
            self._star(spaces, links)
        for rank, (space, link) in enumerate(zip(spaces, links, strict=True)):
            address = f"10.99.0.{rank + 1}"
            self.run(["ip", "-n", space, "address", "add", f"{address}/24", "dev", link])
            self.places.append(Place(space, link, address))

    def _namespace(self, suffix: str) -> str:
        name = f"{PREFIX}{os.getpid()}-{suffix}"
        self.run(["ip", "netns", "add", name])
        self._namespaces.append(name)
        self.run(["ip", "-n", name, "link", "set", "lo", "up"])
        reno = "net.ipv4.tcp_congestion_control=reno"  # one that every kernel has, so that machines compare
        self.run(["ip", "netns", "exec", name, "sysctl", "-qw", reno])
        return name

    def _star(self, spaces: Sequence[str], links: Sequence[str]) -> None:
        hub = self._namespace("hub")
        self.run(["ip", "-n", hub, "link", "add", "bridge0", "type", "bridge"])
        self.run(["ip", "-n", hub, "link", "set", "bridge0", "up"])
        for rank, (space, link) in enumerate(zip(spaces, links, strict=True)):
            port = f"wp{os.getpid()}h{rank}"
            self._join(space, link, hub, port)
            self.run(["ip", "-n", hub, "link", "set", port, "master", "bridge0"])

    def _join(self, one: str, link: str, other: str, port: str) -> None:
        peer = ["peer", "name", port, "netns", other]
        self.run(["ip", "link", "add", link, "netns", one, "type", "veth", *peer])
        shape = ["tbf", "rate", self.rate, "burst", BURST, "latency", LATENCY]
        for space, end in ((one, link), (other, port)):
            self.run(["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", end, "root", *shape])
            self.run(["ip", "-n", space, "link", "set", end, "up"])


def clean(run: Execute = execute) -> list[str]:
    """Remove the namespaces of runs that were killed, and name them."""
    removed: list[str] = []
    for line in run(["ip", "netns", "list"]).splitlines():
        name = line.split()[0] if line.strip() else ""
        process = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and process.isdigit() and not Path(f"/proc/{process}").exists():
            run(["ip", "netns", "delete", name])
            removed.append(name)
    return removed
