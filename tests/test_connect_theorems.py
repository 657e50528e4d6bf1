"""The lemma and the theorem of Zhou et al. (2023) on networks built to satisfy them, and in trained networks."""

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import intertwine as it
from intertwine.connect.additivity import AdditivityMeter
from intertwine.connect.connectivity import Connectivity

TIGHT = 1e-12
GENERATE = (Phase.generate,)  # seeds cannot be made simpler, and looking for simpler ones takes minutes
Batches = list[tuple[Tensor, Tensor]]


class Squared(nn.Module):
    """x ↦ s²·x: with s and −s at the ends, the mix at α scales by (2α − 1)² of both, a positive factor but at ½."""

    def __init__(self, s: float) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(s))

    def forward(self, x: Tensor) -> Tensor:
        return self.s.square() * x


def with_own_heads(seed: int, width: int, scale: float) -> tuple[nn.Module, nn.Module]:
    """One trunk, two last layers, and scales of opposite sign: LLFC holds at the logits, with c = (2α − 1)²·…"""
    torch.manual_seed(seed)
    a = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3), Squared(scale)).double()
    b = copy.deepcopy(a)
    b.load_state_dict(
        a.state_dict() | {"2.weight": torch.randn(3, width), "2.bias": torch.randn(3), "3.s": torch.tensor(-scale)}
    )
    return a, b


