"""Arguments to check rules on: from the rules, recorded from PyTorch's test samples, or made from a schema."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice, product
from typing import Any, cast

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep import _torch
from wholestep.errors import RuleError
from wholestep.rules.registry import RULES, SAMPLES, find
from wholestep.rules.testing.check import CheckResult, Failure, OpCase, Sample, case_of, check_case
from wholestep.rules.testing.harness import tensors_in, with_tensors

EACH_OP = 10  # samples kept for an op
_EACH_INFO = 16  # samples of one entry of PyTorch's database
_LARGEST = 2500  # elements of all tensors of a sample
_KINDS = 40

Progress = Callable[[float], None]


def overloads(namespace: str) -> list[Any]:
    """Return every overload of a namespace."""
    names = [n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]
    found: dict[Any, None] = {}
    for name in sorted(names):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if _torch.is_op(op):
            found[op] = None
    return list(found)


def table(pattern: str = "*") -> list[Any]:
    """Ops with a rule, from the table and from families of ATen; `pattern` is a glob."""
    found = dict.fromkeys(target for target in RULES if not isinstance(target, str))
    for target in overloads("aten"):
        if not _torch.schema_of(target).is_mutable and find(target):
            found[target] = None
    named = {str(target): target for target in found}
    return [named[name] for name in sorted(named) if fnmatch(name, pattern) or fnmatch(name, f"aten.{pattern}")]


def samples_of(targets: Iterable[Any], progress: Progress = lambda done: None) -> dict[Any, list[Sample]]:
    """Samples for each op: of its rule, then recorded from PyTorch's, else made from its schema."""
    targets = list(targets)
    out: dict[Any, list[Sample]] = {}
    recorded = record(targets, progress)
    for target in targets:
        listed = [as_sample(given) for given in SAMPLES[target]()] if target in SAMPLES else []
        out[target] = [*listed, *recorded.get(target, [])][: max(EACH_OP, len(listed))]
        if not out[target] and target not in RULES:
            out[target] = from_schema(target)
    return out


def as_sample(given: Sequence[Any]) -> Sample:
    """A tuple of arguments; a dict at its end holds keyword arguments."""
    if given and isinstance(given[-1], dict):
        return Sample(tuple(given[:-1]), cast(Mapping[str, Any], given[-1]))
    return Sample(tuple(given), {})


@dataclass
class _Recording:
    """The best sample of each kind of call: the same numbers of dims, dtypes and other arguments."""

    wanted: frozenset[Any]
    kinds: dict[Any, dict[Any, tuple[int, Sample]]] = field(default_factory=dict[Any, "dict[Any, tuple[int, Sample]]"])

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call; keep its arguments if they are a sample of a wanted op."""
        found = self._sample(target, args, kwargs)
        made = target(*args, **kwargs)
        if found and all(_torch.is_plain(t) and bool(t.isfinite().all()) for t in tensors_in([made])):
            plain, kind, new = found
            self.kinds.setdefault(plain, {})[kind] = new
        return made

    def _sample(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target not in self.wanted:
            target = _torch.functional_form(target) if _torch.is_op(target) and not kwargs.get("out") else None
            if target not in self.wanted:
                return None
        tensors = list(tensors_in([*args, *kwargs.values()]))
        if not all(map(_torch.is_plain, tensors)) or sum(t.numel() for t in tensors) > _LARGEST:
            return None
        kinds = self.kinds.get(target, {})
        kind = (
            tuple((t.ndim, t.dtype) for t in tensors),
            repr(_torch.tree_map_only(Tensor, lambda _: "T", (args, kwargs))),
        )
        score = sum(size > 1 for t in tensors for size in t.shape) - 100 * sum(t.numel() == 0 for t in tensors)
        if len(kinds) >= _KINDS if kind not in kinds else score <= kinds[kind][0]:
            return None
        return target, kind, (score, Sample(*with_tensors(args, kwargs, [_lively(t.detach()) for t in tensors])))

    def best(self) -> dict[Any, list[Sample]]:
        ranked = {op: sorted(kinds.values(), key=lambda found: found[0] <= 0) for op, kinds in self.kinds.items()}
        return {op: [sample for _, sample in found[:EACH_OP]] for op, found in ranked.items()}


def record(targets: Iterable[Any], progress: Progress = lambda done: None) -> dict[Any, list[Sample]]:
    """Arguments with which PyTorch's sample functions call `targets`, forward and backward, small and in float64."""
    recording = _Recording(frozenset(t for t in targets if _torch.is_op(t) and t.namespace == "aten"))
    if recording.wanted:
        # each entry of the database inspects the whole stack, which is short in a new thread
        with ThreadPoolExecutor(1) as short:
            short.submit(_record, recording, progress).result()
    return recording.best()


