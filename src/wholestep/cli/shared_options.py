"""The options about a step that `plan` and `simulate` share: one declaration, whose fields become options of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from wholestep.units import parse_bytes, parse_count, parse_price

from .hf import ModelSpec, spec_of
from .target import AsyncTp, Hf, Layers, Style, Target, Tp, refuse

if TYPE_CHECKING:
    from wholestep.capture.capture_options import CaptureOptions
    from wholestep.cost.software import Software
    from wholestep.hardware.hardware import Hardware
    from wholestep.plan.pipelines import Pipeline
    from wholestep.planner.recompute_kinds import RecomputeKind

Attention = StrEnum("Attention", ["auto", "gather", "heads", "ring"])
Experts = StrEnum("Experts", ["auto", "rows", "gather_rows", "weights"])
Semantics = StrEnum("Semantics", ["per_rank", "global"])
Dtype = StrEnum("Dtype", ["bfloat16", "float16", "float32"])
Optimizer = StrEnum("Optimizer", ["adamw", "sgd"])
Precision = StrEnum("Precision", {"stored": "stored", "bf16": "bf16", "fp8": "fp8", "fp8_rowwise": "fp8-rowwise"})
Recompute = StrEnum("Recompute", ["none", "selective", "full", "auto"])
Order = StrEnum("Order", {"auto": "auto", "gpipe": "gpipe", "one_forward_one_backward": "1f1b",
                          "interleaved": "interleaved", "zero_bubble": "zero_bubble"})  # fmt: skip
Placement = StrEnum("Placement", ["loop", "v"])
_PANEL = "The step"


def _option(text: str, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, help=text, min=least, rich_help_panel=_PANEL)


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """A step, how it is trained, and what to say of its price. None where the user gave nothing."""

    hf: Hf = None
    layers: Layers = None
    batch: Annotated[int | None, _option("With --hf: sequences of a rank at a time (1).", least=1)] = None
    micro_batches: Annotated[
        int | None,
        _option(
            "With --hf: batches in a step, whose gradients accumulate (1); of a pipeline (4 for a stage).", least=1
        ),
    ] = None
    schedule: Annotated[Order | None, _option("With an axis pp: the order of a pipeline's blocks (1f1b).")] = None
    chunks: Annotated[int | None, _option("With an axis pp: stages on each rank (1; interleaved, v: 2).", least=1)] = (
        None
    )
    placement: Annotated[
        Placement | None,
        _option("With an axis pp: which rank has a stage: over and over from the first (loop), or forth and back."),
    ] = None
    seq: Annotated[
        str | None, _option("With --hf: tokens in each, as 4096, 128Ki or 1M (2048, or the model's limit if less).")
    ] = None
    dtype: Annotated[Dtype | None, _option("With --hf: of parameters, gradients and optimizer state (float32).")] = None
    precision: Annotated[
        Precision | None,
        _option(
            "bf16: float32 parameters compute in it (with --hf); fp8: large linear layers multiply in it; stored: "
            "parameters compute in their own dtype (with MODEL)."
        ),
    ] = None
    optimizer: Annotated[Optimizer | None, _option("With --hf (adamw).")] = None
    style: Annotated[Style | None, _option("The data-parallel style (fully_shard).")] = None
    semantics: Annotated[Semantics, _option("per_rank: as DDP; global: as one device on the whole batch.")] = (
        Semantics.per_rank
    )
    experts: Annotated[Experts | None, _option("Ranks of the first axis have experts of their own; what travels.")] = (
        None
    )
    cp: Annotated[
        Attention | None,
        _option("How tokens meet in attention on an axis cp (auto); with --auto: ranks may share them."),
    ] = None
    tp: Tp = None
    async_tp: AsyncTp = False
    tp_regather: Annotated[
        bool, _option("Activations that --tp gathers are re-gathered for the backward instead of kept.")
    ] = False
    tp_axis: Annotated[str, _option("The axis of --tp; with --hf, of the model's own plan.")] = "tp"
    recompute: Annotated[
        Recompute | None, _option("In the backward: none, selective or full of each layer, auto to fit --memory.")
    ] = None
    tile_rows: Annotated[
        int, _option("Compute long products and their loss, as logits, in so many tiles of rows.", least=1)
    ] = 1
    offload_saved: Annotated[
        int,
        _option("Keep what layers save in host memory, from where it is back so many layers ahead (0: not).", least=0),
    ] = 0
    memory: Annotated[
        str | None, _option("Memory of a rank, as 80GiB: that --auto, gpus or --recompute auto fits into.")
    ] = None
    tokens: Annotated[str | None, _option("Show the time of a run of so many, as 300B or 1T.")] = None
    price: Annotated[str | None, _option("With --tokens, its price; of a GPU and hour, as 2.5/h.")] = None
    batch_tokens: Annotated[
        int | None, _option("With MODEL: tokens in the batch that its function returns.", least=1)
    ] = None
    backend: Annotated[str, _option("eager or inductor: ops one by one, or as the kernels of a compiler.")] = "eager"
    stack: Annotated[
        str | None, _option("Kernels and host of other software, as torchtitan-compile; names them if wrong.")
    ] = None
    profile: Annotated[Path | None, _option("Measured kernels: a table, or a trace of torch.profiler with shapes.")] = (
        None
    )

    def check(self, chooses: bool, pipeline: bool = False) -> None:
        """Refuse options that would have no effect; `chooses`: a search fits plans into --memory,
        `pipeline`: the mesh has an axis of stages.

        Raises:
            PlanError: a size, a number or a price is malformed.
        """
        unused = [name for name, value in self._of_hf.items() if value is not None]
        if pipeline and "micro_batches" in unused:
            unused.remove("micro_batches")
        if self.hf is None and unused:
            refuse(f"--{unused[0].replace('_', '-')} without --hf: the function that returns the step decides that")
        if self.hf is not None and self.batch_tokens is not None:
            refuse("--batch-tokens with --hf: --batch and --seq say it")
        if self.experts is not None and chooses:
            refuse("--experts with --auto: needed one of them")
        if self.memory is not None and not chooses and self.recompute is not Recompute.auto:
            refuse("--memory without --auto or --recompute auto: it has no effect")
        for name in ("schedule", "chunks", "placement"):
            if not pipeline and getattr(self, name) is not None:
                refuse(f"--{name} without an axis pp in --mesh: it has no effect")
        for name, unset in (("tile_rows", 1), ("offload_saved", 0)):
            if pipeline and getattr(self, name) != unset:
                refuse(f"--{name.replace('_', '-')} with an axis pp: needed one of them")
        if self.price is not None and self.tokens is None:
            refuse("--price without --tokens: it has no effect")
        if self.memory is not None:
            parse_bytes(self.memory, "--memory")
        _ = self.wanted_tokens, self.gpu_hour, self.software

    @cached_property
    def software(self) -> Software:
        """What runs the step, by `--backend`, `--stack` and `--profile`."""
        from wholestep.backend.build import BACKENDS
        from wholestep.cost.kernel_times import KernelTimes
        from wholestep.cost.software import OWN, software_named

        if self.backend not in BACKENDS:
            refuse(f"--backend {self.backend} is unknown: give one of {', '.join(BACKENDS)}")
        software = OWN if self.stack is None else software_named(self.stack)
        profile = None if self.profile is None else KernelTimes.load(self.profile)
        return software.measured(self.backend == "inductor", profile)

    @property
    def _of_hf(self) -> dict[str, Any]:
        names = ("batch", "seq", "dtype", "layers", "optimizer", "micro_batches")
        length = None if self.seq is None else round(parse_count(self.seq, "--seq", least=2))
        return {name: getattr(self, name) for name in names} | {"seq": length}

    def pipeline(self, stages: int = 0) -> Pipeline:
        """The pipeline along an axis of so many ranks; of 0, one that leaves to a search what was not given."""
        from wholestep.plan.pipelines import Pipeline

        order: Any = str(self.schedule or ("1f1b" if stages else "auto"))
        placement: Any = str(self.placement or "loop")
        pieces = self.micro_batches or 4 * stages or 1
        return Pipeline(micro_batches=pieces, schedule=order, chunks=self.chunks, placement=placement)

    def spec(self, batch: int | None) -> ModelSpec | None:
        """The model of `--hf` with sequences of a rank; None without `--hf`."""
        return spec_of(self.hf, **self._of_hf | {"batch": batch})

    def capture_options(self, target: Target, hardware: Hardware) -> CaptureOptions:
        """With the kernels of `hardware`. By `--precision`, which is bf16 for a model of `--hf`, float32 computes in
        bfloat16 and is reduced in float32.
        """
        import torch

        from wholestep.capture.capture_options import CaptureOptions
        from wholestep.precision import Float8, MixedPrecision

        kernels = "cuda" if hardware.has_gpus else None
        precision = self.precision or (Precision.stored if self.hf is None else Precision.bf16)
        if precision is Precision.stored:
            return CaptureOptions(kernels=kernels)
        mixed = any(p.dtype is torch.float32 for model in target.models() for p in model.parameters())
        half = MixedPrecision(torch.bfloat16, torch.float32) if mixed else None
        recipes = {Precision.fp8: Float8("tensorwise"), Precision.fp8_rowwise: Float8("rowwise")}
        return CaptureOptions(mixed_precision=half, float8=recipes.get(precision), kernels=kernels)

    def recomputes(self, default: RecomputeKind = "none") -> RecomputeKind:
        """The kind of `--recompute`."""
        return default if self.recompute is None else cast(Any, self.recompute.value)

    @property
    def wanted_tokens(self) -> float | None:
        """`--tokens` as a number."""
        return None if self.tokens is None else parse_count(self.tokens, "--tokens")

    @property
    def gpu_hour(self) -> float | None:
        """`--price` as a number."""
        return None if self.price is None else parse_price(self.price, "--price")


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose parameter `step` is made of the options that are the fields of `SharedOptions`."""
    hints, parameters = (
        get_type_hints(SharedOptions, include_extras=True),
        inspect.signature(command, eval_str=True).parameters,
    )
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(SharedOptions)
    ]
    rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters.values() if p.name != "step"]

    @wraps(command)
    def run(**options: Any) -> None:
        step = {parameter.name: options.pop(parameter.name) for parameter in shared}
        command(step=SharedOptions(**step), **options)

    described: Any = run
    described.__signature__ = inspect.Signature([*rest, *shared])
    described.__annotations__ = {parameter.name: parameter.annotation for parameter in (*rest, *shared)}
    return run
