"""Library code that reads values: the form that a trace runs in its place, against the original run eagerly."""

import copy
import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, Optimizer, swa_utils

import wholestep as ws
from tests.eager import batches, same_as_eager
from wholestep._torch import attributes

pytestmark = pytest.mark.usefixtures("double")

Loss = Callable[..., Tensor]
STYLES = ("replicate", "fully_shard")


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(
    loss: Loss, calls: Any, model: Callable[[], nn.Module] = linear, optimizer: Any = sgd, **options: Any
) -> ws.CompiledStep:
    """Several steps on `loss(model, *batch)`, compared with eager: results, parameters, buffers, optimizer state."""

    def make() -> tuple[nn.Module, Optimizer]:
        made = model()
        return made, optimizer(made)

    def step(model: nn.Module, optimizer: Optimizer, *batch: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return same_as_eager(step, make, calls, **options)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


SIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "max_pool1d": lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True),
    "max_pool1d with places": lambda x: F.max_pool1d(x, 2, return_indices=True)[0],
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.7),
    "interpolate to": lambda x: F.interpolate(x, size=5, mode="linear", align_corners=True),
    "interpolate 2d": lambda x: F.interpolate(x[:, None], scale_factor=(0.5, 2), mode="bicubic"),
    "take_along_dim": lambda x: x.take_along_dim(torch.tensor([[[2], [0], [-2]]]), 2),
}


@pytest.mark.parametrize("name", SIZED)
def test_sizes_that_torch_computes_with_plain_ints(name: str) -> None:
    trained(lambda model, x: SIZED[name](model(x).mT).square().mean(), [(torch.randn(2, 8, 4),) for _ in range(2)])


def whole_numbers(low: int, high: int, shape: tuple[int, ...], count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(low, high, shape, generator=generator) for _ in range(count)]


def beside(*columns: Any) -> list[tuple[Any, ...]]:
    """Calls of a random (5, 4) tensor and one item of each column."""
    return [(*x, *rest) for x, *rest in zip(batches((5, 4), count=4), *columns, strict=True)]


# -- functions ---------------------------------------------------------------------------
TIMES = torch.tensor([1, 2, 1, 1, 3])
FUNCTIONS: dict[str, Loss] = {
    "cov": lambda m, x: m(x).T.cov().square().sum(),
    "cov-weights": lambda m, x: torch.cov(m(x).T, correction=0, fweights=TIMES).square().sum(),
    "cov-both": lambda m, x: torch.cov(m(x).T, fweights=TIMES, aweights=x[:, 0].abs()).square().sum(),
    "cov-vector": lambda m, x: m(x)[:, 0].cov(correction=2),
    "corrcoef": lambda m, x: torch.corrcoef(m(x).T).tril().square().sum(),
    "lstsq": lambda m, x: torch.linalg.lstsq(m(x), x[:, :1]).solution.square().sum(),
    "lstsq-wide": lambda m, x: torch.linalg.lstsq(m(x).T, x[:3, :2])[0].square().sum(),
    "lstsq-vector": lambda m, x: torch.linalg.lstsq(m(x), x[:, 0], driver="gelsd").solution.square().sum(),
    "index_fill": lambda m, x: m(x).index_fill(1, torch.tensor([0, 0, 2]), m(x).mean()).square().sum(),
    "index_fill-number": lambda m, x: m(x).index_fill(-1, torch.tensor([0]), 2.0).square().sum(),
    "index_fill_": lambda m, x: m(x).sin().index_fill_(-2, torch.tensor([4, 1]), m(x)[0, 0]).square().sum(),
    "gaussian_nll_loss": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], m(x).square()),
    "gaussian_nll_loss-rows": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], x[:, 1].abs(), full=True),
    "gaussian_nll_loss-number": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], 0.5, reduction="sum"),
    "gaussian_nll_loss-module": lambda m, x: nn.GaussianNLLLoss(reduction="none")(m(x), x[:, :3], x[:, :1].abs()).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    trained(FUNCTIONS[name], batches((5, 4), count=3))


# -- functions of arrays on the host ---------------------------------------------------------
class Assignment:
    """`scipy.optimize.linear_sum_assignment` for small matrices, no function of Python either."""

    def __call__(self, cost_matrix: Any, maximize: bool = False) -> tuple[np.ndarray, np.ndarray]:
        cost = np.asarray(cost_matrix) * (-1 if maximize else 1)
        few, many = sorted(cost.shape)
        wide, rows = cost if cost.shape[0] == few else cost.T, np.arange(few)
        columns = np.array(min(itertools.permutations(range(many), few), key=lambda c: wide[rows, list(c)].sum()), int)
        order = rows if wide is cost else columns.argsort()
        return (rows, columns) if wide is cost else (columns[order], rows[order])


