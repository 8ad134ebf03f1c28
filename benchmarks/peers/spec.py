"""What a peer is called and what it may be told: "base:word,number=4". Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass


class UnknownPeer(ValueError):
    """No peer has that name or takes that option; the text says which do."""


@dataclass(frozen=True)
class Base:
    """A family of peers: what it is, the words and the numbers it takes."""

    about: str
    words: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


ORDERS = ("gpipe", "1f1b", "interleaved", "zbv", "zero_bubble", "auto")
STYLES = ("replicate", "zero1", "zero2", "fully_shard")
BASES = {
    "one": Base("one process on the whole batch: what the losses should be", ("compile",)),
    "floor": Base("every rank by itself, nothing exchanged: the no-communication floor", ("compile",)),
    "wire": Base(
        "the floor beside as many bytes on the wire, for which nothing waits: what cores and link leave; late: from "
        "the backward on; parts: exchanges and gathers, not all-reduces",
        ("late", "parts"),
        ("bucket",),
    ),
    "ddp": Base(
        "DistributedDataParallel; tuned: bucket view, static graph and the best of several bucket sizes",
        ("tuned", "view", "static", "compile"),
        ("bucket",),
    ),
    "zero": Base("DDP with ZeroRedundancyOptimizer"),
    "fsdp2": Base(
        "fully_shard of every block; keep: no reshard after forward; async: gathers of the next block overlap",
        ("keep", "async", "compile"),
    ),
    "jax": Base("jax.jit over XLA's gloo collectives"),
    "pipe": Base(
        f"torch.distributed.pipelining with a schedule ({', '.join(ORDERS[:4])}); pieces: micro-batches, 4",
        ORDERS[:4],
        ("pieces",),
    ),
    "stages": Base(
        "wholestep.Pipeline with a schedule (gpipe, 1f1b, interleaved, zero_bubble, auto); v: two stages on each "
        "rank, in a V; pieces: micro-batches, 4",
        (*ORDERS[:3], *ORDERS[4:], "v"),
        ("pieces",),
    ),
    "tokens": Base(
        "DDP whose ranks have a part of every sequence each: attention with keys and values gathered, with tokens "
        "exchanged for heads, or by the ring of torch's context_parallel",
        ("gather", "heads", "ring"),
    ),
    "context": Base(
        "wholestep.ContextParallel by a method (auto, gather, heads, ring)", ("auto", "gather", "heads", "ring")
    ),
    "wholestep": Base(
        f"a style ({', '.join(STYLES)}); keep, reshard: after the forward; bucket (MB): its size; "
        "unscheduled: no passes; across: the end of a step is left to the next",
        (*STYLES, "keep", "reshard", "bucket", "unscheduled", "across", "inductor"),
        ("bucket",),
    ),
}


@dataclass(frozen=True)
class Spec:
    """One peer. `options` are words (None) and numbers by name; `str(spec)` is what the user wrote."""

    text: str
    base: str
    options: tuple[tuple[str, float | None], ...] = ()

    def __str__(self) -> str:
        return self.text

    def has(self, word: str) -> bool:
        """Whether `word` was given, with a number or without."""
        return any(name == word for name, _ in self.options)

    def number(self, word: str, default: float) -> float:
        """The number given as `word=...`."""
        return next((value for name, value in self.options if name == word and value is not None), default)

    @property
    def style(self) -> str:
        """Where wholestep keeps tensors; for other peers what that is in the same words ("" for none)."""
        named = {"ddp": "replicate", "jax": "replicate", "zero": "zero1", "fsdp2": "fully_shard"}
        return next((name for name, _ in self.options if name in STYLES), named.get(self.base, ""))

    @property
    def exchanges(self) -> bool:
        """Whether its ranks talk to each other."""
        return self.base not in ("one", "floor")

    @property
    def is_pipe(self) -> bool:
        """Whether each rank has some of the layers, and all are given the whole batch."""
        return self.base in ("pipe", "stages")

    @property
    def shares_tokens(self) -> bool:
        """Whether each rank has some of the tokens of every sequence, and all are given the whole batch."""
        return self.base in ("tokens", "context")

    @property
    def trains_alone(self) -> bool:
        """Whether each rank trains on its own rows only, so that losses say nothing about the whole batch."""
        return self.base in ("floor", "wire")

    @property
    def pieces(self) -> int:
        """Micro-batches of a pipeline."""
        return int(self.number("pieces", 4))

    @property
    def is_ours(self) -> bool:
        """Whether wholestep compiles it."""
        return self.base in ("wholestep", "stages", "context")

    @property
    def measures(self) -> bool:
        """Whether its ranks measure the machine after each of their turns."""
        return self.base in ("stages", "context")

    @property
    def compiled(self) -> bool:
        """Whether a compiler made its kernels."""
        return self.has("compile") or self.has("inductor")

    def processes(self, world: int) -> int:
        """How many processes it runs as."""
        return 1 if self.base == "one" else world


def parse(text: str) -> Spec:
    """The peer that `text` names.

    Raises:
        UnknownPeer: it names none, or an option that this peer does not take.
    """
    name, _, rest = text.partition(":")
    if name not in BASES:
        raise UnknownPeer(f"peer {text!r} is unknown: choose among {', '.join(BASES)}, {', '.join(PRESETS)}")
    base = BASES[name]
    spec = Spec(text, name, tuple(_option(text, item, base) for item in rest.split(",") if item))
    styles = [word for word, _ in spec.options if word in STYLES]
    if name == "wholestep" and len(styles) != 1:
        raise UnknownPeer(f"peer {text!r} needs one style: wholestep:S with S one of {', '.join(STYLES)}")
    if spec.is_pipe and sum(spec.has(word) for word in ORDERS) != 1:
        raise UnknownPeer(f"peer {text!r} needs one schedule: one of {', '.join(base.words)}")
    if spec.shares_tokens and len(spec.options) != 1:
        raise UnknownPeer(f"peer {text!r} needs one method: one of {', '.join(base.words)}")
    if spec.has("keep") and spec.has("reshard"):
        raise UnknownPeer(f"peer {text!r} is told to keep and to reshard: choose one")
    return spec


def _option(text: str, item: str, base: Base) -> tuple[str, float | None]:
    word, equals, value = item.partition("=")
    known = [*base.words, *(f"{number}=<number>" for number in base.numbers)]
    if word not in (base.numbers if equals else base.words):
        takes = f"takes {', '.join(known)}" if known else "takes no options"
        raise UnknownPeer(f"peer {text!r}: option {item!r} is unknown, {text.partition(':')[0]} {takes}")
    try:
        return word, float(value) if equals else None
    except ValueError:
        raise UnknownPeer(f"peer {text!r}: {item!r} needs a number, as {word}=4") from None


TORCH = (
    "one",
    "floor",
    "floor:compile",
    "ddp",
    "ddp:tuned",
    "ddp:compile",
    "zero",
    "fsdp2",
    "fsdp2:keep",
    "fsdp2:async",
)
OURS = tuple(f"wholestep:{style}" for style in (*STYLES[:3], "fully_shard,reshard", "fully_shard,keep"))
PLAIN = tuple(f"{name},unscheduled" for name in OURS)
COMPILED = ("floor:compile", "ddp:compile", *(f"{name},inductor" for name in OURS))
PIPES = (*(f"pipe:{name}" for name in ORDERS[:4]), *(f"stages:{name}" for name in (*ORDERS[:3], *ORDERS[4:], "auto,v")))
LONG = ("tokens:gather", "tokens:heads", "tokens:ring", "context:gather", "context:heads", "context:ring")
PRESETS = {
    "default": ("floor", "ddp", "ddp:tuned", "fsdp2", "fsdp2:keep", *OURS),
    "torch": TORCH,
    "ours": (*OURS, *PLAIN),
    "compiled": COMPILED,
    "pipes": ("one", *PIPES),
    "long": ("one", *LONG),
    "all": (*TORCH, "wire:late", "jax", *OURS, *PLAIN, *PIPES, *LONG),
}


def parse_all(words: Sequence[str]) -> list[Spec]:
    """The peers that `words` name, presets written out, each once, the floor first.

    Raises:
        UnknownPeer: as `parse`.
    """
    names = [name for word in words for name in PRESETS.get(word, (word,))]
    return [parse(name) for name in dict.fromkeys(["floor", *names])]
