"""Models of known bucket sizes for the DDP splitter: each says its input, its cap and the buckets it must give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STATES = ("plain", "autocast", "enable_grad", "no_grad")


class Mlp(nn.Module):
    """Linears of the given widths with a ReLU after each; `state` is what the middle of the forward runs in."""

    def __init__(self, widths: Sequence[int], state: str = "plain") -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.ReLU()]
        self.net, self.state = nn.Sequential(*layers), state

    def forward(self, x: Tensor) -> Tensor:
        if self.state == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)
        if self.state == "enable_grad":
            with torch.enable_grad():
                return self.net(x)
        if self.state == "no_grad":
            with torch.no_grad():
                return self.net(x)
        if self.state == "measured":
            with torch.no_grad():
                scale = self.net(x).abs().mean()
            return self.net(x) / (1 + scale)
        return self.net(x)


class Custom(nn.Module):
    """A layer written by hand: `W.t()`, `mm` and a `where`, no module of torch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.mm(x, self.weight.t())
        return made + torch.where(made < 0.5, 0.3, 0.6)


class WithCustom(nn.Module):
    """Linear, hand-written layer, Linear; `forward(x, y)` starts from `x + y`."""

    def __init__(self, size: int = 512) -> None:
        super().__init__()
        self.seq = nn.Sequential(nn.Linear(size, size), Custom(size), nn.Linear(size, size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.seq(x + y)


class Checkpointed(nn.Module):
    """Two blocks of two Linears, each recomputed in backward: to dynamo each is one higher-order op."""

    def __init__(self, size: int = 1000) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(size, size), nn.Linear(size, size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cos(checkpoint(block, x, use_reentrant=False))
        return x


@dataclass(frozen=True)
class Case:
    """One model; `cap_mb` is DDP's bucket_cap_mb and `bucket_bytes` what must come out, from the input on."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    cap_mb: float
    bucket_bytes: tuple[int, ...]
    ignore: tuple[str, ...] = ()


def _twice() -> tuple[Tensor, ...]:
    x = torch.randn(8, 512)
    return x, x


CASES = (
    Case(
        "5000 wide",
        lambda: Mlp([10, 5000, 5000, 5000, 5]),
        lambda: (torch.randn(20, 10),),
        25,
        (220_000, 100_020_000, 100_120_020),
    ),
    *(
        Case(
            f"1000 wide, {state}",
            lambda s=state: Mlp([1000] * 5, s),
            lambda: (torch.randn(20, 1000),),
            3.5,
            (4_004_000,) * 4,
        )
        for state in STATES
    ),
    Case("5 wide", lambda: Mlp([10, 5, 5, 5, 5]), lambda: (torch.randn(20, 10),), 250, (580,)),
    Case("custom layer", WithCustom, _twice, 1, (1_050_624, 1_048_576, 1_050_624)),
    Case("checkpointed", Checkpointed, lambda: (torch.randn(4, 1000),), 1, (8_008_000,) * 2),
    Case(
        "middle ignored",
        lambda: Mlp([600] * 5),
        lambda: (torch.randn(4, 600),),
        1,
        (1_442_400,) * 2,
        ("net.2.weight", "net.2.bias", "net.4.weight", "net.4.bias"),
    ),
)
