"""The number of different features per layer, and distance maps, against counts and formulas by hand."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from numpy.typing import NDArray
from torch import Tensor, nn

from intertwine import zoo
from intertwine.errors import InputError, MismatchError
from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import (
    DEAD,
    Complexity,
    DistanceMaps,
    LayerComplexity,
    complexity,
    complexity_curves,
    dead_features,
    distance_maps,
)
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.prepare import prepare
from intertwine.fold.prune import prune
from intertwine.fold.swaps import swap_barrier

# -- complexity --------------------------------------------------------------------------------------------------------

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FAR: dict[str, Any] = {"beta": 1e-6, "rows": "mean"}  # only what is the same is merged


def net(width: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2)).double()


def edit(model: Any, rows: dict[int, float] | None = None, columns: dict[int, float] | None = None) -> Any:
    """Rows with their bias, and columns, of some features times a number."""
    with torch.no_grad():
        for i, factor in (rows or {}).items():
            model[0].weight[i] *= factor
            model[0].bias[i] *= factor
        for i, factor in (columns or {}).items():
            model[2].weight[:, i] *= factor
    return model


def copied(model: Any, *pairs: tuple[int, int]) -> Any:
    with torch.no_grad():
        for to, source in pairs:
            model[0].weight[to], model[0].bias[to] = model[0].weight[source], model[0].bias[source]
    return model


def counts(found: LayerComplexity) -> tuple[int, int, int, int]:
    return found.classes, found.equivalent, found.dead, found.left


def dead_by_hand(rows: Tensor, bias: Tensor, columns: Tensor, share: float) -> list[bool]:
    """Lengths in plain numpy: a row with its bias, a column."""
    written = np.linalg.norm(np.concatenate([rows.numpy(), bias.numpy()[:, None]], 1), axis=1)
    read = np.linalg.norm(columns.numpy(), axis=0)
    return [bool(a <= share * written.max() or b <= share * read.max()) for a, b in zip(written, read, strict=True)]


@pytest.mark.usefixtures("one_thread")
def test_classes_of_three_and_two_equal_features_003_F06_F25() -> None:
    model = copied(net(), (3, 0), (6, 0), (5, 2))
    assert counts(complexity(model, X, **FAR)["0"]) == (5, 3, 0, 5)
    assert counts(complexity(net(), X, **FAR)["0"]) == (8, 0, 0, 8)


@pytest.mark.usefixtures("one_thread")
def test_two_zero_rows_are_dead_and_not_equivalent_003_F17() -> None:
    """Near zero they are near each other, and merged: the paper counts one feature more, and here none."""
    model = edit(net(), rows={1: 0.0, 4: 0.0})
    assert counts(complexity(model, X, **FAR)["0"]) == (6, 0, 2, 7)


@pytest.mark.usefixtures("one_thread")
def test_a_feature_that_nobody_reads_is_dead_003_F17() -> None:
    assert counts(complexity(edit(net(), columns={2: 0.0}), X, **FAR)["0"]) == (7, 0, 1, 8)


@pytest.mark.usefixtures("one_thread")
def test_a_dead_twin_of_a_live_feature_is_dead_and_its_class_lives_003_F17() -> None:
    """Equal rows, but one of the two is read by nobody: one class, no equivalent feature."""
    model = edit(copied(net(), (5, 2)), columns={5: 0.0})
    assert counts(complexity(model, X, **FAR)["0"]) == (7, 0, 1, 7)
    model = edit(copied(net(), (5, 2)), columns={5: 0.0, 2: 0.0})  # nobody reads either
    assert counts(complexity(model, X, **FAR)["0"]) == (6, 0, 2, 7)


@pytest.mark.usefixtures("one_thread")
def test_how_short_a_dead_row_is_003_F17() -> None:
    """Relative to the longest row, the bias counted in; at the bound itself a feature is dead."""
    model = net()
    for share in (DEAD, 0.3, 0.7):
        found = complexity(model, X, dead=share, **FAR)["0"]
        weight, bias, columns = (t.detach() for t in (model[0].weight, model[0].bias, model[2].weight))
        assert found.dead == sum(dead_by_hand(weight, bias, columns, share))
    assert {DEAD, complexity(net(), X, dead=0.7, **FAR)["0"].dead > 0} == {1e-3, True}
    even = net(4)
    with torch.no_grad():
        even[0].weight[:], even[0].bias[:], even[2].weight[:] = 0.0, torch.tensor([1.0, 0.5, 0.49, 0.51]), 1.0
    (wire,) = prepare(even, ((X,), {})).wires
    assert dead_features(wire, 0.5).tolist() == [False, True, True, False]


@pytest.mark.usefixtures("one_thread")
def test_lengths_are_those_of_all_layers_together_003_F17() -> None:
    """On a residual wire a feature is dead only where both writers leave it, or both readers do not read it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.c((h + m.b(h)).relu())

    torch.manual_seed(0)
    model: Any = Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 2)).double()
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.weight[0], layer.bias[0] = 0.0, 0.0  # written by nobody
        model.a.weight[1], model.a.bias[1] = 0.0, 0.0  # written by one
        model.b.weight[:, 2], model.c.weight[:, 2] = 0.0, 0.0  # read by nobody
        model.c.weight[:, 3] = 0.0  # read by one
    (wire,) = prepare(model, ((X,), {})).wires
    assert dead_features(wire).tolist() == [True, False, True, False, False, False]


