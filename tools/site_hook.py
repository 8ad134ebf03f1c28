"""Hook of mkdocs: pages that lie outside of docs/ join the site, decisions join its navigation.

`mkdocs.yml` names this file. A page of docs/ may link to any file of the repository, as `../examples/gpt.py`: on a git
host that link works as it is, and on the site it leads to a copy of the file.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"Changelog": "CHANGELOG.md", "Contributing": "CONTRIBUTING.md"}
LINK = re.compile(r"(?P<open>\]\()(?P<target>(?!#|[a-z]+:)[^)\s#]+)")
TITLE = re.compile(r"# (?P<title>.+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Decisions, behind their index, and the pages of the repository's root come last in the navigation."""
    folder = ROOT / "docs" / "decisions"
    decisions = [folder / "index.md", *sorted(folder.glob("[0-9]*.md"))]
    logs = sorted((ROOT / "benchmarks").glob("*.md"))
    nav: list[Any] = config.nav or []
    nav.append({"Measurements": [{title_of(log): f"benchmarks/{log.name}"} for log in logs]})
    nav.append({"Decisions": [{title_of(page): f"decisions/{page.name}"} for page in decisions]})
    nav.extend({title: path} for title, path in PAGES.items())
    return config


def title_of(page: Path) -> str:
    """The first heading of a page."""
    found = TITLE.match(page.read_text())
    assert found is not None, f"{page}: the first line is no heading"
    return found["title"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every file outside of docs/ that a page links to becomes a file of the site, at its path in the repository."""
    docs = ROOT / "docs"
    waiting = [*docs.rglob("*.md"), *(ROOT / path for path in PAGES.values()), *(ROOT / "benchmarks").glob("*.md")]
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        if not page.is_relative_to(docs):
            files.append(File.generated(config, page.relative_to(ROOT).as_posix(), content=page.read_bytes()))
        if page.suffix == ".md":
            waiting += [(page.parent / m["target"]).resolve() for m in LINK.finditer(page.read_text())]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links by their place in the repository become links by their place on the site."""
    source = page.file.src_path
    inside = (ROOT / "docs" / source).exists()
    folder = (ROOT / "docs" / source if inside else ROOT / source).parent

    def on_site(match: re.Match[str]) -> str:
        target = (folder / match["target"]).resolve()
        docs = ROOT / "docs"
        place = target.relative_to(docs if target.is_relative_to(docs) else ROOT)
        return match["open"] + os.path.relpath(place, Path(source).parent)

    return LINK.sub(on_site, markdown)
