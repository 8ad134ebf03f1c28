"""Stacks: which kernels exist where a step runs, and what the host takes to start them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph, Node

from wholestep.cost.kernel_times import KernelTimes
from wholestep.cost.software import Fills
from wholestep.errors import PlanError, shown
from wholestep.hardware.hardware import Hardware

from . import stack_kernels

Accumulates = stack_kernels.Accumulates
Recompute = Literal["none", "attention", "products", "ops", "full"]


@dataclass(frozen=True)
class Stack:
    """The software that runs a step, by what it has and others lack: a `Software`, for `software=` of what predicts.

    Args:
        name: as for `wholestep simulate --stack`.
        compiled: ops on elements, norms and losses run as the kernels that Inductor makes of them (`cost.fusion`);
            else each op is a kernel.
        flash_attention: its generation, 1 to 3; 0: attention writes its scores, normalizes and reads them.
        recorded: the step is a CUDA graph, which the host starts at once.
        start_us: of the host for one kernel of the forward, with the Python around it; 0 for the device's `host_us`.
        backward_start_us: the same in the backward, which autograd starts from C++; 0 for `start_us`.
        waits: the host waits for the device before each forward and before each backward.
        fused_norms: RMSNorm is one kernel.
        fused_loss: where ops are compiled, those of the loss are too; else each of them passes over the logits.
        fused_optimizer: the update of all parameters is one kernel.
        accumulates: what adds up gradients of micro-batches: "own" as the program does; "half" in half precision;
            "product" the product that makes a gradient, in float32.
        copies: parameters and gradients are copied out of and into the buckets of collectives, as FSDP2 does.
        overlaps: gradients are reduced, and parameters gathered, while others are computed.
        fills: gradients of weights that are computed while gradients of activations travel: of "none", of the "own"
            linear, or "all".
        splits_update: some parameters are updated while gradients of others travel; else all in one update.
        regathers: parameters that are gathered for the forward are freed, and gathered again for the backward.
        regathers_activations: tokens that sequence parallelism gathers are freed and gathered again, too.
        recompute: what the backward computes again where nobody says so: "products" keeps results of products and
            attention, "ops" those of every other product.
        to_the_end: a recomputed layer runs to its end, as torch's did before 2.1; else to the last tensor that is read.
        traced: the step is one graph, which keeps only what is read; else selective recomputation keeps all it names.
        expandable_segments: of the allocator (`cost.reserved`).
        joint_qkv: queries, keys and values are one product, where they have as many heads.
        gathers_heads: behind norms of queries and keys, each rank gathers all heads and rotates them.
        whole_ends: with tensor parallelism the embedding is whole, and so are the logits that the loss reads.
        keeps_logits: the caller holds the logits, in float32, while the backward runs.
        source: of the figures.
        profile: measured kernels, which count as measured.

    Example:
        >>> print(ws.simulate(local, ws.Hardware.preset("dgx-h100"), software=Stack.named("torchtitan-compile")))
    """

    name: str
    compiled: bool = False
    flash_attention: int = 2
    recorded: bool = False
    start_us: float = 0.0
    backward_start_us: float = 0.0
    waits: bool = False
    fused_norms: bool = True
    fused_loss: bool = True
    fused_optimizer: bool = True
    accumulates: Accumulates = "own"
    copies: bool = False
    overlaps: bool = True
    fills: Fills = "none"
    splits_update: bool = False
    regathers: bool = True
    regathers_activations: bool = False
    recompute: Recompute = "none"
    to_the_end: bool = False
    traced: bool = False
    expandable_segments: bool = False
    joint_qkv: bool = False
    gathers_heads: bool = False
    whole_ends: bool = False
    keeps_logits: bool = False
    source: str = ""
    profile: KernelTimes | None = None

    @staticmethod
    def named(name: str) -> Stack:
        """The stack of a name.

        Raises:
            PlanError: there is none.
        """
        stack = next((candidate for candidate in STACKS if candidate.name == name), None)
        if stack is None:
            names = ", ".join(candidate.name for candidate in STACKS)
            raise PlanError(f"there is no stack {shown(name)}", f"one of {names}", "correct the name")
        return stack

    def op_times(self, graph: Graph, hardware: Hardware) -> dict[Node, float]:
        """Of `ws.Software`."""
        times = stack_kernels.op_times(
            graph, hardware, self.compiled, self.fused_loss, self.flash_attention, self.accumulates
        )
        return times if self.profile is None else self.profile.applied(times)

    def host_times(self, graph: Graph, times: Mapping[Node, float], hardware: Hardware) -> dict[Node, float]:
        """Of `ws.Software`."""
        call, forward, backward = self.call_us(hardware), self.host_us(hardware, False), self.host_us(hardware, True)
        begun = stack_kernels.starts(graph, times, self.flash_attention, call, (forward, backward))
        return begun if self.profile is None else {node: us * self.profile.host for node, us in begun.items()}

    def measured(self, compiled: bool, profile: KernelTimes | None) -> Stack:
        """Of `ws.Software`."""
        return replace(self, compiled=self.compiled or compiled, profile=profile or self.profile)

    def host_us(self, hardware: Hardware, backward: bool) -> float:
        """Microseconds of the host to start one kernel; 0 where it starts all of them at once, or computes itself."""
        if not self.call_us(hardware):
            return 0.0
        start_us = self.start_us or hardware.start_us
        return (self.backward_start_us or start_us) if backward else start_us

    def call_us(self, hardware: Hardware) -> float:
        """The same for one call without the Python of a module around it, as of a collective."""
        return 0.0 if self.recorded else hardware.start_us


_MEASURED = (
    "vTrain's runs: 3.1 ms of the host for a layer of one sample, recomputed; Megatron-LM: sizes of a batch are read "
    "back (mpu/data.py), timers of forward and backward wait for the device (schedules.py), the loss is one op after "
    "another (mpu/cross_entropy.py), gradients in fp16 are added up in fp16"
)
_TITAN = "pytorch/torchtitan: expandable segments since a5e57e4a9, cuDNN's attention since 6a3a9da95 (October 2025)"
_TITAN_2024 = (
    "pytorch/torchtitan 9dec370ad (December 2024): FlashAttention-2 on Hopper, norms of ops (norm_type = rmsnorm), the "
    "loss is not compiled (train.py, until bbb1b616e)"
)
_TITAN_2025 = (
    "pytorch/torchtitan between bbb1b616e and 6a3a9da95: FlashAttention-2 on Hopper, norms of one kernel (torch 2.9), "
    "compiled losses; Qwen 3 gathers heads (until 8c1d1c5fc)"
)
_TITAN_APRIL_2024 = "pytorch/torchtitan 1ea476e9f (April 2024): norm_type = fused_rmsnorm, a kernel in Triton"
_SIMPLE = "pytorch/torchtitan d9bdfbb20, experiments/simple_fsdp: one graph, op by op, buckets of transformer blocks"
_GRAPH = "pytorch/torchtitan graph_trainer since 9ed1a028d: default memory policy, fuses flex attention alone"
_FULL = "pytorch/torchtitan experiments/graph_trainer, 53bad508f: everything compiled, then recorded"
_APRIL = "the same before 9ed1a028d (28 April 2026): its memory policy keeps what FSDP gathers"
_MARCH = "the same at fca8ab7be: every second product is kept, no buckets, no overlap; CUDA graphs since d98fa54b2"
_TRAIN = "pytorch/torchtitan 83c879f18: norms of ops, foreach AdamW, logits in float32 held (until e29b6b4d4)"
_FOUNDRY = (
    "mosaicml/llm-foundry b2a43a147 (October 2023): torch 2.1.0 (benchmarking/sweep.sh), attention in Triton, one "
    "Wqkv; mosaicml/composer: DecoupledAdamW, one op after another"
)
_FOUNDRY_MAY = "the same at 300cc5c58 (May 2023): torch 1.13.1, whose checkpoints run to their end"
_MEGATRON = (
    "NVIDIA/Megatron-LM: query_key_value is one ColumnParallelLinear, which saves a shard of tokens, and reduces the "
    "gradient of its input beside the product for its weight (mpu/layers.py, bbab79f86); biases of rows are added "
    "behind the sum; the loss of 2022 is one op after another (cross_entropy.py); gradients in fp16 are added to "
    "buffers in fp16 (model/distributed.py), in bf16 by the product that makes them"
)
_KEMPNER = "KempnerInstitute/KempnerForge 01b461a, distributed/tensor_parallel.py"
STACKS = (
    Stack("wholestep", recorded=True, traced=True, fills="all", splits_update=True),
    Stack("wholestep-compile", compiled=True, recorded=True, traced=True, fills="all", splits_update=True),
    Stack("fsdp", copies=True),
    Stack("llm-foundry-2023", flash_attention=1, fused_optimizer=False, joint_qkv=True, source=_FOUNDRY),
    Stack("llm-foundry-2023-05", flash_attention=1, fused_optimizer=False, joint_qkv=True, to_the_end=True,
          source=_FOUNDRY_MAY),
    Stack("fsdp-compile", copies=True, compiled=True, traced=True),
    Stack("kempnerforge-compile", copies=True, compiled=True, traced=True, whole_ends=True, source=_KEMPNER),
    Stack("torchtitan", copies=True, flash_attention=3, recompute="ops", expandable_segments=True, source=_TITAN),
    Stack("torchtitan-compile", copies=True, compiled=True, flash_attention=3, recompute="ops", traced=True,
          expandable_segments=True, source=_TITAN),
    Stack("torchtitan-cudagraph", copies=True, compiled=True, flash_attention=3, recompute="products", recorded=True,
          traced=True, expandable_segments=True, source=_FULL),
    Stack("torchtitan-simple-fsdp", copies=True, flash_attention=3, recompute="ops", traced=True,
          expandable_segments=True, source=_SIMPLE),
    Stack("torchtitan-graph", copies=True, flash_attention=3, recompute="products", recorded=True, traced=True,
          expandable_segments=True, source=_GRAPH),
    Stack("torchtitan-graph-2026-04", copies=True, flash_attention=3, recompute="products", recorded=True, traced=True,
          expandable_segments=True, regathers=False, source=_APRIL),
    Stack("torchtitan-graph-2026-03", flash_attention=3, recompute="ops", traced=True, expandable_segments=True,
          overlaps=False, source=_MARCH),
    Stack("torchtitan-2025", copies=True, recompute="ops", expandable_segments=True, gathers_heads=True,
          source=_TITAN_2025),
    Stack("torchtitan-2025-compile", copies=True, compiled=True, recompute="ops", traced=True,
          expandable_segments=True, gathers_heads=True, source=_TITAN_2025),
    Stack("torchtitan-2024", copies=True, recompute="ops", fused_norms=False, expandable_segments=True,
          source=_TITAN_2024),
    Stack("torchtitan-2024-compile", copies=True, compiled=True, recompute="ops", fused_loss=False, traced=True,
          expandable_segments=True, source=_TITAN_2024),
    Stack("torchtitan-2024-04", copies=True, recompute="ops", source=_TITAN_APRIL_2024),
    Stack("torchtrain-2024", copies=True, recompute="ops", fused_norms=False, fused_optimizer=False, keeps_logits=True,
          source=_TRAIN),
    Stack("torchtrain-2024-compile", copies=True, compiled=True, recompute="ops", fused_loss=False,
          fused_optimizer=False, traced=True, keeps_logits=True, source=_TRAIN),
    Stack("megatron", compiled=True, flash_attention=3, traced=True, joint_qkv=True, accumulates="product",
          fills="own", regathers_activations=True, source=_MEGATRON),
    Stack("megatron-2022", compiled=True, flash_attention=0, fused_loss=False, traced=True, joint_qkv=True,
          accumulates="half", fills="own", regathers_activations=True, source=_MEGATRON),
    Stack("megatron-deepspeed-2022", compiled=True, flash_attention=0, recompute="full", overlaps=False, traced=True,
          start_us=87.0, backward_start_us=8.0, waits=True, fused_loss=False, joint_qkv=True, accumulates="half",
          source=_MEASURED),
    Stack("deepspeed", copies=True),
    Stack("xla", compiled=True, flash_attention=3, recorded=True, traced=True, fills="all",
          source="docs.nvidia.com/jax-toolbox: the latency hiding scheduler moves collectives to overlap more"),
)  # fmt: skip
"""`wholestep` is what `ws.compile` runs; the first of them is priced as if nothing were said."""
