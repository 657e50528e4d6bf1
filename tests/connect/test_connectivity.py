"""`connectivity`: every figure against plain float64 formulas over all samples, and the theorems of the paper."""

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mode_connectivity import side_by_side
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import intertwine as it
from intertwine.connect.connectivity import Connectivity
from intertwine.connect.direct_stitch import direct_stitch
from intertwine.connect.llfc import AdditivityMeter
from intertwine.data.batchnorm import reset_statistics
from intertwine.errors import InputError, MismatchError

Batches = list[tuple[Any, Any]]
ALPHAS = (0.25, 0.5, 0.75)


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 4)
    ).double()


class Residual(nn.Module):
    """Convolutions of several kinds, statistics, a shortcut, and one ReLU that is called twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.group = nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(4, 5)
        self.double()
        for _ in range(5):
            self(torch.randn(8, 3, 6, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.relu(self.group(x) + x)
        return self.head(self.up(x).mean((2, 3)))


def batches(*shape: int, sizes: tuple[int, ...] = (9, 1, 6), classes: int = 4) -> Batches:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=g, dtype=torch.float64)
    y = torch.randint(classes, (sum(sizes),), generator=g)
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def heard(model: nn.Module, x: Any) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """What goes into and comes out of every module, call by call, in evaluation mode and by plain hooks."""
    ins: dict[str, list[Tensor]] = {}
    outs: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(lambda _m, args, n=name: ins.setdefault(n, []).append(args[0].clone())),
            module.register_forward_hook(lambda _m, _a, y, n=name: outs.setdefault(n, []).append(y.clone())),
        ]
    modes = [(m, m.training) for m in model.modules()]
    with torch.no_grad():
        model.eval()(x)
    for m, training in modes:
        m.training = training
    for handle in handles:
        handle.remove()
    return ins, outs


def one_minus_cos(x: Tensor, y: Tensor) -> float:
    return (1 - functional.cosine_similarity(x.flatten(1), y.flatten(1), dim=1)).mean().item()


def rms(first: Tensor, second: Tensor) -> float:
    return ((first.square().sum() + second.square().sum()) / 2).sqrt().item()


# -- LLFC --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shape", "names", "reset"),
    [
        (mlp, (6,), ["0", "1", "3", "4", "5"], False),
        (Residual, (3, 6, 6), ["conv", "norm", "relu@1", "group", "relu@2", "up", "head"], False),
        (Residual, (3, 6, 6), ["conv", "norm", "relu@1", "group", "relu@2", "up", "head"], True),
    ],
)
def test_004_L08_llfc_is_that_of_the_plain_formulas(
    make: Callable[[int], nn.Module], shape: tuple[int, ...], names: list[str], reset: bool
) -> None:
    a, b, data = make(0), make(1), batches(*shape, sizes=(9, 2, 6))
    found = it.connectivity(a, b, data, ALPHAS, reset_statistics=data if reset else None)
    assert [layer.layer for layer in found.layers] == names
    x = torch.cat([x for x, _ in data])

    def outputs(model: nn.Module) -> dict[str, list[Tensor]]:
        return heard(reset_statistics(model, data) if reset else model, x)[1]

    first, second = outputs(a), outputs(b)
    for i, alpha in enumerate(ALPHAS):
        mixed = outputs(it.interpolate(a, b, 1 - alpha))  # α is the weight of a, t that of b
        for layer in found.layers:
            name, _, call = layer.layer.partition("@")
            fa, fb, fm = (some[name][int(call or 1) - 1].flatten(1) for some in (first, second, mixed))
            wanted = alpha * fa + (1 - alpha) * fb
            got = layer.llfc[i]
            assert got.alpha == alpha
            assert got.distance == pytest.approx(one_minus_cos(fm, wanted), rel=1e-9, abs=1e-14)
            assert layer.baseline == pytest.approx(one_minus_cos(fa, fb), rel=1e-9)
            each = (fm * wanted).sum(1) / wanted.square().sum(1)
            assert got.c == pytest.approx(((fm * wanted).sum() / wanted.square().sum()).item(), rel=1e-11)
            assert got.c_mean == pytest.approx(each.mean().item(), rel=1e-11)
            assert got.c_std == pytest.approx(each.std(correction=0).item(), rel=1e-9, abs=1e-14)
    assert found.data.samples == 17
    assert (found.reset_data is None) is (not reset)


def test_003_F29_and_D17_the_distance_has_its_sign_and_c_stands_on_the_side_of_the_mix() -> None:
    class Bent(nn.Module):
        """x ↦ (w² − ½)·x: at ±1 it gives ½x, halfway between −½x, a quarter of the way −¼x."""

        def __init__(self, w: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.w.square() - 0.5) * x

    found = it.connectivity(Bent(1), Bent(-1), batches(6))
    (layer,) = found.layers
    assert [one.distance for one in layer.llfc] == pytest.approx([2, 2, 2], rel=1e-12)  # 1 − |cos| would say 0
    assert [one.c for one in layer.llfc] == pytest.approx([-0.5, -1, -0.5], rel=1e-12)
    assert [one.c_std for one in layer.llfc] == pytest.approx([0, 0, 0], abs=1e-12)
    assert layer.baseline == pytest.approx(0, abs=1e-15)
    assert layer.distance == pytest.approx(2)


def test_004_L07_identical_networks_are_connected_exactly() -> None:
    a = mlp(0)
    found = it.connectivity(a, a, batches(6))
    for layer in found.layers:
        assert layer.baseline == 0
        assert all(one.distance is not None and one.distance <= 1e-15 for one in layer.llfc)
        assert all(one.c == pytest.approx(1, abs=1e-14) for one in layer.llfc)


def test_batches_may_be_cut_in_any_way_and_data_is_read_once() -> None:
    a, b = Residual(0), Residual(1)

    def stream(sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches(3, 6, 6, sizes=sizes)

    first, second = (it.connectivity(a, b, stream(sizes)).to_rows() for sizes in [(16,), (5, 1, 10)])
    for x, y in zip(first, second, strict=True):
        for key in x:
            assert x[key] == (y[key] if isinstance(x[key], str | None) else pytest.approx(y[key], rel=1e-9, abs=1e-13))


def test_nothing_is_changed_and_hooks_of_the_user_hear_no_extra_layers() -> None:
    a, b = Residual(0), Residual(1).eval()
    calls: list[int] = []
    a.head.register_forward_hook(lambda *_: calls.append(1))
    before = [{n: x.clone() for n, x in m.state_dict().items()} for m in (a, b)]
    it.connectivity(a, b, batches(3, 6, 6, sizes=(8,)), (0.5,))
    # The scratch network is a copy of a with its hooks: once to find the layers, then three networks.
    assert len(calls) == 4
    assert (a.training, b.training) == (True, False)
    for model, old in zip((a, b), before, strict=True):
        assert all(torch.equal(x, old[n]) for n, x in model.state_dict().items())


def test_layers_can_be_chosen_inputs_among_them() -> None:
    a, b, data = mlp(0), mlp(1), batches(6)
    whole = it.connectivity(a, b, data)
    found = it.connectivity(a, b, data, layers=["3", "1:input", "0"])
    assert [layer.layer for layer in found.layers] == ["3", "1:input", "0"]
    assert found["3"].llfc == whole["3"].llfc
    assert found["1:input"].llfc == found["0"].llfc
    assert found["1:input"].additivity == ()
    assert [layer.layer for layer in it.connectivity(a, b, data, layers="?:input").layers][:2] == ["0:input", "1:input"]
    with pytest.raises(InputError, match=r"There is no layer '9' here\. Layers: 3, 1:input, 0"):
        found["9"]


# -- the two conditions ------------------------------------------------------------------------------------------------


def test_004_L11_weak_additivity_and_signs_are_those_of_the_plain_formulas() -> None:
    a, b, data = mlp(0), mlp(1), batches(6)
    found = it.connectivity(a, b, data, ALPHAS)
    x = torch.cat([x for x, _ in data])
    first, second = heard(a, x)[0], heard(b, x)[0]
    for name, activation in (("1", torch.relu), ("4", torch.tanh)):
        ha, hb = first[name][0], second[name][0]
        assert found[name].sign_agreement == ((ha * hb) >= 0).double().mean().item()
        for one, alpha in zip(found[name].additivity, ALPHAS, strict=True):
            left = activation(alpha * ha + (1 - alpha) * hb)
            right = alpha * activation(ha) + (1 - alpha) * activation(hb)
            assert one.alpha == alpha
            assert one.distance == pytest.approx(one_minus_cos(left, right), rel=1e-9)
            assert one.residual == pytest.approx(((left - right).norm() / right.norm()).item(), rel=1e-11)
    assert 0.2 < (found["1"].sign_agreement or 0) < 0.9
    assert found["0"].additivity == ()
    assert found["0"].sign_agreement is None


def four_forwards(layer_a: nn.Module, layer_b: nn.Module, ha: Tensor, hb: Tensor) -> dict[str, float]:
    """Commutativity as the paper writes it: W_A H_A + W_B H_B against W_B H_A + W_A H_B. Biases cancel."""
    with torch.no_grad():
        apart = layer_a(ha) + layer_b(hb) - layer_b(ha) - layer_a(hb)
        # without bias: what the layer does to H less what it does to nothing
        if ha.is_floating_point():
            wa, wb = layer_a(ha) - layer_a(torch.zeros_like(ha)), layer_b(hb) - layer_b(torch.zeros_like(hb))
        else:
            wa, wb = layer_a(ha), layer_b(hb)
    w = [layer.get_parameter("weight").detach() for layer in (layer_a, layer_b)]
    return {
        "residual": (apart.norm() / rms(wa, wb)).item(),
        "weights": ((w[0] - w[1]).norm() / rms(*w)).item(),
        "inputs": ((ha - hb).norm() / rms(ha, hb)).item() if ha.is_floating_point() else 0.0,
    }


@pytest.mark.parametrize("make", [mlp, Residual])
def test_004_L12_commutativity_is_the_swap_of_layers(make: Callable[[int], nn.Module]) -> None:
    a, b = make(0), make(1)
    data = batches(6) if make is mlp else batches(3, 6, 6)
    found = it.connectivity(a, b, data)
    x = torch.cat([x for x, _ in data])
    first, second = heard(a, x)[0], heard(b, x)[0]
    seen = 0
    for layer in found.layers:
        if layer.commutativity is None:
            continue
        seen += 1
        modules = a.get_submodule(layer.layer), b.get_submodule(layer.layer)
        wanted = four_forwards(*modules, first[layer.layer][0], second[layer.layer][0])
        got = layer.commutativity
        assert got.residual == pytest.approx(wanted["residual"], rel=1e-10, abs=1e-13)
        assert got.weights == pytest.approx(wanted["weights"], rel=1e-12)
        assert got.inputs == pytest.approx(wanted["inputs"], rel=1e-12, abs=1e-13)
        assert got.product == pytest.approx(wanted["weights"] * wanted["inputs"], rel=1e-10, abs=1e-13)
    assert seen == (3 if make is mlp else 4)
    assert found.layers[0].commutativity is not None
    assert found.layers[0].commutativity.residual == 0  # both read the same inputs


def test_004_L12_embeddings_commute_on_the_same_tokens_and_not_on_others() -> None:
    from intertwine.connect.llfc import CommutativityMeter

    torch.manual_seed(0)
    a, b = nn.Embedding(11, 5).double(), nn.Embedding(11, 5).double()
    tokens = torch.randint(11, (6, 3))
    meter = CommutativityMeter(a, b)
    meter.add(tokens, tokens)
    assert (meter.result().residual, meter.result().inputs) == (0, 0)
    other = tokens.clone()
    other[0] = (other[0] + 1) % 11
    meter = CommutativityMeter(a, b)
    meter.add(tokens, other)
    hot = [functional.one_hot(x, 11).double() for x in (tokens, other)]
    apart = (hot[0] - hot[1]) @ (a.weight - b.weight).detach()
    assert meter.result().residual == pytest.approx((apart.norm() / rms(a(tokens), b(other))).item(), rel=1e-12)
    assert meter.result().inputs == pytest.approx(((hot[0] - hot[1]).norm() / rms(*hot)).item(), rel=1e-12)


def test_layers_without_commutativity_say_why() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) ** 2

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        parametrized = parametrizations.weight_norm(nn.Linear(5, 5))
        return nn.Sequential(
            nn.Embedding(9, 5, max_norm=1.0), nn.LayerNorm(5), Doubled(5, 5), parametrized, nn.PReLU(), nn.Linear(5, 2)
        ).double()

    g = torch.Generator().manual_seed(0)
    found = it.connectivity(net(0), net(1), [(torch.randint(9, (4, 3), generator=g), None)])
    words = {layer.layer: layer.notes for layer in found.layers}
    assert words["0"] == ("no commutativity: an Embedding with max_norm rewrites its weight while it runs",)
    assert words["1"] == ("no commutativity: a LayerNorm is no linear map by one weight",)
    assert words["2"] == ("no commutativity: a Doubled is no linear map by one weight",)
    assert words["3"] == ("no commutativity: its weight is computed from others",)
    assert words["4"] == ("no commutativity: a PReLU is no linear map by one weight",)
    assert words["5"] == ()
    assert "3: no commutativity: its weight is computed from others" in repr(found)
    assert all(layer.commutativity is None for layer in found.layers[:-1])


def test_attention_is_looked_at_as_a_whole() -> None:
    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()

    found = it.connectivity(net(0), net(1), batches(5, 8))
    assert [x.layer for x in found.layers] == ["self_attn", "norm1", "linear1", "linear2", "norm2"]
    assert "self_attn.out_proj" in found.skipped


# -- degenerate features -----------------------------------------------------------------------------------------------


def dead(seed: int, bias: float) -> nn.Sequential:
    """A layer whose ReLU is silent where no input is above −bias."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    torch.manual_seed(seed)
    with torch.no_grad():
        net.get_parameter("0.weight").copy_(torch.eye(2))
        net.get_parameter("0.bias").fill_(bias)
        net.get_parameter("2.weight").copy_(torch.randn(2, 2))
        net.get_parameter("2.bias").zero_()
    return net


