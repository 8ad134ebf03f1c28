"""Tiny random models of transformers' text configurations that carry a tensor-parallel plan, by model type."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tests.hf_models import loss_of
from tests.together import Double, without_chance

VOCAB, LENGTH, ROWS = 96, 12, 4
SMALL: dict[str, Any] = {  # what a configuration does not know is left out
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_hidden_layers": 2, "num_layers": 2, "num_kv_shared_layers": 0, "first_k_dense_replace": 1,
    "hidden_size": 32, "hidden_size_per_layer_input": 8, "intermediate_size": 48, "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48, "dense_intermediate_size": 48, "laurel_rank": 8, "sliding_window": 4,
    # attention
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "num_global_key_value_heads": 2,
    "head_dim": 8, "global_head_dim": 8, "query_pre_attn_scalar": 8, "q_lora_rank": 16, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 4,
    # experts
    "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    # state space and linear attention
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 16, "mamba_d_head": 16,
    "mamba_n_groups": 1, "n_groups": 1, "ssm_state_size": 8, "use_mamba_kernels": False,
}  # fmt: skip
_FOUR = {"num_key_value_heads": 4}
_MIXED = {**_FOUR, "layer_types": ["linear_attention", "full_attention"]}
_THREE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_WHOLE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
_NOTHING: dict[str, Any] = {}
_PLAIN = """
afmoe apertus arcee aria_text beam cohere cohere2 cohere2_moe cwm deepseek_v4 doge dots1 embedding_gemma2_text
ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text glm glm4 glm4_moe gpt_neox granite granite4_vision_text granite_docling_text granite_swa
granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text
inkling_text internlm3 iquestcoder jais2 kolibri1 laguna llama llama4_text mellum mimo_v2_flash minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral muse_glimmer_text muse_spark_text nanochat nemotron olmo
olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_moe_text seed_oss smollm3
solar_open starcoder2 step3p5 ultrabert unlimited_ocr_text vaultgemma
"""
_LATENT = """
axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text esmc glm4_moe_lite glm_moe_dsa minicpm3 mistral4
mistral_large4_text youtu
"""
_IMAGES = """
cosmos3_edge_text glm4v_text glm_image_text glm_ocr_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text
qwen2_vl_text qwen3_omni_moe_text
"""
PLANNED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), _NOTHING),
    **dict.fromkeys(_LATENT.split(), _FOUR),
    **dict.fromkeys(("bailing_hybrid", "granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _MIXED),
    **dict.fromkeys(_IMAGES.split(), _THREE),
    "glm4v_moe_text": {"rope_parameters": {**_WHOLE, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_MIXED, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["full_attention", "moe"]},
    "neomme": {"rope_parameters": {
        "full_attention": _WHOLE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
    }},
}  # fmt: skip
NOT_COMPARED = {
    "higgs_audio_v2": "places audio by a mask of the tokens: capture says so",
    "longcat_flash": "counts the rows of each expert, which ranks would share: the plan says so",
    **dict.fromkeys(
        ("deepseek_ocr2_encoder", "dots3_note_vision_encoder", "ernie4_5_vl_moe_vision", "gemma4_vision", "llama4",
         "llama4_vision_model", "muse_glimmer", "muse_glimmer_vision", "muse_spark", "phi4_multimodal",
         "voxtral_realtime_text"),
        "takes images or sound",
    ),
    **dict.fromkeys(
        ("muse_glimmer_assistant", "qwen3_omni_moe_talker_code_predictor", "qwen3_omni_moe_talker_text",
         "t5_gemma_module", "t5gemma2_decoder", "t5gemma2_text"),
        "a part of another model, not built alone",
    ),
    **dict.fromkeys(
        ("cohere_compass_text", "deepseek_ocr2_text", "diffusion_gemma_text", "ernie4_5_vl_moe_text",
         "glm5_next_text", "qwen4_exp_text"),
        "no tiny configuration found",
    ),
}  # fmt: skip


def planned() -> set[str]:
    """Every model type whose configuration has a tensor-parallel plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {name for name in CONFIG_MAPPING if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)}


def tiny(name: str, train: bool = True) -> nn.Module:
    """A model of that type in double precision, without dropout."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[name]
    renamed = getattr(kind, "attribute_map", {})
    wanted = {**SMALL, **PLANNED.get(name, {})}
    config = kind(**{renamed.get(k, k): v for k, v in wanted.items() if _knows(kind, k)})
    model: Any = without_chance(_class(name, config)(config).double()).train(train)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the grouped product knows no double precision
    return model


def batch(generator: torch.Generator, padded: bool = False) -> dict[str, Tensor]:
    """Token ids that are their own labels; `padded`: the last row ends in padding, and a mask says so."""
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[-1, LENGTH - 3 :] = 0
    return {"input_ids": ids, "labels": ids, **({"attention_mask": mask} if padded else {})}


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The model's own; of one without, a function of its hidden states whose gradient does not vanish behind a norm."""
    with Double():
        if "labels" in inspect.signature(model.forward).parameters:
            return loss_of(model, given)
        hidden: Tensor = model(input_ids=given["input_ids"])[0]
        return (hidden.sin() * torch.linspace(-1, 1, hidden.shape[-1])).sum() / 10


def _knows(kind: Any, option: str) -> bool:
    fields = {*getattr(kind, "__dataclass_fields__", {}), *inspect.signature(kind.__init__).parameters}
    return option in fields or option in getattr(kind, "attribute_map", {})


def _class(name: str, config: Any) -> Any:
    """The language model of a configuration, or what is nearest to it."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for names in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_MAPPING_NAMES,
    ):
        if name in names:
            return getattr(transformers, names[name])
    home = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    kinds = [
        k
        for k in vars(home).values()
        if isinstance(k, type) and k.__module__ == home.__name__ and getattr(k, "config_class", None) is type(config)
    ]
    reads = [k for k in kinds if "input_ids" in inspect.signature(k.forward).parameters]
    return min(reads, key=lambda k: ("ForCausalLM" not in k.__name__, len(k.__name__)))
