"""Checkpoints on an object store: an S3 server of a package, on loopback."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.dist.launch import run_ranks
from tests.dist.test_checkpoint import Training, equal, everywhere
from wholestep.checkpoint import lease

pytestmark = pytest.mark.full


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3fs, boto3 = pytest.importorskip("s3fs"), pytest.importorskip("boto3")
    pytest.importorskip("upath")
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    try:
        yield "s3://bucket/run"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


def _train_and_continue(rank: int, world: int, root: str, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    first = Training("fully_shard", "adamw", noisy=True)
    for number in range(3):
        first.train(range(number, number + 1))
        ws.save(root, first.step, extra={"number": number}, wait=number == 2, keep=2)
    expected, state = first.train(range(3, 6)), first.state()
    again = Training("fully_shard", "adamw", noisy=True, seed=5)
    found = ws.load(root, again.step)
    assert (found.number, found.extra) == (3, {"number": 2})
    assert again.train(range(3, 6)) == expected
    equal(again.state(), state)
    assert len(set(everywhere(expected[0]))) == world


def _aws() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def test_saves_and_continues(bucket: str) -> None:
    import fsspec

    run_ranks(_train_and_continue, 2, bucket, _aws(), timeout=240)
    store: Any = fsspec.filesystem("s3", use_listings_cache=False)
    names = sorted(name.rpartition("/")[2] for name in store.ls("bucket/run", refresh=True))
    assert [name for name in names if not name.startswith(".writer")] == ["latest", "step-00000002", "step-00000003"]
    # damage
    store.pipe_file("bucket/run/step-00000003/values.pt", b"no")
    with pytest.warns(UserWarning, match=r"values.pt has 2 bytes.*; loaded s3://bucket/run/step-00000002 instead"):
        assert ws.load(bucket).number == 2
    with pytest.raises(ws.CheckpointError, match=r"values.pt has 2 bytes"):
        ws.load(bucket, strict=True)
    # the ranks have ended: their lease is free
    model = torch.nn.Linear(2, 2)
    folder = ws.save(bucket, model=model, number=9)
    try:
        assert str(folder) == "s3://bucket/run/step-00000009"
        assert ws.load(bucket, model=model).number == 9
        lost = max(name for name in store.ls("bucket/run", refresh=True) if ".writer" in name)
        store.rm(lost)
        assert ws.save(bucket, model=model, number=10).name == "step-00000010"
    finally:
        lease.release_all()
