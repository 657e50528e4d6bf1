"""`diagnose`: constructed failures are named with their layer, and a healthy merge has no findings."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import Net
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import intertwine as it
from intertwine.connect.diagnose import Diagnosis, HealthMeter, JointMoments
from intertwine.connect.repair import repair
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError, MismatchError

Batches = list[tuple[Tensor, Tensor]]
Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Digit networks that share their first epochs, and some that share nothing."""
    folder: Path = tmp_path_factory.mktemp("zoos")
    made = {}
    for name, spawn in (("spawned", 4), ("independent", 0)):
        zoo = it.zoo.train(
            "mlp", seeds=[0, 1], data="digits", out=folder / name, epochs=20, spawn=spawn,
            options={"widths": [64, 64, 64, 10]},
        )  # fmt: skip
        made[name] = zoo[0], zoo[1]
    return made


def digits() -> Batches:
    return [(x, y) for x, y in it.zoo.data("digits").batches("test", 120)]


def moved(model: nn.Module, layer: int, seed: int = 0) -> nn.Module:
    """The same function, the units of one linear layer in another order."""
    other = copy.deepcopy(model)
    p = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, index in ((f"{layer}.weight", p), (f"{layer}.bias", p)):
            other.get_parameter(name).copy_(model.get_parameter(name)[index])
        following = f"{layer + 2}.weight"
        other.get_parameter(following).copy_(model.get_parameter(following)[:, p])
    return other


def kinds(found: Diagnosis) -> list[str]:
    return [one.kind for one in found.findings]


def finding(found: Diagnosis, kind: str):
    return next(one for one in found.findings if one.kind == kind)


# -- real networks -----------------------------------------------------------------------------------------------------


def test_a_healthy_pair_gets_no_finding(pairs: dict[str, Pair]) -> None:
    found = it.diagnose(*pairs["spawned"], digits())
    assert found.findings == ()
    assert repr(found) == "Diagnosis(nothing found)"
    assert "Nothing found: no layer is out of order" in str(found)
    assert found.error is not None
    assert max(found.error) < 0.06
    assert all((health.matched or 0) > 0.9 for health in found.layers.values())


def test_an_unaligned_pair_is_advised_to_align(pairs: dict[str, Pair]) -> None:
    a, b = pairs["independent"]
    data = digits()
    found = it.diagnose(a, b, data, data[0][0][:2])
    assert kinds(found) == ["order", "variance", "llfc"]
    order, variance, llfc = found.findings
    assert order.layers == ("1", "2", "3", "4")
    assert "the networks do not seem to be aligned" in order.advice
    assert "'3' (wire 3)" in order.what
    assert found.weights_apart == pytest.approx(1.4, abs=0.05)
    assert "Weights differ by 1.4" in order.what
    assert variance.layers[-1] == "5"
    assert variance.figure < 0.2
    assert "repair" in variance.advice
    assert llfc.layers[0] == "3"
    text = str(found)
    assert text.index("1. Units of the two networks") < text.index("2. Variance collapses from '3'")
    assert "Wrong answers: first 3." in text
    assert found.error is not None
    assert found.error[2] > 0.2


def test_one_wrongly_permuted_layer_is_named(pairs: dict[str, Pair]) -> None:
    a, b = pairs["spawned"]
    data = digits()
    for layer in (1, 3):
        found = it.diagnose(a, moved(b, layer), data, data[0][0][:2])
        order = finding(found, "order")
        assert order.layers == (str(layer), str(layer + 1))
        assert f"wires=['{layer}']" in order.advice
        assert "do not seem to be aligned" not in order.advice
        assert order.figure > 0.9
    without = finding(it.diagnose(a, moved(b, 3), data), "order")
    assert without.layers == ("3", "4")
    assert "wires=[…]" in without.advice
    assert "(wire" not in without.what


def test_the_figures_are_those_of_plain_formulas(pairs: dict[str, Pair]) -> None:
    a, b = (model.double() for model in copy.deepcopy(pairs["independent"]))
    data = [(x.double(), y) for x, y in digits()]
    found = it.diagnose(a, b, data, t=0.3)
    middle = it.interpolate(a, b, 0.3)
    x = torch.cat([x for x, _ in data])
    assert isinstance(a, nn.Sequential)
    assert isinstance(b, nn.Sequential)
    assert isinstance(middle, nn.Sequential)
    with torch.no_grad():
        for cut in (2, 4, 6):
            fa, fb, fm = (model[:cut](x).numpy() for model in (a, b, middle))
            health = found.layers[str(cut - 1)]
            wanted = (fa.var(0) + fb.var(0)) / 2
            assert health.variance == pytest.approx(fm.var(0).sum() / wanted.sum(), rel=1e-9)
            assert health.collapsed == pytest.approx((fm.var(0) < wanted / 2)[wanted > 0].mean(), rel=1e-9)
            assert health.dead == 0
            corr = np.corrcoef(fa.T, fb.T)[: fa.shape[1], fa.shape[1] :]
            assert health.matched == pytest.approx(np.diag(corr).mean(), rel=1e-9)
            assert health.possible == pytest.approx(corr[linear_sum_assignment(-corr)].mean(), rel=1e-9)
    row = found.to_rows()[4]
    whole = it.connectivity(a, b, data, (0.7,))["5"]  # α is the weight of a
    assert row["llfc"] == pytest.approx(whole.llfc[0].distance, rel=1e-12)
    assert row["baseline"] == pytest.approx(whole.baseline, rel=1e-12)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["findings"][0]["kind"] == "order"
    assert plain["layers"][4]["matched"] == found.layers["5"].matched


