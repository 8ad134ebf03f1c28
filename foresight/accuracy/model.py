"""The model, optimizer and step of a published run, on `meta`: what a user of wholestep would write for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, RowwiseParallel
from torch.fx import Node
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import wholestep as ws
from foresight.accuracy.config import Run
from wholestep.graph.meta import is_backward, module_path, tensor
from wholestep.layout import REPLICATED
from wholestep.plan.strategy import Pins

_HEADS = "norm_q", "norm_k", "turn"
_aten = torch.ops.aten
Step = tuple[Callable[..., Any], nn.Module, torch.optim.Optimizer, Tensor]


def _norm(run: Run) -> nn.Module:
    """RMSNorm of a stack that has it as one kernel is traced as a layer norm without bias, which moves the same bytes:
    on a CPU, where models are traced, torch itself has none.
    """
    if run.gated and not run.stack.fused_norms:
        return nn.RMSNorm(run.width)
    return nn.LayerNorm(run.width, bias=bool(run.biases))


class Attention(nn.Module):
    """Heads of queries, which may share those of keys and values; rotated where the model has gates."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        inner, keys = run.heads * run.head, run.kv_heads * run.head
        linear = partial(nn.Linear, bias=bool(run.biases))
        self.joint = run.stack.joint_qkv and run.kv_heads == run.heads
        if self.joint:
            self.qkv = linear(run.width, 3 * inner)
        else:
            self.q, self.k, self.v = linear(run.width, inner), linear(run.width, keys), linear(run.width, keys)
        self.out = nn.Linear(inner, run.width, bias=run.biases == "own")
        norm = partial(nn.LayerNorm, run.head, bias=False) if run.normed else nn.Identity
        self.norm_q, self.norm_k, self.turn = norm(), norm(), Turn()

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """(batch, tokens, width)."""
        if self.joint:
            parts = list(self.qkv(x).view(*x.shape[:2], -1, 3 * self.run.head).chunk(3, -1))
        else:
            parts = [made(x).view(*x.shape[:2], -1, self.run.head) for made in (self.q, self.k, self.v)]
        parts[:2] = [self.norm_q(parts[0]), self.norm_k(parts[1])]
        if turns is not None:
            parts[:2] = [self.turn(part, turns) for part in parts[:2]]
        heads = [part.transpose(1, 2) for part in parts]
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=self.run.kv_heads < self.run.heads)
        again = self.run.ac == "attention"
        made: Tensor = _again(attend)(*heads) if again else attend(*heads)
        return self.out(made.transpose(1, 2).flatten(2))