def sampled(seed: int, a: nn.Module, b: nn.Module) -> Batches:
    """Inputs, labelled by one network or the other, with some labels at random: both ends err, differently."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 4, generator=g, dtype=torch.float64)
    with torch.no_grad():
        answers = torch.stack([a(x).argmax(1), b(x).argmax(1), torch.randint(3, (60,), generator=g)])
    return [(x, answers.gather(0, torch.randint(3, (1, 60), generator=g))[0])]


def figures(found: Connectivity) -> dict[str, float]:
    """The worst of each figure over all layers and α."""
    rows = found.to_rows()
    worst = {key: max([r[key] for r in rows if r[key] is not None], default=0.0) for key in ("llfc", "commutativity")}
    return worst | {
        "c": max(abs(r["c"] - 1) for r in rows),
        "additivity": max(r["additivity_residual"] for r in rows if r["additivity_residual"] is not None),
    }


# -- the lemma ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, phases=GENERATE)
@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.2, 3))
def test_004_L10_llfc_at_the_logits_bounds_the_error_of_the_mix(seed: int, width: int, scale: float) -> None:
    a, b = with_own_heads(seed, width, scale)
    data = sampled(seed, a, b)
    found = it.connectivity(a, b, data, (0.25, 0.75), layers="3")
    for one in found.layers[0].llfc:
        assert one.distance is not None
        assert one.distance < TIGHT
        assert one.c == pytest.approx(0.25, rel=1e-9)
    line = it.barrier(a, b, data, points=5)
    assert line.error is not None
    bound = line.error[0] + line.error[-1]
    assert line.error[1] <= bound + TIGHT
    assert line.error[3] <= bound + TIGHT


def test_004_L10_the_bound_is_sharp() -> None:
    """A and B err on different samples, and the mix on both: Err(α) = Err_A + Err_B can be reached."""
    a, b = (nn.Linear(2, 2, bias=False).double() for _ in range(2))
    with torch.no_grad():
        a.weight.copy_(torch.tensor([[0.0, 0.0], [-3.0, 1.0]]))
        b.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, -3.0]]))
    data = [(torch.eye(2, dtype=torch.float64), torch.ones(2).long())]
    line = it.barrier(a, b, data, points=3)
    assert line.error == (0.5, 1.0, 0.5)


def test_004_L10_the_bound_fails_where_llfc_fails() -> None:
    """Two networks that are the same function, without any error, in another order: the mix errs."""
    torch.manual_seed(0)
    a = it.zoo.build("mlp", widths=(4, 24, 24, 3)).double()
    sym = it.symmetry(a, torch.zeros(2, 4, dtype=torch.float64))
    b = sym.act(sym.random(seed=1), a)
    x = torch.randn(300, 4, dtype=torch.float64)
    with torch.no_grad():
        data = [(x, a(x).argmax(1))]
    line = it.barrier(a, b, data, points=3)
    assert line.error is not None
    assert line.error[0] == line.error[2] == 0
    assert line.error[1] > 0.1
    assert (it.connectivity(a, b, data, (0.5,))["5"].distance or 0) > 0.05


def test_004_L10_a_factor_of_zero_is_no_llfc() -> None:
    a, b = with_own_heads(0, 5, 1.0)  # halfway the logits are all zero
    (layer,) = it.connectivity(a, b, sampled(0, a, b), (0.5,), layers="3").layers
    assert layer.llfc[0].distance is None
    assert layer.llfc[0].c == 0
    assert "features are zero" in " ".join(layer.notes)


# -- the scalar fact ---------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-1e3, 1e3).filter(lambda x: x == 0 or abs(x) > 1e-6)


@given(NUMBERS, NUMBERS, st.floats(0.01, 0.99))
def test_004_L11_a_relu_is_additive_exactly_where_signs_agree(a: float, b: float, alpha: float) -> None:
    meter = AdditivityMeter(torch.relu, [alpha])
    meter.add(torch.tensor([[a]], dtype=torch.float64), torch.tensor([[b]], dtype=torch.float64))
    assert meter.agreement == float(a * b >= 0)
    assert (meter.sums[0].apart == 0) is (a * b >= 0)


# -- the theorem -------------------------------------------------------------------------------------------------------

BLOCKS, UNITS = 3, 4


def blockwise(seed: int, break_first: bool = False, break_second: bool = False) -> tuple[nn.Module, nn.Module]:
    """Two networks of independent blocks of units, block k different in layer k alone.

    Where a layer's weights differ its inputs are equal, so (W_A − W_B)(H_A − H_B) = 0. Weights and biases are positive,
    so signs agree. Each condition can be broken alone: by biases that let signs differ, or by one more layer that
    differs behind another.
    """
    torch.manual_seed(seed)
    width = BLOCKS * UNITS
    mask = torch.block_diag(*[torch.ones(UNITS, UNITS)] * BLOCKS)
    a = nn.Sequential(
        *[layer for _ in range(BLOCKS) for layer in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 3)
    ).double()
    with torch.no_grad():
        for k in range(BLOCKS):
            a.get_parameter(f"{2 * k}.weight").copy_(torch.rand(width, width) * mask)
            a.get_parameter(f"{2 * k}.bias").copy_(torch.rand(width))
        b = copy.deepcopy(a)
        for k in range(BLOCKS):
            own = slice(k * UNITS, (k + 1) * UNITS)
            b.get_parameter(f"{2 * k}.weight")[own, own] = torch.rand(UNITS, UNITS)
            b.get_parameter(f"{2 * k}.bias")[: own.stop] += torch.rand(own.stop)  # in this block and those before it
            if break_first and k == 0:
                a.get_parameter("0.bias")[own] -= 3 * torch.rand(UNITS)
                b.get_parameter("0.bias")[own] -= 3 * torch.rand(UNITS)
        if break_second:
            b.get_parameter("2.weight")[:UNITS, :UNITS] = torch.rand(UNITS, UNITS)
    return a, b


def positive(seed: int) -> Batches:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(40, BLOCKS * UNITS, generator=g, dtype=torch.float64)
    return [(x[:25], torch.zeros(25).long()), (x[25:], torch.zeros(15).long())]


@settings(max_examples=15, phases=GENERATE)
@given(st.integers(0, 10**6), st.floats(0.02, 0.98))
def test_004_L13_both_conditions_at_every_layer_give_llfc_with_factor_one(seed: int, alpha: float) -> None:
    a, b = blockwise(seed)
    found = it.connectivity(a, b, positive(seed), (alpha,))
    worst = figures(found)
    assert worst["additivity"] < TIGHT
    assert worst["commutativity"] < TIGHT
    assert worst["llfc"] < TIGHT
    assert worst["c"] < TIGHT
    assert all((layer.baseline or 0) > 1e-4 for layer in found.layers[:2])  # and not because the networks are one


def test_004_L13_without_weak_additivity_alone_llfc_fails() -> None:
    a, b = blockwise(0, break_first=True)
    found = it.connectivity(a, b, positive(0))
    worst = figures(found)
    assert worst["commutativity"] < TIGHT
    assert worst["additivity"] > 1e-2
    assert (found["0"].distance or 0) < TIGHT
    assert all((found[str(i)].distance or 0) > 1e-5 for i in range(1, 2 * BLOCKS + 1))


def test_004_L13_without_commutativity_alone_llfc_fails() -> None:
    a, b = blockwise(0, break_second=True)
    found = it.connectivity(a, b, positive(0))
    worst = figures(found)
    assert worst["additivity"] < TIGHT
    assert worst["commutativity"] > 1e-3
    assert max(found[str(i)].distance or 0 for i in range(2)) < TIGHT
    assert all((found[str(i)].distance or 0) > 1e-8 for i in range(2, 2 * BLOCKS + 1))


@settings(max_examples=25, phases=GENERATE)
@given(st.integers(0, 10**6), st.integers(0, 2 * BLOCKS), st.floats(0.02, 0.98))
def test_004_L17_averaged_features_and_averaged_weights_are_one_under_the_theorem(
    seed: int, cut: int, alpha: float
) -> None:
    a, b = blockwise(seed)
    mixed = it.interpolate(a, b, 1 - alpha)
    ((x, _), _) = positive(seed)
    assert isinstance(a, nn.Sequential)
    assert isinstance(b, nn.Sequential)
    assert isinstance(mixed, nn.Sequential)
    with torch.no_grad():
        features = alpha * a[: cut + 1](x) + (1 - alpha) * b[: cut + 1](x)
        assert torch.allclose(mixed[cut + 1 :](features), mixed(x), rtol=1e-11, atol=1e-11)


@settings(max_examples=30, phases=GENERATE)
@given(st.integers(0, 10**6), st.floats(0.02, 0.98))
def test_004_L12_the_residual_is_the_error_of_a_linear_layer(seed: int, alpha: float) -> None:
    """W_α H_α = αW_A H_A + (1 − α)W_B H_B − α(1 − α)(W_A − W_B)(H_A − H_B), so the residual says what LLFC loses."""
    torch.manual_seed(seed)
    a, b = (nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double() for _ in range(2))
    x = torch.randn(20, 4, dtype=torch.float64)
    mixed = it.interpolate(a, b, 1 - alpha)
    with torch.no_grad():
        error = mixed(x) - alpha * a(x) - (1 - alpha) * b(x)
        own = [functional.linear(m.get_submodule("0")(x), m.get_parameter("1.weight")) for m in (a, b)]
    size = ((own[0].square().sum() + own[1].square().sum()) / 2).sqrt()
    found = it.connectivity(a, b, [(x, None)], (alpha,))["1"].commutativity
    assert found is not None
    assert found.residual is not None
    assert alpha * (1 - alpha) * found.residual == pytest.approx((error.norm() / size).item(), rel=1e-8)


# -- trained networks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Two networks that share their first epochs, and two that share nothing."""
    folder: Path = tmp_path_factory.mktemp("zoos")
    made = {}
    for name, spawn in (("spawned", 4), ("independent", 0)):
        zoo = it.zoo.train(
            "mlp", seeds=[0, 1], data="digits", out=folder / name, epochs=20, spawn=spawn, precision="float64",
            options={"widths": [64, 64, 64, 10]},
        )  # fmt: skip
        made[name] = zoo[0].double(), zoo[1].double()
    return made


