"""What every rank repeats of the products: each model of the catalogue under each kind of strategy."""

from collections.abc import Callable, Iterator

import torch

import wholestep as ws
from tests.catalogue import CASES
from tests.steps import mean_square

STRATEGIES = {
    "per rank": ("dp=2", ws.DataParallel("fully_shard")),
    "global": ("dp=2", ws.DataParallel("fully_shard", semantics="global")),
    "two axes": ("a=2,b=2", ws.DataParallel("zero1", semantics="global")),
    "tensor parallel": ("tp=2", ws.TensorParallel({"*": "colwise"})),
    "stages": ("pp=2", ws.Pipeline()),
}


def shares(graph: ws.TrainGraph) -> Iterator[str]:
    for name, (mesh, strategy) in STRATEGIES.items():
        try:
            repeated = ws.plan(graph, mesh, strategy).repeated
            yield f"  {name}: {', '.join(f'{work.axis} {work.share:.1%}' for work in repeated) or 'all is divided'}"
        except ws.errors.PlanError as error:
            yield f"  {name}: {str(error.found).splitlines()[0]}"


def test_models_of_the_catalogue(golden: Callable[[str, str], None]) -> None:
    lines = list[str]()
    for name, case in CASES.items():
        model = case.build()
        graph = ws.capture(case.step, model, torch.optim.SGD(model.parameters(), lr=0.1), case.batches(0))
        lines += [name, *shares(graph)]
    golden("repeated_work", "\n".join(lines))


class Sorts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sort(self.first(x), 0)[0])


def test_the_operation_is_named() -> None:
    """Of the last of two layers, which sorted rows reach, two of three products are repeated: each rank computes its
    part of the gradient of the weight.
    """
    model = Sorts()
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 6))
    (work,) = ws.plan(graph, "dp=2", ws.DataParallel("fully_shard", semantics="global")).repeated
    assert (work.axis, work.share) == ("dp", 2 * 8 * 4 / (2 * 6 * 8 + 3 * 8 * 4))
    ((op, line, share),) = work.causes
    assert (op, share) == ("aten.sort", work.share)
    assert line.endswith("return self.last(torch.sort(self.first(x), 0)[0])")
    assert f"every rank of dp repeats 33% of the products\n    33% since aten.sort at {line}" == str(work)


class Packs(torch.nn.Linear):
    """Attention of a kernel for packed rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = super().forward(x).flatten(0, 1).unflatten(-1, (2, -1)).chunk(3, -1)
        ends = torch.arange(0, 13, 6, dtype=torch.int32)
        return torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, 6, 6, 0.0, True, False)[0]


def test_what_is_shared_out_in_place_of_packed_attention_is_said() -> None:
    model = Packs(4, 48)
    graph = ws.capture(mean_square, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 6, 4))
    (work,) = ws.plan(graph, "cp=2", ws.ContextParallel()).repeated
    assert {op for op, *_ in work.causes} == {"aten._flash_attention_forward", "aten._flash_attention_backward"}
    assert str(work).count("; use scaled_dot_product_attention with a mask, as ids[:, None, :, None] == ") == 2
