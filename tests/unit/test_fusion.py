"""Kernels of a compiled program: what fuses, what a kernel moves, and how that compares with Inductor's own figures."""

import logging
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import wholestep as ws
from wholestep.cost.compute import work
from wholestep.cost.fusion import LOSS, compiled_us, kernel_work, kernels
from wholestep.graph.nodes import is_collective
from wholestep.graph.op_kinds import arithmetic

H100 = ws.Hardware.preset("dgx-h100")
SIDE = 1024


def program(make: Any, shape: tuple[int, ...] = (SIDE, SIDE), mesh: str = "dp=1") -> ws.LocalGraph:
    """Of a model and its mean square."""

    def train(model: nn.Module, optimizer: SGD, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch.device("meta"):
        model, x = make(), torch.empty(shape)
    graph = ws.capture(train, model, SGD(model.parameters(), lr=0.1), x)
    plan = ws.plan(graph, mesh, ws.DataParallel("replicate"))
    return ws.run_passes(ws.partition(graph, plan), ws.default_passes(H100, backend="inductor"))


class Gated(nn.Module):
    def __init__(self, width: int = SIDE) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def names(nodes: Any) -> list[str]:
    return [str(node.target).removeprefix("aten.").split(".")[0].rstrip("_") for node in nodes]


def test_elements_between_two_products_are_one_kernel_that_moves_its_ends() -> None:
    forward = next(k for k in kernels(program(Gated).graph) if names(k.nodes)[0] == "silu")
    assert names(forward.nodes) == ["silu", "mul"]
    assert kernel_work(forward).moved_bytes == 4 * 4 * SIDE * SIDE, "two products; what is multiplied is read again"


def test_a_product_between_keeps_kernels_apart() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(SIDE, SIDE, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            first = x.exp()
            return first.tanh() + self.inner(first).sigmoid()

    made = kernels(program(Chain).graph)
    of = {name: i for i, kernel in enumerate(made) for name in names(kernel.nodes)}
    assert of["exp"] == of["tanh"], "nothing lies between"
    assert of["exp"] < of["sigmoid"]


def test_readers_of_a_sum_of_all_elements_wait_for_it() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(SIDE))

        def forward(self, x: Tensor) -> Tensor:
            rows = x.exp()
            return (rows / rows.sum(-1, keepdim=True) * self.weight) / x.sin().sum()

    made = kernels(program(Scaled).graph)
    held = [names(kernel.nodes) for kernel in made]
    rows = next(found for found in held if "exp" in found)
    assert "sum" in rows, "a sum of rows"
    assert "div" in rows, "and what reads it"
    assert not any("sin" in found and "div" in found for found in held), "a sum of all is complete before it is read"


def test_collectives_end_kernels_and_each_op_counts_once() -> None:
    local = program(lambda: nn.Sequential(Gated(), Gated()), mesh="dp=2")
    made = kernels(local.graph)
    counted = [node for kernel in made for node in kernel.nodes]
    calls = [n for n in local.graph.nodes if n.op == "call_function" and not is_collective(n) and work(n) is not None]
    assert sorted(n.name for n in counted) == sorted(n.name for n in calls if "wait" not in n.name)
    place = {node: i for i, node in enumerate(local.graph.nodes)}
    cuts = [place[node] for node in place if is_collective(node)]
    assert cuts
    for kernel in made:
        assert not any(place[kernel.nodes[0]] < cut < place[kernel.nodes[-1]] for cut in cuts)


def test_a_compiled_step_takes_less_and_starts_fewer_kernels() -> None:
    local = program(lambda: nn.Sequential(*(Gated(256) for _ in range(4))), (4096, 256))
    one_by_one, compiled = ws.simulate(local, H100), ws.simulate(local, H100, compiled=True)
    assert compiled.step_us < one_by_one.step_us
    assert compiled.host_us == H100.start_us * len(kernels(local.graph))
    assert compiled.host_us < one_by_one.host_us
    times = compiled_us(local.graph, H100)
    assert compiled.step_us == pytest.approx(sum(times.values()))
    shown = ws.timeline(local, H100, compiled=True)
    assert shown.simulated == compiled
    assert shown.busy_us("compute") == pytest.approx(compiled.step_us)


def test_a_loss_that_is_not_compiled_passes_over_the_logits_op_by_op() -> None:
    """As Megatron's of 2022. Nothing else changes: what is added are reads and writes of logits."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 8192, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), x.sum(-1).long())

    graph, logits = program(Scores, (4096, 64)).graph, 4 * 4096 * 8192
    apart = [kernel for kernel in kernels(graph, LOSS) if names(kernel.nodes)[0] in LOSS]
    assert [names(kernel.nodes) for kernel in apart] == [
        ["_log_softmax"], ["nll_loss_forward"], ["nll_loss_backward"], ["_log_softmax_backward_data"],
    ]  # fmt: skip
    joined = [kernel for kernel in kernels(graph) if LOSS & {*names(kernel.nodes)}]
    more = sum(kernel_work(one).moved_bytes for one in apart) - sum(kernel_work(one).moved_bytes for one in joined)
    assert 2.9 * logits < more < 8 * logits, "three at least: written by one op, read by the next"


class Block(nn.Module):
    """Attention op by op, a norm of torch's and one that is written out, a gate, biases."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in parts)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 8 + 1.0, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        inner = self.other(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
def test_kernels_and_bytes_are_near_those_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor counts what its scheduler makes; for a CPU it counts passes over rows apart."""
    from torch._inductor import compile_fx, config, metrics

    def train(model: nn.Module, optimizer: SGD, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    level = compile_fx.inductor_metrics_log.level
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)
    metrics.reset()
    try:
        with config.patch(force_disable_caches=True):
            model = nn.Sequential(Block(), Block())
            step = ws.compile(train, backend="inductor")
            step(model, SGD(model.parameters(), lr=0.1), torch.randn(4, 128, 256))
        counted = metrics.nodes_num_elem
        theirs = 4 * sum(count for node, count in counted if "Extern" not in type(node).__name__)
        several = [node for node, _ in counted if "Nop" not in type(node).__name__]
    finally:
        compile_fx.inductor_metrics_log.setLevel(level)
    assert step.local_graph is not None
    made = kernels(step.local_graph.graph)
    ours = sum(kernel_work(k).moved_bytes for k in made if arithmetic(k.nodes[0].target) is None)
    assert ours == pytest.approx(theirs, rel=0.25)  # its fusions vary: 0.2 above it in some processes
    assert len(made) == pytest.approx(len(several), rel=0.1)
