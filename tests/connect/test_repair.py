"""REPAIR gives every layer the mixed mean and deviation of both networks; scale correction restores lengths."""

import re
from itertools import pairwise

import pytest
import torch
from digit_networks import IMAGE, digits, loss, normed_convolutions, perceptrons
from networks import Net, edited
from orbits import residual
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import intertwine as it
from intertwine.align.align import align
from intertwine.connect.repair import correct_scales, norms_after_layers, repair
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError, MismatchError

Batches = list[tuple[Tensor, Tensor]]


def conv_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 8, 2, stride=2, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 4, 3, groups=2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(400, 5),
    ).double()


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return it.zoo.build("mlp", widths=(10, 64, 64, 64, 3)).double()


def images(*sizes: int) -> Batches:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, 6, 6, generator=g, dtype=torch.float64), torch.zeros(n)) for n in sizes]


def vectors(*sizes: int) -> Batches:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 10, generator=g, dtype=torch.float64), torch.zeros(n)) for n in sizes]


def statistics(model: nn.Module, data: Batches) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and deviation of the outputs of every layer, by plain hooks on all samples at once."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if hasattr(module, "weight"):

            def keep(_module: nn.Module, _args: object, y: Tensor, name: str = name) -> None:
                rows = y.movedim(1, 0).flatten(1)
                found[name] = rows.mean(1), rows.std(1, correction=0)

            handles.append(module.register_forward_hook(keep))
    mode = model.training
    with torch.no_grad():
        model.eval()(torch.cat([x for x, _ in data]))
    model.train(mode)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("t", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize(("make", "data"), [(conv_net, images(40)), (mlp, vectors(200))], ids=["conv", "mlp"])
def test_every_layer_has_the_mixed_statistics(make: type[nn.Module], data: Batches, t: float) -> None:
    a, b = make(0), make(1)
    before = [{n: x.clone() for n, x in m.state_dict().items()} for m in (a, b)]
    found, first, second = (statistics(m, data) for m in (repair(a, b, t, data), a, b))
    assert len(found) == 4
    for name in found:
        for own, x, y in zip(found[name], first[name], second[name], strict=True):
            torch.testing.assert_close(own, (1 - t) * x + t * y, rtol=1e-9, atol=1e-11)
    for model, old in zip((a, b), before, strict=True):
        assert all(torch.equal(x, old[n]) for n, x in model.state_dict().items())


def test_at_the_ends_the_networks_themselves_come_back() -> None:
    a, b, data = mlp(0), mlp(1), vectors(50)
    for t, end in ((0, a), (1, b)):
        torch.testing.assert_close(repair(a, b, t, data)(data[0][0]), end(data[0][0]), rtol=1e-9, atol=1e-11)


def test_the_variance_that_mixing_loses_comes_back() -> None:
    a, b, data = mlp(0), mlp(1), vectors(150, 150, 100)
    plain, repaired, first, second = (
        statistics(m, data)["5"][1].mean() for m in (it.interpolate(a, b, 0.5), repair(a, b, 0.5, data), a, b)
    )
    wanted = float(first + second) / 2
    assert float(plain) < 0.6 * wanted  # three layers into two unrelated networks
    assert float(repaired) == pytest.approx(wanted, rel=0.02)  # several batches: nearly exact


def test_a_unit_that_never_varies_is_only_shifted() -> None:
    a, b, data = mlp(0), mlp(1), vectors(50)
    with torch.no_grad():
        for model, value in ((a, 1.0), (b, 3.0)):
            model.get_parameter("1.weight")[5] = 0
            model.get_parameter("1.bias")[5] = value
    repaired = repair(a, b, 0.5, data)
    assert all(bool(p.isfinite().all()) for p in repaired.parameters())
    assert repaired.get_parameter("1.bias")[5].item() == pytest.approx(2.0, rel=1e-12)


def test_only_the_named_layers_are_repaired() -> None:
    a, b, data = mlp(0), mlp(1), vectors(50)
    repaired, plain = repair(a, b, 0.5, data, layers=["3"]), it.interpolate(a, b, 0.5)
    changed = {n for n, p in repaired.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
    assert changed == {"3.weight", "3.bias"}


def test_networks_with_batch_norm_are_repaired_by_their_statistics() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double() for _ in range(2))
    data = vectors(20, 10)
    found, expected = repair(a, b, 0.5, data), reset_statistics(it.interpolate(a, b, 0.5), data)
    assert all(torch.equal(x, expected.state_dict()[n]) for n, x in found.state_dict().items())
    with pytest.raises(InputError, match="its repair is to reset the statistics"):
        repair(a, b, 0.5, data, layers=["0"])


class Calls(nn.Module):
    """One layer that is called once or several times, and one that is never called."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.again, self.never, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.again(x)
        return self.last(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("make", "layers", "words"),
    [
        (Calls, None, "The layer 'again' is called several times in one forward"),
        (Calls, ["never"], "The network never calls the layer 'never'"),
        (
            Calls,
            ["lats"],
            "Unknown linear or convolution layer 'lats'. Did you mean 'last'? Choose one of: again",
        ),
        (tied, None, "The weight of '0' is tied to another layer"),
        (lambda: parametrizations.weight_norm(nn.Linear(10, 3)), None, "is computed from other weights"),
        (nn.ReLU, None, "no linear or convolution layer, so there is nothing to repair"),
    ],
    ids=["twice", "never", "unknown", "tied", "computed", "none"],
)
def test_layers_that_cannot_be_repaired_are_named(make: type[nn.Module], layers: list[str] | None, words: str) -> None:
    a, b = make().double(), make().double()
    with pytest.raises(InputError, match=re.escape(words)):
        repair(a, b, 0.5, vectors(20), layers=layers)


def test_a_layer_never_called_is_left_as_it_is() -> None:
    a, b = Calls(times=1).double(), Calls(times=1).double()
    repaired, plain = repair(a, b, 0.5, vectors(20)), it.interpolate(a, b, 0.5)
    changed = {n for n, p in repaired.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
    assert changed == {"again.weight", "again.bias", "last.weight", "last.bias"}


def test_bad_input_is_named() -> None:
    a, b = mlp(0), mlp(1)
    with pytest.raises(InputError, match=r"t must lie between 0 .* and 1 .*; found 1\.5"):
        repair(a, b, 1.5, vectors(20))
    with pytest.raises(InputError, match="a generator can be read only once"):
        repair(a, b, 0.5, iter(vectors(20)))
    with pytest.raises(InputError, match="The data holds no samples"):
        repair(a, b, 0.5, [])
    with pytest.raises(InputError, match="A batch gives the layer '1' one value per channel"):
        repair(a, b, 0.5, vectors(20, 1))


def white(samples: int, features: int) -> Tensor:
    """Inputs of mean zero whose covariance is exactly the identity."""
    x = torch.randn(samples, features, dtype=torch.float64)
    x = x - x.mean(0)
    return torch.linalg.qr(x).Q * samples**0.5


def test_exact_on_white_inputs() -> None:
    """Every unit gets the deviation that REPAIR gives it on data, here at t = 0.3."""
    a, b = (nn.Linear(6, 4, bias=False).double() for _ in range(2))
    x = white(50, 6)
    repaired = correct_scales([a, b], weights=[0.7, 0.3])
    torch.testing.assert_close(repaired(x).std(0), 0.7 * a(x).std(0) + 0.3 * b(x).std(0))
    plain = it.interpolate(a, b, 0.3)
    assert bool((plain(x).std(0) < repaired(x).std(0)).all())
    torch.testing.assert_close(repaired(x), repair(a, b, 0.3, [(x, torch.zeros(50))])(x), rtol=1e-9, atol=1e-12)


def test_lengths_with_the_bias() -> None:
    a, b = (nn.Linear(6, 4).double() for _ in range(2))
    rows = [torch.cat([m.weight, m.bias[:, None]], 1) for m in (a, b)]
    mixed = (rows[0] + rows[1]) / 2
    scale = (rows[0].norm(dim=1) + rows[1].norm(dim=1)) / 2 / mixed.norm(dim=1)
    found = correct_scales([a, b])
    weight, bias = found.parameters()
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), mixed * scale[:, None])


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_batch_norm_gets_the_variance_of_the_mix(kind: str) -> None:
    """Against statistics measured on white inputs, for three networks with unequal weights."""
    x = white(400, 8)
    if kind == "convolution":
        x = x[:, :, None, None]

    def make() -> nn.Module:
        layer = nn.Linear(8, 5) if kind == "linear" else nn.Conv2d(8, 5, 1)
        norm = nn.BatchNorm1d(5, eps=1e-12) if kind == "linear" else nn.BatchNorm2d(5, eps=1e-12)
        return reset_statistics(nn.Sequential(layer, norm).double(), [(x, torch.zeros(400))])

    models, shares = [make() for _ in range(3)], [0.5, 0.3, 0.2]
    found = correct_scales(models, x, weights=shares)
    measured = reset_statistics(found, [(x, torch.zeros(400))])
    for name in ("1.running_var", "1.running_mean"):
        torch.testing.assert_close(found.get_buffer(name), measured.get_buffer(name), rtol=1e-9, atol=1e-9)
    mean = torch.stack([w * m.get_parameter("0.weight") for w, m in zip(shares, models, strict=True)]).sum(0)
    torch.testing.assert_close(found.get_parameter("0.weight"), mean)


def test_one_network_with_itself_stays() -> None:
    for model, x in ((residual(nn.BatchNorm2d), torch.zeros(2, 3, 6, 6)), (residual(nn.Identity), None)):
        found = correct_scales([model, model], *([] if x is None else [x]))
        for p, q in zip(found.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_which_norm_follows_which_layer() -> None:
    """A norm behind a sum has no layer of its own and keeps the mixed statistics."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.n2(m.n1(m.a(x)) + m.b(x))

    def make() -> Net:
        return Net(forward, a=nn.Linear(3, 4), b=nn.Linear(3, 4), n1=nn.BatchNorm1d(4), n2=nn.BatchNorm1d(4)).eval()

    a, b = make(), edited(make(), n1__running_var=lambda v: v * 4, n2__running_var=lambda v: v * 9)
    x = torch.zeros(2, 3)
    assert norms_after_layers(it.symmetry(a, x).geometry.graph.program) == {"a.weight": "n1"}
    found = correct_scales([a, b], x)
    torch.testing.assert_close(found.get_buffer("n2.running_var"), torch.full((4,), 5.0))
    assert bool((found.get_buffer("n1.running_var") < 2.5).all())
    torch.testing.assert_close(found.get_parameter("a.weight"), (a.a.weight + b.get_parameter("a.weight")) / 2)
    assert not torch.allclose(found.get_parameter("b.weight"), (a.b.weight + b.get_parameter("b.weight")) / 2)


def test_transposed_convolutions_in_groups() -> None:
    """Units of a transposed convolution lie on the second axis, group by group."""
    a, b = (nn.ConvTranspose2d(6, 8, 2, groups=2).double() for _ in range(2))
    found = correct_scales([a, b])

    def unit(m: nn.Module, i: int) -> Tensor:
        group, within = divmod(i, 4)
        weight, bias = m.parameters()
        return torch.cat([weight[3 * group : 3 * group + 3, within].flatten(), bias[i : i + 1]])

    for i in range(8):
        wanted = (unit(a, i).norm() + unit(b, i).norm()) / 2
        torch.testing.assert_close(unit(found, i).norm(), wanted)


def test_dead_units_and_tied_weights_stay() -> None:
    a = edited(nn.Linear(3, 2), weight=torch.zeros_like, bias=torch.zeros_like)
    opposite = edited(nn.Linear(3, 2), weight=torch.ones_like, bias=torch.zeros_like)
    other = edited(opposite, weight=torch.neg)
    for pair in ([a, a], [opposite, other]):
        found = correct_scales(pair)
        assert torch.equal(found.state_dict()["weight"], torch.zeros(2, 3)), "nothing can be made of nothing"
    tied = [nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}) for _ in range(2)]
    for model in tied:
        model["b"].weight = model["a"].weight
    computed = [parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(2)]
    for pair in (tied, computed):
        found, mean = correct_scales(pair), it.interpolate(pair[0], pair[1], 0.5)
        for p, q in zip(found.parameters(), mean.parameters(), strict=True):
            torch.testing.assert_close(p, q)


