"""fold: planted duplicates are merged, the function stays, the result is a real, trainable module."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from networks import Net, gap, parameter, wire_at
from planted_networks import IMAGES, NETWORKS, SMALL, chain, lively, merged_sets, planted
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import intertwine as it
from intertwine import zoo
from intertwine.errors import InputError
from intertwine.fold.complexity import complexity
from intertwine.fold.fold import fold, fold_groups
from intertwine.fold.options import PAPER_CODE, PRINTED
from intertwine.fold.result import shrink

# -- The folded network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_planted_duplicates_come_back_exactly_003_F08_F13_F14(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    twin, groups = planted(lively(make()), x.double())
    folded = fold(twin, x.double(), beta=1e-7)
    assert {n: g for n, g in merged_sets(dict(folded.groups)).items() if g} == groups
    assert gap(twin, folded.model, x.double()) < 1e-9
    assert folded.parameters.after < folded.parameters.before
    assert folded.flops.after < folded.flops.before
    assert type(folded.model) is type(twin)
    assert [type(m) for m in folded.model.modules()] == [type(m) for m in twin.modules()]


def test_rules_follow_the_activation_003_D14() -> None:
    def rules_of(name: str) -> set[str]:
        make, x = NETWORKS[name]
        return set(fold(lively(make()), x.double(), rows="ward").rules.values())

    rules = {name: rules_of(name) for name in ("mlp", "mlp-tanh", "mlp-gelu", "mlp-prelu", "vgg-bn", "dense")}
    assert rules == {"mlp": {"sum"}, "mlp-tanh": {"mean"}, "mlp-gelu": {"mean"}, "mlp-prelu": {"sum"},
                     "vgg-bn": {"sum"}, "dense": {"mean"}}  # fmt: skip


def test_a_residual_wire_has_all_its_writers_and_readers_003_F13() -> None:
    """By hand: rows of both writers summed, columns of both readers averaged."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.head((h + m.b(h)).relu())

    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 2)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    (name,) = {w.name for w in it.symmetry(net, x).wires}
    small: Any = fold_groups(net, x, groups={name: [(1, 3)]}).model
    keep, mix = [0, 1, 2, 4], torch.eye(5, dtype=torch.float64)
    mix[1, 3] = 1.0
    mean = mix.clone()
    mean[1] /= 2
    assert torch.allclose(small.a.weight, (mix @ net.a.weight)[keep])
    assert torch.allclose(small.a.bias, (mix @ net.a.bias)[keep])
    assert torch.allclose(small.b.weight, (mix @ net.b.weight @ mean.T)[keep][:, keep])
    assert torch.allclose(small.head.weight, (net.head.weight @ mean.T)[:, keep])


def test_any_order_of_merging_gives_the_same_network_003_F09_D11() -> None:
    torch.manual_seed(0)
    twin, _ = planted(chain(6, 9, 3).double(), torch.zeros(1, 6).double(), copies=3)
    x = torch.randn(5, 6, dtype=torch.float64)
    once = fold_groups(twin, x, groups={"0": [(0, 1, 2, 3)]}).model
    first = fold_groups(twin, x, groups={"0": [(0, 1), (2, 3)]})
    twice = fold_groups(first.model, x, groups={"0": [(0, 1)]}).model
    assert gap(once, twice, x) < 1e-12  # features of two each: shares are equal
    weight = cast(Any, twin)[2].weight
    assert torch.allclose(cast(Any, once)[2].weight[:, 0], weight[:, :4].mean(1))
    other = fold(twin, x, beta=1e-7).model
    assert gap(twin, other, x) < 1e-12


def test_batch_norm_summed_as_the_papers_code_does_is_wrong_003_F12_D13() -> None:
    torch.manual_seed(0)
    twin, _ = planted(lively(zoo.build("tiny10")), IMAGES.double(), copies=1)
    pairs = {"conv1": [(0, 1)]}
    exact = fold_groups(twin, IMAGES.double(), groups=pairs)
    summed = fold_groups(twin, IMAGES.double(), groups=pairs, norm="sum")
    assert gap(twin, exact.model, IMAGES.double()) < 1e-12
    assert gap(twin, summed.model, IMAGES.double()) > 1e-5
    before, after = cast(Any, twin).bn1, cast(Any, summed.model).bn1
    for key in ("weight", "bias", "running_mean", "running_var"):
        assert torch.allclose(getattr(after, key)[0], getattr(before, key)[:2].sum())


