"""Training under gloo against DDP and FSDP2 in float32, each rank on its own data. See tests/dist/compare.py.

`EXACT` cases reduce in the same order with the same arithmetic: the same bits. The others, after five steps: 1e-6 in
parameters and buffers, 1e-5 in optimizer state, 1e-5 in losses (those that sum reach 50).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.catalogue import OPTIMIZERS
from tests.conftest import covering
from tests.dist.compare import Found, Job, run_jobs
from tests.dist.launch import run_ranks
from wholestep import DataParallel, LocalGraph, MixedPrecision
from wholestep.graph.nodes import is_wait
from wholestep.passes.schedule import Schedule
from wholestep.plan.data_parallel import STYLES

TOLERANCE = 1e-6
SGD = ("SGD-plain", "SGD-momentum", "SGD-foreach", "SGD-momentum-foreach")
REPLICATE, SHARD = DataParallel("replicate"), DataParallel("fully_shard")
BOTH = (REPLICATE, SHARD)


def without_reductions(local: LocalGraph) -> LocalGraph:
    """A faulty transformation: every rank keeps its own gradients."""
    for node in list(local.graph.nodes):
        if is_wait(node) and "all_reduce" in str(node.args[0].target):
            reduction = node.args[0]
            node.replace_all_uses_with(reduction.args[0])
            local.graph.erase_node(node)
            local.graph.erase_node(reduction)
    return local


def _styles(**options: Any) -> list[DataParallel]:
    return [DataParallel(style, **options) for style in STYLES if style != "hybrid"]  # type: ignore[arg-type]


# the reference results of the first compilers of this kind: SimpleMLP, summed loss, 2 ranks
EXACT = [
    *(Job("mlp-sum", recipe, parallel, lr=0.1) for recipe in SGD for parallel in BOTH),
    Job("mlp-sum", "Adam-fused", REPLICATE, lr=0.1),
    *(Job(case, "SGD-plain", parallel, lr=0.1) for case in ("reshaped", "square-batch") for parallel in BOTH),
    Job("transposed", "Adam-fused", DataParallel("replicate", input_batch_dim=1), lr=0.1),
    *(Job("mlp-mean", "SGD-momentum", parallel) for parallel in _styles()),
    *(Job("mlp-mean", "SGD-plain", parallel, lr=0.1) for parallel in BOTH),
]

# fused kernels round the ends of a shard in another way than its middle: 6e-8 of DDP, and the bits of FSDP2
CLOSE = [
    Job("mlp-sum", "Adam-fused", SHARD, lr=0.1),
    Job("transposed", "Adam-fused", DataParallel("fully_shard", input_batch_dim=1), lr=0.1),
    *(
        Job(case, recipe, parallel)
        for case, recipe in (
            ("uneven", "AdamW-weight_decay"),
            ("twice", "Adam-fused-amsgrad-wd"),
            ("tokens", "AdamW-plain"),
            ("by-hand", "SGD-nesterov-wd"),
            ("tied", "AdamW-fused"),
            ("convolutions", "SGD-momentum"),
            ("partly-used", "AdamW-plain"),
            ("clip-norm", "AdamW-plain"),
            ("clip-value", "SGD-momentum"),
            ("micro-batches", "SGD-momentum"),
            ("micro-clip", "SGD-momentum-foreach"),
            ("recurrent", "AdamW-plain"),
        )
        for parallel in BOTH
    ),
    *(Job("tokens", "AdamW-plain", parallel) for parallel in _styles()),
    *(Job("clip-norm", "AdamW-plain", parallel) for parallel in _styles()),
    *(Job("mlp-mean", recipe, parallel) for recipe in OPTIMIZERS if recipe.endswith("-plain") for parallel in BOTH),
    *(Job("mlp-mean", recipe, SHARD) for recipe in OPTIMIZERS if recipe.endswith("-two-groups")),
    *(Job("mlp-mean", "AdamW-plain", parallel, rows=(16, 5)) for parallel in BOTH),
]  # fmt: skip

FSDP = [
    Job("mlp-sum", "Adam-fused", SHARD, against="fsdp", lr=0.1),
    Job("tokens", "AdamW-fused", SHARD, against="fsdp"),
    Job("uneven", "SGD-momentum", SHARD, against="fsdp"),
    Job("twice", "AdamW-fused", DataParallel("fully_shard", reshard_after_forward=True), against="fsdp"),
    Job("twice", "AdamW-fused", DataParallel("fully_shard", reshard_after_forward=False), against="fsdp"),
]

OTHERS = {
    "bf16, reduced in f32": Job(
        "mlp-mean", "SGD-plain", against="fsdp",
        parallel=DataParallel("fully_shard"), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
    ),
    "bf16": Job("mlp-mean", "SGD-plain", against="fsdp",
        parallel=DataParallel("fully_shard"), mixed_precision=MixedPrecision(torch.bfloat16)),
    "sum": Job("mlp-mean", "SGD-plain", DataParallel("fully_shard", reduce="sum"), lr=0.05, their_lr=0.1),
    "sum, replicated": Job("mlp-mean", "SGD-plain", DataParallel("replicate", reduce="sum"), lr=0.05, their_lr=0.1),
    "buffers of the first rank": Job("convolutions", "SGD-momentum", DataParallel("replicate", broadcast_buffers=True)),
    "kept gradients": Job("mlp-mean", "AdamW-fused", REPLICATE, keep_grads=True),
    "kept gradients, sharded": Job("mlp-mean", "AdamW-fused", SHARD, keep_grads=True),
    "again": Job("twice", "SGD-momentum", DataParallel("fully_shard", reshard_after_forward=True)),
    "kept": Job("twice", "SGD-momentum", DataParallel("fully_shard", reshard_after_forward=False)),
    "nesterov": Job("mlp-mean", "SGD-nesterov-wd", SHARD),
    "without reductions": Job("mlp-mean", "SGD-plain", REPLICATE, lr=0.1, transform=without_reductions),
    "bytes": Job("mlp-mean", "AdamW-plain", SHARD),
}  # fmt: skip

SMALL = Schedule(bucket_bytes=3000, first_bucket_bytes=500)
SCHEDULED = [
    replace(job, schedule=schedule)
    for job in (
        *(Job("tokens", "AdamW-fused", parallel) for parallel in _styles()),
        *(Job("clip-norm", "AdamW-plain", parallel) for parallel in _styles()),
        Job("twice", "AdamW-fused", DataParallel("fully_shard", reshard_after_forward=True)),
        Job("micro-clip", "SGD-momentum-foreach", SHARD),
        Job("convolutions", "AdamW-foreach", DataParallel("zero1")),
        *(Job("mlp-mean", "AdamW-fused", parallel, rows=(16, 5)) for parallel in _styles()),  # other costs by rank
    )
    for schedule in (None, SMALL, "auto")
]

THREE = [Job(case, "AdamW-plain", parallel) for case in ("uneven", "tiny", "tokens") for parallel in _styles()]
FOUR = [
    *(
        Job(case, "AdamW-plain", DataParallel("hybrid"), mesh="replicate=2,shard=2")
        for case in ("tiny", "tokens", "micro-clip", "uneven")
    ),
    Job("mlp-mean", "SGD-plain", REPLICATE, lr=0.1),
    Job("mlp-mean", "SGD-plain", SHARD, lr=0.1),
    Job("tiny", "SGD-momentum", SHARD),
    Job("partly-used", "AdamW-plain", SHARD),
    *(Job("tokens", "AdamW-fused", parallel, schedule=SMALL) for parallel in _styles()),
    Job("micro-clip", "AdamW-plain", DataParallel("hybrid"), mesh="replicate=2,shard=2", schedule=SMALL),
    *(
        Job(case, recipe, parallel, mesh="node=2,rank=2", schedule=schedule)
        for case, recipe in (("tokens", "AdamW-fused"), ("uneven", "AdamW-plain"))
        for parallel in _styles()
        for schedule in (None, SMALL)
    ),
    Job("clip-norm", "AdamW-plain", SHARD, mesh="node=2,rank=2", schedule=SMALL),
    *(
        Job("mlp-mean", "SGD-momentum", parallel, mesh="node=2,rank=2", schedule=replace(SMALL, bucket_bytes=1 << 20))
        for parallel in (*_styles(), DataParallel("fully_shard", reshard_after_forward=True))
    ),
]  # fmt: skip


# what single tests below look at
GATHERED_ONCE = {"all_gather": 4, "reduce_scatter": 4}
SEEN_ONCE = {
    "exact mlp-sum/SGD-plain/replicate": {"all_reduce": 4},
    "exact mlp-sum/SGD-momentum-foreach/fully_shard": GATHERED_ONCE,
    "close mlp-sum/Adam-fused/fully_shard": GATHERED_ONCE,
    "close micro-batches/SGD-momentum/fully_shard": GATHERED_ONCE,
    "close micro-batches/SGD-momentum/replicate": {"all_reduce": 4},
    "close micro-clip/SGD-momentum-foreach/replicate": {"all_reduce": 4},
    "close micro-clip/SGD-momentum-foreach/fully_shard": {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1},
    "close convolutions/SGD-momentum/fully_shard": {"all_gather": 8, "reduce_scatter": 8},  # no buffer
}
UNEVEN = "three uneven/AdamW-plain/fully_shard"


def _named(jobs: list[Job], prefix: str) -> dict[str, Job]:
    """Jobs under names of their own."""
    names = [f"{prefix} {job}" for job in jobs]
    return {
        f"{name} {i}" if names.count(name) > 1 else name: job
        for i, (name, job) in enumerate(zip(names, jobs, strict=True))
    }


def _usual(jobs: dict[str, Job]) -> set[str]:
    """Jobs of `make test`: each case, options of optimizers, style, mesh and schedule occurs, and what single tests
    look at. Classes of optimizers are those of `test_optimizers`.
    """
    rows = [
        {
            "case": j.case,
            "options": j.recipe.partition("-")[2],
            "style": j.parallel.style,
            "mesh": j.mesh,
            "schedule": j.schedule,
        }
        for j in jobs.values()
    ]
    few = covering([{key: hash(value) for key, value in row.items()} for row in rows])
    return {name for n, name in enumerate(jobs) if n in few or name in {*SEEN_ONCE, UNEVEN}}


def _names(jobs: dict[str, Job]) -> list[Any]:
    """Names for `parametrize`; those that are not usual are marked `full`."""
    usual = _usual(jobs)
    return [pytest.param(name, marks=() if name in usual else pytest.mark.full) for name in jobs]


TWO = [_named(EXACT, "exact"), _named(CLOSE, "close"), _named(FSDP, "fsdp")]
SAME_BITS = {f"scheduled {job} {i}": (job, *SCHEDULED[i + 1 : i + 3]) for i, job in enumerate(SCHEDULED) if i % 3 == 0}
USUAL_BITS = _usual({name: jobs[0] for name, jobs in SAME_BITS.items()})


class Results:
    """What each rank found, by the name of a job. Jobs run when one is asked for: all usual ones, or all others."""

    def __init__(self, world: int, usual: dict[str, Job], others: dict[str, Job]) -> None:
        self._world, self._groups = world, (usual, others)
        self._found: dict[str, list[Found]] = {}

    def __getitem__(self, name: str) -> list[Found]:
        if name not in self._found:
            jobs = next(group for group in self._groups if name in group)
            ranks = run_ranks(run_jobs, self._world, list(jobs.values()), timeout=280)
            self._found |= {name: [rank[i] for rank in ranks] for i, name in enumerate(jobs)}
        return self._found[name]

    def usual(self) -> dict[str, list[Found]]:
        return {name: self[name] for name in self._groups[0]}


def _results(world: int, *several: dict[str, Job], always: dict[str, Job] | None = None) -> Results:
    usual = {name: jobs[name] for jobs in several for name in jobs if name in _usual(jobs)}
    others = {name: jobs[name] for jobs in several for name in jobs if name not in usual}
    return Results(world, usual | (always or {}), others)


@pytest.fixture(scope="module")
def two() -> Results:
    return _results(2, *TWO, always=OTHERS)


@pytest.fixture(scope="module")
def scheduled() -> Results:
    """Three results to a name: unscheduled, in small buckets, by default."""
    groups: tuple[dict[str, Job], dict[str, Job]] = ({}, {})
    for name, jobs in SAME_BITS.items():
        groups[name not in USUAL_BITS].update({f"{name} {i}": job for i, job in enumerate(jobs)})
    return Results(2, *groups)


@pytest.fixture(scope="module")
def three() -> Results:
    return _results(3, _named(THREE, "three"))


@pytest.fixture(scope="module")
def four() -> Results:
    return _results(4, _named(FOUR, "four"))


def _close(found: list[Found], tolerance: float = TOLERANCE) -> None:
    for rank, one in enumerate(found):
        for what, limit in (
            ("param", tolerance),
            ("loss", 10 * tolerance),
            ("state", 10 * tolerance),
            ("buffer", tolerance),
        ):
            assert getattr(one, what) <= limit, f"{what} on rank {rank}: {getattr(one, what):.1e}"
        assert one.seen == one.planned, f"rank {rank} planned {one.planned} and ran {one.seen}"


@pytest.mark.parametrize("name", _names(TWO[0]))
def test_same_bits_as_ddp(two: Results, name: str) -> None:
    for found in two[name]:
        assert (found.param, found.state, found.loss) == (0.0, 0.0, 0.0)
        assert found.seen == found.planned


@pytest.mark.parametrize("name", _names(TWO[1]))
def test_same_as_ddp(two: Results, name: str) -> None:
    _close(two[name])


@pytest.mark.parametrize("name", _names(TWO[2]))
def test_same_as_fsdp2(two: Results, name: str) -> None:
    _close(two[name])


@pytest.mark.parametrize("name", _names(_named(THREE, "three")))
def test_three_ranks(three: Results, name: str) -> None:
    _close(three[name])


@pytest.mark.full
@pytest.mark.parametrize("name", _names(_named(FOUR, "four")))
def test_four_ranks(four: Results, name: str) -> None:
    _close(four[name])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in USUAL_BITS else pytest.mark.full) for n in SAME_BITS]
)
def test_scheduled_steps_are_the_same_bits(scheduled: Results, name: str) -> None:
    """Merged, split, reordered: nothing but the number of collectives changes (two ranks add up in one order)."""
    for plain, *others in zip(*(scheduled[f"{name} {i}"] for i in range(3)), strict=True):
        for found in others:
            assert all(torch.equal(x, y) for x, y in zip(plain.params, found.params, strict=True))
            assert found.seen == found.planned
            assert sum(found.seen.values()) < sum(plain.seen.values())


# -- single results -----------------------------------------------------------------------
def test_without_reductions_the_comparison_fails(two: Results) -> None:
    for found in two["without reductions"]:
        assert found.param > 1e-4
        assert found.seen == {}


@pytest.mark.parametrize("name", [n for n in OTHERS if n != "without reductions"])
def test_options(two: Results, name: str) -> None:
    """Gradients reduced in bfloat16 are averaged in another order than FSDP2's: one more rounding."""
    _close(two[name], 2e-6 if name == "bf16" else TOLERANCE)


