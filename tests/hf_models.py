"""Tiny Hugging Face models with random weights, one row each: class, config, and how its batches are made.

Nothing is downloaded. A row names what it takes to build the model; the loss is the model's own where it has one, else
the mean square of its first output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, nn

Batch = dict[str, torch.Tensor]
MakeBatch = Callable[[Generator], Batch]
VOCAB, LENGTH, ROWS, IMAGE = 96, 12, 2, 32
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
MOE: dict[str, Any] = {**GROUPED, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": IMAGE,
    "patch_size": 8,
    "num_labels": 3,
}
SPEECH: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0,
    "layerdrop": 0.0,  # drops layers by a Python `if` on a random number
    "mask_time_prob": 0.0,  # draws its masks from numpy
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}


@dataclass(frozen=True)
class Entry:
    """One model: `kind` is the class in transformers, `config` its overrides, `batch` makes the keyword arguments."""

    name: str
    family: str
    kind: str
    config: dict[str, Any]
    batch: MakeBatch
    build_config: Callable[[], Any] | None = field(default=None, repr=False)

    def build(self) -> nn.Module:
        """The model, in training mode."""
        import transformers

        kind: Any = getattr(transformers, self.kind)
        config = self.build_config() if self.build_config else kind.config_class(**self.config)
        return kind(config).train()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What a step minimises."""
    out: Any = model(**batch)
    loss = getattr(out, "loss", None)
    if loss is None:
        first = out[0] if isinstance(out, tuple) else next(iter(out.values()))
        loss = first.float().square().mean()
    return loss


