"""Padded batches: the numbers of the batch as it is, to 1e-12 in float64, or a refusal that names the line."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import wholestep as ws
from examples.demo.model import GPTConfig, build

IGNORED = -100
LENGTHS = (8, 16)
Step = Callable[..., Tensor]


def words(rows: int, length: int, *, most: int = 64) -> Tensor:
    return torch.randint(most, (rows, length))


def beside_unpadded(
    model: nn.Module, fn: Step, pad_to: Any, batches: list[tuple[Tensor, ...]], **options: Any
) -> ws.CompiledStep:
    """Train on batches as they are, op by op, and padded: the same losses and parameters."""
    torch.manual_seed(0)
    other = copy.deepcopy(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other))
    step = ws.compile(fn, pad_to=pad_to, **options)
    for batch in batches:
        mine, theirs = step(model, optimizer, *batch), fn(other, plain, *batch)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert (mine - theirs).abs().max() < 1e-12 * max(1.0, float(theirs.abs().max()))
    return step


# -- a GPT: causal attention, targets that the loss ignores ------------------------------------
def train(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


TOKENS = ws.PadTo(LENGTHS, {"tokens": 1, "targets": 1}, fill={"targets": IGNORED})
MORE = ((3, 5), (2, 8), (4, 3), (3, 16), (2, 11), (5, 7), (3, 13))


def gpt() -> nn.Module:
    return build(GPTConfig(layers=1, width=16, heads=2, context=32), seed=0).double()


def test_a_gpt_with_ignored_targets() -> None:
    step = beside_unpadded(gpt(), train, TOKENS, [(words(b, t), words(b, t)) for b, t in MORE])
    assert len(step.programs) <= 2, step.misses
    assert {program.capture.symbols is not None for program in step.programs} == {True}


def test_a_length_that_is_longer_than_all_runs_as_it_is() -> None:
    step = beside_unpadded(gpt(), train, TOKENS, [(words(3, t), words(3, t)) for t in (5, 20, 12)])
    assert len(step.programs) == 1, step.misses


# -- an encoder and a decoder with an explicit mask: two lengths ---------------------------------
class Attention(nn.Module):
    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), *self.kv(other).chunk(2, -1)))
        if self.how == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-1, -2)
            scores = scores if bias is None else scores + bias
            mixed = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class T5(nn.Module):
    """RMS norms, a bias by relative position, attention to a padded source, and causal attention by a mask."""

    def __init__(self, how: str = "softmax", width: int = 8) -> None:
        super().__init__()
        self.how = how
        self.words, self.relative = nn.Embedding(64, width), nn.Embedding(9, 2)
        self.attend = nn.ModuleList(Attention(width, 2, how) for _ in range(3))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(5))

    def norm(self, number: int, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scales[number]

    def bias(self, rows: int, columns: int) -> Tensor:
        far = torch.arange(columns)[None, :] - torch.arange(rows)[:, None]
        return self.relative(far.clamp(-4, 4) + 4).permute(2, 0, 1)[None]

    def forward(self, source: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
        seen = mask[:, None, None, :]
        x = self.words(source)
        length, own = source.shape[1], tokens.shape[1]
        x = x + self.attend[0](self.norm(0, x), self.norm(0, x), seen, self.bias(length, length))
        x = x + self.down(F.relu(self.up(self.norm(1, x))))
        y = self.words(tokens)
        causal = torch.arange(own)[:, None] >= torch.arange(own)[None, :]
        y = y + self.attend[1](self.norm(2, y), self.norm(2, y), causal[None, None], self.bias(own, own))
        y = y + self.attend[2](self.norm(3, y), self.norm(4, x), seen)
        return self.norm(3, y) @ self.words.weight.t()


def translate(
    model: nn.Module, optimizer: Optimizer, source: Tensor, mask: Tensor, tokens: Tensor, targets: Tensor
) -> Tensor:
    optimizer.zero_grad()
    logits = model(source, mask, tokens)
    loss = F.cross_entropy(
        logits.transpose(1, 2).transpose(1, 2).flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    loss.backward()
    optimizer.step()
    return loss.detach()


def by_places(model: nn.Module, optimizer: Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of classes in dim 1, of each place."""
    optimizer.zero_grad()
    each = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    loss = each.sum() / (targets != IGNORED).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def next_words(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    """Targets are the tokens themselves, one place later."""
    optimizer.zero_grad()
    logits, targets = model(tokens.clamp_min(0))[:, :-1], tokens[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.full
def test_losses_of_other_forms() -> None:
    beside_unpadded(gpt(), by_places, TOKENS, [(words(3, t), words(3, t)) for t in (5, 8, 13)])
    own = ws.PadTo(LENGTHS, {"tokens": 1}, fill={"tokens": IGNORED})
    beside_unpadded(gpt(), next_words, own, [(words(3, t),) for t in (5, 8, 13)])


BOTH = (
    ws.PadTo(LENGTHS, {"source": 1, "mask": 1}),
    ws.PadTo((6, 12, 24), {"tokens": 1, "targets": 1}, fill={"targets": IGNORED}),
)


def pairs(*sizes: tuple[int, int, int]) -> list[tuple[Tensor, ...]]:
    found: list[tuple[Tensor, ...]] = []
    for rows, length, own in sizes:
        mask = torch.rand(rows, length) > 0.3
        mask[:, 0] = True
        found.append((words(rows, length), mask, words(rows, own), words(rows, own)))
    return found


@pytest.mark.parametrize("how", ["softmax", pytest.param("sdpa", marks=pytest.mark.full)])
@pytest.mark.full
def test_an_encoder_and_a_decoder_with_an_explicit_mask(how: str) -> None:
    torch.manual_seed(1)
    step = beside_unpadded(T5(how).double(), translate, BOTH, pairs((3, 5, 4), (3, 8, 9), (3, 13, 6), (3, 7, 17)))
    assert len(step.programs) == 1, step.misses


@pytest.mark.parametrize("kind", ["gpt", pytest.param("t5", marks=pytest.mark.full)])
def test_padded_batches_in_pieces(kind: str) -> None:
    """Rows are cut, and all pieces have one length, also where rows are no symbol."""
    model, fn, pad_to, batches = {
        "gpt": (gpt(), train, TOKENS, [(words(4, t), words(4, t)) for t in (5, 8, 13)]),
        "t5": (T5("softmax").double(), translate, BOTH, pairs((4, 5, 4), (4, 8, 9), (4, 13, 6))),
    }[kind]
    step = beside_unpadded(model, fn, pad_to, batches, parallel=ws.MicroBatches(2))
    assert len(step.programs) == 1, step.misses


# -- one op at a time: equal, or refused ------------------------------------------------------------
class Op(nn.Module):
    """An op between two layers, from (rows, length, width) to the same."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.before, self.after = op, nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.op(self.before(x), mask))


def masked_sum(model: nn.Module, optimizer: Optimizer, x: Tensor, mask: Tensor) -> Tensor:
    optimizer.zero_grad()
    each = model(x, mask).square().sum(-1) * mask
    loss = each.sum() / mask.sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _causal(x: Tensor, mask: Tensor) -> Tensor:
    length = x.shape[1]
    lower = torch.ones(length, length, dtype=x.dtype).tril()
    return torch.softmax((x @ x.transpose(1, 2)).masked_fill(lower == 0, float("-inf")), -1) @ x


def _upper(x: Tensor, mask: Tensor) -> Tensor:
    added = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
    return torch.softmax(x @ x.transpose(1, 2) + added, -1) @ x


def _keys(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None, :].bool(), float("-inf"))
    return torch.softmax(scores, -1) @ x


def _little(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~mask[:, None, :].bool(), -1e9)
    return torch.softmax(scores, -1) @ x


def _least(x: Tensor, mask: Tensor) -> Tensor:
    """As models of transformers: also where a mask leaves a row nothing, so that softmax takes all keys alike."""
    both = mask[:, None, :].bool() & mask[:, :, None].bool()
    added = torch.where(both, torch.zeros((), dtype=x.dtype), torch.finfo(torch.float32).min)
    return torch.softmax(x @ x.transpose(1, 2) + added, -1) @ x


def _near(x: Tensor, mask: Tensor) -> Tensor:
    """Each position sees its neighbours: a padded one none that is real."""
    places = torch.arange(x.shape[1])
    far = (places[:, None] - places[None]).abs() > 1
    scores = (x @ x.transpose(1, 2)).masked_fill(far, float("-inf"))
    return torch.softmax(scores.masked_fill(~mask[:, None, :].bool() & far, float("-inf")), -1) @ x


def _shifted(x: Tensor, mask: Tensor) -> Tensor:
    """As a decoder gets its targets."""
    made = torch.zeros_like(x)
    made[:, 1:] = x[:, :-1]
    made[:, 0] = 2.0
    return made


def _by_number(x: Tensor, mask: Tensor) -> Tensor:
    """A mask that is read at all its places, and embeddings at places that a table names."""
    rows, places = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])
    table = torch.linspace(0, 1, 12, dtype=x.dtype).expand(x.shape[0], 12)
    return x * mask[rows, places + 0][..., None] + table.gather(1, mask.cumsum(1).clamp_max(11))[..., None]


def _pooled(x: Tensor, mask: Tensor) -> Tensor:
    return x - ((x * mask[..., None]).sum(1) / mask.sum(1)[:, None])[:, None]


def _sdpa(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pointwise": lambda x, mask: F.gelu(x) * 2 + 1,
    "norm": lambda x, mask: F.layer_norm(x, (6,)),
    "rows": lambda x, mask: x.flatten(0, 1).tanh().view(x.shape),
    "turned": lambda x, mask: x.transpose(0, 1).contiguous().sin().transpose(0, 1),
    "halves": lambda x, mask: torch.cat(x.chunk(2, -1)[::-1], -1),
    "heads": lambda x, mask: x.view(x.shape[0], -1, 2, 3).softmax(-1).flatten(2),
    "mean of features": lambda x, mask: x - x.mean(-1, keepdim=True),
    "first": lambda x, mask: x + x[:, :1],
    "one": lambda x, mask: x + x[:, 0:2].sum(1, keepdim=True),
    "masked mean": _pooled,
    "causal, by ones": _causal,
    "causal, by -inf": _upper,
    "masked keys": _keys,
    "all keys": lambda x, mask: _keys(x, torch.ones_like(mask)),
    "causal sdpa": lambda x, mask: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[
        :, 0
    ],
    "places": lambda x, mask: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 64,
    "softmax over tokens": lambda x, mask: x.softmax(1),
    "a mask that is not -inf": _little,
    "a mask by the least number": _least,
    "neighbours alone": _near,
    "shifted to the right": _shifted,
    "by number": _by_number,
    "behind a class": lambda x, mask: torch.cat([x.new_ones(x.shape[0], 1, 6), x], 1)[:, 1:] + x[:, 0].tanh()[:, None],
    "padded in front": lambda x, mask: F.pad(x, (0, 0, 2, 0))[:, : x.shape[1]],
    "over the batch": lambda x, mask: x - x.sum(0, keepdim=True),
}
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "mean over tokens": (lambda x, mask: x - x.mean(1, keepdim=True), "takes the mean over padded positions"),
    "sum over tokens": (lambda x, mask: x - x.sum(1, keepdim=True), "sums over padded positions that are not zero"),
    "count": (lambda x, mask: x / x.shape[1], "computes with the padded length"),
    "attention": (_sdpa, "attends to padded positions"),
    "last": (lambda x, mask: x + x[:, -1:], "counted from the end"),
    "the last": (lambda x, mask: x + x[:, -1][:, None], "the last of the padded positions"),
    "flipped": (lambda x, mask: x.flip(1), "mixes padded positions with others"),
    "shifted": (lambda x, mask: torch.cat([x[:, 1:], x[:, :1]], 1), "puts other positions behind padded ones"),
    "rolled": (lambda x, mask: x.roll(1, 1), "mixes padded positions with others"),
    "summed up": (lambda x, mask: x.cumsum(1), "mixes padded positions with others"),
    "maximum": (lambda x, mask: x - x.amax(1, keepdim=True), "takes the maximum over padded positions"),
    "random numbers of merged positions": (
        lambda x, mask: F.dropout(x.flatten(0, 1), 0.5).view(x.shape),
        "draws random numbers",
    ),
    "in front of a class": (
        lambda x, mask: torch.cat([x, x.new_ones(x.shape[0], 1, 6)], 1)[:, :-1],
        "puts other positions behind padded ones",
    ),
    "padded behind": (lambda x, mask: F.pad(x, (0, 0, 0, 1))[:, :-1], "puts a constant behind padded positions"),
    "in order of a table": (
        lambda x, mask: x[:, torch.arange(x.shape[1]) // 2],
        "reads positions of the padded length by number",
    ),
    "convolved": (lambda x, mask: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), ""),
}
LINE = "self.op(self.before(x), mask)"


def features(*sizes: tuple[int, int]) -> list[tuple[Tensor, ...]]:
    found = [(torch.randn(*size, 6, dtype=torch.float64), torch.rand(size) > 0.3) for size in sizes]
    for _, mask in found:
        mask[:, 0] = True
    return found


FEATURES = ws.PadTo(LENGTHS, {"x": 1, "mask": 1})


QUICK = ("causal, by ones", "masked mean", "all keys")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in EXACT])
def test_ops_that_keep_padded_positions_apart(name: str) -> None:
    torch.manual_seed(0)
    step = beside_unpadded(Op(EXACT[name]).double(), masked_sum, FEATURES, features((3, 5), (3, 8), (3, 13), (3, 3)))
    assert len(step.programs) == 1, step.misses


@pytest.mark.parametrize("name", REFUSED)
def test_ops_that_mix_padded_positions_in(name: str) -> None:
    op, why = REFUSED[name]
    with pytest.raises(ws.PlanError, match=why) as refused:
        beside_unpadded(Op(op).double(), masked_sum, FEATURES, features((3, 5)))
    assert "test_pad_to.py" in refused.value.where


class Dropout(nn.Module):
    """Dropout of positions, and of what they attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = F.dropout(self.before(x), 0.3)[:, None]
        x = torch.native_dropout(x, 0.1, True)[0]  # what F.dropout is on a GPU
        return self.after(F.scaled_dot_product_attention(x, x, x, mask[:, None, None, :], dropout_p=0.2)[:, 0])


@pytest.mark.full
def test_dropout_draws_for_the_longest_length() -> None:
    """So its numbers are those of one device for a batch that is one position longer than the longest length."""
    torch.manual_seed(0)
    model = Dropout().double()
    other = copy.deepcopy(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = ws.compile(masked_sum, pad_to=FEATURES)
    for seed, (x, mask) in enumerate(features((3, 5), (3, 8), (3, 13), (3, 3), (3, 16))):
        more = LENGTHS[-1] + 1 - x.shape[1]
        longer = [F.pad(x, (0, 0, 0, more)), F.pad(mask, (0, more))]
        torch.manual_seed(seed)
        mine = step(model, optimizer, x, mask)
        torch.manual_seed(seed)
        torch.testing.assert_close(mine, masked_sum(other, plain, *longer), rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert len(step.programs) == 1, step.misses


# -- models of transformers ------------------------------------------------------------------------
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
PAIRED: dict[str, Any] = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1, "use_cache": False,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout",
     "attention_dropout", "dropout_rate", "activation_dropout", "classifier_dropout"), 0.0,
)  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "AutoModelForMaskedLM", SMALL),
    "bert, classes": ("bert", "AutoModelForSequenceClassification", SMALL),
    "roberta": ("roberta", "AutoModelForMaskedLM", SMALL),
    "electra": ("electra", "AutoModelForTokenClassification", {**SMALL, "num_labels": 64}),
    "modernbert": ("modernbert", "AutoModelForMaskedLM", {**SMALL, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt2": ("gpt2", "AutoModelForCausalLM", SMALL),
    "llama": ("llama", "AutoModelForCausalLM", GROUPED),
    "mistral": ("mistral", "AutoModelForCausalLM", {**GROUPED, "sliding_window": 4}),
    "opt": ("opt", "AutoModelForCausalLM", {**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "t5": ("t5", "AutoModelForSeq2SeqLM", PAIRED),
    "bart": ("bart", "AutoModelForSeq2SeqLM", PAIRED),
}


@pytest.mark.full
@pytest.mark.parametrize("attention", [pytest.param("eager", marks=pytest.mark.full), "sdpa"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "bert" else pytest.mark.full) for n in MODELS])
def test_models_of_transformers(name: str, attention: str) -> None:
    """With attention that adds the least number where it masks, and with the kernel of torch. Rows are padded by the
    user, too.
    """
    transformers: Any = pytest.importorskip("transformers")
    kind, auto, sizes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **NO_DROPOUT, **sizes)
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config, attn_implementation=attention)
    whole = auto.endswith("SequenceClassification")

    def fn(model: Any, optimizer: Optimizer, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    dims, fill = {"tokens": 1, "mask": 1}, dict[str, float]()
    dims, fill = (dims, fill) if whole else ({**dims, "labels": 1}, {"labels": IGNORED})
    other = copy.deepcopy(model)
    optimizer, plain = (SGD(m.parameters(), lr=0.1) for m in (model, other))
    step = ws.compile(fn, pad_to=ws.PadTo(LENGTHS, dims, fill=fill))
    for length in (5, 8, 13, 7):
        tokens, mask = torch.randint(3, 64, (3, length)), torch.ones(3, length, dtype=torch.int64)
        mask[0, -2:] = 0
        labels = torch.randint(2, (3,)) if whole else torch.where(mask > 0, tokens, IGNORED)
        mine, theirs = step(model, optimizer, tokens, mask, labels), fn(other, plain, tokens, mask, labels)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert len(step.programs) == (2 if whole else 1), step.misses  # transformers notes the kind of problem it found


def test_fill_that_is_not_in_the_mask_is_refused() -> None:
    pad_to = ws.PadTo(LENGTHS, {"x": 1, "mask": 1}, fill={"mask": 1})
    with pytest.raises(ws.PlanError, match="sums over padded positions that are not zero"):
        beside_unpadded(Op(EXACT["norm"]).double(), masked_sum, pad_to, features((3, 5)))


def test_what_is_computed_from_the_length_is_refused() -> None:
    def filled(x: Tensor, mask: Tensor) -> Tensor:
        return x * torch.full((), x.shape[1], dtype=x.dtype)

    with pytest.raises(ws.PlanError, match="computes with the padded length"):
        beside_unpadded(Op(filled).double(), masked_sum, FEATURES, features((3, 5)))


def test_results_of_the_padded_length_are_refused() -> None:
    def returns(model: nn.Module, optimizer: Optimizer, x: Tensor, mask: Tensor) -> Tensor:
        masked_sum(model, optimizer, x, mask)
        return model(x, mask).detach()

    with pytest.raises(ws.PlanError, match="the step returns a value of the padded length"):
        beside_unpadded(Op(EXACT["norm"]).double(), returns, FEATURES, features((3, 5)))


def test_a_guard_that_breaks_without_padding_runs_without_it() -> None:
    def branches(x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 6 else x * 3

    step = beside_unpadded(Op(branches).double(), masked_sum, FEATURES, features((3, 7), (3, 5), (3, 6), (3, 8)))
    assert any(miss.startswith("not padded: without padding, sizes break the guard") for miss in step.misses)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lengths": ()}, "lengths of 2 or more"),
        ({"dims": {"x": -1}}, "a dim of 0 or more"),
        ({"fill": {"y": 1}}, "names 'y'"),
    ],
)
def test_a_malformed_option(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ws.PlanError, match=why):
        ws.PadTo(**{"lengths": LENGTHS, "dims": {"x": 1}, **options})


@pytest.mark.parametrize(
    ("pad_to", "why"),
    [
        (ws.PadTo(LENGTHS, {"x": 1, "mask": 1, "y": 1}), "dim 1 of 'y'"),
        (ws.PadTo(LENGTHS, {"x": 0, "mask": 1}), "lengths 3 of x, 5 of mask"),
    ],
)
def test_dims_that_do_not_fit_the_batch(pad_to: ws.PadTo, why: str) -> None:
    with pytest.raises(ws.PlanError, match=why):
        beside_unpadded(Op(EXACT["norm"]).double(), masked_sum, pad_to, features((3, 5)))


def test_targets_without_the_ignored_class_are_refused() -> None:
    pad_to = ws.PadTo(LENGTHS, {"tokens": 1, "targets": 1})
    with pytest.raises(ws.PlanError) as refused:
        beside_unpadded(gpt(), train, pad_to, [(words(3, 5), words(3, 5))])
    assert "nll_loss_forward" in refused.value.found
    assert "loss = F.cross_entropy(" in refused.value.where
    assert refused.value.needed == "fill={...: -100} for its targets: the loss ignores that class"
