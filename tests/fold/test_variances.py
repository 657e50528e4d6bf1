"""Data-free REPAIR of folded networks: against known and measured variances, and no change for equal members."""

import math
from typing import Any, cast

import pytest
import torch
from digit_networks import digits, normed_convolutions
from networks import Net, gap
from planted_networks import NETWORKS, lively, planted
from scipy.integrate import quad
from torch import Tensor, nn

from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.prepare import prepare
from intertwine.fold.variances import EstimatedMoments, propagate_gaussian, repair_variances

X = torch.randn(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu"])
def test_moments_of_a_function_of_gaussian_numbers(name: str) -> None:
    function = {"relu": torch.relu, "tanh": torch.tanh, "gelu": nn.functional.gelu}[name]
    means, deviations = torch.tensor([-1.0, 0.0, 0.5]).double(), torch.tensor([0.3, 1.0, 2.0]).double()
    found = propagate_gaussian(function, means, deviations.square())
    for i, (m, s) in enumerate(zip(means.tolist(), deviations.tolist(), strict=True)):

        def power(z: float, p: int, m: float = m, s: float = s) -> float:
            return float(function(torch.tensor(z))) ** p * math.exp(-((z - m) ** 2) / (2 * s**2)) / (s * math.tau**0.5)

        powers = [quad(power, m - 9 * s, m + 9 * s, (p,), points=[0.0], limit=200)[0] for p in (1, 2)]
        assert float(found[0][i]) == pytest.approx(powers[0], abs=2e-5)
        assert float(found[1][i]) == pytest.approx(powers[1] - powers[0] ** 2, abs=2e-5)


def test_moments_of_layers() -> None:
    """With BatchNorm they are those of its γ and β behind the ReLU; without, they follow from the weights."""
    torch.manual_seed(0)
    normed: Any = lively(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(),
                                       nn.Linear(5, 2)))  # fmt: skip
    moments = EstimatedMoments(prepare(normed, ((X,), {})))
    beta, gamma = normed[1].bias.detach(), normed[1].weight.detach().abs()
    normal = torch.distributions.Normal(0.0, 1.0)
    above, here = normal.cdf(beta / gamma), normal.log_prob(beta / gamma).exp()
    mean = beta * above + gamma * here  # of a rectified Gaussian
    second = (beta**2 + gamma**2) * above + beta * gamma * here
    assert torch.allclose(moments.features(0)[0], mean, atol=1e-4)
    assert torch.allclose(moments.features(0)[1], second - mean**2, atol=1e-4)
    weight, bias = normed[3].weight.detach(), normed[3].bias.detach()
    expected = propagate_gaussian(torch.relu, weight @ mean + bias, weight.square() @ (second - mean**2))
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(moments.features(1), expected, strict=True))


