"""How a step is given what it needs and gives back what it made: arguments, closures, results."""

import array
import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

import wholestep as ws
from tests.batch_classes import CLASSES, EasyDict
from tests.eager import batches, same, same_as_eager, same_holder
from tests.steps import mse as train
from wholestep.capture import call_structure

Made = tuple[nn.Module, Optimizer]
CALLS = batches((6, 6), (6, 3))


def make() -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# -- arguments ----------------------------------------------------------------------------
class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor
    targets: dict[str, list[Tensor]]
    name: str = "data"


class Encoding(collections.UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return."""


ARGUMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "list": (lambda x, y: [x, [y]], lambda b: (b[0], b[1][0])),
    "tuple": (lambda x, y: ((x,), y), lambda b: (b[0][0], b[1])),
    "namedtuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (lambda x, y: Data(x, {"all": [y]}), lambda b: (b.x, b.targets["all"][0])),
    "mapping": (lambda x, y: Encoding({"x": x, "y": y}), lambda b: (b["x"], b["y"])),
    "nested": (
        lambda x, y: {"a": [Data(x, {"t": [y, y]})], "n": None},
        lambda b: (b["a"][0].x, b["a"][0].targets["t"][1]),
    ),
    "ordered": (lambda x, y: collections.OrderedDict(y=y, x=x), lambda b: (b["x"], b["y"])),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_structures(kind: str) -> None:
    pack, unpack = ARGUMENTS[kind]

    def fn(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        return train(model, optimizer, *unpack(batch))

    step = same_as_eager(fn, make, [(pack(*call),) for call in CALLS])
    assert step.captures == 1


@pytest.mark.parametrize(
    "value",
    [
        *((pack(*CALLS[0]),) for pack, _ in ARGUMENTS.values()),
        (make(), {"b": 1, "a": [(2.0, ("s", None)), {}, ()]}, {1: True, "1": {0: [], 2: {"x": CALLS[0]}}}),
        ({(0, 1): 2}, {True: 3}, {1: b"4"}, torch.amp.GradScaler("cpu"), collections.deque([5])),
    ],
)
def test_arguments_are_taken_apart_as_torch_does(value: Any) -> None:
    """What torch does not open, mappings and dataclasses, has its values where torch has a leaf."""

    def leaves(one: Any) -> list[Any]:
        if isinstance(one, (Data, collections.UserDict)):
            return [leaf for field in vars(one).values() for leaf in leaves(field)]
        inner = tree_leaves(one, is_leaf=lambda item: item is not one)
        return inner if len(inner) == 1 and inner[0] is one else [leaf for item in inner for leaf in leaves(item)]

    found = call_structure.take_apart(value)
    assert [*map(id, found.leaves)] == [*map(id, leaves(value))]
    again = call_structure.put_together(found.structure, found.leaves)
    assert [*map(id, call_structure.take_apart(again).leaves)] == [*map(id, found.leaves)]


class Opened:
    """An object without a module is opened, one with a module is not."""

    def __init__(self, held: Any) -> None:
        self.held = held


def alike_values() -> list[tuple[Any, Any]]:
    """Pairs of values whose structure is one, of other objects."""
    shared, number = [[1.0], [2.0]], np.array(3.0)
    cyclic: list[list[Any]] = [[torch.ones(2)] for _ in range(2)]
    for part in cyclic:
        part.append(part)
    reached = [Opened(torch.ones(i + 1)) for i in range(2)]
    packed = [(pack(*CALLS[0]), pack(*CALLS[1])) for pack, _ in ARGUMENTS.values()]
    return [
        *packed,
        (((make(), CALLS[0]), {}), ((make(), CALLS[1]), {})),
        (((), {"b": {(0, 1): 2}}), ((), {"b": {(0, 1): 3}})),
        ((shared, shared), tuple(2 * [[[3.0], [4.0]]])),
        (shared, [[3.0], [4.0]]),
        tuple(cyclic),
        ({"a": np.ones(3), "s": number}, {"a": np.zeros(4), "s": number}),
        ([nn.Parameter(torch.ones(1)), "x", None], [nn.Parameter(torch.ones(2)), "y", None]),
        tuple([r, [weakref.ref(r), r]] for r in reached),
        (EasyDict(x=CALLS[0]), EasyDict(x=CALLS[1])),
        (collections.deque([5, {1}]), collections.deque([6, {2}])),
    ]


def test_a_generated_opener_takes_apart_what_is_built_alike_and_nothing_else() -> None:
    """`take_apart` is the oracle, for each value and each opener."""
    pairs = alike_values()
    undecided = [Opened(nn.Linear(1, 1)), np.array(["text"]), weakref.ref(make)]  # leaves by what they hold
    others = [[1.0, 2], [torch.ones(1), "x", None], {"x": 1}, {"y": 1, "x": 2}, {1: 2}, {True: 2}, ([0], [0])]
    values = [*(value for pair in pairs for value in pair), *others, *undecided]
    for value, alike in pairs:
        call, other = (call_structure.take_apart(each) for each in (value, alike))
        assert call.structure == other.structure
        opened = call_structure.opener(call.structure, call.leaves)
        assert opened(alike) is not None
        for each in values:
            expected, found = call_structure.take_apart(each), opened(each)
            kinds = [type(leaf) for leaf in expected.leaves] == [type(leaf) for leaf in call.leaves]
            assert (found is not None) is (expected.structure == call.structure and kinds)
            if found is not None:
                assert found.structure is call.structure
                assert [*found.arrays] == [*expected.arrays]
                assert [*map(id, found.objects)] == [*map(id, expected.objects)]
                pairs_of_leaves = zip(found.leaves, expected.leaves, strict=True)
                arrays = expected.arrays
                same_leaves = [torch.equal(a, b) if i in arrays else a is b for i, (a, b) in enumerate(pairs_of_leaves)]
                assert all(same_leaves)
    for value in undecided:
        call = call_structure.take_apart([value])
        assert call.structure.outline[3] == ("leaf",)
        assert call_structure.opener(call.structure, call.leaves)([value]) is None


def test_an_object_that_gets_a_module_is_a_leaf_from_then_on() -> None:
    """One class, and one name: what the object holds decides, in each call."""
    holder, model, x = Opened(2.0), nn.Linear(6, 3).double(), CALLS[0][0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: Tensor, holder: Opened) -> Tensor:
        return model(x).square().mean() * holder.held if isinstance(holder.held, float) else holder.held(x).sum()

    def fn(optimizer: Optimizer, x: Tensor, holder: Opened) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, holder)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = ws.compile(fn)
    for value in (2.0, model, model, 2.0, 3.0):
        holder.held = value
        expected = loss_of(x, holder).detach()
        same(step(optimizer, x, holder), expected, 1e-6, "loss")


def test_a_parameter_of_a_group_that_another_one_replaces_is_seen() -> None:
    """They hold one equal number: `==` of tensors would not tell them apart."""

    def fn(scales: nn.ParameterList, optimizer: Optimizer, x: Tensor) -> Tensor:
        scales.zero_grad()
        loss = (x * scales[0] + scales[1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def once() -> tuple[nn.ParameterList, Optimizer]:
        scales = nn.ParameterList([torch.ones(1), torch.ones(1)])
        return scales, torch.optim.SGD([scales[0]], lr=0.1)

    ours, eager = once(), once()
    step = ws.compile(fn)
    for trained, x in enumerate((torch.zeros(3), torch.rand(3))):
        for scales, optimizer in (ours, eager):
            optimizer.param_groups[0]["params"][:] = [scales[trained]]
        same(step(*ours, x), fn(*eager, x), 1e-6, "loss")
        same_holder(ours[0], eager[0], 1e-6, False, "scales")


def test_zero_dim_tensor() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        return train(model, optimizer, x * scale, y)

    calls = [(*call, torch.tensor(0.5 + i, dtype=torch.float64)) for i, call in enumerate(CALLS)]
    assert same_as_eager(fn, make, calls).captures == 1


def test_plain_values() -> None:
    """Python values are part of the program: another value is another program, never a stale one."""

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scale: float, how: str, flag: Any) -> Tensor:
        x = x * scale if how == "mul" else x + scale
        return train(model, optimizer, -x if flag else x, y)

    values = [(0.5, "mul", True), (0.5, "mul", True), (2.0, "mul", True), (2.0, "add", None), (2, "add", None)]
    calls = [(*CALLS[0], *v) for v in [*values, values[0]]]
    assert same_as_eager(fn, make, calls).captures == 4


@pytest.mark.smoke
def test_keyword_arguments() -> None:
    def fn(model: nn.Module, *, optimizer: Optimizer, batch: Mapping[str, Tensor], smooth: float = 0.0) -> Tensor:
        return train(model, optimizer, batch["x"], batch["y"] + smooth)

    (model, optimizer), (twin, twins) = _two()
    step = ws.compile(fn)
    for x, y in CALLS:
        found = step(model, batch={"x": x, "y": y}, optimizer=optimizer, smooth=0.1)
        same(found, fn(twin, batch={"x": x, "y": y}, optimizer=twins, smooth=0.1), 1e-12, "loss")
    same_holder(model, twin, 1e-12, False, "model")
    assert step.captures == 1


def test_models_and_optimizers_in_containers() -> None:
    def nested() -> tuple[dict[str, Any]]:
        model, optimizer = make()
        return ({"models": [model], "training": {"optimizer": optimizer}},)

    def fn(parts: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
        return train(parts["models"][0], parts["training"]["optimizer"], x, y)

    same_as_eager(fn, nested, CALLS)


def test_batch_changed_in_place() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        x += 1.0
        y.mul_(0.5)[0] = 3.0
        return train(model, optimizer, x, y)

    same_as_eager(fn, make, CALLS)


def test_arguments_that_the_step_would_have_twice_are_refused() -> None:
    def halved(model: nn.Module, optimizer: Optimizer, x: Tensor, target: Tensor) -> Tensor:
        x.mul_(0.5)
        return train(model, optimizer, x, target)

    def clipped(model: nn.Module, optimizer: Optimizer, params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(params, 0.1)
        return train(model, optimizer, x, y)

    model = nn.Linear(6, 6)
    made, step = (model, torch.optim.SGD(model.parameters(), 0.1)), ws.compile(halved)
    rows = torch.randn(12, 6)
    step(*made, rows[:5].clone(), rows[:5])
    step(*made, *rows.split(6))
    for pair in ((rows[:5], rows[:5]), (rows[:5], rows[4:9])):
        with pytest.raises(ws.CaptureError, match=r"changes x in place, and x shares memory with target"):
            step(*made, *pair)
    with pytest.raises(ws.CaptureError, match=r"the argument params\[1\] is 'bias' of the model or the optimizer"):
        ws.compile(clipped)(*made, [rows, model.bias], rows, rows)


def test_batch_that_wants_a_gradient() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.mse_loss(model(x), y)
        (grad,) = torch.autograd.grad(loss, x)
        return loss.detach(), grad

    same_as_eager(fn, make, [(x.clone().requires_grad_(), y) for x, y in CALLS])


def test_strided_batch() -> None:
    calls = [(torch.empty(6, 6, dtype=x.dtype).t().copy_(x), y.repeat(2, 1)[::2]) for x, y in CALLS]
    same_as_eager(train, make, calls)


# -- results ------------------------------------------------------------------------------
@dataclasses.dataclass
class Report:
    loss: Tensor
    outputs: dict[str, Tensor]
    note: str


RESULTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "none": lambda loss, out, x: None,
    "number": lambda loss, out, x: 7,
    "tuple": lambda loss, out, x: (loss, out),
    "list": lambda loss, out, x: [loss, [out, None, "text", 3.5]],
    "dict": lambda loss, out, x: {"loss": loss, "inner": {"out": out}},
    "dataclass": lambda loss, out, x: Report(loss, {"out": out}, "done"),
    "namedtuple": lambda loss, out, x: Pair(loss, out),
    "twice": lambda loss, out, x: (loss, loss, out, out.view(-1)),
    "input": lambda loss, out, x: (x, x[0]),
    "constant": lambda loss, out, x: (torch.arange(3), torch.tensor(2.0)),
    "integers": lambda loss, out, x: (out.argmax(1), out > 0),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results(kind: str) -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        return RESULTS[kind](loss.detach(), out.detach(), x)

    same_as_eager(fn, make, CALLS)


def test_results_are_the_callers_own() -> None:
    """A result is not overwritten by the next call, and changing it changes nothing."""

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = next(model.parameters()).detach().clone()
        return train(model, optimizer, x, y), before

    model, optimizer = make()
    step = ws.compile(fn)
    first = step(model, optimizer, *CALLS[0])
    kept = [t.clone() for t in first]
    step(model, optimizer, *CALLS[1])
    same(first, tuple(kept), 0, "first result")
    first[1].zero_()
    assert next(model.parameters()).abs().sum() > 0


def test_objects_that_hold_tensors_are_no_results() -> None:
    made: list[Callable[[Tensor], Any]] = [lambda t: SimpleNamespace(loss=t), lambda t: lambda: t, lambda t: iter([t])]
    for result in made:
        with pytest.raises(ws.CaptureError, match=r"the step returns a \w+ that holds tensors"):
            ws.compile(lambda *args, result=result: result(train(*args)))(*make(), *CALLS[0])  # type: ignore[misc]


def test_results_carry_no_gradient() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert not ws.compile(fn)(*make(), *CALLS[0]).requires_grad


# -- where models come from ---------------------------------------------------------------
def _two() -> tuple[Made, Made]:
    return make(), make()


@pytest.fixture
def expected() -> tuple[nn.Module, list[Tensor]]:
    """The model after three eager steps, and its losses."""
    model, optimizer = make()
    return model, [train(model, optimizer, *call) for call in CALLS]


def check(step: Callable[..., Tensor], model: nn.Module, expected: tuple[nn.Module, list[Tensor]]) -> None:
    for call, loss in zip(CALLS, expected[1], strict=True):
        same(step(*call), loss, 1e-12, "loss")
    same_holder(model, expected[0], 1e-12, False, "model")


def test_closure(expected: tuple[nn.Module, list[Tensor]]) -> None:
    model, optimizer = make()

    @ws.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x, y)

    check(step, model, expected)


def test_decorator_with_options(expected: tuple[nn.Module, list[Tensor]]) -> None:
    model, optimizer = make()

    @ws.compile(parallel=ws.DataParallel("replicate"))
    def step(x: Tensor, y: Tensor) -> Tensor:
        """Trains."""
        return train(model, optimizer, x, y)

    check(step, model, expected)
    assert (step.__name__, step.__doc__) == ("step", "Trains.")


@pytest.fixture
def global_model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    model, optimizer = make()
    monkeypatch.setitem(globals(), "MODEL", model)
    monkeypatch.setitem(globals(), "OPTIMIZER", optimizer)
    return model


def _on_globals(x: Tensor, y: Tensor) -> Tensor:
    return train(MODEL, OPTIMIZER, x, y)  # type: ignore[name-defined]  # noqa: F821


def test_globals(global_model: nn.Module, expected: tuple[nn.Module, list[Tensor]]) -> None:
    check(ws.compile(_on_globals), global_model, expected)


class Trainer:
    def __init__(self) -> None:
        self.model, self.optimizer = make()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return train(self.model, self.optimizer, x, y)


def test_bound_method(expected: tuple[nn.Module, list[Tensor]]) -> None:
    trainer = Trainer()
    check(ws.compile(trainer.step), trainer.model, expected)


def test_given_to_compile(expected: tuple[nn.Module, list[Tensor]]) -> None:
    trainer = Trainer()
    hidden = {"trainer": trainer}
    step = ws.compile(lambda x, y: hidden["trainer"].step(x, y), model=trainer.model, optimizer=trainer.optimizer)
    check(step, trainer.model, expected)


def test_several_given_to_compile() -> None:
    (one, first), (two, second) = _two()
    hidden = {"parts": [(one, first), (two, second)]}

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [train(m, o, x, y) for m, o in hidden["parts"]]

    step = ws.compile(fn, model=[one, two], optimizer=[first, second])
    step(*CALLS[0])
    twin, twins = make()
    train(twin, twins, *CALLS[0])
    same_holder(one, twin, 1e-12, False, "one")
    same_holder(two, twin, 1e-12, False, "two")


# -- meta ---------------------------------------------------------------------------------
class Constant(nn.Linear):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))
            self.bias.fill_(0.1)


def test_model_on_meta() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), Constant(6, 5), nn.Tanh(), Constant(5, 3))

    with torch.device("meta"):
        model = build()
    twin = build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin)]
    step = ws.compile(train)
    for x, y in batches((6, 6), (6, 3), dtype=torch.float32):
        same(step(model, optimizers[0], x, y), train(twin, optimizers[1], x, y), 1e-6, "loss")
    same_holder(model, twin, 2e-6, False, "model")
    assert all(isinstance(p, nn.Parameter) and not p.is_meta for p in model.parameters())
    assert optimizers[0].param_groups[0]["params"] == list(model.parameters())


def test_parameters_stay_themselves_in_a_world_of_one() -> None:
    model, optimizer = make()
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    step = ws.compile(train)
    for call in CALLS:
        step(model, optimizer, *call)
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
    assert all(p in optimizer.state for p in model.parameters())


# -- objects ------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CLASSES)
def test_an_object_is_a_batch(kind: str) -> None:
    """Its tensors are inputs, whatever its class, and it is the object that the step sees, unchanged afterwards."""
    known = set[int]()

    def fn(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        itself = id(batch) in known or isinstance(batch, tuple)
        return train(model, optimizer, batch.x * (batch.k if itself else 0.0), batch.y)

    step, ours, eager = ws.compile(fn), make(), make()
    given = [(x, y, *(CLASSES[kind](x, y, 1.5, "a") for _ in range(2))) for x, y in CALLS]
    known.update(id(batch) for call in given for batch in call[2:])
    for x, y, batch, other in given:
        same(step(*ours, batch), fn(*eager, other), 1e-12, "loss")
        assert batch.x is x or kind == "arrays"
        assert batch.y is y or kind == "arrays"
    same_holder(ours[0], eager[0], 1e-12, False, "model")
    assert step.captures == 1


def _shifted(a: Any) -> Tensor:
    x = torch.tensor(a)
    assert isinstance(a, np.ndarray)
    assert type(a) is np.ndarray
    assert (a.shape, a.ndim, a.size, a.dtype) == ((x.shape[0], 6), 2, x.numel(), np.float64)
    return x.add_(1.0)


ARRAYS: dict[str, tuple[Callable[[Any], Any], int]] = {  # what the step computes with, and captures of six calls
    "from_numpy": (torch.from_numpy, 1),
    "as_tensor of another dtype": (lambda a: torch.as_tensor(a, dtype=torch.float32).double(), 1),
    "tensor, which is a copy": (_shifted, 1),
    "changed in place": (lambda a: torch.from_numpy(a).mul_(2.0), 1),
    "numpy reads it": (lambda a: torch.from_numpy(a * 2.0), 6),
    "a branch of Python": (lambda a: torch.from_numpy(a) * (2.0 if a[0, 0] > 0.0 else 1.0), 6),
    "a mask": (lambda a: torch.from_numpy(a)[torch.from_numpy(a).sum(1) > -9.0], 6),
}


@pytest.mark.usual("from_numpy", "changed in place", "a branch of Python")
@pytest.mark.filterwarnings("ignore:fn is captured a third time")
@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_a_tensor_until_its_contents_are_read(kind: str) -> None:
    """Calls with other contents, one of them read-only; where they are one program, then with more rows."""
    used, captures = ARRAYS[kind]

    def fn(model: nn.Module, optimizer: Optimizer, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        return train(model, optimizer, used(batch["x"]), torch.from_numpy(batch["y"])), batch["y"]

    step, ours, eager = ws.compile(fn), make(), make()
    for call in range(9 if captures == 1 else 6):
        rng = np.random.default_rng(call)
        batch = {
            "x": rng.standard_normal((6 + max(call - 5, 0), 6)),
            "y": rng.standard_normal((6 + max(call - 5, 0), 3)),
        }
        other = {name: array.copy() for name, array in batch.items()}
        batch["y"].flags.writeable = call != 2
        loss, y = step(*ours, batch)
        same(loss, fn(*eager, other)[0], 1e-12, "loss")
        assert all(np.array_equal(batch[name], other[name]) for name in batch)
        assert np.array_equal(y, batch["y"])
        if call == 5:
            assert step.captures == captures, step.misses
    same_holder(ours[0], eager[0], 1e-12, False, "model")
    assert step.captures <= max(captures, 2), step.misses


@pytest.mark.parametrize("kind", ["closure", "argument that is read", "buffer of bytes"])
def test_an_array_that_is_no_input_and_changes_in_place_is_refused(kind: str) -> None:
    """A tensor that has the memory of an array is not a new one: the change would be lost after the call."""
    memory = np.ones(3, dtype=np.float32)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, given: np.ndarray) -> Tensor:
        array = memory if kind == "closure" else given
        scale = torch.frombuffer(memory, dtype=torch.float32) if "bytes" in kind else torch.from_numpy(array)
        scale.mul_(1.0 + float(given.sum()))
        optimizer.zero_grad()
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model = nn.Linear(3, 3)
    with pytest.raises(ws.CaptureError, match=r"changes in place a tensor of shape \(3,\)"):
        ws.compile(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 3), memory.copy())
    assert memory.tolist() == [1.0, 1.0, 1.0]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


REFILLED: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "array of numpy": (lambda: np.ones(3), lambda a, i: a.fill(i), lambda a: float(a.sum())),
    "array in a dict": (lambda: {"a": np.ones(3)}, lambda d, i: d["a"].fill(i), lambda d: float(d["a"].sum())),
    "array.array": (lambda: array.array("d", [1.0]), lambda a, i: a.__setitem__(0, float(i)), lambda a: a[0]),
    "bytearray": (lambda: bytearray(b"1"), lambda a, i: a.__setitem__(0, i), lambda a: a[0]),
    "memoryview": (lambda: memoryview(bytearray(b"1")), lambda a, i: a.__setitem__(0, i), lambda a: a[0]),
    "set": (set, lambda s, i: s.add(i), len),
    "deque": (lambda: collections.deque([1]), lambda d, i: d.append(i), len),
    "seed": (lambda: _random(1), lambda g, i: g.manual_seed(i), lambda g: g.initial_seed()),
    "attribute": (lambda: Holder(1.0), lambda h, i: setattr(h, "value", float(i)), lambda h: h.value),
    "list in an object": (lambda: Holder([1.0]), lambda h, i: h.value.append(float(i)), lambda h: sum(h.value)),
    "EasyDict": (lambda: EasyDict(k=1.0), lambda d, i: d.update(k=float(i)), lambda d: d.k),
    "Counter": (lambda: collections.Counter(a=1), lambda c, i: c.update(a=i), lambda c: c["a"]),
}


@pytest.mark.parametrize("kind", REFILLED)
def test_the_same_object_with_other_contents_is_seen(kind: str) -> None:
    start, refill, read = REFILLED[kind]
    found: list[list[Tensor]] = []
    for compiled in (False, True):

        def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, given: Any) -> Tensor:
            return train(model, optimizer, x * read(given), y)

        (model, optimizer), given = make(), start()
        step = ws.compile(fn) if compiled else fn
        losses: list[Tensor] = []
        for i in range(1, 4):
            refill(given, i)
            losses.append(step(model, optimizer, *CALLS[0], given).clone())
        found.append(losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_an_object_that_is_given_is_returned_and_passed_on() -> None:
    """What a step returns or passes to a callback is the object of this call."""
    seen: list[Any] = []

    def fn(model: nn.Module, optimizer: Optimizer, batch: Any) -> tuple[Tensor, Any]:
        loss = train(model, optimizer, batch.x, batch.y)
        ws.callback(seen.append, batch)
        return loss, batch

    (model, optimizer), step = make(), ws.compile(fn)
    for x, y in CALLS:
        batch = CLASSES["plain"](x, y, 1.0, "a")
        assert step(model, optimizer, batch)[1] is batch
        assert seen.pop() is batch
    assert step.captures == 1


def _scaled(config: Any, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return train(model, optimizer, x * config["scale"], y)


def _scaled_by_name(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, config: Any) -> Tensor:
    return _scaled(config, model, optimizer, x, y)


class Scaled(dict[str, float]):
    def step(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return _scaled(self, model, optimizer, x, y)


BOUND: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
    "partial": lambda config: functools.partial(_scaled, config),
    "partial by name": lambda config: functools.partial(_scaled_by_name, config=config),
    "partial of a list": lambda config: functools.partial(lambda all, *rest: _scaled(all[0], *rest), [config]),
    "method": lambda config: MethodType(_scaled, config),
    "method of a dict": lambda config: config.step,
}


@pytest.mark.parametrize("kind", BOUND)
def test_what_a_function_is_bound_to_is_compared(kind: str) -> None:
    """A number in it is an input from its second value on."""
    found: list[list[Tensor]] = []
    for compiled in (True, False):
        (model, optimizer), config = make(), Scaled(scale=1.0)
        fn = BOUND[kind](config)
        step = ws.compile(fn) if compiled else fn
        losses: list[Tensor] = []
        for i in range(5):
            config["scale"] = 1.0 + i
            losses.append(step(model, optimizer, *CALLS[0]).clone())
        found.append(losses)
        assert not isinstance(step, ws.CompiledStep) or step.captures == 2, step.misses
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_attributes_of_the_function_itself_are_compared() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return train(model, optimizer, x * getattr(fn, "scale"), y)  # noqa: B009

    ours, eager, step = make(), make(), ws.compile(fn)
    for i in range(5):
        fn.__dict__["scale"] = 1.0 + i
        same(step(*ours, *CALLS[0]), fn(*eager, *CALLS[0]), 1e-12, "loss")
    assert step.captures == 2


def test_a_norm_that_changes_is_computed_in_the_graph() -> None:
    config = SimpleNamespace(norm=1.0)

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.norm)
        optimizer.step()
        return loss.detach()

    ours, eager, step = make(), make(), ws.compile(fn)
    for i in range(20):
        config.norm = 0.1 / (1 + i)
        same(step(*ours, *CALLS[0]), fn(*eager, *CALLS[0]), 1e-12, "loss")
    assert step.captures == 2


VALUES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], int]] = {
    "a number": (lambda i: 1.0 / (1 + i), lambda b: b, 2),
    "of an array": (
        lambda i: np.linspace(0.1, 2, 20)[i],
        lambda b: (1 - b / 3) * (2.0 if b > 5 else math.cos(b)) * (b if type(b) is np.float64 else 7.0),
        2,
    ),
    "in a dict": (lambda i: {"k": 1.0 + i}, lambda b: b["k"], 2),
    "a whole number": (lambda i: {"items": 3 + i}, lambda b: 1.0 / b["items"], 2),
    "in a list of an object": (lambda i: Holder([i, 2.0]), lambda b: b.value[0] * b.value[1], 2),
    "names that nobody reads": (lambda i: {"k": 2.0, "file": f"{i}.png", "ids": [i, b"%d" % i]}, lambda b: b["k"], 2),
    "names that are moved": (
        lambda i: {"k": 1.0 + i, "file": f"{i}.png"},
        lambda b: {k: v.double() if isinstance(v, Tensor) else v for k, v in b.items()}["k"],
        2,
    ),
    "text that decides": (lambda i: {"mode": "ab"[i % 2]}, lambda b: 1.0 if b["mode"] == "a" else 2.0, 2),
    "a name that is caught": (lambda i: {"mode": "ab"[i % 2]}, lambda b: len(_caught(b["mode"])), 2),
    "a number that counts": (lambda i: i % 3, lambda b: sum(1.0 for _ in range(b + 1)), 3),
    "a clamped number": (lambda i: 1.0 + i, lambda b: 3.0 if b > 3 else b, 3),
}


def _caught(value: Any) -> str:
    try:
        return value * 2 if value == "b" else value
    except Exception:
        return "nothing of it"


@pytest.mark.filterwarnings("ignore:.*captured a third time")
@pytest.mark.parametrize("kind", VALUES)
def test_values_of_arguments_cost_two_captures(kind: str) -> None:
    """A number is an input from its second value on; what the step does not read is not compared."""
    value, read, captures = VALUES[kind]

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, given: Any) -> Tensor:
        return train(model, optimizer, x * read(given), y)

    ours, eager, step = make(), make(), ws.compile(fn)
    for i in range(20):
        same(step(*ours, *CALLS[0], value(i)), fn(*eager, *CALLS[0], value(i)), 1e-12, "loss")
    assert step.captures == captures, step.misses


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {  # torch's kernels take a number for `c`
    "huber": lambda y, t, c: F.huber_loss(y, t, delta=c),
    "smooth_l1": lambda y, t, c: F.smooth_l1_loss(y, t, beta=c, reduction="sum"),
    "margin": lambda y, t, c: F.margin_ranking_loss(y, t, (t + 0.125).sign(), margin=c),
    "triplet": lambda y, t, c: F.triplet_margin_loss(y, t, -t, margin=c),
    "softshrink": lambda y, t, c: F.softshrink(y - t, c).square().sum(),
    "of a number": lambda y, t, c: (y * (c if isinstance(c, float) and not isinstance(c, Tensor) else 7.0)).sum(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_number_that_changes_is_an_input_of_losses(kind: str) -> None:
    """Gradients too, at values where the branches of a loss meet."""

    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, t: Tensor, c: float) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        weight = next(model.parameters())
        loss = LOSSES[kind](x * weight, t, c)
        loss.backward()
        assert weight.grad is not None
        grad = weight.grad.clone()
        optimizer.step()
        return loss.detach(), grad

    step, found = ws.compile(fn), list[list[tuple[Tensor, Tensor]]]()
    for call in (fn, step):
        model = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.float64))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, t = (torch.arange(24).double().view(6, 4).mul(factor).remainder(9).sub(4).div(4) for factor in (5, 7))
        found.append([call(model, optimizer, x, t, 1.0 - i / 4) for i in range(4)])
    for ours, eager in zip(*found, strict=True):
        same(ours[0], eager[0], 1e-12, "loss")
        same(ours[1], eager[1], 1e-12, "gradient")
    assert step.captures == 2, step.misses


def test_a_third_capture_for_one_cause_is_said_once() -> None:
    def fn(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, often: int) -> Tensor:
        return train(model, optimizer, x * sum(1.0 for _ in range(often)), y)

    made, step = make(), ws.compile(fn)
    step(*made, *CALLS[0], 1)
    step(*made, *CALLS[0], 2)
    with pytest.warns(UserWarning, match="captured a third time") as said:
        step(*made, *CALLS[0], 3)
    step(*made, *CALLS[0], 4)
    assert [str(one.message) for one in said] == [
        "fn is captured a third time because argument often is 3, it was 2: the step reads its value. To capture it "
        "once, pass it as a tensor"
    ]
