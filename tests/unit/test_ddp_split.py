"""The DDP splitter in one process: sizes of buckets, numbers of compilations, hard graphs, what torch's own got wrong.

DDP runs on one rank; its reducer fills and logs its buckets there as on many. `tests/dist/test_ddp_backend.py` has two.
"""

import logging
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.nn.parallel import DistributedDataParallel as Ddp

import wholestep as ws
from tests.ddp_models import CASES, Case, Mlp
from wholestep.ddp.backend import DdpBackend
from wholestep.ddp.reducer import Param, Reducer, assign
from wholestep.ddp.split import DdpBucket, Split, plan_split

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(optimize_ddp=True):  # as users find it
        torch._dynamo.reset()
        yield
    torch._dynamo.reset()


class Counting:
    """An inner backend that counts its calls."""

    def __init__(self, name: str = "eager") -> None:
        self.calls, self.run = 0, torch._dynamo.lookup_backend(name)

    def __call__(self, part: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.calls += 1
        return self.run(part, inputs)


class Run:
    """A model trained for a few calls under the splitter, on the same data as without; `worst` is the largest error."""

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[tuple[Tensor, ...]],
        inner: str = "aot_eager",
        dynamic: bool | None = None,
        **ddp: Any,
    ) -> None:
        self.inner = Counting(inner)
        self.backend = ws.ddp_backend(inner=self.inner)
        self.ddp = Ddp(model, **ddp)
        compiled = torch.compile(self.ddp, backend=self.backend, dynamic=dynamic)
        self.worst = 0.0
        params = [p for p in model.parameters() if p.requires_grad]
        for args in calls:
            expected = model(*args)
            loss = expected.float().square().mean()
            wanted = torch.autograd.grad(loss, params, allow_unused=True) if loss.requires_grad else []
            found = self.step(compiled, args)
            grads = [(p.grad, grad) for p, grad in zip(params, wanted, strict=False) if grad is not None]
            self.worst = max(self.worst, *(_far(a, b) for a, b in [(found, expected), *grads]))

    def step(self, model: Any, args: tuple[Tensor, ...]) -> Tensor:
        self.ddp.zero_grad()
        out = model(*args)
        if out.requires_grad:
            out.float().square().mean().backward()
        return out

    @property
    def sizes(self) -> list[int]:
        return [bucket.size_bytes for bucket in self.backend.buckets]


def _far(a: Any, b: Tensor) -> float:
    return (a.detach().double() - b.detach().double()).abs().max().item()


def reducers_buckets(ddp: Ddp) -> list[set[str]]:
    """What DDP logged after making its buckets anew, as names of parameters, in the order of sending."""
    logged = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    names = [n for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ddp.parameters_to_ignore]
    return [{names[int(i)] for i in bucket.split()} for bucket in logged.split(",")]


def ours(split: Split) -> list[set[str]]:
    return [{p.name for p in bucket.params} for bucket in reversed(split.buckets)]


# -- the reference results ------------------------------------------------------------------


