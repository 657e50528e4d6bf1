"""The inner products that weight matching keeps between visits: always those of the present weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from networks import Net, gap
from orbits import made, noisy, symmetry_of
from scipy.optimize import quadratic_assignment
from torch import Tensor, nn

import intertwine as it
from intertwine.align import matching, state
from intertwine.align.align import align
from intertwine.align.matching import _best_share, frank_wolfe_order, permutation_step
from intertwine.align.scale_aware import scale_step
from intertwine.align.solver import permutations_of
from intertwine.align.state import MatchingState, counted_weights
from intertwine.symmetry.blocks import weights_of
from intertwine.symmetry.symmetry import Symmetry

# -- The inner products that weight matching keeps between visits --


KINDS = ["MLP with ReLU", "MLP with tanh", "residual with batch norm", "depthwise convolution", "attention"]


def paired(kind: str) -> MatchingState:
    sym = symmetry_of(kind)
    models = [made(kind, seed=i)[0].requires_grad_(False) for i in (0, 1)]
    a, b = (counted_weights(sym, m, weights_of(sym, m), buffers=False) for m in models)
    return MatchingState(sym, a, b, range(len(sym.wires)))


def check(pair: MatchingState) -> None:
    """Against plain products of the slices as they are now, in double precision."""
    for places in pair.slots:
        if places:
            rows = [(pair.rows_of_a(p).double(), p.rows(pair.b[p.block]).double()) for p in places]
            plain = torch.stack([x @ y.mT for x, y in rows]).sum(0)
            assert torch.allclose(pair.products.total(places).double(), plain, atol=1e-5)


@pytest.mark.parametrize("short", [0, state.SHORT])
@pytest.mark.parametrize("kind", KINDS)
def test_they_follow_every_step(kind: str, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SHORT", short)  # these networks are small: 0 keeps all of their products
    pair = paired(kind)
    check(pair)
    moved = 0
    for sweep in range(3):
        for s, strand in enumerate(pair.wire_specs[: len(pair.symmetry.wires)]):
            moved += permutation_step(pair, s, signs=sweep == 1)
            check(pair)
            if strand.scales and sweep == 2:
                moved += scale_step(pair, s)
                check(pair)
    assert moved
    pair.start_at(pair.symmetry.random(seed=4))
    check(pair)


def test_what_is_kept_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SHORT", 0)
    pair = paired("residual with batch norm")
    places = pair.slots[0]
    first = [pair.products.of(p) for p in places]
    assert all(pair.products.of(p) is x for p, x in zip(places, first, strict=True))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SHORT", 0)
    monkeypatch.setattr(state, "MOST", 0)
    pair = paired("residual with batch norm")
    check(pair)
    assert not pair.products._kept


def test_old_products_are_not_reordered_into_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wire is reordered after its neighbour has moved, without a look at its products in between."""
    monkeypatch.setattr(state, "SHORT", 0)
    pair = paired("MLP with ReLU")
    check(pair)
    assert permutation_step(pair, 0)
    before = tuple(pair.b)
    pair.products.reorder(1, torch.arange(pair.wire_specs[1].size)[None], before)
    check(pair)


# -- Frank–Wolfe where units enter one weight twice --


KINDS_ALIGN_FRANK_WOLFE = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


# -- the search itself -------------------------------------------------------------------------------------------------


def starts(n: int) -> tuple[Tensor, Tensor]:
    return torch.eye(n).double(), torch.full((n, n), 1 / n).double()


def best_fit(a: Tensor, b: Tensor) -> tuple[float, list[Tensor]]:
    """The best Σ a ∘ (P b Pᵀ) over both starts, summed entry by entry of the permuted matrix."""
    orders = [frank_wolfe_order(lambda p: (a * (p @ b @ p.mT)).sum(), start, degree=2) for start in starts(len(a))]
    return max(float((a * b[order][:, order]).sum()) for order in orders), orders


