"""A published run as the configuration of a transformer's training step, or the reason why it cannot be one."""

import re
from dataclasses import dataclass, replace
from math import prod

import wholestep as ws
from foresight.accuracy.read import Row, data_sheet, hardware_of, number, whole
from wholestep_foresight import Stack
from wholestep_foresight.stack import STACKS

COLUMNS = (
    "source_id", "hw", "n_gpus", "gpus_per_node", "model", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff",
    "vocab", "seq_len", "dp_replicate", "dp_shard", "tp", "pp", "cp", "sharding", "micro_batch", "grad_accum",
    "global_batch", "dtype", "ac", "compile", "tokens_per_s_per_gpu", "step_time_s", "mem_gib", "notes",
)  # fmt: skip
_GATED = r"llama|mistral|qwen|gemma|deepseek|phi-?[34]|mixtral|olmo|nemotron-?h"
_VOCABULARY = ((r"llama-?3", 128256), (r"llama", 32000), (r"mpt", 50368), (r"gpt", 51200), (r"qwen", 151936),
               (r"mistral", 32000))  # fmt: skip
_HEAD = ((r"qwen-?3", 128),)  # whose heads together are wider than the model
_LENGTH = ((r"llama-?3", 8192), (r"llama", 4096))
_SIZES = {  # by family and billions: layers, width, heads, heads of keys, hidden; as their configurations say
    r"llama-?[12]?-?7b": (32, 4096, 32, 32, 11008), r"llama-?[12]?-?13b": (40, 5120, 40, 40, 13824),
    r"llama-?1?-?(30|33)b": (60, 6656, 52, 52, 17920), r"llama-?1?-?65b": (80, 8192, 64, 64, 22016),
    r"llama-?2-?70b": (80, 8192, 64, 8, 28672), r"llama-?3(\.[123])?-?8b": (32, 4096, 32, 8, 14336),
    r"llama-?3(\.[123])?-?70b": (80, 8192, 64, 8, 28672), r"llama-?3(\.1)?-?405b": (126, 16384, 128, 8, 53248),
    r"llama-?3\.2-?1b": (16, 2048, 32, 8, 8192), r"llama-?3\.2-?3b": (28, 3072, 24, 8, 8192),
    r"mistral-?7b": (32, 4096, 32, 8, 14336), r"gpt-?3?-?175b": (96, 12288, 96, 96, 49152),
    r"gpt-?neox-?20b": (44, 6144, 64, 64, 24576), r"gpt-?2-?xl": (48, 1600, 25, 25, 6400),
    r"mpt-?125m": (12, 768, 12, 12, 3072), r"mpt-?350m": (24, 1024, 16, 16, 4096),
    r"mpt-?760m": (24, 1536, 12, 12, 6144), r"mpt-?1b": (24, 2048, 16, 16, 8192),
    r"mpt-?3b": (32, 2560, 20, 20, 10240), r"mpt-?7b": (32, 4096, 32, 32, 16384),
    r"mpt-?13b": (40, 5120, 40, 40, 20480), r"mpt-?30b": (48, 7168, 56, 56, 28672),
    r"mpt-?70b": (80, 8192, 64, 64, 32768), r"qwen-?2(\.5)?-?7b": (28, 3584, 28, 4, 18944),
    r"qwen-?2(\.5)?-?72b": (80, 8192, 64, 8, 29568), r"qwen-?3-?8b": (36, 4096, 32, 8, 12288),
    r"qwen-?3-?14b": (40, 5120, 40, 8, 17408), r"qwen-?3-?32b": (64, 5120, 64, 8, 25600),
}  # fmt: skip
_LINKS = {"vtrain_multi": "800 Gbit/s a node"}
"""By source, where a row does not say it. vTrain's `inter_node_bandwidth`: 800 Gbit/s for the eight GPUs of a node."""
_SIZE_COLUMNS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff")


