"""One op of PyTorch's own database in a small training step: on one device in eager, and by every plan on all ranks."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import wholestep as ws
from tests.simulate import Simulation, cut
from wholestep import partition, plan
from wholestep.capture import Capture, capture_step
from wholestep.errors import WholestepError
from wholestep.graph.graph import Role
from wholestep.rules.registry import is_random

TOLERANCE = 1e-6  # relative to the largest value: some ops are ill-conditioned
LARGEST = 600  # elements of all tensors of a sample
SAMPLES = 2
QUICK_LINK = ws.Hardware.measured(
    flops_per_us=10, memory_bytes_per_us=100, launch_us=0.1, link_us=0.1, link_bytes_per_us=10_000
)  # what can be cut pays, however small
UNWRITTEN = ("empty", "new_empty")
"""Ops that return memory which nobody wrote: their values mean nothing."""


@dataclass(frozen=True)
class Outcome:
    """What became of one sample under one plan: `equal`, `refused`, `shapes` (random numbers), or `wrong`."""

    verdict: str
    text: str = ""
    how: str = ""


@dataclass(frozen=True)
class Sample:
    """Arguments of an op, their tensors taken out; `trained` are the places of those that have gradients."""

    op: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    trained: tuple[int, ...]
    others: tuple[Any, ...]
    structure: Any

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The op's outputs on other tensors."""
        given = iter(tensors)
        flat = [next(given) if isinstance(x, _Hole) else x for x in self.others]
        args, kwargs = pytree.tree_unflatten(flat, self.structure)
        made = self.op(*args, **kwargs)
        if hasattr(made, "solution"):
            made = made.solution  # of `lstsq`: the rest depends on values, and is refused
        return [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]


class _Hole:
    """Where a tensor was."""


# -- samples -----------------------------------------------------------------------------------
def samples_of(info: Any, seed: int) -> list[Sample]:
    """The first small, dense samples that have most dims, and one without elements; another seed has these shapes."""
    torch.manual_seed(seed)
    kept: list[Sample] = []
    first = (torch.float64, torch.complex128, torch.float32, *sorted(info.dtypes, key=str))
    dtype = next((d for d in first if d in info.dtypes), None)
    if dtype is None:
        return []  # not on the CPU
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for given in islice(info.sample_inputs("cpu", dtype, requires_grad=grad), 24):
        flat, structure = pytree.tree_flatten(((given.input, *given.args), dict(given.kwargs)))
        tensors = tuple(x for x in flat if isinstance(x, Tensor))
        plain = all(type(t) is Tensor and t.layout is torch.strided and not t.is_quantized for t in tensors)
        if not plain or sum(t.numel() for t in tensors) > LARGEST:
            continue
        trained = tuple(i for i, t in enumerate(tensors) if t.requires_grad)
        others = tuple(_Hole() if isinstance(x, Tensor) else x for x in flat)
        kept.append(Sample(info.op, tuple(t.detach().clone() for t in tensors), trained, others, structure))
    best = sorted(kept, key=lambda s: -min(3, sum(n > 1 for t in s.tensors for n in t.shape)))
    empty = [s for s in best[SAMPLES:] if not all(t.numel() for t in s.tensors)]
    return best[:SAMPLES] + empty[:1]


# -- the step ------------------------------------------------------------------------------------
class Scaled(nn.Module):
    """The op on tensors of the batch, each scaled by a parameter of the size of its last dim."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        shapes = {i: sample.tensors[i].shape[-1:] for i in sample.trained}
        self.scales = nn.ParameterDict({str(i): torch.ones(s, dtype=torch.float64) for i, s in shapes.items()})
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        given = [self._scaled(i, t) for i, t in enumerate(leaves)]
        return self.sample.run(given)

    def _scaled(self, i: int, leaf: Tensor) -> Tensor:
        return (leaf * self.scales[str(i)]).to(leaf.dtype) if str(i) in self.scales else leaf


class Held(nn.Module):
    """The op on parameters, which ranks hold in shards; what it makes is scaled by the batch."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.sample = sample
        self.weights = nn.ParameterDict({str(i): sample.tensors[i].clone() for i in sample.trained})

    def forward(self, *leaves: Tensor) -> list[Tensor]:
        *given, scale = leaves
        left = iter(given)
        count = len(self.sample.tensors)
        made = self.sample.run([self.weights[str(i)] if str(i) in self.weights else next(left) for i in range(count)])
        return [m * scale.mean().to(m.dtype) if m.is_floating_point() or m.is_complex() else m for m in made]


