"""The comparison with peers: what follows from times and bytes, whose turn it is, what is set up and taken down."""

import json
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.peers import network
from benchmarks.peers.batches import Batches, write_corpus
from benchmarks.peers.command import app
from benchmarks.peers.launch import Peer, PeerFailed, Site
from benchmarks.peers.limits import least_bytes, limit, link_bytes_per_second
from benchmarks.peers.measure import Effort, Said, groups, measure
from benchmarks.peers.network import Network, NetworkError
from benchmarks.peers.plot import svg
from benchmarks.peers.results import Measured, Scene, read, rows
from benchmarks.peers.sizes import CONFIGS
from benchmarks.peers.spec import BASES, PRESETS, Spec, UnknownPeer, parse, parse_all
from benchmarks.peers.table import HEADS, into, markdown
from benchmarks.peers.turns import Turn, counted, median_ratio, order, step_times_ms, usual_figures

SIZE = 1_000_000


# -- names ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "dpp",
            "peer 'dpp' is unknown: choose among one, floor, wire, ddp, zero, fsdp2, jax, pipe, stages, tokens, "
            "context, wholestep, default, torch, ours, compiled",
        ),
        ("fsdp2:kept", "peer 'fsdp2:kept': option 'kept' is unknown, fsdp2 takes keep, async, compile"),
        ("pipe", "peer 'pipe' needs one schedule: one of gpipe, 1f1b, interleaved, zbv"),
        ("stages:zbv", "peer 'stages:zbv': option 'zbv' is unknown, stages takes gpipe, 1f1b, interleaved"),
        ("zero:keep", "peer 'zero:keep': option 'keep' is unknown, zero takes no options"),
        ("ddp:bucket=big", "peer 'ddp:bucket=big': 'bucket=big' needs a number, as bucket=4"),
        (
            "ddp:bucket",
            "peer 'ddp:bucket': option 'bucket' is unknown, ddp takes tuned, view, static, compile, bucket=<",
        ),
        (
            "wholestep",
            "peer 'wholestep' needs one style: wholestep:S with S one of replicate, zero1, zero2, fully_shard",
        ),
        ("wholestep:zero1,zero2", "peer 'wholestep:zero1,zero2' needs one style"),
        ("wholestep:fully_shard,keep,reshard", "is told to keep and to reshard: choose one"),
    ],
)
def test_refuses_what_it_does_not_know(text: str, said: str) -> None:
    with pytest.raises(UnknownPeer) as refused:
        parse(text)
    assert said in str(refused.value)


def test_a_name_says_what_runs() -> None:
    spec = parse("wholestep:fully_shard,keep,bucket=2.5,inductor")
    assert (str(spec), spec.base, spec.style) == (
        "wholestep:fully_shard,keep,bucket=2.5,inductor",
        "wholestep",
        "fully_shard",
    )
    assert spec.has("keep")
    assert not spec.has("reshard")
    assert (spec.number("bucket", 25.0), spec.number("other", 8.0)) == (2.5, 8.0)
    assert [parse(text).style for text in ("ddp", "zero", "fsdp2:keep", "jax", "floor")] == [
        "replicate", "zero1", "fully_shard", "replicate", "",
    ]  # fmt: skip


def test_presets_hold_every_family_and_the_floor_comes_first() -> None:
    everyone = parse_all(["all"])
    assert {spec.base for spec in everyone} == set(BASES)
    assert [str(spec) for spec in parse_all(["ddp", "fsdp2", "ddp", "floor"])] == ["floor", "ddp", "fsdp2"]
    for name, members in PRESETS.items():
        assert {str(spec) for spec in parse_all([name])} == {"floor", *members}


