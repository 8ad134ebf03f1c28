"""How a rank gathers on the CPU: what the plain collective gives, without the one of its forms that can crash gloo."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.steps import mean_square as train_step
from wholestep.backend.gloo.exchange import funcol, gather

IN_FLIGHT = 8


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _collectives_of_a_step(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(train_step, parallel=ws.DataParallel("fully_shard"))
    step(model, optimizer, torch.ones(2, 8))
    with _Seen() as seen:
        step(model, optimizer, torch.ones(2, 8))
    return sorted(seen.names)


def test_a_step_does_not_use_the_gather_that_frees_memory_twice():
    """Two of it that end at once in gloo's two threads free one string twice; see `gather`. The rank dies later."""
    for names in run_ranks(_collectives_of_a_step, 2):
        assert "_c10d_functional.all_gather_into_tensor_out.default" in names
        assert "_c10d_functional.all_gather_into_tensor.default" not in names


def _same_as_plain(rank: int, world: int) -> list[bool]:
    group = dist.group.WORLD.group_name
    found: list[bool] = []
    for shape in [(3,), (2, 3), (64, 2)]:
        for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]:
            values = [(torch.arange(64 * 2)[: torch.Size(shape).numel()] * i + rank).reshape(shape).to(dtype)
                      for i in range(IN_FLIGHT)]  # fmt: skip
            begun = [gather(value, world, group) for value in values]
            made = [funcol.wait_tensor(value) for value in begun]
            plain = [funcol.wait_tensor(funcol.all_gather_into_tensor(value, world, group)) for value in values]
            found.append(all(torch.equal(*pair) for pair in zip(made, plain, strict=True)))
    return found


def test_gathers_in_flight_give_what_the_plain_collective_gives():
    for found in run_ranks(_same_as_plain, 3):
        assert all(found)
