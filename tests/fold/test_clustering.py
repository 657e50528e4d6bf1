"""Folding by clustering: k-means against scipy and brute force, activations against dense float64 features."""

from importlib import import_module
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from networks import gap
from planted_networks import IMAGES, NETWORKS, lively, merged_sets, planted
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from intertwine import zoo
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError
from intertwine.fold.clustering import (
    StopRule,
    _initial_centers,
    compared_rows,
    fold_activations,
    fold_kmeans,
    inner_products,
    kmeans_labels,
    merge_nearest,
    within_cluster_scatter,
)
from intertwine.fold.fold import fold_groups
from intertwine.fold.merging import MergeState
from intertwine.fold.options import Options
from intertwine.fold.prepare import prepare

# -- k-means -----------------------------------------------------------------------------------------------------------

X = torch.randn(3, 4, dtype=torch.float64)


def net(width: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 2)).double()


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_small_problems_are_solved_as_by_trying_everything() -> None:
    for seed in range(3):
        rows = np.random.default_rng(seed).normal(size=(7, 2))
        best = min(
            sum(((rows[np.equal(own, c)] - rows[np.equal(own, c)].mean(0)) ** 2).sum() for c in range(3))
            for own in product(range(3), repeat=7)
            if len(set(own)) == 3
        )
        labels = kmeans_labels(rows, 3, restarts=20)
        assert within_cluster_scatter(rows, labels) == pytest.approx(best)
        assert sorted(set(labels.tolist())) == [0, 1, 2]


def test_as_good_as_scipys_own_starts_and_at_rest() -> None:
    rows = np.random.default_rng(0).normal(size=(90, 12)) + 4 * np.random.default_rng(1).integers(0, 2, (90, 12))
    labels = kmeans_labels(rows, 30)
    theirs = []
    for seed in range(3):
        centers, found = kmeans2(rows, 30, iter=100, minit="++", rng=np.random.default_rng(seed))
        theirs.append(((rows - centers[found]) ** 2).sum())
    assert within_cluster_scatter(rows, labels) <= 1.05 * min(theirs)
    means = np.stack([rows[labels == c].mean(0) for c in range(30)])
    assert np.array_equal(((rows[:, None] - means[None]) ** 2).sum(-1).argmin(1), labels)  # a fixed point


def test_no_cluster_is_empty_and_the_same_rows_go_together() -> None:
    rng = np.random.default_rng(0)
    base = np.concatenate([rng.normal(size=(4, 3)), 50 + 1e-2 * rng.normal(size=(16, 3))])
    rows = np.concatenate([base, base[::-1]])
    for width in (1, 3, 8, 19, 20):
        labels = kmeans_labels(rows, width)
        assert len(set(labels.tolist())) == width
        assert np.array_equal(labels[:20], labels[20:][::-1])
    assert len(set(kmeans_labels(rows, 30).tolist())) == 20  # no more than there are different ones