def test_folded_batch_norm_keeps_training_mode_too_003_F12() -> None:
    """Duplicates merged: batch statistics normalise the small network as they did the large one."""
    torch.manual_seed(0)
    twin, _ = planted(lively(zoo.build("tiny10")), IMAGES.double())
    small = fold(twin, IMAGES.double(), beta=1e-7).model
    assert gap(copy.deepcopy(twin).train(), small.train(), IMAGES.double()) < 1e-4  # eps weighs a little differently


def test_equal_up_to_what_batch_norm_undoes_is_equal_003_F12() -> None:
    """A feature with its row scaled and flipped, and statistics to match, is the same feature."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, eps=0.0), nn.ReLU(), nn.Linear(6, 2))
    lively(net)
    with torch.no_grad():
        net[0].weight[3], net[0].bias[3] = -2 * net[0].weight[1], -2 * net[0].bias[1]
        net[1].running_mean[3], net[1].running_var[3] = -2 * net[1].running_mean[1], 4 * net[1].running_var[1]
        net[1].weight[3], net[1].bias[3] = -net[1].weight[1], net[1].bias[1]
    x = torch.randn(5, 4, dtype=torch.float64)
    folded = fold(net, x, beta=1e-7)
    assert merged_sets(dict(folded.groups)) == {"0": {frozenset({1, 3})}}
    assert gap(net, folded.model, x) < 1e-12


def test_it_trains_saves_and_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet20").train()
    folded = fold(model, IMAGES, beta=0.7, max_ratio=0.5)
    assert folded.model.training
    assert folded.removed > 0
    small = folded.model
    optimizer = torch.optim.SGD(small.parameters(), 0.05)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(small(IMAGES), torch.tensor([0, 1, 2]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    save_file(small.state_dict(), tmp_path / "small.safetensors")
    widths = {name: int(width.after) for name, width in folded.widths.items()}
    again = shrink(zoo.build("resnet20"), IMAGES, widths=widths)
    again.load_state_dict(load_file(tmp_path / "small.safetensors"))
    assert gap(small.eval(), again.eval(), IMAGES) == 0.0
    torch.export.export(small, (IMAGES,))


def test_the_given_model_is_not_touched() -> None:
    torch.manual_seed(0)
    model = zoo.build("tiny10").train()
    before = copy.deepcopy(model.state_dict())
    fold(model, IMAGES, beta=0.5)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())


def test_the_papers_options_run() -> None:
    model = zoo.build("tiny10")
    for options in (PRINTED, PAPER_CODE):
        assert fold(model, IMAGES, beta=0.9, **options).removed > 0


def test_a_parameter_without_a_module_is_folded_too() -> None:
    """A scale per feature, held by the network itself."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)) * m.scale)

    net: Any = Net(forward, a=nn.Linear(3, 5), scale=parameter(5), b=nn.Linear(5, 2)).double()
    with torch.no_grad():
        net.a.weight[1], net.a.bias[1] = net.a.weight[4], net.a.bias[4]
    x = torch.randn(6, 3, dtype=torch.float64)
    assert fold(net, x, beta=1e-7).removed == 0  # the scales differ
    with torch.no_grad():
        net.scale[1] = net.scale[4]
    folded = fold(net, x, beta=1e-7)
    assert folded.removed == 1
    assert gap(net, folded.model, x) < 1e-12
    assert wire_at(it.symmetry(net, x), "scale[0]").name in folded.groups


class Gated(nn.Module):
    """One layer writes six features and the gate that they all pass: its first row has a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 7), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h[:, 1:].tanh() * h[:, :1].sigmoid())


class Experts(nn.Module):
    """A mixture of two experts by hand: each takes its own column of the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return sum((shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)), torch.zeros(()))


