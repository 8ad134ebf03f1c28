"""Models of transformers cut by the plans that they carry, against one device in float64.

The default selection covers every word of those plans; `-m full` runs all models that carry one.
"""

import importlib
import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node
from torch.optim import AdamW, Optimizer

from tests import hf_plans
from tests.hf_plans import NOT_COMPARED, PLANNED
from tests.together import Comparison, OneDevice, compare
from tests.tp_models import step_of
from wholestep import DataParallel, TensorParallel
from wholestep.graph import meta
from wholestep.plan.module_styles import NAMES

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.usefixtures("double"),
]

TOLERANCE = 1e-10
BOTH = ["tp=2", "dp=2,tp=2"]


def run(name: str, mesh: str = "tp=2", experts: bool = False, train: bool = True, padded: bool = False) -> Comparison:
    """Two steps by the plan of a model, or by its plan for experts, and on one device."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = hf_plans.tiny(name, train)
        return model, AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=True)

    generator = torch.Generator().manual_seed(5)
    one = OneDevice(make, step_of(hf_plans.loss), [(hf_plans.batch(generator, padded),) for _ in range(2)])
    model: Any = one.model
    by_plan = TensorParallel.of(model, loss_parallel=True)
    if experts:
        by_plan = TensorParallel(dict(model.config.base_model_ep_plan), strict=False)
    whole_batch = DataParallel("fully_shard", axis="dp", semantics="global")
    return compare(one, mesh, [whole_batch, by_plan] if "dp" in mesh else by_plan)


def check(name: str, mesh: str = "tp=2", **options: Any) -> Comparison:
    found = run(name, mesh, **options)
    assert found.worst < TOLERANCE, f"{name} on {mesh}: {found.where} differs by {found.worst:.1e}"
    assert not found.ruleless
    return found


def gathered(found: Comparison) -> Counter[str]:
    """How often each module's results are gathered over tp in the forward; in the backward, under an empty path."""
    nodes = [n for n in found.local.graph.nodes if ".all_gather" in str(n.target) and n.args[-1] == "tp"]
    return Counter(_module(n) for n in nodes)


def _module(node: Node) -> str:
    names = [name for name in meta.module_path(node).split(".") if not name.isdigit()]
    return "" if meta.is_backward(node) else ".".join(names)


def kept(found: Comparison) -> set[str]:
    """Parameters that are stored in parts over tp, without the numbers of layers."""
    cut = [n for n, layout in found.plan.storage.items() if layout.state("tp").kind == "S" and "/" not in n]
    return {".".join(part for part in name.split(".") if not part.isdigit()) for name in cut}


@pytest.mark.full
@pytest.mark.crossed
@pytest.mark.parametrize("mesh", BOTH)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_layers_of_columns_and_rows_gather_nothing(name: str, mesh: str) -> None:
    found = check(name, mesh, padded=True)
    assert not gathered(found)
    assert len(kept(found)) >= 8


@pytest.mark.usual("mixtral-tp=2", "qwen3_moe-dp=2,tp=2")
@pytest.mark.crossed
@pytest.mark.parametrize("mesh", BOTH)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "aria_text"])
def test_packed_experts(name: str, mesh: str) -> None:
    """Cut by columns, `aria_text`'s, stored [in, out], by what its plan calls rows; what they make is split whole."""
    found = check(name, mesh)
    assert gathered(found) == {"model.layers.mlp.experts": 2, "": 4}
    experts = next(n for n in found.plan.storage if n.endswith("mlp.experts.gate_up_proj"))
    assert found.plan.storage[experts].state("tp").dim == (2 if name == "aria_text" else 1)


def test_packed_projections_are_gathered_where_the_plan_says() -> None:
    found = check("phi3", "dp=2,tp=2")
    assert gathered(found) == {"model.layers.self_attn.qkv_proj": 2, "model.layers.mlp.gate_up_proj": 2, "": 10}


@pytest.mark.usual(
    "deepseek_v2-mla_kv_a_proj-model.layers.self_attn.kv_b_proj.weight",
    "nemotron_h-embedding_rowwise-model.layers.mixer.experts.up_proj",
)
@pytest.mark.parametrize(
    ("name", "word", "cut"),
    [
        ("deepseek_v2", "mla_kv_a_proj", "model.layers.self_attn.kv_b_proj.weight"),
        ("granitemoe_swa", "local_params", "model.layers.self_attn.sinks"),
        ("nemotron_h", "embedding_rowwise", "model.layers.mixer.experts.up_proj"),
        ("inkling_text", "all_reduce", "model.layers.mlp.experts.gate_up_proj"),
        ("embedding_gemma2_text", "replicated_with_grad_allreduce", "layers.self_attn.k_proj.weight"),
    ],
)
def test_other_words(name: str, word: str, cut: str) -> None:
    model: Any = hf_plans.tiny(name)
    assert word in TensorParallel.of(model).plan.values()
    assert cut in kept(check(name))


@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_experts_apart(name: str) -> None:
    """`grouped_gemm`: each rank holds some of the experts, with their biases; their weights are never reduced."""
    found = check(name, experts=True)
    assert not gathered(found)
    reduced = [meta.tensor(n) for n in found.local.graph.nodes if ".all_reduce" in str(n.target)]
    chosen = 2 * hf_plans.ROWS * hf_plans.LENGTH  # tokens, each for two experts
    assert max(m.numel for m in reduced if m) <= chosen * 2 * hf_plans.SMALL["intermediate_size"]
    assert {n for n in kept(found) if "experts" in n} == kept(found)
    assert all(found.plan.storage[n].state("tp").dim <= 0 for n in found.plan.storage)


def test_a_router_that_draws() -> None:
    """Phi-MoE draws which experts it asks, and how it weighs them: all ranks draw what one device does."""
    found = check("phimoe")
    assert any("exponential" in str(n.target) for n in found.local.graph.nodes)
    check("phimoe", "dp=2,tp=2", train=False)  # pieces of a batch draw numbers of their own


def test_every_word_is_known() -> None:
    for module in ("tensor_parallel", "expert_parallel"):  # each registers its own
        importlib.import_module(f"transformers.distributed.{module}")
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    words = set(ALL_PARALLEL_STYLES.keys())
    assert len(words) >= 18
    assert words <= {*NAMES, "sequence_parallel"}


@pytest.mark.full
def test_every_plan_is_looked_at() -> None:
    assert hf_plans.planned() <= {*PLANNED, *NOT_COMPARED}


@pytest.mark.full
@pytest.mark.parametrize("mesh", BOTH)
@pytest.mark.parametrize("name", [name for name in PLANNED if name != "phimoe"])
def test_every_model_by_its_own_plan(name: str, mesh: str) -> None:
    print(name, mesh, dict(gathered(check(name, mesh))))
