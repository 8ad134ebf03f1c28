"""Who may write to a folder of checkpoints, background saves, what is kept beside a step, and failing disks."""

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wholestep as ws
from tests.steps import mean_square as train_step
from wholestep.checkpoint import durable, lease
from wholestep.checkpoint.lease import Owner
from wholestep.distributed.process import process


def trained() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = ws.compile(train_step)
    step(model, optimizer, torch.ones(2, 4))
    return step, model, optimizer


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lease, "STALE_S", 0.4)
    return trained()[0]


def other(**changes: Any) -> Owner:
    """A living process of this host: the one that started this one."""
    here = Owner.this_process()
    ours = {"token": "f" * 32, "pid": os.getppid(), "started": process(os.getppid()).started}
    return dataclasses.replace(here, **{**ours, **changes})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# -- leases ----------------------------------------------------------------------------------


def test_a_living_job_is_named_and_nothing_is_written(step: Any, tmp_path: Path) -> None:
    (tmp_path / ".writer-4.json").write_bytes(other().to_json())
    with pytest.raises(ws.CheckpointError) as error:
        ws.save(tmp_path, step)
    assert str(error.value) == (
        f"another job saves to {tmp_path}: process {os.getppid()} on {socket.gethostname()}\n"
        "  needed: one job at a time that saves there\n"
        "  next: end one of the two jobs, or save to another folder"
    )
    assert names(tmp_path) == [".writer-4.json"]


DEAD = {"pid": 2**22 + 1, "started": "7"}
ELSEWHERE = {"host": "elsewhere", "place": "another"}


@pytest.mark.parametrize("changes", [DEAD, {"started": "7"}, {**ELSEWHERE, "at": 0.0}])
def test_what_an_ended_process_left_is_taken_at_once(step: Any, changes: Any, tmp_path: Path, recwarn: Any) -> None:
    """`started` tells a later process of the same pid; an hour ago is long ago on any clock."""
    (tmp_path / ".writer-4.json").write_bytes(other(**changes).to_json())
    lease.STALE_S = 1e9
    ws.save(tmp_path, step)
    assert names(tmp_path) == [".writer-5.json", "latest", "step-00000001"]
    assert len(recwarn) == (0 if "host" not in changes else 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_half_written_lease_becomes_stale(step: Any, content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".writer-1.json").write_bytes(content)
    with pytest.warns(UserWarning, match="took over from an unknown process, which sends no heartbeat"):
        ws.save(tmp_path, step)


def test_a_wait_for_a_damaged_lease_is_told_before_it_begins(step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / ".writer-1.json").write_bytes(b'{"host": "x", "pi')
    real, told = lease._unchanged, list[str]()

    def waits(*args: Any) -> bool:
        told.extend(str(one.message) for one in caught)
        return real(*args)

    monkeypatch.setattr(lease, "_unchanged", waits)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ws.save(tmp_path, step)
    whose = ".writer-1.json, which is damaged or half written"
    assert told == [f"{tmp_path}: another job may save there. Waits for up to 0 s whether its lease changes: {whose}"]
    assert "took over from an unknown process" in str(caught[1].message)


@pytest.mark.filterwarnings("ignore:.*another job may save there")
def test_a_damaged_lease_that_changes_is_alive(step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / ".writer-1.json").write_bytes(b"{")
    real = lease._content

    def written_after(*of: Any) -> bytes | None:
        found = real(*of)
        (tmp_path / ".writer-1.json").write_bytes(b"{{")
        return found

    monkeypatch.setattr(lease, "_content", written_after)
    with pytest.raises(ws.CheckpointError, match=r"^another job saves to .*: an unknown process\n"):
        ws.save(tmp_path, step)
    assert names(tmp_path) == [".writer-1.json"]


def test_a_silent_job_of_another_host_loses_its_lease_and_a_living_one_does_not(step: Any, tmp_path: Path) -> None:
    path = tmp_path / ".writer-1.json"
    path.write_bytes(other(**ELSEWHERE).to_json())
    ended = threading.Event()

    def beat() -> None:
        for count in range(1, 1000):
            if ended.wait(0.05):
                return
            durable.replace(path, other(**ELSEWHERE, beat=count).to_json(), lasting=False)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ws.CheckpointError, match=r"^another job saves to .*: process \d+ on elsewhere\n"):
            ws.save(tmp_path, step)
    finally:
        ended.set()
        thread.join()
    with pytest.warns(UserWarning, match=r"took over from process \d+ on elsewhere, which sends no heartbeat"):
        ws.save(tmp_path, step)
    assert names(tmp_path) == [".writer-2.json", "latest", "step-00000001"]