def step(model: nn.Module, optimizer: SGD, *leaves: Tensor) -> list[Tensor]:
    """One update by a loss that weighs every element of every output differently; returns what the op made."""
    optimizer.zero_grad()
    made = model(*leaves)
    losses = [_weighed(m) for m in made if m.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
        optimizer.step()
    return [m.detach() for m in made]


def _weighed(made: Tensor) -> Tensor:
    real = torch.view_as_real(made) if made.is_complex() else made
    weights = torch.linspace(0.5, 1.5, max(real.numel(), 1), dtype=torch.float64)[: real.numel()]
    return (real.double() * weights.view(real.shape)).sum()


# -- running -------------------------------------------------------------------------------------
@dataclass
class _Run:
    """A captured step with its batch, and one device's results: what the op made, parameters after the update."""

    kind: str
    model: nn.Module
    leaves: list[tuple[Tensor, ...]]
    capture: Capture
    random: bool


def outcomes(info: Any) -> Iterator[Outcome]:
    """Every sample of an op by every plan."""
    with warnings.catch_warnings(), mock.patch.object(database, "wrapper_set_seed", lambda op, *a, **k: op(*a, **k)):
        warnings.simplefilter("ignore")
        for number, (sample, twin) in enumerate(zip(samples_of(info, 1), samples_of(info, 2), strict=True)):
            for kind in ("batch", "parameters") if sample.trained else ("batch",):
                how = f"sample {number}, {kind}"
                yield from _outcomes(info, kind, how, sample, twin)


def _outcomes(info: Any, kind: str, how: str, sample: Sample, twin: Sample) -> Iterator[Outcome]:
    model = Scaled(sample) if kind == "batch" else Held(sample)
    alike = [t.shape for t in sample.tensors] == [t.shape for t in twin.tensors]
    leaves = [_leaves(kind, s, rank) for rank, s in enumerate((sample, twin if alike else sample))]
    try:
        random = info.name.startswith(UNWRITTEN) or _is_random(model, leaves[0])
    except Exception as error:
        yield Outcome("refused", f"eager: {type(error).__name__}", how)
        return
    made = _guarded(lambda: _captured(kind, model, leaves, random))
    if isinstance(made, Outcome):
        yield replace(made, how=how)
        return
    for what, work in _plans(made):
        yield replace(_guarded(work), how=f"{how}, {what}")


def _leaves(kind: str, sample: Sample, rank: int) -> tuple[Tensor, ...]:
    if kind == "batch":
        return sample.tensors
    scale = torch.tensor([0.5, 1.5, 2.0, 3.0]) + rank
    return (*(t for i, t in enumerate(sample.tensors) if i not in sample.trained), scale.double())


def _captured(kind: str, model: nn.Module, leaves: list[tuple[Tensor, ...]], random: bool) -> _Run:
    made = copy.deepcopy(model)
    captured = capture_step(step, (made, _optimizer(made), *leaves[0]), {})
    draws = any(is_random(node) for node in captured.graph.graph.nodes)
    return _Run(kind, model, leaves, captured, random or draws)


def _optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.25)