def make(case: Case) -> nn.Module:
    model = case.make()
    if case.ignore:
        Ddp._set_params_and_buffers_to_ignore_for_model(model, list(case.ignore))
    return model


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("case", "inner"),
    [
        (case, inner)
        for inner in ("aot_eager", "eager")
        for case in CASES
        if inner == "aot_eager" or case is not CASES[0]
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_reference_buckets(case: Case, inner: str) -> None:
    trains = not case.name.endswith("no_grad")
    run = Run(make(case), [case.inputs()] * (3 if trains else 1), inner, bucket_cap_mb=case.cap_mb)
    assert run.sizes == list(case.bucket_bytes)
    assert run.inner.calls == len(case.bucket_bytes)
    assert run.worst == 0
    if not trains:
        return  # and there is no gradient to reduce
    logged, (split,) = reducers_buckets(run.ddp), run.backend.splits
    assert logged == [set(bucket) for bucket in split.reduced], "the reducer's own buckets are those we reckoned with"
    if case.name == "checkpointed":  # one op holds two of the reducer's buckets, and cannot be cut
        assert [logged[0] | logged[1], logged[2] | logged[3]] == ours(split)
    else:
        assert logged == ours(split)


@pytest.mark.smoke
def test_one_bucket_is_compiled_whole() -> None:
    class Only:
        def __call__(self, part: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            assert all(isinstance(i, nn.Parameter) for i in inputs if i.dim() == 2 and i.shape[0] == 5), (
                "as dynamo has it"
            )
            return part.forward

    model = torch.compile(Ddp(Mlp([10, 5, 5, 5, 5])), backend=ws.ddp_backend(inner=Only()))
    model(torch.randn(20, 10)).sum().backward()


def test_buckets_are_sent_while_the_next_part_computes() -> None:
    """What it is all for; before DDP settles its buckets, in the first step, there is one bucket."""
    from torch._dynamo.backends.common import aot_autograd

    happened: list[str] = []

    def backward(part: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        number = sum(name.startswith("compiled") for name in happened)
        happened.append(f"compiled {number}")
        return lambda *args: (happened.append(f"backward {number}"), part(*args))[1]

    def send(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        happened.append(f"sent {bucket.index()}")
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    inner = aot_autograd(fw_compiler=lambda part, inputs: part.forward, bw_compiler=backward)
    model = Ddp(Mlp([600] * 4), bucket_cap_mb=1)
    model.register_comm_hook(None, send)
    compiled = torch.compile(model, backend=ws.ddp_backend(inner=inner))
    for _ in range(2):
        happened.clear()
        compiled(torch.randn(4, 600)).sum().backward()
    assert happened == ["backward 0", "sent 0", "backward 1", "sent 1", "backward 2", "sent 2"]


# -- hard graphs ----------------------------------------------------------------------------


class Two(nn.Module):
    """Two square weights of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(512, 512) * 0.02) for _ in range(2))


class Cat(Two):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y]) @ self.one @ self.two


class Direct(Two):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        a, b = sizes.tolist()
        return (torch.cat([x, x]) @ self.one @ self.two) * a + b


class Indirect(Two):
    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        a, b = sizes.tolist()
        made = torch.ones(a, b)
        return x @ self.one @ self.two + made.sum() + torch.zeros(a).sum()


class Nonzero(Two):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.nonzero().squeeze(1)
        return (x[rows] @ self.one).relu() @ self.two + rows.size(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mha = nn.LayerNorm(96), nn.MultiheadAttention(96, 3, batch_first=True)

    def once(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.mha(x, x, x)[0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.once(part) for part in x.flatten(0, 1).split(129)])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(4) for m in (nn.Conv2d(512, 512, 1, bias=False), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 70), nn.Linear(3500, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.transpose(2, 1)).flatten(1))


def _both(rows: int = 512) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 512), torch.randn(rows, 512)


def _sized(*counts: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(8, 512), torch.tensor([n, 3])) for n in counts]


HARD: dict[str, tuple[Callable[[], nn.Module], list[tuple[Tensor, ...]], dict[str, Any], list[int]]] = {
    "cat": (Cat, [_both()] * 3, {"dynamic": True}, [MIB] * 2),
    "cat of other sizes": (Cat, [_both(n) for n in (5, 6, 7)], {"dynamic": True}, [MIB] * 2),
    "unbacked": (Direct, _sized(12, 13, 14), {}, [MIB] * 2),
    "unbacked, indirect": (Indirect, _sized(12, 13, 14), {}, [MIB] * 2),
    "nonzero": (Nonzero, [(torch.randn(4, 512), torch.tensor([1, 0, 1, n])) for n in (1, 0, 1)], {}, [MIB] * 2),
    "attention": (Attention, [(torch.randn(2, 129, 100, 96)[:, :, :5],)] * 3, {"bucket_cap_mb": 0.1}, [768, 148_992]),
    "convolutions": (Convolutions, [(torch.rand(2, 512, 8, 8),)] * 3, {}, [MIB] * 4),
    "transposed": (
        Transposed,
        [(torch.randn(n, 30, 50),) for n in (100, 200, 300)],
        {"bucket_cap_mb": 25},
        [8680, 28_680_192],
    ),
}


@pytest.mark.crossed
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", HARD)
def test_hard_graphs(name: str, inner: str) -> None:
    make_model, calls, options, sizes = HARD[name]
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        run = Run(make_model(), calls, inner, **{"bucket_cap_mb": 1, **options})
    assert run.sizes == sizes
    assert run.worst == 0
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
def test_inductor_inside() -> None:
    run = Run(Transposed(), [(torch.randn(n, 30, 50),) for n in (4, 6, 7)], "inductor", bucket_cap_mb=25)
    assert run.sizes == [8680, 28_680_192]
    assert run.worst < 1e-5
    assert run.inner.calls == 4, "once for the first size and once for all others"


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.full
def test_options_reach_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    backend = ws.ddp_backend()
    inner = backend.inner
    monkeypatch.setattr(
        backend, "inner", lambda part, inputs, **given: (seen.append(given), inner(part, inputs, **given))[1]
    )
    model = torch.compile(Ddp(Mlp([4, 4])), backend=backend, mode="max-autotune-no-cudagraphs", options=None)
    model(torch.randn(2, 4)).sum().backward()
    assert seen == [{"config_patches": {"max_autotune": True, "coordinate_descent_tuning": True}}]


def test_a_marked_dim_compiles_once() -> None:
    run = Run(Mlp([600] * 4), [], bucket_cap_mb=1)
    compiled = torch.compile(run.ddp, backend=run.backend)
    for rows in (4, 5, 9):
        x = torch.randn(rows, 600)
        torch._dynamo.mark_dynamic(x, 0)
        assert run.step(compiled, (x,)).shape == (rows, 600)
    assert run.inner.calls == 3


def test_empty_graph() -> None:
    compiled = torch.compile(lambda: dist.get_world_size(), backend=ws.ddp_backend(inner="eager"))
    assert compiled() == 1
    empty = Graph()
    empty.output(())
    assert plan_split(empty, {}, Reducer((), (1,))).starts == (0,)


def test_nested_ddp() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = Ddp(Mlp([600] * 4), bucket_cap_mb=1), nn.Linear(600, 600)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    run = Run(Outer(), [(torch.randn(4, 600),)] * 3, bucket_cap_mb=1)
    assert [1_442_400] * 3 in [[b.size_bytes for b in split.buckets] for split in run.backend.splits]
    assert run.worst == 0


def test_parts_see_the_strides_that_are() -> None:
    """A compiler that returns channels-last whatever the graph says: the next part is compiled for that."""
    planned: list[tuple[int, ...]] = []
    real: list[tuple[int, ...]] = []

    def compiler(part: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        notes = torch._guards.TracingContext.get()
        planned.extend(i.stride() for i in inputs if i.dim() == 4 and i.shape[-1] > 1)
        number = len(planned)

        def run(*args: Any) -> list[Any]:
            if len(real) < number:
                real.extend(a.stride() for a in args if isinstance(a, Tensor) and a.dim() == 4 and a.shape[-1] > 1)
            return [_channels_last(made) for made in part(*args)]

        made = [n.meta["val"] for n in part.graph.output_node().args[0]]
        if notes.output_strides is not None:
            notes.output_strides.extend(_channels_last(m).stride() if isinstance(m, Tensor) else None for m in made)
        return run

    from torch._dynamo.backends.common import aot_autograd

    inner = aot_autograd(fw_compiler=compiler, bw_compiler=lambda part, inputs: part.forward)
    model = Ddp(Convolutions(), bucket_cap_mb=1)
    x = torch.rand(2, 512, 8, 8)
    expected = model(x)
    found = torch.compile(model, backend=ws.ddp_backend(inner=inner))(x)
    assert _far(found, expected) == 0
    assert len(planned) == 4
    assert planned == real
    assert planned[1] == (512 * 64, 1, 8 * 512, 512), "not what the graph says"


def _channels_last(made: Any) -> Any:
    last = isinstance(made, Tensor) and made.dim() == 4
    return made.contiguous(memory_format=torch.channels_last) if last else made


# -- what torch's own splitter gets wrong ----------------------------------------------------


def test_tied_parameters_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(600, 600)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x).relu())

    run = Run(Tied(), [(torch.randn(4, 600),)] * 3, bucket_cap_mb=1)
    assert run.sizes == [1_442_400]
    assert run.inner.calls == 1
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])


def test_a_tied_parameter_belongs_where_its_gradient_is_complete() -> None:
    class Tied(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.net(x), self.net[0].weight)

    run = Run(Tied([600] * 4), [(torch.randn(4, 600),)] * 3, bucket_cap_mb=1)
    assert run.sizes == [1_442_400] * 3
    assert [p.name for p in run.backend.buckets[0].params] == ["net.0.bias", "net.0.weight"]
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])


def test_parameters_by_keyword_and_in_lists_are_found() -> None:
    class Odd(Two):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.mm(x, mat2=self.one), self.two])

    run = Run(Odd(), [(torch.randn(4, 512),)] * 3, bucket_cap_mb=1)
    assert run.sizes == [MIB, MIB]
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_uses_without_gradient_do_not_count(inner: str) -> None:
    """The model runs twice, first under no_grad: a gradient is complete when its second use is done."""
    run = Run(Mlp([600] * 4, "measured"), [(torch.randn(4, 600),)] * 3, inner, bucket_cap_mb=1)
    assert run.sizes == [1_442_400] * 3
    assert run.backend.splits[0].starts[1] > 10, "ten ops without gradients, then the cuts"
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])
    assert run.worst == 0


def test_two_dtypes_fill_two_buckets_at_a_time() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dtypes = (torch.float32, torch.float64, torch.float32) * 2
            self.layers = nn.ModuleList(nn.Linear(400, 400, dtype=d) for d in dtypes)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype)).relu()
            return x

    run = Run(Mixed(), [(torch.randn(4, 400),)] * 3, bucket_cap_mb=1)
    logged, (split,) = reducers_buckets(run.ddp), run.backend.splits
    assert sorted(map(sorted, logged)) == sorted(map(sorted, split.reduced))
    ends = [{p.name for bucket in split.buckets[i:] for p in bucket.params} for i in range(len(split.buckets))]
    assert all(any(bucket <= done for done in ends) for bucket in logged)
    assert len(split.buckets) == len(logged) == 4


def test_graph_breaks_keep_to_the_reducers_buckets() -> None:
    """No graph knows the others, but a bucket may reach over the break: the first graph counts on what is behind it."""

    class Broken(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = self.net[:6](x)
            torch._dynamo.graph_break()
            return self.net[6:](x)

    run = Run(Broken([400] * 7), [(torch.randn(4, 400),)] * 3, bucket_cap_mb=1)
    assert [[len(b.params) // 2 for b in split.buckets] for split in run.backend.splits] == [[2, 1], [1, 2]]
    logged = reducers_buckets(run.ddp)
    assert [len(bucket) for bucket in logged] == [4, 4, 4]
    parts = [part for split in run.backend.splits for part in ours(split)]
    assert all(part <= bucket for part in parts for bucket in logged if part & bucket)


def test_find_unused_parameters_keeps_the_first_buckets() -> None:
    """There DDP does not make its buckets anew: they follow the order of registration, from the first on."""
    run = Run(Mlp([400] * 7), [(torch.randn(4, 400),)] * 3, bucket_cap_mb=1, find_unused_parameters=True)
    logged = [int(size) for size in run.ddp._get_ddp_logging_data()["bucket_sizes"].split(",")]
    assert run.backend.splits[0].reduced
    assert [sum(_bytes(run.ddp, name) for name in bucket) for bucket in run.backend.splits[0].reduced] == logged
    parts = list(reversed(ours(run.backend.splits[0])))
    complete = [min(i for i, p in enumerate(parts) if p & set(b)) for b in run.backend.splits[0].reduced]
    assert complete == sorted(set(complete), reverse=True), "each is complete with a part of its own"


def _bytes(ddp: Ddp, name: str) -> int:
    return ddp.module.get_parameter(name).numel() * 4


def test_default_caps_are_those_of_ddp() -> None:
    """Unless DDP is told a size its first bucket takes 1 MiB and the others 25."""
    run = Run(Mlp([400] * 7), [(torch.randn(4, 400),)] * 3)
    assert run.backend.splits[0].limits == (MIB, 25 * MIB)
    assert run.sizes == [4 * 641_600, 2 * 641_600]
    assert reducers_buckets(run.ddp) == ours(run.backend.splits[0])


def test_sizes_are_the_reducers_own_rule() -> None:
    """500 random lists of parameters, against the function that DDP calls."""
    draw = random.Random(3)
    for _ in range(500):
        dtypes = draw.choice([[torch.float32], [torch.float32, torch.float64, torch.float16]])
        tensors = [torch.empty(draw.randint(1, 60), dtype=draw.choice(dtypes)) for _ in range(draw.randint(1, 30))]
        sparse = [draw.random() < 0.1 for _ in tensors]
        limits = [draw.randint(1, 400) for _ in range(draw.randint(1, 3))]
        params = [
            Param(str(i), i, t.numel() * t.element_size(), (str(t.dtype), "cpu"), s)
            for i, (t, s) in enumerate(zip(tensors, sparse, strict=True))
        ]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits, sparse)
        assert sorted([p.number for p in bucket] for bucket in assign(params, limits)) == sorted(theirs)


# -- extended buckets ------------------------------------------------------------------------


def test_a_bucket_that_nothing_uses_is_extended(caplog: pytest.LogCaptureFixture) -> None:
    """The last bucket only writes to a buffer: it takes in ops until something outside needs what it makes."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(600, 600), nn.Linear(600, 600)
            self.register_buffer("seen", torch.zeros(4, 600))

        def forward(self, x: Tensor) -> Tensor:
            made = self.one(x)
            shown = made.relu()
            with torch.no_grad():
                self.seen.copy_(self.two(made))
            return shown

    with caplog.at_level(logging.WARNING, "wholestep.ddp"):
        run = Run(Writes(), [], bucket_cap_mb=1)
        torch.compile(run.ddp, backend=run.backend)(torch.randn(4, 600))
    (split,) = run.backend.splits
    assert split.extension
    assert sum(run.sizes) == 2 * 1_442_400
    why = "buckets were extended, because no op outside of them reads their results (in-place writes only)"
    assert why in caplog.text


def test_extension_is_counted() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            y = x * a
            z = y + 1
            x.add_(b)
            return z

    graph = symbolic_trace(Writes()).graph
    _, a, b = graph.find_nodes(op="placeholder")
    pa, pb = (Param(name, i, 40, ("float32", "cpu")) for i, name in enumerate("ab"))
    split = plan_split(graph, {a: [pa], b: [pb]}, Reducer((pa, pb), (40, 40)))
    assert split.buckets == (DdpBucket((pa,)), DdpBucket((pb,), extra_ops=1))
    assert split.starts == (0, 1)
    assert split.extension.splitlines()[1] == "  bucket 1: 1 more ops, 0 B more"


# -- what is said ----------------------------------------------------------------------------

TABLE = """\
wholestep.ddp: bucket cap 3,145,728 bytes, then 3,145,728 bytes: 2 buckets, compiled one by one
bucket      bytes  parameters, in the order in which DDP gets their gradients
     0  2,884,800  net.2.bias                                                  DDP's bucket 1
                   net.2.weight                                                DDP's bucket 1
                   net.0.bias                                                  DDP's bucket 1
                   net.0.weight                                                DDP's bucket 1
     1  4,327,200  net.8.bias                                                  DDP's bucket 0
                   net.8.weight                                                DDP's bucket 0
                   net.6.bias                                                  DDP's bucket 0
                   net.6.weight                                                DDP's bucket 0
                   net.4.bias                                                  DDP's bucket 0
                   net.4.weight                                                DDP's bucket 0"""


def test_the_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "wholestep.ddp"):
        run = Run(Mlp([600] * 6), [(torch.randn(4, 600),)], bucket_cap_mb=3)
    assert str(run.backend) == TABLE
    levels = {r.levelname: r.getMessage() for r in caplog.records if "bucket" in r.getMessage()}
    assert levels["INFO"] == f"{TABLE.splitlines()[0]} (level DEBUG lists them)"
    assert levels["DEBUG"].endswith(TABLE.partition("\n")[2])
    assert str(ws.ddp_backend(inner="eager")).endswith("no graph with parameters of a DDP model compiled yet")


def test_sizes_that_differ_from_ddps_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(Ddp(Mlp([600] * 4)), backend=ws.ddp_backend(inner="eager", bucket_cap_mb=1))
    with caplog.at_level(logging.WARNING, "wholestep.ddp"):
        model(torch.randn(4, 600))
    differ = "bucket caps of (1048576, 1048576) bytes differ from the caps (1048576, 26214400) of this DDP model"
    assert differ in caplog.text


def test_without_ddp_sizes_split_too() -> None:
    backend = ws.ddp_backend(inner="eager", bucket_cap_mb=2)
    torch.compile(Mlp([600] * 4), backend=backend)(torch.randn(4, 600))
    assert [b.size_bytes for b in backend.buckets] == [2 * 1_442_400, 1_442_400], "1 MiB first, then 2"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"bucket_cap_mb": 1, "first_bucket_cap": 2 * MIB},
            "first_bucket_cap is 2,097,152 bytes, more than the 1,048,576 bytes of the other buckets\n"
            "  needed: a first bucket no larger than the others, so that it is sent early\n"
            "  next: pass first_bucket_cap=1048576 or less, or a larger bucket_cap_mb",
        ),
        ({"bucket_cap_mb": 0}, "bucket caps of 0 and 0 bytes\n  needed: positive sizes"),
        (
            {"inner": "wholestep.ddp"},
            "inner='wholestep.ddp' is this backend itself\n"
            '  needed: a backend that compiles\n  next: inner="inductor"',
        ),
    ],
)
def test_refusals(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ws.BackendError) as error:
        ws.ddp_backend(**given)
    assert str(error.value) == text