def test_a_repaired_merge_is_diagnosed_as_given(pairs: dict[str, Pair]) -> None:
    a, b = pairs["independent"]
    data = digits()
    before = it.diagnose(a, b, data)
    after = it.diagnose(a, b, data, merged=repair(a, b, 0.5, data))
    assert "variance" in kinds(before)
    assert "variance" not in kinds(after)
    assert after.layers["3"].variance == pytest.approx(1, abs=0.1)


# -- built failures ----------------------------------------------------------------------------------------------------


def normalised(pair_scale: float) -> tuple[Pair, Batches]:
    """Two networks that are one function: the second has small weights, which BatchNorm scales up again."""
    torch.manual_seed(0)
    a = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, 3),
    ).double()  # fmt: skip
    for layer in ("1", "4"):
        norm = a.get_submodule(layer)
        assert isinstance(norm, nn.BatchNorm1d)
        norm.eps = 1e-12
    x = torch.randn(600, 6, dtype=torch.float64)
    a = reset_statistics(a, [(x, torch.zeros(600))]).eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        for linear, norm in (("0", "1"), ("3", "4")):
            for name in (f"{linear}.weight", f"{linear}.bias"):
                b.get_parameter(name).mul_(pair_scale)
            b.get_buffer(f"{norm}.running_mean").mul_(pair_scale)
            b.get_buffer(f"{norm}.running_var").mul_(pair_scale**2)
        y = a(x).argmax(1)
        assert torch.equal(b(x).argmax(1), y)
    return (a, b), [(x[:350], y[:350]), (x[350:], y[350:])]


def test_batch_norm_statistics_that_were_mixed_are_named() -> None:
    (a, b), data = normalised(0.05)
    found = it.diagnose(a, b, data)
    assert kinds(found)[0] == "statistics"
    one = found.findings[0]
    assert one.layers == ("1", "4")
    # the weights are scaled by s = 0.525, so the variance by s², and the layer divides by (1 + 0.05²)/2
    first = 0.525**2 / ((1 + 0.05**2) / 2)
    assert found.layers["1"].statistics == pytest.approx(first, rel=1e-6)
    assert one.figure == min(found.layers[name].statistics or 9 for name in ("1", "4"))
    assert "They are the mix of those of both networks" in one.what
    assert "reset_statistics(merged, data)" in one.advice
    variance = finding(found, "variance")
    assert "4" in variance.layers
    assert "Reset the BatchNorm statistics" in variance.advice


def test_after_a_reset_nothing_is_left_to_find() -> None:
    (a, b), data = normalised(0.05)
    merged = reset_statistics(it.interpolate(a, b, 0.5), data)
    found = it.diagnose(a, b, data, merged=merged)
    assert found.findings == ()
    assert found.layers["1"].statistics == pytest.approx(1, abs=1e-2)
    stale = it.diagnose(a, b, data, merged=copy.deepcopy(a))  # statistics of one end fit the weights of that end
    assert "statistics" not in kinds(stale)
    with torch.no_grad():
        merged.get_buffer("1.running_var").mul_(4)
    assert (
        "They were estimated on other data or another network"
        in finding(it.diagnose(a, b, data, merged=merged), "statistics").what
    )


def test_an_end_that_is_bad_itself_is_named_first(pairs: dict[str, Pair]) -> None:
    a, _ = pairs["spawned"]
    torch.manual_seed(0)
    for first, second, word in (
        (a, it.zoo.build("mlp", widths=(64, 64, 64, 10)), "second"),
        (it.zoo.build("mlp", widths=(64, 64, 64, 10)), a, "first"),
    ):
        found = it.diagnose(first, second, digits())
        assert found.findings[0].kind == "weak end"
        assert f"The {word} network itself makes" in found.findings[0].what