class Turn(nn.Module):
    """Rotates pairs of numbers, as complex ones in float32; (batch, tokens, heads, head)."""

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Of the shape of `x`."""
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    """With a gate, or with GELU."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=bool(run.biases))
        self.gate = linear(run.width, run.hidden) if run.gated else None
        self.up, self.down = linear(run.width, run.hidden), nn.Linear(run.hidden, run.width, bias=run.biases == "own")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width)."""
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm. Late biases of their last products are added with the residual,
    behind the sum over ranks, as Megatron's `RowParallelLinear` has it (`skip_bias_add`).
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.norm_1, self.attention = _norm(run), Attention(run)
        self.norm_2, self.mlp = _norm(run), Mlp(run)
        late = run.biases == "late"
        self.bias_1, self.bias_2 = (nn.Parameter(torch.empty(run.width)) if late else None for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """(batch, tokens, width)."""
        x = _added(x, self.attention(self.norm_1(x), turns), self.bias_1)
        return _added(x, self.mlp(self.norm_2(x)), self.bias_2)


def _added(x: Tensor, made: Tensor, bias: Tensor | None) -> Tensor:
    return x + (made if bias is None else made + bias)


class Decoder(nn.Module):
    """`layers` layers between an embedding and a head."""

    def __init__(self, run: Run, layers: int) -> None:
        super().__init__()
        self.run = run
        self.embedding = nn.Embedding(run.vocabulary, run.width)
        self.positions = None if run.gated else nn.Embedding(run.length, run.width)
        self.layers = nn.ModuleList(Layer(run) for _ in range(layers))
        self.norm = _norm(run)
        self.head = nn.Linear(run.width, run.vocabulary, bias=False)
        if run.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, vocabulary)."""
        x, turns = self.embedding(tokens), None
        if self.positions is None:
            turns = torch.ones(self.run.length, 1, self.run.head // 2, dtype=torch.complex64, device=tokens.device)
        else:
            x = x + self.positions.weight
        for number, layer in enumerate(self.layers):
            x = _with_recompute(self.run, layer, number, len(self.layers))(x, turns)
        return self.head(self.norm(x))


def _with_recompute(run: Run, layer: nn.Module, number: int, layers: int) -> Callable[..., Tensor]:
    """`layer`, recomputed in the backward as the run says."""
    if run.ac == "full" and number < round(run.checkpointed * layers):
        return _again(layer)
    if run.ac in ("products", "ops"):
        return _again(layer, context_fn=partial(_products, 1 if run.ac == "products" else 2))
    return layer


def _again(made: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """`made`, recomputed in the backward. The models draw no numbers."""
    again = cast(Any, checkpoint.checkpoint)
    return partial(again, made, use_reentrant=False, preserve_rng_state=False, **options)


def _products(nth: int) -> Any:
    """Keeps attention, and products: all, or the first of each two, as torchtitan does by default."""
    met: dict[bool, int] = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in (_aten.mm.default, _aten.linear.default):
            met[context.is_recompute] += 1
            return CheckpointPolicy(3 if nth == 2 and met[context.is_recompute] % 2 == 0 else 0)
        return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = cast(Any, checkpoint.create_selective_checkpoint_contexts)
    return contexts(policy)


def build(run: Run, layers: int) -> Step:
    """The step of a model with so many layers on one micro-batch."""
    with torch.device("meta"):
        model = Decoder(run, layers)
        tokens = torch.empty(run.micro, run.length, dtype=torch.int64)
    fused = run.stack.fused_optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused, foreach=not fused)
    return train_step, model, optimizer, tokens


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """The mean loss of a token, its clipped gradient, one update."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class WholeAgain(ws.Strategy):
    """Results of modules of these names are whole along an axis where the backward recomputes them: the hooks of a
    module, which move its results, run again.
    """

    names: tuple[str, ...]
    axis: str

    def axes(self, mesh: ws.Mesh) -> tuple[str, ...]:
        """None: the axis is that of another strategy."""
        return ()

    def pins(self, graph: ws.TrainGraph, mesh: ws.Mesh) -> Pins:
        """What recomputed nodes of other modules read."""
        again = [node for node in graph.graph.nodes if node.op == "call_function" and _is_recomputed(node)]
        made = [node for node in again if module_path(node).rpartition(".")[2] in self.names and tensor(node)]
        left = [n for n in made if any(_is_recomputed(u) and module_path(u) != module_path(n) for u in n.users)]
        return Pins({node.name: {self.axis: REPLICATED} for node in left})

    def describe(self, mesh: ws.Mesh) -> str:
        """One line."""
        return f"{', '.join(self.names)} whole along {self.axis} when recomputed"


def _is_recomputed(node: Node) -> bool:
    return is_backward(node) and bool(module_path(node))


def strategies(run: Run) -> list[Any]:
    """Data parallelism as the run has it, ranks that share sequences, and tensor parallelism of its layers."""
    made: list[Any] = []
    if run.replicate * run.shard > 1:
        axes = tuple(axis for axis, ranks in (("rep", run.replicate), ("dp", run.shard)) if ranks > 1)
        again = run.stack.regathers if run.style == "full" else None
        kind = "hybrid" if run.style == "full" and len(axes) == 2 else {"full": "fully_shard"}.get(run.style, run.style)
        made.append(ws.DataParallel(kind, axis=axes, reshard_after_forward=again))
    if run.cp > 1:
        made.append(ws.ContextParallel(method="ring", balance=run.balanced))
    if run.tp > 1:
        last: Any = RowwiseParallel(output_layouts=Shard(1)) if run.sequence else "rowwise"
        joint = run.stack.joint_qkv and run.kv_heads == run.heads
        read = ("attention.qkv",) if joint else ("attention.q", "attention.k", "attention.v")
        first = (*read, "mlp.up", *(["mlp.gate"] if run.gated else ()))
        names = dict.fromkeys((f"layers.*.{name}" for name in first), "colwise")
        named: dict[str, Any] = {**names, "layers.*.attention.out": last, "layers.*.mlp.down": last}
        whole = run.stack.whole_ends
        named |= {"head": "colwise_gather_output"} if whole else {"embedding": last, "head": "colwise"}
        if run.sequence:
            named |= dict.fromkeys(("layers.*.norm_1", "layers.*.norm_2", "norm"), "sequence")
        if run.normed and run.stack.gathers_heads:
            # all heads behind these norms, each rotated on every rank
            heads = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())
            named |= dict.fromkeys((f"layers.*.attention.{name}" for name in _HEADS), heads)
            made.append(WholeAgain(_HEADS, "tp"))
        again = run.sequence and run.stack.regathers_activations
        made.append(ws.TensorParallel(named, axis="tp", reshard_after_forward=again))
    return made


def mesh(run: Run) -> str:
    """Axes and sizes; those of one rank are left out."""
    sizes = {"pp": run.stages, "rep": run.replicate, "dp": run.shard, "cp": run.cp, "tp": run.tp}
    return ",".join(f"{axis}={ranks}" for axis, ranks in sizes.items() if ranks > 1) or "dp=1"
