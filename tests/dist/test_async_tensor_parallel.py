"""Async tensor parallelism on gloo ranks: the bits of the plain program, for even and odd sizes."""

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import wholestep as ws
from tests.dist.compare import whole
from tests.dist.launch import run_ranks
from tests.tp_models import SEQUENCE, VOCAB, Llama, next_token, step_of
from wholestep.backend.same_bits import same_bits
from wholestep.passes import async_tensor_parallel
from wholestep.passes.fused_products import FUSED
from wholestep.passes.product_blocks import FUSED_PARTS, Site
from wholestep.runtime import finalize

SLOW = ws.Hardware.measured(
    flops_per_us=10, launch_us=0.001, link_us=0.001, link_bytes_per_us=1, memory_bytes_per_us=1e9
)
"""Products and collectives take long, and starting them nothing: blocks always gain."""


def _trained(mesh: str, async_tp: str | None, shape: tuple[int, int], rank: int) -> tuple[list[Tensor], ws.LocalGraph]:
    """Losses and parameters of two steps, and the program; ranks of a group along tp are given the same batch."""
    torch.manual_seed(0)
    model = Llama(heads=4, kv=4, layers=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    tensor = ws.TensorParallel(SEQUENCE, async_tp=async_tp)  # pyright: ignore[reportArgumentType]
    parallel = [ws.DataParallel("fully_shard", axis="dp"), tensor] if "dp" in mesh else [tensor]
    step = ws.compile(step_of(next_token), parallel=parallel, mesh=mesh, schedule=ws.Schedule(SLOW))
    found: list[Tensor] = []
    for number in range(2):
        generator = torch.Generator().manual_seed(10 * number + (rank // 2 if "dp" in mesh else 0))
        tokens, targets = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
        found.append(step(model, optimizer, tokens, targets))
    assert step.local_graph is not None
    return [*found, *map(whole, model.parameters())], step.local_graph


def _sent(local: ws.LocalGraph) -> int:
    return sum(total.count for total in local.collectives().values())


def _compared(
    rank: int, world: int, mesh: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[bool, int, int, dict[str, bool]]:
    """Whether the bits are equal; how many collectives the plain program sends, and the other; and by collective if the
    kernels of this machine compute the same bits in blocks.
    """
    torch.set_default_dtype(dtype)
    plain, program = _trained(mesh, None, shape, rank)
    fits = dict[str, bool]()

    def recorded(site: Site, parts: int, device: str) -> bool:
        fits[site.collective.name] = fits.get(site.collective.name, False) | (fit := same_bits(site, parts, device))
        return fit

    finalize.same_bits = recorded
    found, cut = _trained(mesh, "exact", shape, rank)
    return all(map(torch.equal, plain, found)), _sent(program), _sent(cut), fits


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("mesh", "shape", "dtype"),
    [
        ("tp=2", (3, 14), torch.float32),  # 7 places of a sequence on each rank
        pytest.param("tp=2", (1, 12), torch.bfloat16, marks=FULL),
        pytest.param("tp=4", (3, 20), torch.float64, marks=FULL),
        pytest.param("dp=2,tp=2", (1, 12), torch.float32, marks=FULL),  # weights come out of buckets
    ],
)
def test_blocks_have_the_bits_of_the_plain_program(mesh: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    for same, before, after, fits in run_ranks(_compared, ws.Mesh(mesh).size, mesh, shape, dtype):
        assert same
        assert len(fits) >= 8  # kinds of products next to collectives, forward and backward
        assert after >= before + sum(fits.values())  # each kind that fits is cut


def _of_sizes(rank: int, world: int) -> tuple[int, list[str]]:
    torch.manual_seed(0)
    model = Llama(heads=4, kv=4, layers=1)
    optimizer, parallel = SGD(model.parameters(), lr=0.1), [ws.TensorParallel(SEQUENCE, async_tp="exact")]
    step = ws.compile(step_of(next_token), parallel=parallel, mesh="tp=2", schedule=ws.Schedule(SLOW))
    for shape in ((3, 14), (2, 10), (4, 12)):
        step(model, optimizer, *(torch.randint(0, VOCAB, shape) for _ in range(2)))
    return len(step.programs), step.misses


@FULL
def test_each_size_is_captured_and_the_step_says_why() -> None:
    for programs, misses in run_ranks(_of_sizes, 2):
        assert programs == 3
        assert any("async tensor parallelism cuts products into blocks by their size" in miss for miss in misses)


def _fused(rank: int, world: int) -> tuple[float, int]:
    torch.set_default_dtype(torch.float64)
    plain, _ = _trained("tp=2", None, (3, 14), rank)
    async_tensor_parallel.faster_parts = lambda site, *_: (FUSED_PARTS,) if site.can_fuse else ()
    found, program = _trained("tp=2", "fast", (3, 14), rank)
    worst = max((one - other).abs().max().item() for one, other in zip(plain, found, strict=True))
    return worst, sum(node.target in FUSED for node in program.graph.nodes)


def test_fused_products_without_symmetric_memory() -> None:
    """They are what GPUs run in place of blocks; here the collective and the product run one after the other."""
    for worst, fused in run_ranks(_fused, 2):
        assert worst < 1e-12
        assert fused >= 6  # three gathers and a reduce-scatter of the layer, forward, and two gathers backward
