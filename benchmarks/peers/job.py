"""What a worker is started with and the thing it drives. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .sizes import Config
from .spec import Spec, parse


@dataclass(frozen=True)
class Job:
    """One rank of one peer. `corpus` and `weights` are files that all ranks of all peers read."""

    spec: Spec
    config: Config
    rank: int
    world: int
    corpus: str
    weights: str

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(asdict(self) | {"spec": self.spec.text})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """Inverse of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields |= {"spec": parse(fields["spec"]), "config": Config(**fields["config"])}
        return cls(**fields)

    @property
    def share(self) -> tuple[int, int]:
        """Which part of the batch this rank is given, and of how many."""
        return (0, 1) if self.spec.is_pipe or self.spec.shares_tokens else (self.rank, self.spec.processes(self.world))


class Trainer(Protocol):
    """One rank of one peer, ready to train."""

    note: str
    """What the peer chose by itself, if anything."""
    update_seconds: float
    """Seconds in the optimizer so far, where the peer tells."""

    def prepare(self, x: Any, y: Any) -> Any:
        """A batch of numpy arrays in the form that `step` takes."""
        ...

    def step(self, batch: Any) -> float:
        """One step; returns when it is done, with the loss."""
        ...

    def finish(self) -> None:
        """Complete what the last step left to the next one, if anything."""
        ...

    def rest_bytes(self) -> int:
        """Bytes of this rank's parameters and optimizer state."""
        ...

    def parameter_bytes(self) -> int:
        """Bytes of the whole model's parameters."""
        ...

    def tensor_bytes(self, batch: Any) -> int:
        """The most bytes of tensors that are alive in one more step; 0 where nothing counts them."""
        ...

    def hardware(self) -> str:
        """The machine as all ranks measure it now, as JSON; only of peers that are `Spec.measures`."""
        ...

    def simulated_ms(self, hardware: Sequence[str]) -> list[float]:
        """What a step takes by simulation on each of these machines; none where no simulation knows the peer."""
        ...

    def collectives(self, batch: Any) -> dict[str, int]:
        """How many collectives one more step starts, by kind."""
        ...