# -- limits --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "sweeps"),
    [
        ("floor", 0), ("one", 0), ("ddp", 2), ("ddp:tuned", 2), ("zero", 2), ("jax", 2), ("fsdp2", 3),
        ("fsdp2:keep", 2), ("wire:late", 2), ("pipe:1f1b", 0), ("stages:auto", 0),
        ("wholestep:replicate", 2), ("wholestep:zero1", 2), ("wholestep:zero2,bucket", 2), ("wholestep:fully_shard", 2),
        ("wholestep:fully_shard,keep", 2), ("wholestep:fully_shard,reshard,unscheduled", 3),
    ],
)  # fmt: skip
def test_least_bytes_of_a_style(name: str, sweeps: int) -> None:
    assert least_bytes(parse(name), 2, SIZE) == sweeps * SIZE / 2
    assert least_bytes(parse(name), 4, SIZE) == sweeps * SIZE * 3 / 4


def test_a_link_carries_less_than_its_rate() -> None:
    assert link_bytes_per_second("1gbit") == pytest.approx(125e6 * 1448 / 1514)
    assert link_bytes_per_second("250mbit") == pytest.approx(31.25e6 * 1448 / 1514)
    assert link_bytes_per_second("none") is None
    with pytest.raises(ValueError, match="rate 'fast' is not a rate: give none, or as 1gbit, 250mbit"):
        link_bytes_per_second("fast")


def test_limit_is_the_larger_of_arithmetic_and_link() -> None:
    def found(name: str, speed: float | None) -> tuple[float, float, float]:
        made = limit(parse(name), 4, SIZE, speed, floor_ms=100.0, update_ms=20.0)
        return made.compute_ms, made.link_ms, made.ms

    assert found("ddp", None) == (100.0, 0.0, 100.0)
    assert found("ddp", 10e6) == (100.0, 150.0, 150.0)  # 1.5 MB
    assert found("zero", 10e6) == (85.0, 150.0, 150.0)  # three quarters of the update are on other ranks
    assert found("fsdp2", 100e6) == (85.0, 22.5, 85.0)  # 2.25 MB
    assert found("floor", 10e6) == (100.0, 0.0, 100.0)


# -- turns ---------------------------------------------------------------------------------
def test_every_peer_has_a_turn_close_to_one_of_the_floor() -> None:
    peers = ["floor", "a", "b", "c", "d"]
    assert order(0, peers, "floor", every=2) == ["floor", "a", "b", "floor", "c", "d"]
    assert order(1, peers, "floor", every=2) == ["floor", "b", "c", "floor", "d", "a"]
    assert order(5, peers, "floor", every=3) == ["floor", "b", "c", "d", "floor", "a"]
    assert order(3, ["floor"], "floor") == ["floor"]


def test_a_step_lasts_until_the_last_rank_is_done() -> None:
    answers = [{"ends": [1.1, 1.3, 1.4]}, {"ends": [1.2, 1.25, 1.6]}]
    assert step_times_ms(answers, [1.0, 1.05]) == pytest.approx([150.0, 100.0, 300.0])


def turn(step_ms: float, floor_ms: float = 100.0, **fields: float) -> Turn:
    plain = Turn(step_ms, 150.0, 1e6, 0.1, 10.0, floor_ms, 20.0, 0.1, 120.0, 10.0)
    return replace(plain, **fields)


def test_quiet_turns_count_where_there_are_three() -> None:
    quiet, loud, beside_loud = turn(1.0), turn(2.0, others=0.3), turn(3.0, floor_others=1.0)
    assert counted([quiet, loud, quiet, beside_loud]) == [quiet, loud, quiet, beside_loud]
    assert counted([quiet, loud, quiet, beside_loud, quiet]) == [quiet] * 3


def test_ratios_are_of_turns_side_by_side() -> None:
    # the machine became slower: medians of either alone would say 2 / 2 = 1
    assert median_ratio([(2.0, 1.0), (4.0, 2.0), (1.0, 4.0)]) == 2.0


def test_groups_share_the_floor() -> None:
    specs = parse_all(["ddp", "fsdp2", "zero"])
    assert [[str(spec) for spec in group] for group in groups(specs, 3)] == [
        ["floor", "ddp", "fsdp2"],
        ["floor", "zero"],
    ]
    assert [[str(spec) for spec in group] for group in groups(specs[:1], 3)] == [["floor"]]