def test_unknown_inner_backend() -> None:
    with pytest.raises(
        ws.BackendError, match=r"there is no torch.compile backend 'indcutor'\n  needed: one of .*inductor"
    ):
        ws.ddp_backend(inner="indcutor")


# -- next to torch's own ----------------------------------------------------------------------


def test_torchs_own_splitter_is_off() -> None:
    ws.ddp_backend(inner="eager")
    assert torch._dynamo.config.optimize_ddp is False


def test_another_way_of_ddp_is_left_alone() -> None:
    with torch._dynamo.config.patch(optimize_ddp="no_optimization"):
        ws.ddp_backend(inner="eager")
        assert torch._dynamo.config.optimize_ddp == "no_optimization"


def test_splitting_twice_is_refused() -> None:
    model = torch.compile(Ddp(Mlp([600] * 4), bucket_cap_mb=1), backend=ws.ddp_backend(inner="eager"))
    torch._dynamo.config.optimize_ddp = True
    with pytest.raises(Exception, match=r"torch's own splitter for DDP models split this graph before 'wholestep.ddp'"):
        model(torch.randn(4, 600))


NAMED = """
import sys
import torch
import torch.distributed as dist
from torch import nn

assert "wholestep" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(600, 600), nn.Linear(600, 600)

    def forward(self, x):
        return self.two(self.one(x))


model = torch.compile(nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=1), backend="wholestep.ddp")
backend = torch._dynamo.lookup_backend("wholestep.ddp")
backend.inner = torch._dynamo.lookup_backend("eager")
model(torch.randn(4, 600)).sum().backward()
print([b.size_bytes for b in backend.buckets], "wholestep.ddp" in torch._dynamo.list_backends())
dist.destroy_process_group()
"""


@pytest.mark.full
def test_the_name_in_dynamos_registry(tmp_path: Path) -> None:
    """With the entry points of pyproject.toml installed, the name is enough and wholestep need not be imported."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch_dynamo_backends"]
    folder = tmp_path / "named-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: named\nVersion: 0\n")
    lines = "".join(f"{name} = {place}\n" for name, place in points.items())
    (folder / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{lines}")
    (tmp_path / "named.py").write_text(NAMED)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, tmp_path / "named.py"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1:] == ["[1442400, 1442400] True"], done.stderr


def test_it_is_a_backend_with_a_name() -> None:
    assert isinstance(ws.ddp_backend(inner="eager"), DdpBackend)
    assert ws.ddp_backend(inner="eager").__name__ == "wholestep.ddp"