# -- batches ----------------------------------------------------------------------------
def _ids(g: Generator, length: int = LENGTH, high: int = VOCAB, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(3, high, (rows, length), generator=g)


def _mask(length: int = LENGTH, rows: int = ROWS) -> torch.Tensor:
    """The last row ends in padding."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length - 3 :] = 0
    return mask


def lm(g: Generator) -> Batch:
    """Token ids that are their own labels, without a mask."""
    ids = _ids(g)
    return {"input_ids": ids, "labels": ids}


def masked_lm(g: Generator) -> Batch:
    """Token ids with padding."""
    ids = _ids(g)
    return {"input_ids": ids, "attention_mask": _mask(), "labels": ids}


def seq2seq(g: Generator) -> Batch:
    """Source with padding and target."""
    return {"input_ids": _ids(g), "attention_mask": _mask(), "labels": _ids(g, 8)}


def classes(g: Generator) -> Batch:
    """Token ids and a class for each row."""
    return {"input_ids": _ids(g), "attention_mask": _mask(), "labels": torch.randint(0, 2, (ROWS,), generator=g)}


def tokens_only(g: Generator) -> Batch:
    """Token ids with padding, no labels."""
    return {"input_ids": _ids(g), "attention_mask": _mask()}


def _pixels(g: Generator, size: int = IMAGE, channels: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, channels, size, size, generator=g)


def images(g: Generator) -> Batch:
    """Images and a class for each."""
    return {"pixel_values": _pixels(g), "labels": torch.randint(0, 3, (ROWS,), generator=g)}


def large_images(g: Generator) -> Batch:
    """64 x 64 images and a class for each."""
    return {"pixel_values": _pixels(g, 64), "labels": torch.randint(0, 3, (ROWS,), generator=g)}


def pixels_only(g: Generator) -> Batch:
    """Images alone."""
    return {"pixel_values": _pixels(g)}


def segments(g: Generator) -> Batch:
    """Images and a class for each pixel."""
    return {"pixel_values": _pixels(g, 64), "labels": torch.randint(0, 3, (ROWS, 64, 64), generator=g)}


def image_and_text(g: Generator) -> Batch:
    """Images and captions."""
    return {**tokens_only(g), "pixel_values": _pixels(g), "return_loss": True}  # type: ignore[dict-item]


def audio(g: Generator) -> Batch:
    """Waveforms and short transcripts."""
    return {"input_values": torch.randn(ROWS, 400, generator=g), "labels": _ids(g, 4, 32)}


def mel(g: Generator) -> Batch:
    """Spectrograms (bins, frames) and transcripts."""
    return {"input_features": torch.randn(ROWS, 16, 40, generator=g), "labels": _ids(g, 6)}


def frames(g: Generator) -> Batch:
    """Spectrograms (frames, bins) and transcripts."""
    return {"input_features": torch.randn(ROWS, 40, 16, generator=g), "labels": _ids(g, 6)}


def layout(g: Generator) -> Batch:
    """Token ids with a box on the page for each."""
    corner = torch.randint(0, 30, (ROWS, LENGTH, 2), generator=g)
    box = torch.cat([corner, corner + torch.randint(1, 30, (ROWS, LENGTH, 2), generator=g)], -1)
    return {**masked_lm(g), "bbox": box}


def series(g: Generator) -> Batch:
    """Past and future values of a few series."""
    return {
        "past_values": torch.randn(ROWS, 24, generator=g),
        "past_time_features": torch.randn(ROWS, 24, 2, generator=g),
        "past_observed_mask": torch.ones(ROWS, 24),
        "future_values": torch.randn(ROWS, 8, generator=g),
        "future_time_features": torch.randn(ROWS, 8, 2, generator=g),
    }


def video(g: Generator) -> Batch:
    """Four frames and a class for each clip."""
    frames = torch.randn(ROWS, 4, 3, IMAGE, IMAGE, generator=g)
    return {"pixel_values": frames, "labels": torch.randint(0, 3, (ROWS,), generator=g)}


# -- configs inside configs --------------------------------------------------------------
def _clip(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import transformers

        text = {**TEXT, "projection_dim": 16, "hidden_act": "gelu"}
        return getattr(transformers, kind)(
            text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16
        )

    return build


def _siglip() -> Any:
    import transformers

    return transformers.SiglipConfig(text_config={**TEXT, "projection_size": 32}, vision_config=VISION)


def _t5gemma() -> Any:
    import transformers

    module = {
        **GROUPED,
        "query_pre_attn_scalar": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return transformers.T5GemmaConfig(
        encoder=module, decoder={**module, "cross_attention_hidden_size": 32}, vocab_size=VOCAB
    )


def _detr() -> Any:
    import transformers

    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    return transformers.DetrConfig(
        backbone_config=backbone, num_queries=5, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
    )  # fmt: skip


def _llava() -> Any:
    import transformers

    vision = transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**GROUPED), image_token_index=95,
        image_seq_length=16, vision_feature_layer=-1,
    )  # fmt: skip


def _blip() -> Any:
    import transformers

    text = {**TEXT, "projection_dim": 16, "encoder_hidden_size": 32}
    return transformers.BlipConfig(text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16)


def image_prompt(g: Generator) -> Batch:
    """Captions that begin with the places of an image's 16 patches."""
    ids = torch.cat([torch.full((ROWS, 16), 95), _ids(g, LENGTH, 95)], 1)
    return {"input_ids": ids, "labels": ids, "pixel_values": _pixels(g)}


# -- the rows ------------------------------------------------------------------------------
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SSM = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
_HYBRID = {**TEXT, "num_key_value_heads": 2, "mamba_d_state": 8, "use_mamba_kernels": False}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}

