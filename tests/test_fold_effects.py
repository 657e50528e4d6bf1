"""Features compared by their effect: rows of one length, weighed by how much they are read; the function untouched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor, nn

from intertwine import zoo
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.merging import Merging
from intertwine.fold.options import Options
from intertwine.fold.prepared import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net(act: Callable[[], nn.Module] = nn.ReLU) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), act(), nn.Linear(12, 3)).double()


def gap(one: nn.Module, other: nn.Module, x: Tensor = X) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).norm() / one(x).norm())


@pytest.mark.parametrize("name", ["resnet20", "vgg11_bn"])
def test_balancing_is_undone_where_nothing_is_merged(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, width=0.25).eval()
    prepared = prepare(model, ((torch.randn(2, 3, 32, 32),), {}))
    before = {k: v.clone() for k, v in prepared.bench.weights().items()}
    merging = Merging(prepared.wires, Options(rows="effect"))
    changed = prepared.bench.weights()
    assert any(not torch.allclose(changed[k], v) for k, v in before.items())
    merging.settle()
    after = prepared.bench.weights()
    assert all(torch.allclose(after[k], v, rtol=1e-10, atol=1e-12) for k, v in before.items())


def test_one_merged_wire_leaves_the_others_as_they_are() -> None:
    """Balanced wires that are not merged come back bit for bit in the smaller network."""
    torch.manual_seed(0)
    model: Any = zoo.build("resnet20", width=0.25).eval()
    x = torch.randn(2, 3, 32, 32)
    inner = "layer3.2.conv1"
    with torch.no_grad():
        model.layer3[2].conv2.weight[:, 5] = 0.0
    folded: Any = fold(model, x, beta={inner: 1e-9})
    assert folded.widths[inner].after == folded.widths[inner].before - 1
    assert gap(model, folded.model, x) < 1e-5
    assert torch.equal(folded.model.conv1.weight, model.conv1.weight)
    assert torch.equal(folded.model.layer3[2].bn2.running_var, model.layer3[2].bn2.running_var)


def test_features_that_are_the_same_up_to_a_scale() -> None:
    for act, merges in ((nn.ReLU, True), (nn.Tanh, False)):
        model = net(act)
        with torch.no_grad():
            model[0].weight[7], model[0].bias[7] = 3 * model[0].weight[2], 3 * model[0].bias[2]
        folded = fold(model, X, beta=1e-9)
        assert ((2, 7) in folded.groups["0"]) == merges
        assert gap(model, folded.model) < 1e-10
        assert (2, 7) not in fold(model, X, beta=1e-9, rows="ward").groups["0"]


def test_a_slope_of_its_own_has_no_part_in_the_length() -> None:
    """PReLU: the same up to a scale, with the same slope; with another slope they are not the same."""
    for slope, merges in ((0.3, True), (0.9, False)):
        model = net(lambda: nn.PReLU(12))
        with torch.no_grad():
            model[1].weight[2], model[1].weight[7] = 0.3, slope
            model[0].weight[7], model[0].bias[7] = 3 * model[0].weight[2], 3 * model[0].bias[2]
        folded = fold(model, X, beta=1e-9)
        assert ((2, 7) in folded.groups["0"]) == merges
        assert gap(model, folded.model) < 1e-10


def test_what_is_not_read_is_merged_and_moves_nothing() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[:, 3] = 0.0
    folded = fold(model, X, beta=1e-9)
    assert folded.widths["0"].after == 11
    assert gap(model, folded.model) < 1e-9
    assert gap(model, fold_groups(model, X, groups={"0": [g for g in folded.groups["0"] if len(g) > 1]}).model) > 1e-3


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_merges_are_those_of_weighted_ward_clustering_by_hand(act: Callable[[], nn.Module]) -> None:
    model = net(act)
    rows = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().numpy()
    columns = model[2].weight.detach().numpy().T
    if act is nn.ReLU:
        size = np.linalg.norm(rows, axis=1)[:, None]
        rows, columns = rows / size, columns * size
    weight = (columns**2).sum(1)
    weight = weight / weight.mean()
    means, total, groups = rows.copy(), weight.copy(), [[i] for i in range(12)]

    def apart() -> Any:
        squares = ((means[:, None] - means[None]) ** 2).sum(-1)
        return squares * 2 / (1 / total[:, None] + 1 / total[None])

    usual = np.median(apart()[np.triu_indices(12, 1)])
    while True:
        table = apart() + np.diag([np.inf] * len(means))
        if table.min() > 0.5 * usual:
            break
        m, n = sorted(np.unravel_index(table.argmin(), table.shape))
        means[m] = (total[m] * means[m] + total[n] * means[n]) / (total[m] + total[n])
        total[m] += total[n]
        groups[m] += groups.pop(n)
        means, total = np.delete(means, n, 0), np.delete(total, n)
    folded: Any = fold(model, X, beta=0.5)
    assert {tuple(sorted(g)) for g in groups} == set(folded.groups["0"])
    assert 2 < len(groups) < 11
    small: Any = nn.Sequential(nn.Linear(4, len(groups)), act(), nn.Linear(len(groups), 3)).double()
    with torch.no_grad():
        small[0].weight[:], small[0].bias[:] = torch.tensor(means[:, :4]), torch.tensor(means[:, 4])
        small[2].weight[:] = torch.tensor(np.stack([columns[g].sum(0) for g in groups], 1))
        small[2].bias[:] = model[2].bias
    assert gap(small, folded.model) < 1e-12


def test_equal_weights_give_ward_clustering_of_scipy() -> None:
    model = net(nn.Tanh)
    with torch.no_grad():
        model[2].weight[:] = 1.0
    rows = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach().numpy()
    folded = fold(model, X, beta=0.6)
    labels = fcluster(linkage(rows, "ward"), len(folded.groups["0"]), "maxclust")
    expected = {tuple(np.flatnonzero(labels == c).tolist()) for c in set(labels.tolist())}
    assert set(folded.groups["0"]) == expected
    assert 2 < len(expected) < 11