def with_scipy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `scipy.optimize`, and a library that has its function by name."""
    scipy, library = types.ModuleType("scipy.optimize"), types.ModuleType("transformers.matching")
    for module in (scipy, library):
        module.__dict__["linear_sum_assignment"] = solve = scipy.__dict__.get("linear_sum_assignment", Assignment())
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "scipy", types.ModuleType("scipy"))
    exec("def match(*given, **named):\n    return linear_sum_assignment(*given, **named)", library.__dict__)
    return solve, library


def matched(solve: Any, library: Any, model: nn.Module, x: Tensor, boxes: Tensor) -> Tensor:
    """Each of the boxes is compared with one row, as in DETR."""
    out = model(x)
    cost = torch.cdist(out.detach(), boxes)
    rows, places = library.match(cost)
    far, _ = solve(cost.numpy(), maximize=True)
    assert rows.dtype == np.int64
    rows, places = torch.as_tensor(rows), torch.as_tensor(places, dtype=torch.int64)
    return (out[rows] - boxes[places]).square().sum() + out[torch.from_numpy(far)].sin().sum()


BOXES = (3, 3, 4, 2, 6, 2)


def test_pairs_that_scipy_finds_are_found_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, library = with_scipy(monkeypatch)
    calls = [(x, torch.randn(n, 3)) for (x,), n in zip(batches((5, 4), count=6), BOXES, strict=True)]
    step = trained(lambda model, *given: matched(solve, library, model, *given), calls)
    assert len(step.programs) <= 2
    assert solve(calls[0][1].numpy())[0].tolist() == [0, 1, 2]


def pairs_as_numbers(solve: Any, out: Tensor) -> Tensor:
    return out[int(solve(out.detach())[0][0])].sum()


def pairs_caught(solve: Any, out: Tensor) -> Tensor:
    try:
        return out.sum() * solve(out.detach())[0].sum()
    except Exception:
        return out.sum()


def array_of_numpy(solve: Any, out: Tensor) -> Tensor:
    return out.sum() * float(np.median(out.detach().numpy()))


@pytest.mark.parametrize("loss", [pairs_as_numbers, pairs_caught, array_of_numpy])
def test_arrays_of_which_numbers_are_read_are_refused(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    solve, _ = with_scipy(monkeypatch)
    with pytest.raises(ws.CaptureError) as caught:
        trained(lambda model, x: loss(solve, model(x)), batches((5, 4), count=1))
    by_numpy = loss is array_of_numpy
    assert ("with numpy()" if by_numpy else "an array that linear_sum_assignment returns") in str(caught.value)
    assert ("torch.library.custom_op" if by_numpy else "make a tensor of it") in caught.value.next_step
    assert "out.detach()" in caught.value.where


COUNTED: dict[str, tuple[Loss, list[Tensor], int]] = {
    "repeat_interleave": (
        lambda m, x, n: m(x).repeat_interleave(n, 0).square().sum(),
        [torch.tensor(v) for v in ([1, 2, 0, 1, 1], [0, 0, 3, 1, 1], [1, 1, 1, 1, 2], [0, 1, 1, 1, 2])],
        2,  # the sums are 5, 5, 6, 5
    ),
    "repeat_interleave-one": (
        lambda m, x, n: torch.repeat_interleave(m(x), n).square().sum() + m(x).repeat_interleave(n, 1).sum(),
        [torch.tensor(v) for v in (2, 1, 2, 1)],
        2,
    ),
    "repeat_interleave-index": (
        lambda m, x, n: m(x)[torch.repeat_interleave(n)].square().sum(),
        whole_numbers(0, 3, (5,)),
        0,
    ),
    "repeat_interleave-size": (
        lambda m, x, n: m(x).repeat_interleave(n, 0, output_size=6).square().sum(),
        [torch.tensor(v) for v in ([1, 2, 1, 1, 1], [0, 0, 4, 1, 1], [1, 1, 1, 1, 2], [2, 1, 1, 1, 1])],
        1,
    ),
    "tensor_split": (
        lambda m, x, n: sum((i + 1) * p.square().sum() for i, p in enumerate(m(x).tensor_split(n))),
        [torch.tensor(v) for v in ([1, 3], [1, 3], [2, 2], [1, 3])],
        2,
    ),
    "tensor_split-parts": (
        lambda m, x, n: torch.tensor_split(m(x), n, dim=1)[0].square().sum(),
        [torch.tensor(v) for v in (2, 3, 2, 2)],
        2,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_sizes_that_integers_of_the_batch_say(name: str) -> None:
    loss, numbers, captures = COUNTED[name]
    step = trained(loss, beside(numbers))
    assert not captures or step.captures == captures


REFUSED: dict[str, tuple[Loss, str]] = {
    "repeat_interleave": (
        lambda m, x: m(x).repeat_interleave((m(x)[:, 0] > 0).long(), 0).sum(),
        "repeat_interleave(output_size=None) is given a number of repeats that depends on values of tensors",
    ),
    "tensor_split": (
        lambda m, x: m(x).tensor_split((x[:1, 0] > 0).long())[0].sum(),
        "tensor_split is given a split points that depends on values of tensors",
    ),
    "lstsq-residuals": (
        lambda m, x: torch.linalg.lstsq(m(x), x).residuals.sum(),
        "the step uses residuals of torch.linalg.lstsq, whose sizes or values depend on the rank of the matrix",
    ),
    "lstsq-rank": (
        lambda m, x: torch.linalg.lstsq(m(x), x)[0].sum() * torch.linalg.lstsq(m(x), x)[:3][2],
        "the step uses rank of torch.linalg.lstsq, whose sizes or values depend on the rank of the matrix",
    ),
    "lstsq-unpacked": (
        lambda m, x: sum(part.sum() for part in torch.linalg.lstsq(m(x), x)),
        "the step uses residuals of torch.linalg.lstsq, whose sizes or values depend on the rank of the matrix",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_is_refused_with_the_line(name: str) -> None:
    loss, message = REFUSED[name]
    with pytest.raises(ws.CaptureError) as caught:
        trained(loss, batches((5, 4), count=1))
    assert caught.value.found == message
    assert "test_replacements.py" in caught.value.where


def test_cond_takes_the_branch_that_integers_of_the_batch_say() -> None:
    def loss(model: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        return torch.where(n.sum() > 2, 1.0, 2.0) * torch.cond(n.sum() > 2, torch.sin, torch.cos, (model(x),)).sum()

    def eager(model: nn.Module, x: Tensor, n: Tensor) -> Tensor:
        out = model(x)
        return (out.sin() if n.sum() > 2 else 2 * out.cos()).sum()

    torch.manual_seed(0)
    model = linear()
    step = ws.compile(lambda model, optimizer, x, n: _step(model, optimizer, loss(model, x, n)))
    optimizer = sgd(model)
    for x, n in beside([torch.tensor(v) for v in (1, 3, 2, 4)]):
        expected = eager(model, x, n)
        torch.testing.assert_close(step(model, optimizer, x, n), expected.detach())
    assert step.captures == 2


def test_cond_takes_the_branch_that_numbers_of_the_batch_say() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (model(x),)).sum()

    model = linear()
    step = ws.compile(lambda model, optimizer, x: _step(model, optimizer, loss(model, x)))
    optimizer = sgd(model)
    for number in range(4):
        x = torch.full((5, 4), 1.0 - 2 * (number % 2))
        expected = model(x).sin().sum() if number % 2 == 0 else model(x).cos().sum()
        torch.testing.assert_close(step(model, optimizer, x), expected.detach())
    assert step.captures == 2


def _step(model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


REFUSED_BY_VALUE: dict[str, Loss] = {
    "gaussian_nll_loss": lambda m, x: F.gaussian_nll_loss(m(x), x[:, :3], x[:, 1:]),
    "cov": lambda m, x: torch.cov(m(x).T, aweights=x[:, 0]).sum(),
}


@pytest.mark.parametrize("name", REFUSED_BY_VALUE)
def test_what_torch_asks_of_values_inside_of_a_function_raises_its_error(name: str) -> None:
    loss, x = REFUSED_BY_VALUE[name], torch.rand(5, 4)
    model = linear()
    alone = copy.deepcopy(model)
    optimizers = sgd(model), sgd(alone)
    step = ws.compile(lambda m, o, x: _step(m, o, loss(m, x)))
    for rows in (x, 2 * x, -x, x.sqrt()):
        try:
            expected = _step(alone, optimizers[1], loss(alone, rows))
        except (ValueError, RuntimeError) as error:
            with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
                step(model, optimizers[0], rows)
        else:
            torch.testing.assert_close(step(model, optimizers[0], rows), expected)
        torch.testing.assert_close(model.weight, alone.weight)
    assert len(step.programs) == 1
    if name == "gaussian_nll_loss":
        assert ws.capture(lambda m, o, x: _step(m, o, loss(m, x)), alone, optimizers[1], x).outputs, "nothing is asked"


# -- modules -----------------------------------------------------------------------------
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norm_that_averages_over_all_batches(tracked: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(linear(), nn.BatchNorm1d(3, momentum=None, track_running_stats=tracked))

    trained(squares, batches((5, 4), count=4), make)


SPARSE: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(7, 3, sparse=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag(7, 3, sparse=True),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_of_embeddings_are_dense_and_said_so_once(name: str) -> None:
    def plain(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    calls = [(i,) for i in whole_numbers(0, 7, (5, 2))]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        trained(squares, calls, SPARSE[name], plain)
    ours = [str(w.message) for w in said if "sparse=True" in str(w.message)]
    assert ours == [
        "an embedding with sparse=True has a dense gradient in a compiled step: "
        "its values are the same, and it needs no optimizer for sparse gradients"
    ]


def by_method() -> nn.Module:
    model = nn.Sequential(linear(), nn.Tanh())
    model[0].compile(backend="eager")
    return model


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "whole": lambda: torch.compile(linear(), backend="eager"),
    "part": lambda: nn.Sequential(torch.compile(linear(), backend="eager"), nn.Tanh()),
    "method": by_method,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_modules_run_as_the_originals(name: str) -> None:
    with pytest.warns(UserWarning, match="is compiled by torch.compile: wholestep captures the original"):
        step = trained(squares, batches((5, 4), count=2), COMPILED[name])
    expected = {"whole": ["bias", "weight"]}.get(name, ["0.bias", "0.weight"])
    assert sorted(step.state.params) == expected


def test_compiled_functions_run_as_the_originals() -> None:
    @torch.compile
    def loss(out: Tensor) -> Tensor:
        return out.sin().square().mean()

    step = ws.compile(lambda m, o, x: _step(m, o, loss(m(x))))
    torch.manual_seed(0)
    model, x = linear(), torch.ones(5, 4)
    expected = model(x).sin().square().mean()
    assert torch.equal(step(model, sgd(model), x), expected.detach())


# -- optimizers ----------------------------------------------------------------------------
ADAFACTOR: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"lr": 0.5, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 2.0, "weight_decay": 0.1},
    "foreach": {"foreach": True, "maximize": True, "lr": 0.1},
}


@pytest.mark.crossed
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ADAFACTOR)
def test_adafactor(name: str, style: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(20, 3), nn.LayerNorm(3))

    step = trained(
        squares, batches((2, 4, 5), count=5), make, lambda m: Adafactor(m.parameters(), **ADAFACTOR[name]),
        parallel=ws.DataParallel(style),
    )  # fmt: skip
    assert step.captures == 1


@pytest.mark.parametrize("options", [{}, {"warmup_init": True}, {"lr": 0.1, "relative_step": False, "beta1": 0.9}])
def test_adafactor_of_transformers(options: dict[str, Any]) -> None:
    from transformers.optimization import Adafactor as TransformersAdafactor

    made: list[tuple[nn.Module, Any]] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = linear()
        made.append((model, TransformersAdafactor(model.parameters(), **options)))
    (theirs, optimizer), (ours, our_optimizer) = made
    step = ws.compile(lambda m, o, x: _step(m, o, squares(m, x)))
    for (x,) in batches((5, 4), count=5):
        expected = _step(theirs, optimizer, squares(theirs, x))
        torch.testing.assert_close(step(ours, our_optimizer, x), expected, rtol=1e-12, atol=0)
    assert step.captures == 2  # the first step makes the state
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert our_optimizer.state[a]["step"] == 5
        torch.testing.assert_close(our_optimizer.state[a]["RMS"], optimizer.state[b]["RMS"], rtol=1e-12, atol=0)


AVERAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "plain-buffers": lambda: {"use_buffers": True},
    "ema": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "ema-buffers": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "swa": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "one-ema": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    "one-swa": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "own": lambda: {"avg_fn": lambda a, b, n: a + (b - a) / (n + 2)},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_model(name: str) -> None:
    def make() -> tuple[nn.Module, Optimizer, nn.Module]:
        model = nn.Sequential(linear(), nn.BatchNorm1d(3))
        return model, sgd(model), swa_utils.AveragedModel(model, **AVERAGES[name]())

    def step(model: nn.Module, optimizer: Optimizer, average: swa_utils.AveragedModel, x: Tensor) -> Tensor:
        loss = _step(model, optimizer, squares(model, x))
        average.update_parameters(model)
        return loss

    assert same_as_eager(step, make, batches((5, 4), count=5)).captures == 1


# -- `.data` -------------------------------------------------------------------------------
def halved(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def from_a_vector(model: nn.Module) -> None:
    whole = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(whole * 0.9, model.parameters())


def there_and_back(model: nn.Module) -> None:
    """Swapped for a moment, as an average is for an evaluation: what is written meanwhile is gone."""
    old = [p.data for p in model.parameters()]
    for param in model.parameters():
        param.data = torch.ones_like(param.data)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for param, data in zip(model.parameters(), old, strict=True):
        param.data = data


@pytest.mark.parametrize("change", [halved, from_a_vector, there_and_back], ids=lambda f: f.__name__)
def test_data_of_parameters(change: Callable[[nn.Module], None]) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = _step(model, optimizer, squares(model, x))
        change(model)
        return loss

    same_as_eager(step, lambda: (model := linear(), sgd(model)), batches((5, 4), count=3))


def test_other_tensors_in_the_place_of_parameters_are_refused() -> None:
    def other_dtype(model: nn.Module) -> None:
        model.weight.data = model.weight.data.float()

    def other_object(model: nn.Module) -> None:
        model.weight = nn.Parameter(model.weight * 0.5)

    for change, message in (
        (other_dtype, "the step assigns a tensor [3, 4] torch.float32 to `.data` of a tensor [3, 4] torch.float64"),
        (other_object, "the step replaces the parameter 'weight'"),
    ):
        model = linear()
        step = ws.compile(lambda m, o, x, change=change: (_step(m, o, squares(m, x)), change(m))[0])
        with pytest.raises(ws.CaptureError) as caught:
            step(model, sgd(model), torch.ones(5, 4))
        assert caught.value.found == message
        assert all(type(p) is nn.Parameter for p in model.parameters())


# -- anomaly mode ----------------------------------------------------------------------------
def test_anomaly_detection_is_refused() -> None:
    def inside(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.detect_anomaly():
            return squares(model, x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is slow
        with pytest.raises(ws.CaptureError, match="anomaly detection is on") as caught:
            trained(inside, batches((5, 4), count=1))
        assert "with torch.autograd.detect_anomaly():" in caught.value.where
        model = linear()
        step = ws.compile(lambda m, o, x: _step(m, o, squares(m, x)))
        with torch.autograd.set_detect_anomaly(True), pytest.raises(ws.CaptureError, match="anomaly detection is on"):
            step(model, sgd(model), torch.ones(5, 4))
        optimizer = sgd(model)
        step(model, optimizer, torch.ones(5, 4))
        with torch.autograd.set_detect_anomaly(True), pytest.raises(ws.CaptureError, match="anomaly detection is on"):
            step(model, optimizer, torch.ones(5, 4))
    assert not torch.is_anomaly_enabled()


def places_that_a_trace_replaces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Owner and name of each function that the capture of a step replaces."""
    found: list[tuple[Any, str]] = []
    original = attributes._replacement  # pyright: ignore[reportPrivateUsage]

    def noted(owner: Any, name: str, form: Any) -> Any:
        if name not in ("__getattribute__", "__setattr__"):  # they are observed
            found.append((owner, name))
        return original(owner, name, form)

    monkeypatch.setattr(attributes, "_replacement", noted)
    model = linear()
    optimizer = sgd(model)
    ws.capture(lambda x: _step(model, optimizer, squares(model, x)), torch.ones(2, 4))
    monkeypatch.undo()
    return found


