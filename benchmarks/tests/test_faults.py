"""`benchmarks.faults`: what is drawn, what counts as a failure, what is kept; a few real kills."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import wholestep as ws
from benchmarks.faults import kills, restart, save_blocking, two_jobs
from benchmarks.faults.cases import MESHES, SCHEDULES, STYLES, Kill, Setup, case_of
from benchmarks.faults.command import main
from benchmarks.faults.kills import damaged, differences, play
from benchmarks.faults.ranks import Job
from benchmarks.faults.results import Outcome, append, into, read, report
from benchmarks.faults.training import Say
from tests.dist.launch import start_server
from wholestep.mesh import Mesh


@pytest.fixture(scope="module", autouse=True)
def rank_server() -> None:
    """Started before any test, so that the clean-up after a test does not take it for a stray."""
    start_server()


def test_cases_follow_from_seeds_and_cover_everything() -> None:
    cases = [case_of(seed) for seed in range(200)]
    assert cases == [case_of(seed) for seed in range(200)]
    assert {case.setup.style for case in cases} == set(STYLES)
    assert {case.setup.schedule for case in cases} == set(SCHEDULES)
    assert {case.setup.ranks for case in cases} == {1, 2, 3, 4}
    assert all(Mesh(mesh).size == ranks for ranks, meshes in MESHES.items() for mesh in meshes)
    drawn = [kill for case in cases for kill in case.kills]
    where = Counter(kill.where for kill in drawn)
    assert 0.5 < where["save"] / len(drawn) < 0.7
    assert {kill.everyone for kill in drawn} == {True, False}


def test_another_bit_is_another_curve() -> None:
    right = [{0: (1.0).hex(), 1: (2.0).hex()}, {0: (3.0).hex(), 1: (4.0).hex()}]
    assert differences(right, [{1: (2.0).hex()}, {}]) == []
    wrong = [{1: (2.0).hex()}, {1: (4.0 + 2**-50).hex()}]
    assert differences(right, wrong) == [
        "curve: rank 1 has 0x1.0000000000001p+2 at step 1, uninterrupted 0x1.0000000000000p+2"
    ]


def test_a_checkpoint_with_another_byte_is_damaged(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = ws.save(tmp_path, model=model, number=1)
    assert damaged(tmp_path) == []
    largest = max(path.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert [line.partition(": ")[0] for line in damaged(tmp_path)] == ["damaged"]


def test_results_go_on_where_they_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Outcome(3, 0, True, False, True, True), Outcome(4, 1, True, True, failures=["lost: a\nb"])
    path = tmp_path / "kills.jsonl"
    append(path, [good])
    append(path, [bad])
    with path.open("a") as file:
        file.write(json.dumps({"seed": 5})[:-3])  # the machine went down
    assert read(path) == [good, bad]
    assert main(["--dir", str(tmp_path), "--kills", "2"]) == 1
    text = capsys.readouterr().out
    assert "| all | 2 | 1 | 1 | 1 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "- `--case 4`, start 1: lost: a\n" in text


def test_the_report_goes_between_the_marks_of_its_mode() -> None:
    page = into(into("# Faults\n", "kills", "one"), "two-jobs", "two")
    assert into(page, "kills", "new").split() == page.replace("one", "new").split()
    assert report([Outcome(3, 0, True, False)]).count("\n| ranks ") == 1


def _raises(rank: int, say: Say) -> None:
    say("begun")
    if rank == 1:
        raise ValueError("of rank 1")


def test_ranks_say_what_they_raise_and_die_when_told() -> None:
    with Job(2, _raises, timeout_s=30.0) as job:
        assert job.listen(30.0, lambda: len(job.of_kind("end")) == 2)
        job.kill([0])
        assert job.listen(30.0, lambda: job.dead(0))
        assert not job.dead(1)
    assert job.of_kind("begun") == [("begun",)] * 2
    (error,) = job.of_kind("error")
    assert "ValueError: of rank 1" in error[1]


IN_A_SAVE = Kill(1, False, "save", 2, 0.0, 4, 0.05)
AFTER_A_STEP = Kill(0, True, "step", 3, 0.5, 0, 0.0)


@pytest.mark.parametrize("kill", [IN_A_SAVE, pytest.param(AFTER_A_STEP, marks=pytest.mark.full)])
def test_a_job_that_is_killed_goes_on_to_the_same_bits(kill: Kill) -> None:
    setup = Setup(2, "zero1", "", "auto", "one_cycle", "per_rank", False)
    case = replace(case_of(0), setup=setup, every=2, keep=1, wait=True, kills=(kill,))
    killed, resumed = play(case)
    assert (killed.failures, resumed.failures) == ([], [])
    assert killed.killed
    assert killed.within_save or kill.where != "save"
    assert resumed.resumed >= 2 or kill.where == "save"


@pytest.mark.full
def test_a_job_with_another_curve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(1, "replicate", "", "none", "cosine", "per_rank", False)
    case = replace(case_of(0), setup=setup, every=1, keep=2, wait=True, kills=())
    curve, digests = kills.reference(setup)
    monkeypatch.setitem(kills._references, setup, ([dict.fromkeys(curve[0], "0x0p+0")], digests))
    (outcome,) = play(case)
    assert outcome.failures[0].startswith("curve: rank 0 has ")


@pytest.mark.full
def test_two_jobs_in_one_folder() -> None:
    text, wrong = two_jobs.run(5.0, (2, 1))
    assert not wrong, text
    assert "another job saves to FOLDER" in text


@pytest.mark.full
def test_a_save_beside_the_next_steps_is_timed() -> None:
    text = save_blocking.run(1, 1)
    assert text.startswith("State of 0.20 GB on the CPU, one rank; medians of 1.\n")
    assert text.count("\n| ") == 5


@pytest.mark.full
def test_a_restart_from_memory_comes_to_the_same_bits() -> None:
    text, wrong = restart.run(1, 1)
    assert not wrong, text
    assert "All restarts come to the same bits." in text
