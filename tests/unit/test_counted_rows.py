"""Steps that pick rows by values which the model computes: one program for all numbers of rows, against eager."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep as ws
from tests.eager import same_as_eager

pytestmark = pytest.mark.usefixtures("double")
D, EXPERTS = 8, 3


class Picks(nn.Module):
    def __init__(self, body: Callable[["Picks", Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.into, self.out, self.gate = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D, bias=False), nn.SiLU()) for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, D, D))
        self.token, self.words = nn.Parameter(torch.ones(1, D)), nn.Embedding(12, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.into(x))


def litgpt(m: Picks, h: Tensor) -> Tensor:
    probs, chosen = m.gate(h).topk(2)
    probs = probs.softmax(1)
    masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
    y = torch.zeros_like(h)
    for mask, expert in zip(masks, m.experts, strict=True):
        token, place = torch.where(mask)
        y[token] += probs[token, place, None] * expert(h[token])
    return m.out(y).square().mean()


def mixtral(m: Picks, h: Tensor) -> Tensor:
    weights, chosen = m.gate(h).softmax(-1).topk(2, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    y = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        place, token = torch.where(mask[number])
        rows = expert(h[None, token].reshape(-1, D)) * weights[token, place, None]
        y.index_add_(0, token, rows.to(h.dtype))
    return m.out(y).square().mean()


def switch(m: Picks, h: Tensor) -> Tensor:
    best, route = m.gate(h).softmax(-1).max(-1)
    tokens = [torch.eq(route, number).nonzero(as_tuple=True)[0] for number in range(EXPERTS)]
    y = h.new_zeros(h.shape)
    for token, expert in zip(tokens, m.experts, strict=True):
        y[token, :] = expert(h[token, :])
    return m.out(y * best.view(-1, 1)).square().mean()


def detection(m: Picks, h: Tensor) -> Tensor:
    positive, boxes = h[:, 0] > 0, m.out(h)
    classes = boxes.detach().roll(1, 1).argmax(-1)
    counted = positive.sum().clamp(min=1)
    smooth = F.smooth_l1_loss(boxes[positive], h[positive].detach(), reduction="sum") / counted
    return smooth + F.cross_entropy(boxes[positive], classes[positive], reduction="sum") / counted


def means(m: Picks, h: Tensor) -> Tensor:
    loss = m.out(h).square()
    rows = loss[loss[:, 0] > 0.05]
    return torch.masked_select(loss, loss > 0.02).sum() + rows.sum() / (rows.shape[0] + 1)


def assigned(m: Picks, h: Tensor) -> Tensor:
    mask, y = h[:, 0] > 0, torch.zeros_like(h)
    y[mask] = m.out(h[mask])
    return (y * h).sum() + F.dropout(m.out(h[~mask]), 0.5).sum()


def joined(m: Picks, h: Tensor) -> Tensor:
    first, second = m.experts[0](h[h[:, 0] > 0]), m.experts[1](h[h[:, 0] <= 0])
    return torch.cat([first, second]).square().mean()


def made_of_number(m: Picks, h: Tensor) -> Tensor:
    rows = h[torch.argwhere(h[:, 0] > 0).squeeze(1)]
    n = rows.shape[0]
    wide = torch.cat([rows, m.token.expand(n, -1), torch.zeros(n, 1), torch.full((n, 1), 0.5)], 1)
    return (F.pad(wide, (0, 0, 0, 1)).tanh() * rows.new_ones(n + 1, 1)).sum() / (n + 1)


def of_each_other(m: Picks, h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    weights = (m.out(rows) @ rows.t()).softmax(-1)
    return (F.layer_norm(rows, (D,)).cumsum(0) * (weights @ rows.sort(0).values)).sum()


def distinct(m: Picks, h: Tensor) -> Tensor:
    ids = (h[:, 0].detach() * 5).long().clamp(-5, 5) + 5
    kinds, places = torch.unique(ids, return_inverse=True)
    return (m.words(kinds)[places] * h).sum()


def none_at_all(m: Picks, h: Tensor) -> Tensor:
    return m.out(h[h[:, 0] > 1e9]).sum() + h.sum()


def mixtral_of_old(m: Picks, h: Tensor) -> Tensor:
    """The loop over experts of transformers before 4.50, which leaves experts without tokens out."""
    weights, chosen = m.gate(h).softmax(-1).topk(2, -1)
    mask, y = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        place, token = torch.where(mask[number])
        if token.shape[0] == 0:
            continue
        rows = expert(h[None, token].reshape(-1, D)) * weights[token, place, None]
        y.index_add_(0, token, rows.to(h.dtype))
    return m.out(y).square().mean()


def deepseek(m: Picks, h: Tensor) -> Tensor:
    weights, chosen = m.gate(h).sigmoid().topk(2, -1)
    mask, y = F.one_hot(chosen, EXPERTS).permute(2, 0, 1), torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        token, place = torch.where(mask[number])
        if token.numel() > 0:
            y.index_add_(0, token, expert(h[token]) * weights[token, place].unsqueeze(-1))
    return m.out(y).square().mean()


def returned_early(m: Picks, h: Tensor) -> Tensor:
    rows = h[h[:, 0] > 0]
    if not len(rows):
        return m.out(h).square().sum()
    return m.out(rows).square().sum() / len(rows) + rows.sum() / (rows.numel() + 0.5)


def more_of_one(m: Picks, h: Tensor) -> Tensor:
    first, second = h[h[:, 0] > 0], h[h[:, 1] > 0.2]
    if len(first) > 2 * second.shape[0] - 1 or min(first.shape[0], len(second)) % 2:
        return m.out(first).sum()
    return m.out(second).sum() if len(first) > 2 * second.shape[0] - 1 else m.experts[0](second).sum()


def divided(m: Picks, h: Tensor) -> Tensor:
    rows = m.out(h)[h[:, 0] > 0]
    return rows.square().sum() / max(1, rows.shape[0]) + rows.sum() / math.sqrt(max(len(rows), 2))


def moe_infer(m: Picks, h: Tensor) -> Tensor:
    """DeepSeek-V2's loop over sorted tokens, which reads how many each expert has."""
    weights, ids = m.gate(h).softmax(-1).topk(2, -1)
    counts = ids.new_zeros((ids.shape[0], EXPERTS)).scatter_(1, ids, 1).sum(dim=0).cpu().numpy()
    order = ids.view(-1).argsort()
    tokens, outputs, start = h[order // ids.shape[1]], list[Tensor](), 0
    for number, count in enumerate(counts):
        if count == 0:
            continue
        outputs.append(m.experts[number](tokens[start : start + count]))
        start = start + count
    outs = torch.cat(outputs) if len(outputs) else tokens.new_empty(0)
    rows = torch.empty_like(outs)
    rows[order] = outs
    return m.out((rows.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)).square().mean()


def dead_codes(m: Picks, h: Tensor) -> Tensor:
    """vector-quantize-pytorch's replacement of codes that nothing is near to, by tokens that are drawn."""
    codes, x = m.words.weight, h.detach()
    size = F.one_hot(torch.cdist(x, codes.detach()).argmin(1), 12).sum(0)
    expired, number = (size < 1) & (torch.arange(12) < 10), 0
    if torch.any(expired):
        number = expired.sum().item()
        codes.data[expired] = x[torch.randperm(10)[:number]]
    return m.out(codes.detach()).square().mean() / max(1, number) + (h @ codes.t()).square().mean()


def equal_numbers(m: Picks, h: Tensor) -> Tensor:
    first, second = h[h[:, 0] > 0], h[h[:, 1] > 0]
    return m.out(first + second).sum() if len(first) == len(second) else m.out(second).sum()


def as_many_of_two(m: Picks, h: Tensor) -> Tensor:
    return (h[h[:, 0] > 0] + m.out(h)[h[:, 0] >= 0]).sum()


def picked_twice(m: Picks, h: Tensor) -> Tensor:
    """Rows of rows: most numbers of the inner ones are fewer than those of the outer ones."""
    rows = m.out(h)[h[:, 0] > 0]
    inner, y = rows[:, 1] > 0, rows.clone()
    y[inner] = m.into(rows[inner])
    kept = rows[(rows[:, 2] > 0).nonzero().squeeze(1)]
    return y.square().sum() + kept[kept[:, 3] > 0].sum() / max(1, len(kept)) + rows.sum() * inner.sum().item()


def not_suppressed(m: Picks, h: Tensor) -> Tensor:
    """Boxes that none of higher score is near to."""
    rows = m.out(h)[h[:, 0] > 0]
    rows = rows[rows[:, 0].argsort(descending=True)]
    near = (rows[:, None] - rows[None]).abs().sum(-1) < 2
    return rows[~near.triu(1).any(0)].square().sum()


def last_row(m: Picks, h: Tensor) -> Tensor:
    rows = m.out(h)[h[:, 0] > 0]
    return rows[-1].sum() + rows[0].sum() if len(rows) else m.token.sum()


def sorted_by_expert(m: Picks, h: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Rows in the order of their experts, how many each has, and what becomes of their results."""
    weights, ids = m.gate(h).softmax(-1).topk(2, -1)
    flat = ids.view(-1)
    order = flat.argsort(stable=True)

    def combined(rows: Tensor) -> Tensor:
        y = torch.zeros_like(rows).index_copy(0, order, rows)
        return m.out((y.view(*ids.shape, D) * weights.unsqueeze(-1)).sum(1)).square().sum()

    return h[order // 2], torch.bincount(flat, minlength=EXPERTS), combined


def split_by_counts(m: Picks, h: Tensor) -> Tensor:
    rows, counts, combined = sorted_by_expert(m, h)
    pieces = zip(m.experts, rows.split(counts.tolist()), torch.split(rows, counts.tolist(), dim=0), strict=True)
    return combined(torch.cat([expert(piece) + again for expert, piece, again in pieces]))


def cut_at_offsets(m: Picks, h: Tensor) -> Tensor:
    rows, counts, combined = sorted_by_expert(m, h)
    ends = counts.cumsum(0).tolist()
    pieces = zip(m.experts, [0, *ends[:-1]], ends, strict=True)
    return combined(torch.cat([expert(rows[start:end]) for expert, start, end in pieces]))


def cut_in_two(m: Picks, h: Tensor) -> Tensor:
    n = (h[:, 0] > 0).sum().item()
    first, rest = m.out(h).split([n, h.shape[0] - n])
    return first.square().sum() + rest.sum() + m.into(h)[n:].square().sum()


def slices(m: Picks, h: Tensor) -> Tensor:
    rows = m.out(h)[h[:, 0] > 0]
    half = len(rows) // 2
    products = (rows[1:] * rows[:-1]).sum() + rows[:half].square().sum() + rows[half:].sum() + rows[-2:].sum()
    return (
        products + rows[::2].square().sum() + rows[3:].sum() + rows[1:5].square().sum() + rows.narrow(0, 0, half).sum()
    )


def all_or_none(m: Picks, h: Tensor) -> Tensor:
    """The product is of one row, too, and fails for nine."""
    rows = m.out(h)[h[:, 0] > 0]
    return (rows * torch.ones(10, D)).sum() if len(rows) == 10 else m.token.sum() + m.out(rows).sum()


def cut_beyond(m: Picks, h: Tensor) -> Tensor:
    """A program for few rows has sizes below none where there are many."""
    n = (h[:, 0] > 0).sum().item()
    z = m.out(h)
    return z[: 2 * n].square().sum() + z[2 * n :].sum() + z[n : 2 * n].square().sum()


def chosen(m: Picks, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loop of transformers over the experts that some token chose: a class more than there are experts."""
    weights, ids = m.gate(h).softmax(-1).topk(2, -1)
    with torch.no_grad():
        mask = F.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    return weights, mask, hit


def eager_experts(m: Picks, h: Tensor) -> Tensor:
    weights, mask, hit = chosen(m, h)
    y = torch.zeros_like(h)
    for expert in hit:
        expert = expert[0]
        if expert == EXPERTS:
            continue
        place, token = torch.where(mask[expert])
        rows = F.linear(h[token], m.stacked[expert]) * weights[token, place, None]
        y.index_add_(0, token, rows.to(y.dtype))
    return m.out(y).square().mean()


def experts_by_name(m: Picks, h: Tensor) -> Tensor:
    """Switch: an expert that no token chose has no gradient, and its optimizer does not step."""
    weights, mask, hit = chosen(m, h)
    y = torch.zeros_like(h)
    for expert in hit:
        place, token = torch.where(mask[expert].squeeze(0))
        y.index_add_(0, token, m.experts.get_submodule(f"{expert[0]}")(h[token]) * weights[token, place, None])
    return m.out(y).square().mean()


def numbered_experts(m: Picks, h: Tensor) -> Tensor:
    """Python counts those that are chosen, and knows which is which."""
    weights, mask, hit = chosen(m, h)
    y, number = torch.zeros_like(h), 0
    for number, expert in enumerate(hit.squeeze(-1).tolist(), 1):
        place, token = torch.where(mask[expert])
        y = y.index_add(0, token, m.experts[expert](h[token]) * weights[token, place, None] * number)
    for last in hit[:, 0]:
        y = y + int(last)
    return m.out(y).square().mean() / number


def counted_behind_the_loop(m: Picks, h: Tensor) -> Tensor:
    """The mask is changed in place; the number of those that are chosen is read, and not which."""
    weights, mask, _ = chosen(m, h)
    idle = mask.sum((-1, -2)) == 0
    hit, y = idle.logical_not_().nonzero(), torch.zeros_like(h)
    for (expert,) in hit:
        place, token = torch.where(mask[expert])
        y.index_add_(0, token, F.linear(h[token], m.stacked[expert]) * weights[token, place, None])
    return m.out(y * len(hit)).square().mean() / hit.shape[0]


QUESTIONS = [
    counted_behind_the_loop, cut_beyond, eager_experts, experts_by_name, numbered_experts,
    mixtral_of_old, deepseek, returned_early, more_of_one, moe_infer, equal_numbers, dead_codes, last_row, all_or_none,
]  # fmt: skip


def attends(m: Picks, h: Tensor) -> Tensor:
    """Kernels of attention on a CPU divide by the number of rows."""
    rows = m.out(h)[h[:, 0] > 0].unflatten(1, (2, -1)).transpose(0, 1)[None]
    seen = torch.ones(10, dtype=torch.bool)[None] & (rows[0, 0, :, :1] > -9)
    plain = F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
    keys = m.into(h).view(1, 10, 2, 4).transpose(1, 2)
    return plain.square().sum() + F.scaled_dot_product_attention(rows, keys, keys, seen).square().sum()


PROGRAMS = [
    attends, litgpt, mixtral, switch, detection, means, assigned, joined, made_of_number, of_each_other, distinct,
    none_at_all,
    divided, as_many_of_two, picked_twice, not_suppressed,
    split_by_counts, cut_at_offsets, cut_in_two, slices,
]  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def made(body: Callable[..., Tensor]) -> Any:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Picks(body)
        return model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9, weight_decay=0.1)

    return make


def batches(rows: int = 10) -> list[tuple[Tensor]]:
    """Several numbers of rows are picked; in the last calls none, all or one."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(rows, D, generator=generator) for _ in range(4)]
    none, every = torch.full((rows, D), -4.0), torch.full((rows, D), 4.0)
    return [(x,) for x in (*drawn, none, every, torch.cat([every[:1], none[1:]]))]


@pytest.mark.parametrize("body", PROGRAMS, ids=lambda body: body.__name__)
def test_one_program_serves_all_numbers_of_rows(body: Callable[..., Tensor]) -> None:
    step = same_as_eager(train, made(body), batches())
    assert len(step.programs) == 1


@pytest.mark.parametrize(
    "body",
    QUESTIONS,
    ids=lambda body: body.__name__,
)
def test_a_question_about_the_number_is_a_branch(body: Callable[..., Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = same_as_eager(train, made(body), [*batches(), *batches()])
    assert 1 < len(step.programs) == step.captures < 6


def train_on_few(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    rows = x[x[:, 0] > 0]
    return train(model, optimizer, rows if len(rows) > 4 else x)


def test_a_question_about_rows_of_the_batch() -> None:
    """Which picks them by no parameter."""
    assert len(same_as_eager(train_on_few, made(lambda m, h: m.out(h).sum()), batches()).programs) == 2


def test_a_mean_of_no_rows_is_nan_as_in_eager() -> None:
    model, optimizer = made(lambda m, h: m.out(h)[h[:, 0] > 1e9].mean())()
    assert math.isnan(ws.compile(train)(model, optimizer, batches()[0][0]))


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_are_as_many_as_the_batch_are_counted_in_each_call(rows: int) -> None:
    """One row would be repeated, and its gradient a sum: the program is for as many as the batch has."""

    def squares(m: Picks, h: Tensor) -> Tensor:
        return (m.out(h)[h[:, 0] > 0] * h).square().sum()

    step, (model, optimizer) = ws.compile(train), made(squares)()
    every, none = torch.full((10, D), 4.0), torch.full((10 - rows, D), -4.0)
    with torch.no_grad():
        model.into.weight.copy_(torch.eye(D))
    step(model, optimizer, every)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ws.CaptureError, match="combines rows that it counts while it runs as if u0 == 10"):
        step(model, optimizer, torch.cat([every[:rows], none]))
    assert all(map(torch.equal, model.parameters(), before))


def test_batches_without_rows() -> None:
    step = same_as_eager(train, made(split_by_counts), [batches(rows)[i] for i, rows in enumerate((10, 0, 6, 0))])
    assert len(step.programs) == 3


def gradients(model: Picks, x: Tensor) -> tuple[Tensor, ...]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), *(p.grad for p in (*model.out.parameters(), *model.into.parameters()))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_variance_of_one_row_is_nan_as_in_eager() -> None:
    """And so are gradients: C++ divides by no rows, where Python raises."""

    def spread(m: Picks, h: Tensor) -> Tensor:
        rows = m.out(h)[h[:, 0] > 0]
        return rows.var(0).sum() + rows.std(0).sum() + torch.var_mean(rows, 0, correction=0)[0].sum() + rows.std()

    step, (ours, _), (plain, _) = ws.compile(gradients, keep_grads=True), made(spread)(), made(spread)()
    for (x,) in batches():
        torch.testing.assert_close(step(ours, x), gradients(plain, x), rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("options", [{"verify": True}, {"memory_bytes": 100_000}, {"on_nonfinite": "skip"}], ids=str)
def test_beside_other_options_and_sizes(options: dict[str, Any]) -> None:
    calls = [batches(rows)[i] for i, rows in enumerate((10, 12, 10))]
    step = same_as_eager(train, made(detection), calls, **options)
    assert len(step.programs) == 2
    assert any("the step counts rows" in str(why) for why in step.misses)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_of_no_rows(momentum: float | None) -> None:
    """Its averages stay, as eagerly."""

    def normed(m: Any, h: Tensor) -> Tensor:
        rows = m.out(h)[h[:, 0] > 0]
        rows = rows if len(rows) != 1 else rows.repeat(2, 1)
        return (m.norm(rows) * rows.detach().cos()).sum()

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = made(normed)()
        model.norm = nn.BatchNorm1d(D, momentum=momentum)
        return model, torch.optim.SGD(model.parameters(), 1e-2)

    same_as_eager(train, make, batches(), tolerance=1e-10)


def test_a_computed_integer_is_an_index() -> None:
    """Alone, behind dims that stay, beside other places and in rows that are counted; its view is not written."""

    def best(m: Any, h: Tensor) -> Tensor:
        out, worst = m.out(h), h.mean(0).argmin()
        rows = out[h[:, 0] > -3]
        picked = out[out[:, 1].argmax()] * out[..., worst - D, None].mean() + out[2:, None, worst][0]
        return (picked * out[worst % 4, torch.tensor([1, 0])].sum()).sum() + rows[rows[:, 2].argmin()].square().sum()

    same_as_eager(train, made(best), batches()[:4], tolerance=1e-10)
    for change in (lambda h, row: row.add_(1), lambda h, row: h.mul_(2)):
        body: Any = lambda m, h, change=change: [row := h[h[:, 1].argmax()], change(h, row), m.out(row).sum()][2]  # noqa: E731
        assert refused(body)[0].startswith("the step writes into what it has picked by a computed integer")


def test_instance_norm_of_no_rows() -> None:
    def normed(m: Any, h: Tensor) -> Tensor:
        rows = m.out(h)[h[:, 0] > 0].view(-1, 2, D // 2)
        return (F.instance_norm(rows) * rows.cos()).sum() + h.sum()

    same_as_eager(train, made(normed), batches(), tolerance=1e-10)


def test_a_kernel_that_refuses_no_places_leaves_the_process_alive() -> None:
    """Behind it, the gradient of the pool would write at the places that it has not given."""
    step, (model, optimizer) = (
        ws.compile(train),
        made(lambda m, h: F.adaptive_max_pool1d(m.out(h)[h[:, 0] > 0].T, 1).sum())(),
    )
    first, *_, none, _, one = batches()
    step(model, optimizer, *first)
    before = [p.clone() for p in model.parameters()]
    for call in (train, step):
        with pytest.raises((RuntimeError, ws.CaptureError)):
            call(model, optimizer, *none)
    assert all(map(torch.equal, model.parameters(), before))
    assert step(model, optimizer, *one).isfinite()


@pytest.mark.parametrize("body", [litgpt, made_of_number, last_row], ids=lambda body: body.__name__)
def test_a_batch_of_one_row(body: Callable[..., Tensor]) -> None:
    one_row = batches(1)
    assert len(same_as_eager(train, made(body), [*batches()[:1], one_row[0], *one_row[-3:]]).programs) < 4


def train_on_labels(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> Tensor:
    """A loss of detection: classes and boxes where the batch has an object."""
    optimizer.zero_grad()
    boxes, positive = model(x), labels > 0
    loss = F.cross_entropy(boxes[positive], labels[positive]) + F.smooth_l1_loss(boxes[positive], x[positive])
    loss.backward()
    optimizer.step()
    return loss.detach()


def labelled(call: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(call)
    return torch.randn(10, D, generator=generator), torch.randint(-3, D, (10,), generator=generator)


def test_rows_that_the_batch_determines_are_counted_from_their_second_number_on() -> None:
    calls = [labelled(call) for call in range(20)]
    assert len({int((labels > 0).sum()) for _, labels in calls}) > 4
    step = same_as_eager(train_on_labels, made(lambda m, h: m.out(h)), calls)
    assert len(step.programs) == 2


def test_bins_beyond_those_of_bincount_are_refused() -> None:
    """At the end of the program, of which all ranks hear."""

    def counted(m: Picks, h: Tensor) -> Tensor:
        counts = torch.bincount((h[:, 0].detach() * 2).long().clamp(0, 4), minlength=3)
        return m.out(h).sum() * counts.sum()

    step, (model, optimizer), calls = ws.compile(train), made(counted)(), batches()
    with torch.no_grad():
        model.into.weight.copy_(torch.eye(D))
    step(model, optimizer, calls[0][0].clamp(max=1))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ws.CaptureError, match=r"result depends on values: aten\.bincount"):
        step(model, optimizer, calls[5][0])
    assert all(map(torch.equal, model.parameters(), before))


def refused(body: Callable[..., Tensor], **options: Any) -> list[str]:
    with pytest.raises(ws.WholestepError) as caught:
        ws.compile(train, **options)(*made(body)(), batches()[0][0])
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            lambda m, h: sum(m.out(row).sum() for row in h[h[:, 0] > 0]),
            "Python asks for a number of rows that the step counts while it runs: u0",
        ),
        (
            lambda m, h: sum(m.out(h[i]).sum() for i in (h[:, 0] > 0).nonzero().sub_(1)),
            "Python asks for a number of rows that the step counts while it runs: u0",
        ),
        (
            lambda m, h: m.out(h[(h[:, 0] > 0).nonzero().squeeze()]).sum(),
            "squeeze() of rows that the step counts while it runs: a single row would lose its dim",
        ),
        (
            lambda m, h: (h[h[:, 0] > 0] * torch.arange(h[h[:, 0] > 0].shape[0])[:, None]).sum(),
            "aten.arange.default takes the number of rows that the step counts, and not the rows",
        ),
        (
            lambda m, h: m.out(h)[h[:, 0] > 0].quantile(0.5),
            "the step counts rows while it runs, and writes in place: aten.squeeze_.dim",
        ),
        (
            lambda m, h: sum(h[i % 10].sum() for i in (h.mean() + torch.arange(501) > 99).nonzero()),
            "the step loops over the places of a mask of 501 elements, each of which is a branch: 501 with those "
            "before it",
        ),
        (
            lambda m, h: m.out(h)[h[:, 0] > 0].tensor_split(2)[0].sum(),
            "the step counts rows while it runs and the program needs ((u0 % 2) > 0) of their number",
        ),
    ],
    ids=["iterated", "other places", "squeezed", "arange", "written in place", "many", "remainder"],
)
def test_what_depends_on_the_number_itself_is_refused(body: Callable[..., Tensor], line: str) -> None:
    text = refused(body)
    assert text[0] == line
    assert "test_counted_rows.py" in text[1]


def added_to_each(hit: Tensor) -> Any:
    for place in hit:
        place += 1
    return hit.sum()


def added_to_all(hit: Tensor) -> Any:
    places = [place for place in hit]  # noqa: C416 - list() asks for the length too
    hit.add_(1)
    return sum(place * 1.0 for place in places)


def added_in_the_loop(hit: Tensor) -> Any:
    total: Any = 0.0
    for place in hit:
        total = total + place * 1.0
        hit.add_(1)
    return total


def added_by_numpy(hit: Tensor) -> Any:
    array = hit.numpy()
    array += 1
    return hit.sum()


def seen_by_numpy(hit: Tensor) -> Any:
    array = hit.numpy()
    hit.add_(1)
    return float(array.sum())


@pytest.mark.parametrize("change", [added_to_each, added_to_all, added_in_the_loop, added_by_numpy, seen_by_numpy])
def test_places_that_share_memory_are_not_written(change: Callable[[Tensor], Any]) -> None:
    text = refused(lambda m, h: m.out(h).square().mean() * change((h[:, :2].sum(0) > -9.0).nonzero().squeeze(1)))
    assert "the step writes into what it has picked by a computed integer, or computed and read" in text[0]


def test_a_loop_over_places_of_the_batch() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        for place in (x[:, 0] > 0).nonzero():
            loss = loss + model(x[place]).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    torch.manual_seed(0)
    same_as_eager(step, made, [(torch.randn(3, 3),) for _ in range(4)])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"backend": "inductor"}, "the step counts rows while it runs, with backend 'inductor'"),
        (
            {"parallel": [ws.DataParallel("replicate"), ws.MicroBatches(2)]},
            "the step counts rows while it runs in micro-batches or stages",
        ),
    ],
    ids=["inductor", "micro-batches"],
)
def test_what_it_does_not_compose_with(options: dict[str, Any], line: str) -> None:
    text = refused(detection, **options)
    assert text[0] == line
    assert "boxes[positive]" in text[1]


def gives(model: nn.Module, x: Tensor, number: bool) -> Any:
    rows = model(x)
    rows = rows[rows[:, 0] > 0]
    rows.sum().backward()
    return rows.shape[0] if number else rows.detach()


def test_rows_are_a_result_and_their_number_is_refused() -> None:
    (model, _), (other, _) = made(lambda m, h: m.out(h))(), made(lambda m, h: m.out(h))()
    step, number = ws.compile(gives, keep_grads=True), ws.compile(gives, keep_grads=True)
    for (x,) in batches():
        torch.testing.assert_close(step(model, x, False), gives(other, x, False))
    with pytest.raises(ws.CaptureError, match="returns a SymInt"):
        number(model, batches()[0][0], True)