@pytest.mark.usefixtures("one_thread")
def test_a_norm_of_scale_zero_kills_and_a_small_row_before_it_does_not_003_F17() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double().eval()
    with torch.no_grad():
        model[1].weight[1] = 0.0
        model[0].weight[3] *= 1e-6  # the norm makes up for it
        model[0].bias[3] *= 1e-6
        model[1].running_var[3] = 1e-12
    model[1].eps = 0.0
    found = complexity(model, X, **FAR)["0"]
    assert counts(found) == (4, 0, 1, 5)


@pytest.mark.usefixtures("one_thread")
def test_a_feature_that_a_depthwise_bias_makes_is_not_dead_003_F17() -> None:
    """Nothing writes features 1 and 2, but the layer on the way adds a number to the first."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 5, 1), nn.ReLU(), nn.Conv2d(5, 5, 1, groups=5), nn.ReLU(), nn.Conv2d(5, 2, 1))
    model: Any = nn.Sequential(*layers).double()
    with torch.no_grad():
        for i, bias in ((1, 0.7), (2, 0.0)):
            model[0].weight[i], model[0].bias[i], model[2].weight[i], model[2].bias[i] = 0.0, 0.0, 0.0, bias
    (wire,) = prepare(model, ((torch.zeros(1, 2, 3, 3).double(),), {})).wires
    assert dead_features(wire).tolist() == [False, False, True, False, False]


@pytest.mark.usefixtures("one_thread")
def test_complexity_follows_its_options_003_F25() -> None:
    model = copied(net(), (3, 0), (6, 0))
    assert complexity(model, X, beta=1e-6, rows="sum")["0"].classes == 7  # of three equal ones one is left over
    assert complexity(model, X, beta=1e-6, rows="mean", terms="in+out")["0"].classes == 8
    for beta in (0.2, {"0": 0.2}):
        found = complexity(model, X, beta=beta, rows="mean")
        assert found["0"].left == fold(model, X, beta=beta, rows="mean").widths["0"].after
        assert found.to_dict()["beta"] == beta
    assert found["0"].share == found["0"].classes / 8
    assert (found["0"].width, found["0"].name) == (8, "0")


@pytest.mark.usefixtures("one_thread")
def test_what_complexity_says_003_F25() -> None:
    found = complexity(edit(copied(net(), (3, 0)), rows={1: 0.0}), X, **FAR)
    assert repr(found) == "layer  width  classes  equivalent  dead\n0          8        6           1     1"
    data = json.loads(json.dumps(found.to_dict()))
    assert data["layers"] == [
        {"name": "0", "width": 8, "classes": 6, "equivalent": 1, "dead": 1, "left": 7, "share": 0.75}
    ]
    assert data["skipped"] == [{"what": "2.weight", "reason": "it is an axis of the model's output"}]
    with pytest.raises(InputError, match=r"Unknown layer '1'\. Choose one of: 0\."):
        found["1"]
    assert repr(complexity(nn.Linear(4, 2).double(), X)) == "Complexity(no layer to measure; 1 skipped)"
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=r"dead must be a share of the longest row, from 0 to below 1, but is"):
            complexity(net(), X, dead=share)
    assert complexity(net(), X, dead=0.0, **FAR)["0"].dead == 0


@pytest.mark.usefixtures("one_thread")
def test_a_network_is_not_changed_by_measuring_it() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    complexity(model, X, beta=0.5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("one_thread")
def test_complexity_of_a_folding_that_is_there_003_F25() -> None:
    model = edit(net(), columns={7: 0.0})
    found = Complexity.of(fold_groups(model, X, groups={"0": [(1, 4, 6), (0, 7)]}))
    assert counts(found["0"]) == (5, 2, 1, 5)
    assert found.beta is None
    folded = fold(model, X, beta=0.3, rows="mean")
    assert Complexity.of(folded).layers == complexity(model, X, beta=0.3, rows="mean").layers


# -- Complexity.of -----------------------------------------------------------------------------------------------------

SMALL_IMAGES = torch.randn(3, 1, 6, 6)


def conv_net() -> Any:
    """With one feature twice, two that do not act, one of which nobody reads."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)).eval()
    with torch.no_grad():
        for tensor in (model[0].weight, model[0].bias):
            tensor[1] = tensor[0]
            tensor[2] *= 1e-9
        model[1].bias[2] = 0.0
        model[4].weight.view(3, 8, 16)[:, 5] = 0.0
    return model


