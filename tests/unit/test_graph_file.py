"""Graphs written to a file and read back: the same text, the same notes on every node; nothing foreign is called."""

import json
from typing import Any

import pytest
import torch

import wholestep as ws
from tests.catalogue import CASES, OPTIMIZERS
from wholestep.graph import meta
from wholestep.graph.file import HERE, Reader, StoreError, Writer, function_called, name_of
from wholestep.graph.meta import TensorMeta
from wholestep.layout import Extent, Layout
from wholestep.passes.reinplace import Reinplace

PARALLEL: dict[str, tuple[str, Any]] = {
    "replicate": ("dp=2", ws.DataParallel("replicate")),
    "zero1": ("dp=3", ws.DataParallel("zero1")),
    "fully_shard": ("dp=3", ws.DataParallel("fully_shard", semantics="global")),
    "gathered again": ("dp=2", ws.DataParallel("fully_shard", reshard_after_forward=True)),
    "hybrid": ("replicate=2,shard=2", ws.DataParallel("hybrid")),
}


def notes(graph: torch.fx.Graph) -> list[Any]:
    """What later stages look up, of every node."""
    return [
        (
            n.op, n.name, str(n.target), meta.tensors(n), meta.whole_shapes(n), meta.traced_stride(n), meta.layouts(n),
            meta.is_ranked(n), meta.rests(n), meta.is_loose(n), meta.is_backward(n), meta.module_path(n),
            meta.source_line(n), meta.stretch(n), repr(n.args), repr(n.kwargs),
        )
        for n in graph.nodes
    ]  # fmt: skip


@pytest.mark.parametrize("style", PARALLEL)
@pytest.mark.parametrize("case", ["uneven", "tokens", "convolutions", "partly-used", "micro-clip", "recurrent"])
def test_what_is_read_is_what_was_written(case: str, style: str) -> None:
    model = CASES[case].build(torch.float32)
    optimizer = OPTIMIZERS["AdamW-fused"].make(model.parameters())
    train = ws.capture(CASES[case].step, model, optimizer, CASES[case].batches(0, torch.float32))
    mesh, parallel = PARALLEL[style]
    local = ws.partition(train, ws.plan(train, mesh, parallel))
    final = ws.run_passes(local, [ws.Schedule(), Reinplace()])
    writer = Writer()
    rows: Any = [writer.train_graph(train), writer.local_graph(local), writer.local_graph(final)]
    rows, tables = json.loads(json.dumps([rows, writer.tables()]))
    reader = Reader(tables, writer.constants)
    found = [reader.train_graph(rows[0]), reader.local_graph(rows[1]), reader.local_graph(rows[2])]
    for ours, theirs in zip(found, [train, local, final], strict=True):
        assert str(ours) == str(theirs)
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        assert ours.constants.keys() == theirs.constants.keys()
        for mine, other in zip(notes(ours.graph), notes(theirs.graph), strict=True):
            assert mine == other
    assert (found[2].layouts, found[2].passes) == (final.layouts, final.passes)  # type: ignore[union-attr]
    assert found[0].losses == train.losses  # type: ignore[union-attr]


VALUES = [
    None, True, -3, 2.5, float("inf"), "text", 1 + 2j, (1, (2,), [3, None]), [], {"a": (1,), 2: None},
    slice(1, None, 2), torch.float16, torch.channels_last, torch.strided, torch.device("cpu"),
    Extent(11, (("dp", 4), ("tp", 2)), 3, True), Layout((("dp",), ()), (("tp", "sum"),), ("x",)),
    TensorMeta((2, 3), (3, 1), torch.int64, "cpu"), torch.ops.aten.add.Tensor, torch.ops.aten.mm.default,
    torch.ops._c10d_functional.wait_tensor.default,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values(value: Any) -> None:
    writer = Writer()
    data = json.loads(json.dumps(writer.value(value)))
    found = Reader(writer.tables(), {}).value(data)
    assert found == value
    assert type(found) is type(value)


def test_the_device_of_a_rank_is_that_of_the_reader() -> None:
    writer = Writer("cuda:0")
    row = [torch.device("cuda:0"), "cuda:0", torch.device("cuda:1"), TensorMeta((), (), torch.int8, "cuda:0")]
    data = writer.value(row)
    assert writer.tables()["metas"][0][-1] == HERE
    here, text, other, found = Reader(writer.tables(), {}, "cuda:3").value(data)
    assert (here, text, other, found.device) == (torch.device("cuda:3"), "cuda:3", torch.device("cuda:1"), "cuda:3")


def test_what_is_no_op_is_named() -> None:
    with pytest.raises(StoreError, match=r"test_values \(tests.unit.test_graph_file\) is no torch op"):
        name_of(test_values)
    with pytest.raises(StoreError, match="is no torch op"):
        name_of(lambda: 0)
    with pytest.raises(StoreError, match="object"):
        Writer().value(object())


@pytest.mark.parametrize(
    "name",
    [
        "os:system", "builtins:eval", "operator:__builtins__", "operator:nothing", "wholestep.graph.file:importlib",
        "wholestep.graph.file:_torch", "wholestep.nothing_of_ours:f", "wholestep:os", "aten::nothing.default",
        "torch:load", "wholestep.runtime.cached:write",
    ],
)  # fmt: skip
def test_nothing_foreign_is_called(name: str) -> None:
    with pytest.raises((StoreError, ImportError)):
        function_called(name)


@pytest.mark.parametrize(
    "row",
    [
        ["call_function", "x = 1", "aten::relu.default", {"t": []}, {"m": []}, {}],
        ["call_function", "class", "aten::relu.default", {"t": []}, {"m": []}, {}],
        ["call_function", "x", "aten::relu.default", {"t": []}, {"m": [["a=1); print(1", 2]]}, {}],
        ["call_method", "x", "relu", {"t": []}, {"m": []}, {}],
    ],
)
def test_text_that_is_no_graph(row: list[Any]) -> None:
    with pytest.raises(StoreError):
        Reader(Writer().tables(), {}).graph([row])