def test_inputs_as_assumed_give_exactly_the_mean_variance() -> None:
    """Uncorrelated inputs of one variance, no BatchNorm: every merged feature has the variance of its members."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = fold_groups(model, X, groups={"0": [(1, 4, 6), (0, 2)]})
    small: Any = repair_variances(plain).model
    variance = model[0].weight.detach().square().sum(1)
    expected = [variance[list(g)].mean() for g in plain.groups["0"]]
    assert torch.allclose(small[0].weight.square().sum(1), torch.stack(expected))
    assert torch.equal(small[0].bias, cast(Any, plain.model)[0].bias)
    assert torch.equal(small[2].weight, cast(Any, plain.model)[2].weight)
    ratio = small[0].weight / cast(Any, plain.model)[0].weight
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))  # rows only become longer
    assert torch.allclose(ratio[[2, 3, 4]], torch.ones(3, 4).double())  # features 3, 5 and 7 stand for themselves


def test_inputs_count_by_how_much_they_vary() -> None:
    """The second layer reads features of very different γ: the repair is right for those, not for equal ones."""
    torch.manual_seed(0)
    model: Any = lively(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=0.0), nn.ReLU(), nn.Linear(6, 3),
                                      nn.BatchNorm1d(3, eps=0.0), nn.ReLU(), nn.Linear(3, 2)))  # fmt: skip
    with torch.no_grad():
        model[1].bias.fill_(20.0)  # so that the ReLU does nothing
        model[1].weight.copy_(torch.tensor([3.0, 2.0, 1.0, 0.1, 0.01, 0.01]))
        model[4].weight.abs_()
    inputs = model[1].weight.detach().square()
    own = (model[3].weight * (model[4].weight / model[4].running_var.sqrt())[:, None]).detach()
    folded: Any = repair_variances(fold_groups(model, X, groups={"3": [(0, 2)]})).model
    new = (folded[3].weight * (folded[4].weight / folded[4].running_var.sqrt())[:, None]).detach()
    wanted = (own.square() @ inputs)[[0, 2]].mean() * 4  # rows are summed: twice the feature
    assert torch.allclose(new.square() @ inputs, torch.stack([wanted, (own.square() @ inputs)[1]]))
    assert torch.allclose(folded[4].weight[0], 2 * model[4].weight[[0, 2]].square().mean().sqrt())
    assert torch.allclose(folded[4].bias[0], model[4].bias[[0, 2]].sum())


def test_the_mean_of_a_layer_with_batch_norm_stays() -> None:
    torch.manual_seed(0)
    model: Any = lively(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)))
    x = torch.randn(500, 4, dtype=torch.float64)
    with torch.no_grad():
        model[1].running_mean.copy_(model[0](x).mean(0))
        model[1].running_var.copy_(model[0](x).var(0))
    folded: Any = repair_variances(fold_groups(model, X, groups={"0": [(0, 3), (1, 2, 5)]})).model
    written = folded[1](folded[0](x)).detach()
    assert torch.allclose(written.mean(0), folded[1].bias, atol=1e-9)
    before = model[1](model[0](x)).detach().var(0)
    counts = torch.tensor([2.0, 3.0, 1.0])
    expected = torch.stack([before[[0, 3]].mean(), before[[1, 2, 5]].mean(), before[4]]) * counts.double() ** 2
    assert torch.allclose(written.var(0), expected, rtol=0.15)  # the inputs are nearly uncorrelated


@pytest.mark.parametrize("name", ["mlp", "mlp-tanh", "mlp-prelu", "tiny10", "mobile", "dense"])
def test_nothing_changes_where_merged_features_are_the_same(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, _ = planted(lively(make()), x.double())
    plain = fold(twin, x.double(), beta=1e-7)
    mended = repair_variances(plain)
    assert mended.groups == plain.groups
    assert gap(twin, mended.model, x.double()) < 1e-9


def test_a_residual_layer_that_reads_its_own_wire_is_repaired() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.c((h + m.b(h)).relu())

    model = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 2)).double()
    plain = fold(model, X, beta=0.7)
    small: Any = repair_variances(plain).model
    lengths = [cast(Any, m).a.weight.detach().square().sum() for m in (plain.model, small)]
    assert plain.removed > 0
    assert lengths[1] > lengths[0]


def test_rows_that_cancel_stay() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight[1] = -model[0].weight[0]
    small = repair_variances(fold_groups(model, X, groups={"0": [(0, 1)]})).model
    assert torch.equal(cast(Any, small)[0].weight[0], torch.zeros(4, dtype=torch.float64))


def test_variances_of_a_trained_network_come_back() -> None:
    """Measured on digits: what BatchNorm divides by is nearer to what is there."""
    model = normed_convolutions(1)[0]
    ((images, _),) = digits()[1]
    groups = {"0": [(0, 1, 2), (3, 4), (5, 6, 7, 8)], "4": [tuple(range(i, i + 3)) for i in range(0, 24, 3)]}
    plain = fold_groups(model, images[:2], groups=groups)
    off = []
    for small in (plain.model, repair_variances(plain).model):
        written: list[Tensor] = []
        norms: list[Any] = [m for m in small.modules() if isinstance(m, nn.BatchNorm2d)]
        for module in norms:
            module.register_forward_hook(lambda m, _, y, to=written: to.append(y.var((0, 2, 3)) / m.weight**2))
        with torch.no_grad():
            small(images[:300])
        off.append([v.log().square().mean().sqrt().item() for v in written])
    assert off[1][0] < 0.5 * off[0][0]
    assert off[1][1] < 0.8 * off[0][1]
