"""Which features are merged, against a plain reference that computes every distance again, and rule by rule."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor, nn

from intertwine import zoo
from intertwine.fold.cutting import Example
from intertwine.fold.fold import fold, fold_groups, merge_all
from intertwine.fold.merging import MergeState
from intertwine.fold.options import PRINTED, Options
from intertwine.fold.prepare import prepare

# -- Which features are merged -----------------------------------------------------------------------------------------

Array = NDArray[np.float64]


class Reference:
    """Algorithm 1 on a chain of layers, as plain as it can be: all distances are computed again before every merge.

    weights[l] has shape (features, features before, entries); a flatten is entries of the layer behind it.
    """

    def __init__(self, model: nn.Sequential, homogeneous: bool, **options: Any) -> None:
        layers = [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))]
        before = [layers[0].weight.shape[1], *(len(m.weight) for m in layers)]
        tensors = [m.weight.detach().double().numpy().copy() for m in layers]
        self.weights = [t.reshape(len(t), n, -1) for t, n in zip(tensors, before, strict=False)]
        self.biases = [m.bias.detach().double().numpy().copy() for m in layers if m.bias is not None]
        self.options, self.homogeneous = options, homogeneous
        self.groups: list[list[tuple[int, ...]]] = [[(i,) for i in range(len(w))] for w in self.weights[:-1]]
        self.start: dict[int, float] = {}

    def distances(self, layer: int) -> Array:
        counts = np.array([len(g) for g in self.groups[layer]], float)
        rows = self.weights[layer].reshape(len(counts), -1)
        if self.options["bias"]:
            rows = np.concatenate([rows, self.biases[layer][:, None]], 1)
        columns = self.weights[layer + 1].swapaxes(0, 1).reshape(len(counts), -1)
        if self.options["rows"] != "sum":
            rows, columns = (rows / counts[:, None], columns) if self.homogeneous else (rows, columns / counts[:, None])
        found = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        if self.options["terms"] == "in+out":
            found = found + ((columns[:, None] - columns[None]) ** 2).sum(-1)
        if self.options["rows"] == "ward":
            found = found * 2 / (1 / counts[:, None] + 1 / counts[None])
        return found

    def reference(self, layer: int) -> float:
        """What β is a share of: the largest distance, or the one in the middle."""
        table = self.distances(layer)
        pairs = sorted(table[i, j] for i in range(len(table)) for j in range(i) if table[i, j] > 1e-6 * table.max())
        if self.options["maximum"] != "typical":
            return float(table.max())
        return float(pairs[len(pairs) // 2] + pairs[(len(pairs) - 1) // 2]) / 2

    def step(self, layer: int) -> bool:
        """One merge; False where the layer is done."""
        if len(self.groups[layer]) == 1:
            return False
        table = self.distances(layer)
        largest = table.max()
        if self.options["maximum"] != "recompute":
            largest = self.start.setdefault(layer, self.reference(layer))
        np.fill_diagonal(table, np.inf)
        if table.min() > self.options["beta"] * largest:
            return False
        m, n = sorted(np.unravel_index(table.argmin(), table.shape))
        a, b = len(self.groups[layer][m]), len(self.groups[layer][n])
        into, out, bias = self.weights[layer], self.weights[layer + 1], self.biases[layer]
        if self.homogeneous:
            into[m], bias[m] = into[m] + into[n], bias[m] + bias[n]
            out[:, m] = (a * out[:, m] + b * out[:, n]) / (a + b)
        else:
            into[m], bias[m] = (a * into[m] + b * into[n]) / (a + b), (a * bias[m] + b * bias[n]) / (a + b)
            out[:, m] = out[:, m] + out[:, n]
        self.weights[layer] = np.delete(into, n, 0)
        self.weights[layer + 1] = np.delete(out, n, 1)
        self.biases[layer] = np.delete(bias, n)
        self.groups[layer][m] += self.groups[layer].pop(n)
        return True

    def run(self) -> list[set[tuple[int, ...]]]:
        hidden = range(len(self.groups))
        if self.options["schedule"] == "layerwise":
            for layer in hidden:
                while self.step(layer):
                    pass
        else:
            for layer in hidden:
                self.start[layer] = self.reference(layer)
            while sum(self.step(layer) for layer in hidden):  # every layer, every sweep
                pass
        return [{tuple(sorted(g)) for g in groups} for groups in self.groups]


def chain(act: Callable[[], nn.Module]) -> nn.Sequential:
    """Two convolutions, a flatten that leaves four pixels, and two linear layers."""
    torch.manual_seed(3)
    return nn.Sequential(
        *(nn.Conv2d(2, 10, 3), act(), nn.Conv2d(10, 12, 3), act(), nn.Flatten(), nn.Linear(48, 14), act()),
        nn.Linear(14, 3),
    ).double()


IMAGE = torch.randn(2, 2, 6, 6, dtype=torch.float64)
CHOICES = list(
    product(
        *(("layerwise", "round-robin"), ("in", "in+out"), (False, True), ("ward", "mean", "sum")),
        ("typical", "fixed", "recompute"),
    )
)


@pytest.mark.parametrize("act", [nn.ReLU, pytest.param(nn.Tanh, marks=pytest.mark.slow)])
def test_the_merges_of_the_plain_algorithm_003_F07_F10_F11_F24(act: Callable[[], nn.Module]) -> None:
    model = chain(act)
    sizes = set()
    for schedule, terms, bias, rows, maximum in CHOICES:
        options: dict[str, Any] = {"schedule": schedule, "terms": terms, "bias": bias, "rows": rows, "maximum": maximum}
        expected = Reference(model, act is nn.ReLU, beta=0.45, **options)
        groups = expected.run()
        found = fold(model, IMAGE, beta=0.45, **options)
        assert [set(g) for g in found.groups.values()] == groups, options
        small: Any = found.model
        assert np.allclose(small[2].weight.detach().flatten(2).numpy(), expected.weights[1], atol=1e-12), options
        sizes.add(tuple(map(len, groups)))
    assert len(sizes) > 6  # the options matter


@pytest.mark.parametrize("name", ["resnet20", "vgg11_bn", "tiny10"])
def test_distances_kept_up_to_date_are_those_measured_anew_003_F24(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, width=0.25)
    example: Example = ((torch.randn(2, 3, 32, 32),), {})
    for rows, norm in (("ward", "fold"), ("mean", "fold"), ("sum", "sum")):
        prepared = prepare(model, example, norm)
        merging = MergeState(prepared.wires, Options(terms="in+out", rows=rows, norm=norm))
        for w in range(len(prepared.wires)):
            merging.distances(w)
        for _ in range(2):
            for w in range(len(prepared.wires)):
                if merging.alive[w].sum() > 2:
                    merging.merge(w, *merging.distances(w).pair())
        for w in range(len(prepared.wires)):
            kept = merging.kept(w)
            running = merging.distances(w).table[np.ix_(kept, kept)]
            nearest = merging.distances(w).smallest
            merging.drop(w)
            fresh = merging.distances(w)
            assert np.allclose(running, fresh.table[np.ix_(kept, kept)], atol=1e-10 * fresh.largest)
            assert nearest == pytest.approx(fresh.smallest, rel=1e-9)


def test_a_layer_from_a_wire_to_itself_is_measured_right_003_F13_F24() -> None:
    """A residual linear layer has the wire on both axes: merging shortens its rows and its columns at once."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x).relu()
            return self.c((h + self.b(h)).relu())

    prepared = prepare(Residual().double(), ((torch.randn(2, 3, dtype=torch.float64),), {}))
    merging = MergeState(prepared.wires, Options(terms="in+out", rows="sum", bias=False))
    rows: dict[str, Any] = {n: t.detach().numpy().copy() for n, t in prepared.model.named_parameters()}
    for m, n in ((2, 5), (2, 7), (0, 3)):
        merging.distances(0)
        counts = merging.counts[0].copy()
        merging.merge(0, m, n)
        share = counts[[m, n]] / counts[[m, n]].sum()
        for name, axis, added in (
            ("a.weight", 0, True),
            ("b.weight", 0, True),
            ("b.weight", 1, False),
            ("c.weight", 1, False),
        ):
            view = np.moveaxis(rows[name], axis, 0)
            view[m] = view[m] + view[n] if added else share[0] * view[m] + share[1] * view[n]
            view[n] = 0
    slices = np.concatenate([rows["a.weight"], rows["b.weight"], rows["b.weight"].T, rows["c.weight"].T], 1)
    kept = merging.kept(0)
    expected = ((slices[kept][:, None] - slices[kept][None]) ** 2).sum(-1)
    assert np.allclose(merging.distances(0).table[np.ix_(kept, kept)], expected)


