"""Folding by k-means: clusters against scipy and brute force, planted duplicates, seeds, widths and bad input."""

from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from networks import gap
from scipy.cluster.vq import kmeans2
from test_fold_exact import IMAGES, NETWORKS, lively, merged_sets, planted
from torch import nn

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.fold.fold import fold_groups
from intertwine.fold.kmeans import _spread_out, cluster, compared_rows, fold_kmeans, scatter
from intertwine.fold.merging import Merging
from intertwine.fold.options import Options
from intertwine.fold.prepared import prepare

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
        labels = cluster(rows, 3, restarts=20)
        assert scatter(rows, labels) == pytest.approx(best)
        assert sorted(set(labels.tolist())) == [0, 1, 2]


def test_as_good_as_scipys_own_starts_and_at_rest() -> None:
    rows = np.random.default_rng(0).normal(size=(90, 12)) + 4 * np.random.default_rng(1).integers(0, 2, (90, 12))
    labels = cluster(rows, 30)
    theirs = []
    for seed in range(3):
        centers, found = kmeans2(rows, 30, iter=100, minit="++", rng=np.random.default_rng(seed))
        theirs.append(((rows - centers[found]) ** 2).sum())
    assert scatter(rows, labels) <= 1.05 * min(theirs)
    means = np.stack([rows[labels == c].mean(0) for c in range(30)])
    assert np.array_equal(((rows[:, None] - means[None]) ** 2).sum(-1).argmin(1), labels)  # a fixed point


def test_no_cluster_is_empty_and_the_same_rows_go_together() -> None:
    rng = np.random.default_rng(0)
    base = np.concatenate([rng.normal(size=(4, 3)), 50 + 1e-2 * rng.normal(size=(16, 3))])
    rows = np.concatenate([base, base[::-1]])
    for width in (1, 3, 8, 19, 20):
        labels = cluster(rows, width)
        assert len(set(labels.tolist())) == width
        assert np.array_equal(labels[:20], labels[20:][::-1])
    assert len(set(cluster(rows, 30).tolist())) == 20  # no more than there are different ones


def test_empty_clusters_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All centers start in one place: k-means alone leaves all clusters but one empty."""
    kmeans = import_module("intertwine.fold.kmeans")
    monkeypatch.setattr(kmeans, "_spread_out", lambda rows, width, rng: np.full((width, 2), 100.0))
    rows = np.array([[0.0, 0], [0, 1], [9, 9], [9, 8], [-7, 0]])
    assert cluster(rows, 3).tolist() == [0, 0, 1, 1, 2]


def test_starts_are_spread_out() -> None:
    """A crowd and two rows far away from it: each has a center from the start, whatever the seed."""
    rows = np.concatenate([1e-3 * np.random.default_rng(0).normal(size=(50, 2)), [[100.0, 0], [0, 100.0]]])
    for seed in range(10):
        centers = _spread_out(rows, 3, np.random.default_rng(seed))
        assert {(x > 50, y > 50) for x, y in centers.tolist()} == {(False, False), (True, False), (False, True)}


def test_rows_keep_their_distances_in_fewer_coordinates() -> None:
    prepared = prepare(zoo.build("tiny10"), ((IMAGES,), {}))
    merging = Merging(prepared.wires, Options(rows="ward"))
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
    first = cluster(torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().numpy(), 4)
    halfway: Any = fold_groups(model, X, groups=_groups("0", first)).model
    second = cluster(torch.cat([halfway[2].weight, halfway[2].bias[:, None]], 1).detach().numpy(), 3)
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
            InputError, match=r"widths=.* was asked for. It is the share of the features that every wire"
        ):
            fold_kmeans(net(), X, widths=share)
    with pytest.raises(InputError, match=r"A width was given for '4', which is no wire that can be folded.*are 0, 2\."):
        fold_kmeans(net(), X, widths={"4": 2})
    for width in (0, 9):
        with pytest.raises(InputError, match=rf"'0' was to keep {width} features; it has 8, and one must stay"):
            fold_kmeans(net(), X, widths={"0": width})
    with pytest.raises(InputError, match=r"repair='means' was asked for\. It is None or 'variances'"):
        fold_kmeans(net(), X, widths=0.5, repair="means")
    with pytest.raises(InputError, match="restarts=0 was asked for"):
        fold_kmeans(net(), X, widths=0.5, restarts=0)
    assert "nothing to fold" in repr(fold_kmeans(nn.Linear(4, 2).double(), X, widths=0.5))
