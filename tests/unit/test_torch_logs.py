"""What a process of its own shows: an import leaves Dynamo out, and torch's loggers add nothing to a failed capture."""

import os
import subprocess
import sys
from pathlib import Path

REFUSED = """
import logging, sys
import torch, torch.nn.functional as F
from torch import nn
import wholestep as ws
assert ws.ddp_backend and "torch._dynamo" not in sys.modules

def no_such_product(model, x):
    y = model(x)
    return (y @ y).mean()

def read(model, x):
    return model(x).mean() * model(x).sum().item()

def counted(model, x):
    return torch.arange(int(model(x).sum())).sum() + model(x).mean()

def embedded(model, x):
    return F.embedding(x.long(), model(x)[0]).mean()

for loss_of in (no_such_product, read, counted, embedded):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(model, optimizer, x):
        loss_of(model, x).backward()
        optimizer.step()
    try:
        ws.compile(step)(model, optimizer, torch.randn(3, 4))
    except ws.CaptureError:
        print(loss_of.__name__)
logging.getLogger("torch._subclasses.fake_tensor").error("heard again")
"""


def test_no_dynamo_is_imported_and_a_failed_capture_prints_no_log_lines(tmp_path: Path) -> None:
    file = tmp_path / "refused.py"
    file.write_text(REFUSED)
    env = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_LOGS_OUT")}
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["no_such_product", "read", "counted", "embedded"]
    assert "heard again" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