def test_each_parameter_is_gathered_and_reduced_once(two: Results) -> None:
    """However often it is used: a layer used twice, nesterov, gradients of several micro-batches, clipping."""
    assert two["kept"][0].seen == {"all_gather": 6, "reduce_scatter": 6}
    assert two["nesterov"][0].seen == {"all_gather": 4, "reduce_scatter": 4}
    for name, expected in SEEN_ONCE.items():
        assert two[name][0].seen == expected, name


def test_gathering_again(two: Results) -> None:
    """Weights that the backward reads are gathered a second time; the numbers are the same bits."""
    again, kept = two["again"], two["kept"]
    assert again[0].seen["all_gather"] > kept[0].seen["all_gather"]
    assert again[0].seen["reduce_scatter"] == kept[0].seen["reduce_scatter"]
    for a, b in zip(again, kept, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.params, b.params, strict=True))


def test_kept_gradients(two: Results) -> None:
    assert all(found.grad == 0 for found in two["kept gradients"])
    assert all(found.grad <= TOLERANCE for found in two["kept gradients, sharded"])


@pytest.mark.full
def test_bytes_at_rest(two: Results, three: Results, four: Results) -> None:
    """The first rank holds what the plan says; sharded evenly, that is 1/ranks of the whole within 1 %."""
    for ranks in (two, three, four):
        for name, found in ranks.usual().items():
            assert found[0].bytes_held == found[0].bytes_planned, name
            assert all(one.bytes_planned == found[0].bytes_planned for one in found), name
    for one in two["bytes"]:
        assert abs(one.bytes_held / one.bytes_whole - 1 / 2) < 0.01 / 2
    rows = 3 * 4 * (11 * 50 + 11 + 3 * 33 + 3)  # 33 and 7 rows over 3 ranks: at most 11 and 3; with two moments each
    assert three[UNEVEN][0].bytes_held == rows + 4 * 4  # and four counts


def test_no_warm_up_and_one_capture(two: Results) -> None:
    assert all(one.captures == 1 for found in two.usual().values() for one in found)


def test_means_are_part_of_the_collective(two: Results) -> None:
    """A rank sums parts of the mean: products are made as parts, all else is multiplied by half. Nothing divides."""
    program = two["bytes"][0].program
    assert program.count("reduce_scatter_tensor(%") == 4
    assert (program.count("'avg'"), program.count("'sum'")) == (0, 4)
    assert program.count("part_of_average(%") == 2
    assert "div(" not in program
