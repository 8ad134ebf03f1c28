"""Stages of a pipeline on null devices: channels, streams, order and memory of messages. No number is computed here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nullcuda", reason="needs the null CUDA device: make test-nullcuda", exc_type=ImportError)

SCRIPT = Path(__file__).with_name("stages.py")
PLAIN: dict[str, Any] = {"order": "1f1b", "mesh": "pp=2", "rows": [16] * 4, "drop": 0.0, "style": "", "options": {}}
TWO: dict[str, dict[str, Any]] = {
    "gpipe": {"order": "gpipe"}, "1f1b": {}, "interleaved": {"order": "interleaved"},
    "zero_bubble": {"order": "zero_bubble"}, "dropout": {"drop": 0.2}, "host": {"options": {"offload": "cpu"}},
    "symbols": {"rows": [16, 32, 24, 32, 16], "options": {"dynamic": {"x": [0]}}},
    "budget": {"options": {"memory_bytes": "1MB"}},
}  # fmt: skip
FOUR: dict[str, dict[str, Any]] = {
    "gpipe": {"order": "gpipe", "mesh": "pp=4"}, "interleaved": {"order": "interleaved", "mesh": "pp=4"},
    "zero_bubble": {"order": "zero_bubble", "mesh": "pp=4"},
}  # fmt: skip
STYLES = ("zero1", "fully_shard")
Found = dict[str, list[dict[str, Any]]]
"""By case, what each rank did."""


def run(folder: Path, count: int, cases: dict[str, dict[str, Any]], bound: str = "bound") -> Found:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(SCRIPT)]
    words += [str(folder), json.dumps({name: {**PLAIN, **case} for name, case in cases.items()}), bound]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(count), "NULLCUDA_DEVICES": str(count)}
    found = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-4000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    return {name: [rank[name] for rank in ranks] for name in cases}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("two"), 2, TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("four"), 4, FOUR)


def check(found: list[dict[str, Any]], stages: int) -> None:
    """Each channel has a stream of its own at both ends, and one order of messages; nothing reads or writes memory
    beside a message in it.
    """
    for one in found:
        by_stream: dict[int, set[tuple[str, str]]] = {}
        for kind, peer, stream, _ in one["messages"]:
            by_stream.setdefault(stream, set()).add((kind, peer))
        assert by_stream
        assert all(len(ends) == 1 for ends in by_stream.values()), "a stream for each channel"
        assert len(by_stream) == len({end for ends in by_stream.values() for end in ends}), "and one alone"
        assert len(one["computing"]) == 1
        assert not set(by_stream) & set(one["computing"])
        assert one["unordered"] == "[]"
        assert one["graph"] == "stages of a pipeline run op by op: Python orders their blocks and messages"
        assert one["profile"] == "step.profile of a Pipeline, whose ranks wait for each other"
        assert one["drawn"] in ({}, {"all": one["alone"]}), "stages draw what one device draws"
    for first in range(0, len(found), stages):
        line = found[first : first + stages]
        for stage, other in ((a, b) for a in range(stages) for b in range(stages)):
            sent, received = (
                [size for kind, peer, _, size in line[end]["messages"] if (kind, peer) == (verb, str(far))]
                for end, verb, far in ((stage, "Send", other), (other, "Recv", stage))
            )
            assert sent == received


@pytest.mark.parametrize("case", TWO)
def test_channels_of_two_stages(two: Found, case: str) -> None:
    check(two[case], 2)
    if case != "host":  # which waits for gradients that come to the host
        assert [one["syncs"] for one in two[case]] == [1, 1], "the test's own"


@pytest.mark.parametrize("case", FOUR)
def test_channels_of_four_ranks(four: Found, case: str) -> None:
    check(four[case], 4)
    assert [one["syncs"] for one in four[case]] == [1] * 4, "the test's own"


def test_dropout_is_drawn(two: Found) -> None:
    assert [one["drawn"] for one in two["dropout"]] == [{"all": two["dropout"][0]["alone"]}] * 2
    assert two["dropout"][0]["alone"] > 0


def test_batches_of_all_sizes_have_one_program(two: Found) -> None:
    assert {one["programs"] for one in two["symbols"]} == {1}


def test_data_parallelism_in_groups_that_are_bound_to_no_device(tmp_path: Path) -> None:
    """There torch makes a communicator for each pair of ranks and group. Of one that is split off, as in other groups,
    the null device does not know the number of ranks, and so not what a gather writes.
    """
    cases = {style: {"mesh": "dp=2,pp=2", "style": style} for style in STYLES}
    for found in run(tmp_path, 4, cases, "unbound").values():
        check(found, 2)
        assert [one["syncs"] for one in found] == [1] * 4, "the test's own"
