"""Folding to a number of parameters or to an accuracy: budgets, copies merged without loss, error messages."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from intertwine import zoo
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError
from intertwine.fold.budget import ParameterCount, allocate, fold_to, pink_noise, random_inputs_like
from intertwine.fold.prune import prune
from intertwine.fold.result import count_parameters, shrink
from intertwine.symmetry.symmetry import symmetry

pytestmark = pytest.mark.usefixtures("one_thread")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def net(width: int = 20) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def gap(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).norm() / one(x).norm())


@pytest.mark.parametrize("name", ["mlp", "vgg11_bn", "resnet20", "tiny10", "vit"])
@pytest.mark.parametrize("how", ["absorb", "merge"])
def test_the_budget_is_kept_and_nearly_used(name: str, how: str) -> None:
    torch.manual_seed(0)
    x = IMAGES[:2, :1, :28, :28] if name == "mlp" else IMAGES[:2]
    options: dict[str, Any] = {"vit": {"depth": 1}, "mlp": {}, "tiny10": {}}.get(name, {"width": 0.25})
    model = zoo.build(name, **options).eval()
    folded = fold_to(model, x, parameters=0.6, how=how)
    assert 0.55 < folded.parameters.share <= 0.6
    assert count_parameters(folded.model) == folded.parameters.after
    assert folded.cut_error < 1e-9
    assert folded.model(x).shape == model(x).shape
    assert bool(folded.betas) == (how == "merge")


@pytest.mark.parametrize("how", ["absorb", "merge"])
def test_copies_go_and_the_function_stays(how: str) -> None:
    """Twelve of twenty features twice or thrice: eight different ones are enough."""
    model = net()
    with torch.no_grad():
        for i in range(8, 20):
            model[0].weight[i], model[0].bias[i] = model[0].weight[i % 8], model[0].bias[i % 8]
    x = 3 * torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    enough = ParameterCount(model, symmetry(model, X))({0: 8})
    folded = fold_to(model, X, parameters=enough, how=how)
    assert folded.widths["0"].after == 8
    assert gap(model, folded.model, x) < 1e-3
    assert all(len({i % 8 for i in group}) == 1 for group in folded.groups["0"])


@pytest.mark.parametrize("bias", [True, False])
def test_a_constant_feature_goes_into_the_bias_or_the_running_mean(bias: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3, bias=bias), nn.BatchNorm2d(5)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2)),
    ).eval()
    with torch.no_grad():
        model[1].weight[4], model[1].bias[4] = 0.0, 2.0
    folded: Any = fold_to(model, IMAGES, parameters=count_parameters(model) - 1, data=[(IMAGES, None)])
    assert folded.widths["0"].after == 5
    assert 4 not in {g[0] for g in folded.groups["0"] if len(g) == 1}
    assert gap(model, folded.model, IMAGES) < 1e-4
    moved = "bias" if bias else "running_mean"
    part, own = (folded.model[3], model[3]) if bias else (folded.model[4], model[4])
    assert not torch.allclose(getattr(part, moved), getattr(own, moved), atol=0.1)


def test_random_inputs_pass_with_statistics_of_their_own() -> None:
    """A network of inputs around 50: random ones of mean 0 would leave its features still, or move all alike."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        *(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 4, 3), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(4, 2)),
    )
    with torch.no_grad():
        model[0].weight[6:], model[0].bias[6:] = model[0].weight[:6], model[0].bias[:6]
    model = reset_statistics(model, [(50 + IMAGES, None)]).eval()
    folded = fold_to(model, IMAGES, parameters=ParameterCount(model, symmetry(model, IMAGES))({0: 6}))
    assert [len({i % 6 for i in group}) for group in folded.groups["0"]] == [1] * 6
    assert gap(model, folded.model, 50 + IMAGES) < 1e-3


def test_absorbing_loses_less_than_pruning_and_than_merging() -> None:
    torch.manual_seed(0)
    model = zoo.build("vgg11_bn", width=0.25).eval()
    data = [(torch.randn(64, 3, 32, 32), None) for _ in range(3)]
    test = torch.randn(64, 3, 32, 32)
    absorbed = fold_to(model, IMAGES, parameters=0.5, data=data)
    widths = {name: int(w.after) for name, w in absorbed.widths.items()}
    pruned = prune(model, IMAGES, widths=widths)
    merged = fold_to(model, IMAGES, parameters=0.5, how="merge")
    assert gap(model, absorbed.model, test) < 0.6 * min(gap(model, other.model, test) for other in (pruned, merged))