def test_batch_norm_needs_the_graph() -> None:
    model = residual(nn.BatchNorm2d)
    with pytest.raises(it.InputError, match="Pass example inputs after the models, or symmetry="):
        correct_scales([model, model])
    with pytest.raises(MismatchError, match="The two networks differ"):
        correct_scales([nn.Linear(3, 2), nn.Linear(3, 3)])


# -- what it is worth --------------------------------------------------------------------------------------------------


def middles(models: tuple[nn.Module, ...], aligned: bool) -> tuple[float, float, float]:
    """Mean loss above that of the ends, over neighbouring pairs: of plain, of corrected and of repaired means."""
    rows = []
    for a, b in pairwise(models):
        other = align(a, b, IMAGE).model if aligned else b
        ends = (loss(a) + loss(b)) / 2
        made = it.interpolate(a, other, 0.5), correct_scales([a, other], IMAGE), repair(a, other, 0.5, digits()[0])
        rows.append([loss(m) - ends for m in made])
    plain, corrected, repaired = torch.tensor(rows).mean(0).tolist()
    return plain, corrected, repaired


def test_it_lowers_the_barrier_of_aligned_networks() -> None:
    """The loss barrier in the middle, mean of three pairs, plain, corrected and repaired: 0.99, 0.71 and 0.23
    with BatchNorm, 0.035, 0.015 and 0.007 with one hidden layer."""
    plain, corrected, repaired = middles(normed_convolutions(), aligned=True)
    assert repaired < corrected < 0.8 * plain
    plain, corrected, repaired = middles(perceptrons(64, 64, 10), aligned=True)
    assert repaired < corrected < 0.7 * plain


def test_it_does_not_help_everywhere() -> None:
    """Networks that are not aligned, with narrow layers: the middle is worse with the correction than without."""
    plain, corrected, repaired = middles(perceptrons(64, 16, 10), aligned=False)
    assert corrected > plain > repaired