@dataclass(frozen=True)
class Run:
    """One training step of a decoder.

    Args:
        style: replicate, zero1, zero2 or full: what data parallel ranks share out.
        shard: ranks that share it; `replicate` copies of them (or of the whole model).
        links: what the source says of those between nodes.
        tp: ranks that share each layer; `sequence`: and the tokens between layers. `stages` of a pipeline.
        chunks: stages of each rank; several are interleaved.
        micro: sequences of a rank at a time; `accumulate` of them in a step.
        ac: none, full, products (kept, with attention), ops (every other product made again), attention.
        checkpointed: share of the layers that `full` recomputes; 1 for the others.
        biases: that linear layers add: none, "own" with each product, or "late", those of a layer's last products with
            the residual.
        normed: queries and keys are normalized, head by head.
        pure: gradients are scattered in half precision too.
        eight: large linear layers multiply in float8.
        stack: which software runs it.
        cp: ranks that share sequences, in a ring; `balanced`: all attend to as many keys.
    """

    source: str
    hardware: str
    links: str
    device: str
    model: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    vocabulary: int
    length: int
    gated: bool
    tied: bool
    replicate: int
    shard: int
    tp: int
    style: str
    sequence: bool
    micro: int
    accumulate: int
    ac: str
    checkpointed: float
    biases: str
    normed: bool
    pure: bool
    eight: bool
    stack: Stack
    per_node: int
    step_s: float | None
    memory_gib: float | None
    device_gib: float
    stages: int = 1
    chunks: int = 1
    cp: int = 1
    balanced: bool = True


