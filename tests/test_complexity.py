"""The complexity of layers: classes, equivalent and dead features told apart, against counts made by hand."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from torch import Tensor, nn

from intertwine.errors import InputError
from intertwine.fold.complexity import DEAD, Complexity, LayerComplexity, complexity, dead_features
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.prepared import prepare

pytestmark = pytest.mark.usefixtures("one_thread")
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


def test_classes_of_three_and_two_equal_features_003_F06_F25() -> None:
    model = copied(net(), (3, 0), (6, 0), (5, 2))
    assert counts(complexity(model, X, **FAR)["0"]) == (5, 3, 0, 5)
    assert counts(complexity(net(), X, **FAR)["0"]) == (8, 0, 0, 8)


def test_two_zero_rows_are_dead_and_not_equivalent_003_F17() -> None:
    """Near zero they are near each other, and merged: the paper counts one feature more, and here none."""
    model = edit(net(), rows={1: 0.0, 4: 0.0})
    assert counts(complexity(model, X, **FAR)["0"]) == (6, 0, 2, 7)


def test_a_feature_that_nobody_reads_is_dead_003_F17() -> None:
    assert counts(complexity(edit(net(), columns={2: 0.0}), X, **FAR)["0"]) == (7, 0, 1, 8)


def test_a_dead_twin_of_a_live_feature_is_dead_and_its_class_lives_003_F17() -> None:
    """Equal rows, but one of the two is read by nobody: one class, no equivalent feature."""
    model = edit(copied(net(), (5, 2)), columns={5: 0.0})
    assert counts(complexity(model, X, **FAR)["0"]) == (7, 0, 1, 7)
    model = edit(copied(net(), (5, 2)), columns={5: 0.0, 2: 0.0})  # nobody reads either
    assert counts(complexity(model, X, **FAR)["0"]) == (6, 0, 2, 7)


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


def test_what_complexity_says_003_F25() -> None:
    found = complexity(edit(copied(net(), (3, 0)), rows={1: 0.0}), X, **FAR)
    assert repr(found) == "layer  width  classes  equivalent  dead\n0          8        6           1     1"
    data = json.loads(json.dumps(found.to_dict()))
    assert data["layers"] == [
        {"name": "0", "width": 8, "classes": 6, "equivalent": 1, "dead": 1, "left": 7, "share": 0.75}
    ]
    assert data["skipped"] == [{"what": "2.weight", "reason": "it is an axis of the model's output"}]
    with pytest.raises(InputError, match=r"There is no layer '1' here\. There are: 0\."):
        found["1"]
    assert repr(complexity(nn.Linear(4, 2).double(), X)) == "Complexity(no layer to measure; 1 skipped)"
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=r"dead=.* was asked for\. It is a share of the longest row, from 0 to"):
            complexity(net(), X, dead=share)
    assert complexity(net(), X, dead=0.0, **FAR)["0"].dead == 0


def test_a_network_is_not_changed_by_measuring_it() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    complexity(model, X, beta=0.5)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_complexity_of_a_folding_that_is_there_003_F25() -> None:
    model = edit(net(), columns={7: 0.0})
    found = Complexity.of(fold_groups(model, X, groups={"0": [(1, 4, 6), (0, 7)]}))
    assert counts(found["0"]) == (5, 2, 1, 5)
    assert found.beta is None
    folded = fold(model, X, beta=0.3, rows="mean")
    assert Complexity.of(folded).layers == complexity(model, X, beta=0.3, rows="mean").layers
