"""What two ranks ask of their GPUs: copies, collectives, dtypes, waits of the host. Skipped where there are not two.

`make test-nullcuda` runs these tests too: they look at calls. What they say of values is said on real devices alone.
"""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep as ws
from tests.gpu.ranks import RANKS, on_ranks
from tests.steps import mean_square

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")
NULL = importlib.util.find_spec("nullcuda") is not None
LAYERS, WIDTH = 6, 66  # a rank's half of a weight or bias is no multiple of 512 bytes
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
WARM_CALLS = 3
DELAY = 50_000_000  # cycles, some 30 ms
Found = dict[str, Any]


class Calls(TorchDispatchMode):
    """Ops by name, dtypes of what collectives send, and addresses of what products read."""

    def __init__(self) -> None:
        super().__init__()
        self.ops, self.sent, self.odd = Counter[str](), set[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.ops[name] += 1
        if func.namespace in ("c10d", "_c10d_functional"):
            flat = torch.utils._pytree.tree_leaves(args)
            self.sent |= {f"{name} {one.dtype}".replace("torch.", "") for one in flat if isinstance(one, Tensor)}
        if name in ("mm", "addmm"):
            self.odd += sum(one.data_ptr() % 512 != 0 for one in args if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batch(rank: int, call: int, rows: int = 8) -> Tensor:
    """Ranks hold different numbers of rows."""
    return torch.randn(rows + rank, WIDTH, generator=torch.Generator().manual_seed(10 * call + rank)).cuda()


class Job:
    """A step that was called some times, and its state."""

    def __init__(
        self, rank: int, style: Any, dtype: torch.dtype = torch.float32, step: Any = train_step, **options: Any
    ) -> None:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.rank, self.model = rank, nn.Sequential(*layers).to("cuda", dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        parallel = ws.DataParallel(style, semantics=options.pop("semantics", "per_rank"))
        schedule = ws.Schedule(ws.Hardware.preset("dgx-h100"), LAYER_BYTES, LAYER_BYTES)
        self.step = ws.compile(
            step, parallel=parallel, schedule=schedule, cuda_graphs=False, timeout=None, check_every=0, **options
        )
        self.dtype = dtype
        for call in range(WARM_CALLS):
            self(call)

    def __call__(self, call: int = WARM_CALLS, rows: int = 8) -> None:
        self.step(self.model, self.optimizer, batch(self.rank, call, rows).to(self.dtype))

    def calls(self) -> Calls:
        """Those of one more call of the step."""
        x = batch(self.rank, WARM_CALLS).to(self.dtype)
        with Calls() as seen:
            self.step(self.model, self.optimizer, x)
        return seen

    def without_host_waits(self, *rows: int) -> str:
        """What the host waited for in calls with batches of so many rows; empty if nothing."""
        batches = [batch(self.rank, WARM_CALLS, count).to(self.dtype) for count in rows]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for x in batches:
                self.step(self.model, self.optimizer, x)
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""

    def parameters(self) -> list[Tensor]:
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        return [one.detach().clone() for one in found]


def _sizes(rank: int) -> Found:
    job = Job(rank, "fully_shard", semantics="global")
    job(rows=4)
    return {"host waits": job.without_host_waits(8, 4, 8)}


def _waits(rank: int) -> Found:
    job = Job(rank, "fully_shard", measure=True)
    if rank:
        torch.cuda._sleep(DELAY)  # the other rank waits for this one, in its stream
    waited = job.without_host_waits(8)
    return {"host waits": waited, "seconds": job.step.waited_seconds}


def _buckets(rank: int, style: str) -> Found:
    job = Job(rank, style)
    seen, local = job.calls(), job.step.local_graph
    assert local is not None
    counts = {kind: total.count for kind, total in local.collectives().items()}
    return {"ops": dict(seen.ops), "odd addresses": seen.odd, "collectives": counts}


def _precision(rank: int) -> Found:
    job = Job(rank, "fully_shard", mixed_precision=ws.MixedPrecision(torch.bfloat16, torch.float32))
    return {"sent": sorted(job.calls().sent)}


def _rounded(rank: int) -> Found:
    at_random = ws.MixedPrecision(stochastic_rounding=True)
    whole = Job(rank, "replicate", torch.bfloat16, mean_square, mixed_precision=at_random)
    cut = Job(rank, "fully_shard", torch.bfloat16, mean_square, mixed_precision=at_random)
    one, other = whole.parameters(), cut.parameters()
    nearest = Job(rank, "replicate", torch.bfloat16, mean_square).parameters()
    return {
        "host waits": cut.without_host_waits(8),
        "same bits": all(map(torch.equal, one, other)),
        "as nearest": all(map(torch.equal, one, nearest)),
    }


def observe(rank: int, folder: str) -> None:
    """What one rank sees, all in one job: starting ranks takes longer than all of it."""
    found = {
        "sizes": _sizes(rank), "waits": _waits(rank), "fully_shard": _buckets(rank, "fully_shard"),
        "zero1": _buckets(rank, "zero1"), "precision": _precision(rank), "rounded": _rounded(rank),
    }  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("seen")
    on_ranks(observe, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_sizes_of_a_global_batch_are_agreed_without_a_wait_of_the_host(seen: list[dict[str, Found]]) -> None:
    """Two kinds of batch, of which ranks hold different numbers of rows."""
    assert [one["sizes"]["host waits"] for one in seen] == ["", ""]


def test_waits_are_timed_on_the_stream(seen: list[dict[str, Found]]) -> None:
    """The host does not wait to time them; rank 0 has waited for rank 1, which began late."""
    assert [one["waits"]["host waits"] for one in seen] == ["", ""]
    assert seen[0]["waits"]["seconds"] > 1e-3  # a null event takes a millisecond


def test_gathered_parameters_are_read_where_they_arrive(seen: list[dict[str, Found]]) -> None:
    """No copy into or out of a bucket, and each tensor at a multiple of 512 bytes."""
    for one in seen:
        ops = one["fully_shard"]["ops"]
        assert ops["addmm"] + ops["mm"] >= 3 * LAYERS - 1
        assert not {"cat", "copy_", "split_with_sizes_copy", "_chunk_cat"} & ops.keys()
        assert one["fully_shard"]["odd addresses"] == 0


def test_new_parameters_are_copied_once_a_bucket(seen: list[dict[str, Found]]) -> None:
    for one in seen:
        ops, gathers = one["zero1"]["ops"], one["zero1"]["collectives"]["all_gather"]
        assert 1 < gathers < 2 * LAYERS
        assert ops["_foreach_copy_"] == gathers
        assert "copy_" not in ops


def test_at_most_what_fsdp2_asks_for(seen: list[dict[str, Found]]) -> None:
    """A group for each layer, gathered twice and reduced once; all gradients are clipped and used at once."""
    for one in seen:
        asked, ops = one["fully_shard"]["collectives"], one["fully_shard"]["ops"]
        assert 0 < asked["all_gather"] <= 2 * LAYERS
        assert 0 < asked["reduce_scatter"] <= LAYERS
        assert sum(count for name, count in ops.items() if name.startswith("_fused_adamw")) == 1
        assert ops["_foreach_norm"] <= asked["reduce_scatter"], "each as soon as its gradients are there"
        assert sum(count for name, count in ops.items() if name.startswith("_foreach_mul")) == 1


def test_collectives_have_the_dtypes_that_were_asked_for(seen: list[dict[str, Found]]) -> None:
    """Parameters are gathered in bfloat16, gradients are reduced in float32."""
    for one in seen:
        dtypes = {
            kind: {text.split()[1] for text in one["precision"]["sent"] if kind in text.replace("_", "")}
            for kind in ("allgather", "reducescatter")
        }
        assert dtypes == {"allgather": {"bfloat16"}, "reducescatter": {"float32"}}


def test_updates_are_rounded_at_random_on_the_device(seen: list[dict[str, Found]]) -> None:
    """The same bits in two styles, others than without; the host waits for no count of steps."""
    for one in seen:
        assert one["rounded"]["host waits"] == ""
        assert NULL or (one["rounded"]["same bits"] and not one["rounded"]["as nearest"])