# -- batches -------------------------------------------------------------------------------
def test_ranks_share_one_global_batch(tmp_path: Path) -> None:
    import numpy as np

    write_corpus(tmp_path / "corpus.npy")
    text = np.load(tmp_path / "corpus.npy")
    for config in (CONFIGS["XS"], CONFIGS["mlp"]):
        whole = Batches(text, config, 0, 1).at(5)
        parts = [Batches(text, config, rank, 4).at(5) for rank in range(4)]
        for i in (0, 1):
            assert (np.concatenate([part[i] for part in parts]) == whole[i]).all()
        assert (parts[0][0] != parts[1][0]).any()
        assert (Batches(text, config, 0, 1).at(6)[0] != whole[0]).any()
    x, y = Batches(text, CONFIGS["XS"], 0, 1).at(0)
    assert (x[:, 1:] == y[:, :-1]).all()


# -- the network ---------------------------------------------------------------------------
class Shell:
    """Takes commands instead of the system; the one numbered `fails_at` fails."""

    def __init__(self, fails_at: int | None = None, listed: str = "") -> None:
        self.fails_at, self.listed = fails_at, listed
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(" ".join(command).replace(str(os.getpid()), "PID"))
        if len(self.commands) - 1 == self.fails_at:
            raise NetworkError("no")
        return self.listed

    def left(self) -> set[str]:
        """Namespaces that were added and not deleted."""
        added = {c.split()[3] for i, c in enumerate(self.commands) if "netns add" in c and i != self.fails_at}
        return added - {c.split()[3] for c in self.commands if "netns delete" in c}


def test_two_ranks_are_joined_by_one_shaped_link() -> None:
    shell = Shell()
    with Network(2, "250mbit", shell, shaped=True) as made:
        assert made.prefix(1) == ["ip", "netns", "exec", f"wspeers{os.getpid()}-r1"]
        assert made.environment(1) == {
            "MASTER_ADDR": "10.99.0.1",
            "GLOO_SOCKET_IFNAME": f"wp{os.getpid()}r1",
            "PEERS_ADDRESS": "10.99.0.2",
        }
        assert not made.one_interface
    sysctl = "sysctl -qw net.ipv4.tcp_congestion_control=reno"
    shape = "root tbf rate 250mbit burst 256kb latency 50ms"
    assert shell.commands == [
        "ip netns add wspeersPID-r0",
        "ip -n wspeersPID-r0 link set lo up",
        f"ip netns exec wspeersPID-r0 {sysctl}",
        "ip netns add wspeersPID-r1",
        "ip -n wspeersPID-r1 link set lo up",
        f"ip netns exec wspeersPID-r1 {sysctl}",
        "ip link add wpPIDr0 netns wspeersPID-r0 type veth peer name wpPIDr1 netns wspeersPID-r1",
        f"ip netns exec wspeersPID-r0 tc qdisc add dev wpPIDr0 {shape}",
        "ip -n wspeersPID-r0 link set wpPIDr0 up",
        f"ip netns exec wspeersPID-r1 tc qdisc add dev wpPIDr1 {shape}",
        "ip -n wspeersPID-r1 link set wpPIDr1 up",
        "ip -n wspeersPID-r0 address add 10.99.0.1/24 dev wpPIDr0",
        "ip -n wspeersPID-r1 address add 10.99.0.2/24 dev wpPIDr1",
        "ip netns delete wspeersPID-r1",
        "ip netns delete wspeersPID-r0",
    ]


def test_four_ranks_meet_at_a_bridge() -> None:
    shell = Shell()
    with Network(4, "1gbit", shell, shaped=True) as made:
        assert [place.address for place in made.places] == [f"10.99.0.{i}" for i in (1, 2, 3, 4)]
    for rank in range(4):
        assert f"ip -n wspeersPID-hub link set wpPIDh{rank} master bridge0" in shell.commands
        for where, end in ((f"r{rank}", f"r{rank}"), ("hub", f"h{rank}")):
            shaped = f"ip netns exec wspeersPID-{where} tc qdisc add dev wpPID{end} root tbf rate 1gbit"
            assert any(command.startswith(shaped) for command in shell.commands)
    assert shell.left() == set()