def _is_random(model: nn.Module, leaves: tuple[Tensor, ...]) -> bool:
    results: list[list[Tensor]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = copy.deepcopy(model)
        results.append(step(made, _optimizer(made), *(t.clone() for t in leaves)))
    return any(off(a, b) > 0 for a, b in zip(*results, strict=True))


def _guarded(work: Callable[[], Any]) -> Any:
    """What `work` makes, or what became of it."""
    try:
        return work()
    except WholestepError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("wrong", "".join(traceback.format_exception(error)[-4:]))


def _plans(run: _Run) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for style in ("replicate", "fully_shard"):
        yield f"per_rank {style}", partial(_per_rank, run, style)
        yield f"global {style} dp=2", partial(_global, run, "dp=2", _data(style))
    yield "tensor parallel", partial(_global, run, "tp=2", ws.TensorParallel("auto", hardware=QUICK_LINK))
    if run.kind == "batch":
        yield "global replicate dp=3", partial(_global, run, "dp=3", _data("replicate"))
        for dim in range(1, min(4, max((t.dim() for t in run.leaves[0]), default=0))):
            yield f"global dim {dim}", partial(_global, run, "dp=2", _data("replicate", dim))


def _data(style: Any, dim: int = 0) -> ws.DataParallel:
    return ws.DataParallel(style, semantics="global", input_batch_dim=dim)


def _per_rank(run: _Run, style: str) -> Outcome:
    """Each rank on its own batch, gradients averaged by hand."""
    planned = plan(run.capture.graph, "dp=2", ws.DataParallel(style))
    models = [copy.deepcopy(run.model) for _ in range(2)]
    leaves = [_copies(own) for own in run.leaves]
    expected = [step(m, _optimizer(m), *own) for m, own in zip(models, leaves, strict=True)]
    both = [dict(m.named_parameters()) for m in models]
    params = {n: torch.stack([own[n].detach() for own in both]).mean(0) for n in both[0]}
    named = [_named(run, own) for own in run.leaves]
    return _compared(run, planned, named, expected, [params | _named(run, own) for own in leaves])


def _global(run: _Run, mesh: str, parallel: Any) -> Outcome:
    """All ranks compute what one device does of one batch."""
    planned = plan(run.capture.graph, mesh, parallel)
    model = copy.deepcopy(run.model)
    leaves = _copies(run.leaves[0])
    expected = step(model, _optimizer(model), *leaves)
    whole = _named(run, run.leaves[0])
    ranks: list[dict[str, Tensor]] = [{} for _ in range(planned.mesh.size)]
    for name, value in whole.items():
        if name in planned.storage:
            for rank, piece in enumerate(cut(value, planned.storage[name], planned.mesh)):
                ranks[rank][name] = piece
    held = {n: p.detach() for n, p in model.named_parameters()} | _named(run, leaves)
    return _compared(run, planned, ranks, [expected] * planned.mesh.size, [held] * planned.mesh.size)


def _compared(
    run: _Run, planned: ws.Plan, batches: list[dict[str, Tensor]], expected: list[list[Tensor]],
    held: list[dict[str, Tensor]],
) -> Outcome:  # fmt: skip
    """Results, and what the step changed: parameters, and leaves of the batch that an op writes into."""
    simulation = Simulation(run.capture, planned, partition(run.capture.graph, planned))
    simulation.start()
    made = simulation.step(batches)
    found: list[tuple[str, Tensor, Tensor]] = []
    for rank, (row, wanted) in enumerate(zip(made, expected, strict=True)):
        found += [(f"output {i} on rank {rank}", a, b) for i, (a, b) in enumerate(zip(row, wanted, strict=True))]
    for name, pieces in simulation.pieces.items():
        own = [h[name] for h in held]
        if planned.storage[name].varies:
            found += [(f"{name} on rank {rank}", a, b) for rank, (a, b) in enumerate(zip(pieces, own, strict=True))]
        else:
            found.append((name, simulation.whole(name), own[0]))
    for where, value, wanted in found:
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            text = f"{value.dtype} {list(value.shape)}, not {wanted.dtype} {list(wanted.shape)}"
            return Outcome("wrong", f"{where}: {text}")
        if not run.random and not off(value, wanted) <= TOLERANCE:
            return Outcome("wrong", f"{where} differs by {off(value, wanted):.1e}")
    return Outcome("shapes" if run.random else "equal")


def _named(run: _Run, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Leaves of the batch by the names that the capture gave them; those that nothing reads are no inputs."""
    names = [f"arg{i}" for i in range(2, 2 + len(leaves))]
    known = {i.name for i in run.capture.graph.inputs if i.role is Role.BATCH}
    assert known <= set(names), f"{known} are not {names}"
    return dict(zip(names, leaves, strict=True))


def _copies(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in leaves]


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest magnitude; what is not finite must stand in its place."""
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (found, wanted))
    if torch.equal(found, wanted) or not found.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    finite = wanted.isfinite()
    alike = torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num())
    if not alike or not bool(found[finite].isfinite().all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = wanted[finite].abs().max().clamp_min(1.0)
    return float((found[finite] - wanted[finite]).abs().max() / scale)