class _OpRecorder(TorchDispatchMode):
    """A dispatch mode that passes every op call to `call`."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})


def _record(recording: _Recording, progress: Progress) -> None:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for number, info in enumerate(op_db):
            with contextlib.suppress(Exception):  # an op that this build or this machine lacks
                for sample in _samples(info):
                    _run(info, sample, recording)
            progress((number + 1) / len(op_db))
        for target, samples in SAMPLES.items():
            for sample in map(as_sample, samples()) if _torch.is_op(target) else ():
                _run_backward(target, sample, recording)


def _lively(tensor: Tensor) -> Tensor:
    """A copy; zeros, which hide most mistakes, become random numbers."""
    if tensor.is_floating_point() and tensor.numel() > 1 and not bool(tensor.any()):
        return torch.randn_like(tensor)
    return tensor.clone()


def _samples(info: Any) -> Iterator[Any]:
    for dtype in [d for d in (torch.float64, torch.int64) if d in info.dtypes][:1]:
        grad = dtype == torch.float64 and info.supports_autograd
        yield from islice(info.sample_inputs("cpu", dtype, requires_grad=grad), _EACH_INFO)


def _run(info: Any, sample: Any, recording: _Recording) -> None:
    given = list(tensors_in([sample.input, sample.args, tuple(sample.kwargs.values())]))
    if sum(t.numel() for t in given) > _LARGEST:
        return
    with _OpRecorder(recording.call):
        _differentiate(info.op(sample.input, *sample.args, **sample.kwargs), given)


def _run_backward(target: Any, sample: Sample, recording: _Recording) -> None:
    """Record the backward of a sample of a forward; some ops allow only their first operand to have a gradient."""
    for count in (None, 1):
        tensors = [t.clone() for t in tensors_in([*sample.args, *sample.kwargs.values()])]
        for tensor in [t for t in tensors if t.is_floating_point()][:count]:
            tensor.requires_grad_()
        args, kwargs = with_tensors(sample.args, sample.kwargs, tensors)
        with contextlib.suppress(Exception):
            made = target(*args, **kwargs)
            with _OpRecorder(recording.call):
                _differentiate(made, tensors)
            return


def _differentiate(made: Any, given: Sequence[Tensor]) -> None:
    outputs = [t for t in tensors_in([made]) if t.requires_grad]
    inputs = [t for t in given if t.requires_grad]
    if outputs and inputs:
        torch.autograd.grad(outputs, inputs, [torch.rand_like(t) for t in outputs], allow_unused=True)


_SHAPES = ([(4, 5), (3,), ()], [(5, 3), (6, 5)])


def from_schema(target: Any) -> list[Sample]:
    """Samples of a pointwise op: tensors of one shape, lists of tensors with several numbers of dims."""
    found: list[Sample] = []
    for shapes in _SHAPES:
        singles: list[tuple[int, ...]] = [shapes[0], (), (len(shapes),)]
        choices = product(singles, (torch.float64, torch.int64), (False, True))
        made = (_filled(target, shapes, single, dtype, every) for single, dtype, every in choices)
        found += islice((sample for sample in made if sample and _runs(target, sample)), 1)
    return found


def _filled(
    target: Any, shapes: Sequence[tuple[int, ...]], single: tuple[int, ...], dtype: torch.dtype, every: bool
) -> Sample | None:
    """Values for the arguments of the schema, with `every` also for those with a default; None for unknown types."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for number, given in enumerate(_torch.schema_of(target).arguments):
        kind = str(given.type)
        if given.has_default_value() and "List[Tensor]" not in kind and not (every and kind in _OPTIONAL):
            if not given.kwarg_only:
                args.append(given.default_value)
            continue
        source = torch.Generator().manual_seed(number)
        value: Any = None
        if "List[Tensor]" in kind:
            step, unused = "step" in given.name, given.name.startswith("max_") and not _amsgrad(shapes)
            value = [
                torch.ones(()) if step else _uniform(shape, dtype, source) for shape in shapes[: 0 if unused else None]
            ]
        elif kind in ("Tensor", "Optional[Tensor]"):
            value = _uniform(single, dtype, source)
        elif kind in _NUMBERS:
            value = _amsgrad(shapes) if given.name == "amsgrad" else _NUMBERS[kind]
        elif kind == "List[number]":
            value = [0.5 + i for i in range(len(shapes))]
        elif not kind.startswith("Optional"):
            return None
        kwargs |= {given.name: value} if given.kwarg_only else {}
        args += [] if given.kwarg_only else [value]
    return Sample(tuple(args), kwargs)


