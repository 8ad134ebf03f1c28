"""The errors of wholestep: what was found, what was needed, the next step."""


class WholestepError(Exception):
    """Base class of the errors of wholestep.

    Args:
        found: the offender by name, and what was found.
        needed: what was needed.
        next_step: how to correct it.
        where: the user's source line, `file:line  code`, if known.

    Example:
        >>> try:
        ...     ws.Mesh("dp=0")
        ... except ws.WholestepError as error:
        ...     print(error.found, error.needed, error.next_step)
    """

    def __init__(self, found: str, needed: str = "", next_step: str = "", where: str = "") -> None:
        self.found, self.needed, self.next_step, self.where = found, needed, next_step, where
        super().__init__(found, needed, next_step, where)

    def __str__(self) -> str:
        parts = [self.found]
        if self.where:
            parts.append(f"  at: {self.where}")
        if self.needed:
            parts.append(f"  needed: {self.needed}")
        if self.next_step:
            parts.append(f"  next: {self.next_step}")
        return "\n".join(parts).encode("utf-8", "backslashreplace").decode()  # half a character cannot be printed


def shown(value: object, most: int = 80) -> str:
    """A value in a message: its `repr`, cut after `most` characters; its class where it has none."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:  # `__repr__` of the user; a number of more digits than Python writes
        text = f"<{type(value).__name__} without a repr: {type(error).__name__}>"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class CaptureError(WholestepError):
    """The step cannot be captured as one graph. `reads_value`: it reads a value that is known only when it runs.
    `place`: the place of a Python value that it reads, where the value was to be an input. `branches`: what values were
    taken for until then, where the step asks for their truth. `counts`: it was traced with rows that it counts.
    """

    reads_value = False
    counts = False
    place = ""
    branches: tuple[bool, ...] = ()


class MeshError(WholestepError):
    """A mesh is malformed, or does not fit the process group."""


class LayoutError(WholestepError):
    """A layout does not fit its tensor or mesh, or no reshard leads to it."""


class GraphError(WholestepError):
    """A graph violates an invariant: a defect of a pass or of a user's transformation."""


class PlanError(WholestepError):
    """No plan is possible, or a plan does not fit its graph."""


class BudgetError(PlanError):
    """No plan fits the memory budget."""


class RuleError(WholestepError):
    """A sharding rule is malformed, does not fit a call, or is wrong for its op."""


class BackendError(WholestepError):
    """A backend is unknown or cannot run here."""


class StateError(WholestepError):
    """The model or the optimizer has a state that a compiled step does not support."""


class CheckpointError(WholestepError):
    """A checkpoint is missing, damaged, or does not fit the step."""


class CacheError(WholestepError):
    """The directory of the compile cache is unusable."""


class RankMismatchError(WholestepError):
    """Ranks of one job compiled different programs."""


class StoreError(WholestepError):
    """The store of the job holds what no rank of the job wrote: another process writes to it. Nothing of it was run."""


class RankFailedError(WholestepError):
    """Another rank of the job died, left, is stopped or hangs, or ranks wait for each other at different points.
    `rank`, `host` and `pid` say which process failed first: -1, "" and 0 where that is none of the ranks.
    """

    rank, host, pid = -1, "", 0


class NonFiniteError(WholestepError):
    """The loss or a gradient of a call was NaN or infinite, and the call changed nothing.

    `number` counts the calls of the step from 1. `names` are `"loss"` and parameters, in the order of the model.
    """

    def __init__(self, number: int, names: tuple[str, ...]) -> None:
        self.number, self.names = number, names
        super().__init__(
            f"call {number} of the step: {not_finite(names)}",
            "a loss and gradients that are finite, with on_nonfinite='raise'",
            "parameters and optimizer state are those before that call: look at its batch, or give on_nonfinite='skip'",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.number, self.names)


def not_finite(names: tuple[str, ...]) -> str:
    """Say which values were not finite."""
    params = [name for name in names if name != "loss"]
    if not params:
        return "the loss is not finite"
    remaining = f" (and those of {len(params) - 1} more)" if len(params) > 1 else ""
    return f"the gradient of {params[0]!r} is not finite{remaining}" + (", nor is the loss" if "loss" in names else "")
