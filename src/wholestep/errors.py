"""Every error wholestep raises on purpose: what was met, what was needed, what to do next."""


class WholestepError(Exception):
    """Base of all errors raised on purpose.

    Args:
        found: the offender by name and what was found there.
        needed: what would have been right.
        next_step: what to do about it.
        where: the user's source line, `file:line  code`, when one is known.

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
        return "\n".join(parts)


class CaptureError(WholestepError):
    """The step cannot be captured as one graph. `reads_value`: it needs a value that only running it gives."""

    reads_value = False


class MeshError(WholestepError):
    """A mesh is malformed, or does not fit the job it is used in."""


class LayoutError(WholestepError):
    """A layout does not fit its tensor or its mesh, or cannot be reached."""


class GraphError(WholestepError):
    """A graph breaks one of its invariants: a defect of a pass or of a user's transformation."""


class PlanError(WholestepError):
    """No plan can be made, or a plan does not fit the graph it is applied to."""


class ConstraintError(PlanError):
    """A plan is not as its user wants it: something that is pinned rests elsewhere, or what is to be whole is cut."""


class BudgetError(PlanError):
    """No plan fits a budget of memory."""


class RuleError(WholestepError):
    """A sharding rule is malformed, does not fit the call it is applied to, or is wrong about its op."""


class BackendError(WholestepError):
    """A backend is unknown or cannot run here."""


class StateError(WholestepError):
    """The model or the optimizer is not in a state the compiled step can use."""


class CheckpointError(WholestepError):
    """A checkpoint is missing, damaged, or belongs to something else."""


class CacheError(WholestepError):
    """The folder of the compile cache cannot be used."""


class RankMismatchError(WholestepError):
    """Ranks of one job compiled different programs."""
