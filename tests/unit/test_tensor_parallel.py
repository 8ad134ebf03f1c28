"""Tensor and sequence parallel plans, alone and with data parallelism, against one device in float64."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.fx import Node
from torch.optim import SGD, AdamW, Optimizer

import wholestep as ws
from tests import tp_models as models
from tests.oracle import relative, twin
from tests.simulate import Simulation, cut
from tests.steps import mean_square
from tests.together import Comparison, OneDevice, compare
from tests.tp_models import MLP, Llama, Normed, SimpleModel, next_token, squares, step_of
from wholestep import DataParallel, TensorParallel
from wholestep.capture import capture_step
from wholestep.cost.memory import peak_memory
from wholestep.graph import meta
from wholestep.graph.graph import LocalGraph
from wholestep.graph.storage import shared_operand
from wholestep.partition.rank_ops import in_order
from wholestep.passes.bucket import Bucket

pytestmark = pytest.mark.usefixtures("double")

TOLERANCE = 1e-10
STEPS = 2


def builder(kind: Callable[..., nn.Module], lr: float = 0.05, **options: Any) -> Callable[[], Any]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = kind(**options)
        return model, AdamW(model.parameters(), lr=lr, eps=1e-4, fused=True)

    return make


def floats(*shape: int, steps: int = STEPS) -> list[tuple[Any, ...]]:
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(steps)]


def tokens(rows: int = 4, length: int = 6, vocab: int = models.VOCAB) -> list[tuple[Any, ...]]:
    made = [(torch.randint(0, vocab, (rows, length)), torch.randint(0, vocab, (rows, length))) for _ in range(STEPS)]
    made[0][1][0, :4] = -100
    return made


@cache
def llama(**options: Any) -> OneDevice:
    return OneDevice(builder(Llama, **options), step_of(next_token), tokens())


def collectives(local: LocalGraph) -> dict[str, Counter[str]]:
    """By axis, how many collectives of each kind."""
    out: dict[str, Counter[str]] = {}
    for node in local.graph.nodes:
        if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
            kind = str(node.target).split(".")[1].removesuffix("_tensor").removesuffix("_into")
            out.setdefault(str(node.args[-1]), Counter())[kind] += 1
    return out


def moved(local: LocalGraph, kind: str, axis: str) -> list[Node]:
    return [n for n in local.graph.nodes if f".{kind}" in str(n.target) and n.args[-1] == axis]


def check(one: OneDevice, mesh: str, parallel: Any) -> Comparison:
    found = compare(one, mesh, parallel)
    assert found.worst < TOLERANCE, f"{mesh}: {found.where} differs by {found.worst:.1e}"
    assert not found.ruleless
    return found


def dp(style: Any = "fully_shard", axis: Any = "dp", **options: Any) -> DataParallel:
    return DataParallel(style, axis=axis, semantics="global", **options)


# -- layers ----------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("hidden", [32, 33])
@pytest.mark.parametrize("shape", [(6, 12), (3, 4, 12)])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "tp=4"])
def test_columns_then_rows(mesh: str, hidden: int, shape: tuple[int, ...]) -> None:
    one = OneDevice(builder(MLP, hidden=hidden), step_of(squares), floats(*shape))
    found = check(one, mesh, TensorParallel(models.MLP_PLAN))
    # one to join the outputs, one for the norm of the gradients
    assert collectives(found.local) == {"tp": Counter(all_reduce=2)}
    assert found.plan.storage["net1.weight"].show((hidden, 12)) == f"{hidden}@tp 12"
    assert found.plan.storage["net1.bias"].show((hidden,)) == f"{hidden}@tp"
    assert found.plan.storage["net2.weight"].show((12, hidden)) == f"12 {hidden}@tp"
    assert found.plan.storage["net2.bias"].show((12,)) == "12"
    assert found.plan.storage["net2.weight/exp_avg"] == found.plan.storage["net2.weight"]


MESHES = ["dp=2,tp=2", "tp=2,dp=2", "dp=3,tp=2", "dp=2,tp=3"]


@pytest.mark.crossed
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("style", ["replicate", "zero1", "fully_shard"])
def test_two_axes(mesh: str, style: str) -> None:
    one = OneDevice(builder(MLP, hidden=14), step_of(squares), floats(12, 12))
    for parallel in ([dp(style), TensorParallel(models.MLP_PLAN)], [TensorParallel(models.MLP_PLAN), dp(style)]):
        found = check(one, mesh, parallel)
    if style == "fully_shard":
        assert found.plan.storage["net1.weight"].show((14, 12)) == "14@tp,dp 12"
        assert found.plan.storage["net2.weight"].show((12, 14)) == "12@dp 14@tp"
        assert found.plan.storage["net1.weight/exp_avg"] == found.plan.storage["net1.weight"]
        assert collectives(found.local) == {
            "tp": Counter(all_reduce=2),
            # each parameter is gathered once; the loss and the norm of the gradients are summed
            "dp": Counter(all_gather=4, reduce_scatter=4, all_reduce=2),
        }


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(axes, marks=() if axes[1] == "dp" else pytest.mark.full)
        for axes in permutations(["rep", "dp", "tp"])
    ],
)
def test_three_axes_in_any_order(order: tuple[str, ...]) -> None:
    one = OneDevice(builder(MLP, hidden=18), step_of(squares), floats(8, 3, 12))
    mesh = ",".join(f"{axis}=2" for axis in order)
    found = check(one, mesh, [dp("hybrid", ("rep", "dp")), TensorParallel(models.MLP_PLAN)])
    assert found.plan.storage["net1.weight"].show((18, 12)) == "18@tp,dp 12"
    counts = collectives(found.local)
    assert counts["tp"] == Counter(all_reduce=2)
    assert counts["dp"] == Counter(all_gather=4, reduce_scatter=4, all_reduce=2)
    assert counts["rep"] == Counter(all_reduce=5)  # gradients and the loss


@pytest.mark.crossed
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=2,dp=2"])
def test_each_rank_its_own_batch(mesh: str, gather: bool) -> None:
    """Per-rank semantics over dp: gradients are averaged; ranks along tp compute one result."""
    (model, optimizer), (twin_model, twin_optimizer) = twin(builder(MLP, hidden=14))
    batches = [floats(3, 4, 12), floats(3, 4, 12)]  # of each rank along dp
    captured = capture_step(step_of(squares), (model, optimizer, *batches[0][0]), {})
    parallel = [
        DataParallel("fully_shard", axis="dp", reshard_after_forward=gather),
        TensorParallel(models.MLP_PLAN),
    ]
    plan = ws.plan(captured.graph, mesh, parallel)
    local = ws.partition(captured.graph, plan)
    simulation = Simulation(captured, plan, local)
    simulation.start()
    for step in range(STEPS):
        mine = [batches[plan.mesh.coordinate(r)["dp"]][step] for r in range(4)]
        results = simulation.step([dict(zip(_names(plan), batch, strict=True)) for batch in mine])
        losses = [squares(twin_model, *batches[d][step]) for d in range(2)]
        for rank, (found,) in enumerate(results):
            assert relative(found, losses[plan.mesh.coordinate(rank)["dp"]].detach()) < TOLERANCE
        twin_optimizer.zero_grad()
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(twin_model.parameters(), 1.0)
        twin_optimizer.step()
    for name, param in twin_model.named_parameters():
        assert relative(simulation.whole(name), param.detach()) < TOLERANCE, name
    expected = Counter(all_gather=4 + 2 * gather, reduce_scatter=4, all_reduce=1)  # weights are read in the backward
    assert collectives(local)["dp"] - expected == Counter()


def _names(plan: ws.Plan) -> list[str]:
    return [i.name for i in plan.inputs if i.role.value == "batch"]


def test_fully_shard_and_tensor_parallel_of_the_simple_model() -> None:
    """Four layers of two axes: net3 is data parallel only, inputs and outputs of the others are cut by rows."""
    one = OneDevice(builder(SimpleModel), step_of(lambda m, x, y: m(x).sum(), None), floats(8, 3, 5))
    for style in ("fully_shard", "zero2"):
        found = check(one, "dp=2,tp=2", [dp(style), TensorParallel(models.SIMPLE_PLAN)])
    assert found.plan.storage["net1.weight"].show((8, 5)) == "8@tp 5"
    assert found.plan.storage["net2.bias"].show((4,)) == "4"
    counts = collectives(found.local)["tp"]
    assert counts["reduce_scatter"] >= 1  # the rows of net2


def test_sequence_sharded_norm_and_mlp() -> None:
    """Five collectives along tp, as torch's own: two gathers, two reduce-scatters, and the gradient of the norm."""
    one = OneDevice(builder(Normed), step_of(squares, None), floats(4, 6, 10))
    found = check(one, "tp=2", TensorParallel(models.NORMED_PLAN))
    assert collectives(found.local)["tp"] == Counter(all_gather=2, reduce_scatter=2, all_reduce=2)  # one for the loss
    found = check(one, "dp=2,tp=2", [dp(), TensorParallel(models.NORMED_PLAN)])
    assert collectives(found.local) == {
        "tp": Counter(all_gather=2, reduce_scatter=2, all_reduce=2),
        "dp": Counter(all_gather=3, reduce_scatter=3, all_reduce=1),
    }