@pytest.mark.parametrize("n", [8, 16, 30])
def test_on_average_as_good_as_scipy(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    ours, faq, swaps = [], [], []
    for seed in range(20):
        a, b = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
        ours.append(best_fit(a, b)[0])
        for found, method in ((faq, "faq"), (swaps, "2opt")):
            options = {"maximize": True, "rng": np.random.default_rng(seed)}
            found.append(quadratic_assignment(a.numpy(), b.numpy(), method=method, options=options).fun)
    assert np.mean(ours) >= np.mean(faq)
    assert np.mean(ours) > np.mean(swaps)


@pytest.mark.parametrize("n", [5, 20, 50])
def test_a_planted_order_comes_back(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    b = a[order][:, order]
    fit, orders = best_fit(a, b)
    assert fit == pytest.approx(float(a.square().sum()))
    assert torch.equal(b[orders[1]][:, orders[1]], a), "it is found from the even start"


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_best_point_of_a_way(degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    here, there = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64)
    way, grid = there - here, torch.linspace(0, 1, 10001, dtype=torch.float64)
    inside = 0
    for _ in range(60):
        parts = torch.randn(degree, 3, 3, generator=generator, dtype=torch.float64)

        def value(p: Tensor, parts: Tensor = parts) -> Tensor:
            return (parts * p).sum((1, 2)).prod()

        lines = (parts * here).sum((1, 2)) + grid[:, None] * (parts * way).sum((1, 2))
        heights = lines.prod(1)
        at = here.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(value(at), at)
        rise = float((slope * way).sum())
        if rise > 0:  # else the search ends here
            share = _best_share(value, here, way, degree, float(value(here)), rise)
            assert float(value(here + share * way)) >= float(heights.max()) - 1e-9
            inside += 0 < share < 1
    assert inside > 3


# -- recurrent networks ------------------------------------------------------------------------------------------------


def recurrent(kind: str, n: int, seed: int) -> Net:
    """One input, one output and no bias: hardly anything but the recurrent weight tells units apart."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rnn = KINDS_ALIGN_FRANK_WOLFE[kind](1, n, batch_first=True, bias=False)
        return Net(lambda m, x: m.head(m.rnn(x)[0]), rnn=rnn, head=nn.Linear(n, 1)).eval()


def symmetry_of_align_frank_wolfe(kind: str, n: int) -> Symmetry:
    return it.symmetry(recurrent(kind, n, 0), torch.zeros(2, 5, 1))


def recovered(kind: str, n: int, noise: float) -> int:
    """How many of ten planted orders come back, from the identity alone."""
    sym, count = symmetry_of_align_frank_wolfe(kind, n), 0
    for seed in range(10):
        model, g = recurrent(kind, n, seed), permutations_of(sym.random(seed))
        found = align(model, noisy(sym.act(g, model), noise, seed), symmetry=sym, starts=1)
        count += (found.element @ g).distance(sym.identity()) == 0
    return count


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS_ALIGN_FRANK_WOLFE)
def test_planted_orders_of_recurrent_networks_come_back(kind: str, n: int, noise: float) -> None:
    assert recovered(kind, n, noise) == 10


@pytest.fixture
def _by_slope_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "frank_wolfe_step", lambda pair, s: False)


@pytest.mark.usefixtures("_by_slope_alone")
@pytest.mark.parametrize("kind", KINDS_ALIGN_FRANK_WOLFE)
def test_the_slope_alone_does_not_bring_them_back(kind: str) -> None:
    assert recovered(kind, 64, 0.05) < 8


@pytest.mark.parametrize("kind", KINDS_ALIGN_FRANK_WOLFE)
def test_strangers_come_nearer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sym = symmetry_of_align_frank_wolfe(kind, 16)
    left = {True: 0.0, False: 0.0}
    for seed in range(3):
        a, b = recurrent(kind, 16, seed), recurrent(kind, 16, seed + 100)
        for walks in (True, False):
            with monkeypatch.context() as patch:
                if not walks:
                    patch.setattr(matching, "frank_wolfe_step", lambda pair, s: False)
                found = align(a, b, symmetry=sym, starts=1)
            left[walks] += found.after / found.before / 3
            for x, y in zip(found.history, found.history[1:], strict=False):
                assert y.sweep == 0 or y.objective < x.objective
        assert gap(b, found.model, torch.randn(2, 5, 1)) < 1e-5
    assert left[True] < left[False] - 0.05


def loop(m: Net, x: Tensor) -> Tensor:
    state = torch.zeros(len(x), 12)
    for t in range(3):
        state = torch.nn.functional.gelu(m.enter(x[:, t]) + m.again(state))
    return m.head(state)


LOOPS: dict[str, Callable[[], Net]] = {
    "by hand": lambda: Net(loop, enter=nn.Linear(1, 12, False), again=nn.Linear(12, 12, False), head=nn.Linear(12, 1)),
    "two layers": lambda: Net(
        lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(1, 12, 2, bias=False, batch_first=True), head=nn.Linear(12, 1)
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_other_recurrences(name: str) -> None:
    x = torch.zeros(2, 3, 1)
    sym = it.symmetry(LOOPS[name](), x)
    for seed in range(5):
        torch.manual_seed(seed)
        model, g = LOOPS[name](), permutations_of(sym.random(seed))
        found = align(model, noisy(sym.act(g, model), 0.05, seed), symmetry=sym, starts=1)
        assert (found.element @ g).distance(sym.identity()) == 0


def test_dead_and_equal_units() -> None:
    """Ties have no one answer, but an exact one."""
    a = recurrent("GRU", 8, 0)
    with torch.no_grad():
        for parameter in (a.rnn.weight_ih_l0, a.rnn.weight_hh_l0):
            parameter.unflatten(0, (3, 8))[:, :3] = 0
        a.rnn.weight_hh_l0[:, :3] = 0
        a.head.weight[:, :3] = 0
    sym = symmetry_of_align_frank_wolfe("GRU", 8)
    for seed in range(5):
        assert align(a, sym.act(permutations_of(sym.random(seed)), a), symmetry=sym, starts=1).after == 0