def test_samples_without_features_are_left_out_and_counted() -> None:
    x = torch.tensor([[3.0, 4.0], [2.0, 0.5], [0.1, 0.2], [0.0, 0.3]], dtype=torch.float64)
    a, b = dead(0, -1), dead(1, -1)
    found = it.connectivity(a, b, [(x[:3], None), (x[3:], None)], (0.5,))
    relu, last = found["1"], found["2"]
    assert relu.llfc[0].distance == pytest.approx(0, abs=1e-15)
    assert relu.notes == (
        "the networks: on 2 of 4 samples features are zero; these samples are left out",
        "α = 0.5: on 2 of 4 samples features are zero; these samples are left out",
        "weak additivity at α = 0.5: on 2 of 4 samples features are zero; these samples are left out",
    )
    with torch.no_grad():
        wanted = one_minus_cos(a(x[:2]), b(x[:2]))
    assert last.baseline == pytest.approx(wanted, rel=1e-12)
    all_dead = it.connectivity(dead(0, -9), dead(1, -9), [(x, None)], (0.5,))
    assert all_dead["1"].baseline is None
    assert all_dead["1"].llfc[0] == all_dead["2"].llfc[0]
    one = all_dead["1"].llfc[0]
    assert (one.distance, one.c, one.c_mean, one.c_std) == (None, None, None, None)
    assert all_dead["1"].additivity[0].residual is None
    assert all_dead["1"].sign_agreement == 1
    assert all_dead["1"].distance is None
    assert "no commutativity: the layer gives nothing but its bias in both networks" in all_dead["2"].notes
    assert "nan" not in json.dumps(all_dead.to_dict()).lower()