def test_a_partial_sum_that_begins_with_an_expanded_value_is_added_to_in_place() -> None:
    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, target: Tensor) -> Tensor:
        params = list(model.parameters())
        loss = F.cross_entropy(model(x), target.argmax(1))
        first = torch.autograd.grad(loss, params, create_graph=True)
        total = sum((g * p.detach().sign()).sum() for g, p in zip(first, params, strict=True))
        for param, product in zip(params, torch.autograd.grad(total, params), strict=True):
            param.grad = product
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    make = builder(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)))
    one = OneDevice(make, train, floats(6, 5))
    found = compare(one, "tp=2", TensorParallel("auto"), in_place=True)
    assert found.worst < 1e-10, f"{found.where} differs by {found.worst:.1e}"


def test_a_sequence_is_cut_without_copies_behind_a_batch_of_one() -> None:
    """Dim 1 lies in front in memory: gathers and scatters of it take tensors as they are. The numbers are the same."""
    one = OneDevice(builder(Normed), step_of(squares, None), floats(1, 6, 10))
    found = check(one, "tp=2", TensorParallel(models.NORMED_PLAN))
    assert torch.ops.aten.clone.default not in {node.target for node in found.local.graph.nodes}
    several = check(OneDevice(builder(Normed), step_of(squares, None), floats(4, 6, 10)), "tp=2",
                    TensorParallel(models.NORMED_PLAN))  # fmt: skip
    assert torch.ops.aten.clone.default in {node.target for node in several.local.graph.nodes}