def test_features_that_differ_in_any_order_are_named() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(200, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    found = it.diagnose(a, b, [(torch.randn(2000, 200), torch.zeros(2000).long())])
    one = finding(found, "unlike")
    assert one.layers[0] == "0"
    assert "even in their best order" in one.what
    assert "wider networks" in one.advice


def test_a_loss_that_no_layer_explains_is_not_hidden() -> None:
    class Odd(nn.Module):
        """A layer that is the same in both networks, and a forward that bends what no layer sees."""

        def __init__(self, w: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 2)
            self.w = nn.Parameter(torch.tensor(float(w)))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w.square() - 0.5) * self.layer(x)

    x = torch.randn(50, 4)
    data = [(x, Odd(1)(x).argmax(1))]
    found = it.diagnose(Odd(1), Odd(-1), data, layers=["layer"])
    assert kinds(found) == ["unexplained"]
    assert "100.0% more mistakes than the ends, but no layer shows why" in found.findings[0].what
    assert kinds(it.diagnose(Odd(1), Odd(-1), data)) == ["llfc"]


def test_targets_that_are_no_classes_are_no_obstacle_and_data_is_read_once() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            yield torch.randn(9, 3), torch.randn(9, 2)

    found = it.diagnose(a, a, stream())
    assert found.error is None
    assert found.findings == ()
    assert found.data.samples == 27
    assert "Wrong answers" not in str(found)


def test_wires_are_named_also_where_a_layer_lies_on_two() -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Net(
            lambda m, x: m.head(m.drop(m.norm(torch.cat([m.left(x), m.right(x)], 1)).relu().mean((2, 3)))),
            left=nn.ConvTranspose2d(3, 4, 3), right=nn.Conv2d(3, 5, 3, padding=2), norm=nn.BatchNorm2d(9),
            drop=nn.Dropout(), head=nn.Linear(9, 3),
        )  # fmt: skip

    x = torch.randn(40, 3, 5, 5)
    found = it.diagnose(net(0), net(1), [(x, torch.zeros(40).long())], x[:2])
    names = [wire.name for wire in it.symmetry(net(0).eval(), x[:2]).wires]  # in training mode dropout is refused
    assert len(names) == 2
    assert {found.wires["left"], found.wires["right"]} == {(name,) for name in names}
    assert set(found.wires["norm"]) == set(names)
    assert "head" not in found.wires
    assert set(found.to_rows()[2]["wires"]) == set(names)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widest", [1024, 3])
def test_correlations_over_batches_are_those_of_all_samples(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("intertwine.connect.diagnose.WIDEST", widest)
    g = torch.Generator().manual_seed(0)
    a, b = (100 + torch.randn(50, 5, generator=g, dtype=torch.float64) for _ in range(2))
    b[:, :4] += 2 * a[:, [1, 0, 3, 2]]
    a[:, 4] = 7  # never varies
    together = JointMoments()
    for part in (slice(0, 20), slice(20, 21), slice(21, 50)):
        together.add(a[part], b[part])
    corr = np.corrcoef(a[:, :4].T, b.T)[:4, 4:]
    matched, possible = together.correlations()
    assert matched == pytest.approx(np.diag(corr).mean(), rel=1e-9)
    if widest == 3:
        assert possible is None
    else:
        best = corr[linear_sum_assignment(-corr)].mean()
        assert possible == pytest.approx(best, rel=1e-9)
        assert best > 0.8


def test_statistics_are_compared_with_both_ends() -> None:
    """Data that varies v times as much as before is no fault of the merge: v, v/4 and v/2 fit together."""
    meter = HealthMeter([torch.tensor([running]) for running in (1.0, 4.0, 2.0)])
    x = 5 * torch.randn(200, 1)
    meter.add(x.double(), x.double(), x.double())
    meter.add_inputs(x, x, x)
    assert meter.result().statistics == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("still", range(3))
def test_statistics_have_no_figure_where_one_of_the_three_never_varies(still: int) -> None:
    meter = HealthMeter([torch.ones(1)] * 3)
    inputs = [torch.randn(20, 1) for _ in range(3)]
    inputs[still] = torch.ones(20, 1)
    meter.add(*(x.double() for x in inputs))
    meter.add_inputs(*inputs)
    assert meter.result().statistics is None


def test_layers_that_never_vary_have_no_figures() -> None:
    a = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        a.get_parameter("0.bias").fill_(-100)
    found = it.diagnose(a, a, [(torch.randn(8, 2), torch.zeros(8).long())])
    health = found.layers["1"]
    assert (health.variance, health.collapsed, health.matched, health.possible) == (None, None, None, None)
    assert health.dead == 6
    assert found.findings == ()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda a, x: it.diagnose(a, a, [(x, x)], t=0), InputError, "t must lie strictly between 0 .* found 0"),
        (lambda a, x: it.diagnose(a, a, []), InputError, "The data holds no samples"),
        (lambda a, x: it.diagnose(a, nn.Linear(3, 2), [(x, x)]), MismatchError, "The two networks differ"),
        (
            lambda a, x: it.diagnose(a, a, [(x, x)], merged=nn.Sequential(nn.Linear(3, 2))),
            MismatchError,
            "one of them has no layer '1'. Only networks of one architecture",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[..., Diagnosis], error: type[Exception], words: str) -> None:
    a, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(4, 3)
    with pytest.raises(error, match=words):
        call(a, x)