@pytest.mark.parametrize(("world", "rate"), [(2, "none"), (2, "1gbit"), (4, "1gbit")])
def test_nothing_stays_whatever_fails(world: int, rate: str) -> None:
    whole = Shell()
    with Network(world, rate, whole, shaped=True):
        setup = len(whole.commands)
    for fails_at in range(setup):
        shell = Shell(fails_at)
        with pytest.raises(NetworkError), Network(world, rate, shell, shaped=True):
            pass
        assert shell.left() == set(), f"after {shell.commands[fails_at]}"


def test_without_root_nothing_is_set_up() -> None:
    shell = Shell()
    with Network(2, "1gbit", shell, shaped=False) as made:
        assert made.prefix(0) == []
        assert made.environment(1)["GLOO_SOCKET_IFNAME"] == "lo"
        assert made.one_interface
    assert shell.commands == []


def test_clean_spares_those_of_living_processes() -> None:
    gone = 1 << 22  # above any process id
    listed = f"wspeers{gone}-r0 (id: 3)\nwspeers{os.getpid()}-r0\nsomebody-elses\nwspeers{gone}-r1\n\n"
    shell = Shell(listed=listed)
    assert network.clean(shell) == [f"wspeers{gone}-r0", f"wspeers{gone}-r1"]
    assert shell.commands[1:] == [f"ip netns delete wspeers{gone}-r0", f"ip netns delete wspeers{gone}-r1"]


def test_a_failing_command_says_what_it_said() -> None:
    with pytest.raises(NetworkError, match=r"^ls /does/not/exist: .*No such file"):
        network.execute(["ls", "/does/not/exist"])
    with pytest.raises(NetworkError, match="no-such-tool is not installed"):
        network.execute(["no-such-tool"])


