"""The page of a plan: its figures are those of the simulation, text of models stays text, and a browser shows it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import mean_square as train
from tests.steps import model_file
from tests.unit.test_plan_command import row_of
from wholestep.cli import app
from wholestep.cost.stage_costs import BlockPrices
from wholestep.cost.timeline import Span, Timeline
from wholestep.graph.text import human, human_at_least, seconds
from wholestep.planner.staged_plan import staged
from wholestep.report import page as page_module
from wholestep.report.compare import Costs
from wholestep.report.page import program
from wholestep.report.page_data import by_op, columns, lanes, outline, sent, tree, verdicts
from wholestep.units import parse_bytes

H100 = ws.Hardware.preset("dgx-h100")
EVIL = """</script><script>alert("1")</script><!--'&"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Named(nn.Module):
    """Two blocks of layers; the second is called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for block in ("first", name):
            self.add_module(block, nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(self.first(x))


def planned(name: str = "second", mesh: str = "dp=4") -> tuple[ws.TrainGraph, ws.Plan]:
    with torch.device("meta"):
        model, x = Named(name), torch.empty(64, 256)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    return graph, ws.plan(graph, mesh, ws.DataParallel("fully_shard"))


class Parsed(HTMLParser):
    """Elements by id: (tag, attributes), all text within, rows of tables as lists of cells; every script's text."""

    VOID = frozenset({"meta", "link", "br", "path", "rect", "line"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, str]] = []
        self.ids: dict[str, dict[str, str | None]] = {}
        self.text: dict[str, str] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        self.rows = {name: [[cell.strip() for cell in row] for row in rows] for name, rows in self.rows.items()}
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]
        given = dict(attrs)
        name = given.get("id") or ""
        if name:
            assert name not in self.ids, f"id {name} twice"
            self.ids[name] = given
        if tag == "script":
            self.scripts.append("")
        for _, table in self.open:
            if tag == "tr":
                self.rows.setdefault(table, []).append([])
            elif tag in ("td", "th") and table in self.rows:
                self.rows[table][-1].append("")
        if tag not in self.VOID:
            self.open.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open[-1][0] == tag, f"</{tag}> in {self.open}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1] += data
        for tag, name in self.open:
            if name:
                self.text[name] = self.text.get(name, "") + data
            if tag == "table" and self.rows.get(name) and self.rows[name][-1]:
                self.rows[name][-1][-1] += data


def shown(plan: ws.Plan, graph: ws.TrainGraph | ws.LocalGraph, **given: Any) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        ws.report(path, plan, graph, H100, **given)
        return path.read_text(encoding="utf-8")


def test_figures_are_those_of_the_simulation(tmp_path: Path) -> None:
    graph, plan = planned()
    local = program(plan, graph, H100)
    ws.report(tmp_path / "new" / "plan.html", plan, graph, H100, model="two blocks")
    text = (tmp_path / "new" / "plan.html").read_text()
    assert text == shown(plan, local, model="two blocks"), "the graph and its program give the same page"
    found = Parsed(text)
    made, peak = ws.simulate(local, H100), ws.peak_memory(local)
    assert found.text["step"] == seconds(made.step_us / 1e6)
    assert found.text["exposed"] == f"{seconds(made.exposed_us / 1e6)} {made.exposed_us / made.step_us:.1%}"
    assert found.text["mfu"] == f"{made.mfu:.1%}"
    assert found.text["peak"] == human(peak.size_bytes)
    assert found.text["rest"] == human(plan.stored_bytes("param") + plan.stored_bytes("state"))
    kinds = [[kind, human(size)] for kind, size in peak.by_kind().items()]
    assert [row[:2] for row in found.rows["kinds"][1:]] == kinds
    assert found.rows["largest"][1][0].startswith(peak.live[0].name)
    assert "two blocks on dp=4" in text
    rows = found.rows["sent-table"][1:]
    totals = local.collectives().values()
    assert sum(int(row[4]) for row in rows) == sum(total.count for total in totals)
    assert {row[1] for row in rows} == {"dp"}
    data = json.loads(found.scripts[0])
    assert sum(len(lane["start"]) for lane in data["lanes"]) == len(ws.timeline(local, H100).spans)
    assert max(json.loads(found.scripts[1])["bytes"]) == peak.size_bytes