def test_features_that_overflow_are_left_out_and_counted() -> None:
    class Pole(nn.Module):
        def __init__(self, w: float) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x / self.w

    (layer,) = it.connectivity(Pole(1), Pole(-1), batches(6, sizes=(4,)), (0.5, 0.25)).layers
    assert layer.llfc[0].distance is None
    assert layer.llfc[0].c is None
    assert "α = 0.5: on 4 of 4 samples features are not finite; these samples are left out" in layer.notes
    assert layer.llfc[1].distance is not None


def test_half_precision_is_added_up_in_float64() -> None:
    a, b = (mlp(seed).bfloat16() for seed in range(2))
    for row in it.connectivity(a, b, batches(6)).to_rows():
        assert all(value is None or value == value for value in row.values())
        assert row["llfc"] < 0.5


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_004_L15_the_result_reads_well_and_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = it.connectivity(mlp(0), mlp(1), batches(6))
    rows = found.to_rows()
    assert len(rows) == 5 * 3
    assert rows[3]["layer"] == "1"
    assert rows[3]["additivity"] == found["1"].additivity[0].distance
    assert rows[3]["commutativity"] is None
    assert rows[7]["alpha"] == 0.5
    assert rows[7]["commutativity"] == found["3"].commutativity.residual  # pyrefly: ignore[missing-attribute]
    assert json.loads(json.dumps(found.to_dict()))["layers"][1]["sign_agreement"] == found["1"].sign_agreement
    text = repr(found)
    assert text.startswith(
        "Connectivity(5 layers, α = 0.25, 0.5, 0.75; 1 − cos of features, largest over α; 16 samples"
    )
    assert re.search(r"\n  1      ReLU    0\.\d+ +0\.\d+ +0\.\d+", text)
    left, right = found.plot().axes
    assert len(left.lines) == 4
    assert len(right.lines) == 2
    assert np.asarray(left.lines[1].get_ydata()).tolist() == [layer.llfc[1].distance for layer in found.layers]
    assert np.asarray(left.lines[3].get_ydata()).tolist() == [layer.baseline for layer in found.layers]
    assert np.asarray(right.lines[1].get_xdata()).tolist() == [1, 3]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=re.escape("pip install 'intertwine[plot]'")):
        found.plot()