def test_the_job_that_was_taken_over_is_told(step: Any, tmp_path: Path) -> None:
    ws.save(tmp_path, step, number=1)
    (tmp_path / ".writer-2.json").write_bytes(other().to_json())
    with pytest.raises(ws.CheckpointError, match=r"was taken by process \d+ on .*: this job sent no heartbeat"):
        ws.save(tmp_path, step, number=2)
    with pytest.raises(ws.CheckpointError, match=r"^another job saves to "):
        ws.save(tmp_path, step, number=2)
    assert "step-00000002" not in names(tmp_path)
    assert ws.load(tmp_path).number == 1


def test_a_lease_lost_while_writing_publishes_nothing(step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    ws.save(tmp_path, step, number=1)
    real = durable.write

    def late(path: Path, data: bytes) -> Any:
        (tmp_path / ".writer-9.json").write_bytes(other().to_json())
        return real(path, data)

    monkeypatch.setattr(durable, "write", late)
    with pytest.raises(ws.CheckpointError, match="was taken by process"):
        ws.save(tmp_path, step, number=2)
    assert "step-00000002" not in names(tmp_path)
    assert ws.load(tmp_path).number == 1


def test_beats_show_life_and_a_released_lease_is_free(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    held = lease.acquire(tmp_path)
    end = time.monotonic() + 20
    while (owner := lease.owner_of(tmp_path / ".writer-1.json")) is None or owner.beat < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    lease.release_all()
    assert names(tmp_path) == []
    assert lease.acquire(tmp_path).owner.token != held.owner.token
    lease.release_all()


def test_of_several_contenders_one_takes_over(tmp_path: Path) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def contend(number: int) -> None:
        gate.wait()
        if durable.create(tmp_path / ".writer-2.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=contend, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (tmp_path / ".writer-2.json").read_bytes() == b"%d" % won[0]


def test_only_what_nobody_can_finish_is_removed(step: Any, tmp_path: Path) -> None:
    owners = {"living": other(), "elsewhere": other(**ELSEWHERE), "ended": other(**DEAD), "unknown": None, "old": None}
    folders = {name: tmp_path / f"step-0000009{i}" for i, name in enumerate(owners)}
    for name, owner in owners.items():
        folders[name].mkdir()
        (folders[name] / "__0_0.distcp").write_bytes(b"half")
        if owner is not None:
            (folders[name] / "writer.json").write_bytes(owner.to_json())
    os.utime(folders["old"] / "__0_0.distcp", (1.0, 1.0))
    ws.save(tmp_path, step)
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == {"living", "elsewhere", "unknown"}
    assert ws.load(tmp_path).number == 1
    lease.release_all()


# -- in the background ---------------------------------------------------------------------------


def test_a_background_save_holds_the_state_of_its_call(tmp_path: Path, monkeypatch: Any) -> None:
    step, model, optimizer = trained()
    then = [tensor.clone() for tensor in model.parameters()]
    gate, real = threading.Event(), durable.write

    def slow(path: Path, data: bytes) -> Any:
        assert gate.wait(60)
        return real(path, data)

    monkeypatch.setattr(durable, "write", slow)
    saving = ws.save(tmp_path, step, wait=False)
    assert isinstance(saving, Future)
    step(model, optimizer, torch.ones(2, 4))
    assert not saving.done()
    gate.set()
    assert saving.result(60) == tmp_path / "step-00000001"
    assert not torch.equal(model.weight, then[0])
    ws.load(tmp_path, model=model)
    assert all(map(torch.equal, model.parameters(), then))


def test_a_failure_in_the_background_is_raised_once(tmp_path: Path, monkeypatch: Any) -> None:
    step, *_ = trained()
    real, broken = durable.ChecksummedFile.write, [True]

    def write(file: durable.ChecksummedFile, data: Any) -> int:
        if broken[0]:
            file.failure = OSError(28, "No space left on device")
            raise file.failure
        return real(file, data)

    monkeypatch.setattr(durable.ChecksummedFile, "write", write)
    ws.save(tmp_path, step, wait=False)
    with pytest.raises(ws.CheckpointError, match=r"could not be written: the disk is full \("):
        ws.save(tmp_path, step, wait=False)  # the next save
    saving = ws.save(tmp_path, step, wait=False)
    assert isinstance(saving, Future)
    with pytest.raises(ws.CheckpointError, match="the disk is full"):
        saving.result()
    assert not list(tmp_path.glob("step-*"))
    broken[0] = False
    ws.save(tmp_path, step)
    assert ws.load(tmp_path).number == 1


def test_every(tmp_path: Path) -> None:
    step, model, optimizer = trained()
    found = []
    for _ in range(5):
        found.append(ws.save(tmp_path, step, every=3, keep=9))
        step(model, optimizer, torch.ones(2, 4))
    assert found == [None, None, tmp_path / "step-00000003", None, None]


def run(script: Path, text: str) -> tuple[int, str]:
    """Exit status and errors of a process of its own, as handlers for the exit run in no fork."""
    script.write_text(SCRIPT + text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=script.parent, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


SCRIPT = """
import torch
import wholestep as ws
def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
step = ws.compile(train_step)
step(model, optimizer, torch.randn(2, 64))
"""


@pytest.mark.full
def test_the_process_ends_after_its_last_save(tmp_path: Path) -> None:
    status, text = run(tmp_path / "script.py", "ws.save('saved', step, wait=False)")
    assert status == 0, text
    assert ws.load(tmp_path / "saved").number == 1
    assert names(tmp_path / "saved") == ["latest", "step-00000001"], "the lease is released"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The folder, status and errors of a process that met a full disk, and ended before it heard of another failure."""
    folder = tmp_path_factory.mktemp("ended")
    text = """
ws.save('saved', step)
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    ws.save('saved', step, number=2)
except ws.CheckpointError as error:
    print(error, file=open('error', 'w'))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
ws.save('script.py', step, wait=False)
"""
    return folder, *run(folder / "script.py", text)


def test_an_unsaved_checkpoint_is_the_exit_status(ended: tuple[Path, int, str]) -> None:
    _, status, text = ended
    assert status == 1, text
    assert "a checkpoint was not saved\nCheckpointError: checkpoint script.py could not be written: " in text


def test_a_full_disk_is_the_first_line_and_the_old_checkpoint_stays(ended: tuple[Path, int, str]) -> None:
    folder, _, text = ended
    assert (folder / "error").exists(), text
    first = (folder / "error").read_text().splitlines()[0]
    assert first == "checkpoint saved/step-00000002 could not be written: the file is larger than the system allows"
    assert names(folder / "saved") == ["latest", "step-00000001"]
    assert ws.load(folder / "saved").number == 1


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (28, "the disk is full"), (122, "the quota of disk space is used up"), (30, "the file system is read-only"),
        (116, "the file system is no longer mounted"), (5, "the disk failed to read or write"), (13, "may not write"),
    ],
)  # fmt: skip
def test_what_the_system_refused_is_the_first_line(code: int, text: str, tmp_path: Path, monkeypatch: Any) -> None:
    step, *_ = trained()
    ws.save(tmp_path, step)

    def refuse(handle: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(ws.CheckpointError) as error:
            ws.save(tmp_path, step, number=2)
    assert text in str(error.value).splitlines()[0]
    assert "step-00000002" not in names(tmp_path)
    assert ws.load(tmp_path).number == 1


# -- beside the step -----------------------------------------------------------------------------


def test_a_scheduler_and_a_loader_continue(tmp_path: Path) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def job() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = torch.arange(80.0).view(20, 4) / 80
        loader = loaders.StatefulDataLoader(list(data), batch_size=2, shuffle=True, num_workers=0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return model, optimizer, loader, scheduler, ws.compile(train_step)

    def train(parts: tuple[Any, ...], batches: Any, count: int) -> list[float]:
        model, optimizer, _, scheduler, step = parts
        losses = []
        for _ in range(count):
            losses.append(step(model, optimizer, next(batches)).item())
            scheduler.step()
        return losses

    first = job()
    batches = iter(first[2])
    train(first, batches, 3)
    kept = {"loader": first[2], "scheduler": first[3]}
    ws.save(tmp_path, first[-1], stateful=kept)
    expected = train(first, batches, 4)
    again = job()
    torch.manual_seed(7)
    ws.load(tmp_path, again[-1], stateful={"loader": again[2], "scheduler": again[3]})
    assert train(again, iter(again[2]), 4) == expected
    with pytest.raises(ws.CheckpointError, match=r"holds no state of 'sampler': it has \['loader', 'scheduler'\]"):
        ws.load(tmp_path, again[-1], stateful={"sampler": again[2]})


class Refuses:
    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("of")


def test_an_object_that_refuses_its_state_is_named_and_nothing_changes(tmp_path: Path) -> None:
    step, model, optimizer = trained()
    ws.save(tmp_path, step, stateful={"a/b c": Refuses()})
    step(model, optimizer, torch.ones(2, 4))
    before = model.weight.clone()
    with pytest.raises(ws.CheckpointError, match="stateful 'a/b c' does not take its state back: 'of'"):
        ws.load(tmp_path, step, stateful={"a/b c": Refuses()})
    assert torch.equal(model.weight, before)
    assert step.calls == 2


def test_torch_alone_reads_the_tensors(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    step, model, optimizer = trained()
    folder = ws.save(tmp_path, step)
    found = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "weight/exp_avg": torch.zeros(3, 4)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    assert torch.equal(found["weight"], model.weight)
    assert torch.equal(found["bias"], model.bias)
    assert torch.equal(found["weight/exp_avg"], optimizer.state[model.weight]["exp_avg"])
