"""Writes docs/api.md, the reference of everything public, from the docstrings. `--check` only compares.

python tools/api.py [--check]
"""

import inspect
import sys
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any

import wholestep

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "foresight" / "src"))
wholestep_foresight = import_module("wholestep_foresight")


PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

Everything public, from the docstrings (written by `python tools/api.py`); `ws` is `wholestep`, and `foresight`
`wholestep_foresight`. Causes and cures of
errors are in [Errors](errors.md).
"""
COLUMNS = 100


class Unquoted:
    """An annotation, shown as it was written: `from __future__ import annotations` makes it a string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def signature(name: str, thing: object, method: bool = False) -> str:
    """The call signature after `name`, one parameter a line where it is longer than a line."""
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    given = list(found.parameters.values())
    parameters = [unquoted(p) for p in (given[1:] if method and given[:1] and given[0].name == "self" else given)]
    returns = "" if found.return_annotation in (found.empty, None, "None") else f" -> {plain(found.return_annotation)}"
    shown = f"{name}({', '.join(marked(parameters))}){returns}".replace("wholestep.", "ws.")
    if len(shown) <= COLUMNS:
        return shown
    lines = "".join(f"    {parameter},\n" for parameter in marked(parameters))
    return f"{name}(\n{lines}){returns}".replace("wholestep.", "ws.")


def unquoted(parameter: Parameter) -> Parameter:
    """The parameter with its annotation as text, not as a quoted string."""
    annotation: Any = parameter.annotation
    return parameter.replace(annotation=Unquoted(annotation)) if isinstance(annotation, str) else parameter


def plain(annotation: Any) -> str:
    """An annotation as text."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def marked(parameters: list[Parameter]) -> list[str]:
    """The parameters as text, with `*` before those that are given by name alone."""
    lines: list[str] = []
    for before, one in zip([None, *parameters], parameters, strict=False):
        alone = one.kind is Parameter.KEYWORD_ONLY
        if alone and (before is None or before.kind not in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL)):
            lines.append("*")
        lines.append(str(one))
    return lines


def entry(name: str, thing: object, package: str = "ws") -> str:
    """One name: signature, docstring, and for a class its public methods and properties."""
    if inspect.ismodule(thing):
        head = [f"## {name}", "", block(inspect.getdoc(thing)), ""]
        return "\n".join([*head, *(entry(f"{name}.{part}", getattr(thing, part)) for part in sorted(thing.__all__))])
    kind = "class " if inspect.isclass(thing) else ""
    lines = [f"## {name}", "", block(kind + signature(f"{package}.{name}", thing)), "", block(inspect.getdoc(thing))]
    if inspect.isclass(thing) and not issubclass(thing, BaseException):
        for member, value in sorted(vars(thing).items()):
            text = inspect.getdoc(value)
            if (
                member.startswith("_")
                or not text
                or not (callable(value) or isinstance(value, property | staticmethod))
            ):
                continue
            target = value.__func__ if isinstance(value, staticmethod) else value
            shown = member if isinstance(value, property) else signature(member, target, method=True)
            lines += ["", f"### {name}.{member}", "", block(f".{shown}"), "", block(text)]
    return "\n".join(lines) + "\n"


def block(text: str | None) -> str:
    """A docstring as preformatted text, so that its sections keep their shape."""
    return f"```text\n{text}\n```" if text else ""


def page() -> str:
    """The whole page."""
    own = [entry(name, getattr(wholestep, name)) for name in sorted(wholestep.__all__)]
    other = [entry(name, getattr(wholestep_foresight, name), "foresight") for name in wholestep_foresight.__all__]
    return "\n".join([HEAD, *own, *other])


def main() -> int:
    """Write the page, or with --check say whether it is up to date."""
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text() == text
        print("docs/api.md is up to date" if same else "docs/api.md is out of date: run python tools/api.py")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