@pytest.mark.parametrize("options", [{}, PRINTED, PAPER_CODE], ids=["own", "printed", "paper-code"])
@pytest.mark.parametrize("beta", [1e-6, 0.3, 0.7])
def test_a_folding_has_the_complexity_that_is_measured(options: dict[str, Any], beta: float) -> None:
    direct = complexity(conv_net(), SMALL_IMAGES, beta=beta, **options)
    found = Complexity.of(fold(conv_net(), SMALL_IMAGES, beta=beta, **options), norm=options.get("norm", "fold"))
    assert found.layers == direct.layers
    assert found.skipped == direct.skipped
    assert found.beta is None
    assert found.to_dict() == direct.to_dict() | {"beta": None}


def test_groups_found_elsewhere_and_dead_features_003_F17() -> None:
    folded = fold_groups(conv_net(), SMALL_IMAGES, groups={"0": [(0, 1), (2, 5), (3, 4, 6)]})
    (layer,) = Complexity.of(folded).layers
    # 2 and 5 are dead, and so is their group; 0 1, 3 4 6 and 7 are left
    assert (layer.width, layer.classes, layer.equivalent, layer.dead, layer.left) == (8, 3, 3, 2, 4)
    assert Complexity.of(folded, dead=0.0)["0"].dead == 1  # none but the one that nobody reads
    merged = fold_to(conv_net(), SMALL_IMAGES, parameters=0.7, how="merge")
    assert Complexity.of(merged).beta == merged.betas


@pytest.mark.parametrize(
    "make",
    [lambda: fold_to(conv_net(), SMALL_IMAGES, parameters=0.7), lambda: prune(conv_net(), SMALL_IMAGES, widths=0.5)],
    ids=["absorbed", "pruned"],
)
def test_features_that_were_not_merged_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"were absorbed or removed, not merged.* Use one that merges: fold"):
        Complexity.of(make())