def triple() -> nn.Sequential:
    """Six features, of which three are the same."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        net[0].weight[1:3], net[0].bias[1:3] = net[0].weight[0], net[0].bias[0]
    return net


def test_sums_compared_as_they_stand_leave_one_of_three_over_003_D12() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fold(triple(), x, beta=1e-6, rows="mean").widths["0"].after == 4
    assert fold(triple(), x, beta=1e-6, rows="sum").widths["0"].after == 5


def test_outgoing_columns_count_only_if_asked_for_003_F07() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fold(triple(), x, beta=1e-6, terms="in").removed == 2
    assert fold(triple(), x, beta=1e-6, terms="in+out").removed == 0


def test_bias_counts_only_if_asked_for_003_F07() -> None:
    net: Any = triple()
    with torch.no_grad():
        net[0].bias[:3] = torch.tensor([0.0, 5.0, -5.0])
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fold(net, x, beta=1e-6, bias=False).removed == 2
    assert fold(net, x, beta=1e-6).removed == 0


def test_more_is_merged_with_a_larger_beta_003_F10() -> None:
    model = zoo.build("tiny10")
    x = torch.randn(1, 3, 32, 32)
    removed = [fold(model, x, beta=beta).removed for beta in (0.05, 0.3, 0.5, 0.7)]
    assert removed == sorted(removed)
    assert removed[0] < removed[-1]


def test_a_cap_and_one_feature_left_003_F11() -> None:
    model: Any = triple()
    x = torch.randn(3, 4, dtype=torch.float64)
    assert fold(model, x, beta=0.999, max_ratio=0.5).widths["0"].after == 3
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor[:] = tensor[:1]
    assert fold(model, x, beta=0.999).widths["0"].after == 1
    assert set(PRINTED) < {"terms", "bias", "rows", "maximum", "schedule"}
    assert merge_all(prepare(model, ((x,), {})), Options(beta={"0": 0.5})).kept(0) == [0]


# -- rows="effect" -----------------------------------------------------------------------------------------------------

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net(act: Callable[[], nn.Module] = nn.ReLU) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), act(), nn.Linear(12, 3)).double()


def gap(one: nn.Module, other: nn.Module, x: Tensor = X) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).norm() / one(x).norm())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["resnet20", "vgg11_bn"])
def test_balancing_is_undone_where_nothing_is_merged(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, width=0.25).eval()
    prepared = prepare(model, ((torch.randn(2, 3, 32, 32),), {}))
    before = {k: v.clone() for k, v in prepared.working.weights().items()}
    merging = MergeState(prepared.wires, Options(rows="effect"))
    changed = prepared.working.weights()
    assert any(not torch.allclose(changed[k], v) for k, v in before.items())
    merging.finish()
    after = prepared.working.weights()
    assert all(torch.allclose(after[k], v, rtol=1e-10, atol=1e-12) for k, v in before.items())


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_features_that_are_the_same_up_to_a_scale() -> None:
    for act, merges in ((nn.ReLU, True), (nn.Tanh, False)):
        model = net(act)
        with torch.no_grad():
            model[0].weight[7], model[0].bias[7] = 3 * model[0].weight[2], 3 * model[0].bias[2]
        folded = fold(model, X, beta=1e-9)
        assert ((2, 7) in folded.groups["0"]) == merges
        assert gap(model, folded.model) < 1e-10
        assert (2, 7) not in fold(model, X, beta=1e-9, rows="ward").groups["0"]


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
def test_what_is_not_read_is_merged_and_moves_nothing() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[:, 3] = 0.0
    folded = fold(model, X, beta=1e-9)
    assert folded.widths["0"].after == 11
    assert gap(model, folded.model) < 1e-9
    assert gap(model, fold_groups(model, X, groups={"0": [g for g in folded.groups["0"] if len(g) > 1]}).model) > 1e-3


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
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
