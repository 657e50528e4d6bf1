"""`Complexity.of`: what a folding shows is what is measured directly; dead features, refusals, the picture."""

from typing import Any

import pytest
import torch
from torch import nn

from intertwine.errors import InputError
from intertwine.fold.budget import fold_to
from intertwine.fold.complexity import Complexity, complexity, dead_features
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.prepared import prepare
from intertwine.fold.pruning import prune
from intertwine.fold.swaps import swap_barrier

X = torch.randn(3, 1, 6, 6)


def net() -> Any:
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
    direct = complexity(net(), X, beta=beta, **options)
    found = Complexity.of(fold(net(), X, beta=beta, **options), norm=options.get("norm", "fold"))
    assert found.layers == direct.layers
    assert found.skipped == direct.skipped
    assert found.beta is None
    assert found.to_dict() == direct.to_dict() | {"beta": None}


def test_groups_found_elsewhere_and_dead_features_003_F17() -> None:
    folded = fold_groups(net(), X, groups={"0": [(0, 1), (2, 5), (3, 4, 6)]})
    (layer,) = Complexity.of(folded).layers
    # 2 and 5 are dead, and so is their group; 0 1, 3 4 6 and 7 are left
    assert (layer.width, layer.classes, layer.equivalent, layer.dead, layer.left) == (8, 3, 3, 2, 4)
    assert Complexity.of(folded, dead=0.0)["0"].dead == 1  # none but the one that nobody reads
    merged = fold_to(net(), X, parameters=0.7, how="merge")
    assert Complexity.of(merged).beta == merged.betas


@pytest.mark.parametrize("make", [
    lambda: fold_to(net(), X, parameters=0.7), lambda: prune(net(), X, widths=0.5),
], ids=["absorbed", "pruned"])  # fmt: skip
def test_features_that_were_not_merged_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"features were absorbed or removed in it, .* Take one that merges: fold"):
        Complexity.of(make())


@pytest.mark.parametrize("dead", [1.0, -0.1, float("nan")])
def test_the_range_of_dead_is_looked_at_everywhere(dead: float) -> None:
    text = r"dead=.* was asked for. It is a share of the longest row, from 0 to below 1\."
    folded = fold_groups(net(), X, groups={"0": [(0, 1)]})
    for call in (
        lambda: dead_features(prepare(net(), ((X,), {})).wires[0], dead),
        lambda: complexity(net(), X, dead=dead),
        lambda: Complexity.of(folded, dead=dead),
        lambda: swap_barrier(folded, [(X, torch.zeros(3, dtype=torch.long))], dead=dead),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_the_legend_does_not_cover_the_bars() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = complexity(net(), X, beta=0.3).plot()
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 >= max(bar.get_window_extent().y1 for bar in axes.patches)