def test_empty_clusters_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All centers start in one place: k-means alone leaves all clusters but one empty."""
    kmeans = import_module("intertwine.fold.clustering")
    monkeypatch.setattr(kmeans, "_initial_centers", lambda rows, width, rng: np.full((width, 2), 100.0))
    rows = np.array([[0.0, 0], [0, 1], [9, 9], [9, 8], [-7, 0]])
    assert kmeans_labels(rows, 3).tolist() == [0, 0, 1, 1, 2]


def test_starts_are_initial_centers() -> None:
    """A crowd and two rows far away from it: each has a center from the start, whatever the seed."""
    rows = np.concatenate([1e-3 * np.random.default_rng(0).normal(size=(50, 2)), [[100.0, 0], [0, 100.0]]])
    for seed in range(10):
        centers = _initial_centers(rows, 3, np.random.default_rng(seed))
        assert {(x > 50, y > 50) for x, y in centers.tolist()} == {(False, False), (True, False), (False, True)}


def test_rows_keep_their_distances_in_fewer_coordinates() -> None:
    prepared = prepare(zoo.build("tiny10"), ((IMAGES,), {}))
    merging = MergeState(prepared.wires, Options(rows="ward"))
    rows = compared_rows(merging, 3)
    assert rows.shape == (32, 32)
    live = merging.distances(3)
    assert np.allclose(((rows[:, None] - rows[None]) ** 2).sum(-1), live.table, atol=1e-9 * live.largest)


# -- folding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp-tanh", "tiny10", "mobile", "dense"])
@pytest.mark.parametrize("repair", [None, "variances"])
def test_planted_duplicates_are_merged_exactly(name: str, repair: str | None) -> None:
    """As many features are asked for as are different: those that are the same go together, and nothing else does."""
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, groups = planted(lively(make()), x.double())
    sizes = {n: sum(map(len, g)) for n, g in fold_groups(twin, x.double(), groups={}).groups.items()}
    folded = fold_kmeans(twin, x.double(), widths={n: sizes[n] - 2 for n in groups}, repair=repair)
    assert {n: g for n, g in merged_sets(dict(folded.groups)).items() if g} == groups
    assert gap(twin, folded.model, x.double()) < 1e-9


def test_clusters_are_merged_as_groups_are_layer_by_layer() -> None:
    """By hand: the rows of the first layer, then those of the second as the first left them."""
    model = net()
    folded = fold_kmeans(model, X, widths={"0": 4, "2": 3})
    first = kmeans_labels(torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().numpy(), 4)
    halfway: Any = fold_groups(model, X, groups=_groups("0", first)).model
    second = kmeans_labels(torch.cat([halfway[2].weight, halfway[2].bias[:, None]], 1).detach().numpy(), 3)
    expected = fold_groups(model, X, groups=_groups("0", first) | _groups("2", second))
    assert folded.groups == expected.groups
    assert gap(folded.model, expected.model, X) == 0.0


def _groups(name: str, labels: Any) -> dict[str, list[list[int]]]:
    return {name: [np.flatnonzero(labels == c).tolist() for c in set(labels.tolist())]}


def test_a_share_is_one_of_every_wire_and_a_seed_says_which() -> None:
    model = zoo.build("tiny10")
    folded = [fold_kmeans(model, IMAGES, widths=0.4, seed=seed) for seed in (0, 0, 1)]
    assert {n: (w.before, w.after) for n, w in folded[0].widths.items()} == {
        "conv1": (16, 6), "conv2": (16, 6), "conv3": (32, 13), "conv4": (32, 13),
        "conv5": (32, 13), "conv6": (64, 26), "conv7": (64, 26), "conv8": (64, 26),
    }  # fmt: skip
    assert folded[0].groups == folded[1].groups != folded[2].groups
    assert fold_kmeans(net(), X, widths=0.01).widths["0"].after == 1


def test_bad_input() -> None:
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(
            InputError, match=r"widths must be above 0 and below 1, the share of its features that every wire keeps"
        ):
            fold_kmeans(net(), X, widths=share)
    with pytest.raises(InputError, match=r"A width is given for '4', which is no wire .*one of: 0, 2\."):
        fold_kmeans(net(), X, widths={"4": 2})
    for width in (0, 9):
        with pytest.raises(InputError, match=rf"width of the wire '0' must be from 1 to 8, but is {width}"):
            fold_kmeans(net(), X, widths={"0": width})
    with pytest.raises(InputError, match=r"Unknown repair 'means'. Choose None or 'variances'"):
        fold_kmeans(net(), X, widths=0.5, repair="means")
    with pytest.raises(InputError, match="restarts must be at least 1, but is 0"):
        fold_kmeans(net(), X, widths=0.5, restarts=0)
    assert "nothing to fold" in repr(fold_kmeans(nn.Linear(4, 2).double(), X, widths=0.5))


# -- Activations -------------------------------------------------------------------------------------------------------

SAMPLES = torch.randn(40, 4, dtype=torch.float64)


def perceptron() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def normed() -> Any:
    torch.manual_seed(0)
    parts = (nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))
    return nn.Sequential(*parts).double()


@pytest.mark.parametrize("at", ["post", "pre"])
def test_inner_products_are_those_of_the_features(at: str) -> None:
    model = perceptron()
    found = inner_products(prepare(model, ((SAMPLES[:2],), {})), [(SAMPLES[:15], None), (SAMPLES[15:], None)], at)
    with torch.no_grad():
        features = {"0": model[: 1 + (at == "post")](SAMPLES), "2": model[: 3 + (at == "post")](SAMPLES)}
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
        assert {tuple(g) for g in merge_nearest(values @ values.T, StopRule(width=width))} == expected


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
    assert {tuple(g) for g in merge_nearest(values @ values.T, StopRule(beta=0.3))} == {
        tuple(sorted(g)) for g in groups
    }


@pytest.mark.parametrize("name", ["mlp", "mlp-tanh", "tiny10", "mobile"])
def test_planted_duplicates_are_merged_exactly_fold_activations(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, groups = planted(lively(make()), x.double())
    folded = fold_activations(twin, [x.double()], beta=1e-10)
    found = merged_sets(dict(folded.groups))
    assert all(any(group <= own for own in found[n]) for n, own in groups.items() for group in own)
    assert gap(twin, folded.model, x.double()) < 1e-8


def test_features_that_only_compute_the_same_are_found() -> None:
    """Rows that differ where the data never goes: no rule on weights would merge them."""
    model = perceptron()
    with torch.no_grad():
        model[0].weight[3, :3], model[0].bias[3] = model[0].weight[1, :3], model[0].bias[1]
    x = SAMPLES.clone()
    x[:, 3] = 0.0
    folded = fold_activations(model, [(x, None)], beta={"0": 1e-9})
    assert merged_sets(dict(folded.groups)) == {"0": {frozenset({1, 3})}, "2": set()}
    assert gap(model, folded.model, x) < 1e-12
    assert gap(model, folded.model, SAMPLES) > 1e-3


def test_labels_and_batches_play_no_part_and_the_model_stays() -> None:
    model = perceptron()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = SAMPLES
    batches = (batch for batch in (x[:30], x[30:]))
    runs: list[Any] = [[(x, torch.zeros(40))], [x[:20], x[20:]], batches, [(x, "any word")]]
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
    plain, mended = (
        fold_activations(perceptron(), [SAMPLES], widths=0.5, repair=repair).model for repair in (None, "variances")
    )
    lengths = [cast(Any, m)[0].weight.detach().norm() for m in (plain, mended)]
    assert lengths[1] > 1.05 * lengths[0]


def test_bad_input_fold_activations() -> None:
    with pytest.raises(InputError, match="Neither beta nor widths is given"):
        fold_activations(perceptron(), [SAMPLES])
    with pytest.raises(InputError, match="Both beta and widths are given"):
        fold_activations(perceptron(), [SAMPLES], beta=0.1, widths=0.5)
    with pytest.raises(InputError, match=r"beta must be above 0 and below 1, but is 2\.0"):
        fold_activations(perceptron(), [SAMPLES], beta=2.0)
    with pytest.raises(InputError, match=r"widths must be above 0 and below 1.*but is 1\.0"):
        fold_activations(perceptron(), [SAMPLES], widths=1.0)
    with pytest.raises(InputError, match="A beta is given for '7'"):
        fold_activations(perceptron(), [SAMPLES], beta={"7": 0.5})
    with pytest.raises(InputError, match="A width is given for '7'"):
        fold_activations(perceptron(), [SAMPLES], widths={"7": 5})
    with pytest.raises(InputError, match="Unknown statistics 'again'"):
        fold_activations(normed(), [SAMPLES], widths=0.5, statistics="again")
    with pytest.raises(
        InputError, match=r"needs BatchNorm with running statistics, but the network has none\. Leave it out"
    ):
        fold_activations(perceptron(), [SAMPLES], widths=0.5, statistics="reset")
    with pytest.raises(InputError, match="a generator can be read only once"):
        fold_activations(normed(), iter([SAMPLES]), widths=0.5, statistics="reset")
    with pytest.raises(InputError, match="The data holds no batches"):
        fold_activations(perceptron(), [], widths=0.5)
    with pytest.raises(InputError, match="data must be an iterable"):
        fold_activations(perceptron(), SAMPLES, widths=0.5)
    with pytest.raises(InputError, match=r"Unknown at='after'. Choose 'post'"):
        fold_activations(perceptron(), [SAMPLES], widths=0.5, at="after")


def test_zoo_networks_fold() -> None:
    model = zoo.build("tiny10").eval()
    folded = fold_activations(model, [torch.randn(4, 3, 32, 32)], widths=0.5)
    assert {w.share for w in folded.widths.values()} == {0.5}


def test_clusters_far_apart_are_all_found_at_the_first_start() -> None:
    """k-means++ draws by squared distance: with twelve tight clusters a start by chance would miss some."""
    rng = np.random.default_rng(0)
    centers = 100 * rng.standard_normal((12, 5))
    truth = np.repeat(np.arange(12), 9)
    rows = centers[truth] + 0.01 * rng.standard_normal((len(truth), 5))
    for seed in range(5):
        labels = kmeans_labels(rows, 12, seed, restarts=1)
        assert len({(int(a), int(b)) for a, b in zip(truth, labels, strict=True)}) == 12