def test_bad_input_is_named() -> None:
    data = batches(6)
    with pytest.raises(MismatchError, match="The two networks differ"):
        it.connectivity(mlp(0), Residual(0), data)
    for bad in [(), (0.0,), (0.5, 1.0), (0.5, 0.5), (float("nan"),)]:
        with pytest.raises(InputError, match="strictly between 0 and 1; found"):
            it.connectivity(mlp(0), mlp(1), data, bad)
    with pytest.raises(InputError, match="The data holds no samples"):
        it.connectivity(mlp(0), mlp(1), [])
    with pytest.raises(InputError, match="the model has no module of that path"):
        it.connectivity(mlp(0), mlp(1), data, layers="relu")
    with pytest.raises(InputError, match=r"There is no layer to compare\. The network has no layer with weights"):
        it.connectivity(nn.Flatten(), nn.Flatten(), data)
    with pytest.raises(InputError, match=r"no BatchNorm layer with running statistics"):
        it.connectivity(mlp(0), mlp(1), data, reset_statistics=data)
    with pytest.raises(InputError, match="The data is read once per pair, but a generator can be read only once"):
        side_by_side({"one": (mlp(0), mlp(1))}, iter(data))
    with pytest.raises(InputError, match="No pair was given"):
        side_by_side({}, data)


