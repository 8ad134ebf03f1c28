"""Throughput, utilization, memory, time and price of a run, and the options that commands share."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import wholestep as ws
from tests.steps import model_file
from wholestep.cli import app
from wholestep.cli.shared_options import SharedOptions
from wholestep.cost import software
from wholestep.hardware import validation
from wholestep.hardware.validation import Validation
from wholestep.planner.bounds import Costs
from wholestep.report.figures import Figures, count
from wholestep.units import parse_count, parse_price

H100 = ws.Hardware.preset("dgx-h100")
COSTS = Costs(10**9, 4 * 10**9, 5, 1, 2.0, 0.5, 0.8, 0.2, 1.0, {"activation": 3 * 10**9, "parameter": 10**9})
STEP = f"{Path(__file__).parents[2] / 'examples' / 'mlp.py'}:build"


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, args)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_arithmetic() -> None:
    found = Figures(COSTS, H100, 8, 16_000, 80 << 30, 1e9, 2.5)
    assert found.tokens_per_s == 8_000
    assert found.tokens_per_s_per_gpu == 1_000
    assert found.run_s == 1e9 / 8_000
    assert found.run_price == pytest.approx(1e9 / 8_000 / 3600 * 8 * 2.5)
    assert (COSTS.mfu, COSTS.hfu) == (0.4, 0.5)


def test_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_table", dict)
    assert str(Figures(COSTS, H100, 8, 16_000, 80 << 30, 1e9, 2.5)).splitlines() == [
        "  step        2.00 s on 8 GPUs, 16,000 tokens",
        "  tokens/s    8,000, 1,000 a GPU",
        "  MFU, HFU    40.0%, 50.0% with what is recomputed",
        "  peak a GPU  4.0 GB of 85.9 GB: activation 3.0 GB, parameter 1.0 GB",
        "  reserved    not known from few layers: `simulate` of this step has it",
        "  exposed     500 ms of communication, 25.0% of the step",
        "  1B tokens   1.4 days, 278 GPU hours, 694 at 2.5 each",
        "  error       not validated: no published run on H100 SXM 80 GB was compared",
    ]
    slow = str(Figures(replace(COSTS, host_s=3.0), H100, 8, None, 2 * 10**9)).splitlines()
    assert slow[1].endswith("unknown: give --batch-tokens, the tokens in the batch")
    assert "of 2.0 GB, too much" in slow[3]
    assert slow[6].endswith("needs 3.00 s to start the ops: the step takes less only as a CUDA graph")


def test_what_is_reserved_is_beside_the_tensors() -> None:
    taken = replace(COSTS, reserved_bytes=5 * 10**9)
    row = str(Figures(taken, H100, 8, None, 80 << 30)).splitlines()[4]
    assert row == "  reserved    5.0 GB by torch's allocator, 1.0 GB of it between tensors; driver and NCCL take more"
    assert "5.0 GB, more than there is, by" in str(Figures(taken, H100, 8, None, 45 * 10**8))
    assert Figures(taken, H100, 8).as_json()["reserved_bytes"] == 5 * 10**9
    assert "reserved" not in str(Figures(COSTS, ws.Hardware.default(), 8)), "a CPU has no such allocator"


def test_an_error_bar_is_of_the_very_device(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Validation("H100 SXM 80 GB", 40, ("a", "b", "c"), 0.12, 0.91, 1.02, 1.2)
    monkeypatch.setattr(validation, "_table", lambda: {row.device: row})
    said = "0.91 to 1.20 times as long were steps of 40 published runs from 3 sources, median 1.02"
    assert said in str(Figures(COSTS, H100, 8))
    assert "not validated" in str(Figures(COSTS, ws.Hardware.preset("h200"), 8))


def test_the_bars_of_the_package_are_printed() -> None:
    """What `foresight.accuracy --validation` wrote is read as it stands in the file."""
    body = json.loads(validation.FILE.read_text())
    assert "foresight.accuracy --runs" in body["made_by"]
    shipped = {row["device"]: row for row in body["devices"]}
    for name in ("dgx-a100", "h100-96gb-500w"):
        hardware = ws.Hardware.preset(name)
        row = shipped[hardware.device.name]
        said = f"{row['low']:.2f} to {row['high']:.2f} times as long were steps of {row['runs']} published runs"
        assert said in str(Figures(COSTS, hardware, 8))


def test_the_table_of_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Validation("B", 40, ("a", "b", "c"), 0.12, 0.91, 1.02, 1.2), Validation("A", 4, ("a",), 0.1, 0.9, 1.0, 1.1)]
    (tmp_path / "table.json").write_text(json.dumps({"devices": [asdict(row) for row in rows]}))
    monkeypatch.setattr(validation, "FILE", tmp_path / "table.json")
    validation._table.cache_clear()
    assert [validation.validation_of(name) for name in ("A", "B", "C")] == [rows[1], rows[0], None]
    validation._table.cache_clear()


@pytest.mark.parametrize(("text", "number"), [("1T", 1e12), ("2.5b", 2.5e9), ("300 M", 3e8), ("4k", 4e3), ("12", 12)])
def test_counts(text: str, number: float) -> None:
    assert parse_count(text, "--tokens") == number
    assert parse_count(count(number), "--tokens") == number


def test_binary_units_and_a_least_number() -> None:
    assert [parse_count(text, "--seq", least=2) for text in ("2", "128Ki", "1 mi", "1M")] == [2, 1 << 17, 1 << 20, 1e6]
    with pytest.raises(ws.PlanError, match=r"--seq='1'\n  needed: 2 or more, or text like"):
        parse_count("1", "--seq", least=2)


@pytest.mark.parametrize("text", ["", "T", "1X", "-1T", "0", "1e12", "nan", "9999999T"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ws.PlanError, match=r"(?s)--tokens=.*1 or more, or text"):
        parse_count(text, "--tokens")


@pytest.mark.parametrize(("text", "price"), [("2.5/h", 2.5), ("$3/h", 3), ("0", 0), (" 2 / h", 2)])
def test_prices(text: str, price: float) -> None:
    assert parse_price(text, "--price") == price


@pytest.mark.parametrize("text", ["-2.5/h", "2.5/min", "free", "", "1e3", "inf/h"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ws.PlanError, match=r"(?s)--price=.*an hour, 0 or above"):
        parse_price(text, "--price")


# -- commands ------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_both_commands_have_every_option(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
    names = {f"--{one.name.replace('_', '-')}" for one in fields(SharedOptions)}
    assert names <= {*re.findall(r"--[a-z-]+", said)}


MODES = {
    "simulate": ("simulate",),
    "plan": ("plan", "--mesh", "dp=8"),
    "compare": ("plan", "--mesh", "dp=8", "--compare"),
    "auto": ("plan", "--mesh", "dp=8", "--auto"),
}


@pytest.mark.parametrize("mode", MODES)
def test_all_of_them_print_the_figures(mode: str) -> None:
    code, said = run(
        *MODES[mode], STEP, "--hardware", "dgx-h100", "--batch-tokens", "1000", "--tokens", "1B", "--price", "2/h"
    )  # fmt: skip
    assert code == 0, said
    for text in ("on 8 GPUs, 8,000 tokens", "a GPU", "MFU, HFU", "of 83.2 GB", "of communication", "1B tokens",
                 "GPU hours", "at 2 each", "by torch's allocator", "  error"):  # fmt: skip
        assert text in said


@pytest.mark.usual("simulate", "plan")
@pytest.mark.parametrize("mode", MODES)
def test_all_of_them_price_measured_kernels(mode: str, tmp_path: Path) -> None:
    """A product that was measured to take 50 ms takes as long everywhere."""
    profile = tmp_path / "kernels.json"
    row = {"op": "mm", "shapes": [[512, 64], [64, 256]], "dtype": "float32", "us": 5e4}
    profile.write_text(json.dumps({"kernels": [row]}))
    (tmp_path / "job.py").write_text(SMALL)
    took: list[float] = []
    for options in ([], ["--profile", str(profile)]):
        code, said = run(*MODES[mode], f"{tmp_path / 'job.py'}:build", "--hardware", "dgx-h100", *options)
        assert code == 0, said
        found = re.search(r"  step +([0-9.]+) (us|ms) on 8 GPUs", said)
        assert found is not None, said
        took.append(float(found[1]) * (1 if found[2] == "us" else 1000))
    assert took[0] < 5e4 < took[1]


SMALL = model_file("nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)", "64, 256")


def test_software_that_no_package_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "entry_points", lambda group: ())
    code, said = run("simulate", STEP, "--stack", "torchtitan")
    assert code == 2
    assert "software 'torchtitan': no installed package has names of other software" in said
    assert "pip install 'wholestep[foresight]'" in said


def test_options_change_what_is_simulated(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"

    def figures(*options: str) -> dict[str, float]:
        code, said = run("simulate", STEP, "--json", str(out), *options)
        assert code == 0, said
        return json.loads(out.read_text())["figures"]

    base, shared = figures(), figures("--style", "replicate")
    assert base["step_tokens"] is None
    assert shared["peak_bytes"] > base["peak_bytes"]
    assert figures("--precision", "bf16")["mfu"] != base["mfu"]
    assert figures("--semantics", "global", "--batch-tokens", "64")["step_tokens"] == 64
    assert figures("--batch-tokens", "64")["step_tokens"] == 8 * 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--micro-batches", "2"], "--micro-batches without --hf"),
        (["--price", "2/h"], "--price without --tokens"),
        (["--tokens", "1X"], "--tokens='1X'"),
        (["--tokens", "1T", "--price", "-1/h"], "--price='-1/h'"),
        (["--memory", "80GiB"], "--memory without --auto or --recompute auto"),
        (["--memory", "lots", "--recompute", "auto"], "--memory='lots'"),
        (["--recompute", "some"], "Invalid value for '--recompute'"),
        (["--hf", "gpt2", "--batch-tokens", "3"], "needed one of them"),
        (["--backend", "triton"], "--backend triton is unknown: give one of eager, inductor"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_is_refused(command: str, options: list[str], said: str) -> None:
    code, text = run(command, STEP, *options)
    assert code == 2
    assert said in text
