"""Parameters cast for a module: tensor parallelism cuts them as without, gradients are reduced as they come."""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import wholestep as ws
from wholestep.graph.meta import one_tensor
from wholestep.graph.nodes import node_at
from wholestep.graph.ops import GRAD_READY

HALF = ws.CaptureOptions(mixed_precision=ws.MixedPrecision(torch.bfloat16, torch.float32))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """`again` wraps the call of each layer."""

    def __init__(self, again: Any = None) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList(Mlp() for _ in range(3)), again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.again is None else self.again(layer, x)
        return x


def train_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def captured(again: Any = None, options: ws.CaptureOptions = HALF) -> ws.TrainGraph:
    model = Model(again)
    return ws.capture(train_step, model, AdamW(model.parameters()), torch.randn(8, 64), options=options)


def count(graph: ws.TrainGraph) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)


def test_layers_are_cut_where_they_are_cut_without_casts() -> None:
    tensor = ws.TensorParallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    plans = [ws.plan(captured(options=options), "tp=4", tensor) for options in (HALF, ws.CaptureOptions())]
    assert plans[0].storage == plans[1].storage
    sent = ws.partition(captured(), plans[0]).collectives()
    assert set(sent) == {"all_reduce"}


def test_activations_are_summed_in_the_dtype_in_which_they_are_computed() -> None:
    """`reduce` is the dtype of gradients: along dp they travel in float32, along tp activations do not."""
    tensor = ws.TensorParallel({"layers.*.up": "colwise", "layers.*.down": "rowwise"})
    graph, mesh = captured(), "dp=2,tp=2"
    local = ws.partition(graph, ws.plan(graph, mesh, [ws.DataParallel("fully_shard", axis="dp"), tensor]))
    sent: dict[str, set[torch.dtype]] = {}
    for node in local.graph.nodes:
        if "reduce" in str(node.target):
            sent.setdefault(str(node.args[-1]), set()).add(one_tensor(node).dtype)
    assert sent == {"tp": {torch.bfloat16}, "dp": {torch.float32}}


def test_gradients_are_reduced_as_they_were_computed() -> None:
    """In bfloat16: those of products in bfloat16 are not cast to float32 and back, those in float32 are cast."""
    reduced = ws.MixedPrecision(torch.bfloat16, torch.bfloat16), ws.MixedPrecision(None, torch.bfloat16)
    makers: list[set[str]] = []
    for precision in reduced:
        graph = captured(options=ws.CaptureOptions(mixed_precision=precision))
        local = ws.partition(graph, ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")))
        sent = [node for node in local.graph.nodes if "reduce_scatter" in str(node.target)]
        assert {one_tensor(node).dtype for node in sent} == {torch.bfloat16}
        makers.append({str(node_at(node, 0).target) for node in sent})
    assert makers == [{"aten.mm.default"}, {"aten._to_copy.default"}]


def test_gradients_are_complete_while_the_backward_runs() -> None:
    """Behind the last product there is the gradient of the first layer alone."""
    nodes = list(captured().graph.nodes)
    last = max(i for i, node in enumerate(nodes) if node.target is torch.ops.aten.mm.default)
    late = [node.args[1] for node in nodes[last:] if node.target is GRAD_READY]
    assert len(late) <= 2
    assert all(str(name).startswith("layers.0") for name in late)


def again(layer: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """The layer, recomputed in the backward. It draws no numbers."""
    call = cast(Any, checkpoint.checkpoint)
    return call(layer, x, use_reentrant=False, preserve_rng_state=False, **options)


def test_checkpoints_recompute_with_the_casts_of_the_forward() -> None:
    """Two products are made again, of the third nothing needs the result."""
    plain, made = captured(), captured(again)
    assert count(made) == count(plain) + 3
    casts = [g for g in (plain, made) for n in g.graph.nodes if n.op == "placeholder" and n.name.endswith("up_weight")
             for u in n.users if u.target is torch.ops.aten._to_copy.default]  # fmt: skip
    assert len(casts) == 6


def test_selective_checkpoints_keep_what_their_policy_keeps() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def activations(graph: ws.TrainGraph) -> int:
        local = ws.partition(graph, ws.plan(graph, "dp=1", ws.DataParallel("replicate")))
        return sum(node.target is torch.ops.aten.relu.default for node in local.graph.nodes)

    contexts = cast(Any, checkpoint.create_selective_checkpoint_contexts)
    plain, made = captured(), captured(partial(again, context_fn=partial(contexts, policy)))
    assert count(made) == count(plain)
    assert activations(made) == 2 * activations(plain)
