"""Folding by activations: distances against dense float64 features, planted duplicates, statistics, and bad input."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from networks import gap
from scipy.cluster.hierarchy import fcluster, linkage
from test_fold_exact import NETWORKS, lively, merged_sets, planted
from torch import Tensor, nn

from intertwine import zoo
from intertwine.connect.statistics import reset_statistics
from intertwine.errors import InputError
from intertwine.fold.activations import Limit, fold_activations, inner_products, nearest
from intertwine.fold.prepared import prepare

X = torch.randn(40, 4, dtype=torch.float64)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def normed() -> Any:
    torch.manual_seed(0)
    parts = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    return nn.Sequential(*parts).double()


@pytest.mark.parametrize("at", ["post", "pre"])
def test_inner_products_are_those_of_the_features(at: str) -> None:
    model = net()
    found = inner_products(prepare(model, ((X[:2],), {})), [(X[:15], None), (X[15:], None)], at)
    with torch.no_grad():
        features = {"0": model[: 1 + (at == "post")](X), "2": model[: 3 + (at == "post")](X)}
    for name, values in features.items():
        assert np.allclose(found[name], (values.T @ values).numpy())


def test_positions_of_images_are_samples() -> None:
    model, x = normed().eval(), torch.randn(5, 2, 7, 7, dtype=torch.float64)
    found = inner_products(prepare(model, ((x,), {})), [(x, None)])["0"]
    with torch.no_grad():
        values = model[:3](x).movedim(1, 0).flatten(1)
    assert np.allclose(found, (values @ values.T).numpy())


def test_groups_are_those_of_ward_clustering() -> None:
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=(6, 30)), 4, 0) + rng.normal(size=(24, 30))
    tree = linkage(values, "ward")
    for width in (6, 11, 20):
        labels = fcluster(tree, width, "maxclust")
        expected = {tuple(np.flatnonzero(labels == c).tolist()) for c in set(labels.tolist())}
        assert {tuple(g) for g in nearest(values @ values.T, Limit(width=width))} == expected


def test_the_stop_rule_is_that_of_fold() -> None:
    """By hand, with all distances measured anew at each step."""
    values = np.random.default_rng(1).normal(size=(12, 5))
    groups = [[i] for i in range(12)]
    means = values.copy()
    largest = ((means[:, None] - means[None]) ** 2).sum(-1).max()
    while True:
        sizes = np.array([len(g) for g in groups])
        apart = ((means[:, None] - means[None]) ** 2).sum(-1) * 2 / (1 / sizes[:, None] + 1 / sizes[None])
        apart += np.diag([np.inf] * len(means))
        if apart.min() > 0.3 * largest:
            break
        m, n = sorted(np.unravel_index(apart.argmin(), apart.shape))
        groups[m] += groups.pop(n)
        means = np.stack([values[g].mean(0) for g in groups])
    assert 1 < len(groups) < 11
    assert {tuple(g) for g in nearest(values @ values.T, Limit(beta=0.3))} == {tuple(sorted(g)) for g in groups}


@pytest.mark.parametrize("name", ["mlp", "mlp-tanh", "tiny10", "mobile"])
def test_planted_duplicates_are_merged_exactly(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, groups = planted(lively(make()), x.double())
    folded = fold_activations(twin, [x.double()], beta=1e-10)
    found = merged_sets(dict(folded.groups))
    assert all(any(group <= own for own in found[n]) for n, own in groups.items() for group in own)
    assert gap(twin, folded.model, x.double()) < 1e-8


def test_features_that_only_compute_the_same_are_found() -> None:
    """Rows that differ where the data never goes: no rule on weights would merge them."""
    model = net()
    with torch.no_grad():
        model[0].weight[3, :3], model[0].bias[3] = model[0].weight[1, :3], model[0].bias[1]
    x = X.clone()
    x[:, 3] = 0.0
    folded = fold_activations(model, [(x, None)], beta={"0": 1e-9})
    assert merged_sets(dict(folded.groups)) == {"0": {frozenset({1, 3})}, "2": set()}
    assert gap(model, folded.model, x) < 1e-12
    assert gap(model, folded.model, X) > 1e-3


def test_labels_and_batches_play_no_part_and_the_model_stays() -> None:
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    runs: list[Any] = [
        [(X, torch.zeros(40))], [X[:20], X[20:]], (batch for batch in (X[:30], X[30:])), [(X, "any word")],
    ]  # fmt: skip
    folded = [fold_activations(model, data, widths=0.5) for data in runs]
    assert all(f.groups == folded[0].groups for f in folded)
    assert {n: w.after for n, w in folded[0].widths.items()} == {"0": 4, "2": 3}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_statistics_are_those_of_the_folded_network() -> None:
    model, x = normed().eval(), 3 + torch.randn(16, 2, 7, 7, dtype=torch.float64)
    folded = fold_activations(model, [x], widths=0.5, statistics="reset")
    small: Any = folded.model
    written: Tensor = small[0](x).detach()
    assert torch.allclose(small[1].running_mean, written.mean((0, 2, 3)))
    assert torch.allclose(small[1].running_var, written.var((0, 2, 3)))
    plain = fold_activations(model, [x], widths=0.5)
    again: Any = reset_statistics(plain.model, [(x, None)])
    assert torch.equal(again[1].running_var, small[1].running_var)
    assert not torch.allclose(cast(Any, plain.model)[1].running_var, small[1].running_var)
    assert "6 → 3" in repr(folded)


def test_variances_can_be_repaired() -> None:
    plain, mended = (fold_activations(net(), [X], widths=0.5, repair=repair).model for repair in (None, "variances"))
    lengths = [cast(Any, m)[0].weight.detach().norm() for m in (plain, mended)]
    assert lengths[1] > 1.05 * lengths[0]


def test_bad_input() -> None:
    with pytest.raises(InputError, match="Neither beta nor widths was given"):
        fold_activations(net(), [X])
    with pytest.raises(InputError, match="Both beta and widths were given"):
        fold_activations(net(), [X], beta=0.1, widths=0.5)
    with pytest.raises(InputError, match=r"beta=2\.0 was asked for"):
        fold_activations(net(), [X], beta=2.0)
    with pytest.raises(InputError, match=r"widths=1\.0 was asked for"):
        fold_activations(net(), [X], widths=1.0)
    with pytest.raises(InputError, match="A beta was given for '7'"):
        fold_activations(net(), [X], beta={"7": 0.5})
    with pytest.raises(InputError, match="A width was given for '7'"):
        fold_activations(net(), [X], widths={"7": 5})
    with pytest.raises(InputError, match="statistics='again' was asked for"):
        fold_activations(normed(), [X], widths=0.5, statistics="again")
    with pytest.raises(InputError, match=r"has no BatchNorm layer with running statistics\. Leave it out"):
        fold_activations(net(), [X], widths=0.5, statistics="reset")
    with pytest.raises(InputError, match="a generator can be read only once"):
        fold_activations(normed(), iter([X]), widths=0.5, statistics="reset")
    with pytest.raises(InputError, match="The data holds no batches"):
        fold_activations(net(), [], widths=0.5)
    with pytest.raises(InputError, match="data must be an iterable"):
        fold_activations(net(), X, widths=0.5)
    with pytest.raises(InputError, match="at='after' was asked for"):
        fold_activations(net(), [X], widths=0.5, at="after")


def test_zoo_networks_fold() -> None:
    model = zoo.build("tiny10").eval()
    folded = fold_activations(model, [torch.randn(4, 3, 32, 32)], widths=0.5)
    assert {w.share for w in folded.widths.values()} == {0.5}