def test_what_three_products_read_is_gathered_once() -> None:
    """Autograd makes a view of it for each: equal views are one, also where the backward recomputes them."""
    model = Llama(layers=1)
    batch = [torch.randint(0, models.VOCAB, (1, 8)) for _ in range(2)]
    graph = ws.capture(step_of(next_token), model, SGD(model.parameters(), lr=0.1), *batch)
    views = [
        (node.target, node.args) for node in graph.graph.nodes
        if node.target is torch.ops.aten.view.default and not meta.is_backward(node)
    ]  # fmt: skip
    assert len({repr(one) for one in views}) == len(views)


def test_a_gradient_is_gathered_once_for_both_products() -> None:
    """Of the gradient, and of its transpose for the gradient of the weight."""
    model = Llama(layers=1)
    batch = [torch.randint(0, models.VOCAB, (2, 8)) for _ in range(2)]
    graph = ws.capture(step_of(next_token), model, SGD(model.parameters(), lr=0.1), *batch)
    local = ws.partition(graph, ws.plan(graph, "tp=2", TensorParallel(models.SEQUENCE)))
    # three forward, and one for each row-parallel layer and for the table of tokens
    assert local.collectives()["all_gather"].count == 6


@pytest.mark.parametrize("plan", [models.SEQUENCE, {"tok": "rowwise", "out": "colwise"}], ids=["sequence", "tokens"])
def test_a_rank_computes_its_rows_of_the_gradient_of_a_table(plan: dict[str, Any]) -> None:
    """The gradient of the whole table would be the largest tensor of a step, and be reduced along tp."""
    model = Llama(layers=1)
    batch = [torch.randint(0, models.VOCAB, (2, 8)) for _ in range(2)]
    graph = ws.capture(step_of(next_token), model, SGD(model.parameters(), lr=0.1), *batch)
    made_plan = ws.plan(graph, "tp=2", TensorParallel(plan))
    local = ws.partition(graph, made_plan)
    table = made_plan.storage["tok.weight"].local_shape(tuple(model.tok.weight.shape), local.mesh, {"tp": 0})
    made = [node for node in local.graph.nodes if "vocabulary_gradient" in str(node.target)]
    assert [meta.one_tensor(node).shape for node in made] == [table]
    assert not [node for node in moved(local, "reduce_scatter", "tp") if models.VOCAB in meta.one_tensor(node).shape]


