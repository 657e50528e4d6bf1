"""REPAIR: every layer of the mended network has the mixed mean and deviation of the two it came from."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import intertwine as it
from intertwine.connect.repair import repair
from intertwine.connect.statistics import reset_statistics
from intertwine.errors import InputError

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
    plain, mended, first, second = (
        statistics(m, data)["5"][1].mean() for m in (it.interpolate(a, b, 0.5), repair(a, b, 0.5, data), a, b)
    )
    wanted = float(first + second) / 2
    assert float(plain) < 0.6 * wanted  # three layers into two unrelated networks
    assert float(mended) == pytest.approx(wanted, rel=0.02)  # several batches: nearly exact


def test_a_unit_that_never_varies_is_only_shifted() -> None:
    a, b, data = mlp(0), mlp(1), vectors(50)
    with torch.no_grad():
        for model, value in ((a, 1.0), (b, 3.0)):
            model.get_parameter("1.weight")[5] = 0
            model.get_parameter("1.bias")[5] = value
    mended = repair(a, b, 0.5, data)
    assert all(bool(p.isfinite().all()) for p in mended.parameters())
    assert mended.get_parameter("1.bias")[5].item() == pytest.approx(2.0, rel=1e-12)


def test_only_the_named_layers_are_mended() -> None:
    a, b, data = mlp(0), mlp(1), vectors(50)
    mended, plain = repair(a, b, 0.5, data, layers=["3"]), it.interpolate(a, b, 0.5)
    changed = {n for n, p in mended.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
    assert changed == {"3.weight", "3.bias"}


def test_networks_with_batch_norm_are_mended_by_their_statistics() -> None:
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double() for _ in range(2))
    data = vectors(20, 10)
    found, expected = repair(a, b, 0.5, data), reset_statistics(it.interpolate(a, b, 0.5), data)
    assert all(torch.equal(x, expected.state_dict()[n]) for n, x in found.state_dict().items())
    with pytest.raises(InputError, match="mended by resetting its statistics"):
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
        (Calls, ["never"], "The layer 'never' was to be mended, but the network never calls it"),
        (Calls, ["lats"], "There is no linear or convolution layer 'lats'. Did you mean last? Layers: again, never"),
        (tied, None, "The weight of '0' is tied to another layer"),
        (lambda: parametrizations.weight_norm(nn.Linear(10, 3)), None, "is computed from other weights"),
        (nn.ReLU, None, "no linear or convolution layer, so there is nothing to mend"),
    ],
    ids=["twice", "never", "unknown", "tied", "computed", "none"],
)
def test_layers_that_cannot_be_mended_are_named(make: type[nn.Module], layers: list[str] | None, words: str) -> None:
    a, b = make().double(), make().double()
    with pytest.raises(InputError, match=re.escape(words)):
        repair(a, b, 0.5, vectors(20), layers=layers)


def test_a_layer_never_called_is_left_as_it_is() -> None:
    a, b = Calls(times=1).double(), Calls(times=1).double()
    mended, plain = repair(a, b, 0.5, vectors(20)), it.interpolate(a, b, 0.5)
    changed = {n for n, p in mended.named_parameters() if not torch.equal(p, plain.get_parameter(n))}
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
