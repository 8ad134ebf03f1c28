"""Recurrent cells and layers on CUDA: the batch may be sharded, gates stay whole."""

from __future__ import annotations

from ..call import Call
from ..dsl import row
from ..rule import BoundRule, Group, Term

row("_thnn_fused_lstm_cell", "n g!, n g!, n h!, g!, g! -> n h, n h, n g")
row("_thnn_fused_lstm_cell_backward_impl", "n h!, n h!, n h!, n h!, n g! -> n g, n h, g")
row("_thnn_fused_gru_cell", "n g!, n g!, n h!, g!, g! -> n h, n w")
row("_thnn_fused_gru_cell_backward", "n h!, n w! -> n g, n g, n h, g, g", linear="0")


def _layer(call: Call) -> tuple[Term, Term]:
    """Terms of the sequences and of the states: the batch may be sharded."""
    return ("n", None, None) if call.argument("batch_first") else (None, "n", None), (None, "n", None)


def _is_packed(call: Call) -> bool:
    return bool(call.argument("batch_sizes"))


@row("_cudnn_rnn")
def cudnn_rnn(call: Call) -> BoundRule | None:
    """(sequences, weights, states) -> sequences, states; the reserve differs between ranks."""
    if _is_packed(call):
        return None
    sequence, state = _layer(call)
    states = {s.positions[0]: state for s in call.slots if s.name in ("hx", "cx") and s.positions}
    given = {0: sequence} | states
    made = {0: sequence, 1: state} | ({2: state} if call.outputs[2] and call.made(2) == call.made(1) else {})
    return BoundRule((Group(given, made, opaque=frozenset({3, 4})),))


@row("_cudnn_rnn_backward")
def cudnn_rnn_backward(call: Call) -> BoundRule | None:
    """Gradients of sequences, states and weights; the latter are sums over the batch."""
    if _is_packed(call):
        return None
    sequence, state = _layer(call)
    terms = {"input": sequence, "output": sequence, "grad_output": sequence, "hx": state, "cx": state,
             "grad_hy": state, "grad_cy": state}  # fmt: skip
    given = {s.positions[0]: terms[s.name] for s in call.slots if s.name in terms and s.positions}
    made: dict[int, Term] = {0: sequence, 1: state, 2: state}
    made |= {o: (None,) * len(call.made(o)) for o in range(3, len(call.outputs))}
    present = {o: t for o, t in made.items() if call.outputs[o] is not None and len(call.made(o)) == len(t)}
    return BoundRule((Group(given, present, {"n": "sum"}),))