# -- processes -----------------------------------------------------------------------------
WORKER = """
import json, os, sys, time
print(json.dumps({"build": 0.5, "empty": 1000}), flush=True)
told = 0
for line in sys.stdin:
    message, rank = json.loads(line), int(os.environ["RANK"])
    told += 1
    if told == %(when)s and rank == 1:
        %(what)s
    n, now = message.get("steps", 0), time.monotonic()
    answer = {"build": 0.5, "empty": 1000, "begin": now, "ends": [now + 0.1 * (i + 1) for i in range(n)],
              "losses": [2.0 + rank] * n, "cpu": 0.2 * n, "calling": 0.15 * n,
              "sent": 500 * n, "update": 0.01 * n, "speed": 0.0, "note": "",
              "rest": 10, "parameters": 20, "peak": 3000, "tensors": 300 + rank, "collectives": {"allreduce": 2},
              "hardware": json.dumps({"name": "m", "rates": [told, 2.0 * told]}),
              "simulated": [json.loads(text)["rates"][1] for text in message.get("hardware", [])]}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Scripted(Site):
    """Runs a script in place of a worker; `bad` misbehaves as `what` at its `when`-th message."""

    bad: str = ""
    what: str = "pass"
    when: int = 0

    def command(self, spec: Spec, rank: int) -> list[str]:
        when = self.when if spec.base == self.bad else 0
        return [sys.executable, "-c", WORKER % {"when": when, "what": self.what}]


@pytest.fixture
def here() -> Network:
    made = Network(2, "none", Shell(), shaped=False)
    return made.__enter__()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sys.exit(7)", "rank 1 died with status 7; see "),
        ("time.sleep(60)", "ranks [1] had not answered after 1 s; see "),
        ("print(json.dumps({'error': 'ValueError: no'}), flush=True); continue", "rank 1: ValueError: no; see "),
    ],
)
def test_a_failing_rank_is_named_and_ended(what: str, said: str, here: Network, tmp_path: Path) -> None:
    peer = Peer(parse("ddp"), Scripted(here, CONFIGS["XS"], tmp_path, bad="ddp", what=what, when=1))
    peer.start()
    try:
        assert [answer["build"] for answer in peer.answers(20)] == [0.5, 0.5]
        begun = time.monotonic()
        with pytest.raises(PeerFailed) as failed:
            peer.ask("run", 1 if "sleep" in what else 20, steps=1)
        assert said in str(failed.value)
        assert str(tmp_path / "ddp-1.log") in str(failed.value)
        assert time.monotonic() - begun < 15
    finally:
        peer.end()
    assert all(process.poll() is not None for process in peer.processes)


def test_others_go_on_when_one_fails(here: Network, tmp_path: Path) -> None:
    site = Scripted(here, CONFIGS["XS"], tmp_path, bad="fsdp2", what="sys.exit(3)", when=5)  # in its second turn
    said: list[Said] = []
    effort = Effort(rounds=3, steps=2, patience_seconds=0.0)
    (found,) = measure(site, parse_all(["fsdp2", "ddp"]), effort, said.append)
    assert list(found) == ["floor", "fsdp2", "ddp"]
    assert "rank 1 died with status 3" in found["fsdp2"].error
    assert found["fsdp2"].turns == ()
    ddp = found["ddp"]
    assert (ddp.error, len(ddp.turns), len(ddp.losses)) == ("", 3, 1 + 4 + 3 * 3)
    assert set(ddp.losses) == {2.5}
    assert (ddp.rest_bytes, ddp.parameter_bytes, ddp.peak_bytes, ddp.empty_bytes) == (10, 20, 3000, 1000)
    for each in ddp.turns:
        assert each.step_ms == pytest.approx(100)
        assert each.cpu_ms == pytest.approx(400)
        assert each.calling_ms == pytest.approx(300)
        assert each.packets_ms >= 0
        assert each.sent_bytes == 250  # one interface: either rank read the sum of both
        assert each.floor_update_ms == pytest.approx(10)
    assert [event.peer for event in said if event.kind == "failed"] == ["fsdp2"]


def test_all_peers_are_simulated_on_the_usual_machine(here: Network, tmp_path: Path) -> None:
    effort = Effort(rounds=3, steps=1, patience_seconds=0.0)
    site = Scripted(here, CONFIGS["XS"], tmp_path)
    (found,) = measure(site, parse_all(["stages:1f1b", "stages:gpipe"]), effort, lambda said: None)
    each = {name: ([turn.simulated_ms for turn in peer.turns], peer.simulated_ms) for name, peer in found.items()}
    # a script's rate is the number of its messages: three before the turns, and two in each turn
    assert each == {
        "floor": ([0.0, 0.0, 0.0], 14.0),
        "stages:1f1b": ([10.0, 14.0, 18.0], 14.0),
        "stages:gpipe": ([10.0, 14.0, 18.0], 14.0),
    }
    assert {peer.simulated_floor_ms for peer in found.values()} == {14.0}
    assert {peer.tensor_bytes for peer in found.values()} == {301}


def test_the_usual_machine_has_the_median_of_each_figure() -> None:
    several = [{"name": "m", "ranks": 2, "rates": [{"us": us, "byte": byte}]} for us, byte in ((1, 9), (3, 8), (2, 1))]
    assert json.loads(usual_figures([json.dumps(one) for one in several])) == {
        "name": "m", "ranks": 2, "rates": [{"us": 2, "byte": 8}],
    }  # fmt: skip
    assert usual_figures([]) == ""


def test_the_floor_keeps_its_turns_in_every_group(here: Network, tmp_path: Path) -> None:
    effort = Effort(rounds=2, steps=1, together=2, patience_seconds=0.0)
    site = Scripted(here, CONFIGS["XS"], tmp_path)
    found = list(measure(site, parse_all(["fsdp2", "ddp"]), effort, lambda said: None))
    assert [list(group) for group in found] == [["floor", "fsdp2"], ["floor", "ddp"]]
    assert [len(group["floor"].turns) for group in found] == [2, 4]


# -- results -------------------------------------------------------------------------------
def scene() -> Scene:
    def measured(peer: str, times: Sequence[float], losses: Sequence[float], **fields: float) -> Measured:
        turns = [turn(t, floor, **fields) for t, floor in zip(times, (100.0, 200.0, 100.0), strict=True)]
        return Measured(
            peer, rest_bytes=12_000_000, parameter_bytes=12_000_000, peak_bytes=90_000_000, empty_bytes=10_000_000,
            first_step_seconds=1.5, collectives={"allreduce": 4, "allgather_base": 2, "allgather": 1},
            turns=tuple(turns), losses=tuple(losses),
        )  # fmt: skip

    found = [
        measured("floor", [100.0, 200.0, 100.0], [5.0, 9.0]),
        measured("ddp", [150.0, 300.0, 210.0], [5.0, 4.0]),
        measured("wholestep:zero1", [300.0, 600.0, 300.0], [5.0, 4.5, 3.0], sent_bytes=7.5e6),
        Measured("jax", error="rank 0 died"),
    ]
    return Scene("S", "1gbit", 2, True, {peer.peer: peer for peer in found})


def test_rows_follow_from_turns() -> None:
    floor, ddp, zero1 = rows(scene())
    assert (floor.to_floor, floor.to_limit, floor.loss_gap) == (1.0, 1.0, None)
    assert (ddp.step_ms, ddp.to_floor, ddp.loss_gap) == (210.0, 1.5, 0.0)
    carried = 1e3 * 12e6 / (125e6 * 1448 / 1514)
    assert (ddp.limit_ms, ddp.to_limit) == pytest.approx(
        (carried, 1.5)
    )  # the middle of 150 / carried, 1.5, 210 / carried
    assert zero1.limit_ms == pytest.approx(carried)
    assert zero1.to_limit == pytest.approx(300 / carried)  # the median beside 600 / 190 and again 300 / carried
    assert (zero1.sent_bytes, zero1.least_bytes, zero1.loss_gap) == (7.5e6, 12e6, 0.5)
    assert (zero1.peak_bytes, zero1.quiet, zero1.turns) == (80_000_000, 3, 3)


def test_losses_are_held_against_one_process_where_it_ran() -> None:
    one = replace(scene().peers["ddp"], peer="one", losses=(5.0, 4.25))
    assert [row.loss_gap for row in rows(scene().merged({"one": one}))] == [None, 0.25, 0.25, 0.0]


def test_a_compiled_peer_is_held_against_compiled_arithmetic() -> None:
    ddp = scene().peers["ddp"]
    loopback = replace(scene(), rate="none")
    compiled = replace(ddp, peer="ddp:compile")
    faster = replace(ddp, peer="floor:compile", turns=(turn(80.0), turn(160.0, 200.0), turn(80.0)))
    alone = {row.peer: row.to_limit for row in rows(loopback.merged({"ddp:compile": compiled}))}
    both = {row.peer: row.to_limit for row in rows(loopback.merged({"ddp:compile": compiled, "floor:compile": faster}))}
    assert alone["ddp:compile"] == pytest.approx(1.5)
    assert (both["ddp:compile"], both["ddp"]) == pytest.approx((1.5 / 0.8, 1.5))


def test_scenes_survive_in_files_and_merge(tmp_path: Path) -> None:
    (tmp_path / f"{scene().name}.json").write_text(scene().to_json())
    assert read(tmp_path) == [scene()]
    assert scene().missing(["floor", "jax", "zero", "ddp"]) == ["jax", "zero"]
    again = replace(scene().peers["ddp"], peer="jax")
    assert list(scene().merged({"jax": again}).peers) == ["floor", "ddp", "wholestep:zero1", "jax"]
    assert scene().merged({"jax": again}).missing(["jax"]) == []


# -- showing -------------------------------------------------------------------------------
def test_markdown_has_every_peer() -> None:
    lines = markdown([scene()]).splitlines()
    assert lines[0] == "### S: GPT of 3.0 M parameters, 2 ranks, 1gbit"
    assert lines[2] == f"| {' | '.join(HEADS)} |"
    assert lines[5] == (
        "| ddp | 210 | 1.50 | 1.50 | 160 | 120 + 30 + 10 | 1.0 | 12.0 "
        "| 4 AR, 3 AG | 12.0 | - | 80 | - | 1.5 | 0e+00 | 3/3 |"
    )
    assert lines[6] == (
        "| wholestep:zero1 | 300 | 3.00 | 2.99 | 160 | 120 + 30 + 10 | 7.5 | 12.0 "
        "| 4 AR, 3 AG | 12.0 | - | 80 | - | 1.5 | 5e-01 | 3/3 |"
    )
    assert lines[8] == "- jax failed: rank 0 died"


def test_tables_go_between_the_marks_of_a_document() -> None:
    document = "head\n<!-- peers: begin -->\nold\n<!-- peers: end -->\ntail\n"
    marked = "head\n<!-- peers: begin -->\n\nnew\n\n<!-- peers: end -->\ntail\n"
    assert into(document, "new\n") == marked
    assert into(marked, "new\n") == marked
    assert into("no marks", "new\n") == "new\n"


def test_plot_has_a_bar_and_a_mark_for_every_peer() -> None:
    drawn = svg([scene(), replace(scene(), rate="none")])
    root = ElementTree.fromstring(drawn)
    space = {"s": "http://www.w3.org/2000/svg"}
    bars = [r for r in root.findall("s:rect", space) if r.get("class") in ("peer", "ours")]
    assert [bar.get("class") for bar in bars] == ["peer", "peer", "ours"] * 2
    lengths = [float(bar.get("width", 0)) for bar in bars]
    assert lengths[1] / lengths[0] == pytest.approx(2.1, rel=0.01)
    marks = [float(line.get("x1", 0)) for line in root.findall("s:line", space)]
    assert marks[1] == pytest.approx(320 + lengths[1] * rows(scene())[1].limit_ms / 210, abs=0.2)
    width, height = (float(root.get(name, 0)) for name in ("width", "height"))
    for element in root.iter():
        assert float(element.get("x", 0)) + float(element.get("width", 0)) <= width
        assert float(element.get("y", 0)) <= height
    assert "prefers-color-scheme: dark" in drawn


# -- the command line ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--peers", "ddp dpp"], "peer 'dpp' is unknown"),
        (["--config", "XXL"], "config 'XXL' is unknown: choose among XS, S, M, L, long, mlp"),
        (["--rate", "fast"], "rate 'fast' is not a rate"),
        (["--world", "3"], "3 ranks cannot share the 8 rows of S"),
    ],
)
def test_says_what_is_wrong_with_options(options: list[str], said: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "--dir", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_jax_is_left_out_where_there_is_none(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    options = ["--peers", "jax", "--resume", "--dir", str(tmp_path), "--jax-python", str(python)]
    known = replace(scene(), peers={"floor": scene().peers["floor"]})
    (tmp_path / "S-1gbit-w2.json").write_text(known.to_json())
    done = CliRunner().invoke(app, ["run", *options])
    assert done.exit_code == 0
    assert "Install it with pip install '.[jax]', or name a Python that has it" in " ".join(done.output.split())


def test_report_writes_table_plot_and_json(tmp_path: Path) -> None:
    (tmp_path / "S-1gbit-w2.json").write_text(scene().to_json())
    outputs = {option: str(tmp_path / name) for option, name in
               (("--table", "a/t.md"), ("--plot", "p.svg"), ("--json", "all.json"))}  # fmt: skip
    done = CliRunner().invoke(
        app, ["report", "--dir", str(tmp_path), *(word for pair in outputs.items() for word in pair)]
    )
    assert done.exit_code == 0, done.output
    assert Path(outputs["--table"]).read_text().startswith(markdown([scene()]))
    assert Path(outputs["--plot"]).read_text() == svg([scene()])
    assert [entry["config"] for entry in json.loads(Path(outputs["--json"]).read_text())] == ["S"]
