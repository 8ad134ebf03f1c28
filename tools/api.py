"""Writes docs/api.md, the reference of everything public, from the docstrings. `--check` only compares.

python tools/api.py [--check]
"""

import inspect
import sys
from pathlib import Path

import wholestep

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
HEAD = "# API\n\nEverything public, from the docstrings (written by `python tools/api.py`); `ws` is `wholestep`.\n"


def signature(thing: object) -> str:
    """The call signature on one line; empty where there is none."""
    try:
        return str(inspect.signature(thing)).replace("wholestep.", "ws.")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


def entry(name: str, thing: object) -> str:
    """One name: signature, docstring, and for a class its public methods and properties."""
    if inspect.ismodule(thing):
        head = [f"## {name}", "", block(inspect.getdoc(thing)), ""]
        return "\n".join([*head, *(entry(f"{name}.{part}", getattr(thing, part)) for part in sorted(thing.__all__))])
    kind = "class " if inspect.isclass(thing) else ""
    lines = [f"## {name}", "", f"```text\n{kind}ws.{name}{signature(thing)}\n```", "", block(inspect.getdoc(thing))]
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
            shown = "" if isinstance(value, property) else signature(target)
            lines += ["", f"**`.{member}{shown}`**", "", block(text)]
    return "\n".join(lines) + "\n"


def block(text: str | None) -> str:
    """A docstring as preformatted text, so that its sections keep their shape."""
    return f"```text\n{text}\n```" if text else ""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(entry(name, getattr(wholestep, name)) for name in sorted(wholestep.__all__))])


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