@pytest.mark.parametrize("buckets", [True, False])
def test_rows_of_collectives_add_up(buckets: bool) -> None:
    graph, plan = planned()
    local = program(plan, graph, H100) if buckets else ws.partition(graph, plan)
    made = ws.timeline(local, H100)
    rows = sent(local, made)
    assert sum(row.sent_bytes for row in rows) == sum(total.bytes for total in local.collectives().values())
    assert sum(row.us for row in rows) == pytest.approx(made.busy_us("dp"))
    assert sum(row.waited_us for row in rows) == pytest.approx(made.simulated.exposed_us)
    assert max(row.count for row in rows) == (2 if buckets else 4), "layers alike, in one row"
    assert not buckets or all(row.where for row in rows), "buckets say what is in them"
    assert sum(us for _, _, us in by_op(made)) == pytest.approx(made.busy_us("compute"))


def test_the_tree_adds_up() -> None:
    _, plan = planned()
    root = tree(plan)
    assert root.size_bytes == plan.stored_bytes("param")
    assert root.state_bytes == plan.stored_bytes("state")
    assert list(root.branches) == ["first", "second"]
    leaf = root.branches["first"].branches["0"].leaves[0]
    assert (leaf.name, leaf.layout, leaf.local) == ("weight", "256@dp 256", "64 256")
    assert leaf.size_bytes == 64 * 256 * 4


def test_the_same_input_gives_the_same_bytes() -> None:
    assert shown(*reversed(planned())) == shown(*reversed(planned()))


def test_text_of_models_stays_text() -> None:
    """In modules, in the model's name, in alternatives; in HTML and in what the script reads."""
    graph, plan = planned(EVIL.replace(".", "_"))
    rows = [row_of(EVIL, 1, None, EVIL)]
    text = shown(plan.with_notes(EVIL), graph, model=EVIL, alternatives=rows, chosen=EVIL)
    assert EVIL not in text
    found = Parsed(text)
    assert len(found.scripts) == 3
    assert len(re.findall("<script", text)) == 3
    words = json.loads(found.scripts[0])["words"]
    assert any(EVIL in word for word in words)
    assert EVIL in found.text["model"]
    assert EVIL in found.rows["alternatives-table"][1][-1]
    assert not any(key.startswith("on") for _, key, _ in found.attributes)


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = shown(*reversed(planned()))
    assert not [value for _, key, value in Parsed(text).attributes if key in ("src", "href") and value[:1] != "#"][1:]
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_why_alternatives_lost() -> None:
    best = Costs(10, 50, 5, 1, 1.0, 0.1)
    rows = [
        row_of("quick but large", 1, replace(best, step_s=0.5, peak_bytes=200)),
        row_of("best", 2, replace(best, step_s=2.0, exposed_s=0.2)),
        row_of("waits", 1, replace(best, step_s=1.5, exposed_s=0.6)),
        row_of("computes", 1, replace(best, step_s=1.5)),
        row_of("fails", 1, None, "11 heads over 2 ranks"),
    ]
    assert verdicts(rows, 100) == [
        "does not fit: 100 B more than the device has",
        "fastest for each batch that fits",
        "50.0% slower for each batch: mostly waits for collectives longer",
        "50.0% slower for each batch: mostly computes longer",
        "no plan: 11 heads over 2 ranks",
    ]
    assert verdicts(rows)[0] == "fastest for each batch"
    graph, plan = planned()
    found = Parsed(shown(plan, graph, alternatives=rows, chosen="best"))
    assert [row[0] for row in found.rows["alternatives-table"][1:]] == [
        "quick but large", "best this plan", "waits", "computes", "fails",
    ]  # fmt: skip


