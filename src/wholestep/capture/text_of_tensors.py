"""Text of a tensor that a library formats while a step is captured, which has no value then.

Most such text is for an error that is not raised. It is refused where a call would write, return or keep it.
"""

from __future__ import annotations

from ..errors import CaptureError

_MARK = "\ufdd0"  # in no text: Unicode keeps this character for use inside of a program


def text_of_tensor(line: str) -> str:
    """Return what stands for the value of a tensor in the text that a `line` makes."""
    return f"{_MARK}{line}{_MARK}"


def refuse_text_of_tensors(value: object) -> None:
    """Raise CaptureError if `value` is text with a `text_of_tensor`."""
    if isinstance(value, str) and _MARK in value:
        raise error_of_text("a tensor", value.split(_MARK)[1])


def error_of_text(what: str, line: str = "") -> CaptureError:
    """Return the error for a step that formats `what` in `line`."""
    return CaptureError(
        f"the step formats {what} as text while it is being captured",
        "text of values that are known before the step runs",
        "return the tensor, or format it in a function passed to wholestep.callback",
        line,
    )
