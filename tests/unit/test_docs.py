"""The documentation runs: every python snippet is executed, every relative link resolves, the README stays short.

The snippets of one page share a namespace and run in one process, in an empty folder. A snippet that cannot run is
preceded by `<!-- no-run: the reason -->`. Every public function and class has an example, and these run as well.
"""

import doctest
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
import wholestep_foresight
from tests.dist.launch import start_server
from tests.forked import run_script
from wholestep.cli import app
from wholestep.cost.stage_orders import NAMED

ROOT = Path(__file__).resolve().parents[2]
README_LINES = 150
PAGE_SECONDS = 240
KERNELS = '{"kernels": [{"op": "mm", "shapes": [[4, 8], [8, 8]], "dtype": "float32", "us": 3.0}]}'
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
RUN_PAGES = [page for page in PAGES if page.name == "README.md" or page.is_relative_to(ROOT / "docs")]
SKIP = re.compile(r"<!--\s*no-run\b:?\s*(?P<why>.*?)\s*-->")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def program(text: str) -> str:
    """The python snippets of a page as one program, each on the lines on which the page has it."""
    lines: list[str] = []
    before, fence = "", None  # last line with text; language of the block that we are in
    keep = False
    for number, line in enumerate(text.splitlines(), 1):
        if fence is None and line.startswith("```"):
            fence = line[3:].strip()
            skip = SKIP.fullmatch(before.strip())
            if skip and not skip["why"]:
                raise ValueError(f"line {number}: say why: <!-- no-run: the reason -->")
            keep = fence.split(" ")[0] == "python" and not skip
            lines.append("")
        elif fence is not None and line.startswith("```"):
            fence, keep = None, False
            lines.append("")
        else:
            lines.append(line if keep else "")
        before = line if line.strip() else before
    if fence is not None:
        raise ValueError("a code block is not closed")
    return "\n".join(lines) + "\n"


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere. Links inside code blocks count as text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [match["target"].partition("#")[0] for match in LINK.finditer(text)]
    return [t for t in targets if t and not re.match(r"[a-z]+:", t) and not (page.parent / t).exists()]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name: the heading in small letters, with hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = [re.sub(r"[^\w\s-]", "", h.strip()).lower() for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"\s", "-", re.sub(r"\s+", " ", heading)) for heading in words}


def broken_anchors(page: Path) -> list[str]:
    """Links of a page to headings that are not there."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = [match["target"].partition("#") for match in LINK.finditer(text)]
    inside = [(path, part) for path, _, part in found if part and not re.match(r"[a-z]+:", path)]
    pages = [(page.parent / path if path else page, part) for path, part in inside]
    return [f"{there.name}#{part}" for there, part in pages if there.exists() and part not in anchors(there)]


@pytest.fixture(scope="module")
def server() -> None:
    """Started before a test is set up: the clean-up after a test leaves it alone."""
    start_server()


def run_page(page: Path, folder: Path) -> tuple[int, str]:
    """Exit status and output of the snippets of a page."""
    script = folder / f"{page.stem}.py"
    script.write_text(program(page.read_text()))
    return run_script(script, PAGE_SECONDS)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("page", RUN_PAGES, ids=page_id)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    if not program(page.read_text()).strip():
        return  # nothing to run
    status, output = run_page(page, tmp_path)
    assert status == 0, f"{page_id(page)} (line numbers are the page's):\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []
    assert broken_anchors(page) == []


def test_the_page_for_newcomers_names_files_that_are_there() -> None:
    rows = re.findall(r"^\| .*", (ROOT / "docs" / "how-it-works.md").read_text(), re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([a-z_]+/[a-z_/.]*)`", row)]
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / "src" / "wholestep" / path).exists()] == []


def unknown_commands(text: str) -> list[str]:
    """Commands of `wholestep` and `make`, scripts and modules of this repository in a page that are not there, and
    options that a command does not take.
    """
    known: Any = typer.main.get_command(app)
    options = {name: {o for p in one.params for o in p.opts} | {"--help"} for name, one in known.commands.items()}
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(one.strip("`") for one in re.findall(r"^```.*?^```|`[^`\n]+`", text, re.MULTILINE | re.DOTALL))
    found = [f"make {name}" for name in re.findall(r"^make ([a-z-]+)", code, re.MULTILINE) if name not in targets]
    scripts = re.findall(r"\b((?:benchmarks|examples|tests|tools)/[\w/]+\.py)\b", text)
    modules = (name.replace(".", "/") for name in re.findall(r"-m ((?:benchmarks|foresight|tests|tools)[\w.]*)", code))
    found += [path for path in scripts if not (ROOT / path).exists()]
    found += [path for path in modules if not (ROOT / path).is_dir() and not (ROOT / f"{path}.py").exists()]
    for name, rest in re.findall(r"(?:^|-m )wholestep ([a-z][a-z-]*)\b(.*)", code, re.MULTILINE):
        given = re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", rest)
        found += [f"{name} {option}" for option in given if option not in options.get(name, set())]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "decisions"], ids=page_id)
def test_commands_are_there(page: Path) -> None:
    assert unknown_commands(page.read_text()) == []


def test_unknown_commands_are_found() -> None:
    text = "`wholestep plan --mesh dp=2 --new 3`\n```\nmake toast\n```\n`wholestep dance --fast`\nmake sense\n"
    text += "`python benchmarks/moon.py` and `python -m benchmarks.moon`, `python benchmarks/start.py`"
    expected = ["make toast", "benchmarks/moon.py", "benchmarks/moon", "plan --new", "dance --fast"]
    assert unknown_commands(text) == expected


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < README_LINES


SEARCHED = (
    "rematerialization", "activation checkpointing", "gradient checkpointing", "roofline", "critical path", "straggler",
    "prefetches", "HSDP", "cost model", "evaluation", "SLURM", "Kubernetes", "Accelerate", "context parallelism",
    "expert parallelism", "pipeline parallelism", "sequence parallelism", "mixed precision", "EMA", "MFU",
)  # fmt: skip
OWN_WORDS = 25


@pytest.mark.parametrize("word", SEARCHED)
def test_a_search_for_a_word_of_the_field_finds_a_page(word: str) -> None:
    pages = [page for page in RUN_PAGES if page.parent == ROOT / "docs"]
    assert any(re.search(rf"\b{word}\b", page.read_text(), re.IGNORECASE) for page in pages)


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert 1 < len(rows) - 1 <= OWN_WORDS


PAGE = """\
```python
x = 1
```
<!-- no-run: needs a GPU -->

