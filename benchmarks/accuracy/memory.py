"""Bytes that one rank's tensors take at the peak of a transformer's training step: nothing here is fitted.

The peak is where the loss is done and its backward begins: all activations are kept, and logits are there in several
forms. What is counted is what an allocator keeps, as that is what runs report (`max_memory_reserved`): gradients that
are scattered on a stream of their own come on top, since they cannot use what the backward has freed.
"""

from benchmarks.accuracy.config import Run

_HALF, _FULL, _GIB = 2, 4, 1 << 30


def peak_gib(run: Run) -> float:
    """Of parameters, optimizer state, gradients, gathered parameters, activations and logits."""
    return (_at_rest(run) + max(_at_loss(run), _at_update(run))) / _GIB


def _at_rest(run: Run) -> float:
    """Parameters and Adam's two moments in float32; where parameters are whole, a copy of them in half precision."""
    own = run.parameters / run.tp
    if run.style == "full":
        return own / run.shard * 3 * _FULL
    shared = 1 if run.style == "replicate" else run.replicate * run.shard
    return own * _HALF + own / shared * 3 * _FULL


def _gradients(run: Run) -> float:
    own = run.parameters / run.tp
    if run.style == "full":
        return own / run.shard * _FULL
    return own * _HALF if run.style in ("replicate", "zero1") else own / (run.replicate * run.shard) * _FULL


def _at_update(run: Run) -> float:
    return 2 * _gradients(run)  # norms and the update of many tensors at once make as much again


def _at_loss(run: Run) -> float:
    ends = run.vocabulary * run.width / run.tp
    layer = run.layer_parameters / run.tp
    gathered = 0.0
    if run.style == "full" and run.shard > 1:
        # the layer that computes and the next; the head, and its gradient before it is scattered
        gathered = 2 * layer * _HALF + ends * (_HALF + _FULL) + layer * _FULL
    # in half precision, after log-softmax in float32, its gradient in float32; that of the loss, or all once more cast
    logits = run.tokens * run.vocabulary / run.tp * (12 if run.compiled else 14)
    activations = run.layers * _kept_on_average(run) + _kept(run, "none") * (run.ac != "none")
    return gathered + _gradients(run) + logits + activations


def _kept_on_average(run: Run) -> float:
    if run.checkpointed == 1:
        return _kept(run, run.ac)
    return run.checkpointed * _kept(run, run.ac) + (1 - run.checkpointed) * _kept(run, "none")


def _kept(run: Run, ac: str) -> float:
    """Bytes of activations that one layer keeps for its backward."""
    apart = run.tp if run.sequence else 1  # what lies between products is shared out only along the tokens
    wide, hidden = run.tokens * run.width * _HALF, run.tokens * run.hidden * _HALF / run.tp
    inside, keys = wide / run.tp, wide / run.tp * run.kv_heads / run.heads
    if ac == "full":
        return wide / apart
    if ac == "ops":  # the products made first, third, ...: queries, values, one of the hidden ones, the last
        return (2 * wide) / apart + 2 * inside + keys + hidden
    kept = 4 * wide / apart + 2 * inside + 2 * keys
    if run.gated:
        kept += (3 if run.compiled else 4) * hidden + (0 if run.compiled else inside + keys)
    else:
        kept += 2 * hidden
    if not run.flash:
        kept += wide / apart  # masks of two dropouts, a byte for each element
        kept += 0 if ac == "attention" else 5 * run.micro * run.heads / run.tp * run.length**2
    return kept