@pytest.mark.parametrize("dead", [1.0, -0.1, float("nan")])
def test_the_range_of_dead_is_looked_at_everywhere(dead: float) -> None:
    text = r"dead must be a share of the longest row, from 0 to below 1, but is"
    folded = fold_groups(conv_net(), SMALL_IMAGES, groups={"0": [(0, 1)]})
    for call in (
        lambda: dead_features(prepare(conv_net(), ((SMALL_IMAGES,), {})).wires[0], dead),
        lambda: complexity(conv_net(), SMALL_IMAGES, dead=dead),
        lambda: Complexity.of(folded, dead=dead),
        lambda: swap_barrier(folded, [(SMALL_IMAGES, torch.zeros(3, dtype=torch.long))], dead=dead),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_the_legend_does_not_cover_the_bars() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = complexity(conv_net(), SMALL_IMAGES, beta=0.3).plot()
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 >= max(bar.get_window_extent().y1 for bar in axes.patches)


# -- Distance maps and curves ------------------------------------------------------------------------------------------

SAMPLES = torch.randn(3, 4, dtype=torch.float64)


def seeded_net(width: int = 8) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def squared(rows: Any) -> NDArray[np.float64]:
    """Squared distances between rows, the plain way."""
    rows = np.asarray(rows)
    return ((rows[:, None] - rows[None]) ** 2).sum(-1)


def rows_of(layer: Any) -> NDArray[np.float64]:
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach().numpy()


def test_distances_are_those_of_the_formula_003_F07_F17_F27() -> None:
    model = seeded_net()
    found = distance_maps(model, SAMPLES)
    for name in ("0", "2"):
        assert np.allclose(found[name].table, squared(rows_of(model[int(name)])), atol=1e-12)
    printed = distance_maps(model, SAMPLES, terms="in+out", bias=False)["0"]
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
    model = seeded_net(12)
    centres = 5 * torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        for i in range(10):  # three clusters, dealt out in turns
            model[0].weight[i] = centres[i % 3] + 0.01 * torch.randn(4)
        model[0].bias[:] = 0.1
        model[0].weight[10:], model[0].bias[10:] = 0.0, 0.0
    found = distance_maps(model, SAMPLES)["0"]
    assert found.dead == found.order[-2:] == (10, 11)
    kinds = [i % 3 for i in found.order[:-2]]
    assert sorted(found.order) == list(range(12))
    assert sum(a != b for a, b in pairwise(kinds)) == 2  # each cluster is one run
    assert found.smallest == 0.0  # two features that do not act are equal, and that says nothing


def test_after_folding_distances_are_those_of_means_003_F09_F17() -> None:
    model = seeded_net()
    before = distance_maps(model, SAMPLES)
    folded = fold_groups(model, SAMPLES, groups={"0": [(1, 4), (2, 3, 7)], "2": []})
    after = before.merged(folded.groups)
    means = [rows_of(model[0])[list(group)].mean(0) for group in folded.groups["0"]]
    assert after["0"].groups == folded.groups["0"] == ((0,), (1, 4), (2, 3, 7), (5,), (6,))
    assert np.allclose(after["0"].table, squared(means), atol=1e-12)
    assert np.allclose(after["2"].table, before["2"].table)
    again = after.merged({"0": [(0, 1), (2,), (3,), (4,)]})["0"]
    assert again.groups[0] == (0, 1, 4)
    assert before.merged({})["0"].table is before["0"].table


def test_nothing_near_is_left_after_folding_003_F10_F27() -> None:
    model = seeded_net(32)
    before = distance_maps(model, SAMPLES)
    after = before.merged(fold(model, SAMPLES, beta={"0": 0.2}, rows="mean", maximum="fixed").groups)
    assert before["0"].below(0.2) > 0.05
    assert after["0"].smallest > 0.2 * before["0"].largest


def test_maps_read_as_a_table_and_as_a_dict() -> None:
    found = distance_maps(seeded_net(), SAMPLES)
    lines = repr(found).splitlines()
    assert lines[0].split() == "wire features dead smallest / largest pairs below 0.1".split()
    assert lines[1].split()[:3] == ["0", "8", "0"]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["wires"][0]["features"] == 8
    assert data["skipped"][0]["what"] == "4.weight"
    assert "no layer to measure" in repr(DistanceMaps(()))


def test_bad_input_to_maps() -> None:
    found = distance_maps(seeded_net(), SAMPLES)
    with pytest.raises(InputError, match=r"Unknown wire '3'. .*one of: 0, 2"):
        found["3"]
    with pytest.raises(InputError, match=r"Unknown wire 'nine'. Choose one of: 0, 2"):
        found.merged({"nine": [(0,)]})
    with pytest.raises(InputError, match=r"groups of '2' must hold each of its features 0 to 4 once. Pass the groups"):
        found.merged({"2": [(0, 1), (1, 2, 3, 4)]})
    with pytest.raises(InputError, match=r"Unknown terms 'out'"):
        distance_maps(seeded_net(), SAMPLES, terms="out")


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_heat_maps_are_drawn_in_order_003_F17_F27() -> None:
    pytest.importorskip("matplotlib")
    model = seeded_net()
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 0.0
    before = distance_maps(model, SAMPLES)
    first: Any = before.plot().axes[0]
    order = list(before["0"].order)
    drawn = np.asarray(first.images[0].get_array())
    assert np.allclose(drawn, before["0"].table[np.ix_(order, order)] / before["0"].largest)
    assert first.get_title() == "0: 8 features, 1 dead"
    after = before.merged(fold_groups(model, SAMPLES, groups={"0": [(0, 1, 2, 4)]}).groups)
    figure = before.plot(after)
    titles = [axes.get_title() for axes in figure.axes[:4]]
    assert titles == ["0: 8 features, 1 dead", "2: 5 features", "0: 5 features, 1 dead", "2: 5 features"]
    low: Any = figure.axes[2]
    order = list(after["0"].order)
    assert np.allclose(low.images[0].get_array(), after["0"].table[np.ix_(order, order)] / before["0"].largest)
    assert [axes.get_title() for axes in before.plot(wires=["2"]).axes[:1]] == ["2: 5 features"]
    with pytest.raises(MismatchError, match="`after` has other wires"):
        before.plot(distance_maps(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).double(), SAMPLES))
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


@pytest.mark.parametrize(("found", "why"), [({}, "no complexity is given"), ({"a": curve()}, "'a' has no layer")])
def test_curves_of_nothing(found: dict[str, Complexity], why: str) -> None:
    with pytest.raises(InputError, match=f"There is nothing to draw: {why}"):
        complexity_curves(found)