```python
raise SystemExit("must not run")
```
```text
not python
```
```python
assert x == 1
print(1 / 0)
```
"""


@pytest.mark.usefixtures("server")
def test_snippets_share_a_namespace_and_keep_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    status, output = run_page(page, tmp_path)
    assert status == 1
    assert "must not run" not in output
    assert "line 14, in <module>\n    print(1 / 0)" in output


@pytest.mark.parametrize("comment", ["<!-- no-run -->", "<!-- no-run: -->"])
def test_skipping_needs_a_reason(comment: str) -> None:
    with pytest.raises(ValueError, match=r"line 2: say why: <!-- no-run: the reason -->"):
        program(f"{comment}\n```python\nx\n```\n")


def test_open_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="a code block is not closed"):
        program("```python\nx = 1\n")


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "there.md").touch()
    page.write_text("[a](there.md#part) [b](https://example.com/x) [c](#here) [d](gone.md)\n```\n[e](code.md)\n```\n")
    assert broken_links(page) == ["gone.md"]


def test_broken_anchor_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `top`: all\n[a](#the-top-all) [b](#bottom) [c](page.md#top)\n")
    assert broken_anchors(page) == ["page.md#bottom", "page.md#top"]


def public() -> Iterator[tuple[str, Any]]:
    """Everything public that has to have an example; of errors the base alone."""
    for module in (ws, ws.collectives, wholestep_foresight):
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if not (inspect.isclass(thing) and issubclass(thing, ws.WholestepError)) or thing is ws.WholestepError:
                yield name, thing


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What examples use without making it: a step that was called, its stages, a mesh of one rank."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("examples"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 8)
    graph = ws.capture(train_step, model, optimizer, batch)
    plan = ws.plan(graph, "dp=8", ws.DataParallel("fully_shard"))
    step = ws.compile(train_step)
    step(model, optimizer, batch)
    ws.save("checkpoints", step)
    Path("kernels.json").write_text(KERNELS)
    yield {
        **{name: getattr(ws, name) for name in ws.__all__}, "Stack": wholestep_foresight.Stack,
        "ws": ws, "wholestep": ws, "torch": torch, "nn": nn, "split": ws.collectives.split, "rank": 0, "losses": [],
        "Replicate": Replicate, "Shard": Shard, "DistributedDataParallel": DistributedDataParallel,
        "train_step": train_step, "model": model, "net": nn.Linear(8, 8), "optimizer": optimizer, "batch": batch,
        "graph": graph, "plan": plan, "local": ws.partition(graph, plan), "step": step,
        "hardware": ws.Hardware.preset("dgx-h100"), "devices": init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)),
    }  # fmt: skip
    dist.destroy_process_group()
    os.chdir(before)


@pytest.mark.parametrize("name", [name for name, _ in public()])
@patch.dict(NAMED)  # an order of stages that is registered goes again
def test_examples_of_the_reference_run(name: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = inspect.getdoc(dict(public())[name]) or ""
    examples = doctest.DocTestParser().get_examples(text)
    assert examples, f"{name} has no example"
    scope = dict(names)
    for one in examples:
        capsys.readouterr()
        exec(compile(one.source, f"<example of {name}>", "single"), scope)
        if one.want:
            assert capsys.readouterr().out == one.want