def shuffled() -> nn.Sequential:
    """Of twelve channels every four become the pixels of one, so one part of their axis moves and two do not."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.PixelShuffle(2), nn.ReLU()),
        nn.Conv2d(3, 2, 3),
    )


#: Networks with an axis that is frozen in part: (network, input, layer, rows that become the same, rows they become).
PARTLY_FROZEN: dict[str, tuple[Callable[[], nn.Module], Tensor, str, list[int], list[int]]] = {
    "pixel shuffle, the layer before": (shuffled, SMALL, "0", [5], [2]),
    "pixel shuffle, its own channels": (shuffled, SMALL, "2", [4, 5, 6, 7], [0, 1, 2, 3]),
    "gate": (Gated, torch.randn(9, 5), "first", [4], [2]),
    "experts": (Experts, torch.randn(9, 5), "experts.1.0", [4], [2]),
}


@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_axes_that_are_frozen_in_part_are_no_obstacle(name: str) -> None:
    make, x, layer, copies, of = PARTLY_FROZEN[name]
    torch.manual_seed(0)
    model = make().double().eval()
    module: Any = model.get_submodule(layer)
    with torch.no_grad():
        module.weight[copies], module.bias[copies] = module.weight[of], module.bias[of]
    folded = fold(model, x.double(), beta=1e-6)
    smaller: Any = folded.model.get_submodule(layer)
    assert folded.removed == 1
    assert len(smaller.weight) == len(module.weight) - len(copies)
    assert gap(model, folded.model, x.double()) < 1e-12
    assert len(set(folded.skipped)) == len(folded.skipped)
    assert it.complexity(model, x.double()).layers
    assert it.fold_to(model, x.double(), parameters=0.9).parameters.share <= 0.9


# -- The result and its errors -----------------------------------------------------------------------------------------

X = torch.randn(3, 4)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_the_result_reads_as_a_table_and_as_a_dict() -> None:
    folded = fold_groups(net(), X, groups={"0": [(1, 4), (2, 3, 7)]})
    assert folded.groups["0"] == ((0,), (1, 4), (2, 3, 7), (5,), (6,))
    text = repr(folded)
    assert "parameters 58 → 37 (63.8%)" in text
    assert "0      8 → 5      rows summed, columns averaged" in text
    assert "2.weight: not folded: it is an axis of the model's output" in text
    found = json.loads(json.dumps(folded.to_dict()))
    assert found["parameters"]["after"] == 37 == sum(p.numel() for p in folded.model.parameters())
    assert found["flops"] == {"before": 2 * 3 * 48, "after": 2 * 3 * 30, "share": 30 / 48}
    assert folded.latency(2).after > 0


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_beta_is_a_share(beta: float) -> None:
    with pytest.raises(InputError, match=r"beta must be above 0 and below 1, but is .* It is a share of a distance"):
        fold(net(), X, beta=beta)
    with pytest.raises(InputError, match="for '0'"):
        complexity(net(), X, beta={"0": beta})


def test_options_that_do_not_exist() -> None:
    with pytest.raises(InputError, match=r"Unknown schedule 'roundrobin'. Did you mean 'round-robin"):
        fold(net(), X, schedule="roundrobin")
    with pytest.raises(InputError, match="max_ratio must be above 0 and at most 1, or None, but is 0"):
        fold(net(), X, max_ratio=0)
    with pytest.raises(
        InputError, match=r"A beta is given for '2', which is no wire that can be folded. Choose one of: 0\."
    ):
        fold(net(), X, beta={"2": 0.1})
    with pytest.raises(InputError, match="name a feature twice"):
        fold_groups(net(), X, groups={"0": [(1, 8)]})
    with pytest.raises(InputError, match="width of the wire '0' must be from 1 to 8, but is 9"):
        shrink(net(), X, widths={"0": 9})
    with pytest.raises(InputError, match="repeats must be at least 1, but is 0"):
        fold(net(), X).latency(0)
    with pytest.raises(InputError, match=r"dead must be a share of the longest row, .* but is 1"):
        complexity(net(), X, dead=1.0)


def test_nothing_to_fold_is_said() -> None:
    model = nn.Linear(4, 2)
    folded = fold(model, X)
    assert repr(folded) == "Fold(nothing to fold: weight: it is an axis of the model's output)"
    assert torch.equal(folded.model.weight, model.weight)  # type: ignore[arg-type]
    untouched = fold(net(), X, beta=1e-9)
    assert "nothing was merged in 1 wire:" in repr(untouched)
    assert torch.equal(untouched.model(X), net()(X))


def test_each_wire_may_have_its_own_beta() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    folded = fold(model, X, beta={"2": 0.6})
    assert folded.widths["0"].after == 8
    assert folded.widths["2"].after < 8


@pytest.mark.parametrize(
    ("parts", "forward", "reason"),
    [
        (
            {"a": nn.Linear(4, 6), "n": nn.LayerNorm(6), "b": nn.Linear(6, 2)},
            lambda m, x: m.b(m.n(m.a(x))),
            "statistics over all features",
        ),
        ({"a": nn.Linear(4, 6), "b": nn.Linear(6, 2)}, lambda m, x: m.b(m.a(x).softmax(1)), "looks at them together"),
        (
            {"a": nn.Linear(4, 6), "b": nn.Linear(6, 2)},
            lambda m, x: m.b((h := m.a(x).relu()) - h.mean(1, keepdim=True)),
            "looks at them together",
        ),
    ],
)
def test_features_that_are_counted_are_not_merged(parts: dict[str, nn.Module], forward: Any, reason: str) -> None:
    model: Any = Net(forward, **parts)
    folded = fold(model, X, beta=0.9)
    assert folded.removed == 0
    assert any(reason in why for what, why in folded.skipped if what == "a"), folded.skipped


def test_groups_and_heads_are_skipped_with_a_reason() -> None:
    torch.manual_seed(0)
    grouped = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()),
        *(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1)),
    )
    folded = fold(grouped, torch.randn(1, 3, 8, 8), beta=0.9)
    assert list(folded.groups) == ["4"]
    reasons = " ".join(why for _, why in folded.skipped)
    assert "groups" in reasons
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    found = fold(encoder, torch.randn(2, 3, 8), beta=0.6)
    assert list(found.groups) == ["linear1"]
    assert "heads" in " ".join(why for _, why in found.skipped)


class Slicing(nn.Module):
    """Features added to themselves with a width in the code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu().view(-1, self.width)
        return self.b(h)