DECODERS = [
    Entry("gpt2", "decoder", "GPT2LMHeadModel", _GPT2, lm),
    Entry("llama", "decoder", "LlamaForCausalLM", GROUPED, masked_lm),
    Entry("qwen2", "decoder", "Qwen2ForCausalLM", GROUPED, masked_lm),
    Entry("qwen3", "decoder", "Qwen3ForCausalLM", GROUPED, lm),
    Entry("gemma", "decoder", "GemmaForCausalLM", GROUPED, lm),
    Entry("gemma2", "decoder", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}, masked_lm),
    Entry("gemma3", "decoder", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4}, lm),
    Entry("mistral", "decoder", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}, masked_lm),
    Entry("phi", "decoder", "PhiForCausalLM", TEXT, lm),
    Entry("phi3", "decoder", "Phi3ForCausalLM", GROUPED, masked_lm),
    Entry("falcon", "decoder", "FalconForCausalLM", {**TEXT, "ffn_hidden_size": 48}, masked_lm),
    Entry("falcon_alibi", "decoder", "FalconForCausalLM", {**TEXT, "ffn_hidden_size": 48, "alibi": True}, masked_lm),
    Entry("gpt_neox", "decoder", "GPTNeoXForCausalLM", TEXT, masked_lm),
    Entry(
        "gpt_neo",
        "decoder",
        "GPTNeoForCausalLM",
        {**TEXT, "num_layers": 2, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 1]]},
        lm,
    ),
    Entry("gptj", "decoder", "GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}, lm),
    Entry("codegen", "decoder", "CodeGenForCausalLM", {**_GPT2, "rotary_dim": 4}, lm),
    Entry("gpt_bigcode", "decoder", "GPTBigCodeForCausalLM", _GPT2, masked_lm),
    Entry("opt", "decoder", "OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, masked_lm),
    Entry(
        "bloom",
        "decoder",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        masked_lm,
    ),
    Entry(
        "mpt",
        "decoder",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        lm,
    ),
    Entry("stablelm", "decoder", "StableLmForCausalLM", GROUPED, lm),
    Entry("starcoder2", "decoder", "Starcoder2ForCausalLM", GROUPED, lm),
    Entry("olmo2", "decoder", "Olmo2ForCausalLM", GROUPED, lm),
    Entry("cohere", "decoder", "CohereForCausalLM", GROUPED, lm),
    Entry("granite", "decoder", "GraniteForCausalLM", GROUPED, lm),
    Entry("glm4", "decoder", "Glm4ForCausalLM", GROUPED, lm),
    Entry("nemotron", "decoder", "NemotronForCausalLM", GROUPED, lm),
    Entry("smollm3", "decoder", "SmolLM3ForCausalLM", GROUPED, lm),
    Entry("persimmon", "decoder", "PersimmonForCausalLM", TEXT, lm),
    Entry("openai_gpt", "decoder", "OpenAIGPTLMHeadModel", _GPT2, lm),
    Entry("ctrl", "decoder", "CTRLLMHeadModel", {**_GPT2, "dff": 48}, lm),
    Entry("biogpt", "decoder", "BioGptForCausalLM", TEXT, masked_lm),
    Entry(
        "xglm",
        "decoder",
        "XGLMForCausalLM",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
        lm,
    ),
    Entry("diffllama", "decoder", "DiffLlamaForCausalLM", GROUPED, lm),
    Entry(
        "gemma3n",
        "decoder",
        "Gemma3nForCausalLM",
        {
            **GROUPED,
            "sliding_window": 4,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.5, 0.0],
        },
        lm,
    ),
]
MIXTURES = [
    Entry(
        "mixtral",
        "moe",
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
        masked_lm,
    ),
    Entry(
        "qwen2_moe", "moe", "Qwen2MoeForCausalLM", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}, lm
    ),
    Entry("qwen3_moe", "moe", "Qwen3MoeForCausalLM", {**MOE, "num_experts": 4}, lm),
    Entry("olmoe", "moe", "OlmoeForCausalLM", {**MOE, "num_experts": 4}, lm),
    Entry(
        "deepseek_v2",
        "moe",
        "DeepseekV2ForCausalLM",
        {
            **MOE,
            **_MLA,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 4,
        },
        lm,
    ),
    Entry(
        "deepseek_v3",
        "moe",
        "DeepseekV3ForCausalLM",
        {
            **MOE,
            **_MLA,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 4,
        },
        lm,
    ),
    Entry("phimoe", "moe", "PhimoeForCausalLM", {**GROUPED, "num_local_experts": 4}, lm),
    Entry(
        "gpt_oss",
        "moe",
        "GptOssForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
        lm,
    ),
    Entry("glm4_moe", "moe", "Glm4MoeForCausalLM", {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1}, lm),
    Entry("granitemoe", "moe", "GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4}, lm),
    Entry(
        "llama4",
        "moe",
        "Llama4ForCausalLM",
        {**GROUPED, "num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        lm,
    ),
    Entry(
        "dbrx",
        "moe",
        "DbrxForCausalLM",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
        lm,
    ),
    Entry(
        "switch_transformers",
        "moe",
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8},
        seq2seq,
    ),
]
RECURRENT = [
    Entry("mamba", "state space", "MambaForCausalLM", _SSM, lm),
    Entry(
        "mamba2",
        "state space",
        "Mamba2ForCausalLM",
        {**_SSM, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        lm,
    ),
    Entry("falcon_mamba", "state space", "FalconMambaForCausalLM", _SSM, lm),
    Entry(
        "rwkv",
        "state space",
        "RwkvForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
        lm,
    ),
    Entry(
        "jamba",
        "state space",
        "JambaForCausalLM",
        {
            **_HYBRID,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
        },
        lm,
    ),
    Entry(
        "zamba",
        "state space",
        "ZambaForCausalLM",
        {**_HYBRID, "num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
        lm,
    ),
    Entry(
        "zamba2",
        "state space",
        "Zamba2ForCausalLM",
        {
            **TEXT,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "use_mamba_kernels": False,
            "adapter_rank": 4,
        },
        lm,
    ),
    Entry(
        "bamba",
        "state space",
        "BambaForCausalLM",
        {
            **GROUPED,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
        lm,
    ),
    Entry(
        "recurrent_gemma",
        "state space",
        "RecurrentGemmaForCausalLM",
        {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        lm,
    ),
    Entry("lfm2", "state space", "Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}, lm),
    Entry(
        "qwen3_next",
        "state space",
        "Qwen3NextForCausalLM",
        {
            **MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        lm,
    ),
]
ENCODERS = [
    Entry("bert", "encoder", "BertForMaskedLM", TEXT, masked_lm),
    Entry("bert_classifier", "encoder", "BertForSequenceClassification", TEXT, classes),
    Entry("roberta", "encoder", "RobertaForMaskedLM", TEXT, masked_lm),
    Entry("xlm_roberta", "encoder", "XLMRobertaForMaskedLM", TEXT, masked_lm),
    Entry("electra", "encoder", "ElectraForMaskedLM", {**TEXT, "embedding_size": 16}, masked_lm),
    Entry(
        "distilbert",
        "encoder",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
        masked_lm,
    ),
    Entry("albert", "encoder", "AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, masked_lm),
    Entry(
        "deberta",
        "encoder",
        "DebertaForMaskedLM",
        {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
        masked_lm,
    ),
    Entry(
        "deberta_v2",
        "encoder",
        "DebertaV2ForMaskedLM",
        {
            **TEXT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "type_vocab_size": 0,
        },
        masked_lm,
    ),
    Entry(
        "xlnet",
        "encoder",
        "XLNetLMHeadModel",
        {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        masked_lm,
    ),
    Entry("mpnet", "encoder", "MPNetForMaskedLM", TEXT, masked_lm),
    Entry("convbert", "encoder", "ConvBertForMaskedLM", {**TEXT, "embedding_size": 16}, masked_lm),
    Entry("squeezebert", "encoder", "SqueezeBertForMaskedLM", {**TEXT, "embedding_size": 32}, masked_lm),
    Entry(
        "mobilebert",
        "encoder",
        "MobileBertForMaskedLM",
        {
            **TEXT,
            "embedding_size": 16,
            "intra_bottleneck_size": 16,
            "true_hidden_size": 16,
            "num_feedforward_networks": 2,
        },
        masked_lm,
    ),
    Entry(
        "funnel",
        "encoder",
        "FunnelForMaskedLM",
        {
            "vocab_size": VOCAB,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "num_decoder_layers": 1,
        },
        masked_lm,
    ),
    Entry("fnet", "encoder", "FNetForMaskedLM", {**TEXT, "tpu_short_seq_length": 12}, lm),
    Entry(
        "nystromformer",
        "encoder",
        "NystromformerForMaskedLM",
        {**TEXT, "segment_means_seq_len": 12, "num_landmarks": 12},
        masked_lm,
    ),
    Entry("roformer", "encoder", "RoFormerForMaskedLM", TEXT, masked_lm),
    Entry(
        "rembert",
        "encoder",
        "RemBertForMaskedLM",
        {**TEXT, "input_embedding_size": 16, "output_embedding_size": 16},
        masked_lm,
    ),
    Entry("ibert", "encoder", "IBertForMaskedLM", TEXT, masked_lm),
    Entry("longformer", "encoder", "LongformerForMaskedLM", {**TEXT, "attention_window": 4}, masked_lm),
    Entry("big_bird", "encoder", "BigBirdForMaskedLM", {**TEXT, "attention_type": "original_full"}, masked_lm),
    Entry(
        "modernbert",
        "encoder",
        "ModernBertForMaskedLM",
        {**TEXT, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        masked_lm,
    ),
    Entry(
        "esm", "encoder", "EsmForMaskedLM", {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 3}, masked_lm
    ),
    Entry("layoutlm", "encoder", "LayoutLMForMaskedLM", {**TEXT, "max_2d_position_embeddings": 64}, layout),
    Entry("tapas", "encoder", "TapasForMaskedLM", TEXT, masked_lm),
    Entry(
        "canine",
        "encoder",
        "CanineForSequenceClassification",
        {
            **TEXT,
            "local_transformer_stride": 4,
            "downsampling_rate": 4,
            "num_hash_buckets": 32,
            "num_hash_functions": 4,
            "hidden_dropout_prob": 0.0,  # the classifier reads no characters: eager draws dropout for them all the same
            "attention_probs_dropout_prob": 0.0,
        },
        classes,
    ),
    Entry(
        "perceiver",
        "encoder",
        "PerceiverForMaskedLM",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "d_latents": 32,
            "num_latents": 8,
            "num_self_attends_per_block": 1,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
            "max_position_embeddings": LENGTH,
            "qk_channels": 16,
            "v_channels": 32,
        },
        lambda g: {
            "inputs": (b := masked_lm(g))["input_ids"],
            "attention_mask": b["attention_mask"],
            "labels": b["labels"],
        },
    ),
]
PAIRS = [
    Entry("t5", "encoder-decoder", "T5ForConditionalGeneration", T5, seq2seq),
    Entry("mt5", "encoder-decoder", "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, seq2seq),
    Entry(
        "longt5",
        "encoder-decoder",
        "LongT5ForConditionalGeneration",
        {**T5, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4},
        seq2seq,
    ),
    Entry("t5gemma", "encoder-decoder", "T5GemmaForConditionalGeneration", {}, seq2seq, build_config=_t5gemma),
    Entry("bart", "encoder-decoder", "BartForConditionalGeneration", SEQ2SEQ, seq2seq),
    Entry("mbart", "encoder-decoder", "MBartForConditionalGeneration", SEQ2SEQ, seq2seq),
    Entry("pegasus", "encoder-decoder", "PegasusForConditionalGeneration", SEQ2SEQ, seq2seq),
    Entry("marian", "encoder-decoder", "MarianMTModel", SEQ2SEQ, seq2seq),
    Entry(
        "m2m_100",
        "encoder-decoder",
        "M2M100ForConditionalGeneration",
        {**SEQ2SEQ, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        seq2seq,
    ),
    Entry("blenderbot", "encoder-decoder", "BlenderbotForConditionalGeneration", SEQ2SEQ, seq2seq),
    Entry(
        "led",
        "encoder-decoder",
        "LEDForConditionalGeneration",
        {
            **SEQ2SEQ,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
        seq2seq,
    ),
    Entry(
        "prophetnet",
        "encoder-decoder",
        "ProphetNetForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "ngram": 2,
            "max_position_embeddings": 64,
        },
        seq2seq,
    ),
    Entry(
        "fsmt",
        "encoder-decoder",
        "FSMTForConditionalGeneration",
        {**SEQ2SEQ, "langs": ["a", "b"], "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB},
        lambda g: {**tokens_only(g), "labels": _ids(g)},
    ),
    Entry(
        "time_series",
        "encoder-decoder",
        "TimeSeriesTransformerForPrediction",
        {
            "prediction_length": 8,
            "context_length": 16,
            "lags_sequence": [1, 2, 8],
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
            "num_time_features": 2,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
        },
        series,
    ),
]
IMAGES = [
    Entry("vit", "vision", "ViTForImageClassification", VISION, images),
    Entry(
        "resnet",
        "vision",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": 3},
        images,
    ),
    Entry("deit", "vision", "DeiTForImageClassification", VISION, images),
    Entry(
        "beit",
        "vision",
        "BeitForImageClassification",
        {**VISION, "use_shared_relative_position_bias": True, "drop_path_rate": 0.1},
        images,
    ),
    Entry("dinov2", "vision", "Dinov2ForImageClassification", VISION, images),
    Entry("dinov3_vit", "vision", "DINOv3ViTModel", {**VISION, "num_register_tokens": 2}, pixels_only),
    Entry(
        "swin",
        "vision",
        "SwinForImageClassification",
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
        images,
    ),
    Entry(
        "swinv2",
        "vision",
        "Swinv2ForImageClassification",
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 3,
        },
        images,
    ),
    Entry(
        "convnext",
        "vision",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3, "drop_path_rate": 0.1},
        images,
    ),
    Entry(
        "convnextv2",
        "vision",
        "ConvNextV2ForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3},
        images,
    ),
    Entry(
        "segformer",
        "vision",
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        segments,
    ),
    Entry(
        "regnet",
        "vision",
        "RegNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8, "num_labels": 3},
        images,
    ),
    Entry(
        "mobilenet_v2",
        "vision",
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "num_labels": 3},
        images,
    ),
    Entry(
        "mobilevit",
        "vision",
        "MobileViTForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 20, 24],
            "neck_hidden_sizes": [8, 8, 12, 16, 16, 16, 32],
            "num_attention_heads": 2,
            "num_labels": 3,
        },
        large_images,
    ),
    Entry(
        "efficientnet",
        "vision",
        "EfficientNetForImageClassification",
        {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128, "num_labels": 3},
        images,
    ),
    Entry(
        "poolformer",
        "vision",
        "PoolFormerForImageClassification",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "num_labels": 3,
        },
        images,
    ),
    Entry(
        "pvt",
        "vision",
        "PvtForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "num_labels": 3,
        },
        large_images,
    ),
    Entry(
        "levit",
        "vision",
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "depths": [1, 1, 1],
            "num_attention_heads": [2, 2, 4],
            "key_dim": [8, 8, 8],
            "num_labels": 3,
        },
        large_images,
    ),
    Entry(
        "cvt",
        "vision",
        "CvtForImageClassification",
        {"embed_dim": [8, 16, 32], "depth": [1, 2, 3], "num_heads": [1, 2, 4], "num_labels": 3},
        images,
    ),
    Entry(
        "focalnet",
        "vision",
        "FocalNetForImageClassification",
        {
            "image_size": IMAGE,
            "patch_size": 2,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": 3,
        },
        images,
    ),
    Entry(
        "hiera",
        "vision",
        "HieraForImageClassification",
        {"image_size": [64, 64], "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "num_labels": 3},
        large_images,
    ),
    Entry(
        "vit_mae",
        "vision",
        "ViTMAEForPreTraining",
        {
            **VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 24,
        },
        pixels_only,
    ),
    Entry(
        "yolos",
        "vision",
        "YolosModel",
        {**VISION, "image_size": [IMAGE, IMAGE], "num_detection_tokens": 4},
        pixels_only,
    ),
    Entry("detr", "vision", "DetrModel", {}, pixels_only, build_config=_detr),
    Entry(
        "glpn",
        "vision",
        "GLPNForDepthEstimation",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 8,
        },
        lambda g: {"pixel_values": _pixels(g, 64), "labels": torch.rand(ROWS, 64, 64, generator=g) + 0.1},
    ),
    Entry("imagegpt", "vision", "ImageGPTForCausalImageModeling", {**_GPT2, "vocab_size": VOCAB + 1}, lm),
    Entry("timesformer", "video", "TimesformerForVideoClassification", {**VISION, "num_frames": 4}, video),
    Entry("videomae", "video", "VideoMAEForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": 2}, video),
    Entry(
        "vivit", "video", "VivitForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]}, video
    ),
]
JOINT = [
    Entry("clip", "vision and text", "CLIPModel", {}, image_and_text, build_config=_clip("CLIPConfig")),
    Entry("siglip", "vision and text", "SiglipModel", {}, image_and_text, build_config=_siglip),
    Entry(
        "blip",
        "vision and text",
        "BlipForConditionalGeneration",
        {},
        lambda g: {**masked_lm(g), "pixel_values": _pixels(g)},
        build_config=_blip,
    ),
    Entry("llava", "vision and text", "LlavaForConditionalGeneration", {}, image_prompt, build_config=_llava),
    Entry(
        "vilt",
        "vision and text",
        "ViltModel",
        VISION | TEXT,
        lambda g: {
            **tokens_only(g),
            "pixel_values": _pixels(g),
            "pixel_mask": torch.ones(ROWS, IMAGE, IMAGE, dtype=torch.long),
        },
    ),
]
SOUNDS = [
    Entry(
        "whisper",
        "speech",
        "WhisperForConditionalGeneration",
        {
            **SEQ2SEQ,
            "num_mel_bins": 16,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        mel,
    ),
    Entry("wav2vec2", "speech", "Wav2Vec2ForCTC", SPEECH, audio),
    Entry("hubert", "speech", "HubertForCTC", SPEECH, audio),
    Entry("wavlm", "speech", "WavLMForCTC", {**SPEECH, "num_buckets": 8, "max_bucket_distance": 16}, audio),
    Entry("sew", "speech", "SEWForCTC", {**SPEECH, "squeeze_factor": 2}, audio),
    Entry("unispeech", "speech", "UniSpeechForCTC", {**SPEECH, "num_ctc_classes": 32}, audio),
    Entry("wav2vec2_conformer", "speech", "Wav2Vec2ConformerForCTC", SPEECH, audio),
    Entry("data2vec_audio", "speech", "Data2VecAudioForCTC", SPEECH, audio),
    Entry(
        "speech_to_text",
        "speech",
        "Speech2TextForConditionalGeneration",
        {
            **SEQ2SEQ,
            "input_feat_per_channel": 16,
            "conv_channels": 16,
            "num_conv_layers": 2,
            "conv_kernel_sizes": [5, 5],
            "max_source_positions": 64,
            "max_target_positions": 32,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        frames,
    ),
    Entry(
        "audio_spectrogram",
        "speech",
        "ASTForAudioClassification",
        {**VISION, "max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        lambda g: {
            "input_values": torch.randn(ROWS, 32, 16, generator=g),
            "labels": torch.randint(0, 3, (ROWS,), generator=g),
        },
    ),
    Entry(
        "moonshine",
        "speech",
        "MoonshineForConditionalGeneration",
        {
            **TEXT,
            "encoder_num_hidden_layers": 1,
            "decoder_num_hidden_layers": 1,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "decoder_start_token_id": 1,
        },
        lambda g: {"input_values": torch.randn(ROWS, 1600, generator=g), "labels": _ids(g, 6)},
    ),
]
CATALOGUE = {e.name: e for e in [*DECODERS, *MIXTURES, *RECURRENT, *ENCODERS, *PAIRS, *IMAGES, *JOINT, *SOUNDS]}


def entries(names: list[str]) -> Iterator[Entry]:
    """The named entries, in order."""
    return (CATALOGUE[name] for name in names)
