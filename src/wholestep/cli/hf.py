"""Builds causal language models of transformers from their configuration, on `meta`, without weights."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from wholestep.errors import PlanError, first_line
from wholestep.graph.gc_control import collector_paused
from wholestep.typed_json import MalformedError, parse

from .screen import Screen
from .target import Target, from_function, is_file, refuse

PRESETS = Path(__file__).parent / "models"
SEQUENCE = 2048


@dataclass(frozen=True)
class ModelSpec:
    """A model and how it is trained.

    Args:
        config: name of a preset, a configuration as JSON, or its folder.
        batch: sequences of a rank at a time.
        seq: tokens in each; by default 2048 or the model's limit, if that is less. More positions than that limit are
            those of a model that has as many: a longer table of learned ones.
        dtype: of parameters, gradients and optimizer state; float32 ones compute in bfloat16 by `--precision`.
        layers: number of layers to keep; all if None.
        optimizer: adamw or sgd.
        micro_batches: batches in a step, whose gradients accumulate.
        recompute: none; what layers compute again in the backward as torch's activation checkpointing does it: full,
            or selective, which keeps products and attention.
    """

    config: str
    batch: int = 1
    seq: int | None = None
    dtype: str = "float32"
    layers: int | None = None
    optimizer: str = "adamw"
    micro_batches: int = 1
    recompute: str = "none"


def presets() -> list[str]:
    """Names of the configurations that come with wholestep."""
    return sorted(file.stem for file in PRESETS.glob("*.json"))


def build(spec: ModelSpec) -> Target:
    """The model on `meta`, its optimizer and a batch, with a step that clips gradients to a norm of 1.

    Raises:
        PlanError: transformers has no such model.
    """
    if importlib.util.find_spec("transformers") is None:
        refuse("--hf needs transformers: pip install 'wholestep[hf]'")
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = _config(transformers, spec)
    most = int(getattr(config, "max_position_embeddings", None) or SEQUENCE)
    length = min(SEQUENCE, most) if spec.seq is None else spec.seq
    if length > most:
        config.max_position_embeddings = length
    try:
        with torch.device("meta"):
            options = {"dtype": getattr(torch, spec.dtype), "trust_remote_code": False}
            model = transformers.AutoModelForCausalLM.from_config(config, **options).train()
    except Exception as error:  # a configuration of the user in code of transformers, which raises what it likes
        raise PlanError(
            f"{spec.config} is not a causal language model of transformers: {first_line(error)}",
            "a configuration of one", "give another --hf, or a function that builds the model",
        ) from error  # fmt: skip
    if spec.recompute != "none":
        _checkpoint(model, spec)
    shape = spec.batch, length
    tokens = [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(spec.micro_batches)]
    changed = [f"{spec.layers} layers"] if spec.layers is not None else []
    changed += [f"{length} positions, not {most}"] if length > most else []
    name = spec.config + (f" with {' and '.join(changed)}" if changed else "")
    args = model, _optimizer(spec.optimizer, model), {"tokens": tokens}
    return Target(name, train_step, args, with_layers=lambda layers: build(replace(spec, layers=layers)))


def _checkpoint(model: Any, spec: ModelSpec) -> None:
    from torch.utils import checkpoint

    options: dict[str, Any] = {"use_reentrant": False}
    if spec.recompute == "selective":
        contexts = cast(
            Any, checkpoint.create_selective_checkpoint_contexts
        )  # torch leaves the type of its policy open
        options["context_fn"] = partial(contexts, _keeps_products)
    if not getattr(model, "supports_gradient_checkpointing", False):
        refuse(f"--recompute {spec.recompute}: {spec.config} has no activation checkpointing in transformers")
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.13
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keeps_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What selective checkpointing keeps: results of products and of attention."""
    from torch.utils.checkpoint import CheckpointPolicy

    must_save = any(word in str(op) for word in ("mm", "linear", "attention"))
    return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE


def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """One step: the mean next-token loss (nats per token) of all micro-batches, its clipped gradient, the update."""
    import torch

    optimizer.zero_grad()
    parts, losses = batch["tokens"], list[Any]()
    for tokens in parts:
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / len(parts) if len(parts) > 1 else loss).backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def _optimizer(name: str, model: Any) -> Any:
    import torch

    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)


def _config(transformers: Any, spec: ModelSpec) -> Any:
    settings = _read(spec.config)
    kind = settings.pop("model_type", None)
    if kind is None:
        refuse(f"{spec.config} has no field model_type: needed a configuration of a transformers model")
    try:
        config = transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:  # as above
        refuse(f"{spec.config}: {first_line(error)}")
    config.use_cache = False
    if spec.layers is not None:
        _shorten(config, spec)
    return config


def _shorten(config: Any, spec: ModelSpec) -> None:
    """Keep the first layers only, also in lists with an entry for each layer."""
    layers, all_layers = spec.layers, getattr(config, "num_hidden_layers", None)
    if all_layers is None or layers is None or not 1 <= layers <= all_layers:
        refuse(f"--layers {layers}: {spec.config} has {all_layers}")
    config.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds is not None:
            setattr(config, name, kinds[:layers])


def _read(name: str) -> dict[str, Any]:
    path = PRESETS / f"{name}.json" if name in presets() else Path(name)
    path = path / "config.json" if not is_file(path) else path
    if not is_file(path):
        refuse(f"--hf {name}: no such file; presets are {', '.join(presets())}")
    try:
        content = parse(path.read_bytes())
    except (OSError, MalformedError) as error:
        refuse(f"--hf {name}: {path} is not JSON: {error}")
    if not isinstance(content, dict):
        refuse(f"--hf {name}: {path} is not a JSON object")
    return cast(dict[str, Any], content)


def with_sizes(step: Target, batch: int, seq: int) -> Target:
    """A step that `build` made, with a batch of another size."""
    model, optimizer, inputs = step.args
    tokens = [micro_batch.new_empty((batch, seq)) for micro_batch in inputs["tokens"]]
    return replace(step, args=(model, optimizer, {"tokens": tokens}))


def tokens_of(step: Target) -> int:
    """Tokens in the batch of a step that `build` made."""
    return sum(tokens.numel() for tokens in step.args[2]["tokens"])


def spec_of(hf: str | None, **options: Any) -> ModelSpec | None:
    """The model of `--hf` with the options that are given; None without `--hf`."""
    chosen = {name: getattr(value, "value", value) for name, value in options.items() if value is not None}
    return None if hf is None else ModelSpec(hf, **chosen)


def load(shown: Screen, target: str | None, spec: ModelSpec | None) -> Target:
    """The step of `spec`; without one, that of the function `target`."""
    with shown.stage("model") as details, collector_paused():
        if spec is None:
            assert target is not None, "checked before"
            return from_function(target)
        step = build(spec)
        details.append(f"{step.name}, {sum(p.numel() for p in step.args[0].parameters()):,} parameters")
        return step