def digits() -> Batches:
    return [(x, y) for x, y in it.zoo.data("digits").batches("test", 120, torch.float64)]


def test_004_L09_llfc_comes_with_connectivity_and_fails_without(
    pairs: dict[str, tuple[nn.Module, nn.Module]],
) -> None:
    data = digits()
    connected = it.connectivity(*pairs["spawned"], data)
    for layer in connected.layers:
        assert layer.distance is not None
        assert layer.baseline is not None
        assert layer.distance < layer.baseline / 10
        assert all(one.c == pytest.approx(1, abs=0.05) for one in layer.llfc)
    apart = it.connectivity(*pairs["independent"], data)
    last = apart.layers[-1]
    assert last.distance is not None
    assert last.baseline is not None
    assert last.distance > last.baseline
    assert all((x.distance or 0) > 50 * (y.distance or 0) for x, y in pairwise_layers(apart, connected))
    assert min(one.c or 0 for one in last.llfc) < 0.5
    errors = [it.barrier(*pairs[name], data, points=3).error_barrier or 0 for name in ("spawned", "independent")]
    assert errors[0] < 0.02 < 0.1 < errors[1]


def pairwise_layers(first: Connectivity, second: Connectivity) -> list:
    """Layer beside layer, from the second on: the first linear layer always mixes exactly."""
    return list(zip(first.layers, second.layers, strict=True))[1:]


