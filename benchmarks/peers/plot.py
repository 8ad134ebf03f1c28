"""Scenes as one SVG: a bar for each peer's step, a mark at its physical limit. Readable on light and on dark ground."""

from collections.abc import Sequence
from html import escape

from .results import Row, Scene, rows
from .table import title_of

WIDTH, LEFT, RIGHT = 900, 320, 120
BAR, GAP, HEAD, FOOT = 14, 6, 44, 40
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328; }
.title { font-weight: 600; font-size: 13px; }
.small { font-size: 11px; fill: #59636e; }
.ground { fill: #ffffff; }
.peer { fill: #8c959f; }
.ours { fill: #0969da; }
.limit { stroke: #cf222e; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .ground { fill: #0d1117; }
  .peer { fill: #6e7681; }
  .ours { fill: #4493f8; }
  .limit { stroke: #ff7b72; }
}"""


def svg(scenes: Sequence[Scene]) -> str:
    """One panel below another, each with a scale of its own."""
    parts: list[str] = []
    top = 8.0
    for scene in scenes:
        panel, height = _panel(scene, top)
        parts += panel
        top += height
    legend = "bar: step in ms (ratio to the physical limit); mark: physical limit of that peer"
    parts.append(_text(12, top + 14, legend, "small"))
    total = round(top + FOOT)
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}">'
    ground = f'<rect class="ground" width="{WIDTH}" height="{total}" rx="6"/>'
    return "\n".join([box, f"<style>\n{STYLE}\n</style>", ground, *parts, "</svg>"]) + "\n"


def _panel(scene: Scene, top: float) -> tuple[list[str], float]:
    """The marks of one scene and its height."""
    found = rows(scene)
    longest = max([row.step_ms for row in found] + [row.limit_ms for row in found], default=1.0)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [_text(12, top + 22, title_of(scene), "title")]
    y = top + HEAD - 8
    for row in found:
        parts += _bar(row, y, scale)
        y += BAR + GAP
    return parts, y - top + GAP


def _bar(row: Row, y: float, scale: float) -> list[str]:
    ours = "ours" if row.peer.startswith("wholestep") else "peer"
    width, mark = row.step_ms * scale, LEFT + row.limit_ms * scale
    baseline = y + BAR - 3
    return [
        _text(LEFT - 8, baseline, row.peer, "", end=True),
        f'<rect class="{ours}" x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        f'<line class="limit" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 1:.1f}" y2="{y + BAR + 1:.1f}"/>',
        _text(
            LEFT + max(width, row.limit_ms * scale) + 6, baseline, f"{row.step_ms:.0f} ({row.to_limit:.2f})", "small"
        ),
    ]


def _text(x: float, y: float, text: str, kind: str, *, end: bool = False) -> str:
    named = f' class="{kind}"' if kind else ""
    anchor = ' text-anchor="end"' if end else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(text)}</text>'
