"""Another process that writes over a key in the job's store: a typed error or no difference, never its code."""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wholestep as ws
from tests.dist.launch import HOST, RankError, run_ranks
from tests.steps import mean_square
from wholestep import _torch

WRITES = ("set", "add", "compare_set")


class Watched:
    """A store whose writes are noted by key, and followed by `after(key)`."""

    def __init__(self, store: Any, keys: dict[str, None], after: Any) -> None:
        self.store, self.keys, self.after = store, keys, after

    def clone(self) -> "Watched":
        return Watched(self.store.clone(), self.keys, self.after)

    def __getattr__(self, name: str) -> Any:
        held = getattr(self.store, name)
        return held if name not in WRITES else lambda key, *rest: self._write(held, key, *rest)

    def _write(self, write: Any, key: str, *rest: Any) -> Any:
        result = write(key, *rest)
        self.keys[kind(key)] = None
        self.after(key)
        return result


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def kind(key: str) -> str:
    return re.sub(r"\d+", "0", key)


def trained(rank: int, world: int, spoiled: str, folder: Path) -> tuple[str, list[str]]:
    """Three calls, whole tensors and a checkpoint; whatever rank 0 writes under keys of a kind is written over."""
    keys: dict[str, None] = {}
    third = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    store = _torch.default_store()

    def after(key: str) -> None:
        if rank == 0 and kind(key) == spoiled:
            third.set(f"0//{key}", pickle.dumps(Runs(str(folder / "canary"))))

    _torch.default_store = lambda: Watched(store, keys, after)
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ws.compile(mean_square, parallel=ws.DataParallel("fully_shard"), timeout=6.0, agree_timeout=6.0, verify=True)
    torch.manual_seed(rank)
    try:
        for call in range(3):
            step(model, optimizer, torch.randn(4 + call, 3))
        with ws.whole(model):
            pass
        ws.save(folder / "saved", step)
    except ws.WholestepError as error:
        return type(error).__name__, list(keys)
    return "", list(keys)


KEYS = [f"wholestep/{name}" for name in (
    *(f"alive/0/{key}" for key in ("0", "failed", "left")), "lives/0",
    *(f"counts/{key}/0" for key in ("join", "save", "steps", "whole")),
    *(f"join/0/{key}" for key in ("0/0", "0/count/0", "outcome", "outcomes", "read")),
    *(f"steps/0/0/{key}" for key in ("0/0", "0/count/0", "order", "outcome", "outcomes")),
    *(f"steps/0/verify/0/{key}" for key in ("0/0", "0/count/0", "outcome", "outcomes", "read")),
    *(f"whole/0/{key}" for key in ("0/0", "0/count/0", "outcome", "outcomes", "read")),
    *(f"save/0/0/{key}" for key in ("0/0", "0/count/0", "all", "outcome", "outcomes", "read")),
    *(f"barrier/{key}" for part in ("", "the end of ")
      for key in (f"{part}`with ws.whole(Linear)`", f"{part}`with ws.whole(Linear)`/0")),
)]  # fmt: skip
QUICK = ("counts/steps/0", "steps/0/0/outcome", "whole/0/read")


@pytest.mark.full
def test_every_key_is_tried(tmp_path: Path) -> None:
    found = run_ranks(trained, 2, "", tmp_path)
    assert [said for said, _ in found] == ["", ""]
    assert {key for _, keys in found for key in keys} <= set(KEYS)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if key.endswith(QUICK) else pytest.mark.full) for key in KEYS]
)
def test_what_another_process_writes_is_an_error_or_nothing(key: str, tmp_path: Path) -> None:
    found, ended = list[str](), ""
    try:
        found = [said for said, _ in run_ranks(trained, 2, key, tmp_path, timeout=60)]
    except RankError as error:  # a rank that is blocked in torch is ended, after the error is written to its output
        ended = str(error)
    assert not ended or "exit code 1 and no result" in ended
    assert set(found) <= {"", "StoreError", "RankFailedError", "RankMismatchError"}
    assert not (tmp_path / "canary").exists()