def test_at_most_seven_collectives() -> None:
    """With gradients scattered and parameters gathered together: five along tp and two along dp."""

    def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        step_of(squares, None)(model, optimizer, x, y)

    graph = capture_step(train, (*builder(Normed)(), *floats(4, 6, 10)[0]), {}).graph
    for style in (dp(), DataParallel("fully_shard", axis="dp")):
        plan = ws.plan(graph, "dp=2,tp=2", [style, TensorParallel(models.NORMED_PLAN)])
        local = ws.run_passes(ws.partition(graph, plan), [Bucket()])
        assert collectives(local) == {
            "tp": Counter(all_gather=2, reduce_scatter=2, all_reduce=1),
            "dp": Counter(all_gather=1, reduce_scatter=1),
        }


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3", pytest.param("tp=3,dp=2", marks=pytest.mark.full)])
def test_merged_collectives_are_bitwise_the_same(mesh: str) -> None:
    one = OneDevice(builder(MLP, hidden=14), step_of(squares), floats(12, 12))
    tensor = [TensorParallel(models.MLP_PLAN)] if "tp" in mesh else []
    found = check(one, mesh, [dp(), *tensor])
    runs = []
    for local in (found.local, ws.run_passes(found.local, [Bucket(1500)])):
        simulation = Simulation(one.capture, found.plan, local)
        simulation.start()
        names = _names(found.plan)
        for batch in one.batches:
            parts = [cut(t, found.plan.storage[n], found.plan.mesh) for n, t in zip(names, batch, strict=True)]
            simulation.step([dict(zip(names, given, strict=True)) for given in zip(*parts, strict=True)])
        runs.append((simulation.pieces, collectives(local)["dp"]))
    (plain, before), (merged, after) = runs
    assert all(torch.equal(a, b) for name in plain for a, b in zip(plain[name], merged[name], strict=True))
    assert after["all_gather"] < before["all_gather"]
    assert after["reduce_scatter"] < before["reduce_scatter"]


@pytest.mark.parametrize("dim", [0, 1])
def test_sequence_on_either_dim(dim: int) -> None:
    plan = {"norm": "sequence", "mlp.net1": "colwise", "mlp.net2": RowwiseParallel(output_layouts=Shard(dim))}
    one = OneDevice(builder(Normed, bias=True), step_of(squares), floats(5, 7, 10))
    for mesh in ("tp=2", "tp=3"):
        found = check(one, mesh, TensorParallel(plan, sequence_dim=dim))
        assert found.plan.storage["norm.weight"].show((10,)) == "10"
        assert collectives(found.local)["tp"]["reduce_scatter"] == 2


# -- a language model ------------------------------------------------------------------------


