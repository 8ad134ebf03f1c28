"""What is trained: sizes of models and batches. Imports no torch."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Config:
    """A model and its batch: `kind` is gpt or mlp, `rows` the global batch; `embed` is the MLP's width of one byte."""

    name: str
    kind: str
    layers: int
    width: int
    heads: int
    context: int
    rows: int
    embed: int = 32
    vocabulary: int = 256
    learning_rate: float = 3e-4

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


CONFIGS = {
    config.name: config
    for config in (
        Config("XS", "gpt", layers=2, width=64, heads=2, context=32, rows=8),  # 0.1 M parameters, for tests
        Config("S", "gpt", layers=4, width=256, heads=4, context=128, rows=8),  # 3.3 M
        Config("M", "gpt", layers=6, width=384, heads=6, context=128, rows=8),  # 10.9 M
        Config("L", "gpt", layers=8, width=768, heads=12, context=128, rows=8),  # 57 M
        Config("long", "gpt", layers=4, width=256, heads=4, context=4096, rows=2),  # S with long sequences, 4.3 M
        Config("mlp", "mlp", layers=6, width=1024, heads=1, context=32, rows=256),  # 6.6 M, next to no arithmetic
    )
}