def test_the_result_can_be_saved_trained_and_loaded_again() -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet20", width=0.25).eval()
    folded = fold_to(model, IMAGES, parameters=0.7)
    again = shrink(
        zoo.build("resnet20", width=0.25), IMAGES, widths={n: int(w.after) for n, w in folded.widths.items()}
    )
    again.load_state_dict(folded.model.state_dict())
    assert gap(folded.model, again.eval(), IMAGES) == 0
    folded.model.train()(IMAGES).sum().backward()
    assert all(p.grad is not None for p in folded.model.parameters())


# -- accuracy ----------------------------------------------------------------------------------------------------------


def trained() -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """A wide network that tells four quarters of the plane apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(600, 2)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] > 0) * 1
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:400]), y[:400]).backward()
        optimizer.step()
    return model, [(x[400:], y[400:])]


def test_the_smallest_network_with_an_accuracy_003_F20() -> None:
    model, held_out = trained()

    def accuracy(m: nn.Module) -> float:
        ((x, y),) = held_out
        return float((m(x).argmax(1) == y).float().mean())

    heard: list[float] = []
    floor = 0.95 * accuracy(model)
    found = fold_to(model, X[:, :2], floor=floor, held_out=held_out, progress=lambda doing, part: heard.append(part))
    assert accuracy(found.model) >= floor
    assert found.parameters.share < 0.3
    assert accuracy(fold_to(model, X[:, :2], parameters=found.parameters.share * 0.5).model) < floor
    assert heard == sorted(heard)
    assert len(heard) > 8
    x = held_out[0][0]
    with pytest.raises(
        InputError, match=r"accuracy of 0\.5 cannot be kept: the network itself has 0 on the held-out data"
    ):
        fold_to(model, X[:, :2], floor=0.5, held_out=[(x, model(x).argmin(1))])
    with pytest.raises(InputError, match="The held-out data has no classes"):
        fold_to(model, X[:, :2], floor=0.5, held_out=[(x, model(x).detach())])


def test_statistics_are_those_of_the_data_where_asked_for() -> None:
    torch.manual_seed(0)
    model = zoo.build("vgg11_bn", width=0.25).eval()
    data = [(5 + torch.randn(16, 3, 32, 32), None) for _ in range(2)]
    keep, reset = (fold_to(model, IMAGES, parameters=0.5, data=data, statistics=s) for s in ("keep", "reset"))
    first = next(m for m in reset.model.modules() if isinstance(m, nn.BatchNorm2d))
    layer = next(m for m in reset.model.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        seen = layer(torch.cat([x for x, _ in data])).mean((0, 2, 3))
    assert first.running_mean is not None
    assert torch.allclose(first.running_mean, seen, atol=1e-4)
    assert keep.widths == reset.widths


# -- widths ------------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_without_building_the_network() -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet20", width=0.25)
    found = symmetry(model.eval(), IMAGES)
    size = ParameterCount(model, found)
    assert size({}) == count_parameters(model)
    folded = fold_to(model, IMAGES, parameters=0.5)
    strands = {wire.name: i for i, wire in enumerate(found.wires)}
    assert size({strands[n]: int(w.after) for n, w in folded.widths.items()}) == folded.parameters.after


def test_features_go_where_they_cost_least_for_what_they_save() -> None:
    """Strand 0 is free until its last feature; strand 1 costs from the first on."""
    model = net(10)
    size = ParameterCount(model, symmetry(model, X))
    costs = {0: [0.0] * 9 + [5.0], 1: [0.1 * k for k in range(10)]}
    assert allocate(costs, size, size({0: 2}))[1] == 10
    assert allocate(costs, size, size({0: 2})) == {0: 2, 1: 10}
    with pytest.raises(InputError, match="13 are left when every wire that can be folded is as narrow as possible"):
        allocate(costs, size, 10)


# -- random inputs -----------------------------------------------------------------------------------------------------


def test_random_pictures_have_the_spectrum_of_photographs() -> None:
    ((x,), _), _ = random_inputs_like(((torch.zeros(1, 3, 64, 64),), {}), batches=2, size=64)
    assert x.shape == (64, 3, 64, 64)
    assert float(x.std()) == pytest.approx(1, abs=0.02)
    power = torch.fft.fft2(x.double()).abs().square().mean((0, 1))
    for k in (2, 4, 8):  # along both axes, positive and negative frequencies
        slow, fast = (power[0, i] + power[i, 0] + power[0, -i] + power[-i, 0] for i in (k, 2 * k))
        assert float(slow / fast) == pytest.approx(4, rel=0.35)
    channels = torch.corrcoef(x.movedim(1, 0).flatten(1))
    assert float(channels[0, 1]) == pytest.approx(0.8, abs=0.05)
    assert torch.equal(random_inputs_like(((torch.zeros(1, 3, 64, 64),), {}), batches=1, size=64)[0][0][0], x)
    assert float(pink_noise(torch.randn(3, 16, 16)).std()) == pytest.approx(1)


def test_random_inputs_that_are_no_pictures_are_white() -> None:
    (((x,), kwargs),) = random_inputs_like(((torch.zeros(1, 50),), {"flag": True}), batches=1, size=2000)
    assert kwargs == {"flag": True}
    off = torch.corrcoef(x.T) - torch.eye(50)
    assert float(off.abs().max()) < 0.12


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither is given"),
        ({"parameters": 0.5, "floor": 0.5}, "both are given, parameters=0.5 and floor=0.5"),
        ({"parameters": 0}, "parameters must be a share .* or a number of them, but is 0"),
        ({"floor": 1.5, "held_out": []}, "floor must be an accuracy, above 0 and at most 1, but is 1.5"),
        ({"floor": 0.5}, "floor needs data to measure the accuracy on. Pass held_out"),
        ({"parameters": 0.5, "how": "absorbe"}, "Unknown how 'absorbe'. Did you mean 'absorb"),
        ({"parameters": 0.5, "statistics": "new"}, "Unknown statistics 'new'. Choose one of: keep, reset"),
        ({"parameters": 0.5, "statistics": "reset"}, "Pass some as data, or keep the statistics"),
        ({"parameters": 3}, "3 of 583 parameters cannot be reached"),
        ({"parameters": float("nan")}, "or a number of them, but is nan"),
        ({"parameters": float("inf")}, "or a number of them, but is inf"),
        ({"floor": float("nan"), "held_out": []}, "floor must be an accuracy, above 0 and at most 1, but is nan"),
        ({"parameters": 0.5, "data": []}, "The data holds no samples. Pass at least one batch"),
        ({"parameters": 0.5, "data": [(X[:0], None)]}, "The data holds no samples. Pass at least one batch"),
        ({"floor": 0.1, "held_out": []}, "The held-out data holds no samples. Pass at least one batch"),
        ({"floor": 0.1, "held_out": iter([])}, "read for every size that is tried, but a generator can be read only"),
        ({"floor": 0.1, "held_out": X}, "data must be an iterable of .* batches; found a tensor"),
        ({"parameters": 0.5, "statistics": "reset", "data": iter([])}, "read more than once, but a generator can be"),
        ({"parameters": 0.5, "held_out": []}, r"held_out has no effect, since parameters=0\.5 decides how far to fold"),
        (
            {"parameters": 0.5, "how": "merge", "data": []},
            "data has no effect on how='merge', which compares weights alone",
        ),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fold_to(net(), X, **options)


def test_data_that_is_read_once_may_be_a_generator() -> None:
    torch.manual_seed(0)
    model, data = net(), [(X, None), (X + 1, None), (X[:0], None)]
    one, other = (fold_to(model, X, parameters=0.5, data=given).model for given in (data, iter(data)))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"parameters": "a"}, {"floor": "a", "held_out": []}])
def test_budgets_that_are_no_numbers(options: dict[str, Any], unchecked: None) -> None:
    with pytest.raises(InputError, match="but is 'a'"):
        fold_to(net(), X, **options)


def test_nothing_to_fold_and_tokens_are_named() -> None:
    with pytest.raises(InputError, match="No wire of this network can be folded"):
        fold_to(nn.Linear(4, 2), X, parameters=0.5)
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    tokens = torch.randint(0, 9, (4, 5))
    with pytest.raises(InputError, match=r"example inputs are int64 \(4, 5\).* Pass batches of real inputs as data"):
        fold_to(words, tokens, parameters=0.5)
    assert fold_to(words, tokens, parameters=0.5, data=[(tokens, None)]).parameters.share <= 0.5


def test_nothing_and_both_are_told_apart() -> None:
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 3)
    with pytest.raises(InputError, match="how far to fold; neither is given"):
        fold_to(net, x)
    with pytest.raises(InputError, match=r"both are given, parameters=0\.5 and floor=0\.9"):
        fold_to(net, x, parameters=0.5, floor=0.9)
    with pytest.raises(InputError, match="Less than one of 50 parameters"):
        fold_to(net, x, parameters=1e-4)
    assert [row["after"] < row["before"] for row in fold_to(net, x, parameters=0.5).to_rows()] == [True]
