"""`benchmarks.truth`: which turns count, which pairs are ranked wrongly, what is written."""

from pathlib import Path

import pytest

from benchmarks.truth.command import main
from benchmarks.truth.results import BEGIN, END, Scene, Style, Turn, into, markdown, read


def style(name: str, predicted: float, *turns: float, others: float = 0.0, chosen: str = "") -> Style:
    made = tuple(Turn(ms, others, predicted) for ms in turns)
    return Style(
        name,
        predicted + 3,
        made,
        (1.0, 2.0),
        {"all_reduce": 3},
        {"mm": (1.0, 2.0)},
        {"launch_us": 4.0},
        chosen,
    )


SCENE = Scene("S", "1gbit", 2, (style("replicate", 90, 100, 102, 98), style("zero1", 80, 120, 121, 119)))


def test_only_quiet_turns_count_where_there_are_three() -> None:
    quiet, busy = (Turn(100.0, 0.1, 90.0), Turn(101.0, 0.2, 101.0), Turn(102.0, 0.0, 204.0)), Turn(500.0, 1.0, 1.0)
    one = Style("x", 99.0, (*quiet, busy), (0.0, 0.0), {}, {})
    assert (one.measured_ms, one.predicted_ms) == (101, 101)
    two = Style("x", 99.0, (*quiet[:2], busy, busy), (0.0, 0.0), {}, {})
    assert two.measured_ms == (101 + 500) / 2


def test_each_turn_is_compared_with_what_was_simulated_for_it() -> None:
    slower = Turn(100.0, 0.0, 90.0), Turn(200.0, 0.0, 180.0), Turn(300.0, 0.0, 270.0), Turn(100.0, 0.0, 300.0)
    assert Style("x", 99.0, slower, (0.0, 0.0), {}, {}).error == pytest.approx(-0.1)


def test_pairs_that_are_ranked_the_wrong_way_round() -> None:
    assert SCENE.swapped() == [("replicate", "zero1")]
    alike = Scene("S", "none", 2, (style("replicate", 90, 100.0), style("zero1", 80, 103.0)))
    assert alike.swapped() == [], "as fast as each other, as measured"
    right = Scene("S", "none", 2, (style("replicate", 80, 100.0), style("zero1", 90, 120.0)))
    assert right.swapped() == []


def test_scenes_survive_in_json(tmp_path: Path) -> None:
    path = tmp_path / "scene.json"
    path.write_text(SCENE.to_json())
    found = read(path)
    assert [s.turns for s in found.styles] == [s.turns for s in SCENE.styles]
    assert markdown([found]) == markdown([SCENE])


def test_a_file_of_an_earlier_version_is_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "S-none-w2.json"
    old.write_text('{"size": "S", "styles": [{"name": "zero1", "turns": [{"step_ms": 1.0}]}]}')
    with pytest.raises(SystemExit):
        main(["--dir", str(tmp_path), "--size", "XS", "--rate", "none"])
    assert f"{old} is no scene of this version" in capsys.readouterr().err


@pytest.mark.full
def test_the_smallest_scene_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks train, are simulated and write what they found."""
    asked = "--size XS --rate none --turns 1 --steps 1 --classes --styles fully_shard,reshard,bucket=0.1"
    assert main([*asked.split(), "--dir", str(tmp_path)]) == 0
    (found,) = read(tmp_path / "XS-none-w2.json").styles
    assert found.measured_ms > 0
    assert found.predicted_ms > 0
    assert found.collectives["reduce_scatter"]
    assert all(simulated > 0 for name, (simulated, _) in found.classes.items() if name == "mm")
    assert "| XS, 2 ranks, loopback | fully_shard,reshard,bucket=0.1 |" in capsys.readouterr().out


def test_the_table_goes_between_its_marks() -> None:
    text = markdown([SCENE])
    assert "| S, 2 ranks, 1gbit | replicate | 90 | 100 | -10% | 93 | 1, 2 | 3 all_reduce |" in text
    assert "- S, 2 ranks, 1gbit: replicate is faster than zero1." in text
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert into(page, text) == f"before\n{BEGIN}\n\n{text}\n{END}\nafter\n"