def read(row: Row) -> Run | str:
    """The run, or why it cannot be expressed."""
    row = _completed(row)
    links = row.get("interconnect", "") or _LINKS.get(row["source_id"], "")
    why, hardware = _inexpressible(row), hardware_of(row["hw"])
    if why or hardware is None:
        return why or "no preset for this hardware"
    model, ranks = _model(row), whole(row, "n_gpus")
    layers, width, heads = (whole(row, name) for name in ("n_layers", "d_model", "n_heads"))
    tp, stages, cp = (whole(row, name, 1) or 1 for name in ("tp", "pp", "cp"))
    data = ranks // (tp * stages * cp)
    style = _style(row["sharding"], row.get("dtype", ""))
    replicate, shard = whole(row, "dp_replicate"), whole(row, "dp_shard")
    if style == "replicate":
        replicate, shard = data, 1
    elif not shard or (replicate or 1) * shard != data:
        replicate, shard = 1, data
    replicate = replicate or 1
    micro = whole(row, "micro_batch")
    accumulate = whole(row, "grad_accum") or max(1, whole(row, "global_batch", micro * data) // (micro * data))
    if stages > 1 and accumulate == 1:  # has no loop, for which a few layers would stand
        return "a pipeline of one micro-batch"
    length = whole(row, "seq_len") or _by_family(model, _LENGTH)
    hidden = whole(row, "d_ff") or 4 * width
    step = number(row, "step_time_s")
    rate = number(row, "tokens_per_s_per_gpu")
    if step is None and rate:
        step = micro * length * accumulate / (tp * stages * cp) / rate
    dtype = row["dtype"].lower()
    stack = _stack(row)
    recompute = _recompute(row["ac"].lower(), stack)
    assert recompute is not None, "a kind that is known"
    notes = f"{row['sharding']} {row['ac']} {row['notes']}".lower()
    return Run(
        row["source_id"], row["hw"], links, data_sheet(hardware).name, row["model"],
        layers, width, heads, whole(row, "n_kv_heads") or heads, _by_family(model, _HEAD) or width // heads, hidden,
        whole(row, "vocab") or _by_family(model, _VOCABULARY), length, bool(re.search(_GATED, model)),
        bool(re.search(r"gpt|mpt", model)), replicate, shard, tp, style,
        tp > 1 and (stack.name.startswith("torchtitan") or "sequence parallel" in notes), micro, accumulate, recompute,
        _checkpointed(row["ac"].lower(), layers),
        "late" if "gpt" in model else "own" if "mpt" in model else "",
        bool(re.search(r"qwen-?3|olmo-?2|gemma-?3", model)),
        "pure" in dtype or stack.name.startswith("megatron"),
        bool(re.search(r"fp8|float8", dtype)), stack,
        _per_node(row), step, number(row, "mem_gib"), _device_gib(row, hardware), stages,
        _chunks(row, notes) if stages > 1 else 1, cp, "not balanced" not in notes,
    )  # fmt: skip


_INTERLEAVED = (("megatron_seqsel", r"-(175|530)b", 3),)
"""By source and model, where a row does not say it: `pipeline_interleaving` of the files that `ref` names."""
_CHUNKS = r"(?:\bvpp?|virtual stages|chunks|interleav\w*)[ =:]*(\d+)|(\d+) (?:virtual|chunks)"


def _chunks(row: Row, notes: str) -> int:
    known = (n for source, name, n in _INTERLEAVED if source in row["source_id"] and re.search(name, _model(row)))
    found = re.search(_CHUNKS, notes)
    return int(found[1] or found[2]) if found else next(known, 1)


def _inexpressible(row: Row) -> str:
    model, dtype = _model(row), row["dtype"].lower()
    checks = (
        (whole(row, "cp", 1) > 1 and "ring" not in row["notes"], "context parallel"),
        (whole(row, "ep", 1) > 1 or bool(re.search(r"mixtral|moe|-a\d+b|deepseek|dbrx|\dx\d+b", model)), "experts"),
        (bool(re.search(r"mxfp|nvfp|fp4", dtype)), "8 bit with scales of blocks, or less"),
        (bool(re.search(r"fp8|float8", dtype)) and whole(row, "tp", 1) > 1, "8 bit with tensor parallelism"),
        (bool(re.search(r"async.?tp", f"{row['notes']} {row['sharding']}".lower())), "asynchronous tensor parallel"),
        (bool(re.search(r"lora|sft|peft", f"{row['notes']} {model}".lower())), "fine-tuning a part"),
        (_recompute(row["ac"].lower(), _stack(row)) is None, "recompute of an unknown kind"),
        (not all(whole(row, name) for name in ("n_layers", "d_model", "n_heads")), "no sizes of layers"),
        (not whole(row, "n_gpus"), "no number of ranks"),
        (not whole(row, "micro_batch"), "no size of the micro-batch"),
        (not (whole(row, "seq_len") or _by_family(model, _LENGTH)), "no length of a sequence"),
        (not (whole(row, "vocab") or _by_family(model, _VOCABULARY)), "no size of the vocabulary"),
        (not (number(row, "step_time_s") or number(row, "tokens_per_s_per_gpu") or number(row, "mem_gib")),
         "neither a time nor bytes"),
    )  # fmt: skip
    return next((reason for found, reason in checks if found), "")


def _per_node(row: Row) -> int:
    """Ranks that the fastest links join: of a rack, where a rack is built as one node."""
    rack = bool(re.search(r"gb[23]00|nvl72", f"{row['hw']} {row.get('interconnect', '')}".lower()))
    return 72 if rack else whole(row, "gpus_per_node", 8) or 8


def _device_gib(row: Row, hardware: ws.Hardware) -> float:
    """Of the row, whose gigabytes are those of a name; else of the preset."""
    return number(row, "gpu_mem_gb") or data_sheet(hardware).memory_bytes / 2**30


def _by_family(model: str, table: tuple[tuple[str, int], ...]) -> int:
    return next((size for pattern, size in table if re.search(pattern, model)), 0)


def _style(text: str, dtype: str) -> str:
    text = text.lower()
    for pattern, style in ((r"grad_op|zero-?2", "zero2"), (r"zero-?1|distributed optimizer|dist.?opt", "zero1"),
                           (r"fsdp|full_shard|zero-?3", "full")):  # fmt: skip
        if re.search(pattern, text):
            return style
    return "replicate"


_COUNTED = r"(\d+)(?: of \d+)? layers?(?: of \d+)? checkpoint|checkpoint\w* (\d+)(?: of \d+)? layers?"
_RECOMPUTE = (
    (r"^(none|no|false)$", "none"), (r"full|selective layer|every|selective 2", "full"),
    (_COUNTED, "full"), (r"\bop\b", "ops"), (r"selective|\bsac\b", "attention"),
    (r"checkpoint|\bac\b", "full"),
)  # fmt: skip


def _recompute(text: str, stack: Stack) -> str | None:
    """Without a word more, torchtitan's selective is that of its stack, and Megatron's of attention; None: unknown."""
    if not text:
        return stack.recompute
    found = next((kind for pattern, kind in _RECOMPUTE if re.search(pattern, text)), None)
    return stack.recompute if found == "attention" and stack.recompute in ("products", "ops") else found


_STACKS = (  # the first whose pattern is found in source, reference, sharding, notes, compile, recomputation and dtype
    (r"vtrain|megatron-deepspeed", "megatron-deepspeed-2022"),
    (r"seqsel|2205\.05198|megatron-lm.*202[12]", "megatron-2022"),
    (r"megatron|nemo", "megatron"),
    (r"torchtrain", "torchtrain-2024"), (r"torchtitan@1ea476e9f", "torchtitan-2024-04"),
    (r"torchtitan@b3eec1e00", "torchtitan-2025"), (r"torchtitan_2024", "torchtitan-2024"),
    (r"graph.?trainer|graph sac|regional inductor|autoresearch", "torchtitan-graph"),
    (r"simple.?fsdp|no inductor", "torchtitan-simple-fsdp"),
    (r"torchtitan|autoparallel", "torchtitan"), (r"maxtext|jax|xla", "xla"),
    (r"deepspeed", "deepspeed"), (r"(llm.?foundry|mosaicml).*mode pure", "llm-foundry-2023-05"),
    (r"llm.?foundry|mosaicml", "llm-foundry-2023"), (r"", "fsdp"),
)  # fmt: skip
_PULL = r"torchtitan.*?(?:pr #|pull/)(\d+)"
_BY_PULL = (  # of torchtitan: below which number a pull request ran what; `wholestep_foresight.stack` has the commits
    (400, "torchtrain-2024"), (1033, "torchtitan-2024"), (1776, "torchtitan-2025"),
)  # fmt: skip
_GRAPH_PULLS = {  # experiments/graph_trainer, where a row does not say so, and what its commits ran
    2570: "torchtitan-graph-2026-03", 3129: "torchtitan-graph", 3132: "torchtitan-graph", 3429: "torchtitan-graph",
    3141: "torchtitan-graph-2026-04",  # merged two hours behind 9ed1a028d, measured before
}  # fmt: skip


def _stack(row: Row) -> Stack:
    """That of the row's column `stack`, where it has one; else of its source, compiled where the row says so."""
    if row.get("stack"):
        return Stack.named(row["stack"])
    named = ("source_id", "ref", "sharding", "notes", "compile", "ac", "dtype")
    said = " ".join(row.get(name, "") for name in named).lower()
    name = next(stack for pattern, stack in _STACKS if re.search(pattern, said))
    pull = int(found[1]) if (found := re.search(_PULL, said)) else 0
    name = _GRAPH_PULLS.get(pull, name)
    if pull and name == "torchtitan":
        name = next((older for below, older in _BY_PULL if pull < below), name)
    built = row["compile"].lower()
    compiled = built in ("yes", "true", "1") or bool(re.search(r"(?<!no )(?<!regional )inductor", built))
    if compiled and "cudagraph" in built and name.startswith("torchtitan"):
        return Stack.named("torchtitan-cudagraph")
    if not compiled or Stack.named(name).compiled or not name.startswith(("fsdp", "torch")):
        return Stack.named(name)
    known = next((one for one in STACKS if one.name == f"{name}-compile"), None)
    return known or replace(Stack.named(name), name=f"{name}-compile", compiled=True)


def _checkpointed(text: str, layers: int) -> float:
    """The share of layers: of "5 layers checkpointed", or every other one."""
    if re.search(r"selective layer|every|selective 2", text):
        return 0.5
    counted = re.search(_COUNTED, text)
    return min(int(counted[1] or counted[2]) / layers, 1.0) if counted else 1.0


def _model(row: Row) -> str:
    """The name, with dashes where sources write spaces or nothing."""
    return re.sub(r"[\s_-]+", "-", row["model"].strip().lower()).removeprefix("meta-")


def _completed(row: Row) -> Row:
    """Sizes of layers by the model's name, where the row has none; the micro-batch from the batch of all ranks."""
    made = dict(row)
    sizes = next((sizes for pattern, sizes in _SIZES.items() if re.match(rf"{pattern}\b", _model(row))), None)
    if sizes and not any(whole(row, name) for name in _SIZE_COLUMNS[:3]):
        made |= dict(zip(_SIZE_COLUMNS, map(str, sizes), strict=True))
    split = prod(whole(row, name, 1) or 1 for name in ("tp", "pp", "cp"))
    parts = max(whole(row, "n_gpus") // split, 1) * (whole(row, "grad_accum") or 1)
    micro, rest = divmod(whole(row, "global_batch"), parts)
    if not whole(row, "micro_batch") and micro and not rest:
        made["micro_batch"] = str(micro)
    elif not whole(row, "micro_batch") and not micro and _stack(row).name.startswith("torchtitan"):
        made["micro_batch"] = "1"  # local_batch_size of its configurations of Llama 3
    return made
