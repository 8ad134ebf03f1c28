"""What torch's allocator reserves: blocks by its published sizes, and a program that repeats its allocations."""

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim import AdamW
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import model_file
from wholestep.cli import app
from wholestep.cli.planning import within_device
from wholestep.cli.screen import Screen
from wholestep.cost.reserved import Allocator, Block, reserved, reserved_bytes
from wholestep.cost.software import OWN
from wholestep.errors import BudgetError

MIB = 1 << 20
PAGES: Any = SimpleNamespace(copies=True, expandable_segments=True)
H100 = ws.Hardware.preset("dgx-h100")


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([1], 2), ([MIB, MIB], 2), ([MIB, MIB, 512], 4), ([MIB + 1], 20), ([9 * MIB, 9 * MIB], 20),
        ([11 * MIB, 9 * MIB], 32), ([21 * MIB - 5], 22), ([512, 3 * MIB], 22),
    ],
)  # fmt: skip
def test_sizes_of_segments(sizes: list[int], segments: int) -> None:
    """As `CUDACachingAllocator` documents them: segments of 2 and 20 MiB, and steps of 2 MiB for what is larger."""
    allocator = Allocator()
    for size in sizes:
        allocator.take(size)
    assert allocator.reserved_bytes == segments * MIB


def test_a_large_block_is_split_and_joined() -> None:
    allocator = Allocator()
    allocator.give(allocator.take(64 * MIB))
    parts = [allocator.take(16 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 64 * MIB
    allocator.give(parts[1])
    allocator.give(parts[2])
    allocator.take(32 * MIB)
    assert allocator.reserved_bytes == 64 * MIB, "two neighbours are one block again"
    allocator.give(parts[0])
    allocator.give(parts[3])
    allocator.take(32 * MIB)
    assert allocator.reserved_bytes == 96 * MIB, "two pieces apart are not"


def test_streams_do_not_share() -> None:
    allocator = Allocator()
    allocator.give(allocator.take(32 * MIB, "gather"))
    allocator.take(32 * MIB)
    assert allocator.reserved_bytes == 64 * MIB


def test_a_range_grows_at_its_end() -> None:
    """Segments of their own leave 30 MiB that fit nothing larger; a range takes 40 more where 50 are asked for."""
    found: list[int] = []
    for grows in (False, True):
        allocator = Allocator(grows)
        allocator.take(20 * MIB)
        allocator.give(allocator.take(30 * MIB))
        allocator.take(50 * MIB)
        found.append(allocator.reserved_bytes // MIB)
    assert found == [100, 80]


@pytest.mark.parametrize("grows", [False, True])
def test_blocks_never_overlap(grows: bool) -> None:
    draw, allocator = random.Random(3), Allocator(grows)
    held: list[tuple[Block, int]] = []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            allocator.give(held.pop(draw.randrange(len(held)))[0])
        else:
            size = draw.choice([300, 5000, MIB // 2, 3 * MIB, 17 * MIB, 40 * MIB]) + draw.randrange(1000)
            held.append((allocator.take(size), size))
        for pool in allocator.pools.values():
            owned = [b for b, _ in held if allocator.owners[id(b)] is pool]
            taken = sorted((b.at, b.at + b.size) for b in owned)
            assert all(one[1] <= other[0] for one, other in pairwise(taken))
            assert sum(end - start for start, end in taken) <= pool.reserved
        assert all(size <= block.size for block, size in held)
    before = allocator.reserved_bytes
    for block, _ in held:
        allocator.give(block)
    for _, size in held:
        allocator.take(size)
    assert allocator.reserved_bytes <= before + 60 * MIB * (not grows) + 20 * MIB


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def graph() -> ws.TrainGraph:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(4)]
        model, x = nn.Sequential(*layers), torch.empty(4096, 1024)
    return ws.capture(train_step, model, AdamW(model.parameters()), x)


@pytest.fixture(scope="module")
def local(graph: ws.TrainGraph) -> ws.LocalGraph:
    made = ws.partition(graph, ws.plan(graph, "dp=4", ws.DataParallel("fully_shard")))
    return ws.run_passes(made, ws.default_passes(H100))


def test_a_program_holds_its_tensors_in_what_is_reserved(local: ws.LocalGraph) -> None:
    """Tensors are those of `peak_memory`, which counts them in another way."""
    plain = reserved(local, OWN)
    assert plain.allocated_bytes == ws.peak_memory(local).size_bytes
    assert plain.allocated_bytes < plain.reserved_bytes < 1.5 * plain.allocated_bytes
    assert reserved(local, PAGES).reserved_bytes < plain.reserved_bytes + 2 * plain.allocated_bytes


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_of_a_loop_are_repeated(graph: ws.TrainGraph, pieces: int) -> None:
    strategies = [ws.DataParallel("zero1"), ws.MicroBatches(pieces)]
    made = ws.run_passes(ws.partition(graph, ws.plan(graph, "dp=4", strategies)), ws.default_passes(H100))
    found = reserved(made, OWN)
    assert found.allocated_bytes == ws.peak_memory(made).size_bytes
    assert found.allocated_bytes < found.reserved_bytes < 1.5 * found.allocated_bytes


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_a_stage_runs_its_blocks_in_order(graph: ws.TrainGraph, order: Any) -> None:
    """Tensors are those of `peak_memory`, and messages: of four pieces that have not left, one that is expected."""
    whole = ws.partition(graph, ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=4, schedule=order)))
    message = 4096 // 4 * 1024 * 4
    for stage in range(2):
        made = ws.run_passes(ws.stage_program(whole, stage), ws.default_passes(schedule=None))
        found, peak = reserved(made, OWN), ws.peak_memory(made).size_bytes
        assert peak <= found.allocated_bytes <= peak + 5 * message
        assert found.allocated_bytes < found.reserved_bytes < 1.5 * found.allocated_bytes
    assert reserved_bytes(whole, H100) is None, "no rank runs all stages"


def test_what_a_device_reserves(local: ws.LocalGraph) -> None:
    """Ranges that grow reserve less than segments; a device without such an allocator reserves nothing."""
    plain = reserved(local, OWN).reserved_bytes
    assert reserved_bytes(local, H100) == plain
    assert reserved_bytes(local, H100, PAGES) == reserved(local, PAGES).reserved_bytes
    assert reserved_bytes(local, ws.Hardware.default()) is None


def test_what_a_stack_holds_is_reserved(local: ws.LocalGraph) -> None:
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    product = next(node for node in calls if node.target is torch.ops.aten.addmm.default)
    longer = reserved(local, PAGES, until={product: calls[-1]})
    assert longer.reserved_bytes >= reserved(local, PAGES).reserved_bytes
    more = reserved(local, PAGES, added=[MIB, 3 * MIB]).allocated_bytes - reserved(local, PAGES).allocated_bytes
    assert more == 4 * MIB


WIDE = model_file(
    "*(nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.Linear(3000, 1000)) for _ in range(5))",
    "3000, 1000",
    "AdamW(model.parameters(), fused=True)",
)


@pytest.mark.full
@pytest.mark.parametrize("args", [
    ("simulate", "--recompute", "auto"),
    pytest.param(("plan", "--hardware", "dgx-h100", "--auto"), marks=pytest.mark.full),
])  # fmt: skip
def test_the_memory_of_a_command_is_that_of_the_device(tmp_path: Path, args: tuple[str, ...]) -> None:
    """A budget of tensors alone lets the allocator reserve more than there is; what is printed fits."""
    (tmp_path / "wide.py").write_text(WIDE)
    command, *more = args
    done = CliRunner().invoke(
        app, [command, f"{tmp_path / 'wide.py'}:build", "--mesh", "dp=4", "--memory", "500MB", *more]
    )
    assert done.exit_code == 0, done.output
    assert "torch's allocator would reserve" in done.output, "else nothing is tested"
    found = re.search(r"reserved +([0-9.]+) MB by", done.output)
    assert found is not None, done.output
    assert float(found[1]) <= 500


def test_less_is_given_to_tensors_until_the_allocator_fits() -> None:
    shown, asked = Screen(Console(quiet=True)), list[int | None]()

    def attempt(budget: int | None) -> int | None:
        asked.append(budget)
        if budget is not None and budget < 60:
            raise BudgetError("nothing", "something", "give more")
        return budget

    def reserved(share: float) -> Callable[[int | None], int | None]:
        return lambda budget: None if budget is None else round(budget * share)

    assert within_device(shown, 100, attempt, reserved(1.2)) == 80
    assert asked == [100, 80]
    assert within_device(shown, 100, attempt, reserved(0.9)) == 100
    assert within_device(shown, None, attempt, reserved(2.0)) is None
    assert within_device(shown, 100, attempt, lambda _: None) == 100, "of a pipeline nobody knows"
    assert within_device(shown, 100, attempt, reserved(1.7)) == 100, "below 60 nothing fits: its figures say so"
    with pytest.raises(BudgetError):
        within_device(shown, 50, attempt, reserved(1.0))