def test_004_L09_matching_units_brings_llfc_nearer(pairs: dict[str, tuple[nn.Module, nn.Module]]) -> None:
    a, b = pairs["independent"]
    data = digits()
    aligned = it.align(a, b, data[0][0][:2]).model
    before, after = it.connectivity(a, b, data), it.connectivity(a, aligned, data)
    for old, new in pairwise_layers(before, after):
        assert new.distance < old.distance / 2
        if old.commutativity is not None:
            assert new.commutativity.residual < old.commutativity.residual / 2
        if old.sign_agreement is not None:
            assert new.sign_agreement > old.sign_agreement


def test_004_L21_networks_of_one_orbit_are_connected_once_they_are_aligned() -> None:
    torch.manual_seed(0)
    a = it.zoo.build("mlp", widths=(4, 12, 12, 3)).double()
    x = torch.randn(50, 4, dtype=torch.float64)
    sym = it.symmetry(a, x[:2])
    b = sym.act(sym.random(seed=3), a)
    data = [(x, a(x).argmax(1))]
    assert (it.connectivity(a, b, data).layers[-1].distance or 0) > 0.02
    element = it.equivalent(a, b, x[:2])
    assert element is not None
    back = it.connectivity(a, sym.act(element, b), data)
    assert figures(back)["llfc"] < 1e-10
    assert max(layer.baseline or 0 for layer in back.layers) < 1e-10


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {"widths": (784, 32, 32, 32, 10)}, (1, 28, 28)),
        ("lenet", {}, (1, 28, 28)),
        ("vgg11", {}, (3, 32, 32)),
        ("resnet20", {}, (3, 32, 32)),
    ],
)
def test_004_L20_the_architectures_of_the_paper_are_looked_at_layer_by_layer(
    name: str, options: dict, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    a, b = it.zoo.build(name, **options), it.zoo.build(name, **options)
    data = [(torch.randn(4, *shape), torch.zeros(4).long())]
    found = it.connectivity(a, b, data, (0.5,))
    weighted = {path for path, m in a.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
    assert weighted <= {layer.layer for layer in found.layers}
    assert {layer.layer for layer in found.layers if layer.commutativity is not None} == weighted
    assert any(layer.sign_agreement is not None for layer in found.layers)
    assert not found.skipped
    for previous, layer in pairwise(found.layers):
        assert previous.layer != layer.layer
        assert 0 <= (layer.distance or 0) <= 2
