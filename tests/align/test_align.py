"""The objective of alignment against dense formulas, and what every solver promises about it."""

import copy
from functools import cache
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from networks import Net, gap
from orbits import KINDS, made, mlp, symmetry_of
from torch import Tensor, nn

import intertwine as it
from intertwine.align.align import SOLVERS, Alignment, align
from intertwine.align.correlations import matched_correlations
from intertwine.align.learned import StraightThroughOptions
from intertwine.align.scale_aware import ScaleTerms, best_log_scale
from intertwine.align.similarity import CrossMoments
from intertwine.align.solver import permutations_of
from intertwine.align.state import squared_distance, unmoved_part
from intertwine.errors import InputError, MismatchError

# -- The objective of alignment against dense formulas, and what every solver promises about it --


METHODS = ("weights", "scale-aware")


def dense(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return sum(float((x.double() - y.double()).square().sum()) for x, y in pairs)


def two(kind: str) -> tuple[nn.Module, nn.Module]:
    return made(kind, seed=0)[0].requires_grad_(False), made(kind, seed=1)[0].requires_grad_(False)


@cache
def aligned(kind: str, method: str) -> Alignment:
    return align(*two(kind), symmetry=symmetry_of(kind), method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_never_rises_and_the_function_stays(kind: str, method: str) -> None:
    if not any(w.group.permutes for w in symmetry_of(kind).wires):
        pytest.skip("nothing to permute")
    b, inputs = made(kind, seed=1)
    found = aligned(kind, method)
    for x, y in zip(found.history, found.history[1:], strict=False):
        assert y.sweep == 0 or y.objective < x.objective, "the first step of a start has no step before it"
    assert found.after <= found.before
    assert found.after == pytest.approx(min(s.objective for s in found.history), rel=1e-9)
    assert gap(copy.deepcopy(b), copy.deepcopy(found.model), *inputs) < 1e-8
    for part in found.per_wire:
        assert part.after <= found.after * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["MLP with ReLU", "MLP with tanh", "residual with batch norm"])
def test_it_is_the_squared_distance_of_the_parameters(kind: str) -> None:
    a, b = two(kind)
    sym = symmetry_of(kind)
    last = "head.bias" if kind.startswith("residual") else "c.bias"  # of the output, on which nothing acts
    constant = float((a.get_parameter(last) - b.get_parameter(last)).square().sum())
    found = align(a, b, symmetry=sym)
    assert found.before == pytest.approx(dense(a, b) - constant, rel=1e-12)
    assert found.after == pytest.approx(dense(a, found.model) - constant, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_aware_is_never_worse(kind: str) -> None:
    if not any(w.group.permutes for w in symmetry_of(kind).wires):
        pytest.skip("nothing to permute")
    plain, aware = (aligned(kind, method).after for method in METHODS)
    assert aware <= plain * (1 + 1e-12)
    if kind == "MLP with tanh":  # for scales see tests/align/test_scale_aware.py
        assert aware < 0.99 * plain


@pytest.mark.parametrize("seed", range(5))
def test_one_wire_against_all_permutations(seed: int) -> None:
    """One hidden layer: descent is exact, so it must find the best of all 720 orders."""
    torch.manual_seed(seed)
    a, b = (mlp(torch.nn.functional.gelu, (3, 6, 2)).double().requires_grad_(False) for _ in range(2))
    found = align(a, b, torch.zeros(1, 3, dtype=torch.float64), starts=1)
    costs = []
    for order in permutations(range(6)):
        p = list(order)
        moved = copy.deepcopy(b)
        with torch.no_grad():
            moved.a.weight.copy_(b.a.weight[p])
            moved.a.bias.copy_(b.a.bias[p])
            moved.b.weight.copy_(b.b.weight[:, p])
        costs.append(dense(a, moved))
    constant = float((a.b.bias - b.b.bias).square().sum())
    assert found.after == pytest.approx(min(costs) - constant, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_signs_and_orders_against_all_of_them(seed: int) -> None:
    """tanh: 24 orders and 16 sign patterns, all tried by hand."""
    torch.manual_seed(seed)
    a, b = (mlp(torch.tanh, (3, 4, 2)).double().requires_grad_(False) for _ in range(2))
    found = align(a, b, torch.zeros(1, 3, dtype=torch.float64), method="scale-aware")
    best = float("inf")
    for order in permutations(range(4)):
        p = list(order)
        for bits in range(16):
            s = torch.tensor([1.0 - 2 * (bits >> i & 1) for i in range(4)], dtype=torch.float64)
            cost = (a.a.weight - s[:, None] * b.a.weight[p]).square().sum()
            cost = (
                cost + (a.a.bias - s * b.a.bias[p]).square().sum() + (a.b.weight - s * b.b.weight[:, p]).square().sum()
            )
            best = min(best, float(cost))
    assert found.after == pytest.approx(best, rel=1e-12)


def random_terms(generator: torch.Generator) -> ScaleTerms:
    a, b = torch.randn(2, 200, 4, generator=generator, dtype=torch.float64)
    a = a + torch.randn(200, 1, generator=generator, dtype=torch.float64) * b
    return ScaleTerms((a * b).sum(-1), (a * a).sum(-1), (b * b).sum(-1))


@pytest.mark.parametrize("powers", [(1.0, -1.0), (1.0, 2.0, -1.0), (0.5, -2.0)])
def test_scales_against_a_fine_grid(powers: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = {p: random_terms(generator) for p in powers}

    def value(t: Tensor) -> Tensor:
        return sum(x.length_b * (2 * p * t).exp() - 2 * x.inner * (p * t).exp() for p, x in terms.items())  # type: ignore[return-value]

    def lengths_apart(t: Tensor) -> Tensor:
        return sum((x.length_a.sqrt() - x.length_b.sqrt() * (p * t).exp()).square() for p, x in terms.items())  # type: ignore[return-value]

    grid = torch.linspace(-6, 6, 24001, dtype=torch.float64)[:, None]
    step = float(grid[1] - grid[0])
    same = grid[lengths_apart(grid).argmin(0), 0]
    best = best_log_scale(terms)
    assert bool(((best >= same.clamp(max=0) - step) & (best <= same.clamp(min=0) + step)).all())
    free = grid[value(grid).argmin(0), 0]
    inside = torch.minimum(torch.maximum(free, same.clamp(max=0)), same.clamp(min=0))
    one_valley = (free - inside).abs() < step  # elsewhere the minimum lies outside and the end of the way is taken
    assert 20 < int(one_valley.sum()) < 180
    assert torch.allclose(best[one_valley], inside[one_valley], atol=2 * step)
    assert bool((value(best) <= value(torch.zeros_like(best)) + 1e-9).all())


def test_the_better_of_two_minima() -> None:
    """s² − 20 s + s⁻² − 18 s⁻¹ has minima near 1/9 and 10, and the search begins at the worse one."""
    written = ScaleTerms(*(torch.tensor([x], dtype=torch.float64) for x in (10 / 9, 100.0, 1 / 81)))
    read = ScaleTerms(*(torch.tensor([x], dtype=torch.float64) for x in (81.0, 81.0, 81.0)))
    scale = float(best_log_scale({1.0: written, -1.0: read}).exp()) / 9
    assert scale == pytest.approx(10, rel=0.02)


def test_a_scale_on_one_side_keeps_lengths_between_the_two() -> None:
    length = torch.tensor
    terms = ScaleTerms(
        length([0.1, -1.0, 3.9]).double(), length([1.0, 1.0, 4.0]).double(), length([4.0, 4.0, 4.0]).double()
    )
    scale = best_log_scale({1.0: terms}).exp()
    assert scale.tolist() == pytest.approx([0.5, 0.5, 1.0])  # the free minimum would be 0.025, none and 0.975


def test_partial_alignment_moves_only_what_it_may() -> None:
    a, b = two("MLP with ReLU")
    sym = symmetry_of("MLP with ReLU")
    first, second = (w.name for w in sym.wires)
    for method in METHODS:
        found = align(a, b, symmetry=sym, method=method, wires=[second])
        assert found.element.only(first).distance(sym.identity()) == 0
        assert found.element.distance(sym.identity()) > 0
        assert align(a, b, symmetry=sym, method=method).after <= found.after


def test_buffers_count_where_asked() -> None:
    a, b = two("residual with batch norm")
    sym = symmetry_of("residual with batch norm")
    with_buffers, without = (align(a, b, symmetry=sym, buffers=x).before for x in (True, False))
    extra = sum(
        float((x.double() - y.double()).square().sum())
        for (name, x), y in zip(a.named_buffers(), b.buffers(), strict=True)
        if "running" in name
    )
    assert with_buffers - without == pytest.approx(extra, rel=1e-9)


def test_the_start_that_is_best_after_a_sweep_is_followed_and_seeds_decide() -> None:
    a, b = two("residual with batch norm")
    sym = symmetry_of("residual with batch norm")
    more = align(a, b, symmetry=sym, starts=8)
    assert align(a, b, symmetry=sym, starts=8).element.distance(more.element) == 0
    reached: dict[str, float] = {}
    for step in more.history:
        reached[step.start] = step.objective
    last = reached.pop("best start")
    assert len(reached) == 8
    goes_on = next(s for s in more.history if s.start == "best start")
    assert goes_on.objective == pytest.approx(min(reached.values()), rel=1e-12)
    assert more.after == pytest.approx(last, rel=1e-12)
    assert last <= min(reached.values())


def test_positive_control_among_strangers() -> None:
    """002-S18: no two strangers are at distance zero, a permuted copy is."""
    sym = symmetry_of("MLP with GELU")
    nets = [made("MLP with GELU", seed=i)[0] for i in range(4)]
    copied = sym.act(permutations_of(sym.random(0)), nets[0])
    assert align(nets[0], copied, symmetry=sym).after == 0
    assert min(align(nets[0], other, symmetry=sym).after for other in nets[1:]) > 0.1


def test_nothing_given_is_changed() -> None:
    a, b = two("MLP with ReLU")
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (a, b)]
    align(a, b, symmetry=symmetry_of("MLP with ReLU"), method="scale-aware")
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_what_it_prints_and_stores() -> None:
    a, b = two("MLP with ReLU")
    found = align(a, b, symmetry=symmetry_of("MLP with ReLU"))
    assert "squared distance" in repr(found)
    stored = found.to_dict()
    assert stored["history"][0] == {"start": "identity", "sweep": 0, "wire": "", "objective": found.before, "own": None}
    assert {p["wire"] for p in stored["per_wire"]} == {w.name for w in found.symmetry.wires}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_unlike_networks_are_refused() -> None:
    x = torch.zeros(1, 3)
    with pytest.raises(MismatchError, match=r"'a.weight' has shape \(5, 3\) in the first and has shape \(6, 3\)"):
        align(mlp(torch.tanh), mlp(torch.tanh, (3, 6, 4, 2)), x)


def test_unknown_method_wire_and_count() -> None:
    a, b = two("MLP with ReLU")
    sym = symmetry_of("MLP with ReLU")
    with pytest.raises(it.InputError, match=r"Unknown method 'weight'\. Did you mean 'weights'\?"):
        align(a, b, symmetry=sym, method="weight")
    with pytest.raises(it.InputError, match=r"Unknown wire 'z'\..*The wires: a, b\."):
        align(a, b, symmetry=sym, wires=["z"])
    with pytest.raises(it.InputError, match="starts must be at least 1, but is 0"):
        align(a, b, symmetry=sym, starts=0)


def test_nothing_to_align() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(it.InputError, match="nothing to align: no wire of this network can be moved by 'weights'"):
        align(model, model, torch.zeros(1, 3))
    a, b = two("MLP with ReLU")
    with pytest.raises(it.InputError, match="nothing to align"):
        align(a, b, symmetry=symmetry_of("MLP with ReLU"), wires=[])


def test_options_of_a_wrong_kind_are_refused_and_functions_are_not() -> None:
    solver = SOLVERS["sinkhorn"]
    with pytest.raises(
        InputError, match=r"The option steps of the method 'sinkhorn' must be a whole number, but is 2.5"
    ):
        solver.settings("sinkhorn", {"steps": 2.5})
    with pytest.raises(InputError, match=r"relative of the method 'weights' must be True or False, but is 'false'"):
        SOLVERS["weights"].settings("weights", {"relative": "false"})

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    assert solver.settings("sinkhorn", {"loss": loss}).loss is loss


# -- Alignment, where changed code went unnoticed --


def test_lengths_and_inner_products_are_those_of_the_features_as_they_are() -> None:
    """Around means far from zero, in uneven batches of two tensors."""
    a, b = 3 + torch.randn(4, 60).double(), -2 + torch.randn(5, 60).double()
    products = CrossMoments()
    for name, start, end in (("x", 0, 7), ("y", 7, 20), ("x", 20, 60)):
        products.add(name, a[:, start:end], b[:, start:end])
    assert torch.allclose(products.inner(), a @ b.T, atol=1e-9)
    first, second = products.lengths()
    assert torch.allclose(first, a.square().sum(1), atol=1e-9)
    assert torch.allclose(second, b.square().sum(1), atol=1e-9)


def beside(seed: int) -> Net:
    """The input stands beside the hidden units: the head has columns that nothing moves, and others that move."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.cat([x, m.body(x).relu()], -1))

    torch.manual_seed(seed)
    return Net(forward, body=nn.Linear(3, 4, bias=False), head=nn.Linear(7, 2, bias=False))


def test_nothing_is_added_where_everything_moves() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    symmetry = it.symmetry(a, torch.randn(1, 3))
    assert unmoved_part(symmetry, dict(a.state_dict()), dict(b.state_dict())) == 0.0


def test_columns_that_nothing_moves_count_as_they_are() -> None:
    a, b = beside(0), beside(1)
    weights = [dict(model.state_dict()) for model in (a, b)]
    still = squared_distance(weights[0]["head.weight"][:, :3], weights[1]["head.weight"][:, :3])
    assert still > 0.1
    assert abs(unmoved_part(it.symmetry(a, torch.randn(2, 3)), *weights) - still) < 1e-6


def test_the_distance_counts_what_nothing_moves() -> None:
    a, b = beside(0), beside(1)
    found = it.align(a, b, torch.randn(2, 3))
    moved = dict(found.model.state_dict())
    apart = sum(squared_distance(tensor, moved[name]) for name, tensor in a.state_dict().items())
    assert abs(found.after - apart) < 1e-5 * apart


def test_the_rate_is_small_where_nothing_is_said() -> None:
    assert 0.001 < StraightThroughOptions().rate < 0.1


@pytest.mark.parametrize("method", ["straight-through", "sinkhorn"])
def test_a_search_begins_with_the_best_of_two_starts(method: str) -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    data = [(torch.randn(20, 3), torch.randint(2, (20,)))]
    plain = it.align(a, b, torch.zeros(1, 3))
    found = it.align(a, b, torch.zeros(1, 3), method=method, data=data)
    first, second = found.history[:2]
    assert (first.start, second.start) == ("identity", "weights")
    losses = [middle_loss(a, model, data[0]) for model in (b, plain.model, found.model)]
    assert [first.own, second.own] == pytest.approx(losses[:2], rel=1e-5)
    assert losses[2] <= min(losses[:2]) * (1 + 1e-5)


def middle_loss(a: nn.Module, b: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """The loss halfway between two networks."""
    return float(F.cross_entropy(it.interpolate(a, b, 0.5)(batch[0]), batch[1]).detach())


def test_pictures_of_matches_name_the_mean_correlation() -> None:
    a, b = (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2))
    found = matched_correlations(a, b, [(torch.randn(50, 3), torch.zeros(50))], torch.zeros(1, 3))
    titles = " ".join(axes.get_title() for axes in found.plot().axes)
    (wire,) = found.wires
    assert wire.mean is not None
    assert f"mean {wire.mean:.2f}" in titles