_OPTIONAL = ("number", "Optional[number]", "Optional[Tensor]")
_NUMBERS: dict[str, Any] = {"number": 2, "Optional[number]": 2, "float": 0.1, "bool": False, "int": 1}


def _amsgrad(shapes: Sequence[tuple[int, ...]]) -> bool:
    """With and without the third state of Adam."""
    return len(shapes) > 2


def _uniform(shape: tuple[int, ...], dtype: torch.dtype, source: torch.Generator) -> Tensor:
    if dtype == torch.int64:
        return torch.randint(1, 9, shape, generator=source)
    return torch.rand(shape, dtype=dtype, generator=source) + 0.5


def _runs(target: Any, sample: Sample) -> bool:
    tensors = tensors_in([*sample.args, *sample.kwargs.values()])
    try:
        args, kwargs = with_tensors(sample.args, sample.kwargs, [t.clone() for t in tensors])
        target(*args, **kwargs)
    except Exception:  # ops refuse samples in many ways
        return False
    return True


@dataclass(frozen=True)
class Row:
    """The check of one op. `given`: samples that it accepts; `named`: it has a row of its own, not of a family."""

    result: CheckResult
    given: int
    runs: bool
    named: bool

    @property
    def verdict(self) -> str:
        """`holds`, `shapes hold` (random values), `wrong`, `no sample`, `not on CPU`, or `says nothing`."""
        if self.result.failures:
            return "wrong"
        if not self.runs:
            return "not on CPU"
        if not self.result.samples:
            return "says nothing" if self.given or not self.named else "no sample"
        return "shapes hold" if self.result.shapes_only else "holds"

    @property
    def ok(self) -> bool:
        """False if the rule is wrong or was never tried."""
        return self.verdict not in ("wrong", "no sample") and not (self.named and self.verdict == "says nothing")


def runs_on_cpu(target: Any) -> bool:
    """Return whether an op has a CPU kernel; kernels of `overrideable` ops only raise."""
    if "overrideable" in target._schema.name:
        return False
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(target.name(), "CPU"))


def cases_of(target: Any, samples: Iterable[Sample]) -> list[OpCase]:
    """The op run on each sample, without samples that it refuses (they are for another overload)."""
    found: list[OpCase] = []
    for sample in samples:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, IndexError):
            found.append(case_of(target, sample))
    return found


def check_op(target: Any, samples: Sequence[Sample]) -> Row:
    """Check one op on its samples; a rule that does not fit a sample is a failure too."""
    runs = not _torch.is_op(target) or runs_on_cpu(target)
    cases = cases_of(target, samples) if runs else []
    result = CheckResult(str(target))
    for case in cases:
        try:
            found = check_case(case)
        except RuleError as error:
            failure = Failure(case.name, "the rule", "bound", "a sample", f"is refused: {error.found}", error.needed)
            found = CheckResult(case.name, 1, failures=(failure,))
        result = result + found if found else result
    return Row(result, len(cases), runs, target in RULES)
