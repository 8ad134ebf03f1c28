"""The command line: starts ranks, shows what they found."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.launch import ROOT, free_port
from benchmarks.peers.network import Network
from benchmarks.peers.sizes import CONFIGS

from .results import Scene, into, markdown, read

STYLES = ("replicate", "zero1", "fully_shard,keep", "fully_shard,reshard")
SECONDS = 600


def main(argv: Sequence[str] | None = None) -> int:
    """Run every scene that is asked for, print the tables and write them where they are wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth", description=__doc__)
    parser.add_argument("--size", nargs="+", default=["S", "M"], choices=CONFIGS)
    parser.add_argument("--rate", nargs="+", default=["none", "1gbit", "250mbit"], help="of the link; none: loopback")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--turns", type=int, default=5, help="of each style")
    parser.add_argument("--steps", type=int, default=4, help="of a turn that count")
    parser.add_argument("--styles", nargs="+", default=list(STYLES), help="also auto and auto=BYTES, as auto=150MB")
    parser.add_argument("--classes", action="store_true", help="show each class of op too")
    parser.add_argument("--dir", type=Path, default=Path("runs/truth"), help="where results are kept")
    parser.add_argument("--report", action="store_true", help="show what --dir has, and measure nothing")
    parser.add_argument("--table", type=Path, help="write the table here, between its marks if there are any")
    given = parser.parse_args(argv)
    given.dir.mkdir(parents=True, exist_ok=True)
    try:
        _scenes(given.dir)
    except ValueError as error:
        parser.error(str(error))
    for size in given.size if not given.report else ():
        for rate in given.rate:
            _show(read(_run(size, rate, given)), given.classes)
    text = markdown(_scenes(given.dir))
    print(text)
    if given.table:
        given.table.write_text(into(given.table.read_text(), text) if given.table.exists() else text)
    return 0


def _scenes(folder: Path) -> list[Scene]:
    return [read(path) for path in sorted(folder.glob("*.json"))]


def _run(size: str, rate: str, given: argparse.Namespace) -> Path:
    """One scene: its ranks are started, waited for, and ended by their ids."""
    out = (given.dir / f"{size}-{rate}-w{given.world}.json").resolve()
    out.unlink(missing_ok=True)
    with Network(given.world, rate) as network:
        port = str(free_port())
        ranks = [_start(network, rank, port, [size, rate, str(out)], given) for rank in range(given.world)]
        try:
            for process in ranks:
                process.wait(SECONDS)
        finally:
            for process in ranks:
                process.kill()
    if not out.exists():
        raise SystemExit(f"the ranks of {size} over {rate} ended without a result; what they said is above")
    return out


def _start(
    network: Network, rank: int, port: str, scene: list[str], given: argparse.Namespace
) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(given.world), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
    fixed = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    command = [*network.prefix(rank), sys.executable, "-m", "benchmarks.truth.worker", *scene]
    command += [str(given.turns), str(given.steps), *given.styles]
    return subprocess.Popen(command, env=os.environ | network.environment(rank) | place | fixed, cwd=ROOT)


def _show(scene: Scene, classes: bool) -> None:
    print(f"\n{scene.title}", flush=True)
    for style in scene.styles:
        turns = " ".join(f"{turn.step_ms:.0f}{'' if turn.others <= 0.25 else '*'}" for turn in style.turns)
        print(f"  {style.name:22} simulated {style.predicted_ms:6.1f}  measured {style.measured_ms:6.1f}  "
              f"{style.error:+.1%}  turns {turns}  {style.chosen}")  # fmt: skip
        for name, (predicted, measured) in list(style.classes.items())[:14] if classes else ():
            print(f"      {name:50} {predicted:8.2f} {measured:8.2f}")
