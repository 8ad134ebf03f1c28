"""Scenes as tables: markdown for documents, rich for the screen."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from .results import Row, Scene, rows
from .sizes import CONFIGS

SHORT = {"allreduce": "AR", "all-reduce": "AR", "reduce_scatter": "RS", "allgather": "AG", "broadcast": "BC"}
HEADS = (
    "peer", "step ms", "x floor", "x limit", "CPU ms", "calling + others + packets", "sent MB", "least MB",
    "collectives", "at rest MB", "tensors MB", "peak MB", "simulated ms, x floor, x step", "first step s",
    "loss gap", "quiet turns",
)  # fmt: skip
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
NOTES = """\
- step ms: median over turns of the median step of a turn. x floor: median over turns of the ratio to the floor's
  turn just before. x limit: likewise to the physical limit, the larger of the floor (its optimizer's part divided
  by the ranks where optimizer state is sharded) and the least bytes of the style over what the link carries.
- CPU ms: processor time of a step, all ranks and the kernel's packets: of the threads that call the step, of all
  others of the ranks, and of the machine's soft interrupts. Over the number of cores it is the least that a step takes.
- sent MB: per rank and step, counted at the interface, headers included. least MB: what the style has to send.
- collectives: of one step; AR all-reduce, RS reduce-scatter, AG all-gather, BC broadcast.
- at rest MB: parameters and optimizer state of one rank. tensors MB: the most bytes of all tensors that are alive
  after any op of a step, these included. peak MB: resident memory in the steps before and in the first turn, over what
  the process holds before it imports anything. first step s: with all that is compiled in it.
- simulated ms: of a step, on the machine whose rates are the median of those measured after each turn of a pipeline
  of ours; all peers that are up at once share it. x floor: to the floor as simulated on it. x step: median over turns
  of a step, simulated on the machine as it was measured just after the turn, to the turn's.
- loss gap: the largest difference of the loss at any step from one process on the whole batch, or from the first
  peer of the table that exchanges. The floor trains something else.
- quiet turns: those in which other processes took at most a quarter of a core, of all. Where there are three of
  them or more, the others do not count."""


@dataclass(frozen=True)
class Shown:
    """A scene's heading, its cells, and what else is to be said of it."""

    title: str
    cells: list[list[str]]
    remarks: list[str]


def show(scene: Scene) -> Shown:
    """A scene as text."""
    found = rows(scene)
    remarks = [f"{row.peer}: {row.note}" for row in found if row.note]
    remarks += [f"{peer.peer} failed: {peer.error}" for peer in scene.peers.values() if peer.error]
    return Shown(title_of(scene), [_cells(row) for row in found], remarks)


def title_of(scene: Scene) -> str:
    """A scene in words."""
    parameters = next((peer.parameter_bytes for peer in scene.peers.values() if peer.turns), 0) / 4e6
    kind = CONFIGS[scene.config].kind if scene.config in CONFIGS else scene.config
    link = (
        "loopback" if scene.rate == "none" else scene.rate if scene.shaped else f"loopback, not shaped to {scene.rate}"
    )
    model = {"gpt": "GPT", "mlp": "wide MLP"}.get(kind, kind)
    return f"{scene.config}: {model} of {parameters:.1f} M parameters, {scene.world} ranks, {link}"


def _cells(row: Row) -> list[str]:
    return [
        row.peer,
        f"{row.step_ms:.0f}",
        f"{row.to_floor:.2f}",
        f"{row.to_limit:.2f}",
        f"{row.cpu_ms + row.packets_ms:.0f}",
        f"{row.calling_ms:.0f} + {row.cpu_ms - row.calling_ms:.0f} + {row.packets_ms:.0f}" if row.calling_ms else "-",
        f"{row.sent_bytes / 1e6:.1f}",
        f"{row.least_bytes / 1e6:.1f}",
        counts(row) or "-",
        f"{row.rest_bytes / 1e6:.1f}",
        f"{row.tensor_bytes / 1e6:.1f}" if row.tensor_bytes else "-",
        f"{row.peak_bytes / 1e6:.0f}",
        _simulated(row),
        f"{row.first_step_seconds:.1f}",
        "-" if row.loss_gap is None else f"{row.loss_gap:.0e}",
        f"{row.quiet}/{row.turns}",
    ]


def _simulated(row: Row) -> str:
    said = [f"{row.simulated_ms:.0f}", f"{row.simulated_to_floor:.2f}", f"{row.simulated_to_step:.2f}"]
    return ", ".join(said[: 3 if row.simulated_to_step else 2]) if row.simulated_ms else "-"


def counts(row: Row) -> str:
    """Collectives by kind, names of the same thing added up."""
    total = Counter[str]()
    for name, count in row.collectives.items():
        total[next((short for known, short in SHORT.items() if name.startswith(known)), name)] += count
    return ", ".join(f"{count} {name}" for name, count in total.items())


def markdown(scenes: Sequence[Scene]) -> str:
    """A section of each scene."""
    sections: list[str] = []
    for shown in map(show, scenes):
        lines = [f"### {shown.title}", "", _line(HEADS), _line(["---"] * len(HEADS)), *map(_line, shown.cells)]
        lines += ["", *(f"- {remark}" for remark in shown.remarks)] if shown.remarks else []
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def into(document: str, text: str) -> str:
    """`document` with `text` between its marks in place of what was there; `text` alone where it has none."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    return f"{head}{begin}\n\n{text}\n{end}{tail}" if begin and end else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def screen(scene: Scene) -> Table:
    """A scene for the terminal."""
    shown = show(scene)
    table = Table(
        title=shown.title, title_justify="left", caption="\n".join(shown.remarks) or None, caption_justify="left"
    )
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="left" if i in (0, 8) else "right", no_wrap=i == 0)
    for cells in shown.cells:
        table.add_row(*cells)
    return table