def test_refusals() -> None:
    graph, plan = planned()
    with pytest.raises(ws.PlanError, match="no alternative is called 'x'"):
        shown(plan, graph, chosen="x")
    other, _ = planned("third")
    with pytest.raises(ws.PlanError, match=r"the plan has 'second\.0\.weight' as .* the graph as absent"):
        shown(plan, other)
    with pytest.raises(ws.PlanError, match=r"has 'second\.0\.bias'"):
        shown(plan, program(ws.plan(other, "dp=4", ws.DataParallel("fully_shard")), other, H100))
    with pytest.raises(ws.PlanError, match="the plan is for mesh dp=4, the program for dp=2"):
        shown(plan, program(ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")), graph, H100))


def test_columns_keep_every_peak() -> None:
    memory = [(1.0, 5), (1.0, 90), (6.0, 7), (10.0, 3)]
    assert columns(memory, 10.0, 5) == [90, 7, 7, 7, 3]
    assert columns([], 10.0, 2) == [0, 0]
    assert columns([(0.0, 4)], 0.0, 2)[0] == 4
    assert outline([10, 5], 10) == "M0 100V0.00H1V50.00H2V100Z"


def test_times_have_three_digits() -> None:
    given = (0.0, 12.345, 999.2, 999.7, 1234.0, 99_960.0, 999_700.0, 12_345_678.0, 1.25e9, 1e-9)
    expected = ["0 us", "12.3 us", "999 us", "1.00 ms", "1.23 ms", "100 ms", "1.00 s", "12.3 s", "1,250 s", "0 us"]
    assert [seconds(us / 1e6) for us in given] == expected


def test_rounded_up_bytes_suffice() -> None:
    for size in (1, 999, 1000, 1001, 6212, 999_950, 999_951, 12_345_678_901, 3 * 10**12):
        assert parse_bytes(human_at_least(size)) >= size
    assert [human_at_least(size) for size in (999, 6201, 999_951)] == ["999 B", "6.3 kB", "1.0 MB"]


def many(local: ws.LocalGraph, count: int) -> Timeline:
    """A step of `count` spans."""
    made = ws.timeline(local, H100)
    spans = tuple(
        Span(f"node_{i}", "mul", "compute" if i % 4 else "dp", float(i), 0.9, "forward", f"layers.{i % 99}.mlp", 1024)
        for i in range(count)
    )
    return replace(made, spans=spans, simulated=replace(made.simulated, step_us=float(count)))


def test_lanes_hold_every_span_compactly() -> None:
    graph, plan = planned()
    data = lanes(many(program(plan, graph, H100), 10_000))
    assert [len(lane["start"]) for lane in data["lanes"]] == [7_500, 0, 2_500]
    assert len(data["words"]) == 101
    assert len(json.dumps(data)) < 6e5


@pytest.mark.usual("0")
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
@pytest.mark.parametrize("count", [0, 100_000])
def test_a_browser_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """No errors, everything drawn, nothing wider than a narrow window; keys and clicks do what the page says."""
    graph, plan = planned(EVIL)
    local = program(plan, graph, H100)
    if count:
        monkeypatch.setattr(page_module, "step_of", lambda *_: (many(local, count), ()))
    text = shown(plan, local, model=EVIL, alternatives=[row_of("fails" * 30, 1, None, EVIL)])
    errors = "addEventListener('error', (e) => { (window.errors ??= []).push(e.message); });"
    probe = """
    const key = (id, key) => document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", {key}));
    const canvas = document.getElementById("timeline");
    const said = () => document.getElementById("timeline-said").textContent;
    const found = {};
    key("timeline", "ArrowRight"); found.first = said();
    key("timeline", "ArrowRight"); found.second = said();
    key("timeline", "Enter"); key("timeline", "ArrowDown"); found.lane = said();
    key("chart", "ArrowRight"); found.held = document.getElementById("chart-said").textContent;
    const head = document.querySelector("#sent-table th:nth-child(5)");
    head.firstElementChild.click(); found.sort = head.ariaSort;
    document.querySelector("[data-tree=open]").click();
    found.closed = document.querySelectorAll(".tree details:not([open])").length;
    found.spans = canvas.dataset.spans;
    const drawn = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    found.drawn = drawn.some((value) => value > 0);
    document.body.style.width = "400px"; // headless windows are not always so narrow
    found.wide = document.documentElement.scrollWidth - Math.max(400, innerWidth);
    found.errors = window.errors || [];
    document.documentElement.setAttribute("data-found", JSON.stringify(found));
    """
    text = text.replace("<style>", f"<script>{errors}</script><style>", 1)
    text = text.replace("</body>", f"<script>{{{probe}}}</script></body>", 1)
    (tmp_path / "page.html").write_text(text)
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=400,900", "--enable-logging=stderr", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    parsed = HTMLAttributes(done.stdout)
    found = json.loads(parsed.found)
    assert found["errors"] == []
    assert found["drawn"]
    assert int(found["spans"]) == (count or len(ws.timeline(local, H100).spans))
    assert re.match(r"compute: \w+ %\w+ · ", found["first"])
    assert found["second"] != found["first"]
    assert found["lane"].startswith("axis dp" if count else "wait")
    assert re.match(r"[\d.]+ \w+: [\d.]+ [kMGB]+", found["held"])
    assert found["sort"] == "descending"
    assert found["closed"] == 0
    assert found["wide"] <= 0


class HTMLAttributes(HTMLParser):
    """What the probe left behind on the root."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found = dict(attrs).get("data-found") or self.found


STEP = model_file("nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)", "8, 16", "SGD(model.parameters(), lr=0.1)")


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *args])
    return done.exit_code, done.output


def test_the_command_writes_page_and_trace(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STEP)
    target, html, trace = f"{tmp_path}/own.py:build", tmp_path / "a" / "plan.html", tmp_path / "b" / "step.json"
    code, text = run(
        target, "--mesh", "dp=4", "--html", str(html), "--trace", str(trace), "--hardware", "dgx-h100"
    )  # fmt: skip
    assert code == 0, text
    found = Parsed(html.read_text())
    assert "predicted for dgx-h100" in html.read_text()
    assert "alternatives-table" not in found.ids
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == sum(
        len(lane["start"]) for lane in json.loads(found.scripts[0])["lanes"]
    )


def test_the_command_shows_alternatives(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(STEP)
    table = tmp_path / "table.json"
    code, text = run(
        f"{tmp_path}/own.py:build", "--mesh", "dp=4", "--compare", "--html", str(tmp_path / "plan.html"),
        "--hardware", "dgx-h100", "--json", str(table),
    )  # fmt: skip
    assert code == 0, text
    found = Parsed((tmp_path / "plan.html").read_text())
    rows = found.rows["alternatives-table"][1:]
    written = json.loads(table.read_text())
    assert [row[0].removesuffix(" this plan") for row in rows] == [row["template"] for row in written["rows"]]
    assert rows[0][0].endswith(" this plan")
    assert rows[0][-1] == "fastest for each batch"
    assert found.text["step"] == rows[0][2]
    assert found.text["peak"] == rows[0][5]
    assert written["hardware"] == "dgx-h100"


def test_a_pipeline_has_a_lane_and_a_row_for_each_stage() -> None:
    with torch.device("meta"):
        model, x = Named("second"), torch.empty(64, 256)
    graph = ws.capture(train, model, Adam(model.parameters(), fused=True), x)
    plan = ws.plan(graph, "pp=2", ws.Pipeline(micro_batches=4, schedule="1f1b"), hardware=H100)
    page, made = Parsed(shown(plan, graph)), staged(ws.partition(graph, plan), BlockPrices(H100, plan.mesh), "1f1b")
    drawn = json.loads(page.scripts[0])
    assert [lane["title"] for lane in drawn["lanes"]] == ["stage 0", "stage 1"]
    busy = [one.busy_us + one.waited_us for one in made.stages]
    assert [sum(lane["us"]) for lane in drawn["lanes"]] == pytest.approx(busy, abs=0.1)
    assert drawn["step"] == pytest.approx(made.step_us, abs=0.1)
    assert [row[4] for row in page.rows["stages"][1:]] == ["2", "1"]
    assert page.rows["stages"][1][6] == human(made.stages[0].peak_bytes)
    assert "chart" not in page.ids
