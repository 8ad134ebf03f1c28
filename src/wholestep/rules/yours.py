"""The public way to write a rule: it goes before what is built in and before discovery."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import registry
from .registry import Function, Samples


def rule(
    op: Any,
    text: str = "",
    *,
    linear: str = "",
    reduces: Mapping[str, str] | None = None,
    sizes: Mapping[str, str] | None = None,
    local: Mapping[str, Callable[..., Any]] | None = None,
    by_shape: Iterable[int] = (),
    filled: Iterable[str] = (),
    samples: Samples | None = None,
) -> Callable[[Function], Function]:
    """Say how an op may be cut: which dims of its tensors go together.

    One term for each tensor argument, then one for each tensor it returns; a factor that is missing in a result is
    summed there. `docs/rules.md` has the grammar. Used as a decorator, without `text`, on a function that is given the
    call (`rules.call.Call`: shapes and arguments) and returns the text, or None for no rule.

    Args:
        op: an op or a list of them: a custom op, a `torch.ops` overload or packet, or a plain function in a graph.
        text: the rule, `"m k, k n -> m n"`.
        linear: inputs the op is linear in: `"0 | 1"` in each alone, `"0+1"` in both together.
        reduces: by factor, what cutting it leaves in a result that lacks it: `sum`, `avg`, `max`, `min`, or `""` where
            every rank makes the same.
        sizes: arguments that hold sizes, and what they are on a rank: `out0`, `in1` or a factor.
        local: by factor, a function that ranks run instead of the op where the factor is cut; it is given where the
            rank's piece starts, how long it is, then the op's arguments.
        by_shape: inputs whose values the op never reads.
        filled: factors of which no rank may get an empty piece.
        samples: makes tuples of arguments, for `wholestep check-rules`.

    Raises:
        RuleError: the text breaks the grammar.

    Example:
        >>> import torch, wholestep as ws
        >>> @torch.library.custom_op("example::swish", mutates_args=())
        ... def swish(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ...     return torch.nn.functional.silu(gate) * x
        >>> _ = ws.rule(swish, "..., ... -> ...", linear="0")
        >>> ws.check_rule(swish, torch.randn(4, 6), torch.randn(4, 6)).ok
        True
    """
    return registry.rule(
        op, text, linear=linear, reduces=reduces, sizes=sizes, local=local, by_shape=by_shape, filled=filled,
        samples=samples, origin="yours",
    )  # fmt: skip