def test_what_a_trace_replaces_is_replaced_by_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    places = places_that_a_trace_replaces(monkeypatch)
    assert len(places) > 100
    only_here: list[str] = []
    for owner, name in places:
        taken = getattr(owner, name)
        beside = types.ModuleType("beside")
        beside.__dict__["by_name"] = taken
        changes = attributes.forms_of([(owner, name, lambda original, *args, **kwargs: "the form")])
        with attributes.attributes_set([*changes, *attributes.aliases(changes, [beside])]):
            assert getattr(owner, name)() == "the form", name
            in_c = not isinstance(taken, types.FunctionType) and owner is not torch.autograd.Function
            by_name = (not in_c and taken() == "the form") or beside.__dict__["by_name"] is getattr(owner, name)
        assert getattr(owner, name) is taken or getattr(owner, name) == taken
        if not by_name:
            only_here.append(f"{getattr(owner, '__name__', owner)}.{name}")
    methods_in_c = {f"Tensor.{name}" for name in ("take_along_dim", "cumprod", "kron")}  # they fix sizes, no more
    methods_in_c |= {"Tensor.as_subclass", "Tensor._make_subclass"}  # an op that is recorded exchanges its tensors too
    assert {one for one in only_here if not one.endswith(".write")} <= methods_in_c, only_here  # write: of stdout