def test_a_width_written_into_the_forward_is_named() -> None:
    torch.manual_seed(0)
    with pytest.raises(
        InputError,
        match=r"with fewer features fails at test_fold\.py:\d+ \(h = self\.a\(x\)\.relu\(\)\.view",
    ):
        fold(Slicing(8), X, beta=0.9)
    with pytest.raises(InputError, match=r"outputs of .* differ by .* uses a width without failing"):
        fold(
            Net(lambda m, x: m.b(m.a(x).relu()) * (m.a.out_features / 8), a=nn.Linear(4, 8), b=nn.Linear(8, 2)),
            X,
            beta=0.9,
        )


def test_padding_written_into_the_forward_is_named() -> None:
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.c((nn.functional.pad(h, (2, 3)) + m.b(h)).relu())

    with pytest.raises(InputError, match=r"pads features with \(2, 3\) zeros at .* the folded network needs \("):
        fold(Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 13), c=nn.Linear(13, 2)), X, beta=0.9)


# -- complexity --------------------------------------------------------------------------------------------------------


def test_dead_features_are_not_equivalent_ones_003_F17() -> None:
    model = net()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = model[0].weight[0], model[0].bias[0]  # one twice
        model[0].weight[2:5], model[0].bias[2:5] = 1e-9 * model[0].weight[2:5], 0.0  # three that do not act
        model[2].weight[:, 7] = 0.0  # one that nobody reads
    for rows, left in (("ward", 5), ("effect", 3)):  # what is not read is merged into anything at no cost
        found = complexity(model, X, beta=1e-4, rows=rows)["0"]
        assert (found.width, found.classes, found.equivalent, found.dead, found.left) == (8, 3, 1, 4, left)
        assert found.width == found.classes + found.equivalent + found.dead


def test_complexity_of_every_layer_003_F25() -> None:
    torch.manual_seed(0)
    model = zoo.build("tiny10")
    x = torch.randn(1, 3, 32, 32)
    low, high = complexity(model, x, beta=0.05), complexity(model, x, beta=0.6)
    folded = fold(model, x, beta=0.6)
    assert {x.name: x.left for x in high.layers} == {n: w.after for n, w in folded.widths.items()}
    assert all(a.classes >= b.classes for a, b in zip(low.layers, high.layers, strict=True))
    assert [x.width for x in low.layers] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert "conv8     64" in repr(low)
    assert json.loads(json.dumps(low.to_dict()))["layers"][0]["share"] == low["conv1"].share
    with pytest.raises(InputError, match="Unknown layer 'conv9'"):
        low["conv9"]


def test_complexity_is_drawn_003_F25() -> None:
    pytest.importorskip("matplotlib")
    found = complexity(net(), X, beta=0.3)
    for relative in (False, True):
        (axes,) = found.plot(relative).axes
        heights = [patch.get_height() for patch in axes.patches]  # type: ignore[attr-defined]
        assert sum(heights) == pytest.approx(1 if relative else 8)