# -- before and after an alignment -------------------------------------------------------------------------------------


def test_004_L14_both_factors_and_their_product_shrink_when_units_are_matched() -> None:
    a = mlp(0).eval()
    torch.manual_seed(5)
    near = it.interpolate(a, mlp(1), 0.1)
    p, q = torch.randperm(9), torch.randperm(7)
    with torch.no_grad():
        moved = it.interpolate(near, near, 0)
        for layer, rows, columns in (("0", p, torch.arange(6)), ("3", q, p), ("5", torch.arange(4), q)):
            old, new = near.get_submodule(layer), moved.get_submodule(layer)
            new.get_parameter("weight").copy_(old.get_parameter("weight")[rows][:, columns])
            new.get_parameter("bias").copy_(old.get_parameter("bias")[rows])
    data = batches(6)
    matched = it.align(a, moved, data[0][0][:2])
    table = side_by_side({"before": (a, moved), "after": (a, matched.model)}, data, layers=["0", "3", "5"])
    assert [row["layer"] for row in table] == ["0", "3", "5"]
    for row in table:
        assert row["after: weights_apart"] < 0.3 < row["before: weights_apart"]
    for row in table[1:]:
        assert row["after: inputs_apart"] < 0.5 * row["before: inputs_apart"]
        assert row["after: commutativity"] < 0.1 * row["before: commutativity"]
        assert row["after: llfc"] < row["before: llfc"]


