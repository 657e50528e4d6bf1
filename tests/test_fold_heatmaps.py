"""Distances between features and curves of complexity: against plain formulas, ordered by cluster, and as drawn."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from intertwine import zoo
from intertwine.errors import InputError, MismatchError
from intertwine.fold.complexity import Complexity, LayerComplexity
from intertwine.fold.curves import complexity_curves
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.heatmaps import DistanceMaps, distance_maps

X = torch.randn(3, 4, dtype=torch.float64)


def net(width: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def squared(rows: Any) -> NDArray[np.float64]:
    """Squared distances between rows, the plain way."""
    rows = np.asarray(rows)
    return ((rows[:, None] - rows[None]) ** 2).sum(-1)


def rows_of(layer: Any) -> NDArray[np.float64]:
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach().numpy()


def test_distances_are_those_of_the_formula_003_F07_F17_F27() -> None:
    model = net()
    found = distance_maps(model, X)
    for name in ("0", "2"):
        assert np.allclose(found[name].table, squared(rows_of(model[int(name)])), atol=1e-12)
    printed = distance_maps(model, X, terms="in+out", bias=False)["0"]
    weight, after = (model[i].weight.detach().numpy() for i in (0, 2))
    expected = squared(weight) + squared(after.T)
    assert np.allclose(printed.table, expected, atol=1e-12)
    off = expected[~np.eye(8, dtype=bool)]
    assert printed.smallest == pytest.approx(off.min())
    assert printed.largest == pytest.approx(off.max())
    assert printed.below(0.3) == pytest.approx((off <= 0.3 * off.max()).mean())


def test_batch_norm_counts_as_part_of_the_layer_003_F17() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 1))
    model = model.double().eval()
    for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
        tensor.data = torch.rand(6, dtype=torch.float64) + 0.5
    scale = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    shift = model[1].bias - scale * model[1].running_mean
    rows = torch.cat([model[0].weight.flatten(1) * scale[:, None], shift[:, None]], 1).detach()
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    assert np.allclose(distance_maps(model, x)["0"].table, squared(rows), atol=1e-12)
    raw = distance_maps(model, x, bias=False, norm="sum")["0"].table
    assert np.allclose(raw, squared(model[0].weight.detach().flatten(1)), atol=1e-12)


def test_features_of_a_cluster_stand_together_and_dead_ones_last_003_F17_F27() -> None:
    model = net(12)
    centres = 5 * torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for i in range(10):  # three clusters, dealt out in turns
            model[0].weight[i] = centres[i % 3] + 0.01 * torch.randn(4)
        model[0].bias[:] = 0.1
        model[0].weight[10:], model[0].bias[10:] = 0.0, 0.0
    found = distance_maps(model, X)["0"]
    assert found.dead == found.order[-2:] == (10, 11)
    kinds = [i % 3 for i in found.order[:-2]]
    assert sorted(found.order) == list(range(12))
    assert sum(a != b for a, b in pairwise(kinds)) == 2  # each cluster is one run
    assert found.smallest == 0.0  # two features that do not act are equal, and that says nothing


def test_after_folding_distances_are_those_of_means_003_F09_F17() -> None:
    model = net()
    before = distance_maps(model, X)
    folded = fold_groups(model, X, groups={"0": [(1, 4), (2, 3, 7)], "2": []})
    after = before.merged(folded.groups)
    means = [rows_of(model[0])[list(group)].mean(0) for group in folded.groups["0"]]
    assert after["0"].groups == folded.groups["0"] == ((0,), (1, 4), (2, 3, 7), (5,), (6,))
    assert np.allclose(after["0"].table, squared(means), atol=1e-12)
    assert np.allclose(after["2"].table, before["2"].table)
    again = after.merged({"0": [(0, 1), (2,), (3,), (4,)]})["0"]
    assert again.groups[0] == (0, 1, 4)
    assert before.merged({})["0"].table is before["0"].table


def test_nothing_near_is_left_after_folding_003_F10_F27() -> None:
    model = net(32)
    before = distance_maps(model, X)
    after = before.merged(fold(model, X, beta={"0": 0.2}, rows="mean", maximum="fixed").groups)
    assert before["0"].below(0.2) > 0.05
    assert after["0"].smallest > 0.2 * before["0"].largest


def test_maps_read_as_a_table_and_as_a_dict() -> None:
    found = distance_maps(net(), X)
    lines = repr(found).splitlines()
    assert lines[0].split() == "wire features dead smallest / largest pairs below 0.1".split()
    assert lines[1].split()[:3] == ["0", "8", "0"]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["wires"][0]["features"] == 8
    assert data["skipped"][0]["what"] == "4.weight"
    assert "no layer to measure" in repr(DistanceMaps(()))


def test_bad_input_to_maps() -> None:
    found = distance_maps(net(), X)
    with pytest.raises(InputError, match=r"There is no wire '3' here. .*There are: 0, 2"):
        found["3"]
    with pytest.raises(InputError, match="There is no wire 'nine' here"):
        found.merged({"nine": [(0,)]})
    with pytest.raises(
        InputError, match=r"groups of '2' do not hold each of its features 0 to 4 once. Pass the groups"
    ):
        found.merged({"2": [(0, 1), (1, 2, 3, 4)]})
    with pytest.raises(InputError, match=r"terms='out' was asked for"):
        distance_maps(net(), X, terms="out")


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_heat_maps_are_drawn_in_order_003_F17_F27() -> None:
    pytest.importorskip("matplotlib")
    model = net()
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 0.0
    before = distance_maps(model, X)
    first: Any = before.plot().axes[0]
    order = list(before["0"].order)
    drawn = np.asarray(first.images[0].get_array())
    assert np.allclose(drawn, before["0"].table[np.ix_(order, order)] / before["0"].largest)
    assert first.get_title() == "0: 8 features, 1 dead"
    after = before.merged(fold_groups(model, X, groups={"0": [(0, 1, 2, 4)]}).groups)
    figure = before.plot(after)
    titles = [axes.get_title() for axes in figure.axes[:4]]
    assert titles == ["0: 8 features, 1 dead", "2: 5 features", "0: 5 features, 1 dead", "2: 5 features"]
    low: Any = figure.axes[2]
    order = list(after["0"].order)
    assert np.allclose(low.images[0].get_array(), after["0"].table[np.ix_(order, order)] / before["0"].largest)
    assert [axes.get_title() for axes in before.plot(wires=["2"]).axes[:1]] == ["2: 5 features"]
    with pytest.raises(MismatchError, match="`after` has other wires than these"):
        before.plot(distance_maps(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).double(), X))
    with pytest.raises(InputError, match="There is no wire to draw"):
        before.plot(wires=[])


def test_a_picture_shows_at_most_twelve_wires_003_F27() -> None:
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    found = distance_maps(zoo.build("vgg16_bn", width=0.0625), torch.zeros(1, 3, 32, 32))
    figure = found.plot()
    assert len(found.wires) == 13
    assert sum(bool(axes.images) for axes in figure.axes) == 12
    assert figure.get_suptitle() == "the first 12 of 13 wires"


def curve(*classes: int, width: int = 10) -> Complexity:
    layers = tuple(LayerComplexity(f"l{i}", width, c, width - c, 0, c) for i, c in enumerate(classes))
    return Complexity(layers, (), 0.1)


def test_curves_of_complexity_003_F25() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = complexity_curves({"small": curve(3, 7, 2), "large": curve(4, 9, 8, 1)}).axes
    assert [list(map(float, line.get_ydata())) for line in axes.get_lines()] == [[3, 7, 2], [4, 9, 8, 1]]  # type: ignore[arg-type]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "3", "4"]  # names differ: numbers
    (axes,) = complexity_curves({"a": curve(3, 7), "b": curve(1, 2)}, relative=True).axes
    assert np.allclose(np.asarray(axes.get_lines()[0].get_ydata(), float), [0.3, 0.7])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["l0", "l1"]
    assert axes.get_ylabel() == "different features / width"


@pytest.mark.parametrize(("found", "why"), [({}, "no complexity was given"), ({"a": curve()}, "'a' has no layer")])
def test_curves_of_nothing(found: dict[str, Complexity], why: str) -> None:
    with pytest.raises(InputError, match=f"Curves of complexity were asked for, but {why}"):
        complexity_curves(found)