@pytest.mark.crossed
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=2,dp=2"])
@pytest.mark.parametrize("name", ["LAYERS", "WHOLE_VOCABULARY", "SEQUENCE"])
def test_llama(name: str, mesh: str) -> None:
    one = llama()
    parallel: list[Any] = [TensorParallel(getattr(models, name))]
    found = check(one, mesh, [dp(), *parallel] if "dp" in mesh else parallel)
    counts = collectives(found.local)["tp"]
    if name == "LAYERS":  # two for each layer forward and backward, and the norm of the gradients
        assert counts == Counter(all_reduce=9)
    if name == "WHOLE_VOCABULARY":  # also the embedding and the gradient of the last norm, and five small ones
        assert counts == Counter(all_reduce=16)
    if name == "SEQUENCE":
        assert counts["all_gather"] == 9  # before q k v, w1 w3 and the head; their backwards but the head's
        assert counts["reduce_scatter"] <= 11


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.full)])
@pytest.mark.full
def test_activations_are_regathered_for_the_backward(mesh: str) -> None:
    """What q k v, w1 w3 and the head read, once more for the gradients of their weights: less is kept until then."""
    one = OneDevice(builder(Llama), step_of(next_token), tokens(8, 32))
    found: list[LocalGraph] = []
    for again in (False, True):
        tensor = TensorParallel(models.SEQUENCE, reshard_after_forward=again)
        found.append(check(one, mesh, [dp(), tensor] if "dp" in mesh else tensor).local)
    kept, freed = found
    assert collectives(freed)["tp"] == collectives(kept)["tp"] + Counter(all_gather=5)
    for passes in ([], ws.default_passes()):
        before, after = (peak_memory(ws.run_passes(one, passes)) for one in found)
        assert after.size_bytes - after.rest_bytes < 0.95 * (before.size_bytes - before.rest_bytes)


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.full)])
def test_attention_by_hand(mesh: str) -> None:
    """Of the products over rows and heads in one dim a rank computes those of its heads."""
    one = OneDevice(builder(Llama, by_hand=True, kv=4), step_of(next_token), tokens())
    parallel: list[Any] = [TensorParallel(models.LAYERS)]
    found = check(one, mesh, [dp(), *parallel] if "dp" in mesh else parallel)
    assert collectives(found.local)["tp"] == Counter(all_reduce=9)
    products = [n for n in found.local.graph.nodes if n.target is torch.ops.aten.bmm.default]
    heads = {(4 // found.plan.mesh.axis_size("dp") if "dp" in mesh else 4) * 4 // 2}
    assert len(products) == 2 * 2 * 3
    assert {meta.one_tensor(n).shape[0] for n in products} == heads
    assert ws.Plan.from_json(found.plan.to_json()) == found.plan


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_one_head_of_keys_for_all_queries(mesh: str) -> None:
    """Repeated by strides of zero on one device; kernels for attention read pieces of it without gaps."""
    one = llama(kv=1)
    parallel: list[Any] = [TensorParallel(models.LAYERS)]
    check(one, mesh, [dp(), *parallel] if "dp" in mesh else parallel)


@pytest.mark.crossed
@pytest.mark.parametrize("mesh", ["tp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_is_never_whole(mesh: str, tied: bool) -> None:
    """Neither the table nor the logits are gathered along tp: what is reduced there is at most a hidden state."""
    plan = {"tok": "rowwise", "out": "colwise"}
    one = llama(tied=tied, layers=1)
    found = check(one, mesh, [dp(), TensorParallel(plan)] if "dp" in mesh else TensorParallel(plan))
    assert not moved(found.local, "all_gather", "tp")
    hidden = 4 * 6 * 16
    assert all(meta.tensor(n).numel <= hidden for n in moved(found.local, "all_reduce", "tp"))
    assert found.plan.storage["tok.weight"].dims[0][0] == "tp"


def test_loss_parallel_over_a_plan_that_gathers_logits() -> None:
    plan = {**models.LAYERS, "out": "colwise_gather_output"}
    one = llama()
    whole = check(one, "tp=2", TensorParallel(plan))
    assert [meta.module_path(n) for n in moved(whole.local, "all_gather", "tp")] == ["out"]
    parts = check(one, "tp=2", TensorParallel(plan, loss_parallel=True))
    assert not moved(parts.local, "all_gather", "tp")


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_what_is_drawn_whole_is_drawn_as_on_one_device(mesh: str) -> None:
    class Noisy(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(F.dropout(x, 0.3)), 0.5)

    one = OneDevice(builder(Noisy), step_of(squares), floats(6, 12))
    check(one, mesh, TensorParallel(models.MLP_PLAN))


WORDS_NOW = {**models.LAYERS, "out": "colwise"}
OLDER_WORDS = {
    "layers.*.attn.w[qkv]": "local_colwise",
    "layers.*.attn.wo": "local_rowwise",
    "layers.*.attn": "gather",
    "layers.*.mlp.w[13]": "local_packed_colwise",
    "layers.*.mlp.w2": "local_packed_rowwise",
    "layers.*.mlp": "all_reduce",
    "layers.*.norm1": "local",
    "layers.*.norm2": "replicate",
    "out": "colwise_rep",
}


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_words_of_older_plans(mesh: str) -> None:
    """What modules without a reduction of their own give is partial; the words for what is around them reduce it."""
    one = llama()
    plan = TensorParallel(OLDER_WORDS, loss_parallel=True)
    found = check(one, mesh, [dp(), plan] if "dp" in mesh else plan)
    same = check(one, mesh, [dp(), TensorParallel(WORDS_NOW)] if "dp" in mesh else TensorParallel(WORDS_NOW))
    assert found.plan.storage == same.plan.storage
    assert collectives(found.local) == collectives(same.local)


def test_columns_of_an_embedding() -> None:
    one = llama(layers=1)
    found = check(one, "tp=2", TensorParallel({"tok": "colwise"}))
    assert found.plan.storage["tok.weight"].show((21, 16)) == "21 16@tp"


# -- what a plan may say --------------------------------------------------------------------


def graph_of(make: Callable[[], Any], loss: Callable[..., Tensor], batch: tuple[Any, ...]) -> ws.TrainGraph:
    return capture_step(step_of(loss), (*make(), *batch), {}).graph


def test_classes_and_words_mean_the_same() -> None:
    graph = graph_of(builder(MLP), squares, floats(4, 12)[0])
    words = ws.plan(graph, "tp=2", TensorParallel({"net1": "colwise", "net2": "rowwise"}))
    classes = ws.plan(graph, "tp=2", TensorParallel({"net1": ColwiseParallel(), "net2": RowwiseParallel()}))
    assert words == classes
    assert ws.Plan.from_json(words.to_json()) == words
    assert words.strategy == "tensor parallel on tp"


def test_a_path_may_leave_out_the_name_of_the_argument() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = MLP(), MLP()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    one = OneDevice(builder(Two), step_of(squares), floats(4, 12))
    for plan in ({"*.net1": "colwise", "*.net2": "rowwise"}, {"net1": "colwise", "net2": "rowwise"}):
        found = check(one, "tp=2", TensorParallel(plan))
        assert found.plan.storage["second.net1.weight"].show((32, 12)) == "32@tp 12"


def test_weights_stored_in_by_out_and_convolutions() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Parameter(torch.randn(12, 32) / 4), nn.Parameter(torch.randn(32, 12) / 4)
            self.conv1, self.conv2 = nn.Conv1d(1, 6, 3, padding=1), nn.Conv1d(6, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x @ self.c_fc) @ self.c_proj
            return self.conv2(torch.tanh(self.conv1(x[:, None])))[:, 0]

    plan = {"c_fc": "colwise", "c_proj": "rowwise", "conv1": "colwise", "conv2": "rowwise"}
    one = OneDevice(builder(Turned), step_of(squares), floats(4, 12))
    found = check(one, "tp=2", TensorParallel(plan))
    shown = {n: str(found.plan.storage[n]) for n in ("c_fc", "c_proj", "conv1.weight", "conv2.weight")}
    assert shown == {"c_fc": "_ _@tp", "c_proj": "_@tp _", "conv1.weight": "_@tp _ _", "conv2.weight": "_ _@tp _"}


def test_prepared_inputs_and_outputs() -> None:
    one = OneDevice(builder(Normed), step_of(squares), floats(4, 6, 10))
    rows = Shard(1)
    plan: dict[str, str | ParallelStyle] = {
        "norm": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=rows),
        "mlp": PrepareModuleInputOutput(
            input_layouts=rows,
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=rows,
        ),
        "mlp.net1": ColwiseParallel(),
        "mlp.net2": RowwiseParallel(output_layouts=rows),
    }
    found = check(one, "tp=2", TensorParallel(plan))
    assert collectives(found.local)["tp"]["all_gather"] == 2


class Columns(nn.Module):
    """A layer of five outputs, which an axis of two cuts unevenly and a view gives a dim of size one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).view(-1, 5, 1).square()


@pytest.mark.parametrize("mesh", ["tp=2", "tp=3"])
def test_a_dim_of_size_one_makes_no_heads(mesh: str) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    one = OneDevice(builder(Columns), train, [(torch.randn(4, 6, dtype=torch.float64),) for _ in range(2)])
    assert check(one, mesh, TensorParallel({"layer": "colwise"})).plan.storage["layer.weight"].is_sharded


# -- errors ------------------------------------------------------------------------------------


def test_heads_that_do_not_divide() -> None:
    graph = graph_of(builder(Llama, heads=4, kv=2), next_token, tokens()[0])
    with pytest.raises(ws.PlanError) as caught:
        ws.plan(graph, "tp=4", TensorParallel(models.LAYERS))
    found = str(caught.value).splitlines()
    assert found[0] == (
        "layers.0.attn (and 1 more modules): layers.0.attn.wq makes 4 heads of 4, layers.0.attn.wk makes 2 heads of 4, "
        "layers.0.attn.wv makes 2 heads of 4; they do not divide over tp=4"
    )
    assert found[2:] == [
        "  needed: an axis whose size divides all head counts: 1, 2",
        "  next: choose another size, or leave those projections out of the plan",
    ]
    assert "self.wk" in found[1] or "x.view" in found[1]


def test_a_pattern_that_names_nothing() -> None:
    graph = graph_of(builder(MLP), squares, floats(4, 12)[0])
    with pytest.raises(ws.PlanError) as caught:
        ws.plan(graph, "tp=2", TensorParallel({"net1": "colwise", "nets2": "rowwise", "layers.*.wq": "colwise"}))
    assert str(caught.value) == (
        "the pattern 'nets2' of a tensor-parallel plan names no module (and 1 more: 'layers.*.wq')\n"
        "  needed: modules of the step, as 'net2', 'net1', 'net2.bias'\n"
        "  next: correct the pattern: one glob for each name between dots"
    )
    ws.plan(graph, "tp=2", TensorParallel({"net1": "colwise", "nets2": "rowwise"}, strict=False))


class Odd(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorParallel({"net1": "columns"}), "the style 'columns' of 'net1' is unknown"),
        (lambda: TensorParallel({"net1": Odd()}), "Odd for 'net1'"),
        (lambda: TensorParallel({}), "TensorParallel({})"),
        (lambda: TensorParallel.of(MLP()), "MLP has no tensor-parallel plan"),
    ],
)
def test_plans_that_say_nothing(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ws.PlanError) as caught:
        make()
    assert str(caught.value).splitlines()[0] == message


def test_axes_that_do_not_fit() -> None:
    graph = graph_of(builder(MLP), squares, floats(4, 12)[0])
    with pytest.raises(ws.MeshError, match="has no axis 'tp'"):
        ws.plan(graph, "dp=2", TensorParallel(models.MLP_PLAN))
    with pytest.raises(ws.PlanError, match="axis 'tp' is used by DataParallel and by TensorParallel"):
        ws.plan(graph, "dp=2,tp=2", [DataParallel(), TensorParallel(models.MLP_PLAN)])
    with pytest.raises(ws.PlanError, match=r"Shard\(3\) for a result of 2 dims"):
        ws.plan(graph, "tp=2", TensorParallel({"net2": RowwiseParallel(output_layouts=Shard(3))}))


def test_an_axis_of_one_rank_changes_nothing() -> None:
    graph = graph_of(builder(Normed), squares, floats(4, 6, 10)[0])
    found = ws.partition(graph, ws.plan(graph, "tp=1", TensorParallel(models.NORMED_PLAN)))
    assert not found.collectives()


class Masked(nn.Module):
    """Attention of four heads with one mask for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (4, 8)).transpose(1, 2) for made in (self.q, self.k, self.v))
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


def test_a_mask_of_all_heads_is_not_copied_for_the_heads_of_a_rank() -> None:
    model = Masked().to(torch.bfloat16)
    x = torch.randn(2, 16, 32, dtype=torch.bfloat16)
    options = ws.CaptureOptions(kernels="cuda")
    graph = ws.capture(mean_square, model, SGD(model.parameters(), 0.1), x, options=options)
    styles = dict.fromkeys(("q", "k", "v"), "colwise") | {"out": "rowwise"}
    local = ws.partition(graph, ws.plan(graph, "tp=2", TensorParallel(styles, axis="tp")))
    (attention,) = (n for n in local.graph.nodes if "efficient_attention.default" in str(n.target))
    mask = attention.args[3]
    assert meta.tensor(mask).shape == (2, 2, 16, 16)
    while mask.op == "call_function" and shared_operand(mask) is not None:
        mask = shared_operand(mask)
    assert meta.tensor(mask).shape == (16, 16), "the masks of heads and samples are views of one"
    one = torch.randn(3, 1, 5).expand(3, 4, 5)[:, :2]
    made = in_order(one, [1, 0, 2], (1,))
    assert made.stride() == (5, 0, 1)
    assert made.equal(one)