# -- extras ------------------------------------------------------------------------------------------------------------


def test_004_L18_direct_stitching_feeds_one_network_into_the_other() -> None:
    a, b, data = mlp(0).eval(), mlp(1).eval(), batches(6)
    found = direct_stitch(a, b, iter(data))
    x, y = (torch.cat(list(part)) for part in zip(*data, strict=True))
    cuts = {"0": 1, "1": 2, "3": 4, "4": 5, "5": 6}
    assert [one.layer for one in found.layers] == list(cuts)
    for one in found.layers:
        with torch.no_grad():
            outputs = b[cuts[one.layer] :](a[: cuts[one.layer]](x))
        assert one.loss == pytest.approx(functional.cross_entropy(outputs, y).item(), rel=1e-12)
        assert one.error == pytest.approx((outputs.argmax(1) != y).double().mean().item())
    assert found.layers[-1].loss == pytest.approx(found.first.loss)
    with torch.no_grad():
        assert found.second.loss == pytest.approx(functional.cross_entropy(b(x), y).item(), rel=1e-12)
    assert found.to_rows()[-1] == {"layer": "second", "loss": found.second.loss, "error": found.second.error}


def test_004_L18_one_call_of_several_is_replaced_and_odd_layers_are_named() -> None:
    a, b, data = Residual(0).eval(), Residual(1).eval(), batches(3, 6, 6, classes=5)
    found = {one.layer: one for one in direct_stitch(a, b, data).layers}
    x, y = (torch.cat(list(part)) for part in zip(*data, strict=True))
    relu = heard(a, x)[1]["relu"]
    with torch.no_grad():
        for call, wanted in ((1, b.relu(b.group(relu[0]) + relu[0])), (2, relu[1])):
            outputs = b.head(b.up(wanted).mean((2, 3)))
            loss = functional.cross_entropy(outputs, y).item()
            assert found[f"relu@{call}"].loss == pytest.approx(loss, rel=1e-12)
    with pytest.raises(InputError, match="Networks are stitched at the outputs of layers; found 'conv:input'"):
        direct_stitch(a, b, data, ["conv:input"])
    rnn = nn.Sequential(nn.RNN(6, 5, batch_first=True)).double()
    with pytest.raises(InputError, match="The layer '0' gives a tuple, not one tensor"):
        direct_stitch(rnn, rnn, batches(3, 6), loss=lambda _y, _z: torch.zeros(()))
    with pytest.raises(InputError, match="marked as ignored"):
        direct_stitch(mlp(0), mlp(0), [(torch.zeros(2, 6), torch.full((2,), -100))])


TIGHT = 1e-12
GENERATE = (Phase.generate,)  # seeds cannot be made simpler, and looking for simpler ones takes minutes


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
    assert (meter.sums[0].difference == 0) is (a * b >= 0)


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
